"""Objects that are decoded from other objects: what is needed for some of them, in which groups, in which order.

A record names its bases, and these may have bases of their own. Reading objects one by one would decode a common base
once for each; so what shares bases is read as one *group*, in which every record is decoded once, bases
first, and a base's memory is used again as soon as nothing waits for it.

Of an object's records the preferred one is taken, so depth falls along every chain (`index.tables.add_place`): the
graph has no circle unless records were lost. Where that way is barred, `reach` and `settle` look at all records of
everything below, from what needs no base upwards: whatever can be decoded is found, whatever the records say.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from casckpt.codec.contract import CONSTANT
from casckpt.errors import CorruptionError, IncompleteError
from casckpt.ids import ObjectId, short
from casckpt.index.kv import KvReader
from casckpt.index.tables import Place, decode_object, first_places
from casckpt.limits import CHUNK_SIZE

DEPTH_MAX = 64  # no encoder makes chains this long; a forged one ends here
GROUP_MAX = 16  # objects asked for in one group: enough to share bases, few enough to keep all threads busy
_SPARE_MAX = 16  # buffers that a thread keeps

Decode = Callable[[ObjectId, Place, Sequence[memoryview], memoryview], None]


def close(places: Iterable[Place], txn: KvReader) -> dict[ObjectId, Place]:
    """The preferred place of every object below `places`; those that the index does not know are left out."""
    found: dict[ObjectId, Place] = {}
    level = {base for place in places for base in place.bases}
    for _ in range(DEPTH_MAX):
        ids = [each for each in level if each not in found]
        if not ids:
            break
        known = zip(ids, first_places(txn.get_many("objects", ids)), strict=True)
        new = {object_id: place for object_id, place in known if place is not None}
        found.update(new)
        level = {base for place in new.values() for base in place.bases}
    return found


def reach(ids: Iterable[ObjectId], txn: KvReader, stop: Container[ObjectId] = ()) -> dict[ObjectId, list[Place]]:
    """All places of these objects and of everything below any of them, but not of or below what is in `stop`."""
    found: dict[ObjectId, list[Place]] = {}
    level = dict.fromkeys(each for each in ids if each not in stop)
    for _ in range(DEPTH_MAX + 1):
        if not level:
            break
        rows = zip(level, txn.get_many("objects", list(level)), strict=True)
        new = {object_id: decode_object(row)[1] if row else [] for object_id, row in rows}
        found.update(new)
        bases = (base for places in new.values() for place in places for base in place.bases)
        level = dict.fromkeys(base for base in bases if base not in found and base not in stop)
    return found


class Settled(NamedTuple):
    """How an object can be decoded: from which place, and over how many bases below bases."""

    place: Place
    height: int


def settle(
    places: Mapping[ObjectId, Sequence[Place]],
    is_good: Callable[[ObjectId, Place], bool],
    known: Mapping[ObjectId, Settled],
) -> dict[ObjectId, Settled]:
    """Those of these objects that can be decoded, each by a place whose bases are among them or `known` already.

    Args:
        places: from `reach`; of those of an object that will do, the first is taken.
        is_good: whether a record may be used, its bases aside.
        known: what was settled before.

    Cost: one pass where depths are true; else at most one for each of DEPTH_MAX levels.
    """
    found: dict[ObjectId, Settled] = {}
    waiting = sorted(places, key=lambda each: min((place.depth for place in places[each]), default=0))
    while waiting:
        left = []
        for object_id in waiting:
            for place in places[object_id]:
                below = [found.get(base) or known.get(base) for base in place.bases]
                height = 1 + max((each.height for each in below if each is not None), default=-1)
                if None not in below and height <= DEPTH_MAX and is_good(object_id, place):
                    found[object_id] = Settled(place, height)
                    break
            else:
                left.append(object_id)
        if len(left) == len(waiting):
            break
        waiting = left
    return found


def group(wanted: Sequence[tuple[ObjectId, Place]], below: Mapping[ObjectId, Place]) -> list[list[int]]:
    """Positions in `wanted` that belong together because they share a base, at most GROUP_MAX in a group."""
    parents: dict[ObjectId, ObjectId] = {}

    def root(object_id: ObjectId) -> ObjectId:
        while (parent := parents.setdefault(object_id, object_id)) != object_id:
            parents[object_id] = parents[parent]
            object_id = parents[parent]
        return object_id

    for object_id, place in [*wanted, *below.items()]:
        for base in place.bases:
            if base not in below or below[base].codec != CONSTANT:  # that costs nothing, and many may share it
                parents[root(base)] = root(object_id)
    members: dict[ObjectId, list[int]] = {}
    for at, (object_id, _) in enumerate(wanted):
        members.setdefault(root(object_id), []).append(at)
    return [found[at : at + GROUP_MAX] for found in members.values() for at in range(0, len(found), GROUP_MAX)]


class Decoding:
    """One group being decoded, on one thread.

    Args:
        wanted: the objects asked for, with the memory that takes each, or None for some of our own.
        below: the places of everything they are decoded from.
        decode: fills memory from a record and the plain bytes of its bases. Nothing is hashed here.
    """

    def __init__(
        self,
        wanted: Mapping[ObjectId, tuple[Place, memoryview | None]],
        below: Mapping[ObjectId, Place],
        decode: Decode,
    ) -> None:
        self._wanted = wanted
        self._below = below
        self._decode = decode
        self._plain: dict[ObjectId, memoryview] = {}
        self._own: dict[ObjectId, bytearray] = {}
        self._waiting: Counter[ObjectId] = Counter(wanted.keys())
        self._path: list[ObjectId] = []
        seen: set[ObjectId] = set()
        pending = list(wanted)
        while pending:
            object_id = pending.pop()
            place = self._find(object_id)
            if place is not None and object_id not in seen:
                seen.add(object_id)
                self._waiting.update(place.bases)
                pending += place.bases

    def _find(self, object_id: ObjectId) -> Place | None:
        return self._wanted[object_id][0] if object_id in self._wanted else self._below.get(object_id)

    def _place(self, object_id: ObjectId) -> Place:
        place = self._find(object_id)
        if place is None:
            raise IncompleteError(
                f"base {short(object_id)} is in no pack or entry. Run `casckpt verify`.", object_id=object_id
            )
        return place

    def plain(self, object_id: ObjectId) -> memoryview:
        """The plain bytes of an object, not hashed; the caller says `let_go` when it has used them."""
        if object_id in self._plain:
            return self._plain[object_id]
        place = self._place(object_id)
        if object_id in self._path or len(self._path) >= DEPTH_MAX:
            raise CorruptionError(
                f"object {short(object_id)}: its bases form a circle, or a chain of more than {DEPTH_MAX}",
                object_id=object_id,
            )
        self._path.append(object_id)
        try:
            bases = [self.plain(base) for base in place.bases]
        finally:
            self._path.pop()
        out = self._memory(object_id, place.plain_size)
        self._decode(object_id, place, bases, out)
        self._plain[object_id] = out
        for base in place.bases:
            self.let_go(base)
        return out

    def _memory(self, object_id: ObjectId, size: int) -> memoryview:
        given = self._wanted[object_id][1] if object_id in self._wanted else None
        if given is not None:
            return given
        buffer = self._own[object_id] = _take(size)
        return memoryview(buffer)[:size]

    def let_go(self, object_id: ObjectId) -> None:
        """One use less; after the last the memory is used again."""
        self._waiting[object_id] -= 1
        if not self._waiting[object_id]:
            del self._plain[object_id]
            if object_id in self._own:
                _give_back(self._own.pop(object_id))


_spare = threading.local()


def _take(size: int) -> bytearray:
    """Memory of at least `size` bytes, touched before if possible: fresh pages cost seven times a copy."""
    buffers: list[bytearray] = getattr(_spare, "buffers", [])
    if size <= CHUNK_SIZE and buffers:
        return buffers.pop()
    return bytearray(max(size, CHUNK_SIZE))


def _give_back(buffer: bytearray) -> None:
    if not hasattr(_spare, "buffers"):
        _spare.buffers = []
    if len(buffer) == CHUNK_SIZE and len(_spare.buffers) < _SPARE_MAX:
        _spare.buffers.append(buffer)
