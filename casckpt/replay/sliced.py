"""A ring in a buffer of one's own that has a length and slices, oldest row first, and nothing else that is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sized
from typing import Any

from casckpt.errors import InvalidInputError
from casckpt.replay.arguments import expect, whole
from casckpt.replay.contract import Position
from casckpt.state import _numpy


class Sliced:
    """Rows by age: `buffer[0]` is the oldest, and `buffer[a:b]` gives the rows between as arrays.

    Rows are read in slices of at most a segment (16 MiB), so that the buffer may be larger than memory.

    Args:
        buffer: has `len()` and slices. A slice is an array, or a mapping of column name to array; it must hold at
            least one row when the ring is made, so that dtypes and shapes are known.
        capacity: the most rows that it holds.
        load: called at a restore, first with None to clear the buffer, then with mappings of column name to array,
            oldest rows first. None: the buffer can be committed and not restored.
        total: says how many rows were ever appended. None: not counted, and `trust="counter"` is not possible; a
            buffer that is full then gives no sign of how far its rows moved, and commits may store all of them.

    Raises:
        InvalidInputError: no row yet, or slices that are no arrays.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        capacity: int,
        load: Callable[[Mapping[str, Any] | None], object] | None = None,
        total: Callable[[], int] | None = None,
    ) -> None:
        expect(buffer, Sized, "buffer", "an object with len() and slices")
        capacity = whole(capacity, "capacity", least=1)
        for name, act in (("load", load), ("total", total)):
            expect(act, Callable | None, name, "something to call")
        if len(buffer) == 0:
            raise InvalidInputError("an empty buffer does not tell its columns: add a row before the ring is made")
        self._buffer, self._capacity, self._load, self._count_rows = buffer, capacity, load, total
        first = _as_columns(buffer[0:1])
        for name, rows in first.items():
            if not hasattr(rows, "dtype") or len(rows) != 1:
                raise InvalidInputError(f"column {name!r}: buffer[0:1] gives a {type(rows).__name__}, not one row")
        self._columns = {name: _Column(self, name, rows) for name, rows in first.items()}
        self._lock = threading.Lock()
        self._read: tuple[int, int, Mapping[str, Any]] = (0, 0, {})

    def position(self) -> Position:
        self._read = (0, 0, {})  # whoever asks for the place will read rows as they are from now on
        count = len(self._buffer)
        total = None if self._count_rows is None else self._count_rows()
        return Position(self._capacity, count % self._capacity, count, total)

    def columns(self) -> Mapping[str, Any]:
        return self._columns

    def mutable(self) -> Any:
        return {}

    def place(self, position: Position) -> None:
        """Nothing to be told: the rows came through `append`."""

    def rows(self, name: str, start: int, stop: int) -> Any:
        """Rows of one column; a slice of the buffer serves all of its columns."""
        with self._lock:  # several threads hash and encode; a buffer of somebody's own may not like that
            if self._read[:2] != (start, stop):
                self._read = (start, stop, _as_columns(self._buffer[start:stop]))
            return self._read[2][name]

    def append(self, rows: Mapping[str, Any] | None) -> None:
        """Give restored rows to the buffer; None clears it.

        Raises:
            InvalidInputError: it was made without `load`.
        """
        if self._load is None:
            raise InvalidInputError("this buffer was wrapped without load=, so that nothing can be restored into it")
        self._load(rows)


class _Column:
    """One column of a sliced buffer, by slot: slots are counted from the oldest row."""

    def __init__(self, owner: Sliced, name: str, first: Any) -> None:
        self._owner, self._name = owner, name
        self.dtype = _numpy.as_array(first).dtype
        self.shape = (owner._capacity, *first.shape[1:])

    def __getitem__(self, rows: slice) -> Any:
        return self._owner.rows(self._name, rows.start, rows.stop)


def _as_columns(rows: Any) -> Mapping[str, Any]:
    return rows if isinstance(rows, Mapping) else {"rows": rows}
