"""Cursors: where a training stands in what it reads, counts and waits for.

* `IndexCursor` draws indices of a data set, shuffled anew each epoch: prompts, replayed tasks, opponents.
* `DataCursor` is the same for a torch `DataLoader`: it counts the batches that the loop received, not those that the
  loader's workers fetched ahead, so nothing is skipped or seen twice after a restore.
* `InFlightRollouts` are rollouts that were begun and are not finished: a restore says what must be done again.
* `Counters` are named counts of a collector or a trainer, which notice when two parts disagree.

All are Checkpointables. The order of an epoch is computed from `(seed, epoch)` by a permutation of this file, so a
cursor's state is a few numbers however large the data set is, and does not depend on the version of any library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from casckpt.errors import InvalidInputError, MismatchError, NotFoundError
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.seeding import stream_seed

_ROUNDS = 6  # of the Feistel network; four make a permutation that looks random (Luby and Rackoff, 1988)
_WORD = (1 << 64) - 1


class IndexCursor:
    """Indices from 0 to `length - 1`, each once an epoch, in an order of its own each epoch.

    Args:
        length: of the data set.
        seed: decides every order; from 0 to 2**63 - 1.
        shuffle: false gives ascending order.

    Attributes:
        epoch: how many epochs are over.
        position: how many indices of this epoch were given out.

    Cost: 10 µs an index, no memory.

    Raises:
        InvalidInputError: `length` is no positive integer, or `seed` is out of range.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool = True) -> None:
        if type(length) is not int or length < 1:
            raise InvalidInputError(f"length={length!r:.40}: expected the number of items, at least 1")
        stream_seed(seed)
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.epoch = self.position = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the last index of the epoch was given out, and the next epoch has not begun."""
        return self.position >= self.length

    def take(self, count: int) -> list[int]:
        """The next `count` indices; goes on into the next epochs."""
        taken: list[int] = []
        while len(taken) < count:
            if self.is_exhausted:
                self.finish_epoch()
            stop = min(self.length, self.position + count - len(taken))
            taken += self._indices(self.position, stop)
            self.position = stop
        return taken

    def finish_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.position = 0

    def _indices(self, start: int, stop: int) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(start, stop))
        keys = [stream_seed(self.seed, "epoch", self.epoch, number) for number in range(_ROUNDS)]
        return (_permuted(place, self.length, keys) for place in range(start, stop))

    def state_dict(self) -> dict[str, Any]:
        """Five numbers."""
        return {name: getattr(self, name) for name in ("length", "seed", "shuffle", "epoch", "position")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the state was taken.

        Raises:
            MismatchError: it is of a data set of another length, or of another order; nothing was changed.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise MismatchError(
                    f"cursor: expected {name}={state[name]!r}, found {getattr(self, name)!r}. The same position would "
                    "mean other items. Make the cursor as it was, or leave this component out to begin anew",
                    differences=[(name, repr(state[name]), repr(getattr(self, name)))],
                )
        self.epoch, self.position = state["epoch"], state["position"]


def _permuted(place: int, length: int, keys: list[int]) -> int:
    """Where a permutation of `range(length)` puts `place`: a Feistel network, walked until it is back in the range."""
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        place = (left << half) | right
        if place < length:
            return place


def _mixed(word: int) -> int:
    """64 well-mixed bits; the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


