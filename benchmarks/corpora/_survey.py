"""How much of a series changes from commit to commit: the first thing to know about it.

Tensors are compared bit by bit with those of the commit before, where both have one of the same path and shape. They
are added up by component, and those of an optimizer by what they are (`exp_avg`, `exp_avg_sq`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.corpora._series import Series, State, tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Change:
    """Elements of one kind, in all commits but the first."""

    element_count: int = 0
    changed_count: int = 0

    @property
    def share(self) -> float:
        """Changed elements ÷ all."""
        return self.changed_count / self.element_count


def changes(series: Series) -> dict[str, Change]:
    """What changed, by component or component and moment. Costs reading the whole series."""
    found: dict[str, Change] = defaultdict(Change)
    before = _leaves(series.state(0))
    for index in range(1, series.count):
        after = _leaves(series.state(index))
        for path, leaf in after.items():
            base = before.get(path)
            if base is not None and base.shape == leaf.shape:
                change = found[_kind(path)]
                change.element_count += leaf.numel()
                change.changed_count += int((_bits(base) != _bits(leaf)).sum())
        before = after
    return dict(found)


def _leaves(state: State) -> dict[tuple[object, ...], Tensor]:
    return {path: leaf for path, leaf in tensors(state) if leaf.ndim}


def _kind(path: tuple[object, ...]) -> str:
    return f"{path[0]}.{path[-1]}" if path[-1] in MOMENTS else str(path[0])


def _bits(leaf: Tensor) -> Tensor:
    return leaf.contiguous().view(BITS[leaf.element_size()])
