"""The only door to numpy. Imported only when a state, or a structure to restore, holds something of numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.random

from casckpt.errors import CorruptionError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.structure import Leaf
from casckpt.state.memory import distinct_count, flat_parts, reach

LEAF_TYPES = (np.ndarray, np.memmap)
GENERATOR = np.random.Generator
RANDOM_STATE = np.random.RandomState
BIT_GENERATOR = np.random.BitGenerator
BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
SCALAR = np.generic
DTYPE = np.dtype

Array = Any  # np.ndarray[Any, Any]
Described = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, int], int | None, int, int, bool]


@lru_cache(maxsize=4096)
def dtype_name(dtype: Any) -> str:
    """The stored name of a dtype (see `casckpt.format.dtypes`).

    Raises:
        ValueError: one that casckpt does not store.
    """
    if dtype.hasobject:
        raise ValueError("object arrays are not supported; store the parts that are numbers or text")
    description = _describe_dtype(dtype)
    name = description if type(description) is str else json.dumps(description, separators=(",", ":"), sort_keys=True)
    try:
        itemsize_of("numpy", name)
        same = dtype_of(name) == dtype
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ValueError(f"numpy dtype {dtype!r} is not supported; store a view as integers and its name")
    return name


def _describe_dtype(dtype: Any) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_describe_dtype(base), list(shape)]
    if dtype.fields is None:
        return str(dtype.str)
    fields = []
    for name in dtype.names:
        kind, offset, *title = dtype.fields[name]
        fields.append([name, offset, _describe_dtype(kind), title[0] if title else None])
    return {"aligned": dtype.isalignedstruct, "fields": fields, "itemsize": dtype.itemsize}


@lru_cache(maxsize=4096)
def dtype_of(name: str) -> Any:
    """The dtype of a stored name that `itemsize_of` has accepted."""
    return _parse_dtype(json.loads(name) if name.startswith("{") else name)


def _parse_dtype(description: Any) -> Any:
    if type(description) is str:
        return np.dtype(description)
    if type(description) is list:
        return np.dtype((_parse_dtype(description[0]), tuple(description[1])))
    names, offsets, kinds, titles = zip(*description["fields"], strict=True) if description["fields"] else ((),) * 4
    spec: dict[str, Any] = {
        "names": list(names),
        "formats": [_parse_dtype(kind) for kind in kinds],
        "offsets": list(offsets),
        "itemsize": description["itemsize"],
    }
    if any(title is not None for title in titles):
        spec["titles"] = list(titles)
    return np.dtype(spec, align=description["aligned"])  # type: ignore[call-overload]


def describe(array: Array) -> Described:
    """Where an array's bytes lie, as `casckpt.state._torch.describe` does for tensors.

    Raises:
        ValueError: a dtype that is not stored.
    """
    name = dtype_name(array.dtype)
    shape, strides, itemsize = array.shape, array.strides, array.itemsize
    if not array.size * itemsize:
        return ("numpy", name, shape, None, 0), -1, 0, 0, True
    first = array.ctypes.data
    if array.flags.c_contiguous:
        return ("numpy", name, shape, None, 0), first, first + array.nbytes, first, True
    below, above = reach(shape, strides)
    extent = below + above + itemsize
    is_dense = extent <= distinct_count(shape, strides) * itemsize
    return ("numpy", name, shape, strides, 0), first - below, first + above + itemsize, first, is_dense


def compact_source(array: Array) -> Callable[[int, int], memoryview]:
    """Copies of pieces of what an array's contiguous copy would be, without making it whole."""
    narrowed = array[tuple(slice(0, None if stride else 1) for stride in array.strides)]
    itemsize = array.itemsize

    def piece(start: int, stop: int) -> memoryview:
        first, last = start // itemsize, -(-stop // itemsize)
        parts = flat_parts(narrowed, first, last)
        whole = memoryview(b"".join(part.tobytes() for part in parts))
        return whole[start - first * itemsize : stop - first * itemsize]

    return piece


def array_in(memory: Any, start: int, leaf: Leaf) -> Array:
    """The array of `leaf` in writable `memory` (None for an empty one), whose byte `start` is its first element."""
    dtype = dtype_of(leaf.dtype)
    if memory is None:
        return np.empty(leaf.shape, dtype)
    return np.ndarray(leaf.shape, dtype, memory, start, leaf.strides)


