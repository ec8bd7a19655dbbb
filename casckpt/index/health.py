"""Whether an LMDB folder may be mapped into this process, decided without mapping it.

A damaged LMDB file does not fail politely: reading a page that is not there is a bus error, a wild page number a
segmentation fault. So the files are first looked at with plain reads (`examine`): kind, size, the two meta pages, the
magic of the lock file. What cannot be right raises `Distrust`; what is merely odd is *suspect* and goes to `probe`:
another process that reads every page, and may die of it.

The **seal**: whoever closes the data file sets its modification time to `SEAL_NS`. Any later write sets it to the
present, so a sealed file is one that nobody wrote to since it was closed, for the price of one stat.

Layout of LMDB 0.9 data files (64-bit, native byte order), from lmdb's mdb.c: page header of 16 bytes; meta page: magic,
version, address, map size, two database records of 48 bytes, last page, transaction number.
This file imports no lmdb; the probe's script does, in its own process.
"""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys

from casckpt import limits
from casckpt.index.lock import SAFE_FLAGS

SEAL_NS = 1_000_000_000 * 10**9  # 2001-09-09, even seconds: every file system can hold it, no clock will say it again

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META = struct.Struct(
    "=16xIIQQ40xQ40xQQQ"
)  # magic, version, address, map size, root of free list, root, last page, txn
_PAGE_SIZE_AT = 40  # the free list's record starts with the page size
_NO_PAGE = 2**64 - 1
_IS_64_BIT = struct.calcsize("P") == 8

_PROBE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import lmdb
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
env = lmdb.open(sys.argv[2], readonly=True, create=False, readahead=False)
with env.begin() as txn:
    last, count = b"", 0
    for key, value in txn.cursor():
        assert key > last, "keys out of order"
        last, count = key, count + 1
    assert count == txn.stat()["entries"], "entry count is wrong"
with open(os.devnull, "wb") as nowhere:
    env.copyfd(nowhere.fileno(), compact=True)  # walks the free list too
print("whole")
"""


class Distrust(Exception):
    """Why an index is not used. Stays inside the index layer: callers see it as a reason."""


def identity(path: str, what: str) -> tuple[int, int, os.stat_result]:
    """Device and inode of a plain file or folder at `path`; links are not followed.

    Raises:
        Distrust: nothing is there.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        raise Distrust(f"damaged: {what} is missing") from None
    return found.st_dev, found.st_ino, found


def is_sealed(data_path: str) -> bool:
    """True when nobody wrote to the file since it was closed."""
    return os.stat(data_path, follow_symlinks=False).st_mtime_ns == SEAL_NS


def seal(data_path: str) -> None:
    """Say that the file is closed; the caller holds the write lock."""
    os.utime(data_path, ns=(SEAL_NS, SEAL_NS))


def examine(data_path: str, lock_path: str) -> str | None:
    """Look at the files without mapping them; two small reads.

    Must not run while this process has the environment open: closing a descriptor of lock.mdb drops its locks.

    Returns:
        What is odd about them and asks for a probe, or None.

    Raises:
        Distrust: they cannot be a healthy LMDB environment.
    """
    if not _IS_64_BIT:
        return "meta pages of 32-bit systems are not read here"
    size_bytes, head = _read(data_path, "data.mdb", 2 * 65536)
    page_size = struct.unpack_from("=I", head, _PAGE_SIZE_AT)[0] if len(head) >= _META.size else 0
    if page_size not in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536) or size_bytes < 2 * page_size:
        raise Distrust(f"damaged: data.mdb of {size_bytes} bytes has no meta pages")
    metas = [_META.unpack_from(head, at) for at in (0, page_size)]
    for magic, version, _, _, free_root, root, last_page, _ in metas:
        if magic != _MAGIC or version != _DATA_VERSION:
            raise Distrust(f"damaged: data.mdb: meta page magic {magic:#x} version {version}")
        if any(page > last_page and page != _NO_PAGE for page in (free_root, root)):
            raise Distrust("damaged: data.mdb: a root page lies behind the last page")
    newest_last_page = max(metas, key=lambda meta: int(meta[-1]))[-2]
    lock_size_bytes, lock_head = _read(lock_path, "lock.mdb", 4)
    if size_bytes % page_size:
        return f"data.mdb of {size_bytes} bytes is no multiple of its page size {page_size}"
    if size_bytes < (newest_last_page + 1) * page_size:
        return f"data.mdb of {size_bytes} bytes is shorter than its {newest_last_page + 1} pages of {page_size}"
    if lock_size_bytes < 8192 or struct.unpack("=I", lock_head)[0] != _MAGIC:
        return "lock.mdb has no LMDB header"
    return None


def _read(path: str, what: str, size: int) -> tuple[int, bytes]:
    fd = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Distrust(f"damaged: {what} is not a regular file")
        return found.st_size, os.read(fd, size)
    finally:
        os.close(fd)


def probe(folder: str, lmdb_home: str, timeout_s: float = limits.PROBE_TIMEOUT_S) -> None:
    """Read every page of the environment in another process; about 0.1 s and 2 µs per entry.

    Raises:
        Distrust: that process died, complained, or took longer than `timeout_s`.
    """
    if not sys.executable:
        raise Distrust("damaged, perhaps: there is no Python interpreter to probe it with")
    command = [sys.executable, "-I", "-S", "-c", _PROBE, lmdb_home, folder]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Distrust(f"damaged: the probe took longer than {timeout_s:g} s") from None
    if done.returncode != 0 or done.stdout.strip() != b"whole":
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Distrust(f"damaged: the probe ended with {done.returncode} {last_line}".rstrip())
