"""Components of a commit: captured state to chunks, manifests and references.

Unchanged data is recognised without a lookup: the chunk ids of the position's components are kept in memory and
compared place by place. What is reused is only believed while the files that hold it exist with their sizes.

All components of a commit go through each stage together (trust, structures, chunks, manifests): what costs a
transaction or a hand-over to another thread is paid once, however many small components there are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from casckpt.codec.level import COST_MAX, COST_UNIT, OPENING_SIZE, PLAIN, Level
from casckpt.codec.memory import Limits, Memory
from casckpt.errors import CorruptionError
from casckpt.format import wire
from casckpt.format.layout import SCALARS, Layout, Part, plan_layout
from casckpt.format.record import MANIFEST, NODE, STRUCTURE
from casckpt.format.snapshot import (
    EXACT,
    MANIFEST_VERSION,
    NECESSITIES,
    ComponentRef,
    Manifest,
    RingManifest,
    Snapshot,
)
from casckpt.ids import ObjectId
from casckpt.limits import NODE_FANOUT, PREDICTED_SIZE_MIN
from casckpt.objects.chunks import ChunkTask
from casckpt.objects.writer import ObjectWriter
from casckpt.replay.ring import StoredRing
from casckpt.replay.segments import Node
from casckpt.state.capture import Captured
from casckpt.state.near import find_near
from casckpt.state.relations import Relations, find_relations
from casckpt.store.catalog import Catalog
from casckpt.store.draft import Draft
from casckpt.store.predictions import Numbered, Predictions, operand_positions
from casckpt.store.rings import (
    SEPARATOR,
    KnownRing,
    RingWork,
    Segment,
    is_segment,
    load_nodes,
    ring_manifest,
    segment_chunk_size,
    with_frames,
)
from casckpt.store.wholeness import FLAWS, Source, WholenessCheck


@dataclass
class Known:
    """A component of the position, as it lies in the store."""

    ref: ComponentRef
    structure_id: ObjectId
    scalars_size: int
    ids: list[ObjectId]
    nodes: list[ObjectId]
    structure_bytes: bytes = b""
    sources: Sequence[Source] | None = None
    ring: KnownRing | None = None

    def objects(self) -> list[ObjectId]:
        """Everything that the component consists of."""
        return [ObjectId(self.ref.manifest), self.structure_id, *self.nodes, *self.ids]


@dataclass
class Added:
    """The components of a new snapshot, and plain bytes of each that no earlier commit had stored."""

    known: dict[str, Known]
    refs: dict[str, ComponentRef]
    new_bytes: dict[str, int]
    relations: Relations | None


class _Chunk(NamedTuple):
    """One chunk's place in a payload, and what paid for it before."""

    parts: list[Part]
    size: int
    itemsize: int
    memory: Memory


class _Payload:
    """The bytes of a component of one shape, whichever capture of it is being committed."""

    captured: Captured | None = None

    def read(self, parts: Sequence[Part], size: int) -> memoryview:
        assert self.captured is not None
        return read_chunk(self.captured, parts, size)


@dataclass
class _Shape:
    """The chunks of a component of a certain structure; planned once, used while the structure stays.

    Attributes:
        tasks: those of the last commit, used again while nothing that they say has changed.
        told: ids and limits that they were made for.
    """

    structure_bytes: bytes
    scalars_size: int
    layout: Layout
    chunks: list[_Chunk]
    payload: _Payload
    tasks: Sequence[ChunkTask] = ()
    told: tuple[Sequence[ObjectId], Limits] | None = None


@dataclass
class _Plan:
    """One captured component on its way."""

    captured: Captured
    known: Known | None
    layout: Layout
    chunks: list[_Chunk]
    structure_id: ObjectId
    chunk_size: int

    @property
    def is_alike(self) -> bool:
        """Whether chunks stand for the same places as in the position's."""
        known = self.known
        return (
            known is not None and known.structure_id == self.structure_id and len(known.ids) == self.layout.chunk_count
        )


