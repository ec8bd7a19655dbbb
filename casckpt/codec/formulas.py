"""What one step of training computes: the next value of a tensor from what stands beside it, in float32.

A *formula* is a kind (which value of which optimizer), the order of its operations (a *variant*: torch has several
kernels for one step), the 16-bit format that a number was rounded to on the way, and constants. Evaluated on *operands*
(the values before, and new values that are stored already), it gives a *prediction*. A prediction need not be right,
but it must be the same bits on every machine, for ever, because what is stored is the difference to it:

* Only addition, subtraction, multiplication, division, square root, maximum, comparison and casts: IEEE 754 leaves
  them no freedom. Never an exponential, a power, a sum over elements. A fused multiply-add is a float64 multiplication,
  exact for two float32, an addition, and a cast: rounded twice, which differs from the processor's once in 2 ** 29.
* Flush-to-zero and denormals-are-zero change nothing: a result of a magnitude under the kind's *floor*, an infinite
  one, or a NaN is replaced by the bits of the first operand. Floors, and the bounds of constants, are such that no
  subnormal number on the way can move a result that stays (docs/design/0008-prediction.md has the proof).
* Nothing depends on where a tile ends: every element is by itself.

Operands are float32, or bf16, which is widened. A prediction of bf16 is computed in float32 and rounded at the end, as
torch's kernels do; those that round after each operation are variants of their own.

Work is done in tiles that stay in the cache, with scratch that is allocated once per call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from casckpt.codec import kernels
from casckpt.codec.lanes import Array
from casckpt.codec.models import (
    ADAM_WEIGHT,
    AVERAGE,
    CENTERED_STEP,
    DRIFTING_AVERAGE,
    FIRST_MOMENT,
    MOMENTUM_WEIGHT,
    NESTEROV_WEIGHT,
    ROUNDING,
    SECOND_MOMENT,
    SQUARES,
)

ROUND_NOT, ROUND_BF16, ROUND_FP16 = 0, 1, 2

TILE_COUNT = 32 * 1024  # items: 128 KiB of float32, at most 1 MiB of scratch; smaller ones cost more calls

_MOMENT_FLOOR, _WEIGHT_FLOOR = 2.0**-70, 2.0**-40
_SINGLE = np.dtype("<f4")  # in chunks; scratch has the host's own order
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SMALLEST_GRADIENT, _SMALLEST_VARIANCE = np.float32(2.0**-60), np.float32(2.0**-96)  # of a centered step
_BF16_NAN, _FP16_NAN = 0x7FC0, 0x7E00  # what NaNs become, whatever their sign and payload
_TEST_COUNT = 331  # items: whole vectors of every width, and a rest
_SMALLEST_TESTED = np.uint16((127 - 60) << 7)  # 2 ** -60 as bf16: flush-to-zero reaches only gradients below it
_COMPILED_DIGEST = 1623904709
_UPPER_HALF = 1 if sys.byteorder == "little" else 0  # of a float32 in the host's order


class Bound(NamedTuple):
    """Magnitudes that a constant may have; zero besides, where it is no divisor."""

    low: float
    high: float
    may_be_zero: bool = False


@dataclass(frozen=True, slots=True)
class Formula:
    """One way to compute a prediction. `constants` are rounded to float32 when it is evaluated."""

    kind: int
    variant: int
    rounding: int
    constants: tuple[float, ...]


class Kind(NamedTuple):
    """What all formulas of a kind have in common."""

    name: str
    operand_count: int
    bounds: tuple[Bound, ...]  # of the constants
    variants: tuple[int, ...]  # kernels for float32
    narrow_variants: tuple[int, ...]  # kernels for bf16, where a fused multiply-add is not worth its time
    evaluate: Callable[[Formula, Sequence[Array], Array, _Scratch], None]
    floor: float = 0.0
    roundings: tuple[int, ...] = (ROUND_NOT,)
    operand_sizes: tuple[int, ...] = (4, 2)  # bytes per item that operands may have
    takes_gradient: bool = False  # a rounded gradient follows the operands


class _Scratch:
    """Working memory for tiles: three rows of float64, of float32 three, one for the result and three for operands."""

    def __init__(self, count: int) -> None:
        self.single = [np.empty(count, np.float32) for _ in range(3)]
        self.double = [np.empty(count, np.float64) for _ in range(3)]
        self.result = np.empty(count, np.float32)
        self.widened = [np.empty(count, np.float32) for _ in range(3)]

    def cut(self, count: int) -> _Scratch:
        """The same memory for a shorter tile."""
        shorter = _Scratch(0)
        shorter.single = [row[:count] for row in self.single]
        shorter.double = [row[:count] for row in self.double]
        shorter.result = self.result[:count]
        shorter.widened = [row[:count] for row in self.widened]
        return shorter


class _Local(threading.local):
    """Scratch of each thread, kept: its pages would cost as much as half of the arithmetic."""

    def __init__(self) -> None:
        self.scratch = _Scratch(TILE_COUNT)


_local = _Local()


def itemsize_of(kind: int, first_size: int) -> int:
    """Bytes per item of a prediction whose first operand has items of `first_size` bytes."""
    return 2 if kind == ROUNDING else first_size


def predict(formula: Formula, operands: Sequence[Array], out: Array) -> None:
    """Evaluate a formula whose constants are within their bounds.

    Args:
        formula: see above.
        operands: as many arrays as the kind has, at least as long as `out`: float32, or the bits of bf16 as unsigned
            integers. Of a kind that `takes_gradient`, then the gradient's 16-bit items as unsigned integers.
        out: the bits of the prediction, as unsigned integers of its item size (`itemsize_of`).

    Costs per MiB of float32 and core 0.5 ms for weights, 1 for moments. Releases the GIL.
    """
    if has_kernels() and _predict_compiled(formula, operands, out):
        return
    kind = KINDS[formula.kind]
    scratch = _local.scratch
    with np.errstate(all="ignore"):
        for start in range(0, len(out), TILE_COUNT):
            tile = out[start : start + TILE_COUNT]
            if len(tile) < len(scratch.result):
                scratch = scratch.cut(len(tile))
            inputs = [operand[start : start + len(tile)] for operand in operands]
            result = tile.view(_SINGLE) if tile.itemsize == 4 else scratch.result
            kind.evaluate(formula, _widened(inputs, kind, scratch), result, scratch)
            is_steady = _find_steady(result, kind.floor, scratch)
            if tile.itemsize == 2:
                _round_into(tile, result, formula.rounding, scratch, may_be_nan=not kind.floor)
            if is_steady is not None:
                np.copyto(tile, inputs[0].view(tile.dtype), where=~is_steady)


def _predict_compiled(formula: Formula, operands: Sequence[Array], out: Array) -> bool:
    """The same by `kernels`, if they have the formula and everything has the sizes that it takes."""
    kind = KINDS[formula.kind]
    is_whole = (len(formula.constants), len(operands)) == (len(kind.bounds), kind.operand_count + kind.takes_gradient)
    if formula.rounding == ROUND_FP16 or not is_whole:
        return False
    if out.itemsize != itemsize_of(formula.kind, operands[0].itemsize):
        return False
    return kernels.predict(
        formula.kind, formula.variant, formula.rounding, kind.floor, formula.constants, operands, out
    )


def has_kernels() -> bool:
    """Whether `kernels` are there and give what they must: a compiler may have taken liberties."""
    return kernels.IS_THERE and _are_right()


@cache
def _are_right() -> bool:
    if _digest_of(_predict_compiled, _find_gradient_compiled) != _COMPILED_DIGEST:
        kernels.leave_out()
    return kernels.IS_THERE


def _digest_of(
    evaluate: Callable[[Formula, Sequence[Array], Array], object], solve: Callable[[Formula, Array, Array], Array]
) -> int:
    """CRC of what every formula gives on a few hundred numbers of all magnitudes, and of gradients; 1 ms."""
    state = np.arange(1, 4 * _TEST_COUNT + 1, dtype=np.uint32) * np.uint32(2654435761)
    state ^= state >> np.uint32(15)
    state *= np.uint32(2246822519)
    wide = np.split(state ^ (state >> np.uint32(13)), 4)
    close = [wide[0], *(wide[0] + (each & np.uint32(0xFFFF)) for each in wide[1:])]  # as a step leaves them
    found = 0
    for number, kind in KINDS.items():
        constants = tuple(max(bound.low, min(bound.high, 0.3)) for bound in kind.bounds)
        for bits in (wide, close):
            for size in kind.operand_sizes:
                operands = [each.view(_SINGLE) for each in bits]
                if size == 2:
                    operands = [(each >> np.uint32(16)).astype(np.uint16) for each in bits]
                operands = operands[: kind.operand_count]
                if kind.takes_gradient:
                    operands = [*operands, (bits[1] >> np.uint32(16)).astype(np.uint16)]
                for variant in kind.variants if size == 4 and kind.variants else kind.narrow_variants:
                    for rounding in set(kind.roundings) - {ROUND_FP16}:
                        out = np.zeros(_TEST_COUNT, f"u{itemsize_of(number, size)}")
                        formula = Formula(number, variant, rounding, constants)
                        evaluate(formula, operands, out)
                        found = crc32(out.data, found)
                        if kind.takes_gradient:
                            gradient = solve(formula, operands[0], bits[1].view(_SINGLE))
                            is_steady = (gradient & np.uint16(0x7FFF)) >= _SMALLEST_TESTED
                            found = crc32(np.where(is_steady, gradient, np.uint16(0)).data, found)
    return found


def _widened(inputs: list[Array], kind: Kind, scratch: _Scratch) -> list[Array]:
    """Operands in float32; a gradient stays as it is."""
    wide = list(inputs)
    for number in range(kind.operand_count):
        if wide[number].itemsize == 2:
            wide[number] = scratch.widened[number]
            _widen(inputs[number], wide[number])
    return wide


def _find_steady(result: Array, floor: float, scratch: _Scratch) -> Array | None:
    """Which results stay: none of them under the floor, infinite or a NaN. None when all do, or there is no floor."""
    if not floor:
        return None
    size, limit = scratch.single[0], np.float32(floor)
    np.abs(result, out=size)
    if size.min() >= limit and size.max() < np.inf:  # false where one is a NaN
        return None
    is_steady: Array = (size >= limit) & (size < np.inf)
    return is_steady


def _round_into(tile: Array, result: Array, rounding: int, scratch: _Scratch, *, may_be_nan: bool) -> None:
    """A result in 16 bits: half precision where a rounded copy is of that, else bf16.

    Where there is a floor, the caller replaces what a NaN becomes here.
    """
    if rounding == ROUND_FP16:
        np.copyto(tile.view("<f2"), result, casting="same_kind")
        np.copyto(tile, np.uint16(_FP16_NAN), where=np.isnan(result))
        return
    rounded = scratch.single[0].view(np.uint32)
    _add_for_rounding(result.view(np.uint32), rounded, out=rounded)
    np.copyto(tile, rounded.view(np.uint16)[_UPPER_HALF::2])
    if may_be_nan:
        np.copyto(tile, np.uint16(_BF16_NAN), where=np.isnan(result))


# --- Adam ---


def _second_moment(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`v' = decay·v + share·g²` with the gradient that took m to m'. Operands v, m, m'."""
    before, m, new_m = inputs
    weight, decay, share = map(np.float32, formula.constants)
    gradient, product, decayed = scratch.single
    np.subtract(new_m, m, out=gradient)
    np.divide(gradient, weight, out=gradient)
    np.add(gradient, m, out=gradient)
    if formula.rounding:
        _round_to_bf16(gradient, product)
    if formula.variant == 1:
        np.multiply(gradient, gradient, out=product)
    else:
        np.multiply(gradient, share, out=product)
    if formula.variant == 2:
        np.multiply(product, gradient, out=product)
        _multiply_add(before, decay, product, out, scratch)
        return
    np.multiply(before, decay, out=decayed)
    if formula.variant == 0:
        _multiply_add(product, gradient, decayed, out, scratch)
    elif formula.variant == 1:
        _multiply_add(product, share, decayed, out, scratch)
    else:
        np.multiply(product, gradient, out=product)
        if formula.variant == 4:
            _round_to_bf16(decayed, gradient)
        np.add(decayed, product, out=out)


