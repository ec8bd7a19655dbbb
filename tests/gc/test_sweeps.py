"""A collection that is killed, or whose disk fails, at its n-th operation: n = 1, 2, 3 … (G01, G06).

After each fault the store is opened by another process: what must stay is exact, what was retired may be committed
again, and the next collection finishes what the first one left, down to the last file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from casckpt_gc import Compaction, Retention, Thinning

from casckpt.storage.process import System
from tests.gc.collecting import check_steps, collect, commit, files, tree, trees
from tests.gc.faults import MODES, SHARED, Killed, KillingFileSystem, sweep, sweep_power_cuts
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so

RETENTION, THINNING, COMPACTION = Retention(latest=3), Thinning(["optimizer"], keep_latest=2), Compaction(0.9)
QUICK_STRIDE = 47


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "store"
    with open_store(path) as store:
        commit(store, *range(1, 8))
    return path


def collect_on(path: Path, system: System) -> None:
    with open_store(path, create=False, system=system) as store:
        collect(store, RETENTION, THINNING, compaction=COMPACTION)


def check_after(path: Path) -> None:
    """What stays is exact; what went can be committed again; the next collection leaves nothing behind."""
    with open_store(path, create=False) as store:
        for step in (6, 7):
            assert store.restore(step)["counters"] == {"step": step}
        store.commit(8, tree(2))
        collect(store, RETENTION, THINNING, compaction=COMPACTION)
        collect(store, RETENTION, THINNING, compaction=COMPACTION)
    left = {name: value for name, value in tree(6).items() if name != "optimizer"}
    check_steps(path, {6: left, **trees([7]), 8: tree(2)})
    assert files(path, "trash", "leases") == []


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_some_faults_of_a_collection_cost_nothing(start: Path, tmp_path: Path, mode: str) -> None:
    assert sweep(start, tmp_path, collect_on, check_after, modes=[mode], stride=QUICK_STRIDE) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("modes", SHARED)
def test_no_fault_of_a_collection_costs_anything(start: Path, tmp_path: Path, modes: tuple[str, ...]) -> None:
    assert sweep(start, tmp_path, collect_on, check_after, modes=modes) > 30


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_a_killed_collection_published_is_durable_before_another_relies_on_it(tmp_path: Path) -> None:
    def make(path: Path, system: System) -> None:
        with open_store(path, system=system) as store:
            commit(store, 1, 2, 3)

    def check(path: Path) -> None:
        with open_store(path, create=False) as store:
            found = store.verify(read_data=True)
            assert found.ok and store.steps() == [1, 2, 3], str(found)

    assert sweep_power_cuts(tmp_path, make, collect_on, collect_on, check) > 30


def test_killed_between_publishing_and_pruning_leaves_the_new_and_the_old(start: Path, tmp_path: Path) -> None:
    """G01: retention runs after the commit is durable, so a crash in between leaves at least one whole snapshot."""
    path = tmp_path / "store"
    shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
    with open_store(path, create=False) as store:
        store.commit(8, tree(8))
    disk = KillingFileSystem(UnsyncedFileSystem(), at=1)
    with pytest.raises(Killed):
        collect_on(path, System(file_system=disk))
    check_steps(path, trees(range(1, 9)))
