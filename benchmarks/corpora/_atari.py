"""Atari games as pixels, and the convolutional network that reads them: what B and C share.

Each step repeats an action for four frames, takes the brighter of the last two, and shrinks the grey picture of
210 x 160 to 84 x 84 by area averaging. An observation is a stack of the last four such pictures; places before the
first one of an episode are black. ale-py carries the games; it is imported only here, and only when a game starts.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 84
STACK = 4
FRAME_SKIP = 4
NOOP_MAX = 30  # idle frames at the start of an episode, so that episodes differ


class Atari:
    """Copies of one game that restart by themselves; rewards are clipped to their sign."""

    def __init__(self, game: str, count: int) -> None:
        self._games = [_start(game, seed) for seed in range(count)]
        self._actions = self._games[0].getMinimalActionSet()
        self.action_count = len(self._actions)
        self._stack = torch.zeros(count, STACK, SIZE, SIZE, dtype=torch.uint8)
        self._shrink_rows = _area_weights(210, SIZE)
        self._shrink_columns = _area_weights(160, SIZE).T

    def reset(self) -> Tensor:
        """Observations (count, 4, 84, 84), uint8, newest picture last."""
        for number in range(len(self._games)):
            self._begin(number)
        return self._stack.clone()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step in each: observations, rewards and whether an episode ended (float32)."""
        rewards, ends = [], []
        for number, action in enumerate(actions.tolist()):
            reward, frames = self._repeat(self._games[number], self._actions[action])
            ended = self._games[number].game_over()
            if ended:
                self._begin(number)
            else:
                self._push(number, frames)
            rewards.append(float((reward > 0) - (reward < 0)))
            ends.append(float(ended))
        return self._stack.clone(), torch.tensor(rewards), torch.tensor(ends)

    def _begin(self, number: int) -> None:
        game = self._games[number]
        game.reset_game()
        for _ in range(int(torch.randint(NOOP_MAX + 1, ()))):
            game.act(self._actions[0])
        self._stack[number] = 0
        self._push(number, torch.from_numpy(game.getScreenGrayscale()))

    def _repeat(self, game: Any, action: Any) -> tuple[float, Tensor]:
        reward = sum(game.act(action) for _ in range(FRAME_SKIP - 1))
        before = torch.from_numpy(game.getScreenGrayscale())
        reward += game.act(action)
        return reward, torch.maximum(before, torch.from_numpy(game.getScreenGrayscale()))

    def _push(self, number: int, frame: Tensor) -> None:
        self._stack[number, :-1] = self._stack[number, 1:].clone()
        shrunk = self._shrink_rows @ frame.float() @ self._shrink_columns
        self._stack[number, -1] = shrunk.round().to(torch.uint8)


class NatureCnn(nn.Sequential):
    """Pictures (rows, 4, 84, 84), uint8, to features (rows, 512); `width` scales the channels for miniatures."""

    def __init__(self, width: int) -> None:
        super().__init__(
            _Scale(),
            nn.Conv2d(STACK, width, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 16 * width),
            nn.ReLU(),
        )
        self.feature_count = 16 * width


class _Scale(nn.Module):
    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.float() / 255.0


def _start(game: str, seed: int) -> Any:
    try:
        ale_py = importlib.import_module("ale_py")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("series B and C play Atari games: `pip install ale-py`", name="ale_py") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    interface = ale_py.ALEInterface()
    interface.setInt("random_seed", seed)
    interface.setFloat("repeat_action_probability", 0.0)
    interface.loadROM(ale_py.roms.get_rom_path(game))
    return interface


def _area_weights(size: int, smaller: int) -> Tensor:
    """(smaller, size): row i averages the pixels that the i-th of `smaller` equal spans covers, by their overlap."""
    edges = torch.arange(smaller + 1, dtype=torch.float64) * (size / smaller)
    pixels = torch.arange(size, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return (overlap.clamp(min=0) * (smaller / size)).float()
