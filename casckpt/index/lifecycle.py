"""Which index is trusted, and how a new one takes its place.

    home = IndexHome(store_path, store_id, tables)
    kv = home.open()                       # a Kv, or None with home.reason
    if kv is None:
        kv = home.rebuild(fill)            # fill(kv) writes everything; None with home.reason if that cannot be kept

An index is a folder `index/<generation>/`; the pointer file `index/current` says which one counts and what it was when
it was published: format, store, boot, and device and inode of the folder and its files. **Every doubt is a no**: a
copied, foreign, rebooted-over, half-built or changed index is not repaired but built again, into a new generation,
while others go on reading theirs. The pointer is replaced in one rename, and only for a build that says it is complete.

Nothing that lies in `index/` can make `open` raise, hang or crash: files are looked at before they are mapped, odd
ones are read by another process first (`health`), links are not followed.

Generations that no living process has open are removed when a new one is published, under the build lock. This is the
only thing casckpt ever removes besides temporary files: it is derived data. What is in the way of the index but was
not put there by it (a file named `index`) is renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import msgspec

from casckpt import limits
from casckpt.errors import BusyError, CasckptError, CorruptionError, OutOfSpaceError, ReadOnlyError, StorageError
from casckpt.ids import StoreId
from casckpt.index.health import Distrust, examine, identity, is_sealed, probe
from casckpt.index.kv import Kv
from casckpt.index.lmdb_kv import DATA_NAME, LMDB_HOME, LOCK_NAME, WRITE_LOCK_NAME, LmdbKv, prepare_folder
from casckpt.index.lock import SAFE_FLAGS, WriteLock
from casckpt.index.place import index_root, is_network_path
from casckpt.index.presence import FolderPresence, users_of

INDEX_FORMAT = 3
POINTER_NAME, BUILD_LOCK_NAME = "current", "build.lock"
_POINTER_SIZE_MAX = 4096
_TOKEN_SIZE = 16
_POINTER_TRIES = 3  # opens that lost a race against a publication

_FULL = (errno.ENOSPC, errno.EDQUOT)

Inode = tuple[int, int]


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file `current`. Every field is compared with what is there, so a flipped bit anywhere is a doubt."""

    format: int
    generation: int
    store: str
    boot: str
    complete: bool
    folder: Inode
    data: Inode
    lock: Inode
    token: str  # also a row inside: file systems give a freed inode to the next file


@cache
def read_boot_id() -> str:
    """An identifier of this machine's current boot, or "" where the system has none (then no index is trusted)."""
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=False)
        return asked.stdout.strip()
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Building:
    """A generation under construction: fill `kv`, then call `complete()`."""

    def __init__(self, kv: LmdbKv, generation: int) -> None:
        self.kv, self.generation = kv, generation
        self.is_complete = False

    def complete(self) -> None:
        """Say that everything is in it. Without this call it is thrown away."""
        self.is_complete = True


