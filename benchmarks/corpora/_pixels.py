"""Series B: PPO with the Nature-CNN on Breakout's pixels, a commit after each update, rollout buffer included.

The usual setting: eight games, 128 steps, four epochs of four minibatches, a learning rate of 2.5e-4 that falls
linearly. The buffer holds stacked observations, so every picture is in it four times, as in the common libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from benchmarks.corpora._atari import Atari, NatureCnn
from benchmarks.corpora._ppo import Ppo, PpoConfig
from benchmarks.corpora._series import Recorder


@dataclass(frozen=True)
class PixelsConfig:
    """What B is made with."""

    game: str = "breakout"
    update_count: int = 30
    environment_count: int = 8
    width: int = 32
    ppo: PpoConfig = field(
        default_factory=lambda: PpoConfig(
            rollout_steps=128,
            minibatch_size=256,
            epochs=4,
            learning_rate=2.5e-4,
            clip_range=0.1,
            entropy_coefficient=0.01,
        )
    )


QUICK = PixelsConfig(
    update_count=3, environment_count=2, width=2, ppo=PpoConfig(rollout_steps=8, minibatch_size=8, epochs=1)
)


def train(config: PixelsConfig, recorder: Recorder) -> None:
    """Train from scratch and commit after every update."""
    games = Atari(config.game, config.environment_count)
    learner = Ppo(config.ppo, PixelAgent(config.width, games.action_count), games)
    for update in range(config.update_count):
        learner.update(remaining=1.0 - update / config.update_count)
        recorder.commit(learner.update_count, learner.components() | {"rollout": learner.rollout})


class PixelAgent(nn.Module):
    """Policy and value on one trunk."""

    def __init__(self, width: int, action_count: int) -> None:
        super().__init__()
        self.network = NatureCnn(width)
        self.actor = nn.Linear(self.network.feature_count, action_count)
        self.critic = nn.Linear(self.network.feature_count, 1)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.orthogonal_(parameter, 2**0.5)
            else:
                nn.init.zeros_(parameter)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rows, actions) and values (rows,) of pictures (rows, 4, 84, 84)."""
        features = self.network(observations)
        return self.actor(features), self.critic(features)[:, 0]
