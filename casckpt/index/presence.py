"""Which processes have an index folder open: one small file each, held under the operating system's lock.

A file `use-<pid>-<nonce>` that is locked belongs to a living process; one that is not, to a process that died without
closing. It appears under its name already locked, so nobody ever sees a living owner's file unlocked. The last act of
a well-behaved user is to seal the data file (see `health`) and to remove its own mark.
"""

from __future__ import annotations

import contextlib
import os
import weakref

from casckpt.errors import BusyError, StorageError
from casckpt.index.health import seal
from casckpt.index.lmdb_kv import DATA_NAME, WRITE_LOCK_NAME
from casckpt.index.lock import FORK_GATE, SAFE_FLAGS, WriteLock, try_lock

_PREFIX = "use-"


class FolderPresence:
    """This process's mark in `folder`.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._fd = -1
        _ALL_MARKS.add(self)
        self.renew()

    def renew(self) -> None:
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        unseen = os.path.join(self._folder, f"new-{name}")
        with FORK_GATE:
            self._fd = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE_FLAGS, 0o666)
        try_lock(self._fd)
        self._path = os.path.join(self._folder, _PREFIX + name)
        os.rename(unseen, self._path)

    def leave(self) -> None:
        """Seal the data file unless someone is writing (they will), then remove the mark."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError, BusyError, StorageError), self._writers_kept_out():
            seal(os.path.join(self._folder, DATA_NAME))
        self.abandon()

    def abandon(self) -> None:
        """Remove the mark of an open that failed; the seal stays as it was found."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._close()

    def is_own(self, path: str) -> bool:
        return path == self._path

    def _writers_kept_out(self) -> contextlib.AbstractContextManager[None]:
        return WriteLock(os.path.join(self._folder, WRITE_LOCK_NAME)).hold(timeout_s=0)

    def _close(self) -> None:
        with FORK_GATE:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


_ALL_MARKS: weakref.WeakSet[FolderPresence] = weakref.WeakSet()


def users_of(folder: str, own: FolderPresence | None = None) -> tuple[bool, list[str]]:
    """Whether a living process other than `own` has `folder` open, and the marks of dead ones."""
    has_living, dead = False, []
    with os.scandir(folder) as found:
        paths = [entry.path for entry in found if entry.name.startswith(_PREFIX)]
    for path in paths:
        if own is not None and own.is_own(path):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            continue  # its owner left between the listing and now
        try:
            if try_lock(fd, shared=True):  # shared: two who look at once must not take each other for the owner
                dead.append(path)
            else:
                has_living = True
        finally:
            os.close(fd)
    return has_living, dead


def _forget_in_child() -> None:
    for mark in list(_ALL_MARKS):
        mark._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
