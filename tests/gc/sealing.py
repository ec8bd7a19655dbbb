"""Small stores to seal: epochs of four entries, steps small enough to lie inline."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from casckpt_gc import Compaction, Retention

import casckpt
from casckpt.storage.process import System
from casckpt.testing.trees import difference
from tests.gc.collecting import check_steps, collect, commit, files, noise
from tests.unit.stores import open_store

PER_EPOCH = 4
RETENTION = Retention(latest=2)


@contextmanager
def short_epochs() -> Iterator[None]:
    """Epochs of four entries, so that a few commits make several; for all readers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("casckpt.objects.epochs.ENTRIES_PER_EPOCH", PER_EPOCH)
        patch.setattr("tests.conformance.independent_epochs.PER_EPOCH", PER_EPOCH)
        yield


def tree(step: int) -> dict[str, Any]:
    """Steps 2n and 2n + 1 share their weights, all share a table."""
    return {"counters": {"step": step}, "frozen": {"t": noise(77, 300)}, "policy": {"w": noise(step // 2, 300)}}


def trees(*steps: int) -> dict[int, Any]:
    return {step: tree(step) for step in steps}


def make(path: Path, system: System | None = None) -> None:
    """Ten steps."""
    with open_store(path, **({"system": system} if system else {})) as store:
        commit(store, *range(1, 11), make=tree)


def seal(path: Path, system: System) -> None:
    """Of ten steps 9 and 10 stay; entries 1 to 3 are sealed."""
    with open_store(path, create=False, system=system) as store:
        collect(store, RETENTION, compaction=Compaction(epoch_count_max=1))


def check_after(path: Path) -> None:
    """What stays is exact, before and after what was begun is finished, with the index and without."""
    for is_finished in (False, True):
        with open_store(path, create=False) as store:
            for step in (9, 10):
                assert difference(tree(step), store.restore(step)) is None
            if is_finished:
                store.commit(11, tree(2))
                collect(store, RETENTION)
                collect(store, RETENTION)
        shutil.rmtree(path / "index")
    check_steps(path, {10: tree(10), 11: tree(2)})
    own = [name for name in files(path, "timeline") if "/epochs/" not in name]
    assert len(own) <= 1 + 2 * PER_EPOCH
    assert files(path, "trash", "leases") == []


def main(path: str) -> None:
    """Collect: seals one epoch, and drops what it leaves behind."""
    with short_epochs(), casckpt.open(path) as opened:
        collect(opened, RETENTION, compaction=Compaction(epoch_count_max=1))
