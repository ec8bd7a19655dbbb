"""A process dies at any operation; a second one takes over and acknowledges the same work; then the power goes.

What the first one wrote but never synced is visible to the second one and still not durable: acknowledging on top of it
without syncing it would lose an acknowledged snapshot. Names and times follow from the process, so that two kills that
leave the same files, with the same acknowledged, are told to have: they are checked once.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

import casckpt
from casckpt.storage.fs import FileSystem, LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import COUNTED, CountingFileSystem
from casckpt.testing.invariants import check_promises
from casckpt.testing.recording import Mark, RecordingFileSystem, crash_states
from casckpt.testing.workload import HISTORY, TRAINING, Act, Rehearsal, oracle_of
from casckpt.testing.wrapping import MUTATING, Operation

T = TypeVar("T")


class _KilledError(BaseException):
    """The process is gone; nothing of it runs any more."""


class _KillingFileSystem(CountingFileSystem):
    """Once the chosen operation is reached, it and everything after it does not happen."""

    def strike(self, operation: Operation, act: Callable[[], Any]) -> Any:
        raise _KilledError

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if self.was_hit and operation.name in MUTATING:
            raise _KilledError
        return super().perform(operation, act)


def _system(process: int, file_system: FileSystem) -> System:
    return System(file_system=file_system, time_ns=lambda: 10**18, random_bytes=random.Random(process).randbytes)


def _run(folder: Path, kill_at: int, acts: Sequence[Act], kinds: Collection[str]) -> tuple[RecordingFileSystem, int]:
    """Both processes on one recorded disk; returns it and the operations before the kill, -1 when none came to it."""
    folder.mkdir()
    path = str(folder / "store")
    recording = RecordingFileSystem(LocalFileSystem(), str(folder))
    killing = _KillingFileSystem(recording, at=kill_at, operations=kinds)
    one, other = _system(1, killing), _system(2, recording)
    first = Rehearsal(lambda run: casckpt.open(path, create=True, run=run, system=one), recording.mark)
    with contextlib.suppress(_KilledError):
        for act in acts:
            first.perform(act)
    killed_at = sum(isinstance(step, Operation) for step in recording.log) if killing.was_hit else -1
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run, system=other), recording.mark) as second:
        for act in acts:
            if act.name not in {done.name for done in first.done}:
                second.perform(act)
    first.close()
    return recording, killed_at


def _check(folder: Path, kill_at: int, acts: Sequence[Act], kinds: Collection[str], seen: set[int]) -> bool:
    recording, killed_at = _run(folder / f"{kill_at}", kill_at, acts, kinds)
    # A power cut before the kill, or in the middle of an act, is what the plain sweep checks.
    moments = {done for done in _acknowledgements(recording.log) if done >= killed_at}
    assert moments
    for number, state in enumerate(crash_states(recording.log, moments)):
        fingerprint = hash((state.marks, state.folders, frozenset(state.files.items())))
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        target = folder / f"{kill_at}-{number}"
        target.mkdir()
        state.write_to(str(target))
        try:
            check_promises(str(target / "store"), oracle_of(state.marks))
        except Exception as error:
            raise AssertionError(f"killed at {kill_at}, power cut {state.label}: {error!r}") from error
        shutil.rmtree(target)
    return killed_at >= 0


def _acknowledgements(log: list[Operation | Mark]) -> set[int]:
    """How many operations had been carried out when each act was acknowledged."""
    found, done = set(), 0
    for step in log:
        if isinstance(step, Operation):
            done += 1
        elif step.value[0] == "done":
            found.add(done)
    return found


def _sweep(folder: Path, acts: Sequence[Act], kinds: Collection[str] = COUNTED) -> None:
    kill_at = 1
    seen: set[int] = set()
    while _check(folder, kill_at, acts, kinds, seen):
        kill_at += 1
    assert kill_at > len(acts)
    assert len(seen) > 10 * kill_at


@pytest.mark.full
def test_kill_before_a_folder_sync_and_a_power_cut_lose_nothing_acknowledged(tmp_path: Path) -> None:
    _sweep(tmp_path, HISTORY[:2], {"sync_folder"})


@pytest.mark.full
def test_every_kill_followed_by_a_power_cut_loses_nothing_acknowledged(tmp_path: Path) -> None:
    _sweep(tmp_path, HISTORY[:3])


@pytest.mark.full
def test_every_kill_in_a_training_followed_by_a_power_cut_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The second process builds on bases whose names the first one may not have made durable."""
    _sweep(tmp_path, TRAINING[:4], {"sync_folder", "rename", "link"})


@pytest.mark.full
def test_first_entry_of_a_new_folder_makes_the_last_of_the_old_one_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries lie in folders of a thousand; a writer that starts one must not rely on who died filling the other."""
    monkeypatch.setattr("casckpt.objects.timeline.ENTRIES_PER_SHARD", 2)
    _sweep(tmp_path, HISTORY[:4], {"sync_folder"})


def test_retiring_what_a_dead_process_retired_is_durable(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    recording = RecordingFileSystem(LocalFileSystem(), str(tmp_path))
    with casckpt.open(path, create=True, system=System(file_system=recording)) as store:
        store.commit(1, {"policy": 1})
        count = sum(isinstance(step, Operation) for step in recording.log)
        store.commit(2, {"policy": 2})
    linked = sum(isinstance(step, Operation) for step in recording.log) - count - 2  # without folder sync and unlink
    killing = _KillingFileSystem(recording, at=linked + 1)
    store = casckpt.open(path, system=System(file_system=killing))
    with pytest.raises(_KilledError):
        store.retire(1)
    with casckpt.open(path, system=System(file_system=recording)) as second:
        assert second.steps() == [2], "the dead process got as far as publishing"
        second.retire(1)
        recording.mark("retired")
    for number, state in enumerate(state for state in crash_states(recording.log) if state.marks):
        (tmp_path / str(number)).mkdir()
        state.write_to(str(tmp_path / str(number)))
        with casckpt.open(str(tmp_path / str(number) / "store")) as after:
            assert after.steps() == [2], state.label
