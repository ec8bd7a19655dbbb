"""Restoring into containers that hold less, more or other things than the snapshot, and what mismatches advise."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.errors import MismatchError
from casckpt.format.structure import decode_structure
from casckpt.state import RngState, Target, capture


def target_of(source: Any, live: Any, **options: Any) -> tuple[Target, Any]:
    captured = capture("s", source)
    return Target("s", live, decode_structure(captured.structure_bytes), **options), captured


def restore(source: Any, live: Any, **options: Any) -> Target:
    target, captured = target_of(source, live, **options)
    target.check(captured.scalars)
    for block, memory in target.blocks.items():
        memory[:] = captured.blocks.view(block, 0, captured.blocks.size(block))
    target.finish(captured.scalars)
    return target


def refusal(source: Any, live: Any, **options: Any) -> MismatchError:
    target, captured = target_of(source, live, **options)
    with pytest.raises(MismatchError) as caught:
        target.check(captured.scalars)
    return caught.value


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, so that trees compare."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple, deque)) else value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("maker", [torch.ones, np.ones])
def test_a_fresh_process_takes_a_history_and_a_best_one(maker: Any, strict: bool) -> None:
    source = {"h": [maker(2), maker(3)], "recent": deque([maker(1)], maxlen=4), "best": maker(2), "n": [maker(1), None]}
    live: dict[str, Any] = {"h": [], "recent": deque(maxlen=4), "best": None, "n": [None, None]}
    history, recent = live["h"], live["recent"]
    target = restore(source, live, strict=strict)
    assert plain(live) == plain(source)
    assert live["h"] is history and live["recent"] is recent and recent.maxlen == 4
    assert live["h"][0] is not source["h"][0]
    assert sorted(target.leaf_paths_touched) == ["s/best", "s/h/0", "s/h/1", "s/n/0", "s/n/1", "s/recent/0"]


@pytest.mark.few(12)
@pytest.mark.parametrize("live_count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("stored_count", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("kind", [list, deque])
def test_a_history_takes_the_length_of_the_snapshot_and_keeps_the_elements_that_fit(
    kind: Any, stored_count: int, live_count: int
) -> None:
    source = {"h": kind({"w": torch.full((2,), float(i)), "at": i} for i in range(stored_count))}
    live = {"h": kind({"w": torch.full((2,), -1.0), "at": -1} for _ in range(live_count))}
    history, before = live["h"], list(live["h"])
    tensors = [each["w"] for each in before]
    restore(source, live)
    assert plain(live) == plain(source) and live["h"] is history
    for position in range(min(stored_count, live_count)):
        assert live["h"][position] is before[position] and live["h"][position]["w"] is tensors[position]


def test_elements_of_a_history_that_do_not_fit_are_new_values() -> None:
    source = {"l": [torch.ones(2), torch.ones(3), 5], "d": deque([np.ones(2), np.ones(3)])}
    old, kept = torch.zeros(4), torch.zeros(3)
    live = {"l": [old, kept], "d": deque([np.zeros(3), np.zeros(3)])}
    second = live["d"][1]
    restore(source, live)
    assert plain(live) == plain(source)
    assert live["l"][0] is not old and old.tolist() == [0.0] * 4 and live["l"][1] is kept and live["d"][1] is second


def test_a_list_of_the_same_length_is_a_row_of_places_whose_shapes_are_compared_when_strict() -> None:
    source, live = {"buffers": [torch.ones(2), torch.ones(3)]}, {"buffers": [torch.zeros(2), torch.zeros(4)]}
    assert [each[0] for each in refusal(source, live).differences] == ["s/buffers/1"]
    assert plain(live) == {"buffers": [[0.0] * 2, [0.0] * 4]}
    first = live["buffers"][0]
    restore(source, live, strict=False)
    assert plain(live) == plain(source) and live["buffers"][0] is first


def test_a_stored_deque_of_another_bound_comes_as_a_new_one_and_loses_nothing() -> None:
    source, live = {"d": deque([torch.ones(1)] * 3, maxlen=8)}, {"d": deque([torch.zeros(1)], maxlen=2)}
    restore(source, live)
    assert plain(live) == plain(source) and live["d"].maxlen == 8


def test_a_stored_none_replaces_what_is_live_and_a_live_none_takes_what_is_stored() -> None:
    live: dict[str, Any] = {"t": torch.zeros(1), "d": {"x": np.zeros(1)}, "l": [torch.zeros(1)], "n": 3}
    none = dict.fromkeys(live)
    restore(none, live)
    assert live == none
    source = {"t": torch.ones(1), "d": {"x": np.ones(1)}, "l": [torch.ones(1)], "n": 3}
    restore(source, live)
    assert plain(live) == plain(source)
    live["g"] = None
    restore({**source, "g": np.random.default_rng(5)}, live)
    assert live["g"].random() == np.random.default_rng(5).random()


def test_a_stored_number_where_a_tensor_is_live_is_refused_once_the_scalars_are_known() -> None:
    for strict in (True, False):
        error = refusal({"t": 4, "s": torch.ones(1)}, {"t": torch.zeros(1), "s": torch.zeros(2)}, strict=strict)
        assert ("s/t", "a number", "a torch.Tensor") in error.differences
        assert len(error.differences) == 1 + strict


def test_another_shape_is_a_difference_when_strict_and_a_new_value_otherwise() -> None:
    source, live = {"a": np.ones(2), "b": torch.ones(1)}, {"a": np.zeros(3), "b": torch.zeros(1)}
    old, kept = live["a"], live["b"]
    assert refusal(source, live).differences == [("s/a", "<f8[2]", "<f8[3]")]
    restore(source, live, strict=False)
    assert plain(live) == plain(source) and live["b"] is kept and old.tolist() == [0.0] * 3


def test_a_root_that_cannot_be_replaced_is_refused_even_without_strict() -> None:
    assert refusal(torch.ones(2), torch.zeros(3), strict=False).differences
    assert refusal(torch.ones(2), None, strict=False).differences
    live: list[Any] = []
    restore([torch.ones(2)], live)
    assert plain(live) == [[1.0, 1.0]]


def test_a_module_parameter_of_another_shape_is_refused_even_without_strict() -> None:
    error = refusal({"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(3, 2)}, strict=False)
    assert error.differences == [("s/m/weight", "float32[2, 2]", "float32[2, 3]")]


def test_names_are_added_without_strict_and_never_dropped() -> None:
    source = {"a": 1, "gone": {"x": [torch.ones(1), 2]}, "z": np.ones(1)}
    live: dict[str, Any] = {"a": 0, "extra": 5}
    paths = [each[0] for each in refusal(source, live).differences]
    assert sorted(paths) == ["s/extra", "s/gone", "s/z"]
    target = restore(source, live, strict=False)
    assert plain(live) == {**plain(source), "extra": 5}
    assert sorted(target.leaf_paths_touched) == ["s/a", "s/gone/x/0", "s/gone/x/1", "s/z"]


@pytest.mark.parametrize("stored_count, live_count", [(1, 2), (2, 1), (0, 2)])
def test_a_list_of_objects_with_a_state_of_their_own_keeps_its_length(stored_count: int, live_count: int) -> None:
    source = [torch.nn.Linear(2, 2) for _ in range(stored_count)]
    live = [torch.nn.Linear(2, 2) for _ in range(live_count)]
    assert [each[0] for each in refusal({"m": source}, {"m": live}, strict=False).differences] == ["s/m"]


def test_a_deque_of_objects_never_swaps_one_for_its_stored_state() -> None:
    live = deque([{"net": torch.nn.Linear(3, 2)}])
    assert refusal({"d": deque([{"net": torch.nn.Linear(2, 2)}])}, {"d": live}, strict=False)
    assert isinstance(live[0]["net"], torch.nn.Linear)


def test_a_new_value_that_is_the_same_tensor_as_a_live_one_in_the_snapshot_is_that_live_one() -> None:
    best = torch.ones(2)
    live: dict[str, Any] = {"best": None, "h": [torch.zeros(2)], "after": None}
    kept = live["h"][0]
    restore({"best": best, "h": [best], "after": [best]}, live)
    assert live["best"] is kept and live["after"][0] is kept and kept.tolist() == [1.0, 1.0]


def test_memory_that_new_values_share_only_in_the_snapshot_is_a_difference_when_strict() -> None:
    base = torch.arange(4.0)
    live: dict[str, Any] = {"base": torch.zeros(4), "view": None}
    assert [each[0] for each in refusal({"base": base, "view": base[1:3]}, live).differences] == ["s/view"]
    restore({"base": base, "view": base[1:3]}, live, strict=False)
    assert plain(live) == {"base": [0.0, 1.0, 2.0, 3.0], "view": [1.0, 2.0]}


SCALARS: list[Any] = [1, 1.5, "text", b"bytes", True, 1j]
FAMILIES = ["number", "number", "text", "bytes", "bool", "number"]


@pytest.mark.parametrize("stored", range(6))
@pytest.mark.parametrize("live", range(6))
def test_a_scalar_of_another_family_is_a_difference_when_strict(stored: int, live: int) -> None:
    source, target = {"x": SCALARS[stored], "t": torch.ones(1)}, {"x": SCALARS[live], "t": torch.zeros(1)}
    if FAMILIES[stored] != FAMILIES[live]:
        assert [each[0] for each in refusal(source, target).differences] == ["s/x"]
        assert target["x"] is SCALARS[live] and target["t"].item() == 0.0
        restore(source, target, strict=False)
    else:
        restore(source, target)
    assert type(target["x"]) is type(SCALARS[stored]) and target["x"] == SCALARS[stored]


@pytest.mark.parametrize("value", SCALARS)
def test_none_goes_with_every_family(value: Any) -> None:
    one, other = {"x": None}, {"x": value}
    restore({"x": value}, one), restore({"x": None}, other)
    assert one == {"x": value} and other == {"x": None}


def test_numpy_scalars_belong_to_their_families() -> None:
    live = {"x": 1.0, "y": True, "z": "a"}
    restore({"x": np.float32(2), "y": np.bool_(False), "z": np.str_("b")}, live)
    assert refusal({"x": np.bool_(True), "y": True, "z": "a"}, live).differences == [("s/x", "a bool", "a number")]


ADVICE = {
    "strict=False": ({"a": torch.ones(2)}, {"a": torch.zeros(3)}),
    "cast=True": ({"a": torch.ones(2)}, {"a": torch.zeros(2, dtype=torch.float64)}),
    "restore()": ({"a": torch.ones(2)}, {"a": "text"}),
}


def test_a_whole_component_may_be_a_list_a_deque_or_a_set_of_plain_values() -> None:
    pairs: list[tuple[Any, Any]] = [
        ([1, 2], []),
        ([], [torch.ones(1)]),
        (deque([1], 3), deque(maxlen=3)),
        ({1}, {2, 3}),
    ]
    for source, live in pairs:
        restore(source, live)
        assert live == source
    assert refusal(None, [1]).differences and refusal((1,), [1]).differences
    assert refusal(deque([1], 3), deque([1], 4)).differences


@pytest.mark.parametrize("advice", ADVICE)
def test_the_advice_of_a_mismatch_is_given_only_where_it_helps(advice: str) -> None:
    source, live = ADVICE[advice]
    message = str(refusal(source, live))
    assert [each for each in ("strict=False", "cast=True") if each in message] == [a for a in [advice] if "=" in a]
    assert "restore()" in message and "Nothing was touched" in message
    if "=" in advice:
        name, _, value = advice.partition("=")
        restore(source, live, **{name: value == "True"})
        assert plain(live["a"]) == [1.0, 1.0]


def test_the_advice_counts_what_each_option_accepts() -> None:
    source = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1), "d": 1}
    live = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "c": "text", "d": "text"}
    message = str(refusal(source, live))
    assert "strict=False accepts 2 of the 4 differences" in message and "cast=True accepts 1 of the 4" in message


def test_an_enum_without_such_a_member_is_refused_before_anything_is_touched() -> None:
    import enum

    stored_class = enum.Enum("Mode", {"A": 1, "B": 2})
    live_class = enum.Enum("Mode", {"A": 1})
    live = {"t": torch.zeros(1), "mode": live_class.A}
    assert [each[0] for each in refusal({"t": torch.ones(1), "mode": stored_class.B}, live).differences] == ["s/mode"]
    assert live["t"].item() == 0.0


def test_the_state_dict_of_a_bundle_of_generators_is_a_copy() -> None:
    generators = {
        "numpy": np.random.default_rng(1),
        "legacy": np.random.RandomState(1),
        "bits": np.random.PCG64(1),
        "torch": torch.Generator().manual_seed(1),
    }
    state = RngState(**generators).state_dict()
    drawn = [generators["numpy"].random(), generators["legacy"].random(), generators["bits"].random_raw()]
    drawn.append(torch.rand(1, generator=generators["torch"]).item())
    assert all(state["extra"][name] is not generator for name, generator in generators.items())
    extra = state["extra"]
    again = [extra["numpy"].random(), extra["legacy"].random(), extra["bits"].random_raw()]
    assert [*again, torch.rand(1, generator=extra["torch"]).item()] == drawn
