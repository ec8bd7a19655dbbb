"""Stable-Baselines3: where in the loop a snapshot is taken, what is restored in place, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

stable_baselines3 = pytest.importorskip("stable_baselines3")
import torch  # noqa: E402
from stable_baselines3 import DQN, PPO, SAC, TD3  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize  # noqa: E402

import casckpt  # noqa: E402
from casckpt.engine.templates import check_complete, paths_of  # noqa: E402
from casckpt.integrations.gymnasium import EnvState  # noqa: E402
from casckpt.integrations.sb3 import CheckpointCallback, StatefulEnv, components, resume  # noqa: E402
from casckpt.recovery import make_plan  # noqa: E402

SMALL = {"net_arch": [8]}
TOTAL = 96
# Forked workers need not import anything; what they run here touches no thread's lock.
IN_WORKERS: dict[str, Any] = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}


def ppo(**options: Any) -> PPO:
    env = options.pop("env", None) or VecNormalize(make_vec_env("CartPole-v1", 2, seed=1))
    arguments = {
        "n_steps": 8,
        "batch_size": 16,
        "n_epochs": 1,
        "policy_kwargs": dict(SMALL),
        "seed": 3,
        "device": "cpu",
    }
    return PPO("MlpPolicy", env, **{**arguments, **options})


def off_policy(kind: Any, env_id: str, env_count: int = 1, **options: Any) -> Any:
    arguments = {"learning_starts": 16, "buffer_size": 64, "batch_size": 8, "train_freq": 4, "device": "cpu", "seed": 3}
    env = make_vec_env(env_id, env_count, seed=1)
    return kind("MlpPolicy", env, policy_kwargs=dict(SMALL), **{**arguments, **options})


@pytest.fixture
def open_store(store_path: Path) -> Iterator[Callable[..., casckpt.Store]]:
    """Opens the test's store; all handles are closed at the end."""
    opened: list[casckpt.Store] = []

    def open_it(**options: Any) -> casckpt.Store:
        opened.append(casckpt.open(store_path, create=True, **options))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def train(model: Any, store: casckpt.Store, total: int = TOTAL, every_steps: int = 1, others: Any = (), **options: Any):
    """Resume if there is something to resume, and train up to `total`; returns what `resume` said."""
    callback = CheckpointCallback(store, every_steps=every_steps, **options)
    start = resume(model, callback, total)
    model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=[callback, *others])
    return start


