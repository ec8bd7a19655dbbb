"""The network of both demos, and the seed of what they draw from. A learner that plays nothing loads no Gymnasium."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn


def seed_global_streams(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def network(input_size: int, hidden_size: int, output_size: int, *, output_gain: float) -> nn.Sequential:
    """Two hidden layers over an observation, orthogonal at first."""
    sizes = [(input_size, hidden_size, 2**0.5), (hidden_size, hidden_size, 2**0.5)]
    layers: list[nn.Module] = []
    for inputs, outputs, gain in [*sizes, (hidden_size, output_size, output_gain)]:
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
