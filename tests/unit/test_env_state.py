"""Environments as components: what was captured goes on as it would have gone on, to the last bit.

The oracle is the environment itself, played on after the capture; nothing of the code under test computes it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers

import casckpt
from casckpt.integrations.gymnasium import EnvState, register_env_adapter
from casckpt.integrations.gymnasium.nodes import Same
from tests.unit import environments
from tests.unit.environments import Corridor, Counting, Handles, actions_for, atari, five_deep, play

QUICK = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "HalfCheetah-v5"]
MORE = ["Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Hopper-v5", "Ant-v5"]
BARE = ["Taxi-v4", "CliffWalking-v1", "Blackjack-v1", "Humanoid-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5"]
BARE += ["Walker2d-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5", "HumanoidStandup-v5"]
MAKERS: dict[str, Any] = {name: lambda name=name: wrapped(name) for name in QUICK + MORE}
MAKERS |= {name: lambda name=name: gymnasium.make(name) for name in BARE}
MAKERS |= {"ALE/Breakout-v5": lambda: atari("ALE/Breakout-v5"), "ALE/Pong-v5": lambda: atari("ALE/Pong-v5")}
MAKERS["Corridor"] = Corridor
SLOW = {*MORE, *BARE, "ALE/Pong-v5"}


def wrapped(name: str) -> Any:
    """Five wrappers where observations are arrays; FrozenLake's are numbers, which none of these normalises."""
    if name == "FrozenLake-v1":
        return wrappers.RecordEpisodeStatistics(wrappers.TimeAwareObservation(gymnasium.make(name), flatten=True))
    return five_deep(name)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in MAKERS]
)
def test_next_200_steps_after_a_restore_equal_those_after_the_capture(name: str, store_path: Any, seed: int) -> None:
    env = MAKERS[name]()
    env.reset(seed=seed % 1000)
    env.action_space.seed(seed)
    actions = actions_for(env, 263, seed)
    play(env, actions[:63])
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"env": EnvState(env)})
        expected = play(env, actions[63:])
        drawn = [np.array(env.action_space.sample()).tolist() for _ in range(5)]
        fresh, used = MAKERS[name](), MAKERS[name]()
        used.reset(seed=1)
        play(used, actions[:31])
        for live in (fresh, used, env):
            store.restore_into({"env": EnvState(live)}, 1)
            assert play(live, actions[63:]) == expected
            assert [np.array(live.action_space.sample()).tolist() for _ in range(5)] == drawn
    for live in (fresh, used, env):
        live.close()


def test_state_of_every_wrapper_comes_back() -> None:
    env, other = five_deep("CartPole-v1"), five_deep("CartPole-v1")
    env.reset(seed=3)
    play(env, actions_for(env, 150, 3))
    frames, rewards, observations = env.env, env.env.env, env.env.env.env
    statistics, limit = observations.env, observations.env.env
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert len(statistics.return_queue) > 2
    assert list(other.env.env.env.env.return_queue) == list(statistics.return_queue)
    assert list(other.env.env.env.env.length_queue) == list(statistics.length_queue)
    assert other.env.env.env.env.env._elapsed_steps == limit._elapsed_steps > 0
    assert other.env.env.env.obs_rms.mean.tobytes() == observations.obs_rms.mean.tobytes()
    assert other.env.env.return_rms.var == rewards.return_rms.var != 1.0
    assert other.env.env.discounted_reward == rewards.discounted_reward
    assert np.array(other.env.obs_queue).tobytes() == np.array(frames.obs_queue).tobytes()


def test_durations_measured_by_a_clock_are_no_state_and_unknown_after_a_restore(store_path: Any) -> None:
    env = wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    env.reset(seed=1)
    play(env, [1] * 40)
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"env": EnvState(env)})
        env.episode_start_time -= 100.0
        env.time_queue[0] = 77.0
        store.commit(2, {"env": EnvState(env)})
        assert store.snapshot(2).new_bytes == 0
        store.restore_into({"env": EnvState(env)}, 1)
    assert len(env.time_queue) == len(env.return_queue) > 0
    assert all(math.isnan(duration) for duration in env.time_queue)


