"""What a ring believes ends in time: columns that become others, rows that move while they are read, takes that nobody
commits, restores that stop half way, buffers that do not do what they were told."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import casckpt
from casckpt.errors import (
    ConcurrentMutationError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    StoreWarning,
    UnsupportedStateError,
)
from casckpt.replay import Arrays, Ring, Sliced
from tests.unit.rings import PlainRing, assert_rows
from tests.unit.stores import open_store

TRUSTS = ("digest", "counter")
Commit = Callable[[Any, int, dict[str, Any]], Any]
COMMITS: dict[str, Commit] = {
    "now": lambda store, step, state: store.commit(step, state),
    "in the background": lambda store, step, state: store.commit_async(step, state).result(),
}
EVERY_COMMIT = pytest.mark.parametrize("commit", COMMITS.values(), ids=COMMITS)

# --- columns that become others ---

WORDS = np.arange(400, dtype=np.int32).reshape(100, 4)
FORMS: dict[str, dict[str, Any]] = {
    "one more": {"a": WORDS, "b": WORDS + 1},
    "another name": {"c": WORDS},
    "another dtype of the same bytes": {"a": WORDS.view(np.uint32)},
    "another shape of the same bytes": {"a": WORDS.reshape(100, 2, 2)},
    "a tensor of the same bytes": {"a": torch.from_numpy(WORDS)},
    "strided": {"a": np.repeat(WORDS, 2, axis=1)[:, ::2]},
}


class Changing(Arrays):
    """Whose columns may become others, as those of a buffer that learns of a column with a later row."""

    def become(self, columns: dict[str, Any]) -> None:
        self._columns = columns


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new_row_count", [0, 30, 100])
@pytest.mark.parametrize("trust", TRUSTS)
def test_columns_that_became_others_are_stored_as_they_are(
    store_path: Path, form: str, new_row_count: int, trust: str
) -> None:
    place = {"total": 100}
    buffer = Changing({"a": WORDS}, place, total="total")
    ring = Ring(buffer, trust=trust)
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        buffer.become(FORMS[form])
        place["total"] += new_row_count
        store.commit(2, {"replay": ring})
        rows = np.arange(new_row_count, 100 + new_row_count) % 100
        found = store.restore(2)["replay"].last(100)
        assert_rows(found, {name: np.asarray(column)[rows] for name, column in FORMS[form].items()})
        assert [type(each) for each in found.values()] == [type(each) for each in FORMS[form].values()]
        assert_rows(store.restore(1)["replay"].last(100), {"a": WORDS})


@pytest.mark.parametrize("commit", COMMITS.values(), ids=COMMITS)
@pytest.mark.parametrize("trust", TRUSTS)
def test_ring_that_grew_into_other_arrays_is_stored_as_it_is(store_path: Path, trust: str, commit: Commit) -> None:
    buffer = PlainRing(100)
    ring = buffer.ring(trust=trust)
    with open_store(store_path) as store:
        buffer.add(80)
        commit(store, 1, {"replay": ring})
        for name, column in buffer.columns().items():
            setattr(buffer, name, np.concatenate([column, np.zeros_like(column)]))
        buffer.capacity = 200
        buffer.add(70)
        commit(store, 2, {"replay": ring})
        assert store.restore(2)["replay"].capacity == 200
        assert_rows(store.restore(2)["replay"].rows(0, 150), buffer.expected(0, 150))
        assert_rows(store.restore(1)["replay"].rows(0, 80), buffer.expected(0, 80))
        buffer.obs = buffer.obs.copy()  # the same form; and old rows that the counter would not tell of
        buffer.obs[3] = 1
        buffer.add(1)
        commit(store, 3, {"replay": ring})
        assert (store.restore(3)["replay"].rows(3, 4)["obs"] == 1).all()
        store.resume_into({"replay": ring}, 2)
        assert_rows({name: column[:150] for name, column in buffer.columns().items()}, buffer.expected(0, 150))


def test_column_beside_the_rows_that_is_given_anew_is_stored_as_it_is(store_path: Path) -> None:
    buffer = PlainRing(10)
    ring = buffer.ring(trust="counter", mutable=("done",))
    buffer.add(10)
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        buffer.done = ~buffer.done
        store.commit(2, {"replay": ring})
        assert (store.restore(2)["replay"].mutable["done"] == buffer.done).all()
        assert (store.restore(1)["replay"].mutable["done"] == ~buffer.done).all()
        buffer.done = np.zeros(9, np.bool_)
        with pytest.raises(InvalidInputError, match="one row per slot each"):
            store.commit(3, {"replay": ring})


def test_columns_that_are_strided_are_stored_and_restored(store_path: Path) -> None:
    def layouts() -> dict[str, Any]:
        packed, wide = np.zeros(30, [("a", "i2"), ("b", "f8", 3)]), np.zeros((30, 10))
        turned = {"rows": wide[::-1].copy()[::-1], "inner": np.zeros((30, 3, 4)).transpose(0, 2, 1)}
        return {
            "left": wide[:, :4],
            "right": wide[:, 3:],
            "f": packed["a"],
            "g": packed["b"],
            **turned,
            "F": turned["inner"].T.copy().T,
        }

    live, other = layouts(), layouts()
    for column in live.values():
        column[...] = np.random.default_rng(0).integers(0, 99, column.shape)
    with open_store(store_path) as store:
        for step in (1, 2):
            store.commit(step, {"replay": Ring(Arrays(live, {"total": 30}, total="total"))})
        store.restore_into({"replay": Ring(Arrays(other, {"total": 0}, total="total"))})
        view = store.restore()["replay"]
        for name, column in live.items():
            np.testing.assert_array_equal(view.column(name), column)
            np.testing.assert_array_equal(other[name], column)


def test_column_that_became_one_of_objects_is_refused_and_the_ring_goes_on(store_path: Path) -> None:
    place = {"total": 100}
    buffer = Changing({"a": WORDS}, place, total="total")
    ring = Ring(buffer, trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        buffer.become({"a": WORDS, "b": np.array([None] * 100)})
        with pytest.raises(UnsupportedStateError, match="b"):
            store.commit(2, {"replay": ring})
        buffer.become({"a": WORDS})
        place["total"] += 3
        store.commit(3, {"replay": ring})
        assert_rows(store.restore(3)["replay"].last(100), {"a": np.roll(WORDS, -3, axis=0)})


# --- rows that move while they are read ---


class Shifting:
    """Rows oldest first, as a deque has them. At the n-th read, before it answers, others come and the oldest go."""

    def __init__(self, rows: int, *, capacity: int) -> None:
        self.capacity, self.total = capacity, 0
        self.rows: list[int] = []
        self.reads, self.at, self.grows_by = 0, 0, 0
        self.grow(rows)

    def grow(self, count: int) -> None:
        self.rows = [*self.rows, *range(self.total, self.total + count)][-self.capacity :]
        self.total += count

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: slice) -> Any:
        self.reads += 1
        if self.reads == self.at:
            self.grow(self.grows_by)
        return np.array(self.rows[at], np.int64)[:, None] + np.arange(600)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("trust", "is_counted"), [("digest", False), ("digest", True), ("counter", True)], ids=["place", "digest", "count"]
)
@pytest.mark.parametrize("start", [60, 95, 100])
@pytest.mark.parametrize("grows_by", [1, 7, 150])
def test_rows_that_move_up_while_they_are_read_are_read_again(
    store_path: Path, trust: str, is_counted: bool, start: int, grows_by: int
) -> None:
    """A full buffer of slices moves all of its rows when one comes. Each row of a commit follows the row before it."""
    for at in itertools.count(1):
        buffer = Shifting(start, capacity=100)
        total = (lambda buffer=buffer: buffer.total) if is_counted else None
        ring = Ring(Sliced(buffer, capacity=100, total=total), trust=trust)
        with open_store(store_path / str(at)) as store:
            store.commit(1, {"replay": ring})
            buffer.grow(20)
            buffer.reads, buffer.at, buffer.grows_by = 0, at, grows_by
            store.commit(2, {"replay": ring})
            view = store.restore(2)["replay"]
            found = view.last(100)["rows"][:, 0]
            if is_counted:
                assert found.tolist() == list(range(view.first, view.total))
            assert (np.diff(found) == 1).all()
            assert found[-1] in (start + 19, start + 19 + grows_by)
        if buffer.reads < at:
            break
    assert at > 2


def test_rows_that_never_stop_moving_are_refused(store_path: Path) -> None:
    class Restless(Shifting):
        def __getitem__(self, at: slice) -> Any:
            self.grow(1)
            return super().__getitem__(at)

    ring = Ring(Sliced(Restless(100, capacity=100), capacity=100))
    with open_store(store_path) as store, pytest.raises(ConcurrentMutationError, match="replay"):
        store.commit(1, {"replay": ring})


# --- takes that nobody commits ---


class Refusing(Arrays):
    """Whose place cannot be told at times."""

    error: BaseException | None = None

    def position(self) -> Any:
        if self.error is not None:
            raise self.error
        return super().position()


@pytest.mark.few(3)
@EVERY_COMMIT
@pytest.mark.parametrize("error", [RuntimeError("locked"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("is_first", [False, True])
def test_ring_beside_one_that_could_not_be_taken_is_committed_later(
    store_path: Path, commit: Commit, error: BaseException, trust: str, is_first: bool
) -> None:
    live, other = PlainRing(100, width=4096), PlainRing(50)
    refusing = Refusing(other.columns(), other, total="total")
    state = {"replay": live.ring(trust=trust), "second": Ring(refusing)}
    with open_store(store_path) as store:
        live.add(80)
        if not is_first:
            commit(store, 1, state)
        live.add(5)
        refusing.error = error
        for _ in range(2):
            with pytest.raises(type(error)):
                commit(store, 2, state)
        refusing.error = None
        live.add(10)
        snapshot = commit(store, 3, state)
        assert_rows(store.restore(3)["replay"].rows(0, 95), live.expected(0, 95))
        if not is_first:
            assert snapshot.new_bytes < 20 * 4200


# --- restores that stop half way, and other surprises ---


class Fragile:
    """Refuses what it is given, from a moment on."""

    refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise casckpt.InvalidInputError("no")


@pytest.mark.full
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("what", ["rows", "mutable"])
def test_after_a_restore_that_stopped_half_way_nothing_is_taken_for_known(
    store_path: Path, trust: str, what: str, recwarn: pytest.WarningsRecorder
) -> None:
    live, fragile = PlainRing(400, width=16_000), Fragile()
    live.add(400)
    buffer = Arrays(live.columns(), live, total="total", mutable={"fragile": fragile})
    with open_store(store_path) as store:
        for step in (1, 2):
            store.commit(step, {"replay": Ring(buffer)})
            live.obs[7] ^= 255 * (step == 1)  # a row that the samples of a counter do not know
        ring = Ring(buffer, trust=trust)
        store.resume_into({"replay": ring}, 2)
        last = live.log[-1][0].tobytes()
        (pack,) = [each for each in store_path.glob("packs/*/*") if last in each.read_bytes()]
        whole = pack.read_bytes()
        if what == "rows":
            pack.write_bytes(whole.replace(last, bytes(len(last))))
        fragile.refuses = what == "mutable"
        with pytest.raises(IncompleteError, match="stopped half way"):
            store.restore_into({"replay": ring}, 1, atomic=False)
        pack.write_bytes(whole)
        store.commit(3, {"replay": ring})
        assert_rows(store.restore(3)["replay"].rows(0, 400), live.columns())
    assert not recwarn.list


def test_column_that_cannot_be_written_is_told_before_anything_is_touched(store_path: Path) -> None:
    live, other = PlainRing(50), PlainRing(50)
    live.add(30)
    other.done.flags.writeable = False
    ring = other.ring()
    with open_store(store_path) as store:
        store.commit(1, {"replay": live.ring()})
        for restore in (
            lambda: store.restore_into({"replay": ring}),
            lambda: store.restore()["replay"].copy_into(ring),
        ):
            with pytest.raises(MismatchError, match="replay/columns/done: expected rows that can be written"):
                restore()
            assert not other.obs.any() and other.total == 0


def test_buffer_that_appends_where_it_should_replace_is_told(store_path: Path) -> None:
    rows = list(range(30))
    grown = np.array(rows)

    class Growing:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, at: slice) -> Any:
            return np.array(rows[at])

    def load(part: Any) -> None:
        rows.extend(part["rows"].tolist() if part is not None else [])

    with open_store(store_path) as store:
        ring = Ring(Sliced(Growing(), capacity=100, load=load))
        store.commit(1, {"replay": ring})
        with pytest.raises(IncompleteError, match="holds 60 of 100 now"):
            store.restore_into({"replay": ring})
        assert rows == [*grown, *grown]


def test_counter_of_a_buffer_that_counts_on_after_a_restore_is_followed(store_path: Path) -> None:
    """A buffer of slices is not told where it stands: its own count goes on, wherever it was."""
    buffer = Shifting(130, capacity=100)
    ring = Ring(Sliced(buffer, capacity=100, total=lambda: buffer.total), trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        other = Shifting(257, capacity=100)

        def load(part: Any) -> None:
            other.rows = [] if part is None else [*other.rows, *part["rows"][:, 0].tolist()]

        target = Ring(Sliced(other, capacity=100, total=lambda: other.total, load=load), trust="counter")
        store.resume_into({"replay": target})
        other.rows = [*other.rows[3:], 130, 131, 132]
        other.total += 3
        assert store.commit(2, {"replay": target}).new_bytes < 10 * 4800
        view = store.restore(2)["replay"]
        assert (view.first, view.total) == (33, 133)
        assert view.column("rows")[:, 0].tolist() == list(range(33, 133))


def test_breach_that_is_raised_as_an_error_is_not_forgotten(store_path: Path) -> None:
    live = PlainRing(100)
    live.add(80)
    ring = live.ring(trust="counter")
    with open_store(store_path) as store:
        store.commit(1, {"replay": ring})
        live.obs[0] ^= 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(StoreWarning, match="changed in place"):
                store.commit(2, {"replay": ring})
        store.commit(3, {"replay": ring})
        np.testing.assert_array_equal(store.restore(3)["replay"].column("obs"), live.obs[:80])
