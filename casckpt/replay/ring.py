"""`Ring`: a live replay buffer as a component of a state.

A commit *takes* a ring: it reads the position once, decides which rows it has to read, and describes them as segments.
Two rules keep a ring from being stale in silence:

* Rows that are not read are those that an earlier take of the same ring read, and that the snapshot which this commit
  continues has. Where either is not known (a new process, another branch, a save that failed) every row is read.
* `trust="counter"` reads only rows that are new by the buffer's own counter, because old ones are never changed. Some
  of them are looked at again each time; when one differs, a warning says so and every row is read.

A take is one instant: rows that a writer overwrites while they are read are noticed by the position afterwards. Rows
that come meanwhile belong to the next commit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from casckpt.digest import check16
from casckpt.errors import InvalidInputError, StoreWarning, UnsupportedStateError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.structure import Leaf
from casckpt.replay.arguments import Trim, checked_trim, expect, whole
from casckpt.replay.contract import Buffer, Column, Position, check_position
from casckpt.replay.segments import Range, cut, rows_per_segment
from casckpt.replay.view import allocate
from casckpt.state.capture import Captured, capture
from casckpt.state.inplace import direct_memory
from casckpt.state.walk import LazyArray

TRUSTS = ("digest", "counter")
CAPACITY_RULES = ("refuse", "newest")
EPISODE_RULES = ("continue", "truncate")
_SAMPLES_MAX = 256  # rows whose digests are kept as a tripwire
_LOOKS_PER_TAKE = 8  # of these are compared by each take: about 10 µs a column and row


class StoredRing(NamedTuple):
    """The ring that the next commit continues, as the store has it: its address, and its segments when asked."""

    address: bytes
    segments: Callable[[], Sequence[Range]]


class Given(NamedTuple):
    """Rows that a take gives to be stored: `rows`, of the stored segment `known` (all of it, or its end) if any."""

    rows: Range
    known: Range | None


@dataclass(eq=False)
class Take:
    """What one commit gets of a ring.

    Attributes:
        position: with rows numbered as the store numbers them.
        first: the first row that is kept.
        given: rows to be stored or compared, oldest first.
        segments: all segments of the ring after this commit, if what is compared proves equal.
        relies_on: the take whose snapshot must have the rows `relied`, which are not given; None: all are given.
        forms: of the columns.
        address: of the manifest, once the commit is published.
        edges: digests of the first and the last row given, of a buffer that does not count.
    """

    ring: Ring
    position: Position
    first: int
    given: list[Given]
    segments: list[Range]
    relies_on: Take | None
    forms: Mapping[str, Any]
    relied: tuple[int, int] = (0, 0)
    address: bytes | None = None
    has_failed: bool = False
    captured: dict[str, Captured] = field(default_factory=dict)
    edges: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row after the newest."""
        assert self.position.total is not None
        return self.position.total

    @property
    def is_pending(self) -> bool:
        return self.address is None and not self.has_failed

    def settle(self, address: bytes | None) -> None:
        """Learn how the commit ended: the ring's address, or None for a failure. Only the first answer counts."""
        if not self.is_pending:
            return
        self.address, self.has_failed = address, address is None
        if address is None and self.ring._last is self and self.relies_on is not None:
            self.ring._last = self.relies_on  # what is stored is still what it was
            self.ring.forget_samples(self.relies_on.stop)  # rows may have moved before they were looked at
        self.relies_on = None

    def has_moved(self) -> bool:
        """Whether a writer may have changed rows that were given, by the position now, or moved them to other slots."""
        if not self.given:
            return False
        before, now, first = self.position, self.ring.numbered_position(is_take=False), self.given[0].rows.start
        assert now.total is not None and before.total is not None
        if now == before:
            return self.ring.edges(before, self.edges) != self.edges
        is_overwritten = now.total <= before.total or first <= now.total - now.capacity
        is_elsewhere = now.capacity != before.capacity or now.slot(first) != before.slot(first)
        return is_overwritten or is_elsewhere or self.ring.edges(before, self.edges) != self.edges


