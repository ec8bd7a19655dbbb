"""A clock that tests move, and a store on a disk whose writes take time by that clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from casckpt.errors import OutOfSpaceError
from casckpt.storage.process import System
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")
GATE_TIMEOUT_S = 200.0


class Clock:
    """Monotonic seconds that only tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Disk(UnsyncedFileSystem):
    """By the clock, publishing an entry takes `publish_s` and writing a byte `byte_s`.

    Publishing waits while it is not `is_open`, or with `closed_to` the making of files by the thread of that name;
    publishing fails while it `is_full`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.publish_s = self.byte_s = 0.0
        self.is_full = False
        self.closed_to: str | None = None
        self.is_open = threading.Event()
        self.is_open.set()
        self.waiting = threading.Event()
        self._lock = threading.Lock()

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        self._spend(self.byte_s * len(operation.data))
        thread = threading.current_thread().name
        is_held = operation.name == "link" if self.closed_to is None else operation.name == "create"
        if is_held and self.closed_to in (None, thread):
            self.waiting.set()
            assert self.is_open.wait(GATE_TIMEOUT_S), "the disk stayed shut"
        if operation.name == "link":
            if self.is_full:
                raise OutOfSpaceError(f"{operation.path}: no space left", path=operation.path)
            self._spend(self.publish_s)
        return super().perform(operation, act)

    def _spend(self, seconds: float) -> None:
        with self._lock:  # threads of two saves write at the same time
            self.clock.now_s += seconds


def open_timed(path: Any, clock: Clock, disk: Disk, **options: Any) -> Any:
    """A store on this disk, under this clock."""
    return open_store(path, system=System(file_system=disk, monotonic_s=clock), **options)
