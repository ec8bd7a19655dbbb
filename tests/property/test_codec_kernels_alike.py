"""With compiled kernels and without, encoders write the same bytes, and decoders read the same from any bytes.

Which of the two a machine has is in no record, so whatever one writes the other must read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from casckpt.codec import Encoded, Hint, decode_into, encode
from casckpt.codec.difference import encode_difference
from casckpt.codec.models import Model
from casckpt.codec.prediction import encode_prediction
from casckpt.errors import CorruptionError
from tests.property.mutation import mutate
from tests.property.test_codec_prediction_roundtrip import MODELS, SHAPES, bases_of, make
from tests.unit.kernel_ways import by_numpy, placed, with_kernels

pytestmark = with_kernels

SIZES = st.integers(0, 200) | st.integers(0, 20_000)
SEEDS = st.integers(0, 2**32)
DENSITIES = st.sampled_from([0, 0.001, 0.02, 0.1, 0.4, 0.6, 1])


def drawn(size: int, seed: int) -> bytes:
    """Noise, few values, runs or floats near each other."""
    rng = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:
        return rng.bytes(size)
    if kind == 1:
        return rng.choice(np.array([0, 1, 255], np.uint8), size).tobytes()
    if kind == 2:
        return np.repeat(rng.integers(0, 256, size // 7 + 1, np.uint8), 7)[:size].tobytes()
    return rng.normal(1, 0.01, size // 4 + 1).astype("<f4").tobytes()[:size]


def moved(base: bytes, itemsize: int, density: float, seed: int) -> bytes:
    """A base of which so many items are moved by a few units, some by any."""
    rng = np.random.default_rng(seed)
    width = max(each for each in (1, 2, 4, 8) if itemsize % each == 0)
    items = np.frombuffer(base, f"<u{width}", len(base) // width).copy()
    is_moved = rng.random(len(items)) < density
    steps = rng.integers(-9, 10, len(items)) * rng.choice([1, 1, 1, 1000], len(items))
    items[is_moved] += steps[is_moved].astype(items.dtype)
    return items.tobytes() + rng.bytes(len(base) % width)


def both_ways(write: Callable[[], Encoded | None], plain: bytes, bases: Sequence[bytes | memoryview]) -> Encoded | None:
    """Encode with the kernels and without: the same bytes, which both ways read."""
    found, expected = write(), by_numpy(write)
    assert (found is None) == (expected is None)
    if found is None:
        return None
    assert (found.codec, found.rejected, found.params) == (expected.codec, None, expected.params)
    assert bytes(found.payload) == bytes(expected.payload)
    for read in (decoded, lambda *given: by_numpy(decoded, *given)):
        assert read(found, bases, len(plain), 3) == plain
    return found


def decoded(encoded: Encoded, bases: Sequence[bytes | memoryview], size: int, shift: int = 0) -> bytes:
    """What it decodes to, in memory that starts anywhere; what lies around stays."""
    whole = placed(b"\xee" * (size + 64), shift)
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, bases, whole[32 : 32 + size])
    finally:
        assert whole[:32] == whole[32 + size :] == b"\xee" * 32, "written outside the chunk"
    return bytes(whole[32 : 32 + size])


@given(SIZES, st.integers(1, 17), SEEDS)
def test_standalone_forms_are_the_same(size: int, itemsize: int, seed: int) -> None:
    plain = placed(drawn(size, seed), seed % 8)
    both_ways(lambda: encode(plain, itemsize), bytes(plain), ())


@given(SIZES, st.sampled_from([1, 2, 3, 4, 6, 8, 16]), DENSITIES, SEEDS)
def test_differences_are_the_same(size: int, itemsize: int, density: float, seed: int) -> None:
    base = drawn(size, seed)
    plain = placed(moved(base, itemsize, density, seed), seed % 8)
    other = placed(base, seed % 5)
    both_ways(lambda: encode_difference(plain, other, itemsize, ceiling=2 * size + 600), bytes(plain), (other,))


@pytest.mark.parametrize("density", [0.001, 0.05, 0.3, 1])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_forms_of_a_whole_chunk_are_the_same(itemsize: int, density: float, seed: int) -> None:
    size = (1 << 20) + itemsize - 1
    base = np.random.default_rng(seed).normal(size=(1 << 18) + 4).astype("<f4").tobytes()[:size]
    plain, other = placed(moved(base, itemsize, density, seed), 1), placed(base, 3)
    found = both_ways(lambda: encode_difference(plain, other, itemsize, ceiling=size), bytes(plain), (other,))
    assert found is not None
    assert density == 0.3 or found.params[1] == (density < 0.1), "few changes are stored as such, many are not"
    standalone = both_ways(lambda: encode(plain, itemsize), bytes(plain), ())
    assert standalone is not None


@given(st.lists(st.tuples(DENSITIES, SEEDS), min_size=2, max_size=8), st.sampled_from([1, 2, 4, 8]), SIZES)
def test_what_a_hint_learns_is_the_same(steps: list[tuple[float, int]], itemsize: int, size: int) -> None:
    def write() -> list[tuple[bytes, bytes] | None]:
        hint, found = Hint(), []
        before = drawn(size, 3)
        for density, seed in steps:
            plain = moved(before, itemsize, density, seed)
            made = encode_difference(memoryview(plain), memoryview(before), itemsize, hint, ceiling=size)
            found.append(made and (made.params, bytes(made.payload)))
            before = plain
        return found

    assert write() == by_numpy(write)


@given(MODELS, SHAPES, st.integers(4, 9000), SEEDS)
def test_predictions_are_the_same(model: Model, shape: str, size: int, seed: int) -> None:
    plain, operands = make(model, shape, size, seed)
    models = [model, Model(model.kind, model.constants)]
    chunk = placed(plain, seed % 8)
    both_ways(lambda: encode_prediction(chunk, models, operands, ceiling=4 * size + 2000), plain, bases_of(operands))


def outcome(encoded: Encoded, bases: Sequence[bytes | memoryview], size: int) -> bytes | str:
    try:
        return decoded(encoded, bases, size, size % 5)
    except CorruptionError as error:
        return str(error)


@given(st.sampled_from(["planes", "dense", "sparse", "prediction"]), MODELS, st.integers(4, 3000), SEEDS)
def test_mutated_forms_decode_to_the_same_or_are_the_same_error(
    method: str, model: Model, size: int, seed: int
) -> None:
    rng = random.Random(seed)
    itemsize = rng.choice([2, 4, 8])
    bases: Sequence[bytes | memoryview] = ()
    plain = drawn(size, seed | 3)
    if method == "prediction":
        plain, operands = make(model, "training", size, seed)
        bases = bases_of(operands)
        encoded = encode_prediction(memoryview(plain), [model], operands, ceiling=4 * size + 2000)
    elif method == "planes":
        encoded = encode(memoryview(plain), itemsize)
    else:
        bases = (plain,)
        plain = moved(plain, itemsize, 0.03 if method == "sparse" else 1, seed)
        encoded = encode_difference(memoryview(plain), memoryview(bases[0]), itemsize, ceiling=2 * size + 600)
    assert encoded is not None
    for _ in range(30):
        params, payload = mutate(rng, encoded.params, bytes(encoded.payload))
        forged = Encoded(encoded.codec, 1, params, payload, len(payload))
        given_size = rng.choice([size, size, size, size - 1, size + 1, 2 * size])
        assert outcome(forged, bases, given_size) == by_numpy(outcome, forged, bases, given_size)
