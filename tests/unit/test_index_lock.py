"""The lock between writers: who waits, for how long, and what the loser is told."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from casckpt.errors import BusyError, InvalidInputError, StorageError
from casckpt.index.lock import Holder, WriteLock


class Time:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s


def lock_at(path: Path, time: Time) -> WriteLock:
    return WriteLock(str(path), clock=time.clock, sleep=time.sleep, wall_clock=lambda: 86400.5)


def test_the_loser_waits_exactly_its_timeout_and_learns_who_holds_it(tmp_path: Path) -> None:
    time = Time()
    held, other = lock_at(tmp_path / "lock", time), lock_at(tmp_path / "lock", time)
    with held.hold(), pytest.raises(BusyError) as caught, other.hold(timeout_s=1.5):
        pass
    assert sum(time.pauses) == pytest.approx(1.5)
    assert max(time.pauses) <= 0.02
    expected = Holder(os.getpid(), os.uname().nodename, threading.current_thread().name, 86400.5)
    assert (caught.value.holder, caught.value.timeout_s) == (expected, 1.5)
    assert f"held by process {os.getpid()} on {os.uname().nodename}" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).holder == expected  # noqa: S301
    with other.hold(timeout_s=0):
        pass


def test_a_timeout_of_zero_tries_once(tmp_path: Path) -> None:
    time = Time()
    with lock_at(tmp_path / "lock", time).hold(), pytest.raises(BusyError), lock_at(tmp_path / "lock", time).hold(0):
        pass
    assert time.pauses == []


def test_an_exception_in_the_block_releases_it(tmp_path: Path) -> None:
    lock = lock_at(tmp_path / "lock", Time())
    with pytest.raises(ZeroDivisionError), lock.hold():
        raise ZeroDivisionError
    with lock.hold(0):
        pass


def test_holding_it_twice_in_a_thread_is_refused_at_once_and_keeps_it(tmp_path: Path) -> None:
    lock = lock_at(tmp_path / "lock", Time())
    with lock.hold():
        with pytest.raises(InvalidInputError, match="would wait for itself"), lock.hold():
            pass
        with pytest.raises(BusyError), lock_at(tmp_path / "lock", Time()).hold(0):
            pass


def test_threads_that_share_one_lock_exclude_each_other(tmp_path: Path) -> None:
    lock = WriteLock(str(tmp_path / "lock"))
    inside, most = [], []

    def work() -> None:
        for _ in range(100):
            with lock.hold():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (800, 1)


@pytest.mark.parametrize("content", [b"", b"\xff" * 300, b"{}", b'{"pid": "x"}', b"[" * 300])
def test_an_unreadable_note_is_no_holder_and_no_obstacle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    lock = lock_at(tmp_path / "lock", Time())
    assert lock.holder() is None
    with lock.hold(0):
        assert lock.holder() is not None


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "target")


@pytest.mark.parametrize("make", [make_folder, make_link, os.mkfifo])
def test_what_is_no_plain_file_is_refused_without_hanging(tmp_path: Path, make) -> None:
    make(tmp_path / "lock")
    with pytest.raises(StorageError, match=r"lock file .*lock: "), lock_at(tmp_path / "lock", Time()).hold(0):
        pass
    assert not (tmp_path / "target").exists()


def test_a_folder_that_is_gone_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"), lock_at(tmp_path / "none/lock", Time()).hold():
        pass


def test_a_waiter_does_not_take_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    path, time = tmp_path / "lock", Time()
    old_holder = lock_at(path, time).hold()
    old_holder.__enter__()

    def replace_then_release(pause_s: float) -> None:
        time.now_s += pause_s
        if not time.pauses:
            path.rename(tmp_path / "aside")
            old_holder.__exit__(None, None, None)
        time.pauses.append(pause_s)

    waiter = WriteLock(str(path), clock=time.clock, sleep=replace_then_release)
    with waiter.hold(timeout_s=1), pytest.raises(BusyError), lock_at(path, time).hold(0):
        pass
    assert path.exists()
