"""Series A: PPO with two small MLPs on CartPole, a commit after each update.

Network sizes and hyper-parameters are the defaults of the common libraries (two hidden layers of 64, Tanh), and the
policy's leaves are named as these name them. A commit is 320 optimizer steps after the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.corpora._ppo import Ppo, PpoConfig
from benchmarks.corpora._series import Recorder

ENVIRONMENT_ID = "CartPole-v1"
OBSERVATION_SIZE, ACTION_COUNT = 4, 2


@dataclass(frozen=True)
class ControlConfig:
    """What A is made with."""

    update_count: int = 30
    environment_count: int = 8
    hidden_size: int = 64
    ppo: PpoConfig = field(default_factory=PpoConfig)


QUICK = ControlConfig(update_count=3, environment_count=2, ppo=PpoConfig(rollout_steps=32, epochs=2))


def train(config: ControlConfig, recorder: Recorder) -> None:
    """Train from scratch and commit after every update."""
    learner = Ppo(config.ppo, ActorCritic(config.hidden_size), CartPoles(config.environment_count))
    for update in range(config.update_count):
        learner.update(remaining=1.0 - update / config.update_count)
        recorder.commit(learner.update_count, learner.components())


class ActorCritic(nn.Module):
    """Separate policy and value networks in one module."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp_extractor = nn.ModuleDict({name: _hidden(hidden_size) for name in ("policy_net", "value_net")})
        self.action_net = _linear(hidden_size, ACTION_COUNT, gain=0.01)
        self.value_net = _linear(hidden_size, 1, gain=1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rows, actions) and values (rows,) of observations (rows, 4)."""
        logits = self.action_net(self.mlp_extractor["policy_net"](observations))
        return logits, self.value_net(self.mlp_extractor["value_net"](observations))[:, 0]


class CartPoles:
    """Copies of CartPole that restart by themselves; the i-th is seeded with i."""

    def __init__(self, count: int) -> None:
        self._environments = [gymnasium.make(ENVIRONMENT_ID, disable_env_checker=True) for _ in range(count)]

    def reset(self) -> Tensor:
        """First observations."""
        firsts = [environment.reset(seed=number)[0] for number, environment in enumerate(self._environments)]
        return torch.from_numpy(np.stack(firsts))

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step in each."""
        observations, rewards, ends = [], [], []
        for environment, action in zip(self._environments, actions.tolist(), strict=True):
            observation, reward, terminated, truncated, _ = environment.step(action)
            ended = terminated or truncated
            observations.append(environment.reset()[0] if ended else observation)
            rewards.append(float(reward))
            ends.append(float(ended))
        return torch.from_numpy(np.stack(observations)), torch.tensor(rewards), torch.tensor(ends)


def _hidden(size: int) -> nn.Sequential:
    first, second = _linear(OBSERVATION_SIZE, size, gain=2**0.5), _linear(size, size, gain=2**0.5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())


def _linear(inputs: int, outputs: int, *, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear
