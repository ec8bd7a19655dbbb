"""Compiled passes give what the NumPy code gives, to the bit, and touch nothing but what they are given.

NumPy's way is what records mean (docs/format.md; `tests/property` compares it with a decoder on Python's own numbers),
so it is the oracle here: each function runs with the kernels and without.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.codec import changes, decode_into, difference, formulas, kernels, lanes
from casckpt.codec.contract import DIFFERENCE, Encoded
from casckpt.codec.formulas import KINDS, Formula, find_gradient, itemsize_of, predict
from casckpt.codec.models import FIRST_MOMENT, MOMENTUM_WEIGHT, Model
from casckpt.codec.prediction import Operand, encode_prediction
from tests.unit.kernel_ways import by_numpy, placed, with_kernels

# Around the widths of vectors, of the groups of `find_changes` (16 and 128) and of blocks (1024).
COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 145, 255, 1023, 1024, 1025, 2047, 2500)
SHIFTS = (0, 1, 3, 8)  # bytes from an aligned address


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pair(rng: np.random.Generator, size: int, density: float) -> tuple[bytes, bytes]:
    """Two chunks that differ in so many of their bytes, and in whole runs; NaNs and all else are among their items."""
    one = rng.integers(0, 256, size, np.uint8)
    other = np.where(rng.random(size) < density, rng.integers(0, 256, size, np.uint8), one)
    start = int(rng.integers(0, size + 1))
    if density:
        other[start : start + size // 9] += 1
    return one.tobytes(), other.tobytes()


# --- whether they are there ---


def test_kernels_are_there_where_they_can_be_compiled() -> None:
    if os.environ.get("CASCKPT_KERNELS") == "0":
        assert not formulas.has_kernels()
        return
    compiler = shlex.split(os.environ.get("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C compiler ({compiler})")
    assert formulas.has_kernels(), (
        f"{compiler} is a C compiler, but there are no compiled kernels, or they give other bits than NumPy. "
        "In a source tree run `python -m casckpt.codec.kernels_build`."
    )


def join_by_numpy(given: list[tuple[int, np.ndarray]], mask: int, out: np.ndarray) -> None:
    """The last lane is the constant one."""
    width = out.itemsize // (len(given) + 1)
    last = np.array([mask >> (8 * (out.itemsize - width))], f"<u{width}")
    lanes.merge([*given, (out.itemsize - width, last)], out.itemsize, out.view(np.uint8).data)


def find_by_numpy(new: np.ndarray, old: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    found = changes.find(new.view(np.uint8).data, old.view(np.uint8).data, new.itemsize, 1, limit)
    return None if found is None else (found.gaps.astype("<u4"), found.differences)


PASSES_OF_NUMPY = {
    "subtract": lambda new, old, bias, out: np.copyto(out, new - old + np.uint64(bias).astype(out.dtype)),
    "add": lambda there, old, bias, out: np.copyto(out, there + old - np.uint64(bias).astype(out.dtype)),
    "cut": lambda items, offset, lane: lanes.split(
        items.view(np.uint8).data, items.itemsize, offset, lane.itemsize, lane
    ),
    "join": join_by_numpy,
    "count_changed": lambda one, other: int(np.count_nonzero(one != other)),
    "find_changes": find_by_numpy,
    "add_changes": lambda items, gaps, differences: changes.add(items, changes.Changes(gaps, differences)),
}


def test_the_digests_that_a_library_must_have_are_those_of_the_numpy_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_numpy(formulas._digest_of, predict, find_gradient) == formulas._COMPILED_DIGEST
    for name, function in PASSES_OF_NUMPY.items():
        monkeypatch.setattr(kernels, name, function)
    assert by_numpy(kernels._digest) == kernels._DIGEST


@with_kernels
def test_kernels_that_are_left_out_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparisons below compare two ways."""
    monkeypatch.setattr(kernels, "_functions", {})
    items = np.arange(100, dtype="<u4")
    plain, base = items.view(np.uint8).data, (items * (items % 7 > 0)).astype("<u4").view(np.uint8).data
    calls: list[tuple[Any, ...]] = [
        (lanes.split, plain, 4, 0, 2, np.empty(100, "<u2")),
        (lanes.merge, [(0, items)], 4, bytearray(400)),
        (changes.is_equal, plain, base),
        (changes.find, plain, base, 4, 1, 100),
        (changes.add, items.copy(), changes.Changes(np.array([1], "<u1"), items[:1])),
        (difference._subtract, items, items, 1, items.copy()),
        (decode_into, DIFFERENCE, 1, b"\1\0\0\0", b"a", (b"a",), memoryview(bytearray(1))),
        (predict, Formula(FIRST_MOMENT, 0, 1, (0.9, 0.1)), [items.view("<f4"), np.zeros(100, "<u2")], items.copy()),
        (find_gradient, Formula(FIRST_MOMENT, 0, 1, (0.9, 0.1)), items.view("<f4"), items.view("<f4")),
    ]
    for function, *arguments in calls:
        with pytest.raises(KeyError):
            function(*arguments)
        by_numpy(function, *arguments)


