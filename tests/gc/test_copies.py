"""Copies made while entries are sealed: `cp -r` without a snapshot of the file system, folder after folder.

Each folder is copied as it was at some moment, of the entries the names at one moment and the files at a later one. A
copy gives every step exactly of which it has all files; of others it says what is missing, and copying again what the
first time left out makes it whole.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from casckpt.errors import CasckptError, CorruptionError, IncompleteError, NotFoundError
from casckpt.storage.process import System
from casckpt.testing.trees import difference
from casckpt.testing.wrapping import Operation
from tests.gc.collecting import check_steps, collect, commit, files
from tests.gc.sealing import RETENTION, make, seal, short_epochs, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # what is missing is told so

LEFT_OUT = shutil.ignore_patterns("index", "leases", "tmp")
ORDERS = [  # of folders; "names" and "entries" are what is listed and what is copied of the entries' own files
    ("packs", "names", "entries", "epochs"),
    ("packs", "epochs", "names", "entries"),
    ("epochs", "names", "entries", "packs"),
    ("names", "entries", "epochs", "packs"),
    ("names", "entries", "packs", "epochs"),
    ("names", "packs", "epochs", "entries"),
]
SHARD = f"timeline/{0:014d}"
SEAL = 12  # number of the entry that seals; the one before retires. There is one pack, of what is copied for it.


class Moments(UnsyncedFileSystem):
    """Keeps the store as it is after each change of a name."""

    def __init__(self, store: Path, folder: Path) -> None:
        super().__init__()
        self.store, self.folder = store, folder
        self.count = 0

    def perform(self, operation: Operation, act: Callable[[], Any]) -> Any:
        done = super().perform(operation, act)
        seen = operation.target or operation.path
        if operation.name in ("rename", "link", "unlink") and "/store/tmp/" not in seen:
            shutil.copytree(self.store, self.folder / str(self.count), ignore=LEFT_OUT)
            self.count += 1
        return done


@pytest.fixture(autouse=True, scope="module")
def epochs() -> Iterator[None]:
    with short_epochs():
        yield


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory, epochs: None) -> list[Path]:
    """A sealing from before its first change to its end."""
    folder = tmp_path_factory.mktemp("moments")
    make(folder / "store")
    shutil.copytree(folder / "store", folder / "before", ignore=LEFT_OUT)
    disk = Moments(folder / "store", folder)
    seal(folder / "store", System(file_system=disk))
    return [folder / "before", *(folder / str(number) for number in range(disk.count))]


Files = dict[str, bytes | None]
"""By path relative to the store; None for a folder."""


def read(store: Path) -> Files:
    return {str(each.relative_to(store)): each.read_bytes() if each.is_file() else None for each in store.rglob("*")}


def copied(order: Sequence[str], at: Sequence[Files]) -> Files:
    """What is copied by who takes folders in this order, each as at its moment."""
    source = dict(zip(order, at, strict=True))
    found = {path: at[-1][path] for path in ("casckpt.json", "timeline", SHARD)}
    found |= {path: content for path, content in source["entries"].items() if path in below(SHARD, source["names"])}
    return found | below("packs", source["packs"]) | below("timeline/epochs", source["epochs"])


def below(folder: str, found: Files) -> Files:
    return {path: content for path, content in found.items() if f"{path}/".startswith(f"{folder}/") and path != SHARD}


def has_all(found: Files) -> bool:
    """Before the seal these are all files of entries; after it the pack, and entries as files or in the epoch."""
    got = {int(Path(path).name) for path in below(SHARD, found)}
    has_all_files = got == set(range(max(got) + 1))
    if SEAL not in got:
        return has_all_files
    packs, epochs = (
        [each for each in below(folder, found).values() if each] for folder in ("packs", "timeline/epochs")
    )
    return bool(packs) and (has_all_files or bool(epochs))


def write(found: Files, target: Path) -> None:
    target.mkdir()
    for path, content in sorted(found.items()):
        if content is None:
            (target / path).mkdir()
        else:
            (target / path).write_bytes(content)


def check_copy(path: Path, *, is_complete: bool) -> bool:
    """Each step is exact, or an error says why not; returns whether all were."""
    exact = 0
    with open_store(path, create=False) as store:
        for step in (9, 10):
            try:
                assert difference(tree(step), store.restore(step)) is None
                exact += 1
            except (CorruptionError, IncompleteError, NotFoundError):
                assert not is_complete
        try:
            found = store.restore()
        except CasckptError:
            assert not is_complete
        else:
            assert difference(tree(found["counters"]["step"]), found) is None
        assert exact == 2 or not store.verify(read_data=True).ok
    return exact == 2


def check_going_on(path: Path) -> None:
    """A copy that is never completed is a store like another: it is committed to, collected, and opened anew."""
    with open_store(path, create=False) as store:
        store.resume(10)
        store.tag("kept", 9)
        commit(store, *range(11, 21), make=tree)
        collect(store, RETENTION)
        collect(store, RETENTION)
        assert len(files(path, "timeline/epochs")) > 1
    check_steps(path, trees(9, 19, 20))
    shutil.rmtree(path)


def copies(moments: list[Path]) -> dict[str, Files]:
    """All different copies, each with the first choice of an order and of moments that yields it."""
    states = [read(path) for path in moments]
    choices = itertools.product(ORDERS, itertools.combinations_with_replacement(range(len(moments)), 4))
    found, seen = {}, set()
    for order, numbers in choices:
        copy = copied(order, [states[number] for number in numbers])
        fingerprint = hash(frozenset(copy.items()))
        if fingerprint not in seen:
            seen.add(fingerprint)
            found[f"{dict(zip(order, numbers, strict=True))} of {len(moments)}"] = copy
    return found


def sweep(moments: list[Path], tmp_path: Path, stride: int) -> tuple[int, int]:
    """Every `stride`-th of the different copies; returns how many were exact at once, and how many not."""
    results = []
    for label, copy in itertools.islice(copies(moments).items(), 0, None, stride):
        path = tmp_path / "copy"
        try:
            write(copy, path)
            results.append(check_copy(path, is_complete=has_all(copy)))
            if has_all(copy):
                check_going_on(Path(shutil.copytree(path, tmp_path / "own", ignore=LEFT_OUT)))
            shutil.copytree(moments[-1], path, dirs_exist_ok=True)  # again, as rsync would
            for is_collected in (False, True):
                with open_store(path, create=False) as store:
                    if is_collected:
                        collect(store, RETENTION)
                check_steps(path, trees(9, 10))
        except (CasckptError, AssertionError) as error:
            raise AssertionError(f"{label}: {error!r}") from error
        shutil.rmtree(path)
    return results.count(True), results.count(False)


def test_some_copies_made_while_sealing_are_exact_or_say_what_is_missing(moments: list[Path], tmp_path: Path) -> None:
    assert sweep(moments, tmp_path, 19)[0] > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_copies_made_while_sealing_are_exact_or_say_what_is_missing(moments: list[Path], tmp_path: Path) -> None:
    exact, lacking = sweep(moments, tmp_path, 1)
    assert exact > 10 and lacking > 10
