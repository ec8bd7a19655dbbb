"""Codec 3: items cut into lanes, each constant, raw or a zstd frame.

Bytes of a number differ in kind: signs and exponents repeat, low mantissas are noise. Apart, the first compress and
the rest is not even tried.

    params   item size u8 · lane count u8 · per lane, lowest offset first:
             width u8 · mode u8 · constant (mode 0): the bytes | raw (1): nothing | zstd (2): frame size u32 LE
    payload  the lanes' bytes in that order (none for constant lanes) · the bytes after the last whole item

Version 1 has items of 2-16 bytes, at least one whole item, and lanes that cover the item. A damaged size is found by
adding everything up before anything is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from casckpt.codec import lanes, zstd
from casckpt.codec.constant import is_constant
from casckpt.codec.contract import PLANES, Buffer, Decoder, Encoded, damaged
from casckpt.codec.lanes import Array

MODE_CONSTANT, MODE_RAW, MODE_ZSTD = 0, 1, 2

_HEAD = struct.Struct("<BB")
_FRAME_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class LanePlan:
    """How the encoder treats one lane. A lane that is not constant after all is compressed, or stored raw."""

    width: int
    mode: int
    profile: zstd.Profile = "entropy"


@dataclass(frozen=True, slots=True)
class _Lane:
    """One lane as the parameters describe it."""

    offset: int
    width: int
    mode: int
    constant: bytes
    frame_size: int


def encode(plain: memoryview, itemsize: int, plan: Sequence[LanePlan]) -> Encoded:
    """Apply a plan whose lanes cover the item. `plain` has at least one whole item; the result is never longer than it.

    Raw lanes are cut straight into their place in the payload; one other lane at a time is held beside it.
    """
    count = len(plain) // itemsize
    params = bytearray(_HEAD.pack(itemsize, len(plan)))
    payload = np.empty(len(plain), np.uint8)
    filled = offset = 0
    for lane in plan:
        dtype = f"<u{lane.width}"
        if lane.mode == MODE_RAW:
            params += bytes((lane.width, MODE_RAW))
            size = count * lane.width
            lanes.split(plain, itemsize, offset, lane.width, payload[filled : filled + size].view(dtype))
        else:
            values = np.empty(count, dtype)
            lanes.split(plain, itemsize, offset, lane.width, values)
            lane_params, stored = _encode_lane(values, lane)
            params += lane_params
            size = len(stored)
            payload[filled : filled + size] = np.frombuffer(stored, np.uint8)
        filled += size
        offset += lane.width
    tail = plain[count * itemsize :]
    payload[filled : filled + len(tail)] = np.frombuffer(tail, np.uint8)
    filled += len(tail)
    return Encoded(PLANES, 1, bytes(params), payload[:filled].data, filled)


def _encode_lane(values: Array, lane: LanePlan) -> tuple[bytes, Buffer]:
    if lane.mode == MODE_CONSTANT and is_constant(values):
        return bytes((lane.width, MODE_CONSTANT)) + values[:1].tobytes(), b""
    plain = values.view(np.uint8).data
    frame = zstd.compress(plain, lane.profile)
    if len(frame) >= len(plain):  # a stale hint: this lane is noise now
        return bytes((lane.width, MODE_RAW)), plain
    return bytes((lane.width, MODE_ZSTD)) + _FRAME_SIZE.pack(len(frame)), frame


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    itemsize, described = _parse(params, len(out))
    count = len(out) // itemsize
    tail_size = len(out) - count * itemsize
    sizes = [lane.width * count if lane.mode == MODE_RAW else lane.frame_size for lane in described]
    if sum(sizes) + tail_size != len(payload):
        raise damaged("planes", f"payload has {len(payload)} bytes, lanes and tail add up to {sum(sizes) + tail_size}")
    decoded = []
    start = 0
    for lane, size in zip(described, sizes, strict=True):
        decoded.append((lane.offset, _lane_values(lane, payload[start : start + size], count)))
        start += size
    lanes.merge(decoded, itemsize, out)
    out[count * itemsize :] = payload[start:]


def _lane_values(lane: _Lane, stored: memoryview, count: int) -> Array:
    if lane.mode == MODE_CONSTANT:
        return np.frombuffer(lane.constant, f"<u{lane.width}")
    plain: Buffer = stored
    if lane.mode == MODE_ZSTD:
        plain = zstd.decompress(stored, count * lane.width, "planes")
    return np.frombuffer(plain, f"<u{lane.width}")


def _parse(params: bytes, plain_size: int) -> tuple[int, list[_Lane]]:
    """The item size and lanes that `params` describe, proven to cover the item exactly."""
    if len(params) < _HEAD.size:
        raise damaged("planes", f"{len(params)} bytes of parameters")
    itemsize, lane_count = _HEAD.unpack_from(params)
    if not lanes.ITEM_SIZE_MIN <= itemsize <= min(lanes.ITEM_SIZE_MAX, plain_size):
        raise damaged("planes", f"items of {itemsize} bytes in {plain_size} bytes")
    described = []
    position, offset = _HEAD.size, 0
    for _ in range(lane_count):
        lane, position = _parse_lane(params, position, itemsize, offset)
        described.append(lane)
        offset += lane.width
    if offset != itemsize or position != len(params):
        raise damaged("planes", f"lanes cover {offset} of {itemsize} bytes; parameters use {position} of {len(params)}")
    return itemsize, described


def _parse_lane(params: bytes, position: int, itemsize: int, offset: int) -> tuple[_Lane, int]:
    width, mode = params[position : position + 2].ljust(2, b"\0")
    position += 2
    extra = {MODE_CONSTANT: width, MODE_RAW: 0, MODE_ZSTD: _FRAME_SIZE.size}.get(mode)
    if extra is None or position + extra > len(params) or not lanes.fits(itemsize, offset, width):
        raise damaged("planes", f"lane at byte {offset} of {itemsize}: width {width}, mode {mode}")
    body = params[position : position + extra]
    frame_size = _FRAME_SIZE.unpack(body)[0] if mode == MODE_ZSTD else 0
    return _Lane(offset, width, mode, body if mode == MODE_CONSTANT else b"", frame_size), position + extra


DECODERS = {1: Decoder("planes", _decode)}
