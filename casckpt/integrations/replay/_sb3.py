"""Buffers of Stable-Baselines3 and sb3-contrib.

Rows are (slots, environments, …), and `pos` and `full` say where the ring stands. Nothing counts rows, so `add` of the
one buffer does from now on.

Three things are not append-only. A hindsight buffer keeps the start and length of episodes, sets lengths to 0, and may
cut the last episode, which flips ends. A buffer that is made with `optimize_memory_usage` writes the newest next
observation into the slot that comes next: that slot is no row, and its observation is kept beside the rows. Arrays of
subclasses that are not known here are stored whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from casckpt.errors import UnsupportedStateError
from casckpt.integrations.replay._counted import Counted, calls_counted, count_calls, once
from casckpt.replay import Position
from casckpt.replay.arguments import expect_buffer

_ROWS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_ENDS = ("dones", "timeouts")


class Sb3Buffer:
    """A replay buffer of Stable-Baselines3 for `Ring`.

    Args:
        buffer: its arrays stay its own; `add` of this one object counts from now on.

    Raises:
        InvalidInputError: another buffer.
        UnsupportedStateError: rows of Python objects (`copy_info_dict`).
    """

    def __init__(self, buffer: Any) -> None:
        expect_buffer(buffer, ("buffer_size", "pos", "full", "add"), "Stable-Baselines3")
        self._buffer = buffer
        self._capacity = int(buffer.buffer_size)
        count_calls(buffer, self._capacity if buffer.full else int(buffer.pos), add=once)
        self._counted = Counted()
        self._is_shared = bool(getattr(buffer, "optimize_memory_usage", False))
        self._next = _NextObservation(buffer)
        ends = () if not hasattr(buffer, "ep_length") else _ENDS
        self._columns: dict[str, Any] = {}
        self._mutable: dict[str, Any] = {}
        for name, value in vars(buffer).items():
            for key, array in _arrays(name, value):
                if getattr(buffer, "copy_info_dict", True) is False and name == "infos":
                    continue  # objects that are never read
                if array.dtype.hasobject:
                    raise UnsupportedStateError(
                        f"replay buffer: {key} holds Python objects. Use a buffer without them (copy_info_dict=False).",
                        path=key,
                        type_name="numpy.ndarray",
                    )
                is_row = name in _ROWS and name not in ends
                (self._columns if is_row else self._mutable)[key] = array
        if not self._mutable:
            self.rearrange = _keep_all  # nothing is kept by slot: rows may get any

    def position(self) -> Position:
        buffer, capacity = self._buffer, self._capacity
        head = int(buffer.pos)
        held = (capacity - self._is_shared) if buffer.full else head
        return Position(capacity, head, held, self._counted.total(calls_counted(buffer), head, capacity, held))

    def columns(self) -> Mapping[str, Any]:
        return self._columns

    def mutable(self) -> Any:
        return {**self._mutable, "next": self._next} if self._is_shared else self._mutable

    def place(self, position: Position) -> None:
        assert position.total is not None
        self._buffer.pos, self._buffer.full = position.head, position.held == position.capacity
        self._counted.stand_at(position.total, calls_counted(self._buffer), position.head, self._capacity)
        self._next.put()


def _keep_all(moves: Sequence[tuple[int, int, int]]) -> None:
    """What there is beside the rows does not depend on their slots."""


class _NextObservation:
    """The observation in the slot that comes next; a restore puts it there with the place, which it tells last."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        pos = self._buffer.pos
        return {key: array[pos : pos + 1].copy() for key, array in _arrays("observations", self._buffer.observations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def put(self) -> None:
        """Put a restored observation where the buffer stands."""
        pos, restored = self._buffer.pos, self._restored
        self._restored = {}
        for key, array in _arrays("observations", self._buffer.observations):
            if key in restored:
                array[pos : pos + 1] = restored[key]


def _arrays(name: str, value: Any) -> list[tuple[str, Any]]:
    """An attribute's arrays by name: itself, or those of a dict observation."""
    if isinstance(value, dict):
        return [(f"{name}/{key}", each) for key, each in value.items() if hasattr(each, "__array_interface__")]
    return [(name, value)] if hasattr(value, "__array_interface__") and value.shape else []
