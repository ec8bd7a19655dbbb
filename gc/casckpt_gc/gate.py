"""Waiting until nobody reads any more what is about to go.

A gate is made after an entry was published. It opens when the grace time has passed and no living lease is older than
that entry: whoever reads by then has seen the entry, and does not expect what it takes away. Readers without a lease
are protected by the grace time alone.

Only this process's monotonic clock is asked, and only for differences: no step depends on a clock that can jump.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from casckpt.errors import IncompleteError
from casckpt.limits import LEASE_TIMEOUT_S
from casckpt.storage.process import owner_of
from casckpt.store.leases import LEASES, read_leases
from casckpt.store.store import Store


@dataclass
class Observer:
    """What one process has seen of the leases of a store: since when each counter stands still, by its own clock."""

    store: Store
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

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
        now_s = self.store._system.monotonic_s()
        found = read_leases(self.store._timeline.fs, self.store.path)
        self._seen = {name: seen for name, seen in self._seen.items() if name in found}
        alive = []
        for name, lease in found.items():
            counter, since_s = self._seen.setdefault(name, (lease.counter, now_s))
            if counter != lease.counter:
                since_s = now_s
                self._seen[name] = lease.counter, now_s
            if lease.seq < seq and not self._is_dead(name, now_s - since_s):
                alive.append(name)
        return alive

    def remove_dead(self) -> None:
        """Take away leases whose holder is dead."""
        now_s = self.store._system.monotonic_s()
        for name, (_, since_s) in self._seen.items():
            if self._is_dead(name, now_s - since_s):
                with contextlib.suppress(FileNotFoundError):
                    self.store._timeline.fs.unlink(f"{self.store.path}/{LEASES}/{name}")

    def _is_dead(self, name: str, still_s: float) -> bool:
        return still_s >= LEASE_TIMEOUT_S or owner_of(name)[1] == "dead"

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
