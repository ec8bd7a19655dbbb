"""The bytes of one leaf in C order, out of the memory of its block."""

from __future__ import annotations

from math import prod

from casckpt.format.dtypes import itemsize_of
from casckpt.format.structure import Leaf


def gather(leaf: Leaf, block: memoryview) -> memoryview:
    """The elements of `leaf` one after the other, whatever its strides.

    Args:
        leaf: of a decoded structure, so its extent lies inside the block.
        block: the plain bytes of its block; not looked at for an empty leaf.

    Returns:
        A view into `block` where the elements already lie so, else a copy of the leaf's own size.
    """
    itemsize = itemsize_of(leaf.kind, leaf.dtype)
    size = prod(leaf.shape) * itemsize
    if size == 0:
        return memoryview(b"")
    if leaf.strides is None:
        return block[leaf.offset : leaf.offset + size]
    from casckpt.state import _numpy

    scale = itemsize if leaf.kind == "torch" else 1
    strides = tuple(stride * scale for stride in leaf.strides)
    opaque = Leaf("numpy", leaf.block, leaf.offset, f"|V{itemsize}", leaf.shape, strides)  # bits, whatever they mean
    return memoryview(_numpy.array_in(block, leaf.offset, opaque).tobytes())
