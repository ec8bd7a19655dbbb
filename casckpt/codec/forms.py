"""What codecs with bases share: standalone forms as parts of a form, samples of items, and the proof of the whole.

A codec with bases stores what it computed (differences, gaps, gradients) in *parts*, each a form of codecs 0-3 in their
version 1. A part names no base, so nothing nests. A part is not checked when it is made: the whole is proven by
decoding, which decodes its parts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from casckpt.codec import changes, choose, planes, raw, zstd
from casckpt.codec.contract import CONSTANT, PLANES, RAW, ZSTD, Buffer, Encoded, damaged
from casckpt.codec.lanes import Array
from casckpt.codec.registry import decode_into
from casckpt.errors import CorruptionError

BASE_ID_SIZE = 32  # what naming a base adds to the record

_STANDALONE = (RAW, CONSTANT, ZSTD, PLANES)
_MATCH_GAIN = 0.9  # of the size without matches, which a gap or a difference of few values takes five times as long for


def size_of(encoded: Encoded) -> int:
    """Bytes of parameters and payload."""
    return encoded.stored_size + len(encoded.params)


def integers_in(plain: memoryview, size: int) -> Array:
    """The whole items of a chunk as little-endian unsigned integers; no copy."""
    return np.frombuffer(plain, f"<u{size}", len(plain) // size)


def sample_of(values: Array) -> Array:
    """Items from evenly spaced places, first and last included; everything when there are few."""
    count = choose.SAMPLE_SIZE // choose.SAMPLE_SLICES // values.itemsize
    if len(values) <= count * choose.SAMPLE_SLICES:
        return values
    starts = np.linspace(0, len(values) - count, choose.SAMPLE_SLICES).astype(int)
    return np.concatenate([values[start : start + count] for start in starts])


def plan_part(part: memoryview, itemsize: int, known: choose.Plan | None) -> choose.Plan | None:
    """The known plan if it is for such items, else one by trial: without matches, unless these save a tenth."""
    if not part or (known is not None and known.itemsize == itemsize):
        return known
    plan = choose.choose(part, itemsize)
    lanes = tuple(replace(lane, profile="entropy") for lane in plan.lanes)
    plain_plan = replace(plan, lanes=lanes, profile=plan.profile and "entropy")
    start = part[: choose.SAMPLE_SIZE]
    sizes = [size_of(encode_part(start, itemsize, each)) for each in (plan, plain_plan)]
    return plan if sizes[0] < _MATCH_GAIN * sizes[1] else plain_plan


def encode_part(plain: memoryview, itemsize: int, plan: choose.Plan | None) -> Encoded:
    """A part by its plan, or raw where the plan does not pay."""
    encoded = raw.encode(plain)
    if plan is not None and plan.lanes and len(plain) >= itemsize:
        encoded = planes.encode(plain, itemsize, plan.lanes)
    elif plan is not None and plan.profile is not None:
        encoded = zstd.encode(plain, plan.profile)
    return encoded if size_of(encoded) < len(plain) else raw.encode(plain)


def decode_part(codec: int, params: bytes, payload: memoryview, out: memoryview, whole: str) -> None:
    """Decode a part of a form of the codec named `whole`.

    Raises:
        CorruptionError: not a standalone codec, or a form that does not fill `out`.
    """
    if codec not in _STANDALONE:
        raise damaged(whole, f"a part in codec {codec}")
    decode_into(codec, 1, params, payload, (), out)


def proven(plain: memoryview, bases: Sequence[Buffer], encoded: Encoded, name: str) -> Encoded:
    """`encoded` if the decoder gives back `plain`, else raw that names the codec."""
    decoded = np.empty(len(plain), np.uint8)
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, bases, decoded.data)
    except CorruptionError:
        return raw.encode(plain, rejected=name)
    return encoded if changes.is_equal(plain, decoded.data) else raw.encode(plain, rejected=name)