class Components:
    """Writes the components of commits for one handle, which stands at one position."""

    def __init__(self, catalog: Catalog, chunk_size: int, level: Level) -> None:
        self._catalog = catalog
        self._level = level
        self._chunk_size = chunk_size
        self._known: dict[str, Known] = {}
        self._relations: Relations | None = None
        self._origin: Snapshot | None = None
        self._shapes: dict[str, _Shape] = {}
        self._row_memories: dict[tuple[str, int], Memory] = {}  # of rings, by component and column
        self._condemned = -1
        self._raw: set[str] = set()  # rings of the draft whose rows are stored as they are

    def stand_at(self, known: dict[str, Known], relations: Relations | None = None) -> None:
        """Compare with these components from now on; those not among them are read from the store when needed.

        `relations` are those of the commit that stored them.
        """
        self._known = known
        self._relations = relations

    def start_from(self, origin: Snapshot | None) -> None:
        """Where the position has no component of a name, compare with that of a snapshot of any run: a fork begins with
        what its origin has. Rings are left out: what a ring's counters say holds for its own run alone."""
        self._origin = origin

    def narrow(self, names: Container[str]) -> None:
        """Forget all but these: the position has others under the other names."""
        self._known = {name: each for name, each in self._known.items() if name in names}

    def take_in(self, known: Mapping[str, Known]) -> None:
        """Compare with these from now on, in place of what the position had under their names."""
        self._known.update(known)

    def layout(self, key: str, captured: Captured) -> Layout:
        """How a component, or a segment of a ring, is cut into chunks."""
        return plan_layout(captured.structure.blocks, len(captured.scalars), self._chunk_size_of(key, captured))

    def _chunk_size_of(self, key: str, captured: Captured) -> int:
        if not is_segment(key):
            return self._chunk_size
        return segment_chunk_size(captured.structure, self._chunk_size, is_raw=self._is_raw(key))

    def _is_raw(self, key: str) -> bool:
        return is_segment(key) and key.partition(SEPARATOR)[0] in self._raw

    def stored_ring(self, name: str, parent: Snapshot | None, check: WholenessCheck) -> StoredRing | None:
        """The ring that a component of the position is, if every file it lies in is as it should be."""
        known = self._trusted([name], parent, check)[name]
        if known is None or known.ring is None:
            return None
        return StoredRing(known.ref.manifest, known.ring.ranges)

    def add(
        self, draft: Draft, parent: Snapshot | None, writer: ObjectWriter, check: WholenessCheck, condemned: int
    ) -> Added:
        """Store what is new of all components of a draft.

        Args:
            draft: what is to be stored.
            parent: the snapshot that it continues.
            writer: takes what is new.
            check: says what is there.
            condemned: the newest entry that condemned packs, read before `check` looked at anything.

        Raises:
            CorruptionError: a component to be inherited is damaged or missing.
        """
        if condemned != self._condemned:
            self._condemned = condemned
            for each in self._known.values():
                each.sources = None  # a condemned pack may still lie there with its size, and is no source any more
                if each.ring is not None:
                    each.ring.sources.clear()
        self._raw = {name for name, take in draft.takes.items() if take.ring.is_raw}
        trusted = self._trusted([*draft.names, *draft.inherit], parent, check)
        rings = self._rings(draft, trusted, parent)
        plans = self._plan(draft, trusted, rings, writer)
        relations = self._find_relations(draft, plans)
        tasks = self._tasks(draft, plans, relations)
        try:
            results = iter(writer.add_chunks(tasks, is_own_memory=draft.is_copy))
        finally:
            for name in plans:
                self._shapes[name].payload.captured = None  # it keeps a state's memory
        added = Added({}, {}, {}, relations)
        changed: dict[str, list[ObjectId]] = {}
        for name, plan in plans.items():
            outcome = [next(results) for _ in range(plan.layout.chunk_count)]
            ids = [object_id for object_id, _ in outcome]
            sizes = plan.layout.chunk_sizes
            added.new_bytes[name] = sum(size for size, (_, is_new) in zip(sizes, outcome, strict=True) if is_new)
            known = plan.known
            is_same = known and plan.is_alike and ids == known.ids and known.scalars_size == len(plan.captured.scalars)
            if known is None or not is_same or name in rings:
                changed[name] = ids
            elif not is_segment(name):
                self._keep(added, draft, name, plan, known, parent)
        self._add_manifests(added, draft, plans, changed, rings, parent, writer)
        self._forget_segments()
        for name in draft.inherit:
            assert parent is not None
            added.known[name] = self._inherited(name, trusted[name], parent)
            ref = parent.components[name]
            necessity = _necessity(draft, name, parent)
            added.refs[name] = ComponentRef(ref.manifest, ref.step, ref.logical_bytes, necessity)
        return added

    # --- what is there already ---

    def _trusted(self, names: Sequence[str], parent: Snapshot | None, check: WholenessCheck) -> dict[str, Known | None]:
        """Each component as the parent has it, if every file it lies in is as it should be."""
        found = {name: self._find(name, parent) for name in names}
        unlocated = [known for known in found.values() if known is not None and known.sources is None]
        for known, sources in zip(unlocated, check.sources([each.objects() for each in unlocated]), strict=True):
            rows = [] if known.ring is None else known.ring.locate(self._catalog, check)
            known.sources = None if sources is None or rows is None else [*sources, *rows]
        return {
            name: known if known and known.sources is not None and check.are_sources_good(known.sources) else None
            for name, known in found.items()
        }

    def _find(self, name: str, parent: Snapshot | None) -> Known | None:
        known = self._known.get(name)
        of_origin = parent is None or name not in parent.components
        source = self._origin if of_origin else parent
        if known is not None and known.ring is not None and source is not None and name in source.components:
            known = known if known.ref.manifest == source.components[name].manifest else None  # rows of another ring
        if known is None and source is not None and name in source.components:
            ref = source.components[name]
            try:
                manifest = self._catalog.manifest(ref.manifest)
                ids, nodes = self._catalog.chunk_ids(manifest), self._catalog.node_ids(manifest)
                is_ring = isinstance(manifest, RingManifest)
                if is_ring and of_origin:
                    return None
                ring = KnownRing(load_nodes(self._catalog, manifest)) if is_ring else None
            except FLAWS:
                return None  # damaged: everything is stored again
            known = Known(ref, ObjectId(manifest.structure), manifest.scalars_size, ids, nodes, ring=ring)
            self._known[name] = known
        return known

    def _inherited(self, name: str, known: Known | None, parent: Snapshot) -> Known:
        if known is None:
            step = parent.components[name].step
            raise CorruptionError(
                f"component {name!r} cannot be inherited from step {step}: its data is damaged or missing. "
                "Give it in the state, or drop it. Run `casckpt verify`.",
                component=name,
                step=step,
            )
        return known

    # --- what is new ---

    def _rings(self, draft: Draft, trusted: dict[str, Known | None], parent: Snapshot | None) -> dict[str, RingWork]:
        """What becomes of the segments of each ring."""
        found = {}
        for name, take in draft.takes.items():
            known = trusted[name]
            ref = parent.components.get(name) if parent else None
            work = RingWork(name, take, known.ring if known else None, ref.manifest if ref else None, self._catalog)
            work.prepare(draft.captured)
            found[name] = work
        return found

    def _plan(
        self, draft: Draft, trusted: dict[str, Known | None], rings: dict[str, RingWork], writer: ObjectWriter
    ) -> dict[str, _Plan]:
        skipped = {key for work in rings.values() for key in work.matched}
        captured = {key: each for key, each in draft.captured.items() if key not in skipped}
        compared = {key: pair for work in rings.values() for key, pair in work.compared.items()}
        known = {key: _known_segment(*compared[key]) if key in compared else trusted.get(key) for key in captured}
        ids: dict[str, ObjectId] = {}
        for name, each in captured.items():
            twin = known[name]
            if twin is not None and each.structure_bytes is twin.structure_bytes:
                ids[name] = twin.structure_id
        new = {name: each.structure_bytes for name, each in captured.items() if name not in ids}
        ids.update(zip(new, writer.add_all((STRUCTURE, plain) for plain in new.values()), strict=True))
        plans = {}
        for name, each in captured.items():
            shape = self._shape(name, each)
            size = self._chunk_size_of(name, each)
            plans[name] = plan = _Plan(each, known[name], shape.layout, shape.chunks, ids[name], size)
            if plan.known is not None and plan.is_alike and not plan.known.structure_bytes and not is_segment(name):
                self._learn_costs(plan.known.ids, plan.chunks)
        return plans

    def _learn_costs(self, ids: Sequence[ObjectId], chunks: Sequence[_Chunk]) -> None:
        """What chunks cost that this handle did not store itself, as after a resume."""
        for chunk, place in zip(chunks, self._catalog.places(ids), strict=True):
            if place is not None:
                chunk.memory.learn_cost(place.cost, has_bases=bool(place.bases))

    def _forget_segments(self) -> None:
        """Let go of what belongs to segments: each commit has others."""
        for key in [key for key in self._shapes if is_segment(key)]:
            del self._shapes[key]

    def _shape(self, name: str, captured: Captured) -> _Shape:
        known = self._shapes.get(name)
        is_known = known is not None and known.structure_bytes == captured.structure_bytes
        if known is not None and is_known and known.scalars_size == len(captured.scalars):
            return known
        layout = self.layout(name, captured)
        memories: dict[int, Memory] = (
            {chunk.parts[0].block: chunk.memory for chunk in known.chunks} if known and is_known else {}
        )
        chunks = []
        for chunk, size in enumerate(layout.chunk_sizes):
            parts = layout.parts(chunk)
            if is_segment(name):
                memory = self._row_memories.setdefault((name.partition(SEPARATOR)[0], parts[0].block), Memory())
            else:
                memory = memories.setdefault(parts[0].block, Memory())
            chunks.append(_Chunk(parts, size, layout.itemsizes[chunk], memory))
        shape = _Shape(captured.structure_bytes, len(captured.scalars), layout, chunks, _Payload())
        self._shapes[name] = shape
        return shape

    def _find_relations(self, draft: Draft, plans: dict[str, _Plan]) -> Relations | None:
        """What leaves may follow from; nothing of a small state, whose differences cost little anyway."""
        if sum(plan.layout.payload_size for plan in plans.values()) < PREDICTED_SIZE_MIN:
            return None
        components = {name: draft.captured[name] for name in draft.names}
        relations = find_relations(components, self._relations)
        find_near(relations, components, self._relations)
        return relations

    def _tasks(self, draft: Draft, plans: dict[str, _Plan], relations: Relations | None) -> list[ChunkTask]:
        firsts = itertools.accumulate((plan.layout.chunk_count for plan in plans.values()), initial=0)
        numbered = {
            name: Numbered(plan.layout, first) for (name, plan), first in zip(plans.items(), firsts, strict=False)
        }
        predictions = Predictions(relations, numbered, self._chunk_size) if relations else None
        levels = {
            name: PLAIN if self._is_raw(name) else draft.levels.get(name.partition(SEPARATOR)[0], self._level)
            for name in plans
        }
        level_limits = _limits([(levels[name], plan.chunks) for name, plan in plans.items()])
        tasks: list[ChunkTask] = []
        for name, plan in plans.items():
            previous = draft.previous.get(name)
            if previous is not None and not _is_laid_out_alike(previous, plan.captured):
                previous = None
            own = self._tasks_of(name, plan, level_limits[levels[name]], previous, predictions)
            has_frames = is_segment(name) and not self._is_raw(name)
            tasks += with_frames(own, len(tasks), plan.captured.structure, plan.layout) if has_frames else own
        for at in operand_positions(tasks):
            tasks[at] = tasks[at]._replace(limits=tasks[at].limits._replace(is_operand=True))
        return tasks

    def _tasks_of(
        self, name: str, plan: _Plan, limits: Limits, previous: Captured | None, predictions: Predictions | None
    ) -> Sequence[ChunkTask]:
        shape = self._shapes[name]
        shape.payload.captured = plan.captured
        ids = plan.known.ids if plan.known and plan.is_alike else None
        is_plain = ids is not None and previous is None and predictions is None
        if is_plain and shape.told is not None and shape.told[0] is ids and shape.told[1] == limits:
            return shape.tasks
        tasks = []
        for (parts, size, itemsize, memory), known_id in zip(plan.chunks, ids or itertools.repeat(None), strict=False):
            read = functools.partial(shape.payload.read, parts, size)
            parent = functools.partial(read_chunk, previous, parts, size) if previous else None
            found = predictions.of(name, *parts[0]) if predictions and len(parts) == 1 else ()
            tasks.append(ChunkTask(read, size, itemsize, known_id, memory, limits, found, parent))
        shape.tasks, shape.told = (tasks, (ids, limits)) if ids is not None and is_plain else ((), None)
        return tasks

    def _keep(self, added: Added, draft: Draft, name: str, plan: _Plan, known: Known, parent: Snapshot | None) -> None:
        """An unchanged component: the same manifest, captured anew."""
        size = plan.captured.logical_bytes
        ref = ComponentRef(known.ref.manifest, draft.step, size, _necessity(draft, name, parent))
        same = known.scalars_size, known.ids, known.nodes, plan.captured.structure_bytes, known.sources
        added.refs[name] = ref
        added.known[name] = Known(ref, plan.structure_id, *same)

    def _add_manifests(
        self,
        added: Added,
        draft: Draft,
        plans: dict[str, _Plan],
        changed: dict[str, list[ObjectId]],
        rings: dict[str, RingWork],
        parent: Snapshot | None,
        writer: ObjectWriter,
    ) -> None:
        """Manifests of what changed: first those of segments, which the manifests of rings name."""
        nodes = {name: _add_nodes(ids, writer) for name, ids in changed.items()}
        manifests = {name: _manifest(plans[name], nodes[name] or ids) for name, ids in changed.items()}
        segments = {key: each for key, each in manifests.items() if is_segment(key)}
        addresses = writer.add_all((MANIFEST, wire.encode(each)) for each in segments.values())
        stored = {
            key: (address, Segment(manifest, plans[key].structure_id, changed[key], nodes[key]))
            for (key, manifest), address in zip(segments.items(), addresses, strict=True)
        }
        known_rings: dict[str, KnownRing] = {}
        sizes = {name: plans[name].captured.logical_bytes for name in changed if not is_segment(name)}
        for name, work in rings.items():
            own = {key: each for key, each in stored.items() if key.partition(SEPARATOR)[0] == name}
            parts = work.finish(own, draft.step, writer)
            known_rings[name] = work.known(parts, own)
            manifests[name] = ring_manifest(manifests[name], parts, work)
            sizes[name] += work.row_count * draft.takes[name].ring.row_size
            for key in [key for key in added.new_bytes if key.startswith(name + SEPARATOR)]:
                added.new_bytes[name] += added.new_bytes.pop(key)
        tops = {name: each for name, each in manifests.items() if not is_segment(name)}
        addresses = writer.add_all((MANIFEST, wire.encode(each)) for each in tops.values())
        for (name, manifest), address in zip(tops.items(), addresses, strict=True):
            plan = plans[name]
            ref = ComponentRef(address, draft.step, sizes[name], _necessity(draft, name, parent))
            added.refs[name] = ref
            added.known[name] = Known(
                ref,
                plan.structure_id,
                manifest.scalars_size,
                changed[name],
                nodes[name],
                plan.captured.structure_bytes,
                ring=known_rings.get(name),
            )


