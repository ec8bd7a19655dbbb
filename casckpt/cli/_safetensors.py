"""The only door to safetensors: which leaves its format can say, and a component's tensors as one file.

What the format has no element type for is written as its bytes, and complex numbers as pairs of reals; the JSON beside
the file says so. The library writes, we only make its result durable. Its torch half loads torch, so it is imported
when there is something to write, not for `--help`.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from casckpt.errors import StorageError

_EXACT = frozenset(  # torch's names of the element types that readers since 0.4 know
    (
        *("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16", "bfloat16"),
        *("int32", "uint32", "float32", "int64", "uint64", "float64"),
    )
)
_NUMPY = {"b": "bool", "i": "int", "u": "uint", "f": "float"}
_REALS = {"complex32": "float16", "complex64": "float32", "complex128": "float64", "<c8": "float32", "<c16": "float64"}


class TensorForm(NamedTuple):
    """How a leaf is written: torch's dtype and the shape of the tensor in the file, and what these are of the leaf.

    `meaning` is "exact" (the same elements), "real pairs" (a complex number is two reals along a last axis), or "bytes"
    (an element type that the format lacks: its raw bytes, in C order).
    """

    dtype: str
    shape: tuple[int, ...]
    meaning: str


def form_of(kind: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> TensorForm:
    """The form of a leaf of `size_bytes` bytes."""
    name = dtype if kind == "torch" else _numpy_name(dtype) if kind == "numpy" else ""
    if name in _EXACT and _is_writable(name):
        return TensorForm(name, shape, "exact")
    if dtype in _REALS:
        return TensorForm(_REALS[dtype], (*shape, 2), "real pairs")
    return TensorForm("uint8", (size_bytes,), "exact" if kind == "bytes" else "bytes")


def _numpy_name(dtype: str) -> str:
    """Torch's name of a little-endian or single-byte numpy type; "" for others."""
    if len(dtype) < 3 or dtype[0] not in "<|" or dtype[1] not in _NUMPY or not dtype[2:].isdigit():
        return ""
    name = _NUMPY[dtype[1]]
    return name if name == "bool" else f"{name}{8 * int(dtype[2:])}"


@functools.cache
def _is_writable(dtype: str) -> bool:
    """Whether the library here writes this type: 0.4 does not know torch's wider unsigned integers."""
    import safetensors.torch

    from casckpt.state import _torch

    try:
        safetensors.torch.save({"probe": _torch.tensor_over(memoryview(bytearray(8)), dtype, (-1,))})
    except KeyError:
        return False
    return True


def tensor(form: TensorForm, data: memoryview) -> Any:
    """The tensor to be written for a leaf, over its writable bytes in C order; nothing is copied."""
    from casckpt.state import _torch

    return _torch.tensor_over(data, form.dtype, form.shape)


def write(path: str, tensors: Mapping[str, Any], about: Mapping[str, str]) -> int:
    """Write a new file, durable when this returns; returns its size in bytes.

    Args:
        path: in a folder of the caller's own: the library writes under another name first.
        tensors: by name; no two over the same bytes.
        about: text for `__metadata__`.

    Raises:
        StorageError: the library could not write; its message says why.
    """
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        safetensors.torch.save_file(dict(tensors), path, dict(about))
    except SafetensorError as error:
        raise StorageError(f"{path}: {error}. Free space, or export into another folder.", path=path) from error
    folder_mode = os.stat(os.path.dirname(path)).st_mode
    os.chmod(path, stat.S_IMODE(folder_mode) & 0o666)  # 0.8 leaves it readable by the owner alone, whatever the umask
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
