"""Vector environments: sub-environments, what the vector itself keeps, and workers in other processes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector

import casckpt
from casckpt.integrations.gymnasium import EnvState, capturable
from tests.unit.environments import Counting, cart_pole, normalised_cart_pole

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # workers that start fast

COUNT = 2
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def play(venv: Any, actions: Any) -> list[Any]:
    """What the vector gives, as bytes; where it does not reset by itself, ended episodes are reset by mask."""
    given = []
    for action in actions:
        observation, reward, terminated, truncated, _ = venv.step(action)
        given.append([np.array(part).tobytes() for part in (observation, reward, terminated, truncated)])
        ended = terminated | truncated
        if venv.metadata["autoreset_mode"] == AutoresetMode.DISABLED and ended.any():
            given.append([np.array(venv.reset(options={"reset_mask": ended})[0]).tobytes()])
    return given


def actions_for(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 2, (count, COUNT))


def sync(mode: AutoresetMode) -> Any:
    venv: Any = SyncVectorEnv([normalised_cart_pole] * COUNT, autoreset_mode=mode)
    venv = vector.RecordEpisodeStatistics(venv)
    if mode == AutoresetMode.NEXT_STEP:
        venv = vector.NormalizeObservation(venv)  # which knows no other mode
    return venv if mode == AutoresetMode.DISABLED else vector.NormalizeReward(venv)


def workers(mode: AutoresetMode, shared_memory: bool = True, make: Any = normalised_cart_pole) -> Any:
    makers = [capturable(make)] * COUNT
    return AsyncVectorEnv(makers, shared_memory=shared_memory, context="fork", autoreset_mode=mode)


def steps_to_an_end(venv: Any, actions: Any) -> int:
    """Play until an episode has just ended; how many steps that took."""
    for number, action in enumerate(actions):
        _, _, terminated, truncated, _ = venv.step(action)
        if (terminated | truncated).any():
            return number + 1
    raise AssertionError("no episode ended")


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_vector_of_environments_goes_on_as_it_would_have(mode: AutoresetMode, store_path: Any, seed: int) -> None:
    venv, other = sync(mode), sync(mode)
    venv.reset(seed=seed % 1000)
    venv.action_space.seed(seed)
    actions = actions_for(280, seed)
    play(venv, actions[:80])
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"envs": EnvState(venv)})
        expected, drawn = play(venv, actions[80:]), venv.action_space.sample().tolist()
        other.reset(seed=5)
        play(other, actions[:33])
        store.restore_into({"envs": EnvState(other)}, 1)
    assert play(other, actions[80:]) == expected
    assert other.action_space.sample().tolist() == drawn


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
def test_reset_that_is_due_at_the_capture_is_done_after_the_restore(mode: AutoresetMode, seed: int) -> None:
    venv, other = sync(mode), sync(mode)
    venv.reset(seed=seed % 1000)
    actions = actions_for(400, seed)
    at = steps_to_an_end(venv, actions)
    state = EnvState(venv).state_dict()
    expected = play(venv, actions[at : at + 100])
    EnvState(other).load_state_dict(state)
    assert play(other, actions[at : at + 100]) == expected


def check_workers(mode: AutoresetMode, shared_memory: bool, seed: int, *, live_is_due: bool) -> None:
    """Capture when a reset is due, restore into other workers; `live_is_due`: one is due there too, or none is."""
    venv, other = workers(mode, shared_memory), workers(mode, shared_memory)
    try:
        venv.reset(seed=seed % 1000)
        venv.action_space.seed(seed)
        actions = actions_for(400, seed)
        states, expected = [], []
        at = steps_to_an_end(venv, actions) if mode != AutoresetMode.DISABLED else len(play(venv, actions[:30]))
        for start in (at, at + 3):  # with a reset due, and without
            states.append(EnvState(venv).state_dict())
            expected.append(play(venv, actions[start : start + 100]))
            EnvState(venv).load_state_dict(states[-1])
            assert play(venv, actions[start : start + 100]) == expected[-1]
            EnvState(venv).load_state_dict(states[-1])
            play(venv, actions[start : start + 3])
        drawn = venv.action_space.sample().tolist()
        other.reset(seed=77)
        if live_is_due and mode != AutoresetMode.DISABLED:
            steps_to_an_end(other, actions)
        for start, state, outcome in zip((at, at + 3), states, expected, strict=True):
            EnvState(other).load_state_dict(state)
            assert play(other, actions[start : start + 100]) == outcome
        assert len(drawn) == COUNT
        assert other.action_space.np_random.bit_generator.state != venv.action_space.np_random.bit_generator.state
    finally:
        venv.close()
        other.close()


@pytest.mark.full
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "pipes"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_environments_in_workers_go_on_as_they_would_have(mode: AutoresetMode, shared_memory: bool, seed: int) -> None:
    check_workers(mode, shared_memory, seed, live_is_due=True)


@pytest.mark.full
def test_workers_in_which_no_reset_is_due_take_a_state_in_which_one_is(seed: int) -> None:
    check_workers(AutoresetMode.NEXT_STEP, True, seed, live_is_due=False)


@pytest.mark.full
def test_draws_of_a_vectors_action_space_go_on(store_path: Any) -> None:
    venv, other = workers(MODES[0]), workers(MODES[0])
    try:
        venv.reset(seed=1)
        venv.action_space.seed(9)
        with casckpt.open(store_path, create=True) as store:
            store.commit(1, {"envs": EnvState(venv)})
            drawn = [venv.action_space.sample().tolist() for _ in range(8)]
            other.reset(seed=2)
            store.restore_into({"envs": EnvState(other)}, 1)
        assert [other.action_space.sample().tolist() for _ in range(8)] == drawn
    finally:
        venv.close()
        other.close()


@pytest.mark.full
def test_workers_that_cannot_be_asked_are_refused_with_the_way_out() -> None:
    venv = AsyncVectorEnv([cart_pole] * COUNT, context="fork")
    try:
        with pytest.raises(casckpt.UnsupportedStateError, match=r"capturable\(make\)"):
            EnvState(venv).state_dict()
        assert venv.reset(seed=0)[0].shape == (COUNT, 4)
    finally:
        venv.close()


@pytest.mark.full
def test_step_under_way_is_refused() -> None:
    venv = workers(MODES[0])
    try:
        venv.reset(seed=0)
        venv.step_async(np.zeros(COUNT, int))
        with pytest.raises(casckpt.InvalidInputError, match="a step is under way"):
            EnvState(venv).state_dict()
        venv.step_wait()
        assert EnvState(venv).state_dict()["version"] == 1
    finally:
        venv.close()


@pytest.mark.full
def test_what_a_worker_cannot_capture_is_reported_with_its_number() -> None:
    venv = workers(MODES[0], make=Counting)
    try:
        venv.reset(seed=0)
        missing = EnvState(venv).report().missing
        assert [finding.path for finding in missing] == [f"env.envs[{number}]" for number in range(COUNT)]
        assert all(finding.reason.startswith("env.count: itertools.count") for finding in missing)
        with pytest.raises(casckpt.UnsupportedStateError, match="itertools"):
            EnvState(venv).state_dict()
    finally:
        venv.close()


@pytest.mark.full
def test_other_environments_in_the_workers_are_refused_untouched() -> None:
    venv, other = workers(MODES[0]), workers(MODES[0], make=cart_pole)
    try:
        venv.reset(seed=0)
        other.reset(seed=1)
        state = EnvState(venv).state_dict()
        before = EnvState(other).state_dict()
        with pytest.raises(casckpt.MismatchError, match=r"worker 0: .*NormalizeReward"):
            EnvState(other).load_state_dict(state)
        other.step(np.zeros(COUNT, int))
        EnvState(other).load_state_dict(before)
        assert other.action_space == venv.action_space
    finally:
        venv.close()
        other.close()


def test_number_of_environments_is_compared() -> None:
    one, two = SyncVectorEnv([cart_pole]), SyncVectorEnv([cart_pole] * 2)
    one.reset(seed=0)
    two.reset(seed=0)
    with pytest.raises(casckpt.MismatchError, match="envs"):
        EnvState(two).load_state_dict(EnvState(one).state_dict())
    assert isinstance(two.envs[1], gymnasium.Env)
