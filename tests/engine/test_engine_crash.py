"""A process that ends between a snapshot and what was to be added to it, at every file operation on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.engine.engine import CheckpointEngine
from casckpt.engine.strategy import SaveStrategy
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.recording import RecordingFileSystem, crash_states
from tests.unit.stores import open_store

ROWS = 40_000  # of the buffer: more than an entry holds
KILLED = "names kept, data kept"  # what the process wrote is there, synced or not


def engine_on(store: Any) -> tuple[CheckpointEngine, Any, Any]:
    """An engine whose buffer is added to snapshots later, and the live policy and buffer."""
    engine = CheckpointEngine(store, save_budget=None)
    policy, replay = np.zeros(4), np.zeros(ROWS)
    engine.register("policy", policy, SaveStrategy(every_steps=1))
    engine.register("replay", replay, SaveStrategy(every_steps=10, lane="best_effort"))
    return engine, policy, replay


def train(engine: CheckpointEngine, policy: Any, replay: Any, step: int) -> None:
    policy[:] = step
    replay[:] = np.random.default_rng(step).random(ROWS)
    replay[0] = step
    engine.step(step)
    engine.wait()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::casckpt.StoreWarning")
def test_end_between_a_light_entry_and_the_one_that_supersedes_it_leaves_one_or_the_other(tmp_path: Path) -> None:
    fs = RecordingFileSystem(LocalFileSystem(), str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    with casckpt.open(str(tmp_path / "disk" / "store"), create=True, system=System(file_system=fs)) as store:
        engine, policy, replay = engine_on(store)
        train(engine, policy, replay, 1)
        fs.mark("saved 1")
        train(engine, policy, replay, 10)
        fs.mark("saved 10")
        engine.close()
    seen, states = set(), [state for state in crash_states(fs.log) if state.marks]
    killed = [state for state in states if state.label.endswith(KILLED)]
    assert len(killed) >= 10
    for number, state in enumerate([*killed, *states[::40]]):  # power cuts are swept in tests/crash
        folder = tmp_path / str(number)
        folder.mkdir()
        state.write_to(str(folder))
        with open_store(folder / "store", create=False) as store:
            newest = {name: each.step for name, each in store.timeline()[-1].components.items()}
            engine, policy, replay = engine_on(store)
            report = engine.restore()
            assert (report.step, policy.tolist(), replay[0]) == (report.step, [report.step] * 4, report.step), (
                state.label
            )
            seen.add((newest["policy"], newest["replay"], report.step))
            if "saved 10" in state.marks:
                assert report.step == 10, state.label
        with open_store(folder / "store") as store:
            engine, policy, replay = engine_on(store)
            assert engine.restore(allow_mixed=True).step == newest["policy"], state.label
            train(engine, policy, replay, 20)
            assert store.snapshot(20).is_consistent and store.verify().ok, state.label
    assert seen == {(1, 1, 1), (10, 1, 1), (10, 10, 10)}
