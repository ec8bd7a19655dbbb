"""T4: verified restore of plainly stored state ÷ reading and hashing the same bytes, and ÷ torch.load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

import casckpt
from benchmarks._baselines import read_and_hash, thread_pool
from benchmarks._harness import Measurement, Settings, Timed, paired, scratch
from benchmarks._states import contiguous, random_state, seeded, state_size

STREAMING_TARGET, ATOMIC_TARGET, TORCH_TARGET = 1.2, 2.2, 1.0


def restore(settings: Settings) -> Iterator[Measurement]:
    """T4, everything in the page cache on both sides (the warm-up pair reads it in).

    Into warm memory: live tensors against a buffer that exists already. Into fresh memory: new tensors against a new
    buffer, whose pages the kernel has to hand out in both cases.
    """
    generator = seeded()
    state = random_state(settings.size_bytes, 64, generator)
    size = state_size(state)
    plain = contiguous(size, generator)
    with scratch(settings) as folder, thread_pool() as pool:
        path, file, saved = f"{folder}/store", f"{folder}/file", f"{folder}/saved.pt"
        plain.tofile(file)
        torch.save(state, saved)
        fd = os.open(file, os.O_RDONLY)
        warm = plain.data
        with casckpt.open(path, create=True) as store:
            store.commit(1, {"model": state})

            def compare(case: str, target: float, subject: Callable[[], object], other: Callable[[], object]) -> None:
                pairs = paired(Timed(lambda _: subject()), Timed(lambda _: other()), settings.pair_count)
                found.append(pairs.measurement("T4", case, target=target, size_bytes=size))

            def fresh() -> None:
                read_and_hash(pool, fd, torch.empty(size, dtype=torch.uint8).numpy().data)

            found: list[Measurement] = []
            targets = {"model": state}
            into_warm = (lambda: read_and_hash(pool, fd, warm),)
            compare(
                "atomic=False, warm", STREAMING_TARGET, lambda: store.restore_into(targets, atomic=False), *into_warm
            )
            compare("atomic=True, warm", ATOMIC_TARGET, lambda: store.restore_into(targets, atomic=True), *into_warm)
            compare("restore, fresh memory", STREAMING_TARGET, store.restore, fresh)
            compare("restore ÷ torch.load", TORCH_TARGET, store.restore, lambda: torch.load(saved, mmap=False))
            yield from found
        os.close(fd)
