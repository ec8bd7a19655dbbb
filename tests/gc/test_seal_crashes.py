"""A sealing whose disk fails, whose process is killed, or whose power goes, at its n-th operation: n = 1, 2, 3 …"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from casckpt_gc import Compaction

from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing import killing
from casckpt.testing.recording import CrashState, RecordingFileSystem, crash_states
from casckpt.testing.wrapping import Operation
from tests.gc.collecting import collect
from tests.gc.faults import SHARED, sweep, sweep_power_cuts
from tests.gc.sealing import RETENTION, check_after, make, seal, short_epochs
from tests.unit.stores import open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so

PARTS = 4


@pytest.fixture(autouse=True, scope="module")
def epochs() -> Iterator[None]:
    with short_epochs():
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, epochs: None) -> Path:
    path = tmp_path_factory.mktemp("start") / "store"
    make(path)
    return path


def check(path: Path, label: str) -> None:
    try:
        check_after(path)
    except BaseException as error:
        raise AssertionError(f"{label}: {error!r}") from error
    shutil.rmtree(path)


def copy(start: Path, path: Path) -> Path:
    return Path(shutil.copytree(start, path, ignore=shutil.ignore_patterns("index")))


# --- a disk that fails, a process that stops ---


def test_some_kills_in_a_sealing_lose_nothing(start: Path, tmp_path: Path) -> None:
    assert sweep(start, tmp_path, seal, check_after, modes=["killed"], stride=17) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("modes", SHARED)
def test_every_fault_of_a_sealing_loses_nothing(start: Path, tmp_path: Path, modes: tuple[str, ...]) -> None:
    assert sweep(start, tmp_path, seal, check_after, modes=modes) > 30


# --- a power cut ---


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, epochs: None) -> list[CrashState]:
    """What a power cut in the sealing may leave; everything before it was acknowledged."""
    root = tmp_path_factory.mktemp("recorded")
    disk = RecordingFileSystem(LocalFileSystem(), str(root))
    make(root / "store", System(file_system=disk))
    before = sum(isinstance(step, Operation) for step in disk.log)
    seal(root / "store", System(file_system=disk))
    return [state for state in crash_states(disk.log) if state.prefix >= before]


def cut(states: list[CrashState], tmp_path: Path) -> None:
    for number, state in enumerate(states):
        (tmp_path / str(number)).mkdir()
        state.write_to(str(tmp_path / str(number)))
        check(tmp_path / str(number) / "store", state.label)


def test_some_power_cuts_in_a_sealing_lose_nothing(states: list[CrashState], tmp_path: Path) -> None:
    assert len(states) > 100
    cut(states[::67], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_power_cut_in_a_sealing_loses_nothing(states: list[CrashState], tmp_path: Path, part: int) -> None:
    cut(states[part::PARTS], tmp_path)


# --- a kill, another collection, a power cut ---


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_a_killed_sealing_published_is_durable_before_another_relies_on_it(tmp_path: Path) -> None:
    """Who died may have linked an entry or an epoch, and not synced its name."""

    def finish(path: Path, system: System) -> None:  # seals nothing by itself
        with open_store(path, create=False, system=system) as store:
            collect(store, RETENTION, compaction=Compaction(epoch_count_max=0))

    assert sweep_power_cuts(tmp_path, make, seal, finish, check_after) > 30


# --- SIGKILL ---


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.skipif(killing.why_not() is not None, reason=str(killing.why_not()))
def test_every_kill_in_a_sealing_loses_nothing(start: Path, tmp_path: Path, part: int) -> None:
    """A real process, at its n-th changing system call."""
    with killing.Victims("tests.gc.sealing:main") as victims:
        counts = victims.count_calls(str(copy(start, tmp_path / "counted")))
        points = [(call, number) for call, count in counts.items() for number in range(1, count + 1)][part::PARTS]
        assert {"unlink", "fdatasync", "link"} <= counts.keys()
        killed = 0
        for call, number in points:
            path = copy(start, tmp_path / f"{call}-{number}")
            killed += victims.finish(victims.start([str(path)], call, number))
            check(path, f"{call} {number}")
    assert killed >= 0.9 * len(points)  # threads take turns: the last few numbers may not be reached
