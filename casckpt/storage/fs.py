"""The only door to a store's files.

`FileSystem` is the interface that everything above uses; `LocalFileSystem` is the real one. Test doubles that record
every operation, or fail the n-th, implement the same interface (`casckpt.testing`).

Rules that hold here:

* Every descriptor is close-on-exec, and `os.register_at_fork` closes those that a forked child inherits.
* `File.sync` that fails poisons the file: the kernel may have dropped the dirty pages, so it is never tried again.
* Errors are `StorageError` / `OutOfSpaceError` with `errno` and `path`; a missing file is `FileNotFoundError`, a taken
  name `FileExistsError`, because callers decide on those two.
* Linux-only calls (preallocation, early write-back, page-cache advice) are hints: without them everything works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from casckpt.errors import OutOfSpaceError, StorageError

_IS_LINUX = sys.platform.startswith("linux")
_IS_MACOS = sys.platform == "darwin"
_F_FULLFSYNC = 51  # <fcntl.h> on macOS: fsync alone leaves data in the drive's cache
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>: start write-out, do not wait
_O_CLOEXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class File(Protocol):
    """An open file. Offsets and sizes in bytes."""

    path: str

    def write(self, buffers: Sequence[Any], offset: int) -> int:
        """Write all buffers one after the other at `offset`; returns the bytes written (always all of them)."""

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fill a writable buffer from `offset`; returns fewer bytes only at the end of the file."""

    def preallocate(self, size: int) -> None:
        """Reserve disk space, so that a full disk shows early. A hint where it is not supported."""

    def truncate(self, size: int) -> None: ...

    def start_writeback(self, offset: int, size: int) -> None:
        """Begin writing a range to disk without waiting, so that the final sync is short. A hint."""

    def drop_cache(self, offset: int, size: int) -> None:
        """Tell the kernel that the range will not be read soon. A hint; only clean pages go."""

    def sync(self) -> None:
        """Make the content durable. Raises StorageError, and raises it again at every later call."""

    def size(self) -> int: ...

    def map(self, offset: int, size: int) -> FileMap | None:
        """A range as private memory; None where this cannot be done, or the file is shorter."""

    def close(self) -> None: ...


class FileSystem(Protocol):
    """Paths are absolute strings. Methods raise StorageError, FileNotFoundError or FileExistsError."""

    def create(self, path: str) -> File:
        """A new file for writing and reading; FileExistsError when the name is taken."""

    def open(self, path: str) -> File:
        """An existing regular file for reading; links are not followed."""

    def rename(self, source: str, target: str) -> None:
        """Move, replacing `target`."""

    def link(self, source: str, target: str) -> None:
        """Give `source` a second name, or FileExistsError; falls back to an exclusive rename."""

    def unlink(self, path: str) -> None: ...

    def make_folder(self, path: str) -> None:
        """Create one folder; no error when it is there."""

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty when it is not there."""

    def size(self, path: str) -> int | None:
        """Size of a regular file, or None when there is none under this name."""

    def sync_folder(self, path: str) -> None:
        """Make names in a folder durable."""


def read_file(fs: FileSystem, path: str, size_max: int) -> bytes:
    """The whole file. Raises StorageError when it is larger than `size_max` bytes."""
    file = fs.open(path)
    try:
        size = file.size()
        if size > size_max:
            raise StorageError(f"{path}: {size} bytes, expected at most {size_max}", path=path, errno=errno.EFBIG)
        buffer = bytearray(size)
        return bytes(buffer[: file.read_into(buffer, 0)])
    finally:
        file.close()


def write_file(fs: FileSystem, path: str, parts: Iterable[Any]) -> None:
    """A new file of these buffers, one after the other; durable but for its name: that takes a sync of the folder.

    Raises:
        FileExistsError: there is such a file.
        StorageError: it could not be written; a part of it may lie there.
    """
    file = fs.create(path)
    try:
        offset = 0
        for part in parts:
            file.write([part], offset)
            offset += len(part)
        file.sync()
    finally:
        file.close()


def replace_file(fs: FileSystem, temporary: str, target: str, parts: Iterable[Any]) -> None:
    """A file in place of the one under its name, if there is one; durable but for the name: as `write_file`.

    Raises:
        StorageError: the old one is there, and no temporary file is left of this.
    """
    try:
        write_file(fs, temporary, parts)
        fs.rename(temporary, target)
    except BaseException:  # Ctrl-C among them: outside of a store no collector cleans up
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise


@contextlib.contextmanager
def _typed(operation: str, path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError, StorageError):
        raise
    except OSError as error:
        raise typed_error(error, operation, path) from error


_ABOUT_THE_FILE = {errno.EIO, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EFBIG}
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


def is_about_file(error: OSError) -> bool:
    """Whether an error says something of the file itself: its medium, its kind, its size.

    Others (too many open files, no memory, no permission) say nothing of the data and may pass: they must never be
    taken for damage.
    """
    return error.errno in _ABOUT_THE_FILE


def is_of_medium(error: BaseException) -> bool:
    """Whether something counts as damaged only because the medium refused to give it, this once or for ever."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EIO


