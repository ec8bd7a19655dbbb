"""From leaves' addresses to blocks: which leaves share memory, and where each lies in it.

Touched extents are sorted by address and merged where they overlap, whatever library or storage they come from; each
merged run is a block. A leaf alone in its run whose elements leave holes is stored as its contiguous copy instead.
Blocks are numbered by their first leaf, so that addresses never show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from casckpt.format.dtypes import itemsize_of, plane_size
from casckpt.format.structure import Leaf
from casckpt.state.memory import compact_strides, distinct_count, window

Source = Callable[[int, int], memoryview]
DEVICE_BIT = 1 << 64  # addresses from here on are not the CPU's


class Extent(NamedTuple):
    """What a door's `describe` says of one leaf."""

    meta: tuple[str, str, tuple[int, ...], tuple[int, ...] | None, int]  # kind, dtype, shape, strides, flags
    low: int | None  # -1: no elements; None: only a copy can be stored
    high: int
    first: int
    is_dense: bool


class Plan(NamedTuple):
    """Leaves placed in blocks, and where each block's bytes come from."""

    leaves: list[Leaf]
    blocks: list[tuple[int, int]]
    addresses: list[int]  # of each block; 0 where it is the contiguous copy of its one leaf
    owners: list[int]  # the first leaf of each block


def plan_blocks(extents: list[Any]) -> Plan:
    """Place every leaf; O(n log n), about 1.5 µs a leaf."""
    starts, stops, shared = merge_extents(extents)
    plan = Plan([], [], [], [])
    numbers: dict[int, int] = {}
    for index, (meta, low, _, first, is_dense) in enumerate(extents):
        kind, dtype, shape, strides, flags = meta
        if low == -1:
            plan.leaves.append(Leaf(kind, -1, 0, dtype, tuple(shape), None, flags))
            continue
        start = starts[index]
        number = numbers.get(start) if low is not None else None
        if low is None or (not is_dense and not shared[index]):
            plan.leaves.append(_compact_leaf(meta, len(plan.blocks), low is None))
            plan.blocks.append((_compact_size(plan.leaves[-1]), plane_size(kind, dtype)))
            plan.addresses.append(0)
            plan.owners.append(index)
            continue
        if number is None:
            number = numbers[start] = len(plan.blocks)
            plan.blocks.append((stops[start] - start, plane_size(kind, dtype)))
            plan.addresses.append(start)
            plan.owners.append(index)
        plan.leaves.append(Leaf(kind, number, first - start, dtype, tuple(shape), strides, flags))
    return plan


def merge_extents(extents: list[Any]) -> tuple[list[int], dict[int, int], list[bool]]:
    """Per leaf the start of its run and whether others are in it; per run where it stops."""
    count = len(extents)
    starts = [0] * count
    shared = [False] * count
    stops: dict[int, int] = {}
    run_start = run_stop = run_leaf = -1
    lows = [extent[1] for extent in extents]
    for index in sorted((i for i in range(count) if lows[i] is not None and lows[i] >= 0), key=lows.__getitem__):
        low, high = lows[index], extents[index][2]
        if low >= run_stop:
            run_start, run_stop, run_leaf = low, high, index
        else:
            shared[index] = shared[run_leaf] = True
            run_stop = max(run_stop, high)
        starts[index] = run_start
        stops[run_start] = run_stop
    return starts, stops, shared


def _compact_leaf(meta: Any, block: int, is_compact: bool) -> Leaf:
    kind, dtype, shape, strides, flags = meta
    if not is_compact:
        strides = compact_strides(shape, strides, 1 if kind == "torch" else itemsize_of(kind, dtype))
    return Leaf(kind, block, 0, dtype, tuple(shape), strides, flags)


def _compact_size(leaf: Leaf) -> int:
    strides = leaf.strides if leaf.strides is not None else (1,) * len(leaf.shape)
    return distinct_count(leaf.shape, strides) * itemsize_of(leaf.kind, leaf.dtype)


class Blocks:
    """The blocks of a captured component: sizes, and views of their bytes.

    Views of CPU memory are not copies and live no longer than the `Captured` they come from. Views of device
    memory and of strided leaves are copies of what was asked for, no more.
    """

    def __init__(self, sizes: list[tuple[int, int]], addresses: list[int], sources: dict[int, Source]) -> None:
        self.sizes = sizes  # (size in bytes, item size)
        self.addresses = addresses
        self.sources = sources  # blocks that are copied piece by piece

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.sizes[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.sizes)

    def size(self, index: int) -> int:
        return self.sizes[index][0]

    def view(self, index: int, start: int, stop: int) -> memoryview:
        """The bytes [start, stop) of block `index`."""
        if not 0 <= start <= stop <= self.sizes[index][0]:
            raise IndexError(f"block {index} has {self.sizes[index][0]} bytes, asked for [{start}, {stop})")
        source = self.sources.get(index)
        return window(self.addresses[index] + start, stop - start) if source is None else source(start, stop)
