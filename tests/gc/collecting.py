"""Small stores to collect from: every commit brings a pack of its own, and its tree follows from its step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import casckpt_gc
import numpy as np

from casckpt.testing.anatomy import dissect
from casckpt.testing.failing import FailingFileSystem
from casckpt.testing.invariants import check_depths, index_counts
from casckpt.testing.trees import difference
from tests.unit.stores import UnsyncedFileSystem, open_store

SIZE = 20_000  # float32 of noise: more than a commit carries inline


class FullDisk(FailingFileSystem):
    """Nothing can be created or written on it, but for a few entries' worth of bytes once the reserve is gone."""

    def __init__(self, store_path: Path) -> None:
        operations = {"create", "write", "preallocate"}
        super().__init__(UnsyncedFileSystem(), fail_at=1, error=errno.ENOSPC, is_forever=True, operations=operations)
        self._reserve = store_path / "reserve"
        self._room = 16 * 1024

    def pass_by(self, operation: Any, act: Callable[[], Any]) -> Any:
        wanted = len(operation.data) + operation.size
        if self._reserve.exists() or wanted > self._room:
            return super().pass_by(operation, act)
        self._room -= wanted
        return act()


def noise(seed: int, size: int = SIZE) -> Any:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def tree(step: int) -> dict[str, Any]:
    """Weights and moments that are new at every step, a table that never changes."""
    return {
        "counters": {"step": step},
        "frozen": {"table": noise(1_000_000)},
        "optimizer": {"m": noise(10_000 + step)},
        "policy": {"w": noise(step)},
    }


def commit(store: Any, *steps: int, make: Callable[[int], Any] = tree, **options: Any) -> None:
    for step in steps:
        store.commit(step, make(step), **options)


def collect(store: Any, retention: Any = None, thinning: Any = (), **options: Any) -> Any:
    """A collection that does not wait for readers without a lease."""
    options.setdefault("grace_s", 0.0)
    return casckpt_gc.collect(store, retention, thinning, **options)


def check_steps(path: Path | str, expected: dict[int, dict[str, Any]], run: str = "main") -> None:
    """The run has exactly these steps, each with its tree; everything of the store is sound (I1, I3, I8).

    Steps may lie on any branch. The index is made anew in between, and must come out the same.
    """
    for is_rebuilt in (False, True):
        with open_store(path, create=False, run=run) as store:
            found = {each.step: each for each in store.timeline(all_runs=True) if each.run == run}
            assert sorted(found) == sorted(expected)
            for step, wanted in expected.items():
                names = None if not found[step].thinned else sorted(wanted)
                assert difference(wanted, store.restore(found[step].id, only=names)) is None, step
            report = store.verify(read_data=True)
            assert report.ok, str(report)
            check_depths(store)
            counts = index_counts(store)
        if not is_rebuilt:
            before = counts
            shutil.rmtree(f"{path}/index")
    assert counts == before
    assert {bytes(each): count for each, count in dissect(str(path)).counts().items()} == before


def files(path: Path | str, *folders: str) -> list[str]:
    """Relative paths of all files below some folders of a store."""
    found = []
    for folder in folders:
        for base, _, names in os.walk(f"{path}/{folder}"):
            found += [os.path.relpath(f"{base}/{name}", path) for name in names]
    return sorted(found)


def size(path: Path | str, *folders: str) -> int:
    return sum(os.path.getsize(f"{path}/{name}") for name in files(path, *folders))


def trees(steps: Iterable[int]) -> dict[int, dict[str, Any]]:
    return {step: tree(step) for step in steps}