def test_statistics_of_a_normaliser_belong_to_each_snapshot(store_path: Any) -> None:
    env = five_deep("Pendulum-v1")
    env.reset(seed=0)
    means = []
    with casckpt.open(store_path, create=True) as store:
        for step in (1, 2, 3):
            play(env, actions_for(env, 20, step))
            means.append(env.env.env.env.obs_rms.mean.copy())
            store.commit(step, {"env": EnvState(env)})
        for step, mean in zip((1, 2, 3), means, strict=True):
            store.restore_into({"env": EnvState(env)}, step)
            assert env.env.env.env.obs_rms.mean.tobytes() == mean.tobytes()
    assert len({mean.tobytes() for mean in means}) == 3


# --- sharing and identity ---


def test_objects_that_were_shared_are_shared_again() -> None:
    env, other = Corridor(), Corridor()
    env.reset(seed=0)
    play(env, [1, 0, 1] * 5)
    generator = other.rng
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert other.agents[0].rng is other.agents[1].rng is other.rng is generator
    assert other.tail is other.recent
    assert other.agents[0].friends[0] is other.agents[1]
    assert np.shares_memory(other.row, other.board)
    assert isinstance(other.pair, environments.Pair) and other.pair == env.pair
    assert other.colour is env.colour


def test_view_of_a_simulators_memory_stays_that_view() -> None:
    env, other = gymnasium.make("Hopper-v5"), gymnasium.make("Hopper-v5")
    for each in (env, other):
        each.reset(seed=1)
        each.unwrapped.angles = each.unwrapped.data.qpos
    play(env, actions_for(env, 10, 0))
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    play(other, actions_for(env, 10, 0))
    assert np.shares_memory(other.unwrapped.angles, other.unwrapped.data.qpos)


def test_contacts_are_those_of_the_restored_state() -> None:
    env, other = gymnasium.make("HumanoidStandup-v5"), gymnasium.make("HumanoidStandup-v5")
    env.reset(seed=1)
    play(env, actions_for(env, 30, 0))
    assert env.unwrapped.data.ncon > 0 and other.unwrapped.data.ncon == 0
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert other.unwrapped.data.ncon > 0


def test_captured_state_is_not_changed_by_playing_on_or_restoring_twice() -> None:
    env = Corridor()
    env.reset(seed=0)
    play(env, [1] * 10)
    state = EnvState(env).state_dict()
    expected = play(env, [0, 1] * 20)
    for _ in range(3):
        EnvState(env).load_state_dict(state)
        assert play(env, [0, 1] * 20) == expected


def test_attribute_that_came_after_the_capture_goes() -> None:
    env = Corridor()
    env.reset(seed=0)
    state = EnvState(env).state_dict()
    play(env, [1])
    assert hasattr(env, "late")
    EnvState(env).load_state_dict(state)
    assert not hasattr(env, "late")


def test_randomised_physics_of_a_model_comes_back() -> None:
    env, other = gymnasium.make("Hopper-v5"), gymnasium.make("Hopper-v5")
    env.unwrapped.model.body_mass[1] *= 1.5
    env.unwrapped.model.opt.gravity[2] = -5.0
    env.unwrapped.model.opt.timestep = 0.001
    env.reset(seed=1)
    actions = actions_for(env, 60, 0)
    play(env, actions[:10])
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert other.unwrapped.model.opt.timestep == 0.001
    assert play(other, actions[10:]) == play(env, actions[10:])


# --- what does not fit ---


def limited() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=20)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gymnasium.make("Acrobot-v1"), "CartPoleEnv"),
        (lambda: wrappers.ClipReward(gymnasium.make("CartPole-v1"), -1, 1), "ClipReward"),
        (limited, "max_episode_steps"),
        (lambda: gymnasium.make("CartPole-v1", sutton_barto_reward=True), "sutton_barto_reward"),
    ],
    ids=["another environment", "another wrapper", "another limit", "another argument"],
)
def test_environment_that_is_made_otherwise_is_refused_untouched(make: Any, words: str) -> None:
    env, other = gymnasium.make("CartPole-v1"), make()
    env.reset(seed=1)
    other.reset(seed=2)
    before = np.array(other.unwrapped.state)
    with pytest.raises(casckpt.MismatchError, match=words):
        EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert np.array_equal(other.unwrapped.state, before)


