"""Windows onto memory by address, and the arithmetic of strided extents.

A window keeps nothing alive: whoever asks for one holds the tensor or array that owns the memory for as long as the
window is used. This is the one file that turns addresses into memoryviews.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, cast

_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


def window(address: int, size: int, *, writable: bool = False) -> memoryview:
    """The `size` bytes at `address`; 0.5 µs, no copy."""
    return cast(memoryview, _from_memory(address, size, _WRITE if writable else _READ))


def reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """How far below and above its first element a non-empty strided view goes, in the unit of `strides`."""
    below = above = 0
    for size, stride in zip(shape, strides, strict=True):
        if stride < 0:
            below -= (size - 1) * stride
        else:
            above += (size - 1) * stride
    return below, above


def distinct_count(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of a view, counting a dimension of stride 0 once."""
    count = 1
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            count *= size
    return count


def compact_strides(shape: Sequence[int], strides: Sequence[int], unit: int) -> tuple[int, ...] | None:
    """Strides of the contiguous copy of a view that keeps its stride-0 dimensions; None when that is C order."""
    result = [0] * len(shape)
    step = unit
    for axis in range(len(shape) - 1, -1, -1):
        if strides[axis]:
            result[axis] = step
            step *= shape[axis]
    if any(not stride and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return tuple(result)
    return None


def flat_parts(array: Any, first: int, last: int) -> list[Any]:
    """The elements [first, last) of an array or tensor in C order, as pieces of it; touches no other element."""
    if array.ndim < 2:
        return [array.reshape(-1)[first:last]]
    inner = math.prod(array.shape[1:])
    parts = []
    while first < last:
        row, offset = divmod(first, inner)
        rows = (last - first) // inner
        if offset or not rows:
            stop = min(inner, offset + last - first)
            parts += flat_parts(array[row], offset, stop)
            first += stop - offset
        else:
            parts.append(array[row : row + rows])
            first += rows * inner
    return parts
