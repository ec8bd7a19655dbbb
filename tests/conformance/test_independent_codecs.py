"""A second decoder of codecs 4 to 6 reads the document's golden forms; on hostile operands it agrees with casckpt."""

from __future__ import annotations

import itertools
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from casckpt.codec import decode_into
from tests.conformance import independent_codecs as second

FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def _rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a line that starts with `heading`."""
    lines = FORMAT[FORMAT.index(f"\n{heading}") + 1 :].splitlines()
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def _hex(text: str) -> bytes:
    return bytes.fromhex("" if text == "–" else text.replace(" ", ""))


def test_every_golden_difference_is_decoded() -> None:
    rows = _rows("| parameters | payload | base | plain |")
    assert len(rows) >= 10
    for params, payload, base, plain in rows:
        found = second.decode_codec(4, _hex(params), _hex(payload), len(_hex(plain)), [_hex(base)])
        assert found == _hex(plain), params


def test_every_golden_prediction_is_decoded() -> None:
    rows = _rows("| form | parameters | payload | bases | plain |")
    kinds = {_hex(row[1])[0] for row in rows}
    assert kinds == second.KINDS.keys()
    for name, params, payload, bases, plain in rows:
        chunks = [_hex(each) for each in bases.split("·")]
        assert second.decode_codec(5, _hex(params), _hex(payload), len(_hex(plain)), chunks) == _hex(plain), name


def test_every_golden_frame_is_decoded() -> None:
    rows = _rows("| form | parameters | payload | base | plain |")
    assert {_hex(row[1])[1] for row in rows} == {0, 1, 2, 3}
    for name, params, payload, base, plain in rows:
        bases = [] if base == "–" else [_hex(base)]
        assert second.decode_codec(6, _hex(params), _hex(payload), len(_hex(plain)), bases) == _hex(plain), name


@pytest.mark.parametrize("method", [1, 2, 3])
@pytest.mark.parametrize("has_base", [False, True])
def test_both_decoders_make_the_same_frames_of_random_parts(method: int, has_base: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for new in (1, 2, 3, 5, 8, 11):
        height, width = int(rng.integers(2, 9)), int(rng.integers(8, 40))
        size, itemsize = height * width, 1 if method > 1 or height * width % 2 else 2
        plain = []
        if method == 1:
            items = new * size // itemsize
            ones = min(20, items // 4)
            gaps = rng.permutation([1] * ones + [254, 255, 256, 256][: (items - ones) // 256])
            short = np.minimum(gaps, 255).astype(np.uint8)
            long_gaps = (gaps[gaps >= 255] - 255).astype("<u4")
            plain = [short.tobytes(), long_gaps.tobytes(), rng.bytes(len(gaps) * itemsize)]
            changed, long = len(gaps), len(long_gaps)
        else:
            plain, changed, long = [rng.bytes(new * size)], 0, 0
        head = (itemsize, method, int(rng.integers(1, 4)), size, width if method == 3 else 0, 0, new, new)
        params = struct.pack("<BBHIIIIIIIII", *head, 2 * has_base, has_base, changed, long)
        parts = [bytes(2 * new), b"", *plain]
        params += b"".join(struct.pack("<BIB", 0, len(part), 0) for part in parts)
        bases = [rng.bytes(2 + size)] if has_base else []
        out = bytearray(new * size)
        decode_into(6, 1, params, b"".join(parts), bases, memoryview(out))
        assert second.decode_codec(6, params, b"".join(parts), len(out), bases) == bytes(out)


def _constants(kind: second.Kind, rng: np.random.Generator) -> list[float]:
    """Any within the bounds, the bounds themselves among them."""
    found = []
    for least, may_be_zero in kind.bounds:
        choices = [2.0**least, 1.0, float(2.0 ** rng.uniform(least, 0)), 0.0 if may_be_zero else 0.5]
        found.append(float(rng.choice(choices)) * (1 if rng.random() < 0.7 else -1))
    return found


def _hostile(rng: np.random.Generator, width: int, count: int) -> bytes:
    """Any bits, numbers around the floors, subnormal ones, infinities, NaNs with payloads, both zeros."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    scales = 2.0 ** rng.uniform(-130, 4, count)
    near = (rng.normal(size=count) * scales).astype(np.float32).view(np.uint32)
    special = np.array([0, 1 << 31, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001], np.uint32)
    pick = rng.integers(0, 3, count)
    bits = np.where(pick == 0, bits, np.where(pick == 1, near, rng.choice(special, count)))
    return bits.astype("<u4").tobytes() if width == 4 else (bits >> 16).astype("<u2").tobytes()


CASES = [
    (number, variant, rounding, widths)
    for number, kind in second.KINDS.items()
    for variant in range(kind.variants)
    for rounding in kind.roundings
    for widths in itertools.product(kind.itemsizes, repeat=kind.operand_count)
]


@pytest.mark.few(3)
@pytest.mark.parametrize("number", second.KINDS)
def test_both_decoders_predict_the_same_from_hostile_operands(number: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for kind, variant, rounding, widths in (case for case in CASES if case[0] == number):
        for _ in range(3):
            assert _first_difference(rng, kind, variant, rounding, widths) is None, (kind, variant, rounding, widths)


def _first_difference(
    rng: np.random.Generator, number: int, variant: int, rounding: int, widths: tuple[int, ...]
) -> int | None:
    """The first item that the two decoders see differently."""
    kind, count = second.KINDS[number], 400
    params = struct.pack("<3B", number, variant, rounding)
    params += b"".join(struct.pack("<f", each) for each in _constants(kind, rng))
    bases = []
    for width in widths:
        skip = int(rng.integers(0, 3))
        data = _hostile(rng, width, count + skip + 1)
        cut = width * int(rng.integers(skip + 1, count)) if rng.random() < 0.5 else 0
        chunks = [data[:cut], data[cut:]] if cut else [data]
        params += struct.pack("<BBI", width, len(chunks), skip)
        bases += chunks
    payload = b""
    if number == 3:
        payload = _hostile(rng, 2, count)
        params += struct.pack("<BIB", 0, len(payload), 0)
    itemsize = 2 if number == 4 else widths[0]
    size = count * itemsize + 1
    params += struct.pack("<BB", itemsize, 1) + bytes(itemsize) + struct.pack("<IBBIBB", 0, 1, 0, 0, 0, 0)
    payload += b"\x07"  # the rest
    out = bytearray(size)
    decode_into(5, 1, params, payload, bases, memoryview(out))
    found = second.decode_codec(5, params, payload, size, bases)
    return next((at // itemsize for at in range(size) if found[at] != out[at]), None)


def test_rounding_to_half_precision_is_that_of_ieee_754() -> None:
    for bits in range(0, 1 << 16, 7):
        number = np.uint16(bits).view(np.float16)
        if not np.isnan(number):
            assert second.fp16_bits(float(number)) == bits
    for number in (65519.9, 65520.0, -65520.0, 1e30, math.inf, 5.96e-8, 2.9e-8, -(2.0**-25), 0.0):
        with np.errstate(over="ignore"):
            assert second.fp16_bits(second.f32(number)) == int(np.float16(np.float32(number)).view(np.uint16)), number
