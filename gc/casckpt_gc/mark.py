"""What is needed: every object that a snapshot reaches, and every object that one of those is decoded from.

*Roots* are the snapshots that are not retired, and those that a tag means. A root reaches its context, and of every
component that is not withdrawn the manifest, structure, nodes, chunks and parts: these objects are *live*. What a
record of a live object names as a base, directly or through other bases, is *held*, unless it is live itself. All
records of a live or held object count, not only the one that a restore prefers: so what stays decodes as before,
whatever is taken away beside it (I8). Two kinds do not count: those that nobody can decode any more, and those inline
in an entry, which cannot be taken away, of objects that a pack holds less deep.

A mark starts from the timeline as the index has applied it, reads manifests, and believes no reference count. It grows:
roots that appear later are added to what is known. Whatever cannot be read stops it: nothing is concluded from half a
tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from casckpt.errors import CorruptionError, IncompleteError
from casckpt.format.snapshot import parts_of
from casckpt.ids import ObjectId, PackId, SnapshotId, short
from casckpt.index.tables import CONDEMNED, Place, decode_object, decode_pack_row, decode_snap, key_number, number_key
from casckpt.objects import graph
from casckpt.store.store import Store

Withdrawn = Mapping[bytes, Iterable[str]]


def roots(store: Store) -> set[SnapshotId]:
    """Snapshots that must stay whole, as of the entries applied. Costs one pass over the rows of all snapshots."""
    with store._keeper.kv.read() as txn:
        found = {SnapshotId(key) for key, row in txn.scan("snaps") if not decode_snap(row).is_retired}
        found |= {SnapshotId(value) for _, value in txn.scan("tags")}
    return found


def check_certain(store: Store) -> None:
    """Raise unless all of the timeline and all packs that it names are here and readable.

    Raises:
        CorruptionError: an entry cannot be read.
        IncompleteError: an entry or a pack is missing, as in a copy under way.
        StorageError: an entry cannot be read now.
    """
    store._keeper.settle()
    bad = store._catalog.bad_entries()
    pending = store._catalog.pending_packs()
    if not bad and not pending:
        return
    reasons = [entry.reason for entry in bad] + [f"pack {row.pack_id.hex()} is missing or short" for row in pending]
    kind = CorruptionError if any(entry.found_size >= 0 for entry in bad) else IncompleteError
    raise kind(
        f"store {store.path}: nothing is collected while it is not certain what is needed: {'; '.join(reasons[:3])}. "
        "Run `casckpt verify`.",
        path=store.path,
        reasons=reasons,
    )


def is_condemned(store: Store, packs: Sequence[bytes]) -> bool:
    """Whether an entry has condemned one of these packs by now."""
    with store._keeper.kv.read() as txn:
        keys = [key for key in txn.get_many("pack_ids", packs) if key is not None]
        rows = txn.get_many("packs", keys)
    return any(row is not None and decode_pack_row(row)[1] == CONDEMNED for row in rows)


@dataclass
class Mark:
    """Objects needed by the snapshots added so far.

    Attributes:
        store: whose objects.
        withdrawn: components that count as withdrawn besides those that are: snapshot id to names.
        recoded: records that count in place of all others of their objects: those that a collection is about to write.
        snapshots: those added.
        live, held: see the module.
        edges: needed objects that have bases, each with the bases of all its records that count.
    """

    store: Store
    withdrawn: Withdrawn = field(default_factory=dict)
    recoded: Mapping[ObjectId, Place] = field(default_factory=dict)
    snapshots: set[SnapshotId] = field(default_factory=set)
    live: set[ObjectId] = field(default_factory=set)
    held: set[ObjectId] = field(default_factory=set)
    edges: dict[ObjectId, set[ObjectId]] = field(default_factory=dict)

    def __contains__(self, object_id: bytes) -> bool:
        return object_id in self.live or object_id in self.held

    def add(self, snapshots: Iterable[SnapshotId]) -> set[ObjectId]:
        """Add snapshots with all they need; returns the objects that were not needed before.

        Cost: one timeline entry per snapshot, one small read per manifest and node not seen before, two look-ups per
        object not seen before.

        Raises:
            CorruptionError, IncompleteError: something on the way cannot be read, or an object is nowhere.
        """
        fresh: set[ObjectId] = set()
        for snapshot_id in snapshots:
            if snapshot_id not in self.snapshots:
                fresh |= self._reach(snapshot_id) - self.live
                self.live |= fresh
                self.snapshots.add(snapshot_id)
        was_held = fresh & self.held
        self.held -= fresh
        return (fresh - was_held) | self._hold(fresh)

    def records(self, objects: Iterable[ObjectId]) -> dict[ObjectId, list[Place]]:
        """The records of needed objects that count, as the index has them now. Costs a look-up per object below."""
        ids = list(objects)
        with self.store._keeper.kv.read() as txn:
            places = graph.reach(ids, txn)
        settled = graph.settle(places, lambda _, __: True, {})
        return {each: counting(places[each], settled) for each in ids}

    def recode(self, records: Mapping[ObjectId, Place]) -> Mark:
        """The mark as it is once these objects have only these records. Costs two look-ups per live object.

        Raises:
            IncompleteError: something live could not be decoded then.
        """
        changed = Mark(self.store, self.withdrawn, records, set(self.snapshots), set(self.live))
        changed._hold(changed.live)
        return changed

    def _reach(self, snapshot_id: SnapshotId) -> set[ObjectId]:
        catalog = self.store._catalog
        snapshot = catalog.load(snapshot_id)
        gone = {*catalog.thinned(snapshot_id), *self.withdrawn.get(snapshot_id, ())}
        found = {ObjectId(snapshot.context)} if snapshot.context else set()
        for name, ref in snapshot.components.items():
            if name not in gone and ref.manifest not in self.live:
                found |= objects_below(self.store, ObjectId(ref.manifest), self.live)
        return found

    def _hold(self, fresh: set[ObjectId]) -> set[ObjectId]:
        """Hold the bases of all records of these objects, and theirs; returns what was not needed before."""
        with self.store._keeper.kv.read() as txn:
            places = graph.reach(fresh, txn)
            new = {each: record for each, record in self.recoded.items() if each in places}
            places.update(graph.reach((base for record in new.values() for base in record.bases), txn, places))
        places.update((each, [record]) for each, record in self.recoded.items() if each in places)
        settled = graph.settle(places, lambda _, __: True, {})
        lost = next((each for each in fresh if each not in settled), None)
        if lost is not None:
            raise IncompleteError(
                f"object {short(lost)}, which a snapshot needs, cannot be decoded from what is in packs and entries. "
                "Nothing is collected. Run `casckpt verify`; repair or retire what it names.",
                object_id=lost,
            )
        added: set[ObjectId] = set()
        waiting = list(fresh)
        while waiting:
            object_id = waiting.pop()
            bases = {base for place in counting(places[object_id], settled) for base in place.bases}
            if bases:
                self.edges[object_id] = bases
            below = [base for base in bases if base not in self]
            self.held.update(below)
            added.update(below)
            waiting += below
        return added


def counting(places: Iterable[Place], decodable: Container[ObjectId]) -> list[Place]:
    """The records of one object that count: see the module."""
    good = [place for place in places if all(base in decodable for base in place.bases)]
    depth = min((place.depth for place in good if not place.is_inline), default=None)
    return [place for place in good if not place.is_inline or depth is None or place.depth <= depth]


def objects_below(store: Store, manifest: ObjectId, known: Container[bytes]) -> set[ObjectId]:
    """A manifest and everything that it reaches, parts of a ring included; manifests in `known` are left out.

    Raises:
        CorruptionError, IncompleteError: a manifest or node cannot be read.
    """
    found: set[ObjectId] = set()
    waiting = [manifest]
    while waiting:
        address = waiting.pop()
        if address in known or address in found:
            continue
        content = store._catalog.manifest(address)
        found |= {address, ObjectId(content.structure)}
        found.update(store._catalog.node_ids(content))
        found.update(store._catalog.chunk_ids(content))
        waiting += [ObjectId(part.manifest) for part in parts_of(content)]
    return found


@dataclass(frozen=True)
class PackState:
    """A pack that is part of the store, and how many of its bytes are records of live, of held and of other objects."""

    pack_id: PackId
    size_bytes: int
    live_bytes: int
    held_bytes: int
    dead_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.live_bytes + self.held_bytes


@dataclass(frozen=True)
class Census:
    """What is in packs and entries.

    Attributes:
        packs: condemned ones left out.
        dead_counts: by pack, its records that nothing needs.
        live_bytes, held_bytes: of records of live objects, those in entries included, and of held ones in packs.
    """

    packs: dict[PackId, PackState]
    dead_counts: Counter[PackId]
    live_bytes: int
    held_bytes: int


def census(store: Store, mark: Mark) -> Census:
    """Costs one pass over the rows of all objects."""
    live: Counter[int] = Counter()
    held: Counter[int] = Counter()
    dead: Counter[int] = Counter()
    dead_counts: Counter[int] = Counter()
    with store._keeper.kv.read() as txn:
        for object_id, row in txn.scan("objects"):
            is_live = object_id in mark.live and object_id not in mark.recoded
            sums = live if is_live else held if object_id in mark.held else dead
            for place in decode_object(row)[1]:
                sums[place.pack_no] += place.size
                dead_counts[place.pack_no] += sums is dead
        rows = [(key_number(key), *decode_pack_row(row)) for key, row in txn.scan("packs")]
    packs = [(number, PackId(pack_id), size) for number, pack_id, size in rows if size != CONDEMNED]
    states = {pack: PackState(pack, size, live[number], held[number], dead[number]) for number, pack, size in packs}
    counts = Counter({pack: dead_counts[number] for number, pack, _ in packs})
    return Census(states, counts, sum(live.values()), sum(each.held_bytes for each in states.values()))


def packs_with(store: Store, objects: Iterable[ObjectId]) -> set[PackId]:
    """The packs that hold records of these objects."""
    with store._keeper.kv.read() as txn:
        rows = txn.get_many("objects", list(objects))
        places = (place for row in rows if row for place in decode_object(row)[1])
        numbers = {place.pack_no for place in places if not place.is_inline}
        packs = txn.get_many("packs", [number_key(each) for each in numbers])
    return {PackId(decode_pack_row(row)[0]) for row in packs if row is not None}
