"""A file system around another one, with a single choke point.

Every operation of `WrappedFileSystem` and of the files it opens goes through `perform`, as an `Operation` that says
what is about to happen and a callable that makes it happen. A double overrides `perform` and nothing else. Hints
(early write-back, cache advice) are passed on without asking: they may do nothing at any time, so no fault can be
made of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from casckpt.storage.fs import File, FileMap, FileSystem

T = TypeVar("T")

MUTATING = frozenset(
    {
        "create",
        "write",
        "preallocate",
        "truncate",
        "sync",
        "close",
        "rename",
        "link",
        "unlink",
        "make_folder",
        "sync_folder",
    }
)
READING = frozenset({"open", "read", "list", "size", "file_size"})


@dataclass(frozen=True)
class Operation:
    """One operation about to be performed.

    Attributes:
        name: a member of MUTATING or READING.
        path: what it works on; for `rename` and `link` the source.
        target: the second path of `rename` and `link`.
        file_id: identity of a file created through the double; -1 for names and for files opened to be read.
        offset: of a write or read, in bytes.
        size: bytes of a preallocation, truncation or read.
        data: content of a write.
        file: the wrapped file itself, for operations on an open file.
    """

    name: str
    path: str
    target: str = ""
    file_id: int = -1
    offset: int = 0
    size: int = 0
    data: bytes = field(default=b"", repr=False)
    file: File | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        what = f"{self.name} {self.path}"
        if self.target:
            what += f" -> {self.target}"
        return f"{what} [{self.offset}+{len(self.data)}]" if self.name == "write" else what


class WrappedFileSystem:
    """Passes everything to `inner`; subclasses decide in `perform`."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self._file_ids = itertools.count(1)

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        """Carry out `act`; a double may refuse, count, record or do something else instead."""
        return act()

    def create(self, path: str) -> WrappedFile:
        file_id = next(self._file_ids)
        return self.perform(
            Operation("create", path, file_id=file_id), lambda: WrappedFile(self, self.inner.create(path), file_id)
        )

    def open(self, path: str) -> WrappedFile:
        return self.perform(Operation("open", path), lambda: WrappedFile(self, self.inner.open(path), -1))

    def rename(self, source: str, target: str) -> None:
        self.perform(Operation("rename", source, target), lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self.perform(Operation("link", source, target), lambda: self.inner.link(source, target))

    def unlink(self, path: str) -> None:
        self.perform(Operation("unlink", path), lambda: self.inner.unlink(path))

    def make_folder(self, path: str) -> None:
        self.perform(Operation("make_folder", path), lambda: self.inner.make_folder(path))

    def list(self, path: str) -> list[str]:
        return self.perform(Operation("list", path), lambda: self.inner.list(path))

    def size(self, path: str) -> int | None:
        return self.perform(Operation("size", path), lambda: self.inner.size(path))

    def sync_folder(self, path: str) -> None:
        self.perform(Operation("sync_folder", path), lambda: self.inner.sync_folder(path))


class WrappedFile:
    """An open file of a `WrappedFileSystem`."""

    def __init__(self, owner: WrappedFileSystem, inner: File, file_id: int) -> None:
        self.path = inner.path
        self._owner = owner
        self._inner = inner
        self._file_id = file_id

    def _operation(self, name: str, *, offset: int = 0, size: int = 0, data: bytes = b"") -> Operation:
        return Operation(name, self.path, file_id=self._file_id, offset=offset, size=size, data=data, file=self._inner)

    def write(self, buffers: Sequence[Any], offset: int) -> int:
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        operation = self._operation("write", offset=offset, data=data)
        return self._owner.perform(operation, lambda: self._inner.write(buffers, offset))

    def read_into(self, buffer: Any, offset: int) -> int:
        operation = self._operation("read", offset=offset, size=len(buffer))
        return self._owner.perform(operation, lambda: self._inner.read_into(buffer, offset))

    def preallocate(self, size: int) -> None:
        self._owner.perform(self._operation("preallocate", size=size), lambda: self._inner.preallocate(size))

    def truncate(self, size: int) -> None:
        self._owner.perform(self._operation("truncate", size=size), lambda: self._inner.truncate(size))

    def start_writeback(self, offset: int, size: int) -> None:
        self._inner.start_writeback(offset, size)

    def drop_cache(self, offset: int, size: int) -> None:
        self._inner.drop_cache(offset, size)

    def sync(self) -> None:
        self._owner.perform(self._operation("sync"), self._inner.sync)

    def size(self) -> int:
        return self._owner.perform(self._operation("file_size"), self._inner.size)

    def map(self, offset: int, size: int) -> FileMap | None:
        return self._owner.perform(self._operation("map"), lambda: self._inner.map(offset, size))

    def close(self) -> None:
        self._owner.perform(self._operation("close"), self._inner.close)
