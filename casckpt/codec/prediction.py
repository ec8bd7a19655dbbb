"""Codec 5: a chunk of a training state as what an optimizer's step predicts, and the exact difference to that.

Where one step of Adam lies between two snapshots, the second moment follows from the moments before and the new first
moment, the weight from the new moments: to the bit for most elements, if the arithmetic is the optimizer's own. The
prediction is a `formulas.Formula` of bases; what it misses is a form of codec 4 whose base is the prediction, so that
the chunk is exact whatever the bases are, and every method of codec 4 serves here.

    params   kind u8 · variant u8 · rounding u8 · constants, f32 LE each ·
             per operand: item size u8 · number of chunks u8 · items skipped in the first u32 LE ·
             of a first moment: the gradient's codec u8 · payload size u32 LE · size of parameters u8 · parameters ·
             parameters of the form of codec 4
    payload  of a first moment: that of the gradient, a form of codecs 0-3 · that of the form of codec 4

The bases are the chunks of all operands, in order. Trials on a sample decide which model (hyper-parameters that may
have been used) and which variant (kernel of torch) a leaf's formula has; a hint remembers them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from typing import NamedTuple

import numpy as np

from casckpt.codec import averages, choose, difference, raw, zstd
from casckpt.codec.contract import DIFFERENCE, PREDICTION, Buffer, Decoder, Encoded, Hint, damaged
from casckpt.codec.forms import BASE_ID_SIZE, decode_part, encode_part, integers_in, plan_part, proven, size_of
from casckpt.codec.formulas import KINDS, Formula, find_gradient, floats, itemsize_of, predict
from casckpt.codec.lanes import Array
from casckpt.codec.models import AVERAGE, DRIFTING_AVERAGE, Model
from casckpt.codec.registry import decode_into
from casckpt.errors import InvalidInputError

BASE_COUNT_MAX = 16

_SAMPLE_COUNT, _SAMPLE_SLICES = 4096, 4  # items that a trial evaluates, and from how many places
_SOLVED_KINDS = (AVERAGE, DRIFTING_AVERAGE)  # models of these may leave their constants to be found
_APPROXIMATE = 0.1  # share of the chunk from which solved constants are a fit, which the next chunk has another of
_SAMPLE_CREDIT = 0.95  # a sample carries as many Huffman tables as the chunk

_HEAD = struct.Struct("<BBB")
_OPERAND = struct.Struct("<BBI")
_GRADIENT = struct.Struct("<BIB")  # codec, payload size, size of parameters


@dataclass(frozen=True, slots=True)
class Operand:
    """Where one operand's items lie: `skip` items into the first of some whole chunks, which follow each other.

    Items of 4 bytes are float32, of 2 bytes bf16. The chunks hold at least as many items from there as the chunk that
    is to be encoded.
    """

    chunks: tuple[memoryview, ...]
    itemsize: int
    skip: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a leaf's last trial found: the formula but for its constants, and how its parts are encoded."""

    kind: int
    model: int  # index of the model among those given
    variant: int
    rounding: int
    residual: difference.Plan
    gradient: choose.Plan | None = None
    ratio: float = 0.0  # parameters and payload, as a share of the chunk
    solved: tuple[float, ...] | None = None  # constants that the model left to be found


