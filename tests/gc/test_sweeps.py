"""A collection that is killed, or whose disk fails, at its n-th operation: n = 1, 2, 3 … (G01, G06).

A kill is a process that does nothing more: from the n-th operation on, all raise what nobody catches. After
each fault the store is opened by another process: what must stay is exact, what was retired may be committed again,
and the next collection finishes what the first one left, down to the last file.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from casckpt_gc import Compaction, Retention, Thinning

from casckpt.errors import CasckptError
from casckpt.storage.fs import FileSystem, LocalFileSystem
from casckpt.storage.process import System
from casckpt.testing.failing import CountingFileSystem, FailingFileSystem
from casckpt.testing.recording import RecordingFileSystem, after_power_cut
from tests.gc.collecting import check_steps, collect, commit, files, tree, trees
from tests.unit.stores import UnsyncedFileSystem, open_store

pytestmark = pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a stale index is reported so

RETENTION, THINNING, COMPACTION = Retention(latest=3), Thinning(["optimizer"], keep_latest=2), Compaction(0.9)
QUICK_STRIDE = 47


class Killed(BaseException):
    """The process is no more."""


class KillingFileSystem(CountingFileSystem):
    """From the chosen operation on nothing happens any more."""

    def strike(self, operation: Any, act: Callable[[], Any]) -> Any:
        raise Killed(str(operation))

    def pass_by(self, operation: Any, act: Callable[[], Any]) -> Any:
        return self.strike(operation, act) if self.was_hit else act()


MODES: dict[str, Callable[[int], CountingFileSystem]] = {
    "killed": lambda n: KillingFileSystem(UnsyncedFileSystem(), at=n),
    "EIO once": lambda n: FailingFileSystem(UnsyncedFileSystem(), fail_at=n, error=errno.EIO),
    "EIO for ever": lambda n: FailingFileSystem(UnsyncedFileSystem(), fail_at=n, error=errno.EIO, is_forever=True),
    "ENOSPC for ever": lambda n: FailingFileSystem(
        UnsyncedFileSystem(), fail_at=n, error=errno.ENOSPC, is_forever=True, has_short_writes=True
    ),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "store"
    with open_store(path) as store:
        commit(store, *range(1, 8))
    return path


def collect_on(path: Path, disk: FileSystem) -> None:
    with open_store(path, create=False, system=System(file_system=disk)) as store:
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


def sweep(start: Path, tmp_path: Path, mode: str, stride: int) -> int:
    """A fault at operation 1, 1 + stride and so on, until there is none; returns at how many."""
    done, n, is_over = 0, 1, False
    while not is_over:
        path = tmp_path / str(n)
        shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
        disk = MODES[mode](n)
        try:
            try:
                collect_on(path, disk)
            except (Killed, CasckptError):
                assert disk.was_hit
            is_over = not disk.was_hit
            check_after(path)
        except (CasckptError, AssertionError) as error:
            raise AssertionError(f"{mode} at operation {n} ({disk.struck}): {error!r}") from error
        shutil.rmtree(path)
        done, n = done + 1, n + stride
    return done


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_some_faults_of_a_collection_cost_nothing(start: Path, tmp_path: Path, mode: str) -> None:
    assert sweep(start, tmp_path, mode, QUICK_STRIDE) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_no_fault_of_a_collection_costs_anything(start: Path, tmp_path: Path, mode: str) -> None:
    assert sweep(start, tmp_path, mode, 1) > 30


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_a_killed_collection_published_is_durable_before_another_relies_on_it(tmp_path: Path) -> None:
    """Killed after a link and before the sync of its folder; another collection sweeps; then the power goes."""
    n, is_reached = 0, True
    while is_reached:
        n += 1
        root = tmp_path / str(n)
        (root / "cut").mkdir(parents=True)
        disk = RecordingFileSystem(LocalFileSystem(), str(root))
        with open_store(root / "store", system=System(file_system=disk)) as store:
            commit(store, 1, 2, 3)
        dying = KillingFileSystem(disk, at=n)
        with contextlib.suppress(Killed):
            collect_on(root / "store", dying)
        is_reached = dying.was_hit
        shutil.rmtree(root / "store" / "index")
        collect_on(root / "store", disk)
        after_power_cut(disk.log).write_to(str(root / "cut"))
        with open_store(root / "cut" / "store", create=False) as store:
            found = store.verify(read_data=True)
            assert found.ok and store.steps() == [1, 2, 3], f"killed at operation {n}: {found}"
        shutil.rmtree(root)
    assert n > 30


def test_killed_between_publishing_and_pruning_leaves_the_new_and_the_old(start: Path, tmp_path: Path) -> None:
    """G01: retention runs after the commit is durable, so a crash in between leaves at least one whole snapshot."""
    path = tmp_path / "store"
    shutil.copytree(start, path, ignore=shutil.ignore_patterns("index"))
    with open_store(path, create=False) as store:
        store.commit(8, tree(8))
    disk = KillingFileSystem(UnsyncedFileSystem(), at=1)
    with pytest.raises(Killed):
        collect_on(path, disk)
    check_steps(path, trees(range(1, 9)))
