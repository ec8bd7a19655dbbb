"""The lock between writers, in one process and between processes, that says who holds it.

One small file; whoever has the operating system's lock on it (flock; msvcrt on Windows) is the holder. The kernel lets
go when the holder dies, so a lock of a killed process is free at once, and one of a stopped process is not: others get
`BusyError` after their timeout. The file's text names the holder; it is a note for people and decides nothing.

* Each acquisition opens a descriptor of its own, closed on release, so threads exclude each other as processes do; a
  thread lock in front only saves them the polling.
* A forked child closes its copy at once: it never keeps its parent's lock alive. (The kernel's lock belongs to the
  open file, which both share; so no fork may fall between opening a descriptor and noting it: `FORK_GATE`.)
* The file is opened without following links, and is never removed by this layer.

Works on local file systems; the index lives nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from casckpt import limits
from casckpt.errors import BusyError, StorageError
from casckpt.index.kv import nested_write

_RECORD_SIZE = 256  # the holder's note: one fixed-size write, so a reader never sees half of two
_HOST = socket.gethostname()[:64]
_POLL_S = (0.0005, 0.02)  # first and longest pause between two tries


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock: process, host, thread name and since when (seconds since 1970)."""

    pid: int
    host: str
    thread: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} (thread {self.thread}) since {since}"


class WriteLock:
    """An exclusive lock on the file at `path`, made when it is first needed. Threads may share one object."""

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float = limits.LOCK_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._timeout_s, self._clock, self._sleep, self._wall_clock = timeout_s, clock, sleep, wall_clock
        self._forget()
        _ALL_LOCKS.add(self)

    def _forget(self) -> None:
        self._fd = -1
        self._owner: int | None = None
        self._thread_lock = threading.Lock()

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock for the block. Costs about 20 µs when it is free.

        Args:
            timeout_s: how long to wait; 0 tries once; None takes the lock's own default.

        Raises:
            BusyError: someone else held it all the time (`holder`, `timeout_s`, `path`).
            InvalidInputError: this thread holds it already.
            StorageError: the lock file cannot be opened.
        """
        if self._owner == threading.get_ident():
            raise nested_write()
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = self._clock() + wait_s
        process = os.getpid()
        try:
            self._take(deadline, wait_s)
            yield
        finally:
            if os.getpid() == process:  # a child that forked inside the block has been made to forget it already
                self._release()

    def holder(self) -> Holder | None:
        """Who took the lock last, as the file says; None when it says nothing readable."""
        try:
            fd = os.open(self.path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            return None
        try:
            return msgspec.json.decode(os.read(fd, _RECORD_SIZE), type=Holder)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None
        finally:
            os.close(fd)

    def _take(self, deadline: float, wait_s: float) -> None:
        if not self._thread_lock.acquire(timeout=max(0.0, wait_s)):
            raise self._busy(wait_s)
        self._owner = threading.get_ident()
        pause_s = _POLL_S[0]
        while not self._try_once():
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise self._busy(wait_s)
            self._sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_S[1])
        self._note_holder()

    def _try_once(self) -> bool:
        with FORK_GATE:
            self._fd = self._open()
        try:
            is_mine = try_lock(self._fd) and _is_still_at(self._fd, self.path)
        except OSError as error:
            raise self._unusable(error.errno or 0, error.strerror or str(error)) from error
        if not is_mine:
            self._close()
        return is_mine

    def _release(self) -> None:
        if self._owner == threading.get_ident():
            self._close()
            self._owner = None
            self._thread_lock.release()

    def _close(self) -> None:
        with FORK_GATE:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | SAFE_FLAGS, 0o666)
        except OSError as error:
            raise self._unusable(error.errno or 0, error.strerror or str(error)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._unusable(0, "not a regular file")
        return fd

    def _unusable(self, errno: int, reason: str) -> StorageError:
        return StorageError(
            f"lock file {self.path}: {reason}. Check that its folder is writable.",
            errno=errno,
            path=self.path,
            index_path=self.path,
        )

    def _note_holder(self) -> None:
        thread = threading.current_thread().name[:64].encode("ascii", "replace").decode()
        holder = Holder(os.getpid(), _HOST, thread, self._wall_clock())
        record = msgspec.json.encode(holder).ljust(_RECORD_SIZE)
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only nameless
            os.write(self._fd, record)  # the descriptor is fresh: offset 0

    def _busy(self, wait_s: float) -> BusyError:
        holder = self.holder()
        return BusyError(
            f"lock {self.path}: not obtained within {wait_s:g} s; held by {holder or 'a process that left no name'}. "
            "Nothing was changed. Continue or end that process, then try again.",
            holder=holder,
            timeout_s=wait_s,
            path=self.path,
            index_path=self.path,
        )


SAFE_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOINHERIT", 0)
)  # no links, no inheritance, no waiting for the other end of a FIFO
FORK_GATE = (
    threading.RLock()  # where it is held, the garbage collector may close an index that nobody uses any more
)  # held where a descriptor that carries a lock is open but nowhere noted: no fork in between
_ALL_LOCKS: weakref.WeakSet[WriteLock] = weakref.WeakSet()


if sys.platform == "win32":
    import msvcrt

    def try_lock(fd: int, *, shared: bool = False) -> bool:
        """Take the lock on an open file without waiting; Windows knows exclusive ones only."""
        os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the note: Windows locks keep others from reading the bytes
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        os.lseek(fd, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def try_lock(fd: int, *, shared: bool = False) -> bool:
        """Take the lock on an open file without waiting."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_still_at(fd: int, path: str) -> bool:
    """False when the file was renamed or replaced between open and lock: others would lock another file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _forget_in_child() -> None:
    FORK_GATE.release()
    for lock in list(_ALL_LOCKS):
        if lock._fd >= 0:
            os.close(lock._fd)
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=FORK_GATE.acquire, after_in_parent=FORK_GATE.release, after_in_child=_forget_in_child)
