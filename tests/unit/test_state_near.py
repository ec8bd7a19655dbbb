"""Leaves near others: found by what they hold, whatever they are called; bounded; without circles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from casckpt.codec.models import AVERAGE, DRIFTING_AVERAGE, NEAR
from casckpt.state import Captured, capture
from casckpt.state import near as near_module
from casckpt.state.near import PARTNERS_MAX, SKETCH_COUNT_MAX, find_near
from casckpt.state.relations import Place, Relations, find_relations

SHAPE = (192, 192)  # 72 KiB of bf16: a large block
AVERAGES = [AVERAGE, DRIFTING_AVERAGE]


def weights(seed: int, scale: float = 0.05, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def relate(before: Relations | None = None, **components: Any) -> Relations:
    """The relations of a commit of these components, each one tensor or a tree of them."""
    captured: dict[str, Captured] = {name: capture(name, copy.deepcopy(each)) for name, each in components.items()}
    relations = find_relations(captured, before)
    find_near(relations, captured, before)
    return relations


def found(relations: Relations, component: str, block: int = 0) -> list[tuple[int, tuple[str, ...]]]:
    """Kinds, each with the components of what it takes; those of the parent snapshot with an apostrophe before."""
    names = [
        tuple("'" * place.is_before + place.component for place in each.operands)
        for each in of(relations, component, block)
    ]
    return list(zip([each.kind for each in of(relations, component, block)], names, strict=True))


def of(relations: Relations, component: str, block: int = 0) -> list[Any]:
    return list(relations.of(component, block))


# --- averages ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_target_follows_its_source_and_never_the_other_way(dtype: torch.dtype) -> None:
    source, target, other = (
        weights(0, dtype=dtype),
        weights(1, 0.02, dtype) + weights(0, dtype=dtype),
        weights(2, dtype=dtype),
    )
    before = relate(b=source, a=target, other=other)
    source += weights(3, 0.002, dtype)
    target.lerp_(source, 0.1)
    relations = relate(before, b=source, a=target, other=other)
    assert (AVERAGE, ("'a", "b")) in found(relations, "a")
    assert (DRIFTING_AVERAGE, ("'a", "'b", "b")) in found(relations, "a")
    assert not {kind for kind, _ in found(relations, "b")} & set(AVERAGES)
    assert found(relations, "other") == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_numbers_that_the_codec_does_not_average_get_no_average(dtype: torch.dtype) -> None:
    source, target = weights(0, dtype=dtype), weights(1, 0.02, dtype) + weights(0, dtype=dtype)
    before = relate(b=source, a=target)
    target.lerp_(source, 0.1)
    assert not {kind for kind, _ in found(relate(before, b=source, a=target), "a")} & set(AVERAGES)


def test_change_that_leads_away_from_every_leaf_is_no_average() -> None:
    source, target = weights(0), weights(1, 0.02) + weights(0)
    before = relate(b=source, a=target)
    target += 0.1 * (target - source)
    assert found(relate(before, b=source, a=target), "a") == []


def test_without_the_parents_sketches_there_is_no_average() -> None:
    source, target = weights(0), weights(1, 0.02) + weights(0)
    target.lerp_(source, 0.1)
    assert not {kind for kind, _ in found(relate(b=source, a=target), "a")} & set(AVERAGES)


def test_average_needs_the_structure_that_the_parent_had() -> None:
    source, target = weights(0), weights(1, 0.02) + weights(0)
    before = relate(b=source, a={"x": target, "gone": 1})
    target.lerp_(source, 0.1)
    assert not {kind for kind, _ in found(relate(before, b=source, a={"x": target}), "a")} & set(AVERAGES)


# --- clones and forks ---


def test_new_component_is_near_what_it_was_cloned_from() -> None:
    policy, other = weights(0), weights(1)
    before = relate(policy=policy, other=other)
    policy += weights(2, 1e-4)
    relations = relate(before, policy=policy, other=other, opponent=policy + weights(3, 1e-4))
    assert found(relations, "opponent") == [(NEAR, ("policy",))]
    assert found(relations, "policy") == found(relations, "other") == []


def test_leaf_that_was_replaced_is_near_the_one_that_replaced_it() -> None:
    """Members of a population: the first takes over the weights of the last, and both train on."""
    members = {f"member_{number}": weights(number) for number in range(4)}
    before = relate(**members)
    members["member_0"] = members["member_3"].clone()
    for number, each in enumerate(members.values()):
        each += weights(10 + number, 1e-5)
    relations = relate(before, **members)
    assert {name: found(relations, name) for name in members} == {
        "member_0": [(NEAR, ("member_3",))],
        "member_1": [],
        "member_2": [],
        "member_3": [],
    }


def test_leaf_that_is_nearest_to_its_own_past_is_near_no_other() -> None:
    policy = weights(0)
    before = relate(policy=policy, reference=policy + weights(1, 1e-3))
    reference = policy + weights(1, 1e-3)
    policy += weights(2, 1e-5)
    assert found(relate(before, policy=policy, reference=reference), "policy") == []


def test_unrelated_leaves_of_one_form_are_near_nothing() -> None:
    relations = relate(**{f"net_{number}": weights(number) for number in range(30)})
    assert len(relations) == 0


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_leaves_of_one_value_say_nothing(value: float) -> None:
    relations = relate(**{f"net_{number}": torch.full(SHAPE, value) for number in range(3)})
    assert len(relations) == 0


def test_first_commit_of_copies_goes_from_the_first_to_the_others() -> None:
    policy = weights(0)
    relations = relate(**{f"copy_{number}": policy + weights(number, 1e-5) for number in range(1, 5)})
    for number in range(1, 5):
        assert all(operands[0] < f"copy_{number}" for _, operands in found(relations, f"copy_{number}"))
    assert found(relations, "copy_1") == []
    assert min(len(found(relations, f"copy_{number}")) for number in range(2, 5)) == 1


# --- bounds ---


def test_unchanged_leaves_are_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"net_{number}": weights(number % 3) for number in range(9)}
    before = relate(**state)
    compared = _counting(monkeypatch)
    relate(before, **state)
    assert len(compared) == len(state), "each with its own past"


def test_comparisons_grow_with_the_number_of_leaves_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _counting(monkeypatch)
    tree = {str(number): weights(number % 50) * (1 + number) for number in range(6 * PARTNERS_MAX)}
    relations = relate(policy=tree)
    assert len(relations.sketches) == len(tree)
    assert len(compared) <= PARTNERS_MAX * len(tree)


def test_number_of_sketches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_module, "SKETCH_COUNT_MAX", 5)
    relations = relate(policy={str(number): weights(number) for number in range(9)})
    assert len(relations.sketches) == 5 < SKETCH_COUNT_MAX


def _counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    compared: list[int] = []
    agreement = near_module._agreement
    monkeypatch.setattr(near_module, "_agreement", lambda *pair: compared.append(1) or agreement(*pair))
    return compared


@pytest.mark.parametrize(
    "leaf",
    [
        torch.randn(SHAPE).half().double().float()[:, ::2],  # a view with gaps
        torch.randn(64, 64),  # small: it shares a chunk
        torch.randint(0, 99, SHAPE, dtype=torch.int32),
        torch.randn(SHAPE, dtype=torch.complex64),
    ],
    ids=["strided", "small", "integers", "complex"],
)
def test_leaf_of_another_kind_is_sketched_only_where_it_is_a_large_run_of_floats(leaf: torch.Tensor) -> None:
    relations = relate(a=leaf, b=leaf + 1)
    assert len(relations.sketches) == (2 if leaf.dtype == torch.float32 and leaf.numel() * 4 >= 1 << 16 else 0)
    assert all(isinstance(place, Place) for place in relations.sketches)
