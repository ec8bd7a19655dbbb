"""The passes over items that codecs 3, 4 and 5 are made of, compiled: the same bits as NumPy's, several times as fast.

The NumPy code in `formulas`, `lanes`, `changes` and `difference` defines what a record means, and runs wherever the
library is missing: no compiler when the package was built, a file that does not load, a big-endian machine, or
`CASCKPT_KERNELS=0` in the environment.

Functions release the GIL and take contiguous arrays, as long as the first one unless said, of any alignment. They
must be called only if `IS_THERE`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from casckpt.codec.lanes import Array

_VERSION = 1  # of the functions' arguments: a library of another one is not used
_INT, _SIZE, _WORD, _AT, _BYTES = (
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_char_p,
)
_PASSES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "predict": (_INT, (_INT, _INT, _INT, ctypes.c_float, _AT, _AT, _BYTES, _INT, _AT, _SIZE)),
    "find_gradient": (None, (_INT, _AT, _AT, _AT, _AT, _SIZE)),
    "count_changed": (_SIZE, (_AT, _AT, _SIZE)),
    "are_gaps": (_INT, (_AT, _INT, _SIZE, _SIZE)),
}
_ITEM_PASSES: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "subtract": (None, (_AT, _AT, _WORD, _AT, _SIZE), (1, 2, 4, 8)),
    "add": (None, (_AT, _AT, _WORD, _AT, _SIZE), (1, 2, 4, 8)),
    "cut": (None, (_AT, _INT, _INT, _AT, _SIZE), (2, 4, 8)),
    "join": (None, (_AT, _BYTES, _BYTES, _INT, _WORD, _AT, _SIZE), (2, 4, 8)),
    "find_changes": (_SIZE, (_AT, _AT, _SIZE, _SIZE, _AT, _AT), (1, 2, 4, 8)),
    "add_changes": (None, (_AT, _AT, _INT, _AT, _SIZE), (1, 2, 4, 8)),
}
LANED_ITEM_SIZES = (2, 4, 8)
_ROOM = 16  # items that `find_changes` may write beyond its limit


def _load() -> dict[str, Any]:
    """The library's functions by name; none where it cannot be used."""
    path = Path(__file__).with_name("_kernels.so")
    if sys.byteorder != "little" or os.environ.get("CASCKPT_KERNELS") == "0" or not path.exists():
        return {}
    try:
        library = ctypes.CDLL(str(path))
        if library.kernels_version() != _VERSION:
            return {}
        found = {}
        for name, (result, arguments) in _PASSES.items():
            found[name] = getattr(library, name)
            found[name].restype, found[name].argtypes = result, arguments
        for name, (result, arguments, sizes) in _ITEM_PASSES.items():
            for size in sizes:
                function = found[f"{name}_{size}"] = getattr(library, f"{name}_{size}")
                function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # of another machine, or another version
        return {}
    return found


_functions = _load()
IS_THERE = bool(_functions)


def leave_out() -> None:
    """Use them no more: they do not give what they must."""
    global IS_THERE
    IS_THERE = False


def predict(
    kind: int,
    variant: int,
    rounding: int,
    floor: float,
    constants: Sequence[float],
    operands: Sequence[Array],
    out: Array,
) -> bool:
    """`formulas.predict`, to bf16 where `out` has items of 2 bytes; False where there is no such formula."""
    values = np.array(constants, np.float32)
    places = np.array([each.ctypes.data for each in operands], np.uintp)
    sizes = bytes(each.itemsize for each in (*operands, out))
    return not _functions["predict"](
        kind,
        variant,
        rounding,
        floor,
        values.ctypes.data,
        places.ctypes.data,
        sizes,
        len(operands),
        out.ctypes.data,
        len(out),
    )


def find_gradient(variant: int, constants: Sequence[float], m: Array, new_m: Array) -> Array:
    """`formulas.find_gradient`."""
    values = np.array(constants, np.float32)
    found = np.empty(len(m), np.uint16)
    _functions["find_gradient"](
        variant, values.ctypes.data, m.ctypes.data, new_m.ctypes.data, found.ctypes.data, len(m)
    )
    return found


def subtract(new: Array, old: Array, bias: int, out: Array) -> None:
    """`new - old + bias` of unsigned integers, modulo; `out` may be one of them."""
    _functions[f"subtract_{new.itemsize}"](new.ctypes.data, old.ctypes.data, bias, out.ctypes.data, len(new))


def add(difference: Array, old: Array, bias: int, out: Array) -> None:
    """What `subtract` came from: `difference + old - bias`; `out` may be one of them."""
    _functions[f"add_{old.itemsize}"](difference.ctypes.data, old.ctypes.data, bias, out.ctypes.data, len(old))


def cut(items: Array, offset: int, lane: Array) -> None:
    """`lanes.split`."""
    _functions[f"cut_{items.itemsize}"](items.ctypes.data, lane.itemsize, offset, lane.ctypes.data, len(items))


def join(lanes: Sequence[tuple[int, Array]], mask: int, out: Array) -> None:
    """`lanes.merge` of the lanes that vary; `mask` holds the constant ones."""
    places = np.array([values.ctypes.data for _, values in lanes], np.uintp)
    widths, offsets = bytes(values.itemsize for _, values in lanes), bytes(offset for offset, _ in lanes)
    _functions[f"join_{out.itemsize}"](places.ctypes.data, widths, offsets, len(lanes), mask, out.ctypes.data, len(out))


def count_changed(one: Array, other: Array) -> int:
    """How many words of 8 bytes differ."""
    found: int = _functions["count_changed"](one.ctypes.data, other.ctypes.data, len(one))
    return found


def find_changes(new: Array, old: Array, limit: int) -> tuple[Array, Array] | None:
    """Gaps (u32) and differences of the items that changed; None if there are more than `limit`."""
    gaps, differences = np.empty(limit + _ROOM, np.uint32), np.empty(limit + _ROOM, new.dtype)
    count = _functions[f"find_changes_{new.itemsize}"](
        new.ctypes.data, old.ctypes.data, len(new), limit, gaps.ctypes.data, differences.ctypes.data
    )
    return (gaps[:count], differences[:count]) if count <= limit else None


def add_changes(items: Array, gaps: Array, differences: Array) -> bool:
    """`changes.add`: gaps are checked first."""
    if not _functions["are_gaps"](gaps.ctypes.data, gaps.itemsize, len(gaps), len(items)):
        return False
    _functions[f"add_changes_{items.itemsize}"](
        items.ctypes.data, gaps.ctypes.data, gaps.itemsize, differences.ctypes.data, len(gaps)
    )
    return True
