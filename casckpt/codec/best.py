"""A chunk with or without a base: whichever is smaller by enough, and cheap enough to decode.

A leaf's `Memory` knows what its chunks take by each way, so that only what likely wins is computed: everything is tried
at the first chunk and every TRIAL_INTERVAL uses. A chunk of frames is tried as frames first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from casckpt.codec import choose, constant, raw
from casckpt.codec.contract import Encoded
from casckpt.codec.difference import encode_difference
from casckpt.codec.forms import size_of
from casckpt.codec.frames import Frames, encode_frames
from casckpt.codec.level import PLAIN, decode_cost
from casckpt.codec.memory import Limits, Memory

_FRAMES_GAIN = 0.9  # of the size without a base: what frames with a base have to stay under


class Base(NamedTuple):
    """A chunk that a difference may name: its decoding cost, and its plain bytes; None when they cannot be had.

    `skip`: where the chunk is frames, its bytes before the first whole one. `is_far`: it lies many commits back.
    """

    cost: int
    read: Callable[[], memoryview | None]
    skip: int = 0
    is_far: bool = False


class Best(NamedTuple):
    """An encoding, and which of the bases it names; None: none."""

    encoded: Encoded
    base: int | None = None


def encode_best(
    plain: memoryview,
    itemsize: int,
    memory: Memory,
    bases: Sequence[Base],
    limits: Limits,
    frames: Frames | None = None,
) -> Best:
    """The difference to the first base that is worth it and cheap enough, else the standalone encoding.

    Args:
        plain: the chunk: C-contiguous, one byte per item of the view.
        itemsize: bytes per number.
        memory: what paid last for this leaf; updated.
        bases: those that may be tried, the most alike first. One is read only when it is.
        limits: of cost and size.
        frames: how the chunk is frames, if it is.

    Returns:
        An encoding that decodes to `plain` by proof. `rejected` is kept when the proof of a difference failed and
        the standalone encoding takes its place.

    Raises:
        InvalidInputError: `itemsize` is not positive.
    """
    if _is_constant(plain, itemsize):
        return Best(choose.encode(plain, itemsize))
    if limits.level is PLAIN:
        return Best(raw.encode(plain))
    if frames is not None and memory.is_frames_due():
        found = _as_frames(plain, frames, memory, bases, limits)
        memory.learn_frames(has_paid=found is not None)
        if found is not None:
            return found
    alone = None
    if not bases or memory.is_trial_due():
        alone = _alone(plain, itemsize, memory, limits)
        memory.learn_alone(alone, len(plain))
    rejected, has_failed = None, False
    for number, base in enumerate(bases):
        if memory.is_hopeless(is_far=base.is_far) or base.cost + memory.difference_cost > limits.cost_max:
            continue
        base_plain = base.read()
        if base_plain is None:
            continue
        ceiling = memory.ceiling(len(plain), min(limits.level.difference_max, 1 - limits.gain_min))
        hint = memory.far_difference if base.is_far else memory.difference
        form = encode_difference(plain, base_plain, itemsize, hint, ceiling=ceiling)
        if form is not None and form.rejected is not None:
            rejected = form.rejected
            break
        if form is not None and not memory.is_worth(form, len(plain), limits.price):
            form = None
        memory.learn_difference(form, len(plain), is_far=base.is_far)
        has_failed |= form is None
        if form is not None and base.cost + memory.difference_cost <= limits.cost_max:
            return Best(form, number)
    if bases and not has_failed and memory.difference_share <= limits.level.root_gain:
        return Best(raw.encode(plain, rejected=rejected))
    alone = alone or _alone(plain, itemsize, memory, limits)
    return Best(replace(alone, rejected=alone.rejected or rejected))


def _alone(plain: memoryview, itemsize: int, memory: Memory, limits: Limits) -> Encoded:
    """The chunk without a base; raw, until the next trial, where that costs more than all chunks could."""
    alone = choose.encode(plain, itemsize, memory.standalone, gain_min=limits.gain_min)
    if decode_cost(alone, len(plain)) <= limits.alone_max:
        return alone
    memory.standalone.learn(choose.Plan(itemsize))
    return raw.encode(plain)


def _as_frames(plain: memoryview, frames: Frames, memory: Memory, bases: Sequence[Base], limits: Limits) -> Best | None:
    """The chunk as frames where anything in it repeats: with the first base that pays and is cheap enough, or without.

    A base costs a restore of the whole column nothing, which decodes it anyway: so it has no price but its own size.
    """
    ceiling = int((1 - limits.gain_min) * len(plain))
    alone = encode_frames(plain, frames, hint=memory.frames, ceiling=ceiling)
    is_cheap = alone is not None and alone.rejected is None and decode_cost(alone, len(plain)) <= limits.cost_max
    best = Best(alone) if alone is not None and is_cheap else None
    for number, base in enumerate(bases):
        base_plain = base.read() if base.cost < limits.cost_max else None
        if base_plain is None:
            continue
        room = ceiling if best is None else int(_FRAMES_GAIN * size_of(best.encoded))
        form = encode_frames(plain, frames._replace(base_skip=base.skip), base_plain, memory.frames, ceiling=room)
        is_proven = form is not None and form.rejected is None
        if form is not None and is_proven and base.cost + decode_cost(form, len(plain)) <= limits.cost_max:
            return Best(form, number)
    return best


def _is_constant(plain: memoryview, itemsize: int) -> bool:
    """Whether a chunk is one short pattern over and over, which takes no bytes at all."""
    return constant.find_pattern(plain, max(itemsize, 1)) is not None
