"""Series C: DQN on Seaquest's pixels with a replay ring of 508 MB that fills and wraps while it is committed.

The ring holds single pictures; stacks of four are put together when they are sampled. In row t: the newest picture,
the action taken on it, its reward, and whether the episode ended there. All rows ever written are kept in one log,
and the ring after n rows is made from it: row t lies at slot t mod capacity. So a commit stores its networks only.

Commits are 1,000 environment steps (250 gradient steps) apart; the target is copied every 2,500, so in some commits
it did not change and in some it equals the policy.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.corpora._atari import SIZE, STACK, Atari, NatureCnn
from benchmarks.corpora._series import Recorder, State

LOG = "log.pt"


@dataclass(frozen=True)
class DqnConfig:
    """What C is made with; steps are environment steps."""

    game: str = "seaquest"
    capacity: int = 72_000
    learning_starts: int = 60_000
    exploration_steps: int = 80_000  # over which the share of random actions falls to `exploration_min`
    exploration_min: float = 0.05
    first_commit: int = 62_000
    steps_apart: int = 1_000
    commit_count: int = 20
    target_interval: int = 2_500
    learning_interval: int = 4
    batch_size: int = 32
    width: int = 32
    learning_rate: float = 1e-4
    gamma: float = 0.99
    gradient_norm_max: float = 10.0


QUICK = DqnConfig(
    capacity=60,
    learning_starts=20,
    exploration_steps=40,
    first_commit=50,
    steps_apart=6,
    commit_count=4,
    target_interval=15,
    batch_size=4,
    width=2,
)


def train(config: DqnConfig, recorder: Recorder) -> None:
    """Play and learn; commit the networks, and at the end the log."""
    game = Atari(config.game, 1)
    learner = Dqn(config, game.action_count)
    last = config.first_commit + config.steps_apart * (config.commit_count - 1)
    log = _empty_log(last)
    stack = game.reset()
    for step in range(last):
        log["observations"][step] = stack[0, -1]
        log["actions"][step] = action = learner.act(stack, step)
        stack, reward, ended = game.step(action)
        log["rewards"][step], log["dones"][step] = reward[0], ended[0] > 0
        learner.after_step(log, step + 1)
        if step + 1 >= config.first_commit and (step + 1 - config.first_commit) % config.steps_apart == 0:
            recorder.commit(step + 1, learner.components(step + 1))
    torch.save({"capacity": config.capacity, "rows": log}, os.path.join(recorder.folder, LOG))


def compose(folder: str, index: int, stored: State) -> State:
    """Add the ring as it was at the commit."""
    log = torch.load(os.path.join(folder, LOG), weights_only=True, mmap=True)
    capacity, written = log["capacity"], stored["counters"]["environment_steps"]
    ring = {name: ring_of(rows, written, capacity) for name, rows in log["rows"].items()}
    counters = {"position": written % capacity, "is_full": written >= capacity, "added": written}
    return stored | {"ring": ring | counters}


def ring_of(rows: Tensor, written: int, capacity: int) -> Tensor:
    """A ring of `capacity` rows after `written` rows of a log; slots not reached yet are zero."""
    ring = torch.zeros(capacity, *rows.shape[1:], dtype=rows.dtype)
    split = written - written % capacity  # rows from here on lie at the ring's start
    ring[: written - split] = rows[split:written]
    if split:
        ring[written - split :] = rows[written - capacity : split]
    return ring


class Dqn:
    """Policy, target and optimizer."""

    def __init__(self, config: DqnConfig, action_count: int) -> None:
        self.config = config
        self.action_count = action_count
        trunk = NatureCnn(config.width)
        self.policy = nn.Sequential(trunk, nn.Linear(trunk.feature_count, action_count))
        self.target = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.learning_rate)
        self.gradient_steps = 0

    def act(self, stack: Tensor, step: int) -> Tensor:
        """One action (1,): random ones ever more rarely, else the best."""
        chance = max(self.config.exploration_min, 1.0 - step / self.config.exploration_steps)
        if float(torch.rand(())) < chance:
            return torch.randint(self.action_count, (1,))
        with torch.no_grad():
            best: Tensor = self.policy(stack).argmax(-1)
            return best

    def after_step(self, log: dict[str, Tensor], written: int) -> None:
        """Learn and copy the target when it is time."""
        config = self.config
        if written >= config.learning_starts and written % config.learning_interval == 0:
            self._learn(log, written)
        if written % config.target_interval == 0:
            self.target.load_state_dict(self.policy.state_dict())

    def components(self, step: int) -> State:
        """What a commit holds beside the ring."""
        return {
            "policy": self.policy.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": {"environment_steps": step, "gradient_steps": self.gradient_steps},
            "rng": {"torch": torch.get_rng_state()},
        }

    def _learn(self, log: dict[str, Tensor], written: int) -> None:
        config = self.config
        oldest = max(0, written - config.capacity) + STACK - 1
        rows = torch.randint(oldest, written - 1, (config.batch_size,))
        with torch.no_grad():
            following = self.target(stacks(log, rows + 1)).max(-1).values
            expected = log["rewards"][rows] + config.gamma * (~log["dones"][rows]) * following
        values = self.policy(stacks(log, rows)).gather(1, log["actions"][rows, None])[:, 0]
        self.optimizer.zero_grad()
        functional.smooth_l1_loss(values, expected).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.policy.parameters(), config.gradient_norm_max)
        self.optimizer.step()
        self.gradient_steps += 1


def stacks(log: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The observations (rows, 4, 84, 84) at `rows`, each at least 3; pictures of an earlier episode are black."""
    window = rows[:, None] + torch.arange(1 - STACK, 1)
    ended = log["dones"][window[:, :-1]]
    is_earlier = ended.flip(1).cumsum(1).flip(1) > 0  # an end at or after a picture, and before the newest
    pictures = log["observations"][window]
    pictures[:, :-1][is_earlier] = 0
    return pictures


def _empty_log(row_count: int) -> dict[str, Tensor]:
    return {
        "observations": torch.zeros(row_count, SIZE, SIZE, dtype=torch.uint8),
        "actions": torch.zeros(row_count, dtype=torch.int64),
        "rewards": torch.zeros(row_count),
        "dones": torch.zeros(row_count, dtype=torch.bool),
    }
