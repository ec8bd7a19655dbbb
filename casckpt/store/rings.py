"""Rings in a commit: which stored segments stay, which rows are stored, and how they are listed.

A ring is captured as its own small tree and some segments (`casckpt.replay.Take`). Each segment goes through the
commit like a component of its own: structure, chunks, manifest. What is special is decided here: a stored segment that
still has all its rows is compared chunk by chunk with what the parent has in its place; one whose first rows are
overwritten by now is compared, as far as it lives on, with its stored bytes, and stays as it is; rows that are not
given at all stay because an earlier take read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from casckpt.errors import CorruptionError, SaveFailedError
from casckpt.format import wire
from casckpt.format.dtypes import itemsize_of
from casckpt.format.layout import Layout, plan_layout
from casckpt.format.record import MANIFEST, STRUCTURE
from casckpt.format.snapshot import (
    RING_MANIFEST_VERSION,
    Manifest,
    Part,
    RingManifest,
    parts_of,
)
from casckpt.format.structure import VERSION, Structure, decode_structure, encode_structure
from casckpt.format.structure import Mapping as MappingNode
from casckpt.ids import ObjectId, short
from casckpt.limits import CHUNK_SIZE_MAX, CHUNK_SIZE_MIN, PICTURE_CHUNK_SIZE
from casckpt.objects.chunks import ChunkTask, Sibling
from casckpt.objects.writer import ObjectWriter
from casckpt.replay.ring import Take
from casckpt.replay.segments import Node, Range, grouped, kept, rebuilt
from casckpt.state.capture import Captured
from casckpt.store.catalog import Catalog
from casckpt.store.wholeness import FLAWS, Source, WholenessCheck

if TYPE_CHECKING:  # loads NumPy
    from casckpt.codec.frames import Frames

SEPARATOR = "/"  # no component's name has it: "replay/0" is the first segment that a commit gives of "replay"
_GROUP = encode_structure(Structure(VERSION, MappingNode("dict", [], []), [], []))


def is_segment(key: str) -> bool:
    """Whether a captured part of a draft is a segment of a ring, and no component."""
    return SEPARATOR in key


def segment_chunk_size(structure: Structure, chunk_size: int, *, is_raw: bool) -> int:
    """Where the payload of a segment is cut: after whole rows of its widest column, if a chunk holds one.

    `chunk_size` is that of the store. What is to be mapped is cut as little as can be; pictures are cut into larger
    chunks, for they repeat within one.
    """
    from casckpt.codec.frames import frames_of

    items = [(leaf.shape[1:], itemsize_of(leaf.kind, leaf.dtype)) for leaf in structure.leaves]
    width = max((prod(shape) * size for shape, size in items), default=0) or 1
    if is_raw:
        chunk_size = CHUNK_SIZE_MAX
    elif any(frames is not None and frames.width for frames in (frames_of(*item) for item in items)):
        chunk_size = max(chunk_size, PICTURE_CHUNK_SIZE)
    return max(chunk_size - chunk_size % width, CHUNK_SIZE_MIN) if width <= chunk_size else chunk_size


class FrameHint(NamedTuple):
    """How a chunk of a segment is frames, and which chunk of the same segment likely has some of them."""

    frames: Frames
    sibling: int | None
    sibling_skip: int


def frame_hints(structure: Structure, layout: Layout) -> dict[int, FrameHint]:
    """For the chunks of columns that may repeat: pictures, and any column beside another of the same kind.

    A column's sibling is the one before it with rows of the same dtype and shape (`next_obs` beside `obs`); a chunk
    without one is compared with the chunk before it.
    """
    from casckpt.codec.frames import frames_of

    found: dict[int, FrameHint] = {}
    firsts: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for leaf in structure.leaves:
        spans = layout.spans(leaf.block) if leaf.block >= 0 else []
        is_alone = bool(spans) and spans[0].offset == 0 and layout.chunk_sizes[spans[0].chunk] == spans[0].size
        frames = frames_of(leaf.shape[1:], itemsize_of(leaf.kind, leaf.dtype)) if is_alone else None
        if frames is None:
            continue
        chunks = [span.chunk for span in spans]
        beside = firsts.setdefault((leaf.dtype, leaf.shape[1:]), chunks)
        if frames.width == 0 and beside is chunks:
            continue
        for number, (chunk, span) in enumerate(zip(chunks, spans, strict=True)):
            sibling = beside[number] if beside is not chunks else chunks[number - 1] if number else None
            before = spans[number if beside is not chunks else number - 1].start if sibling is not None else 0
            own = frames._replace(skip=-span.start % frames.size)
            found[chunk] = FrameHint(own, sibling, -before % frames.size)
    return found


def with_frames(tasks: Sequence[ChunkTask], first: int, structure: Structure, layout: Layout) -> Sequence[ChunkTask]:
    """The tasks of a segment's chunks, which stand from `first` on in a commit, with what they may repeat."""
    hints = frame_hints(structure, layout)
    found = list(tasks)
    for chunk, (frames, sibling, skip) in hints.items():
        beside = None if sibling is None else Sibling(first + sibling, skip)
        found[chunk] = found[chunk]._replace(frames=frames, sibling=beside)
    return found


