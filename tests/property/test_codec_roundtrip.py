"""Whatever is encoded decodes to itself, and whatever is damaged is an error or stays inside its chunk."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from casckpt.codec import Encoded, Hint, decode_into, encode
from casckpt.errors import CorruptionError
from tests.property.mutation import mutate

CHUNK = 1 << 16  # as a store may set it; every branch is the same at 1 MiB

ITEM_SIZES = st.sampled_from([1, 2, 3, 4, 8, 13, 16, 17, 40, 64, 65, 500])
KINDS = st.sampled_from(["noise", "constant", "items", "floats", "counter", "runs", "text", "half"])


def make(kind: str, size: int, itemsize: int, seed: int) -> bytes:
    """Bytes of one kind; the generator is the test's own."""
    rng = np.random.default_rng(seed)
    if kind == "constant":
        return (rng.bytes(itemsize) * (size // itemsize + 1))[:size]
    if kind == "items":
        table = [rng.bytes(itemsize) for _ in range(3)]
        return b"".join(table[i] for i in rng.integers(0, 3, size // itemsize + 1))[:size]
    if kind == "floats":
        return rng.normal(size=size // 2 + 1).astype("f2" if itemsize == 2 else "f4").tobytes()[:size]
    if kind == "counter":
        return np.arange(size // 8 + 1, dtype="<u8").tobytes()[:size]
    if kind == "runs":
        return np.repeat(rng.integers(0, 256, size // 20 + 1, dtype=np.uint8), 20).tobytes()[:size]
    if kind == "text":
        return (b'{"step": 17, "loss": 0.25, "name": "policy"}, ' * (size // 40 + 1))[:size]
    if kind == "half":
        return bytes(size // 2) + rng.bytes(size - size // 2)
    return rng.bytes(size)


def decoded(encoded: Encoded, size: int) -> bytes:
    whole = bytearray(b"\xee" * (size + 64))
    out = memoryview(whole)[32 : 32 + size]
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, (), out)
    finally:
        assert whole[:32] == whole[32 + size :] == b"\xee" * 32, "written outside the chunk"
    return bytes(out)


@given(KINDS, st.one_of(st.integers(0, 300), st.integers(0, CHUNK + 1)), ITEM_SIZES, st.integers(0, 2**32))
@example("constant", CHUNK, 4, 0)
@example("constant", CHUNK + 1, 13, 0)
@example("floats", CHUNK, 4, 0)
@example("floats", CHUNK, 2, 0)
@example("counter", CHUNK, 8, 0)
@example("half", CHUNK, 16, 0)
@example("items", 1, 16, 0)
def test_every_chunk_comes_back(kind: str, size: int, itemsize: int, seed: int) -> None:
    plain = make(kind, size, itemsize, seed)
    encoded = encode(memoryview(plain), itemsize)
    assert decoded(encoded, size) == plain
    assert encoded.stored_size == len(encoded.payload) <= size
    assert encoded.rejected is None


@given(st.lists(st.tuples(KINDS, st.integers(0, 9000)), max_size=12), st.sampled_from([1, 2, 4, 8]), st.integers(0, 99))
def test_a_hint_from_other_data_changes_size_but_never_content(
    chunks: list[tuple[str, int]], itemsize: int, seed: int
) -> None:
    hint = Hint()
    for i, (kind, size) in enumerate(chunks):
        plain = make(kind, size, itemsize, seed + i)
        encoded = encode(memoryview(plain), itemsize if i % 3 else 4, hint)
        assert decoded(encoded, size) == plain
        assert encoded.stored_size <= size


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "i1",
        "u1",
        "i2",
        "u2",
        "<f2",
        ">f2",
        "i4",
        "u4",
        "<f4",
        ">f4",
        "i8",
        "u8",
        "<f8",
        ">f8",
        "c8",
        "c16",
        "S3",
        "S13",
        "U1",
        "U4",
        "M8[ns]",
        "g",
    ],
)
def test_arrays_of_every_dtype_come_back(dtype: str) -> None:
    kind = np.dtype(dtype)
    noise = np.random.default_rng(7).normal(scale=40, size=5001)
    if kind.kind in "SU":
        values = np.array([f"{value:.1f}" for value in noise]).astype(kind)
    elif kind.kind in "ub":
        values = np.abs(noise).astype(kind)
    else:
        values = noise.astype("i8" if kind.kind == "M" else kind).astype(kind)
    plain = values.tobytes()
    assert decoded(encode(memoryview(plain), kind.itemsize), len(plain)) == plain


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("itemsize", [1, 3, 4, 8, 16])
def test_zeros_of_every_edge_size_are_constant_and_come_back(size: int, itemsize: int) -> None:
    encoded = encode(memoryview(bytes(size)), itemsize)
    assert (encoded.codec, encoded.stored_size) == (1, 0)
    assert decoded(encoded, size) == bytes(size)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_runs_of_zeros_inside_noise_come_back(itemsize: int, seed: int) -> None:
    rng = random.Random(seed)
    hint = Hint()
    for run in [*range(1, 40), *(int(1.17**k) for k in range(24, 74)), 100_000]:
        before = rng.randrange(0, 5000)
        plain = rng.randbytes(before) + bytes(run) + rng.randbytes(rng.randrange(0, 5000))
        assert decoded(encode(memoryview(plain), itemsize, hint), len(plain)) == plain


@pytest.mark.few(40)
@pytest.mark.parametrize("at", [0, 1, 7, 8, 63, 64, 127, 128, 129, 200, 4096, 65535, 262143, 262144, -9, -8, -1])
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 13, 16, 64])
def test_one_wrong_byte_anywhere_is_not_constant(at: int, itemsize: int) -> None:
    plain = bytearray((bytes(range(1, itemsize + 1)) * 300_000)[:300_001])
    assert encode(memoryview(plain), itemsize).codec == 1
    plain[at] ^= 0x80
    encoded = encode(memoryview(plain), itemsize)
    assert encoded.codec != 1
    assert encoded.rejected is None, "found by the check only, not by the search for a pattern"
    assert decoded(encoded, len(plain)) == plain


FUZZED = [("constant", 4), ("floats", 4), ("floats", 2), ("counter", 8), ("text", 1), ("items", 13), ("noise", 4)]


@pytest.mark.parametrize(("kind", "itemsize"), FUZZED)
def test_mutated_forms_decode_inside_the_chunk_or_are_corruption(kind: str, itemsize: int, seed: int) -> None:
    rng = random.Random(seed)
    size = 6001
    plain = make(kind, size, itemsize, 1)
    encoded = encode(memoryview(plain), itemsize)
    outcomes = {"error": 0, "bytes": 0}
    for _ in range(300):
        params, payload = mutate(rng, encoded.params, bytes(encoded.payload))
        given_size = rng.choice([size, size, size, 0, 1, size - 1, size + 1, 2 * size])
        forged = Encoded(encoded.codec, encoded.version, params, payload, len(payload))
        try:
            assert len(decoded(forged, given_size)) == given_size
            outcomes["bytes"] += 1
        except CorruptionError:
            outcomes["error"] += 1
    assert outcomes["error"] > 50
