"""Two small histories: one that touches every kind of timeline entry and both kinds of commit, one of a training.

HISTORY has content that no encoding shrinks. TRAINING drifts as training does, so that its commits store differences
and predictions, in chains, on a branch, and from the buffers of background commits.

Acts are independent of each other's handles: each can be repeated on a fresh handle after it failed, because it first
goes back to the snapshot that it builds on. All content is a function of run and step, so that the expected tree of
every commit is known without running anything. NumPy only: a process that runs it need not load torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import casckpt
from casckpt.limits import PREDICTED_SIZE_MIN

Key: TypeAlias = tuple[str, int]
"""Run and step: unique in this history, across branches too."""

RUNS = ("main", "second")
LEARNER = "learner"
"""The run of TRAINING."""

_WEIGHTS = 9_000  # float32: 36 KB per array, so that three new ones do not fit into a timeline entry


class Act(NamedTuple):
    """One thing done to a store.

    Attributes:
        name: unique; for messages and acknowledgements.
        run: the run whose handle it needs.
        do: performs it on a handle in the right position.
        holds: whether its effect can be seen in an open store of its run.
        parent: step that a new handle must go back to first; None for acts that need no position.
        commits: keys of the snapshots it makes, in order.
        retires: key of the snapshot that need not be listed any more once it was begun, or None.
    """

    name: str
    run: str
    do: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    parent: int | None = None
    commits: tuple[Key, ...] = ()
    retires: Key | None = None


def tree(run: str, step: int) -> dict[str, Any]:
    """The state that `run` commits at `step`. In HISTORY weights change at every third step, the rest always."""
    if run == LEARNER:
        return _learner(step)
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

    return Act(f"commit {step} of {run}", run, do, holds, parent, ((run, step),))


def _commit_in_two(step: int, parent: int) -> Act:
    """A light commit, and then a snapshot of the same step in place of it, in which everything is of that step.

    Weights are those of the parent: both have the tree that is expected.
    """
    state = tree("main", step)
    heavy = {name: state.pop(name) for name in ("optimizer", "policy")}

    def do(store: Any) -> Any:
        if step not in store.steps():
            store.commit(step, state, inherit="*", necessity=dict.fromkeys(heavy, "reloadable"))
        handle = store.supersede_async(step, heavy, metrics={"return": float(step)})
        error = handle.exception()
        if error is not None:
            raise error

    def holds(store: Any) -> bool:
        found = store.snapshot(step)
        return bool(found.components["policy"].step == step and found.metrics == {"return": float(step)})

    return Act(f"commit {step} of main in two entries", "main", do, holds, parent, (("main", step),))


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
    _commit_in_two(7, 6),
)


# --- a training ---

_DRIFTING = 16_500  # float32: just over the size from which a block has chunks of its own
_BETAS, _RATE, _EPS, _DECAY = (0.9, 0.999), 1e-3, 1e-8, 0.01


@functools.cache
def _moments(step: int) -> tuple[Any, Any, Any]:
    """Weight, first and second moment after `step` steps of AdamW, in float32 and in the order of torch's kernels."""
    weight = _noise(7)[np.arange(_DRIFTING) % _WEIGHTS] * np.float32(0.1)
    if step == 0:
        return weight, np.zeros_like(weight), np.zeros_like(weight)
    before, first, second = _moments(step - 1)
    single = np.float32
    gradient = (weight + np.resize(_noise(500 + step), _DRIFTING) * single(0.01)) * single(0.1)
    first = first + (gradient - first) * single(1 - _BETAS[0])
    second = second * single(_BETAS[1]) + gradient * single(1 - _BETAS[1]) * gradient
    divisor = np.sqrt(second) / single((1 - _BETAS[1] ** step) ** 0.5) + single(_EPS)
    after = before * single(1 - _RATE * _DECAY) + first * single(-_RATE / (1 - _BETAS[0] ** step)) / divisor
    return after, first, second


