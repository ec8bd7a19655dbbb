"""casckpt itself, driven as a training script would drive it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from benchmarks.peers._disk import size_below
from benchmarks.peers.contract import BOUNDED, Peer, State, Wait, nothing_left

RESERVE = "reserve"  # room kept for a full disk, not part of a store's size


class Casckpt(Peer):
    """One store with default options but its level; "async" after the level means commits in the background."""

    product = "casckpt"
    packages = ("casckpt",)
    restores = BOUNDED
    durability = "its own"

    @property
    def is_asynchronous(self) -> bool:
        """Whether training goes on before the commit is durable."""
        return self.level.endswith(" async")

    def load(self) -> None:
        """Import it, with everything that it imports later."""
        self._open = import_module("casckpt").open

    def start(self) -> None:
        """Create the store."""
        level = self.level.removesuffix(" async")
        self._store = self._open(os.path.join(self.folder, "store"), create=True, level=level)

    def begin(self, index: int, state: Any) -> Wait:
        """One commit."""
        if not self.is_asynchronous:
            self._store.commit(index, state)
            return nothing_left
        handle = self._store.commit_async(index, state)

        def wait() -> None:
            handle.result()

        return wait

    def restore(self, index: int, template: State | None) -> State:
        """Opens the store and restores one step."""
        with self._open(os.path.join(self.folder, "store")) as store:
            state: State = store.restore(index)
        return state

    def size(self) -> int:
        """The whole folder, index included."""
        return size_below(self.folder, skipping=(RESERVE,))

    def close(self) -> None:
        """Close the store."""
        self._store.close()
