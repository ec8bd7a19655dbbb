"""The demo's PPO: deterministic, whole in what it calls its state, and able to learn.

The oracle of every continuation is the training that was not interrupted.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason='needs the extra "demo"')

from casckpt.demo._environments import Environments, RunningMoments
from casckpt.demo._network import seed_global_streams
from casckpt.demo._ppo import Ppo, PpoConfig, estimate_advantages
from casckpt.demo._proof import digest_components, draw_next, plain_state

SMALL = PpoConfig(
    seed=7, updates=20, environment_count=3, rollout_steps=48, epochs=2, minibatch_size=36, hidden_size=16
)


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    with undisturbed_process():
        yield


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """One torch thread, as in the worker; afterwards it and the global random streams are as they were."""
    threads, python, legacy, cpu = (
        torch.get_num_threads(),
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(cpu)


class Uninterrupted(NamedTuple):
    """State after update 2 of a training, and what it went on to be at update 3."""

    state: dict[str, Any]
    metrics: list[dict[str, float]]
    digests: dict[str, str]
    draws: dict[str, list[float]]
    policy: list[torch.Tensor]


@pytest.fixture(scope="module")
def uninterrupted() -> Uninterrupted:
    with undisturbed_process():
        ppo = started()
        train(ppo, 2)
        state = captured(ppo)
        metrics = train(ppo, 1)
        return Uninterrupted(
            state, metrics, digest_components(ppo.state()), draw_next(ppo), list(ppo.policy.parameters())
        )


def started(config: PpoConfig = SMALL) -> Ppo:
    ppo = Ppo(config)
    ppo.begin()
    return ppo


def train(ppo: Ppo, update_count: int) -> list[dict[str, float]]:
    metrics = []
    for _ in range(update_count):
        ppo.collect()
        metrics.append(ppo.learn())
    return metrics


def captured(ppo: Ppo) -> dict[str, Any]:
    return copy.deepcopy(plain_state(ppo.state()))


def load(ppo: Ppo, state: dict[str, Any], *, forget: str | None = None) -> None:
    """What a restore has to do, written by hand; streams come last."""
    parts = ppo.state()
    for name in [*(name for name in parts if name != "rng"), "rng"]:
        if name == forget:
            continue
        if hasattr(parts[name], "load_state_dict"):
            parts[name].load_state_dict(copy.deepcopy(state[name]))
        else:
            parts[name].update(copy.deepcopy(state[name]))


def disturb_streams() -> None:
    seed_global_streams(99)
    random.random(), np.random.random(), torch.rand(5)


def test_two_trainings_from_one_seed_are_bit_identical() -> None:
    first, second = (_trained_once() for _ in range(2))
    assert first == second


def _trained_once() -> tuple[Any, ...]:
    ppo = started()
    return train(ppo, 3), digest_components(ppo.state()), draw_next(ppo)


def test_another_seed_gives_another_training() -> None:
    first, second = started(), started(PpoConfig(**{**vars(SMALL), "seed": 8}))
    train(first, 1), train(second, 1)
    assert digest_components(first.state())["policy"] != digest_components(second.state())["policy"]


def test_state_taken_mid_way_continues_bit_exactly_in_new_objects(uninterrupted: Uninterrupted) -> None:
    resumed = Ppo(SMALL)
    disturb_streams()
    load(resumed, uninterrupted.state)
    assert train(resumed, 1) == uninterrupted.metrics
    assert digest_components(resumed.state()) == uninterrupted.digests
    assert draw_next(resumed) == uninterrupted.draws
    for left, right in zip(uninterrupted.policy, resumed.policy.parameters(), strict=True):
        assert torch.equal(left, right)


# Not among them: the rollout buffer, which the next update fills from scratch.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "component", ["policy", "value", "optimizer", "schedule", "normalizer", "environments", "counters", "rng"]
)
def test_a_forgotten_component_changes_the_continuation(component: str, uninterrupted: Uninterrupted) -> None:
    resumed = started()
    disturb_streams()
    load(resumed, uninterrupted.state, forget=component)
    train(resumed, 1)
    assert digest_components(resumed.state()) != uninterrupted.digests


def test_training_does_not_change_a_state_taken_before() -> None:
    ppo = started()
    train(ppo, 1)
    state = ppo.normalizer.state_dict(), ppo.environments.state_dict()
    before = copy.deepcopy(state)
    train(ppo, 1)
    assert repr(state) == repr(before)


def test_reseed_leaves_the_recorded_streams_for_those_of_the_seed() -> None:
    ppo = started()
    train(ppo, 1)
    ppo.reseed(5)
    draws = draw_next(ppo)
    assert draws["python"][0] == random.Random(5).random()
    assert draws["numpy"][0] == np.random.RandomState(5).random_sample()
    assert draws["shuffle"][0] == np.random.default_rng(5).random()
    assert draws["torch"][0] == torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).item()


@pytest.mark.full
def test_the_return_more_than_doubles_in_ten_updates() -> None:
    metrics = train(started(PpoConfig(seed=1, updates=60)), 10)
    assert metrics[-1]["return"] > 2 * metrics[0]["return"]


def test_learning_rate_falls_linearly_to_the_horizon() -> None:
    metrics = train(started(), 3)
    expected = [SMALL.learning_rate * (1 - done / SMALL.updates) for done in range(3)]
    assert [row["learning_rate"] for row in metrics] == pytest.approx(expected, rel=1e-12)


def test_advantages_are_the_discounted_sum_of_surprises_within_an_episode() -> None:
    gamma, lam = 0.9, 0.8
    reward, value, ended, last_value = [1.0, 2.0, 3.0, 4.0], [0.5, 1.5, 2.5, 3.5], [False, True, False, False], 6.0
    following = [*value[1:], last_value]
    surprise = [r + gamma * n * (not e) - v for r, v, e, n in zip(reward, value, ended, following, strict=True)]
    expected = [
        surprise[0] + gamma * lam * surprise[1],
        surprise[1],
        surprise[2] + gamma * lam * surprise[3],
        surprise[3],
    ]
    rollout = {"reward": reward, "value": value, "ended": ended}
    columns = {name: torch.tensor(rows)[:, None] for name, rows in rollout.items()}
    advantage, target = estimate_advantages({**columns, "last_value": torch.tensor([last_value])}, gamma, lam)
    assert advantage[:, 0].tolist() == pytest.approx(expected)
    assert (target - advantage)[:, 0].tolist() == pytest.approx(value)


def test_running_moments_are_those_of_all_rows_together(seed: int) -> None:
    rows = np.random.default_rng(seed).normal(3.0, 2.0, size=(500, 2))
    moments = RunningMoments(2)
    for part in np.array_split(rows, 7):
        moments.update(part)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, rows.var(axis=0), rtol=1e-5)


def test_environments_continue_in_the_middle_of_episodes_across_restarts() -> None:
    seed_global_streams(3)
    actions = np.random.default_rng(3).integers(0, 2, size=(60, 2))
    environments = Environments(2)
    environments.begin(3)
    for action in actions[:20]:
        environments.step(action)
    state, streams = copy.deepcopy(environments.state_dict()), (random.getstate(), np.random.get_state())
    expected = [environments.step(action) for action in actions[20:]]
    assert any(step.ended.any() for step in expected)

    restored = Environments(2)
    restored.load_state_dict(state)
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    for action, wanted in zip(actions[20:], expected, strict=True):
        for found, column in zip(restored.step(action), wanted, strict=True):
            np.testing.assert_array_equal(found, column)
    assert repr(restored.state_dict()) == repr(environments.state_dict())


def test_the_time_limit_counts_on_after_a_restore_and_ends_the_episode_as_truncated() -> None:
    seed_global_streams(3)
    environments = Environments(1)
    environments.begin(3)
    state = environments.state_dict()
    state["environments"][0]["elapsed_steps"] = 499  # CartPole-v1 ends an episode at 500
    restored = Environments(1)
    restored.load_state_dict(state)
    step = restored.step(np.array([0]))
    assert step.truncated.tolist() == [True]
    assert step.ended.tolist() == [True]
