"""The two ways to compute a pass of a codec: compiled, and by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from casckpt.codec import kernels

with_kernels = pytest.mark.skipif(not kernels.IS_THERE, reason="there are no compiled kernels")


def by_numpy(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function with the kernels left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "IS_THERE", False)
        return function(*arguments, **options)


def placed(plain: bytes | np.ndarray, shift: int) -> memoryview:
    """The bytes in memory of their own, so far from an aligned address."""
    size = len(plain) if isinstance(plain, bytes) else plain.nbytes
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    memory[start : start + size] = np.frombuffer(plain, np.uint8)
    return memory[start : start + size].data
