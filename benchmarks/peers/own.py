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


class CasckptRing(Casckpt):
    """The same, with the replay ring of a series as `casckpt.replay.Ring`, believed by its counter.

    For series whose component `ring` is a full one, of tensors alone, with its rows counted in `counters`.
    """

    def load(self) -> None:
        """Rings as well."""
        super().load()
        self._replay = import_module("casckpt.replay")
        self._counter = {"total": 0}
        self._ring: Any = None

    def prepare(self, state: State) -> Any:
        """The live tensors as a ring that is made once, as a training has it."""
        self._counter["total"] = state["counters"]["environment_steps"]
        if self._ring is None:
            buffer = self._replay.Arrays(state["ring"], self._counter, total="total")
            self._ring = self._replay.Ring(buffer, trust="counter")
        return {**state, "ring": self._ring}

    def restore(self, index: int, template: State | None) -> State:
        """Opens the store, restores one step, and reads all rows into their slots."""
        with self._open(os.path.join(self.folder, "store")) as store:
            state: State = store.restore(index)
            view = state["ring"]
            state["ring"] = {name: view.column(name).roll(view.head, 0) for name in view.columns}
        return state
