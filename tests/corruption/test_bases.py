"""Damage in a training's chains of differences and predictions: what needs it, what is next, what heals it.

Which steps a damaged record costs is computed from the files before (`anatomy`), through bases. Whatever else happens:
what restores is exact, "latest" goes back to the newest step that is whole, and a commit that brings the lost bytes
again stores them by themselves, after which all that was built on them restores.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from casckpt.errors import CorruptionError, IncompleteError, NotFoundError, StorageError
from casckpt.ids import ObjectId
from casckpt.storage.process import System
from casckpt.testing.anatomy import CONFIG, Anatomy, Region, dissect
from casckpt.testing.invariants import check_depths
from casckpt.testing.trees import difference
from casckpt.testing.workload import LEARNER, tree
from casckpt.testing.wrapping import Operation
from tests.unit.stores import UnsyncedFileSystem, open_store

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # damage that is found is reported so

STEPS = range(1, 7)
QUICK_STRIDE = 11


@dataclass(frozen=True)
class Chain:
    """A training's store, without its index, and its anatomy."""

    path: str
    anatomy: Anatomy

    def step_of(self, snapshot_id: ObjectId) -> int:
        return self.anatomy.commits[snapshot_id][1].step

    def lost(self, objects: set[ObjectId], *, as_bases: bool = True) -> dict[int, set[str]]:
        """Components by step that cannot be restored without these objects."""
        found = self.anatomy.damage(objects, as_bases=as_bases)
        return {self.step_of(key): names - {CONFIG} for key, names in found.items() if names - {CONFIG}}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    path = str(tmp_path_factory.mktemp("chain") / "store")
    with open_store(path, run=LEARNER) as store:
        for step in STEPS:
            store.commit(step, tree(LEARNER, step))
    shutil.rmtree(f"{path}/index")
    anatomy = dissect(path)
    depths = [len(forms[0]) for forms in anatomy.bases.values() if forms[0]]
    assert depths.count(1) >= 5, "differences"
    assert depths.count(3) >= 6, "predictions"
    return Chain(path, anatomy)


def _payloads(chain: Chain) -> list[Region]:
    """Payloads in packs whose objects are what a component consists of or is decoded from."""
    payloads = [each for each in chain.anatomy.regions if each.path.startswith("packs") and "payload" in each.name]
    payloads = [each for each in payloads if not each.name.endswith("check")]
    return [each for each in payloads if each.object_id and chain.lost({each.object_id})]


def _copy(chain: Chain, folder: Path, *, has_index: bool) -> str:
    path = str(folder / "store")
    shutil.copytree(chain.path, path)
    if has_index:
        open_store(path, run=LEARNER).close()
    return path


def _restorable(store: Any) -> Iterator[int]:
    """Steps that restore, each exactly; the others say which step and component is bad."""
    for step in STEPS:
        try:
            found = store.restore(step)
        except (CorruptionError, IncompleteError) as error:
            assert f"step {step}" in str(error)
            assert any(repr(name) in str(error) for name in tree(LEARNER, step)), error
            continue
        assert difference(tree(LEARNER, step), found) is None
        yield step


def _reported(store: Any) -> dict[int, set[str]]:
    named: dict[int, set[str]] = {}
    for problem in store.verify(read_data=True).problems:
        for _, _, step, component, _ in problem.snapshots:
            named.setdefault(step, set()).add(component)
    return {step: names - {CONFIG} for step, names in named.items() if names - {CONFIG}}


def _check_latest(store: Any, expected: int | None) -> None:
    if expected is None:
        with pytest.raises((NotFoundError, CorruptionError, IncompleteError)):
            store.snapshot("latest")
    else:
        assert store.snapshot("latest").step == expected
        assert difference(tree(LEARNER, expected), store.restore("latest")) is None


