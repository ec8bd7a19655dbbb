"""An index that is made anew, with other numbers for all packs, whenever an operation has just taken the old one.

Rows name packs by small numbers, which mean something in the index that they are read from alone. So what an operation
answers must not depend on when another thread has the index made anew: swept over all moments at which it may.
"""

from __future__ import annotations

import random
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np
import pytest

from casckpt.errors import CasckptError
from casckpt.ids import ObjectId
from casckpt.index.tables import decode_object
from casckpt.objects import keeper
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.packs import list_packs
from casckpt.testing.trees import difference
from tests.gc.collecting import collect, commit, noise
from tests.unit.stores import open_store

Place = tuple[str, ...]


class Renumbering:
    """Has the index made anew by another thread once it was taken at a place, unless who takes it holds the lock under
    which that is done.

    Attributes:
        seen: places at which it was taken: what calls what there.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.is_done = place, False
        self.seen: dict[Place, None] = {}
        self._chance = random.Random(str(place))
        self._lock = threading.Lock()
        self._maker: threading.Thread | None = None

    def list_packs(self, *where: Any) -> list[Any]:
        """In another order each time: so packs get other numbers."""
        found = list(list_packs(*where))
        self._chance.shuffle(found)
        return found

    def kv(self, of: IndexKeeper) -> Any:
        taken = of._kv
        assert taken is not None
        if threading.current_thread() is not self._maker:
            frames = traceback.extract_stack()
            place = tuple(f"{Path(each.filename).name}:{each.lineno}" for each in frames if "casckpt" in each.filename)
            with self._lock:
                is_met = place == self.place and not self.is_done
                self.seen[place] = None
                if is_met:
                    self._maker = threading.Thread(target=self._make, args=(of,))
                    self._maker.start()
                    self._maker.join()
        return taken

    def _make(self, of: IndexKeeper) -> None:
        if of._lock.acquire(blocking=False):
            try:
                of.rebuild()
                self.is_done = True
            finally:
                of._lock.release()


def small(step: int) -> dict[str, Any]:
    return {"optimizer": {"m": noise(10 + step)}, "policy": {"w": noise(step)}}


BIG = {"x": np.tile(noise(9, 1024), 1100)[7:]}  # more chunks than one list holds
TREES = {2: small(2), 4: small(4), 5: small(5), 6: small(6), 7: {**small(6), "big": BIG}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of several packs, one of which holds what nothing needs; others were condemned."""
    path = tmp_path_factory.mktemp("made") / "store"
    with open_store(path, chunk_size=4096) as store:
        commit(store, *range(1, 5), make=small)
        store.retire(1)
        assert collect(store).condemned_count
        commit(store, 5, 6, make=small)
        store.commit(7, TREES[7])
        store.retire(3)
    return path


def restored(store: Any) -> Any:
    return [difference(tree, store.restore(step)) for step, tree in TREES.items()]


def planned(store: Any) -> Any:
    found = casckpt_gc.plan(store, casckpt_gc.Retention(latest=2)).to_dict()
    return found["retired_count"], found["freed_bytes"]


def run(made: Path, path: Path, act: Callable[[Any], Any], renumbering: Renumbering) -> Any:
    shutil.copytree(made, path, ignore=shutil.ignore_patterns("index"))
    with open_store(path, create=False) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexKeeper, "kv", property(renumbering.kv))
        patch.setattr(keeper, "list_packs", renumbering.list_packs)
        found = act(store)
    shutil.rmtree(path)
    return found


ACTS = (restored, planned)


@pytest.mark.full
@pytest.mark.parametrize("act", ACTS, ids=[act.__name__ for act in ACTS])
def test_what_is_answered_does_not_depend_on_when_the_index_is_made_anew(
    made: Path, tmp_path: Path, act: Callable[[Any], Any]
) -> None:
    quiet = Renumbering(())
    expected = run(made, tmp_path / "quiet", act, quiet)
    done = 0
    for place in quiet.seen:
        renumbering = Renumbering(place)
        assert run(made, tmp_path / "made anew", act, renumbering) == expected, f"made anew at {place}"
        done += renumbering.is_done
    assert done > 3


class Watched:
    """A reader's lock: whenever who makes an index anew takes it or has let go of it, another thread reads."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._lock, self._maker, self._read = threading.Lock(), threading.current_thread(), read

    def __enter__(self) -> None:
        self._read_elsewhere()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._read_elsewhere()

    def _read_elsewhere(self) -> None:
        if threading.current_thread() is self._maker:
            thread = threading.Thread(target=self._read)
            thread.start()
            thread.join()


@pytest.mark.full
def test_no_moment_at_which_files_of_old_numbers_are_read_by_new_ones(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read by an index just put in use is proven: a number that still means another pack looks like damage."""
    shutil.copytree(made, tmp_path / "store", ignore=shutil.ignore_patterns("index"))
    with open_store(tmp_path / "store", create=False) as store:
        reader = store._keeper.reader
        with store._keeper.kv.read() as txn:
            packed = [ObjectId(key) for key, row in txn.scan("objects") if decode_object(row)[1]]
        failed: list[CasckptError] = []
        counts: list[int] = []

        def read_all() -> None:
            counts.append(len(packed))
            for each in packed:
                try:
                    reader.read(each)
                except CasckptError as error:
                    failed.append(error)

        monkeypatch.setattr(keeper, "list_packs", lambda *where: list(list_packs(*where))[::-1])
        reader._lock = Watched(read_all)  # type: ignore[assignment]
        store._keeper.rebuild()
        assert failed == []
        assert len(counts) >= 4 and min(counts) > 10
