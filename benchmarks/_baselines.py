"""The speed of light of each row: the least that any program must do to the same bytes.

Threads: a baseline that hashes uses as many as casckpt's own pool does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from benchmarks._states import pieces

MIB = 1 << 20
PIECE_SIZE = 8 * MIB  # of writes, and of the tasks of the pool
HASH_SIZE = MIB  # bytes under one digest, as in a store


def thread_pool() -> ThreadPoolExecutor:
    """As many threads as there are usable cores, eight at most: what casckpt uses too."""
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))


def preallocate(path: str, size_bytes: int) -> int:
    """Create a file of that size with its blocks reserved; returns the descriptor."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.posix_fallocate(fd, 0, size_bytes)
    return fd


def write_and_sync(fd: int, plain: memoryview) -> None:
    """Write all of `plain` into the preallocated file, then fsync it."""
    offset = 0
    for piece in pieces(plain, PIECE_SIZE):
        offset += os.pwrite(fd, piece, offset)
    if offset != len(plain):
        raise OSError(f"short write: {offset} of {len(plain)} bytes")
    os.fsync(fd)


def small_durable_file(path: str, plain: bytes) -> None:
    """Create one new file, fsync it, fsync its folder: the least that makes a few bytes durable under a new name."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, plain)
    os.fsync(fd)
    os.close(fd)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)


def hash_all(pool: ThreadPoolExecutor, plain: memoryview) -> None:
    """blake3 of every MiB of `plain` in memory, on the threads of `pool`."""

    def task(piece: memoryview) -> None:
        for part in pieces(piece, HASH_SIZE):
            blake3(part).digest()

    _run_all(pool, task, [(piece,) for piece in pieces(plain, PIECE_SIZE)])


def read_and_hash(pool: ThreadPoolExecutor, fd: int, into: memoryview) -> None:
    """Read a file into memory a MiB at a time and hash each while it is in cache, on the threads of `pool`."""

    def task(start: int, piece: memoryview) -> None:
        for number, part in enumerate(pieces(piece, HASH_SIZE)):
            if os.preadv(fd, [part], start + number * HASH_SIZE) != len(part):
                raise OSError("short read")
            blake3(part).digest()

    starts = range(0, len(into), PIECE_SIZE)
    _run_all(pool, task, list(zip(starts, pieces(into, PIECE_SIZE), strict=True)))


def _run_all(pool: ThreadPoolExecutor, task: Callable[..., None], arguments: list[tuple[object, ...]]) -> None:
    for future in [pool.submit(task, *each) for each in arguments]:
        future.result()
