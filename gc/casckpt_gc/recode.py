"""Objects that get another record: what only old bases are held for, and what is cold.

A base of a retired snapshot is *held* while anything live is decoded from it. That is cheap as long as a chain is
young, and has no bound of its own: so where more is held than a stated share of what is live, those live objects that
name held ones directly are encoded anew without them, and what was held for them goes. Cold chunks may be encoded at
level `small` on the same way.

What is written anew takes the place of *all* records that its object has in packs, and these packs are rewritten in the
same collection, so that the entry which condemns them brings the new record. The decode graph stays well-founded (I8):

* a new record names only live objects that lie in packs, and is deeper than every record of them that stays;
* every record that names its object is deeper than it;
* `prove` marks again what is needed with the new records alone, before anything is condemned, and refuses
  when anything live cannot be decoded then, or when something is held that was not before.

Each encoding was decoded and compared before it is written, and is read back before it is published.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from casckpt.codec import encode
from casckpt.codec.contract import CONSTANT, RAW, Encoded
from casckpt.codec.level import COST_MAX, COST_UNIT, DEPTH_MAX, LEVELS, Level, decode_cost
from casckpt.codec.memory import Limits, Memory
from casckpt.errors import CasckptError, CorruptionError
from casckpt.format.record import CHUNK, RecordHeader
from casckpt.ids import ObjectId, PackId, SnapshotId, short
from casckpt.index.tables import Place, decode_object, decode_snap
from casckpt.objects import graph
from casckpt.objects.writer import header_of
from casckpt.store.store import Store
from casckpt_gc.compaction import Compaction
from casckpt_gc.mark import Census, Mark, packs_with

_ITEM_SIZES = (4, 2, 8, 1)  # of numbers: a record does not say of what type they are


@dataclass(frozen=True)
class Recoding:
    """What is encoded anew.

    Attributes:
        bases: those objects, what others may name before these, each with what its new record may name.
        packs: those that have records of them.
        plain_bytes: of those objects: the most that is written for them.
        level: what decoding may cost.
        postponed_count: objects that would be encoded anew too, had the budget room.
    """

    bases: Mapping[ObjectId, Sequence[ObjectId]] = field(default_factory=dict)
    packs: frozenset[PackId] = frozenset()
    plain_bytes: int = 0
    level: Level = LEVELS["balanced"]
    postponed_count: int = 0

    def foreseen(self) -> dict[ObjectId, Place]:
        """Records as they are before they are written: of no bases that are not live anyway."""
        return dict.fromkeys(self.bases, Place(0, 0, 0, 0, 0, RAW))


def find_recoding(store: Store, mark: Mark, found: Census, compaction: Compaction, level: Level) -> Recoding:
    """What a collection should encode anew, by what is needed and in packs.

    Cost: one look-up per held object and per object decoded from one; nothing where little enough is held. For cold
    chunks: reads and encodes those that are stored without a base.

    Raises:
        CorruptionError, IncompleteError: a manifest cannot be read.
    """
    choice = _Choice(store, mark, found, compaction)
    if found.held_bytes > compaction.held_share_max * found.live_bytes:
        choice.take_held(found)
    if compaction.cold_after is not None:
        level = LEVELS["small"]
        choice.take_cold(level)
    postponed_count = len(choice.postponed - choice.bases.keys())
    return Recoding(choice.bases, frozenset(choice.packs), choice.plain_bytes, level, postponed_count)


class _Choice:
    """Takes objects within the budget."""

    def __init__(self, store: Store, mark: Mark, found: Census, compaction: Compaction) -> None:
        self.bases: dict[ObjectId, Sequence[ObjectId]] = {}
        self.packs: set[PackId] = set()
        self.plain_bytes = 0
        self.postponed: set[ObjectId] = set()
        self._written_bytes = 0  # at most, the other needed records of those packs included
        self._store = store
        self._mark = mark
        self._states = found.packs
        self._compaction = compaction
        self._records: dict[ObjectId, list[Place]] = {}

    def take_held(self, found: Census) -> None:
        """Groups of held objects, those that give back most for what has to be written first."""
        live, held = found.live_bytes, found.held_bytes
        groups: list[tuple[int, int, list[ObjectId]]] = []
        for members in self._groups():
            freed = sum(place.size for each in members if each in self._mark.held for place in self._in_packs(each))
            users = [each for each in members if each in self._mark.live]
            groups.append((freed, sum(self._alone_size(each) for each in users), users))
        for freed, written, users in sorted(groups, key=lambda each: each[1] / max(each[0], 1)):
            if held <= self._compaction.held_share_max * live or freed < self._compaction.held_gain_min * written:
                break
            if self._take({each: self._below(each) for each in users}):
                held, live = held - freed, live + written
        self.bases = dict(sorted(self.bases.items(), key=lambda each: (self._places(each[0])[0].depth, each[0])))

    def _groups(self) -> Iterator[list[ObjectId]]:
        """Held objects with the live ones that name them, by what hangs together over held ones."""
        links: dict[ObjectId, list[ObjectId]] = defaultdict(list)
        for object_id, bases in self._mark.edges.items():
            for base in bases:
                if base in self._mark.held:
                    links[object_id].append(base)
                    links[base].append(object_id)
        seen: set[ObjectId] = set()
        for start in links:
            waiting, members = [start], []
            while waiting:
                each = waiting.pop()
                if each not in seen:
                    seen.add(each)
                    members.append(each)
                    waiting += links[each]
            if members:
                yield members

    def _alone_size(self, object_id: ObjectId) -> int:
        """About what an object takes without a base: what the object that it goes back to takes."""
        place = self._places(object_id)[0]
        root = place
        for _ in range(graph.DEPTH_MAX):
            below = self._places(root.bases[0]) if root.bases else []
            if not below:
                break
            root = below[0]
        return min(place.plain_size, root.size) if root.plain_size == place.plain_size else place.plain_size

    def _below(self, object_id: ObjectId) -> list[ObjectId]:
        """The nearest live object of equal size that an object goes back to."""
        size = self._places(object_id)[0].plain_size
        for _ in range(graph.DEPTH_MAX):
            place = next(iter(self._places(object_id)), None)
            if place is None or not place.bases or place.plain_size != size:
                break
            object_id = place.bases[0]
            if object_id in self._mark.live:
                return [object_id]
        return []

    def take_cold(self, level: Level) -> None:
        """Chunks of old snapshots that are stored without a base, each with the chunk in its place one snapshot before.

        Only where it is smaller: so everything is encoded once here, and once more when it is written.
        """
        assert self._compaction.cold_after is not None
        lines = self._lines()
        warm = Mark(self._store, self._mark.withdrawn)
        warm.add(each for line in lines for each in line[-self._compaction.cold_after :])
        encoder = Encoder(self._store, Recoding(self.bases, level=level))
        for line in lines:
            before: dict[str, list[ObjectId]] = {}
            for snapshot_id in line[: -self._compaction.cold_after]:
                chunks = self._chunks(snapshot_id)
                for name, ids in chunks.items():
                    old = before.get(name, [])
                    for at, object_id in enumerate(ids):
                        if object_id in warm.live or object_id in self.bases:
                            continue
                        bases = [old[at]] if len(old) == len(ids) and old[at] != object_id else []
                        self._try(object_id, bases, encoder)
                before = chunks

    def _try(self, object_id: ObjectId, bases: Sequence[ObjectId], encoder: Encoder) -> None:
        places = self._in_packs(object_id)
        if not places or places[0].bases or places[0].codec == CONSTANT:
            return
        try:
            header, _ = encoder.encode_one(object_id, bases)
        except CasckptError:
            return  # damaged: for a repair
        gain = encoder.recoding.level.standalone_gain * places[0].plain_size
        if places[0].stored_size - header.stored_size < gain or not self._take({object_id: bases}):
            encoder.forget(object_id)

    def _lines(self) -> list[list[SnapshotId]]:
        """Snapshots that stay, by branch, oldest first."""
        lines: dict[int, list[tuple[int, SnapshotId]]] = defaultdict(list)
        with self._store._keeper.kv.read() as txn:
            for snapshot_id in self._mark.snapshots:
                row = decode_snap(txn.get("snaps", snapshot_id) or b"")
                lines[row.branch_no].append((row.step, snapshot_id))
        return [[each for _, each in sorted(line)] for _, line in sorted(lines.items())]

    def _chunks(self, snapshot_id: SnapshotId) -> dict[str, list[ObjectId]]:
        catalog = self._store._catalog
        gone = {*catalog.thinned(snapshot_id), *self._mark.withdrawn.get(snapshot_id, ())}
        components = catalog.load(snapshot_id).components
        return {
            name: catalog.chunk_ids(catalog.manifest(ref.manifest))
            for name, ref in components.items()
            if name not in gone
        }

    def _take(self, wanted: Mapping[ObjectId, Sequence[ObjectId]]) -> bool:
        """Take some objects together, if the budget has room for them and for the packs that they lie in."""
        packs = packs_with(self._store, wanted) - self.packs
        if not packs <= self._states.keys():
            return False  # one came meanwhile
        plain_bytes = sum(self._places(each)[0].plain_size for each in wanted)
        written_bytes = plain_bytes + sum(self._states[each].needed_bytes for each in packs)
        if self._written_bytes + written_bytes > self._compaction.budget_bytes:
            self.postponed |= wanted.keys()
            return False
        self.bases |= wanted
        self.packs |= packs
        self.plain_bytes += plain_bytes
        self._written_bytes += written_bytes
        return True

    def _places(self, object_id: ObjectId) -> list[Place]:
        if object_id not in self._records:
            (self._records[object_id],) = self._store._keeper.reader.locate([object_id])
        return self._records[object_id]

    def _in_packs(self, object_id: ObjectId) -> list[Place]:
        return [place for place in self._places(object_id) if not place.is_inline]


class Encoder:
    """Makes the new records of a recoding, bases first. Where one may have a base, that costs a pass over all rows.

    Attributes:
        recoding: what is to be encoded.
        places: the new records so far, of which place, depth, cost and bases are known.
    """

    def __init__(self, store: Store, recoding: Recoding) -> None:
        self.recoding = recoding
        self.places: dict[ObjectId, Place] = {}
        self._store = store

    @functools.cached_property
    def _above(self) -> dict[ObjectId, int]:
        """The least depth of what names an object, needed or not."""
        found: dict[ObjectId, int] = {}
        with self._store._keeper.kv.read() as txn:
            for _, row in txn.scan("objects"):
                for place in decode_object(row)[1]:
                    for base in place.bases:
                        found[base] = min(place.depth, found.get(base, place.depth))
        return found

    def records(self) -> Iterator[tuple[RecordHeader, memoryview]]:
        """All new records. Memory: a few chunks.

        Raises:
            CorruptionError, IncompleteError: an object cannot be read.
        """
        for object_id, bases in self.recoding.bases.items():
            yield self.encode_one(object_id, bases)

    def encode_one(self, object_id: ObjectId, wanted: Sequence[ObjectId]) -> tuple[RecordHeader, memoryview]:
        """The new record of one object: the difference to a base that is worth it, else what it takes by itself."""
        from casckpt.codec.best import Base, encode_best

        bases = [each for each in wanted if self._may_be_base(each, object_id)]
        plain = self._store._keeper.reader.read_together([object_id, *bases])
        chunk = plain[object_id]
        forms = {size: encode(chunk, size) for size in _ITEM_SIZES}
        itemsize = min(forms, key=lambda size: (forms[size].stored_size, _ITEM_SIZES.index(size)))
        level = self.recoding.level
        limits = Limits(level, int(level.cost_max * COST_UNIT), price=level.price)
        candidates = [Base(self._standing(each)[1], lambda each=each: plain[each]) for each in bases]  # type: ignore[misc]
        form, number = encode_best(chunk, itemsize, Memory(), candidates, limits)
        return self._note(object_id, len(chunk), form, () if number is None else (bases[number],))

    def _note(
        self, object_id: ObjectId, plain_size: int, form: Encoded, bases: tuple[ObjectId, ...]
    ) -> tuple[RecordHeader, memoryview]:
        depth, cost = 0, decode_cost(form, plain_size)
        if bases:
            below = self._standing(bases[0])
            depth, cost = 1 + below[0], min(cost + below[1], COST_MAX)
        header = header_of(CHUNK, object_id, plain_size, form, bases, depth, cost)
        self.places[object_id] = Place(0, 0, 0, form.stored_size, plain_size, form.codec, depth, cost, bases)
        return header, memoryview(form.payload)

    def is_below(self, objects: Iterable[ObjectId]) -> bool:
        """Whether these objects, which were committed meanwhile, are all deeper than new records that they name."""
        ids = list(objects)
        found = zip(ids, self._store._keeper.reader.locate(ids), strict=True) if self.places and ids else ()
        places = (place for each, records in found if each not in self.places for place in records)
        return all(
            place.depth > self.places[base].depth for place in places for base in place.bases if base in self.places
        )

    def forget(self, object_id: ObjectId) -> None:
        """A record that was made is not used."""
        del self.places[object_id]

    def _records_of(self, object_id: ObjectId) -> list[Place]:
        """All records that an object has afterwards."""
        if object_id in self.places:
            (old,) = self._store._keeper.reader.locate([object_id])
            return [self.places[object_id], *(place for place in old if place.is_inline)]
        (places,) = self._store._keeper.reader.locate([object_id])
        return places

    def _standing(self, object_id: ObjectId) -> tuple[int, int]:
        """Depth and cost that a record built on an object inherits."""
        places = self._records_of(object_id)
        return max(place.depth for place in places), places[0].cost

    def _may_be_base(self, base: ObjectId, object_id: ObjectId) -> bool:
        """Whether a record of `object_id` may name `base`: it lies in packs only, and what it is is less deep than all
        that is decoded from `object_id`."""
        if base in self.recoding.bases and base not in self.places:
            return False  # its new record is not made yet, so its depth is not known
        places = self._records_of(base)
        if not places or any(place.is_inline for place in places):
            return False
        depth = 1 + max(place.depth for place in places)
        is_below = depth < self._above.get(object_id, DEPTH_MAX + 1)
        (own,) = self._store._keeper.reader.locate([object_id])
        is_preferred = all(depth < place.depth for place in own if place.is_inline)
        return depth <= DEPTH_MAX and is_below and is_preferred


def prove(mark: Mark, encoder: Encoder) -> Mark:
    """The mark with the new records as they are: everything live can be decoded, and nothing is held for it anew.

    Raises:
        CorruptionError, IncompleteError: a bug of this package, or the store changed. Nothing may be condemned.
    """
    changed = mark.recode(encoder.places)
    for object_id, place in encoder.places.items():
        for base in place.bases:
            if base not in mark.live or encoder._standing(base)[0] >= place.depth:
                raise CorruptionError(
                    f"object {short(object_id)}: its new record may not name {short(base)}. Nothing was changed. "
                    "Report this as a bug.",
                    object_id=object_id,
                )
    if not changed.held <= mark.held:
        raise CorruptionError("new records hold what was not held before. Nothing was changed. Report this as a bug.")
    return changed
