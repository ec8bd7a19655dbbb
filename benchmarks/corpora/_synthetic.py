"""Series S: about 1 GB that changes as trained state does, for throughput. Synthetic, and made like this.

The run is that of D-fp32-1 with few commits. A state holds its policy and its moments four times, as four *tiles*. The
first is what was trained. In each other tile every element has its own fixed noise: a weight is w + a, its moments are
(1 + b) m and (1 + b)^2 v, with a normal, 0.01 wide, and b uniform within 0.1. The same a and b hold for all commits, so
from commit to commit a tile changes as a training run would change it, up to rounding, and no two tiles share bytes.

Only the trained tile is stored; the others are made when a state is read, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.corpora import _finetune
from benchmarks.corpora._finetune import FinetuneConfig
from benchmarks.corpora._series import Recorder, State

TILE_COUNT = 4
WEIGHT_NOISE, MOMENT_NOISE = 0.01, 0.1


@dataclass(frozen=True)
class SyntheticConfig:
    """What S is made with."""

    run: FinetuneConfig = field(default_factory=lambda: FinetuneConfig(commit_count=5))


QUICK = SyntheticConfig(_finetune.quick("fp32", 1))


def train(config: SyntheticConfig, recorder: Recorder) -> None:
    """Train the tile that the others are made of."""
    _finetune.train(config.run, recorder)


def compose(folder: str, index: int, stored: State) -> State:
    """The tiles of one commit; the reference is left out, for S is a state of which everything trains."""
    policies, optimizers = [], []
    for number in range(TILE_COUNT):
        policy, optimizer = _tile(stored, number) if number else (stored["policy"], stored["optimizer"])
        policies.append(policy)
        optimizers.append(optimizer)
    return {
        "policy": {f"tile_{k}.{name}": leaf for k, policy in enumerate(policies) for name, leaf in policy.items()},
        "optimizer": _joined(optimizers),
        "counters": stored["counters"],
        "rng": stored["rng"],
    }


def _tile(stored: State, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(number)
    policy = {
        name: leaf + torch.randn(leaf.shape, generator=generator).mul_(WEIGHT_NOISE)
        for name, leaf in stored["policy"].items()
    }
    state = {}
    for key, leaves in stored["optimizer"]["state"].items():
        factor = torch.rand(leaves["exp_avg"].shape, generator=generator).mul_(2 * MOMENT_NOISE).add_(1 - MOMENT_NOISE)
        state[key] = {
            "step": leaves["step"].clone(),
            "exp_avg": leaves["exp_avg"] * factor,
            "exp_avg_sq": leaves["exp_avg_sq"] * factor.square_(),
        }
    return policy, stored["optimizer"] | {"state": state}


def _joined(optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """One state dict for the parameters of all tiles, numbered on from tile to tile."""
    size = len(optimizers[0]["state"])
    state = {
        number * size + key: leaves for number, each in enumerate(optimizers) for key, leaves in each["state"].items()
    }
    groups = [
        group | {"params": [number * size + key for number in range(len(optimizers)) for key in group["params"]]}
        for group in optimizers[0]["param_groups"]
    ]
    return {"state": state, "param_groups": groups}