def copy_into(live: Array, stored: Array) -> float:
    """Copy into a live array; the largest change by a cast, 0.0 where the dtypes agree."""
    axes = tuple(slice(0, None if stride else 1) for stride in live.strides)
    live, stored = live[axes or ...], stored[axes or ...]
    if live.dtype == stored.dtype:
        live[...] = stored
        return 0.0
    with np.errstate(all="ignore"):
        np.copyto(live, stored, casting="unsafe")
        wide = np.complex128 if "c" in (live.dtype.kind, stored.dtype.kind) else np.float64
        change = np.abs(live.astype(wide) - stored.astype(wide))
    return float(np.nan_to_num(change, nan=0.0, posinf=np.inf).max(initial=0.0))


def as_array(rows: Any) -> Array:
    """Anything that is an array, or becomes one without its elements being understood anew."""
    return np.asarray(rows)


def bytes_of(rows: Any, dtype: Any) -> memoryview:
    """The elements of anything that becomes an array of this dtype, in C order; a copy where it is not so already."""
    return np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8).data


def allocate(size: int) -> Array:
    """Fresh bytes for a block."""
    return np.empty(size, np.uint8)


def scalar_payload(value: Any) -> list[Any]:
    """A numpy scalar as [dtype name, bytes].

    Raises:
        ValueError: a dtype that is not stored.
    """
    return [dtype_name(value.dtype), value.tobytes()]


def scalar_of(payload: Any) -> Any:
    """The numpy scalar of a payload, of the same type."""
    name, data = payload
    if type(name) is not str or type(data) is not bytes or len(data) != itemsize_of("numpy", name):
        raise CorruptionError("scalar block: a numpy scalar whose bytes do not fit its type")
    return np.frombuffer(bytearray(data), dtype_of(name))[0] if data else dtype_of(name).type()


def checked_dtype(name: Any) -> Any:
    """The dtype of a name that may be anything.

    Raises:
        ValueError: it is no stored name.
    """
    if type(name) is not str:
        raise ValueError("not a dtype name")
    itemsize_of("numpy", name)
    return dtype_of(name)


def generator_tree(generator: Any) -> dict[str, Any]:
    """The state of a Generator, BitGenerator or RandomState as a plain tree; a fresh copy."""
    if isinstance(generator, RANDOM_STATE):
        return dict(generator.get_state(legacy=False))
    return dict((generator.bit_generator if isinstance(generator, GENERATOR) else generator).state)


def set_generator(generator: Any, tree: dict[str, Any]) -> None:
    """Put a state from `generator_tree` into a generator of the same kind."""
    if isinstance(generator, RANDOM_STATE):
        generator.set_state(tree)
    elif isinstance(generator, GENERATOR):
        generator.bit_generator.state = tree
    else:
        generator.state = tree


def make_generator(kind: str, tree: dict[str, Any]) -> Any:
    """A new generator of `kind` ("numpy.Generator", …) in the state `tree`; known algorithms only."""
    name = tree.get("bit_generator")
    if name not in BIT_GENERATORS:
        raise CorruptionError(f"unknown numpy bit generator {name!r:.60}")
    bits = BIT_GENERATORS[name]()
    makers: dict[str, Any] = {"numpy.Generator": GENERATOR, "numpy.RandomState": RANDOM_STATE}
    made = makers[kind](bits) if kind in makers else bits
    set_generator(made, tree)
    return made


def global_rng_tree() -> dict[str, Any]:
    """The state of `np.random`'s legacy global generator."""
    return dict(np.random.get_state(legacy=False))


def set_global_rng(tree: dict[str, Any]) -> None:
    np.random.set_state(tree)


def changed_elements(a: Any, b: Any, itemsize: int) -> Array:
    """Which elements of two equally long byte strings differ in any bit."""
    rows = np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)
    return rows.reshape(-1, itemsize).any(axis=1)


def as_wide_arrays(dtype: str, a: Any, b: Any) -> tuple[Array, Array] | None:
    """Two byte strings as float64 or complex128; None where the dtype holds no numbers."""
    kind = dtype_of(dtype)
    if kind.kind not in "biufcmM":
        return None
    stored = np.dtype("<i8") if kind.kind in "mM" else kind
    wide = np.complex128 if kind.kind == "c" else np.float64
    return np.frombuffer(a, stored).astype(wide), np.frombuffer(b, stored).astype(wide)


def largest_change(a: Array, b: Array, changed: Array) -> float:
    """The largest |a - b| where `changed`; infinity where one side alone is infinite or NaN."""
    with np.errstate(all="ignore"):
        change = np.abs(a - b)[changed]
    same_special = (np.isnan(a) & np.isnan(b))[changed]
    change[same_special] = 0.0
    change[np.isnan(change)] = np.inf
    return float(change.max(initial=0.0))