def test_model_of_another_robot_is_refused_untouched() -> None:
    env, other = gymnasium.make("Hopper-v5"), gymnasium.make("Hopper-v5", frame_skip=4)
    env.reset(seed=1)
    other.reset(seed=2)
    other.unwrapped.model.geom_contype[:] = 0
    before = other.unwrapped.data.qpos.copy()
    with pytest.raises(casckpt.MismatchError, match="another MuJoCo model"):
        EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert np.array_equal(other.unwrapped.data.qpos, before)


def test_state_of_an_unknown_version_is_refused() -> None:
    env = Counting()
    state = EnvState(env, strict=False).state_dict() | {"version": 99}
    with pytest.raises(casckpt.InvalidInputError, match="expected version 1, found 99"):
        EnvState(env, strict=False).load_state_dict(state)


class Rounding(Corridor):
    """It changes what it is given."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    @property
    def level(self) -> float:
        return float(self.__dict__["level"])

    @level.setter
    def level(self, value: float) -> None:
        self.__dict__["level"] = round(value)


def test_environment_that_changes_what_it_is_given_is_noticed() -> None:
    env, other = Rounding(), Rounding()
    for each in (env, other):
        each.reset(seed=0)
    env.__dict__["level"] = 0.25
    with pytest.raises(casckpt.MismatchError, match="level"):
        EnvState(other).load_state_dict(EnvState(env).state_dict())


# --- what cannot be captured ---


def test_handles_of_the_process_are_named_and_refused() -> None:
    env = Handles()
    try:
        report = EnvState(env).report()
        found = {finding.path for finding in report.missing}
        expected = {"count", "number", "pointer", "log", "socket", "lock", "nested['workers'][0]"}
        assert found == {f"env.{name}" for name in expected}
        assert not report.is_complete
        assert "env.pointer" in str(report)
        with pytest.raises(casckpt.UnsupportedStateError, match=r"env\.pointer") as caught:
            EnvState(env).state_dict()
        assert set(caught.value.paths) == found
    finally:
        env.close()


def test_partial_capture_is_recorded_and_restored_only_when_asked_for() -> None:
    env, other = Counting(), Counting()
    env.reset(seed=4)
    other.reset(seed=5)
    state = EnvState(env, strict=False).state_dict()
    assert state["not_captured"] and "env.count" in state["not_captured"][0]
    with pytest.raises(casckpt.InvalidInputError, match=r"captured without env\.count"):
        EnvState(other).load_state_dict(state)
    EnvState(other, strict=False).load_state_dict(state)
    assert other.np_random.random() == env.np_random.random()


def test_action_that_the_emulator_may_repeat_is_named_and_refused() -> None:
    env = gymnasium.make("ALE/Breakout-v5")
    env.reset(seed=1)
    report = EnvState(env).report()
    assert [finding.path for finding in report.missing] == ["env.env.env.ale"]
    assert "StickyAction(env, 0.25)" in report.missing[0].reason
    with pytest.raises(casckpt.UnsupportedStateError, match=r"env\.env\.env\.ale"):
        EnvState(env).state_dict()
    assert EnvState(env, strict=False).state_dict()["not_captured"] == [str(report.missing[0])]
    env.close()


@pytest.mark.full
def test_game_without_repeats_goes_on_from_any_moment_into_a_used_emulator(seed: int) -> None:
    env, other = (gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0) for _ in range(2))
    other.reset(seed=3)
    actions = actions_for(env, 200, seed)
    for number in range(20):
        env.reset(seed=number)
        play(env, actions[: 90 + number])
        play(other, actions[: 30 + number])
        EnvState(other).load_state_dict(EnvState(env).state_dict())
        assert play(other, actions[120:]) == play(env, actions[120:])
    env.close()
    other.close()


def test_report_lists_generators_that_nobody_has_seeded() -> None:
    env = gymnasium.make("CartPole-v1")
    assert {"env.env.env.env._np_random", "env.env.env.env.action_space._np_random"} <= set(
        EnvState(env).report().unseeded
    )
    env.reset(seed=0)
    env.action_space.seed(0)
    assert EnvState(env).report().unseeded == ["env.env.env.env.observation_space._np_random"]


def test_environment_that_holds_on_to_too_much_is_refused() -> None:
    env = Corridor()
    env.everything = [[] for _ in range(20_001)]
    with pytest.raises(casckpt.InvalidInputError, match=r"env\.everything\[\d+\].*more than 20000 objects"):
        EnvState(env).state_dict()


# --- own classes ---


class Engine:
    """A simulator that keeps its state where attributes do not show it."""

    def __init__(self) -> None:
        self._iterator = iter(range(10**6))
        self.position = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def advance(self) -> int:
        self.position = next(self._iterator)
        return self.position


def test_registered_adapter_captures_its_class_wherever_it_is_held() -> None:
    def rebuild(engine: Engine, position: int) -> None:
        engine._iterator = iter(range(position + 1, 10**6))
        engine.position = position

    register_env_adapter(Engine, lambda engine: engine.position, rebuild)
    env, other = Corridor(), Corridor()
    env.engines, other.engines = [Engine()], [Engine()]
    for _ in range(7):
        env.engines[0].advance()
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert other.engines[0].advance() == 7


def test_registering_something_that_is_no_class_is_refused() -> None:
    with pytest.raises(casckpt.InvalidInputError, match="expected a class"):
        register_env_adapter("Engine", id, print)  # type: ignore[arg-type]


class OwnProtocol(Counting):
    """It says itself what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.position = -1

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position += 1
        return np.array([float(self.position)]), 0.0, False, False, {}


