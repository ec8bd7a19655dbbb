"""A ring buffer as people write them, and the oracle of it: every row ever written, by number."""

from __future__ import annotations

from typing import Any

import numpy as np

from casckpt.replay import Arrays, Ring
from tests.unit.stores import open_store

Array = Any


class PlainRing:
    """Rows of an observation, an action and a flag in NumPy arrays; `log` keeps each row that was ever written."""

    def __init__(self, capacity: int, *, width: int = 24, seed: int = 0) -> None:
        self.capacity = capacity
        self.obs = np.zeros((capacity, width), np.uint8)
        self.action = np.zeros((capacity, 2), np.float32)
        self.done = np.zeros(capacity, np.bool_)
        self.total = 0
        self.log: list[tuple[Array, Array, Array]] = []
        self._rng = np.random.default_rng(seed)

    def add(self, row_count: int) -> None:
        """Write so many random rows."""
        for _ in range(row_count):
            obs = self._rng.integers(0, 256, self.obs.shape[1], dtype=np.uint8)
            row = (obs, self._rng.random(2, np.float32), self._rng.random() < 0.1)
            slot = self.total % self.capacity
            self.obs[slot], self.action[slot], self.done[slot] = row
            self.log.append(row)
            self.total += 1

    @property
    def position(self) -> int:
        return self.total % self.capacity

    @property
    def full(self) -> bool:
        return self.total >= self.capacity

    def columns(self) -> dict[str, Array]:
        return {"obs": self.obs, "action": self.action, "done": self.done}

    def ring(self, *, mutable: tuple[str, ...] = (), **options: Any) -> Ring:
        return Ring(Arrays(self.columns(), self, total="total", mutable=mutable), **options)

    def expected(self, start: int, stop: int) -> dict[str, Array]:
        """Rows by number, as they were written."""
        rows = self.log[start:stop]
        names = ("obs", "action", "done")
        shapes = {name: (0, *column.shape[1:]) for name, column in self.columns().items()}
        return {
            name: np.array([row[at] for row in rows], self.columns()[name].dtype) if rows else np.empty(shapes[name])
            for at, name in enumerate(names)
        }


def assert_rows(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """The same columns with the same rows, bit for bit."""
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), column, err_msg=name)


def make_ring_store(path: Any) -> PlainRing:
    """A store whose step 1 and 2 have a ring called "replay"; returns the buffer as of step 2."""
    live = PlainRing(100)
    ring = live.ring()
    with open_store(path) as store:
        for step in (1, 2):
            live.add(70)
            store.commit(step, {"replay": ring, "counters": {"step": step}})
    return live
