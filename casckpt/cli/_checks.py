"""The checks of `casckpt doctor`: each looks at one thing and says what it means and what to do.

Nothing here changes a store. Abilities of a file system are found by trying them on small files in the store's `tmp/`,
which are removed at once; where that cannot be written, they stay unknown and the finding says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import NamedTuple

from casckpt.cli._text import plural, size
from casckpt.errors import CasckptError, StorageError
from casckpt.format.document import StoreDocument, unknown_features
from casckpt.ids import StoreId
from casckpt.index.lifecycle import BUILD_LOCK_NAME, IndexHome
from casckpt.index.lmdb_kv import WRITE_LOCK_NAME
from casckpt.index.lock import SAFE_FLAGS, WriteLock, try_lock
from casckpt.index.place import INDEX_NAME, is_network_path
from casckpt.index.tables import TABLES, read_applied
from casckpt.storage.fs import LocalFileSystem, write_file
from casckpt.storage.process import System

OK, WARN, PROBLEM = "ok", "warn", "problem"
PYTHON_MIN = (3, 10)
FREE_BYTES_MIN = 1 << 30  # below this a full snapshot of a middling model may not fit any more
FREE_INODES_MIN = 10_000
CLOCK_MIN_NS = 1_704_067_200 * 10**9  # 2024-01-01: an earlier clock was never set
REQUIRED = ("blake3", "click", "lmdb", "msgspec", "numpy", "rich", "safetensors", "torch", "zstandard")
OPTIONAL = {"gymnasium": "`casckpt demo`"}


class Finding(NamedTuple):
    """What was looked at, how it is ("ok", "warn", "problem"), in words, and the next step where there is one."""

    topic: str
    level: str
    text: str
    next_step: str = ""


# --- this machine ---


def environment() -> Iterator[Finding]:
    """Python, libraries, platform, clock, plug-ins."""
    found = platform.python_version()
    is_old = sys.version_info < PYTHON_MIN
    wanted = ".".join(map(str, PYTHON_MIN))
    yield Finding("python", PROBLEM if is_old else OK, f"Python {found}", f"Use Python {wanted} or newer." * is_old)
    yield from _libraries()
    if importlib.util.find_spec("numpy") is not None:
        yield _kernels()
    yield _platform()
    is_unset = time.time_ns() < CLOCK_MIN_NS
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    hint = "Set this machine's clock: commits carry its time, for people only." * is_unset
    yield Finding("clock", WARN if is_unset else OK, f"the clock says {now}", hint)
    for plugin in entry_points(group="casckpt.commands"):
        try:
            plugin.load()
        except Exception as error:  # noqa: BLE001 - a plug-in's import may raise anything; that is the finding
            text = f"command {plugin.name!r} ({plugin.value}) cannot be loaded: {type(error).__name__}: {error}"
            yield Finding("plug-in", WARN, text, "Reinstall or remove the package that it comes from.")


def _libraries() -> Iterator[Finding]:
    versions, missing = [], []
    for name in REQUIRED:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("libraries", PROBLEM, f"not installed: {', '.join(missing)}", "Run `pip install casckpt` again.")
    yield Finding("libraries", OK, ", ".join([f"casckpt {version('casckpt')}", *versions]))
    for name, user in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("libraries", OK, f"{name} is not installed; only {user} needs it")


def _kernels() -> Finding:
    from casckpt.codec import kernels
    from casckpt.codec.formulas import has_kernels

    if has_kernels():
        return Finding("kernels", OK, "compiled kernels are used")
    if not kernels.IS_WANTED:
        reason, hint = "CASCKPT_KERNELS=0 leaves compiled kernels out", "Unset CASCKPT_KERNELS."
    elif kernels.LIBRARY.exists():
        reason = f"{kernels.LIBRARY} is of another machine or version, or gives other bits than NumPy, and is not used"
        hint = "Install casckpt again, with a C compiler (gcc, clang) that is known to be good."
    else:
        reason, hint = "no compiled kernels", "Install a C compiler (gcc, clang), then install casckpt again."
    text = f"{reason}: differences are stored and restored by NumPy, to the same bytes, at half the speed"
    return Finding("kernels", WARN, text, hint)


def _platform() -> Finding:
    lacks = []
    if not hasattr(os, "posix_fallocate"):
        lacks.append("preallocation (a full disk shows late)")
    if not hasattr(os, "posix_fadvise"):
        lacks.append("page-cache advice (a verification may read the cache instead of the disk)")
    if not sys.platform.startswith("linux"):
        lacks.append("early write-back (the final sync takes longer)")
    if os.name == "nt":
        lacks.append("folder syncs (names are as durable as NTFS's journal makes them)")
    text = f"{platform.system()} {platform.release()} on {platform.machine()}, {os.cpu_count()} processors"
    if not lacks:
        return Finding("platform", OK, text)
    return Finding(
        "platform", WARN, f"{text}; lacks {'; '.join(lacks)}", "Nothing to do: slower or later, not less safe."
    )


# --- the folder ---


def folder(root: str) -> Iterator[Finding]:
    """Kind of file system, room, permissions, abilities."""
    if is_network_path(root):
        text = "the store is on a network file system, so its index is in this machine's cache folder"
        yield Finding("file system", WARN, text, "Keep XDG_CACHE_HOME on a local disk.")
    else:
        yield Finding("file system", OK, "the store is on a local file system")
    yield from _room(root)
    is_writable = os.access(root, os.W_OK)
    if not is_writable:
        yield Finding("permissions", WARN, f"{root} cannot be written: looking and restoring work, commits do not")
    else:
        yield Finding("permissions", OK, "the folder can be written")
        yield from _closed_subfolders(root)
    yield from _abilities(root)


def _room(root: str) -> Iterator[Finding]:
    free = shutil.disk_usage(root).free
    is_low = free < FREE_BYTES_MIN
    yield Finding(
        "room",
        WARN if is_low else OK,
        f"{size(free)} free on this disk",
        "Free some: a commit that does not fit fails, and leaves the earlier ones whole." * is_low,
    )
    if hasattr(os, "statvfs"):
        status = os.statvfs(root)
        if status.f_files and status.f_favail < FREE_INODES_MIN:
            text = f"{status.f_favail} file names (inodes) free on this disk"
            yield Finding("room", WARN, text, "Remove small files: every commit makes one.")


def _closed_subfolders(root: str) -> Iterator[Finding]:
    for name in ("packs", "timeline", "tmp", INDEX_NAME):
        path = f"{root}/{name}"
        if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK):
            text = f"{path} cannot be written by this user (uid {os.getuid() if hasattr(os, 'getuid') else '?'})"
            yield Finding(
                "permissions", PROBLEM, text, f"Give the training's user write permission: chmod u+rwx {path}"
            )


def _abilities(root: str) -> Iterator[Finding]:
    """Try what a commit needs, on files in tmp/."""
    if not os.access(f"{root}/tmp", os.W_OK | os.X_OK):
        yield Finding("abilities", OK, "not tried: tmp/ cannot be written")
        return
    fs, system = LocalFileSystem(), System()
    first, second = system.temporary_path(root), system.temporary_path(root)
    try:
        write_file(fs, first, [b"casckpt doctor\n"])
        yield _try_link(first, second)
        yield _try_exclusive(fs, first, second)
        yield _try_folder_sync(fs, root)
        yield _try_preallocation(first)
    except StorageError as error:
        yield Finding("abilities", PROBLEM, error.message, "No commit can work here: check the disk and its mount.")
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _try_link(first: str, second: str) -> Finding:
    try:
        os.link(first, second)
    except OSError as error:
        text = f"no hard links here ({error.strerror}): entries are published by a rename that refuses to replace"
        return Finding("abilities", OK, text)
    return Finding("abilities", OK, "hard links: one of several writers wins each number")


def _try_exclusive(fs: LocalFileSystem, first: str, second: str) -> Finding:
    """Publishing under a taken name must fail, by link or by exclusive rename: the base of everything."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(second, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        fs.link(first, second)
    except FileExistsError:
        return Finding("abilities", OK, "a taken name is refused")
    except StorageError as error:
        text = f"neither hard links nor an exclusive rename: {error.message}"
        return Finding("abilities", PROBLEM, text, "Put the store on another file system.")
    text = "publishing under a taken name replaced it: two writers would lose commits"
    return Finding("abilities", PROBLEM, text, "Put the store on another file system.")