# --- lanes ---


def cuts(itemsize: int) -> Iterator[tuple[int, int]]:
    """Offset and width of every lane that an item can have."""
    for width, offset in product(lanes.LANE_WIDTHS, range(itemsize)):
        if lanes.fits(itemsize, offset, width):
            yield offset, width


@with_kernels
@pytest.mark.parametrize("itemsize", [2, 3, 4, 6, 8, 12, 16])
def test_lanes_are_cut_alike(itemsize: int, rng: np.random.Generator) -> None:
    for count, shift in product(COUNTS, SHIFTS):
        plain = placed(rng.bytes(count * itemsize + (count + shift) % itemsize), shift)
        for offset, width in cuts(itemsize):
            found = np.frombuffer(placed(bytes(count * width), shift), f"<u{width}")
            expected = np.empty(count, f"<u{width}")
            lanes.split(plain, itemsize, offset, width, found)
            by_numpy(lanes.split, plain, itemsize, offset, width, expected)
            assert found.tobytes() == expected.tobytes()


def divisions(itemsize: int, rng: np.random.Generator) -> Iterator[list[tuple[int, int, bool]]]:
    """Items divided into lanes: offset, width, and whether it is constant; all of each width, and mixed ones."""
    for width in lanes.LANE_WIDTHS:
        if itemsize % width == 0:
            yield [(offset, width, bool(rng.random() < 0.3)) for offset in range(0, itemsize, width)]
    for _ in range(4):
        found, offset = [], 0
        while offset < itemsize:
            fitting = [width for width in lanes.LANE_WIDTHS if lanes.fits(itemsize, offset, width)]
            found.append((offset, int(rng.choice(fitting)), bool(rng.random() < 0.4)))
            offset += found[-1][1]
        yield found


@with_kernels
@pytest.mark.parametrize("itemsize", [2, 3, 4, 6, 8, 12, 16])
def test_lanes_are_joined_alike_and_nothing_is_written_behind(itemsize: int, rng: np.random.Generator) -> None:
    for count, shift in product(COUNTS, SHIFTS):
        for division in divisions(itemsize, rng):
            given = [
                (offset, np.frombuffer(placed(rng.bytes(width * (1 if is_constant else count)), shift), f"<u{width}"))
                for offset, width, is_constant in division
            ]
            size = count * itemsize
            tail = b"\xee" * (itemsize - 1)
            found, expected = placed(bytes(size) + tail, shift), memoryview(bytearray(bytes(size) + tail))
            lanes.merge(given, itemsize, found)
            by_numpy(lanes.merge, given, itemsize, expected)
            assert bytes(found) == bytes(expected)
            assert found[size:] == tail


# --- changes ---


