"""Memory of rings: committing and restoring takes little beside the buffer, and no more the hundredth time.

Each test runs in a process of its own, whose largest resident size says what was needed at any moment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
MIB = 1 << 20
PROLOGUE = """
import resource, sys
import numpy as np
import casckpt
from casckpt.replay import Arrays, Ring, Sliced

path = sys.argv[1]
MIB = 1 << 20

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def fill(array, seed):
    rng, flat = np.random.default_rng(seed), array.reshape(-1).view(np.uint8)
    for at in range(0, len(flat), MIB):
        flat[at : at + MIB] = rng.integers(0, 256, len(flat[at : at + MIB]), dtype=np.uint8)

with casckpt.open(path + "/warm", create=True) as store:  # code and pools that any commit loads
    warm = {"total": 3000}
    ring = Ring(Arrays({"x": np.ones((3000, 1024), np.uint8)}, warm, total="total"))
    store.commit(1, {"replay": ring})
    store.restore_into({"replay": ring})
"""


def peaks(tmp_path: Path, program: str) -> list[int]:
    """What a program prints, in bytes."""
    command = [sys.executable, "-c", PROLOGUE + program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [int(word) for word in run.stdout.split()]


def test_four_hundred_megabytes_need_less_than_sixty_four_more(tmp_path: Path) -> None:
    before, committed, restored = peaks(
        tmp_path,
        """
rows = np.empty((100_000, 4096), np.uint8)
fill(rows, 1)
place = {"total": 130_000}
before = peak()
with casckpt.open(path + "/store", create=True) as store:
    store.commit(1, {"replay": Ring(Arrays({"obs": rows}, place, total="total"))})
    committed = peak()
    first, place["total"] = rows[0].copy(), 0
    rows[:] = 0
    store.restore_into({"replay": Ring(Arrays({"obs": rows}, place, total="total"))})
    assert place["total"] == 130_000 and (rows[0] == first).all()
print(before, committed, peak())
""",
    )
    assert committed - before < 64 * MIB
    assert restored - before < 64 * MIB


def test_buffer_larger_than_memory_is_read_in_slices(tmp_path: Path) -> None:
    before, committed, read = peaks(
        tmp_path,
        """
class Made:  # 400 MB that are never there at once
    def __len__(self):
        return 100_000

    def __getitem__(self, at):
        numbers = np.arange(at.start, at.stop, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        return {"x": numbers ^ np.arange(512, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)}

before = peak()
with casckpt.open(path + "/store", create=True) as store:
    store.commit(1, {"replay": Ring(Sliced(Made(), capacity=100_000))})
    committed = peak()
    view = store.restore()["replay"]
    for start, rows in view.batches():
        assert (rows["x"][0] == Made()[start : start + 1]["x"][0]).all()
print(before, committed, peak())
""",
    )
    assert committed - before < 96 * MIB
    assert read - before < 128 * MIB


def test_memory_is_flat_over_a_hundred_commits_and_ten_restores(tmp_path: Path) -> None:
    early, late, restored = peaks(
        tmp_path,
        """
rows = np.empty((10_000, 2048), np.uint8)
fill(rows, 1)
place = {"total": 10_000}
ring = Ring(Arrays({"obs": rows}, place, total="total"), trust="counter")
with casckpt.open(path + "/store", create=True) as store:
    for step in range(1, 111):
        slots = np.arange(place["total"], place["total"] + 100) % 10_000
        rows[slots] = np.random.default_rng(step).integers(0, 256, (100, 2048), dtype=np.uint8)
        place["total"] += 100
        (store.commit_async if step % 2 else store.commit)(step, {"replay": ring})
        store.wait()
        if step == 10:
            store.restore_into({"replay": ring}, 5)
            store.resume_into({"replay": ring}, 10)
            early = peak()
    late = peak()
    for step in range(20, 120, 10):
        store.restore_into({"replay": ring}, step)
print(early, late, peak())
""",
    )
    assert late - early < 16 * MIB
    assert restored - late < 16 * MIB
