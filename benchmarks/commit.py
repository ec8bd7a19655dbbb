"""Rows about commits that the training loop waits for: T1 new content, T2 unchanged content, T7 light commits."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch

import casckpt
from benchmarks._baselines import hash_all, preallocate, small_durable_file, thread_pool, write_and_sync
from benchmarks._harness import Measurement, Settings, Timed, absolute, folder_size, paired, scratch
from benchmarks._states import contiguous, random_state, refill, seeded, state_size

VERIFY_TARGETS = {"off": 1.2, "reread": 1.8, "media": 2.5}
UNCHANGED_TARGETS = ((500, 1.25), (5000, 1.5))  # up to so many tensors
ADDED_BYTES_MAX = 1024
LIGHT_SIZE = 48 * 1024  # bytes of new content in a light commit
SMALL_FILE_SIZE = 4096


def new_content(settings: Settings) -> Iterator[Measurement]:
    """T1: a durable commit of a state whose every byte is new ÷ writing and syncing one file of the same size."""
    generator = seeded()
    state = random_state(settings.size_bytes, 64, generator)
    size = state_size(state)
    plain = contiguous(size, generator).data
    for verify, target in VERIFY_TARGETS.items():
        with scratch(settings) as folder:
            subject = _fresh_commit(folder, state, verify, settings.syncs)
            baseline = _fresh_file(folder, plain, settings.syncs)
            pairs = paired(subject, baseline, settings.pair_count)
        yield pairs.measurement("T1", f"verify={verify}", target=target, size_bytes=size)


def unchanged(settings: Settings) -> Iterator[Measurement]:
    """T2: a commit of an unchanged state ÷ blake3 of the same bytes, and the bytes that each such commit adds."""
    generator = seeded()
    for count in settings.tensor_counts:
        state = random_state(settings.size_bytes, count, generator)
        size = state_size(state)
        plain = contiguous(size, generator).data
        steps = itertools.count()
        with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store, thread_pool() as pool:
            store.commit(next(steps), {"model": state})
            pairs = paired(
                Timed(lambda _: store.commit(next(steps), {"model": state})),  # noqa: B023 - used inside this turn only
                Timed(lambda _: hash_all(pool, plain)),  # noqa: B023
                settings.pair_count,
            )
            yield pairs.measurement("T2", f"{count} tensors", target=_unchanged_target(count), size_bytes=size)
            before = folder_size(store.path)
            for _ in range(settings.commit_count):
                store.commit(next(steps), {"model": state})
            added = (folder_size(store.path) - before) / settings.commit_count
        case = f"{count} tensors, added per commit, mean of {settings.commit_count}"
        yield absolute("T2", case, [added], "B", target=ADDED_BYTES_MAX)


def light(settings: Settings) -> Iterator[Measurement]:
    """T7: a durable commit with at most 64 KiB of new content ÷ one new 4 KiB file, synced with its folder."""
    generator = seeded()
    state = random_state(LIGHT_SIZE, 24, generator)
    steps, names = itertools.count(), itertools.count()
    with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
        os.mkdir(f"{folder}/files")
        plain = bytes(SMALL_FILE_SIZE)
        pairs = paired(
            Timed(
                lambda _: store.commit(next(steps), {"model": state, "counters": {"step": 1, "episodes": 2}}),
                prepare=lambda: refill(state, generator),
            ),
            Timed(lambda _: small_durable_file(f"{folder}/files/{next(names)}", plain)),
            settings.commit_count,
            warm_up_count=settings.warm_up_count,
        )
    yield pairs.measurement("T7", f"{LIGHT_SIZE // 1024} KiB new in 24 tensors", target=5)


def _unchanged_target(tensor_count: int) -> float:
    return next(target for limit, target in UNCHANGED_TARGETS if tensor_count <= limit)


def _fresh_commit(folder: str, state: dict[str, torch.Tensor], verify: str, syncs: bool) -> Timed:
    """A commit of new bytes into a new store that has one small commit already; the store is deleted afterwards."""
    generator, path = seeded(), f"{folder}/store"

    def prepare() -> Any:
        refill(state, generator)
        store = casckpt.open(path, create=True, verify=verify)
        store.commit(0, {"model": {"first": torch.zeros(1)}})
        return store

    def clean(store: Any) -> None:
        store.close()
        shutil.rmtree(path)

    return Timed(lambda store: store.commit(1, {"model": state}), prepare, clean, syncs=syncs)


def _fresh_file(folder: str, plain: memoryview, syncs: bool) -> Timed:
    path = f"{folder}/file"

    def clean(fd: int) -> None:
        os.close(fd)
        os.unlink(path)

    return Timed(lambda fd: write_and_sync(fd, plain), lambda: preallocate(path, len(plain)), clean, syncs=syncs)
