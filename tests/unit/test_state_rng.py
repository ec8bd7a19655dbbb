"""Random streams: what a bundle covers, who moved, streams of workers, and seeding anew on purpose."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import casckpt
from casckpt.engine.streams import WorkerStreams
from casckpt.state.rng_guard import RngGuard
from casckpt.state.seeding import stream_seed


class OwnDistribution:
    """Something of a user's that draws from numpy."""

    def __init__(self) -> None:
        self.bit_generator = np.random.Philox(4)
        self._generator = np.random.Generator(self.bit_generator)

    def draw(self) -> float:
        return float(self._generator.random())


def draws(env: Any, space: Any, own: OwnDistribution, mine: random.Random) -> list[Any]:
    return [
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        env.unwrapped.np_random.random(),
        {name: np.array(value).tolist() for name, value in space.sample().items()},
        own.draw(),
        mine.random(),
    ]


def test_bundle_covers_global_generators_environments_spaces_and_own_objects(store_path: Any) -> None:
    env, own, mine = gymnasium.make("CartPole-v1"), OwnDistribution(), random.Random(3)
    space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(1000), b=gymnasium.spaces.Box(0.0, 1.0, (3,)))
    env.reset(seed=1)
    space.seed(8)
    rng = casckpt.RngState(env=env, space=space, own=own, mine=mine)
    assert set(rng.extra) == {"env", "space", "space/a", "space/b", "own", "mine"}
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"rng": rng})
        expected = draws(env, space, own, mine)
        draws(env, space, own, mine)
        store.restore_into({"rng": rng}, 1)
    assert draws(env, space, own, mine) == expected


def test_space_that_is_seeded_again_is_followed() -> None:
    space = gymnasium.spaces.Discrete(1000)
    rng = casckpt.RngState(space=space)
    space.seed(1)
    state = rng.state_dict()
    expected = [space.sample() for _ in range(5)]
    space.seed(2)
    rng.load_state_dict(state)
    assert [space.sample() for _ in range(5)] == expected


def test_bundle_does_not_seed_parts_of_a_space_anew() -> None:
    inner = gymnasium.spaces.Discrete(10**6, seed=5)
    twin = gymnasium.spaces.Discrete(10**6, seed=5)
    casckpt.RngState(space=gymnasium.spaces.Tuple([inner])).state_dict()
    assert inner.sample() == twin.sample()


def test_something_that_does_not_draw_is_refused_by_name() -> None:
    with pytest.raises(casckpt.UnsupportedStateError, match="policy: Linear is no random generator"):
        casckpt.RngState(policy=torch.nn.Linear(1, 1))


class Remote:
    """Hands out copies, as environments in other processes do."""

    @property
    def np_random(self) -> tuple[Any, ...]:
        return (np.random.default_rng(1),)


def test_copies_of_generators_in_other_processes_are_refused() -> None:
    with pytest.raises(casckpt.UnsupportedStateError, match="copies of generators"):
        casckpt.RngState(envs=Remote())


# --- the guard ---


class Rogue:
    """A constructor that seeds a global generator."""

    def __init__(self, name: str) -> None:
        {"numpy": np.random.seed, "python": random.seed, "torch.cpu": torch.manual_seed}[name](0)


@pytest.mark.parametrize("name", ["numpy", "python", "torch.cpu"])
def test_guard_names_the_global_generator_that_a_constructor_reseeds(name: str, store_path: Any) -> None:
    rng = casckpt.RngState(mine=random.Random(1))
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"rng": rng})
        store.resume_into({"rng": rng}, 1)
        guard = RngGuard(rng)
        guard.check()
        Rogue(name)
        with pytest.raises(casckpt.MismatchError, match=f"restored: {name}. ") as caught:
            guard.check()
    assert caught.value.moved == [name]


def test_guard_names_an_own_generator_that_was_drawn_from_and_puts_it_back() -> None:
    mine, other = np.random.default_rng(1), np.random.default_rng(2)
    rng = casckpt.RngState(mine=mine, other=other)
    guard = RngGuard(rng)
    expected = mine.random()
    assert guard.moved() == ["mine"]
    guard.put_back()
    guard.check()
    assert mine.random() == expected