def _manifest(plan: _Plan, ids: Sequence[ObjectId]) -> Manifest:
    return Manifest(
        MANIFEST_VERSION,
        plan.structure_id,
        plan.chunk_size,
        len(plan.captured.scalars),
        plan.layout.payload_size,
        plan.layout.chunk_count,
        b"".join(ids),
    )


def _known_segment(node: Node, segment: Segment) -> Known:
    """A stored segment as what the same rows of a live ring are compared with."""
    ref = ComponentRef(node.manifest, node.step, segment.manifest.plain_size)
    return Known(ref, segment.structure_id, segment.manifest.scalars_size, segment.ids, segment.nodes)


def _limits(parts: Iterable[tuple[Level, list[_Chunk]]]) -> dict[Level, Limits]:
    """For each level what a chunk may cost to decode; told from what each leaf did in the commits before."""
    chunks_of: dict[Level, list[_Chunk]] = {}
    for level, chunks in parts:
        chunks_of.setdefault(level, []).extend(chunks)
    return {level: _limit(level, chunks) for level, chunks in chunks_of.items()}


def _limit(level: Level, chunks: list[_Chunk]) -> Limits:
    """What a chunk may cost to decode, so that a restore of all keeps the level's mean; and the price.

    What chunks that want no base cost anyway is taken from the whole, and the others share the rest. Some of these may
    stand still (frozen, or trained in turns) with chains that nobody shortens: what moves gets no more than they leave.
    A small state may cost more, at a lower price: its restore is mostly that of opening the store.
    """
    size = spent = wanting = moving = standing = 0
    for chunk in chunks:
        memory = chunk.memory
        size += chunk.size
        if not memory.wants_bases:
            spent += chunk.size * memory.cost
            continue
        wanting += chunk.size
        if memory.has_moved:
            moving += chunk.size
        else:
            standing += chunk.size * memory.cost
    whole = level.cost_max * COST_UNIT * (size + OPENING_SIZE)
    left = whole - spent
    cost = left / wanting if wanting else 2 * level.cost_max * COST_UNIT  # not known yet: half of a state is usual
    if moving:
        cost = min(cost, (left - standing) / moving)
        for chunk in chunks:
            chunk.memory.has_moved = False
    price = level.price * size / (size + OPENING_SIZE)
    alone_max = min(round(whole / size), COST_MAX) if size else COST_MAX
    return Limits(level, min(round(cost), COST_MAX), price=price, alone_max=alone_max)


