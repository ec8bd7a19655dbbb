"""Stores for tests of behaviour: real files and a real index, without waiting for the disk.

What a crash leaves is the business of `tests/crash`; here a sync would cost most of the time and decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import casckpt
from casckpt.storage.fs import LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.wrapping import Operation, WrappedFileSystem

T = TypeVar("T")


class UnsyncedFileSystem(WrappedFileSystem):
    """The real file system, with syncs that only say that they were asked for."""

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        return self.skip(operation) if operation.name in ("sync", "sync_folder") else act()

    def skip(self, operation: Operation) -> Any:
        """Called for every sync that is left out."""


def open_store(path: Any, **options: Any) -> Any:
    """`casckpt.open` on a file system without syncs; makes the store unless told otherwise.

    Locks are waited for so long that only a hang takes longer, on a busy machine too.
    """
    options.setdefault("lock_timeout_s", 300.0)
    options.setdefault("create", not options.get("read_only"))
    options.setdefault("system", System(file_system=UnsyncedFileSystem()))
    return casckpt.open(path, **options)
