"""Leases: who is waited for, for how long, and what a reader finds that began before a collection (G07, G11, G21)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Retention

from casckpt.errors import CasckptError
from casckpt.limits import LEASE_PULSE_S, LEASE_TIMEOUT_S
from casckpt.storage.process import System
from casckpt.store.leases import Leases, read_leases
from casckpt.testing.failing import FailingFileSystem
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.gc.collecting import check_steps, commit, files, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def begin(store: Any, **options: Any) -> casckpt_gc.Collection:
    plan = casckpt_gc.plan(store, Retention(latest=1))
    return casckpt_gc.Collection(plan, grace_s=options.pop("grace_s", 0.0), **options)


def held_back(path: Path) -> bool:
    """Whether all packs of three commits are still there."""
    return len(files(path, "packs")) == 3


def test_grace_time_is_waited_for_by_the_own_monotonic_clock(store_path: Path) -> None:
    clock, wall = Clock(), [10**18]
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=clock, time_ns=lambda: wall[0])
    with open_store(store_path, system=system) as store:
        commit(store, 1, 2, 3)
        collection = begin(store, grace_s=60.0)
        for now_s, jump_ns in ((0.0, 0), (59.0, 3600 * 10**9), (59.9, -(10**13))):
            clock.now_s, wall[0] = 1000.0 + now_s, wall[0] + jump_ns
            assert not collection.advance() and held_back(store_path)
        clock.now_s = 1060.0
        assert not collection.advance()  # condemned, moved aside, and waiting for the second time
        assert files(store_path, "trash")
        clock.now_s = 1120.0
        assert collection.advance() and not files(store_path, "trash")
    check_steps(store_path, trees([3]))


def test_lease_of_an_older_read_is_waited_for_and_one_of_a_newer_is_not(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        reader = Leases(str(store_path), store._system, is_silent=False)
        with reader.hold(store._keeper.applied().seq):
            collection = begin(store)
            assert not collection.advance() and held_back(store_path)
        with reader.hold(store._keeper.catch_up()):
            assert not collection.advance()
            assert not held_back(store_path) and files(store_path, "trash")  # the second gate is younger than that read
        assert collection.advance()


def test_lease_whose_counter_stands_still_dies_and_one_that_moves_lives(store_path: Path) -> None:
    clock = Clock()
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=clock)
    with open_store(store_path, system=system) as store:
        commit(store, 1, 2, 3)
        reader = Leases(str(store_path), system, is_silent=False)
        with reader.hold(0):
            collection = begin(store)
            for _ in range(20):
                clock.now_s += LEASE_PULSE_S
                reader.pulse()
                assert not collection.advance() and held_back(store_path)
            clock.now_s += LEASE_TIMEOUT_S - 1
            assert not collection.advance()
            clock.now_s += 1
            assert collection.advance() or collection.advance()
    check_steps(store_path, trees([3]))


def test_lease_that_moved_while_files_were_removed_is_not_taken_away(store_path: Path) -> None:
    """Unlinking many files takes time, in which nobody looks at leases."""
    clock = Clock()

    class Slow(UnsyncedFileSystem):
        def perform(self, operation: Operation, act: Any) -> Any:
            if operation.name == "unlink" and "/trash/" in operation.path:
                clock.now_s += LEASE_TIMEOUT_S
                reader.pulse()
            return super().perform(operation, act)

    system = System(file_system=Slow(), monotonic_s=clock)
    with open_store(store_path, system=system) as store:
        commit(store, 1, 2, 3)
        reader = Leases(str(store_path), system, is_silent=False)
        collection = begin(store)
        assert not files(store_path, "leases")
        with reader.hold(10**6):  # younger than all gates
            while not collection.advance():
                pass
            assert not held_back(store_path) and len(files(store_path, "leases")) == 1
        assert not files(store_path, "leases")
    check_steps(store_path, trees([3]))


def test_lease_of_a_killed_process_ends_at_once_although_a_forked_child_lives(store_path: Path) -> None:
    """G21."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
        program = (
            "import os, sys, time\n"
            "from casckpt.storage.process import System\n"
            "from casckpt.store.leases import Leases\n"
            f"lease = Leases({str(store_path)!r}, System(), is_silent=False).hold(0)\n"
            "lease.__enter__()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    sys.stdin.read()\n"
            "    os._exit(0)\n"
            "print(child, flush=True)\n"
            "sys.stdin.read()\n"
        )
        learner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert learner.stdout is not None and learner.stdin is not None
        child = int(learner.stdout.readline())
        collection = begin(store)
        assert not collection.advance() and held_back(store_path)
        os.kill(learner.pid, signal.SIGKILL)
        learner.wait()
        os.kill(child, 0)  # it lives
        assert collection.advance()
        learner.stdin.close()  # the child's input ends, too
        learner.stdout.close()
    assert files(store_path, "leases") == []
    check_steps(store_path, trees([3]))