@with_kernels
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_changes_are_found_alike(itemsize: int, rng: np.random.Generator) -> None:
    for count, density in product((0, *COUNTS), (0, 0.002, 0.05, 1)):
        shift = SHIFTS[count % 4]
        sides = [placed(each, shift) for each in pair(rng, count * itemsize + count % itemsize, density)]
        assert changes.is_equal(*sides) == (bytes(sides[0]) == bytes(sides[1]))
        every = changes.find(*sides, itemsize, 1, count)
        assert every is not None
        for word_max, item_max in ((1, count), (1, len(every.gaps)), (1, max(0, len(every.gaps) - 1)), (0.3, count)):
            found = changes.find(*sides, itemsize, word_max, item_max)
            expected = by_numpy(changes.find, *sides, itemsize, word_max, item_max)
            assert (found is None) == (expected is None)
            if found is not None:
                for ours, numpys in zip(found, expected, strict=True):
                    assert (ours.dtype, ours.tobytes()) == (numpys.dtype, numpys.tobytes())


@with_kernels
@pytest.mark.parametrize("gap", [255, 256, 65_535, 65_536, 70_000])
def test_gaps_at_the_bounds_of_their_widths_are_found_alike(gap: int) -> None:
    base = np.zeros(2 * gap + 5, np.uint8)
    plain = base.copy()
    plain[[gap - 1, 2 * gap - 1, -1]] = 7
    found = changes.find(plain.data, base.data, 1, 1, 3)
    assert found is not None
    assert found.gaps.tolist() == [gap, gap, 5]
    expected = by_numpy(changes.find, plain.data, base.data, 1, 1, 3)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]


@with_kernels
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_changes_are_added_alike(itemsize: int, rng: np.random.Generator) -> None:
    for count, width, shift in product(COUNTS, changes.GAP_WIDTHS, SHIFTS):
        positions = np.flatnonzero(rng.random(count) < rng.choice([0.02, 0.3, 1]))
        gaps = np.diff(positions, prepend=-1)
        if gaps.max(initial=0) >= 1 << (8 * width):
            continue
        given = changes.Changes(
            np.frombuffer(placed(gaps.astype(f"<u{width}"), shift), f"<u{width}"),
            np.frombuffer(placed(rng.bytes(len(gaps) * itemsize), shift), f"<u{itemsize}"),
        )
        before = np.frombuffer(rng.bytes(count * itemsize), f"<u{itemsize}")
        found, expected = np.frombuffer(placed(before, shift), before.dtype), before.copy()
        assert changes.add(found, given)
        assert by_numpy(changes.add, expected, given)
        assert found.tobytes() == expected.tobytes()
        assert (found != before).sum() == np.count_nonzero(given.differences)


U4_MAX = 0xFFFFFFFF
BAD_GAPS = {
    "zero, first": [0, 1],
    "zero, between": [1, 0, 3],
    "zero, last": [1, 2, 0],
    "one too far": [1, 10],
    "one item too far": [11],
    "far": [U4_MAX],
    "sum that is small modulo 2 ** 32": [1, U4_MAX, 3],
    "sum that is nothing modulo 2 ** 32": [2, U4_MAX - 1],
    "sum that is small modulo 2 ** 32, of many": [U4_MAX] * 16 + [17],
    "zero and far": [0, 11],
}


@with_kernels
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("name", BAD_GAPS)
def test_gaps_that_lead_nowhere_or_outside_change_nothing(name: str, itemsize: int) -> None:
    gaps = BAD_GAPS[name]
    for width in changes.GAP_WIDTHS:
        if max(gaps) >= 1 << (8 * width):
            continue
        given = changes.Changes(np.array(gaps, f"<u{width}"), np.ones(len(gaps), f"<u{itemsize}"))
        items = np.arange(10, dtype=f"<u{itemsize}")
        assert not changes.add(items, given)
        assert not by_numpy(changes.add, items, given)
        assert items.tolist() == list(range(10))


# --- sums ---


