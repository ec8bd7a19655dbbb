"""Random streams in the engine: a guard between a restore and the first update, and seeding anew on purpose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import casckpt
from casckpt import CheckpointEngine


def engine_of(store: Any, rng: Any) -> CheckpointEngine:
    engine = CheckpointEngine(store)
    engine.register("rng", rng)
    engine.register("counts", {"updates": 1})
    return engine


def saved(store_path: Any) -> None:
    with (
        casckpt.open(store_path, create=True) as store,
        engine_of(store, casckpt.RngState(own=random.Random(1))) as engine,
    ):
        engine.advance_step()
        engine.save(async_mode=False)


def test_constructor_that_reseeds_after_a_restore_is_named_at_the_first_update(store_path: Any) -> None:
    saved(store_path)
    own = random.Random(2)
    with casckpt.open(store_path) as store, engine_of(store, casckpt.RngState(own=own)) as engine:
        engine.restore()
        np.random.seed(0)
        own.random()
        with pytest.raises(casckpt.MismatchError, match="numpy, own") as caught, engine.update():
            raise AssertionError("the update began")
        assert caught.value.moved == ["numpy", "own"]


def test_new_run_may_seed_after_the_restore_that_found_nothing(store_path: Any) -> None:
    own = random.Random(2)
    with (
        casckpt.open(store_path, create=True) as store,
        engine_of(store, casckpt.RngState(own=own)) as engine,
    ):
        assert engine.restore().is_fresh
        np.random.seed(0)
        own.seed(3)
        with engine.update():
            drawn = own.random()
        assert drawn == random.Random(3).random()


def test_draws_of_training_are_no_accident(store_path: Any) -> None:
    saved(store_path)
    own = random.Random(2)
    with casckpt.open(store_path) as store, engine_of(store, casckpt.RngState(own=own)) as engine:
        engine.restore()
        first = []
        for _ in range(2):
            with engine.update():
                first.append(own.random())
            engine.advance_step()
        expected = random.Random(1)
        assert first == [expected.random(), expected.random()]
        engine.restore()
        own.random()
        engine.advance_step()  # a loop without `update` is at its first safe point here
        with engine.update():
            assert engine.global_step == 2


def test_seeding_anew_at_a_restore_is_in_the_labels_of_the_next_snapshot_alone(store_path: Any) -> None:
    saved(store_path)
    draws = []
    for seed in (7, 7, None):
        own = random.Random(2)
        with casckpt.open(store_path) as store, engine_of(store, casckpt.RngState(own=own)) as engine:
            engine.restore(1, reseed=seed, branch=None if store.step == 1 else f"again-{len(draws)}")
            with engine.update():
                draws.append((own.random(), random.random(), np.random.rand()))
            for _ in range(2):
                engine.advance_step()
                engine.save(async_mode=False)
            labels = [snapshot.labels.get("rng.reseed") for snapshot in engine.list_checkpoints()]
            assert labels[1:] == [None if seed is None else "7", None]
    assert draws[0] == draws[1] != draws[2]


def test_seed_that_another_restore_took_back_is_in_no_label(store_path: Any) -> None:
    saved(store_path)
    own = random.Random(2)
    with casckpt.open(store_path) as store, engine_of(store, casckpt.RngState(own=own)) as engine:
        engine.restore(reseed=7)
        drawn = own.random()
        engine.restore()
        assert own.random() != drawn
        engine.advance_step()
        engine.save(async_mode=False)
        assert store.timeline()[-1].labels == {}


@pytest.mark.parametrize("seed", [-1, 1.5, 2**63])
def test_impossible_seed_is_refused_before_anything_is_restored(seed: Any, store_path: Any) -> None:
    saved(store_path)
    own = random.Random(2)
    with casckpt.open(store_path) as store, engine_of(store, casckpt.RngState(own=own)) as engine:
        with pytest.raises(casckpt.InvalidInputError, match="expected an integer from 0"):
            engine.restore(reseed=seed)
        assert own.random() == random.Random(2).random()


def test_seeding_anew_without_streams_is_refused(store_path: Any) -> None:
    with casckpt.open(store_path, create=True) as store, CheckpointEngine(store) as engine:
        engine.register("counts", {"updates": 1})
        with pytest.raises(casckpt.InvalidInputError, match="no RngState is registered"):
            engine.restore(reseed=1)
