"""Rows of stored rings read: the store's side of `RingView` and of restores into live rings.

A segment is an ordinary component as far as reading goes: its structure says where each column's bytes lie in which
chunk. Whole runs of rows are read straight into the memory that takes them; chunks of which a few rows are wanted, as
for a sampled batch, are decoded once and a bounded number of them is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from casckpt.errors import CorruptionError, IncompleteError, InvalidInputError, NotFoundError
from casckpt.format.dtypes import itemsize_of
from casckpt.format.snapshot import ComponentRef
from casckpt.format.structure import Leaf, Structure, keys_of
from casckpt.format.structure import Mapping as MappingNode
from casckpt.ids import ObjectId
from casckpt.limits import MIB
from casckpt.replay.contract import Column, Position, Wanted
from casckpt.replay.mapped import Map
from casckpt.replay.segments import Node, Range
from casckpt.replay.view import RingView
from casckpt.state.build import read_scalars
from casckpt.store.rings import load_nodes

if TYPE_CHECKING:
    from casckpt.store.restore import Restorer, Stored

_SCALAR_NAMES = ("capacity", "head", "count", "total")  # the first four of a ring's own tree
_KEPT_SIZE = 32 * MIB  # decoded chunks kept for single rows, and read together
_SEGMENTS_MAX = 256  # of which structure and places are kept, about 10 KiB each

_Pieces = dict[int, list[tuple[int, memoryview]]]


def read_position(stored: Stored, scalars: bytes) -> Position:
    """Where a stored ring stood; `held` is what was kept.

    Raises:
        CorruptionError: the numbers are impossible or contradict the rows that are there.
    """
    values = read_scalars(stored.structure, scalars)[: len(_SCALAR_NAMES)]
    if len(values) < len(_SCALAR_NAMES) or any(type(value) is not int for value in values):
        raise CorruptionError(f"component {stored.name!r}: a ring without its position. Run `casckpt verify`.")
    found = Position(*values)
    if not 0 <= found.head < found.capacity or not 0 <= found.held <= min(found.capacity, found.total or 0):
        raise CorruptionError(f"component {stored.name!r}: an impossible position {found}. Run `casckpt verify`.")
    return found


def columns_of(structure: Structure, tree: Any) -> dict[str, tuple[int, Leaf]]:
    """Columns of a mapping node of leaves: name → index and leaf, each in C order.

    Raises:
        CorruptionError: it is none.
    """
    if not isinstance(tree, MappingNode) or not all(isinstance(child, int) for child in tree.children):
        raise CorruptionError("a ring whose columns are no leaves. Run `casckpt verify`.")
    found = {}
    for name, index in zip(keys_of(tree), tree.children, strict=True):
        assert isinstance(index, int)
        leaf = structure.leaves[index]
        if not isinstance(name, str) or not leaf.shape or leaf.strides is not None:
            raise CorruptionError(f"column {name!r} of a ring is none. Run `casckpt verify`.")
        found[name] = index, leaf
    return found


def _own_columns(structure: Structure) -> dict[str, Column]:
    """The columns that a ring's own tree describes by leaves of no rows."""
    tree = structure.tree
    children = dict(zip(keys_of(tree), tree.children, strict=True)) if isinstance(tree, MappingNode) else {}
    return {
        name: Column(leaf.kind, leaf.dtype, leaf.shape[1:], prod(leaf.shape[1:]) * itemsize_of(leaf.kind, leaf.dtype))
        for name, (_, leaf) in columns_of(structure, children.get("columns")).items()
    }


