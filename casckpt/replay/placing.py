"""Rows of a stored ring put into the slots of a live one.

Where both have the same capacity and the ring is full, every row goes back into its own slot, so that the next draw of
a sampler is the one it would have been; else the rows start at slot 0. Nothing is appended: restoring twice gives what
restoring once gives.

Rows stream straight into the memory of arrays and tensors on the CPU; other columns take slices of at most a segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from casckpt.errors import MismatchError
from casckpt.replay.contract import Position, RowSource, Wanted
from casckpt.replay.ring import Ring, is_array_or_tensor
from casckpt.replay.view import allocate, piece_row_count
from casckpt.state.differences import Difference, mismatch
from casckpt.state.inplace import direct_memory, note_written


class Placing:
    """One restore of rows into one ring: `check`, perhaps `prove`, `fill`, and `finish` at the end.

    Args:
        ring: takes the rows.
        source: has them.
        first: the oldest row that is wanted.
    """

    def __init__(self, ring: Ring, source: RowSource, first: int) -> None:
        self._ring, self._source = ring, source
        self._stored = source.position
        assert self._stored.total is not None
        self._stop = self._stored.total
        self._capacity = ring.buffer.position().capacity
        count = min(self._stop - first, self._capacity)
        self.left_out_count = self._stop - first - count
        self._first = self._stop - count
        self.position = _position(self._stored, self._capacity, count)

    @property
    def row_count(self) -> int:
        return self.position.held

    @property
    def is_resized(self) -> bool:
        return self._capacity != self._stored.capacity

    @property
    def change(self) -> str:
        """Stored and live capacity, for people."""
        return f"{self._stored.capacity} → {self._capacity}"

    @property
    def moves(self) -> list[tuple[int, int, int]]:
        """(stored slot, new slot, rows) of the rows that get another slot; empty when all keep theirs."""
        first_stored, first_new = self._stored.slot(self._first), self._slot(self._first)
        found, row = [], self._first
        while row < self._stop and first_stored != first_new:
            before, after = self._stored.slot(row), self._slot(row)
            count = min(self._stop - row, self._stored.capacity - before, self._capacity - after)
            found.append((before, after, count))
            row += count
        return found

    def differences(self) -> list[Difference]:
        """What keeps the rows from fitting; nothing is touched before these are looked at."""
        name, found = self._source.name, []
        if self.is_resized and self._ring.on_capacity == "refuse":
            rule = "Ring(on_capacity='newest')"
            found.append(Difference(f"{name}/capacity", str(self._stored.capacity), str(self._capacity), rule))
        is_stuck = self._ring.buffer.mutable() and not hasattr(self._ring.buffer, "rearrange")
        if is_stuck and (self.moves or self.is_resized or self.row_count < self._stored.held):
            what = "a mutable part by slot, with rows left out, in other slots, or in a ring of another capacity"
            found.append(Difference(f"{name}/mutable", "all rows in a ring of the same capacity", what))
        live = self._ring.columns()
        for column in [*self._source.columns, *(key for key in live if key not in self._source.columns)]:
            expected, got = self._source.columns.get(column), live.get(column)
            if expected != got:
                found.append(Difference(f"{name}/columns/{column}", _shown(expected), _shown(got)))
        if not hasattr(self._ring.buffer, "append"):
            for column, rows in self._ring.buffer.columns().items():
                if not _can_be_assigned(rows):
                    path = f"{name}/columns/{column}"
                    found.append(Difference(path, "rows that can be written", "a read-only column"))
        return found

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            MismatchError: all differences; nothing was touched.
        """
        differences = self.differences()
        if differences:
            raise mismatch(differences)

    def prove(self) -> None:
        """Read and hash every row that is wanted, keeping nothing."""
        self._source.prove(self._first, self._stop)

    def fill(self) -> None:
        """Put every row into its slot.

        Raises:
            CorruptionError, IncompleteError: some slots may hold new rows by then.
            MismatchError: the buffer takes no rows.
        """
        self._ring.forget()
        if hasattr(self._ring.buffer, "append"):
            self._append()
            return
        columns = self._ring.buffer.columns()
        wanted: list[Wanted] = []
        staged: list[tuple[int, int, str]] = []
        for start, stop in self._runs():
            slot = self._slot(start)
            memory = {}
            for name in self._source.columns:
                direct = None
                if is_array_or_tensor(columns[name]):  # else a slice may be a copy
                    direct = direct_memory(columns[name][slot : slot + stop - start], self._source.columns[name].kind)
                if direct is None:
                    staged.append((start, stop, name))
                else:
                    memory[name] = direct
            wanted.append(Wanted(start, stop, memory))
        self._source.read(wanted)
        note_written([columns[name] for name, each in self._source.columns.items() if each.kind == "torch"])
        for start, stop, name in staged:
            self._copy(start, stop, name, columns[name])

    def finish(self) -> None:
        """Let the buffer stand at its new position."""
        self._ring.stand_at(self.position, self._stop, self._source.segments, self._source.address)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """The rows in runs of neighbouring slots."""
        wrap = self._stop - self.position.head  # the row in slot 0
        cuts = [self._first, *([wrap] if self._first < wrap < self._stop else []), self._stop]
        yield from ((start, stop) for start, stop in itertools.pairwise(cuts) if start < stop)

    def _slot(self, row: int) -> int:
        return (self.position.head - (self._stop - row)) % self._capacity

    def _copy(self, start: int, stop: int, name: str, column: Any) -> None:
        """Rows of a column that cannot be read into directly."""
        described = {name: self._source.columns[name]}
        step = piece_row_count(described)
        for at in range(start, stop, step):
            upto = min(stop, at + step)
            memory, arrays = allocate(list(described.items()), upto - at)
            self._source.read([Wanted(at, upto, memory)])
            slot = self._slot(at)
            column[slot : slot + upto - at] = arrays()[name]

    def _append(self) -> None:
        """Give the rows to a buffer that takes them in order."""
        buffer: Any = self._ring.buffer
        described = dict(self._source.columns)
        step = piece_row_count(described)
        buffer.append(None)
        for at in range(self._first, self._stop, step):
            upto = min(self._stop, at + step)
            memory, arrays = allocate(list(described.items()), upto - at)
            self._source.read([Wanted(at, upto, memory)])
            buffer.append(arrays())


def _position(stored: Position, capacity: int, count: int) -> Position:
    """Where the live ring will stand, as its buffer counts: row numbers of the store where these fit its slots."""
    assert stored.total is not None
    is_same = count == capacity == stored.capacity
    head = stored.head if is_same else count % capacity
    if stored.total % capacity == head and (count == capacity or stored.total == count):
        return Position(capacity, head, count, stored.total)
    return Position(capacity, head, count, count + (head - count) % capacity)


def _can_be_assigned(column: Any) -> bool:
    return hasattr(column, "__setitem__") and bool(getattr(getattr(column, "flags", None), "writeable", True))


def _shown(column: Any) -> str:
    return "nothing of this name" if column is None else f"{column.kind} {column.dtype}{list(column.shape)} a row"


def refuse_kind(name: str, expected: str, found: str) -> MismatchError:
    """The error for a ring on one side only."""
    return MismatchError(
        f"component {name!r}: expected {expected}, found {found}. Rings are restored into a casckpt.replay.Ring.",
        differences=[(name, expected, found)],
    )
