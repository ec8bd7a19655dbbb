"""`casckpt.open`: find or make a store, and check that this release may touch it."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable

import msgspec

from casckpt.codec.level import DEFAULT_LEVEL, find_level
from casckpt.errors import (
    AlreadyExistsError,
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StoreWarning,
    UnsupportedFormatError,
)
from casckpt.format.document import (
    FORMAT_VERSION,
    Features,
    StoreDocument,
    decode_document,
    encode_document,
    unknown_features,
)
from casckpt.format.entry import Create, Envelope, decode_entry, encode_entry
from casckpt.ids import NO_DIGEST, StoreId, WriteId
from casckpt.limits import CHUNK_SIZE, CHUNK_SIZE_MAX, CHUNK_SIZE_MIN, ENTRY_SIZE_MAX, LOCK_TIMEOUT_S
from casckpt.objects.packs import list_packs
from casckpt.objects.timeline import Timeline
from casckpt.objects.writer import VERIFY_MODES
from casckpt.storage.fs import FileSystem, is_about_file, read_file, replace_file
from casckpt.storage.process import System
from casckpt.store.store import Store
from casckpt.version import __version__

DOCUMENT = "casckpt.json"
_DOCUMENT_SIZE_MAX = 1 << 20
_FOLDERS = ("tmp", "packs", "timeline")


def open_store(
    path: str | os.PathLike[str],
    create: bool = False,
    read_only: bool = False,
    run: str = "main",
    *,
    verify: str = "reread",
    level: str = DEFAULT_LEVEL,
    chunk_size: int = CHUNK_SIZE,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    system: System | None = None,
) -> Store:
    """Open the store in folder `path`.

    Args:
        path: the store's folder, on a local disk or a network file system.
        create: make the store when there is none. Without it, a path without a store is an error, so that a typing
            mistake never starts a training afresh.
        read_only: promise to write nothing; works on read-only media and full disks. A collector is not told of its
            reads (`Store.protection`).
        run: name of the training. Runs in one store share content; steps, branches and "latest" are each run's own.
        verify: what a commit proves before it publishes: "reread" (default) reads new packs back through a fresh
            descriptor, which catches wrong writes; "media" first drops the kernel's cache, so that the bytes come from
            the device; "off" trusts the kernel.
        level: how long a restore may take, as a multiple of plain bytes, for the bytes that commits save: "fast"
            (1.3), "balanced" (3.5, default) or "small" (10).
        chunk_size: bytes per chunk, for a store that is being made.
        lock_timeout_s: how long any lock is waited for before `BusyError`.
        system: clock, randomness and file system, for tests.

    Cost: constant in the length of the history while the index is trusted; after a reboot, a copy or any doubt the
    index is rebuilt from the timeline and the packs' tables.

    Raises:
        NotFoundError: no store there, and `create` is false.
        UnsupportedFormatError: the store needs a feature that this release does not know.
        CorruptionError: both copies of the store's document are damaged.
        StorageError: the file system refuses.
    """
    found_level = find_level(level)
    _check_options(verify, chunk_size, create=create, read_only=read_only)
    root = os.path.abspath(os.fspath(path))
    system = system or System()
    document = find_document(system.file_system, root)
    if document is None:
        if not create:
            raise NotFoundError(f"{root}: no store here. Check the path, or pass create=True to make one.", path=root)
        document = _create(root, system, chunk_size)
    unknown = unknown_features(document, "read")
    if unknown:
        raise UnsupportedFormatError(
            f"store {root} needs {unknown}, which this release does not know. Upgrade casckpt.", features=unknown
        )
    if not read_only:
        _complete_folders(system.file_system, root)
    return Store(
        root,
        document,
        system,
        run=run,
        read_only=read_only,
        verify=verify,
        level=found_level,
        lock_timeout_s=lock_timeout_s,
    )


def _check_options(verify: str, chunk_size: int, *, create: bool, read_only: bool) -> None:
    if verify not in VERIFY_MODES:
        raise InvalidInputError(f"verify={verify!r}: expected one of {', '.join(VERIFY_MODES)}")
    if not CHUNK_SIZE_MIN <= chunk_size <= CHUNK_SIZE_MAX or chunk_size % CHUNK_SIZE_MIN:
        raise InvalidInputError(
            f"chunk_size={chunk_size}: expected a multiple of {CHUNK_SIZE_MIN} up to {CHUNK_SIZE_MAX}"
        )
    if create and read_only:
        raise InvalidInputError("create=True and read_only=True contradict each other")


def _complete_folders(fs: FileSystem, root: str) -> None:
    """Make the folders that a copy left out because they were empty, as git and some copying tools do."""
    with contextlib.suppress(StorageError):  # a full disk must still restore; a commit there says what is wrong
        missing = sorted(set(_FOLDERS) - set(fs.list(root)))
        for folder in missing:
            fs.make_folder(f"{root}/{folder}")
        if missing:
            fs.sync_folder(root)


def find_document(fs: FileSystem, root: str) -> StoreDocument | None:
    """The store's document, from casckpt.json or from timeline entry 0; None when there is no store.

    Raises:
        CorruptionError: there is a store, and both copies are damaged.
        IncompleteError: there is part of one, and both copies are missing.
        UnsupportedFormatError: a newer format.
    """
    noted, first = _attempt(lambda: _read_noted(fs, root))
    logged, second = _attempt(lambda: _read_logged(fs, root))
    if noted is not None and logged is not None:
        return _agreed(noted, logged, root)
    if noted is not None or logged is not None:
        return noted or logged
    if isinstance(first, StorageError) and isinstance(second, StorageError):
        raise first from second  # it is the disk, the name or a permission, not what the files hold
    if first is None and second is None:
        if not Timeline(root, StoreId(bytes(16)), System(file_system=fs)).numbers() and not any(list_packs(fs, root)):
            return None  # at most the folders of a store that somebody died making
        raise IncompleteError(
            f"{root}: holds parts of a store, but neither {DOCUMENT} nor its copy in timeline entry 0. If a copy is "
            f"under way, wait for it; otherwise copy {DOCUMENT} from any other copy of this store.",
            path=root,
        )
    raise CorruptionError(
        f"{root}: {DOCUMENT} and its copy in timeline entry 0 are both missing or damaged ({first or second}). Copy "
        f"{DOCUMENT} back from a backup: any copy of this store has the same one.",
        path=root,
    ) from (first or second)


def _attempt(read: Callable[[], StoreDocument | None]) -> tuple[StoreDocument | None, CasckptError | None]:
    """What was read, or why not; None and None where there is no such file.

    Raises:
        UnsupportedFormatError: a newer format.
        StorageError: it could not be read now, which says nothing of its content.
    """
    try:
        return read(), None
    except FileNotFoundError:
        return None, None
    except CorruptionError as error:
        return None, error
    except StorageError as error:
        if not is_about_file(error):
            raise
        return None, error


def _read_noted(fs: FileSystem, root: str) -> StoreDocument:
    path = f"{root}/{DOCUMENT}"
    try:
        return decode_document(read_file(fs, path, _DOCUMENT_SIZE_MAX), path)
    except StorageError as error:
        if error.errno == errno.ENOTDIR:
            raise StorageError(
                f"{root}: not a folder, or below something that is none. Check the path.",
                path=root,
                errno=errno.ENOTDIR,
            ) from error
        raise


def _read_logged(fs: FileSystem, root: str) -> StoreDocument | None:
    origin = Timeline(root, StoreId(bytes(16)), System(file_system=fs))
    body = decode_entry(read_file(fs, origin.path(0), ENTRY_SIZE_MAX), 0, "timeline entry 0").envelope.body
    return decode_document(body.document, "timeline entry 0") if isinstance(body, Create) else None


def _agreed(noted: StoreDocument, logged: StoreDocument, root: str) -> StoreDocument:
    """One document of two. The log's has a digest, so it decides who the store is; feature flags only ever grow."""
    if noted == logged:
        return noted
    one, other = noted.features, logged.features
    features = Features(
        sorted({*one.read, *other.read}), sorted({*one.write, *other.write}), sorted({*one.collect, *other.collect})
    )
    if (noted.store_id, noted.chunk_size) != (logged.store_id, logged.chunk_size):
        warnings.warn(
            f"{root}/{DOCUMENT} was changed: it says store {noted.store_id[:12]} with chunks of {noted.chunk_size} "
            f"bytes, the timeline says {logged.store_id[:12]} with {logged.chunk_size}, and is believed. Copy "
            f"{DOCUMENT} back from a backup.",
            StoreWarning,
            stacklevel=4,
        )
    return msgspec.structs.replace(logged, features=features)


