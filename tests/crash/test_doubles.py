"""The fault suite's own instruments: each must be able to fail a store that deserves it."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from casckpt.errors import OutOfSpaceError, StorageError
from casckpt.storage.fs import LocalFileSystem, read_file
from casckpt.testing.failing import (
    CountingFileSystem,
    FailingFileSystem,
    InterruptingFileSystem,
    LyingFileSystem,
)
from casckpt.testing.recording import CrashState, RecordingFileSystem, crash_states

CONTENT = bytes(range(1, 251)) * 5  # 1250 bytes, no zero among them, three sectors


def _publish(fs: RecordingFileSystem, root: Path, skip: str = "") -> None:
    """A correct little writer: file under a temporary name, then under its own, in a new folder. `skip` breaks it."""
    folder, temporary, final = str(root / "a"), str(root / "temporary"), str(root / "a" / "final")
    fs.make_folder(folder)
    if skip != "sync of the parent":
        fs.sync_folder(str(root))
    file = fs.create(temporary)
    file.write([CONTENT[:700]], 0)
    file.write([CONTENT[700:]], 700)
    if skip != "sync of the file":
        file.sync()
    file.close()
    fs.link(temporary, final)
    fs.unlink(temporary)
    if skip != "sync of the folder":
        fs.sync_folder(folder)
    fs.mark("published")


def _states(root: Path, skip: str = "") -> list[CrashState]:
    fs = RecordingFileSystem(LocalFileSystem(), str(root))
    _publish(fs, root, skip)
    return list(crash_states(fs.log))


def _broken(states: list[CrashState]) -> Iterator[str]:
    for state in states:
        if state.marks and state.files.get("a/final") != CONTENT:
            yield state.label


def test_sweep_passes_a_writer_that_syncs_everything(tmp_path: Path) -> None:
    assert list(_broken(_states(tmp_path))) == []


@pytest.mark.parametrize("skip", ["sync of the file", "sync of the folder", "sync of the parent"])
def test_sweep_catches_a_writer_that_leaves_out_one_sync(tmp_path: Path, skip: str) -> None:
    assert list(_broken(_states(tmp_path, skip)))


def test_states_include_every_way_a_file_can_be_cut(tmp_path: Path) -> None:
    found = {state.files["a/final"] for state in _states(tmp_path, "sync of the file") if "a/final" in state.files}
    assert {b"", bytes(1250), CONTENT, CONTENT[:701], CONTENT[:1024], bytes(700) + CONTENT[700:]} <= found
    assert CONTENT[:1024] + bytes(226) in found


def test_states_are_distinct_labelled_and_repeatable(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = _states(tmp_path / "1"), _states(tmp_path / "2")
    assert first == second
    assert len({state.label for state in first}) == len(first)
    contents = {(len(s.marks), s.folders, tuple(sorted(s.files.items()))) for s in first}
    assert len(contents) == len(first)


def test_a_state_on_disk_is_the_state(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    state = next(state for state in _states(tmp_path / "from") if state.marks)  # the first after it: all kept
    state.write_to(str(tmp_path / "to"))
    assert (tmp_path / "to" / "a" / "final").read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path / "to")) == ["a"]


def test_a_folder_sync_keeps_only_its_own_names(tmp_path: Path) -> None:
    states = _states(tmp_path)
    assert any(s.marks and "temporary" in s.files for s in states), "the parent was not synced after the unlink"


def _write_one(fs: FailingFileSystem | LyingFileSystem | InterruptingFileSystem, path: Path) -> None:
    file = fs.create(str(path))
    try:
        file.write([CONTENT], 0)
        file.sync()
    finally:
        file.close()


@pytest.mark.parametrize("is_forever", [False, True])
def test_failing_file_system_fails_each_operation_in_turn(tmp_path: Path, is_forever: bool) -> None:
    outcomes = []
    for n in itertools.count(1):
        fs = FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO, is_forever=is_forever)
        try:
            _write_one(fs, tmp_path / str(n))
        except StorageError as error:
            assert error.errno == errno.EIO
            assert fs.struck is not None
            outcomes.append(fs.struck.name)
        if not fs.was_hit:
            break
    assert outcomes == ["create", "write", "sync"]


def test_full_disk_stays_full_but_lets_files_go(tmp_path: Path) -> None:
    fs = FailingFileSystem(LocalFileSystem(), fail_at=2, error=errno.ENOSPC, is_forever=True, has_short_writes=True)
    with pytest.raises(OutOfSpaceError):
        _write_one(fs, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT[:625]
    with pytest.raises(OutOfSpaceError):
        fs.create(str(tmp_path / "y"))
    fs.unlink(str(tmp_path / "x"))


def test_failed_sync_is_never_forgiven(tmp_path: Path) -> None:
    fs = FailingFileSystem(LocalFileSystem(), fail_at=1, error=errno.EIO, operations={"sync"})
    file = fs.create(str(tmp_path / "x"))
    for _ in range(2):
        with pytest.raises(StorageError):
            file.sync()
    file.close()


def test_interrupt_arrives_as_a_real_sigint(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        _write_one(InterruptingFileSystem(LocalFileSystem(), at=3), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("lie", "differs"),
    [("flip", lambda found: found[625] == CONTENT[625] ^ 0x10), ("lose", lambda found: not any(found[625:]))],
)
def test_lying_file_system_reports_success(tmp_path: Path, lie: str, differs: Callable[[bytes], bool]) -> None:
    _write_one(LyingFileSystem(LocalFileSystem(), lie_at=1, lie=lie), tmp_path / "x")
    found = read_file(LocalFileSystem(), str(tmp_path / "x"), 10_000)
    assert len(found) == len(CONTENT) and differs(found)


def test_counting_changes_nothing_and_counts_only_what_it_is_told(tmp_path: Path) -> None:
    fs = CountingFileSystem(LocalFileSystem(), operations={"list", "create"})
    fs.list(str(tmp_path))
    fs.create(str(tmp_path / "x")).close()
    assert fs.count == 2 and not fs.was_hit
