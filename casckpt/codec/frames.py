"""Codec 6: frames that repeat are stored once, and new ones as what they add to the frames around them.

A *frame* is a run of bytes of one size: a picture, or a whole row of numbers. The chunk is whole frames, one after the
other, between two rests. So may the *base* be: the chunk before it in the same column, or the same rows of a sibling
(`next_obs` is `obs` one row later). Frames of the base have the numbers from 0, then come the chunk's own *new* frames
in the order in which they appear. Each frame of the chunk is one of these numbers; in a stack of four pictures that
advances by one, three are known. How new frames are stored is the *method*:

    plain     as they are
    changes   gaps between changed items and the new values: what clean pictures need
    between   the difference to the mean of a frame before and one after, in a pyramid of steps (`pictures.pyramid`)
    smoothed  the same to the smoothed mean, in which the noise of a camera averages out

In the last three a new frame is compared with the one before it in its *series*: of environments that take turns in a
ring each is one, and so is each plane of color. Before the first stands the base's last frame, or zeros.

    params   item size u8 · method u8 · series u16 · frame size u32 · picture width u32 · rest before the frames u32 ·
             frames u32 · new frames u32 · base: rest u32, frames u32 · changed items u32, long gaps u32 ·
             for each part of the payload: codec u8 · payload size u32 · size of parameters u8 · parameters
    payload  numbers, rests, then pixels (or residuals), or gaps, long gaps and values; each a standalone form

Numbers are stored as differences to the number before plus one, so that frames in order are zeros. The base's bytes
and `out` are never the same memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from casckpt.codec import changes, choose, pictures, raw, zstd
from casckpt.codec.contract import FRAMES, Buffer, Decoder, Encoded, Hint, damaged
from casckpt.codec.forms import BASE_ID_SIZE, decode_part, encode_part, proven, size_of
from casckpt.codec.lanes import Array
from casckpt.errors import InvalidInputError

PLAIN, CHANGES, BETWEEN, SMOOTHED = 0, 1, 2, 3

FRAME_SIZE_MIN = 16  # bytes: of smaller ones the numbers alone cost a share of them
_ITEM_SIZES = (1, 2, 4, 8)
_ALWAYS_CHANGES = 1 / 8  # of the words changed from frame to frame: below it the method wins without a trial
_CHANGES_MAX = 1 / 2  # of all items, besides one whole frame
_SAMPLE_FRAMES = 9  # consecutive: three steps of a pyramid
_SIDE_MIN = 8  # pixels: less is no picture
_LONG_GAP = 255  # in the stream of gaps: the gap is this much longer than the next of the long gaps

_HEAD = struct.Struct("<BBHIIIIIIIII")
_PART = struct.Struct("<BIB")


class Frames(NamedTuple):
    """How the bytes of a chunk are frames.

    Attributes:
        size: bytes of a frame: one picture of a stack, or a row where nothing is stacked.
        width: bytes of a row of pixels, for smoothing; 0: not a picture.
        itemsize: bytes per number: 1, 2, 4 or 8.
        per_row: frames in each row of the buffer: pictures of a stack, environments, planes of color.
        skip: bytes of the chunk before its first whole frame.
        base_skip: the same of the base.
    """

    size: int
    width: int = 0
    itemsize: int = 1
    per_row: int = 1
    skip: int = 0
    base_skip: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trial found for a leaf: the method, and how its pixels or residuals are compressed."""

    method: int
    pixels: choose.Plan
    width: int  # of the leaf's frames, with
    itemsize: int


def frames_of(row_shape: Sequence[int], itemsize: int) -> Frames | None:
    """How rows of one shape are frames: pictures, else vectors; None for rows that are too small.

    Bytes whose last two dimensions have at least 8 each are pictures, one by one, be they stacked, planes of color or
    of several environments. With a smaller last dimension, as in (height, width, colors), three dimensions are one.
    """
    sides = [each for each in row_shape if each > 1]
    dims, width = 1, 0
    if itemsize == 1 and len(sides) > 1 and min(sides[-2:]) >= _SIDE_MIN:
        dims, width = 2, sides[-1]
    elif itemsize == 1 and len(sides) > 2 and min(sides[-3:-1]) >= _SIDE_MIN:
        dims, width = 3, sides[-2] * sides[-1]
    size = prod(sides[-dims:]) * itemsize
    if size < FRAME_SIZE_MIN:  # a few numbers: of all environments together
        dims, size = len(sides), prod(sides) * itemsize
    per_row = prod(sides[:-dims]) if dims < len(sides) else 1
    if size < FRAME_SIZE_MIN or per_row >= 1 << 16:
        return None
    item = gcd(itemsize, _ITEM_SIZES[-1])
    return Frames(size, width, item, per_row)


