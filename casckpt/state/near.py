"""Leaves near another leaf of the same state: averages of weights beside their source, copies that were trained on.

What may be near has the same form (dtype, shape, strides); what is near is decided by a *sketch*, 64 numbers from
evenly spaced places of a leaf. Two kinds of relations come out, to be tried by the codec:

    average   target before · source now           the new value lies on the way from the old one to the source
    near      another leaf now                     clones, forks and opponents: closer to it than to its own past

An average is proposed where that is so in the sketches, whatever names say. A near leaf is proposed where the other
one's sketch agrees more than its own of the parent snapshot, or where it has none: a component that is new. Near leaves
follow from those that stayed nearer to their own past, or stand earlier, so these relations have no circle; the few
that averages may add are cut by the encoder.

Cost: 25 µs for each of at most SKETCH_COUNT_MAX leaves, most of it for memory that is not in the cache; where a sketch
changed, 2 µs for each of at most PARTNERS_MAX others. Memory: 300 bytes a leaf.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf, isfinite
from typing import Literal, NamedTuple

from casckpt.codec.models import AVERAGE, DRIFTING_AVERAGE, NEAR, Model
from casckpt.state.hyperparameters import Described
from casckpt.state.relations import Place, Relation, Relations, Twins

SKETCH_COUNT_MAX = 256  # leaves of a state that are sketched: 6 ms, 2 % of what hashing 512 MiB takes
PARTNERS_MAX = 12  # others that one leaf is compared with
_COUNT = 64  # numbers in a sketch

_SIMILAR = _COUNT * 3 // 8  # unrelated leaves of one scale agree in a sixth of signs and exponents
_NEAR = _COUNT * 5 // 8  # below it a difference gains nothing
_LEAD = _COUNT // 8  # agreement by which another leaf has to be nearer than the leaf's own past
_PART_MAX = 0.95  # of the way to its source that an average goes; what goes all of it is a copy
_EXPLAINED_MIN = 0.5  # share of a leaf's change that its source must explain

_FORMATS: dict[int, Literal["H", "I", "Q"]] = {2: "H", 4: "I", 8: "Q"}
_LOW = int.from_bytes(b"\x7f" * _COUNT, "little")
_HIGH = int.from_bytes(b"\x80" * _COUNT, "little")


class Sketch(NamedTuple):
    """Numbers of one leaf as they lie in memory, and their highest and second bytes as one integer each."""

    raw: bytes
    highest: int
    second: int


def find_near(relations: Relations, captured: Mapping[str, Described], before: Relations | None) -> None:
    """Add to the relations of a commit those of leaves near others; `before`: the relations of the parent's commit."""
    old = before.sketches_of(captured) if before is not None else {}
    for twins in _bounded(relations.twins):
        group = _Group(twins, _sketches(twins, captured), old)
        relations.sketches.update(group.now)
        for target in group.now:
            for relation in group.relations_of(target):
                relations.add(target, relation)


def _bounded(twins: Sequence[Twins]) -> Iterator[Twins]:
    left = SKETCH_COUNT_MAX
    for each in twins:
        if left > 1:
            yield each._replace(places=each.places[:left])
            left -= len(each.places)