def encode_prediction(
    plain: memoryview, models: Sequence[Model], operands: Sequence[Operand], hint: Hint | None = None, *, ceiling: int
) -> Encoded | None:
    """The chunk as predicted from `operands`, if that is worth naming their chunks as bases.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        models: candidates, all of one kind. Those with constants out of bounds are left out.
        operands: as many as the kind has, in its order; their chunks must stay unchanged until this returns.
        hint: what paid last for this leaf's predictions; updated. A hint names a model by its index.
        ceiling: bytes that parameters, payload and the bases' ids must stay under.

    Returns:
        The encoding, which decodes to `plain` by proof; its bases are the chunks of all operands, in order. None when
        it does not stay under `ceiling`, or nothing can be predicted: no model, an operand that is too short, more
        than BASE_COUNT_MAX chunks. Raw with `rejected` when the proof or the library failed.

    Deterministic for equal input, hint state and library versions. Costs two predictions (0.5-1.3 ms per MiB each), the
    encoding of what they miss, and 0.1 ms per model and variant every TRIAL_INTERVAL uses. Memory: four chunks.

    Raises:
        InvalidInputError: models of several kinds, or operands that do not fit their kind.
    """
    if not models:
        return None
    _check_operands(models, operands)
    bases = tuple(chunk for operand in operands for chunk in operand.chunks)
    room = ceiling - BASE_ID_SIZE * len(bases)
    itemsize = itemsize_of(models[0].kind, operands[0].itemsize)
    count = len(plain) // itemsize
    if room <= 0 or not count or len(bases) > BASE_COUNT_MAX:
        return None
    found = [array for operand in operands if (array := _items_of(operand, count)) is not None]
    if len(found) < len(operands):
        return None
    try:
        plan = _recall(models, itemsize, hint) or _try_formulas(integers_in(plain, itemsize), models, found)
        if plan is None:
            return None
        encoded, learned = _encode(plain, models[plan.model], operands, found, plan, room)
    except zstd.ZstdError:  # the library failed, of which memory is the usual reason; raw needs none
        return raw.encode(plain, rejected="zstd")
    if hint is not None:
        hint.learn(learned)
    if encoded is None or learned is None:
        return None
    return proven(plain, bases, encoded, "prediction")


def _check_operands(models: Sequence[Model], operands: Sequence[Operand]) -> None:
    kinds = {model.kind for model in models}
    if len(kinds) > 1 or not kinds <= KINDS.keys():
        raise InvalidInputError(f"models of kinds {sorted(kinds)}, expected one kind of {sorted(KINDS)}")
    kind = KINDS[models[0].kind]
    sizes = [operand.itemsize for operand in operands]
    if len(sizes) != kind.operand_count or not set(sizes) <= set(kind.operand_sizes):
        expected = f"{kind.operand_count} of {kind.operand_sizes}"
        raise InvalidInputError(f"operands with items of {sizes} bytes, a {kind.name} has {expected}")


def _items_of(operand: Operand, count: int) -> Array | None:
    """The `count` items of an operand, copied only where they lie in several chunks; None where they do not."""
    parts, missing, skip = [], count, operand.skip
    dtype = "<f4" if operand.itemsize == 4 else "<u2"
    for chunk in operand.chunks:
        length = len(chunk) // operand.itemsize
        if missing > length - skip and len(chunk) % operand.itemsize:
            return None  # an item across two chunks
        part = np.frombuffer(chunk, dtype, length)[skip : skip + missing]
        parts.append(part)
        missing -= len(part)
        skip = max(0, skip - length)
    if missing:
        return None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


# --- which formula ---


def _recall(models: Sequence[Model], itemsize: int, hint: Hint | None) -> _Plan | None:
    """The hint's plan, if it is for these models and no trial is due."""
    plan = hint.recall() if hint is not None else None
    if not isinstance(plan, _Plan) or (plan.kind, plan.residual.itemsize) != (models[0].kind, itemsize):
        return None
    if plan.model >= len(models) or (plan.solved and plan.ratio > _APPROXIMATE):
        return None
    return plan if _is_within_bounds(_formula(models[plan.model], plan)) else None


def _formula(model: Model, plan: _Plan) -> Formula:
    return Formula(model.kind, plan.variant, plan.rounding, plan.solved or model.constants)


def _is_within_bounds(formula: Formula) -> bool:
    bounds = KINDS[formula.kind].bounds
    if len(bounds) != len(formula.constants):
        return False
    for bound, constant in zip(bounds, formula.constants, strict=True):
        is_inside = isfinite(constant) and bound.low <= abs(constant) <= bound.high
        if not is_inside and not (bound.may_be_zero and constant == 0):
            return False
    return True


def _try_formulas(items: Array, models: Sequence[Model], operands: Sequence[Array]) -> _Plan | None:
    """Every variant of every model on a sample; the one that predicts most items, and what it would take."""
    places = _places(len(items))
    expected, inputs = items[places], [operand[places] for operand in operands]
    best: tuple[int, _Plan, Array] | None = None
    for plan in _variants(models, expected, inputs):
        predicted = np.empty_like(expected)
        _predict(_formula(models[plan.model], plan), inputs, expected, predicted)
        hits = int(np.count_nonzero(predicted == expected))
        if best is None or hits > best[0]:
            best = hits, plan, predicted
    return None if best is None else _estimate(models, best[1], expected, inputs)


