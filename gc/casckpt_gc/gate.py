"""Waiting until nobody reads any more what is about to go.

A gate is made after an entry was published. It opens when the grace time has passed and no living lease is older than
that entry: whoever reads by then has seen the entry, and does not expect what it takes away. Readers without a lease
are protected by the grace time alone.

Only this process's monotonic clock is asked, and only for differences: no step depends on a clock that can jump.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from casckpt.errors import IncompleteError, StorageError
from casckpt.limits import LEASE_TIMEOUT_S
from casckpt.storage.process import owner_of
from casckpt.store.leases import LEASES, Lease, read_leases
from casckpt.store.store import Store


@dataclass
class Observer:
    """What one process has seen of the leases of a store: since when each counter stands still, by its own clock."""

    store: Store
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    _now_s: float = 0.0

    def prepare(self) -> None:
        """Make the folder of leases, so that a missing one means that it was taken away."""
        fs, root = self.store._timeline.fs, self.store.path
        fs.make_folder(f"{root}/{LEASES}")
        self._check()

    def alive_before(self, seq: int) -> list[str]:
        """Names of living leases of reads that began before entry `seq` was applied.

        Raises:
            IncompleteError: the folder of leases is gone, and with it what readers said.
            StorageError: it cannot be read now.
        """
        self._check()
        found = self._look()
        return [name for name, lease in found.items() if lease.seq < seq and not self._is_dead(name)]

    def _look(self) -> dict[str, Lease]:
        """Leases as they are, and since when each counter stands still."""
        self._now_s = self.store._system.monotonic_s()
        found = read_leases(self.store._timeline.fs, self.store.path)
        seen = {name: (lease.counter, self._now_s) for name, lease in found.items()}
        still = self._seen.keys() & seen.keys()
        self._seen = seen | {name: self._seen[name] for name in still if self._seen[name][0] == seen[name][0]}
        return found

    def remove_dead(self) -> None:
        """Take away leases whose holder is dead, by a look of now: the last one may be long ago."""
        with contextlib.suppress(StorageError):  # the next collection does it
            for name in self._look():
                if self._is_dead(name):
                    with contextlib.suppress(FileNotFoundError):
                        self.store._timeline.fs.unlink(f"{self.store.path}/{LEASES}/{name}")

    def _is_dead(self, name: str) -> bool:
        return self._now_s - self._seen[name][1] >= LEASE_TIMEOUT_S or owner_of(name)[1] == "dead"

    def _check(self) -> None:
        if LEASES not in self.store._timeline.fs.list(self.store.path):
            raise IncompleteError(
                f"{self.store.path}/{LEASES}: the folder is gone, so who reads is not known. Nothing more is "
                "collected. Wait until no process reads this store, then collect again.",
                path=self.store.path,
            )


class Gate:
    """Opens once; see the module.

    Args:
        observer: of the store's leases, kept over several gates.
        seq: the entry that readers must have seen.
        grace_s: the least time to wait, in seconds.
    """

    def __init__(self, observer: Observer, seq: int, grace_s: float) -> None:
        self._observer = observer
        self._seq = seq
        self._opens_s = observer.store._system.monotonic_s() + grace_s

    def is_open(self) -> bool:
        """Whether it is safe to go on. Costs one read of each lease.

        Raises:
            IncompleteError, StorageError: see `Observer.alive_before`.
        """
        alive = self._observer.alive_before(self._seq)
        return not alive and self._observer.store._system.monotonic_s() >= self._opens_s
