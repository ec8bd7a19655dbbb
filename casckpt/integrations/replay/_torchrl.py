"""Buffers of TorchRL with a tensor storage and a round-robin writer.

The storage is a tree of tensors, in memory or memory maps, that is made with its first rows. The writer knows the next
slot and counts rows. A prioritized sampler keeps its priorities in two trees that cannot be copied out; they are read
leaf by leaf, and their inner nodes follow from the leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from casckpt.errors import InvalidInputError
from casckpt.integrations.replay._counted import Counted
from casckpt.replay import Position

_SAMPLER = ("_alpha", "_beta", "_eps", "_max_priority")


class TorchRlBuffer:
    """A replay buffer of TorchRL for `Ring`.

    Args:
        buffer: a `ReplayBuffer` or one of its kinds, with a storage of one dimension that is in use.

    Raises:
        InvalidInputError: another storage or writer, or no row yet.
    """

    def __init__(self, buffer: Any) -> None:
        self._storage, self._writer, self._sampler = buffer._storage, buffer._writer, buffer._sampler
        if not hasattr(self._writer, "_cursor_value") or not hasattr(self._storage, "_len_along_dim0"):
            raise InvalidInputError(
                f"a {type(self._storage).__name__} written by a {type(self._writer).__name__} is no ring of tensors: "
                "expected a LazyTensorStorage, LazyMemmapStorage or TensorStorage, and a round-robin writer"
            )
        if getattr(self._storage, "ndim", 1) != 1:
            raise InvalidInputError(f"a storage of {self._storage.ndim} dimensions: expected one (ndim=1)")
        if not self._storage.initialized:
            raise InvalidInputError(
                "an empty TorchRL storage does not tell its columns: extend it by a row before the ring is made. A "
                "restore replaces it."
            )
        self._counted = Counted()
        self._rest = _Sampler(self._sampler, self._storage) if hasattr(self._sampler, "_sum_tree") else None

    def position(self) -> Position:
        capacity, head = int(self._storage.max_size), int(self._writer._cursor)
        total = self._counted.total(int(self._writer._write_count), head, capacity)
        return Position(capacity, head, len(self._storage), total)

    def columns(self) -> Mapping[str, Any]:
        data = self._storage._storage
        if not hasattr(data, "items"):
            return {"data": _plain(data)}
        leaves = data.items(include_nested=True, leaves_only=True)
        return {key if isinstance(key, str) else "/".join(key): _plain(value) for key, value in leaves}

    def mutable(self) -> Any:
        found = {} if self._rest is None else {"sampler": self._rest}
        generation = getattr(self._writer, "_generation", None)
        return found if generation is None else {**found, "generation": generation}

    def place(self, position: Position) -> None:
        assert position.total is not None
        self._writer._cursor, self._writer._write_count = position.head, position.total
        self._storage._len = position.held
        self._counted.stand_at(position.total, position.total, position.head, position.capacity)
        if self._rest is not None:
            self._rest.put(position.held)


class _Sampler:
    """A Checkpointable of a prioritized sampler; a restore fills its trees with the place, which it tells last."""

    def __init__(self, sampler: Any, storage: Any) -> None:
        self._sampler, self._storage = sampler, storage
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        count = len(self._storage)
        trees = {name: np.asarray(tree[np.arange(count)]) for name, tree in self._trees().items()}
        return {**{name: getattr(self._sampler, name) for name in _SAMPLER}, **trees}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def put(self, row_count: int) -> None:
        """Fill the trees with what was restored, if that is for so many rows."""
        restored, self._restored = self._restored, None
        if restored is None or len(restored["sums"]) != row_count:
            return
        self._sampler._empty()
        for name in _SAMPLER:
            setattr(self._sampler, name, restored[name])
        for name, tree in self._trees().items():
            tree[np.arange(row_count)] = restored[name]

    def _trees(self) -> dict[str, Any]:
        return {"sums": self._sampler._sum_tree, "minima": self._sampler._min_tree}


def _plain(value: Any) -> Any:
    """A tensor over the same memory, whatever kind of tensor (a memory map, say) that is."""
    base = next((each for each in type(value).__mro__ if (each.__module__, each.__name__) == ("torch", "Tensor")), None)
    return value if base is None or type(value) is base else value.as_subclass(base)