def _adam_weight(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`w' = keep·w + step·m' / (√v' / correction + eps)`; `step` is negative. Operands w, m', v'."""
    before, m, v = inputs
    keep, step, correction, eps = map(np.float32, formula.constants)
    divisor, change, kept = scratch.single

    def narrow(values: Array) -> None:
        if formula.variant == 2:
            _round_to_bf16(values, change)

    if not v.min() >= _SMALLEST_NORMAL:  # a subnormal one would be zero to some machines; or there is a NaN
        v = np.maximum(v, _SMALLEST_NORMAL, out=divisor)
    np.sqrt(v, out=divisor)
    narrow(divisor)
    np.divide(divisor, correction, out=divisor)
    narrow(divisor)
    np.add(divisor, eps, out=divisor)
    narrow(divisor)
    if formula.variant == 2:
        np.multiply(before, keep, out=kept)
        narrow(kept)
    else:
        kept = _share_of(before, keep, kept)
    if formula.variant == 1:
        np.divide(m, divisor, out=change)
        _multiply_add(change, step, kept, out, scratch)
    else:
        np.multiply(m, step, out=change)
        np.divide(change, divisor, out=change)
        np.add(kept, change, out=out)


def _first_moment(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`m' = m + weight·(g - m)`, or `m' = decay·m + weight·g`. Operand m, then the rounded gradient."""
    before, stored = inputs
    decay, weight = map(np.float32, formula.constants)
    gradient, moved, _ = scratch.single
    _widen(stored, gradient)
    if formula.variant == 2:
        np.multiply(before, decay, out=moved)
        _multiply_add(gradient, weight, moved, out, scratch)
        return
    np.subtract(gradient, before, out=moved)
    if formula.variant == 0:
        _multiply_add(moved, weight, before, out, scratch)
    else:
        np.multiply(moved, weight, out=moved)
        np.add(before, moved, out=out)


def find_gradient(formula: Formula, m: Array, new_m: Array) -> Array:
    """The rounded gradient, in 16-bit unsigned integers, that most likely took m to m' by a FIRST_MOMENT formula.

    Only the encoder needs it: what it finds is stored.
    """
    if has_kernels():
        return _find_gradient_compiled(formula, m, new_m)
    return _find_gradient(formula, m, new_m)


def _find_gradient_compiled(formula: Formula, m: Array, new_m: Array) -> Array:
    return kernels.find_gradient(formula.variant, formula.constants, m, new_m)


def _find_gradient(formula: Formula, m: Array, new_m: Array) -> Array:
    decay, weight = map(np.float64, map(np.float32, formula.constants))
    with np.errstate(all="ignore"):
        wide = np.multiply(m, decay, dtype=np.float64) if formula.variant == 2 else m
        wide = np.subtract(new_m, wide, dtype=np.float64)
        wide /= weight
        if formula.variant != 2:
            wide += m
        gradient = wide.astype(np.float32)
    _round_to_bf16(gradient, np.empty_like(gradient))
    return _upper_half(gradient)


# --- SGD ---


def _momentum_weight(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`w' = w + step·b'`; `step` is negative. Operands w, b'."""
    before, buffer = inputs
    _step(formula.variant, before, buffer, np.float32(formula.constants[0]), out, scratch)


def _nesterov_weight(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`w' = w + step·(g + momentum·b')` with `g = b' - momentum·b`. Operands w, b, b'."""
    before, buffer, new_buffer = inputs
    step, momentum = map(np.float32, formula.constants)
    gradient, ahead, _ = scratch.single
    np.multiply(buffer, momentum, out=gradient)
    np.subtract(new_buffer, gradient, out=gradient)
    _multiply_add(new_buffer, momentum, gradient, ahead, scratch)
    _step(formula.variant, before, ahead, step, out, scratch)


def _step(variant: int, before: Array, direction: Array, step: Any, out: Array, scratch: _Scratch) -> None:
    if variant == 0:
        _multiply_add(direction, step, before, out, scratch)
    else:
        change = scratch.single[0]
        np.multiply(direction, step, out=change)
        np.add(before, change, out=out)


# --- RMSprop ---


def _squares(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`s' = decay·s + share·g²`, where x' = keep·x + step·g / (√s' + eps), or √(s' + eps): solved for s'.

    Operands s, x, x'. With c = share·d², d the direction of the step: s' = p + c·(√s' + eps)², where p is what stays.
    """
    before, x, new_x = inputs
    decay, share, eps, keep, step = map(np.float32, formula.constants)
    kept, c, rest = scratch.single
    np.subtract(new_x, _share_of(x, keep, c), out=c)
    np.divide(c, step, out=c)
    np.multiply(c, c, out=c)
    np.multiply(c, share, out=c)
    np.subtract(np.float32(1), c, out=rest)
    np.multiply(before, decay, out=kept)
    if formula.variant == 1:
        np.divide(c, rest, out=c)
        np.add(kept, eps, out=rest)
        np.multiply(rest, c, out=rest)
    else:
        root = scratch.widened[0]  # which float32 operands leave free
        np.multiply(rest, kept, out=root)
        np.multiply(c, eps * eps, out=out)
        np.add(root, out, out=root)
        np.maximum(root, _SMALLEST_NORMAL, out=root)
        np.sqrt(root, out=root)
        np.add(root, eps, out=root)
        np.divide(root, rest, out=root)
        np.multiply(root, c, out=rest)
        np.multiply(rest, root, out=rest)
    np.add(kept, rest, out=out)


def _centered_step(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`x' = keep·x + step·g / (√(s' - a'²) + eps)`, or √(s' - a'² + eps), with the g that took a to a'.

    Operands x, a, a', s'.
    """
    x, average, new_average, squares = inputs
    share, eps, keep, step = map(np.float32, formula.constants)
    gradient, divisor, _ = scratch.single
    np.subtract(new_average, average, out=gradient)
    np.divide(gradient, share, out=gradient)
    np.add(gradient, average, out=gradient)
    np.abs(gradient, out=divisor)
    if not divisor.min() >= _SMALLEST_GRADIENT:  # what subnormal numbers made, maybe; or there is a NaN
        np.copyto(gradient, np.float32(0), where=divisor < _SMALLEST_GRADIENT)
    np.multiply(new_average, new_average, out=divisor)
    np.subtract(squares, divisor, out=divisor)
    if formula.variant == 1:
        np.add(divisor, eps, out=divisor)
    np.maximum(divisor, _SMALLEST_VARIANCE, out=divisor)
    np.sqrt(divisor, out=divisor)
    if formula.variant == 0:
        np.add(divisor, eps, out=divisor)
    np.multiply(gradient, step, out=gradient)
    np.divide(gradient, divisor, out=gradient)
    np.add(_share_of(x, keep, divisor), gradient, out=out)


# --- averages of weights ---


def _average(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`w' = keep·w + share·s`, or `w + share·(s - w)`. Operands w, s."""
    before, source = inputs
    keep, share = map(np.float32, formula.constants)
    kept, change, _ = scratch.single
    if formula.variant in (2, 3):
        np.subtract(source, before, out=change)
        _step(formula.variant - 2, before, change, share, out, scratch)
        return
    np.multiply(before, keep, out=kept)
    if formula.variant == 4:
        _round_to_bf16(kept, change)
    if formula.variant == 0:
        _multiply_add(source, share, kept, out, scratch)
    else:
        np.multiply(source, share, out=change)
        np.add(kept, change, out=out)


def _drifting_average(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """`w' = keep·w + old·s + share·s'`: several steps, in which the source went from s to s'. Operands w, s, s'."""
    before, old_source, source = inputs
    keep, old, share = map(np.float32, formula.constants)
    kept, moved, _ = scratch.single
    np.multiply(before, keep, out=kept)
    _multiply_add(old_source, old, kept, moved, scratch)
    _multiply_add(source, share, moved, out, scratch)


# --- rounding, and arithmetic ---


def _copy(formula: Formula, inputs: Sequence[Array], out: Array, scratch: _Scratch) -> None:
    """The number itself: what is predicted is its rounding."""
    np.copyto(out, inputs[0])


def _share_of(x: Array, share: Any, out: Array) -> Array:
    """`x·share`; x itself, and no pass, where all of it stays, as a decay of 1e-8 leaves it in float32."""
    return x if share == 1 else np.multiply(x, share, out=out)


def _multiply_add(x: Array, y: Any, z: Array, out: Array, scratch: _Scratch) -> None:
    """`out = x·y + z` in float64; `y` is an array or a constant, all of float32."""
    product, other, _ = scratch.double
    np.copyto(product, x)
    if isinstance(y, np.ndarray):
        np.copyto(other, y)
        np.multiply(product, other, out=product)
    else:
        np.multiply(product, np.float64(y), out=product)
    np.copyto(other, z)
    np.add(product, other, out=product)
    np.copyto(out, product, casting="same_kind")


def _round_to_bf16(values: Array, spare: Array) -> None:
    """Round float32 numbers in place to those that bf16 has, by integer arithmetic; `spare` is overwritten."""
    is_nan = np.isnan(values)
    bits = values.view(np.uint32)
    _add_for_rounding(bits, spare.view(np.uint32), out=bits)
    np.bitwise_and(bits, np.uint32(0xFFFF0000), out=bits)
    if is_nan.any():
        bits[is_nan] = _BF16_NAN << 16


def _add_for_rounding(bits: Array, spare: Array, out: Array) -> None:
    """Numbers whose upper halves are those of `bits` rounded to 16, ties to even; `spare` is overwritten."""
    np.right_shift(bits, np.uint32(16), out=spare)
    np.bitwise_and(spare, np.uint32(1), out=spare)
    np.add(spare, np.uint32(0x7FFF), out=spare)
    np.add(bits, spare, out=out)


def _upper_half(values: Array) -> Array:
    bits: Array = values.view(np.uint32) >> np.uint32(16)
    return bits.astype(np.uint16)


def floats(items: Array) -> Array:
    """Operands' or a chunk's items as float32: themselves, or bf16 widened to a copy."""
    if items.itemsize == 4:
        return items.view(_SINGLE)
    wide = np.empty(len(items), np.float32)
    _widen(items, wide)
    return wide


def _widen(bf16: Array, out: Array) -> None:
    bits = out.view(np.uint32)
    bits[:] = bf16
    bits <<= np.uint32(16)


_SHARE = Bound(2.0**-24, 1.0)  # of a gradient in a moment
_FACTOR = Bound(2.0**-50, 1.0)
_STEP = Bound(2.0**-50, 1.0, may_be_zero=True)
_EPS = Bound(2.0**-45, 1.0)

KINDS = {
    SECOND_MOMENT: Kind(
        "second moment",
        3,
        (Bound(2.0**-16, 1.0), _FACTOR, _SHARE),
        (0, 1, 2, 3),
        (3, 4),
        _second_moment,
        _MOMENT_FLOOR,
        roundings=(ROUND_NOT, ROUND_BF16),
    ),
    ADAM_WEIGHT: Kind(
        "Adam weight",
        3,
        (_FACTOR, _STEP, Bound(2.0**-20, 1.0), Bound(2.0**-50, 1.0)),
        (0, 1),
        (0, 2),
        _adam_weight,
        _WEIGHT_FLOOR,
    ),
    FIRST_MOMENT: Kind(
        "first moment",
        1,
        (_FACTOR, Bound(2.0**-16, 1.0)),
        (0, 1, 2),
        (),
        _first_moment,
        _MOMENT_FLOOR,
        roundings=(ROUND_BF16,),
        operand_sizes=(4,),
        takes_gradient=True,
    ),
    ROUNDING: Kind("rounding", 1, (), (), (0,), _copy, roundings=(ROUND_BF16, ROUND_FP16), operand_sizes=(4,)),
    MOMENTUM_WEIGHT: Kind("momentum weight", 2, (_STEP,), (0, 1), (1,), _momentum_weight, _WEIGHT_FLOOR),
    NESTEROV_WEIGHT: Kind("Nesterov weight", 3, (_STEP, _FACTOR), (0, 1), (1,), _nesterov_weight, _WEIGHT_FLOOR),
    AVERAGE: Kind("average", 2, (_FACTOR, _FACTOR), (0, 1, 2, 3), (3, 4), _average, _WEIGHT_FLOOR),
    DRIFTING_AVERAGE: Kind("drifting average", 3, (_STEP, _STEP, _STEP), (0,), (0,), _drifting_average, _WEIGHT_FLOOR),
    SQUARES: Kind(
        "squares",
        3,
        (_FACTOR, _SHARE, _EPS, _FACTOR, _FACTOR),
        (0, 1),
        (),
        _squares,
        _MOMENT_FLOOR,
        operand_sizes=(4,),
    ),
    CENTERED_STEP: Kind(
        "centered step",
        4,
        (Bound(2.0**-16, 1.0), _EPS, _FACTOR, _STEP),
        (0, 1),
        (),
        _centered_step,
        _WEIGHT_FLOOR,
        operand_sizes=(4,),
    ),
}