def _check_flipped(chain: Chain, region: Region, path: str) -> None:
    assert region.object_id is not None
    with open(f"{path}/{region.path}", "r+b") as file:
        file.seek(region.offset + region.size // 2)
        byte = file.read(1)[0]
        file.seek(region.offset + region.size // 2)
        file.write(bytes([byte ^ 0x40]))
    may, certain = chain.lost({region.object_id}), chain.lost({region.object_id}, as_bases=False)
    with open_store(path, run=LEARNER) as store:
        failed = set(STEPS) - set(_restorable(store))
        assert certain.keys() <= failed <= may.keys()
        reported = _reported(store)
        assert reported.keys() == failed
        assert all(names <= may[step] for step, names in reported.items())
        assert all(names <= reported[step] for step, names in certain.items())
        _check_latest(store, max(set(STEPS) - may.keys(), default=None))
        _check_heals(chain, store, {region.object_id}, min(certain))


def _check_heals(chain: Chain, store: Any, lost: set[ObjectId], step: int) -> None:
    """A commit of the state that consists of the lost objects stores them by themselves, and everything is whole."""
    before = set(Path(store.path).glob("packs/*/*"))
    store.commit(100, tree(LEARNER, step))
    assert set(_restorable(store)) == set(STEPS)
    assert difference(tree(LEARNER, step), store.restore(100)) is None
    check_depths(store)
    assert not _reported(store)
    new = [place for each in lost for place in _places(store, each)]
    again = [place for place in new if place.is_inline or _pack(store, place) not in {each.name for each in before}]
    assert len(again) == len(lost), "each is stored once more"
    assert not any(place.bases for place in again), "by itself"
    # What follows may be built on it again.
    following = tree(LEARNER, step + 1)
    store.commit(101, following)
    assert difference(following, store.restore(101)) is None
    check_depths(store)


def _places(store: Any, object_id: ObjectId) -> Any:
    return store._keeper.reader.locate([object_id])[0]


def _pack(store: Any, place: Any) -> str:
    return bytes(store._keeper.reader.pack_id(place.pack_no)).hex()


def _check_flips(chain: Chain, tmp_path: Path, stride: int) -> None:
    for number, region in enumerate(_payloads(chain)[::stride]):
        path = _copy(chain, tmp_path / str(number), has_index=number % 2 == 0)
        try:
            _check_flipped(chain, region, path)
        except Exception as error:
            raise AssertionError(f"{region.name}: {error!r}") from error


@pytest.mark.full
def test_some_flipped_records_cost_what_is_built_on_them_until_they_come_again(chain: Chain, tmp_path: Path) -> None:
    _check_flips(chain, tmp_path, QUICK_STRIDE)


@pytest.mark.full
def test_every_flipped_record_costs_what_is_built_on_it_until_it_comes_again(chain: Chain, tmp_path: Path) -> None:
    _check_flips(chain, tmp_path, 1)


# --- packs ---

LOSSES: dict[str, Callable[[str], object]] = {
    "deleted": os.unlink,
    "cut": lambda path: os.truncate(path, os.stat(path).st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
}


def _packs(chain: Chain) -> list[str]:
    """In the order of their steps."""
    needed = {path: len(chain.lost(_only_in(chain, path))) for path in {each.path for each in _payloads(chain)}}
    return sorted(needed, key=lambda path: -needed[path])


def _only_in(chain: Chain, path: str) -> set[ObjectId]:
    return {each for each, paths in chain.anatomy.records.items() if set(paths) == {path}}


@pytest.mark.few(4)
@pytest.mark.parametrize("number", range(len(STEPS)))
@pytest.mark.parametrize("has_index", [True, False], ids=["index kept", "index deleted"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_pack_costs_what_is_built_on_it_until_its_content_comes_again(
    chain: Chain, tmp_path: Path, number: int, has_index: bool, loss: str
) -> None:
    pack = _packs(chain)[number]
    lost = _only_in(chain, pack)
    may = chain.lost(lost)
    path = _copy(chain, tmp_path, has_index=has_index)
    LOSSES[loss](f"{path}/{pack}")
    with open_store(path, run=LEARNER) as store:
        failed = set(STEPS) - set(_restorable(store))
        assert failed == may.keys() if loss == "deleted" else failed <= may.keys()
        _check_latest(store, max(set(STEPS) - may.keys(), default=None))
        assert _reported(store).keys() == failed
        whole = {each for each in lost if chain.anatomy.bases[each]}
        store.commit(100, tree(LEARNER, min(may)))
        assert set(_restorable(store)) == set(STEPS)
        check_depths(store)
        for object_id in whole:
            assert _places(store, object_id), "stored again"
    shutil.rmtree(f"{path}/index")
    with open_store(path, run=LEARNER) as store:
        assert set(_restorable(store)) == set(STEPS)
        check_depths(store)


def test_pack_that_comes_back_is_as_if_it_had_never_been_away(chain: Chain, tmp_path: Path) -> None:
    path = _copy(chain, tmp_path, has_index=False)
    pack = _packs(chain)[1]
    os.rename(f"{path}/{pack}", f"{tmp_path}/away")
    with open_store(path, run=LEARNER) as store:
        store.commit(100, tree(LEARNER, 2))
        store.commit(101, tree(LEARNER, 3))
    os.rename(f"{tmp_path}/away", f"{path}/{pack}")
    with open_store(path, run=LEARNER) as store:
        assert set(_restorable(store)) == set(STEPS)
        assert not _reported(store)
        check_depths(store)


class _Refusing(UnsyncedFileSystem):
    """A medium that does not give one file's bytes."""

    refused = ""

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name == "read" and self.refused and operation.path.endswith(self.refused):
            raise StorageError(f"{operation.path}: input/output error", path=operation.path, errno=errno.EIO)
        return super().perform(operation, act)


def test_medium_that_refuses_one_pack_is_told_and_hides_nothing(chain: Chain, tmp_path: Path) -> None:
    path = _copy(chain, tmp_path, has_index=True)
    pack = _packs(chain)[2]
    may = chain.lost(_only_in(chain, pack))
    refusing = _Refusing()
    with open_store(path, run=LEARNER, system=System(file_system=refusing)) as store:
        refusing.refused = pack
        for step in STEPS:
            if step in may:
                with pytest.raises(StorageError, match="input/output"):
                    store.restore(step)
            else:
                assert difference(tree(LEARNER, step), store.restore(step)) is None
        report = store.verify(read_data=True)
        named = {user[2] for problem in report.problems for user in problem.snapshots}
        assert named == may.keys(), report
        refusing.refused = ""
        assert set(_restorable(store)) == set(STEPS)


@pytest.mark.full
def test_state_that_goes_back_and_forth_after_damage_is_never_built_on_what_is_built_on_it(
    chain: Chain, tmp_path: Path
) -> None:
    """A, B, A, B …: the first A is damaged; the second one must not be a difference to B, which is one to A."""
    path = _copy(chain, tmp_path, has_index=True)
    first = max((each for each in _payloads(chain) if each.path == _packs(chain)[0]), key=lambda each: each.size)
    with open(f"{path}/{first.path}", "r+b") as file:
        file.seek(first.offset + first.size // 2)
        file.write(b"damage")
    with open_store(path, run=LEARNER) as store:
        assert not store.verify(read_data=True).ok
        for number in range(8):
            store.commit(100 + number, tree(LEARNER, 1 + number % 2))
            assert difference(tree(LEARNER, 1 + number % 2), store.restore(100 + number)) is None
            check_depths(store)
        assert set(_restorable(store)) == set(STEPS)
    shutil.rmtree(f"{path}/index")
    with open_store(path, run=LEARNER) as store:
        check_depths(store)
        assert set(_restorable(store)) == set(STEPS)
