"""Codec 1: one pattern, repeated and cut off at the plain size.

The pattern is one item (its size is the period that is tested), or the whole chunk when that is shorter. An empty
chunk has an empty pattern. The payload is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import numpy as np

from casckpt.codec.contract import CONSTANT, Buffer, Decoder, Encoded, damaged

PATTERN_SIZE_MAX = 64  # numbers of every dtype; longer items (strings, records) are left to zstd

_WORD_SIZE = 8
_TILE_SIZE = 256 * 1024  # bytes compared at a time: a later mismatch ends the test, the temporary stays in the cache


def find_pattern(plain: memoryview, itemsize: int) -> bytes | None:
    """The repeating pattern if `plain` is nothing else, else None. Exact.

    The head is compared byte by byte with itself one item on, which ends the test for almost all data within a
    microsecond. Then words are compared one common multiple of item and word on: 60 us per MiB.
    """
    if itemsize > PATTERN_SIZE_MAX:
        return None
    period = lcm(itemsize, _WORD_SIZE)
    whole = len(plain) - len(plain) % _WORD_SIZE
    if not _repeats(plain[: period + itemsize], itemsize) or not _repeats(plain[-period - _WORD_SIZE :], itemsize):
        return None
    words = np.frombuffer(plain[:whole], np.uint64)
    shift, step = period // _WORD_SIZE, _TILE_SIZE // _WORD_SIZE
    ahead, here = words[shift:], words[:-shift]
    if all(bool((ahead[i : i + step] == here[i : i + step]).all()) for i in range(0, len(ahead), step)):
        return bytes(plain[:itemsize])
    return None


def _repeats(plain: memoryview, period: int) -> bool:
    part = bytes(plain)
    return part[period:] == part[:-period]


def is_constant(items: Any) -> bool:
    """Whether all elements of a 1-d array of unsigned integers are equal."""
    first = items[0]
    step = int(_TILE_SIZE // items.itemsize)
    return all(bool((items[i : i + step] == first).all()) for i in range(0, len(items), step))


def encode(pattern: bytes) -> Encoded:
    """The form of a chunk that `find_pattern` found constant, or of the empty chunk (empty pattern)."""
    return Encoded(CONSTANT, 1, pattern, b"", 0)


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    if len(payload):
        raise damaged("constant", f"payload has {len(payload)} bytes, expected none")
    if len(params) > min(PATTERN_SIZE_MAX, len(out)) or bool(params) != bool(out):
        raise damaged("constant", f"pattern of {len(params)} bytes for {len(out)} bytes")
    target = np.frombuffer(out, np.uint8)
    filled = len(params)
    target[:filled] = np.frombuffer(params, np.uint8)
    while filled < len(target):  # copy what is there behind itself: log2(n) copies at memory speed, without the GIL
        count = min(filled, len(target) - filled)
        target[filled : filled + count] = target[:count]
        filled += count


DECODERS = {1: Decoder("constant", _decode)}
