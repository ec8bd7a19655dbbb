"""A stored ring, looked at: rows by number, read when they are asked for.

Opening a view reads the ring's own small tree and the list of its segments. Rows come from the segments that hold them
and no others, the newest first where order is free. Everything handed out is new memory, verified like any restore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.format.structure import VERSION, Leaf, Structure
from casckpt.format.structure import Mapping as MappingNode
from casckpt.limits import SEGMENT_SIZE_MAX
from casckpt.replay.arguments import checked_trim, expect, listed, whole
from casckpt.replay.contract import Buffer, Column, RowSource, Wanted
from casckpt.replay.mapped import MappedRows
from casckpt.state.build import LeafMemory

if TYPE_CHECKING:
    from casckpt.replay.ring import Ring

MakeArrays = Callable[[], "dict[str, Any]"]


class RingView:
    """A ring of one snapshot. What `Store.restore` gives for a `Ring`.

    Reading fails with a typed error once the store is closed, or where it is damaged; other rows are still there.
    A view holds nothing back: where its step is retired, a collection takes what no other step has. Tag the step for as
    long as its rows are wanted.

    Attributes:
        mutable: what the ring's buffer had beside its rows.
        columns: name → kind, dtype, shape and bytes of a row.
    """

    def __init__(self, source: RowSource, mutable: Any, first: int) -> None:
        self._source = source
        self.mutable = mutable
        self.columns = source.columns
        self._first = first

    # --- where it stood ---

    @property
    def capacity(self) -> int:
        """Slots of the live ring."""
        return self._source.position.capacity

    @property
    def total(self) -> int:
        """Rows ever written: the number after the newest row's."""
        total = self._source.position.total
        assert total is not None
        return total

    @property
    def first(self) -> int:
        """The number of the oldest row."""
        return self._first

    @property
    def head(self) -> int:
        """The slot that would be written next."""
        return self._source.position.head

    @property
    def tail(self) -> int:
        """The slot of the oldest row."""
        return self._source.position._replace(held=len(self)).tail

    def __len__(self) -> int:
        return self.total - self._first

    # --- rows ---

    def rows(self, start: int, stop: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
        """Rows [start, stop) by number, in the order in which they were written.

        Args:
            start, stop: `first` ≤ start ≤ stop ≤ `total`.
            columns: names; None for all.

        Returns:
            Column → array or tensor of shape (stop - start, …).

        Cost: decoding the chunks that hold these rows of these columns, in parallel.

        Raises:
            InvalidInputError: rows that the ring does not hold.
            NotFoundError: no such column.
            CorruptionError, IncompleteError: the rows are damaged or not here.
        """
        start, stop = whole(start, "start"), whole(stop, "stop")
        if not self._first <= start <= stop <= self.total:
            raise InvalidInputError(
                f"rows {start} to {stop}: this ring holds {self._first} to {self.total}", start=start, stop=stop
            )
        memory, arrays = self._allocate(stop - start, columns)
        if stop > start:
            self._source.read([Wanted(start, stop, memory)])
        return arrays()

    def last(self, row_count: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
        """The newest rows; all of them where there are fewer than `row_count`."""
        return self.rows(max(self._first, self.total - whole(row_count, "row_count")), self.total, columns)

    def column(self, name: str) -> Any:
        """All rows of one column. Memory: that column."""
        return self.rows(self._first, self.total, [name])[name]

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> dict[str, Any]:
        """Single rows by number, in the order given: a sampled batch.

        Cost: each chunk that holds one of them is decoded once; a few are kept for the next call.

        Raises:
            As `rows`.
        """
        numbers = [whole(row, "rows") for row in listed(rows, "rows")]
        outside = [row for row in numbers if not self._first <= row < self.total]
        if outside:
            raise InvalidInputError(f"rows {outside[:5]}: this ring holds {self._first} to {self.total}", rows=outside)
        memory, arrays = self._allocate(len(numbers), columns)
        sizes = {name: self.columns[name].row_size for name in memory}
        self._source.read(
            [
                Wanted(
                    row,
                    row + 1,
                    {name: view[at * sizes[name] : (at + 1) * sizes[name]] for name, view in memory.items()},
                )
                for at, row in enumerate(numbers)
            ]
        )
        return arrays()

    def batches(
        self, columns: Sequence[str] | None = None, *, newest_first: bool = False
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """All rows in pieces of at most a segment, as (number of the first row, columns). Memory: one piece."""
        names, pieces = list(self._described(columns)), self._pieces()
        for start, stop in reversed(pieces) if newest_first else pieces:
            yield start, self.rows(start, stop, names)

    def mapped(self, columns: Sequence[str] | None = None, *, newest_first: bool = False) -> Iterator[MappedRows]:
        """All rows in pieces of at most a segment, as private maps of the store's files where they are stored raw.

        What cannot be mapped is read into new memory; `MappedRows.mapped` says which columns are maps.

        Cost: hashing the columns; no memory beside what is not mapped.

        Raises:
            As `batches`.
        """
        names, pieces = list(self._described(columns)), self._pieces()
        for start, stop in reversed(pieces) if newest_first else pieces:
            maps = self._source.map(start, stop, names)
            read = self.rows(start, stop, [name for name in names if name not in maps])
            yield MappedRows(start, stop, self.columns, maps, read)

    def _allocate(self, row_count: int, columns: Sequence[str] | None) -> tuple[dict[str, memoryview], MakeArrays]:
        """Memory for rows by column, and what makes arrays of it once it is filled."""
        return allocate(list(self._described(columns).items()), row_count)

    def _described(self, columns: Sequence[str] | None) -> dict[str, Column]:
        """The columns wanted, each once."""
        names = list(self.columns) if columns is None else listed(columns, "columns")
        unknown = [name for name in names if not isinstance(name, str) or name not in self.columns]
        if unknown:
            raise NotFoundError(f"no column {unknown}; there are {list(self.columns)}", columns=unknown)
        return {name: self.columns[name] for name in names}

    # --- less of it ---

    def trimmed(
        self, *, rows: int | None = None, since_step: int | None = None, max_age_s: float | None = None
    ) -> RingView:
        """The same ring without its older rows.

        Args:
            rows: at most so many.
            since_step: only rows that were first committed at this step or later.
            max_age_s: only rows that were first committed at most so many seconds before this snapshot, by the
                writers' clocks.

        Raises:
            InvalidInputError: a negative number, or none.
        """
        first, (rows, since_step, max_age_s) = self._first, checked_trim(rows, since_step, max_age_s)
        if rows is not None:
            first = max(first, self.total - rows)
        if max_age_s is not None:
            since_step = max(self._source.first_step_within(max_age_s), since_step or 0)
        if since_step is not None:
            old = [each.stop for each in self._source.segments if each.step is not None and each.step < since_step]
            first = max([first, *old])
        return RingView(self._source, self.mutable, first)

    def copy_into(self, target: Ring | Buffer) -> int:
        """Put the rows into a live ring's slots, as a restore does; returns how many. Its mutable part is not touched.

        Args:
            target: a `Ring`, or the adapter of a buffer.

        Raises:
            InvalidInputError: neither.
            MismatchError: columns differ, or the capacity, unless the ring takes the newest rows that fit.
        """
        from casckpt.replay.placing import Placing
        from casckpt.replay.ring import Ring

        ring = target if isinstance(target, Ring) else Ring(target)
        placing = Placing(ring, self._source, self._first)
        placing.check()
        placing.fill()
        placing.finish()
        return placing.row_count

    # --- Arrow ---

    def to_arrow(self, columns: Sequence[str] | None = None, *, form: str = "table") -> Any:
        """The rows as Arrow data, one record batch for each segment.

        Args:
            columns: names; None for all.
            form: "table"; "reader", for one pass that holds a segment at a time; or "dataset", which Arrow, DuckDB and
                Polars scan as often as they like: each segment is a fragment, read when a scan comes to it, with all
                columns of the dataset, so name those that you need. Arrow reads a few fragments ahead.

        Returns:
            A `pyarrow.Table`, `pyarrow.RecordBatchReader` or `pyarrow.dataset.Dataset`. Shapes and dtypes that Arrow
            has not are in the schema's metadata. A dataset lives as long as the store is open.

        Raises:
            InvalidInputError: another form.
            NotFoundError: no such column.
            As `rows`, where and when rows are read.
        """
        if form not in ("table", "reader", "dataset"):
            raise InvalidInputError(f"form={form!r}: expected table, reader or dataset")
        if form == "dataset":
            return self._arrow_dataset(columns)
        reader = self._arrow_reader(columns)
        return reader if form == "reader" else reader.read_all()

    def write(self, path: str, file_format: str, columns: Sequence[str] | None = None) -> int:
        """Write the rows as a new file, "arrow" (IPC) or "parquet", synced; returns how many. Memory: one segment.

        Raises:
            FileExistsError: there is such a file.
            InvalidInputError: another format.
        """
        from casckpt.replay import _arrow

        expect(path, str | os.PathLike, "path", "the path of a file")
        if file_format not in _arrow.FORMATS:
            raise InvalidInputError(f"file_format={file_format!r}: expected {' or '.join(_arrow.FORMATS)}")
        return _arrow.write(path, self._arrow_reader(columns), file_format)

    def _arrow_reader(self, columns: Sequence[str] | None) -> Any:
        from casckpt.replay import _arrow

        described = self._described(columns)
        batches = (self._raw_batch(start, stop, list(described)) for start, stop in self._pieces())
        return _arrow.reader(described, batches, self._facts())

    def _arrow_dataset(self, columns: Sequence[str] | None) -> Any:
        from casckpt.replay import _arrow

        described = self._described(columns)
        stops = dict(self._pieces())
        return _arrow.dataset(
            described, list(stops), lambda start: self._raw_batch(start, stops[start], list(described)), self._facts()
        )

    def _facts(self) -> dict[str, int]:
        numbers = {"first_row": self._first, "total": self.total, "capacity": self.capacity}
        return {**numbers, "head": self.head, "tail": self.tail}

    def _raw_batch(self, start: int, stop: int, names: Sequence[str]) -> tuple[int, dict[str, memoryview]]:
        memory, _ = self._allocate(stop - start, names)
        self._source.read([Wanted(start, stop, memory)])
        return stop - start, memory

    def segments(self) -> list[tuple[int, int, int]]:
        """(first row, rows, step that stored them) of each segment that rows of this view lie in."""
        return [
            (each.start, each.row_count, each.step or 0) for each in self._source.segments if each.stop > self._first
        ]

    def _pieces(self) -> list[tuple[int, int]]:
        """The rows cut where segments end."""
        return [
            (max(each.start, self._first), min(each.stop, self.total))
            for each in self._source.segments
            if each.stop > self._first and each.start < self.total
        ]

    def __repr__(self) -> str:
        return f"<ring {self._source.name!r}: rows {self._first} to {self.total} of capacity {self.capacity}>"


def allocate(columns: Sequence[tuple[str, Column]], row_count: int) -> tuple[dict[str, memoryview], MakeArrays]:
    """Fresh memory for rows, by column, and a function that gives it as arrays and tensors.

    Memory: the rows; of big columns pages that are touched when they are filled.
    """
    leaves: list[Leaf] = []
    blocks: list[tuple[int, int]] = []
    for _, column in columns:
        size = row_count * column.row_size
        leaves.append(Leaf(column.kind, len(blocks) if size else -1, 0, column.dtype, (row_count, *column.shape)))  # type: ignore[arg-type]
        blocks += [(size, 1)] if size else []
    names = [name for name, _ in columns]
    structure = Structure(VERSION, MappingNode("dict", list(names), list(range(len(names)))), leaves, blocks)
    held = LeafMemory(structure, range(len(leaves)))
    memory = {name: held.blocks[leaf.block] for name, leaf in zip(names, leaves, strict=True) if leaf.block >= 0}
    return memory, lambda: {name: held.leaf(at) for at, name in enumerate(names)}


def piece_row_count(columns: Mapping[str, Column]) -> int:
    """Rows that are staged at once where they cannot be read into their place."""
    return max(1, SEGMENT_SIZE_MAX // max(1, sum(each.row_size for each in columns.values())))