class DataCursor(IndexCursor):
    """The sampler of a torch `DataLoader`, and the loop over it.

        cursor = DataCursor(len(dataset), batch_size=64, seed=0)
        loader = DataLoader(dataset, batch_size=64, sampler=cursor, num_workers=4)
        while cursor.epoch < 10:
            for batch in cursor.batches(loader):
                ...                     # a commit here counts this batch as used

    A new iterator of a `DataLoader` draws from torch's global generator. Where an epoch goes on after a restore, the
    uninterrupted run drew nothing there, so `batches` puts the generators back.
    """

    def __init__(
        self, length: int, *, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        super().__init__(length, seed=seed, shuffle=shuffle)
        if type(batch_size) is not int or batch_size < 1:
            raise InvalidInputError(f"batch_size={batch_size!r:.40}: expected a positive integer")
        self.batch_size, self.drop_last = batch_size, drop_last

    def __len__(self) -> int:
        """How many indices an epoch has."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        """The indices of this epoch that were not used yet. Iterating uses none of them."""
        return self._indices(self.position, self.length)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of this epoch that were not used yet; afterwards the next epoch has begun.

        Args:
            loader: gives batches of `batch_size` of the indices that this cursor gives as its sampler.
        """
        rest = self.length - self.position
        if rest >= (self.batch_size if self.drop_last else 1):
            guard = RngGuard(RngState()) if self.position else None
            iterator = iter(loader)
            if guard is not None:
                guard.put_back()
            for batch in iterator:
                self.position = min(self.length, self.position + self.batch_size)
                yield batch
        self.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """As of an `IndexCursor`, and the size of batches."""
        return {**super().state_dict(), "batch_size": self.batch_size, "drop_last": self.drop_last}


class InFlightRollouts:
    """Rollouts that were begun and are not finished, by key.

    What is kept of each is the caller's: the prompt or the seed to begin it again, or what it has so far, to go on.
    """

    def __init__(self) -> None:
        self._rollouts: dict[int, dict[str, Any]] = {}
        self._next = 0

    def begin(self, **kept: Any) -> int:
        """Note a rollout; its key, which is never given twice."""
        key = self._next
        self._next += 1
        self._rollouts[key] = kept
        return key

    def update(self, key: int, **kept: Any) -> None:
        """Replace or add to what is kept of a rollout."""
        self._known(key).update(kept)

    def finish(self, key: int) -> dict[str, Any]:
        """Take a rollout out; what was kept of it.

        Raises:
            NotFoundError: it is not under way.
        """
        self._known(key)
        return self._rollouts.pop(key)

    def _known(self, key: int) -> dict[str, Any]:
        if key not in self._rollouts:
            known = list(self._rollouts)
            raise NotFoundError(
                f"rollout {key} is not under way; {len(known)} are: {known[:8]}. After a restore only those that were "
                "under way at the snapshot are known",
                key=key,
            )
        return self._rollouts[key]

    def pending(self) -> dict[int, dict[str, Any]]:
        """All that are under way, oldest first; after a restore, what must be done again or gone on with."""
        return {key: dict(kept) for key, kept in self._rollouts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that is under way, and the next key."""
        return {"next": self._next, "rollouts": {key: dict(kept) for key, kept in self._rollouts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only what was under way then is under way now."""
        self._next = state["next"]
        self._rollouts = {key: dict(kept) for key, kept in state["rollouts"].items()}


class Counters:
    """Named counts, such as a collector's progress: `Counters(frames=0, episodes=0, policy_version=0)`."""

    def __init__(self, **start: int) -> None:
        self._counts = dict(start)

    def __getitem__(self, name: str) -> int:
        if name not in self._counts:
            raise NotFoundError(f"no counter {name!r}; there are {', '.join(sorted(self._counts))}", name=name)
        return self._counts[name]

    def add(self, **increments: int) -> None:
        """Count on.

        Raises:
            NotFoundError: a name that was not given at the start.
        """
        for name in increments:
            self[name]
        for name, increment in increments.items():
            self._counts[name] += increment

    def disagreements(self, others: Mapping[str, int]) -> list[str]:
        """Where another part counted otherwise, as text; names that only one side has are no disagreement.

        Args:
            others: what a trainer, an optimizer or a logger says of the same counts.
        """
        return [
            f"{name}: counted {self._counts[name]} here, {count} there"
            for name, count in others.items()
            if name in self._counts and self._counts[name] != count
        ]

    def check(self, **others: int) -> None:
        """Refuse to go on when another part counted otherwise.

        Raises:
            MismatchError: `disagreements` has each.
        """
        found = self.disagreements(others)
        if found:
            raise MismatchError(
                f"counters disagree: {'; '.join(found)}. The parts come from different steps; restore all of them from "
                "one snapshot (`casckpt show` lists the step of each component)",
                disagreements=found,
            )

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Count on from there.

        Raises:
            MismatchError: other names; nothing was changed.
        """
        if state.keys() != self._counts.keys():
            raise MismatchError(f"counters: expected {sorted(state)}, found {sorted(self._counts)}")
        self._counts = dict(state)
