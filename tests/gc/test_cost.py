"""What a collection costs follows what is garbage, counted in operations, not timed (G08)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from casckpt_gc import Retention

from casckpt.limits import NODE_FANOUT
from casckpt.storage.process import System
from casckpt.testing.wrapping import Operation
from tests.gc.collecting import collect, noise
from tests.unit.stores import UnsyncedFileSystem, open_store

CHUNK = 4096
MANY = 30_000  # chunks: a hundred times the operations that are allowed for them


class Counting(UnsyncedFileSystem):
    """Counts operations by name, and bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def perform(self, operation: Operation, act: Any) -> Any:
        self.counts[operation.name] += 1
        self.counts["bytes written"] += len(operation.data)
        return super().perform(operation, act)


def numbered(first: int, count: int) -> Any:
    """`count` chunks, each other than every other, none of them constant, all of them cheap to store."""
    cells = np.zeros((count, CHUNK // 8), np.int64)
    cells[:, 0] = np.arange(first, first + count)
    return cells


def collect_ten_dead(path: Path, chunk_count: int) -> Counter[str]:
    """Operations of a collection that lets one commit of 20 chunks go, beside `chunk_count` that stay."""
    disk = Counting()
    with open_store(path, chunk_size=CHUNK, system=System(file_system=disk)) as store:
        parts = range(0, chunk_count, 10_000)
        names = [f"part{first}" for first in parts]
        for step, first in enumerate(parts, 1):
            state = {f"part{first}": {"x": numbered(first, min(10_000, chunk_count - first))}}
            store.commit(step, state, inherit="*", necessity=dict.fromkeys(state, "reloadable"))
        steps = len(parts)
        for step in (steps + 1, steps + 2):
            store.commit(step, {"small": {"x": noise(step, 20 * CHUNK // 4)}}, inherit=names)
        for step in range(1, steps + 1):
            store.retire(step)
        disk.counts.clear()
        report = collect(store, Retention(latest=1))
        assert report.condemned_count == 1 and report.rewritten_bytes < 2 * CHUNK  # a structure that both have
        found = disk.counts.copy()
        disk.counts.clear()
        collect(store, Retention(latest=1))
        assert disk.counts["bytes written"] == 0 and disk.counts["open"] <= 8
        assert np.array_equal(store.restore()["part0"]["x"], numbered(0, min(10_000, chunk_count)))
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)  # most of it is making the store
def test_what_a_collection_touches_follows_the_garbage(tmp_path: Path) -> None:
    few, many = (collect_ten_dead(tmp_path / str(count), count) for count in (1_000, MANY))
    for name in ("create", "rename", "unlink", "link", "bytes written"):
        assert many[name] <= few[name] + 64, name  # entries name packs, whose number does not change
    more = many["open"] + many["read"] - few["open"] - few["read"]
    assert more <= 4 * (MANY // NODE_FANOUT + 20)  # manifests and nodes of what stays, twice; no chunk