def encode_frames(
    plain: memoryview, frames: Frames, base: memoryview | None = None, hint: Hint | None = None, *, ceiling: int
) -> Encoded | None:
    """The chunk as frames, with those of a base if one is given.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        frames: how its bytes are frames.
        base: plain bytes of the base, of any size. Must stay unchanged until this returns.
        hint: what paid last for this leaf; updated. Not one that another codec uses.
        ceiling: bytes that parameters, payload and the base's id must stay under.

    Returns:
        The encoding, which decodes to `plain` by proof; it names the base if one was given. None when it does not stay
        under `ceiling`, or nothing repeats: no frame occurs twice, and none follows from others. Raw with `rejected`
        when the proof or the library failed.

    Deterministic for equal input, hint state and library versions. Releases the GIL in the heavy parts. Costs per MiB
    0.5-1 ms of stacked pictures, 2-6 ms of noisy ones; a trial adds as much. Memory: four chunks and the base's.

    Raises:
        InvalidInputError: sizes that contradict each other.
    """
    _check(frames)
    count, known = (len(plain) - frames.skip) // frames.size, _frames_in(base, frames.size, frames.base_skip)
    room = ceiling - (BASE_ID_SIZE if base is not None else 0)
    if count < 1 or (count < 2 if base is None else not len(known)) or room <= 0:
        return None
    plan = hint.recall() if hint is not None else None
    if not isinstance(plan, Plan) or (plan.width, plan.itemsize) != (frames.width, frames.itemsize):
        plan = None
    try:
        encoded, learned = _encode(plain, frames, known, plan)
    except zstd.ZstdError:  # the library failed, of which memory is the usual reason; raw needs none
        return raw.encode(plain, rejected="zstd")
    if hint is not None:
        hint.learn(learned)
    if encoded is None or size_of(encoded) >= room:
        return None
    return proven(plain, () if base is None else (base,), encoded, "frames")


def _check(frames: Frames) -> None:
    size, width, itemsize, per_row, skip, base_skip = frames
    if (
        not FRAME_SIZE_MIN <= size < 1 << 32
        or itemsize not in _ITEM_SIZES
        or size % itemsize
        or not 0 <= width <= size
        or (width and size % width)
        or not 1 <= per_row < 1 << 16
        or min(skip, base_skip) < 0
    ):
        raise InvalidInputError(
            f"{frames}: expected frames of at least {FRAME_SIZE_MIN} bytes, whole items of 1, 2, 4 or 8 bytes and "
            "whole rows of pixels in them, and at least one in each row",
            frames=frames,
        )


def _frames_in(plain: Buffer | None, size: int, skip: int) -> Array:
    """The whole frames after `skip` bytes; no copy."""
    count = 0 if plain is None else max(0, len(plain) - skip) // size
    if plain is None or not count:
        return np.empty((0, size), np.uint8)
    return np.frombuffer(plain, np.uint8, count * size, skip).reshape(count, size)


def _number_dtype(count: int) -> str:
    """What the numbers of so many frames, base and chunk, are stored in: modulo, so that any difference fits."""
    return "<u2" if count <= 1 << 16 else "<u4"


def _series_order(count: int, series: int) -> Array:
    """Positions of new frames, one series after the other."""
    return np.concatenate([np.arange(start, count, series) for start in range(min(series, count))] or [np.arange(0)])


# --- encoding ---


def _encode(plain: memoryview, frames: Frames, known: Array, plan: Plan | None) -> tuple[Encoded | None, Plan | None]:
    own = _frames_in(plain, frames.size, frames.skip)
    numbers, is_new = _number(own, known)
    new = np.flatnonzero(is_new)
    stack = np.empty((1 + len(new), frames.size), np.uint8)
    stack[0] = known[-1] if len(known) else 0
    series = max(1, round(len(new) * frames.per_row / len(own)))  # new frames of a row come one for each series
    np.take(own, new[_series_order(len(new), series)], axis=0, out=stack[1:], mode="clip")
    before = numbers.copy()
    before[1:] = numbers[:-1] + 1
    before[0] = len(known)
    differences = (numbers - before).astype(_number_dtype(len(known) + len(own)))
    rests = bytes(plain[: frames.skip]) + bytes(plain[frames.skip + own.size :])
    parts = [_deep(differences), _deep(np.frombuffer(rests, np.uint8))]
    method, long_count, change_count, learned = PLAIN, 0, 0, plan
    if len(new):
        best, learned = _choose_method(stack, frames, plan, has_base=len(known) > 0)
        method, change_count, long_count = best.method, best.change_count, best.long_count
        parts += best.parts
        if method == PLAIN and len(new) == len(own):
            return None, learned
    head = _HEAD.pack(
        frames.itemsize, method, series, frames.size, frames.width if method == SMOOTHED else 0, frames.skip,
        len(own), len(new), frames.base_skip if len(known) else 0, len(known), change_count, long_count,
    )  # fmt: skip
    params = head + b"".join(_PART.pack(each.codec, each.stored_size, len(each.params)) + each.params for each in parts)
    payload = b"".join(each.payload for each in parts)
    return Encoded(FRAMES, 1, params, payload, len(payload)), learned


