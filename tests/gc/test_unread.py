"""What a medium refuses to give for a moment while an index catches up: nothing is decided without it, nothing stays.

Two handles with an index each, as on two machines: what one publishes the other must read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import casckpt_gc
import pytest
from casckpt_gc import Retention, Thinning

import casckpt
from casckpt.errors import CorruptionError, StorageError, StoreWarning
from casckpt.index.lifecycle import IndexHome
from casckpt.index.tables import TABLES, decode_pack_row, key_number, read_fill
from casckpt.objects.keeper import IndexKeeper
from casckpt.storage.fs import typed_error
from casckpt.storage.process import System
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import READING, Operation
from tests.gc.collecting import check_steps, collect, commit, noise, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # what is not seen yet is told so


class Refusing(UnsyncedFileSystem):
    """Once `is_armed`, refuses reads from the `at`-th on, `times` of them; of files whose path holds `part` alone."""

    def __init__(self, at: int = 1, times: int = 1, part: str = "", names: Collection[str] = ("open",)) -> None:
        super().__init__()
        self.at, self.times, self.part, self.count, self.is_armed = at, times, part, 0, False
        self.names = names
        self.refused: Operation | None = None

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if self.is_armed and operation.name in self.names and self.part in operation.path:
            self.count += 1
            if self.at <= self.count < self.at + self.times:
                self.refused = operation
                raise typed_error(OSError(errno.EIO, os.strerror(errno.EIO)), operation.name, operation.path)
        return super().perform(operation, act)


@contextmanager
def elsewhere(path: Path, disk: UnsyncedFileSystem | None = None, **options: Any) -> Iterator[Any]:
    """A handle whose index is not that of the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("casckpt.index.place.INDEX_NAME", "index-elsewhere")
        store = open_store(path, system=System(file_system=disk or UnsyncedFileSystem()), create=False, **options)
    with store:
        yield store


def entry(seq: int) -> str:
    return f"/{seq:020d}"


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_commit_that_cannot_read_a_condemnation_does_not_go_on_without_it(store_path: Path, times: int) -> None:
    """It has the content of step 1 again, whose packs are condemned and still there when the collector looked last."""
    with open_store(store_path) as store:
        commit(store, 1, 2)
    disk, refusals = Refusing(times=times), []
    with open_store(store_path) as store, elsewhere(store_path, disk) as learner:
        store.retire(1)
        assert learner.steps() == [2]
        collection = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)
        look_again = collection._look_again

        def look_and_let_commit(packs: Any) -> None:
            look_again(packs)
            disk.part, disk.is_armed = entry(store._keeper.last_condemned()), True
            try:
                learner.commit(3, tree(1))
            except StorageError as error:
                assert error.errno == errno.EIO and "Nothing was published" in str(error)
                assert learner.steps() == [2]  # reading goes on with what was seen
                refusals.append(error)
                disk.is_armed = False
                learner.commit(3, tree(1))

        collection._look_again = look_and_let_commit  # type: ignore[method-assign]
        collection.run()
    assert disk.refused is not None and len(refusals) == (times > 1)
    check_steps(store_path, {2: tree(2), 3: tree(1)})


def test_a_collector_that_cannot_read_a_commit_condemns_nothing(store_path: Path) -> None:
    """The commit wins the number that the condemnation wants, with the content of step 1 again."""
    with open_store(store_path) as store:
        commit(store, 1, 2)
    disk = Refusing(times=10**6)
    with open_store(store_path) as learner, elsewhere(store_path, disk) as store:
        store.retire(1)
        collection = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)
        verdict = collection._verdict

        def commit_first(*facts: Any) -> Any:
            found = verdict(*facts)
            if not disk.is_armed:
                disk.part, disk.is_armed = entry(learner.commit(3, tree(1)).seq), True
            return found

        collection._verdict = commit_first  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="Nothing was published"):
            collection.run()
        disk.is_armed = False
        collect(store)
    assert disk.refused is not None
    check_steps(store_path, {2: tree(2), 3: tree(1)})


