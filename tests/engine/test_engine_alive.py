"""What a supervisor hears of an engine that nobody wired up: steps, phases, saves that get on, and how it ended."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt.engine.beats import Beat, BeatFolder
from casckpt.recovery import RecoveryCoordinator, open_generation
from casckpt.storage.process import System
from tests.engine.clocks import Clock, Disk
from tests.unit.stores import open_store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BeatFolder:
    """Where a supervisor listens."""
    monkeypatch.setenv("CASCKPT_BEATS", str(tmp_path / "beats"))
    return BeatFolder(str(tmp_path / "beats"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[casckpt.Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


def heard(folder: BeatFolder) -> Beat:
    (pulse,) = folder.look().values()
    return pulse.beat


def test_engine_tells_a_supervisor_of_its_steps_and_phases_by_itself(store: casckpt.Store, folder: BeatFolder) -> None:
    with casckpt.CheckpointEngine(store, save_budget=None, async_mode=False) as engine:
        engine.register("w", {"w": np.zeros(8)}, casckpt.SaveStrategy(every_steps=2))
        engine.restore()
        assert (heard(folder).step, heard(folder).phase) == (-1, "restoring")  # nobody is to miss it yet
        engine.step(1)
        assert (heard(folder).step, heard(folder).phase) == (1, "")
        engine.step(2)
        assert (heard(folder).step, heard(folder).phase) == (2, "saving")
        with engine.pause("evaluating", quiet_s=600):
            assert (heard(folder).step, heard(folder).phase, heard(folder).quiet_s) == (2, "evaluating", 600)
        assert (heard(folder).phase, heard(folder).quiet_s) == ("", 0)
        with pytest.raises(ZeroDivisionError), engine.pause("evaluating", quiet_s=600):
            raise ZeroDivisionError
        assert (heard(folder).phase, heard(folder).quiet_s) == ("", 0)  # an evaluation that failed is no excuse
    assert (heard(folder).step, heard(folder).phase) == (2, "closed")  # it said good-bye, and how far it came
    assert heard(folder).quiet_s > 1e6


def test_save_that_gets_on_is_a_sign_of_life(store: casckpt.Store, folder: BeatFolder, monkeypatch: Any) -> None:
    monkeypatch.setattr("casckpt.engine.beats._SUPERVISED_PERIOD_S", 0.0)  # each sign is written
    with casckpt.CheckpointEngine(store, save_budget=None, async_mode=False) as engine:
        weights = np.random.default_rng(0).standard_normal(6 << 20)  # 48 chunks, in several batches
        engine.register("w", {"w": weights})
        before = heard(folder).counter
        engine.save(1)
        saved = heard(folder).counter
        engine.restore()
        restored = heard(folder).counter
    assert saved - before >= 6  # batches of 8 MiB
    assert restored - saved >= 48


def test_failed_saves_are_counted_and_told(tmp_path: Path, folder: BeatFolder) -> None:
    disk = Disk(Clock())
    with open_store(tmp_path / "full", system=System(file_system=disk)) as store:
        engine = casckpt.CheckpointEngine(store, save_budget=None)
        engine.register("w", {"w": np.zeros(8)}, casckpt.SaveStrategy(every_steps=1, expect_change=False))
        engine.save(1, async_mode=False)
        disk.is_full = True
        with pytest.raises(casckpt.OutOfSpaceError):
            engine.save(2, async_mode=False)
        assert (heard(folder).phase, heard(folder).failed_saves) == ("save failed", 1)
        engine.step(3)
        engine._saves.under_way[-1].handle.wait()
        with pytest.raises(casckpt.SaveFailedError):
            engine.step(4)
        assert (heard(folder).phase, heard(folder).failed_saves) == ("save failed", 2)
        assert engine.report().failed_count == 2
        disk.is_full = False
        engine.step(5)
        engine.close()
        assert (heard(folder).phase, heard(folder).failed_saves, heard(folder).step) == ("closed", 2, 5)


def test_postponed_saves_are_counted_and_told(
    tmp_path: Path, folder: BeatFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casckpt.engine.beats._SUPERVISED_PERIOD_S", 0.0)  # each sign is written
    clock = Clock()
    disk = Disk(clock)
    disk.publish_s = 5.0
    with (
        open_store(tmp_path / "slow", system=System(file_system=disk)) as store,
        casckpt.CheckpointEngine(store, clock=clock, async_mode=False) as engine,
    ):
        live = {"n": 0}
        engine.register("live", live, casckpt.SaveStrategy(every_steps=1))
        for step in range(1, 5):
            live["n"] = step
            engine.step(step)
        assert engine.report().layers[0].postponed_count == 1
    assert heard(folder).postponed_saves == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_engine_that_is_fenced_says_so_even_when_it_is_closed(
    tmp_path: Path, store: casckpt.Store, folder: BeatFolder, is_async: bool
) -> None:
    with (
        pytest.raises((casckpt.FencedError, casckpt.SaveFailedError)),
        casckpt.CheckpointEngine(store, async_mode=is_async) as engine,
    ):
        engine.register("w", {"w": np.zeros(8)})
        engine.save(1, async_mode=False)
        with open_store(tmp_path / "store", create=False) as other:
            open_generation(other, other.snapshot())
        engine.save(2)
        engine.wait()
    assert (heard(folder).phase, heard(folder).generation) == ("fenced", 0)


def test_fence_is_told_to_a_supervisor_whoever_hears_of_it_until_the_run_is_recovered_here(
    tmp_path: Path, store: casckpt.Store, folder: BeatFolder
) -> None:
    with casckpt.CheckpointEngine(store, save_budget=None) as engine:
        engine.register("w", {"w": np.zeros(8)}, casckpt.SaveStrategy(every_steps=1))
        engine.save(1, async_mode=False)
        with open_store(tmp_path / "store", create=False) as other:
            open_generation(other, other.snapshot())
        handle = engine.step(2)
        assert handle is not None
        assert isinstance(handle.exception(), casckpt.FencedError)  # the program takes it, and says nothing
        assert heard(folder).phase == "fenced"
        engine.step(3)
        assert (heard(folder).step, heard(folder).phase) == (3, "fenced")
        with pytest.raises(casckpt.SaveFailedError):
            engine.wait()
        assert RecoveryCoordinator(store).recover(engine).generation == 2
        engine.step(2)
        assert heard(folder).phase != "fenced"
        engine.wait()
    with casckpt.open(tmp_path / "store") as store, open_store(tmp_path / "store", create=False) as other:
        RecoveryCoordinator(store).recover({"w": {"w": np.zeros(8)}})
        open_generation(other, other.snapshot())
        with pytest.raises(casckpt.FencedError):
            store.commit(3, {"w": {"w": np.ones(8)}})
        assert {pulse.beat.phase for pulse in folder.look().values()} == {"closed", "fenced"}
        RecoveryCoordinator(store).recover({"w": {"w": np.zeros(8)}})
        assert {pulse.beat.phase for pulse in folder.look().values()} == {"closed", ""}
        open_generation(other, other.snapshot())
        with pytest.raises(casckpt.FencedError):
            store.commit(3, {"w": {"w": np.ones(8)}})
    assert {pulse.beat.phase for pulse in folder.look().values()} == {"closed", "", "fenced"}
    with casckpt.open(tmp_path / "store") as store:  # another handle of this process
        RecoveryCoordinator(store).recover({"w": {"w": np.zeros(8)}})
    assert {pulse.beat.phase for pulse in folder.look().values()} == {"closed", ""}


def is_fenced(folder: BeatFolder) -> bool:
    """What a supervisor takes from it: the newest generation that anybody speaks for is fenced."""
    beats = [pulse.beat for pulse in folder.look().values()]
    newest = max(beat.generation for beat in beats)
    return any(beat.phase == "fenced" and beat.generation >= newest for beat in beats)


def fence(path: Path, store: casckpt.Store, step: int) -> None:
    """Another process recovers the run, and `store` hears of it."""
    with open_store(path, create=False) as other:
        open_generation(other, other.snapshot())
    with pytest.raises(casckpt.FencedError):
        store.commit(step, {"w": {"w": np.full(8, step)}})


@pytest.mark.parametrize("is_closed", [False, True], ids=["engine open", "engine closed"])
def test_a_process_is_fenced_from_a_run_until_any_of_its_handles_has_recovered_it(
    tmp_path: Path, store: casckpt.Store, folder: BeatFolder, is_closed: bool
) -> None:
    """Told by an engine, and over by a handle without one; and the other way round."""
    path = tmp_path / "store"
    engine = casckpt.CheckpointEngine(store, save_budget=None)
    engine.register("w", {"w": np.zeros(8)})
    engine.save(1, async_mode=False)
    fence(path, store, 2)
    assert is_fenced(folder)
    if is_closed:
        engine.close()
        assert is_fenced(folder)
    with open_store(path, create=False) as second:
        RecoveryCoordinator(second).recover({"w": {"w": np.zeros(8)}})
        assert not is_fenced(folder)
        with pytest.raises(casckpt.FencedError):
            store.commit(3, {"w": {"w": np.ones(8)}})  # its own process has recovered the run since
        assert not is_fenced(folder)
        fence(path, second, 4)
        assert is_fenced(folder)
        if not is_closed:
            engine.close()
        with open_store(path, create=False) as third, casckpt.CheckpointEngine(third, save_budget=None) as again:
            again.register("w", {"w": np.zeros(8)})
            RecoveryCoordinator(third).recover(again)
            assert not is_fenced(folder)
            again.save(5, async_mode=False)
            assert not is_fenced(folder)


def test_folder_of_beats_that_is_gone_stops_no_training(
    tmp_path: Path, store: casckpt.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CASCKPT_BEATS", str(tmp_path / "file" / "beats"))
    with caplog.at_level(logging.WARNING), casckpt.CheckpointEngine(store, save_budget=None) as engine:
        engine.register("w", {"w": np.zeros(8)}, casckpt.SaveStrategy(every_steps=1, expect_change=False))
        engine.step(1)
        engine.step(2)
    assert store.steps() == [1, 2]
    assert caplog.text.count("cannot be told that this training is alive") == 1
    monkeypatch.setenv("CASCKPT_BEATS", str(tmp_path / "beats"))
    with casckpt.CheckpointEngine(store, save_budget=None) as engine:
        engine.register("w", {"w": np.zeros(8)}, casckpt.SaveStrategy(every_steps=1))
        engine.restore()
        shutil.rmtree(tmp_path / "beats")
        engine.step(3)
    assert store.steps() == [1, 2, 3]
