"""The codecs of docs/format.md §5 a second time: standard library and zstandard, one item after the other.

Arithmetic in float32: Python computes in float64 and each result is rounded to float32 by C. For one addition,
subtraction, multiplication, division or square root of float32 numbers that is the correctly rounded result, because a
float64 has more than twice the bits and two (53 ≥ 2 · 24 + 2); only where a quotient or product is subnormal in float32
it may not be, and there the document gives the operand's bits or a term too small to matter. `fma` is by definition two
roundings to float64 and one to float32, and bf16 and fp16 start from a float32: no result is rounded twice.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zstandard


class Damaged(Exception):
    """The store is not what docs/format.md describes."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Damaged(message)


def decode_codec(codec: int, params: bytes, payload: bytes, size: int, bases: Sequence[bytes]) -> bytes:
    """The plain bytes of a record in version 1 of a codec."""
    if codec == 4:
        need(len(bases) == 1, "difference: one base")
        return _decode_difference(params, payload, size, bases[0])
    if codec == 5:
        return _decode_prediction(params, payload, size, bases)
    if codec == 6:
        need(len(bases) <= 1, "frames: one base")
        return _decode_frames(params, payload, size, bases[0] if bases else None)
    need(not bases, f"codec {codec} with bases")
    return decode_form(codec, params, payload, size)


