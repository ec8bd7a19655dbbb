"""Every other algorithm, gSDE and action noise: a training that stops within a rollout and goes on in a new model.

In one process, so that many fit into little time; across processes see `test_sb3_exact.py`. The expected values are
those of an uninterrupted training: trajectory, parameters, and the next numbers of every stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

import casckpt
from casckpt.integrations.sb3 import CheckpointCallback, resume

pytestmark = pytest.mark.full
TOTAL, STOP = 192, 110
ON_POLICY = {"n_steps": 16}
OFF_POLICY = {"learning_starts": 16, "buffer_size": 64, "batch_size": 8, "train_freq": 4}
CONTINUOUS, DISCRETE = "Pendulum-v1", "CartPole-v1"


def make(algorithm: str, env_id: str, env_count: int, options: dict[str, Any]) -> Any:
    kind = getattr(stable_baselines3, algorithm, None) or getattr(sb3_contrib, algorithm)
    env = make_vec_env(env_id, env_count, seed=1)
    rate = {"learning_rate": lambda progress: 1e-3 * progress}
    policy = {"net_arch": [8], **({"n_quantiles": 5} if algorithm in ("TQC", "QRDQN") else {})}
    return kind("MlpPolicy", env, policy_kwargs=policy, seed=3, device="cpu", **rate, **options)


def noise() -> OrnsteinUhlenbeckActionNoise:
    return OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1))


MODELS: dict[str, Callable[[], Any]] = {
    "A2C": lambda: make("A2C", DISCRETE, 2, ON_POLICY),
    "PPO with gSDE": lambda: make(
        "PPO", CONTINUOUS, 2, {**ON_POLICY, "use_sde": True, "batch_size": 16, "n_epochs": 1}
    ),
    "SAC with gSDE": lambda: make("SAC", CONTINUOUS, 2, {**OFF_POLICY, "use_sde": True, "sde_sample_freq": 3}),
    "TD3 with noise": lambda: make("TD3", CONTINUOUS, 2, {**OFF_POLICY, "action_noise": noise()}),
    "DQN that shares observations": lambda: make(
        "DQN",
        DISCRETE,
        1,
        {**OFF_POLICY, "optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    "TQC": lambda: make("TQC", CONTINUOUS, 1, OFF_POLICY),
    "QRDQN": lambda: make("QRDQN", DISCRETE, 1, {**OFF_POLICY, "target_update_interval": 20}),
}


class Tape(BaseCallback):
    """Notes what every step did, and may end the training."""

    def __init__(self, stop_at: int = 1 << 30) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.rows: list[tuple[int, bytes]] = []

    def _on_step(self) -> bool:
        parts = [np.ascontiguousarray(self.locals[name]).tobytes() for name in ("actions", "rewards", "new_obs")]
        self.rows.append((self.num_timesteps, b"".join(parts)))
        return self.num_timesteps < self.stop_at


def train(store: casckpt.Store, model: Any, tape: Tape) -> int:
    callback = CheckpointCallback(store, every_steps=32)
    start = resume(model, callback, TOTAL)
    model.learn(start.remaining, reset_num_timesteps=start.is_fresh, callback=[callback, tape])
    return start.report.step or 0


def end(model: Any) -> list[Any]:
    """What training left: parameters, moments, and the next draws."""
    moments = [model.get_parameters()[name] for name in model.get_parameters() if name.endswith("optimizer")]
    tensors = [
        *model.policy.state_dict().values(),
        *(t for each in moments for s in each["state"].values() for t in s.values()),
    ]
    draws = [random.random(), np.random.rand(), torch.rand(1).item(), np.asarray(model.action_space.sample()).tolist()]
    return [[t.tolist() if hasattr(t, "tolist") else t for t in tensors], draws, model.num_timesteps, model._n_updates]


@pytest.mark.parametrize("name", MODELS)
def test_stopped_training_goes_on_bit_for_bit(name: str, store_path: Path) -> None:
    whole, model, tape = MODELS[name], MODELS[name](), Tape()
    with casckpt.open(store_path, create=True, run="whole") as store:
        assert train(store, model, tape) == 0
    expected = end(model)
    with casckpt.open(store_path, run="broken") as store:
        train(store, whole(), Tape(STOP))
    resumed, rest = whole(), Tape()
    with casckpt.open(store_path, run="broken") as store:
        step = train(store, resumed, rest)
        manifests = {each: facts.manifest for each, facts in store.timeline()[-1].components.items()}
    assert 64 <= step <= STOP
    assert rest.rows == [row for row in tape.rows if row[0] > step]
    assert end(resumed) == expected
    with casckpt.open(store_path, run="whole", read_only=True) as store:
        differing = [
            each for each, facts in store.timeline()[-1].components.items() if facts.manifest != manifests[each]
        ]
    # Where observations share a slot, a full ring has one row less, and its rows get other slots: draws are equal.
    assert differing == (["clock", "replay_buffer"] if "shares" in name else ["clock"])
