"""T9: replay buffers. A commit costs the new rows, opening and a first batch cost what they read.

The ring is full from the start: observations (84 × 84 noise, so that nothing compresses), actions, rewards and flags.
Each timed commit follows 1 % of new rows.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Iterator
from statistics import median
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import torch

import casckpt
from benchmarks._baselines import hash_all, preallocate, thread_pool, write_and_sync
from benchmarks._harness import MIB, Measurement, Settings, Timed, absolute, folder_size, paired, rate, scratch, timed
from casckpt.replay import Arrays, Ring

ROW_SHARE = 100  # a commit brings one row in so many
FIXED_S = 0.005  # what T9 allows a commit beside the rows
BATCH_ROWS = 256
RESTORE_COUNT = 3


class _Buffer:
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
    buffer = _Buffer(settings.size_bytes)
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


def _stall(settings: Settings, store: Any, ring: Ring, buffer: _Buffer, steps: Iterator[int]) -> Iterator[Measurement]:
    """How long `commit_async` holds the training: as long as copying the new rows, whatever the ring holds."""
    stalls: dict[int, list[float]] = {}
    for rows in (buffer.capacity // 1000, buffer.capacity // 100, buffer.capacity // 20):
        for _ in range(settings.pair_count + 1):
            buffer.add(max(1, rows))
            handle = store.commit_async(next(steps), {"replay": ring})
            handle.result()
            stalls.setdefault(rows, []).append(handle.stall_s)
        case = f"stall of commit_async, {rows} new rows"
        yield absolute("T9", case, [1e3 * seconds for seconds in stalls[rows][1:]], "ms", target=None)


def peers(settings: Settings) -> Iterator[Measurement]:
    """T9p: a checkpoint of a ring with 1 % new rows, in seconds and bytes, ÷ the same written whole as people do it."""
    buffer = _Buffer(settings.size_bytes)
    new_rows = max(1, buffer.capacity // ROW_SHARE)
    steps = itertools.count(1)
    for name, write in _PEERS.items():
        with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
            ring = buffer.ring("counter")
            store.commit(next(steps), {"replay": ring})
            before = folder_size(store.path)
            count = itertools.count()

            def commit(_: Any, store: Any = store, ring: Ring = ring, count: Iterator[int] = count) -> None:
                next(count)
                store.commit(next(steps), {"replay": ring})

            subject = Timed(commit, lambda: buffer.add(new_rows), syncs=settings.syncs)
            whole = functools.partial(write, f"{folder}/whole")
            baseline = Timed(whole, buffer.columns, syncs=settings.syncs)
            pairs = paired(subject, baseline, settings.pair_count)
            yield pairs.measurement("T9p", f"time ÷ {name} of the whole ring", target=1.0)
            added = (folder_size(store.path) - before) / next(count)
            size = os.path.getsize(f"{folder}/whole")
            case = f"bytes added ÷ {name} of the whole ring"
            subject_size, whole_size = f"{added / MIB:.2f} MiB", f"{size / MIB:.2f} MiB"
            yield absolute("T9p", case, [added / size], "×", target=0.05, subject=subject_size, baseline=whole_size)


def _pickle(path: str, columns: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        pickle.dump(columns, file, protocol=5)
        file.flush()
        os.fsync(file.fileno())


def _torch_save(path: str, columns: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save({name: torch.from_numpy(column) for name, column in columns.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _hdf5(path: str, columns: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column)
    with open(path, "rb") as written:
        os.fsync(written.fileno())


_PEERS = {"pickle": _pickle, "torch.save": _torch_save, "HDF5": _hdf5}


def _by_digest(
    settings: Settings, store: Any, buffer: _Buffer, new_rows: int, steps: Iterator[int]
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


def _opening(path: str, buffer: _Buffer) -> Iterator[Measurement]:
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
