"""T3: how long the training loop stands still for `commit_async`, and what that does to the wall time of training."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import casckpt
from benchmarks._harness import MIB, Measurement, Pairs, Settings, Timed, paired, percentile, scratch
from benchmarks._states import random_state, refill, seeded, state_size

STALL_TARGET, IN_FLIGHT_TARGET, TRAINING_TARGET = 1.15, 1.5, 1.02
LIGHT_EVERY_STEPS = 100
TRAINING_WIDTH = 3276  # four square layers of it with Adam's two moments: 515 MB of state
TRAINING_BATCH = 16


def stall(settings: Settings) -> Iterator[Measurement]:
    """The call of `commit_async` with warm staging ÷ a single-thread copy of the captured bytes, tensor by tensor.

    Three cases for each number of tensors: nothing under way, another commit under way, and the very first call, which
    has to allocate its staging memory (printed only).
    """
    for count in settings.tensor_counts:
        yield from _stall_of(settings, count)


def _stall_of(settings: Settings, count: int) -> Iterator[Measurement]:
    generator = seeded()
    state = random_state(settings.size_bytes, count, generator)
    size = state_size(state)
    copies = _warm_copies(state)
    steps, handles = itertools.count(), []
    with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:

        def commit(_: object = None) -> None:
            handles.append(store.commit_async(next(steps), {"model": state}))

        def quiet() -> None:
            store.wait()
            handles.clear()
            _change_some(state, generator)

        def busy() -> bool:
            quiet()
            commit()
            return not handles[0].done()

        def copy(prepare: Callable[[], Any]) -> Timed:
            return Timed(lambda _: _copy_all(copies), prepare=prepare)

        first = paired(Timed(commit), copy(lambda: None), 1, warm_up_count=0)
        yield first.measurement("T3", f"{count} tensors, first call", target=None, size_bytes=size)
        idle = paired(Timed(commit, prepare=quiet), copy(store.wait), settings.stall_count, warm_up_count=2)
        yield idle.measurement("T3", f"{count} tensors", target=STALL_TARGET, size_bytes=size)
        yield _tail(f"{count} tensors, p99 of the stall", idle)
        flight = paired(Timed(commit, prepare=busy), copy(store.wait), settings.stall_count, warm_up_count=2)
        case = f"{count} tensors, a commit in flight"
        yield flight.measurement("T3", case, target=IN_FLIGHT_TARGET, size_bytes=size)
        yield _tail(f"{case}, p99 of the stall", flight)
        store.wait()


def _warm_copies(state: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    """(target, source) of each tensor's bytes; the targets are one buffer whose pages are there."""
    sources = [tensor.numpy() for tensor in state.values()]
    buffer = np.ones(sum(source.size for source in sources), np.float32)
    return list(zip(np.split(buffer, np.cumsum([source.size for source in sources])[:-1]), sources, strict=True))


def _copy_all(copies: list[tuple[Any, Any]]) -> None:
    for target, source in copies:
        np.copyto(target, source)


def _change_some(state: dict[str, torch.Tensor], generator: np.random.SFC64) -> None:
    """New content for an eighth of the tensors: the commits behind the measured stalls have something to write."""
    refill({name: tensor for number, (name, tensor) in enumerate(state.items()) if number % 8 == 0}, generator)


def _tail(case: str, pairs: Pairs) -> Measurement:
    stalls = [seconds * 1e3 for seconds in pairs.subject_s]
    tail = percentile(stalls, 99)
    return Measurement("T3", case, tail, "ms", None, min(stalls), max(stalls), len(stalls), "", "")


def training(settings: Settings) -> Iterator[Measurement]:
    """Wall time of training with light commits every 100 steps and full ones each minute ÷ the same without.

    Each run makes the same number of optimizer steps, chosen so that it lasts `training_s`, on the same seed.
    """
    if not settings.training_s:
        return
    width = max(64, round(TRAINING_WIDTH * (settings.size_bytes / (512 * MIB)) ** 0.5))
    trained = _Training(width)
    step_count = max(2, int(settings.training_s / trained.step_time_s()))
    with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
        committer = _Committer(store, trained, settings.full_commit_interval_s)
        committer.commit_full()
        store.wait()
        pairs = paired(
            Timed(
                lambda _: trained.run(step_count, committer.after_step),
                clean=lambda _: store.wait(),
                syncs=settings.syncs,
            ),
            Timed(lambda _: trained.run(step_count, lambda: None), syncs=settings.syncs),
            settings.training_pair_count,
            warm_up_count=0,
        )
    case = f"training of {step_count} steps, {committer.light_count} light and {committer.full_count} full commits"
    yield pairs.measurement("T3", case, target=TRAINING_TARGET)


class _Training:
    """A regression by a wide network with Adam: real optimizer steps on as much state as the row needs."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(TRAINING_BATCH, width)
        self.step = 0

    def step_time_s(self) -> float:
        """The median time of a step, after warm-up."""
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            self._train()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])

    def run(self, step_count: int, after_step: Callable[[], None]) -> None:
        for _ in range(step_count):
            self._train()
            after_step()

    def _train(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = (torch.tanh(self.model(self.batch)) - self.batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1


class _Committer:
    """Light commits by step, full ones by time, both asynchronous."""

    def __init__(self, store: Any, trained: _Training, full_interval_s: float) -> None:
        self.store, self.trained, self.full_interval_s = store, trained, full_interval_s
        self.light_count = self.full_count = 0
        self.full_at_s = time.perf_counter()

    def after_step(self) -> None:
        if time.perf_counter() - self.full_at_s >= self.full_interval_s:
            self.commit_full()
            self.full_count += 1
        elif self.trained.step % LIGHT_EVERY_STEPS == 0:
            self.store.commit_async(self.trained.step, {"light": self._light()}, inherit=("model", "optimizer"))
            self.light_count += 1

    def commit_full(self) -> None:
        state = {"model": self.trained.model, "optimizer": self.trained.optimizer, "light": self._light()}
        self.store.commit_async(self.trained.step, state)
        self.full_at_s = time.perf_counter()

    def _light(self) -> dict[str, Any]:
        return {"step": self.trained.step, "rng": torch.get_rng_state()}
