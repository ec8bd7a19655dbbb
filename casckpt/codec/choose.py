"""Which encoding a chunk gets, and the proof that it decodes.

    empty or periodic             -> constant
    a hint says so                -> what paid last, without a trial
    a sample of 16 KiB shrinks    -> zstd, or planes when they are smaller
    otherwise, or under 3 % gain  -> raw

The first round of a trial asks only whether anything compresses at all: the interleaved sample in the match profile,
its lowest and highest planes in the entropy profile (whatever compresses shows in one of these). Incompressible data,
the case where every microsecond counts, pays for no more. The second round tries every plane in both profiles.

The check runs the registered decoder on every encoding but raw and compares all bytes. A compressor that fails or gives
wrong bytes costs space, never data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from casckpt.codec import changes, constant, planes, raw, zstd
from casckpt.codec.contract import Encoded, Hint
from casckpt.codec.lanes import ITEM_SIZE_MAX, ITEM_SIZE_MIN, LANE_WIDTHS, Array, fits
from casckpt.codec.planes import MODE_CONSTANT, MODE_RAW, MODE_ZSTD, LanePlan
from casckpt.codec.registry import decode_into
from casckpt.errors import CorruptionError, InvalidInputError

SAMPLE_SIZE = 16 * 1024  # bytes: the trial costs 50 us a chunk, a tenth of hashing and writing it
SAMPLE_SLICES = 4  # places: a leaf's beginning alone often differs from the rest

GAIN_MIN = 0.03  # of the chunk; less is not worth decoding at every restore
_PLANE_GAIN_MIN = 0.05  # of a plane's sample: below it the rest of the plane is noise at 250 MB/s


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision for items of one size: lanes, or one frame in `profile`, or (neither) raw."""

    itemsize: int = 0
    lanes: tuple[LanePlan, ...] = ()
    profile: zstd.Profile | None = None


def encode(plain: memoryview, itemsize: int, hint: Hint | None = None, *, gain_min: float = GAIN_MIN) -> Encoded:
    """The smallest worthwhile encoding of one chunk.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        itemsize: bytes per number; 1 for opaque bytes. The chunk need not hold whole items.
        hint: what paid last for this leaf; updated. One hint goes with one `gain_min`.
        gain_min: share of the chunk that an encoding has to save.

    Returns:
        The encoding. For raw, its payload is `plain` itself.

    Deterministic for equal input, hint state and library versions. Releases the GIL in the heavy parts. Costs per
    MiB: raw about 60 us (5 by a hint), constant 0.2 ms, others 0.5-3 ms; at most three chunks of memory.

    Raises:
        InvalidInputError: `itemsize` is not positive.
    """
    if itemsize < 1:
        raise InvalidInputError(f"item size {itemsize}, expected at least 1", itemsize=itemsize)
    if not plain:
        return constant.encode(b"")
    pattern = constant.find_pattern(plain, itemsize)
    if pattern is not None:
        return _checked(plain, constant.encode(pattern), "constant")
    try:
        plan = hint.recall() if hint is not None else None
        if plan is None or plan.itemsize != itemsize:  # one hint given for different leaves
            plan = choose(plain, itemsize)
        encoded = _apply(plain, itemsize, plan, gain_min)
    except zstd.ZstdError:  # the library failed, of which memory is the usual reason; raw needs none
        return raw.encode(plain, rejected="zstd")
    if hint is not None:
        hint.learn(plan if encoded.codec else Plan(itemsize))
    return encoded


def _apply(plain: memoryview, itemsize: int, plan: Plan, gain_min: float) -> Encoded:
    if plan.lanes:
        encoded, name = planes.encode(plain, itemsize, plan.lanes), "planes"
    elif plan.profile is not None:
        encoded, name = zstd.encode(plain, plan.profile), "zstd"
    else:
        return raw.encode(plain)
    if encoded.stored_size + len(encoded.params) > (1 - gain_min) * len(plain):
        return raw.encode(plain)
    return _checked(plain, encoded, name)


