"""A ring in a store: it grows, changes, is cleared, committed, restored, collected, in any order; lists of numbers are
the model.

Every row has a number of its own, which its content follows from. What a snapshot must hold are the numbers that the
buffer held when it was committed, the priority of each, and the marks. Segments, groups, packs and epochs are so small
that a history has many of each.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import casckpt_gc
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from casckpt.errors import MismatchError
from casckpt.objects import epochs
from casckpt.replay import Arrays, Ring, Sliced, segments
from casckpt.testing.invariants import check_depths, index_counts
from tests.unit.stores import open_store

# What `lose_the_index` does is told. That a row was changed, which is told likewise, fails a history.
pytestmark = pytest.mark.filterwarnings("ignore:the index:casckpt.errors.StoreWarning")

WIDTH = 100
CAPACITIES = (1, 7, 40)
KINDS = ("count", "place", "slices", "counted slices")
BESIDE = ("nothing", "marks", "priorities")
COMPACTION = casckpt_gc.Compaction(is_thorough=True, needed_share_max=1.0, tiny_count_min=2)
PATCHES = ((segments, "SEGMENT_SIZE_MIN", 4096), (segments, "GROUP_SIZE", 2), (epochs, "ENTRIES_PER_EPOCH", 4))


class Held(NamedTuple):
    """What a snapshot must have: numbers of rows, oldest first, with their priorities; and the marks."""

    numbers: list[int]
    priorities: list[float]
    marks: list[int]


def content(numbers: Any) -> Any:
    """Rows of 800 bytes that follow from their numbers."""
    return np.asarray(numbers, np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.arange(WIDTH, dtype=np.uint64)


class Live:
    """A buffer and the numbers of its rows, oldest first."""

    def __init__(self, kind: str, beside: str, capacity: int) -> None:
        self.kind, self.beside, self.capacity = kind, beside, capacity
        self.x, self.n = np.zeros((capacity, WIDTH), np.uint64), np.zeros(capacity, np.int64)
        self.marks, self.p = np.zeros(3, np.int64), np.zeros(capacity)
        self.numbers: list[int] = []
        self.total, self.position, self.full = 0, 0, False

    def add(self, count: int, next_number: int) -> None:
        for number in range(next_number, next_number + count):
            self.put((self.position,), [number])
            self.numbers = [*self.numbers, number][-self.capacity :]
            self.total += 1
            self.full |= self.position == self.capacity - 1
            self.position = (self.position + 1) % self.capacity

    def put(self, slots: Any, numbers: list[int]) -> None:
        self.x[list(slots)], self.n[list(slots)], self.p[list(slots)] = content(numbers), numbers, 1.0

    def change(self, at: int, number: int) -> None:
        """Another row in the place of one that is there."""
        at %= len(self.numbers)
        self.numbers[at] = number
        self.put([(self.position - len(self.numbers) + at) % self.capacity], [number])

    def clear(self) -> None:
        self.numbers, self.position, self.full = [], 0, False
        if self.kind == "count":
            self.total = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: slice) -> Any:
        numbers = self.numbers[at]
        return {"x": content(numbers) if numbers else self.x[:0], "n": np.array(numbers, np.int64)}

    def load(self, rows: Any) -> None:
        self.numbers = [] if rows is None else [*self.numbers, *rows["n"].tolist()]
        self.total = len(self.numbers) if self.kind == "counted slices" else self.total

    def ring(self, trust: str, options: dict[str, Any]) -> Ring:
        if "slices" in self.kind:
            total = (lambda: self.total) if self.kind == "counted slices" else None
            return Ring(Sliced(self, capacity=self.capacity, load=self.load, total=total), trust=trust, **options)
        place: Any = {"total": "total"} if self.kind == "count" else {"position": "position", "full": "full"}
        columns = {"x": self.x, "n": self.n}
        if self.beside == "marks":
            place["mutable"] = {"marks": self.marks}
        if self.beside == "priorities":
            columns["p"], place["mutable"] = self.p, ["p"]
        return Ring(Arrays(columns, self, **place), trust=trust, **options)

    def stand(self) -> None:
        """Know what a restore put into the arrays, after a look whether it is whole."""
        if "slices" not in self.kind:
            by_place = self.capacity if self.full else self.position
            held = min(self.total, self.capacity) if self.kind == "count" else by_place
            head = self.total % self.capacity if self.kind == "count" else self.position
            slots = [(head - held + at) % self.capacity for at in range(held)]
            np.testing.assert_array_equal(self.x[slots], content(self.n[slots]))
            self.numbers, self.position = [int(number) for number in self.n[slots]], head
        else:
            self.position = len(self.numbers) % self.capacity
        self.full = len(self.numbers) == self.capacity

    def priorities(self, p: Any, head: int, count: int) -> list[float]:
        """Those of the newest rows by slot, oldest first; none where there are no priorities."""
        slots = [(head - count + at) % self.capacity for at in range(count)]
        return [float(each) for each in p[slots]] if self.beside == "priorities" else []


class RingMachine(RuleBasedStateMachine):
    """Rules are what a training does with its ring."""

    @initialize(
        kind=st.sampled_from(KINDS),
        beside=st.sampled_from(BESIDE),
        capacity=st.sampled_from(CAPACITIES),
        is_believed=st.booleans(),
        keep_rows=st.sampled_from([None, None, 1, 15]),
        is_raw=st.booleans(),
    )
    def start(
        self, kind: str, beside: str, capacity: int, is_believed: bool, keep_rows: int | None, is_raw: bool
    ) -> None:
        self.patches = [mock.patch.object(*each) for each in PATCHES]
        for each in self.patches:
            each.start()
        self.folder = tempfile.mkdtemp()
        self.path = Path(self.folder) / "store"
        self.next = 1
        self.live = Live(kind, "nothing" if "slices" in kind else beside, capacity)
        if "slices" in kind:
            self.grow(1)
        self.trust = "counter" if is_believed and "count" in kind else "digest"
        self.options: dict[str, Any] = {"is_raw": is_raw, "on_capacity": "newest"}
        if keep_rows and self.live.beside != "marks":
            self.options["keep_rows"] = keep_rows
        self.ring = self.live.ring(self.trust, self.options)
        self.store = open_store(self.path, chunk_size=4096)
        self.expected: dict[str, Held] = {}
        self.pending: list[tuple[Any, Held]] = []
        self.stored: Held | None = None  # what the ring of the last commit had
        self.step = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                self.check_everything()
            finally:
                self.store.close()
                shutil.rmtree(self.folder)
                for each in self.patches:
                    each.stop()

    def settle(self) -> None:
        for handle, held in self.pending:
            self.expected[handle.result().id] = held
        self.pending.clear()

    def held(self) -> Held:
        numbers = self.live.numbers[-self.options.get("keep_rows", self.live.capacity) :]
        priorities = self.live.priorities(self.live.p, self.live.position, len(numbers))
        self.stored = Held(numbers, priorities, self.live.marks.tolist())
        return self.stored

    def state(self) -> dict[str, Any]:
        self.step += 1
        return {"replay": self.ring, "light": {"step": self.step}}

    def grow(self, count: int) -> None:
        self.live.add(count, self.next)
        self.next += count

    indexes = st.integers(0, 1 << 16)
    has_snapshots = precondition(lambda self: self.expected or self.pending)

    def pick(self, index: int) -> str:
        self.settle()
        return list(self.expected)[index % len(self.expected)]

    # --- the buffer ---

    @rule(share=st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0, 1.6]))
    def add(self, share: float) -> None:
        self.grow(max(1, int(share * self.live.capacity)))

    @precondition(lambda self: self.trust == "digest" and self.live.numbers)
    @rule(index=indexes)
    def change(self, index: int) -> None:
        self.live.change(index, self.next)
        self.next += 1

    @rule()
    def mark(self) -> None:
        self.live.marks += 1
        self.live.p += np.arange(self.live.capacity)

    @rule()
    def clear(self) -> None:
        self.live.clear()

    # --- commits ---

    @rule()
    def commit(self) -> None:
        self.settle()
        self.expected[self.store.commit(self.step + 1, self.state()).id] = self.held()

    @rule()
    def commit_in_the_background(self) -> None:
        self.pending.append((self.store.commit_async(self.step + 1, self.state()), self.held()))

    @precondition(lambda self: self.stored is not None)
    @rule(is_joined=st.booleans(), is_waited_for=st.booleans())
    def commit_light_and_perhaps_add_the_ring_later(self, is_joined: bool, is_waited_for: bool) -> None:
        """Before what joined the step before is there, where it is not waited for."""
        assert self.stored is not None
        if is_waited_for or not is_joined:
            self.settle()
        light = {"light": self.state()["light"]}
        handle = self.store.commit_async(self.step, light, inherit=["replay"])
        if is_waited_for:
            handle.result()
        if is_joined:
            self.pending.append((self.store.supersede_async(self.step, {"replay": self.ring}), self.held()))
        else:
            self.expected[handle.result().id] = self.stored

    @rule()
    def commit_that_fails(self) -> None:
        self.settle()
        with mock.patch.object(self.store._committer, "_publish", side_effect=OSError("no")), pytest.raises(OSError):
            self.store.commit(self.step + 1, self.state())

    # --- restores ---

    @has_snapshots
    @rule(index=indexes, moves=st.booleans(), is_new=st.booleans(), rows=st.sampled_from([None, None, 0, 1, 9]))
    def restore_into(self, index: int, moves: bool, is_new: bool, rows: int | None) -> None:
        wanted = self.pick(index)
        if is_new:
            self.forget()
        self.restore(wanted, self.live, self.ring, moves, rows)

    @has_snapshots
    @rule(index=indexes, moves=st.booleans(), capacity=st.sampled_from(CAPACITIES))
    def restore_into_another_capacity(self, index: int, moves: bool, capacity: int) -> None:
        wanted = self.pick(index)
        live = Live(self.live.kind, self.live.beside, capacity)
        live.add(1, self.next)
        self.restore(wanted, live, live.ring(self.trust, self.options), moves, None)

    def restore(self, wanted: str, live: Live, ring: Ring, moves: bool, rows: int | None) -> None:
        held, view = self.expected[wanted], self.store.restore(wanted, allow_mixed=True)["replay"]
        count = min(len(held.numbers), live.capacity, len(held.numbers) if rows is None else rows)
        is_resized = view.capacity != live.capacity
        is_refused = is_resized if live.beside == "priorities" else is_resized or count < len(held.numbers)
        before = list(live.numbers)
        act, more = (self.store.resume_into, {"leave": ["light"]}) if moves else (self.store.restore_into, {})
        if is_refused and live.beside != "nothing":
            with pytest.raises(MismatchError):
                act({"replay": ring.restoring(rows=rows)}, wanted, allow_mixed=True, **more)
            live.stand()
            assert live.numbers == before
            return
        act({"replay": ring.restoring(rows=rows)}, wanted, allow_mixed=True, **more)
        live.stand()
        assert live.numbers == held.numbers[len(held.numbers) - count :]
        if live.beside == "priorities":
            assert live.priorities(live.p, live.position, count) == held.priorities[len(held.numbers) - count :]
        if live.beside == "marks":
            assert live.marks.tolist() == held.marks
        self.live, self.ring = live, ring
        self.stored = held if moves else self.stored

    @has_snapshots
    @rule(index=indexes)
    def start_cold(self, index: int) -> None:
        self.store.restore_into({"replay": self.ring.cold()}, self.pick(index), allow_mixed=True)
        self.live.stand()
        assert self.live.numbers == []

    @has_snapshots
    @rule(index=indexes, at=indexes, count=st.integers(0, 50))
    def read(self, index: int, at: int, count: int) -> None:
        wanted = self.pick(index)
        numbers, priorities, marks = self.expected[wanted]
        view = self.store.restore(wanted, allow_mixed=True)["replay"]
        assert len(view) == len(numbers)
        assert view.last(count)["n"].tolist() == (numbers[-count:] if count else [])
        assert len(view.trimmed(rows=count)) == min(count, len(numbers))
        some = [at * each % len(numbers) for each in range(count)] if numbers else []
        taken = view.take([view.first + each for each in some])
        assert taken["n"].tolist() == [numbers[each] for each in some]
        if some:
            np.testing.assert_array_equal(taken["x"], content(taken["n"]))
        pieces = view.mapped(newest_first=True) if at % 2 else view.mapped()
        mapped = {piece.start + k: int(n) for piece in pieces for k, n in enumerate(piece.column("n"))}
        assert mapped == dict(enumerate(numbers, view.first))
        if self.live.beside == "marks":
            assert view.mutable["marks"].tolist() == marks
        if priorities and view.capacity == self.live.capacity:
            assert self.live.priorities(view.mutable["p"], view.head, len(view)) == priorities

    # --- the store ---

    @rule()
    def forget(self) -> None:
        if self.live.numbers or "slices" not in self.live.kind:
            self.ring = self.live.ring(self.trust, self.options)

    @rule(is_killed=st.booleans(), has_index=st.booleans())
    def reopen(self, is_killed: bool, has_index: bool) -> None:
        """After an end that nobody told the store of, its files are what they are."""
        self.settle()
        if is_killed:
            files = self.path.with_name(f"store-{self.step}")
            shutil.copytree(self.path, files, ignore=None if has_index else shutil.ignore_patterns("index"))
        self.store.close()
        if is_killed:
            shutil.rmtree(self.path)
            files.rename(self.path)
        self.store = open_store(self.path)
        at = self.store._committer.position.snapshot
        self.stored = self.expected.get(at.hex()) if at else None

    @rule()
    def lose_the_index(self) -> None:
        self.settle()
        shutil.rmtree(self.path / "index", ignore_errors=True)

    @has_snapshots
    @rule(indexes=st.lists(indexes, max_size=5), is_compacted=st.booleans())
    def retire_and_collect(self, indexes: list[int], is_compacted: bool) -> None:
        for wanted in {self.pick(index) for index in indexes}:
            if wanted != self.store._committer.position.snapshot.hex():
                self.store.retire(wanted)
                del self.expected[wanted]
        self.settle()
        casckpt_gc.collect(self.store, grace_s=0.0, **({"compaction": COMPACTION} if is_compacted else {}))

    @has_snapshots
    @rule()
    def check_everything(self) -> None:
        self.settle()
        for wanted, (numbers, *_) in self.expected.items():
            view = self.store.restore(wanted, allow_mixed=True)["replay"]
            rows = view.rows(view.first, view.total)
            assert rows["n"].tolist() == numbers
            np.testing.assert_array_equal(rows["x"], content(numbers) if numbers else self.live.x[:0])
        report = self.store.verify()
        assert report.ok, str(report)
        check_depths(self.store)
        before = index_counts(self.store)
        self.store._keeper.rebuild()
        assert index_counts(self.store) == before


class TestRing(RingMachine.TestCase):  # type: ignore[misc, name-defined]
    """Quick: few, short histories."""

    settings = settings(max_examples=5, stateful_step_count=15)


@pytest.mark.full
class TestRingLong(RingMachine.TestCase):  # type: ignore[misc, name-defined]
    """Longer histories."""

    settings = settings(max_examples=25, stateful_step_count=40)