def test_a_collector_that_cannot_read_an_entry_takes_nothing_out_of_the_trash(store_path: Path) -> None:
    """Above it another collector has condemned what lies there; who reads it still has seen less."""
    clock, disk = [0.0], Refusing(times=10**6)
    system = System(file_system=UnsyncedFileSystem(), monotonic_s=lambda: clock[0])
    trash = store_path / "trash"
    with open_store(store_path, system=system) as other, elsewhere(store_path, disk) as store:
        commit(other, 1, 2, 3)
        mine = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)  # nothing to do but to clear up
        other.retire(1)
        disk.part, disk.is_armed = entry(other._keeper.applied().seq), True
        theirs = casckpt_gc.Collection(casckpt_gc.plan(other), grace_s=1.0)
        while not trash.exists() or not any(trash.iterdir()):
            assert not theirs.advance()
            clock[0] += 2.0
        packs = sorted(trash.iterdir())
        with pytest.raises(StorageError, match="Nothing was published"):
            mine.run()
        assert sorted(trash.iterdir()) == packs
        disk.is_armed = False
        collect(store)
        assert not any(trash.iterdir())
    check_steps(store_path, trees([2, 3]))


def test_an_entry_that_is_found_damaged_at_opening_hides_no_other(store_path: Path) -> None:
    """One bad sector must not shut a store: what is refused while it is opened counts as lost, until it is given."""
    with open_store(store_path) as store:
        commit(store, 1)
    disk = Refusing(times=10**6, part=entry(2))
    with open_store(store_path) as store, elsewhere(store_path) as other:
        assert other.steps() == [1]
        commit(store, 2, 3)
    disk.is_armed = True
    with elsewhere(store_path, disk) as other:
        assert other.steps() == [1, 3]
        other.commit(4, tree(4))
        disk.is_armed = False
    with elsewhere(store_path) as other:
        assert other.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["gone", "damaged", "refused"])
def test_an_entry_that_was_taken_for_lost_stays_lost_until_it_is_back_at_an_opening(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """At no later opening the index is made anew for it, its number is not used again, and what is above stays."""
    with open_store(store_path) as store:
        commit(store, 1, 2, 3)
    (file,) = store_path.glob(f"timeline/*{entry(2)}")
    content, disk = file.read_bytes(), Refusing(times=10**6, part=entry(2))
    disk.is_armed = how == "refused"
    if how == "gone":
        file.unlink()
    elif how == "damaged":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(store_path / "index")
    made, rebuild = [], IndexKeeper.rebuild
    monkeypatch.setattr(IndexKeeper, "rebuild", lambda *of, **given: made.append(rebuild(*of, **given)))
    counts = []
    for step in (4, 5, 6):
        with open_store(store_path, system=System(file_system=disk)) as store:
            assert store.steps() == [1, 3, *range(4, step)]
            assert not store.verify().ok
            assert store.commit(step, tree(step)).seq == step
        counts.append(len(made))
    assert counts == [counts[0]] * 3
    with open_store(store_path, system=System(file_system=disk)) as opened:
        disk.is_armed = False
        file.write_bytes(content)
        assert opened.steps() == [1, 3, 4, 5, 6]  # as it was opened
        with open_store(store_path) as store:
            assert store.steps() == [1, 2, 3, 4, 5, 6]
    check_steps(store_path, trees(range(1, 7)))


# --- an index that another process made meanwhile ---


@contextmanager
def overtaken(keeper: Any, rows: dict[str, list[tuple[bytes, bytes]]]) -> Iterator[list[int]]:
    """When `keeper` first is about to make its index anew, another process publishes one with these rows."""
    home = keeper._home
    rebuild, overtaken_at = home.rebuild, []

    def publish_first(fill: Any) -> Any:
        if not overtaken_at:
            overtaken_at.append(home.generation)
            other = IndexHome(keeper._root, keeper._store_id, TABLES)
            other.root, other.generation = home.root, home.generation
            made = other.rebuild(lambda kv: put_rows(kv, rows))
            assert made is not None
            made.close()
        return rebuild(fill)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "rebuild", publish_first)
        yield overtaken_at


