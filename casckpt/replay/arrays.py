"""A ring in a dict of arrays, tensors or memory maps, with its place in attributes of some object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from casckpt.errors import InvalidInputError
from casckpt.replay.arguments import expect, listed
from casckpt.replay.contract import Position


class Arrays:
    """Columns of equal length, one row per slot, and an object that knows where the ring stands.

    The rows of a memory map are read when a commit stores them: what it stored is its own. Where a column is what the
    owner has under its name, and the owner is given another array there (it grew, say), that one is the column.

    Args:
        columns: name → array or tensor of shape (capacity, …), numpy or torch, on any device; or an object with
            `shape`, `dtype` and slices (a file of HDF5, say), read and written in slices.
        owner: an object with attributes, or a dict, that holds the place under the names below.
        total: how many rows were ever written, in `owner`; row n is in slot n % capacity. The counter that
            `trust="counter"` needs.
        position, full: for rings without a counter: the slot that is written next, and whether all slots are filled.
        mutable: names of columns that are changed in place, which every commit stores whole: priorities, episode
            marks. Or a mapping of name to any plain tree of live objects; a restore that gives rows other slots than
            they had is then refused.

    Raises:
        InvalidInputError: columns of different lengths, names that are not there, or neither a counter nor a place.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        owner: Any,
        *,
        total: str | None = None,
        position: str | None = None,
        full: str | None = None,
        mutable: Sequence[str] | Mapping[str, Any] = (),
    ) -> None:
        if total is None and (position is None or full is None):
            raise InvalidInputError("name where the ring stands: total=, or both position= and full=")
        expect(columns, Mapping, "columns", "a mapping of name to rows")
        for name, value in (("total", total), ("position", position), ("full", full)):
            expect(value, str | None, name, "the name of an attribute or key of the owner")
        self._owner = owner
        self._total, self._position, self._full = total, position, full
        for name in filter(None, (total, position)):
            _number(owner, name)
        if full is not None:
            _get(owner, full)
        names = [] if isinstance(mutable, Mapping) else listed(mutable, "mutable")
        unknown = [name for name in names if name not in columns]
        if unknown:
            raise InvalidInputError(f"mutable={unknown}: no such column; there are {sorted(columns)}", names=unknown)
        self._columns = {name: column for name, column in columns.items() if name not in names}
        self._mutable = dict(mutable) if isinstance(mutable, Mapping) else {name: columns[name] for name in names}
        if names:
            self.rearrange = self._rearrange
        self._of_owner = [name for name, column in columns.items() if _find(owner, name) is column]
        self.replaced_count = 0
        self._measure()

    def _measure(self) -> None:
        columns = {**self._columns, **(self._mutable if hasattr(self, "rearrange") else {})}
        lengths = {name: (getattr(column, "shape", None) or (None,))[0] for name, column in columns.items()}
        if len(set(lengths.values())) != 1 or not (capacity := next(iter(lengths.values()))):
            raise InvalidInputError(f"columns need one row per slot each, found {lengths}", lengths=lengths)
        self._capacity = capacity

    def _follow(self) -> None:
        """Take the owner's arrays for those that it had before under the same names."""
        replaced = False
        for name in self._of_owner:
            columns, now = (self._columns if name in self._columns else self._mutable), _get(self._owner, name)
            replaced, columns[name] = replaced or now is not columns[name], now
        if replaced:
            self.replaced_count += 1
            self._measure()

    def position(self) -> Position:
        self._follow()
        if self._total is not None:
            total = _number(self._owner, self._total)
            return Position(self._capacity, total % self._capacity, min(total, self._capacity), total)
        assert self._position is not None and self._full is not None
        head = _number(self._owner, self._position)
        count = self._capacity if _get(self._owner, self._full) else head
        return Position(self._capacity, head % self._capacity, count, None)

    def columns(self) -> Mapping[str, Any]:
        self._follow()
        return self._columns

    def mutable(self) -> Any:
        self._follow()
        return self._mutable

    def place(self, position: Position) -> None:
        values = {
            self._total: position.total,
            self._position: position.head,
            self._full: position.held == position.capacity,
        }
        for name, value in values.items():
            if name is not None:
                _set(self._owner, name, value)

    def _rearrange(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Let mutable columns follow rows that a restore gave other slots: (old slot, new slot, rows)."""
        for column in self._mutable.values():
            kept = [_copied(column[before : before + count]) for before, _, count in moves]
            for (_, after, count), rows in zip(moves, kept, strict=True):
                column[after : after + count] = rows


def _copied(rows: Any) -> Any:
    return rows.clone() if hasattr(rows, "clone") else rows.copy()


def _get(owner: Any, name: str) -> Any:
    try:
        return owner[name] if isinstance(owner, Mapping) else getattr(owner, name)
    except (KeyError, AttributeError):
        raise InvalidInputError(f"a {type(owner).__name__} without {name!r}: the ring's place is not there") from None


def _find(owner: Any, name: Any) -> Any:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, str(name), None)


def _number(owner: Any, name: str) -> int:
    value = _get(owner, name)
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(f"{name!r} of a {type(owner).__name__} is {value!r:.80}: no number of rows") from None


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, Mapping):
        owner[name] = value  # type: ignore[index]
    else:
        setattr(owner, name, value)