def _checked(plain: memoryview, encoded: Encoded, name: str) -> Encoded:
    """`encoded` if the decoder gives back `plain`, else raw that names the codec."""
    decoded = np.empty(len(plain), np.uint8)
    try:
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, (), decoded.data)
    except CorruptionError:
        return raw.encode(plain, rejected=name)
    return encoded if changes.is_equal(plain, decoded.data) else raw.encode(plain, rejected=name)


def choose(plain: memoryview, itemsize: int) -> Plan:
    """Try a sample of a chunk that is not constant: 40-50 us when nothing compresses, else 0.1-0.6 ms."""
    has_planes = ITEM_SIZE_MIN <= itemsize <= min(ITEM_SIZE_MAX, len(plain))
    sample = _sample(plain, itemsize if has_planes else 1)
    rows = np.frombuffer(sample, np.uint8).reshape(-1, itemsize).T if has_planes else None
    match_size = len(zstd.compress(sample, "match"))
    probes = (rows[0], rows[-1]) if rows is not None else (np.frombuffer(sample, np.uint8),)
    if _gains(match_size, len(sample)) or any(_gains(_entropy_size(probe), len(probe)) for probe in probes):
        return _refine(sample, itemsize, rows, match_size)
    return Plan(itemsize)


def _refine(sample: bytes, itemsize: int, rows: Array | None, match_size: int) -> Plan:
    """Second round: something compresses, so everything is tried, and the smallest wins."""
    whole: dict[zstd.Profile, int] = {"match": match_size, "entropy": len(zstd.compress(sample, "entropy"))}
    profile = min(whole, key=whole.__getitem__)
    if rows is not None:
        plans = [_plan_row(np.ascontiguousarray(row)) for row in rows]
        planes_size = sum(size for _, size in plans)
        if planes_size < whole[profile] and _gains(planes_size, len(sample)):
            return Plan(itemsize, lanes=_widen([plan for plan, _ in plans]))
    return Plan(itemsize, profile=profile if _gains(whole[profile], len(sample)) else None)


def _plan_row(row: Array) -> tuple[LanePlan, int]:
    """How to treat one plane, and what its sample would take."""
    if bool((row == row[0]).all()):
        return LanePlan(1, MODE_CONSTANT), 0
    match_size, entropy_size = len(zstd.compress(row.data, "match")), _entropy_size(row)
    size = min(match_size, entropy_size)
    if size > (1 - _PLANE_GAIN_MIN) * len(row):
        return LanePlan(1, MODE_RAW), len(row)
    return LanePlan(1, MODE_ZSTD, "match" if match_size < entropy_size else "entropy"), size


def _widen(plans: Sequence[LanePlan]) -> tuple[LanePlan, ...]:
    """Neighbouring constant or raw planes become one lane, as wide as alignment allows."""
    widened = []
    offset = 0
    while offset < len(plans):
        mode = plans[offset].mode
        width = 1
        if mode != MODE_ZSTD:
            width = max(
                width
                for width in LANE_WIDTHS
                if fits(len(plans), offset, width) and all(plan.mode == mode for plan in plans[offset : offset + width])
            )
        widened.append(LanePlan(width, mode, plans[offset].profile))
        offset += width
    return tuple(widened)


def _sample(plain: memoryview, itemsize: int) -> bytes:
    """Whole items from evenly spaced places, first and last included; everything when the chunk is small."""
    count = len(plain) // itemsize
    slice_count = SAMPLE_SIZE // SAMPLE_SLICES // itemsize
    if count <= slice_count * SAMPLE_SLICES:
        return bytes(plain[: count * itemsize])
    starts = ((count - slice_count) * i // (SAMPLE_SLICES - 1) * itemsize for i in range(SAMPLE_SLICES))
    return b"".join(plain[start : start + slice_count * itemsize] for start in starts)


def _entropy_size(row: Array) -> int:
    return len(zstd.compress(np.ascontiguousarray(row).data, "entropy"))


def _gains(size: int, plain_size: int) -> bool:
    return size < (1 - GAIN_MIN) * plain_size