@with_kernels
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sums_are_alike_in_place_too(size: int, rng: np.random.Generator) -> None:
    for count, shift in product((0, *COUNTS), SHIFTS):
        new, old = (np.frombuffer(placed(rng.bytes(count * size), shift), f"<u{size}") for _ in range(2))
        for bias in (0, 1, int.from_bytes(b"\x80" * size, "little"), (1 << 8 * size) - 1):
            expected = np.empty(count, f"<u{size}")
            by_numpy(difference._subtract, new, old, bias, expected)
            for place in (None, 0, 1):  # where the result goes: elsewhere, or in place of an operand
                sides = [new.copy(), old.copy()]
                out = np.empty(count, f"<u{size}") if place is None else sides[place]
                kernels.subtract(*sides, bias, out)
                assert out.tobytes() == expected.tobytes()
                sides = [expected.copy(), old.copy()]
                out = np.empty(count, f"<u{size}") if place is None else sides[place]
                kernels.add(*sides, bias, out)
                assert out.tobytes() == new.tobytes()


# --- formulas ---

CONSTANTS = {
    number: [tuple(max(bound.low, min(bound.high, each)) for bound in kind.bounds) for each in (0.3, 0.0, 1.0)]
    + [tuple(-max(bound.low, min(bound.high, 1e-3)) for bound in kind.bounds)]
    for number, kind in KINDS.items()
}


def hostile(rng: np.random.Generator, count: int, near: np.ndarray | None = None) -> np.ndarray:
    """Bits of float32: any, small ones, special ones; and a few units beside other numbers, as a step leaves them."""
    anything = rng.integers(0, 1 << 32, count, np.uint32)
    small = (anything & np.uint32(0x807FFFFF)) | (rng.integers(0, 90, count, np.uint32) << np.uint32(23))
    special = [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F807FFF, 0x3F808000, 0x3F818000]
    special += [0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFFFFFFFF]
    usual = rng.normal(size=count).astype("<f4").view("<u4")
    beside = usual if near is None else near + rng.integers(0, 64, count, np.uint32)
    choices = [anything, small, rng.choice(np.array(special, np.uint32), count), usual, beside]
    return np.choose(rng.integers(0, len(choices), count), choices).astype("<u4")


def operands_of(rng: np.random.Generator, kind: int, sizes: tuple[int, ...], count: int, shift: int) -> list[Any]:
    """Operands of so many bytes per item, and the gradient of a kind that takes one."""
    found, bits = [], None
    for size in sizes:
        bits = hostile(rng, count, bits)
        items = bits.view("<f4") if size == 4 else (bits >> 16).astype("<u2")
        found.append(np.frombuffer(placed(items, shift), items.dtype))
    if KINDS[kind].takes_gradient:
        found.append(np.frombuffer(placed((hostile(rng, count) >> 16).astype("<u2"), shift), "<u2"))
    return found


def formulas_of(number: int) -> Iterator[Formula]:
    kind = KINDS[number]
    for variant, rounding, constants in product(
        sorted({*kind.variants, *kind.narrow_variants}), kind.roundings, CONSTANTS[number]
    ):
        yield Formula(number, variant, rounding, constants)


def predicted(formula: Formula, operands: list[Any], count: int, shift: int) -> bytes:
    size = itemsize_of(formula.kind, operands[0].itemsize)
    whole = placed(b"\xee" * (count * size + 64), shift)
    predict(formula, operands, np.frombuffer(whole, f"<u{size}", count, 32))
    assert whole[:32] == b"\xee" * 32
    assert whole[32 + count * size :] == b"\xee" * 32
    return bytes(whole)


@with_kernels
@pytest.mark.parametrize("kind", KINDS, ids=lambda number: KINDS[number].name)
def test_every_formula_predicts_alike_from_operands_of_every_size(kind: int, rng: np.random.Generator) -> None:
    for sizes in product(KINDS[kind].operand_sizes, repeat=KINDS[kind].operand_count):
        counts = COUNTS if len(set(sizes)) == 1 else (1, 17, 1025)
        for number, formula in enumerate(formulas_of(kind)):
            count, shift = counts[number % len(counts)], SHIFTS[number % len(SHIFTS)]
            operands = operands_of(rng, kind, sizes, count, shift)
            found = predicted(formula, operands, count, shift)
            assert found == by_numpy(predicted, formula, operands, count, shift), (formula, sizes, count)


