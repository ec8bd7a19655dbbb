"""Series E and E-1: soft actor-critic on Pendulum, whose targets follow the critics by Polyak averaging.

One gradient step for each environment step, from a replay of all transitions so far. A state has the actor, two critics
and two targets as components of their own, one Adam for the actor, one for both critics and one for the entropy
coefficient, that coefficient's logarithm, counters and the generator. Commits are 64 (E) or 1 (E-1) gradient steps
apart.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn

from benchmarks.corpora._series import Recorder, State

ENVIRONMENT_ID = "Pendulum-v1"
OBSERVATION_SIZE, ACTION_SIZE, ACTION_MAX = 3, 1, 2.0
ROW = 2 * OBSERVATION_SIZE + ACTION_SIZE + 2  # observation, action, reward, terminated, next observation


@dataclass(frozen=True)
class SacConfig:
    """What E is made with."""

    steps_apart: int = 64
    commit_count: int = 30
    random_steps: int = 1000  # environment steps before learning begins
    warm_up_steps: int = 1000  # gradient steps before the first commit
    hidden_size: int = 256
    batch_size: int = 256
    learning_rate: float = 3e-4
    gamma: float = 0.99
    tau: float = 0.005
    target_entropy: float = -float(ACTION_SIZE)


def quick(steps_apart: int) -> SacConfig:
    """The same run in miniature."""
    return SacConfig(steps_apart, 3, random_steps=20, warm_up_steps=3, hidden_size=16, batch_size=8)


def train(config: SacConfig, recorder: Recorder) -> None:
    """Play at random, then learn; commit every `steps_apart` gradient steps."""
    last = config.warm_up_steps + config.steps_apart * (config.commit_count - 1)
    player = _Player(config.random_steps + last)
    for _ in range(config.random_steps):
        player.play(torch.rand(ACTION_SIZE) * 2 - 1)
    learner = Sac(config)
    for step in range(1, last + 1):
        with torch.no_grad():
            player.play(learner.act(player.observation[None])[0][0])
        learner.learn(player.sample(config.batch_size))
        if step >= config.warm_up_steps and (step - config.warm_up_steps) % config.steps_apart == 0:
            recorder.commit(step, learner.components(step))


class Sac:
    """The networks and their optimizers. Actions lie in [-1, 1]."""

    def __init__(self, config: SacConfig) -> None:
        self.config = config
        self.actor = _network(OBSERVATION_SIZE, config.hidden_size, 2 * ACTION_SIZE)
        self.critics = nn.ModuleList(_network(OBSERVATION_SIZE + ACTION_SIZE, config.hidden_size, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=config.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=config.learning_rate)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=config.learning_rate)

    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn actions (rows, 1) and their log probabilities (rows,), differentiable."""
        mean, log_std = self.actor(observations).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        drawn = mean + log_std.exp() * noise
        action = drawn.tanh()
        log_density = -0.5 * noise.square() - log_std - 0.5 * torch.log(torch.tensor(2 * torch.pi))
        return action, (log_density - torch.log(1 - action.square() + 1e-6)).sum(-1)

    def learn(self, rows: Tensor) -> None:
        """One gradient step of critics, actor and entropy coefficient; then the targets follow."""
        observation, action, reward, terminated, following = torch.split(
            rows, [OBSERVATION_SIZE, ACTION_SIZE, 1, 1, OBSERVATION_SIZE], -1
        )
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.act(following)
            next_value = _least(self.targets, following, next_action) - alpha * next_log_prob
            expected = reward[:, 0] + self.config.gamma * (1 - terminated[:, 0]) * next_value
        values = [_value(critic, observation, action) for critic in self.critics]
        _step(self.critic_optimizer, torch.stack([(value - expected).square().mean() for value in values]).sum())
        new_action, log_prob = self.act(observation)
        _step(self.actor_optimizer, (alpha * log_prob - _least(self.critics, observation, new_action)).mean())
        surplus = log_prob.detach() + self.config.target_entropy
        _step(self.alpha_optimizer, -(self.log_alpha.exp() * surplus).mean())
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.mul_(1 - self.config.tau).add_(source, alpha=self.config.tau)

    def components(self, step: int) -> State:
        """What a commit after `step` gradient steps holds."""
        networks: dict[str, nn.Module] = {"actor": self.actor}
        for number in range(2):
            networks[f"critic_{number + 1}"] = self.critics[number]
            networks[f"target_{number + 1}"] = self.targets[number]
        return {name: network.state_dict() for name, network in networks.items()} | {
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
            "entropy": {"log_alpha": self.log_alpha.detach()},
            "counters": {"gradient_steps": step},
            "rng": {"torch": torch.get_rng_state()},
        }


class _Player:
    """A Pendulum under way, and every transition it gave."""

    def __init__(self, step_count_max: int) -> None:
        self._environment = gymnasium.make(ENVIRONMENT_ID, disable_env_checker=True)
        self.observation = torch.from_numpy(self._environment.reset(seed=0)[0])
        self._rows = torch.zeros(step_count_max, ROW)
        self._count = 0

    def play(self, action: Tensor) -> None:
        """One step with an action in [-1, 1]."""
        following, reward, terminated, truncated, _ = self._environment.step((action * ACTION_MAX).numpy())
        after = torch.from_numpy(following)
        facts = torch.tensor([float(reward), float(terminated)])
        self._rows[self._count] = torch.cat([self.observation, action, facts, after])
        self._count += 1
        self.observation = torch.from_numpy(self._environment.reset()[0]) if terminated or truncated else after

    def sample(self, batch_size: int) -> Tensor:
        """Rows (batch_size, ROW) drawn from all so far."""
        return self._rows[torch.randint(self._count, (batch_size,))]


def _network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def _value(critic: nn.Module, observation: Tensor, action: Tensor) -> Tensor:
    value: Tensor = critic(torch.cat([observation, action], -1))[:, 0]
    return value


def _least(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    return torch.min(*(_value(critic, observation, action) for critic in critics))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