class Ring:
    """A replay buffer that is committed and restored by rows.

    Args:
        buffer: an adapter: `Arrays`, `Sliced`, one of the integrations, or your own `Buffer`.
        trust: "digest" reads and hashes every row at every commit and stores what changed, whatever the buffer
            does. "counter" reads new rows only: for buffers that count their rows and never change old ones.
        keep_rows: store at most so many of the newest rows. The live buffer is not touched.
        keep_steps: store only rows that were first committed at most so many steps ago.
        episode_end: the column, or key of a mutable mapping, that is true in the last row of an episode.
        on_capacity: what a restore into another capacity does: "refuse", or "newest" (keep the newest that fit).
        is_raw: store rows as they are, each column of a segment in one piece, so that `RingView.mapped` can map them.
            Costs their plain size on disk, and a read of a single row that of its column in the segment.

    Raises:
        InvalidInputError: `trust="counter"` for a buffer without a counter; an argument out of range; a column whose
            rows do not lie one after the other; `episode_end` that is nowhere; rows to be left out of a buffer with a
            mutable part that cannot follow them.
        UnsupportedStateError: a column of a type that is not stored; `path` names it.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        trust: str = "digest",
        keep_rows: int | None = None,
        keep_steps: int | None = None,
        on_capacity: str = "refuse",
        episode_end: str | None = None,
        is_raw: bool = False,
    ) -> None:
        if not isinstance(buffer, Buffer):
            raise InvalidInputError(
                f"a {type(buffer).__name__} is no ring buffer that casckpt knows: wrap it in casckpt.replay.Arrays or "
                "Sliced, or give it position(), columns(), mutable() and place(). Of buffers of frameworks, "
                "casckpt.integrations.replay.rings makes rings."
            )
        _check_choice("trust", trust, TRUSTS)
        _check_choice("on_capacity", on_capacity, CAPACITY_RULES)
        for name, value in (("keep_rows", keep_rows), ("keep_steps", keep_steps)):
            if value is not None:
                whole(value, name, least=1)
        expect(is_raw, bool, "is_raw", "True or False")
        self.buffer = buffer
        self.trust, self.on_capacity = trust, on_capacity
        self.keep_rows, self.keep_steps = keep_rows, keep_steps
        self.episode_end = episode_end
        self.is_raw = is_raw
        self._offset = 0  # the store's number of a row minus the buffer's
        self._last: Take | None = None
        self._derived: Position | None = None  # the last position of a buffer without a counter, with rows counted
        self._samples: dict[int, bytes] = {}
        self._is_counted = check_position(buffer.position()).total is not None
        if trust == "counter" and not self._is_counted:
            raise InvalidInputError(
                "trust='counter' needs a buffer that counts the rows it was given; this one only knows its place. "
                "Use trust='digest', or count rows."
            )
        self._describe()
        if (keep_rows or keep_steps) and buffer.mutable() and not hasattr(buffer, "rearrange"):
            raise InvalidInputError(
                "keep_rows and keep_steps leave rows out, and this buffer keeps something by slot beside its rows "
                "(mutable) that cannot follow: nothing could be restored. Store all rows, or give it rearrange()."
            )
        if episode_end is not None and self._ends() is None:
            raise InvalidInputError(f"episode_end={episode_end!r}: no column, and no key of a mutable mapping")

    def _describe(self) -> None:
        expect(self.buffer.columns(), Mapping, "columns()", "a mapping of name to rows")
        columns = self.columns()
        if not columns:
            raise InvalidInputError("a ring without columns: there is nothing to store")
        rows = [_rows_of(column, 0, column.shape[0]) for column in self.buffer.columns().values()]
        for name, leaf in zip(columns, capture("columns", rows).structure.leaves, strict=True):
            _check_order(name, leaf)  # also of columns that share memory
        self._forms = self._forms_now()
        self.row_size = max(1, sum(column.row_size for column in columns.values()))

    def _forms_now(self) -> dict[str, Any]:
        """What would show that columns are not those of before: cheaper than describing them."""
        forms = {name: _form_of(column) for name, column in self.buffer.columns().items()}
        return {**forms, "": getattr(self.buffer, "replaced_count", 0)}

    def columns(self) -> dict[str, Column]:
        """What the buffer's columns are: kind, dtype, shape and bytes of a row."""
        return {name: _described_column(name, column) for name, column in self.buffer.columns().items()}

    def _ends(self) -> Any:
        """The column that is true in the last row of an episode; None where there is none."""
        name, mutable = str(self.episode_end), self.buffer.mutable()
        found = self.buffer.columns().get(name)
        return mutable.get(name) if found is None and isinstance(mutable, Mapping) else found

    def end_episode_at(self, slot: int, *, is_cut: bool) -> bool:
        """Whether an episode was open in the row of this slot; it is closed there when `is_cut`."""
        column = self._ends()
        flags = column[slot : slot + 1]
        if bool(flags.all()):
            return False
        if is_cut:
            flags[...] = True
            column[slot : slot + 1] = flags  # a slice may be a copy
            self.forget_newest()
        return True

    # --- position ---

    def numbered_position(self, *, is_take: bool = True) -> Position:
        """The position, with rows numbered as in the store. Without a counter, as few rows were written as can be."""
        found = check_position(self.buffer.position())
        if found.total is not None:
            return found._replace(total=found.total + self._offset)
        last = self._derived
        if last is None:
            counted = found._replace(total=found.held + self._offset)
        else:
            assert last.total is not None
            is_cleared = found.held < last.held or found.capacity != last.capacity
            written = found.held if is_cleared else (found.head - last.head) % found.capacity
            counted = found._replace(total=last.total + written)
        if is_take:
            self._derived = counted
        return counted

    # --- take ---

    def take(self, name: str, step: int, stored: StoredRing | None, previous: Mapping[str, Captured]) -> Take:
        """Describe what a commit at `step` has to store. Reads the position, and a few old rows.

        Args:
            name: of the component.
            stored: what the commit continues; None: nothing that could be relied on.
            previous: what an earlier take captured, by key.

        Cost: some 50 µs a segment that is given. The rows themselves are read when they are hashed or copied.

        Raises:
            UnsupportedStateError: a part of the mutable state cannot be stored.
        """
        if self._forms_now() != self._forms:
            self._describe()  # a column came, went, or is another one now
        position = self.numbered_position()
        assert position.total is not None
        last = self._last
        is_known = last is not None and (last.is_pending or (stored is not None and last.address == stored.address))
        is_known = is_known and last is not None and last.forms == self._forms
        known = list(last.segments if last is not None and is_known else stored.segments() if stored else ())
        if last is not None and is_known and position.total < last.stop:
            known, is_known = [], False  # cleared: other rows have these numbers now
        if not is_known:
            self._samples = {}
        first = self._first(position, known, step)
        known = [each for each in known if each.stop > first and each.stop <= position.total]
        is_whole = not is_known or self.trust == "digest" or not self._do_samples_agree(position, first)
        take = self._described(position, first, known, step, None if is_whole else last)
        take.captured = self._capture(name, take, previous)
        if take.given and not self._is_counted:
            take.edges = self.edges(position, (take.given[0].rows.start, take.given[-1].rows.stop - 1))
        self._sample(take)
        self._last = take
        return take

    def _first(self, position: Position, known: Sequence[Range], step: int) -> int:
        """The first row to keep."""
        assert position.total is not None
        first = position.total - position.held
        if self.keep_rows is not None:
            first = max(first, position.total - self.keep_rows)
        if self.keep_steps is not None:
            old = [each.stop for each in known if each.step is not None and each.step < step - self.keep_steps]
            first = max([first, *old])
        return first

    def _described(self, position: Position, first: int, known: list[Range], step: int, relies_on: Take | None) -> Take:
        total = position.total or 0
        wrap = total - position.head  # the row in slot 0
        row_max = rows_per_segment(self.row_size, position.capacity)
        start, stop = (known[0].start, known[-1].stop) if known else (first, first)
        before = [Given(each, None) for each in cut(first, start, row_max, wrap)]
        after = [Given(each, None) for each in cut(stop, total, row_max, wrap)]
        between: list[Given] = []
        if relies_on is None:
            for each in known:
                live = each._replace(start=max(first, each.start))
                if live.start < wrap < live.stop:  # stored by a ring of another capacity
                    between += [Given(piece, None) for piece in cut(*live[:2], row_max, wrap)]
                else:
                    between.append(Given(live, each))
        rows = [given.known or given.rows for given in (*before, *between, *after)]
        segments = rows if relies_on is None else [*(g.rows for g in before), *known, *(g.rows for g in after)]
        segments = [each if each.step is not None else each._replace(step=step) for each in segments]
        given = [*before, *between, *after]
        return Take(self, position, first, given, segments, relies_on, self._forms, (max(start, first), stop))

    def _capture(self, name: str, take: Take, previous: Mapping[str, Captured]) -> dict[str, Captured]:
        """The ring's own tree under `name`, and each segment under a name that no component can have."""
        columns = {key: _rows_of(column, 0, 0) for key, column in self.buffer.columns().items()}
        position = take.position
        tree = {
            "capacity": position.capacity,
            "head": position.head,
            "count": (position.total or 0) - take.first,
            "total": position.total,
            "columns": columns,
            "mutable": self.buffer.mutable(),
        }
        found = {name: capture(name, tree, previous=previous.get(name))}
        for number, given in enumerate(take.given):
            key = f"{name}/{number}"
            rows = self._slots(position.slot(given.rows.start), given.rows.row_count)
            found[key] = _Rows(capture(key, rows, previous=previous.get(key)), None if number else take)
        return found

    def _slots(self, slot: int, row_count: int) -> dict[str, Any]:
        columns = self.buffer.columns()
        return {name: _rows_of(column, slot, slot + row_count) for name, column in columns.items()}

    def forget_newest(self) -> None:
        """The newest row was changed: it is stored again with its segment."""
        last = self._last
        if last is not None and last.segments:
            last.segments.pop()
            self.forget_samples(last.stop - 1)

    # --- tripwire ---

    def forget_samples(self, stop: int) -> None:
        """Know rows below `stop` alone."""
        self._samples = {row: each for row, each in self._samples.items() if row < stop}

    def _digest(self, position: Position, row: int) -> bytes:
        parts = []
        for rows in self._slots(position.slot(row), 1).values():
            plain = direct_memory(rows, "torch" if _is_of(rows, "torch") else "numpy")
            if plain is None:  # elsewhere than on the CPU, strided, or read when asked
                blocks = capture("row", [rows]).blocks
                plain = memoryview(b"".join(blocks.view(at, 0, size) for at, (size, _) in enumerate(blocks)))
            parts.append(plain)
        return check16(b"".join(parts))

    def edges(self, position: Position, rows: Iterable[int]) -> dict[int, bytes]:
        """Digests of some rows, where they lay at `position`."""
        return {row: self._digest(position, row) for row in rows}

    def _sample(self, take: Take) -> None:
        """Remember digests of a few rows of each segment that was given."""
        if self.trust != "counter":
            return
        for given in take.given:
            for row in {given.rows.start, (given.rows.start + given.rows.stop) // 2}:
                self._samples[row] = self._digest(take.position, row)
        live = [row for row in self._samples if row >= take.first]
        self._samples = {row: self._samples[row] for row in live[:: 1 + len(live) // _SAMPLES_MAX]}

    def _do_samples_agree(self, position: Position, first: int) -> bool:
        """Compare some rows with what they were; those looked at longest ago come first."""
        looks = [row for row in self._samples if row >= first][:_LOOKS_PER_TAKE]
        for row in looks:
            expected = self._samples.pop(row)
            self._samples[row] = self._digest(position, row)
            if self._samples[row] == expected:
                continue
            self.forget()  # whatever comes of this take, a warning that is raised among it
            now = self.numbered_position(is_take=False)
            assert now.total is not None
            is_held = row > now.total - now.capacity  # else a writer overwrites it just now
            if is_held and now.slot(row) == position.slot(row):
                warnings.warn(
                    f"row {row} of a ring was changed in place, although trust='counter' says that old rows are not. "
                    "Every row is read for this commit. Leave the column that changes to `mutable`, or use "
                    "trust='digest'.",
                    StoreWarning,
                    stacklevel=6,
                )
            return False
        return True

    # --- restore ---

    def forget(self) -> None:
        """Believe nothing of the rows that are there: the next take reads all of them."""
        self._last, self._samples = None, {}

    def stand_at(self, position: Position, stored_total: int, segments: Sequence[Range], address: bytes) -> None:
        """Tell the buffer where it stands now that its rows are in their slots, and remember what they are.

        Args:
            position: as the buffer counts.
            stored_total: rows ever written, as the store counts.
            segments: of the stored ring.
            address: of its manifest.
        """
        self.buffer.place(position)
        found = check_position(self.buffer.position())
        if (found.capacity, found.held) != (position.capacity, position.held):
            raise InvalidInputError(
                f"a ring that was given {position.held} rows holds {found.held} of {found.capacity} now: what takes "
                "rows (place, append, load) must replace those that were there.",
                position=found,
            )
        self._offset = stored_total - (position if found.total is None else found).total  # type: ignore[operator]
        numbered = found._replace(total=stored_total)
        first = stored_total - position.held
        self._derived = numbered
        kept = [each for each in segments if each.stop > first]
        self._last = Take(self, numbered, first, [], kept, None, self._forms_now(), address=address)
        self._samples = {}
        if self.trust == "counter":
            rows = {max(each.start, first) for each in kept[-_SAMPLES_MAX:]}
            self._samples = {row: self._digest(numbered, row) for row in sorted(rows)}

    def probe(self) -> dict[str, Any]:
        """A live tree of the form that a commit stores beside the rows; its numbers mean nothing."""
        described = self.columns()
        empty = allocate(list(described.items()), 0)[1]()
        numbers = dict.fromkeys(("capacity", "head", "count", "total"), 0)
        return {**numbers, "columns": empty, "mutable": self.buffer.mutable()}

    def restoring(
        self,
        *,
        rows: int | None = None,
        since_step: int | None = None,
        max_age_s: float | None = None,
        open_episode: str = "continue",
    ) -> Restoring:
        """This ring as a target that takes less than everything.

        Args:
            rows: at most so many of the newest rows.
            since_step: only rows that were first committed at this step or later.
            max_age_s: only rows that were first committed at most so many seconds before the snapshot that is restored.
            open_episode: "continue", or "truncate": the newest row becomes the last of its episode, where
                `episode_end` is not true in it, so that no later row is taken for its successor.
        """
        if open_episode == "truncate" and self.episode_end is None:
            raise InvalidInputError("open_episode='truncate' needs Ring(episode_end=...): which column says so?")
        _check_choice("open_episode", open_episode, EPISODE_RULES)
        if open_episode == "truncate" and not hasattr(self._ends(), "__setitem__"):
            raise InvalidInputError(f"open_episode='truncate': slices of {self.episode_end!r} cannot be assigned")
        return Restoring(self, checked_trim(rows, since_step, max_age_s), open_episode)

    def cold(self, dependents: Mapping[str, Callable[[], object]] | None = None, *, reset: bool = False) -> Restoring:
        """This ring as a target that starts empty although rows are stored; the report says so.

        Args:
            dependents: what counts on rows being there (updates per sample, warm-up), with what resets each. The
                report names them.
            reset: call these after the restore.
        """
        expect(dependents, Mapping | None, "dependents", "a mapping of name to what resets it")
        for name, act in (dependents or {}).items():
            expect(act, Callable, f"dependents[{name!r}]", "something to call")
        expect(reset, bool, "reset", "True or False")
        return Restoring(self, is_cold=True, dependents=dict(dependents or {}), is_reset=reset)

    def __repr__(self) -> str:
        position = self.buffer.position()
        return f"<casckpt ring of {position.held}/{position.capacity} rows, trust={self.trust!r}>"


@dataclass(frozen=True)
class Restoring:
    """A ring as a target of a restore, and how much of it is wanted; see `Ring.restoring` and `Ring.cold`."""

    ring: Ring
    trim: Trim = field(default_factory=Trim)
    open_episode: str = "continue"
    is_cold: bool = False
    dependents: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    is_reset: bool = False

    def start_cold(self, stored_total: int, address: bytes) -> None:
        """Empty the buffer; rows that come are numbered after those that are stored."""
        ring = self.ring
        ring.forget()
        append = getattr(ring.buffer, "append", None)
        if append is not None:
            append(None)
        ring.stand_at(Position(ring.buffer.position().capacity, 0, 0, 0), stored_total, [], address)
        for act in self.dependents.values() if self.is_reset else ():
            act()

    def end_episode(self, position: Position) -> str:
        """Deal with an episode that is open after a restore; says what was done, empty when none is known to be."""
        if self.ring.episode_end is None or not position.held:
            return ""
        is_cut = self.open_episode == "truncate"
        if not self.ring.end_episode_at((position.head - 1) % position.capacity, is_cut=is_cut):
            return ""
        return "the open episode was cut" if is_cut else "the open episode continues"


class _Rows(Captured):
    """A captured segment: what moves it is a writer that overwrites its rows, not one that appends others.

    The first one of a take speaks for all of them, and has the take.
    """

    def __init__(self, captured: Captured, take: Take | None) -> None:
        parts = (captured.structure, captured.structure_bytes, captured.scalars, captured.blocks, captured.kept)
        super().__init__(captured.component, *parts, captured.plan)
        self._take = take

    def release(self) -> None:
        super().release()
        self._take = None

    def moved(self) -> list[str]:
        return [self.component] if self._take is not None and self._take.has_moved() else []


def _rows_of(column: Any, start: int, stop: int) -> Any:
    """Rows of a column: a view where they lie one after the other, else something that reads them so when asked."""
    if _is_of(column, "torch") or (_is_of(column, "numpy") and column.flags.c_contiguous):
        return column[start:stop]
    from casckpt.state import _numpy

    dtype, shape = _numpy.dtype_name(column.dtype), (stop - start, *column.shape[1:])
    row_size = prod(column.shape[1:]) * column.dtype.itemsize

    def read(low: int, high: int) -> memoryview:
        first, last = low // row_size, -(-high // row_size)
        rows = _numpy.bytes_of(column[start + first : start + last], column.dtype)
        return rows[low - first * row_size : high - first * row_size]

    return LazyArray(dtype, shape, read)


def _is_of(column: Any, library: str) -> bool:
    return type(column).__module__.partition(".")[0] == library


def is_array_or_tensor(column: Any) -> bool:
    """Whether slices of a column are views of it."""
    return _is_of(column, "numpy") or _is_of(column, "torch")


def _form_of(column: Any) -> tuple[Any, ...]:
    """Type, dtype, shape of a row and strides of a column."""
    strides = column.stride() if _is_of(column, "torch") else getattr(column, "strides", None)
    return type(column), getattr(column, "dtype", None), tuple(getattr(column, "shape", ()))[1:], strides


def _described_column(name: str, column: Any) -> Column:
    """A column as the store names it.

    Raises:
        InvalidInputError, UnsupportedStateError: see `Ring`.
    """
    is_plain = is_array_or_tensor(column) or hasattr(getattr(column, "dtype", None), "hasobject")
    if not isinstance(name, str) or not getattr(column, "shape", ()) or not is_plain:
        raise UnsupportedStateError(
            f"column {name!r}: a {type(column).__name__} is no array, tensor, or object with NumPy's dtype and slices. "
            "Give a plain view of it.",
            path=str(name),
        )
    leaf = capture(name, [_rows_of(column, 0, 1)]).structure.leaves[0]
    _check_order(name, leaf)
    return Column(leaf.kind, leaf.dtype, leaf.shape[1:], prod(leaf.shape) * itemsize_of(leaf.kind, leaf.dtype))


def _check_order(name: str, rows: Leaf) -> None:
    if rows.strides is not None:
        raise InvalidInputError(
            f"column {name!r}: its rows do not lie one after the other in memory. Make it contiguous, or wrap it.",
            column=name,
        )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidInputError(f"{name}={value!r}: expected one of {', '.join(choices)}")