def _is_laid_out_alike(one: Captured, other: Captured) -> bool:
    return one.structure_bytes == other.structure_bytes and len(one.scalars) == len(other.scalars)


def _necessity(draft: Draft, name: str, parent: Snapshot | None) -> int:
    """What the commit says, else what the parent has, else exact."""
    wanted = draft.necessity.get(name)
    if wanted is not None:
        return NECESSITIES.index(wanted)
    old = parent.components.get(name) if parent else None
    return old.necessity if old else EXACT


def _add_nodes(ids: Sequence[ObjectId], writer: ObjectWriter) -> list[ObjectId]:
    """Ids of the nodes that hold `ids`; none where a manifest holds them itself."""
    if len(ids) <= NODE_FANOUT:
        return []
    return writer.add_all((NODE, b"".join(ids[at : at + NODE_FANOUT])) for at in range(0, len(ids), NODE_FANOUT))


def read_chunk(captured: Captured, parts: Sequence[Part], size: int) -> memoryview:
    """The plain bytes of a chunk: a view where it is one run of memory, else put together."""
    if len(parts) == 1 and parts[0].block != SCALARS:
        return captured.blocks.view(*parts[0])
    out = memoryview(bytearray(size))
    at = 0
    scalars = memoryview(captured.scalars)
    for block, start, stop in parts:
        piece = scalars[start:stop] if block == SCALARS else captured.blocks.view(block, start, stop)
        out[at : at + stop - start] = piece
        at += stop - start
    return out
