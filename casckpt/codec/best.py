"""A chunk with or without a base: whichever is smaller by enough.

A leaf's `Memory` knows what its chunks take without a base, so that a difference need not be measured against a
standalone encoding that is then thrown away: both are made only at the first chunk and every TRIAL_INTERVAL uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from casckpt.codec import choose, constant
from casckpt.codec.contract import TRIAL_INTERVAL, Encoded, Hint
from casckpt.codec.difference import encode_difference

MARGIN = 0.03  # of the chunk: what a base has to save, because every restore decodes and hashes it too


@dataclass(slots=True)
class Memory:
    """What paid for one leaf. May be shared by threads like a `Hint`: a race costs a trial, never correctness."""

    standalone: Hint = field(default_factory=Hint)
    difference: Hint = field(default_factory=Hint)
    _ratio: float = 1.0  # size without a base, as a share of the chunk
    _uses: int = 0

    def is_trial_due(self) -> bool:
        """Whether this use, which is counted, has to measure the standalone encoding."""
        self._uses += 1
        return self._uses % TRIAL_INTERVAL == 1

    def learn(self, alone: Encoded, plain_size: int) -> None:
        """Remember what a chunk takes without a base."""
        self._ratio = (alone.stored_size + len(alone.params)) / plain_size

    def ceiling(self, plain_size: int) -> int:
        """Bytes that a difference must stay under."""
        return int((self._ratio - MARGIN) * plain_size)


def encode_best(plain: memoryview, itemsize: int, memory: Memory, base: memoryview | None) -> Encoded:
    """The standalone encoding, or the difference to `base` when that saves at least MARGIN of the chunk.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        itemsize: bytes per number.
        memory: what paid last for this leaf; updated.
        base: plain bytes of the only base that is to be tried. None: exactly `choose.encode`.

    Returns:
        An encoding that decodes to `plain` by proof. It names `base` exactly when its codec is `DIFFERENCE`.
        `rejected` is kept when the proof of a difference failed and the standalone encoding takes its place.

    Raises:
        InvalidInputError: `itemsize` is not positive.
    """
    if base is None or constant.find_pattern(plain, max(itemsize, 1)) is not None:
        return choose.encode(plain, itemsize, memory.standalone)
    alone = None
    if memory.is_trial_due():
        alone = choose.encode(plain, itemsize, memory.standalone)
        memory.learn(alone, len(plain))
    form = encode_difference(plain, base, itemsize, memory.difference, ceiling=memory.ceiling(len(plain)))
    if form is not None and form.rejected is None:
        return form
    alone = alone or choose.encode(plain, itemsize, memory.standalone)
    return alone if form is None else replace(alone, rejected=alone.rejected or form.rejected)
