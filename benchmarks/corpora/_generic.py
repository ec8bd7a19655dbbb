"""What a series takes by the plainest lossless difference: a reference that shares no code with casckpt.

Each leaf against the leaf of the same path in the commit before: bits as unsigned integers, subtracted, zigzag; a
bitmask and the changed items where few changed, byte planes else; zstd level 1 for each plane, and what does not shrink
raw. A leaf that did not change, or equals another of its commit, takes nothing. Nothing else is counted: no names, no
index, no bound on how long a chain a restore has to decode.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.corpora._series import Series, tensors

_FEW = 1 / 16  # of the items
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_Items = NDArray[Any]


def generic_share(series: Series, count: int | None = None) -> float:
    """Bytes of the differences of the first `count` commits ÷ bytes of their states."""
    taken = raw = 0
    before: dict[tuple[object, ...], _Items] = {}
    seen: set[bytes] = set()
    for index in range(min(count or series.count, series.count)):
        now = {path: _items(leaf) for path, leaf in tensors(series.state(index))}
        for path, items in now.items():
            key = hashlib.blake2b(items.tobytes(), digest_size=16).digest()
            if key not in seen:
                taken += _size(items, before.get(path))
                seen.add(key)
        raw += series.raw_bytes(index)
        before = now
    return taken / raw


def _items(leaf: Tensor) -> _Items:
    data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    items: _Items = data.view(_UNSIGNED.get(leaf.element_size(), np.uint8)).copy()
    return items


def _size(new: _Items, old: _Items | None) -> int:
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return _planes_size(new)
    difference = new - old
    sign = difference >> (8 * difference.itemsize - 1)
    zigzag = (difference << 1) ^ (0 - sign)
    is_changed = zigzag != 0
    if np.count_nonzero(is_changed) > _FEW * len(zigzag):
        return _planes_size(zigzag)
    return _frame_size(np.packbits(is_changed)) + _planes_size(zigzag[is_changed])


def _planes_size(items: _Items) -> int:
    planes = items.view(np.uint8).reshape(-1, items.itemsize).T
    return sum(_frame_size(np.ascontiguousarray(plane)) for plane in planes)


def _frame_size(plane: NDArray[np.uint8]) -> int:
    return min(len(zstandard.ZstdCompressor(level=1).compress(plane.tobytes())), len(plane))