class RingReader:
    """The rows of one stored ring; a `RowSource`. Thread-safe.

    Raises:
        CorruptionError, IncompleteError: its position or a group of segments is damaged or not here.
    """

    def __init__(self, restorer: Restorer, stored: Stored, scalars: bytes) -> None:
        self.name = stored.name
        self.address = bytes(stored.ref.manifest)
        self.position = read_position(stored, scalars)
        self.columns: Mapping[str, Column] = _own_columns(stored.structure)
        self._snapshot_id = stored.snapshot_id
        self._restorer = restorer
        parts = load_nodes(restorer.catalog, stored.manifest)
        self._nodes = [each for part in parts for each in part.segments()]
        self._starts = [node.start for node in self._nodes]
        self._loaded: OrderedDict[bytes, Stored] = OrderedDict()
        self._kept: OrderedDict[ObjectId, memoryview] = OrderedDict()
        self._kept_size = 0
        self._lock = threading.Lock()
        total = self.position.total or 0
        held = [self._starts[0], self._nodes[-1].stop] if self._nodes else [total, total]
        if held[0] > total - self.position.held or held[1] != total:
            raise CorruptionError(
                f"component {self.name!r}: rows {held[0]} to {held[1]} are stored, its position needs "
                f"{total - self.position.held} to {total}. Run `casckpt verify`."
            )
        self.segments: Sequence[Range] = [Range(node.start, node.stop, node.step) for node in self._nodes]

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill all memory; see `RowSource`.

        Raises:
            CorruptionError, IncompleteError: with `component`, `paths` and `object_id`.
        """
        found: dict[bytes, tuple[Stored, _Pieces]] = {}
        for start, stop, memory in wanted:
            for node in self._nodes_of(start, stop):
                stored, pieces = found.setdefault(node.manifest, (self._load(node), {}))
                self._add(stored, pieces, node, start, stop, memory)
        self._restorer.read_pieces(self._take_kept(list(found.values())))

    def prove(self, start: int, stop: int) -> None:
        """Read and hash every chunk that rows [start, stop) lie in."""
        nodes = self._nodes_of(start, stop)
        for at in range(0, len(nodes), _SEGMENTS_MAX):
            loaded = [self._load(node) for node in nodes[at : at + _SEGMENTS_MAX]]
            self._restorer.read_pieces([(each, {chunk: [] for chunk in range(len(each.ids))}) for each in loaded])

    def map(self, start: int, stop: int, names: Sequence[str]) -> dict[str, tuple[Map, memoryview]]:
        """Columns of rows of one segment that are one raw chunk, or a part of one; see `RowSource`."""
        (node,) = self._nodes_of(start, stop)
        stored = self._load(node)
        leaves = columns_of(stored.structure, stored.structure.tree)
        found: dict[str, tuple[Map, memoryview]] = {}
        for name in names:
            leaf, size = leaves[name][1], self.columns[name].row_size
            spans = stored.layout.spans(leaf.block) if leaf.block >= 0 else []
            mapped = self._restorer.map(stored, spans[0].chunk) if len(spans) == 1 else None
            if mapped is not None:
                low = spans[0].offset + leaf.offset + (start - node.start) * size
                found[name] = mapped, mapped.memory[low : low + (stop - start) * size]
        return found

    def first_step_within(self, age_s: float) -> int:
        """See `RowSource`. Steps that cannot be read any more count as young. Cost: an entry read for each older step.

        Raises:
            InvalidInputError: the snapshot is not known here.
        """
        catalog = self._restorer.catalog
        if self._snapshot_id is None:
            raise InvalidInputError(f"component {self.name!r}: read without its snapshot, so that ages are not known")
        own = catalog.info(self._snapshot_id)
        oldest = own.created_at.timestamp() - age_s
        first = 0
        for step in sorted({node.step for node in self._nodes}):
            snapshot_id = catalog.find_step(own.run, own.branch, step)
            with contextlib.suppress(CorruptionError, IncompleteError, NotFoundError):
                if snapshot_id is not None:
                    if catalog.info(snapshot_id).created_at.timestamp() >= oldest:
                        break
                    first = step + 1
        return first

    def view(self, mutable: Any) -> RingView:
        """What is handed out of it."""
        return RingView(self, mutable, (self.position.total or 0) - self.position.held)

    # --- segments ---

    def _nodes_of(self, start: int, stop: int) -> list[Node]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_right(self._starts, stop - 1)
        return self._nodes[first:last] if start < stop else []

    def _load(self, node: Node) -> Stored:
        with self._lock:
            stored = self._loaded.get(node.manifest)
            if stored is not None:
                self._loaded.move_to_end(node.manifest)
                return stored
        rows = f", rows {node.start} to {node.stop}"
        stored = self._restorer.load(self.name, ComponentRef(node.manifest, node.step, 0), rows)
        for name, (_, leaf) in columns_of(stored.structure, stored.structure.tree).items():
            column = self.columns.get(name)
            if column is None or (leaf.kind, leaf.dtype, leaf.shape) != (*column[:2], (node.row_count, *column.shape)):
                raise CorruptionError(
                    f"component {self.name!r}{rows}: column {name!r} is not what the ring says. Run `casckpt verify`."
                )
        with self._lock:
            self._loaded[node.manifest] = stored
            while len(self._loaded) > _SEGMENTS_MAX:
                self._loaded.popitem(last=False)
        return stored

    def _add(
        self, stored: Stored, pieces: _Pieces, node: Node, start: int, stop: int, memory: Mapping[str, memoryview]
    ) -> None:
        """Which parts of which chunks go where, for the rows that a segment has of [start, stop)."""
        low, high = max(start, node.start), min(stop, node.stop)
        leaves = columns_of(stored.structure, stored.structure.tree)
        for name, view in memory.items():
            size = self.columns[name].row_size
            if name not in leaves:
                raise CorruptionError(f"component {self.name!r}: column {name!r} is missing. Run `casckpt verify`.")
            leaf = leaves[name][1]
            begin = leaf.offset + (low - node.start) * size
            target = view[(low - start) * size : (high - start) * size]
            for chunk, offset, at, length in stored.layout.spans(leaf.block):
                first, last = max(begin, at), min(begin + len(target), at + length)
                if first < last:
                    piece = offset + first - at, target[first - begin : last - begin]
                    pieces.setdefault(chunk, []).append(piece)

    # --- single rows ---

    def _take_kept(self, wanted: Sequence[tuple[Stored, _Pieces]]) -> list[tuple[Stored, _Pieces]]:
        """Serve chunks of which little is wanted from those that are kept; gives back the others."""
        bulk: list[tuple[Stored, _Pieces]] = []
        few: list[tuple[Stored, int, list[tuple[int, memoryview]]]] = []
        for stored, pieces in wanted:
            rest = {}
            for chunk, parts in pieces.items():
                if 2 * sum(len(memory) for _, memory in parts) > stored.layout.chunk_sizes[chunk]:
                    rest[chunk] = parts
                else:
                    few.append((stored, chunk, parts))
            bulk.append((stored, rest))
        while few:
            sizes = itertools.accumulate(stored.layout.chunk_sizes[chunk] for stored, chunk, _ in few)
            count = max(1, sum(size <= _KEPT_SIZE for size in sizes))
            group, few = few[:count], few[count:]
            plain = self._plain([(stored, chunk) for stored, chunk, _ in group])
            for stored, chunk, parts in group:
                for offset, memory in parts:
                    memory[:] = plain[stored.ids[chunk]][offset : offset + len(memory)]
        return bulk

    def _plain(self, chunks: Sequence[tuple[Stored, int]]) -> dict[ObjectId, memoryview]:
        """Some chunks, kept or read together."""
        with self._lock:
            found = {
                stored.ids[at]: self._kept[stored.ids[at]] for stored, at in chunks if stored.ids[at] in self._kept
            }
            for object_id in found:
                self._kept.move_to_end(object_id)
        missing = {stored.ids[at]: (stored, at) for stored, at in chunks if stored.ids[at] not in found}
        new = {each: memoryview(bytearray(stored.layout.chunk_sizes[at])) for each, (stored, at) in missing.items()}
        self._restorer.read_pieces([(stored, {at: [(0, new[each])]}) for each, (stored, at) in missing.items()])
        with self._lock:
            for object_id, plain in new.items():
                if self._kept.setdefault(object_id, plain) is plain:
                    self._kept_size += len(plain)
            while self._kept_size > _KEPT_SIZE:
                self._kept_size -= len(self._kept.popitem(last=False)[1])
        return {**found, **new}