def put_rows(kv: Any, rows: dict[str, list[tuple[bytes, bytes]]]) -> None:
    with kv.write() as txn:
        for table, items in rows.items():
            txn.put_many(table, items)


def index_rows(store: Any) -> dict[str, list[tuple[bytes, bytes]]]:
    with store._keeper.kv.read() as txn:
        return {table: list(txn.scan(table)) for table in TABLES}


def test_an_entry_that_is_refused_at_opening_counts_as_lost_in_another_process_s_index_too(store_path: Path) -> None:
    """The other one began to make its index before that entry was there."""
    with open_store(store_path) as store, elsewhere(store_path):
        commit(store, 1)
        rows = index_rows(store)
        commit(store, 2, 3)
    disk = Refusing(times=10**6, part=entry(2))
    disk.is_armed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("casckpt.index.place.INDEX_NAME", "index-elsewhere")
        opening = IndexKeeper.open

        def open_overtaken(keeper: Any) -> None:
            with overtaken(keeper, rows) as seen:
                opening(keeper)
            assert seen

        patch.setattr(IndexKeeper, "open", open_overtaken)
        with open_store(store_path, system=System(file_system=disk), create=False) as other:
            assert other.steps() == [1, 3]
            assert other.commit(4, tree(4)).seq == 4


def test_what_came_after_another_process_s_index_is_seen_at_once(store_path: Path) -> None:
    """It was made because packs were gone that this handle had not heard of."""
    with open_store(store_path) as store, elsewhere(store_path) as other:
        commit(store, 1, 2, 3)
        assert other.steps() == [1, 2, 3]
        collect(store, Retention(latest=1))
        rows = index_rows(store)
        commit(store, 4)
        with overtaken(other._keeper, rows) as seen:
            assert other._keeper.catch_up() == store.snapshot(4).seq
        assert seen


def test_what_came_after_another_process_s_index_is_seen_at_once_in_place_of_a_damaged_one(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_path) as store, elsewhere(store_path) as other:
        commit(store, 1)
        rows = index_rows(store)
        commit(store, 2)
        apply_next = other._keeper._apply_next

        def damaged_once(*given: Any) -> int:
            monkeypatch.setattr(other._keeper, "_apply_next", apply_next)
            raise CorruptionError("a page is damaged", index_path="index")

        monkeypatch.setattr(other._keeper, "_apply_next", damaged_once)
        with overtaken(other._keeper, rows) as seen, pytest.warns(StoreWarning, match="was damaged and is rebuilt"):
            assert other._keeper.catch_up() == store.snapshot(2).seq
        assert seen


def test_number_that_is_known_to_be_taken_stays_so_in_another_process_s_index(store_path: Path) -> None:
    """The other one began to make its index when that entry was not there yet; now it is gone."""
    with open_store(store_path) as store, elsewhere(store_path) as other:
        commit(store, 1)
        rows = index_rows(store)
        commit(store, 2)
        assert other.steps() == [1, 2]
        (file,) = store_path.glob(f"timeline/*{entry(2)}")
        file.unlink()
        with overtaken(other._keeper, rows) as seen:
            other._keeper.rebuild(at_least=2)
        assert seen
        assert other._keeper.applied().gaps == [2]


def test_a_condemnation_that_is_gone_leaves_packs_where_they_are(store_path: Path) -> None:
    """Who commits does not see it, and may use them."""
    with open_store(store_path) as store:
        commit(store, 1, 2)
        store.retire(1)
        collection = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)
        look_again = collection._look_again

        def lose_and_look(packs: Any) -> None:
            (file,) = store_path.glob(f"timeline/*{entry(store._keeper.last_condemned())}")
            file.unlink()
            look_again(packs)

        collection._look_again = lose_and_look  # type: ignore[method-assign]
        before = set((store_path / "packs").rglob("*"))
        with pytest.raises(CorruptionError, match=r"stay where they are: timeline entry \d+: no such file.*verify"):
            collection.run()
        assert before <= set((store_path / "packs").rglob("*"))


