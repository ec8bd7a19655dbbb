"""Buffers of TorchRL with a tensor storage and a round-robin writer.

The storage is a tree of tensors, in memory or memory maps, that is made with its first rows. The writer knows the next
slot and counts rows; that it was emptied or loaded, which may leave it at any count, is noted from now on.

A prioritized sampler keeps its priorities in two trees that cannot be copied out; they are read leaf by leaf, and their
inner nodes follow from the leaves. Other samplers (without replacement, say) are what their `state_dict` says: where
that is not empty, it is by slot, and rows cannot get other slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np

from casckpt.errors import InvalidInputError, MismatchError
from casckpt.integrations.replay._counted import Counted, calls_counted, count_calls, once
from casckpt.replay import Position
from casckpt.replay.arguments import expect_buffer

_SAMPLER = ("_alpha", "_beta", "_eps", "_max_priority")
_TREES = ("sums", "minima")


class TorchRlBuffer:
    """A replay buffer of TorchRL for `Ring`.

    Args:
        buffer: a `ReplayBuffer` or one of its kinds, with a storage of one dimension that is in use. `_empty`,
            `load_state_dict` and `loads` of its writer are counted from now on.

    Raises:
        InvalidInputError: another storage or writer, or no row yet.
    """

    def __init__(self, buffer: Any) -> None:
        expect_buffer(buffer, ("_storage", "_writer", "_sampler"), "TorchRL")
        self._buffer = buffer
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
        count_calls(self._writer, 0, _empty=once, load_state_dict=once, loads=once)
        self._replaced_count = calls_counted(self._writer)
        self._trees = _Sampler(self._sampler, self._storage) if hasattr(self._sampler, "_sum_tree") else None
        if self._trees is not None or not self._sampler.state_dict():
            self.rearrange = self._rearrange

    def position(self) -> Position:
        replaced_count = calls_counted(self._writer)
        if replaced_count != self._replaced_count:
            self._counted.start_anew()
        self._replaced_count = replaced_count
        capacity, head, held = int(self._storage.max_size), int(self._writer._cursor), len(self._storage)
        total = self._counted.total(int(self._writer._write_count), head, capacity, held)
        return Position(capacity, head, held, total)

    def columns(self) -> Mapping[str, Any]:
        data = self._storage._storage
        if not hasattr(data, "items"):
            return {"data": _plain(data)}
        leaves = data.items(include_nested=True, leaves_only=True)
        return {key if isinstance(key, str) else "/".join(key): _plain(value) for key, value in leaves}

    def mutable(self) -> Any:
        found = {"sampler": self._trees or self._sampler} if self._trees or self._sampler.state_dict() else {}
        generation = getattr(self._writer, "_generation", None)
        return found if generation is None else {**found, "generation": generation}

    def place(self, position: Position) -> None:
        assert position.total is not None
        self._writer._cursor, self._writer._write_count = position.head, position.total
        self._storage._len = position.held
        last = (position.head - 1) % position.capacity if position.held else None
        if hasattr(self._storage, "_set_last_cursor"):
            self._storage._set_last_cursor(last)  # where an episode ends whatever its rows say: samplers of slices ask
            self._storage._bump_mutation_revision()
        else:
            self._storage._last_cursor = last
        self._counted.stand_at(position.total, position.total, position.head, position.capacity)
        self._forget_draws()
        if self._trees is not None:
            self._trees.put(position.held)

    def _forget_draws(self) -> None:
        """Drop what was made of the rows before: batches drawn ahead, and the slices that a sampler remembers."""
        ahead = getattr(self._buffer, "_prefetch_queue", ())
        wait([batch for batch in ahead if not batch.cancel()])  # one that was cancelled is never said to be done
        if ahead:
            ahead.clear()
        if getattr(self._sampler, "_cache", None):
            self._sampler._cache.clear()
        if getattr(self._sampler, "_fragmented_index", None) is not None:
            self._sampler._fragmented_index = None

    def _rearrange(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Let priorities follow rows that a restore gave other slots."""
        if self._trees is not None:
            self._trees.rearrange(moves)


class _Sampler:
    """A Checkpointable of a prioritized sampler; a restore fills its trees with the place, which it tells last."""

    def __init__(self, sampler: Any, storage: Any) -> None:
        self._sampler, self._storage = sampler, storage
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        count = len(self._storage)
        trees = {name: np.asarray(tree[np.arange(count)]) for name, tree in self._live().items()}
        return {**{name: getattr(self._sampler, name) for name in _SAMPLER}, **trees}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def rearrange(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Give what was restored to the new slots: (old slot, new slot, rows)."""
        restored = self._restored
        if restored is None:
            return
        for name in _TREES:
            before = restored[name]
            restored[name] = np.zeros(max(after + count for _, after, count in moves), before.dtype)
            for old, after, count in moves:
                restored[name][after : after + count] = before[old : old + count]
        value, at = restored["_max_priority"]
        places = [at - old + after for old, after, count in moves if at is not None and old <= at < old + count]
        restored["_max_priority"] = value, places[0] if places else None

    def put(self, row_count: int) -> None:
        """Fill the trees with what was restored; an empty buffer has empty ones.

        Raises:
            MismatchError: there are rows without a priority.
        """
        restored, self._restored = self._restored, None
        if not row_count:
            self._sampler._empty()
        if restored is None:
            return
        if len(restored["sums"]) < row_count:
            raise MismatchError(
                f"a sampler with priorities of {len(restored['sums'])} rows, for {row_count} rows. Restore another "
                "step, or the rows alone: `RingView.copy_into`.",
                differences=[("sampler/sums", str(row_count), str(len(restored["sums"])))],
            )
        self._sampler._empty()
        for name in _SAMPLER:
            setattr(self._sampler, name, restored[name])
        for name, tree in self._live().items():
            if row_count:
                tree[np.arange(row_count)] = restored[name][:row_count]

    def _live(self) -> dict[str, Any]:
        return dict(zip(_TREES, (self._sampler._sum_tree, self._sampler._min_tree), strict=True))


def _plain(value: Any) -> Any:
    """A tensor over the same memory, whatever kind of tensor (a memory map, say) that is."""
    base = next((each for each in type(value).__mro__ if (each.__module__, each.__name__) == ("torch", "Tensor")), None)
    return value if base is None or type(value) is base else value.as_subclass(base)
