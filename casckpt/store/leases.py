"""Leases: files that say "somebody reads here, and began at this entry", so that a collector waits.

A lease is a small file in `leases/`, named like a temporary file after machine, process and start time. It holds the
last timeline entry that the reader had applied when it began, and a counter that the reader raises while it makes
progress. An observer calls a lease dead when its process is gone, or when the counter has stood still for
LEASE_TIMEOUT_S of the observer's *own* clock: no time is compared between machines, and a forked child, which raises
no counter, keeps nothing alive.

A lease protects from a collector's sweep, nothing else; a reader without one (read-only media, a full disk) is
protected by the collector's grace time alone. Nothing here is synced: a lease must not outlive a crash.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from casckpt.errors import StorageError
from casckpt.limits import LEASE_PULSE_S
from casckpt.storage.fs import File, FileSystem, read_file
from casckpt.storage.process import System

LEASES = "leases"
_CONTENT = struct.Struct("<QQ")  # entry, counter


class Lease(NamedTuple):
    """A lease as an observer finds it: the entry at which its holder began, and its counter."""

    seq: int
    counter: int


class Leases:
    """The leases of one store handle. Thread-safe.

    Args:
        root: the store's folder.
        system: file system, clock and identity.
        is_silent: write nothing, as a read-only handle promised.
    """

    def __init__(self, root: str, system: System, *, is_silent: bool) -> None:
        self._root = root
        self._system = system
        self._is_silent = is_silent
        self._has_failed = False
        self._held: dict[str, tuple[File, int]] = {}
        self._counter = 0
        self._pulsed_s = 0.0
        self._lock = threading.Lock()

    @property
    def protection(self) -> str:
        """What a collector gives the reads of this handle: "lease" or "grace", see `Store.protection`."""
        return "grace" if self._is_silent or self._has_failed else "lease"

    @contextlib.contextmanager
    def hold(self, seq: int) -> Iterator[None]:
        """Say that a read that began at entry `seq` is under way; costs one small file, not synced.

        Where the file cannot be made the read goes on without it.
        """
        path, pid = self._take(seq), os.getpid()
        try:
            yield
        finally:
            if path is not None and os.getpid() == pid:
                self._let_go(path)

    def _take(self, seq: int) -> str | None:
        if self._is_silent:
            return None
        fs = self._system.file_system
        path = self._system.lease_path(self._root)
        try:
            try:
                file = fs.create(path)
            except FileNotFoundError:
                fs.make_folder(f"{self._root}/{LEASES}")
                file = fs.create(path)
        except (StorageError, FileNotFoundError):
            self._has_failed = True
            return None
        self._has_failed = False
        with self._lock:
            self._held[path] = file, seq
        try:
            file.write([_CONTENT.pack(seq, self._counter)], 0)
        except StorageError:
            self._has_failed = True  # an empty one is waited for until it is taken for dead; do not count on more
        return path

    def _let_go(self, path: str) -> None:
        with self._lock:
            file, _ = self._held.pop(path)
            with contextlib.suppress(StorageError):
                file.close()
        with contextlib.suppress(StorageError, FileNotFoundError):
            self._system.file_system.unlink(path)

    def pulse(self) -> None:
        """Say that reads go on. Called for every chunk; writes every LEASE_PULSE_S at most."""
        now_s = self._system.monotonic_s()
        if not self._held or now_s - self._pulsed_s < LEASE_PULSE_S:
            return
        fs = self._system.file_system
        with self._lock:
            self._pulsed_s = now_s
            self._counter += 1
            for path, (file, seq) in self._held.items():
                with contextlib.suppress(StorageError, FileNotFoundError):
                    if fs.size(path) is None:  # it stood still for so long that a collector took it away
                        file.close()
                        file = fs.create(path)
                        self._held[path] = file, seq
                    file.write([_CONTENT.pack(seq, self._counter)], 0)


def read_leases(fs: FileSystem, root: str) -> dict[str, Lease]:
    """All leases by name. One that is being made, and cannot be read yet, began at entry 0.

    Raises:
        StorageError: the folder or a file in it cannot be read now.
    """
    found = {}
    for name in fs.list(f"{root}/{LEASES}"):
        try:
            content = read_file(fs, f"{root}/{LEASES}/{name}", 4 * _CONTENT.size)
        except FileNotFoundError:
            continue  # let go of meanwhile
        found[name] = Lease(*_CONTENT.unpack(content)) if len(content) == _CONTENT.size else Lease(0, 0)
    return found
