"""Proximal policy optimisation, compact and complete: what `casckpt demo` trains.

Clipped surrogate objective and generalised advantage estimation (Schulman et al., 2017 and 2016) with the usual
details: separate policy and value networks, orthogonal initialisation, normalised observations and returns,
minibatches over several epochs, gradient clipping, a linear learning-rate schedule, and a bootstrap where the time
limit (not the pole) ended an episode.

The object knows nothing of stores. `state()` says what a run consists of, component by component; anything left out
of it is something a resumed run would get wrong. Given the same state, `collect()` and `learn()` are deterministic on
one machine: they read no clock and no stream that `state()` does not contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casckpt import RngState
from casckpt.demo._environments import ACTION_COUNT, OBSERVATION_SIZE, Environments, Normalizer
from casckpt.demo._network import network, seed_global_streams


@dataclass(frozen=True)
class PpoConfig:
    """Hyper-parameters. `updates` is the horizon of the learning-rate schedule."""

    seed: int = 1
    updates: int = 40
    environment_count: int = 8
    rollout_steps: int = 128
    epochs: int = 4
    minibatch_size: int = 256
    hidden_size: int = 64
    learning_rate: float = 2.5e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    gradient_norm_max: float = 0.5


class Ppo:
    """One training run: `begin()` a new one or load `state()` of an old one, then `collect()` and `learn()` in turn."""

    def __init__(self, config: PpoConfig) -> None:
        seed_global_streams(config.seed)
        self.config = config
        self.policy = network(OBSERVATION_SIZE, config.hidden_size, ACTION_COUNT, output_gain=0.01)
        self.value = network(OBSERVATION_SIZE, config.hidden_size, 1, output_gain=1.0)
        self._parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.Adam(self._parameters, lr=config.learning_rate, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: 1.0 - done / config.updates)
        self.rollout = _empty_rollout(config.rollout_steps, config.environment_count)
        self.normalizer = Normalizer(config.environment_count, config.gamma)
        self.environments = Environments(config.environment_count)
        self.shuffle = np.random.default_rng(config.seed)
        self.rng = RngState(shuffle=self.shuffle)
        self.counters = {"update": 0, "samples": 0, "optimizer_steps": 0}

    def state(self) -> dict[str, Any]:
        """The live parts of this run by component name, for `commit` to read and `resume_into` to write."""
        return {
            "policy": self.policy,
            "value": self.value,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rollout": self.rollout,
            "normalizer": self.normalizer,
            "environments": self.environments,
            "counters": self.counters,
            "rng": self.rng,
        }

    def begin(self) -> None:
        """Start the first episodes of a new run."""
        self.environments.begin(self.config.seed)

    def collect(self) -> None:
        """Fill the rollout buffer: `rollout_steps` steps of every environment with the current policy."""
        rollout, environments, normalizer = self.rollout, self.environments, self.normalizer
        for t in range(self.config.rollout_steps):
            observation = torch.from_numpy(normalizer.observe(environments.observation))
            action, log_probability, value = self._act(observation)
            step = environments.step(action.numpy())
            reward = torch.from_numpy(normalizer.scale_reward(step.reward, step.ended))
            if step.truncated.any():
                cut = torch.from_numpy(step.truncated)
                final = torch.from_numpy(normalizer.normalize(step.final_observation))
                reward = reward + self.config.gamma * self._value_of(final) * cut
            rollout["observation"][t], rollout["action"][t] = observation, action
            rollout["log_probability"][t], rollout["value"][t] = log_probability, value
            rollout["reward"][t], rollout["ended"][t] = reward, torch.from_numpy(step.ended)
        last = torch.from_numpy(normalizer.normalize(environments.observation))
        rollout["last_value"].copy_(self._value_of(last))

    def learn(self) -> dict[str, float]:
        """Optimise on the rollout buffer, advance the schedule and the counters; returns the metrics of this update."""
        advantage, target = estimate_advantages(self.rollout, self.config.gamma, self.config.gae_lambda)
        learning_rate = self.schedule.get_last_lr()[0]
        losses: list[Tensor] = []
        for rows in self._minibatches():
            self.optimizer.zero_grad()
            loss, parts = self._loss(rows, advantage.flatten()[rows], target.flatten()[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._parameters, self.config.gradient_norm_max)
            self.optimizer.step()
            losses.append(parts)
        self.schedule.step()
        self.counters["update"] += 1
        self.counters["samples"] += advantage.numel()
        self.counters["optimizer_steps"] += len(losses)
        policy_loss, value_loss, entropy = torch.stack(losses).mean(dim=0).tolist()
        return {
            "return": self.environments.mean_return(),
            "episodes": self.environments.episode_count,
            "learning_rate": float(learning_rate),
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
        }

    def reseed(self, seed: int) -> None:
        """Leave the recorded streams on purpose: everything random from here on follows `seed`."""
        seed_global_streams(seed)
        self.shuffle.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    def close(self) -> None:
        """Release the environments."""
        self.environments.close()

    def _act(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            log_probabilities = self.policy(observation).log_softmax(dim=-1)
            action = torch.multinomial(log_probabilities.exp(), 1)
            return action[:, 0], log_probabilities.gather(1, action)[:, 0], self.value(observation)[:, 0]

    def _value_of(self, observation: Tensor) -> Tensor:
        with torch.no_grad():
            value: Tensor = self.value(observation)[:, 0]
            return value

    def _minibatches(self) -> Iterator[Tensor]:
        row_count = self.config.rollout_steps * self.config.environment_count
        for _ in range(self.config.epochs):
            order = torch.from_numpy(self.shuffle.permutation(row_count))
            yield from torch.split(order, self.config.minibatch_size)

    def _loss(self, rows: Tensor, advantage: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        config, rollout = self.config, self.rollout
        observation = rollout["observation"].flatten(0, 1)[rows]
        action = rollout["action"].flatten()[rows, None]
        log_probabilities = self.policy(observation).log_softmax(dim=-1)
        ratio = (log_probabilities.gather(1, action)[:, 0] - rollout["log_probability"].flatten()[rows]).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1.0 - config.clip_range, 1.0 + config.clip_range)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (self.value(observation)[:, 0] - target).square().mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean()
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        return loss, torch.stack([policy_loss, value_loss, entropy]).detach()


def estimate_advantages(rollout: dict[str, Tensor], gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and value targets, both of shape (steps, environments), by generalised advantage estimation."""
    value, reward = rollout["value"], rollout["reward"]
    goes_on = 1.0 - rollout["ended"].float()
    advantage = torch.zeros_like(reward)
    following_value, carried = rollout["last_value"], torch.zeros_like(rollout["last_value"])
    for t in reversed(range(len(reward))):
        surprise = reward[t] + gamma * following_value * goes_on[t] - value[t]
        carried = surprise + gamma * gae_lambda * goes_on[t] * carried
        advantage[t] = carried
        following_value = value[t]
    return advantage, advantage + value


def _empty_rollout(steps: int, environments: int) -> dict[str, Tensor]:
    each = (steps, environments)
    return {
        "observation": torch.zeros(*each, OBSERVATION_SIZE),
        "action": torch.zeros(each, dtype=torch.int64),
        "log_probability": torch.zeros(each),
        "value": torch.zeros(each),
        "reward": torch.zeros(each),
        "ended": torch.zeros(each, dtype=torch.bool),
        "last_value": torch.zeros(environments),
    }
