"""File systems that go wrong at the n-th operation.

Operations are counted from 1 in the order they start. A sweep raises n until `was_hit` stays false::

    for n in itertools.count(1):
        disk = FailingFileSystem(LocalFileSystem(), fail_at=n, error=errno.EIO)
        ...                       # the workload, on `disk`
        if not disk.was_hit:
            break

`close` is not counted: by the time of a close everything that must be durable was synced, and a failing close of a
clean descriptor has no consequence that a test could look for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from casckpt.errors import StorageError
from casckpt.storage.fs import FileSystem, typed_error
from casckpt.testing.wrapping import MUTATING, Operation, WrappedFileSystem

T = TypeVar("T")

COUNTED = MUTATING - {"close"}
_FREES_SPACE = frozenset({"unlink", "truncate"})


class CountingFileSystem(WrappedFileSystem):
    """Does at the `at`-th operation what a subclass says in `strike`; counts, and does nothing, by itself.

    Args:
        inner: the file system that works.
        at: number of the operation to strike, from 1; 0 for none.
        operations: which operations count (names as in `Operation.name`).

    Attributes:
        count: operations so far.
        struck: the operation that was struck, or None.
    """

    def __init__(self, inner: FileSystem, *, at: int = 0, operations: Collection[str] = COUNTED) -> None:
        super().__init__(inner)
        self.count = 0
        self.struck: Operation | None = None
        self._at = at
        self._operations = operations
        self._lock = threading.Lock()

    @property
    def was_hit(self) -> bool:
        """Whether the operation number `at` was reached."""
        return self.struck is not None

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name not in self._operations:
            return act()
        with self._lock:
            self.count += 1
            is_struck = self.count == self._at
            if is_struck:
                self.struck = operation
        return cast(T, self.strike(operation, act)) if is_struck else self.pass_by(operation, act)

    def strike(self, operation: Operation, act: Callable[[], Any]) -> Any:
        """What happens at the chosen operation."""
        return act()

    def pass_by(self, operation: Operation, act: Callable[[], T]) -> T:
        """What happens at every other counted operation."""
        return act()


class FailingFileSystem(CountingFileSystem):
    """The `fail_at`-th operation fails with `error`, and all later ones too when `is_forever`.

    A full disk still gives up space: `unlink` and `truncate` keep working after the first failure. A file whose sync
    failed fails every later sync with the same error, as `storage.File` demands.

    Args:
        inner: the file system that works.
        fail_at: number of the first operation that fails.
        error: errno of the failure.
        is_forever: later operations fail too.
        has_short_writes: a failing write stores the first half of its bytes before it fails.
        operations: which operations count.
    """

    def __init__(
        self,
        inner: FileSystem,
        *,
        fail_at: int,
        error: int,
        is_forever: bool = False,
        has_short_writes: bool = False,
        operations: Collection[str] = COUNTED,
    ) -> None:
        super().__init__(inner, at=fail_at, operations=operations)
        self._error = error
        self._is_forever = is_forever
        self._has_short_writes = has_short_writes
        self._sync_failures: dict[int, StorageError] = {}

    def strike(self, operation: Operation, act: Callable[[], Any]) -> Any:
        if operation.name == "write" and self._has_short_writes and operation.file is not None:
            operation.file.write([operation.data[: len(operation.data) // 2]], operation.offset)
        cause = OSError(self._error, os.strerror(self._error))
        failure = typed_error(cause, operation.name, operation.target or operation.path)
        if operation.name == "sync":
            self._sync_failures[operation.file_id] = failure
        raise failure from cause

    def pass_by(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name == "sync" and operation.file_id in self._sync_failures:
            raise self._sync_failures[operation.file_id]
        if self.was_hit and self._is_forever and operation.name not in _FREES_SPACE:
            self.strike(operation, act)
        return act()


class InterruptingFileSystem(CountingFileSystem):
    """A real SIGINT arrives right before the chosen operation, in whatever thread that runs.

    Python runs the handler, and so raises KeyboardInterrupt, in the main thread: at once when the operation is its
    own, at its next instruction or wait otherwise. Use it from the main thread.
    """

    def strike(self, operation: Operation, act: Callable[[], Any]) -> Any:
        signal.raise_signal(signal.SIGINT)
        return act()


class LyingFileSystem(CountingFileSystem):
    """The chosen write reports success but does something else. Give `operations={"write"}` to count only writes.

    Args:
        inner: the file system that works.
        lie_at: number of the write, from 1.
        lie: "flip" turns over one bit; "lose" stores zeros from there on.
        position: where in the write, from 0 to 1.
    """

    def __init__(self, inner: FileSystem, *, lie_at: int, lie: str, position: float = 0.5) -> None:
        super().__init__(inner, at=lie_at, operations=frozenset({"write"}))
        self._lie = lie
        self._position = position

    def strike(self, operation: Operation, act: Callable[[], Any]) -> Any:
        content = bytearray(operation.data)
        at = int(len(content) * self._position)
        if self._lie == "lose":
            content[at:] = bytes(len(content) - at)
        elif content:
            content[at] ^= 0x10
        assert operation.file is not None
        return operation.file.write([content], operation.offset)