def _number(own: Array, known: Array) -> tuple[Array, Array]:
    """The number of each frame of the chunk, and which are new."""
    prints = np.concatenate([pictures.fingerprints(each) for each in (known, own) if len(each)])
    _, firsts, inverse = np.unique(prints, return_index=True, return_inverse=True)
    first = firsts[inverse.reshape(-1)][len(known) :]  # the first frame, base and chunk, with this content
    is_new = first == np.arange(len(known), len(prints))
    rank = np.cumsum(is_new) - 1
    is_own = first >= len(known)
    numbers = first.copy()
    numbers[is_own] = len(known) + rank[first[is_own] - len(known)]
    return numbers, is_new


def _deep(values: Array) -> Encoded:
    return encode_part(values.view(np.uint8).data, values.itemsize, choose.Plan(values.itemsize, profile="deep"))


class _Method(NamedTuple):
    """New frames by one method."""

    method: int
    parts: Sequence[Encoded]
    change_count: int = 0
    long_count: int = 0

    @property
    def size(self) -> int:
        return sum(size_of(part) for part in self.parts)


def _choose_method(stack: Array, frames: Frames, plan: Plan | None, *, has_base: bool) -> tuple[_Method, Plan]:
    """New frames by the method that suits: changes where few items change, else what a trial says.

    The first frame has nothing before it without a base, and says nothing of the others.
    """
    compared = stack if has_base else stack[1:]
    is_changed = changes.changed_words(compared[1:].reshape(-1).data, compared[:-1].reshape(-1).data)
    share = np.count_nonzero(is_changed) / max(1, len(is_changed))
    by_changes = Plan(CHANGES, choose.Plan(), frames.width, frames.itemsize)
    was_changes = plan is not None and plan.method == CHANGES
    if share <= _ALWAYS_CHANGES or (was_changes and share <= _CHANGES_MAX):
        return _by_changes(stack, frames), by_changes
    is_known = plan is not None and not was_changes
    plan = plan if plan is not None and is_known else _try_methods(stack, frames)
    pixels = _encode_pixels(stack, frames, plan, has_base=has_base)
    if not is_known and share <= _CHANGES_MAX:
        found = _by_changes(stack, frames)
        if found.size < size_of(pixels):
            return found, by_changes
    return _Method(plan.method, [pixels]), plan


