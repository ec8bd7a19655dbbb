"""(S16, S17) The index replaced by anything, or built half: rebuilt from packs and timeline, which are not touched."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import casckpt
from casckpt.errors import StoreWarning
from casckpt.testing import killing
from casckpt.testing.invariants import check_snapshots, check_store, index_counts, listing
from casckpt.testing.workload import HISTORY, Rehearsal

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a distrusted index is reported so


@pytest.fixture
def oracle(store_path: Path) -> Rehearsal:
    return _history(str(store_path))


def _history(path: str) -> Rehearsal:
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run)) as rehearsal:
        for act in HISTORY:
            rehearsal.perform(act)
    return rehearsal


def _noise(path: Path, seed: int) -> None:
    path.write_bytes(random.Random(seed).randbytes(path.stat().st_size))


def _noise_after_the_first_page(path: Path, seed: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8192] + random.Random(seed).randbytes(max(0, len(data) - 8192)))


def _folder(path: Path, seed: int) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


def _dangling(path: Path, seed: int) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


REPLACEMENTS: dict[str, Callable[[Path, int], object]] = {
    "random bytes": _noise,
    "random bytes after a good start": _noise_after_the_first_page,
    "zeros": lambda path, seed: path.write_bytes(bytes(path.stat().st_size)),
    "an empty file": lambda path, seed: os.truncate(path, 0),
    "half of itself": lambda path, seed: os.truncate(path, path.stat().st_size // 2),
    "a folder": _folder,
    "a dangling link": _dangling,
    "nothing": lambda path, seed: path.unlink(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_each_file_of_the_index_replaced_costs_nothing(
    store_path: Path, oracle: Rehearsal, seed: int, name: str
) -> None:
    files = [path.relative_to(store_path) for path in (store_path / "index").rglob("*") if path.is_file()]
    assert files
    for file in files:
        path = store_path / file
        if not path.is_file():
            continue  # an earlier rebuild made another generation
        truth = listing(str(store_path))
        REPLACEMENTS[name](path, seed)
        with casckpt.open(str(store_path)) as store:
            check_snapshots(store, oracle.acknowledged, oracle.possible)
            assert store.verify(read_data=True).ok
        assert listing(str(store_path)) == truth, f"{file}: packs or timeline were touched"
    check_store(str(store_path), oracle)


@pytest.mark.few(1)
@pytest.mark.parametrize("as_what", ["file", "link", "other store's"])
def test_index_folder_that_is_something_else_costs_nothing(
    store_path: Path, tmp_path: Path, oracle: Rehearsal, as_what: str
) -> None:
    shutil.rmtree(store_path / "index")
    if as_what == "file":
        (store_path / "index").write_bytes(b"not a folder")
    elif as_what == "link":
        (store_path / "index").symlink_to("/nowhere/at/all")
    else:
        with casckpt.open(str(tmp_path / "other"), create=True) as other:
            other.commit(77, {"policy": {"step": 77}})
        shutil.copytree(tmp_path / "other" / "index", store_path / "index")
    check_store(str(store_path), oracle)


def test_older_index_of_the_same_store_is_brought_up_to_date(store_path: Path, tmp_path: Path) -> None:
    path = str(store_path)
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run)) as rehearsal:
        for act in HISTORY[:3]:
            rehearsal.perform(act)
        rehearsal.close()
        shutil.copytree(store_path / "index", tmp_path / "older")
        for act in HISTORY[3:]:
            rehearsal.perform(act)
    shutil.rmtree(store_path / "index")
    shutil.copytree(tmp_path / "older", store_path / "index")
    check_store(path, rehearsal)


def test_entry_that_the_index_has_seen_and_that_is_gone_stays_reported_and_its_number_taken(
    store_path: Path, tmp_path: Path
) -> None:
    """A restored backup, or somebody's hand, can take entries away that the index has applied."""
    path = str(store_path)
    with Rehearsal(lambda run: casckpt.open(path, create=True, run=run)) as rehearsal:
        for act in HISTORY[:4]:
            rehearsal.perform(act)
    newest = max((store_path / "timeline").rglob("0*"), key=lambda file: file.name if file.is_file() else "")
    newest.unlink()
    with pytest.warns(StoreWarning, match=f"entry {int(newest.name)} was here before"):
        store = casckpt.open(path)
    with store:
        assert store.steps() == [1, 2]
        store.resume("latest")
        assert store.commit(5, {"policy": 1}, drop=["optimizer", "counters"]).seq == int(newest.name) + 1
        assert any(f"entry {int(newest.name)} is missing" in problem.message for problem in store.verify().problems)
        before = index_counts(store)
    shutil.rmtree(store_path / "index")
    with casckpt.open(path) as store:
        assert store.steps() == [1, 2, 5]
        assert index_counts(store) == before


@pytest.fixture(scope="module")
def victims() -> Iterator[killing.Victims]:
    with killing.Victims("casckpt.testing.workload:reopen") as found:
        yield found


@pytest.mark.full
@pytest.mark.skipif(killing.why_not() is not None, reason=str(killing.why_not()))
@pytest.mark.parametrize("call", ["write", "writev", "pwrite64", "rename", "unlink", "flock"])
def test_rebuild_killed_half_way_is_not_taken_for_whole(
    store_path: Path, oracle: Rehearsal, victims: killing.Victims, call: str
) -> None:
    number = 1
    while True:
        shutil.rmtree(store_path / "index", ignore_errors=True)
        was_killed = victims.finish(victims.start([str(store_path)], call, number))
        with casckpt.open(str(store_path)) as store:
            check_snapshots(store, oracle.acknowledged, oracle.possible)
        if not was_killed:
            break
        number += 1
    assert number > 1, f"no rebuild was killed in {call}"
