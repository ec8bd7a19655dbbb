"""States to commit: random bits, so that neither deduplication nor compression can help, in any number of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch

FILL_SIZE = 8 << 20  # bytes drawn at a time: the generator's own arrays stay small


def random_state(size_bytes: int, tensor_count: int, generator: np.random.SFC64) -> dict[str, torch.Tensor]:
    """`tensor_count` float32 tensors of random bits, together `size_bytes` (rounded down to whole tensors of 64 B)."""
    elements = max(16, size_bytes // tensor_count // 64 * 16)
    state = {f"layer{number:05}": torch.empty(elements) for number in range(tensor_count)}
    refill(state, generator)
    return state


def refill(state: dict[str, torch.Tensor], generator: np.random.SFC64) -> None:
    """Replace every byte of every tensor by new random bits, in place."""
    for tensor in state.values():
        plain = tensor.view(torch.uint8).numpy()
        for start in range(0, plain.size, FILL_SIZE):
            piece = plain[start : start + FILL_SIZE]
            words = generator.random_raw(-(-piece.size // 8))
            piece[:] = words.view(np.uint8)[: piece.size]


def state_size(state: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def contiguous(size_bytes: int, generator: np.random.SFC64) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Random bytes in one run of memory: what a baseline copies, hashes or writes."""
    plain = np.empty(size_bytes, np.uint8)
    refill({"": torch.from_numpy(plain)}, generator)
    return plain


def pieces(plain: memoryview, size: int) -> Iterator[memoryview]:
    """`plain` cut every `size` bytes, without copying."""
    for start in range(0, len(plain), size):
        yield plain[start : start + size]


def seeded() -> np.random.SFC64:
    """A generator that differs from run to run: content must be new to any store that is kept."""
    return np.random.SFC64(int.from_bytes(os.urandom(8), "little"))