def _change_count_max(count: int, size: int, itemsize: int) -> int:
    """Bound of changed items in so many frames: half of all, and one whole frame besides; which bounds memory."""
    return (count + 1) * (size // itemsize) // 2 + changes.WORD_SIZE


def _by_changes(stack: Array, frames: Frames) -> _Method:
    flat = stack.reshape(-1)
    new, before = flat[frames.size :].data, flat[: -frames.size].data
    found = changes.find(new, before, frames.itemsize, 1, len(new) // frames.itemsize)
    assert found is not None  # there is no limit
    gaps = found.gaps
    positions = np.cumsum(gaps, dtype=np.intp)
    positions -= 1
    values = np.frombuffer(new, f"<u{frames.itemsize}").take(positions)
    is_long = gaps >= _LONG_GAP
    long_gaps = (gaps[is_long] - _LONG_GAP).astype("<u4")
    long_plain = long_gaps.view(np.uint8).data
    parts = [
        _deep(np.minimum(gaps, _LONG_GAP).astype(np.uint8)),
        encode_part(long_plain, 4, choose.choose(long_plain, 4) if long_plain else None),
        _deep(values),
    ]
    return _Method(CHANGES, parts, len(gaps), len(long_gaps))


def _try_methods(stack: Array, frames: Frames) -> Plan:
    """The best of the methods but changes for a few frames in the middle."""
    start = max(1, (len(stack) - _SAMPLE_FRAMES) // 2)
    sample = stack[start : start + _SAMPLE_FRAMES] if len(stack) > 2 else stack
    size = frames.itemsize
    tried = [(PLAIN, choose.choose(sample.reshape(-1).data, size)), (PLAIN, choose.Plan(size, profile="deep"))]
    if size == 1:
        tried.append((BETWEEN, choose.Plan(1, profile="entropy")))
        if frames.width:
            tried.append((SMOOTHED, choose.Plan(1, profile="entropy")))
    plans = [Plan(method, pixels, frames.width, size) for method, pixels in tried]
    return min(plans, key=lambda plan: size_of(_encode_pixels(sample, frames, plan, has_base=True)))


def _encode_pixels(stack: Array, frames: Frames, plan: Plan, *, has_base: bool) -> Encoded:
    """New frames, or what they add to a prediction; frame 0 of the stack stands before them."""
    pixels = stack[1:]
    if plan.method != PLAIN:
        pixels = stack[1:].copy()  # of which the first stays as it is where nothing stands before it
        width = frames.width if plan.method == SMOOTHED else 0
        for residual, series, between in _tiles(stack, pixels, has_base=has_base):
            np.subtract(series[between.frames], pictures.predict(series, between, width), out=residual)
    return encode_part(pixels.reshape(-1).data, frames.itemsize, plan.pixels)


def _tiles(stack: Array, residuals: Array, *, has_base: bool) -> Iterator[tuple[Array, Array, pictures.Between]]:
    """A stack's residuals in their order, tile by tile; the stack in which the tile's frames are numbered; the tile.

    Without a base the first new frame is its own residual, and frame 0 of that stack.
    """
    at, series = (0, stack) if has_base else (1, stack[1:])
    for between in pictures.pyramid(len(series), stack.shape[1]):
        yield residuals[at : at + len(between.frames)], series, between
        at += len(between.frames)


# --- decoding ---


class _Head(NamedTuple):
    """The fixed part of the parameters."""

    itemsize: int
    method: int
    series: int
    size: int
    width: int
    skip: int
    frame_count: int
    new_count: int
    base_skip: int
    base_count: int
    change_count: int
    long_count: int


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    base = memoryview(bases[0]).cast("B") if bases else None
    head = _parse(params, None if base is None else len(base), len(out))
    parts = _Parts(params, payload)
    known = _frames_in(base, head.size, head.base_skip)[: head.base_count]
    differences = np.empty(head.frame_count, _number_dtype(head.base_count + head.frame_count))
    parts.read(differences)
    numbers = _numbers(differences, head)
    rests = np.empty(len(out) - head.frame_count * head.size, np.uint8)
    parts.read(rests)
    stack = np.empty((1 + head.new_count, head.size), np.uint8)
    stack[0] = known[-1] if len(known) else 0
    if head.new_count:
        _DECODE_METHODS[head.method](head, parts, stack)
    parts.finish()
    own_stop = head.skip + head.frame_count * head.size
    out[: head.skip] = rests[: head.skip].data
    out[own_stop:] = rests[head.skip :].data
    own = np.frombuffer(out[head.skip : own_stop], np.uint8).reshape(head.frame_count, head.size)
    if head.frame_count:
        _place(numbers, known, stack[1:], head.series, own)


def _parse(params: bytes, base_size: int | None, plain_size: int) -> _Head:
    if len(params) < _HEAD.size:
        raise damaged("frames", f"{len(params)} bytes of parameters")
    head = _Head(*_HEAD.unpack_from(params))
    is_picture = head.width > 0 and head.size % head.width == 0
    if (
        head.itemsize not in _ITEM_SIZES
        or head.size < FRAME_SIZE_MIN
        or head.size % head.itemsize
        or head.method not in _DECODE_METHODS
        or not head.series
        or not (is_picture if head.method == SMOOTHED else head.width == 0)
        or (head.method in (BETWEEN, SMOOTHED) and head.itemsize > 1)
    ):
        raise damaged("frames", f"frames of {head.size} bytes, {head}")
    if (
        not head.frame_count  # of which the size of a frame, and so all memory, is bounded by the chunk
        or head.skip + head.frame_count * head.size > plain_size
        or head.base_skip + head.base_count * head.size > (base_size or 0)
        or bool(head.base_count) == (base_size is None)
        or head.new_count > head.frame_count
    ):
        raise damaged("frames", f"{head} in {plain_size} bytes, with a base of {base_size} bytes")
    change_count_max = _change_count_max(head.new_count, head.size, head.itemsize) if head.method == CHANGES else 0
    if head.change_count > change_count_max or head.long_count > head.change_count:
        raise damaged("frames", f"{head.change_count} items changed, {head.long_count} long gaps, in {head}")
    return head


class _Parts:
    """The parts of a payload, one after the other."""

    def __init__(self, params: bytes, payload: memoryview) -> None:
        self._params, self._payload = params, payload
        self._position, self._start = _HEAD.size, 0

    def read(self, out: Array) -> None:
        """Decode the next part, which has to fill `out`."""
        position = self._position + _PART.size
        if position > len(self._params):
            raise damaged("frames", f"{len(self._params)} bytes of parameters, a part begins at {self._position}")
        codec, size, params_size = _PART.unpack_from(self._params, self._position)
        self._position, stop = position + params_size, self._start + size
        if self._position > len(self._params) or stop > len(self._payload):
            raise damaged("frames", f"a part of {params_size} and {size} bytes, of which there are fewer")
        part_params, payload = self._params[position : self._position], self._payload[self._start : stop]
        decode_part(codec, part_params, payload, out.reshape(-1).view(np.uint8).data, "frames")
        self._start = stop

    def finish(self) -> None:
        """See that nothing is left."""
        if self._position != len(self._params) or self._start != len(self._payload):
            raise damaged("frames", "bytes after the last part")


def _numbers(differences: Array, head: _Head) -> Array:
    """The number of each frame, proven to be one of a frame that is known by then, and of every new frame."""
    differences[:1] += differences.dtype.type(head.base_count & np.iinfo(differences.dtype).max)
    differences[1:] += differences.dtype.type(1)
    numbers: Array = np.cumsum(differences, dtype=differences.dtype).astype(np.intp)
    highest = np.maximum.accumulate(np.concatenate([[head.base_count - 1], numbers]))
    if (numbers > highest[:-1] + 1).any() or int(highest[-1]) != head.base_count + head.new_count - 1:
        raise damaged("frames", f"numbers of frames that are not there, or not of {head.new_count} new ones")
    return numbers


def _decode_plain(head: _Head, parts: _Parts, stack: Array) -> None:
    parts.read(stack[1:])


def _decode_pyramid(head: _Head, parts: _Parts, stack: Array) -> None:
    residuals = np.empty_like(stack[1:])
    parts.read(residuals)
    if not head.base_count:
        stack[1] = residuals[0]
    for residual, series, between in _tiles(stack, residuals, has_base=head.base_count > 0):
        series[between.frames] = residual + pictures.predict(series, between, head.width)


def _decode_changes(head: _Head, parts: _Parts, stack: Array) -> None:
    short = np.empty(head.change_count, np.uint8)
    parts.read(short)
    is_long = short == _LONG_GAP
    if np.count_nonzero(is_long) != head.long_count:
        raise damaged("frames", f"{np.count_nonzero(is_long)} long gaps, expected {head.long_count}")
    long_gaps = np.empty(head.long_count, "<u4")
    parts.read(long_gaps)
    dtype = f"<u{head.itemsize}"
    values = np.empty(head.change_count, dtype)
    parts.read(values)
    gaps = short.astype(np.int64)
    gaps[is_long] += long_gaps
    positions = np.cumsum(gaps)
    positions -= 1
    items = stack.view(dtype)
    changed = items[1:]
    changed[:] = 0
    if len(positions) and (not gaps.all() or int(positions[-1]) >= changed.size):
        raise damaged("frames", "gaps that are 0 or lead outside")
    places, differences = pictures.changes_at(positions, values, items[0])
    changed.reshape(-1)[places] = differences
    changed[0] += items[0]
    pictures.cumulate(changed)


_DECODE_METHODS = {PLAIN: _decode_plain, CHANGES: _decode_changes, BETWEEN: _decode_pyramid, SMOOTHED: _decode_pyramid}


def _place(numbers: Array, known: Array, new: Array, series: int, own: Array) -> None:
    """Put every frame of the chunk where it belongs."""
    in_series = np.empty(len(new), np.intp)
    in_series[_series_order(len(new), series)] = np.arange(len(new))
    is_new = numbers >= len(known)
    at = np.where(is_new, numbers - len(known), 0)
    at = in_series[at] if len(new) else at
    # Most of them in one pass, straight into place; then the others over what that pass put there for them.
    if 2 * np.count_nonzero(is_new) >= len(own) and len(new):
        np.take(new, at, axis=0, out=own, mode="clip")
        own[~is_new] = known[numbers[~is_new]]
    else:
        np.take(known, numbers, axis=0, out=own, mode="clip")
        own[is_new] = new[at[is_new]]


DECODERS = {1: Decoder("frames", _decode, range(2))}
