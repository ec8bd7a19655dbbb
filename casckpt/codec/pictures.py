"""Arithmetic on stacks of frames: which are equal, what lies between two in time, what stays where.

A stack is an array of shape (frames, bytes per frame), uint8, in the order of time. All results are integers computed
from integers without any dependence on the machine. Work is done in tiles of frames that stay in the cache, so that a
stack of any length costs a handful of NumPy calls for each tile, which release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from casckpt.codec.lanes import Array

WORD_SIZE = 8
_TILE_SIZE = 64 * 1024  # bytes of frames: with two buffers of their 16-bit sums, a part of an L2 cache
_SHIFT = 4  # bytes between the two readings of a frame by `fingerprints`
_LAST_WEIGHT = 0x9E3779B97F4A7C15  # odd, and none of the others
_EDGE = 2  # pixels around a picture that smoothing repeats


def fingerprints(frames: Array) -> Array:
    """One u64 for each frame of at least 16 bytes: equal for equal frames, and hardly ever for others.

    A sum of words times fixed random odd numbers, modulo 2 ** 64, twice: the words of the second sum begin 4 bytes
    later, because a product tells little of a difference in its highest byte alone. Who wants a collision can make one,
    so whatever is built on it has to be proven. 130 us per MiB.
    """
    size = frames.shape[1]
    whole = size // WORD_SIZE * WORD_SIZE
    shifted = (size - _SHIFT) // WORD_SIZE * WORD_SIZE
    first = _weighted(frames[:, :whole])
    if whole < size:
        first += _weighted(frames[:, size - WORD_SIZE :]) * np.uint64(_LAST_WEIGHT)
    second = _weighted(frames[:, _SHIFT : _SHIFT + shifted])
    first ^= (second << np.uint64(29)) | (second >> np.uint64(35))
    return first


def _weighted(part: Array) -> Array:
    words = part.view("<u8")
    total: Array = np.einsum("ij,j->i", words, _weights(words.shape[1]))
    return total


@lru_cache(maxsize=8)
def _weights(count: int) -> Array:
    """Random odd numbers: a counter, mixed (the finalizer of SplitMix64, Steele et al., 2014)."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Array = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return result


class Between(NamedTuple):
    """Frames that are predicted together, from those at `before` and `after` each."""

    frames: Array
    before: Array
    after: Array


def pyramid(count: int, frame_size: int) -> Iterator[Between]:
    """The frames 1 … count - 1 of a stack, each after those that it is predicted from; frame 0 is known.

    The largest power of two below `count` is the first step, then its half, and so on. At a step s the frames s, 3s,
    5s, … are predicted from the frames s before and s after; from the one before alone where the stack ends earlier. So
    half of all frames lie between neighbours that are known. Each step comes in tiles.
    """
    step = 1 << (max(count - 1, 1).bit_length() - 1)
    per_tile = max(1, _TILE_SIZE // frame_size)
    while step:
        frames = np.arange(step, count, 2 * step)
        for start in range(0, len(frames), per_tile):
            tile = frames[start : start + per_tile]
            after = np.where(tile + step < count, tile + step, tile - step)
            yield Between(tile, tile - step, after)
        step //= 2


def predict(stack: Array, between: Between, width: int) -> Array:
    """What lies between frames: their mean, rounded up; smoothed when `width` (bytes of a picture's row) is not 0."""
    before, after = stack[between.before], stack[between.after]
    mean: Array = (before | after) - ((before ^ after) >> 1)
    return smooth(mean, width) if width else mean


def smooth(stack: Array, width: int) -> Array:
    """Each pixel as the mean of 5 x 5 around it with weights 1 2 2 2 1 each way; pixels at the edges are repeated.

    Sums run over the padded pictures as one long row: what they mix across its ends falls into the padding.
    """
    count, size = stack.shape
    height, step = size // width, width + 2 * _EDGE
    padded = np.empty((count, height + 2 * _EDGE, step), np.uint16)
    padded[:, _EDGE:-_EDGE, _EDGE:-_EDGE] = stack.reshape(count, height, width)
    padded[:, :_EDGE, _EDGE:-_EDGE] = padded[:, _EDGE : _EDGE + 1, _EDGE:-_EDGE]
    padded[:, -_EDGE:, _EDGE:-_EDGE] = padded[:, -_EDGE - 1 : -_EDGE - 2 : -1, _EDGE:-_EDGE]
    padded[:, :, :_EDGE] = padded[:, :, _EDGE : _EDGE + 1]
    padded[:, :, -_EDGE:] = padded[:, :, -_EDGE - 1 : -_EDGE - 2 : -1]
    total, other = padded.reshape(-1), np.empty(padded.size, np.uint16)
    for distance in (1, 2, 1):  # 1 1, then 1 1 1 1, then 1 2 2 2 1
        for ahead in (distance, distance * step):
            np.add(total[:-ahead], total[ahead:], out=other[:-ahead])
            other[-ahead:] = 0  # at the end of the last padding: read, never used
            total, other = other, total
    total += 32
    total >>= 6
    inside = total.reshape(count, height + 2 * _EDGE, step)[:, :height, :width]
    result: Array = inside.astype(np.uint8).reshape(count, size)
    return result


def cumulate(stack: Array) -> None:
    """Add up a stack of unsigned integers along time, in place and modulo: each frame becomes the sum of all up to it.

    Blocks of about the square root of its length are added up together, then to each other: NumPy's own sum along the
    first axis is ten times as slow.
    """
    count = len(stack)
    length = max(1, int(count**0.5))
    whole = count // length * length
    blocks = stack[:whole].reshape(-1, length, stack.shape[1])
    for at in range(1, length):
        blocks[:, at] += blocks[:, at - 1]
    for at in range(1, len(blocks)):
        blocks[at] += blocks[at - 1, -1]
    for at in range(max(whole, 1), count):
        stack[at] += stack[at - 1]


def changes_at(positions: Array, values: Array, start: Array) -> tuple[Array, Array]:
    """Changed values as differences to what was there before.

    Args:
        positions: ascending indices into a stack, raveled.
        values: what is there from then on.
        start: the frame before the stack.

    Returns:
        The positions in another order, and the difference at each, modulo.
    """
    places = positions % len(start)
    # Narrow places: a stable sort of 16 bits is a radix sort.
    order = np.argsort(places.astype(np.uint16) if len(start) <= 1 << 16 else places, kind="stable")
    places, values = places[order], values[order]
    before = start[places]
    is_again = places[1:] == places[:-1]
    before[1:][is_again] = values[:-1][is_again]
    return positions[order], values - before
