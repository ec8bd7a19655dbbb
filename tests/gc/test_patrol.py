"""A patrol of what is bad as a whole: packs without tables or content, and epochs of the timeline (G17)."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import casckpt_gc
import pytest
from casckpt_gc import Retention

from casckpt.errors import CorruptionError, StorageError
from casckpt.format.epoch import HEADER_SIZE, table_size
from casckpt.storage.fs import typed_error
from casckpt.storage.process import System
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.gc import collecting
from tests.gc.collecting import check_steps, collect, commit, files
from tests.gc.faults import Killed
from tests.gc.sealing import PER_EPOCH, make, short_epochs, tree, trees
from tests.gc.test_health import NO_LIMITS, packs_by_step, rot, whole
from tests.unit.stores import UnsyncedFileSystem, open_store

__all__ = ["whole"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # what is damaged is told so


@pytest.fixture(autouse=True, scope="module")
def epochs() -> Iterator[None]:
    with short_epochs():
        yield


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def without_table(data: bytes) -> bytes:
    """Nor with the last third of its records."""
    return data[: len(data) * 2 // 3] + bytes(len(data) - len(data) * 2 // 3)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


# --- packs ---


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", [zeroed, without_table, cut, None])
def test_records_that_cannot_even_be_found_are_named_and_stored_again(
    whole: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    pack = packs_by_step(whole)[3]
    file = whole / "packs" / pack[:2] / pack
    data = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(data))
    with open_store(whole) as store:
        found = casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert {step for _, _, step, _ in found.needed_by} == {3}
        assert {name for *_, name in found.needed_by} >= {"policy"}
        store.commit(7, collecting.tree(3))
        assert difference(collecting.tree(3), store.restore(7)) is None
    shutil.rmtree(whole / "index")
    with open_store(whole, create=False) as store:
        assert difference(collecting.tree(3), store.restore(7)) is None


def test_pack_that_arrives_after_a_patrol_missed_it_is_good(whole: Path) -> None:
    """As in a copy under way: what is short or missing now is not damage for ever."""
    pack = packs_by_step(whole)[6]
    file = whole / "packs" / pack[:2] / pack
    data = file.read_bytes()
    file.write_bytes(cut(data))
    with open_store(whole, create=False) as store:
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).findings
        file.write_bytes(data)
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).ok
        assert difference(collecting.tree(6), store.restore("latest")) is None


def test_bad_record_beside_a_good_one_is_found_and_nobody_suffers(whole: Path) -> None:
    """A second round finds the bad one again; steps stay whole, and nothing is stored a third time."""
    rot(whole, packs_by_step(whole)[3])
    with open_store(whole, create=False) as store:
        casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert store.commit(7, collecting.tree(3)).new_bytes > 0
        again = casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert len(again.findings) == 1 and again.needed_by == ()
        assert store.snapshot("latest").step == 7
        assert store.commit(8, collecting.tree(3)).new_bytes == 0


def test_damaged_snapshots_do_not_count_among_the_latest(whole: Path) -> None:
    """Of six steps 5 and 6 are damaged: three whole ones stay, not one."""
    for step in (5, 6):
        rot(whole, packs_by_step(whole)[step])
    with open_store(whole, create=False) as store:
        casckpt_gc.patrol(store, limits=NO_LIMITS)
        kept = [each.step for each in casckpt_gc.plan(store, Retention(latest=3)).kept]
        assert kept == [2, 3, 4, 5, 6]


class RefusingFileSystem(UnsyncedFileSystem):
    """Raises where one pack is opened."""

    def __init__(self, pack: str, error: BaseException) -> None:
        super().__init__()
        self.pack, self.error = pack, error

    def perform(self, operation: Operation, act: Callable[[], Any]) -> Any:
        if operation.name == "open" and operation.path.endswith(self.pack):
            raise self.error
        return super().perform(operation, act)


def test_patrol_that_is_killed_goes_on_where_it_was(whole: Path) -> None:
    names = sorted(packs_by_step(whole).values())
    now = itertools.count(0.0, 20.0)
    system = System(file_system=RefusingFileSystem(names[3], Killed()), monotonic_s=lambda: next(now))
    with open_store(whole, create=False, system=system) as store, pytest.raises(Killed):
        casckpt_gc.patrol(store, budget_s=1e9, limits=NO_LIMITS)
    with open_store(whole, create=False) as store:
        assert casckpt_gc.patrol(store, budget_bytes=1, limits=NO_LIMITS).checked_count == 1
    assert sorted(json.loads((whole / "patrol").read_text())) == names[:4]


def test_what_was_found_before_a_patrol_broke_off_is_noted(whole: Path) -> None:
    first, second, *_ = sorted(packs_by_step(whole).values())
    rot(whole, first)
    error = typed_error(OSError(errno.EACCES, "no"), "open", second)
    with open_store(whole, create=False, system=System(file_system=RefusingFileSystem(second, error))) as store:
        with pytest.raises(StorageError):
            casckpt_gc.patrol(store, limits=NO_LIMITS)
        with store._keeper.kv.read() as txn:
            assert txn.count("damage") == 1


# --- epochs ---


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """Ten steps, which all stay, of which entries 1 to 7 are sealed; beside it a copy from before: `unsealed`."""
    path = tmp_path / "store"
    make(path)
    shutil.copytree(path, tmp_path / "unsealed", ignore=shutil.ignore_patterns("index"))
    with open_store(path, create=False) as store:
        assert collect(store).sealed_count == 2 * PER_EPOCH
    shutil.copytree(path, tmp_path / "copy", ignore=shutil.ignore_patterns("index"))
    return path


def epoch(path: Path, number: int = 1) -> Path:
    return path / f"timeline/epochs/{number:018d}"


TABLE_STOP = HEADER_SIZE + table_size(PER_EPOCH)
REGIONS = {  # of an epoch: the byte that is bad, and the steps whose entries are lost with it
    "header": (10, set()),  # images are found one after the other
    "table": (HEADER_SIZE + 3, set()),
    "first image": (TABLE_STOP + 80, {4}),
    "trailer": (-1, set()),
}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.few(2)
@pytest.mark.parametrize("region", REGIONS)
def test_damaged_epoch_is_found_named_and_healed(sealed: Path, region: str) -> None:
    at, steps = REGIONS[region]
    flip(epoch(sealed), at)
    with open_store(sealed, create=False) as store:
        found = casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert [each.pack for each in found.findings] == ["epoch-1"] and not found.ok
        assert {step for _, _, step, _ in found.needed_by} == steps
        assert all(f"needed by main/main@{step}, all of it" in str(found) for step in steps)
        for step in {*range(1, 11)} - steps:
            assert difference(tree(step), store.restore(step)) is None
        if steps:
            with pytest.raises(CorruptionError):
                collect(store, Retention(latest=1))
        lost = casckpt_gc.repair(store)
        is_found = region == "trailer"  # it follows from the rest
        assert (lost.epochs, lost.lost_epochs) == ((1,) if is_found else (), () if is_found else (1,))
        assert {step for _, _, step, _ in lost.lost_by} == steps
        with open_store(sealed.with_name("copy"), read_only=True) as copy:
            assert casckpt_gc.repair(store, copy, execute=True).epochs == (1,)
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).ok
        collect(store, Retention(latest=2))
    check_steps(sealed, trees(9, 10))


def test_table_and_image_that_are_both_damaged_cost_what_lies_behind(sealed: Path) -> None:
    flip(epoch(sealed), 10)
    flip(epoch(sealed), len(epoch(sealed).read_bytes()) - 100)  # in the last image
    shutil.rmtree(sealed / "index")
    with open_store(sealed, create=False) as store:
        assert store.steps() == [1, 2, 3, 4, 5, 6, 8, 9, 10]
        assert any("timeline entry 7" in each.message for each in store.verify().problems)


def test_missing_epoch_is_found(sealed: Path) -> None:
    epoch(sealed).unlink()
    with open_store(sealed, create=False) as store:
        found = casckpt_gc.patrol(store, limits=NO_LIMITS)
        assert [each.pack for each in found.findings] == ["epoch-1"]
        assert {step for _, _, step, _ in found.needed_by} == {4, 5, 6, 7}


def test_epoch_that_is_sealed_and_not_made_yet_is_no_finding(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path)
    with open_store(path, create=False) as store:
        collection = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)
        collection._make_epochs = lambda: []  # type: ignore[method-assign]
        collection.run()
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).ok and not epoch(path).exists()
        assert casckpt_gc.repair(store).lost_epochs == ()


@pytest.mark.few(2)
@pytest.mark.parametrize("region", [*REGIONS, "missing"])
def test_epoch_is_made_anew_from_a_copy_that_was_never_sealed(sealed: Path, region: str) -> None:
    good = epoch(sealed).read_bytes()
    if region == "missing":
        epoch(sealed).unlink()
    else:
        flip(epoch(sealed), REGIONS[region][0])
    shutil.rmtree(sealed / "index")
    with open_store(sealed, create=False) as store, open_store(sealed.with_name("unsealed"), read_only=True) as copy:
        assert casckpt_gc.repair(store, copy).epochs == (1,)
        assert casckpt_gc.repair(store, copy, execute=True).lost_epochs == ()
    assert epoch(sealed).read_bytes() == good
    check_steps(sealed, trees(*range(1, 11)))


def test_epoch_is_made_anew_from_two_halves(sealed: Path) -> None:
    """Here the first image is bad, in the copy another one."""
    good = epoch(sealed).read_bytes()
    flip(epoch(sealed), TABLE_STOP + 80)
    flip(epoch(sealed.with_name("copy")), len(good) - 100)
    with open_store(sealed, create=False) as store, open_store(sealed.with_name("copy"), read_only=True) as copy:
        assert casckpt_gc.repair(store, copy, execute=True).epochs == (1,)
    assert epoch(sealed).read_bytes() == good
    assert files(sealed, "quarantine") == ["quarantine/epoch-1"]
    check_steps(sealed, trees(*range(1, 11)))


def test_epoch_that_is_damaged_while_its_entries_have_files_is_made_anew_from_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path)
    with open_store(path, create=False) as store:
        collection = casckpt_gc.Collection(casckpt_gc.plan(store), grace_s=0.0)
        collection._unlink_entries = lambda numbers: None  # type: ignore[method-assign]
        collection.run()
        flip(epoch(path), TABLE_STOP + 80)
        assert casckpt_gc.repair(store, execute=True).epochs == (1,)
        assert casckpt_gc.patrol(store, limits=NO_LIMITS).ok
        collect(store)
        commit(store, 11, make=tree)
    check_steps(path, trees(*range(1, 12)))


def test_epoch_of_another_history_heals_nothing(sealed: Path) -> None:
    """The copy is of the same store, and went on differently before its entries were sealed."""
    other = sealed.with_name("unsealed")
    for seq in range(5, 11):
        (other / f"timeline/{0:014d}/{seq:020d}").unlink()
    with open_store(other, create=False) as copy:
        copy.resume()
        commit(copy, *range(5, 11), make=lambda step: tree(step + 50))
    flip(epoch(sealed), 10)
    with open_store(sealed, create=False) as store, open_store(other, read_only=True) as copy:
        assert casckpt_gc.repair(store, copy, execute=True).lost_epochs == (1,)


def test_file_of_any_size_under_an_epochs_name_is_damage_and_takes_no_memory(sealed: Path) -> None:
    os.truncate(epoch(sealed), 1 << 40)
    with open_store(sealed, create=False) as store:
        assert [each.pack for each in casckpt_gc.patrol(store, limits=NO_LIMITS).findings] == ["epoch-1"]
        assert not store.verify(read_data=False).ok
