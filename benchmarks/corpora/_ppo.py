"""Proximal policy optimisation as the corpora train it: one learner for control, pixels and self-play.

Clipped surrogate objective with generalised advantage estimation (Schulman et al., 2017 and 2016), minibatches over
several epochs, advantages normalised per minibatch, gradients clipped, a learning rate that the caller lowers, and one
Adam for policy and value. The agent and the environments come from outside:

* an *agent* maps observations to (logits of shape (rows, actions), values of shape (rows,));
* *environments* are a fixed number of copies that restart by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Environments(Protocol):
    """Copies of one environment; every tensor has a row for each."""

    def reset(self) -> Tensor:
        """Observations at the start of a first episode in each."""

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Observations, rewards and whether an episode ended, both float32.

        Where one ended, the observation is already the next one's first.
        """


@dataclass(frozen=True)
class PpoConfig:
    """Hyper-parameters; the defaults are those common for control tasks."""

    rollout_steps: int = 256
    minibatch_size: int = 64
    epochs: int = 10
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    gradient_norm_max: float = 0.5
    adam_eps: float = 1e-5


class Ppo:
    """A learner: `update` plays one rollout and learns from it."""

    def __init__(self, config: PpoConfig, agent: nn.Module, environments: Environments) -> None:
        self.config = config
        self.agent = agent
        self.environments = environments
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=config.learning_rate, eps=config.adam_eps)
        self.rollout: dict[str, Tensor] = {}
        self.update_count = 0
        self.optimizer_steps = 0
        self._observation = environments.reset()
        self._episode_return = 0.0  # mean over the last rollout

    def update(self, *, remaining: float = 1.0) -> None:
        """Play `rollout_steps` steps everywhere, then optimise; `remaining` scales the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * remaining
        self.rollout = self._collect()
        self._estimate_advantages()
        self._learn()
        self.update_count += 1

    def components(self) -> dict[str, Any]:
        """Everything but the rollout that a run would commit."""
        return {
            "policy": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": {
                "update": self.update_count,
                "optimizer_steps": self.optimizer_steps,
                "episode_return": self._episode_return,
            },
            "rng": {"torch": torch.get_rng_state()},
        }

    def _collect(self) -> dict[str, Tensor]:
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("observations", "actions", "log_probs", "values", "rewards", "episode_ends")
        }
        for _ in range(self.config.rollout_steps):
            with torch.no_grad():
                logits, value = self.agent(self._observation)
            action = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            row = [self._observation, action, _log_prob(logits, action), value]
            self._observation, reward, ended = self.environments.step(action)
            for column, values in zip(columns.values(), [*row, reward, ended], strict=True):
                column.append(values)
        return {name: torch.stack(values) for name, values in columns.items()}

    def _estimate_advantages(self) -> None:
        config, rollout = self.config, self.rollout
        with torch.no_grad():
            following = self.agent(self._observation)[1]
        values, rewards, goes_on = rollout["values"], rollout["rewards"], 1.0 - rollout["episode_ends"]
        self._episode_return = float(rewards.sum() / rollout["episode_ends"].sum().clamp(min=1))
        advantages, carried = torch.zeros_like(rewards), torch.zeros_like(following)
        for t in reversed(range(len(rewards))):
            surprise = rewards[t] + config.gamma * following * goes_on[t] - values[t]
            carried = surprise + config.gamma * config.gae_lambda * goes_on[t] * carried
            advantages[t], following = carried, values[t]
        rollout["advantages"], rollout["returns"] = advantages, advantages + values

    def _learn(self) -> None:
        flat = {name: values.flatten(0, 1) for name, values in self.rollout.items()}
        for rows in self._minibatches(len(flat["actions"])):
            self.optimizer.zero_grad()
            self._loss({name: values[rows] for name, values in flat.items()}).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.agent.parameters(), self.config.gradient_norm_max)
            self.optimizer.step()
            self.optimizer_steps += 1

    def _minibatches(self, row_count: int) -> Iterator[Tensor]:
        for _ in range(self.config.epochs):
            yield from torch.split(torch.randperm(row_count), self.config.minibatch_size)

    def _loss(self, rows: dict[str, Tensor]) -> Tensor:
        config = self.config
        logits, values = self.agent(rows["observations"])
        ratio = (_log_prob(logits, rows["actions"]) - rows["log_probs"]).exp()
        advantages = (rows["advantages"] - rows["advantages"].mean()) / (rows["advantages"].std() + 1e-8)
        clipped = ratio.clamp(1.0 - config.clip_range, 1.0 + config.clip_range)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        value_loss = functional.mse_loss(values, rows["returns"])
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss: Tensor = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        return loss


def _log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    chosen: Tensor = logits.log_softmax(-1).gather(-1, actions[:, None])[:, 0]
    return chosen
