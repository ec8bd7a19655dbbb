"""Two snapshots compared: by address first, so that what is equal is not read, then leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from casckpt.errors import cut
from casckpt.format.layout import SCALARS
from casckpt.format.snapshot import RingManifest
from casckpt.format.structure import Place, leaf_extent, leaf_places
from casckpt.ids import SnapshotId
from casckpt.state.build import read_scalars
from casckpt.state.diff import diff_leaf
from casckpt.store.catalog import Catalog
from casckpt.store.restore import Restorer, Stored
from casckpt.store.rings import load_nodes
from casckpt.store.values import Snapshot, Value

_SHOWN_LENGTH_MAX = 60  # characters of a value


@dataclass(frozen=True)
class LeafDiff(Value):
    """A leaf that differs.

    Attributes:
        change: "changed", "added", "removed" or "reshaped" (dtype or shape differ).
        changed_count, element_count: elements that differ, of how many.
        largest_change: largest absolute difference, where the elements are numbers; NaN when a NaN came or went.
        before, after: values of scalars; dtype and shape of reshaped leaves.
    """

    path: str
    change: str
    changed_count: int = 0
    element_count: int = 0
    largest_change: float | None = None
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class ComponentDiff(Value):
    """A component in two snapshots: "equal" (same address), "changed", "added" or "removed"."""

    name: str
    change: str
    leaves: tuple[LeafDiff, ...] = ()


@dataclass(frozen=True)
class Diff(Value):
    """What differs between two snapshots."""

    a: Snapshot
    b: Snapshot
    components: tuple[ComponentDiff, ...]

    @property
    def is_equal(self) -> bool:
        return all(component.change == "equal" for component in self.components)

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "is_equal": self.is_equal,
            "components": [component.to_dict() for component in self.components],
        }


def compare(catalog: Catalog, restorer: Restorer, a: SnapshotId, b: SnapshotId) -> Diff:
    """Compare two snapshots. Reads only components whose addresses differ, one pair at a time."""
    first, second = catalog.load(a), catalog.load(b)
    components = []
    for name in [*first.components, *(n for n in second.components if n not in first.components)]:
        old, new = first.components.get(name), second.components.get(name)
        if old is None or new is None:
            components.append(ComponentDiff(name, "added" if old is None else "removed"))
        elif old.manifest == new.manifest:
            components.append(ComponentDiff(name, "equal"))
        else:
            one, other = restorer.load(name, old), restorer.load(name, new)
            leaves = [*_compare_component(restorer, one, other), *_compare_rows(catalog, one, other)]
            components.append(ComponentDiff(name, "changed", tuple(leaves)))
    return Diff(catalog.info(a), catalog.info(b), tuple(components))


class _Side:
    """One side's leaves by path, with their bytes."""

    def __init__(self, restorer: Restorer, stored: Stored) -> None:
        self._stored = stored
        self._blocks = {i: memoryview(bytearray(size)) for i, (size, _) in enumerate(stored.structure.blocks)}
        scalars = bytearray(stored.manifest.scalars_size)
        restorer.read([(stored, {**self._blocks, SCALARS: memoryview(scalars)})])
        self._scalars = read_scalars(stored.structure, bytes(scalars))
        self.places: dict[str, list[Place]] = {}
        for place in leaf_places(stored.structure, stored.name):
            self.places.setdefault(place.path, []).append(place)

    def leaf(self, place: Place) -> Any:
        return None if place.leaf is None else self._stored.structure.leaves[place.leaf]

    def memory(self, place: Place) -> memoryview:
        """The run of memory that a leaf spans: its elements, in memory order."""
        leaf = self.leaf(place)
        if leaf.block < 0:
            return memoryview(b"")
        low, high = leaf_extent(leaf)
        return self._blocks[leaf.block][low:high]

    def value(self, place: Place) -> Any:
        return None if place.scalar is None else self._scalars[place.scalar]


def _compare_component(restorer: Restorer, old: Stored, new: Stored) -> list[LeafDiff]:
    a, b = _Side(restorer, old), _Side(restorer, new)
    found = []
    for path in [*a.places, *(path for path in b.places if path not in a.places)]:
        if path not in b.places or path not in a.places:
            found.append(LeafDiff(path, "removed" if path in a.places else "added"))
            continue
        for one, other in zip(a.places[path], b.places[path], strict=False):
            difference = _compare_leaf(path, a, one, b, other)
            if difference is not None:
                found.append(difference)
    return found


def _compare_rows(catalog: Catalog, old: Stored, new: Stored) -> list[LeafDiff]:
    """Of rings, how many rows lie in segments that only the newer one has. Reads no rows."""
    if not isinstance(old.manifest, RingManifest) or not isinstance(new.manifest, RingManifest):
        return []
    before, after = (
        [each for part in load_nodes(catalog, side.manifest) for each in part.segments()] for side in (old, new)
    )
    known = {each.manifest for each in before}
    new_count = sum(each.row_count for each in after if each.manifest not in known)
    if [each.manifest for each in before] == [each.manifest for each in after]:
        return []
    shown = [f"rows {nodes[0].start} to {nodes[-1].stop}" if nodes else "no rows" for nodes in (before, after)]
    row_count = sum(each.row_count for each in after)
    return [LeafDiff(f"{new.name}/rows", "changed", new_count, row_count, None, *shown)]


def _compare_leaf(path: str, a: _Side, one: Place, b: _Side, other: Place) -> LeafDiff | None:
    leaf, twin = a.leaf(one), b.leaf(other)
    if leaf is None or twin is None:
        if leaf is None and twin is None:
            return _compare_scalars(path, a.value(one), b.value(other))
        return LeafDiff(path, "reshaped", before=_kind(leaf), after=_kind(twin))
    if (leaf.kind, leaf.dtype, leaf.shape, leaf.strides) != (twin.kind, twin.dtype, twin.shape, twin.strides):
        return LeafDiff(path, "reshaped", before=_kind(leaf), after=_kind(twin))
    changed, largest = diff_leaf(leaf.kind, leaf.dtype, a.memory(one), b.memory(other))
    return LeafDiff(path, "changed", changed, prod(leaf.shape), largest) if changed else None


def _compare_scalars(path: str, before: Any, after: Any) -> LeafDiff | None:
    if type(before) is type(after) and repr(before) == repr(after):
        return None
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    largest = abs(float(after) - float(before)) if is_number else None
    return LeafDiff(path, "changed", 1, 1, largest, _shown(before), _shown(after))


def _shown(value: Any) -> str:
    return cut(repr(value), _SHOWN_LENGTH_MAX)


def _kind(leaf: Any) -> str:
    if leaf is None:
        return "scalar"
    strides = "" if leaf.strides is None else f" strides {list(leaf.strides)}"
    return f"{leaf.kind} {leaf.dtype} {list(leaf.shape)}{strides}"
