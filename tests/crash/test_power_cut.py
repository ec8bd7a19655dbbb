"""(a) Every prefix of a workload's file operations, with unsynced data kept, dropped, torn, and names undone.

The state's label, printed by a failure, names the operation after which the power went and what the disk kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import casckpt
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.invariants import check_promises, check_store, check_usable
from casckpt.testing.recording import CrashState, RecordingFileSystem, crash_states
from casckpt.testing.workload import HISTORY, Rehearsal, oracle_of

PARTS = 4
QUICK_STRIDE = 61  # coprime to the number of operations in a commit, so that all kinds are hit


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[CrashState]:
    root = tmp_path_factory.mktemp("recorded")
    fs = RecordingFileSystem(LocalFileSystem(), str(root))
    path = str(root / "store")
    with Rehearsal(
        lambda run: casckpt.open(path, create=True, run=run, system=System(file_system=fs)), fs.mark
    ) as rehearsal:
        for act in HISTORY:
            rehearsal.perform(act)
    return list(crash_states(fs.log))


def _check(state: CrashState, folder: Path, *, thoroughly: bool) -> None:
    folder.mkdir()
    state.write_to(str(folder))
    path = str(folder / "store")
    try:
        (check_store if thoroughly else check_promises)(path, oracle_of(state.marks))
        check_usable(path)
    except Exception as error:
        raise AssertionError(f"{state.label}: {error!r}") from error


def test_some_states_of_a_power_cut_open_whole(states: list[CrashState], tmp_path: Path) -> None:
    for i, state in enumerate(states[::QUICK_STRIDE]):
        _check(state, tmp_path / str(i), thoroughly=True)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_state_of_a_power_cut_opens_whole(states: list[CrashState], tmp_path: Path, part: int) -> None:
    for i, state in enumerate(states[part::PARTS]):
        _check(state, tmp_path / str(i), thoroughly=i % 5 == 0)
