"""Whatever repeats comes back, whatever is forged is an error or stays inside its chunk, and a plain decoder agrees."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from casckpt.codec import Encoded, Hint, decode_into
from casckpt.codec.frames import Frames, encode_frames
from casckpt.errors import CorruptionError
from tests.conformance.independent_codecs import decode_codec
from tests.property.mutation import mutate

KINDS = st.sampled_from(["still", "few", "noise", "camera", "random"])
GEOMETRIES = st.sampled_from(
    [(16, 4, 1), (48, 6, 1), (64, 0, 2), (72, 0, 8), (100, 10, 1), (132, 0, 4), (256, 16, 1), (17, 17, 1)]
)


def make(kind: str, geometry: tuple[int, int, int], count: int, stack: int, series: int, seed: int) -> bytes:
    """`count` rows of `stack` frames that advance by one, of several environments in turn; the test's own generator."""
    rng = np.random.default_rng(seed)
    size = geometry[0]
    films = []
    for _ in range(series):
        film = np.zeros((count // series + stack + 1, size), np.uint8)
        film[0] = rng.integers(0, 256, size)
        for at in range(1, len(film)):
            film[at] = film[at - 1]
            if kind == "few":
                film[at, rng.integers(0, size, 3)] = rng.integers(0, 256, 3)
            elif kind == "noise":
                film[at] += rng.integers(0, 5, size).astype(np.uint8)
            elif kind == "random":
                film[at] = rng.integers(0, 256, size)
        if kind == "camera":
            waves = 120 + 60 * np.sin(np.arange(size) / 9 + np.arange(len(film))[:, None] / 5)
            film = np.clip(waves + rng.normal(0, 6, film.shape), 0, 255).astype(np.uint8)
        films.append(film)
    rows = [films[row % series][row // series : row // series + stack] for row in range(count)]
    return b"".join(row.tobytes() for row in rows)


def decoded(encoded: Encoded, base: bytes | None, size: int) -> bytes:
    whole = bytearray(b"\xee" * (size + 64))
    out = memoryview(whole)[32 : 32 + size]
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, _bases(base), out)
    finally:
        assert whole[:32] == whole[32 + size :] == b"\xee" * 32, "written outside the chunk"
    return bytes(out)


def _bases(base: bytes | None) -> tuple[bytes, ...]:
    return () if base is None else (base,)


@given(
    KINDS,
    GEOMETRIES,
    st.integers(1, 24),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(["none", "before", "same", "sibling"]),
    st.integers(0, 2**32),
)
@example("camera", (256, 16, 1), 24, 4, 1, 0, 0, "none", 0)
@example("few", (64, 0, 2), 24, 4, 3, 7, 3, "before", 0)
@example("random", (16, 4, 1), 1, 1, 1, 0, 0, "before", 0)
def test_every_chunk_of_frames_comes_back(
    kind: str,
    geometry: tuple[int, int, int],
    count: int,
    stack: int,
    series: int,
    skip: int,
    rest: int,
    which: str,
    seed: int,
) -> None:
    size, width, itemsize = geometry
    rows = make(kind, geometry, 2 * count + 1, stack, series, seed)
    row_size = size * stack
    noise = np.random.default_rng(seed).bytes(skip + rest)
    plain = noise[:skip] + rows[count * row_size : 2 * count * row_size] + noise[skip:]
    base = {
        "none": None,
        "before": b"ab" + rows[: count * row_size] + b"c",
        "same": b"ab" + rows[count * row_size : 2 * count * row_size],
        "sibling": b"ab" + rows[(count + 1) * row_size :],
    }[which]
    frames = Frames(size, width, itemsize, series * stack, skip, 2)
    view = None if base is None else memoryview(base)
    encoded = encode_frames(memoryview(plain), frames, view, ceiling=2 * len(plain) + 1000)
    if encoded is None:  # nothing repeats and nothing follows from anything
        assert which != "same"
        assert stack == 1 or count <= series
        return
    assert encoded.rejected is None
    assert (encoded.codec, encoded.version) == (6, 1)
    assert encoded.stored_size == len(encoded.payload)
    assert decoded(encoded, base, len(plain)) == plain
    if len(plain) < 6000:
        bases = list(_bases(base))
        assert decode_codec(6, encoded.params, bytes(encoded.payload), len(plain), bases) == plain


@given(
    st.lists(st.tuples(KINDS, GEOMETRIES, st.integers(1, 12), st.booleans()), max_size=12),
    st.integers(100, 9000),
    st.integers(0, 99),
)
def test_a_hint_from_other_chunks_changes_size_but_never_content(
    chunks: list[tuple[str, tuple[int, int, int], int, bool]], ceiling: int, seed: int
) -> None:
    hint = Hint()
    for number, (kind, geometry, count, has_base) in enumerate(chunks):
        size, width, itemsize = geometry
        rows = make(kind, geometry, 2 * count, 3, 1, seed + number)
        base, plain = rows[: len(rows) // 2] if has_base else None, rows[len(rows) // 2 :]
        view = None if base is None else memoryview(base)
        encoded = encode_frames(memoryview(plain), Frames(size, width, itemsize), view, hint, ceiling=ceiling)
        if encoded is not None:
            assert encoded.rejected is None
            assert encoded.stored_size + len(encoded.params) + 32 * has_base < ceiling
            assert decoded(encoded, base, len(plain)) == plain


FUZZED = [("few", True), ("camera", False), ("camera", True), ("noise", True), ("random", True), ("still", False)]


@pytest.mark.parametrize(("kind", "has_base"), FUZZED)
def test_mutated_forms_decode_inside_the_chunk_or_are_corruption(kind: str, has_base: bool, seed: int) -> None:
    rng = random.Random(seed)
    rows = make(kind, (64, 8, 1), 40, 4, 1, 1)
    base, plain = rows[: len(rows) // 2] if has_base else None, rows[len(rows) // 2 :]
    view = None if base is None else memoryview(base)
    encoded = encode_frames(memoryview(plain), Frames(64, 8), view, ceiling=2 * len(plain))
    assert encoded is not None
    outcomes = {"error": 0, "bytes": 0}
    for _ in range(400):
        params, payload = mutate(rng, encoded.params, bytes(encoded.payload))
        given_size = rng.choice([len(plain)] * 4 + [0, 1, len(plain) - 1, len(plain) + 1, 2 * len(plain)])
        forged_base = base if base is None else rng.choice([base, base, base[:-1], base * 2, b""])
        forged = Encoded(encoded.codec, encoded.version, params, payload, len(payload))
        try:
            assert len(decoded(forged, forged_base, given_size)) == given_size
            outcomes["bytes"] += 1
        except CorruptionError:
            outcomes["error"] += 1
    assert outcomes["error"] > 100