def test_read_only_handle_writes_no_lease_and_is_given_the_grace_time(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
    clock = Clock()
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=clock)
    with open_store(store_path, system=system) as store, open_store(store_path, read_only=True) as reader:
        collection = begin(store, grace_s=60.0)
        assert not collection.advance()
        assert difference(tree(1), reader.restore(1)) is None and not files(store_path, "leases")
        assert (store.protection, reader.protection) == ("lease", "grace")
        clock.now_s += 60
        assert not collection.advance()
        clock.now_s += 60
        assert collection.advance()


def test_handle_that_cannot_write_a_lease_says_so(store_path: Path) -> None:
    with open_store(store_path) as store:
        commit(store, 1)
    disk = FailingFileSystem(
        UnsyncedFileSystem(), fail_at=1, error=errno.ENOSPC, is_forever=True, operations={"create", "make_folder"}
    )
    with open_store(store_path, system=System(file_system=disk)) as reader:
        assert reader.protection == "lease"
        assert difference(tree(1), reader.restore(1)) is None
        assert reader.protection == "grace"


def test_handle_whose_lease_is_left_empty_says_so(store_path: Path) -> None:
    """A full disk often has room for a name and none for sixteen bytes."""
    with open_store(store_path) as store:
        commit(store, 1)
    disk = FailingFileSystem(
        UnsyncedFileSystem(), fail_at=1, error=errno.ENOSPC, is_forever=True, operations={"write", "preallocate"}
    )
    with open_store(store_path, system=System(file_system=disk)) as reader:
        assert difference(tree(1), reader.restore(1)) is None
        assert reader.protection == "grace"


def test_lease_that_was_taken_for_dead_is_back_when_its_reader_goes_on(store_path: Path) -> None:
    clock = Clock()
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=clock)
    store_path.mkdir()
    leases = Leases(str(store_path), system, is_silent=False)
    with leases.hold(7):
        (name,) = files(store_path, "leases")
        (store_path / name).unlink()
        clock.now_s += LEASE_PULSE_S
        leases.pulse()
        assert files(store_path, "leases") == [name]
        assert list(read_leases(system.file_system, str(store_path)).values()) == [(7, 1)]
    assert files(store_path, "leases") == []


def test_comparison_holds_a_lease_while_it_reads(store_path: Path) -> None:
    seen: list[list[str]] = []

    class Watching(UnsyncedFileSystem):
        def perform(self, operation: Operation, act: Any) -> Any:
            if operation.name == "open" and "/packs/" in operation.path:
                seen.append(files(store_path, "leases"))
            return super().perform(operation, act)

    with open_store(store_path) as store:
        commit(store, 1, 2)
    with open_store(store_path, create=False, system=System(file_system=Watching())) as store:
        seen.clear()
        assert not store.diff(1, 2).is_equal
    assert seen and all(len(each) == 1 for each in seen)


class StoppingFileSystem(UnsyncedFileSystem):
    """Stops before the first pack is opened, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reading, self.may_go_on = threading.Event(), threading.Event()

    def perform(self, operation: Operation, act: Any) -> Any:
        if operation.name == "open" and "/packs/" in operation.path and threading.current_thread().name == "reader":
            self.is_reading.set()
            self.may_go_on.wait(200)
        return super().perform(operation, act)


@pytest.mark.parametrize("waits", [True, False], ids=["for the lease", "not long enough"])
def test_restore_that_began_before_is_exact_or_a_typed_error(store_path: Path, waits: bool) -> None:
    """G07: while a restore is under way its lease holds the collection back; where the lease is ignored (its counter
    stands still), what is missing is an error that says so."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
    disk, clock = StoppingFileSystem(), Clock()
    found: list[Any] = []

    def restore(reader: Any) -> None:
        try:
            found.append(reader.restore(2))
        except CasckptError as error:
            found.append(error)

    with (
        open_store(store_path, system=System(file_system=disk)) as reader,
        open_store(store_path, run="c", system=System(file_system=UnsyncedFileSystem(), monotonic_s=clock)) as store,
    ):
        store.run = "main"
        thread = threading.Thread(target=restore, args=(reader,), name="reader")
        thread.start()
        assert disk.is_reading.wait(200)
        collection = begin(store)
        assert not collection.advance() and held_back(store_path)
        if not waits:
            clock.now_s += LEASE_TIMEOUT_S
            assert collection.advance() or collection.advance()
        disk.may_go_on.set()
        thread.join(200)
        while not collection.advance():
            clock.now_s += 1
    if waits:
        assert difference(tree(2), found[0]) is None
    else:
        assert isinstance(found[0], LookupError) and "collector" in str(found[0])


def test_leases_are_read_as_they_were_written(store_path: Path) -> None:
    clock = Clock()
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=clock)
    store_path.mkdir()
    leases = Leases(str(store_path), system, is_silent=False)
    with leases.hold(7), leases.hold(9):
        assert sorted(read_leases(system.file_system, str(store_path)).values()) == [(7, 0), (9, 0)]
        clock.now_s += LEASE_PULSE_S
        leases.pulse()
        assert sorted(read_leases(system.file_system, str(store_path)).values()) == [(7, 1), (9, 1)]
    assert read_leases(system.file_system, str(store_path)) == {}
