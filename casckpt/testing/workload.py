"""A small history that touches every kind of timeline entry and both kinds of commit.

Acts are independent of each other's handles: each can be repeated on a fresh handle after it failed, because it first
goes back to the snapshot that it builds on. All content is a function of run and step, so that the expected tree of
every commit is known without running anything. NumPy only: a process that runs it need not load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import casckpt

Key: TypeAlias = tuple[str, int]
"""Run and step: unique in this history, across branches too."""

RUNS = ("main", "second")
_WEIGHTS = 9_000  # float32: 36 KB per array, so that three new ones do not fit into a timeline entry


class Act(NamedTuple):
    """One thing done to a store.

    Attributes:
        name: unique; for messages and acknowledgements.
        run: the run whose handle it needs.
        do: performs it on a handle in the right position.
        holds: whether its effect can be seen in an open store of its run.
        parent: step that a new handle must go back to first; None for acts that need no position.
        commits: key of the snapshot it makes, or None.
        retires: key of the snapshot that need not be listed any more once it was begun, or None.
    """

    name: str
    run: str
    do: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    parent: int | None = None
    commits: Key | None = None
    retires: Key | None = None


def tree(run: str, step: int) -> dict[str, Any]:
    """The state that `run` commits at `step`: weights change at every third step, the rest always."""
    weights = _noise(RUNS.index(run) * 100 + step - step % 3)
    return {  # components in the order of their names, as they come back
        "counters": {"step": step, "run": run, "rng": _noise(1000 + step)[:64].copy(), "done": np.zeros(5, bool)},
        "optimizer": {"moments": {1: weights[::-1].copy(), 0: weights * np.float32(0.5)}, "lr": 3e-4},
        "policy": {"weight": weights, "bias": weights[:32].copy(), "parts": [weights[:8].copy(), None]},
    }


def _noise(seed: int) -> np.ndarray[Any, Any]:
    """Finite float32 numbers that no encoding shrinks much; the same for the same seed on every platform."""
    words = np.arange(_WEIGHTS, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    numbers: np.ndarray[Any, Any] = (words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    numbers -= np.float32(0.5)
    return numbers


def _commit(run: str, step: int, parent: int | None = None, *, goes_back: bool = False) -> Act:
    # Only every other commit brings notes: publishing them would hide a commit that is not durable by itself.
    notes: dict[str, Any] = {"metrics": {"return": float(step)}, "labels": {"at": str(step)}} if step % 2 else {}

    def do(store: Any) -> Any:
        if goes_back:
            store.resume(parent)
        return store.commit(step, tree(run, step), **notes)

    def holds(store: Any) -> bool:  # that it is there is checked with its content; a retired one is not listed
        found = [each for each in store.timeline(all_runs=True) if (each.run, each.step) == (run, step)]
        return all(each.metrics.items() >= notes.get("metrics", {}).items() for each in found) and all(
            each.labels == notes.get("labels", {}) for each in found
        )

    return Act(f"commit {step} of {run}", run, do, holds, parent, (run, step))


HISTORY: tuple[Act, ...] = (
    _commit("main", 1),  # a pack
    _commit("main", 2, 1),  # light: inline
    Act(
        "annotate 2",
        "main",
        lambda store: store.annotate(2, metrics={"evaluation": 0.5}),
        lambda store: store.snapshot(2).metrics.get("evaluation") == 0.5,
    ),
    _commit("main", 3, 2),  # a pack with new weights
    _commit("second", 1),  # content of its own, in the same store
    Act(
        "tag 2",
        "main",
        lambda store: "good" in store.tags() or store.tag("good", 2),
        lambda store: store.snapshot("good").step == 2,
    ),
    _commit("main", 4, 2, goes_back=True),  # light again, on another branch
    Act(
        "retire 1",
        "main",
        lambda store: store.retire(1),
        lambda store: 1 not in store.steps(),
        retires=("main", 1),
    ),
    _commit("main", 6, 4),
)


class Rehearsal:
    """Performs acts on handles of its own, and keeps the oracle of what the store then owes.

    Args:
        open_store: makes a handle for a run.
        mark: told ("begin", act name) and ("done", act name).

    Attributes:
        acknowledged: trees that must be there.
        possible: trees that may be there.
        done: acts that were acknowledged.
    """

    def __init__(self, open_store: Callable[[str], Any], mark: Callable[[tuple[str, str]], None] | None = None) -> None:
        self.acknowledged: dict[Key, Any] = {}
        self.possible: dict[Key, Any] = {}
        self.done: list[Act] = []
        self._open_store = open_store
        self._mark = mark or (lambda value: None)
        self._handles: dict[str, Any] = {}

    def perform(self, act: Act) -> None:
        """Do one act; on a new handle from the snapshot that it builds on, or that it already made."""
        self.begin(act)
        self._mark(("begin", act.name))
        if act.run not in self._handles:
            store = self._handles[act.run] = self._open_store(act.run)
            is_there = act.commits is not None and act.commits[1] in store.steps()
            if act.parent is not None:
                store.resume(act.commits[1] if act.commits and is_there else act.parent)
        act.do(self._handles[act.run])
        self.finish(act)
        self._mark(("done", act.name))

    def begin(self, act: Act) -> None:
        """Note that an act may have happened."""
        if act.commits:
            self.possible[act.commits] = tree(*act.commits)
        if act.retires:
            self.acknowledged.pop(act.retires, None)

    def finish(self, act: Act) -> None:
        """Note that an act was acknowledged."""
        if act.commits:
            self.acknowledged[act.commits] = self.possible[act.commits]
        self.done.append(act)

    def close(self) -> None:
        """Close all handles; later acts open new ones."""
        while self._handles:
            self._handles.popitem()[1].close()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def oracle_of(marks: Iterable[tuple[str, str]]) -> Rehearsal:
    """What a store owes after these marks of a rehearsal; it has no handles."""
    by_name = {act.name: act for act in HISTORY}
    oracle = Rehearsal(lambda run: None)
    for what, name in marks:
        (oracle.begin if what == "begin" else oracle.finish)(by_name[name])
    return oracle


def main(path: str, marks: str) -> None:
    """Run the history on a new store at `path`, appending marks to a file; the store is opened again half way."""
    with (
        open(marks, "a", buffering=1) as log,
        Rehearsal(
            lambda run: casckpt.open(path, create=True, run=run), lambda mark: print(*mark, sep="\t", file=log)
        ) as rehearsal,
    ):
        for act in HISTORY[:4]:
            rehearsal.perform(act)
        rehearsal.close()
        for act in HISTORY[4:]:
            rehearsal.perform(act)


if __name__ == "__main__":
    main(*sys.argv[1:])