def decode_form(codec: int, params: bytes, payload: bytes, size: int) -> bytes:
    """Codecs 0 to 3."""
    if codec == 0:
        need(not params and len(payload) == size, "raw")
        return payload
    if codec == 1:
        need(not payload and len(params) <= min(64, size) and bool(params) == bool(size), "constant")
        return (params * (size // max(len(params), 1) + 1))[:size]
    if codec == 2:
        need(not params, "zstd with parameters")
        return _decode_frame(payload, size)
    need(codec == 3, f"unknown codec {codec}")
    return _decode_planes(params, payload, size)


def _decode_frame(frame: bytes, size: int) -> bytes:
    header = zstandard.get_frame_parameters(frame)
    need(header.content_size == size and not header.dict_id and header.window_size <= 67_108_864, "zstd frame")
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def _decode_planes(params: bytes, payload: bytes, plain_size: int) -> bytes:
    itemsize, lane_count = params[0], params[1]
    need(2 <= itemsize <= 16, "planes: item size")
    count, rest = divmod(plain_size, itemsize)
    need(count, "planes: no whole item")
    out = bytearray(plain_size)
    at, start, offset = 2, 0, 0
    for _ in range(lane_count):
        width, mode = params[at], params[at + 1]
        at += 2
        need(width in (1, 2, 4, 8) and offset % width == 0 and itemsize % width == 0, "planes: lane")
        if mode == 0:
            lane = params[at : at + width] * count
            at += width
        elif mode == 1:
            lane = payload[start : start + count * width]
            start += len(lane)
        else:
            need(mode == 2, "planes: mode")
            (size,) = struct.unpack_from("<I", params, at)
            lane = _decode_frame(payload[start : start + size], count * width)
            at, start = at + 4, start + size
        need(len(lane) == count * width, "planes: lane length")
        for i in range(width):
            out[offset + i : count * itemsize : itemsize] = lane[i::width]
        offset += width
    need(offset == itemsize and at == len(params) and start + rest == len(payload), "planes: lengths")
    out[count * itemsize :] = payload[start:]
    return bytes(out)


# --- difference (codec 4) ---

_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _words(data: bytes, itemsize: int) -> list[int]:
    count = len(data) // itemsize
    return list(struct.unpack(f"<{count}{_WORDS[itemsize]}", data[: count * itemsize]))


def _join(words: Sequence[int], itemsize: int) -> bytes:
    return struct.pack(f"<{len(words)}{_WORDS[itemsize]}", *words)


def _decode_difference(params: bytes, payload: bytes, size: int, base: bytes) -> bytes:
    itemsize, method = params[0], params[1]
    need(itemsize in _WORDS and len(base) == size, "difference: item size or base")
    bias = int.from_bytes(params[2 : 2 + itemsize], "little")
    mask = (1 << 8 * itemsize) - 1
    count, rest = divmod(size, itemsize)
    params = params[2 + itemsize :]
    items = _words(base, itemsize)
    if method == 0:
        form = decode_form(params[0], params[1:], payload, size)
        stored = _words(form, itemsize)
        return (
            _join([(a + b - bias) & mask for a, b in zip(items, stored, strict=True)], itemsize) + form[size - rest :]
        )
    need(method == 1, "difference: method")
    changed, gap_width, gap_codec, gap_payload, gap_params = struct.unpack_from("<IBBIB", params)
    need(changed <= count // 2 and gap_width in (1, 2, 4), "sparse: counts")
    params = params[11:]
    need(len(params) > gap_params and len(payload) >= gap_payload + rest, "sparse: lengths")
    gaps = _words(decode_form(gap_codec, params[:gap_params], payload[:gap_payload], changed * gap_width), gap_width)
    values = payload[gap_payload : len(payload) - rest]
    form = decode_form(params[gap_params], params[gap_params + 1 :], values, changed * itemsize)
    at = -1
    for gap, stored in zip(gaps, _words(form, itemsize), strict=True):
        at += gap
        need(gap >= 1 and at < count, "sparse: index")
        items[at] = (items[at] + stored - bias) & mask
    return _join(items, itemsize) + payload[len(payload) - rest :]


# --- prediction (codec 5) ---


class Kind(NamedTuple):
    operand_count: int
    itemsizes: tuple[int, ...]
    bounds: tuple[tuple[int, bool], ...]  # of each constant: least power of two, and whether 0 is allowed too
    variants: int
    roundings: tuple[int, ...]
    floor: float


KINDS = {
    1: Kind(3, (2, 4), ((-16, False), (-50, False), (-24, False)), 5, (0, 1), 2.0**-70),
    2: Kind(3, (2, 4), ((-50, False), (-50, True), (-20, False), (-50, False)), 3, (0,), 2.0**-40),
    3: Kind(1, (4,), ((-50, False), (-16, False)), 3, (1,), 2.0**-70),
    4: Kind(1, (4,), (), 1, (1, 2), 0.0),
    5: Kind(2, (2, 4), ((-50, True),), 2, (0,), 2.0**-40),
    6: Kind(3, (2, 4), ((-50, True), (-50, False)), 2, (0,), 2.0**-40),
    7: Kind(2, (2, 4), ((-50, False), (-50, False)), 5, (0,), 2.0**-40),
    8: Kind(3, (2, 4), ((-50, True), (-50, True), (-50, True)), 1, (0,), 2.0**-40),
    9: Kind(3, (4,), ((-50, False), (-24, False), (-45, False), (-50, False), (-50, False)), 2, (0,), 2.0**-70),
    10: Kind(4, (4,), ((-16, False), (-45, False), (-50, False), (-50, True)), 2, (0,), 2.0**-40),
}


def f32(number: float) -> float:
    return ctypes.c_float(number).value


def fma(x: float, y: float, z: float) -> float:
    return f32(x * y + z)


def _divide(x: float, y: float) -> float:
    if y:
        return f32(x / y)
    return math.nan if x == 0 or math.isnan(x) else math.copysign(math.inf, x) * math.copysign(1, y)


def _root(x: float) -> float:
    return f32(math.sqrt(x))  # of a positive number, infinity or a NaN


def bf16_bits(number: float) -> int:
    if math.isnan(number):
        return 0x7FC0
    (bits,) = struct.unpack("<I", ctypes.c_float(number))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16(number: float) -> float:
    return _widen(bf16_bits(number))


def _widen(bits: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return float(number)


def fp16_bits(number: float) -> int:
    if math.isnan(number):
        return 0x7E00
    try:
        (bits,) = struct.unpack("<H", struct.pack("<e", number))
    except OverflowError:
        bits = 0xFC00 if number < 0 else 0x7C00
    return int(bits)


def _second_moment(c: Sequence[float], variant: int, rounding: int, v: float, m: float, after: float) -> float:
    a, b, k = c
    g = f32(_divide(f32(after - m), a) + m)
    g = bf16(g) if rounding == 1 else g
    if variant == 0:
        return fma(f32(g * k), g, f32(v * b))
    if variant == 1:
        return fma(f32(g * g), k, f32(v * b))
    if variant == 2:
        return fma(v, b, f32(f32(g * k) * g))
    kept = f32(v * b)
    return f32((bf16(kept) if variant == 4 else kept) + f32(f32(g * k) * g))


def _adam_weight(c: Sequence[float], variant: int, rounding: int, w: float, m: float, v: float) -> float:
    a, s, q, e = c
    step = bf16 if variant == 2 else f32
    root = step(_root(max(v, 2.0**-126)))
    d = step(f32(step(_divide(root, q)) + e))
    kept = f32(w * a)
    if variant == 1:
        return fma(_divide(m, d), s, kept)
    return f32((bf16(kept) if variant == 2 else kept) + _divide(f32(m * s), d))


def _first_moment(c: Sequence[float], variant: int, rounding: int, m: float, g: float) -> float:
    b, a = c
    if variant == 0:
        return fma(f32(g - m), a, m)
    if variant == 1:
        return f32(m + f32(f32(g - m) * a))
    return fma(g, a, f32(m * b))


def _momentum_weight(c: Sequence[float], variant: int, rounding: int, w: float, u: float) -> float:
    return fma(u, c[0], w) if variant == 0 else f32(w + f32(u * c[0]))


def _nesterov_weight(c: Sequence[float], variant: int, rounding: int, w: float, u: float, after: float) -> float:
    h = fma(after, c[1], f32(after - f32(u * c[1])))
    return _momentum_weight(c, variant, rounding, w, h)


def _average(c: Sequence[float], variant: int, rounding: int, w: float, s: float) -> float:
    a, b = c
    if variant == 0:
        return fma(s, b, f32(w * a))
    if variant in (2, 3):
        return _momentum_weight((b,), variant - 2, rounding, w, f32(s - w))
    kept = f32(w * a)
    return f32((bf16(kept) if variant == 4 else kept) + f32(s * b))


def _drifting_average(c: Sequence[float], variant: int, rounding: int, w: float, s: float, after: float) -> float:
    a, old, b = c
    return fma(after, b, fma(s, old, f32(w * a)))


def _squares(c: Sequence[float], variant: int, rounding: int, s: float, x: float, after: float) -> float:
    b, share, e, k, t = c
    d = _divide(f32(after - f32(x * k)), t)
    n = f32(f32(d * d) * share)
    q, p = f32(1 - n), f32(s * b)
    if variant == 1:
        return f32(p + f32(f32(p + e) * _divide(n, q)))
    root = _root(max(f32(f32(q * p) + f32(n * f32(e * e))), 2.0**-126))
    u = _divide(f32(root + e), q)
    return f32(p + f32(f32(u * n) * u))


def _centered_step(
    c: Sequence[float], variant: int, rounding: int, x: float, a: float, after: float, s: float
) -> float:
    share, e, k, t = c
    g = f32(_divide(f32(after - a), share) + a)
    g = 0.0 if abs(g) < 2.0**-60 else g
    v = f32(s - f32(after * after))
    d = _root(max(f32(v + e), 2.0**-96)) if variant == 1 else f32(_root(max(v, 2.0**-96)) + e)
    return f32(f32(x * k) + _divide(f32(g * t), d))


_FORMULAS: dict[int, Callable[..., float]] = {
    1: _second_moment,
    2: _adam_weight,
    3: _first_moment,
    4: lambda c, variant, rounding, x: float(x),
    5: _momentum_weight,
    6: _nesterov_weight,
    7: _average,
    8: _drifting_average,
    9: _squares,
    10: _centered_step,
}


def _decode_prediction(params: bytes, payload: bytes, size: int, bases: Sequence[bytes]) -> bytes:
    number, variant, rounding = params[:3]
    need(number in KINDS, "prediction: kind")
    kind = KINDS[number]
    need(variant < kind.variants and rounding in kind.roundings, "prediction: variant or rounding")
    constants = struct.unpack_from(f"<{len(kind.bounds)}f", params, 3)
    for constant, (least, may_be_zero) in zip(constants, kind.bounds, strict=True):
        need(2.0**least <= abs(constant) <= 1 or (may_be_zero and constant == 0), "prediction: constant")
    at = 3 + 4 * len(constants)
    operands, left = [], list(bases)
    itemsize = 2 if number == 4 else params[at]
    count = size // itemsize
    need(count and 1 <= len(bases) <= 16, "prediction: no whole item, or bases")
    for _ in range(kind.operand_count):
        width, chunk_count, skip = struct.unpack_from("<BBI", params, at)
        need(width in kind.itemsizes and chunk_count <= len(left), "prediction: operand")
        operands.append(_operand(left[:chunk_count], width, skip, count))
        left, at = left[chunk_count:], at + 6
    need(not left, "prediction: bases that no operand has")
    inputs = [_numbers(bits, width) for bits, width in operands]
    if number == 3:
        form, gradient_size, params_size = struct.unpack_from("<BIB", params, at)
        at += 6 + params_size
        need(len(payload) >= gradient_size, "prediction: gradient")
        gradient = decode_form(form, params[at - params_size : at], payload[:gradient_size], 2 * count)
        inputs.append([_widen(bits) for bits in _words(gradient, 2)])
        payload = payload[gradient_size:]
    formula = _FORMULAS[number]
    predicted = [formula(constants, variant, rounding, *each) for each in zip(*inputs, strict=True)]
    first, _ = operands[0]
    items = [_finish(number, kind, rounding, itemsize, *each) for each in zip(predicted, first, strict=True)]
    base = _join(items, itemsize)
    return _decode_difference(params[at:], payload, size, base + bytes(size - len(base)))


def _operand(chunks: Sequence[bytes], width: int, skip: int, count: int) -> tuple[list[int], int]:
    """The bits of the first `count` items of an operand after the skipped ones."""
    at, needed = skip * width, count
    bits: list[int] = []
    for chunk in chunks:
        here = min(needed, max(0, len(chunk) - at) // width)
        need(here == needed or (len(chunk) - at) % width == 0, "prediction: an item across two chunks")
        bits += _words(chunk[at : at + here * width], width)
        needed -= here
        at = max(0, at - len(chunk))
    need(not needed, "prediction: an operand with too few items")
    return bits, width


def _numbers(bits: Sequence[int], width: int) -> list[float]:
    if width == 2:
        return [_widen(each) for each in bits]
    return list(struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *bits)))


def _finish(number: int, kind: Kind, rounding: int, itemsize: int, predicted: float, first: int) -> int:
    """The bits of a predicted item."""
    if number == 4:
        return bf16_bits(predicted) if rounding == 1 else fp16_bits(predicted)
    if not kind.floor <= abs(predicted) < math.inf:
        return first
    return bf16_bits(predicted) if itemsize == 2 else int(struct.unpack("<I", struct.pack("<f", predicted))[0])


# --- frames (codec 6) ---

_FRAMES_HEAD = (
    *("itemsize", "method", "series", "size", "width", "skip", "count", "new"),
    *("base_skip", "base", "changed", "long"),
)


def _decode_frames(params: bytes, payload: bytes, plain_size: int, base: bytes | None) -> bytes:
    head = dict(zip(_FRAMES_HEAD, struct.unpack_from("<BBHIIIIIIIII", params), strict=True))
    size, method, start = head["size"], head["method"], head["base_skip"]
    need(head["itemsize"] in _WORDS and size >= 16 and size % head["itemsize"] == 0, "frames: sizes")
    need(method <= 3 and head["series"] and (method < 2 or head["itemsize"] == 1), "frames: method")
    need(head["width"] and size % head["width"] == 0 if method == 3 else not head["width"], "frames: width")
    need((base is None) == (head["base"] == 0) and head["count"], "frames: base, frames of the chunk")
    need(start + size * head["base"] <= len(base or b"") and head["new"] <= head["count"], "frames: counts")
    need(method == 1 or not (head["changed"] or head["long"]), "frames: changes without the method")
    parts = _frame_parts(params[struct.calcsize("<BBHIIIIIIIII") :], payload)
    known = [(base or b"")[start + at * size : start + (at + 1) * size] for at in range(head["base"])]
    width = 2 if head["base"] + head["count"] <= 65_536 else 4
    stored = _words(parts(head["count"] * width), width)
    rests = parts(plain_size - head["count"] * size)
    before = known[-1] if known else None
    decode = (_plain_frames, _changed_frames, _between_frames, _between_frames)[method]
    in_series = decode(head, parts, before) if head["new"] else []
    parts(None)
    order = [at for first in range(head["series"]) for at in range(first, head["new"], head["series"])]
    new = [frame for _, frame in sorted(zip(order, in_series, strict=True))]
    numbers, highest, last = [], head["base"] - 1, head["base"] - 1
    for each in stored:
        last = (last + 1 + each) % (1 << 8 * width)
        need(last <= highest + 1, "frames: number")
        highest = max(highest, last)
        numbers.append(last)
    need(highest == head["base"] + head["new"] - 1, "frames: new frames")
    frames = known + new
    return rests[: head["skip"]] + b"".join(frames[number] for number in numbers) + rests[head["skip"] :]


def _frame_parts(params: bytes, payload: bytes) -> Callable[[int | None], bytes]:
    """A function that gives the next part, of so many plain bytes; None: there is no more."""
    at = start = 0

    def next_part(size: int | None) -> bytes:
        nonlocal at, start
        if size is None:
            need(at == len(params) and start == len(payload), "frames: lengths")
            return b""
        codec, stored, params_size = struct.unpack_from("<BIB", params, at)
        need(at + 6 + params_size <= len(params) and start + stored <= len(payload), "frames: part")
        form = decode_form(codec, params[at + 6 : at + 6 + params_size], payload[start : start + stored], size)
        at, start = at + 6 + params_size, start + stored
        return form

    return next_part


def _plain_frames(head: dict[str, int], parts: Callable[[int | None], bytes], before: bytes | None) -> list[bytes]:
    return _cut(parts(head["new"] * head["size"]), head["size"])


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _changed_frames(head: dict[str, int], parts: Callable[[int | None], bytes], before: bytes | None) -> list[bytes]:
    itemsize, new = head["itemsize"], head["new"]
    per_frame = head["size"] // itemsize
    need(head["changed"] <= (new + 1) * per_frame // 2 + 8, "frames: changes")
    gaps = list(parts(head["changed"]))
    need(gaps.count(255) == head["long"], "frames: long gaps")
    longer = iter(_words(parts(4 * head["long"]), 4))
    values = _words(parts(head["changed"] * itemsize), itemsize)
    changed, at = {}, -1
    for gap, value in zip(gaps, values, strict=True):
        need(gap, "frames: gap of 0")
        at += gap + (next(longer) if gap == 255 else 0)
        changed[at] = value
    need(at < new * per_frame, "frames: item")
    frame = _words(before or bytes(head["size"]), itemsize)
    frames = []
    for first in range(0, new * per_frame, per_frame):
        frame = [changed.get(first + item, old) for item, old in enumerate(frame)]
        frames.append(_join(frame, itemsize))
    return frames


def _between_frames(head: dict[str, int], parts: Callable[[int | None], bytes], before: bytes | None) -> list[bytes]:
    residuals = iter(_cut(parts(head["new"] * head["size"]), head["size"]))
    count = head["new"] + (before is not None)
    frames = {0: before if before is not None else next(residuals)}
    step = 1
    while 2 * step < count:
        step *= 2
    while step:
        for at in range(step, count, 2 * step):
            one = frames[at - step]
            other = frames[at + step] if at + step < count else one
            mean = [(a + b + 1) // 2 for a, b in zip(one, other, strict=True)]
            predicted = _smoothed(mean, head["width"]) if head["width"] else mean
            frames[at] = bytes((a + b) & 255 for a, b in zip(predicted, next(residuals), strict=True))
        step //= 2
    return [frames[at] for at in range(before is not None, count)]


def _smoothed(picture: list[int], width: int) -> list[int]:
    height = len(picture) // width
    weights = (1, 2, 2, 2, 1)

    def pixel(y: int, x: int) -> int:
        return picture[min(max(y, 0), height - 1) * width + min(max(x, 0), width - 1)]

    def around(y: int, x: int) -> int:
        return sum(v * w * pixel(y + i - 2, x + j - 2) for i, v in enumerate(weights) for j, w in enumerate(weights))

    return [(around(y, x) + 32) // 64 for y in range(height) for x in range(width)]