class Watch(BaseCallback):
    """Calls a function at every step; what it returns tells whether to go on."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self._look = look

    def _on_step(self) -> bool:
        return self._look(self.model) is not False


# --- where a snapshot is taken ---


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("env_count", [1, 2])
def test_every_snapshot_has_as_many_rows_as_its_counter_says(env_count: int, open_store: Any) -> None:
    model, store = off_policy(DQN, "CartPole-v1", env_count, buffer_size=1000), open_store()
    in_on_step: list[int] = []
    look = Watch(lambda live: in_on_step.append(live.num_timesteps // env_count - live.replay_buffer.pos))
    train(model, store, others=[look])
    assert set(in_on_step) == {1}  # a callback that saved there would count a row that is not stored yet
    assert len(store.steps()) > 5
    for step in store.steps():
        state = store.restore(step, only=["progress", "replay_buffer"])
        rows = state["replay_buffer"].rows(0, len(state["replay_buffer"]), ["observations"])["observations"]
        assert len(rows) == state["progress"]["counters"]["num_timesteps"] // env_count == step // env_count
        assert np.abs(rows).sum(axis=(1, 2)).all()


@pytest.mark.full
def test_multiples_are_committed_at_the_next_boundary_and_so_is_the_end(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, every_steps=40)
    assert store.steps() == [48, 80, 96]  # the boundaries after 40 and 80, and the end
    assert store.snapshot(48).metrics["ep_len_mean"] > 0


@pytest.mark.full
def test_training_that_ends_inside_a_rollout_keeps_the_last_boundary(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, others=[Watch(lambda model: model.num_timesteps < 40)])
    assert store.steps() == [16, 32]


@pytest.mark.full
def test_training_goes_on_in_the_same_process_without_a_resume(open_store: Any) -> None:
    model, store = ppo(), open_store()
    callback = CheckpointCallback(store, every_steps=32, async_mode=False)
    model.learn(32, callback=callback)
    with pytest.warns(
        casckpt.ConfigDriftWarning, match="total_timesteps: 32 → 64"
    ):  # schedules run over another length
        model.learn(32, callback=callback, reset_num_timesteps=False)
    assert store.steps() == [32, 64]


# --- what is restored ---


def test_parameters_optimizers_and_temperature_keep_their_identity(open_store: Any) -> None:
    train(off_policy(SAC, "Pendulum-v1"), open_store(run="a"), every_steps=1000)
    model = off_policy(SAC, "Pendulum-v1", seed=9)
    before = [*model.policy.parameters(), model.log_ent_coef]
    resume(model, CheckpointCallback(open_store(run="a"), every_steps=1), TOTAL)
    after = [*model.policy.parameters(), model.log_ent_coef]
    assert all(old is new for old, new in zip(before, after, strict=True))
    assert model.ent_coef_optimizer.param_groups[0]["params"][0] is model.log_ent_coef
    temperature = model.log_ent_coef.item()
    model.set_logger(stable_baselines3.common.logger.Logger(None, []))
    model.train(gradient_steps=1, batch_size=8)
    assert model.log_ent_coef.item() != temperature
    assert model.ent_coef_optimizer.state[model.log_ent_coef]["step"] > 1


def test_normalizer_comes_back_with_its_returns(open_store: Any) -> None:
    model, store = ppo(), open_store()
    train(model, store, total=32)
    other = ppo(seed=9)
    resume(other, CheckpointCallback(store, every_steps=1), 32)
    live, restored = model.get_vec_normalize_env(), other.get_vec_normalize_env()
    assert live is not None and restored is not None
    assert live.returns.any()
    np.testing.assert_array_equal(restored.returns, live.returns)
    for name in ("obs_rms", "ret_rms"):
        for part in ("mean", "var", "count"):
            np.testing.assert_array_equal(getattr(getattr(restored, name), part), getattr(getattr(live, name), part))


@pytest.mark.full
def test_each_snapshot_has_the_statistics_of_its_own_step(open_store: Any) -> None:
    model, store = ppo(), open_store()
    seen: dict[int, float] = {}

    def look(live: Any) -> None:
        if live.num_timesteps % 16 == 2:  # the first step of a rollout has added its two rows
            seen[live.num_timesteps - 2] = live.get_vec_normalize_env().obs_rms.count - 2

    train(model, store, total=64, others=[Watch(look)])
    counts = {step: store.restore(step)["normalizer"]["opened"]["obs_rms"]["count"] for step in (16, 32, 48)}
    assert counts == pytest.approx({step: seen[step] for step in (16, 32, 48)})
    assert len(set(counts.values())) == 3


@pytest.mark.full
def test_action_noise_survives_the_reset_that_learn_makes(open_store: Any) -> None:
    def make() -> Any:
        noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1))
        return off_policy(TD3, "Pendulum-v1", 2, action_noise=noise)

    model, store = make(), open_store(run="a")
    train(model, store, total=64)
    reference = [noise.noise_prev for noise in model.action_noise.noises]
    assert np.abs(reference).min() > 0

    class Look(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def _on_training_start(self) -> None:
            self.seen.append([noise.noise_prev.copy() for noise in self.model.action_noise.noises])

        _on_rollout_start = _on_training_start

        def _on_step(self) -> bool:
            return False

    look, other = Look(), make()
    callback = CheckpointCallback(open_store(run="a"), every_steps=1000)
    start = resume(other, callback, 80)
    other.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=[look, callback])
    reset, settled = look.seen
    assert not np.any(reset)
    np.testing.assert_array_equal(settled, reference)


@pytest.mark.full
def test_counter_of_a_subclass_is_captured_without_being_named(open_store: Any) -> None:
    class Counting(PPO):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.train_count = 0

        def train(self) -> None:
            self.train_count += 1
            super().train()

    def make() -> Counting:
        return Counting("MlpPolicy", make_vec_env("CartPole-v1", 1), n_steps=16, batch_size=16, device="cpu")

    store = open_store()
    train(make(), store, total=64)
    model = make()
    resume(model, CheckpointCallback(store, every_steps=1), 64)
    assert model.train_count == 4


@pytest.mark.full
def test_stacked_frames_come_back(open_store: Any) -> None:
    def make() -> PPO:
        return ppo(env=VecFrameStack(make_vec_env("CartPole-v1", 2, seed=1), 3))

    model, store = make(), open_store()
    train(model, store, total=32)
    other = make()
    resume(other, CheckpointCallback(store, every_steps=1), 32)
    np.testing.assert_array_equal(other.env.stacked_obs.stacked_obs, model.env.stacked_obs.stacked_obs)
    assert other.env.stacked_obs.stacked_obs[:, 4:8].any()


@pytest.mark.full
def test_best_evaluation_and_its_records_come_back_and_later_ones_are_gone(open_store: Any, tmp_path: Path) -> None:
    def evaluation(name: str) -> EvalCallback:
        env = make_vec_env("CartPole-v1", 1, seed=5)
        return EvalCallback(env, eval_freq=12, n_eval_episodes=1, log_path=str(tmp_path / name), verbose=0)

    model, store, first = ppo(env=make_vec_env("CartPole-v1", 2, seed=1)), open_store(), evaluation("a")
    train(model, store, others=[first])
    assert first.evaluations_timesteps == [24, 48, 72, 96]
    second = evaluation("b")
    other = ppo(env=make_vec_env("CartPole-v1", 2, seed=1))
    callback = CheckpointCallback(store, every_steps=1)
    start = resume(other, callback, TOTAL, ref=64)
    assert start.remaining == 32
    other.learn(start.remaining, reset_num_timesteps=False, callback=[callback, second])
    assert second.evaluations_timesteps == first.evaluations_timesteps
    assert second.evaluations_results == first.evaluations_results
    assert second.best_mean_reward == first.best_mean_reward
    assert store.timeline()[-1].metrics["eval_mean_reward"] == first.last_mean_reward


@pytest.mark.full
def test_callback_that_is_missing_after_a_resume_is_named(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=64, others=[Watch(lambda model: model.num_timesteps < 40)])
    with pytest.warns(casckpt.StoreWarning, match="Watch-1"):
        train(ppo(), store, total=64)


@pytest.mark.full
def test_reseeding_leaves_the_recorded_streams_and_says_so(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=64)
    draws = []
    for seed in (None, 11):
        model = ppo()
        callback = CheckpointCallback(store, every_steps=16, async_mode=False)
        start = resume(model, callback, 64, ref="main@32", branch=f"seed-{seed}", reseed=seed)
        model.learn(start.remaining, reset_num_timesteps=False, callback=callback)
        draws.append(model.rollout_buffer.actions.copy())
    assert (draws[0] != draws[1]).any()
    assert store.snapshot("seed-11").labels["rng.reseed"] == "11"
    assert "rng.reseed" not in store.snapshot("seed-None").labels


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "make"),
    [("ppo", ppo), ("sac", lambda: off_policy(SAC, "Pendulum-v1")), ("dqn", lambda: off_policy(DQN, "CartPole-v1"))],
)
def test_model_in_training_is_complete_by_its_template(template: str, make: Any, open_store: Any) -> None:
    store = open_store()
    train(make(), store, total=32)
    state = store.restore()
    assert check_complete(template, paths_of(state)).is_complete
    for name in ("policy", "rng", "env", "observation", "progress"):
        without = {key: value for key, value in state.items() if key != name}
        assert check_complete(template, paths_of(without)).missing, f"nothing is missing without {name}"


@pytest.mark.full
def test_plan_of_a_recovery_names_each_part_of_sac_by_its_kind(open_store: Any) -> None:
    model, store = off_policy(SAC, "Pendulum-v1"), open_store()
    train(model, store, total=32)
    steps = {step.kind: step for step in make_plan(store).steps}
    weights = sum(each.nbytes for each in model.policy.state_dict().values()) + model.log_ent_coef.nbytes
    assert steps["weights"].touches == ("log_ent_coef", "policy")
    assert weights <= steps["weights"].size_bytes < weights + 16  # with two blocks of scalars
    assert steps["optimizers"].touches == ("actor.optimizer", "critic.optimizer", "ent_coef_optimizer")
    assert steps["buffers"].touches == ("replay_buffer",)
    assert steps["environments"].touches == ("env",)
    assert steps["streams"].touches == ("rng",)
    assert {"progress", "observation"} <= set(steps["metadata"].touches)
    assert list(steps).index("streams") > list(steps).index("check") > list(steps).index("environments")


@pytest.mark.full
def test_temperature_and_its_optimizer_are_missed(open_store: Any) -> None:
    store = open_store()
    train(off_policy(SAC, "Pendulum-v1"), store, total=32)
    state = store.restore()
    for component, role in (("log_ent_coef", "temperature"), ("ent_coef_optimizer", "temperature optimizer")):
        without = {name: value for name, value in state.items() if name != component}
        assert check_complete("sac", paths_of(without)).missing == (role,)


@pytest.mark.full
def test_engine_decides_what_is_saved_at_a_boundary_and_brings_it_back(open_store: Any) -> None:
    config = {"save_budget": None, "async_mode": False, "components": {"policy": {"every_steps": 32}}}

    def go_on(run: str, *others: BaseCallback) -> tuple[PPO, Any]:
        model = ppo()
        with casckpt.CheckpointEngine(open_store(run=run), config=config) as engine:
            callback = CheckpointCallback(engine, every_steps=16)
            start = resume(model, callback, TOTAL)
            model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=[callback, *others])
        return model, start

    whole, start = go_on("whole")
    assert start.is_fresh
    steps = {snapshot.step: snapshot for snapshot in open_store(run="whole").timeline()}
    assert {step: snapshot.components["policy"].step for step, snapshot in steps.items()} == {
        **{16: 16, 32: 32, 48: 32, 64: 64, 80: 64, 96: 96}
    }
    go_on("broken", Watch(lambda model: model.num_timesteps < 60))
    assert open_store(run="broken").timeline()[-1].step == 48
    with pytest.warns(casckpt.StoreWarning, match=r"step 48 .* is mixed"):  # it has the weights of step 32
        model, start = go_on("broken", Watch(lambda model: True))
    assert start.report.step == 32
    assert all(torch.equal(value, model.policy.state_dict()[name]) for name, value in whole.policy.state_dict().items())
    np.testing.assert_array_equal(whole._last_obs, model._last_obs)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_environments_in_worker_processes_go_on_through_their_wrapper(open_store: Any) -> None:
    def make() -> PPO:
        return ppo(env=make_vec_env("CartPole-v1", 2, seed=1, wrapper_class=StatefulEnv, **IN_WORKERS))

    ends = []
    for run, stops in (("whole", [1000]), ("broken", [40, 1000])):
        for stop in stops:
            model = make()
            train(model, open_store(run=run), others=[Watch(lambda live, at=stop: live.num_timesteps < at)])
            model.env.close()
        ends.append((model.num_timesteps, model._last_obs, model.policy.state_dict()))
    assert ends[0][0] == ends[1][0] == TOTAL
    np.testing.assert_array_equal(ends[0][1], ends[1][1])
    assert all(torch.equal(value, ends[1][2][name]) for name, value in ends[0][2].items())


# --- what is refused ---


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_environments_in_worker_processes_are_refused_without_their_wrapper(open_store: Any) -> None:
    model = ppo(env=make_vec_env("CartPole-v1", 2, seed=1, **IN_WORKERS))
    with pytest.raises(casckpt.UnsupportedStateError, match=r"worker processes.*wrapper_class=StatefulEnv"):
        train(model, open_store())
    model.env.close()


class Drift(VecEnv):
    """Simulates all its environments in one array, as those on a GPU do."""

    def __init__(self, handle: Any = None) -> None:
        box = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
        super().__init__(2, box, gymnasium.spaces.Discrete(2))
        self.luck, self.position, self.handle = np.random.default_rng(5), np.zeros((2, 3), np.float32), handle

    def reset(self) -> Any:
        self.position[:] = 0
        return self.position.copy()

    def step_async(self, actions: Any) -> None:
        self.position += self.luck.standard_normal((2, 3)) * (1 + actions[:, None])

    def step_wait(self) -> Any:
        return self.position.copy(), self.position[:, 0].copy(), np.zeros(2, bool), [{}, {}]

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * 2

    set_attr = env_method = None

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        raise NotImplementedError


@pytest.mark.full
def test_environments_that_their_vector_simulates_itself_go_on_or_are_named(open_store: Any) -> None:
    ends = []
    for run, stops in (("whole", [1000]), ("broken", [40, 1000])):
        for stop in stops:
            model = ppo(env=VecNormalize(Drift()))
            train(model, open_store(run=run), others=[Watch(lambda live, at=stop: live.num_timesteps < at)])
        ends.append(model)
    np.testing.assert_array_equal(ends[0]._last_obs, ends[1]._last_obs)
    assert ends[0].env.unwrapped.luck.random() == ends[1].env.unwrapped.luck.random()
    message = r"environments: Drift simulates all .* captured: env\.handle: .*object.*state_dict\(\).*StatefulEnv"
    with pytest.raises(casckpt.UnsupportedStateError, match=message):
        train(ppo(env=Drift(object())), open_store(run="refused"))
    with pytest.warns(casckpt.StoreWarning, match=message):
        train(ppo(env=Drift(object())), open_store(run="lenient"), total=32, strict=False)
    model = ppo(env=Drift(object()))
    with pytest.warns(casckpt.StoreWarning, match="go on without environments: Drift .* and begin new episodes"):
        resume(model, CheckpointCallback(open_store(run="lenient"), every_steps=1, strict=False), TOTAL)
    assert model._last_obs is None
    assert model.env.luck.bit_generator.state == Drift().luck.bit_generator.state  # nothing of it was restored


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:snapshots of this training lack")
def test_environments_that_no_snapshot_has_begin_new_episodes_or_are_refused(open_store: Any) -> None:
    """Whoever accepted that they cannot be captured goes on all the same; with the wrapper in place, too."""
    for run, wrapper in (("without", None), ("with", StatefulEnv)):
        env = make_vec_env("CartPole-v1", 2, seed=1, **IN_WORKERS)
        train(ppo(env=env), open_store(run=run), strict=False, others=[Watch(lambda live: live.num_timesteps < 40)])
        env.close()
        env = make_vec_env("CartPole-v1", 2, seed=1, wrapper_class=wrapper, **IN_WORKERS)
        resets, reset = [], env.reset
        env.reset = lambda resets=resets, reset=reset: resets.append(1) or reset()
        model, store = ppo(env=env), open_store(run=run)
        with pytest.raises(casckpt.InvalidInputError, match=r"captured without environments: .*strict=False"):
            resume(model, CheckpointCallback(store, every_steps=1), TOTAL)
        with pytest.warns(casckpt.StoreWarning, match="go on without environments: .* and begin new episodes"):
            train(model, store, strict=False, others=[Watch(lambda live: True)])
        env.close()
        assert (model.num_timesteps, len(resets)) == (TOTAL, 1)


def test_run_that_is_not_resumed_is_not_continued_by_accident(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=32)
    with pytest.raises(casckpt.InvalidInputError, match=r"stands at step 32.*resume"):
        ppo().learn(TOTAL, callback=CheckpointCallback(store, every_steps=16))
    assert store.steps() == [16, 32]


def test_learn_that_would_begin_anew_after_a_resume_is_refused(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=32)
    model, callback = ppo(), CheckpointCallback(store, every_steps=16)
    start = resume(model, callback, TOTAL)
    with pytest.raises(casckpt.InvalidInputError, match=r"at step 32 of 96, and learn\(\) started at step 0 of 64"):
        model.learn(start.remaining, callback=callback)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*total_timesteps:casckpt.ConfigDriftWarning")
@pytest.mark.parametrize("has_engine", [False, True])
def test_objects_that_a_model_is_given_between_two_trainings_are_those_that_are_stored(
    has_engine: bool, open_store: Any
) -> None:
    store, model = open_store(), off_policy(DQN, "CartPole-v1")
    engine = casckpt.CheckpointEngine(store, save_budget=None) if has_engine else None
    callback = CheckpointCallback(engine or store, every_steps=1)
    model.learn(40, callback=callback)
    model.replay_buffer = copy.deepcopy(model.replay_buffer)
    model.set_env(make_vec_env("CartPole-v1", 1, seed=9))
    model.policy.optimizer = torch.optim.SGD(model.policy.q_net.parameters(), lr=0.125, momentum=0.5)
    model.learn(8, reset_num_timesteps=False, callback=callback)
    stored = store.restore(48)
    assert stored["replay_buffer"].total == model.replay_buffer.pos == 48
    newest = stored["replay_buffer"].last(1)["observations"]
    assert (newest[0] == model.replay_buffer.observations[47]).all()
    assert stored["policy.optimizer"]["param_groups"][0]["momentum"] == 0.5
    env = make_vec_env("CartPole-v1", 1, seed=0).envs[0]
    EnvState(env).load_state_dict(stored["env"]["environments"][0])
    assert env.unwrapped.state == pytest.approx(model.env.envs[0].unwrapped.state, abs=0.0)


@pytest.mark.full
def test_buffer_that_takes_the_place_of_a_restored_one_is_refused_and_one_of_a_new_run_is_stored(
    open_store: Any, tmp_path: Path
) -> None:
    collected = off_policy(DQN, "CartPole-v1")
    collected.learn(24)
    collected.save_replay_buffer(tmp_path / "rows.pkl")
    store = open_store()

    def begin() -> tuple[Any, CheckpointCallback, Any]:
        model, callback = off_policy(DQN, "CartPole-v1"), CheckpointCallback(store, every_steps=1)
        start = resume(model, callback, 32)
        model.load_replay_buffer(tmp_path / "rows.pkl")
        return model, callback, start

    model, callback, start = begin()
    model.learn(8, reset_num_timesteps=start.is_fresh, callback=callback)
    assert store.restore(8)["replay_buffer"].total == 32  # what was collected before, and eight rows
    model, callback, start = begin()
    with pytest.raises(casckpt.InvalidInputError, match="another replay_buffer after resume"):
        model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=callback)


def test_model_of_another_shape_is_refused_and_nothing_is_touched(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=32)
    model = ppo(policy_kwargs={"net_arch": [16]})
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    with pytest.raises(casckpt.MismatchError, match="policy"):
        resume(model, CheckpointCallback(store, every_steps=1), TOTAL)
    assert all(torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
    assert model.num_timesteps == 0


@pytest.mark.full
def test_environments_that_are_wrapped_otherwise_are_refused_by_name(open_store: Any) -> None:
    store = open_store()
    train(ppo(), store, total=32)
    model = ppo(env=VecNormalize(VecFrameStack(make_vec_env("CartPole-v1", 2), 1)))
    with pytest.raises(casckpt.IncompleteError, match="VecFrameStack"):
        resume(model, CheckpointCallback(store, every_steps=1), TOTAL)
    other = ppo(env=VecNormalize(make_vec_env("CartPole-v1", 2, env_kwargs={"sutton_barto_reward": True})))
    with pytest.raises(casckpt.IncompleteError, match="sutton_barto_reward"):
        resume(other, CheckpointCallback(store, every_steps=1), TOTAL)


class WithHandle(gymnasium.Wrapper):
    """Keeps an open socket: nothing that another process could have."""

    def __init__(self, env: Any, handle: Any) -> None:
        super().__init__(env)
        self.handle = handle


@pytest.mark.full
def test_environment_that_cannot_be_captured_is_refused_or_said(open_store: Any) -> None:
    handle = object()
    env = DummyVecEnv([lambda: WithHandle(gymnasium.make("CartPole-v1"), handle)] * 2)
    with pytest.raises(casckpt.UnsupportedStateError, match="handle"):
        train(ppo(env=env), open_store(run="strict"))
    store = open_store(run="lenient")
    with pytest.warns(casckpt.StoreWarning, match="handle"):
        train(ppo(env=env), store, total=32, strict=False)
    gaps = store.restore(only=["env"])["env"]["not_captured"]
    assert len(gaps) == 2
    assert all("handle: " in gap and "object" in gap for gap in gaps)


class Curriculum(Monitor):
    """A monitor that makes the task harder, and so decides what comes next."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.level, self.recent, self.luck = 1, [0.0], np.random.default_rng(3)

    def step(self, action: Any) -> Any:
        self.level += 1
        self.recent.append(self.luck.random())
        return super().step(action)


