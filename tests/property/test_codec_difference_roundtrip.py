"""Whatever differs comes back, whatever is forged is an error or stays inside its chunk, and a plain decoder agrees.

The oracle decodes with Python integers, item by item, as docs/format.md says; it uses the codec for standalone forms
only.
"""

from __future__ import annotations

import random
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from casckpt.codec import Encoded, Hint, decode_into
from casckpt.codec.difference import encode_difference
from casckpt.errors import CorruptionError
from tests.property.mutation import mutate

CHUNK = 1 << 16

ITEM_SIZES = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 17, 40])
DENSITIES = st.sampled_from([0.0, 0.0001, 0.001, 0.01, 0.06, 0.1, 0.25, 0.5, 0.75, 1.0])
KINDS = st.sampled_from(["near", "last place", "noise", "runs", "rows", "floats"])
SIZES = st.one_of(st.integers(0, 300), st.integers(0, CHUNK + 1))


def make(kind: str, size: int, itemsize: int, density: float, seed: int) -> tuple[bytes, bytes]:
    """A base and a chunk of which about `density` differs; the generator is the test's own."""
    rng = np.random.default_rng(seed)
    width = itemsize if itemsize in (1, 2, 4, 8) else 1
    count = size // width + 1
    items = np.frombuffer(rng.bytes(count * width), f"<u{width}")
    if kind == "floats":  # NaNs of every payload, infinities, subnormals and zeros of both signs among them
        special = [0x7F800001, 0xFFC00000, 0x7F800000, 0xFF800000, 1, 0x80000001, 0, 0x80000000]
        drawn = 2 * (size // 8 + 2)
        singles = np.where(rng.random(drawn) < 0.2, rng.choice(special, drawn), rng.integers(0, 1 << 32, drawn))
        items = np.frombuffer(singles.astype("<u4").tobytes(), f"<u{width}")[:count]
    changed = rng.random(count) < density
    if kind in ("runs", "rows"):
        length = 37 if kind == "runs" else 256
        changed = np.repeat(rng.random(count // length + 1) < density, length)[:count]
    reach = {"near": 1000, "last place": 2}.get(kind, 1 << 62)
    added = rng.integers(-reach, reach, count).astype(np.int64).astype(f"<u{width}")
    moved = items + np.where(changed, added, 0).astype(f"<u{width}")
    return items.tobytes()[:size], moved.tobytes()[:size]


def decoded(encoded: Encoded, base: bytes, size: int) -> bytes:
    whole = bytearray(b"\xee" * (size + 64))
    out = memoryview(whole)[32 : 32 + size]
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, (base,), out)
    finally:
        assert whole[:32] == whole[32 + size :] == b"\xee" * 32, "written outside the chunk"
    return bytes(out)


def part(codec: int, params: bytes, payload: bytes, size: int) -> bytes:
    out = bytearray(size)
    decode_into(codec, 1, params, payload, (), memoryview(out))
    return bytes(out)


def numbers(plain: bytes, width: int) -> list[int]:
    return [int.from_bytes(plain[at : at + width], "little") for at in range(0, len(plain) // width * width, width)]


def oracle(params: bytes, payload: bytes, base: bytes) -> bytes:
    """docs/format.md, codec 4, word for word."""
    width, method = params[0], params[1]
    bias = int.from_bytes(params[2 : 2 + width], "little")
    rest = params[2 + width :]
    items, tail_size = numbers(base, width), len(base) % width
    if method == 0:
        plain = part(rest[0], rest[1:], payload, len(base))
        added, tail = numbers(plain, width), plain[len(base) - tail_size :]
        positions = list(range(len(items)))
    else:
        count, gap_width, codec, gaps_size, params_size = struct.unpack_from("<IBBIB", rest)
        end = 11 + params_size
        gaps = numbers(part(codec, rest[11:end], payload[:gaps_size], count * gap_width), gap_width)
        stop = len(payload) - tail_size
        added = numbers(part(rest[end], rest[end + 1 :], payload[gaps_size:stop], count * width), width)
        tail = payload[stop:]
        positions = [sum(gaps[: at + 1]) - 1 for at in range(count)] if count < 200 else list(np.cumsum(gaps) - 1)
    for position, value in zip(positions, added, strict=True):
        items[position] = (items[position] + value - bias) % (1 << (8 * width))
    return b"".join(item.to_bytes(width, "little") for item in items) + tail


@given(KINDS, SIZES, ITEM_SIZES, DENSITIES, st.integers(0, 2**32))
@example("near", CHUNK, 4, 1.0, 0)
@example("near", CHUNK + 1, 2, 1.0, 0)
@example("last place", CHUNK + 1, 8, 0.25, 0)
@example("rows", CHUNK - 1, 4, 0.5, 0)
@example("floats", CHUNK, 4, 1.0, 0)
@example("noise", CHUNK, 1, 0.25, 0)
@example("noise", 1, 8, 1.0, 0)
@example("noise", 0, 1, 1.0, 0)
def test_every_pair_comes_back(kind: str, size: int, itemsize: int, density: float, seed: int) -> None:
    base, plain = make(kind, size, itemsize, density, seed)
    encoded = encode_difference(memoryview(plain), memoryview(base), itemsize, ceiling=2 * size + 1000)
    assert encoded is not None
    assert encoded.rejected is None
    assert encoded.codec == 4
    assert encoded.stored_size == len(encoded.payload)
    assert decoded(encoded, base, size) == plain
    if size < 3000:
        assert oracle(encoded.params, bytes(encoded.payload), base) == plain


@given(
    st.lists(st.tuples(KINDS, st.integers(0, 9000), DENSITIES), max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 9000),
    st.integers(0, 99),
)
def test_a_hint_from_other_pairs_changes_size_but_never_content(
    pairs: list[tuple[str, int, float]], itemsize: int, ceiling: int, seed: int
) -> None:
    hint = Hint()
    for number, (kind, size, density) in enumerate(pairs):
        base, plain = make(kind, size, itemsize, density, seed + number)
        width = itemsize if number % 3 else 4
        encoded = encode_difference(memoryview(plain), memoryview(base), width, hint, ceiling=ceiling)
        if encoded is not None:
            assert encoded.rejected is None
            assert encoded.stored_size + len(encoded.params) + 32 < ceiling
            assert decoded(encoded, base, size) == plain


@given(KINDS, SIZES, st.sampled_from([1, 2, 4, 8]), DENSITIES, st.integers(0, 99))
def test_difference_stays_under_its_ceiling_or_is_none(
    kind: str, size: int, itemsize: int, density: float, seed: int
) -> None:
    base, plain = make(kind, size, itemsize, density, seed)
    encoded = encode_difference(memoryview(plain), memoryview(base), itemsize, ceiling=size // 2)
    assert encoded is None or encoded.stored_size + len(encoded.params) + 32 < size // 2


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("at", [0, 1, 7, 8, 9, 4095, 32_767, 60_000, -17, -9, -8, -2, -1])
def test_one_changed_byte_anywhere_is_found(itemsize: int, at: int) -> None:
    base = np.random.default_rng(0).bytes(CHUNK + 13)
    plain = bytearray(base)
    plain[at] ^= 0x80
    encoded = encode_difference(memoryview(plain), memoryview(base), itemsize, ceiling=len(base))
    assert encoded is not None
    assert encoded.rejected is None, "found by the proof only, not by the comparison"
    assert encoded.stored_size < 24
    assert decoded(encoded, base, len(base)) == plain


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_equal_chunks_of_every_edge_size_cost_parameters_only(size: int, itemsize: int) -> None:
    plain = memoryview(np.random.default_rng(size).bytes(size))
    encoded = encode_difference(plain, plain, itemsize, ceiling=1000)
    assert encoded is not None
    assert encoded.stored_size == size % itemsize
    assert decoded(encoded, bytes(plain), size) == plain


FUZZED = [("near", 4, 1.0), ("last place", 2, 0.01), ("noise", 1, 0.05), ("rows", 8, 0.3), ("last place", 4, 0.3)]


@pytest.mark.parametrize(("kind", "itemsize", "density"), FUZZED)
def test_mutated_forms_decode_inside_the_chunk_or_are_corruption(
    kind: str, itemsize: int, density: float, seed: int
) -> None:
    rng = random.Random(seed)
    size = 6001
    base, plain = make(kind, size, itemsize, density, 1)
    encoded = encode_difference(memoryview(plain), memoryview(base), itemsize, ceiling=size)
    assert encoded is not None
    outcomes = {"error": 0, "bytes": 0}
    for _ in range(400):
        params, payload = mutate(rng, encoded.params, bytes(encoded.payload))
        given_size = rng.choice([size, size, size, 0, 1, size - 1, size + 1, 2 * size])
        forged_base = (base * 2 + b"more")[:given_size]
        forged = Encoded(encoded.codec, encoded.version, params, payload, len(payload))
        try:
            assert len(decoded(forged, forged_base, given_size)) == given_size
            outcomes["bytes"] += 1
        except CorruptionError:
            outcomes["error"] += 1
    assert outcomes["error"] > 100