def load_nodes(catalog: Catalog, manifest: Manifest) -> list[Node]:
    """The parts of a ring with their row numbers; groups are read, segments are not.

    Raises:
        CorruptionError, IncompleteError: a group is damaged or not here.
    """
    start = manifest.first_row if isinstance(manifest, RingManifest) else 0
    found = []
    for part in parts_of(manifest):
        found.append(_load_node(catalog, part, start))
        start += part.row_count
    return found


def _load_node(catalog: Catalog, part: Part, start: int) -> Node:
    children: list[Node] = []
    if part.level:
        at = start
        for child in parts_of(catalog.manifest(part.manifest)):
            if child.level >= part.level:
                raise CorruptionError(f"group {short(part.manifest)}: a part of level {child.level}")
            children.append(_load_node(catalog, child, at))
            at += child.row_count
        if at != start + part.row_count:
            raise CorruptionError(f"group {short(part.manifest)}: {at - start} rows, its ring says {part.row_count}")
    return Node(part.manifest, start, part.row_count, part.step, part.level, tuple(children))


@dataclass
class Segment:
    """A stored segment as far as a commit needs it: all but its data."""

    manifest: Manifest
    structure_id: ObjectId
    ids: list[ObjectId]
    nodes: list[ObjectId]

    def objects(self, address: bytes) -> list[ObjectId]:
        return [ObjectId(address), self.structure_id, *self.nodes, *self.ids]


@dataclass
class KnownRing:
    """The rows of a ring at the position, and what was looked up of them; shared by the positions of one handle."""

    parts: list[Node]
    segments: dict[bytes, Segment] = field(default_factory=dict)
    sources: dict[bytes, list[Source]] = field(default_factory=dict)

    def segment(self, catalog: Catalog, address: bytes) -> Segment:
        if address not in self.segments:
            manifest = catalog.manifest(address)
            ids, nodes = catalog.chunk_ids(manifest), catalog.node_ids(manifest)
            self.segments[address] = Segment(manifest, ObjectId(manifest.structure), ids, nodes)
        return self.segments[address]

    def locate(self, catalog: Catalog, check: WholenessCheck) -> list[Source] | None:
        """Every file that the rows lie in; None when something is nowhere or damaged. Looks up what is not known yet.

        Raises:
            StorageError: a file cannot be looked at now.
        """
        wanted: dict[bytes, list[ObjectId]] = {}
        try:
            for node in _all_nodes(self.parts):
                if node.manifest not in self.sources:
                    below = [] if node.children else self.segment(catalog, node.manifest).objects(node.manifest)
                    wanted[node.manifest] = below or [ObjectId(node.manifest)]
        except FLAWS:
            return None
        for address, sources in zip(wanted, check.sources(list(wanted.values())), strict=True):
            if sources is None:
                return None
            self.sources[address] = sources
        largest: dict[str, Source] = {}
        for node in _all_nodes(self.parts):
            for source in self.sources[node.manifest]:
                known = largest.get(source.path)
                if known is None or known.size < source.size:
                    largest[source.path] = source
        return list(largest.values())

    def ranges(self) -> list[Range]:
        return [Range(each.start, each.stop, each.step) for part in self.parts for each in part.segments()]

    def with_parts(self, parts: list[Node], new: Mapping[bytes, Segment]) -> KnownRing:
        """The same look-ups for the parts of the next snapshot; what these do not have is forgotten."""
        alive = {node.manifest for node in _all_nodes(parts)}
        segments = {address: each for address, each in {**self.segments, **new}.items() if address in alive}
        return KnownRing(parts, segments, {key: each for key, each in self.sources.items() if key in alive})


def _all_nodes(nodes: Sequence[Node]) -> list[Node]:
    return [each for node in nodes for each in (node, *_all_nodes(node.children))]


