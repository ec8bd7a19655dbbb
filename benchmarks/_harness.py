"""How a row measures: settings, paired timing, and what a row yields.

A *paired ratio* is measured in one process: in each pair the subject and the baseline run once, in an order that
alternates from pair to pair, so that drift of the machine (clock, disk, neighbours) hits both. The figure of a row is
the median of the pairs' ratios, and its spread is their smallest and largest. What has to happen around a timed
action but is not part of it (making new content, opening a store, deleting files) goes into `prepare` and `clean`.

This file knows nothing of casckpt.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What a run of the benchmarks may use: sizes, repetitions and a folder on a real disk."""

    folder: str
    corpora: str | None = None  # folder of series that are built or get built; None: small ones, thrown away
    size_bytes: int = 512 * MIB  # of the large states
    pair_count: int = 7
    tensor_counts: tuple[int, ...] = (16, 500, 5000)
    commit_count: int = 100  # in rows that take a mean or a percentile over commits
    history_count: int = 10_000  # snapshots of the long history in T8
    stall_count: int = 40  # calls of commit_async in each case of T3: enough for a 99th percentile to mean something
    training_s: float = 75.0  # of each run in the training row; 0 leaves the row out
    training_pair_count: int = 5
    full_commit_interval_s: float = 60.0
    start_count: int = 15  # processes started by T11
    warm_up_count: int = 5  # pairs thrown away in rows of short operations
    syncs: bool = True  # empty the write-back queue before timed writes; needless where no figure is read


@dataclass(frozen=True)
class Measurement:
    """One line of the table. `value` is a ratio where `unit` is "×"; a target of None means printed only."""

    row: str
    case: str
    value: float
    unit: str
    target: float | None
    low: float
    high: float
    sample_count: int
    subject: str
    baseline: str
    is_floor: bool = False  # the target is the least that the figure should be, not the most

    @property
    def is_reached(self) -> bool | None:
        """Whether the figure keeps its target; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.is_floor else self.value <= self.target


@dataclass(frozen=True)
class Timed:
    """An action to time: `prepare` and `clean` run outside the clock. `run` gets what `prepare` returned."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    clean: Callable[[Any], object] = lambda prepared: None
    syncs: bool = False  # empty the machine's write-back queue first, so that nobody pays for another's dirty pages


@dataclass(frozen=True)
class Pairs:
    """Seconds of subject and baseline, pair by pair."""

    subject_s: tuple[float, ...]
    baseline_s: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Subject ÷ baseline of each pair."""
        return tuple(s / b for s, b in zip(self.subject_s, self.baseline_s, strict=True))

    def measurement(self, row: str, case: str, *, target: float | None, size_bytes: int | None = None) -> Measurement:
        """The median ratio with its spread; speeds are in GB/s where `size_bytes` is given, else times."""
        ratios = self.ratios
        subject, baseline = (
            rate(statistics.median(seconds), size_bytes) for seconds in (self.subject_s, self.baseline_s)
        )
        return Measurement(
            row, case, statistics.median(ratios), "×", target, min(ratios), max(ratios), len(ratios), subject, baseline
        )


def paired(subject: Timed, baseline: Timed, pair_count: int, *, warm_up_count: int = 1) -> Pairs:
    """Time both, alternating who goes first; the first `warm_up_count` pairs are thrown away."""
    subject_s: list[float] = []
    baseline_s: list[float] = []
    gc.collect()
    for number in range(-warm_up_count, pair_count):
        order = [(subject, subject_s), (baseline, baseline_s)]
        for action, seconds in order if number % 2 == 0 else reversed(order):
            elapsed = timed(action)
            if number >= 0:
                seconds.append(elapsed)
    return Pairs(tuple(subject_s), tuple(baseline_s))


def timed(action: Timed) -> float:
    """Seconds that one `run` took."""
    prepared = action.prepare()
    if action.syncs:
        os.sync()
    start = time.perf_counter()
    action.run(prepared)
    elapsed = time.perf_counter() - start
    action.clean(prepared)
    return elapsed


def absolute(
    row: str,
    case: str,
    values: list[float],
    unit: str,
    *,
    target: float | None,
    subject: str = "",
    baseline: str = "",
) -> Measurement:
    """A measurement that is not a ratio: the median of `values` in `unit`."""
    return Measurement(
        row,
        case,
        statistics.median(values),
        unit,
        target,
        min(values),
        max(values),
        len(values),
        subject,
        baseline,
    )


def rate(seconds: float, size_bytes: int | None) -> str:
    """Speed in GB/s of `size_bytes`, or the time itself, as text."""
    if size_bytes is not None:
        return f"{size_bytes / 1e9 / seconds:.2f} GB/s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, by nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(percent / 100 * (len(ranked) - 1)))]


def folder_size(path: str) -> int:
    """Apparent bytes of all files below `path`, leaving out the reserve file."""
    total = 0
    for folder, _, names in os.walk(path):
        total += sum(os.path.getsize(os.path.join(folder, name)) for name in names if name != "reserve")
    return total


@contextmanager
def scratch(settings: Settings) -> Iterator[str]:
    """A temporary folder inside the settings' folder, removed afterwards."""
    path = tempfile.mkdtemp(prefix="casckpt-bench-", dir=settings.folder)
    try:
        yield path
    finally:
        shutil.rmtree(path)
