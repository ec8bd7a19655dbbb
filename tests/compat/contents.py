"""What is in a state, as one line of text per path: the form in which golden stores keep what they must restore to.

Two functions give the same lines: `contents` from live objects, `contents_read` from what the independent reader
found. Leaves are given by kind, dtype, shape, flags and the digest of their elements in C order; scalars by value;
containers by kind.
"""

from __future__ import annotations

import collections
import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from tests.conformance.independent_reader import Component

PLAIN = (int, float, bool, str, bytes, complex, type(None))


def contents(state: Mapping[str, Any]) -> dict[str, str]:
    """Lines of a state: original objects, or what `restore` gave."""
    lines: dict[str, str] = {}
    for name, value in state.items():
        _describe(name, value, lines)
    return lines


def contents_read(components: Mapping[str, Component]) -> dict[str, str]:
    """The same lines from the independent reader."""
    lines: dict[str, str] = {}
    for component in components.values():
        for path, leaf in component.leaves.items():
            kind = "opaque" if path in component.opaque else leaf.kind
            lines[path] = _leaf_line(kind, _short_name(leaf.dtype), leaf.shape, leaf.flags, leaf.data)
        lines |= {path: _scalar_line(value) for path, value in component.scalars.items()}
        lines |= {path: f"container {kind}" for path, kind in component.containers.items()}
    return lines


def _leaf_line(kind: str, dtype: str, shape: tuple[int, ...], flags: int, data: bytes) -> str:
    if kind == "opaque":
        return "opaque"  # a pickle's bytes may differ between Python versions; what it holds is not the format's
    return f"leaf {kind} {dtype} {list(shape)} flags {flags} {blake3(data).hexdigest()[:32]}"


def _scalar_line(value: Any) -> str:
    return f"scalar {_text(value)}"


def _text(value: Any) -> str:
    """repr, but the same for equal sets, and ASCII."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_text, value)))})"
    return ascii(value)


def _describe(path: str, value: Any, lines: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        flags = isinstance(value, torch.nn.Parameter) + 2 * value.requires_grad
        plain = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        lines[path] = _leaf_line("torch", str(value.dtype).removeprefix("torch."), tuple(value.shape), flags, plain)
    elif isinstance(value, np.ndarray):
        lines[path] = _leaf_line("numpy", _dtype_name(value.dtype), value.shape, 0, value.tobytes())
    elif isinstance(value, bytes) and len(value) >= 4096:
        lines[path] = _leaf_line("bytes", "", (len(value),), 0, value)
    elif (generator := _generator_state(value)) is not None:
        _describe_container(path, *generator, lines)
    elif isinstance(value, dict) or (isinstance(value, list | tuple | collections.deque) and not _is_scalar(value)):
        _describe_container(path, _container_kind(value), _items(value), lines)
    elif type(value).__name__ == "Unknown":
        lines[path] = "opaque"
    else:
        lines[path] = _scalar_line(_foreign(value))


def _describe_container(path: str, kind: str, items: Mapping[Any, Any], lines: dict[str, str]) -> None:
    lines[path] = f"container {kind}"
    for key, child in items.items():
        text = key if isinstance(key, str) else repr(key)
        _describe(f"{path}/{text.replace('~', '~0').replace('/', '~1')}", child, lines)


def _is_scalar(value: Any) -> bool:
    """A sequence of plain values is one scalar; a torch.Size always is."""
    return type(value) is torch.Size or (not hasattr(value, "_fields") and all(type(item) in PLAIN for item in value))


def _container_kind(value: Any) -> str:
    if hasattr(value, "_fields"):
        return f"namedtuple:{type(value).__name__}"
    if isinstance(value, collections.defaultdict):
        return f"defaultdict:{getattr(value.default_factory, '__name__', None)}"
    bound = getattr(value, "maxlen", None)
    return type(value).__name__ if bound is None else f"{type(value).__name__}:{bound}"


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))


def _generator_state(value: Any) -> tuple[str, Mapping[str, Any]] | None:
    """A generator's kind and state, as its own library gives it."""
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return "rng:python", {"version": version, "words": struct.pack("<625I", *words), "gauss": gauss}
    if isinstance(value, np.random.Generator):
        return "rng:numpy.Generator", _rooted(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return "rng:numpy.RandomState", _rooted(value.get_state(legacy=False))
    if isinstance(value, np.random.BitGenerator):
        return "rng:numpy.BitGenerator", _rooted(value.state)
    if isinstance(value, torch.Generator):
        return "rng:torch", {"device": value.device.type, "state": value.get_state()}
    return None


def _rooted(state: Any) -> Mapping[str, Any]:
    assert isinstance(state, dict)
    return state


def _foreign(value: Any) -> Any:
    """A value of NumPy, torch or an enum in the independent reader's form."""
    if isinstance(value, np.generic):
        return ("foreign", "numpy", [value.dtype.str, value.tobytes()])
    if isinstance(value, np.dtype):
        return ("foreign", "numpy.dtype", value.str)
    if type(value) is torch.Size:
        return ("foreign", "torch.Size", list(value))
    if isinstance(value, torch.dtype):
        return ("foreign", "torch.dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ("foreign", "torch.device", str(value))
    if hasattr(value, "type_name") and hasattr(value, "resolve"):  # a stored enum member
        return ("foreign", "enum", [value.type_name, value.name, value.value])
    if hasattr(value, "_member_map_") or hasattr(type(value), "_member_map_"):
        return ("foreign", "enum", [type(value).__name__, value.name, value.value])
    return value


def _dtype_name(dtype: Any) -> str:
    return str(dtype.str) if dtype.fields is None else f"records of {', '.join(dtype.names)}"


def _short_name(dtype: str) -> str:
    """A stored dtype name with structured types as `_dtype_name` writes them."""
    if not dtype.startswith("{"):
        return dtype
    return f"records of {', '.join(field[0] for field in json.loads(dtype)['fields'])}"
