"""T8: what a history of 10,000 snapshots costs commit, open, restore and the timeline, against a history of ten."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import lmdb
import torch

import casckpt
from benchmarks._harness import Measurement, Settings, Timed, absolute, paired, scratch, timed
from benchmarks._states import random_state, refill, seeded

CHUNK_SIZE = 4096
CHUNKS_PER_COMMIT = 20  # 10,000 snapshots make 200,000 chunks
SHORT_HISTORY = 10
TARGET, OPEN_TARGET_MS = 1.2, 5.0


def scale(settings: Settings) -> Iterator[Measurement]:
    """T8: each operation on the long history ÷ the same on the short one; open also beyond the least it must do."""
    with scratch(settings) as folder:
        long, short = f"{folder}/long", f"{folder}/short"
        for path, count in ((long, settings.history_count), (short, SHORT_HISTORY)):
            _build(path, count)
        yield from _compare_operations(settings, long, short)
        yield from _compare_open(settings, long, short)
        yield _rebuild(settings, long)


def _build(path: str, snapshot_count: int) -> None:
    generator, state = seeded(), _state()
    with casckpt.open(path, create=True, chunk_size=CHUNK_SIZE) as store:
        for step in range(snapshot_count):
            refill(state, generator)
            store.commit(step, {"model": state})


def _state() -> dict[str, torch.Tensor]:
    return random_state(CHUNK_SIZE * CHUNKS_PER_COMMIT, 1, seeded())


def _compare_operations(settings: Settings, long: str, short: str) -> Iterator[Measurement]:
    generator, state = seeded(), _state()
    steps = itertools.count(settings.history_count)
    with casckpt.open(long) as large, casckpt.open(short) as small:

        def compare(case: str, operation: Callable[[Any], object], prepare: Callable[[], object]) -> Measurement:
            long_side, short_side = (
                Timed(lambda _: operation(large), prepare),
                Timed(lambda _: operation(small), prepare),
            )
            pairs = paired(long_side, short_side, settings.commit_count, warm_up_count=settings.warm_up_count)
            return pairs.measurement("T8", _case(settings, case), target=TARGET)

        yield compare(
            "commit", lambda store: store.commit(next(steps), {"model": state}), lambda: refill(state, generator)
        )
        yield compare("restore of the newest", lambda store: store.restore(), lambda: None)
        yield compare("timeline()[-1]", lambda store: store.timeline()[-1], lambda: None)


def _compare_open(settings: Settings, long: str, short: str) -> Iterator[Measurement]:
    def opened(path: str) -> Timed:
        return Timed(lambda _: opened_stores.append(casckpt.open(path)), clean=lambda _: opened_stores.pop().close())

    opened_stores: list[Any] = []
    pairs = paired(opened(long), opened(short), settings.commit_count // 2, warm_up_count=2)
    yield pairs.measurement("T8", _case(settings, "open"), target=TARGET)
    bare = paired(opened(long), _bare_open(long), settings.commit_count // 2, warm_up_count=2)
    beyond = [(subject - base) * 1e3 for subject, base in zip(bare.subject_s, bare.baseline_s, strict=True)]
    yield absolute(
        "T8", _case(settings, "open beyond a bare LMDB open + one read"), beyond, "ms", target=OPEN_TARGET_MS
    )


def _bare_open(path: str) -> Timed:
    """LMDB opened on a copy of the store's index, and one read transaction."""
    copy = f"{path}-index"
    source = next(folder for folder, _, names in os.walk(f"{path}/index") if "data.mdb" in names)
    shutil.copytree(source, copy)

    def run(_: object) -> None:
        environment = lmdb.open(copy, max_dbs=16)
        with environment.begin() as transaction:
            transaction.get(b"absent")
        environment.close()

    return Timed(run)


def _rebuild(settings: Settings, path: str) -> Measurement:
    """Open after the index is gone: printed, without a target."""

    def prepare() -> None:
        shutil.rmtree(f"{path}/index")

    seconds = [
        timed(Timed(lambda _: casckpt.open(path).close(), prepare)) for _ in range(max(1, min(3, settings.pair_count)))
    ]
    return absolute("T8", _case(settings, "open that rebuilds the index"), seconds, "s", target=None)


def _case(settings: Settings, operation: str) -> str:
    return f"{operation}, {settings.history_count} snapshots"
