"""Whether what a snapshot needs is here, told from tables and sizes of files; no state is read.

An object is here when one of its places lies in a file of the right size, no damage of it is on record, and the bases
that it is decoded with there are here in turn. What no file holds is damage, unless files are missing that may hold
it: then the snapshot is incomplete, as in a copy under way.

Commits ask which objects they may build on, "latest" which snapshot to choose, the command line what is wrong where:
one check answers all. Only what is known of the *content* is a flaw. A file that cannot be looked at now (too many open
files, no permission, a failing disk) raises StorageError: concluding from it would choose an older step in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from casckpt.errors import CasckptError, CorruptionError, IncompleteError
from casckpt.format.snapshot import parts_of
from casckpt.ids import ObjectId, SnapshotId, short
from casckpt.index.kv import KvReader
from casckpt.index.tables import CONDEMNED, UNREADABLE, Place, decode_object, decode_pack_row, first_places, number_key
from casckpt.objects import graph
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.packs import pack_path
from casckpt.objects.timeline import Timeline
from casckpt.store.catalog import Catalog

FLAWS = (CorruptionError, IncompleteError)  # what is known of a snapshot's content; all else is of the moment


class Flaw(NamedTuple):
    """Why something is not whole: "damaged" or "incomplete", and what is wrong where."""

    state: str
    reason: str

    @staticmethod
    def of(error: CasckptError) -> Flaw:
        """The flaw that one of FLAWS tells of."""
        return Flaw("incomplete" if isinstance(error, IncompleteError) else "damaged", error.message)


class Source(NamedTuple):
    """A file that objects lie in: a pack has exactly `size` bytes, a timeline entry at least as many."""

    path: str
    size: int
    is_pack: bool


@dataclass(frozen=True)
class _Bases:
    """Bases looked at so far."""

    good: dict[ObjectId, graph.Settled]
    bad: dict[ObjectId, Flaw]

    def __contains__(self, object_id: object) -> bool:
        return object_id in self.good or object_id in self.bad


class WholenessCheck:
    """Looks at each component and each file once; its answers are those of the moment it first looked.

    Every method raises StorageError when a file cannot be looked at.
    """

    def __init__(self, timeline: Timeline, keeper: IndexKeeper, catalog: Catalog) -> None:
        self._timeline = timeline
        self._keeper = keeper
        self._catalog = catalog
        self._sizes: dict[str, int | None] = {}
        self._components: dict[ObjectId, Flaw | None] = {}
        self._bases: dict[bool, _Bases] = {True: _Bases({}, {}), False: _Bases({}, {})}  # with marks looked at, or not

    # --- snapshots and components ---

    def snapshot_flaw(self, snapshot_id: SnapshotId) -> Flaw | None:
        """The first flaw of a snapshot, withdrawn components aside. Costs one lookup per chunk and one stat per file
        not looked at before."""
        try:
            snapshot = self._catalog.load(snapshot_id)
        except FLAWS as error:
            return Flaw.of(error)
        thinned = self._catalog.thinned(snapshot_id)
        return self.first_flaw({name: ref.manifest for name, ref in snapshot.components.items() if name not in thinned})

    def first_flaw(self, components: Mapping[str, bytes]) -> Flaw | None:
        """The first flaw among components, given as name → address of the manifest."""
        for name, address in components.items():
            flaw = self.component_flaw(ObjectId(address))
            if flaw is not None:
                return Flaw(flaw.state, f"component {name!r}: {flaw.reason}")
        return None

    def component_flaw(self, address: ObjectId) -> Flaw | None:
        """The first flaw of the component with this manifest."""
        if address not in self._components:
            self._components[address] = self._look(address)
        return self._components[address]

    def _look(self, address: ObjectId) -> Flaw | None:
        flaw = self._first([address])
        if flaw is not None:
            return flaw
        try:
            manifest = self._catalog.manifest(address)
            top = [ObjectId(manifest.structure), *self._catalog.node_ids(manifest)]
            flaw = self._first(top) or self._first(self._catalog.chunk_ids(manifest))
        except FLAWS as error:
            return Flaw.of(error)
        return flaw or next(filter(None, (self.component_flaw(ObjectId(p.manifest)) for p in parts_of(manifest))), None)

    # --- objects ---

    def _first(self, ids: Sequence[ObjectId]) -> Flaw | None:
        return next(filter(None, self.flaws(ids)), None)

    def are_present(self, ids: Sequence[ObjectId]) -> list[bool]:
        """For each object, whether a commit may refer to it instead of storing it."""
        with self._keeper.kv.read() as txn:
            _, _, found = self._look_up(ids, txn, has_marks=self._has_marks(txn))
            return [each in found for each in ids]

    def flaws(self, ids: Sequence[ObjectId], *, trust_marks: bool = True) -> list[Flaw | None]:
        """For each object what is wrong with it; without `trust_marks`, damage on record is not looked at."""
        with self._keeper.kv.read() as txn:
            has_marks = trust_marks and self._has_marks(txn)
            places, bases, found = self._look_up(ids, txn, has_marks=has_marks)
            return [None if each in found else self._why(each, places, bases, txn, has_marks=has_marks) for each in ids]

    def _look_up(
        self, ids: Sequence[ObjectId], txn: KvReader, *, has_marks: bool
    ) -> tuple[dict[ObjectId, list[Place]], _Bases, Mapping[ObjectId, graph.Settled]]:
        """Places of these objects, the bases below, and those of the objects that are here."""
        rows = zip(ids, txn.get_many("objects", ids), strict=True)
        places = {object_id: decode_object(row)[1] if row else [] for object_id, row in rows}
        below = {base for found in places.values() for place in found for base in place.bases}
        bases = self._settle(below, txn, has_marks=has_marks) if below else self._bases[has_marks]
        return places, bases, graph.settle(places, self._is_good(txn, has_marks=has_marks), bases.good)

    def _is_good(self, txn: KvReader, *, has_marks: bool) -> Callable[[ObjectId, Place], bool]:
        packs: dict[int, Flaw | None] = {}

        def is_good(object_id: ObjectId, place: Place) -> bool:
            return self._place_flaw(place, txn, packs) is None and not (has_marks and self._mark(object_id, txn))

        return is_good

    def _has_marks(self, txn: KvReader) -> bool:
        return txn.count("damage") > 0

    def _settle(self, ids: Iterable[ObjectId], txn: KvReader, *, has_marks: bool) -> _Bases:
        """What is known of these bases and of all below them. Threads that look at one at once do it twice."""
        bases = self._bases[has_marks]
        places = graph.reach(ids, txn, bases)
        bases.good.update(graph.settle(places, self._is_good(txn, has_marks=has_marks), bases.good))
        for object_id in places:
            if object_id not in bases.good:
                bases.bad[object_id] = self._why(object_id, places, bases, txn, has_marks=has_marks)
        return bases

    def _why(
        self,
        object_id: ObjectId,
        places: Mapping[ObjectId, Sequence[Place]],
        bases: _Bases,
        txn: KvReader,
        *,
        has_marks: bool,
    ) -> Flaw:
        """The flaw of an object that is not here: its own, or that of the first base that is not."""
        seen: set[ObjectId] = set()
        while object_id not in seen:
            seen.add(object_id)
            if object_id in bases.bad:
                return bases.bad[object_id]
            flaws = [self._place_flaw(place, txn, {}) for place in places.get(object_id, ())]
            if None not in flaws:
                return flaws[0] if flaws and flaws[0] else self._nowhere(object_id)
            mark = self._mark(object_id, txn) if has_marks else None
            if mark is not None:
                return mark
            needed = places[object_id][flaws.index(None)].bases
            object_id = next((base for base in needed if base not in bases.good), object_id)
        return Flaw("damaged", f"object {short(object_id)}: its bases form a circle, or a chain that is too long")

    def _mark(self, object_id: ObjectId, txn: KvReader) -> Flaw | None:
        mark = txn.get("damage", object_id)
        return None if mark is None else _marked(object_id, mark)

    def _nowhere(self, object_id: ObjectId) -> Flaw:
        """Of an object that no file here holds: while files are missing, it may lie in one of them."""
        what = f"object {short(object_id)} is in no pack or entry"
        return Flaw("incomplete", f"{what}; {self._absent}") if self._absent else Flaw("damaged", what)

    @cached_property
    def _absent(self) -> str:
        """Which files are missing or could not be read when the index was made; empty when none."""
        packs = self._catalog.pending_packs()
        absent = [f"pack {row.pack_id.hex()} is missing" for row in packs if row.found_size == -1]
        absent += [f"timeline entry {row.seq} is missing" for row in self._catalog.bad_entries() if row.found_size < 0]
        absent += [f"pack {row.pack_id.hex()} cannot be read" for row in packs if row.found_size == UNREADABLE]
        more = f", and {len(absent) - 1} more files" if len(absent) > 1 else ""
        return f"{absent[0]}{more}" if absent else ""

    # --- files ---

    def _place_flaw(self, place: Place, txn: KvReader, packs: dict[int, Flaw | None]) -> Flaw | None:
        """What is wrong with a place. `packs` is what this transaction has found: another may see an index that was
        made anew, with other numbers for the packs."""
        if place.is_inline:
            return self._entry_flaw(place)
        if place.pack_no not in packs:
            row = txn.get("packs", number_key(place.pack_no))
            packs[place.pack_no] = (
                Flaw("damaged", f"pack number {place.pack_no} is unknown")
                if row is None
                else self._pack_flaw(*decode_pack_row(row))
            )
        return packs[place.pack_no]

    def _pack_flaw(self, pack_id: bytes, expected: int) -> Flaw | None:
        if expected == CONDEMNED:
            return Flaw("incomplete", f"pack {pack_id.hex()} was condemned by a collector")
        found = self._size(pack_path(self._timeline.root, pack_id))
        if found is None:
            return Flaw("incomplete", f"pack {pack_id.hex()} is missing")
        if found != expected:
            return Flaw("damaged", f"pack {pack_id.hex()} has {found} bytes, expected {expected}")
        return None

    def _entry_flaw(self, place: Place) -> Flaw | None:
        found, end = self._size(self._timeline.path(place.entry_seq)), _end_in_entry(place)
        if found is None:
            return Flaw("incomplete", f"timeline entry {place.entry_seq} is missing")
        if found < end:
            return Flaw("damaged", f"timeline entry {place.entry_seq} has {found} bytes, an object ends at {end}")
        return None

    def _size(self, path: str) -> int | None:
        if path not in self._sizes:
            self._sizes[path] = self._timeline.fs.size(path)
        return self._sizes[path]

    def sources(self, groups: Sequence[Sequence[ObjectId]]) -> list[list[Source] | None]:
        """For each group of objects the files that they lie in; None when one has no place.

        Valid also when the index is made again.
        """
        with self._keeper.kv.read() as txn:
            return [self._sources(ids, txn) for ids in groups]

    def _sources(self, ids: Sequence[ObjectId], txn: KvReader) -> list[Source] | None:
        ends: dict[int, int] = {}
        packs: set[int] = set()
        places = first_places(txn.get_many("objects", ids))
        here = [place for place in places if place is not None]
        below = graph.close(here, txn)
        needed = {base for place in (*here, *below.values()) for base in place.bases}
        if len(here) < len(places) or not needed <= below.keys():
            return None
        for place in (*here, *below.values()):
            if place.is_inline:
                ends[place.entry_seq] = max(ends.get(place.entry_seq, 0), _end_in_entry(place))
            else:
                packs.add(place.pack_no)
        found = [Source(self._timeline.path(seq), end, False) for seq, end in ends.items()]
        for pack_no in packs:
            row = txn.get("packs", number_key(pack_no))
            if row is None:
                return None
            pack_id, size = decode_pack_row(row)
            if size == CONDEMNED:
                return None
            found.append(Source(pack_path(self._timeline.root, pack_id), size, True))
        return found

    def are_sources_good(self, sources: Sequence[Source]) -> bool:
        """Whether all these files are there with their sizes and no object at all is known to be damaged."""
        if self._is_any_marked:
            return False
        found = ((source, self._size(source.path)) for source in sources)
        return all(
            size is not None and (size == source.size if source.is_pack else size >= source.size)
            for source, size in found
        )

    @cached_property
    def _is_any_marked(self) -> bool:
        with self._keeper.kv.read() as txn:
            return self._has_marks(txn)


def _end_in_entry(place: Place) -> int:
    return place.entry_offset + place.header_size + place.stored_size


def _marked(object_id: ObjectId, mark: bytes) -> Flaw:
    return Flaw("damaged", f"object {short(object_id)} is damaged: {mark.decode(errors='replace')}")