def test_environment_with_get_state_and_set_state_uses_them_and_loses_no_stream() -> None:
    env, other = OwnProtocol(), OwnProtocol()
    for each, seed in ((env, 1), (other, 2)):
        each.reset(seed=seed)
        each.own = np.random.default_rng(seed)
    play(env, [0] * 5)
    state = EnvState(env).state_dict()
    EnvState(other).load_state_dict(state)
    assert other.step(0)[0] == 5.0
    assert other.np_random.random() == env.np_random.random()
    assert other.own.random() == env.own.random()
    assert EnvState(env).report().missing == []


# --- wrappers, and every moment ---

STACKS: dict[str, Any] = {
    "Autoreset": lambda env: wrappers.Autoreset(env),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 3),
    "StickyAction": lambda env: wrappers.StickyAction(env, 0.5, (2, 5)),
    "RepeatAction": lambda env: wrappers.RepeatAction(env, 2),
    "MaxAndSkipObservation": lambda env: wrappers.MaxAndSkipObservation(env, 2),
    "TimeAwareObservation": lambda env: wrappers.TimeAwareObservation(env),
    "RescaleAction": lambda env: wrappers.RescaleAction(env, np.float32(-0.5), np.float32(0.5)),
    "DiscretizeAction": lambda env: wrappers.DiscretizeAction(env, 5),
    "RescaleObservation": lambda env: wrappers.RescaleObservation(env, np.float32(-1), np.float32(1)),
    "ReshapeObservation": lambda env: wrappers.ReshapeObservation(env, (3, 1)),
    "FlattenObservation": lambda env: wrappers.FlattenObservation(env),
    "TransformObservation": lambda env: wrappers.TransformObservation(env, lambda seen: seen[:2], None),
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 3, padding_type="zero"),
    "ClipReward": lambda env: wrappers.ClipReward(env, -1.0, 0.0),
}


@pytest.mark.parametrize("name", STACKS)
def test_every_kind_of_wrapper_goes_on(name: str, seed: int) -> None:
    env, other = (STACKS[name](gymnasium.make("Pendulum-v1", max_episode_steps=37)) for _ in range(2))
    env.reset(seed=seed % 1000)
    actions = actions_for(env, 150, seed)
    play(env, actions[:50])
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    assert play(other, actions[50:]) == play(env, actions[50:])