def _learner(step: int) -> dict[str, Any]:
    """AdamW's state, its weights, a table of which a few entries change, and enough else to be worth predicting."""
    weight, first, second = _moments(step)
    table = np.arange(_DRIFTING, dtype=np.int32)
    for each in range(1, step + 1):
        table[each * 37 % 101 :: 997] += each
    group = {"lr": _RATE, "betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY, "amsgrad": False, "maximize": False}
    slots = {0: {"step": float(step), "exp_avg": first.copy(), "exp_avg_sq": second.copy()}}
    return {
        "optimizer": {"state": slots, "param_groups": [{**group, "params": [0]}]},
        "policy": {"weight": weight.copy(), "table": table},
        "replay": {"frames": np.zeros(PREDICTED_SIZE_MIN, np.uint8), "position": step},
    }


def _commit_together(steps: Sequence[int], parent: int) -> Act:
    """Background commits that are staged while those before them are written."""

    def do(store: Any) -> Any:
        with contextlib.suppress(casckpt.SaveFailedError):
            store.wait()  # what an interrupted attempt left under way
        missing = [step for step in steps if step not in store.steps()]
        if missing and store.steps()[-1] > missing[0]:  # a later one was committed without it: all again, on a branch
            store.resume(parent)
            missing = list(steps)
        missing = missing or list(steps[-1:])  # committed by somebody who may not have made it durable: once more
        handles: list[Any] = []
        for step in missing:
            try:
                handles.append(store.commit_async(step, tree(LEARNER, step)))
            except casckpt.SaveFailedError as failed:  # one before it has failed already, which may come at any time
                assert failed.__cause__ is not None
                raise failed.__cause__ from None
        for error in filter(None, [handle.exception() for handle in handles]):
            raise error

    keys = tuple((LEARNER, step) for step in steps)
    return Act(f"commit {steps} of {LEARNER} in the background", LEARNER, do, lambda store: True, parent, keys)


TRAINING: tuple[Act, ...] = (
    _commit(LEARNER, 1),
    _commit(LEARNER, 2, 1),  # differences to 1
    _commit(LEARNER, 3, 2),  # one step on: predictions
    _commit_together((4, 5, 6), 3),  # bases in the buffers that the third writes over
    _commit(LEARNER, 8, 6),  # two steps on: differences only
    _commit(LEARNER, 7, 3, goes_back=True),  # another branch, from the middle of the chain
    Act(
        "retire 3 of the learner",
        LEARNER,
        lambda store: store.retire(3),
        lambda store: 3 not in store.steps(),
        retires=(LEARNER, 3),
    ),
    _commit(LEARNER, 9, 7),
)
HISTORIES = {"every kind of entry": HISTORY, "training": TRAINING}


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
            there = [step for _, step in act.commits if step in store.steps()]
            if act.parent is not None:
                store.resume(there[-1] if there else act.parent)
        act.do(self._handles[act.run])
        self.finish(act)
        self._mark(("done", act.name))

    def begin(self, act: Act) -> None:
        """Note that an act may have happened."""
        for key in act.commits:
            self.possible[key] = tree(*key)
        if act.retires:
            self.acknowledged.pop(act.retires, None)

    def finish(self, act: Act) -> None:
        """Note that an act was acknowledged."""
        for key in act.commits:
            self.acknowledged[key] = self.possible[key]
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
    by_name = {act.name: act for history in HISTORIES.values() for act in history}
    oracle = Rehearsal(lambda run: None)
    for what, name in marks:
        (oracle.begin if what == "begin" else oracle.finish)(by_name[name])
    return oracle


def main(path: str, marks: str, name: str = "every kind of entry") -> None:
    """Run a history on a new store at `path`, appending marks to a file; the store is opened again half way."""
    history = HISTORIES[name]
    with (
        open(marks, "a", buffering=1) as log,
        Rehearsal(
            lambda run: casckpt.open(path, create=True, run=run), lambda mark: print(*mark, sep="\t", file=log)
        ) as rehearsal,
    ):
        for act in history[:4]:
            rehearsal.perform(act)
        rehearsal.close()
        for act in history[4:]:
            rehearsal.perform(act)


def reopen(path: str) -> None:
    """Open a store and close it; for a process that is killed in between."""
    casckpt.open(path).close()
