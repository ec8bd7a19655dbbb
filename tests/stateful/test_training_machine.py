"""A training that steps, commits at any level, goes back, forks, loses its index and once some bytes; copies are kept.

The model is a copy of every committed state. Weights and moments follow each other as AdamW's do, and a target follows
the weights, so that commits one step apart store predictions, others differences, and chains grow, branch and are
healed in any order. Leaves jump to what others hold, so that one leaf is built on another.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from casckpt.codec.level import LEVELS
from casckpt.errors import CorruptionError, IncompleteError
from casckpt.ids import ObjectId
from casckpt.storage.process import System
from casckpt.store import components
from casckpt.testing.anatomy import CONFIG, dissect
from casckpt.testing.invariants import check_depths, index_counts
from casckpt.testing.trees import difference
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")

_ITEMS = 16_400  # float32: just over the size from which a block has chunks of its own
_BETAS, _RATE, _EPS = (0.9, 0.999), 1e-3, 1e-8
levels = st.sampled_from(list(LEVELS))


def _first() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    single = np.float32
    group = {"lr": _RATE, "betas": _BETAS, "eps": _EPS, "weight_decay": 0.0, "amsgrad": False, "params": [0]}
    slot = {"step": 0.0, "exp_avg": np.zeros(_ITEMS, single), "exp_avg_sq": np.zeros(_ITEMS, single)}
    weight, table = rng.normal(size=_ITEMS).astype(single), rng.integers(0, 1 << 40, 9_000)
    return {
        "optimizer": {"state": {0: slot}, "param_groups": [group]},
        "policy": {"weight": weight, "table": table},
        "target": weight + rng.normal(size=_ITEMS, scale=0.2).astype(single),
    }


def _step(state: dict[str, Any], kind: int) -> None:
    """One step of AdamW on noise of this kind, and of the target, in place; and a few entries of the table."""
    single, slot, policy = np.float32, state["optimizer"]["state"][0], state["policy"]
    slot["step"] += 1
    number = int(slot["step"])
    rng = np.random.default_rng([kind, number])
    gradient = (policy["weight"] + rng.normal(size=_ITEMS)).astype(single) * single(0.01)
    slot["exp_avg"] += (gradient - slot["exp_avg"]) * single(1 - _BETAS[0])
    slot["exp_avg_sq"] *= single(_BETAS[1])
    slot["exp_avg_sq"] += gradient * single(1 - _BETAS[1]) * gradient
    divisor = np.sqrt(slot["exp_avg_sq"]) / single((1 - _BETAS[1] ** number) ** 0.5) + single(_EPS)
    policy["weight"] += slot["exp_avg"] * single(-_RATE / (1 - _BETAS[0] ** number)) / divisor
    state["target"] *= single(0.995)
    state["target"] += policy["weight"] * single(0.005)
    policy["table"][rng.integers(0, 9_000, 10 if kind else 3_000)] += 1


class TrainingMachine(RuleBasedStateMachine):
    """One handle; each rule checks its own answer."""

    @initialize(level=levels)
    def start(self, level: str) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = str(Path(self.folder) / "store")
        self.patch = mock.patch.object(components, "PREDICTED_SIZE_MIN", 0)
        self.patch.start()
        disk, ids = UnsyncedFileSystem(), np.random.default_rng(1)
        self.system = System(file_system=disk, random_bytes=ids.bytes)  # the order of packs is that of their names
        self.store = open_store(self.path, level=level, chunk_size=32_768, system=self.system)
        self.state = _first()
        self.kept: dict[str, Any] = {}  # by snapshot id
        self.fragile: set[str] = set()  # may have lost something
        self.retired: set[str] = set()
        self.last_step = 0
        self.is_damaged = False

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            for snapshot in self.kept:
                self._check(snapshot)
        finally:
            self.store.close()
            self.patch.stop()
            shutil.rmtree(self.folder)

    def _pick(self, index: int) -> str | None:
        ids = list(self.kept)
        return ids[index % len(ids)] if ids else None

    def _check(self, snapshot: str) -> None:
        try:
            found = self.store.restore(snapshot)
        except (CorruptionError, IncompleteError):
            assert snapshot in self.fragile, "a step that needs nothing of what was damaged"
            return
        problem = difference(self.kept[snapshot], found)
        assert problem is None, problem

    indexes = st.integers(0, 1 << 16)

    # --- writing ---

    @rule(count=st.sampled_from([1, 1, 1, 2, 5]), kind=st.integers(0, 2))
    def train(self, count: int, kind: int) -> None:
        for _ in range(count):
            _step(self.state, kind)

    @rule(kind=st.sampled_from(["hard update", "take-over", "swap"]))
    def jump(self, kind: str) -> None:
        """A leaf becomes what another one is; nothing of it is near its own past any more."""
        weight, target = self.state["policy"]["weight"], self.state["target"]
        of_weight, of_target = weight.copy(), target.copy()
        if kind != "hard update":
            weight[:] = of_target
        if kind != "take-over":
            target[:] = of_weight

    @rule(optimizer=levels, policy=levels, is_async=st.booleans(), count=st.sampled_from([0, 1, 1]))
    def commit(self, optimizer: str, policy: str, is_async: bool, count: int) -> None:
        for _ in range(count):
            _step(self.state, 1)
        self._commit(is_async, {"optimizer": optimizer, "policy": policy})

    def _commit(self, is_async: bool, chosen: dict[str, str] | None = None) -> None:
        self.last_step += 1
        if is_async:
            handle = self.store.commit_async(self.last_step, self.state, levels=chosen)
            expected = copy.deepcopy(self.state)
            _step(self.state, 2)  # goes on meanwhile
            snapshot = handle.result()
        else:
            expected = copy.deepcopy(self.state)
            snapshot = self.store.commit(self.last_step, self.state, levels=chosen)
        self.kept[snapshot.id] = expected
        self.retired.discard(snapshot.id)
        self._check(snapshot.id)

    @rule(first=levels, second=levels)
    def commit_twice_at_once(self, first: str, second: str) -> None:
        """The second is staged while the first is written, over the buffers of the save before."""
        handles = []
        for chosen in (first, second, first):
            self.last_step += 1
            levels_of = {"optimizer": chosen}
            handles.append(
                (self.store.commit_async(self.last_step, self.state, levels=levels_of), copy.deepcopy(self.state))
            )
            _step(self.state, 1)
        for handle, expected in handles:
            self.kept[handle.result().id] = expected

    @rule(index=indexes)
    def commit_an_old_state_again(self, index: int) -> None:
        """What was lost of it comes again."""
        wanted = self._pick(index)
        if wanted is not None:
            self.state = copy.deepcopy(self.kept[wanted])
            self._commit(is_async=False)
            self.fragile.discard(wanted)
            self._check(wanted)

    @rule(index=indexes)
    def retire(self, index: int) -> None:
        wanted = self._pick(index)
        if wanted is not None:
            self.store.retire(wanted)
            self.retired.add(wanted)

    # --- moving ---

    @rule(index=indexes)
    def resume(self, index: int) -> None:
        wanted = self._pick(index)
        if wanted is not None and wanted not in self.fragile:
            self.state = self.store.resume(wanted)
            assert difference(self.kept[wanted], self.state) is None

    @rule(level=levels, loses_index=st.booleans())
    def reopen(self, level: str, loses_index: bool) -> None:
        counts = index_counts(self.store)
        self.store.close()
        if loses_index:
            shutil.rmtree(Path(self.path) / "index")
        self.store = open_store(self.path, level=level, system=self.system)
        if self.is_damaged:
            self.store.verify(read_data=True)  # what the index knew of damage went with it
        else:
            assert index_counts(self.store) == counts

    # --- harm ---

    @precondition(lambda self: self.kept and not self.is_damaged)
    @rule(index=indexes, is_flipped=st.booleans())
    def damage(self, index: int, is_flipped: bool) -> None:
        """Once: a record of a chunk is changed, or a whole pack is gone. Verification makes it known."""
        anatomy = dissect(self.path)
        payloads = [each for each in anatomy.regions if each.path.startswith("packs") and each.name.endswith("payload")]
        if not payloads:
            return
        region = payloads[index % len(payloads)]
        path = Path(self.path) / region.path
        lost: set[ObjectId] = {region.object_id} if region.object_id else set()
        if is_flipped:
            content = bytearray(path.read_bytes())
            content[region.offset + region.size // 2] ^= 0x55
            path.write_bytes(content)
        else:
            path.unlink()
            lost = {each for each, paths in anatomy.records.items() if set(paths) == {region.path}}
        self.is_damaged = True
        self.store.close()  # an open handle still has the file
        self.store = open_store(self.path, system=self.system)
        harmed = {key.hex(): names - {CONFIG} for key, names in anatomy.damage(lost).items()}
        self.fragile = {key for key, names in harmed.items() if names}
        report = self.store.verify(read_data=True)
        named = {user[4] for problem in report.problems for user in problem.snapshots if user[3] != CONFIG}
        assert named <= self.fragile
        alone = {each for each in lost if len(anatomy.records[each]) == 1 or not is_flipped}
        expected = {key.hex() for key in anatomy.damage(alone, as_bases=False)} - self.retired
        assert expected & self.fragile <= named

    # --- reading ---

    @rule(index=indexes)
    def restore(self, index: int) -> None:
        wanted = self._pick(index)
        if wanted is not None:
            self._check(wanted)

    @invariant()
    def depth_falls(self) -> None:
        if hasattr(self, "store") and not self.is_damaged:
            check_depths(self.store)

    @precondition(lambda self: self.kept and not self.is_damaged)
    @rule()
    def verify(self) -> None:
        assert self.store.verify(read_data=True).ok
        assert index_counts(self.store) == {bytes(key): count for key, count in dissect(self.path).counts().items()}


class TestTraining(TrainingMachine.TestCase):  # type: ignore[misc, name-defined]
    """Quick: few, short histories."""

    settings = settings(max_examples=6, stateful_step_count=15)


@pytest.mark.full
class TestTrainingLong(TrainingMachine.TestCase):  # type: ignore[misc, name-defined]
    """Longer histories."""

    settings = settings(max_examples=60, stateful_step_count=40)