@with_kernels
@pytest.mark.parametrize("count", [0, *COUNTS])
def test_a_prediction_does_not_depend_on_where_a_vector_or_block_ends(count: int, rng: np.random.Generator) -> None:
    for kind in KINDS:
        size = KINDS[kind].operand_sizes[-1]
        operands = operands_of(rng, kind, (size,) * KINDS[kind].operand_count, count + 5, 0)  # longer ones are allowed
        for formula in formulas_of(kind):
            assert predicted(formula, operands, count, 4) == by_numpy(predicted, formula, operands, count, 4)


@with_kernels
def test_gradients_are_found_alike(rng: np.random.Generator) -> None:
    for count, shift, formula in product((0, *COUNTS), SHIFTS, formulas_of(FIRST_MOMENT)):
        m = hostile(rng, count)
        sides = [np.frombuffer(placed(each, shift), "<f4") for each in (m, hostile(rng, count, m))]
        assert find_gradient(formula, *sides).tobytes() == by_numpy(find_gradient, formula, *sides).tobytes()


@with_kernels
def test_flush_to_zero_changes_neither_a_prediction_nor_whether_kernels_are_used(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first thread that asks is one of a training that flushes."""
    monkeypatch.setattr(kernels, "IS_THERE", True)  # put back at the end, whatever is found
    given = [
        (formula, operands_of(rng, kind, sizes, 2500, 0))
        for kind in KINDS
        for sizes in product(KINDS[kind].operand_sizes[-1:], repeat=KINDS[kind].operand_count)
        for formula in formulas_of(kind)
    ]
    plain = [predicted(*each, 2500, 0) for each in given]
    assert torch.set_flush_denormal(True)
    try:
        assert np.float32(2.0**-126) * np.float32(0.5) == 0, "the mode is on"
        flushed = [predicted(*each, 2500, 0) for each in given]
        formulas._are_right.cache_clear()
        is_used, by_digest = formulas.has_kernels(), by_numpy(formulas._digest_of, predict, find_gradient)
    finally:
        torch.set_flush_denormal(False)
        formulas._are_right.cache_clear()
    assert flushed == plain
    assert is_used
    assert by_digest == formulas._COMPILED_DIGEST


# --- what they refuse ---


def passes() -> dict[str, tuple[Callable[..., Any], list[Any], list[int]]]:
    """Calls with 40 items: arguments, and which of them are arrays that may be too short; the last is written."""
    u4, u2, f4 = np.arange(40, dtype="<u4"), np.ones(40, "<u2"), np.ones(40, "<f4")
    step = Formula(FIRST_MOMENT, 0, 1, (0.9, 0.1))
    return {
        "subtract": (lambda old, out: kernels.subtract(u4, old, 1, out), [u4.copy(), u4.copy()], [1]),
        "add": (lambda old, out: kernels.add(u4, old, 1, out), [u4.copy(), u4.copy()], [1]),
        "cut": (lambda lane: kernels.cut(u4, 2, lane), [u2.copy()], [0]),
        "join": (lambda one, other: kernels.join([(0, one), (2, other)], 0, u4.copy()), [u2.copy(), u2.copy()], []),
        "count_changed": (lambda other: kernels.count_changed(u4.astype("<u8"), other), [u4.astype("<u8")], []),
        "find_changes": (lambda old: kernels.find_changes(u4, old, 40), [u4.copy()], []),
        "add_changes": (lambda values: kernels.add_changes(np.zeros(50, "<u4"), u2, values), [u4.copy()], []),
        "predict": (lambda m, g: predict(step, [m, g], np.empty(40, "<u4")), [f4.copy(), u2.copy()], []),
        "find_gradient": (lambda new_m: find_gradient(step, f4, new_m), [f4.copy()], []),
    }


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


SPOILED = {
    "one item short": lambda array: array[:-1],
    "with gaps": lambda array: np.repeat(array, 2)[::2],
    "backwards": lambda array: array[::-1],
    "of wider items": lambda array: array.astype("<c16"),
    "empty": lambda array: array[:0],
}


@with_kernels
@pytest.mark.parametrize("name", passes())
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    function, arrays, written = passes()[name]
    function(*arrays)
    for number, (how, spoil) in product(range(len(arrays)), SPOILED.items()):
        given = list(arrays)
        given[number] = spoil(arrays[number])
        with pytest.raises((ValueError, TypeError)):
            function(*given)
            pytest.fail(f"argument {number} {how} was taken")
    for number in written:
        with pytest.raises(ValueError, match="read-only"):
            function(*[read_only(each.copy()) if at == number else each for at, each in enumerate(arrays)])


@with_kernels
@pytest.mark.parametrize("method", ["dense", "sparse", "planes", "prediction"])
def test_memory_that_must_not_be_written_is_not(method: str) -> None:
    """`bytes` are shared by all that have equal ones; a mapped file would end the process."""
    constants, table = np.array([-0.5], "<f4").tobytes(), b"\4\1\0\0\0\0" * 2
    codec, params, payload, bases = {
        "dense": (4, b"\4\0" + bytes(4) + b"\0", b"\1" * 8, (bytes(8),)),
        "sparse": (4, b"\4\1" + bytes(4) + b"\1\0\0\0\1\0\1\0\0\0\0\0", b"\1" + b"\1" * 4, (bytes(8),)),
        "planes": (3, b"\4\2\2\1\2\1", b"\1" * 8, ()),
        "prediction": (5, b"\5\0\0" + constants + table + b"\4\0" + bytes(4) + b"\0", b"\1" * 8, (b"\2" * 8,) * 2),
    }[method]
    target = bytearray(8)
    decode_into(codec, 1, params, payload, bases, memoryview(target))
    assert bytes(target) != bytes(8)
    frozen = bytes(bytearray(8))
    for decode in (decode_into, lambda *given: by_numpy(decode_into, *given)):
        with pytest.raises((ValueError, TypeError)):
            decode(codec, 1, params, payload, bases, memoryview(frozen))
        assert frozen == bytes(8)


# --- threads and processes ---


def decodings(rng: np.random.Generator) -> list[tuple[Encoded, list[memoryview], bytes]]:
    """A few differences and predictions, with their bases and what they decode to."""
    found: list[tuple[Encoded, list[memoryview], bytes]] = []
    for density in (0.01, 1):
        plain, base = (placed(each, 1) for each in pair(rng, 100_001, density))
        encoded = difference.encode_difference(plain, base, 4, ceiling=2 * len(plain))
        assert encoded is not None
        found.append((encoded, [base], bytes(plain)))
    w, b = (rng.normal(size=25_000).astype("<f4") for _ in range(2))
    operands = [Operand((placed(each, 3),), 4) for each in (w, b)]
    plain = memoryview((w - np.float32(0.5) * b).tobytes())
    predicted = encode_prediction(plain, [Model(MOMENTUM_WEIGHT, (-0.5,))], operands, ceiling=2 * len(plain))
    assert predicted is not None
    return [*found, (predicted, [operand.chunks[0] for operand in operands], bytes(plain))]


def are_decoded(forms: list[tuple[Encoded, list[memoryview], bytes]]) -> bool:
    for encoded, bases, plain in forms:
        out = bytearray(len(plain))
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, bases, memoryview(out))
        if out != plain:
            return False
    return True


@with_kernels
def test_threads_share_kernels_and_bases(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first use on, which every thread may be the one to make."""
    forms = decodings(rng)
    monkeypatch.setattr(formulas, "_are_right", cache(formulas._are_right.__wrapped__))
    start = threading.Barrier(8)
    good = []

    def work() -> None:
        start.wait()
        good.extend(are_decoded(forms) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 80
    assert kernels.IS_THERE


@with_kernels
def test_forked_child_goes_on_with_them(rng: np.random.Generator) -> None:
    forms = decodings(rng)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if are_decoded(forms) and are_decoded(decodings(rng)) and formulas.has_kernels() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert are_decoded(forms)
