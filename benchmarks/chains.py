"""T5, and size and speed beside it: histories of differences, from real training, restored step by step.

Each corpus is committed at each level into a store of its own. A restore runs in a new process and is timed from
`open`; its baseline is the restore of a store that holds the last state alone, every chunk raw. Beside it stand what
the whole series took on disk (with the index), and the median speed of the commits after the first two.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import casckpt
from benchmarks import corpora
from benchmarks._harness import Measurement, Settings, absolute, folder_size, scratch

RESTORE_TARGETS = {"fast": 1.3, "balanced": 3.5, "small": 10.0}
JOINT_TARGETS = {  # share of raw for fp32 and for bf16 with fp32 moments, commit speed in MB/s
    "balanced": (0.34, 0.32, 400.0),
    "small": (0.28, 0.25, 250.0),
}
_CORPORA = ("D-fp32-1", "D-bf16-fp32-1")
_RESTORED_COUNT = 8  # newest commits whose restore is timed: more than one turn of any chain
_STEADY_FROM = 2  # commits before it still learn what pays


def chains(settings: Settings) -> Iterator[Measurement]:
    """T5 and the joint row, for two ways of fine-tuning a transformer, one optimizer step between commits."""
    is_quick = settings.corpora is None
    with scratch(settings) as folder:
        for name in _CORPORA:
            series = corpora.build(name, settings.corpora or folder, quick=is_quick)
            plain = f"{folder}/{name}-plain"
            _commit(plain, series, [series.count - 1], "fast")
            for level in RESTORE_TARGETS:
                path = f"{folder}/{name}-{level}"
                speeds = _commit(path, series, range(series.count), level)
                raw = sum(series.raw_bytes(at) for at in range(series.count))
                yield from _joint(name, level, folder_size(path) / raw, speeds, has_targets=not is_quick)
                yield _restores(name, level, path, plain, series, settings)


def _commit(path: str, series: corpora.Series, commits: range | list[int], level: str) -> list[float]:
    """Commit these states; MB/s of raw bytes for each."""
    speeds = []
    with casckpt.open(path, create=True, level=level) as store:
        for at in commits:
            state = series.state(at)
            start = time.perf_counter()
            store.commit(series.steps[at], state)
            speeds.append(series.raw_bytes(at) / 1e6 / (time.perf_counter() - start))
    return speeds


def _joint(name: str, level: str, share: float, speeds: list[float], *, has_targets: bool) -> Iterator[Measurement]:
    fp32, bf16, speed = JOINT_TARGETS.get(level, (None, None, None)) if has_targets else (None, None, None)
    target = bf16 if "bf16" in name else fp32
    yield absolute("T5", f"{name}, {level}: bytes of the series", [share], "of raw", target=target)
    steady = speeds[_STEADY_FROM:] or speeds
    found = absolute("T5", f"{name}, {level}: commit", steady, "MB/s", target=speed)
    yield replace(found, is_floor=True)


def _restores(name: str, level: str, path: str, plain: str, series: corpora.Series, settings: Settings) -> Measurement:
    """The slowest restore among the newest commits, as a ratio to the plain one."""
    found = slowest_paired(path, plain, series.steps, settings.pair_count, look=lambda *at: restore_costs(*at)[0])
    pairs = [(one[0], other[0]) for one, other in found]
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    size = series.raw_bytes(series.count - 1)
    return absolute(
        "T5",
        f"{name}, {level}: worst restore",
        [one / other for one, other in pairs],
        "×",
        target=RESTORE_TARGETS[level],
        subject=f"{size / 1e9 / ours:.2f} GB/s",
        baseline=f"{size / 1e9 / theirs:.2f} GB/s",
    )


def slowest_paired(
    path: str, plain: str, steps: list[int], pair_count: int, *, look: Callable[[str, int], float]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Costs of the slowest restore among the newest of `steps`, and of the newest from the store `plain`, in turns.

    The slowest is found by one look at each: `look` returns seconds of a path and a step.
    """
    look(plain, steps[-1])  # into the page cache, and what is imported at the first restore
    first = {step: look(path, step) for step in steps[-_RESTORED_COUNT:]}
    slowest = max(first, key=first.__getitem__)
    return [(restore_costs(path, slowest), restore_costs(plain, steps[-1])) for _ in range(pair_count)]


def restore_costs(path: str, step: int) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, of a restore in a new process."""
    command = [sys.executable, "-m", "benchmarks._restore_child", path, str(step)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=os.getcwd())
    elapsed, used = done.stdout.split()
    return float(elapsed), float(used)