def test_what_a_subclass_of_a_monitor_keeps_is_captured_or_named() -> None:
    env, other = Curriculum(gymnasium.make("CartPole-v1")), Curriculum(gymnasium.make("CartPole-v1"))
    env.reset(seed=1)
    env.step(0)
    EnvState(other).load_state_dict(EnvState(env).state_dict())
    env.step(1), other.step(1)
    assert (other.level, other.recent, other.total_steps) == (3, env.recent, 2)
    env.handle = object()
    assert [finding.path for finding in EnvState(env).report().missing] == ["env.handle"]


@pytest.mark.full
def test_episodes_of_a_long_run_cost_what_was_added_and_come_back(open_store: Any) -> None:
    env, other = Monitor(gymnasium.make("CartPole-v1")), Monitor(gymnasium.make("CartPole-v1"))
    env.reset(seed=1)
    luck = np.random.default_rng(0)
    env.episode_returns, env.episode_lengths = luck.standard_normal(20_000).tolist(), list(range(20_000))
    store, added = open_store(), []
    for step in range(1, 4):
        env.episode_returns.append(luck.random())
        env.episode_lengths.append(step)
        added.append(store.commit(step, {"env": EnvState(env)}).stored_bytes)
    assert added[0] > 100_000  # of 160 KB that cannot be compressed
    assert max(added[1:]) < 10_000
    store.restore_into({"env": EnvState(other)})
    assert other.get_episode_rewards() == env.episode_returns
    assert other.get_episode_lengths() == env.episode_lengths
    assert {type(each) for each in other.episode_lengths} == {int}
    assert len(other.get_episode_times()) == 20_003


@pytest.mark.full
def test_component_of_a_users_own_takes_part_under_a_name_of_its_own(open_store: Any) -> None:
    store, curriculum = open_store(), {"level": np.array([3])}
    train(ppo(), store, total=32, extra={"curriculum": curriculum})
    curriculum["level"][0] = 0
    resume(ppo(), CheckpointCallback(store, every_steps=1, extra={"curriculum": curriculum}), 32)
    assert curriculum["level"].tolist() == [3]
    with pytest.raises(casckpt.InvalidInputError, match="policy"):
        components(ppo(), extra={"policy": {}})


@pytest.mark.full
def test_failed_commit_ends_the_training(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()

    def fail(*_: Any, **__: Any) -> None:
        raise casckpt.OutOfSpaceError("the disk is full", needed_bytes=1)

    monkeypatch.setattr(store._committer, "commit", fail)
    with pytest.raises(casckpt.SaveFailedError, match="full"):
        train(ppo(), store)
