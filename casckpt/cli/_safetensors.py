"""A safetensors file written piece by piece, so that a component need not fit into memory twice.

::

    8 bytes  header size, u64 little-endian
    header   JSON: name → {"dtype", "shape", "data_offsets": [start, stop]}, padded with spaces to 8 bytes
    data     tensors one after the other in C order, without gaps

The format is that of huggingface/safetensors (README, "Format"). Its own writers take a dict of whole tensors; the
tests read our files with its readers. Tensors are ordered by element size, largest first, so that each starts at a
multiple of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}  # those that every reader since 0.4 knows, with their element sizes in bytes

_TORCH = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
_NUMPY = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}
_COMPLEX = {"complex32": "F16", "complex64": "F32", "complex128": "F64", "<c8": "F32", "<c16": "F64"}


@dataclass(frozen=True)
class TensorForm:
    """How a leaf is written: dtype and shape in the file, and what these are of it.

    `meaning` is "exact" (the same elements), "real pairs" (a complex number is two reals along a last axis), or "bytes"
    (an element type that the format lacks: its raw bytes, in C order).
    """

    dtype: str
    shape: tuple[int, ...]
    meaning: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]


def form_of(kind: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> TensorForm:
    """The form of a leaf of `size_bytes` bytes."""
    name = _TORCH.get(dtype) if kind == "torch" else _numpy_name(dtype) if kind == "numpy" else None
    if name is not None:
        return TensorForm(name, shape, "exact")
    if dtype in _COMPLEX:
        return TensorForm(_COMPLEX[dtype], (*shape, 2), "real pairs")
    return TensorForm("U8", (size_bytes,), "exact" if kind == "bytes" else "bytes")


def _numpy_name(dtype: str) -> str | None:
    """The name of a little-endian or single-byte numpy type; None for others."""
    if len(dtype) < 3 or dtype[0] not in "<|" or dtype[1] not in _NUMPY or not dtype[2:].isdigit():
        return None
    name = _NUMPY[dtype[1]]
    name = name if name == "BOOL" else f"{name}{8 * int(dtype[2:])}"
    return name if name in DTYPES else None


def order(forms: Mapping[str, TensorForm]) -> list[str]:
    """Names in the order in which the data must be written."""
    return sorted(forms, key=lambda name: -DTYPES[forms[name].dtype])  # stable: equal sizes keep their order


def write(file: BinaryIO, forms: Mapping[str, TensorForm], data: Iterable[memoryview], about: Mapping[str, str]) -> int:
    """Write a whole file; returns its size in bytes.

    Args:
        file: open for writing, empty.
        forms: by name.
        data: bytes of each tensor in the order of `order(forms)`; consumed one by one.
        about: text for `__metadata__`.
    """
    names = order(forms)
    header: dict[str, object] = {"__metadata__": dict(about)}
    position = 0
    for name in names:
        stop = position + forms[name].size_bytes
        header[name] = {
            "dtype": forms[name].dtype,
            "shape": list(forms[name].shape),
            "data_offsets": [position, stop],
        }
        position = stop
    encoded = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for name, piece in zip(names, data, strict=True):
        if len(piece) != forms[name].size_bytes:
            raise ValueError(f"{name}: {len(piece)} bytes, its form has {forms[name].size_bytes}")
        file.write(piece)
    return 8 + len(encoded) + position