def _try_folder_sync(fs: LocalFileSystem, root: str) -> Finding:
    try:
        fs.sync_folder(f"{root}/tmp")
    except StorageError as error:
        text = f"folders cannot be synced: {error.message}"
        return Finding(
            "abilities", PROBLEM, text, "A power cut may take acknowledged commits: use another file system."
        )
    return Finding("abilities", OK, "folders can be synced")


def _try_preallocation(path: str) -> Finding:
    if not hasattr(os, "posix_fallocate"):
        return Finding("abilities", OK, "preallocation: not on this platform")
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, 0, 4096)
    except OSError as error:
        return Finding("abilities", OK, f"no preallocation here ({error.strerror}): a full disk shows while writing")
    finally:
        os.close(descriptor)
    return Finding("abilities", OK, "space can be preallocated")


# --- the store ---


def document(found: StoreDocument) -> Iterator[Finding]:
    """Features that this release does not know."""
    known = f"format {found.casckpt_format}, store {found.store_id[:12]}, written by {found.created_by}"
    yield Finding("format", OK, known)
    effects = {"read": "it cannot be read", "write": "it cannot be committed to", "collect": "nothing may be deleted"}
    for need, effect in effects.items():
        unknown = unknown_features(found, need)
        if unknown:
            level = PROBLEM if need == "read" else WARN
            text = f"the store needs {', '.join(unknown)}, which this release does not know: {effect}"
            yield Finding("format", level, text, "Upgrade casckpt.")


