"""Whatever the operands and the chunk are, it comes back; a plain decoder agrees; what is forged is an error or bytes.

The oracle evaluates formulas on Python's own floats, item by item, as docs/format.md says: float64, rounded to float32
after each operation by `struct`. It uses the codec for forms of codecs 0-4 only.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from casckpt.codec import Encoded, Hint, decode_into
from casckpt.codec.models import Model
from casckpt.codec.prediction import Operand, encode_prediction
from casckpt.errors import CorruptionError
from tests.property.mutation import mutate

SECOND, ADAM, FIRST, ROUNDING, MOMENTUM, NESTEROV, AVERAGE, DRIFTING, SQUARES, CENTERED = range(1, 11)
OPERAND_COUNTS = {SECOND: 3, ADAM: 3, FIRST: 1, ROUNDING: 1, MOMENTUM: 2, NESTEROV: 3, AVERAGE: 2, DRIFTING: 3}
OPERAND_COUNTS |= {SQUARES: 3, CENTERED: 4}
SINGLE_KINDS = (FIRST, ROUNDING, SQUARES, CENTERED)  # of which no operand is bf16
CONSTANTS = {
    SECOND: st.tuples(st.floats(2**-16, 1), st.floats(2**-50, 1), st.floats(2**-24, 1)),
    ADAM: st.tuples(st.floats(0.5, 1), st.floats(-1, -(2**-50)), st.floats(2**-20, 1), st.floats(2**-50, 1)),
    FIRST: st.tuples(st.floats(2**-50, 1), st.floats(2**-16, 1)),
    ROUNDING: st.just(()),
    MOMENTUM: st.tuples(st.floats(-1, -(2**-50)) | st.just(0.0)),
    NESTEROV: st.tuples(st.floats(-1, -(2**-50)), st.floats(2**-50, 1)),
    AVERAGE: st.tuples(st.floats(2**-50, 1), st.floats(2**-50, 1)),
    DRIFTING: st.tuples(*[st.floats(2**-50, 1) | st.just(0.0)] * 3),
    SQUARES: st.tuples(*[st.floats(2**-24, 1)] * 4, st.floats(-1, -(2**-50)) | st.just(1.0)),
    CENTERED: st.tuples(st.floats(2**-16, 1), st.floats(2**-45, 1), st.floats(2**-50, 1), st.floats(-1, -(2**-50))),
}
MODELS = st.sampled_from(list(CONSTANTS)).flatmap(lambda kind: st.builds(Model, st.just(kind), CONSTANTS[kind]))
SHAPES = st.sampled_from(["noise", "hostile", "training", "zeros"])


# --- the oracle ---


def single(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def of_bits(number: int) -> float:
    return struct.unpack("<f", number.to_bytes(4, "little"))[0]


def rounded_bf16(value: float) -> int:
    if math.isnan(value):
        return 0x7FC0
    number = bits(value)
    low, high = number & 0xFFFF, number >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def rounded_fp16(value: float) -> int:
    if math.isnan(value):
        return 0x7E00
    try:
        return int.from_bytes(struct.pack("<e", value), "little")
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def narrow(value: float) -> float:
    """Rounded to float32, and then to bf16."""
    return of_bits(rounded_bf16(single(value)) << 16)


def fma(x: float, y: float, z: float) -> float:
    return single(x * y + z)


def second_moment(variant: int, rounding: int, constants: Sequence[float], v: float, m: float, new: float) -> float:
    weight, decay, share = constants
    g = single(single(single(new - m) / weight) + m)
    if rounding == 1:
        g = of_bits(rounded_bf16(g) << 16)
    product = single(single(g * share) * g)
    return (
        fma(single(g * share), g, single(decay * v)),
        fma(single(g * g), share, single(decay * v)),
        fma(v, decay, product),
        single(single(decay * v) + product),
        single(narrow(decay * v) + product),
    )[variant]


def adam_weight(variant: int, rounding: int, constants: Sequence[float], w: float, m: float, v: float) -> float:
    keep, step, correction, eps = constants
    rounded = narrow if variant == 2 else single
    root = rounded(math.sqrt(v if math.isnan(v) else max(v, 2.0**-126)))
    divisor = rounded(rounded(root / correction) + eps)
    if variant != 1:
        return single(rounded(keep * w) + single(single(step * m) / divisor))
    return fma(single(m / divisor), step, single(keep * w))


def first_moment(variant: int, rounding: int, constants: Sequence[float], m: float, gradient: int) -> float:
    decay, weight = constants
    g = of_bits(gradient << 16)
    return (
        fma(single(g - m), weight, m),
        single(m + single(single(g - m) * weight)),
        fma(g, weight, single(decay * m)),
    )[variant]


def momentum_weight(variant: int, rounding: int, constants: Sequence[float], w: float, b: float) -> float:
    return fma(b, constants[0], w) if variant == 0 else single(w + single(b * constants[0]))


def nesterov_weight(variant: int, rounding: int, constants: Sequence[float], w: float, b: float, new: float) -> float:
    step, momentum = constants
    g = single(new - single(momentum * b))
    return momentum_weight(variant, rounding, (step,), w, fma(new, momentum, g))


def average(variant: int, rounding: int, constants: Sequence[float], w: float, s: float) -> float:
    keep, share = constants
    kept, added = single(keep * w), single(share * s)
    return (
        fma(s, share, kept),
        single(kept + added),
        fma(single(s - w), share, w),
        single(w + single(single(s - w) * share)),
        single(narrow(kept) + added),
    )[variant]


def drifting_average(variant: int, rounding: int, constants: Sequence[float], w: float, s: float, new: float) -> float:
    keep, old, share = constants
    return fma(new, share, fma(s, old, single(keep * w)))


def squares(variant: int, rounding: int, constants: Sequence[float], s: float, x: float, new: float) -> float:
    decay, share, eps, keep, step = constants
    d = single(single(new - single(x * keep)) / step)
    n = single(single(d * d) * share)
    q, p = single(1 - n), single(s * decay)
    if variant == 1:
        return single(p + single(single(p + eps) * quotient(n, q)))
    inside = single(single(q * p) + single(n * single(eps * eps)))
    root = single(math.sqrt(inside if math.isnan(inside) else max(inside, 2.0**-126)))
    u = quotient(single(root + eps), q)
    return single(p + single(single(u * n) * u))


def quotient(x: float, y: float) -> float:
    """Of float32 numbers; what is divided by zero is predicted by nothing, whichever infinity or NaN it becomes."""
    return single(x / y) if y else math.nan


def centered_step(
    variant: int, rounding: int, constants: Sequence[float], x: float, a: float, new: float, s: float
) -> float:
    share, eps, keep, step = constants
    g = single(single(single(new - a) / share) + a)
    g = 0.0 if abs(g) < 2.0**-60 else g
    v = single(s - single(new * new))
    v = single(v + eps) if variant else v
    root = single(math.sqrt(v if math.isnan(v) else max(v, 2.0**-96)))
    return single(single(x * keep) + single(single(g * step) / (root if variant else single(root + eps))))


FORMULAS = {
    SECOND: (second_moment, 3, 2.0**-70),
    ADAM: (adam_weight, 4, 2.0**-40),
    FIRST: (first_moment, 2, 2.0**-70),
    MOMENTUM: (momentum_weight, 1, 2.0**-40),
    NESTEROV: (nesterov_weight, 2, 2.0**-40),
    AVERAGE: (average, 2, 2.0**-40),
    DRIFTING: (drifting_average, 3, 2.0**-40),
    SQUARES: (squares, 5, 2.0**-70),
    CENTERED: (centered_step, 4, 2.0**-40),
}


def part(codec: int, params: bytes, payload: bytes, bases: Sequence[bytes], size: int) -> bytes:
    out = bytearray(size)
    decode_into(codec, 1, params, payload, bases, memoryview(out))
    return bytes(out)


def oracle(params: bytes, payload: bytes, bases: Sequence[bytes], size: int) -> bytes:
    """docs/format.md, codec 5, word for word."""
    kind, variant, rounding = params[:3]
    constant_count = 0 if kind == ROUNDING else FORMULAS[kind][1]
    constants = struct.unpack_from(f"<{constant_count}f", params, 3)
    at = 3 + 4 * constant_count
    left, columns = list(bases), []
    table = [struct.unpack_from("<BBI", params, at + 6 * number) for number in range(OPERAND_COUNTS[kind])]
    at += 6 * len(table)
    width = 2 if kind == ROUNDING else table[0][0]
    count = size // width
    for itemsize, chunk_count, skip in table:
        run = b"".join(left[:chunk_count])
        left = left[chunk_count:]
        starts = range(itemsize * skip, itemsize * (skip + count), itemsize)
        columns.append([run[start : start + itemsize] for start in starts])
    rows = list(zip(*columns, strict=True))
    extra: list[tuple[int, ...]] = [()] * count
    if kind == FIRST:
        codec, payload_size, params_size = struct.unpack_from("<BIB", params, at)
        at += 6
        plain = part(codec, params[at : at + params_size], payload[:payload_size], (), 2 * count)
        extra = list(struct.iter_unpack("<H", plain))
        at, payload = at + params_size, payload[payload_size:]
    base = b"".join(
        predicted(kind, variant, rounding, constants, row, more) for row, more in zip(rows, extra, strict=True)
    )
    return part(4, params[at:], payload, (base + bytes(size - len(base)),), size)


def predicted(
    kind: int, variant: int, rounding: int, constants: Sequence[float], row: Sequence[bytes], extra: tuple[int, ...]
) -> bytes:
    numbers = [struct.unpack("<f", bytes(4 - len(item)) + item)[0] for item in row]  # bf16 is the upper half
    if kind == ROUNDING:
        return (rounded_bf16 if rounding == 1 else rounded_fp16)(numbers[0]).to_bytes(2, "little")
    formula, _, floor = FORMULAS[kind]
    value = formula(variant, rounding, constants, *numbers, *extra)
    if not floor <= abs(value) < math.inf:
        return row[0]
    return struct.pack("<f", value) if len(row[0]) == 4 else rounded_bf16(value).to_bytes(2, "little")


# --- data ---


def make(model: Model, shape: str, size: int, seed: int) -> tuple[bytes, list[Operand]]:
    """A chunk and its operands, each in one chunk, of float32 or bf16; the generator is the test's own."""
    rng = np.random.default_rng(seed)
    can_be_narrow = model.kind not in SINGLE_KINDS
    sizes = [2 if can_be_narrow and seed >> number & 1 else 4 for number in range(OPERAND_COUNTS[model.kind])]
    width = 2 if model.kind == ROUNDING else sizes[0]
    count = size // width
    columns = [numbers(rng, shape, count) for _ in sizes]
    if shape == "training":  # the chunk is near a step of plain float64 arithmetic
        plain = step(model, [column.astype(np.float64) for column in columns], rng)
    else:
        plain = numbers(rng, shape, count)
    given = [
        Operand((memoryview(upper(column, itemsize).tobytes()),), itemsize)
        for column, itemsize in zip(columns, sizes, strict=True)
    ]
    return upper(plain, width).tobytes() + rng.bytes(size % width), given


