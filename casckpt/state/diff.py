"""How far two versions of one leaf are apart, element by element."""

from __future__ import annotations

from typing import Any

from casckpt.format.dtypes import itemsize_of


def diff_leaf(kind: str, dtype: str, a: bytes | memoryview, b: bytes | memoryview) -> tuple[int, float | None]:
    """Compare the bytes of two contiguous leaves of equal kind, dtype and size.

    Returns:
        How many elements differ in any bit, and the largest absolute change of a number: None where the elements are
        no numbers, infinity where one side is infinite or NaN alone.

    Raises:
        ValueError: sizes differ, or are no whole number of elements.
    """
    itemsize = itemsize_of(kind, dtype)
    if len(a) != len(b) or (itemsize and len(a) % itemsize):
        raise ValueError(f"{len(a)} and {len(b)} bytes of {itemsize}-byte elements cannot be compared")
    if not len(a):
        return 0, None if kind == "bytes" else 0.0
    from casckpt.state import _numpy

    changed = _numpy.changed_elements(a, b, itemsize)
    if not changed.any():
        return 0, None if kind == "bytes" else 0.0
    return int(changed.sum()), _largest_change(kind, dtype, a, b, changed)


def _largest_change(kind: str, dtype: str, a: Any, b: Any, changed: Any) -> float | None:
    from casckpt.state import _numpy

    if kind == "bytes":
        return None
    if kind == "torch":
        from casckpt.state import _torch

        numbers = _torch.as_wide_arrays(dtype, a, b)
    else:
        numbers = _numpy.as_wide_arrays(dtype, a, b)
    return None if numbers is None else _numpy.largest_change(*numbers, changed)
