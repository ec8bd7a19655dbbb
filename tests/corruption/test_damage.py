"""(e, S05, S07, S21) Every file and every named byte range of a store flipped, zeroed, cut, swapped or deleted.

What damage must cost is computed from the intact files (`casckpt.testing.anatomy`), not by the store: a damaged
payload costs exactly the snapshots that reach the object; a damaged header or table costs at most those; a range that
belongs to no object costs nothing. Whatever happens, opening and listing work, what restores is bit-exact, what
does not raises an error that names step and component, and `verify` lists the same snapshots.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import casckpt
from casckpt.errors import CorruptionError, IncompleteError
from casckpt.ids import ObjectId
from casckpt.testing.anatomy import CONFIG, Anatomy, Region, dissect
from casckpt.testing.trees import difference
from casckpt.testing.workload import HISTORIES, Rehearsal, tree

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # damage that is found is reported so

PARTS = 4
QUICK_STRIDES = {"every kind of entry": 149, "training": 307}
OF_A_KIND = {"every kind of entry": 10, "training": 4}  # cases of the full suite; its records are many and alike
PAYLOADS = 5  # times as many of payloads: each is of another object, which others need


@dataclass(frozen=True)
class Intact:
    history: str
    path: str
    anatomy: Anatomy


@pytest.fixture(scope="module", params=HISTORIES)
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Intact:
    path = str(tmp_path_factory.mktemp("intact") / "store")
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run)) as rehearsal:
        for act in HISTORIES[request.param]:
            rehearsal.perform(act)
    shutil.rmtree(f"{path}/index")
    return Intact(request.param, path, dissect(path))


@dataclass(frozen=True)
class Case:
    """A way to damage a store.

    Attributes:
        label: printed by a failure.
        damage: does it to the store at a path.
        must: objects that cannot be read any more.
        wrong: objects that are read as something else.
        may: objects that perhaps cannot.
    """

    label: str
    damage: Callable[[str], object]
    must: frozenset[ObjectId] = frozenset()
    wrong: frozenset[ObjectId] = frozenset()
    may: frozenset[ObjectId] = frozenset()


def _region_cases(anatomy: Anatomy) -> Iterator[Case]:
    for number, region in enumerate(anatomy.regions):
        lost = frozenset({region.object_id} if region.object_id else ())
        if region.path.startswith("timeline"):
            lost = _objects_in(anatomy, region.path)  # one digest guards the whole entry
        is_certain = region.name.endswith("payload") and not region.path.startswith("timeline")
        wrong = lost if is_certain and len(anatomy.records[next(iter(lost))]) == 1 else frozenset()
        at = (0, region.size // 2, region.size - 1)[number % 3]
        yield Case(f"flip byte {at} of {region.name}", _flip(region, at), wrong=wrong, may=lost)
        if region.size > 48:
            yield Case(f"zero {region.name}", _zero(region), may=lost)


def _objects_in(anatomy: Anatomy, path: str) -> frozenset[ObjectId]:
    return frozenset(region.object_id for region in anatomy.regions if region.path == path and region.object_id)


def _flip(region: Region, at: int) -> Callable[[str], None]:
    def damage(path: str) -> None:
        with open(os.path.join(path, region.path), "r+b") as file:
            file.seek(region.offset + at)
            byte = file.read(1)[0]
            file.seek(region.offset + at)
            file.write(bytes([byte ^ (1 << at % 8)]))

    return damage


def _zero(region: Region) -> Callable[[str], None]:
    def damage(path: str) -> None:
        with open(os.path.join(path, region.path), "r+b") as file:
            file.seek(region.offset)
            file.write(bytes(region.size))

    return damage


def _file_cases(anatomy: Anatomy) -> Iterator[Case]:
    paths = sorted({region.path for region in anatomy.regions})
    for path in paths:
        lost = _objects_in(anatomy, path)
        only = frozenset(object_id for object_id in lost if set(anatomy.records.get(object_id, [])) == {path})
        yield Case(f"delete {path}", _to(path, os.unlink), must=only, may=lost)
        yield Case(f"empty {path}", _to(path, functools.partial(os.truncate, length=0)), must=only, may=lost)
        yield Case(f"folder instead of {path}", _to(path, _as_folder), must=only, may=lost)
        yield Case(f"dangling link instead of {path}", _to(path, _as_link), must=only, may=lost)
        yield from _cut_cases(anatomy, path, lost)
    document = {"casckpt.json", anatomy.entry_paths[0]}  # two copies of the same: both lost is another test
    for one, two in itertools.combinations(paths, 2):
        if {one, two} == document:
            continue
        lost = _objects_in(anatomy, one) | _objects_in(anatomy, two)
        yield Case(f"swap {one} and {two}", functools.partial(_swap, one=one, two=two), may=lost)


def _cut_cases(anatomy: Anatomy, path: str, lost: frozenset[ObjectId]) -> Iterator[Case]:
    mine = [region for region in anatomy.regions if region.path == path]
    for region in mine:
        if region.offset and region.name.endswith(("magic", "payload", "footer", "digest", "body", "count")):
            gone = {each.object_id for each in mine if each.object_id and each.offset + each.size > region.offset}
            cut = functools.partial(os.truncate, length=region.offset)
            may = lost if path.startswith("timeline") else frozenset(gone)
            yield Case(f"cut {path} before {region.name}", _to(path, cut), may=may)


def _to(path: str, action: Callable[[str], object]) -> Callable[[str], object]:
    return lambda root: action(f"{root}/{path}")


def _as_folder(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


def _as_link(path: str) -> None:
    os.unlink(path)
    os.symlink("/nowhere/at/all", path)


def _swap(root: str, *, one: str, two: str) -> None:
    os.rename(f"{root}/{one}", f"{root}/away")
    os.rename(f"{root}/{two}", f"{root}/{one}")
    os.rename(f"{root}/away", f"{root}/{two}")


def _check(intact: Intact, case: Case, root: Path, *, keeps_index: bool) -> None:
    path = str(root / "store")
    shutil.copytree(intact.path, path)
    if keeps_index:
        casckpt.open(path).close()
    case.damage(path)
    try:
        _check_damaged(intact.anatomy, case, path)
    except Exception as error:
        raise AssertionError(f"{case.label}, index {'kept' if keeps_index else 'deleted'}: {error!r}") from error
    shutil.rmtree(path)


def _check_damaged(anatomy: Anatomy, case: Case, path: str) -> None:
    must, may = anatomy.damage(case.must) | anatomy.damage(case.wrong, as_bases=False), anatomy.damage(case.may)
    with casckpt.open(path) as store:
        listed = {bytes.fromhex(snapshot.id) for snapshot in store.timeline(all_runs=True)}
        failed = _restore_all(store, anatomy, listed, may)
        lost = {snapshot_id for snapshot_id, components in may.items() if components - {CONFIG}}
        certain = {snapshot_id for snapshot_id, components in must.items() if components - {CONFIG}}
        assert failed <= lost, f"undamaged snapshots lost: {_names(anatomy, failed - lost)}"
        assert certain - anatomy.retired <= failed, f"damage not noticed: {_names(anatomy, certain - failed)}"
        report = store.verify(read_data=True)
    is_newest_gone = case.label == f"delete {anatomy.entry_paths[max(anatomy.entry_paths)]}"  # nothing refers to it
    assert not failed or not report.ok or is_newest_gone, "verify found nothing where restores fail"
    reported = _reported(report.problems)
    for snapshot_id, components in reported.items():
        assert components <= may.get(snapshot_id, set()), f"verify names {components}: {report}"
    certain_damage = anatomy.damage(case.must - anatomy.commits.keys())
    certain_damage |= anatomy.damage(case.wrong - anatomy.commits.keys(), as_bases=False)
    for snapshot_id, components in certain_damage.items():
        if snapshot_id in case.must:
            continue  # its own entry is lost: nothing says any more which components it had
        assert components <= reported.get(snapshot_id, set()), f"verify does not name {components}: {report}"
    named = {snapshot_id for snapshot_id, components in reported.items() if components - {CONFIG}}
    named |= {ObjectId(bytes.fromhex(each.object_id)) for each in report.problems} & listed
    named -= anatomy.retired
    known = failed & listed
    assert named == known, f"verify names {_names(anatomy, named)}, restore fails {_names(anatomy, known)}: {report}"


def _restore_all(store: Any, anatomy: Anatomy, listed: set[bytes], may: dict[ObjectId, set[str]]) -> set[ObjectId]:
    """Restore every snapshot; returns those that are not listed or raise, after checking all others, and the errors."""
    failed = set()
    for snapshot_id, (_, snapshot) in anatomy.commits.items():
        if snapshot_id in anatomy.retired:
            continue
        if snapshot_id not in listed:
            failed.add(snapshot_id)
            continue
        try:
            found = store.restore(snapshot_id.hex())
        except (CorruptionError, IncompleteError) as error:
            failed.add(snapshot_id)
            assert f"step {snapshot.step}" in str(error), f"the error does not name step {snapshot.step}: {error}"
            assert any(name in str(error) for name in may.get(snapshot_id, ())), f"no damaged component named: {error}"
        else:
            problem = difference(tree(snapshot.run, snapshot.step), found)
            assert problem is None, f"wrong data restored: {problem}"
    return failed


def _reported(problems: Iterable[Any]) -> dict[ObjectId, set[str]]:
    """Snapshots that a report names as needing a damaged object, and which components of them."""
    named: dict[ObjectId, set[str]] = {}
    for problem in problems:
        for _, _, _, component, snapshot_id in problem.snapshots:
            named.setdefault(ObjectId(bytes.fromhex(snapshot_id)), set()).add(component)
    return named


def _names(anatomy: Anatomy, ids: Iterable[bytes]) -> list[str]:
    found = [anatomy.commits[ObjectId(snapshot_id)][1] for snapshot_id in ids]
    return sorted(f"{snapshot.run} {snapshot.step}" for snapshot in found)


def _cases(anatomy: Anatomy) -> list[Case]:
    return [*_region_cases(anatomy), *_file_cases(anatomy)]


def _some_of_every_kind(cases: list[Case], count: int) -> list[Case]:
    """So many cases, spread over all, of those that differ in nothing but the file and the record."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kind = re.sub(r"(packs/)?\b[0-9a-f]{2,}\b|[0-9]+", "", case.label)
        kinds.setdefault(kind, []).append(case)
    found = []
    for kind, members in kinds.items():
        wanted = min(len(members), count * (PAYLOADS if kind.endswith("payload") else 1))
        found += [members[number * len(members) // wanted] for number in range(wanted)]
    return found


@pytest.mark.few(1)
def test_some_damage_is_local_named_and_never_restored(intact: Intact, tmp_path: Path) -> None:
    cases = _cases(intact.anatomy)[:: QUICK_STRIDES[intact.history]]
    assert len(cases) > 5
    for number, case in enumerate(cases):
        _check(intact, case, tmp_path, keeps_index=number % 2 == 0)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_damage_is_local_named_and_never_restored(intact: Intact, tmp_path: Path, part: int) -> None:
    cases = _some_of_every_kind(_cases(intact.anatomy), OF_A_KIND[intact.history])[part::PARTS]
    assert len(cases) > 80
    for number, case in enumerate(cases):
        _check(intact, case, tmp_path, keeps_index=number % 2 == 0)


def test_every_byte_of_a_store_lies_in_a_named_region(intact: Intact) -> None:
    by_path: dict[str, list[Region]] = {}
    for region in intact.anatomy.regions:
        by_path.setdefault(region.path, []).append(region)
    root = Path(intact.path)
    assert by_path.keys() == {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    for path, regions in by_path.items():
        at = 0
        for region in sorted(regions, key=lambda region: region.offset):
            assert region.offset == at, f"{path}: gap or overlap at {at}"
            at += region.size
        assert at == os.path.getsize(os.path.join(intact.path, path)), path


def test_atomic_restore_of_a_damaged_snapshot_leaves_every_target_alone(intact: Intact, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    shutil.copytree(intact.path, path)
    chunk = next(r for r in intact.anatomy.regions if r.name.endswith("payload") and r.size > 4096)
    _flip(chunk, 17)(path)
    damaged = intact.anatomy.damage([ObjectId(chunk.object_id or b"")])
    assert damaged.keys() - intact.anatomy.retired
    with casckpt.open(path) as store:
        for snapshot_id in damaged.keys() - intact.anatomy.retired:
            _, snapshot = intact.anatomy.commits[snapshot_id]
            targets = _sentinels(tree(snapshot.run, snapshot.step))
            before = _sentinels(tree(snapshot.run, snapshot.step))
            with pytest.raises(CorruptionError):
                store.restore_into(targets, snapshot_id.hex())
            assert difference(before, targets) is None


def _sentinels(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sentinels(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sentinels(item) for item in value]
    if hasattr(value, "fill"):
        value = value.copy()
        value.fill(7)
        return value
    return value


def test_store_whose_document_and_its_copy_are_both_lost_says_how_to_get_one(intact: Intact, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    shutil.copytree(intact.path, path)
    _swap(path, one="casckpt.json", two=intact.anatomy.entry_paths[0])
    with pytest.raises(CorruptionError, match=r"Copy casckpt\.json back"):
        casckpt.open(path)
    shutil.copyfile(f"{intact.path}/casckpt.json", f"{path}/casckpt.json")
    with casckpt.open(path) as store:
        assert len(store.timeline(all_runs=True)) == len(intact.anatomy.commits) - len(intact.anatomy.retired)
