"""`Kv` on LMDB, and the only door to it.

LMDB forbids to open one environment twice in a process and to use one across fork; and it has no timeout. So:

* **One environment per process and folder.** A registry, keyed by real path and folder inode, counts its users.
* **Fork.** Before a fork, environments without a running transaction are closed (the fork waits `_FORK_WAIT_S` for
  other threads' transactions); parent and child each reopen on their next use. A child forked in the middle of a
  transaction keeps the inherited environment untouched for ever, because both closing it and ending its transactions
  would clear the parent's slots in the shared reader table; there, every use raises `BusyError`.
* **Writers** take a `WriteLock` beside the environment before LMDB's own mutex, so waiting ends and names the holder.
* **No fsync, no writable map.** What a process wrote survives its death; what a machine's crash leaves is never
  trusted (see `lifecycle`). Nothing here is durable, and nothing here is the truth.
* **lock.mdb is never opened by anything but LMDB** while an environment is open: closing any other descriptor of it
  would drop this process's locks.
* lmdb's exceptions do not leave this file: full disk or map -> `OutOfSpaceError`/`StorageError`, damage ->
  `CorruptionError`, too many readers or a foreign lock -> `BusyError`; each has `index_path`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

import lmdb

from casckpt import limits
from casckpt.errors import (
    BusyError,
    CasckptError,
    CorruptionError,
    OutOfSpaceError,
    ReadOnlyError,
    StorageError,
)
from casckpt.index.kv import SCAN_BATCH, Ended, KvReader, KvWriter, check_key, unknown_table
from casckpt.index.lock import WriteLock

DATA_NAME, LOCK_NAME, WRITE_LOCK_NAME = "data.mdb", "lock.mdb", "write.lock"
LMDB_HOME = os.path.dirname(os.path.dirname(os.path.abspath(lmdb.__file__)))  # where a probe's interpreter finds it
MAX_READERS = 126  # reader slots: transactions of all processes at one time; as LMDB has it, 64 bytes each
LOCK_FILE_SIZE = 64 * MAX_READERS + 4096  # LMDB keeps a longer lock file as it is
_MAP_SIZES = tuple(1 << bits for bits in (38, 35, 32, 30, 28))  # virtual; smaller where address space is limited
_FORK_WAIT_S = 1.0  # transactions are short; a fork that waits longer would look like a hang
_ENGINE: dict[str, Any] = (
    {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
)  # 0.9 files whatever the default

_COUNT_PREFIX, _TOKEN_KEY = b"\0", b"\0token"  # rows that belong to no table

_CORRUPTION = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.InvalidError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)
_BUSY = (lmdb.ReadersFullError, lmdb.LockError, lmdb.BadRslotError)


def prepare_folder(folder: str) -> None:
    """Write the lock file of a new environment in full, so that a full disk is an error here, not a bus error in LMDB.

    Raises:
        OSError: there is no room, or the file exists.
    """
    fd = os.open(
        os.path.join(folder, LOCK_NAME), os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666
    )
    try:
        zeros = memoryview(bytes(LOCK_FILE_SIZE))
        while zeros:
            zeros = zeros[os.write(fd, zeros) :]
    finally:
        os.close(fd)


T = TypeVar("T", bound="_Reader")


class Presence(Protocol):
    """What tells other processes that this one has a folder open."""

    def renew(self) -> None:
        """Say so again, in a forked child that goes on using the folder."""

    def leave(self) -> None:
        """Stop saying so: no transaction of this process is running or will be."""


class LmdbKv:
    """A `Kv` in the LMDB environment at `folder`, which must exist.

    Opening costs about 1 ms, or some µs when this process has it open already. A table is stored under its position in
    `tables`: that order is part of the index format. `check` runs before the environment is opened, only if this
    process does not have it open, and under the registry's lock: the one moment at which looking into lock.mdb is
    harmless.

    Raises:
        CorruptionError, StorageError, BusyError: the environment cannot be opened.
    """

    def __init__(
        self,
        folder: str,
        tables: Sequence[str],
        *,
        read_only: bool = False,
        use_lock_file: bool = True,
        check: Callable[[], None] | None = None,
        presence: Presence | None = None,
        lock_timeout_s: float = limits.LOCK_TIMEOUT_S,
    ) -> None:
        self.tables = tuple(tables)
        self._lock_timeout_s = lock_timeout_s
        self.is_read_only = read_only
        self._presence = presence
        self._process = os.getpid()
        self._environment = _Environment.acquire(folder, self.tables, read_only, use_lock_file, check)
        self._finalizer = weakref.finalize(self, self._environment.release, presence)  # also when nobody calls close

    @property
    def folder(self) -> str:
        """Where it lies."""
        return self._environment.folder

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return self._finalizer.alive

    def read(self) -> AbstractContextManager[KvReader]:
        return _Transaction(self, _Reader)

    @contextmanager
    def write(self, timeout_s: float | None = None) -> Iterator[KvWriter]:
        """A write transaction; `timeout_s` bounds the wait for other writers (default: what the Kv was opened with)."""
        timeout_s = self._lock_timeout_s if timeout_s is None else timeout_s
        if self.is_read_only:
            raise ReadOnlyError(
                f"index {self.folder}: opened read-only. Open the store without read_only=True to write."
            )
        environment = self._environment
        with environment.kept(), environment.write_lock.hold(timeout_s), _Transaction(self, _Writer) as txn:
            yield txn

    @property
    def token(self) -> bytes | None:
        """What `set_token` stored: tells this environment from another one that took its place, inode and all."""
        with _Transaction(self, _Reader) as txn, self._environment.typed:
            return txn.get_own(_TOKEN_KEY)

    def set_token(self, token: bytes) -> None:
        environment = self._environment
        with environment.kept(), environment.write_lock.hold(), _Transaction(self, _Writer) as txn, environment.typed:
            txn.put_own(_TOKEN_KEY, token)

    def fill_from(self, other: LmdbKv, token: bytes) -> None:
        """Take over all rows of another, and a token, in one transaction and in key order: pages come out full."""
        environment = self._environment
        with (
            environment.kept(),
            environment.write_lock.hold(),
            other.read() as rows,
            _Transaction(self, _Writer) as txn,
        ):
            for table in self.tables:
                txn.put_many(table, rows.scan(table))
            with environment.typed:
                txn.put_own(_TOKEN_KEY, token)

    @property
    def is_shared(self) -> bool:
        """Whether another handle of this process has it open too."""
        return self._environment.users > 1

    def page_counts(self) -> tuple[int, int]:
        """How many pages hold rows or are LMDB's own, and how many the data file has."""
        environment = self._environment
        handle = environment.enter(self)
        try:
            with environment.typed:
                found, last = handle.stat(), handle.info()["last_pgno"]
        finally:
            environment.leave()
        return 2 + sum(found[kind] for kind in ("branch_pages", "leaf_pages", "overflow_pages")), last + 1

    def close(self) -> None:
        self._finalizer()

    def __enter__(self) -> LmdbKv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Transaction(Generic[T]):
    """A transaction for the length of a block. A class, not a generator: a small commit reads some twenty times."""

    __slots__ = ("_kind", "_kv", "_txn")

    def __init__(self, kv: LmdbKv, kind: type[T]) -> None:
        self._kv, self._kind = kv, kind

    def __enter__(self) -> T:
        kv = self._kv
        environment = kv._environment
        handle = environment.enter(kv)
        try:
            with environment.typed:
                if kv._process != os.getpid():
                    if kv._presence is not None:
                        kv._presence.renew()
                    kv._process = os.getpid()
                self._txn = self._kind(handle, environment)
        except BaseException:
            environment.leave()
            raise
        return self._txn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._txn.end(commit=error is None)  # not inside `typed`: what the block raised is the caller's
        finally:
            self._kv._environment.leave()