class IndexHome:
    """The place of one store's index. Cheap to make; touches nothing until asked.

    Args:
        tables: names of the tables; their order is part of the index format.
        read_only: create nothing; open an existing healthy index only where that is safe.
        is_network: whether a path lies on a network file system.
        lock_timeout_s: how long builds and write transactions wait for others.
    """

    def __init__(
        self,
        store_path: str,
        store_id: StoreId,
        tables: Sequence[str],
        *,
        read_only: bool = False,
        boot_id: Callable[[], str] = read_boot_id,
        is_network: Callable[[str], bool] = is_network_path,
        environ: Mapping[str, str] = os.environ,
        probe_timeout_s: float = limits.PROBE_TIMEOUT_S,
        lock_timeout_s: float = limits.LOCK_TIMEOUT_S,
    ) -> None:
        self.root = index_root(store_path, store_id, is_network=is_network, environ=environ)
        self.reason: str | None = None
        self.generation = 0
        self._store_id, self._tables, self._read_only = store_id, tuple(tables), read_only
        self._presence: FolderPresence | None = None  # of what was opened last
        self._boot_id, self._probe_timeout_s, self._lock_timeout_s = boot_id, probe_timeout_s, lock_timeout_s

    # --- open ---

    def open(self) -> LmdbKv | None:
        """The current generation if it can be trusted, else None and `reason` says why.

        Costs a few stats and small reads beyond LMDB's own open; a probe (0.1 s and more) only when the last user died
        or a file looks odd. Never raises for anything that lies in the index folder.
        """
        self.reason, self.generation = None, 0
        refused: list[bytes | None] = []
        for _ in range(_POINTER_TRIES):
            seen = self._pointer_bytes()
            if seen in refused:
                break  # otherwise a new one was published while this one was looked at
            refused.append(seen)
            try:
                return self._open_current()
            except Distrust as doubt:
                self.reason = str(doubt)
            except CorruptionError as error:
                self.reason = f"damaged: {error}"
            except (CasckptError, OSError) as error:
                self.reason = f"unusable: {error}"
        return None

    def _open_current(self) -> LmdbKv:
        if self.root is None:
            raise Distrust("no local file system for it: set XDG_CACHE_HOME to a local folder")
        pointer = self._read_pointer(self.root)
        folder = os.path.join(self.root, str(pointer.generation))
        self.generation = pointer.generation
        self._check_pointer(pointer)
        _check_identity(pointer, folder)
        kv = self._open_to_read(folder) if self._read_only else self._open_to_write(folder)
        try:
            _check_identity(pointer, folder)  # nobody removed it between the first look and the open
            if (kv.token or b"").hex() != pointer.token:
                raise Distrust(f"damaged: {DATA_NAME} is another index's")
        except BaseException:
            kv.close()
            raise
        return kv

    def _check_pointer(self, pointer: Pointer) -> None:
        if pointer.format != INDEX_FORMAT:
            raise Distrust(f"other format: {pointer.format}, this release writes {INDEX_FORMAT}")
        if pointer.store != self._store_id.hex():
            raise Distrust(f"foreign store: made for {pointer.store}")
        if not pointer.boot or pointer.boot != self._boot_id():
            raise Distrust("after reboot: nothing in it was synced to disk")
        if not pointer.complete:
            raise Distrust("incomplete")

    def _open_to_write(self, folder: str) -> LmdbKv:
        lock_path = os.path.join(folder, WRITE_LOCK_NAME)
        if os.path.lexists(lock_path) and not stat.S_ISREG(os.stat(lock_path, follow_symlinks=False).st_mode):
            raise Distrust(f"damaged: {WRITE_LOCK_NAME} is something else")
        return self._open_present(folder, lambda presence: self._check_files(folder, presence))

    def _open_present(self, folder: str, check: Callable[[FolderPresence], None]) -> LmdbKv:
        presence = FolderPresence(folder)
        try:
            kv = LmdbKv(
                folder,
                self._tables,
                check=lambda: check(presence),
                presence=presence,
                lock_timeout_s=self._lock_timeout_s,
            )
        except BaseException:
            presence.abandon()
            raise
        self._presence = presence
        return kv

    def _check_files(self, folder: str, presence: FolderPresence) -> None:
        data_path = os.path.join(folder, DATA_NAME)
        suspicion = examine(data_path, os.path.join(folder, LOCK_NAME))
        died = _check_seal(folder, data_path, presence)
        if suspicion or died:
            probe(folder, LMDB_HOME, self._probe_timeout_s)
        for mark in died:
            with contextlib.suppress(OSError):
                os.unlink(mark)

    def _open_to_read(self, folder: str) -> LmdbKv:
        """Without a lock file only where nobody can write; otherwise as a registered reader, which creates nothing."""
        data_path, lock_path = os.path.join(folder, DATA_NAME), os.path.join(folder, LOCK_NAME)
        is_read_only_mount = bool(os.statvfs(folder).f_flag & os.ST_RDONLY) if hasattr(os, "statvfs") else False
        if not is_read_only_mount and not os.access(lock_path, os.W_OK):
            raise Distrust("no permission to register as a reader")

        def check() -> None:
            suspicion = examine(data_path, lock_path)
            if suspicion or _check_seal(folder, data_path, None):
                raise Distrust(f"suspect: {suspicion or 'its last user died'}")

        return LmdbKv(folder, self._tables, read_only=True, use_lock_file=not is_read_only_mount, check=check)

    # --- pointer ---

    def _pointer_bytes(self) -> bytes | None:
        try:
            return _read_small(os.path.join(self.root or "", POINTER_NAME))
        except (OSError, Distrust):
            return None

    def _read_pointer(self, root: str) -> Pointer:
        try:
            if not stat.S_ISDIR(os.stat(root, follow_symlinks=False).st_mode):
                raise Distrust(f"damaged: {root} is not a folder")
            return msgspec.json.decode(_read_small(os.path.join(root, POINTER_NAME)), type=Pointer)
        except FileNotFoundError:
            raise Distrust("missing") from None
        except (OSError, ValueError) as error:
            raise Distrust(f"damaged: pointer: {error}") from None

    # --- build ---

    def rebuild(self, fill: Callable[[Kv], None]) -> LmdbKv | None:
        """Build a new generation with `fill`, publish it and return it, open.

        Where another process published one since this home last looked, and it is healthy, that one is returned and
        `fill` is not called. None, with `reason`, when the index cannot be kept on disk (full, no permission, another
        build under way for longer than `lock_timeout_s`); what `fill` raises on its own account passes through.

        Raises:
            ReadOnlyError: this home is read-only.
        """
        refused = self.generation
        try:
            with self._building_alone():
                if self._published_generation() not in (0, refused):
                    kv = self.open()
                    if kv is not None:
                        return kv
                with self._build() as building:
                    fill(building.kv)
                    building.complete()
                return building.kv
        except (StorageError, BusyError, CorruptionError) as error:
            if "index_path" not in error.facts:
                raise
            self.reason = f"unusable: {error}"
            return None

    @contextmanager
    def new_generation(self) -> Iterator[Building]:
        """A `Building` in a new folder, published when the block ends and `complete()` was called in it.

        Its `kv` then stays open and is the caller's. Without `complete()`, or with an exception, the folder is removed.

        Raises:
            BusyError: another process has been building all the time.
            ReadOnlyError: this home is read-only.
            StorageError: the folder cannot be made or written.
        """
        with self._building_alone(), self._build() as building:
            yield building

    def close(self, kv: Kv) -> None:
        """Close this home's index; a small one of which most is old pages is replaced by a dense copy.

        LMDB writes over no page that its last two transactions used, so a small index to which each commit adds rows in
        random places is three times as large as its rows. Nothing is replaced where anybody else has it open, and
        whatever fails leaves it as it is. Costs some milliseconds, where it has grown since it was opened.
        """
        try:
            with contextlib.suppress(CasckptError, OSError):
                if isinstance(kv, LmdbKv) and self._is_worth_compacting(kv):
                    self._compact(kv)
        finally:
            kv.close()

    def _is_worth_compacting(self, kv: LmdbKv) -> bool:
        if self._read_only or kv.is_read_only or kv.is_shared or users_of(kv.folder, self._presence)[0]:
            return False
        used, total = kv.page_counts()
        size = os.stat(os.path.join(kv.folder, DATA_NAME)).st_size
        return total > 2 * used and size <= limits.INDEX_COMPACTED_MAX

    def _compact(self, kv: LmdbKv) -> None:
        """Publish a generation with the same rows, and remove the one that it replaces.

        Who opens that one meanwhile goes on with it, as with any generation that is not the newest.
        """
        with self._building_alone(timeout_s=0):
            if self._published_generation() != self.generation:
                return
            with self._build() as building:
                building.kv.fill_from(kv, os.urandom(_TOKEN_SIZE))
                building.complete()
            building.kv.close()
            kv.close()
            assert self.root is not None
            _remove_unused(self.root, building.generation)

    @contextmanager
    def _building_alone(self, timeout_s: float | None = None) -> Iterator[None]:
        if self._read_only:
            raise ReadOnlyError("index: not built, the store is open read-only. Open it without read_only=True.")
        with _storage_errors(self.root):
            root = self._make_root()
        with WriteLock(os.path.join(root, BUILD_LOCK_NAME)).hold(
            self._lock_timeout_s if timeout_s is None else timeout_s
        ):
            yield

    @contextmanager
    def _build(self) -> Iterator[Building]:
        assert self.root is not None
        with _storage_errors(self.root):
            generation, folder = _make_folder(self.root)
        kv: LmdbKv | None = None
        is_published = False
        try:
            with _storage_errors(folder):
                prepare_folder(folder)
                kv = self._open_present(folder, lambda presence: None)
            building = Building(kv, generation)
            yield building
            if building.is_complete:
                with _storage_errors(folder):
                    self._publish(self.root, kv, generation)
                is_published = True
        finally:
            if not is_published:
                if kv is not None:
                    kv.close()
                _remove_folder(folder)
        self.generation, self.reason = generation, None
        _remove_unused(self.root, generation)

    def _make_root(self) -> str:
        if self.root is None:
            raise StorageError(
                "index: no local file system for it. Set XDG_CACHE_HOME to a local folder.", index_path=""
            )
        for path, is_right in (
            (self.root, stat.S_ISDIR),
            (os.path.join(self.root, BUILD_LOCK_NAME), stat.S_ISREG),
            (os.path.join(self.root, POINTER_NAME), stat.S_ISREG),
        ):
            _set_aside_unless(path, is_right)
            if is_right is stat.S_ISDIR:
                os.makedirs(path, exist_ok=True)
        return self.root

    def _published_generation(self) -> int:
        try:
            return self._read_pointer(self.root or "").generation
        except Distrust:
            return 0

    def _publish(self, root: str, kv: LmdbKv, generation: int) -> None:
        folder, token = kv.folder, kv.token
        if token is None:
            token = os.urandom(_TOKEN_SIZE)
            kv.set_token(token)
        pointer = Pointer(
            format=INDEX_FORMAT,
            generation=generation,
            store=self._store_id.hex(),
            boot=self._boot_id(),
            complete=True,
            folder=identity(folder, "the folder")[:2],
            data=identity(os.path.join(folder, DATA_NAME), DATA_NAME)[:2],
            lock=identity(os.path.join(folder, LOCK_NAME), LOCK_NAME)[:2],
            token=token.hex(),
        )
        _replace_file(os.path.join(root, POINTER_NAME), msgspec.json.encode(pointer))