def _sketches(twins: Twins, captured: Mapping[str, Described]) -> dict[Place, Sketch]:
    """Sketches of leaves that hold enough different numbers to say something."""
    found = {}
    for place in twins.places:
        described = captured[place.component]
        view = described.blocks.view(place.block, 0, described.structure.blocks[place.block][0])
        items = view.cast(_FORMATS[twins.itemsize])
        raw = items[:: len(items) // _COUNT][:_COUNT].tobytes()
        second = raw[twins.itemsize - 2 :: twins.itemsize]
        if len(set(second)) > _COUNT // 8:  # else zeros, ones, or few values: what is equal is stored once anyway
            highest = int.from_bytes(raw[twins.itemsize - 1 :: twins.itemsize], "little")
            found[place] = Sketch(raw, highest, int.from_bytes(second, "little"))
    return found


class _Group:
    """Leaves of one form: their sketches now and, of those that had one, in the parent snapshot."""

    def __init__(self, twins: Twins, now: Mapping[Place, Sketch], old: Mapping[Place, Sketch]) -> None:
        self.now = now
        self._twins = twins
        self._old = old
        # How near a leaf is to its own past, then how early it stands.
        pasts = [sum(_agreement(now[place], old[place])) if place in old else -1 for place in now]
        self._places = list(now)
        self._by_block: dict[int, list[Place]] = defaultdict(list)
        for place in now:
            self._by_block[place.block].append(place)
        self._steadiness = {place: (past, -at) for at, (place, past) in enumerate(zip(now, pasts, strict=True))}

    def relations_of(self, target: Place) -> list[Relation]:
        """What one leaf may follow from: nothing where it has not changed."""
        sketch, own = self.now[target], self._old.get(target)
        partners = self._partners(target) if own != sketch else []
        if not partners:
            return []
        agreements = {place: _agreement(sketch, self.now[place]) for place in partners}
        source = max(partners, key=lambda place: sum(agreements[place]))
        found = []
        if own is not None and self._is_average(own, source, sketch, agreements[source]):
            found += _averages(target, source)
        past = self._steadiness[target]
        nearer = [
            place
            for place, each in agreements.items()
            if each[0] >= _NEAR and sum(each) >= past[0] + _LEAD and self._steadiness[place] > past
        ]
        if nearer:
            source = max(nearer, key=lambda place: sum(agreements[place]))
            found.append(Relation(NEAR, (source,), (Model(NEAR, ()),)))
        return found

    def _partners(self, target: Place) -> list[Place]:
        """Others to compare with: those in the same place of other components, then those around it."""
        at = -self._steadiness[target][1]
        around = self._places[max(0, at - PARTNERS_MAX) : at + PARTNERS_MAX + 1]
        alike = islice(self._by_block[target.block], PARTNERS_MAX + 1)
        return [each for each in dict.fromkeys((*alike, *around)) if each != target][:PARTNERS_MAX]

    def _is_average(self, own: Sketch, source: Place, sketch: Sketch, agreement: tuple[int, int]) -> bool:
        """Whether a leaf went a part of the way to a source that comes from its own past, not from that leaf."""
        if not self._twins.can_average or agreement[0] < _SIMILAR or self._steadiness[source][0] < sum(agreement):
            return False
        part, explained = _way_to(self.now[source], own, sketch, self._twins.itemsize)
        return 0 < part < _PART_MAX and explained >= _EXPLAINED_MIN


def _averages(target: Place, source: Place) -> list[Relation]:
    """Averages one step apart and several."""
    past, old_source = target._replace(is_before=True), source._replace(is_before=True)
    return [
        Relation(AVERAGE, (past, source), (Model(AVERAGE, ()),)),
        Relation(DRIFTING_AVERAGE, (past, old_source, source), (Model(DRIFTING_AVERAGE, ()),)),
    ]


def _agreement(one: Sketch, other: Sketch) -> tuple[int, int]:
    """Of how many numbers the highest 9 bits are equal (of a float32: sign and exponent), and of how many 16."""
    highest, second = one.highest ^ other.highest, one.second ^ other.second
    return _zeros(highest | second & _HIGH), _zeros(highest | second)


def _zeros(number: int) -> int:
    """How many of the bytes are zero."""
    return _COUNT - (((number & _LOW) + _LOW | number) & _HIGH).bit_count()


def _way_to(source: Sketch, old: Sketch, new: Sketch, itemsize: int) -> tuple[float, float]:
    """Which part of the way to its source a leaf went, by least squares, and how much of its change that explains."""
    numbers = [_floats(each.raw, itemsize) for each in (old, source, new)]
    pairs = [(t - w, s - w) for w, s, t in zip(*numbers, strict=True) if isfinite(w + s + t)]
    change = sum(x * x for x, _ in pairs)
    way = sum(y * y for _, y in pairs)
    common = sum(x * y for x, y in pairs)
    if not 0 < change * way < inf:
        return 0.0, 0.0
    return common / way, common * common / (change * way)


def _floats(raw: bytes, itemsize: int) -> tuple[float, ...]:
    """float32 or bf16 numbers."""
    wide = raw
    if itemsize == 2:
        padded = bytearray(2 * len(raw))
        padded[2::4], padded[3::4] = raw[::2], raw[1::2]
        wide = bytes(padded)
    return struct.unpack(f"<{_COUNT}f", wide)