# --- what an update of the index could not read ---


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store at two moments. In between is all that changes counts: commits, one of them with nodes, a superseded, a
    thinned, retired ones, one of which has a tag, packs that go, and the same content once more."""
    early, late = (tmp_path_factory.mktemp("moments") / name for name in ("early", "late"))
    with open_store(early) as store:
        commit(store, 1, 2, make=small)
    shutil.copytree(early, late, ignore=shutil.ignore_patterns("index"))
    with open_store(late, create=False, chunk_size=4096) as store:
        store.commit(3, {**small(3), "big": {"x": noise(9, 1024 * 1100)}})
        store.supersede_async(3, {"late": {"y": noise(10)}}).result()
        store.tag("good", 1)
        collect(store, Retention(latest=1), Thinning(["optimizer"], keep_latest=1))
        store.commit(4, small(2), drop=["big", "late"])
        store.retire(3)
    return early, late


def small(step: int) -> dict[str, Any]:
    return {"optimizer": {"m": noise(10 + step)}, "policy": {"w": noise(step)}}


def rows(store: Any) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Counts of objects, and live bytes of packs, as an index has them."""
    with store._keeper.kv.read() as txn:
        packs = [(decode_pack_row(row)[0], read_fill(txn, key_number(key))) for key, row in txn.scan("packs")]
    return index_counts(store), {pack_id: size for pack_id, size in packs if size}


def learn(moments: tuple[Path, Path], path: Path, disk: Refusing) -> tuple[Any, Any]:
    """What an index says that was made at the first moment and catches up at the second: at once, and when it has been
    opened again."""
    early, late = moments
    shutil.copytree(early, path, ignore=shutil.ignore_patterns("index"))
    with open_store(path, create=False, system=System(file_system=disk)) as store:
        assert store.steps() == [1, 2]
        shutil.copytree(late, path, ignore=shutil.ignore_patterns("index"), dirs_exist_ok=True)
        disk.is_armed = True
        with contextlib.suppress(casckpt.CasckptError):
            store.steps()
        disk.times = 0
        assert store.steps() == [1, 4]
        found = rows(store)
    with open_store(path, create=False) as store:
        again = rows(store)
    shutil.rmtree(path)
    return found, again


def sweep(moments: tuple[Path, Path], tmp_path: Path, stride: int) -> int:
    """A read fails once while an index learns: the 1st, the 1 + stride-th …; returns how many did."""
    shutil.rmtree(moments[1] / "index", ignore_errors=True)
    with open_store(moments[1]) as store:
        expected = rows(store)  # of an index made anew
    done, n = 0, 1
    while True:
        disk = Refusing(n, names=READING)
        found, again = learn(moments, tmp_path / str(n), disk)
        assert found == again == expected, f"read {n}: {disk.refused}"
        if disk.refused is None:
            return done
        done, n = done + 1, n + stride


def test_some_failed_reads_leave_no_wrong_count(moments: tuple[Path, Path], tmp_path: Path) -> None:
    assert sweep(moments, tmp_path, 7) > 3


@pytest.mark.full
def test_no_failed_read_leaves_a_wrong_count(moments: tuple[Path, Path], tmp_path: Path) -> None:
    assert sweep(moments, tmp_path, 1) > 30


def test_a_lost_entry_of_a_step_that_is_let_go_stops_nothing(store_path: Path) -> None:
    """Nobody knows any more what that step held; the others go on, in a handle that knew the step, too."""
    with open_store(store_path) as store:
        commit(store, 1, 2, make=small)
    with open_store(store_path) as store, elsewhere(store_path) as other:
        assert other.steps() == [1, 2]
        gone = store.retire(1)
        (file,) = store_path.glob(f"timeline/*{entry(gone.seq)}")
        file.unlink()
        assert other.steps() == [2]
        commit(other, 3, make=small)
        assert difference(small(3), other.restore()) is None
