"""What a ring is to casckpt: slots, a position, columns, and what else its buffer keeps.

Rows are numbered from 0 in the order in which they were written, for ever; a ring holds the newest `count` of them, row
after row in its `capacity` slots. Numbers are what is stored: which slot a row lay in only matters when it is read from
a live buffer or put back into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from casckpt.errors import InvalidInputError
from casckpt.replay.arguments import expect, whole
from casckpt.replay.segments import Range

if TYPE_CHECKING:
    from casckpt.replay.mapped import Map


class Position(NamedTuple):
    """Where a ring stands.

    Attributes:
        capacity: slots.
        head: the slot that is written next.
        held: rows held; the newest lies in the slot before `head`, the others before it, around the end.
        total: rows ever written. None where the buffer has no counter.
    """

    capacity: int
    head: int
    held: int
    total: int | None

    @property
    def tail(self) -> int:
        """The slot of the oldest row."""
        return (self.head - self.held) % self.capacity

    def slot(self, row: int) -> int:
        """The slot of a row that is held."""
        assert self.total is not None
        return (self.head - (self.total - row)) % self.capacity


def check_position(position: Position) -> Position:
    """A position as a buffer gave it, as plain integers.

    Raises:
        InvalidInputError: it is no position, or its numbers contradict each other.
    """
    expect(position, Position, "position()", "a casckpt.replay.Position")
    total = None if position.total is None else whole(position.total, "position().total")
    capacity, head, held = (whole(getattr(position, name), f"position().{name}") for name in Position._fields[:3])
    found = Position(capacity, head, held, total)
    if found.capacity < 1 or not 0 <= found.head < found.capacity or not 0 <= found.held <= found.capacity:
        raise InvalidInputError(f"a ring at {found}: head and held must lie in its capacity", position=found)
    if total is not None and total < found.held:
        raise InvalidInputError(f"a ring at {found}: fewer rows written than held", position=found)
    return found


@runtime_checkable
class Buffer(Protocol):
    """A live ring buffer. `Arrays` and `Sliced` are two; write your own for anything else.

    Rows that were written are not changed any more, unless their column is left to `mutable`; `Ring(trust=...)` says
    whether that is believed.

    Two more methods are used where they are there: `append(rows)`, which a restore gives mappings of column to array,
    oldest rows first, after None to clear the buffer, instead of assigning slots; and `rearrange(moves)`, given (old
    slot, new slot, rows) where rows get other slots than they had, for what `mutable` has by slot. A number
    `replaced_count` that grew since the last commit says that columns are other objects now: then every row is read.
    """

    def position(self) -> Position:
        """Where it stands now. Read once per capture, before the rows, and once after."""

    def columns(self) -> Mapping[str, Any]:
        """Name → rows by slot: an array or tensor of shape (capacity, …), or what has its shape and dtype and slices.

        Rows may be asked for in slices `column[a:b]`, and are assigned so by a restore.
        """

    def mutable(self) -> Any:
        """What is not append-only, as a plain tree of live objects: stored whole by every commit. `{}` for nothing."""

    def place(self, position: Position) -> None:
        """Stand at `position`, whose rows are in their slots by now. `position.total` is at least its held."""


class Column(NamedTuple):
    """One column: "numpy" or "torch", dtype as the store names it, shape of one row, bytes of one row."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    row_size: int


class Wanted(NamedTuple):
    """Rows [start, stop), and for each wanted column the memory that takes them."""

    start: int
    stop: int
    memory: Mapping[str, memoryview]


class RowSource(Protocol):
    """Where a view's rows come from: a store."""

    name: str
    position: Position
    columns: Mapping[str, Column]
    segments: Sequence[Range]
    address: bytes

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill all memory. Each chunk that is needed is decoded once."""

    def prove(self, start: int, stop: int) -> None:
        """Read and hash everything that rows [start, stop) lie in, keeping nothing."""

    def map(self, start: int, stop: int, names: Sequence[str]) -> dict[str, tuple[Map, memoryview]]:
        """Of columns of rows that lie in one segment, those that can be mapped, with the memory of these rows."""

    def first_step_within(self, age_s: float) -> int:
        """The first step that was committed at most `age_s` seconds before the ring's own snapshot was."""
