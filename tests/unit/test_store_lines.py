"""Lines compared: the claim about each step is checked against states kept in a plain dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.recovery import compare_lines, continuation
from tests.unit.cli_stores import entry_path, flip
from tests.unit.stores import open_store

CRASH, RESUME = 9, 5


def training() -> dict[str, Any]:
    return {
        "policy": {"w": np.zeros(2000, np.float32)},
        "env": {"rng": np.random.default_rng(3), "position": 0},
        "frozen": {"w": np.ones(10)},
    }


def update(state: dict[str, Any]) -> None:
    state["policy"]["w"] += state["env"]["rng"].standard_normal(2000, dtype=np.float32)
    state["env"]["position"] += 1


def resume_at_five(store: casckpt.Store, spoil_step: int | None, spoil: str) -> None:
    """A training to step 9, resumed at 5 and trained to 8; one thing is put wrong before `spoil_step`."""
    state = training()
    for step in range(1, CRASH + 1):
        update(state)
        store.commit(step, state)
    store.resume_into(state, RESUME)
    for step in range(RESUME + 1, CRASH):
        update(state)
        if step == spoil_step and spoil == "rng":
            state["env"]["rng"].random()
        if step == spoil_step and spoil == "weight":
            state["policy"]["w"][1234] += 1
        store.commit(step, state)


def test_exact_resume_is_proven_for_every_step_committed_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        resume_at_five(store, None, "")
        found = continuation(store)
        assert found is not None
        assert (found.shared_step, found.equal_steps, found.only_a, found.only_b) == (5, (6, 7, 8), 1, 0)
        assert found.is_proof
        assert str(found) == "6–8 bit-identical (3 committed twice)"


@pytest.mark.few(2)
@pytest.mark.parametrize("step", [6, 7, 8])
@pytest.mark.parametrize(("spoil", "path"), [("rng", "env/rng"), ("weight", "policy/w")])
def test_first_divergence_is_named_by_step_and_leaf(tmp_path: Path, step: int, spoil: str, path: str) -> None:
    with open_store(tmp_path / "store") as store:
        resume_at_five(store, step, spoil)
        found = continuation(store)
        assert found is not None
        assert found.equal_steps == tuple(range(6, step))
        assert found.divergence is not None
        assert (found.divergence.step, set(found.divergence.paths)) == (step, {path})
        assert f"first divergence {step}: {path}" in str(found)
        assert not found.is_proof


def test_equal_runs_of_one_seed_are_compared_from_their_first_step(tmp_path: Path) -> None:
    for run, shift in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        with open_store(tmp_path / "store", run=run) as store:
            for step in (1, 2, 3):
                last = store.commit(step, {"policy": {"w": np.full(10, step + (shift if step == 3 else 0))}})
        with open_store(tmp_path / "store", run="a") as store:
            found = compare_lines(store, "latest", last)
        assert found.shared_step == (3 if run == "a" else None)
        assert found.equal_steps == {"a": (), "b": (1, 2, 3), "c": (1, 2)}[run]


def test_component_on_one_side_only_is_a_divergence(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.commit(1, {"a": [1]})
        store.commit(2, {"a": [2]})
        store.resume(1)
        store.commit(2, {"a": [2], "b": [3]})
        found = continuation(store)
        assert found is not None
        assert found.divergence is not None
        assert (found.divergence.components, found.divergence.paths) == (("b",), ("b",))


def test_line_that_lost_nothing_has_nothing_to_compare(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert continuation(store) is None
        store.commit(1, {"a": [1]})
        store.resume(1, branch="side")
        store.commit(2, {"a": [2]})
        assert continuation(store) is None
        assert continuation(store, "main") is None
        with pytest.raises(casckpt.NotFoundError, match="no branch 'other'"):
            continuation(store, "other")


def test_step_that_cannot_be_read_is_named_and_makes_no_proof(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        resume_at_five(store, None, "")
        seq = store.snapshot("main@7").seq
    flip(entry_path(tmp_path / "store", seq), 100)
    with open_store(tmp_path / "store", read_only=True) as store:
        found = compare_lines(store, "main", "main-5")
        assert [step for step, _ in found.unreadable] == [7]
        assert (found.equal_steps, found.divergence, found.is_proof) == ((6, 8), None, False)


def test_comparison_reads_only_the_component_that_differs(tmp_path: Path) -> None:
    """What is equal may even be lost: its address alone is compared."""
    with open_store(tmp_path / "store") as store:
        big = np.random.default_rng(0).standard_normal(100_000)
        store.commit(1, {"big": big, "n": [0]})
        for value in (1, 2):
            store.resume(1, branch=f"line-{value}")
            store.commit(2, {"n": [value]}, inherit=["big"])
    packs = sorted((tmp_path / "store" / "packs").rglob("*"))
    for pack in packs:
        if pack.is_file():
            flip(pack, pack.stat().st_size // 2)
    with open_store(tmp_path / "store") as store:
        found = compare_lines(store, "line-1", "line-2")
        assert found.divergence is not None
        assert found.divergence.paths == ("n",)