def index(root: str, store_id: StoreId) -> Iterator[Finding]:
    """Whether the index on disk is used, and why not; what it remembers of damage; who holds its locks.

    No handle of this store may be open in this process.
    """
    home = IndexHome(root, store_id, TABLES, read_only=True)
    if home.root is None:
        yield Finding("index", WARN, "no local disk for the index", "Set XDG_CACHE_HOME to a folder on a local disk.")
        return
    yield from _locks(home.root)
    kv = home.open()
    if kv is None:
        text = f"the index in {home.root} is not used: {home.reason}"
        hint = "Nothing to do: it is derived data, and the next open for writing builds it again."
        yield Finding("index", OK if home.reason == "missing" else WARN, text, hint)
        return
    try:
        with kv.read() as txn:
            applied = read_applied(txn)
            seq = -1 if applied is None else applied.seq
            text = f"generation {home.generation} in {home.root} is trusted; entries up to {seq} are in it"
            yield Finding("index", OK, text)
            marks = txn.count("damage")
    except CasckptError as error:
        yield Finding("index", WARN, f"the index is damaged: {error.message}", "The next open builds it again.")
        return
    finally:
        kv.close()
    if marks:
        text = f"{plural(marks, 'object')} known to be damaged; commits of the same content store them again"
        yield Finding("packs", PROBLEM, text, "Run `casckpt verify --read-data`: it names the steps that need them.")


def _locks(index_root: str) -> Iterator[Finding]:
    """Who holds the locks of the index at this moment."""
    paths = [os.path.join(index_root, BUILD_LOCK_NAME)]
    with contextlib.suppress(OSError):
        paths += [os.path.join(index_root, name, WRITE_LOCK_NAME) for name in os.listdir(index_root) if name.isdigit()]
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            continue
        try:
            is_held = not try_lock(descriptor, shared=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if is_held:
            holder = WriteLock(path).holder()
            text = f"the lock {path} is held by {holder or 'a process that left no name'}"
            yield Finding("index", WARN, text, "Fine while it writes. If it hangs or was stopped, continue or end it.")


def timeline(problems: Callable[[], list[tuple[str, str]]]) -> Iterator[Finding]:
    """What a look at every entry and file size finds (a verification without data)."""
    try:
        found = problems()
    except CasckptError as error:
        yield Finding("store", PROBLEM, error.message, "Run `casckpt verify`.")
        return
    for kind, message in found:
        yield Finding("packs" if kind in ("missing", "incomplete") else "store", PROBLEM, message)
    if not found:
        yield Finding("store", OK, "every entry can be read, and every object lies in a file of the right size")


def strangers(names: list[str], known: set[str]) -> Iterator[Finding]:
    """Files in the store's folder that are none of the store's."""
    others = sorted(set(names) - known)
    if others:
        text = f"not of this store: {', '.join(others[:5])}{' …' if len(others) > 5 else ''}"
        yield Finding("folder", WARN, text, "They are left alone; move them elsewhere if they are not yours.")
