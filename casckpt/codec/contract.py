"""The types that codecs and their callers share.

A codec file exports `DECODERS`, a mapping of version to `Decoder`; the registry does the rest. A decoder gets the
record's `params`, the whole `payload`, the plain bytes of its `bases` in the record's order, and a writable `out` of
exactly the plain size. It writes all of `out` or raises `CorruptionError`; it may leave `out` half written when it
raises.

This file imports neither NumPy nor zstandard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from casckpt.errors import CorruptionError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

RAW, CONSTANT, ZSTD, PLANES, DIFFERENCE, PREDICTION, FRAMES = 0, 1, 2, 3, 4, 5, 6  # codec ids, as stored in records

TRIAL_INTERVAL = (
    32  # uses of a hint between two trials: the trial then costs under 2 us a chunk, and a change is seen soon
)


class Decoder(NamedTuple):
    """One version of one codec: its name for messages, its function, and how many bases it takes."""

    name: str
    decode: Callable[[bytes, memoryview, Sequence[Buffer], memoryview], None]
    base_counts: range = range(1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One stored form of a chunk.

    `payload` is a single buffer; for raw it is the caller's own view, so it must be written before the memory changes.
    `rejected` names a codec whose output did not decode to the plain bytes, in which case this is raw; callers count
    and report it.
    """

    codec: int
    version: int
    params: bytes
    payload: Buffer
    stored_size: int
    rejected: str | None = None


@dataclass(slots=True)
class Hint:
    """What paid last for one leaf or chunk: a cheap skip of the trial.

    One hint may be shared by threads that encode chunks of one leaf; a race costs a trial more or less and never
    correctness, because every encoding is checked whatever chose it.
    """

    _plan: Any = field(default=None, repr=False)
    _uses: int = 0

    def recall(self) -> Any:
        """The plan to use again, or None when it is time for a trial (every `TRIAL_INTERVAL` uses)."""
        self._uses += 1
        return None if self._uses % TRIAL_INTERVAL == 0 else self._plan

    def learn(self, plan: Any) -> None:
        """Remember the outcome of a trial or of an attempt."""
        self._plan = plan


def damaged(codec: str, what: str) -> CorruptionError:
    """The error for a stored form that cannot be what any encoder wrote."""
    return CorruptionError(f"{codec} encoding is damaged: {what}. Run `casckpt verify --read-data`.", codec=codec)
