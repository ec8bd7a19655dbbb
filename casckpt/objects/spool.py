"""Chunks that were read, kept in files of the reader's own: who is killed in a long read does not read them again.

A spool is a family of files, `<path>-<random>`, outside of any store: one per attempt, so that none continues what a
kill left half written. A record is the chunk's address, its size, and its plain bytes. Nothing is synced and nothing is
believed: what comes out is hashed again, and what does not fit its address is read from the store after all. A spool
that cannot be written any more stays as it is.
"""

from __future__ import annotations

import contextlib
import struct
import threading

from casckpt.digest import digest
from casckpt.errors import StorageError
from casckpt.ids import ObjectId
from casckpt.limits import OBJECT_SIZE_MAX
from casckpt.storage.fs import File
from casckpt.storage.process import System

_HEADER = struct.Struct("<32sI")


class Spool:
    """What earlier attempts read, and what this one reads. Thread-safe.

    Args:
        path: of the family; the files lie beside one another.
    """

    def __init__(self, path: str, *, system: System | None = None) -> None:
        self._system = system or System()
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[ObjectId, tuple[File, int, int]] = {}
        self._old = [self._system.file_system.open(each) for each in self._paths()]
        for file in self._old:
            self._index(file)
        self._file: File | None = None
        self._size = 0
        with contextlib.suppress(StorageError):
            self._file = self._system.file_system.create(f"{path}-{self._system.random_bytes(8).hex()}")

    def __len__(self) -> int:
        """How many chunks it has."""
        return len(self._places)

    def __contains__(self, object_id: ObjectId) -> bool:
        return object_id in self._places

    def _paths(self) -> list[str]:
        folder, _, name = self._path.rpartition("/")
        names = self._system.file_system.list(folder or ".")
        return [f"{folder or '.'}/{each}" for each in sorted(names) if each.startswith(f"{name}-")]

    def _index(self, file: File) -> None:
        """Find the records of an earlier attempt; the last one may be half there."""
        header, offset, end = bytearray(_HEADER.size), 0, file.size()
        while offset + _HEADER.size <= end and file.read_into(header, offset) == _HEADER.size:
            object_id, size = _HEADER.unpack(header)
            offset += _HEADER.size
            if size > OBJECT_SIZE_MAX or offset + size > end:
                return
            self._places[ObjectId(object_id)] = file, offset, size
            offset += size

    def get(self, object_id: ObjectId, out: memoryview) -> bool:
        """Fill `out` with a chunk; false when it is not here, or not what its address says."""
        found = self._places.get(object_id)
        if found is None or found[2] != len(out):
            return False
        with contextlib.suppress(StorageError):
            file, offset, size = found
            return file.read_into(out, offset) == size and digest(out) == object_id
        return False

    def add(self, object_id: ObjectId, plain: memoryview) -> None:
        """Keep a chunk that was hashed; on a disk that is full, no more."""
        with self._lock:
            if self._file is None or object_id in self._places:
                return
            try:
                self._file.write([_HEADER.pack(object_id, len(plain)), plain], self._size)
            except StorageError:
                self._file.close()
                self._file = None
                return
            self._places[object_id] = self._file, self._size + _HEADER.size, len(plain)
            self._size += _HEADER.size + len(plain)

    def close(self) -> None:
        """Let go of the files; they stay for the next attempt."""
        with self._lock:
            for file in [*self._old, *([] if self._file is None else [self._file])]:
                file.close()
            self._old, self._file = [], None
            self._places.clear()

    def remove(self) -> None:
        """Close it, and remove what all attempts kept."""
        self.close()
        for path in self._paths():
            with contextlib.suppress(StorageError, FileNotFoundError):
                self._system.file_system.unlink(path)
