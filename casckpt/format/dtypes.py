"""Names of element types, and what can be said about them without torch or numpy.

Torch types have torch's own names. NumPy types are `dtype.str` (`<f4`, `>i2`, `<U7`, `<M8[ns]`), or, for structured
types, canonical JSON that starts with `{`: item size, alignment flag, and fields with offset and type, a type being
one of the two again, or `[type, shape]` for a subarray. Only names that this file accepts ever reach numpy.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import prod
from typing import Any

TORCH_ITEMSIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

_NUMPY = re.compile(r"([<>|])([?biufcmMSUV])(0|[1-9][0-9]{0,9})(\[[0-9a-zA-Zµμ/]{1,24}\])?", re.ASCII)
_FIXED = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16), "c": (8, 16, 24, 32), "m": (8,)}
_DEPTH_MAX = 16  # structures in structures
_NAME_SIZE_MAX = 65536


@lru_cache(maxsize=4096)
def itemsize_of(kind: str, dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: not a type that casckpt stores.
    """
    if kind == "bytes":
        if dtype:
            raise ValueError(f"bytes have no dtype, found {dtype!r}")
        return 1
    if kind == "torch":
        if dtype not in TORCH_ITEMSIZES:
            raise ValueError(f"unknown torch dtype {dtype!r}")
        return TORCH_ITEMSIZES[dtype]
    if len(dtype) > _NAME_SIZE_MAX:
        raise ValueError("dtype description too long")
    if not dtype.startswith("{"):
        return _simple_itemsize(dtype)
    try:
        description = json.loads(dtype)
    except (ValueError, RecursionError):
        raise ValueError(f"not a dtype description: {dtype[:80]!r}") from None
    if json.dumps(description, separators=(",", ":"), sort_keys=True) != dtype:
        raise ValueError("dtype description not in canonical form")
    return _structured_itemsize(description, 0)


def _simple_itemsize(dtype: str) -> int:
    match = _NUMPY.fullmatch(dtype)
    if match is None:
        raise ValueError(f"unknown numpy dtype {dtype!r}")
    _, letter, digits, unit = match.groups()
    count = int(digits)
    allowed = _FIXED.get("m" if letter == "M" else letter)
    if (allowed is not None and count not in allowed) or (unit is not None and letter not in "mM") or count > 1 << 31:
        raise ValueError(f"unknown numpy dtype {dtype!r}")
    return count * 4 if letter == "U" else count


def _structured_itemsize(description: Any, depth: int) -> int:
    """The item size of a parsed description, after checking that every field lies inside."""
    if type(description) is str and not description.startswith("{"):
        return _simple_itemsize(description)
    if depth > _DEPTH_MAX:
        raise ValueError("dtype nested too deeply")
    if type(description) is list and len(description) == 2 and type(description[1]) is list:
        base, shape = description
        if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape) or len(shape) > 32:
            raise ValueError("bad subarray shape in a dtype")
        return _bounded(_structured_itemsize(base, depth + 1) * prod(shape))
    if type(description) is not dict or set(description) != {"aligned", "fields", "itemsize"}:
        raise ValueError("bad dtype description")
    size = description["itemsize"]
    if type(size) is not int or type(description["aligned"]) is not bool or type(description["fields"]) is not list:
        raise ValueError("bad dtype description")
    _bounded(size)
    for field in description["fields"]:
        if type(field) is not list or len(field) != 4 or type(field[0]) is not str or type(field[1]) is not int:
            raise ValueError("bad field in a dtype")
        if field[3] is not None and type(field[3]) is not str:
            raise ValueError("bad field title in a dtype")
        if not 0 <= field[1] <= size - _structured_itemsize(field[2], depth + 1):
            raise ValueError(f"field {field[0]!r} lies outside its record")
    return size


def _bounded(size: int) -> int:
    if not 0 <= size < 1 << 31:
        raise ValueError("record size out of bounds")
    return size


@lru_cache(maxsize=4096)
def plane_size(kind: str, dtype: str) -> int:
    """The item size that a codec should split bytes by: of a complex number its half, of text one character.

    Records of more than 64 bytes, and empty ones, count as single bytes.
    """
    size = itemsize_of(kind, dtype)
    if kind == "torch" and dtype.startswith("complex"):
        return size // 2
    if kind == "numpy" and dtype[1:2] == "c" and dtype[0] != "{":
        return size // 2
    if kind == "numpy" and dtype[1:2] in "SU" and dtype[0] != "{":
        return 4 if dtype[1] == "U" else 1
    return size if 1 <= size <= 64 else 1
