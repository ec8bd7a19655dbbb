"""Which stored blocks may stream straight into live memory, and how the other leaves are copied.

A block is *direct* when one dense live leaf covers all of it and every leaf that the snapshot has in it lies in that
memory at the same offset, in the same layout and dtype. Memory that belongs to nobody known is never written.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from casckpt.format.structure import Leaf, Structure
from casckpt.state.blocks import DEVICE_BIT, merge_extents
from casckpt.state.memory import window


class LiveLeaf(NamedTuple):
    """A live tensor or array that will receive stored leaf `leaf`."""

    leaf: int
    live: Any
    extent: Any  # as the doors' `describe` gives it
    path: str


class Sharing(NamedTuple):
    """Two paths that share memory on one side only; `is_stored` says on which."""

    path: str
    other: str
    is_stored: bool


def describe_live(live: Any, kind: str) -> Any:
    """The extent of a live tensor ("torch") or array ("numpy"); None for anything else, and for what is not stored."""
    if kind == "numpy":
        from casckpt.state import _numpy as door
    else:
        from casckpt.state import _torch as door  # type: ignore[no-redef]
    try:
        return door.describe(live) if type(live) in door.LEAF_TYPES else None
    except ValueError:
        return None


def direct_memory(live: Any, kind: str) -> memoryview | None:
    """The writable memory of a live tensor or array in C order on the CPU; None for anything else."""
    extent = describe_live(live, kind)
    if extent is None:
        return None
    (_, _, _, strides, _), low, high, _, is_dense = extent
    if low is None or not 0 <= low < DEVICE_BIT or strides is not None or not is_dense:
        return None
    is_locked = kind == "numpy" and not live.flags.writeable
    return None if is_locked else window(low, high - low, writable=True)


def note_written(tensors: list[Any]) -> None:
    """Let torch know that the memory of these tensors was written past it."""
    if tensors:
        from casckpt.state import _torch

        _torch.note_written(tensors)


def find_sharing(structure: Structure, entries: list[LiveLeaf]) -> list[Sharing]:
    """Where live memory is shared otherwise than the stored one."""
    starts, _, _ = merge_extents([entry.extent for entry in entries])
    by_block: dict[int, LiveLeaf] = {}
    by_run: dict[int, tuple[int, LiveLeaf]] = {}
    run_of: dict[int, int] = {}
    found = []
    for entry, run in zip(entries, starts, strict=True):
        block = structure.leaves[entry.leaf].block
        if block < 0 or entry.extent[1] is None:
            continue
        first = by_block.setdefault(block, entry)
        if first is not entry and run_of[block] != run:
            found.append(Sharing(entry.path, first.path, is_stored=True))
        run_of.setdefault(block, run)
        owner, owning = by_run.setdefault(run, (block, entry))
        if owner != block and entry.extent[4] and owning.extent[4]:
            found.append(Sharing(entry.path, owning.path, is_stored=False))
    return found


def direct_blocks(structure: Structure, entries: list[LiveLeaf], staged: set[int]) -> dict[int, memoryview]:
    """Writable live memory by block, for the blocks that are direct; `staged` leaves are needed as values."""
    members: dict[int, set[int]] = defaultdict(set)
    for index, leaf in enumerate(structure.leaves):
        members[leaf.block].add(index)
    groups: dict[int, list[LiveLeaf]] = defaultdict(list)
    for entry in entries:
        groups[structure.leaves[entry.leaf].block].append(entry)
    direct = {}
    for block, group in groups.items():
        if block < 0 or members[block] & staged or members[block] != {entry.leaf for entry in group}:
            continue
        base = _common_base(structure, group, structure.blocks[block][0])
        if base is not None:
            direct[block] = window(base, structure.blocks[block][0], writable=True)
    return direct


def _common_base(structure: Structure, group: list[LiveLeaf], size: int) -> int | None:
    """Where the block starts in live memory, if all its leaves agree and one of them covers it."""
    bases = set()
    is_covered = False
    for entry in group:
        leaf = structure.leaves[entry.leaf]
        if not _lies_alike(leaf, entry.extent):
            return None
        _, low, high, first, is_dense = entry.extent
        bases.add(first - leaf.offset)
        is_covered = is_covered or (is_dense and high - low == size and low == first - leaf.offset)
    return bases.pop() if len(bases) == 1 and is_covered else None


def _lies_alike(leaf: Leaf, extent: Any) -> bool:
    (kind, dtype, shape, strides, _), low = extent[:2]
    if low is None or low < 0 or low >= DEVICE_BIT:
        return False
    return bool(leaf.kind == kind and leaf.dtype == dtype and leaf.shape == shape and leaf.strides == strides)


def is_writable(live: Any, leaf: Leaf, strides: tuple[int, ...] | None) -> bool:
    """Whether every element can be written on its own, or is repeated in the snapshot as it is here."""
    if leaf.kind == "numpy" and not live.flags.writeable:
        return False
    stored = leaf.strides or (1,) * len(leaf.shape)
    return strides is None or all(
        stride or size == 1 or not kept for size, stride, kept in zip(leaf.shape, strides, stored, strict=True)
    )


def shown(leaf: Leaf) -> str:
    """A leaf as messages name it."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def copy_leaf(live: Any, stored: Any, kind: str) -> float:
    """Put a staged leaf into a live one of the same shape; the largest change that a cast made (0.0 without one)."""
    if kind == "numpy":
        from casckpt.state import _numpy

        return _numpy.copy_into(live, stored)
    from casckpt.state import _torch

    return _torch.copy_into(live, stored)