def is_out_of_descriptors(error: OSError) -> bool:
    return error.errno in _OUT_OF_DESCRIPTORS


def typed_error(error: OSError, operation: str, path: str) -> StorageError:
    """The StorageError for an OSError of `operation` on `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(
            f"{path}: no space left ({operation}). Free space on this disk and commit again.",
            path=path,
            errno=error.errno,
            operation=operation,
        )
    return StorageError(
        f"{path}: {operation} failed: {error.strerror or error}. Run `casckpt doctor`.",
        path=path,
        errno=error.errno,
        operation=operation,
    )


_open_files: weakref.WeakSet[LocalFile] = weakref.WeakSet()


class FileMap:
    """A range of a file as memory. Private: what is written into it stays there. It holds a descriptor of its own, so
    that it outlives the file's name.

    A page that the file has no longer ends the process when it is touched, and one that was written to in the file may
    be another one here. That happens when a file is cut short or written to in place, which nothing of casckpt does;
    `check` finds it before.

    Attributes:
        memory: the range, writable.
    """

    def __init__(self, path: str, mapped: mmap.mmap, start: int, stop: int, known: os.stat_result) -> None:
        self.path = path
        self._mapped, self._stop, self._known = mapped, stop, known
        self.memory = memoryview(mapped)[start:]

    def check(self) -> None:
        """Find out whether the memory may be touched.

        Raises:
            StorageError: the file is shorter than it was, or was written to since.
        """
        with _typed("stat", self.path):
            size = self._mapped.size()
            changed = "" if size >= self._stop else f"{size} bytes, mapped up to {self._stop}: it was cut short since"
            with contextlib.suppress(FileNotFoundError):  # without a name, there is none under which it is written to
                now, known = os.stat(self.path), self._known
                if os.path.samestat(now, known) and now.st_mtime_ns != known.st_mtime_ns:
                    changed = changed or "it was written to since it was mapped"
        if changed:
            raise StorageError(
                f"{self.path}: {changed}, and must not be touched there. Run `casckpt verify`.",
                path=self.path,
                errno=errno.EIO,
            )


class LocalFile:
    """A file of the local file system, by descriptor."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._sync_error: StorageError | None = None
        _open_files.add(self)

    def write(self, buffers: Sequence[Any], offset: int) -> int:
        with _typed("write", self.path):
            views = [memoryview(b).cast("B") for b in buffers]
            total = sum(len(v) for v in views)
            position = offset
            while views:
                batch = views[:_IOV_MAX]
                written = _write_vector(self._descriptor, batch, position)
                position += written
                views = _drop(views, written)
            return total

    def read_into(self, buffer: Any, offset: int) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        with _typed("read", self.path):
            while done < len(view):
                count = _read_vector(self._descriptor, view[done:], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def preallocate(self, size: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise typed_error(error, "preallocate", self.path) from error
            # Anything else: this file system cannot; writing will show whether there is room.

    def truncate(self, size: int) -> None:
        with _typed("truncate", self.path):
            os.ftruncate(self._descriptor, size)

    def start_writeback(self, offset: int, size: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(self._descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)

    def drop_cache(self, offset: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        if self._sync_error is not None:
            raise self._sync_error
        try:
            if _IS_MACOS:
                import fcntl

                fcntl.fcntl(self._descriptor, _F_FULLFSYNC)
            elif hasattr(os, "fdatasync"):
                os.fdatasync(self._descriptor)  # size changes are synced too; only times are left out
            else:
                os.fsync(self._descriptor)
        except OSError as error:
            self._sync_error = typed_error(error, "fsync", self.path)
            raise self._sync_error from error

    def size(self) -> int:
        with _typed("stat", self.path):
            return os.fstat(self._descriptor).st_size

    def map(self, offset: int, size: int) -> FileMap | None:
        if self._descriptor < 0:
            return None  # closed: -1 would map fresh zeros
        first = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            known = os.fstat(self._descriptor)
            mapped = mmap.mmap(self._descriptor, offset + size - first, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError):
            return None
        return FileMap(self.path, mapped, offset - first, offset + size, known)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with _typed("close", self.path):
                os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class LocalFileSystem:
    """The real file system."""

    def create(self, path: str) -> LocalFile:
        with _typed("create", path):
            return LocalFile(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | _O_CLOEXEC, 0o644))

    def open(self, path: str) -> LocalFile:
        with _typed("open", path):
            # O_NONBLOCK: a FIFO under this name must not hang us; it is refused below.
            flags = os.O_RDONLY | _O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(path, flags)
        file = LocalFile(path, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise StorageError(f"{path}: not a regular file. Run `casckpt doctor`.", path=path, errno=errno.EINVAL)
        return file

    def rename(self, source: str, target: str) -> None:
        with _typed("rename", target):
            os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        with _typed("link", target):
            try:
                os.link(source, target)
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            _rename_exclusive(source, target)

    def unlink(self, path: str) -> None:
        with _typed("unlink", path):
            os.unlink(path)

    def make_folder(self, path: str) -> None:
        with _typed("mkdir", path), contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def list(self, path: str) -> list[str]:
        with _typed("list", path):
            try:
                return sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, path: str) -> int | None:
        with _typed("stat", path):
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sync_folder(self, path: str) -> None:
        if os.name == "nt":
            return  # Windows has no folder descriptors; NTFS journals names by itself
        with _typed("fsync folder", path):
            descriptor = os.open(path, os.O_RDONLY | _O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


_IOV_MAX = 512
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_RENAME_NOREPLACE = 1  # <linux/fs.h>
_AT_FDCWD = -100


def _drop(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after `count` bytes of them were written."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _load_sync_file_range() -> Any:
    if not _IS_LINUX:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _load_sync_file_range()


def _rename_exclusive(source: str, target: str) -> None:
    """A rename that refuses to replace, for file systems without hard links."""
    if os.name == "nt":
        os.rename(source, target)  # on Windows this raises FileExistsError
        return
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if _IS_LINUX else None
    if function is None:
        raise OSError(errno.ENOTSUP, "this file system has neither hard links nor an exclusive rename")
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


if hasattr(os, "pwritev"):
    _write_vector = os.pwritev

    def _read_vector(descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)
else:  # Windows: no positioned I/O; callers use each file from one thread at a time there

    def _write_vector(descriptor: int, views: Sequence[memoryview], offset: int) -> int:  # type: ignore[misc]
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, views[0])

    def _read_vector(descriptor: int, view: memoryview, offset: int) -> int:
        os.lseek(descriptor, offset, os.SEEK_SET)
        piece = os.read(descriptor, len(view))
        view[: len(piece)] = piece
        return len(piece)


def _close_inherited() -> None:
    for file in list(_open_files):
        with contextlib.suppress(OSError):
            file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
