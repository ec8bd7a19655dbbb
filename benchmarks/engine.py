"""T3 through the engine: the first save of a training, and the wall time of training with the engine in its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

import casckpt
from benchmarks._harness import MIB, Measurement, Settings, Timed, paired, scratch
from benchmarks._states import random_state, seeded, state_size
from benchmarks.stall import (
    LIGHT_EVERY_STEPS,
    TRAINING_TARGET,
    TRAINING_WIDTH,
    _copy_all,
    _Training,
    _warm_copies,
)

FIRST_CALL_TARGET = 2.5


def first_save(settings: Settings) -> Iterator[Measurement]:
    """The first background save of a registered state ÷ a single-thread copy of its bytes into a warm buffer.

    Each pair has a store and an engine of its own: what was registered has memory, and nothing was ever saved.
    """
    for count in settings.tensor_counts:
        state = random_state(settings.size_bytes, count, seeded())
        copies = _warm_copies(state)
        pairs = paired(
            Timed(lambda run: run.engine.save(1), prepare=_opening(settings, state), clean=_Run.close),
            Timed(_copying(copies)),
            settings.pair_count,
            warm_up_count=0,
        )
        size = state_size(state)
        yield pairs.measurement("T3e", f"{count} tensors, first save", target=FIRST_CALL_TARGET, size_bytes=size)


def _copying(copies: list[tuple[Any, Any]]) -> Callable[[Any], None]:
    return lambda _: _copy_all(copies)


class _Run:
    """An engine on a new store in a folder of its own, with one registered component."""

    def __init__(self, settings: Settings, state: dict[str, torch.Tensor]) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(scratch(settings))
        store = self._stack.enter_context(casckpt.open(f"{folder}/store", create=True))
        self.engine = self._stack.enter_context(casckpt.CheckpointEngine(store))
        self.engine.register("model", state)

    def close(self) -> None:
        self._stack.close()


def _opening(settings: Settings, state: dict[str, torch.Tensor]) -> Callable[[], _Run]:
    return lambda: _Run(settings, state)


def training(settings: Settings) -> Iterator[Measurement]:
    """Wall time of training with an engine that saves counters every 100 steps and all each minute ÷ without it.

    Each run makes the same number of optimizer steps, chosen so that it lasts `training_s`.
    """
    if not settings.training_s:
        return
    trained = _Training(max(64, round(TRAINING_WIDTH * (settings.size_bytes / (512 * MIB)) ** 0.5)))
    step_count = max(2, int(settings.training_s / trained.step_time_s()))
    with scratch(settings) as folder, casckpt.open(f"{folder}/store", create=True) as store:
        engine = _engine_of(store, trained, settings.full_commit_interval_s)
        engine.save(trained.step)
        engine.wait()

        def after_step() -> None:
            engine.step(trained.step)

        pairs = paired(
            Timed(
                lambda _: trained.run(step_count, after_step),
                clean=lambda _: engine.wait(),
                syncs=settings.syncs,
            ),
            Timed(lambda _: trained.run(step_count, lambda: None), syncs=settings.syncs),
            settings.training_pair_count,
            warm_up_count=0,
        )
        full_count = sum(each.is_consistent for each in store.timeline()) - 1
        light_count = len(store.timeline()) - 1 - full_count
    case = f"training of {step_count} steps, {light_count} light and {full_count} full saves by the engine"
    yield pairs.measurement("T3we", case, target=TRAINING_TARGET)


def _engine_of(store: Any, trained: _Training, full_interval_s: float) -> casckpt.CheckpointEngine:
    engine = casckpt.CheckpointEngine(store)
    full = casckpt.SaveStrategy(every_seconds=full_interval_s)
    engine.register("model", trained.model, full)
    engine.register("optimizer", trained.optimizer, full)
    light = casckpt.SaveStrategy(every_steps=LIGHT_EVERY_STEPS)
    engine.register(
        "light", lambda: {"step": trained.step, "rng": torch.get_rng_state()}, light, load=lambda state: None
    )
    return engine
