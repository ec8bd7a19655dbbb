"""One training of `resume_sb3`, in a process of its own: whole, up to where it is killed, or what comes after."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common import callbacks as sb3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

import casckpt
from benchmarks.resume_sb3 import EVERY_STEPS, REFERENCE, Experiment, Outcome, digest, say_and_wait
from casckpt.integrations.sb3 import CheckpointCallback, resume

ENV_SEED, EVALUATION_SEED = 1, 7


def linear(progress_remaining: float) -> float:
    """A learning rate that would show a progress which starts over."""
    return 1e-3 * progress_remaining


class Tape(sb3.BaseCallback):
    """Notes every step of the environments, and the learning rate of every rollout."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__()
        self._kill_at = kill_at
        self.steps: list[tuple[int, str]] = []
        self.rates: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        policy: Any = self.model.policy
        optimizer = getattr(policy, "optimizer", None) or policy.actor.optimizer
        self.rates.append((self.model.num_timesteps, optimizer.param_groups[0]["lr"]))

    def _on_step(self) -> bool:
        if self._kill_at is not None and self.model.num_timesteps >= self._kill_at:
            say_and_wait()
        row = [self.locals[name] for name in ("actions", "rewards", "new_obs")]
        self.steps.append((self.model.num_timesteps, digest(*row)))
        return True


def train_once(experiment: Experiment, name: str, method: str, folder: Path, train: str) -> Outcome:
    """Train as `train` says, saving or restoring with `method`."""
    kill_at = experiment.kill_at if train == "killed" else None
    tape, place = Tape(kill_at), folder / f"{name}-{method}"
    evaluation = sb3.EvalCallback(
        _environments(experiment, 1, seed=EVALUATION_SEED),
        eval_freq=70,
        n_eval_episodes=1,
        log_path=str(place / "evaluation"),
        verbose=0,
    )
    others = [evaluation, tape]
    if method == "casckpt":
        model, start = _with_casckpt(experiment, place, others)
    elif method == REFERENCE:
        model, start = _make(experiment), 0
        model.learn(experiment.total_steps, callback=others)
    else:
        model, start = _with_sb3(experiment, method, place, others, is_resumed=train == "resumed")
    return _outcome(model, start, tape, evaluation, place)


def _environments(experiment: Experiment, count: int, seed: int) -> VecEnv:
    env: VecEnv = make_vec_env(experiment.env_id, count, seed=seed)
    return VecNormalize(env) if experiment.is_normalized else env


def _class(experiment: Experiment) -> Any:
    return getattr(stable_baselines3, experiment.algorithm, None) or getattr(sb3_contrib, experiment.algorithm)


def _make(experiment: Experiment) -> Any:
    env = _environments(experiment, experiment.env_count, ENV_SEED)
    policy = "MlpLstmPolicy" if experiment.algorithm == "RecurrentPPO" else "MlpPolicy"
    arguments = {**experiment.arguments, "policy_kwargs": dict(experiment.arguments["policy_kwargs"])}
    return _class(experiment)(policy, env, learning_rate=linear, **arguments)


def _with_casckpt(experiment: Experiment, place: Path, others: list[Any]) -> tuple[Any, int]:
    model = _make(experiment)
    with casckpt.open(place / "store", create=True) as store:
        callback = CheckpointCallback(store, every_steps=EVERY_STEPS)
        start = resume(model, callback, experiment.total_steps)
        model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=[callback, *others])
    return model, start.report.step or 0


# --- SB3's own files ---


class AtBoundary(sb3.CheckpointCallback):
    """SB3's callback, but between two rollouts."""

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps:
            self.num_timesteps, self.n_calls = self.model.num_timesteps, self.save_freq
            super()._on_step()

    def _on_step(self) -> bool:
        return True


def _with_sb3(
    experiment: Experiment, method: str, place: Path, others: list[Any], *, is_resumed: bool
) -> tuple[Any, int]:
    kind = AtBoundary if method == "sb3-boundary" else sb3.CheckpointCallback
    calls = EVERY_STEPS // experiment.env_count
    callback = kind(calls, str(place), save_replay_buffer=True, save_vecnormalize=True)
    if not is_resumed:
        model = _make(experiment)
        model.learn(experiment.total_steps, callback=[callback, *others])
        return model, 0
    steps = max(int(path.stem.split("_")[2]) for path in place.glob("rl_model_*_steps.zip"))
    env: VecEnv = make_vec_env(experiment.env_id, experiment.env_count, seed=ENV_SEED)
    if experiment.is_normalized:
        env = VecNormalize.load(str(place / f"rl_model_vecnormalize_{steps}_steps.pkl"), env)
    model = _class(experiment).load(place / f"rl_model_{steps}_steps.zip", env=env, device="cpu")
    if hasattr(model, "load_replay_buffer"):
        model.load_replay_buffer(place / f"rl_model_replay_buffer_{steps}_steps.pkl")
    remaining = experiment.total_steps - model.num_timesteps
    model.learn(remaining, reset_num_timesteps=False, callback=[callback, *others])
    return model, steps


# --- what was there at the end ---


def _outcome(model: Any, start: int, tape: Tape, evaluation: sb3.EvalCallback, place: Path) -> Outcome:
    place.mkdir(parents=True, exist_ok=True)
    parameters = torch.cat([value.detach().flatten() for value in model.policy.state_dict().values()]).numpy()
    np.save(place / "parameters.npy", parameters)
    digests = {"parameters": digest(parameters), "optimizer moments": _digest_optimizers(model)}
    counters = [model.num_timesteps, model._n_updates, model._episode_num, getattr(model, "_n_calls", 0)]
    digests["counters"] = digest(counters)
    digests["episode statistics"] = digest([info["r"] for info in model.ep_info_buffer])
    if getattr(model, "replay_buffer", None) is not None:
        samples = model.replay_buffer.sample(64)
        digests["replay samples"] = digest(*(each.numpy() for each in samples if each is not None))
    digests["next draws"] = digest(random.random(), np.random.rand(4), torch.rand(4).numpy())
    step = model.env.step(np.array([model.action_space.sample() for _ in range(model.n_envs)]))
    digests["environments"] = digest(*step[:3])
    results = [evaluation.evaluations_timesteps, evaluation.evaluations_results, evaluation.best_mean_reward]
    file = str(place / "parameters.npy")
    return Outcome(start, tape.steps, tape.rates, digests, file, results)


def _digest_optimizers(model: Any) -> str:
    names = [name for name in model.get_parameters() if name.endswith("optimizer")]
    states = [model.get_parameters()[name]["state"] for name in names]
    moments = [value for state in states for slot in state.values() for value in slot.values()]
    return digest(*(value.detach().numpy() if hasattr(value, "detach") else value for value in moments))
