"""What a new chunk may be stored as a difference to: chosen from the index, read, and proven to be what it claims.

A base has to outlive what names it, so it lies in a pack (objects inlined in the timeline are never bases), all files
that it needs are here, and no damage of it is on record. Its bytes come from wherever they are cheapest, and are
hashed against its address before anything is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from casckpt.codec.contract import CONSTANT, PREDICTION
from casckpt.codec.level import DEPTH_MAX
from casckpt.digest import digest
from casckpt.errors import CorruptionError, IncompleteError, StorageError, UnsupportedFormatError
from casckpt.ids import ObjectId
from casckpt.objects.reader import ObjectReader

IsPresent = Callable[[Sequence[ObjectId]], Sequence[bool]]
ReadParent = Callable[[], "memoryview | None"]


class Standing(NamedTuple):
    """An object that may be a base, with what a record built on it inherits."""

    object_id: ObjectId
    depth: int
    cost: int
    codec: int


class Bases:
    """The bases that one batch of chunks may use. Used by one thread.

    Args:
        reader: of the store.
        is_present: for each id, whether a good, existing record of it is in the store.
        parents: for each id that may be wanted, how to get its bytes without the store; None: only from there.
        new: ids about to be stored.
    """

    def __init__(
        self,
        reader: ObjectReader,
        is_present: IsPresent,
        parents: Mapping[ObjectId, ReadParent | None],
        new: Iterable[ObjectId],
    ) -> None:
        self._reader = reader
        self._parents = parents
        new = list(new)
        self._places = reader.chains([*parents, *new])
        # An object that has a record already, which is bad: what builds on it is in the store too, and may not be what
        # it is built on in turn.
        self.lost = {object_id for object_id in new if object_id in self._places}
        ids = list(self._places)
        # Any record of a base may be the one that is left: what is built on it is deeper than all of them.
        records = dict(zip(ids, reader.locate(ids), strict=True))
        self._depths = {object_id: max(place.depth for place in found) for object_id, found in records.items() if found}
        self._inline = {object_id for object_id, found in records.items() if any(place.is_inline for place in found)}
        self._present = dict(zip(ids, is_present(ids) if ids else (), strict=True))
        self._plain: dict[ObjectId, memoryview | None] = {}

    def standing(self, object_id: ObjectId) -> Standing | None:
        """The object as a base, if it may be one."""
        place, depth = self._places.get(object_id), self._depths.get(object_id, DEPTH_MAX)
        if place is None or object_id in self._inline or not self._present[object_id] or depth >= DEPTH_MAX:
            return None
        return Standing(object_id, depth, place.cost, place.codec)

    def lineage(self, parent: ObjectId) -> list[Standing]:
        """What a chunk may differ from: its parent, and the object without bases that the parent goes back to.

        A predicted parent is none: behind it stand all operands of its step, which nothing else may need any more.
        """
        found = []
        place = self._places.get(parent)
        if place is None or place.codec == CONSTANT:
            return []
        root, is_predicted = parent, False
        for _ in range(DEPTH_MAX):  # a chain that is longer has no root that is worth it, or is a circle
            if place is None or not place.bases:
                break
            is_predicted |= place.codec == PREDICTION
            root = place.bases[0]
            place = self._places.get(root)
        for object_id in (root,) if is_predicted else dict.fromkeys((parent, root)):
            standing = self.standing(object_id)
            found += [standing] if standing else []
        return found

    def fetch(self, ids: Iterable[ObjectId]) -> None:
        """Get the bytes of several bases, each object that they share decoded once."""
        missing = [each for each in dict.fromkeys(ids) if each not in self._plain and not self._take_parent(each)]
        if not missing:
            return
        try:
            self._plain.update(self._reader.read_together(missing))
        except (CorruptionError, IncompleteError, StorageError, UnsupportedFormatError):
            self._plain.update(dict.fromkeys(missing))  # a chunk is then stored by itself

    def _take_parent(self, object_id: ObjectId) -> bool:
        """Copy an object's bytes from memory that may be reused at any time, and see whether they still are its."""
        read = self._parents.get(object_id)
        view = read() if read is not None else None
        if view is None:
            return False
        copy = memoryview(bytearray(view))
        if digest(copy) != object_id:
            return False
        self._plain[object_id] = copy
        return True

    def plain(self, object_id: ObjectId) -> memoryview | None:
        """The bytes of a base, None when they cannot be had."""
        self.fetch([object_id])
        return self._plain[object_id]


def inherit(bases: Sequence[Standing], extra: Sequence[Standing], step_cost: int) -> tuple[int, int]:
    """Depth of a record with these bases, and its cost: of `extra` are those that only it makes a restore decode."""
    return 1 + max(base.depth for base in bases), step_cost + sum(base.cost for base in dict.fromkeys(extra))