class RingWork:
    """One ring in one commit.

    Attributes:
        matched: given segments that turned out to be stored, by key.
        compared: given segments that the parent has stored with other or equal content, by key.
    """

    def __init__(self, name: str, take: Take, known: KnownRing | None, parent: bytes | None, catalog: Catalog) -> None:
        self._name, self._take, self._catalog = name, take, catalog
        self._known = known or KnownRing([])
        self.matched: dict[str, Node] = {}
        self.compared: dict[str, tuple[Node, Segment]] = {}
        if take.relies_on is not None and (known is None or take.relies_on.address != parent):
            raise self._lost()

    def _lost(self) -> SaveFailedError:
        return SaveFailedError(
            f"component {self._name!r}: this save has the rows that came after an earlier one, and that one is not in "
            "the store (it failed, or its data is damaged). Nothing was committed. The next commit reads all rows.",
            component=self._name,
        )

    def prepare(self, captured: Mapping[str, Captured]) -> None:
        """Find stored twins of what is given; compares the one segment that lost rows since."""
        stored = {each.stop: each for part in self._known.parts for each in part.segments()}
        for number, given in enumerate(self._take.given):
            key = f"{self._name}{SEPARATOR}{number}"
            node = stored.get(given.rows.stop) if given.known is not None else None
            if node is None or node.start > given.rows.start:
                continue
            try:
                segment = self._known.segment(self._catalog, node.manifest)
                if node.start == given.rows.start:
                    self.compared[key] = node, segment
                elif self._is_end_of(segment, captured[key]):
                    self.matched[key] = node
            except FLAWS:
                continue  # damaged: the rows are stored again

    def _is_end_of(self, segment: Segment, live: Captured) -> bool:
        """Whether live rows are the last rows of a stored segment, byte for byte. Reads its chunks one by one."""
        structure = decode_structure(self._catalog.chunk(segment.structure_id))
        sizes = [size for size, _ in structure.blocks]
        skips = [size - len_ for size, (len_, _) in zip(sizes, live.structure.blocks, strict=False)]
        is_alike = len(sizes) == len(live.structure.blocks) == len(structure.leaves) == len(live.structure.leaves)
        alike = zip(structure.leaves, live.structure.leaves, strict=False)
        if not is_alike or structure.tree != live.structure.tree:  # the names of its columns
            return False
        if any(a.dtype != b.dtype or a.shape[1:] != b.shape[1:] or a.kind != b.kind for a, b in alike):
            return False
        manifest = segment.manifest
        layout = plan_layout(structure.blocks, manifest.scalars_size, manifest.chunk_size)
        for chunk, object_id in enumerate(segment.ids):
            parts = [part for part in layout.parts(chunk) if part.block >= 0 and part.stop > skips[part.block]]
            plain, at = self._catalog.chunk(object_id) if parts else b"", 0
            for part in layout.parts(chunk):
                low, size = max(part.start, skips[part.block] if part.block >= 0 else 0), part.stop - part.start
                if part in parts:
                    stored = memoryview(plain)[at + low - part.start : at + size]
                    skip = skips[part.block]
                    if stored != live.blocks.view(part.block, low - skip, part.stop - skip):
                        return False
                at += size
        return True

    def finish(self, new: Mapping[str, tuple[bytes, Segment]], step: int, writer: ObjectWriter) -> list[Node]:
        """All parts of the new snapshot, grouped.

        Args:
            new: manifest and content of each given segment that is not stored as it is, by key.
            step: of this commit.
        """
        nodes: list[Node] = []
        for number, given in enumerate(self._take.given):
            key = f"{self._name}{SEPARATOR}{number}"
            if key in new:
                nodes.append(Node(new[key][0], given.rows.start, given.rows.row_count, step))
            else:
                nodes.append(self.matched[key] if key in self.matched else self.compared[key][0])

        def make(members: Sequence[Node]) -> bytes:
            return self._add_group(members, writer)

        return grouped(self._with_stored(nodes, make), make)

    def _with_stored(self, nodes: list[Node], make: Callable[[Sequence[Node]], bytes]) -> list[Node]:
        """What was given, with the rows that were not, and with the groups of the parent."""
        take, parts = self._take, self._known.parts
        if take.relies_on is None:
            return rebuilt(kept(parts, take.first, take.stop), nodes, make)
        start, stop = take.relied
        between = kept(parts, start, stop) if start < stop else []
        if start < stop and not (between and between[0].start <= start and between[-1].stop == stop):
            raise self._lost()
        before = [node for node in nodes if node.start < start]
        return [*before, *between, *nodes[len(before) :]]

    def _add_group(self, members: Sequence[Node], writer: ObjectWriter) -> bytes:
        (structure,) = writer.add_all([(STRUCTURE, _GROUP)])
        (address,) = writer.add_all([(MANIFEST, wire.encode(_ring_manifest(structure, 0, members)))])
        return address

    def known(self, parts: list[Node], new: Mapping[str, tuple[bytes, Segment]]) -> KnownRing:
        """What the next commit knows of the ring."""
        return self._known.with_parts(parts, dict(new.values()))

    @property
    def stop(self) -> int:
        """The row after the newest."""
        return self._take.stop

    @property
    def row_count(self) -> int:
        """Rows that the ring holds in the new snapshot."""
        return self._take.stop - self._take.first


def _ring_manifest(structure: ObjectId, first_row: int, nodes: Sequence[Node]) -> RingManifest:
    """A group's manifest: parts, and no payload."""
    return RingManifest(RING_MANIFEST_VERSION, structure, CHUNK_SIZE_MIN, 0, 0, 0, b"", first_row, as_parts(nodes))


def ring_manifest(own: Manifest, parts: Sequence[Node], work: RingWork) -> RingManifest:
    """The manifest of a ring: that of its own tree, with the parts."""
    first_row = parts[0].start if parts else work.stop
    fields = (own.structure, own.chunk_size, own.scalars_size, own.plain_size, own.chunk_count, own.ids)
    return RingManifest(RING_MANIFEST_VERSION, *fields, first_row, as_parts(parts))


def as_parts(nodes: Sequence[Node]) -> tuple[Part, ...]:
    return tuple(Part(node.manifest, node.row_count, node.step, node.level) for node in nodes)
