"""Objects decoded from others, over graphs of any shape, with a toy codec: what comes out, how often, in what memory.

The toy codec adds its bases, each times its position, to the payload: a base forgotten, doubled or swapped shows. The
oracle is the plain bytes that the payloads were made from.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from casckpt.codec.contract import CONSTANT, DIFFERENCE
from casckpt.errors import CorruptionError, IncompleteError
from casckpt.ids import ObjectId
from casckpt.index.kv import MemoryKv
from casckpt.index.tables import TABLES, Place, add_place, encode_object, first_places
from casckpt.objects import graph
from casckpt.testing.trees import difference as unlike
from tests.corruption import forging
from tests.unit.stores import open_store

SIZE = 24


class Toy(NamedTuple):
    """A graph of objects by number; `records` are (object, bases), several of one object too."""

    plain: list[bytes]
    records: list[tuple[int, tuple[int, ...]]]
    depths: list[int]
    codecs: dict[int, int]

    def id(self, number: int) -> ObjectId:
        return ObjectId(blake3(b"%d" % number).digest())

    def place(self, record: int) -> Place:
        number, bases = self.records[record]
        codec = self.codecs.get(number, DIFFERENCE)
        ids = tuple(self.id(base) for base in bases)
        return Place(0, record, 96, SIZE, SIZE, codec, self.depths[record], 0, ids)

    def kv(self) -> MemoryKv:
        places: dict[int, list[Place]] = {}
        for record, (number, _) in enumerate(self.records):
            places[number] = add_place(places.get(number, ()), self.place(record))
        kv = MemoryKv(TABLES)
        with kv.write() as txn:
            txn.put_many("objects", [(self.id(number), encode_object(0, found)) for number, found in places.items()])
        return kv

    def payload(self, record: int) -> bytes:
        number, bases = self.records[record]
        return _add(self.plain[number], [self.plain[base] for base in bases], -1)

    def decoder(self, decoded: Counter[int]) -> graph.Decode:
        def decode(object_id: ObjectId, place: Place, bases: Sequence[memoryview], out: memoryview) -> None:
            decoded[place.offset] += 1
            out[:] = _add(self.payload(place.offset), [bytes(base) for base in bases], 1)

        return decode


def _add(start: bytes, bases: Sequence[bytes], sign: int) -> bytes:
    out = list(start)
    for position, base in enumerate(bases, 1):
        out = [(a + sign * position * b) % 256 for a, b in zip(out, base, strict=True)]
    return bytes(out)


@st.composite
def toys(draw: st.DrawFn, count_max: int = 40) -> Toy:
    """Well-founded: bases have lower numbers; depths are as a writer gives them."""
    count = draw(st.integers(1, count_max))
    records: list[tuple[int, tuple[int, ...]]] = []
    depths: list[int] = []
    least: dict[int, int] = {}
    for number in range(count):
        for _ in range(draw(st.integers(1, 2))):
            candidates = st.integers(max(0, number - draw(st.sampled_from([1, 5, 50]))), number - 1)
            bases = tuple(draw(st.lists(candidates, max_size=3))) if number else ()
            depth = 1 + max((least[base] for base in bases), default=-1)
            if depth < graph.DEPTH_MAX:
                records.append((number, bases))
                depths.append(depth)
                least[number] = min(depth, least.get(number, depth))
        if number not in least:
            records.append((number, ()))
            depths.append(0)
            least[number] = 0
    plain = [blake3(b"plain %d" % number).digest()[:SIZE] for number in range(count)]
    codecs = {number: CONSTANT for number, bases in records if not bases and number % 3 == 0}
    return Toy(plain, records, depths, codecs)


def _wanted(toy: Toy, numbers: Sequence[int], kv: MemoryKv) -> tuple[list[tuple[ObjectId, Place]], Any]:
    ids = [toy.id(number) for number in numbers]
    with kv.read() as txn:
        places = [place for place in first_places(txn.get_many("objects", ids)) if place is not None]
        return list(zip(ids, places, strict=True)), graph.close(places, txn)


@given(toys(), st.data())
def test_wanted_objects_of_every_group_are_right_and_each_record_is_decoded_once(toy: Toy, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(toy.plain) - 1), min_size=1, unique=True))
    in_own_memory = data.draw(st.sets(st.sampled_from(numbers)))
    wanted, below = _wanted(toy, numbers, toy.kv())
    groups = graph.group(wanted, below)
    assert sorted(at for members in groups for at in members) == list(range(len(wanted)))
    assert all(len(members) <= graph.GROUP_MAX for members in groups)
    for members in groups:
        decoded: Counter[int] = Counter()
        memory = {at: memoryview(bytearray(SIZE)) if numbers[at] in in_own_memory else None for at in members}
        asked = {wanted[at][0]: (wanted[at][1], memory[at]) for at in members}
        with _Lent() as lent:
            decoding = graph.Decoding(asked, below, toy.decoder(decoded))
            for at in members:
                plain = decoding.plain(wanted[at][0])
                assert plain == toy.plain[numbers[at]]
                assert memory[at] is None or plain is memory[at]
                decoding.let_go(wanted[at][0])
        assert set(decoded.values()) == {1}
        assert lent.count == 0, "memory that nobody waits for is kept"


@given(toys(), st.data())
def test_objects_that_share_a_base_are_in_one_group_while_it_has_room(toy: Toy, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, len(toy.plain) - 1), min_size=1, max_size=graph.GROUP_MAX, unique=True))
    wanted, below = _wanted(toy, numbers, toy.kv())
    group_of = {at: number for number, members in enumerate(graph.group(wanted, below)) for at in members}
    for one, (_, place) in enumerate(wanted):
        for two, (other_id, other) in enumerate(wanted):
            shared = {base for base in place.bases if below[base].codec != CONSTANT} & {*other.bases, other_id}
            assert not shared or group_of[one] == group_of[two]


class _Lent:
    """Counts the buffers that a decoding has and has not given back."""

    def __init__(self) -> None:
        self.count = self.most = 0

    def __enter__(self) -> _Lent:
        self._patches = [
            mock.patch.object(graph, "_take", self._take),
            mock.patch.object(graph, "_give_back", self._give_back),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _take(self, size: int) -> bytearray:
        self.count += 1
        self.most = max(self.most, self.count)
        return bytearray(size + 7)  # larger than asked for, as buffers that are used again are

    def _give_back(self, buffer: bytearray) -> None:
        buffer[:] = b"\xff" * len(buffer)  # whoever still reads it reads rubbish
        self.count -= 1


def _line(length: int) -> Toy:
    records = [(0, ()), *((number, (number - 1,)) for number in range(1, length + 1))]
    return Toy([bytes([number % 256]) * SIZE for number in range(length + 1)], records, list(range(length + 1)), {})


def test_chain_takes_the_memory_of_two_objects() -> None:
    toy = _line(50)
    wanted, below = _wanted(toy, [50], toy.kv())
    with _Lent() as lent:
        decoding = graph.Decoding({each: (place, None) for each, place in wanted}, below, toy.decoder(Counter()))
        assert decoding.plain(toy.id(50)) == toy.plain[50]
    assert lent.most == 2


@pytest.mark.parametrize("length", [graph.DEPTH_MAX - 1, graph.DEPTH_MAX, graph.DEPTH_MAX + 1, 3000])
def test_chains_end_at_the_limit(length: int) -> None:
    toy = _line(length)
    toy = toy._replace(depths=[min(depth, 255) for depth in toy.depths])
    wanted, below = _wanted(toy, [length], toy.kv())
    decoding = graph.Decoding({each: (place, None) for each, place in wanted}, below, toy.decoder(Counter()))
    if length < graph.DEPTH_MAX:
        assert decoding.plain(toy.id(length)) == toy.plain[length]
    else:
        with pytest.raises((CorruptionError, IncompleteError)):
            decoding.plain(toy.id(length))
    with toy.kv().read() as txn:
        settled = graph.settle(graph.reach([toy.id(length)], txn), lambda each, place: True, {})
    assert (toy.id(length) in settled) == (length <= graph.DEPTH_MAX)


# --- any records at all ---


@st.composite
def tangles(draw: st.DrawFn) -> Toy:
    """Records with any bases, themselves and unknown ones among them, and any depths."""
    count = draw(st.integers(1, 12))
    number = st.integers(0, count)  # `count` itself has no record
    records = draw(st.lists(st.tuples(st.integers(0, count - 1), st.lists(number, max_size=3).map(tuple)), max_size=30))
    depths = draw(st.lists(st.integers(0, 255), min_size=len(records), max_size=len(records)))
    return Toy([bytes([each]) * SIZE for each in range(count + 1)], records, depths, {})


def _decodable(records: Sequence[tuple[int, tuple[int, ...]]], is_good: Callable[[int], bool]) -> set[int]:
    """By the definition: the least set that holds each object with a good record all of whose bases are in it."""
    found: set[int] = set()
    while True:
        more = {number for at, (number, bases) in enumerate(records) if is_good(at) and found.issuperset(bases)}
        if more <= found:
            return found
        found |= more


@given(tangles(), st.data())
def test_what_can_be_decoded_is_settled_and_nothing_else(toy: Toy, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, max(0, len(toy.records) - 1))))
    start = data.draw(st.sets(st.integers(0, len(toy.plain) - 1), min_size=1))
    expected = _decodable(toy.records, lambda at: at not in bad)
    with toy.kv().read() as txn:
        places = graph.reach([toy.id(each) for each in start], txn)
        settled = graph.settle(places, lambda each, place: place.offset not in bad, {})
        assert {each for each in start if toy.id(each) in settled} == start & expected
        for object_id, (place, height) in settled.items():
            assert place in places[object_id]
            assert height == 1 + max((settled[base].height for base in place.bases), default=-1)
        # What was settled before counts as well as what is settled now.
        known = {each: found for each, found in settled.items() if data.draw(st.booleans())}
        again = graph.settle(
            graph.reach([toy.id(each) for each in start], txn, known),
            lambda each, place: place.offset not in bad,
            known,
        )
    assert {each for each in start if toy.id(each) in again or toy.id(each) in known} == start & expected


_RECORDS = st.lists(
    st.tuples(st.integers(0, 19), st.one_of(st.just(-1), st.just(-2), st.integers(0, 21)), st.sampled_from([0, 1, 9])),
    max_size=40,
)


@pytest.mark.filterwarnings("ignore::casckpt.errors.StoreWarning")  # a bad copy that was passed over
@settings(max_examples=25)
@given(records=_RECORDS)
def test_stored_objects_are_read_exactly_if_any_of_their_records_allow_it(
    records: list[tuple[int, int, int]],
) -> None:
    """On disk: raw records, good (-1) and bad (-2), and differences in any tangle; 16 of the objects are a state."""
    first = forging.FIRST
    forged = [_forged(first + number, base if base < 0 else first + base, depth) for number, base, depth in records]
    named = {number for number, _, _ in records}
    described = [(number, () if base < 0 else (base,)) for number, base, _ in records]
    described += [(number, ()) for number in range(forging.COUNT) if number not in named]
    bad = {at for at, (_, base, _) in enumerate(records) if base == -2}
    expected = _decodable(described, lambda at: at not in bad)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        forging.make(path)
        forging.forge(path, forged)
        with open_store(path) as store:
            if expected.issuperset(range(forging.COUNT)):
                assert unlike(forging.STATE, store.restore(1)) is None
            else:
                with pytest.raises((CorruptionError, IncompleteError)):
                    store.restore(1)
                assert {user[3] for each in store.verify().problems for user in each.snapshots} == {"numbers"}


def _forged(number: int, base: int, depth: int) -> forging.Forged:
    if base == -1:
        return forging.raw(number, depth=depth)
    if base == -2:
        good = forging.raw(number, depth=depth)
        return forging.Forged(good.header, good.payload[:-1] + b"?")
    return forging.difference(number, base, depth=depth)
