"""The passes over items that codecs 3, 4 and 5 are made of, compiled: the same bits as NumPy's, several times as fast.

The NumPy code in `formulas`, `lanes`, `changes` and `difference` defines what a record means, and runs wherever the
library is missing: no compiler when the package was built, a file that does not load, a big-endian machine, or
`CASCKPT_KERNELS=0` in the environment.

What is stored must decode on every machine, and the proof of a record, which the same functions compute, cannot tell
where they are wrong on both ways. So a library is used only if all of them give what they must on a few hundred items:
passes over integers when it is loaded, formulas before their first use (`formulas.has_kernels`).

Functions release the GIL and take contiguous arrays, as long as the first one unless said, of any alignment; others
are a ValueError, whatever record they come from. They must be called only if `IS_THERE`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

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
LIBRARY = Path(__file__).with_name("_kernels.so")
IS_WANTED = os.environ.get("CASCKPT_KERNELS") != "0"
_ROOM = 16  # items that `find_changes` may write beyond its limit
_TEST_COUNT = 587  # items: whole vectors and groups of every size, and a rest
_DIGEST = 1144901271


def _load() -> dict[str, Any]:
    """The library's functions by name; none where it cannot be used."""
    if sys.byteorder != "little" or not IS_WANTED or not LIBRARY.exists():
        return {}
    try:
        library = ctypes.CDLL(str(LIBRARY))
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


def leave_out() -> None:
    """Use them no more: they do not give what they must."""
    global IS_THERE
    IS_THERE = False


def _at(array: Array, count: int, itemsize: int) -> int:
    """The address of `count` items or more, one after the other."""
    if len(array) < count or array.itemsize != itemsize or not array.flags.c_contiguous:
        raise ValueError(f"{len(array)} items of {array.dtype}, expected {count} of {itemsize} bytes, contiguous")
    address: int = array.ctypes.data
    return address


def _into(array: Array, count: int, itemsize: int) -> int:
    """The same of memory that may be written."""
    if not array.flags.writeable:
        raise ValueError("read-only memory cannot be written")
    return _at(array, count, itemsize)


def _width(items: Array, offset: int, lane: Array) -> int:
    """Bytes per item of a lane that lies inside the items."""
    width: int = lane.itemsize
    if width not in (1, 2, 4, 8) or not 0 <= offset <= items.itemsize - width:
        raise ValueError(f"a lane of {width} bytes at byte {offset} of items of {items.itemsize}")
    return width


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
    count = len(out)
    values = np.array(constants, np.float32)
    places = np.array([_at(each, count, 2 if each.itemsize == 2 else 4) for each in operands], np.uintp)
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
        _into(out, count, 2 if out.itemsize == 2 else 4),
        count,
    )


def find_gradient(variant: int, constants: Sequence[float], m: Array, new_m: Array) -> Array:
    """`formulas.find_gradient`."""
    count = len(m)
    values = np.array(constants, np.float32)
    found = np.empty(count, np.uint16)
    _functions["find_gradient"](
        variant, _at(values, 2, 4), _at(m, count, 4), _at(new_m, count, 4), found.ctypes.data, count
    )
    return found


def subtract(new: Array, old: Array, bias: int, out: Array) -> None:
    """`new - old + bias` of unsigned integers, modulo; `out` may be one of them."""
    count, size = len(new), new.itemsize
    _functions[f"subtract_{size}"](_at(new, count, size), _at(old, count, size), bias, _into(out, count, size), count)


def add(difference: Array, old: Array, bias: int, out: Array) -> None:
    """What `subtract` came from: `difference + old - bias`; `out` may be one of them."""
    count, size = len(difference), difference.itemsize
    _functions[f"add_{size}"](_at(difference, count, size), _at(old, count, size), bias, _into(out, count, size), count)


def cut(items: Array, offset: int, lane: Array) -> None:
    """`lanes.split`."""
    count, size, width = len(items), items.itemsize, _width(items, offset, lane)
    _functions[f"cut_{size}"](_at(items, count, size), width, offset, _into(lane, count, width), count)


