"""Series F: a league that plays Connect Four: one learner, and a growing pool of opponents made from its past.

Every third update the pool grows by one: in turn by a copy of the learner as it is, by a copy that was trained on
against the learner (an exploiter), and by a copy with noise on its output layers. Opponents never change afterwards. A
state has the learner's `policy` and `optimizer`, and each opponent as a component of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.corpora._ppo import Ppo, PpoConfig
from benchmarks.corpora._series import Recorder

ROWS, COLUMNS, IN_LINE = 6, 7, 4


@dataclass(frozen=True)
class LeagueConfig:
    """What F is made with."""

    update_count: int = 30
    game_count: int = 64
    hidden_size: int = 512
    growth_interval: int = 3  # updates
    exploiter_updates: int = 2
    noise: float = 0.01  # standard deviation on the perturbed copies' output layers
    ppo: PpoConfig = field(
        default_factory=lambda: PpoConfig(rollout_steps=64, minibatch_size=512, epochs=4, entropy_coefficient=0.01)
    )


QUICK = LeagueConfig(
    update_count=10, game_count=4, hidden_size=8, ppo=PpoConfig(rollout_steps=8, minibatch_size=16, epochs=1)
)


def train(config: LeagueConfig, recorder: Recorder) -> None:
    """Play against the pool and commit after every update; the first opponent is the untrained learner."""
    agent = Agent(config.hidden_size)
    pool = [_frozen(agent)]
    learner = Ppo(config.ppo, agent, Games(config.game_count, pool))
    for update in range(1, config.update_count + 1):
        learner.update()
        if update % config.growth_interval == 0:
            pool.append(_new_opponent(agent, len(pool), config))
        opponents = {f"opponent_{number:02}": each.state_dict() for number, each in enumerate(pool)}
        recorder.commit(update, learner.components() | opponents)


class Agent(nn.Module):
    """Logits of the columns, full ones excluded, and a value, from the side that is to move."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * ROWS * COLUMNS, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
        )
        self.action = nn.Linear(hidden_size, COLUMNS)
        self.value = nn.Linear(hidden_size, 1)

    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        """Boards (rows, 2, 6, 7): own and other pieces as 1.0; gives (rows, 7) and (rows,)."""
        features = self.trunk(boards)
        is_full = boards[:, :, 0].sum(1) > 0
        return self.action(features).masked_fill(is_full, -1e9), self.value(features)[:, 0]


class Games:
    """Connect Four games of one learner against opponents drawn from a pool that may grow meanwhile.

    The learner sees only positions in which it is to move. It gets 1 for a won game, -1 for a lost one, 0 for a draw.
    """

    def __init__(self, count: int, pool: list[nn.Module]) -> None:
        self._pool = pool
        self._boards = torch.zeros(count, 2, ROWS, COLUMNS)
        self._opponents = torch.zeros(count, dtype=torch.int64)

    def reset(self) -> Tensor:
        """Begin every game anew."""
        self._begin(torch.arange(len(self._boards)))
        return self._boards.clone()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The learner's move in every game, and the answer where the game goes on."""
        everywhere = torch.arange(len(self._boards))
        won, over = self._move(everywhere, actions, side=0)
        rewards = won.float()
        open_games = everywhere[~over]
        lost, over_after = self._answer(open_games)
        rewards[open_games] -= lost.float()
        over[open_games] |= over_after
        self._begin(everywhere[over])
        return self._boards.clone(), rewards, over.float()

    def _begin(self, games: Tensor) -> None:
        self._boards[games] = 0.0
        self._opponents[games] = torch.randint(len(self._pool), (len(games),))
        self._answer(games[torch.rand(len(games)) < 0.5])  # the opponent opens half of them

    def _answer(self, games: Tensor) -> tuple[Tensor, Tensor]:
        """The opponents' moves; whether they won, and whether the games are over."""
        actions = torch.zeros(len(games), dtype=torch.int64)
        seen = self._boards[games].flip(1)
        for number, opponent in enumerate(self._pool):
            own = self._opponents[games] == number
            if own.any():
                with torch.no_grad():
                    actions[own] = torch.multinomial(opponent(seen[own])[0].softmax(-1), 1)[:, 0]
        return self._move(games, actions, side=1)

    def _move(self, games: Tensor, actions: Tensor, *, side: int) -> tuple[Tensor, Tensor]:
        pieces = self._boards[games, :, :, actions].sum((1, 2)).long()
        self._boards[games, side, ROWS - 1 - pieces, actions] = 1.0
        won = has_line(self._boards[games, side] > 0)
        is_full = self._boards[games, :, 0].sum((1, 2)) == COLUMNS
        return won, won | is_full


def has_line(pieces: Tensor) -> Tensor:
    """Which boards (games, 6, 7), bool, have four in a row, column or diagonal."""
    squares = pieces.unfold(1, IN_LINE, 1).unfold(2, IN_LINE, 1)  # every line lies in one
    diagonals = [each.diagonal(dim1=-2, dim2=-1) for each in (squares, squares.flip(-1))]
    lines = [squares.all(-1), squares.all(-2), *(diagonal.all(-1) for diagonal in diagonals)]
    return torch.stack([line.flatten(1).any(1) for line in lines]).any(0)


def _frozen(agent: nn.Module) -> nn.Module:
    return copy.deepcopy(agent).requires_grad_(False)


def _new_opponent(agent: Agent, number: int, config: LeagueConfig) -> nn.Module:
    """The `number`-th of the pool: an exploiter, a perturbed copy or a plain one, in turn."""
    fork = copy.deepcopy(agent)
    if number % 3 == 2:
        exploiter = Ppo(config.ppo, fork, Games(config.game_count, [agent]))
        for _ in range(config.exploiter_updates):
            exploiter.update()
    if number % 3 == 0:
        with torch.no_grad():
            for parameter in (*fork.action.parameters(), *fork.value.parameters()):
                parameter.add_(torch.randn_like(parameter), alpha=config.noise)
    return _frozen(fork)
