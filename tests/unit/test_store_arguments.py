"""What a commit and a reference accept: names, steps, metrics, configs, schema versions, components of the parent.

Whatever is wrong is refused with a typed error that says what to write instead, and nothing is committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import CasckptError, ConfigDriftWarning, InvalidInputError, NotFoundError
from tests.unit.stores import open_store

STATE = {"policy": {"weight": 1.5}}


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with open_store(store_path) as opened:
        yield opened


# --- names ---

BAD_NAMES = [
    "",
    " x",
    "x ",
    ".",
    "..",
    "a/b",
    "../x",
    "/x",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x7f",
    "x" * 201,
    "é" * 101,
    "\ud800",
]


def test_name_that_could_leave_a_folder_or_break_a_key_is_refused(store: Any) -> None:
    store.commit(1, STATE)
    for name in BAD_NAMES:
        with pytest.raises(InvalidInputError):
            store.commit(2, {name: 1}, drop=["policy"])
        with pytest.raises(InvalidInputError):
            store.tag(name, 1)
        with pytest.raises(InvalidInputError):
            store.resume(1, branch=name)
        with pytest.raises(InvalidInputError):
            casckpt.open(store.path, run=name)
    assert store.steps() == [1]
    assert store.tags() == {}


def test_ordinary_component_names_are_kept_exactly(store: Any) -> None:
    state = {name: {"x": name} for name in ("x" * 200, "é" * 100, "actor critic", "层.0", "a@b", "_", "-", "0")}
    store.commit(1, state)
    assert store.restore(1) == state
    for name in state:
        assert store.restore(1, only=[f"{name}/x"]) == {name: {"x": name}}


def test_tag_or_branch_that_reads_like_another_reference_is_refused(store: Any) -> None:
    store.commit(1, STATE)
    for name in ("latest", "12", "deadbeef", "0123456789abcdef", "a@b"):
        with pytest.raises(InvalidInputError):
            store.tag(name, 1)
        with pytest.raises(InvalidInputError):
            store.resume(1, branch=name)


def test_component_name_that_is_no_text_is_refused(store: Any) -> None:
    for name in (1, None, b"x", ("a",)):
        with pytest.raises(InvalidInputError, match="component name"):
            store.commit(1, {name: 1})


# --- steps ---


def test_integer_step_of_any_library_is_accepted(store: Any) -> None:
    for step in (0, 1, np.int64(7), np.uint8(8), torch.tensor(9), 2**63 - 1):
        assert store.commit(step, STATE).step == int(step)
        assert store.restore(step) == STATE
    assert store.steps() == [0, 1, 7, 8, 9, 2**63 - 1]
    assert {type(step) for step in store.steps()} == {int}


def test_step_that_is_no_whole_number_is_refused(store: Any) -> None:
    for step in (-1, 2**63, 1.0, "1", None, True, np.float32(1), np.bool_(True), float("nan"), [1]):
        with pytest.raises(InvalidInputError, match="step"):
            store.commit(step, STATE)
    assert store.steps() == []


# --- references ---


def test_text_that_means_nothing_is_not_found_or_refused(store: Any) -> None:
    store.commit(1, STATE)
    for ref in ("²", "main@²", "\ud800", "a\0b", "x" * 3000, "main@", "@1", "nobody", "9" * 5000):
        with pytest.raises((NotFoundError, InvalidInputError)):
            store.restore(ref)


def test_reference_of_another_type_is_refused(store: Any) -> None:
    store.commit(1, STATE)
    for ref in (None, b"main", ["main"], 1.0, True, -1):
        with pytest.raises(InvalidInputError):
            store.restore(ref)


def _commit_until(store: Any, wanted: Callable[[str], bool]) -> Any:
    """Commit different states until an id is as wanted; ids are digests of fixed states, so the count never varies."""
    for step in range(1, 400):
        snapshot = store.commit(step, {"counter": step})
        if wanted(snapshot.id):
            return snapshot
    raise AssertionError("no such id")


def test_id_prefix_of_decimal_digits_alone_is_found(store: Any) -> None:
    snapshot = _commit_until(store, lambda text: text[:8].isdigit())
    assert store.snapshot(snapshot.id[:8]).id == snapshot.id


def test_step_given_as_text_is_a_step_before_it_is_an_id(store: Any) -> None:
    store.commit(12345678, STATE)
    assert store.snapshot("12345678").step == 12345678
    assert store.snapshot("main@12345678").step == 12345678


def test_prefix_of_two_snapshots_is_ambiguous_and_says_how_many(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(1, STATE)
    store.commit(2, STATE)
    from casckpt.store import catalog

    ids = [bytes.fromhex("deadbeef" + "00" * 28), bytes.fromhex("deadbeef" + "11" * 28)]
    monkeypatch.setattr(catalog, "find_snapshots", lambda txn, prefix, limit: ids)
    with pytest.raises(InvalidInputError, match="fits 2 snapshots"):
        store.snapshot("deadbeef")


def test_full_id_odd_prefix_and_snapshot_value_mean_the_same_snapshot(store: Any) -> None:
    first = store.commit(1, {"counter": 1})
    store.commit(2, {"counter": 2})
    for ref in (first.id, first.id[:8], first.id[:9], first.id[:63], first):
        assert store.restore(ref) == {"counter": 1}


@pytest.mark.parametrize("size", [1, 7])
def test_prefix_of_fewer_than_eight_digits_is_no_reference(store: Any, size: int) -> None:
    snapshot = _commit_until(store, lambda text: not text[:7].isdigit() and not text[:1].isdigit())
    with pytest.raises(NotFoundError):
        store.snapshot(snapshot.id[:size])


def test_snapshot_of_another_store_is_not_found_here(store: Any, tmp_path: Path) -> None:
    with open_store(tmp_path / "other") as other:
        foreign = other.commit(1, {"counter": 99})
    with pytest.raises(NotFoundError, match="not in this store"):
        store.restore(foreign)


# --- metrics and labels ---


class Text(str):
    """A subclass whose str() lies."""

    def __str__(self) -> str:
        return "not what it holds"


class Level(enum.IntEnum):
    HIGH = 3


def test_numbers_and_text_of_any_library_become_pythons_own(store: Any) -> None:
    given = {
        "np": np.float32(0.5),
        "torch": torch.tensor(2),
        "bool": np.bool_(True),
        "enum": Level.HIGH,
        Text("name"): Text("value"),
        "zero-d": np.array(1.25),
        "np text": np.str_("q"),
    }
    store.commit(1, STATE, metrics=given, labels={Text("k"): Text("v")})
    found = store.snapshot(1)
    assert found.metrics == {
        "np": 0.5, "torch": 2, "bool": True, "enum": 3, "name": "value", "zero-d": 1.25, "np text": "q",
    }  # fmt: skip
    assert {type(value) for value in found.metrics.values()} == {float, int, bool, str}
    assert found.labels == {"k": "v"}


def test_nan_and_infinite_metrics_come_back(store: Any) -> None:
    store.commit(1, STATE, metrics={"loss": math.nan, "best": math.inf, "worst": -math.inf, "zero": -0.0})
    found = store.snapshot(1).metrics
    assert math.isnan(found["loss"])
    assert (found["best"], found["worst"]) == (math.inf, -math.inf)
    assert math.copysign(1, found["zero"]) == -1
    assert store.commit(1, STATE, metrics={"loss": math.nan}).id == store.snapshot(1).id


BAD_METRICS = [
    {"a": None}, {"a": [1]}, {"a": np.arange(2)}, {"a": 1j}, {"a": b"x"}, {1: 2}, {"a": 1 << 64},
    {"a": -(1 << 63) - 1}, {"a": "\ud800"}, {"\ud800": 1}, [1], "loss", {"a": "x" * (1 << 19)},
]  # fmt: skip


def test_metrics_of_another_kind_or_size_are_refused(store: Any) -> None:
    for metrics in BAD_METRICS:
        with pytest.raises(InvalidInputError, match="metrics"):
            store.commit(1, STATE, metrics=metrics)
    assert store.steps() == []
    store.commit(1, STATE)
    for metrics in BAD_METRICS:
        with pytest.raises(InvalidInputError, match="metrics"):
            store.annotate(1, metrics=metrics)
    assert store.snapshot(1).metrics == {}


def test_labels_of_another_kind_or_size_are_refused(store: Any) -> None:
    for labels in ({"a": 1}, {1: "a"}, {"a": "\ud800"}, ["a"], {"a": "x" * (1 << 19)}):
        with pytest.raises(InvalidInputError, match="labels"):
            store.commit(1, STATE, labels=labels)
    assert store.steps() == []


def test_integers_up_to_64_bits_are_metrics(store: Any) -> None:
    store.commit(1, STATE, metrics={"low": -(1 << 63), "high": (1 << 64) - 1})
    assert store.snapshot(1).metrics == {"low": -(1 << 63), "high": (1 << 64) - 1}


# --- config and schema version ---


@dataclasses.dataclass
class Optimizer:
    lr: float
    betas: tuple[float, float]


def test_config_of_ordinary_objects_is_kept_as_plain_values(store: Any) -> None:
    config = {
        "optimizer": Optimizer(3e-4, (0.9, 0.999)),
        "args": argparse.Namespace(seed=np.int64(3), log=Path("runs") / "x"),
        "sizes": np.array([64, 64]),
        "flags": {"b", "a"},
        "clip": math.inf,
        "level": Level.HIGH,
        "text": Text("exact"),
        7: None,
    }
    store.commit(1, STATE, config=config)
    assert store.context(1).config == {
        "optimizer": {"lr": 3e-4, "betas": [0.9, 0.999]},
        "args": {"seed": 3, "log": "runs/x"},
        "sizes": [64, 64],
        "flags": ["a", "b"],
        "clip": "inf",
        "level": 3,
        "text": "exact",
        "7": None,
    }


def test_config_without_plain_form_is_refused(store: Any) -> None:
    for config in ({"f": print}, {"t": torch.float32}, {"a": "\ud800"}, {"o": object()}):
        with pytest.raises(InvalidInputError, match="config"):
            store.commit(1, STATE, config=config)
    assert store.steps() == []


@pytest.mark.full
def test_config_with_a_set_is_equal_in_every_process(store: Any) -> None:
    """Sets of text iterate in another order in each process."""
    code = """if True:
        import sys, casckpt
        with casckpt.open(sys.argv[1], run=sys.argv[2], create=True) as store:
            print(store.commit(1, {"a": 1}, config={"flags": {"one", "two", "three", "four"}}).id)
    """
    for seed in ("1", "2", "3"):
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code, store.path, "same"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
        )
    with casckpt.open(store.path, run="same") as same:
        assert same.steps() == [1]


def test_config_drift_is_warned_item_by_item(store: Any) -> None:
    store.commit(1, STATE, config={"lr": 1e-3, "net": {"width": 64, "act": "tanh"}, "old": 1})
    with pytest.warns(ConfigDriftWarning) as caught:
        store.commit(2, STATE, config={"lr": 1e-4, "net": {"width": 64, "act": "relu"}, "new": 2})
    message = str(caught[0].message)
    for item in ("lr: 0.001 → 0.0001", "net.act: 'tanh' → 'relu'", "old was 1, is gone", "new is new: 2"):
        assert item in message
    assert "width" not in message
    assert store.context(2).config["lr"] == 1e-4
    assert store.context(1).config["lr"] == 1e-3


def test_config_drift_of_type_alone_names_the_item(store: Any) -> None:
    store.commit(0, STATE, config={"clip": 1})
    for step, value in enumerate([1.0, True, [1], [1.0], None, 0, "0", "1"], 1):
        with pytest.warns(ConfigDriftWarning, match="clip: "):
            store.commit(step, STATE, config={"clip": value})


def test_equal_or_no_config_warns_of_nothing_and_keeps_the_parents(store: Any) -> None:
    store.commit(1, STATE, config={"b": 1, "a": 2}, schema_version=4)
    store.commit(2, STATE, config={"a": 2, "b": 1})
    store.commit(3, STATE)
    assert store.context(3).config == {"a": 2, "b": 1}
    assert store.context(3).schema_version == 4


def test_commit_without_config_has_none(store: Any) -> None:
    store.commit(1, STATE)
    assert (store.context(1).config, store.context(1).schema_version) == (None, 1)


def test_schema_version_that_is_no_whole_number_is_refused(store: Any) -> None:
    for version in (-1, 1 << 63, "2", 1.0, True, [1]):
        with pytest.raises(InvalidInputError, match="schema_version"):
            store.commit(1, STATE, schema_version=version)
    assert store.steps() == []


def test_schema_version_zero_is_kept(store: Any) -> None:
    store.commit(1, STATE, schema_version=0)
    assert store.context(1).schema_version == 0


def test_restore_under_another_schema_version_is_refused_before_anything_is_touched(store: Any) -> None:
    store.commit(1, {"policy": {"weight": np.ones(3)}}, schema_version=2)
    target = {"policy": {"weight": np.zeros(3)}}
    with pytest.raises(casckpt.MismatchError, match="schema version 2"):
        store.restore(1, schema_version=1)
    with pytest.raises(casckpt.MismatchError, match="schema version 2"):
        store.restore_into(target, 1, schema_version=3)
    with pytest.raises(casckpt.MismatchError, match="schema version 2"):
        store.resume("latest", schema_version=1)
    assert (target["policy"]["weight"] == 0).all()
    assert (store.restore(1, schema_version=2)["policy"]["weight"] == 1).all()


# --- components of the parent ---


@pytest.fixture
def grown(store: Any) -> Any:
    store.commit(1, {"policy": 1, "replay": 2, "normalizer": 3})
    return store


def test_component_left_out_in_silence_is_refused_by_name(grown: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"\['normalizer', 'replay'\].*inherit=.*drop=") as caught:
        grown.commit(2, {"policy": 1})
    assert caught.value.names == ["normalizer", "replay"]
    assert grown.steps() == [1]


def test_inherited_component_keeps_its_own_step_and_dropped_one_is_gone(grown: Any) -> None:
    snapshot = grown.commit(2, {"policy": 10}, inherit=["replay"], drop=["normalizer"])
    assert {name: each.step for name, each in snapshot.components.items()} == {"policy": 2, "replay": 1}
    assert grown.restore(2, allow_mixed=True) == {"policy": 10, "replay": 2}
    third = grown.commit(3, {"policy": 11}, inherit=["replay"])
    assert third.components["replay"].step == 1


CONTRADICTIONS: list[dict[str, Any]] = [
    {"inherit": ["nothing"]}, {"drop": ["nothing"]}, {"inherit": ["policy"]}, {"drop": ["policy"]},
    {"inherit": ["replay"], "drop": ["replay", "normalizer"]}, {"inherit": "replay"}, {"drop": "replay"},
    {"inherit": [1]},
]  # fmt: skip


def test_inherit_and_drop_that_contradict_are_refused(grown: Any) -> None:
    for options in CONTRADICTIONS:
        with pytest.raises(InvalidInputError):
            grown.commit(2, {"policy": 1}, **options)
    assert grown.steps() == [1]


def test_new_component_needs_no_leave(grown: Any) -> None:
    snapshot = grown.commit(2, {"policy": 1, "replay": 2, "normalizer": 3, "value": 4})
    assert snapshot.components["value"].step == 2


def test_commit_of_inherited_components_alone_is_possible(grown: Any) -> None:
    snapshot = grown.commit(2, {}, inherit=["policy", "replay", "normalizer"])
    assert snapshot.is_consistent  # all of step 1
    assert grown.restore(2) == {"policy": 1, "replay": 2, "normalizer": 3}


def test_state_that_is_no_mapping_of_components_is_refused(store: Any) -> None:
    for state in ({}, [1], None, torch.nn.Linear(1, 1), "policy"):
        with pytest.raises(InvalidInputError, match="state"):
            store.commit(1, state)


def test_more_components_than_an_entry_can_name_are_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casckpt.format.entry.ENTRY_SIZE_MAX", 65536)
    with pytest.raises(InvalidInputError, match="components"):
        store.commit(1, {f"{number:0200d}": None for number in range(400)})
    assert store.commit(1, STATE).step == 1


# --- errors ---


def test_every_refusal_pickles_with_its_facts(store: Any) -> None:
    store.commit(5, {"policy": 1, "replay": 2})
    refusals: list[CasckptError] = []
    for use in (
        lambda: store.commit(4, {"policy": 1, "replay": 2}),
        lambda: store.commit(5, {"policy": 2, "replay": 2}),
        lambda: store.commit(6, {"policy": 1}),
        lambda: store.commit(6, {"policy": print, "replay": 2}),
        lambda: store.restore(7),
        lambda: store.restore(5, only=["policy/x"]),
        lambda: store.restore_into({"policy": {"a": 1}}, 5),
        lambda: casckpt.open(store.path + "/nowhere"),
        lambda: store.tag("main", 5),
    ):
        with pytest.raises(CasckptError) as caught:
            use()
        refusals.append(caught.value)
    for error in refusals:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - an error made in this test
        assert (type(copy), str(copy), copy.facts) == (type(error), str(error), error.facts)


@pytest.mark.parametrize("ref", ["x" * 10_000, "f" * 10_000, "main@" + "9" * 10_000, 10**4000, "\ud800" * 10_000])
def test_a_message_echoes_a_bounded_part_of_a_reference(store_path: Path, ref: Any) -> None:
    with open_store(store_path) as store:
        store.commit(1, {"a": {"n": 1}})
        with pytest.raises(casckpt.CasckptError) as caught:
            store.restore(ref)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["x" * 10_000, "a\n" * 50, "/" * 180])
def test_a_message_echoes_a_bounded_part_of_a_name(store_path: Path, name: str) -> None:
    with open_store(store_path) as store:
        store.commit(1, {"a": {"n": 1}})
        with pytest.raises(casckpt.InvalidInputError) as caught:
            store.tag(name, 1)
        assert len(str(caught.value)) < 250
