"""Trees compared bit by bit, without any code of the store: the oracle's half of every fault test."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def difference(expected: Any, found: Any, path: str = "state") -> str | None:
    """The first place where two trees differ, as a sentence, or None when they are bit-identical.

    Arrays and tensors are equal when dtype, shape and every byte (in C order) are: NaN payloads and signed zeros
    count, strides do not. Types of containers and scalars count, and so does the order of keys.
    """
    if type(expected) is not type(found):
        return f"{path}: {type(found).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, Mapping):
        if list(expected) != list(found):
            return f"{path}: keys {list(found)}, expected {list(expected)}"
        pairs = [(f"{path}[{key!r}]", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{path}: {len(found)} items, expected {len(expected)}"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, found, strict=True))]
    else:
        return None if _bits(expected) == _bits(found) else f"{path}: {found!r:.80}, expected {expected!r:.80}"
    return next((text for text in (difference(a, b, at) for at, a, b in pairs) if text is not None), None)


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    torch = sys.modules.get("torch")  # a tensor cannot be there unless someone imported it
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, tuple(value.shape), plain.tobytes()
    return value
