"""Torch tensors as numpy arrays and back, without a copy where memory may be shared, for products that know only
numpy.

numpy lacks bfloat16 and the eight-bit floats. They go as `ml_dtypes` where the product knows those, else as unsigned
integers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.peers._tree import Tensor, dtype_name, dtype_named

Array = np.ndarray[Any, Any]
UNSIGNED = {1: torch.uint8, 2: torch.uint16}


def is_numpy_dtype(dtype: torch.dtype) -> bool:
    """Whether plain numpy has it."""
    return not (dtype.is_floating_point and dtype not in (torch.float16, torch.float32, torch.float64))


def to_array(tensor: Tensor, *, extended: bool) -> Array:
    """A view of a contiguous tensor; `extended` chooses `ml_dtypes` over unsigned integers."""
    if is_numpy_dtype(tensor.dtype):
        array: Array = tensor.numpy()
        return array
    bits: Array = tensor.view(UNSIGNED[tensor.itemsize]).numpy()
    return bits.view(getattr(import_module("ml_dtypes"), dtype_name(tensor.dtype))) if extended else bits


def to_tensor(array: Any, dtype: str) -> Tensor:
    """A tensor over the array's memory; copied first where it may not be written to."""
    array = np.asarray(array)
    array = array if array.flags.writeable else array.copy()
    if is_numpy_dtype(dtype_named(dtype)):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(dtype_named(dtype))