def _check_identity(pointer: Pointer, folder: str) -> None:
    """The folder and its files are the very ones that were published: not copies, not links, not replacements."""
    for path, what, expected, is_right in (
        (folder, f"generation {pointer.generation}", pointer.folder, stat.S_ISDIR),
        (os.path.join(folder, DATA_NAME), DATA_NAME, pointer.data, stat.S_ISREG),
        (os.path.join(folder, LOCK_NAME), LOCK_NAME, pointer.lock, stat.S_ISREG),
    ):
        device, inode, found = identity(path, what)
        if not is_right(found.st_mode):
            raise Distrust(f"damaged: {what} is something else")
        if (device, inode) != expected:
            raise Distrust("copied folder" if what not in (DATA_NAME, LOCK_NAME) else f"damaged: {what} was replaced")


def _check_seal(folder: str, data_path: str, own: FolderPresence | None) -> list[str]:
    """The marks of users that died. Looks twice, because a user may open, write, seal and leave in between.

    Raises:
        Distrust: the data file changed while nobody had it open.
    """
    for _ in range(2):
        was_sealed = is_sealed(data_path)
        has_living, dead = users_of(folder, own)
        if was_sealed or has_living or dead:
            return dead
    raise Distrust(f"damaged: {DATA_NAME} was changed from outside since it was closed")


