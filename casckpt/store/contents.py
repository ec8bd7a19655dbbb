"""A stored component read leaf by leaf, without making torch or numpy objects of it.

For tools that look at state or carry it elsewhere: paths, types and sizes cost the structure alone; scalars the scalar
block; bytes are read block by block, so that the caller decides how much memory that takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from casckpt.errors import CorruptionError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.layout import SCALARS
from casckpt.format.scalars import decode_scalars
from casckpt.format.snapshot import RingManifest
from casckpt.format.structure import Place, Structure, leaf_places
from casckpt.replay.view import RingView
from casckpt.store.restore import Restorer, Stored
from casckpt.store.ring_reader import RingReader
from casckpt.store.values import Value


@dataclass(frozen=True)
class LeafFacts(Value):
    """What the structure says of one leaf.

    Attributes:
        kind: "torch", "numpy", "bytes", "pickle" or "scalar".
        dtype: as stored; empty for bytes, pickles and scalars.
        size_bytes: of its elements; 0 for scalars, which lie together in the scalar block.
        leaf: its index in the structure; equal at several paths for one object. None for scalars.
        scalar: its index among the scalars, or None.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    leaf: int | None
    scalar: int | None


class Contents:
    """One component of a snapshot. Made by `Inspection.contents`."""

    def __init__(self, restorer: Restorer, stored: Stored) -> None:
        self._restorer = restorer
        self._stored = stored

    @property
    def structure(self) -> Structure:
        return self._stored.structure

    def leaves(self) -> Iterator[LeafFacts]:
        """Every leaf and scalar in tree order. Reads nothing."""
        return (self._facts(place) for place in leaf_places(self.structure, self._stored.name))

    def _facts(self, place: Place) -> LeafFacts:
        if place.leaf is None:
            return LeafFacts(place.path, "scalar", "", (), 0, None, place.scalar)
        leaf = self.structure.leaves[place.leaf]
        kind = "pickle" if place.is_opaque else leaf.kind
        size = prod(leaf.shape) * itemsize_of(leaf.kind, leaf.dtype)
        return LeafFacts(place.path, kind, leaf.dtype, leaf.shape, size, place.leaf, None)

    def scalars(self) -> list[Any]:
        """Values of the scalars, in tree order; those of torch and numpy stay `Foreign`. Reads the scalar block.

        Raises:
            CorruptionError, IncompleteError: it is damaged or not here.
        """
        encoded = bytearray(self._stored.manifest.scalars_size)
        self._restorer.read([(self._stored, {SCALARS: memoryview(encoded)})])
        values = decode_scalars(memoryview(encoded))
        expected = sum(each.scalar is not None for each in self.leaves())
        if len(values) != expected:
            raise CorruptionError(f"scalar block: {len(values)} values, the structure has {expected}")
        return values

    def read_blocks(self, blocks: Collection[int]) -> dict[int, memoryview]:
        """Plain bytes of some blocks, verified. Memory: their sizes in `structure.blocks`.

        Raises:
            CorruptionError, IncompleteError: with the chunk and the leaves that lie in it.
        """
        memory = {block: memoryview(bytearray(self.structure.blocks[block][0])) for block in blocks}
        self._restorer.read([(self._stored, memory)])
        return memory

    def ring(self) -> RingView | None:
        """The rows of a ring; None for any other component. Reads where it stood.

        Raises:
            CorruptionError, IncompleteError: that, or a group of segments, is damaged or not here.
        """
        if not isinstance(self._stored.manifest, RingManifest):
            return None
        encoded = bytearray(self._stored.manifest.scalars_size)
        self._restorer.read([(self._stored, {SCALARS: memoryview(encoded)})])
        return RingReader(self._restorer, self._stored, bytes(encoded)).view({})