def join(lanes: Sequence[tuple[int, Array]], mask: int, out: Array) -> None:
    """`lanes.merge` of the lanes that vary; `mask` holds the constant ones."""
    count, size = len(out), out.itemsize
    places = np.array([_at(values, count, values.itemsize) for _, values in lanes], np.uintp)
    widths, offsets = bytes(_width(out, *lane) for lane in lanes), bytes(offset for offset, _ in lanes)
    _functions[f"join_{size}"](places.ctypes.data, widths, offsets, len(lanes), mask, _into(out, count, size), count)


def count_changed(one: Array, other: Array) -> int:
    """How many words of 8 bytes differ."""
    count = len(one)
    found: int = _functions["count_changed"](_at(one, count, 8), _at(other, count, 8), count)
    return found


def find_changes(new: Array, old: Array, limit: int) -> tuple[Array, Array] | None:
    """Gaps (u32) and differences of the items that changed; None if there are more than `limit`."""
    count, size = len(new), new.itemsize
    gaps, differences = np.empty(limit + _ROOM, np.uint32), np.empty(limit + _ROOM, new.dtype)
    found = _functions[f"find_changes_{size}"](
        _at(new, count, size), _at(old, count, size), count, limit, gaps.ctypes.data, differences.ctypes.data
    )
    return (gaps[:found], differences[:found]) if found <= limit else None


def add_changes(items: Array, gaps: Array, differences: Array) -> bool:
    """`changes.add`: gaps are checked first; there are as many differences."""
    count, width, size = len(gaps), gaps.itemsize, items.itemsize
    places, values = _at(gaps, count, width), _at(differences, count, size)
    if not _functions["are_gaps"](places, width, count, len(items)):
        return False
    _functions[f"add_changes_{size}"](_into(items, len(items), size), places, width, values, count)
    return True


# --- whether they give what they must ---


def _are_right() -> bool:
    """Whether the passes over integers give what NumPy gives."""
    try:
        return _digest() == _DIGEST
    except (ValueError, LookupError, ArithmeticError):  # from a count that cannot be
        return False


def _digest() -> int:
    """CRC of what the passes over integers give on a few hundred items: a third changes, none, few, and a third."""
    bits = np.arange(1, 2 * _TEST_COUNT + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words, others = np.split(bits ^ (bits >> np.uint64(29)), 2)
    near = np.where(others % np.uint64(3) == 0, others, words)
    near[128:512] = words[128:512]
    near[[260, 430]] += np.uint64(0x0101010101010101)
    found = count_changed(words, near)
    for size in (1, 2, 4, 8):
        new, old = words.astype(f"<u{size}"), near.astype(f"<u{size}")
        for result in (*_sums(new, old), *_changes(new, old), *(_lanes(new) if size in LANED_ITEM_SIZES else ())):
            found = crc32(result.tobytes(), found)
    return found


def _sums(new: Array, old: Array) -> list[Array]:
    there, back = np.empty_like(new), np.empty_like(new)
    subtract(new, old, 0x8877665544332211, there)
    add(new, old, 0x8877665544332211, back)
    return [there, back]


def _changes(new: Array, old: Array) -> list[Array]:
    """Those found within each limit; and the old items with them added, where their gaps serve."""
    count = int(np.count_nonzero(new != old))
    found = [find_changes(new, old, limit) for limit in (len(new), count, count - 1)]
    results = [part for each in found for part in each or ()]
    if not results:
        return []
    gaps, differences = results[:2]
    zero, outside = gaps.copy(), gaps.copy()
    zero[7], outside[7] = 0, int(gaps[7]) + len(new) + 1 - int(gaps.sum())
    for width in (1, 2, 4):
        for each in (gaps, zero, outside):
            items = np.append(old, old[:1])[:-1]  # what leads outside hits nothing, if it is not refused
            if add_changes(items, each.astype(f"<u{width}"), differences):
                results.append(items)
    return results


def _lanes(items: Array) -> list[Array]:
    """All lanes, and the items joined from all but the last of each width."""
    results = []
    for width in (each for each in (1, 2, 4, 8) if each <= items.itemsize):
        lanes = [(offset, np.empty(len(items), f"<u{width}")) for offset in range(0, items.itemsize, width)]
        for offset, lane in lanes:
            cut(items, offset, lane)
        joined = np.empty_like(items)
        join(lanes[:-1], 0x5A << (8 * lanes[-1][0]), joined)
        results += [*(lane for _, lane in lanes), joined]
    return results


_functions = _load()
IS_THERE = bool(_functions) and _are_right()
