"""(f) Two learners on one run and one on another act in any order; a plain dict of trees is the model.

The model knows snapshots by id (run, branch, step, parent, tree, metrics), heads by branch, tags, and where each
handle stands. Names of new branches are the store's to choose; everything else is predicted.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import casckpt
from casckpt.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError, StepOrderError
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")

HANDLES = ("main", "main", "side")  # the run of each handle
TAGS = ("good", "best")


@dataclass
class Known:
    """A snapshot in the model."""

    run: str
    branch: str
    step: int
    parent: str | None
    tree: Any
    metrics: dict[str, float]
    is_retired: bool = False


@dataclass
class Stand:
    """Where a handle stands: the snapshot its next commit continues, and whether that opens a branch."""

    snapshot: str | None = None
    branch: str | None = None
    forks: bool = False


@dataclass
class Model:
    snapshots: dict[str, Known] = field(default_factory=dict)
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    last_branch: dict[str, str] = field(default_factory=dict)
    tags: dict[tuple[str, str], str] = field(default_factory=dict)

    def line(self, run: str, branch: str | None) -> dict[int, str]:
        """Snapshot by step on a branch and its ancestors, retired ones too."""
        found: dict[int, str] = {}
        at = self.heads.get((run, branch)) if branch else None
        while at is not None:
            found.setdefault(self.snapshots[at].step, at)
            at = self.snapshots[at].parent
        return dict(sorted(found.items()))

    def listed(self, run: str, stand: Stand) -> list[int]:
        """Steps that a handle lists: of its line, as far as the fork when its next commit opens a branch."""
        line = self.line(run, stand.branch or "main")
        last = self.snapshots[stand.snapshot].step if stand.forks and stand.snapshot else None
        return [
            step for step, at in line.items() if not self.snapshots[at].is_retired and (last is None or step <= last)
        ]


def _tree(value: int, is_heavy: bool) -> dict[str, Any]:
    weight = np.arange(30_000 if is_heavy else 50, dtype=np.float32) + value // 3
    return {"counters": {"value": value, "heavy": is_heavy}, "policy": {"weight": weight}}


class StoreMachine(RuleBasedStateMachine):
    """Rules are what users do; each checks its own answer, invariants check everything else."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = str(Path(self.folder) / "store")
        self.model = Model()
        self.stores = [casckpt.open(self.path, create=True, run=run) for run in HANDLES]
        self.stands = [Stand() for _ in HANDLES]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)

    handles = st.integers(0, len(HANDLES) - 1)
    indexes = st.integers(0, 1 << 16)

    def _pick(self, run: str, index: int) -> str | None:
        ids = [key for key, known in self.model.snapshots.items() if known.run == run]
        return ids[index % len(ids)] if ids else None

    # --- writing ---

    @rule(at=handles, delta=st.integers(-1, 3), value=st.integers(0, 8), is_heavy=st.booleans())
    def commit(self, at: int, delta: int, value: int, is_heavy: bool) -> None:
        store, stand, run, model = self.stores[at], self.stands[at], HANDLES[at], self.model
        parent = model.snapshots[stand.snapshot] if stand.snapshot else None
        step = max(0, (parent.step if parent else 0) + delta)
        tree, metrics = _tree(value, is_heavy), {"value": float(value)}
        head = model.heads.get((run, stand.branch or "main"))
        expected: type[Exception] | None = None
        is_same = parent is not None and step == parent.step and difference(parent.tree, tree) is None
        if not stand.forks and head != stand.snapshot:
            expected = ConflictError
        elif parent is not None and step <= parent.step and not is_same:
            expected = StepOrderError
        if expected is not None:
            with pytest.raises(expected):
                store.commit(step, tree, metrics=metrics)
            return
        snapshot = store.commit(step, tree, metrics=metrics)
        if is_same:
            assert snapshot.id == stand.snapshot
            model.snapshots[snapshot.id].metrics.update(metrics)
            return
        assert (snapshot.run, snapshot.step, snapshot.parent) == (run, step, stand.snapshot)
        if stand.forks:
            assert (run, snapshot.branch) not in model.heads, "a fork must open a branch"
        else:
            assert snapshot.branch == (stand.branch or "main")
        model.snapshots[snapshot.id] = Known(run, snapshot.branch, step, stand.snapshot, tree, metrics)
        model.heads[run, snapshot.branch] = snapshot.id
        model.last_branch[run] = snapshot.branch
        self.stands[at] = Stand(snapshot.id, snapshot.branch)

    @rule(at=handles, index=indexes, key=st.sampled_from(["evaluation", "value"]), value=st.integers(0, 9))
    def annotate(self, at: int, index: int, key: str, value: int) -> None:
        wanted = self._pick(HANDLES[at], index)
        if wanted is not None:
            self.stores[at].annotate(wanted, metrics={key: float(value)})
            self.model.snapshots[wanted].metrics[key] = float(value)

    @rule(at=handles, index=indexes, name=st.sampled_from(TAGS))
    def tag(self, at: int, index: int, name: str) -> None:
        wanted = self._pick(HANDLES[at], index)
        if wanted is None:
            return
        if (HANDLES[at], name) in self.model.tags:
            with pytest.raises(AlreadyExistsError):
                self.stores[at].tag(name, wanted)
            return
        if self.model.snapshots[wanted].is_retired:
            with pytest.raises(InvalidInputError):
                self.stores[at].tag(name, wanted)
            return
        self.stores[at].tag(name, wanted)
        self.model.tags[HANDLES[at], name] = wanted

    @rule(at=handles, index=indexes)
    def retire(self, at: int, index: int) -> None:
        wanted = self._pick(HANDLES[at], index)
        if wanted is not None:
            self.stores[at].retire(wanted)
            self.model.snapshots[wanted].is_retired = True

    # --- moving ---

    @rule(at=handles, index=indexes)
    def resume(self, at: int, index: int) -> None:
        wanted = self._pick(HANDLES[at], index)
        if wanted is not None:
            self._assert_equal(wanted, self.stores[at].resume(wanted))
            self._stand(at, wanted)

    @rule(at=handles)
    def resume_latest(self, at: int) -> None:
        steps = self.model.listed(HANDLES[at], self.stands[at])
        if not steps:
            return
        wanted = self.model.line(HANDLES[at], self._branch(at))[steps[-1]]
        self._assert_equal(wanted, self.stores[at].resume("latest"))
        self._stand(at, wanted)

    @rule(at=handles)
    def reopen(self, at: int) -> None:
        self.stores[at].close()
        self.stores[at] = casckpt.open(self.path, run=HANDLES[at])
        branch = self.model.last_branch.get(HANDLES[at])
        self.stands[at] = Stand(self.model.heads[HANDLES[at], branch], branch) if branch else Stand()

    @rule()
    def lose_the_index(self) -> None:
        """While handles are open, too: they go on with what they have."""
        shutil.rmtree(Path(self.path) / "index", ignore_errors=True)

    def _stand(self, at: int, wanted: str) -> None:
        known = self.model.snapshots[wanted]
        self.stands[at] = Stand(wanted, known.branch, self.model.heads[known.run, known.branch] != wanted)

    def _branch(self, at: int) -> str:
        return self.stands[at].branch or "main"

    # --- reading ---

    def _assert_equal(self, wanted: str, found: Any) -> None:
        problem = difference(self.model.snapshots[wanted].tree, found)
        assert problem is None, problem

    @rule(at=handles, index=indexes, how=st.sampled_from(["id", "prefix", "branch@step"]))
    def restore(self, at: int, index: int, how: str) -> None:
        wanted = self._pick(HANDLES[at], index)
        if wanted is None:
            return
        known = self.model.snapshots[wanted]
        ref = {"id": wanted, "prefix": wanted[:16], "branch@step": f"{known.branch}@{known.step}"}[how]
        self._assert_equal(wanted, self.stores[at].restore(ref))

    @rule(at=handles, step=st.integers(0, 12))
    def restore_step(self, at: int, step: int) -> None:
        wanted = self.model.line(HANDLES[at], self._branch(at)).get(step)
        if wanted is None:
            with pytest.raises(NotFoundError):
                self.stores[at].restore(step)
        else:
            self._assert_equal(wanted, self.stores[at].restore(step))

    @rule(at=handles, name=st.sampled_from(TAGS))
    def restore_tag(self, at: int, name: str) -> None:
        wanted = self.model.tags.get((HANDLES[at], name))
        if wanted is None:
            with pytest.raises(NotFoundError):
                self.stores[at].restore(name)
        else:
            self._assert_equal(wanted, self.stores[at].restore(name))

    @precondition(lambda self: self.model.snapshots)
    @rule(at=handles)
    def verify_and_compare_with_a_rebuilt_index(self, at: int) -> None:
        report = self.stores[at].verify(read_data=True)
        assert report.ok, str(report)
        before = index_counts(self.stores[at])
        copy = str(Path(self.folder) / "copy")
        shutil.copytree(self.path, copy, ignore=shutil.ignore_patterns("index"))
        with casckpt.open(copy) as rebuilt:
            assert index_counts(rebuilt) == before
        shutil.rmtree(copy)

    @invariant()
    def every_handle_lists_what_the_model_has(self) -> None:
        if not hasattr(self, "model"):
            return
        for at, store in enumerate(self.stores):
            run = HANDLES[at]
            assert store.steps() == self.model.listed(run, self.stands[at])
            for snapshot in store.timeline():
                known = self.model.snapshots[snapshot.id]
                assert dict(snapshot.metrics) == known.metrics
                assert (snapshot.run, snapshot.branch, snapshot.step) == (known.run, known.branch, known.step)
            names = {name for of, name in self.model.heads if of == run}
            assert {branch.name for branch in store.branches()} == names


class TestStore(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """Quick: few, short histories; the profile's examples are for the full suite."""

    settings = settings(max_examples=8, stateful_step_count=25)


@pytest.mark.full
class TestStoreLong(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """Longer histories."""

    settings = settings(max_examples=120, stateful_step_count=50)