def test_guard_is_quiet_when_nothing_moved_and_after_renewal() -> None:
    mine = random.Random(1)
    guard = RngGuard(casckpt.RngState(mine=mine))
    assert guard.moved() == []
    mine.random()
    guard.renew()
    assert guard.moved() == []


def test_streams_of_devices_that_are_not_here_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a run of two GPUs is restored on a machine with one, or with none."""
    rng, put = casckpt.RngState(), []
    state = rng.state_dict()
    state["torch"]["cuda"] = [torch.arange(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: put.append((index, state.tolist())))
    for count, expected in ((0, []), (1, [(0, list(range(16)))]), (3, [(0, list(range(16))), (1, [1] * 16)])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        put.clear()
        if count < 2:
            with pytest.warns(casckpt.StoreWarning, match=f"streams of 2 CUDA devices, and {count} are here"):
                rng.load_state_dict(state)
        else:
            rng.load_state_dict(state)  # where all are restored, nothing is said
        assert put == expected


def test_streams_are_restored_after_everything_else(store_path: Any) -> None:
    class Drawing:
        """Loading it draws."""

        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            np.random.rand()

    state = {"rng": casckpt.RngState(), "zz": Drawing()}
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, state)
        expected = np.random.rand(), random.random()
        store.resume_into(state, 1)
    assert (np.random.rand(), random.random()) == expected


# --- seeding anew ---


def test_reseeding_is_the_same_everywhere_different_from_before_and_recorded(store_path: Any) -> None:
    mine = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator(), np.random.SFC64(1)]
    rng = casckpt.RngState(**{f"g{number}": generator for number, generator in enumerate(mine)})

    def drawn() -> list[Any]:
        own = [mine[0].random(), mine[1].random(), mine[2].rand(), torch.rand(1, generator=mine[3]).item()]
        return [random.random(), np.random.rand(), torch.rand(1).item(), *own, int(mine[4].random_raw())]

    labels = rng.reseed(7)
    first = drawn()
    rng.reseed(8)
    other = drawn()
    rng.reseed(7)
    assert drawn() == first
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert len(set(first)) == len(first)
    with casckpt.open(store_path, create=True) as store:
        snapshot = store.commit(1, {"rng": rng}, labels=labels)
        assert snapshot.labels["rng.reseed"] == "7"
        assert snapshot.labels["rng.reseed.generators"] == "python, numpy, torch, g0, g1, g2, g3, g4"


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None])
def test_seed_out_of_range_is_refused(seed: Any) -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected an integer from 0"):
        casckpt.RngState().reseed(seed)


def test_seeds_of_streams_stay_what_they_are() -> None:
    """Written down once, from blake3 of `[1,"worker",0,0,""]`: a release that changes them changes every run."""
    assert stream_seed(1, "worker", 0, 0, "") == 5314968853977321799


def test_workers_have_streams_of_their_own_that_go_on_after_restarts() -> None:
    streams, again = WorkerStreams(11), WorkerStreams(11)
    first = [streams.seed(worker) for worker in range(100)]
    assert len(set(first)) == 100
    assert [again.seed(worker) for worker in range(100)] == first
    assert streams.restarted(3) not in first
    assert streams.python(3).random() != again.python(3).random()
    again.load_state_dict(streams.state_dict())
    assert again.seed(3) == streams.seed(3) != first[3]
    assert again.seed(4) == first[4]
    a, b = np.random.default_rng(0), torch.Generator()
    streams.start(3, a)
    drawn = a.random()
    streams.start(3, a)
    streams.start(3, b)
    assert a.random() == drawn
    assert streams.seed(3, "eval") != streams.seed(3)
    assert b.initial_seed() == streams.seed(3, "own")


def test_process_of_a_worker_draws_from_its_stream() -> None:
    streams = WorkerStreams(5)
    streams.seed_process(2)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    streams.seed_process(1)
    assert random.random() != expected[0]
    streams.seed_process(2)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_streams_of_another_root_are_refused() -> None:
    streams = WorkerStreams(5)
    with pytest.raises(casckpt.MismatchError, match="expected root 6, found 5"):
        streams.load_state_dict({"root": 6, "restarts": {1: 1}})
    assert streams.restarts == {}
