"""Ordered key-value tables with transactions: the substrate of the index.

A `Kv` holds a fixed set of named tables; each maps keys (1 to `KEY_SIZE_MAX` bytes) to values (any bytes, also none),
ordered by key. All access is inside a transaction:

    with kv.write() as txn:
        txn.put("objects", key, value)
    with kv.read() as txn:
        value = txn.get("objects", key)

* A read transaction sees the state of the moment it began. It may be open while another is written, in any thread.
* A write transaction excludes other writers, in this and other processes. It is applied as a whole when its block
  ends, and not at all when the block raises. The same thread may not nest two.
* Values are bytes of their own, never views into a map.
* Keep transactions short: a long reader keeps old pages of an LMDB file alive. `scan` fetches `SCAN_BATCH` entries at
  a time and holds no cursor between them; what a write transaction changes in a table while it scans that table may
  or may not show up in the rest of the scan.

`MemoryKv` is the simple implementation: the oracle for the other one, and the index where nothing can be written.
This file imports neither lmdb nor anything that does I/O.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from casckpt.errors import InvalidInputError

KEY_SIZE_MAX = 510  # LMDB's own bound (511) less the table's byte; the other implementation keeps to it
SCAN_BATCH = 1024  # entries fetched at a time by `scan`: tens of KiB


class KvReader(Protocol):
    """What a read transaction can do. Unknown tables raise `InvalidInputError`."""

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of `key`, or None."""

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in their order; about 1 µs each."""

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < stop in key order, or from the last to the first."""

    def count(self, table: str) -> int:
        """Number of entries; O(1)."""


class KvWriter(KvReader, Protocol):
    """What a write transaction can do besides; it reads its own writes."""

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set `key`, replacing what was there.

        Raises:
            InvalidInputError: the key is empty or longer than `KEY_SIZE_MAX`.
        """

    def put_many(self, table: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set all `items` (all held in memory), written in key order; of equal keys the last counts."""

    def delete(self, table: str, key: bytes) -> bool:
        """Remove `key`; True if it was there."""


class Kv(Protocol):
    """Named tables with transactions. Safe to use from several threads."""

    tables: tuple[str, ...]
    is_read_only: bool

    def read(self) -> AbstractContextManager[KvReader]:
        """A read transaction."""

    def write(self) -> AbstractContextManager[KvWriter]:
        """A write transaction, applied when its block ends without an exception.

        Raises:
            BusyError: another writer held the lock for the whole timeout.
            ReadOnlyError: this Kv only reads.
            StorageError: it could not be written; nothing of it is applied.
        """

    def close(self) -> None:
        """Release it; what has been written stays. Closing twice is harmless."""


def check_key(key: bytes) -> None:
    """Raise unless `key` may be stored."""
    if not 0 < len(key) <= KEY_SIZE_MAX:
        raise InvalidInputError(
            f"index key of {len(key)} bytes: expected 1 to {KEY_SIZE_MAX}. Use a shorter name.", key=bytes(key)
        )


def nested_write() -> InvalidInputError:
    """The error for a write transaction inside another one of the same thread: waiting for it would never end."""
    return InvalidInputError(
        "index write transaction inside another one of the same thread: it would wait for itself. "
        "Use the transaction that is open."
    )


def unknown_table(table: str, tables: Iterable[str]) -> InvalidInputError:
    """The error for a table that was not named when the Kv was made."""
    return InvalidInputError(f"index table {table!r} does not exist: expected one of {', '.join(tables)}.", table=table)


class Ended:
    """Stands for what a transaction worked on, once its block has ended."""

    def __getattr__(self, name: str) -> Any:
        raise InvalidInputError("index transaction used after its block ended. Begin a new one.")

    def __getitem__(self, table: str) -> Any:
        return self.__getattr__(table)