def _create(root: str, system: System, chunk_size: int) -> StoreDocument:
    """Make an empty store: folders, then entry 0, then casckpt.json. Whoever links entry 0 first decides.

    The folders are durable before entry 0 is there: who finds it may commit at once, also when its writer died.
    """
    fs = system.file_system
    others = [name for name in fs.list(root) if name not in _FOLDERS]
    if others:
        raise AlreadyExistsError(
            f"{root}: the folder is not empty and holds no store (found {', '.join(others[:3])}). Choose a new folder.",
            path=root,
        )
    _make_durable_folder(fs, root)
    for name in _FOLDERS:
        fs.make_folder(f"{root}/{name}")
    fs.sync_folder(root)
    document = StoreDocument(
        FORMAT_VERSION, system.random_bytes(16).hex(), f"casckpt {__version__}", chunk_size=chunk_size
    )
    encoded = encode_document(document)
    store_id = StoreId(bytes.fromhex(document.store_id))
    envelope = Envelope(
        WriteId(system.random_bytes(16)), NO_DIGEST, system.time_ns(), system.host, system.pid(), Create(encoded)
    )
    timeline = Timeline(root, store_id, system)
    if not timeline.append(0, encode_entry(0, store_id, envelope, [])):
        found = find_document(fs, root)  # another process made the store in this moment
        assert found is not None
        return found
    _write_document(fs, root, system, encoded)
    return document


def _make_durable_folder(fs: FileSystem, path: str) -> None:
    """A folder and those above it that are missing, each name synced."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent) and parent != path:
        _make_durable_folder(fs, parent)
    try:
        fs.make_folder(path)
    except FileNotFoundError as error:  # as /proc answers
        raise StorageError(
            f"{path}: folders cannot be made here. Check the path.", path=path, errno=error.errno
        ) from error
    fs.sync_folder(parent)


def _write_document(fs: FileSystem, root: str, system: System, encoded: bytes) -> None:
    replace_file(fs, system.temporary_path(root), f"{root}/{DOCUMENT}", [encoded])
    fs.sync_folder(root)


def add_feature(store: Store, name: str) -> None:
    """Note in casckpt.json that reading and writing this store takes feature `name`; durable when this returns.

    The timeline says so too, by entries of a kind that a release without the feature refuses: losing the file again
    loses nothing.

    Raises:
        StorageError: it could not be written; the old document is in place.
    """
    document = store.document
    if name in document.features.read and name in document.features.write:
        return
    old = document.features
    features = Features(sorted({*old.read, name}), sorted({*old.write, name}), old.collect)
    document = msgspec.structs.replace(document, features=features)
    _write_document(store._timeline.fs, store.path, store._system, encode_document(document))
    store.document = document