def _read_small(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _POINTER_SIZE_MAX:
            raise Distrust(f"damaged: {path} is not a small regular file")
        return os.read(fd, _POINTER_SIZE_MAX)
    finally:
        os.close(fd)


def _replace_file(path: str, content: bytes) -> None:
    """Write beside, sync, rename: readers see the old file or the new one. The build lock is held."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS, 0o666)
        try:
            os.write(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _generations(root: str) -> list[int]:
    return [int(name) for name in os.listdir(root) if name.isascii() and name.isdigit() and len(name) < 16]


def _make_folder(root: str) -> tuple[int, str]:
    generation = max(_generations(root), default=0) + 1
    folder = os.path.join(root, str(generation))
    os.mkdir(folder)
    return generation, folder


def _remove_unused(root: str, current: int) -> None:
    """Remove generations that no living process has open, and pointer files that were never renamed."""
    with contextlib.suppress(OSError):
        for generation in _generations(root):
            folder = os.path.join(root, str(generation))
            is_folder = stat.S_ISDIR(os.stat(folder, follow_symlinks=False).st_mode)
            if generation != current and is_folder and not users_of(folder)[0]:
                _remove_folder(folder)
        for name in os.listdir(root):
            if name.startswith(POINTER_NAME + ".") and name.endswith(".tmp"):
                os.unlink(os.path.join(root, name))


def _remove_folder(folder: str) -> None:
    """Only files that a generation is made of; anything else in it keeps the folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name in (DATA_NAME, LOCK_NAME, WRITE_LOCK_NAME) or name.startswith(("use-", "new-")):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _set_aside_unless(path: str, is_right: Callable[[int], bool]) -> None:
    """Rename what is in the way of the index but is none of it; nothing of unknown origin is removed."""
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if is_right(mode):
        return
    number = 1
    while os.path.lexists(f"{path}.set-aside-{number}"):
        number += 1
    os.rename(path, f"{path}.set-aside-{number}")


@contextmanager
def _storage_errors(path: str | None) -> Iterator[None]:
    try:
        yield
    except Distrust as doubt:
        raise StorageError(f"index {path}: {doubt}. Open the store again.", path=path, index_path=path) from doubt
    except OSError as error:
        if isinstance(error, CasckptError):
            raise
        kind = OutOfSpaceError if error.errno in _FULL else StorageError
        raise kind(
            f"index {path}: {error.strerror}. The store works without it, slower; make room or check permissions.",
            errno=error.errno,
            path=path,
            index_path=path,
        ) from error
