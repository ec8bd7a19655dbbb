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
from casckpt.errors import StorageError
from casckpt.index.tables import decode_pack_row, key_number, read_fill
from casckpt.storage.fs import typed_error
from casckpt.storage.process import System
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import READING, Operation
from tests.gc.collecting import check_steps, collect, commit, noise, tree
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
