"""Compressor contexts belong to one thread and one process."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from casckpt.codec import decode_into, encode, zstd

THREADS, CHUNKS = 16, 10_000


@pytest.mark.full
def test_sixteen_threads_compress_ten_thousand_chunks_each_without_mixing_them() -> None:
    """Contexts shared between threads give wrong frames or crash within a few hundred chunks."""
    wrong: list[tuple[int, int]] = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        start.wait()
        for i in range(CHUNKS):
            plain = b"%d:%d " % (number, i) * 9
            if zstd.decompress(zstd.compress(plain, "match"), len(plain), "zstd") != plain:
                wrong.append((number, i))

    run([threading.Thread(target=work, args=(number,)) for number in range(THREADS)])
    assert wrong == []


def test_threads_encode_and_decode_different_chunks_at_once() -> None:
    rng = np.random.default_rng(0)
    plains = [rng.normal(size=9_000).astype(np.float32).tobytes() for _ in range(THREADS)]
    good = [0] * THREADS

    def work(number: int) -> None:
        plain = plains[number]
        out = bytearray(len(plain))
        for _ in range(12):
            encoded = encode(memoryview(plain), 4)
            decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, (), memoryview(out))
            good[number] += out == plain and encoded.rejected is None

    run([threading.Thread(target=work, args=(number,)) for number in range(THREADS)])
    assert good == [12] * THREADS


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


FORKING = """
import os
from casckpt.codec import encode, zstd
plain = memoryview(b"what the parent compressed " * 400)
encode(plain, 1)
parents = zstd._contexts.compressors
child = os.fork()
if child == 0:
    is_fresh = zstd._contexts.compressors is not parents
    os._exit(0 if is_fresh and encode(plain, 1).codec == 2 else 1)
status = os.waitpid(child, 0)[1]
assert zstd._contexts.compressors is parents
print("status", os.waitstatus_to_exitcode(status))
"""


def test_forked_child_drops_the_parents_contexts() -> None:
    found = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True)
    assert found.stdout == "status 0\n"
