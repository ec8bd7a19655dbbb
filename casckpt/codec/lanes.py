"""Cutting items into lanes and putting them together again, at memory speed.

A *lane* is a run of 1, 2, 4 or 8 bytes at the same offset of every item. Cutting and joining work on memory order, not
on values (all views are little-endian), so the bytes are the same on every host. A lane's width divides its offset and
the item size, so that every lane is a regular strided view of the chunk.

Two ways in NumPy, by measurement (docs/design/0004-codecs.md): items of 2 and 4 bytes are unsigned integers that are
shifted and cast; others are strided copies. Both release the GIL, as `kernels` does, which serves where it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from casckpt.codec import kernels

ITEM_SIZE_MIN, ITEM_SIZE_MAX = 2, 16  # complex128 and long double; beyond, items are records, not numbers
LANE_WIDTHS = (1, 2, 4, 8)

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_SHIFTED_ITEM_SIZES = (2, 4)


def fits(itemsize: int, offset: int, width: int) -> bool:
    """Whether a lane may lie there: aligned, and inside the item."""
    return width in LANE_WIDTHS and offset % width == 0 and itemsize % width == 0 and offset + width <= itemsize


def split(plain: memoryview, itemsize: int, offset: int, width: int, lane: Array) -> None:
    """Copy one lane of every whole item of `plain` into `lane` (unsigned integers of `width` bytes, one per item)."""
    if kernels.IS_THERE and itemsize in kernels.LANED_ITEM_SIZES:
        kernels.cut(np.frombuffer(plain, f"<u{itemsize}", len(plain) // itemsize), offset, lane)
        return
    if itemsize not in _SHIFTED_ITEM_SIZES:
        lane[:] = _strided(plain, itemsize, offset, width)
        return
    items = np.frombuffer(plain, f"<u{itemsize}", len(plain) // itemsize)
    np.copyto(lane, items >> items.dtype.type(8 * offset) if offset else items, casting="unsafe")


def merge(lanes: Sequence[tuple[int, Array]], itemsize: int, out: memoryview) -> None:
    """Put lanes together: `(offset, values)` in ascending order, covering the item.

    Args:
        lanes: values are unsigned integers, one per item, or an array of one element for a constant lane.
        itemsize: bytes per item.
        out: the chunk; its bytes after the last whole item are left alone.
    """
    if kernels.IS_THERE and itemsize in kernels.LANED_ITEM_SIZES:
        varying = [each for each in lanes if len(each[1]) > 1]
        kernels.join(varying, _constants_in(lanes), np.frombuffer(out, f"<u{itemsize}", len(out) // itemsize))
        return
    if itemsize in _SHIFTED_ITEM_SIZES:
        _merge_shifted(lanes, np.frombuffer(out, f"<u{itemsize}", len(out) // itemsize))
        return
    for offset, values in lanes:
        _strided(out, itemsize, offset, values.itemsize)[:] = values


def _merge_shifted(lanes: Sequence[tuple[int, Array]], items: Array) -> None:
    """From the highest lane down: shift what is there, or in the next; constants come in at the end as one mask."""
    number = items.dtype.type
    mask = _constants_in(lanes)
    varying = [(offset, values) for offset, values in lanes if len(values) > 1]
    if not varying:
        items[:] = mask
        return
    above, values = varying.pop()
    items[:] = values
    for offset, values in reversed(varying):
        items <<= number(8 * (above - offset))
        items |= values
        above = offset
    if above:
        items <<= number(8 * above)
    if mask:
        items |= number(mask)


def _constants_in(lanes: Sequence[tuple[int, Array]]) -> int:
    """An item with the constant lanes alone."""
    return sum(int(values[0]) << (8 * offset) for offset, values in lanes if len(values) == 1)


def _strided(plain: memoryview, itemsize: int, offset: int, width: int) -> Array:
    count = len(plain) // itemsize
    return np.frombuffer(plain, f"<u{width}", count * itemsize // width).reshape(count, -1)[:, offset // width]