class _Reader:
    """All tables share LMDB's main database: a key's first byte is its table's number, counted from 1.

    Named databases would have to be opened inside a write transaction, that is behind LMDB's mutex, which has no
    timeout. Under the byte 0 lie the tables' entry counts and the token.
    """

    is_writer = False

    def __init__(self, handle: Any, environment: _Environment) -> None:
        self._txn: Any = handle.begin(write=self.is_writer)
        self._environment, self._process = environment, os.getpid()
        self._typed, self._prefixes = environment.typed, environment.prefixes

    def end(self, *, commit: bool) -> None:
        """End LMDB's transaction and let go of it while its environment is surely open."""
        txn, self._txn = self._txn, Ended()
        try:
            if os.getpid() != self._process:
                self._environment.inherited.append(txn)
                if commit and self.is_writer:
                    raise _forked(self._environment.folder)
                return
            with self._typed:
                self._commit(txn) if commit and self.is_writer else txn.abort()
        finally:
            del txn  # a traceback would keep it

    def _commit(self, txn: Any) -> None:
        txn.commit()

    def get_own(self, row: bytes) -> bytes | None:
        """A row that belongs to no table."""
        value: bytes | None = self._txn.get(row)
        return value

    def _prefix(self, table: str) -> bytes:
        try:
            return self._prefixes[table]
        except KeyError:
            raise unknown_table(table, self._prefixes) from None

    def get(self, table: str, key: bytes) -> bytes | None:
        with self._typed:
            value: bytes | None = self._txn.get(self._prefix(table) + key)
            return value

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        prefix, get = self._prefix(table), self._txn.get
        with self._typed:
            return [get(prefix + key) for key in keys]

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        prefix = self._prefix(table)
        end = bytes([prefix[0] + 1]) if stop is None else prefix + stop
        return (self._backward if reverse else self._forward)(prefix + start, end)

    def _forward(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        seen, sizes = None, _batch_sizes()
        while batch := self._batch(start, seen, next(sizes)):
            for key, value in batch:
                if key >= end:
                    return
                yield key[1:], value
            start = seen = batch[-1][0]

    def _batch(self, start: bytes, seen: bytes | None, size: int) -> list[tuple[bytes, bytes]]:
        with self._typed, self._txn.cursor() as cursor:
            if not cursor.set_range(start) or (cursor.key() == seen and not cursor.next()):
                return []
            return list(islice(cursor.iternext(), size))

    def _backward(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        sizes = _batch_sizes()
        while batch := self._batch_below(end, next(sizes)):
            for key, value in batch:
                if key < start:
                    return
                yield key[1:], value
            end = batch[-1][0]

    def _batch_below(self, end: bytes, size: int) -> list[tuple[bytes, bytes]]:
        with self._typed, self._txn.cursor() as cursor:
            if not (cursor.prev() if cursor.set_range(end) else cursor.last()):
                return []
            return list(islice(cursor.iterprev(), size))

    def count(self, table: str) -> int:
        with self._typed:
            return int.from_bytes(self._txn.get(_COUNT_PREFIX + self._prefix(table)) or b"", "little")


class _Writer(_Reader):
    is_writer = True

    def __init__(self, handle: Any, environment: _Environment) -> None:
        super().__init__(handle, environment)
        self._added = dict.fromkeys(self._prefixes, 0)  # change of each table's entry count

    def _commit(self, txn: Any) -> None:
        for table, added in self._added.items():
            if added:
                row = _COUNT_PREFIX + self._prefixes[table]
                count = int.from_bytes(txn.get(row) or b"", "little") + added
                txn.put(row, count.to_bytes(8, "little"))
        txn.commit()

    def put_own(self, row: bytes, value: bytes) -> None:
        self._txn.put(row, value)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        check_key(key)
        stored_key = self._prefix(table) + key
        with self._typed:
            if self._txn.put(stored_key, value, overwrite=False):
                self._added[table] += 1
            else:
                self._txn.put(stored_key, value)

    def put_many(self, table: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        prefix = self._prefix(table)
        ordered = sorted(items, key=itemgetter(0))  # neighbours share pages; stable: the last of equal keys counts
        for key, _ in ordered:
            check_key(key)
        with self._typed, self._txn.cursor() as cursor:
            before = self._txn.stat()["entries"]
            cursor.putmulti([(prefix + key, value) for key, value in ordered])
            self._added[table] += self._txn.stat()["entries"] - before

    def delete(self, table: str, key: bytes) -> bool:
        with self._typed:
            was_there = bool(self._txn.delete(self._prefix(table) + key))
        self._added[table] -= was_there
        return was_there

    def count(self, table: str) -> int:
        return super().count(table) + self._added[table]


def _batch_sizes() -> Iterator[int]:
    """Small ones first: a scan is often for one entry, and the rows behind it may be another table's."""
    size = 8
    while True:
        yield min(size, SCAN_BATCH)
        size *= 8


_GUARD = threading.Condition(
    threading.RLock()
)  # over the registry and every environment's state; never held in I/O waits
_REGISTRY: dict[Any, _Environment] = {}
_forks_waiting = 0


class _Environment:
    """This process's LMDB environment at `folder`: opened on use, closed with its last user or before a fork."""

    def __init__(self, folder: str, tables: tuple[str, ...], read_only: bool, use_lock_file: bool) -> None:
        self.folder, self.read_only, self.use_lock_file = folder, read_only, use_lock_file
        self.prefixes = {table: bytes([number]) for number, table in enumerate(tables, 1)}
        self.typed = _Typed(folder)
        self.key: Any = None
        self.handle: Any = None
        self.users = 0
        self.leaving: list[Presence] = []  # of Kvs that were closed while a transaction was running
        self.active: list[int] = []  # the thread of each running transaction
        self.inherited: list[Any] = []  # a parent's handle and transactions: kept, never touched
        self.process = os.getpid()
        self.write_lock = WriteLock(os.path.join(folder, WRITE_LOCK_NAME))

    @classmethod
    def acquire(
        cls,
        folder: str,
        tables: tuple[str, ...],
        read_only: bool,
        use_lock_file: bool,
        check: Callable[[], None] | None,
    ) -> _Environment:
        with _GUARD:
            key = _folder_key(folder)
            known = _REGISTRY.get(key)
            if known is None:
                if check is not None:
                    check()
                known = cls(folder, tables, read_only, use_lock_file)
                known.key = key
                known._open()
            elif known.read_only and not read_only:
                known._make_writable()
            known.users += 1
            _REGISTRY[key] = known  # again, where its last user was collected since it was looked up
            return known

    def release(self, presence: Presence | None = None) -> None:
        with _GUARD:
            self.users -= 1
            if presence is not None:
                self.leaving.append(presence)
            self._retire_if_unused()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the environment registered for the block, whoever closes their Kv meanwhile."""
        with _GUARD:
            self.users += 1
        try:
            yield
        finally:
            self.release()

    def enter(self, kv: LmdbKv) -> Any:
        """The open handle, kept open until this thread leaves."""
        me = threading.get_ident()
        with _GUARD:
            if _forks_waiting and me not in self.active:
                _GUARD.wait_for(lambda: not _forks_waiting, timeout=_FORK_WAIT_S)
            if not kv.is_open:
                raise StorageError(f"index {self.folder}: closed. Open the store again.", index_path=self.folder)
            if self.inherited:
                raise _forked(self.folder)
            if self.process != os.getpid():
                self._leave_to_parent()
                raise _forked(self.folder)
            if self.handle is None:
                self._open()
            self.active.append(me)
            return self.handle

    def leave(self) -> None:
        """Let go of the handle."""
        me = threading.get_ident()
        with _GUARD:
            if me in self.active:  # not so in a child that forked meanwhile
                self.active.remove(me)
            if not self.active:
                self._retire_if_unused()
            _GUARD.notify_all()

    def _open(self) -> None:
        with self.typed:
            handle = self._map()
            try:
                handle.reader_check()
                _close_on_exec(os.path.join(self.folder, DATA_NAME))
            except BaseException:
                handle.close()
                raise
        self.handle = handle

    def _map(self) -> Any:
        for map_size in _MAP_SIZES:
            try:
                return lmdb.open(
                    self.folder,
                    map_size=map_size,
                    readonly=self.read_only,
                    lock=self.use_lock_file,
                    create=False,
                    sync=False,
                    metasync=False,
                    readahead=False,
                    max_readers=MAX_READERS,
                    max_dbs=0,
                    max_spare_txns=0,
                    **_ENGINE,
                )
            except lmdb.MemoryError:
                if map_size == _MAP_SIZES[-1]:
                    raise
        raise AssertionError("unreachable: the last size returns or raises")

    def _retire_if_unused(self) -> None:
        if self.active:
            return
        while self.leaving:
            self.leaving.pop().leave()
        if self.users == 0:
            self._close_if_idle()
            if _REGISTRY.get(self.key) is self:
                del _REGISTRY[self.key]

    def _make_writable(self) -> None:
        if not _GUARD.wait_for(lambda: not self.active, timeout=_FORK_WAIT_S):
            raise BusyError(f"index {self.folder}: still read by another thread. Try again.", index_path=self.folder)
        self._close_if_idle()
        self.read_only, self.use_lock_file = False, True
        self._open()

    def _close_if_idle(self) -> None:
        if self.handle is None or self.active or self.inherited or self.process != os.getpid():
            return
        handle, self.handle = self.handle, None
        handle.close()

    def _leave_to_parent(self) -> None:
        if self.handle is not None:
            self.inherited.append(self.handle)
        self.handle, self.active = None, []


def _folder_key(folder: str) -> tuple[str, int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise StorageError(
            f"index folder {folder}: {error.strerror}. It is made again when the store is opened.",
            errno=error.errno,
            path=folder,
            index_path=folder,
        ) from error
    return os.path.realpath(folder), found.st_dev, found.st_ino


class _Typed:
    """Turns lmdb's and the system's exceptions in its block into ours. A class: it is on the way of every `get`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lmdb.Error):
            raise _translate(error, self._folder) from error
        if isinstance(error, OSError) and not isinstance(error, CasckptError):
            raise _storage_error(error.errno or 0, str(error), self._folder) from error


def _translate(error: lmdb.Error, folder: str) -> CasckptError:
    if isinstance(error, lmdb.MapFullError):
        return _storage_error(errno.ENOSPC, f"the address space for it is full ({error})", folder)
    if isinstance(error, lmdb.DiskError):
        return _storage_error(errno.ENOSPC, str(error), folder)
    if isinstance(error, _BUSY):
        return BusyError(
            f"index {folder}: {error}. Close other processes that use the store, or try again.", index_path=folder
        )
    if isinstance(error, _CORRUPTION):
        return CorruptionError(
            f"index {folder}: damaged ({error}). The store itself is not: open it again and the index is rebuilt.",
            index_path=folder,
        )
    return _storage_error(0, str(error), folder)


def _storage_error(number: int, reason: str, folder: str) -> StorageError:
    kind = OutOfSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else StorageError
    return kind(
        f"index {folder}: {reason}. The store works without it, slower; make room or check the folder's permissions.",
        errno=number,
        path=folder,
        index_path=folder,
    )


def _forked(folder: str) -> BusyError:
    return BusyError(
        f"index {folder}: this process was forked while a transaction was running, and cannot use it. "
        "Fork outside of commits and restores, or start children with spawn.",
        index_path=folder,
    )


def _close_on_exec(data_path: str) -> None:
    """LMDB leaves the data file's descriptor inheritable; a child started without close_fds would keep it."""
    data = os.stat(data_path)
    with contextlib.suppress(OSError):  # no such folder on this platform
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                if os.path.samestat(os.fstat(int(name)), data):
                    os.set_inheritable(int(name), False)


def _before_fork() -> None:
    global _forks_waiting
    _GUARD.acquire()
    _forks_waiting += 1  # no new transactions, or busy threads would never leave a gap
    me = threading.get_ident()
    environments = list(_REGISTRY.values())
    _GUARD.wait_for(lambda: all(t == me for env in environments for t in env.active), timeout=_FORK_WAIT_S)
    for environment in environments:
        environment._close_if_idle()


def _after_fork_in_parent() -> None:
    global _forks_waiting
    _forks_waiting -= 1
    _GUARD.notify_all()
    _GUARD.release()


def _after_fork_in_child() -> None:
    global _GUARD, _forks_waiting
    _forks_waiting = 0
    _GUARD = threading.Condition(threading.RLock())
    for environment in _REGISTRY.values():
        environment._leave_to_parent()
        environment.process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