def upper(column: np.ndarray, itemsize: int) -> np.ndarray:
    """float32 numbers, or their upper halves."""
    bits = column.view("<u4")
    return bits if itemsize == 4 else (bits >> 16).astype("<u2")


def numbers(rng: np.random.Generator, shape: str, count: int) -> np.ndarray:
    if shape == "training":
        return np.abs(rng.normal(size=count)).astype("<f4")
    if shape == "zeros":
        return np.zeros(count, "<f4")
    raw = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    if shape == "hostile":
        special = [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345]
        near = (raw & 0x8FFFFFFF) | (raw % 91 << 23).astype(np.uint32)
        raw = np.where(rng.random(count) < 0.3, rng.choice(np.array(special, np.uint32), count), near)
    return raw.astype("<u4").view("<f4")


def step(model: Model, columns: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    first = columns[0]
    if model.kind == ROUNDING:
        return first.astype("<f4")
    if model.kind == SECOND:
        weight, decay, share = model.constants
        result = decay * first + share * (columns[1] + (columns[2] - columns[1]) / weight) ** 2
    elif model.kind == ADAM:
        keep, rate, correction, eps = model.constants
        result = keep * first + rate * columns[1] / (np.sqrt(columns[2]) / correction + eps)
    elif model.kind == FIRST:
        gradient = (rng.normal(size=len(first)).astype("<f4").view("<u4") >> 16 << 16).view("<f4")
        result = first + model.constants[1] * (gradient - first)
    elif model.kind == SQUARES:  # columns[1:] make the direction small enough to have come from such a step
        decay, share, eps, keep, rate = model.constants
        d = (columns[2] - keep * columns[1]) / rate
        result = decay * first + share * d**2 * (np.sqrt(first) + eps) ** 2
    elif model.kind == CENTERED:
        share, eps, keep, rate = model.constants
        gradient = columns[1] + (columns[2] - columns[1]) / share
        result = keep * first + rate * gradient / (np.sqrt(np.maximum(columns[3] - columns[2] ** 2, 0)) + eps)
    elif model.kind in (AVERAGE, DRIFTING):
        result = sum(share * column for share, column in zip(model.constants, columns, strict=True))
    else:
        result = first + model.constants[0] * columns[-1]
    return result.astype("<f4")


def cut_apart(given: Sequence[Operand], cut: int) -> list[Operand]:
    """The same operands in two chunks each, with `cut` items before them that are skipped."""
    found = []
    for operand in given:
        (chunk,), size = operand.chunks, cut * operand.itemsize
        first = memoryview(bytes(size) + bytes(chunk[:size]))
        found.append(Operand((first, chunk[size:]), operand.itemsize, cut))
    return found


def bases_of(given: Sequence[Operand]) -> list[memoryview]:
    return [chunk for operand in given for chunk in operand.chunks]


def decoded(encoded: Encoded, bases: Sequence[bytes | memoryview], size: int) -> bytes:
    whole = bytearray(b"\xee" * (size + 64))
    try:
        decode_into(
            encoded.codec, encoded.version, encoded.params, encoded.payload, bases, memoryview(whole)[32 : 32 + size]
        )
    finally:
        assert whole[:32] == whole[32 + size :] == b"\xee" * 32, "written outside the chunk"
    return bytes(whole[32 : 32 + size])


# --- claims ---


@given(MODELS, SHAPES, st.integers(4, 900), st.integers(0, 2**32), st.integers(0, 3))
@example(Model(SECOND, (0.1, 0.999, 0.001)), "training", 803, 0, 1)
@example(Model(ADAM, (0.999, -1e-3, 0.3, 1e-8)), "hostile", 800, 0, 0)
@example(Model(FIRST, (0.9, 0.1)), "hostile", 801, 0, 2)
@example(Model(ROUNDING, ()), "hostile", 803, 0, 0)
def test_any_bytes_come_back_and_the_oracle_agrees(model: Model, shape: str, size: int, seed: int, cut: int) -> None:
    plain, given_operands = make(model, shape, size, seed)
    if cut:
        given_operands = cut_apart(given_operands, cut)
    encoded = encode_prediction(memoryview(plain), [model], given_operands, ceiling=4 * size + 2000)
    assert encoded is not None
    assert (encoded.codec, encoded.rejected) == (5, None)
    assert encoded.stored_size == len(encoded.payload)
    bases = bases_of(given_operands)
    assert decoded(encoded, bases, size) == plain
    assert oracle(encoded.params, bytes(encoded.payload), [bytes(base) for base in bases], size) == plain


@given(MODELS, SHAPES, st.integers(4, 400), st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 1))
def test_every_variant_is_what_the_oracle_computes(
    model: Model, shape: str, size: int, seed: int, variant: int, rounding: int
) -> None:
    """The variant and rounding that a trial chose are replaced; both decoders give the same bytes."""
    plain, given_operands = make(model, shape, size, seed)
    encoded = encode_prediction(memoryview(plain), [model], given_operands, ceiling=4 * size + 2000)
    assert encoded is not None
    params = bytearray(encoded.params)
    params[1] = variant % {SECOND: 5, ADAM: 3, FIRST: 3, ROUNDING: 1, AVERAGE: 5, DRIFTING: 1}.get(model.kind, 2)
    params[2] = {SECOND: rounding, FIRST: 1, ROUNDING: 1 + rounding}.get(model.kind, 0)
    forged = Encoded(5, 1, bytes(params), encoded.payload, encoded.stored_size)
    bases = [bytes(base) for base in bases_of(given_operands)]
    assert decoded(forged, bases, size) == oracle(bytes(params), bytes(encoded.payload), bases, size)


