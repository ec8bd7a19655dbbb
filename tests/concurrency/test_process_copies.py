"""(S10, S36) A store that is copied, also while files are still missing or being written."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import IncompleteError, NotFoundError
from casckpt.testing.invariants import check_snapshots, check_store
from casckpt.testing.trees import difference
from casckpt.testing.workload import HISTORY, Rehearsal, tree
from tests.concurrency.racers import racing

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # an incomplete copy is reported so

DOCUMENTS = ("casckpt.json", f"timeline/{0:014d}/{0:020d}")  # a folder with neither is no store yet


@pytest.fixture
def source(store_path: Path) -> Rehearsal:
    with Rehearsal(lambda run: casckpt.open(str(store_path), create=True, run=run)) as rehearsal:
        for act in HISTORY:
            rehearsal.perform(act)
    return rehearsal


@pytest.mark.few(1)
@pytest.mark.parametrize("with_index", [True, False])
def test_copy_is_a_store_of_its_own(store_path: Path, tmp_path: Path, source: Rehearsal, with_index: bool) -> None:
    ignore = None if with_index else shutil.ignore_patterns("index")
    shutil.copytree(store_path, tmp_path / "copy", ignore=ignore)
    with casckpt.open(str(tmp_path / "copy")) as copy:
        check_snapshots(copy, source.acknowledged, source.possible)
        copy.resume("latest")
        copy.commit(50, tree("main", 50))
    check_store(str(store_path), source)
    source.possible["main", 50] = source.acknowledged["main", 50] = tree("main", 50)
    check_store(str(tmp_path / "copy"), source)


def test_two_copies_that_went_apart_and_were_overwritten_are_read_by_their_files(
    store_path: Path, tmp_path: Path, source: Rehearsal
) -> None:
    """rsync of another line of history over a folder leaves an index that knows the wrong entries."""
    shutil.copytree(store_path, tmp_path / "other")
    for path, step in ((store_path, 50), (tmp_path / "other", 51)):
        with casckpt.open(str(path)) as store:
            store.resume("latest")
            store.commit(step, tree("main", step))
    for folder in ("timeline", "packs"):
        shutil.rmtree(store_path / folder)
        shutil.copytree(tmp_path / "other" / folder, store_path / folder)
    source.possible["main", 51] = source.acknowledged["main", 51] = tree("main", 51)
    with casckpt.open(str(store_path)) as store:
        check_snapshots(store, source.acknowledged, source.possible)


@pytest.mark.few(1)
@pytest.mark.parametrize("round_", range(3))
def test_copy_opens_while_files_arrive_in_any_order(
    store_path: Path, tmp_path: Path, source: Rehearsal, seed: int, round_: int
) -> None:
    files = sorted(p.relative_to(store_path) for p in store_path.rglob("*") if p.is_file() and "index" not in p.parts)
    random.Random(seed).shuffle(files)
    copy = tmp_path / "copy"
    for done, file in enumerate(files):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store_path / file, copy / file)
        if not any(str(each) in DOCUMENTS for each in files[: done + 1]):
            with pytest.raises((NotFoundError, IncompleteError)):
                casckpt.open(str(copy))
            continue
        try:
            with casckpt.open(str(copy)) as store:
                _assert_whole_or_incomplete(store)
        except AssertionError as error:
            raise AssertionError(f"after {done + 1} of {[str(f) for f in files]}: {error}") from error
    check_store(str(copy), source)


def _assert_whole_or_incomplete(store: casckpt.Store) -> None:
    for snapshot in store.timeline(all_runs=True):
        try:
            found = store.restore(snapshot.id)
        except IncompleteError:
            continue
        problem = difference(tree(snapshot.run, snapshot.step), found)
        assert problem is None, problem
    for problem in store.verify(read_data=True).problems:
        assert problem.kind != "corrupt", f"called damage: {problem}"


def test_number_missing_in_a_copy_is_never_given_out_again(store_path: Path, tmp_path: Path, source: Rehearsal) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store_path, copy, ignore=shutil.ignore_patterns("index"))
    entries = sorted((copy / "timeline").rglob("0*0*"), key=lambda path: path.name)
    missing = [path for path in entries if path.is_file()][4]
    saved = missing.read_bytes()
    missing.unlink()
    with casckpt.open(str(copy), run="third") as store:
        assert store.commit(7, tree("main", 7)).seq == len([p for p in entries if p.is_file() or p == missing])
    assert not missing.exists()
    missing.write_bytes(saved)
    source.possible["third", 7] = source.acknowledged["third", 7] = tree("main", 7)
    check_store(str(copy), source)


WRITE = """
with casckpt.open(path) as store:
    gate()
    from casckpt.testing.workload import tree
    for step in range(1, 41):
        store.commit(step, tree("main", step))
"""


@pytest.mark.full
def test_copy_taken_while_a_training_commits_opens_and_completes(store_path: Path, tmp_path: Path, seed: int) -> None:
    casckpt.open(str(store_path), create=True).close()
    copy, order = tmp_path / "copy", random.Random(seed)
    with racing([WRITE], str(store_path)) as (writer,):
        writer.release()
        while writer.process.poll() is None:
            _synchronise(store_path, copy, order)
            with casckpt.open(str(copy), create=False) as store:
                _assert_whole_or_incomplete(store)
        writer.finish()
    _synchronise(store_path, copy, order)
    with casckpt.open(str(copy)) as store:
        assert store.steps() == list(range(1, 41))
        assert store.verify(read_data=True).ok
        _assert_whole_or_incomplete(store)


def _synchronise(source: Path, copy: Path, order: random.Random) -> None:
    """What rsync does: files that are there now, in any order, those that are already there left out."""
    found = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    order.shuffle(found)
    for path in found:
        target = copy / path
        if not target.exists() and path.parts[0] not in ("index", "tmp"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, f"{target}.arriving")
            os.replace(f"{target}.arriving", target)
