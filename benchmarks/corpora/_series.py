"""A series on disk: one file per commit, parts that never change stored once, and a marker that is written last.

    <name>/000.pt 001.pt …   what torch.save made of the components that the commit brought
           shared.pt         components that are equal in every commit (a frozen reference), if there are any
           series.json       the marker: without it there is no series

Some recipes store less than a state and *compose* it when it is read: the replay ring of C is a window of one log, and
S multiplies what it stores. A composition is a pure function of the folder, the commit's number and what was stored.

States hold no two tensors that share memory. Every state is read with `weights_only=True`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MARKER = "series.json"
SHARED = "shared.pt"

State = dict[str, Any]
Compose = Callable[[str, int, State], State]


class Series:
    """A finished series. Reading one state costs reading its file; only the shared components are kept in memory."""

    def __init__(self, folder: str, steps: list[int], facts: dict[str, Any], compose: Compose | None = None) -> None:
        self.folder = folder
        self.steps = steps
        self.facts = facts  # what the marker says: name, is_quick, parameters, versions, build_s, steps, raw_bytes
        self._compose = compose
        self._shared: State | None = None

    @property
    def name(self) -> str:
        """The recipe's name, as in NAMES."""
        return str(self.facts["name"])

    @property
    def count(self) -> int:
        """How many commits there are."""
        return len(self.steps)

    def state(self, index: int) -> State:
        """Component name to tree of torch tensors and Python values, as commit `index` (0 … count - 1) gave it.

        Trees are what `state_dict()` returned: modules flat, optimizers with `state` and `param_groups`. Shared
        components are the same objects at each call, as a frozen network is during a run: do not write to them.

        Raises:
            IndexError: There is no such commit.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"series {self.name} has commits 0 to {self.count - 1}, not {index}")
        if self._shared is None:
            path = os.path.join(self.folder, SHARED)
            self._shared = _read(path) if os.path.exists(path) else {}
        stored = self._shared | _read(os.path.join(self.folder, commit_name(index)))
        return self._compose(self.folder, index, stored) if self._compose else stored

    def raw_bytes(self, index: int) -> int:
        """Bytes of all tensors of commit `index`."""
        return int(self.facts["raw_bytes"][index])


class Recorder:
    """What a training run writes its commits to. `downloads` is a folder that all series share."""

    def __init__(self, folder: str, downloads: str) -> None:
        self.folder = folder
        self.downloads = downloads
        self.steps: list[int] = []

    def share(self, components: State) -> None:
        """Store components that are part of every commit and equal in all. At most once in a series."""
        torch.save(components, os.path.join(self.folder, SHARED))

    def commit(self, step: int, components: State) -> None:
        """Store the components that the next commit brings; `step` is greater than the one before."""
        assert not self.steps or step > self.steps[-1]
        torch.save(components, os.path.join(self.folder, commit_name(len(self.steps))))
        self.steps.append(step)


def commit_name(index: int) -> str:
    """The file of one commit."""
    return f"{index:03}.pt"


def tensors(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor of a tree with its path of keys and indices, in the tree's order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from tensors(value, (*path, position))


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(tensor.nbytes for _, tensor in tensors(tree))


def write_marker(folder: str, facts: dict[str, Any]) -> None:
    """Declare the series in `folder` finished."""
    with open(os.path.join(folder, MARKER), "w") as stream:
        json.dump(facts, stream, indent=1)


def read_marker(folder: str) -> dict[str, Any] | None:
    """The marker's content; None where there is no finished series."""
    try:
        with open(os.path.join(folder, MARKER)) as stream:
            facts: dict[str, Any] = json.load(stream)
            return facts
    except FileNotFoundError:
        return None


def _read(path: str) -> State:
    stored: State = torch.load(path, weights_only=True)
    return stored