@pytest.mark.full
def test_every_moment_of_a_training_can_be_gone_back_to(seed: int) -> None:
    """Before the first reset, in the middle of episodes, and between the end of one and its reset."""
    env, other = five_deep("CartPole-v1"), five_deep("CartPole-v1")
    actions = actions_for(env, 200, seed)
    states, given = [EnvState(env).state_dict()], [np.array(env.reset(seed=5)[0]).tobytes()]
    for action in actions[:80]:
        states.append(EnvState(env).state_dict())
        observation, _, terminated, truncated, _ = env.step(action)
        given.append(np.array(observation).tobytes())
        if terminated or truncated:
            states.append(EnvState(env).state_dict())
            given.append(np.array(env.reset()[0]).tobytes())
    EnvState(other).load_state_dict(states[0])
    assert np.array(other.reset(seed=5)[0]).tobytes() == given[0]
    resets = len(given) - 81
    assert resets > 2
    for at in reversed(range(1, len(given))):
        EnvState(other).load_state_dict(states[at])
        taken = sum(1 for state in states[1:at] if not is_at_an_end(state))
        is_end = is_at_an_end(states[at])
        observation = other.reset()[0] if is_end else other.step(actions[taken])[0]
        assert np.array(observation).tobytes() == given[at]


def is_at_an_end(state: dict[str, Any]) -> bool:
    """Whether CartPole's pole has fallen in this state."""
    return list(state["env"].layers.values())[-1].state.attributes["steps_beyond_terminated"] is not None


def test_several_environments_are_one_component(store_path: Any) -> None:
    def make() -> dict[str, Any]:
        return {"train": [gymnasium.make("CartPole-v1"), Corridor()], "eval": gymnasium.make("Pendulum-v1")}

    envs, others = make(), make()
    for each in (*envs["train"], envs["eval"]):
        each.reset(seed=1)
    with casckpt.open(store_path, create=True) as store:
        store.commit(1, {"envs": EnvState(envs)})
        store.restore_into({"envs": EnvState(others)}, 1)
    for env, other in zip((*envs["train"], envs["eval"]), (*others["train"], others["eval"]), strict=True):
        actions = actions_for(env, 50, 1)
        assert play(other, actions) == play(env, actions)


# --- trees that no capture makes ---


def test_forged_trees_are_refused_untouched() -> None:
    env = Counting()
    env.reset(seed=3)
    plain = EnvState(env, strict=False).state_dict()
    layer = plain["env"].layers["0.Counting"]
    before = env.np_random.bit_generator.state
    forged = [
        layer.state._replace(attributes={"__class__": "x"}),
        layer.state._replace(attributes={"a": Same("env.nowhere")}),
        layer.state._replace(attributes=7),
        layer.state._replace(kind="os.system"),
        Same("env"),
        None,
    ]
    for state in forged:
        tree = plain["env"]._replace(layers={"0.Counting": layer._replace(state=state)})
        with pytest.raises(casckpt.CasckptError):
            EnvState(env, strict=False).load_state_dict({**plain, "env": tree})
            raise AssertionError(f"{state} was accepted")
    assert env.np_random.bit_generator.state == before


class Odd(Counting):
    """It holds values of kinds that environments hold now and then."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.count = range(start)
        self.places = {(start, 1), (2, start)}
        self.routes = {(0, start): [start], (1, (2, 3)): []}
        self.wide = np.datetime64(start, "s")
        self.table = np.array([(start, 0.5)], dtype=[("a", "i4"), ("b", "f8")])
        self.memory = memoryview(bytes(start))
        self.parts = np.array([object()], dtype=object)
        self.scale = functools.partial(np.multiply, start)
        self.chooser = functools.partial(max, [start])


def test_odd_values_are_captured_or_named() -> None:
    env, other = Odd(3), Odd(4)
    places = other.places
    assert {finding.path for finding in EnvState(env).report().missing} == {"env.memory", "env.parts", "env.chooser"}
    EnvState(other, strict=False).load_state_dict(EnvState(env, strict=False).state_dict())
    assert other.places == {(3, 1), (2, 3)} and other.places is places
    assert other.routes == {(0, 3): [3], (1, (2, 3)): []}
    assert other.wide == np.datetime64(3, "s")
    assert other.table.tolist() == [(3, 0.5)] and other.table.dtype == env.table.dtype
