"""Buffers of Tianshou: one ring for each environment, and what a vector of them shares.

A buffer's data is a tree of arrays that is made with its first row. `_add_index` is what moves its place, in a buffer
of its own and in one of a vector alike, so that is what counts rows. Priorities are a tree over all slots and are
stored whole, with the running episode's statistics.

A hindsight buffer writes other goals into rows that it draws, and takes them back before it draws, grows or is saved:
that is done here too, before a commit or a restore looks at the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from casckpt.errors import InvalidInputError
from casckpt.integrations.replay._counted import Counted, calls_counted, count_calls, once
from casckpt.replay import Position
from casckpt.replay.arguments import expect_buffer

_STATISTICS = ("last_index", "_ep_rew", "_ep_len", "_ep_idx")
_SHARED = ("last_index", "_lengths")
_PRIORITIES = ("_max_prio", "_min_prio", "_alpha", "_beta")


class TianshouBuffer:
    """One `ReplayBuffer` for `Ring`: by itself, or of a vector (whose shared part is `TianshouShared`).

    Args:
        buffer: its arrays stay its own; `_add_index` and `update` of this one object count from now on.

    Raises:
        InvalidInputError: another buffer, or it has no row yet, so that its columns are not known.
    """

    def __init__(self, buffer: Any) -> None:
        expect_buffer(buffer, ("_meta", "_index", "_add_index", "maxsize"), "Tianshou, or of an environment in one")
        if buffer._meta.is_empty():
            raise InvalidInputError(
                "an empty Tianshou buffer does not tell its columns: add a row before the ring is made. A restore "
                "replaces it."
            )
        self._buffer = buffer
        count_calls(buffer, len(buffer), _add_index=once, update=len)
        self._counted = Counted()
        self._rest = _Attributes(buffer, _STATISTICS, _trees(buffer))

    def position(self) -> Position:
        buffer = self._buffer
        if hasattr(buffer, "_restore_cache"):
            buffer._restore_cache()
        head, capacity, held = int(buffer._index), int(buffer.maxsize), len(buffer)
        return Position(capacity, head, held, self._counted.total(calls_counted(buffer), head, capacity, held))

    def columns(self) -> Mapping[str, Any]:
        return dict(_leaves(self._buffer._meta))

    def mutable(self) -> Any:
        return {"rest": self._rest}

    def place(self, position: Position) -> None:
        assert position.total is not None
        self._buffer._index, self._buffer._size = position.head, position.held
        self._counted.stand_at(position.total, calls_counted(self._buffer), position.head, position.capacity)


class TianshouShared:
    """A Checkpointable of what the buffers of a vector share: their lengths, and priorities."""

    def __init__(self, vector: Any) -> None:
        self._attributes = _Attributes(vector, _SHARED, _trees(vector))

    def state_dict(self) -> dict[str, Any]:
        return self._attributes.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attributes.load_state_dict(state)


class _Attributes:
    """A Checkpointable of attributes of one object, and of the array of its sum tree."""

    def __init__(self, owner: Any, names: tuple[str, ...], has_tree: bool) -> None:
        self._owner = owner
        self._names = (*names, *(_PRIORITIES if has_tree else ()))
        self._has_tree = has_tree

    def state_dict(self) -> dict[str, Any]:
        found = {name: _plain(getattr(self._owner, name)) for name in self._names}
        return {**found, "weight": self._owner.weight._value} if self._has_tree else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._names:
            live = getattr(self._owner, name)
            if len(getattr(live, "shape", ())):
                live[...] = state[name]
            else:
                setattr(self._owner, name, state[name])
        if self._has_tree:
            self._owner.weight._value[...] = state["weight"]


def _trees(buffer: Any) -> bool:
    return "weight" in vars(buffer)


def _plain(value: Any) -> Any:
    """Numbers as Python's own; arrays as they are, for the commit reads them at once."""
    return value if len(getattr(value, "shape", ())) else value.item() if hasattr(value, "item") else value


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Arrays of a tree of batches, by path; what is empty has none."""
    for key in tree.keys():  # noqa: SIM118 - iterating a batch gives its rows
        value = tree[key]
        if hasattr(value, "is_empty"):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
