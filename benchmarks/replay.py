"""T9, R01: replay buffers. A commit costs the new rows, opening and a first batch cost what they read.

The ring is full from the start: observations (84 × 84 noise, so that nothing compresses), actions, rewards and flags.
Each timed commit follows 1 % of new rows.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from blake3 import blake3

import casckpt
from benchmarks._baselines import hash_all, preallocate, thread_pool, write_and_sync
from benchmarks._harness import MIB, Measurement, Settings, Timed, absolute, folder_size, paired, rate, scratch, timed
from casckpt.replay import Arrays, Ring

ROW_SHARE = 100  # a commit brings one row in so many
FIXED_S = 0.005  # what T9 allows a commit beside the rows
BATCH_ROWS = 256
RESTORE_COUNT = 3
STALL_SHARES = (1000, 100, 20)  # one new row in so many
COMMITS, KEPT = 60, 7  # of R01, and the one that is restored at the end


class FullRing:
    """A full ring of about `size_bytes`, and its rows to come."""

    def __init__(self, size_bytes: int) -> None:
        self.capacity = size_bytes // (84 * 84 + 4 + 4 + 1)
        self._rng = np.random.default_rng(9)
        self.obs = np.empty((self.capacity, 84, 84), np.uint8)
        self.action = np.zeros(self.capacity, np.int32)
        self.reward = np.zeros(self.capacity, np.float32)
        self.done = np.zeros(self.capacity, np.bool_)
        self.total = 0
        while self.total < self.capacity:
            self.add(min(4096, self.capacity - self.total))
        self.row_size = size_bytes // self.capacity
        self.exact_row_size = sum(column[:1].nbytes for column in self.columns().values())

    def add(self, row_count: int) -> None:
        """Write random rows."""
        slots = np.arange(self.total, self.total + row_count) % self.capacity
        self.obs[slots] = self._rng.integers(0, 256, (row_count, 84, 84), dtype=np.uint8)
        self.action[slots] = self._rng.integers(0, 6, row_count)
        self.reward[slots] = self._rng.random(row_count, np.float32)
        self.done[slots] = self._rng.random(row_count) < 0.01
        self.total += row_count

    def ring(self, trust: str) -> Ring:
        return Ring(Arrays(self.columns(), self, total="total"), trust=trust)

    def columns(self) -> dict[str, Any]:
        return {"obs": self.obs, "action": self.action, "reward": self.reward, "done": self.done}


def replay(settings: Settings) -> Iterator[Measurement]:
    """T9: commits of 1 % new rows, by counter and by digest; opening and first batch beside a full load."""
    buffer = FullRing(settings.size_bytes)
    new_rows = max(1, buffer.capacity // ROW_SHARE)
    plain = np.random.default_rng(1).integers(0, 256, new_rows * buffer.row_size, dtype=np.uint8).data
    steps = itertools.count(1)
    with scratch(settings) as folder:
        with casckpt.open(f"{folder}/store", create=True) as store:
            ring = buffer.ring("counter")
            whole_s = timed(Timed(lambda _: store.commit(next(steps), {"replay": ring}), syncs=settings.syncs))
            commit = Timed(
                lambda _: store.commit(next(steps), {"replay": ring}),
                lambda: buffer.add(new_rows),
                syncs=settings.syncs,
            )
            pairs = paired(commit, _fresh_file(folder, plain, settings.syncs), settings.pair_count)
            allowed = [s / (2 * b + FIXED_S) for s, b in zip(pairs.subject_s, pairs.baseline_s, strict=True)]
            yield pairs.measurement("T9", "counter, 1 % new rows ÷ write + fsync of them", target=None)
            subject, baseline = rate(median(pairs.subject_s), None), rate(2 * median(pairs.baseline_s) + FIXED_S, None)
            case = "counter, 1 % new rows ÷ (2 × that + 5 ms)"
            yield absolute("T9", case, allowed, "×", target=1.0, subject=subject, baseline=baseline)
            shares = [seconds / whole_s for seconds in pairs.subject_s]
            case = "counter, 1 % new rows ÷ committing the whole ring"
            yield absolute("T9", case, shares, "×", target=0.03, subject=subject, baseline=rate(whole_s, None))
            yield from _stall(settings, store, ring, buffer, steps)
            yield from _by_digest(settings, store, buffer, new_rows, steps)
        yield from _opening(f"{folder}/store", buffer)


def _copy(warm: Any, plain: Any, prepared: None) -> None:
    np.copyto(warm[: len(plain)], plain)


def _stall(settings: Settings, store: Any, ring: Ring, buffer: FullRing, steps: Iterator[int]) -> Iterator[Measurement]:
    """How long `commit_async` holds the training, beside copying the new rows once: it knows nothing of the others."""
    stalls: list[list[float]] = []
    warm = np.zeros(buffer.capacity // STALL_SHARES[-1] * buffer.row_size, np.uint8)
    for share in STALL_SHARES:
        rows = max(1, buffer.capacity // share)
        plain = np.ones(rows * buffer.row_size, np.uint8)
        copies: list[float] = []
        stalls.append([])
        for _ in range(settings.pair_count + 1):
            buffer.add(rows)
            copies.append(timed(Timed(functools.partial(_copy, warm, plain))))
            handle = store.commit_async(next(steps), {"replay": ring})
            handle.result()
            stalls[-1].append(handle.stall_s)
        texts = [rate(median(seconds[1:]), None) for seconds in (stalls[-1], copies)]
        case = f"stall of commit_async, {rows} new rows of {buffer.capacity}"
        figures = [1e3 * seconds for seconds in stalls[-1][1:]]
        yield absolute("T9", case, figures, "ms", target=None, subject=texts[0], baseline=texts[1])
    one, five = median(stalls[1][1:]), median(stalls[2][1:])
    case = "stall, 5 % ÷ 1 % new rows (5 is proportional)"
    yield absolute("T9", case, [five / one], "×", target=7.5, subject=rate(five, None), baseline=rate(one, None))


def pool(settings: Settings) -> Iterator[Measurement]:
    """R01: bytes that each of 60 commits adds; an early one restored exactly at the end, those before it retired."""
    buffer = FullRing(settings.size_bytes)
    new_rows = max(1, buffer.capacity // ROW_SHARE)
    sizes, expected = [], b""
    with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
        ring = buffer.ring("counter")
        store.commit(0, {"replay": ring})
        for step in range(1, COMMITS + 1):
            buffer.add(new_rows)
            before = folder_size(store.path)
            store.commit(step, {"replay": ring})
            sizes.append(folder_size(store.path) - before)
            if step == KEPT:
                slots = np.arange(buffer.total, buffer.total + buffer.capacity) % buffer.capacity
                expected = _digest({name: column[slots] for name, column in buffer.columns().items()})
        mean, allowed = sum(sizes) / len(sizes), 1.2 * new_rows * buffer.exact_row_size + 4096
        case = f"bytes added by a commit, mean of {COMMITS} ÷ (1.2 × new rows + 4 KiB)"
        texts = {"subject": f"{mean / MIB:.3f} MiB", "baseline": f"{allowed / MIB:.3f} MiB"}
        yield absolute("R01", case, [mean / allowed], "×", target=1.0, **texts)
        for step in range(KEPT):
            store.retire(step)
        view = store.restore(KEPT)["replay"]
        wrong = 100.0 * (_digest(view.rows(view.first, view.total)) != expected)
        yield absolute("R01", f"commit {KEPT} restored after commit {COMMITS}, wrong", [wrong], "%", target=0.0)


def memory(settings: Settings) -> Iterator[Measurement]:
    """T10r: resident memory of a process with a full ring, over 100 commits and 10 restores."""
    with scratch(settings) as folder:
        command = [sys.executable, "-m", "benchmarks._ring_memory_child", folder, str(settings.size_bytes)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for case, extra in json.loads(out).items():
        target = None if "peak" in case else 16.0
        yield absolute("T10r", case, [extra / MIB], "MiB", target=target)


def _digest(columns: dict[str, Any]) -> bytes:
    hashed = blake3()
    for name in sorted(columns):
        hashed.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data)
    return hashed.digest()


def _by_digest(
    settings: Settings, store: Any, buffer: FullRing, new_rows: int, steps: Iterator[int]
) -> Iterator[Measurement]:
    """The same commits where every row is read and hashed."""
    ring = buffer.ring("digest")
    store.commit(next(steps), {"replay": ring})
    with thread_pool() as pool:
        pairs = paired(
            Timed(lambda _: store.commit(next(steps), {"replay": ring}), lambda: buffer.add(new_rows)),
            Timed(lambda _: hash_all(pool, buffer.obs.reshape(-1).data)),
            settings.pair_count,
        )
    yield pairs.measurement("T9", "digest, 1 % new rows ÷ blake3 of the ring", target=None)


def _opening(path: str, buffer: FullRing) -> Iterator[Measurement]:
    """A new handle, the restored view and one batch of the newest rows, beside a load of all rows."""
    shares, first, full = [], [], []

    def open_and_draw(_: Any) -> None:
        with casckpt.open(path, read_only=True) as store:
            store.restore()["replay"].last(BATCH_ROWS)

    def load(_: Any) -> None:
        with casckpt.open(path, read_only=True) as store:
            view = store.restore()["replay"]
            view.rows(view.first, view.total)

    for _ in range(RESTORE_COUNT):
        first.append(timed(Timed(open_and_draw)))
        full.append(timed(Timed(load)))
        shares.append(first[-1] / full[-1])
    case = f"open and draw {BATCH_ROWS} rows ÷ load all {buffer.capacity}"
    subject, baseline = (f"{min(seconds) * 1e3:.0f} ms" for seconds in (first, full))
    yield absolute("T9", case, shares, "×", target=0.05, subject=subject, baseline=baseline)


def _fresh_file(folder: str, plain: memoryview, syncs: bool) -> Timed:
    path = f"{folder}/rows"

    def clean(fd: int) -> None:
        os.close(fd)
        os.unlink(path)

    return Timed(lambda fd: write_and_sync(fd, plain), lambda: preallocate(path, len(plain)), clean, syncs=syncs)