class MemoryKv:
    """Tables as dicts in this process. Forks get a copy; nothing is shared and nothing survives.

    A write transaction collects its changes beside the tables and applies them when it ends: in place, or to a copy
    where a reader still looks at the old state. `scan` sorts the keys on first use after a change: O(n log n).
    """

    is_read_only = False

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tuple(tables)
        self._entries = {table: _Entries({}) for table in self.tables}
        self._readers: list[dict[str, _Entries]] = []
        self._lock = threading.Lock()
        self._writing = _OneWriter()

    @contextmanager
    def read(self) -> Iterator[KvReader]:
        with self._lock:
            seen = dict(self._entries)
            self._readers.append(seen)
        txn = _MemoryReader(seen)
        try:
            yield txn
        finally:
            txn.end()
            with self._lock:
                self._readers = [reader for reader in self._readers if reader is not seen]

    @contextmanager
    def write(self) -> Iterator[KvWriter]:
        with self._writing:
            txn = _MemoryWriter(self._entries)
            try:
                yield txn
            except BaseException:
                txn.end()
                raise
            with self._lock:
                for table, changes in txn.end().items():
                    self._apply(table, changes)

    def _apply(self, table: str, changes: dict[bytes, bytes | None]) -> None:
        values = self._entries[table].values
        if self._readers:
            values = dict(values)
        for key, value in changes.items():
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
        self._entries[table] = _Entries(values)

    def close(self) -> None:
        self._entries = {table: _Entries({}) for table in self.tables}


class _OneWriter:
    """A lock that tells a thread that it already holds it, where waiting would never end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise nested_write()
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._owner = None
        self._lock.release()


class _Entries:
    """The entries of one table, and their sorted keys once someone scanned."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values = values
        self._sorted_keys: list[bytes] | None = None

    def sorted_keys(self) -> list[bytes]:
        if self._sorted_keys is None:
            self._sorted_keys = sorted(self.values)
        return self._sorted_keys


class _MemoryReader:
    def __init__(self, entries: dict[str, _Entries]) -> None:
        self._entries: Any = entries

    def end(self) -> None:
        self._entries = Ended()

    def _table(self, table: str) -> _Entries:
        try:
            entries: _Entries = self._entries[table]
        except KeyError:
            raise unknown_table(table, self._entries) from None
        return entries

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._table(table).values.get(key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        get = self._table(table).values.get
        return [get(key) for key in keys]

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        source = self._table(table)
        keys, values = source.sorted_keys(), source.values
        first = bisect_left(keys, start)
        last = len(keys) if stop is None else bisect_left(keys, stop)
        order = range(last - 1, first - 1, -1) if reverse else range(first, last)
        return ((keys[at], values[keys[at]]) for at in order)

    def count(self, table: str) -> int:
        return len(self._table(table).values)


class _MemoryWriter:
    """Reads through its own changes; None stands for a deleted key."""

    def __init__(self, entries: dict[str, _Entries]) -> None:
        self._base = _MemoryReader(entries)
        self._changes: Any = {table: {} for table in entries}

    def end(self) -> dict[str, dict[bytes, bytes | None]]:
        """The changes of each table; after it the transaction does nothing more."""
        changes: dict[str, dict[bytes, bytes | None]] = self._changes
        self._changes = Ended()
        return changes

    def _changed(self, table: str) -> dict[bytes, bytes | None]:
        try:
            changes: dict[bytes, bytes | None] = self._changes[table]
        except KeyError:
            raise unknown_table(table, self._changes) from None
        return changes

    def get(self, table: str, key: bytes) -> bytes | None:
        changes = self._changed(table)
        return changes[key] if key in changes else self._base.get(table, key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(table, key) for key in keys]

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        return self._merged(table).scan(table, start, stop, reverse=reverse)

    def count(self, table: str) -> int:
        return self._merged(table).count(table)

    def _merged(self, table: str) -> _MemoryReader:
        changes = self._changed(table)
        if not changes:
            return self._base
        values = {key: value for key, value in self._base.scan(table) if key not in changes}
        values.update((key, value) for key, value in changes.items() if value is not None)
        return _MemoryReader({table: _Entries(values)})

    def put(self, table: str, key: bytes, value: bytes) -> None:
        check_key(key)
        self._changed(table)[bytes(key)] = bytes(value)

    def put_many(self, table: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            self.put(table, key, value)

    def delete(self, table: str, key: bytes) -> bool:
        was_there = self.get(table, key) is not None
        self._changed(table)[bytes(key)] = None
        return was_there
