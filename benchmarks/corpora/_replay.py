"""Series R: a full replay ring of stacked pictures that advances by six hundredths of its rows from commit to commit.

`R-clean` is an Atari game played by random actions; `R-camera` a smooth pattern that moves, with Gaussian noise of 6
grey levels, clipped. Row t of the ring holds the newest four pictures, so that every picture is in four rows; before
the first picture of an episode stand black ones. All pictures are kept in one log, and the ring of a commit is made
from it: row t lies at slot t mod capacity.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.corpora._atari import SIZE, STACK, Atari
from benchmarks.corpora._dqn import ring_of
from benchmarks.corpora._series import Recorder, State

LOG = "log.pt"
NOISE = 6.0  # grey levels


@dataclass(frozen=True)
class ReplayConfig:
    """What R is made with."""

    game: str | None = "seaquest"  # None: a camera
    capacity: int = 16_384
    rows_apart: int = 983  # 6 % of the ring
    commit_count: int = 8


def quick(game: str | None) -> ReplayConfig:
    """The same form in seconds."""
    return ReplayConfig(game, capacity=64, rows_apart=4, commit_count=3)


def train(config: ReplayConfig, recorder: Recorder) -> None:
    """Fill the ring, then commit it again and again."""
    row_count = config.capacity + config.rows_apart * (config.commit_count - 1)
    pictures, ages = _play(config.game, row_count) if config.game else _film(row_count)
    torch.save({"capacity": config.capacity, "pictures": pictures, "ages": ages}, os.path.join(recorder.folder, LOG))
    for written in range(config.capacity, row_count + 1, config.rows_apart):
        recorder.commit(written, {"counters": {"environment_steps": written}})


def compose(folder: str, index: int, stored: State) -> State:
    """Add the ring as it was at the commit."""
    log = torch.load(os.path.join(folder, LOG), weights_only=True, mmap=True)
    capacity, written = log["capacity"], stored["counters"]["environment_steps"]
    ring = torch.empty(capacity, STACK, SIZE, SIZE, dtype=torch.uint8)
    for place in range(STACK):
        back = STACK - 1 - place
        shifted = torch.cat([torch.zeros_like(log["pictures"][:back]), log["pictures"][: written - back]])
        shifted[log["ages"][:written] < back] = 0
        ring[:, place] = ring_of(shifted, written, capacity)
    return stored | {"ring": {"observations": ring}}


def _play(game: str, row_count: int) -> tuple[Tensor, Tensor]:
    """The newest picture of each row, and how many of its episode came before it."""
    atari = Atari(game, 1)
    pictures = torch.empty(row_count, SIZE, SIZE, dtype=torch.uint8)
    ages = torch.empty(row_count, dtype=torch.int64)
    stack, age = atari.reset(), 0
    for row in range(row_count):
        pictures[row], ages[row] = stack[0, -1], age
        stack, _, ended = atari.step(torch.randint(atari.action_count, (1,)))
        age = 0 if ended[0] > 0 else age + 1
    return pictures, ages


def _film(row_count: int) -> tuple[Tensor, Tensor]:
    y, x = torch.meshgrid(torch.arange(SIZE) / 13, torch.arange(SIZE) / 9, indexing="ij")
    pictures = torch.empty(row_count, SIZE, SIZE, dtype=torch.uint8)
    for row in range(row_count):
        pattern = 128 + 50 * torch.sin(x + row / 20) + 40 * torch.cos(y + x / 4 - row / 33)
        pictures[row] = (pattern + NOISE * torch.randn(SIZE, SIZE)).round().clamp(0, 255).to(torch.uint8)
    return pictures, torch.arange(row_count)
