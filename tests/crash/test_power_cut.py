"""(a) Every prefix of a workload's file operations, with unsynced data kept, dropped, torn, and names undone.

The state's label, printed by a failure, names the operation after which the power went and what the disk kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import casckpt
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.invariants import check_promises, check_store, check_usable
from casckpt.testing.recording import CrashState, RecordingFileSystem, crash_states
from casckpt.testing.workload import HISTORIES, Rehearsal, oracle_of

PARTS = 4
QUICK_STRIDES = {"every kind of entry": 127, "training": 127}  # coprime to a commit's operations: all kinds are hit
FULL_STRIDES = {"every kind of entry": 1, "training": 5}  # its states are many and alike


@dataclass(frozen=True)
class Recorded:
    """A history and what a power cut in it may leave."""

    name: str
    states: list[CrashState]


@pytest.fixture(scope="module", params=HISTORIES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("recorded")
    fs = RecordingFileSystem(LocalFileSystem(), str(root))
    path = str(root / "store")
    with Rehearsal(
        lambda run: casckpt.open(path, create=True, run=run, system=System(file_system=fs)), fs.mark
    ) as rehearsal:
        for act in HISTORIES[request.param]:
            rehearsal.perform(act)
    return Recorded(request.param, list(crash_states(fs.log)))


def _check(name: str, state: CrashState, folder: Path, *, thoroughly: bool) -> None:
    folder.mkdir()
    state.write_to(str(folder))
    path = str(folder / "store")
    try:
        (check_store if thoroughly else check_promises)(path, oracle_of(state.marks))
        check_usable(path, HISTORIES[name][0].run)
    except Exception as error:
        raise AssertionError(f"{state.label}: {error!r}") from error


@pytest.mark.few(1)
def test_some_states_of_a_power_cut_open_whole(recorded: Recorded, tmp_path: Path) -> None:
    states = recorded.states[:: QUICK_STRIDES[recorded.name]]
    assert len(states) > 5
    for i, state in enumerate(states):
        _check(recorded.name, state, tmp_path / str(i), thoroughly=True)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_state_of_a_power_cut_opens_whole(recorded: Recorded, tmp_path: Path, part: int) -> None:
    states = recorded.states[part :: PARTS * FULL_STRIDES[recorded.name]]
    assert len(states) > 50
    for i, state in enumerate(states):
        _check(recorded.name, state, tmp_path / str(i), thoroughly=i % 5 == 0)