@given(st.lists(st.tuples(MODELS, SHAPES, st.integers(0, 9000)), max_size=8), st.integers(0, 9000), st.integers(0, 99))
def test_a_hint_from_other_chunks_changes_size_but_never_content(
    chunks: list[tuple[Model, str, int]], ceiling: int, seed: int
) -> None:
    hint = Hint()
    for number, (model, shape, size) in enumerate(chunks):
        plain, given_operands = make(model, shape, size, seed + number)
        models = [model, Model(model.kind, model.constants)]
        encoded = encode_prediction(memoryview(plain), models, given_operands, hint, ceiling=ceiling)
        if encoded is not None:
            assert encoded.rejected is None
            assert encoded.stored_size + len(encoded.params) + 32 * len(given_operands) < ceiling
            assert decoded(encoded, bases_of(given_operands), size) == plain


FUZZED = [
    Model(SECOND, (0.1, 0.999, 0.001)),
    Model(ADAM, (0.999, -1e-3, 0.3, 1e-8)),
    Model(FIRST, (0.9, 0.1)),
    Model(ROUNDING, ()),
    Model(AVERAGE, (0.995, 0.005)),
    Model(SQUARES, (0.99, 0.01, 1e-8, 1.0, -0.5)),
    Model(CENTERED, (0.01, 1e-8, 1.0, -1e-3)),
]


@pytest.mark.parametrize("model", FUZZED, ids=lambda model: str(model.kind))
def test_mutated_forms_decode_inside_the_chunk_or_are_corruption(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    size = 6001
    plain, given_operands = make(model, "training", size, 0)
    columns = bases_of(given_operands)
    encoded = encode_prediction(memoryview(plain), [model], given_operands, ceiling=2 * size)
    assert encoded is not None
    outcomes = {"error": 0, "bytes": 0}
    for _ in range(400):
        params, payload = mutate(rng, encoded.params, bytes(encoded.payload))
        given_size = rng.choice([size, size, size, 0, 1, size - 1, size + 1, 2 * size])
        forged = Encoded(5, 1, params, payload, len(payload))
        bases = columns[: rng.choice([len(columns), len(columns), 1])]
        try:
            assert len(decoded(forged, bases, given_size)) == given_size
            outcomes["bytes"] += 1
        except CorruptionError:
            outcomes["error"] += 1
    assert outcomes["error"] > 100