def _variants(models: Sequence[Model], expected: Array, inputs: Sequence[Array]) -> list[_Plan]:
    kind = KINDS[models[0].kind]
    variants = kind.variants if expected.itemsize == 4 else kind.narrow_variants
    plans = [
        _Plan(models[0].kind, number, variant, rounding, difference.Plan(expected.itemsize), solved=solved)
        for number, model in enumerate(models)
        for solved in _solutions(model, expected, inputs)
        for rounding in kind.roundings
        for variant in variants
    ]
    return [plan for plan in plans if _is_within_bounds(_formula(models[plan.model], plan))]


def _solutions(model: Model, expected: Array, inputs: Sequence[Array]) -> Sequence[tuple[float, ...] | None]:
    """What the constants of a model that has none may be; None: it has them."""
    if model.constants or model.kind not in _SOLVED_KINDS:
        return (None,)
    return averages.solve(floats(expected), [floats(each) for each in inputs])


def _places(count: int) -> Array | slice:
    """Which items a trial looks at: evenly spaced runs, first and last included; everything when there are few."""
    length = _SAMPLE_COUNT // _SAMPLE_SLICES
    if count <= _SAMPLE_COUNT:
        return slice(None)
    starts = [(count - length) * i // (_SAMPLE_SLICES - 1) for i in range(_SAMPLE_SLICES)]
    return np.concatenate([np.arange(start, start + length) for start in starts])


def _estimate(models: Sequence[Model], plan: _Plan, expected: Array, inputs: Sequence[Array]) -> _Plan:
    """The plan with what the sample would take by it, and the plans of its parts."""
    plain = expected.view(np.uint8).data
    predicted = np.empty_like(expected)
    gradient = _predict(_formula(models[plan.model], plan), inputs, expected, predicted)
    residual, learned = difference.encode_unproven(plain, predicted.view(np.uint8).data, plan.residual, len(plain))
    size = len(plain) if residual is None else residual.stored_size  # parameters do not grow with the chunk
    if gradient is not None:
        part = gradient.view(np.uint8).data
        plan = replace(plan, gradient=plan_part(part, gradient.itemsize, None))
        size += encode_part(part, gradient.itemsize, plan.gradient).stored_size
    return replace(plan, residual=learned, ratio=_SAMPLE_CREDIT * size / len(plain))


def _predict(formula: Formula, operands: Sequence[Array], expected: Array, out: Array) -> Array | None:
    """Predict what is expected; the gradient that this takes, if the kind has one."""
    if not KINDS[formula.kind].takes_gradient:
        predict(formula, operands, out)
        return None
    gradient = find_gradient(formula, operands[0], expected.view("<f4"))
    predict(formula, [*operands, gradient], out)
    return gradient


# --- encoding ---


def _encode(
    plain: memoryview, model: Model, operands: Sequence[Operand], arrays: Sequence[Array], plan: _Plan, room: int
) -> tuple[Encoded | None, _Plan | None]:
    """The form by a plan, not proven, and what was learned.

    No form where the plan says that it misses `room`; nothing learned where it misses that against what the plan says:
    one chunk unlike the others of a leaf must not spoil theirs.
    """
    if plan.ratio * len(plain) >= room:
        return None, plan
    formula = _formula(model, plan)
    items = integers_in(plain, plan.residual.itemsize)
    base, predicted = _buffer_for(len(plain), items.itemsize)
    gradient = _predict(formula, arrays, items, predicted)
    residual, learned = difference.encode_unproven(plain, base.data, plan.residual, room)
    if residual is None:
        return None, None
    plan = replace(plan, residual=learned)
    params, payload = _head(formula, operands), residual.payload
    if gradient is not None:
        part = gradient.astype("<u2", copy=False).view(np.uint8).data
        plan = replace(plan, gradient=plan_part(part, gradient.itemsize, plan.gradient))
        form = encode_part(part, gradient.itemsize, plan.gradient)
        params += _GRADIENT.pack(form.codec, form.stored_size, len(form.params)) + form.params
        payload = b"".join((form.payload, payload))
    encoded = Encoded(PREDICTION, 1, params + residual.params, payload, len(payload))
    size = size_of(encoded)
    return encoded, replace(plan, ratio=size / len(plain)) if size < room else None


def _buffer_for(size: int, itemsize: int) -> tuple[Array, Array]:
    """Bytes for the base of the difference, and their whole items: zeros stand for what follows these."""
    base = np.empty(size, np.uint8)
    whole = size // itemsize * itemsize
    base[whole:] = 0
    return base, base[:whole].view(f"<u{itemsize}")


def _head(formula: Formula, operands: Sequence[Operand]) -> bytes:
    constants = struct.pack(f"<{len(formula.constants)}f", *formula.constants)
    table = b"".join(_OPERAND.pack(operand.itemsize, len(operand.chunks), operand.skip) for operand in operands)
    return _HEAD.pack(formula.kind, formula.variant, formula.rounding) + constants + table


# --- decoding ---


class _Parsed(NamedTuple):
    """What the parameters say up to the gradient or residual, which start at `position`."""

    formula: Formula
    operands: list[Operand]
    position: int


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    formula, operands, position = _parse(params, bases)
    kind = KINDS[formula.kind]
    itemsize = itemsize_of(formula.kind, operands[0].itemsize)
    count = len(out) // itemsize
    inputs = [array for operand in operands if count and (array := _items_of(operand, count)) is not None]
    if len(inputs) < len(operands):
        raise damaged("prediction", f"{len(out)} bytes of a {kind.name}, from operands of fewer items")
    if kind.takes_gradient:
        gradient = np.empty(count, "<u2")
        position, payload = _decode_gradient(params, position, payload, gradient)
        inputs.append(gradient)
    predict(formula, inputs, integers_in(out, itemsize))
    whole = count * itemsize
    out[whole:] = bytes(len(out) - whole)  # zeros stand for what follows the items
    decode_into(DIFFERENCE, 1, params[position:], payload, (out,), out)


def _decode_gradient(params: bytes, position: int, payload: memoryview, gradient: Array) -> tuple[int, memoryview]:
    """Fill `gradient`; where the parameters go on, and the rest of the payload."""
    start = position + _GRADIENT.size
    if start > len(params):
        raise damaged("prediction", f"{len(params)} bytes of parameters are too few for a gradient")
    codec, size, params_size = _GRADIENT.unpack_from(params, position)
    stop = start + params_size
    if stop > len(params) or size > len(payload):
        raise damaged("prediction", f"a gradient of {size} bytes in {len(payload)} bytes of payload")
    decode_part(codec, params[start:stop], payload[:size], gradient.view(np.uint8).data, "prediction")
    return stop, payload[size:]


def _parse(params: bytes, bases: Sequence[Buffer]) -> _Parsed:
    number, variant, rounding = params[: _HEAD.size].ljust(_HEAD.size, b"\0")
    kind = KINDS.get(number)
    if kind is None or variant not in kind.variants + kind.narrow_variants or rounding not in kind.roundings:
        raise damaged("prediction", f"kind {number}, variant {variant}, rounding {rounding}")
    constants = struct.Struct(f"<{len(kind.bounds)}f")
    table_start = _HEAD.size + constants.size
    position = table_start + _OPERAND.size * kind.operand_count
    if position > len(params):
        raise damaged("prediction", f"{len(params)} bytes of parameters, a {kind.name} has {position} and more")
    formula = Formula(number, variant, rounding, constants.unpack_from(params, _HEAD.size))
    if not _is_within_bounds(formula):
        raise damaged("prediction", f"constants {formula.constants} of a {kind.name}")
    rows = list(_OPERAND.iter_unpack(params[table_start:position]))
    if sum(chunk_count for _, chunk_count, _ in rows) != len(bases):
        raise damaged("prediction", f"{len(bases)} bases for operands of {[row[1] for row in rows]} chunks")
    if not {size for size, _, _ in rows} <= set(kind.operand_sizes):
        raise damaged("prediction", f"a {kind.name} with items of {[row[0] for row in rows]} bytes")
    chunks = (memoryview(base).cast("B") for base in bases)
    operands = [Operand(tuple(islice(chunks, chunk_count)), size, skip) for size, chunk_count, skip in rows]
    return _Parsed(formula, operands, position)


DECODERS = {1: Decoder("prediction", _decode, range(1, BASE_COUNT_MAX + 1))}
