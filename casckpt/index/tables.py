"""What the index's rows mean: pure conversions between rows and values, and the few lookups built on them.

========== ============================ ==========================================================================
table      key                          value
========== ============================ ==========================================================================
meta       name                         MessagePack (`applied`, `bad`, `pending`, `epoch`, counters); empty flags
objects    object id                    count u32, then places: where records of the object are, preferred first
packs      pack number u32              pack id 16, size u64
pack_ids   pack id 16                   pack number u32
snaps      snapshot id                  entry seq u64, branch number u32, step i64, flags u8
lines      branch number u32, step u64  snapshot id
branches   run NUL branch               `BranchRow`
tags       run NUL tag                  snapshot id
notes      snapshot id                  `NoteRow`: metrics and labels that annotations added
damage     object id                    reason, found by a verification or a failed read
fill       pack number u32              bytes of records of live objects u64; no row where there are none
thinned    snapshot id                  `ThinRow`: components that were withdrawn
========== ============================ ==========================================================================

Integers in keys are big-endian so that they sort. Snapshot objects are found through `snaps`, not `objects`: they
always lie inline in their commit's entry, and the row is a third of the size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from casckpt.format import wire
from casckpt.format.entry import EpochRef, MetricValue
from casckpt.format.pack import PackRow
from casckpt.format.record import RecordHeader
from casckpt.ids import DIGEST_SIZE, ObjectId, SnapshotId
from casckpt.index.kv import KvReader, KvWriter

T = TypeVar("T")

TABLES = (
    "meta",
    "objects",
    "packs",
    "pack_ids",
    "snaps",
    "lines",
    "branches",
    "tags",
    "notes",
    "damage",
    "fill",
    "thinned",
)

INLINE = 0xFFFFFFFF  # pack number of places inside a timeline entry
_ENTRY_OFFSET_BITS = 24  # entries are at most 4 MiB
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<IQHIIBBBB")
_SNAP = struct.Struct("<QIqB")
_U32 = struct.Struct(">I")
_LINE = struct.Struct(">IQ")
_PACK = struct.Struct("<16sQ")
_U64 = struct.Struct("<Q")

FLAG_RETIRED, FLAG_MIXED, FLAG_THINNED = 1, 2, 4
CONDEMNED = (1 << 64) - 1  # size, in `packs`, of one that a collector has condemned: it may be gone at any time
PENDING = b"pending:"  # meta keys: then the pack id
UNREADABLE = -2  # a pack's `found_size` when the medium refused to give its table
BAD = b"bad:"  # meta keys: then the entry's number, 8 bytes
EPOCH = b"epoch:"  # meta keys: then the epoch's number, 8 bytes
UNTOLD = b"untold"  # meta key: there were epochs that no entry names when the index was made
UNCOUNTED = b"uncounted:"  # meta keys: then the id of a live manifest or node that could not be read …
UNDECODABLE = b"undecodable"  # … or, by this value, was read, and is none: it never will be
INEXACT = b"inexact"  # meta key: something else could not be read when an entry was applied
GENERATION = b"generation:"  # meta keys: then run, NUL and number, 8 bytes


class Place(NamedTuple):
    """Where one record of an object is. In a pack: its number and the record's offset. Inline: INLINE, and the
    entry's seq and the offset in it packed into `offset`. `bases` are the ids of what it is decoded with."""

    pack_no: int
    offset: int
    header_size: int
    stored_size: int
    plain_size: int
    codec: int
    depth: int = 0
    cost: int = 0
    bases: tuple[ObjectId, ...] = ()

    @property
    def is_inline(self) -> bool:
        return self.pack_no == INLINE

    @property
    def size(self) -> int:
        """Bytes that the record takes in its file, padding aside."""
        return self.header_size + self.stored_size

    @property
    def entry_seq(self) -> int:
        return self.offset >> _ENTRY_OFFSET_BITS

    @property
    def entry_offset(self) -> int:
        return self.offset & ((1 << _ENTRY_OFFSET_BITS) - 1)


def inline_offset(seq: int, offset: int) -> int:
    """The `offset` of a place inside entry `seq`."""
    return seq << _ENTRY_OFFSET_BITS | offset


def place_of(header: RecordHeader | PackRow, pack_no: int, offset: int, bases: tuple[ObjectId, ...]) -> Place:
    """The place of a record, from its header or its row in a footer."""
    sizes = header.header_size, header.stored_size, header.plain_size
    return Place(pack_no, offset, *sizes, header.codec, header.depth, header.cost, bases)


def add_place(places: Sequence[Place], place: Place) -> list[Place]:
    """`places` with one more, in order of preference: the least depth, and of equals the newest.

    A record is always deeper than those that its bases had when it was written, so a chain that goes by preference
    ends: depth falls with every step.
    """
    return sorted([place, *places], key=lambda each: each.depth)


def encode_object(count: int, places: Sequence[Place]) -> bytes:
    parts = [_COUNT.pack(count)]
    for place in places:
        parts += (_PLACE.pack(*place[:-1], len(place.bases)), *place.bases)
    return b"".join(parts)


def decode_object(row: bytes) -> tuple[int, list[Place]]:
    """Reference count and places, the preferred one first."""
    (count,) = _COUNT.unpack_from(row)
    places = []
    at = _COUNT.size
    while at < len(row):
        place = _place_at(row, at)
        places.append(place)
        at += _PLACE.size + DIGEST_SIZE * len(place.bases)
    return count, places


def _place_at(row: bytes, at: int) -> Place:
    *fields, base_count = _PLACE.unpack_from(row, at)
    start = at + _PLACE.size
    starts = range(start, start + DIGEST_SIZE * base_count, DIGEST_SIZE)
    return Place._make([*fields, tuple([ObjectId(row[each : each + DIGEST_SIZE]) for each in starts])])


def first_places(rows: Iterable[bytes | None]) -> list[Place | None]:
    """The preferred place of each object, None where it has none."""
    first = _COUNT.size
    return [_place_at(row, first) if row and len(row) > first else None for row in rows]


class SnapRow(NamedTuple):
    seq: int
    branch_no: int
    step: int
    flags: int

    @property
    def is_retired(self) -> bool:
        return bool(self.flags & FLAG_RETIRED)

    @property
    def is_mixed(self) -> bool:
        return bool(self.flags & FLAG_MIXED)

    @property
    def is_thinned(self) -> bool:
        return bool(self.flags & FLAG_THINNED)


def encode_snap(row: SnapRow) -> bytes:
    return _SNAP.pack(*row)


def decode_snap(value: bytes) -> SnapRow:
    return SnapRow(*_SNAP.unpack(value))


class BranchRow(msgspec.Struct, frozen=True, array_like=True):
    """A line of steps. `fork` is the parent snapshot of its first one (empty: none); `last_seq` its newest entry."""

    number: int
    head: bytes
    head_step: int
    fork: bytes
    last_seq: int


class NoteRow(msgspec.Struct, frozen=True, array_like=True):
    metrics: dict[str, MetricValue]
    labels: dict[str, str]


class GenerationRow(msgspec.Struct, frozen=True, array_like=True):
    """A generation of a run, and the entry that opened it; 0 and 0 before the first."""

    number: int = 0
    seq: int = 0


class ThinRow(msgspec.Struct, frozen=True, array_like=True):
    components: list[str]


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """How far the timeline has been applied: last number, its digest, and numbers below it that were not there."""

    seq: int
    digest: bytes
    gaps: list[int]


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """An entry that could not be applied fully: a pack was missing (-1), unreadable, or of another size."""

    seq: int
    pack_id: bytes
    found_size: int


class BadEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry that could not be read, the size of its file then, and why."""

    seq: int
    found_size: int
    reason: str


def name_key(run: str, name: str) -> bytes:
    return f"{run}\0{name}".encode()


def generation_key(run: str, number: int) -> bytes:
    return GENERATION + run.encode() + b"\0" + number.to_bytes(8, "big")


def generation_bounds(run: str) -> tuple[bytes, bytes]:
    """Start and stop of a run's generations in `meta`."""
    return generation_key(run, 0), generation_key(run, (1 << 64) - 1)


def run_prefix(run: str) -> tuple[bytes, bytes]:
    """Start and stop of a run's keys in `branches` and `tags`."""
    return f"{run}\0".encode(), f"{run}\1".encode()


def split_name_key(key: bytes) -> tuple[str, str]:
    run, _, name = key.decode().partition("\0")
    return run, name


def line_key(branch_no: int, step: int) -> bytes:
    return _LINE.pack(branch_no, step)


def line_step(key: bytes) -> int:
    return int(_LINE.unpack(key)[1])


def number_key(number: int) -> bytes:
    return _U32.pack(number)


def key_number(key: bytes) -> int:
    return int(_U32.unpack(key)[0])


def encode_pack_row(pack_id: bytes, size: int) -> bytes:
    return _PACK.pack(pack_id, size)


def decode_pack_row(row: bytes) -> tuple[bytes, int]:
    pack_id, size = _PACK.unpack(row)
    return pack_id, size


def add_fill(txn: KvWriter, changes: Mapping[int, int]) -> None:
    """Add to the live bytes of packs, given as pack number → change."""
    for number, change in changes.items():
        key = number_key(number)
        old = txn.get("fill", key)
        new = (_U64.unpack(old)[0] if old else 0) + change
        if new:
            txn.put("fill", key, _U64.pack(new))
        else:
            txn.delete("fill", key)


def read_fill(txn: KvReader, number: int) -> int:
    """Bytes of records of live objects in a pack."""
    found = txn.get("fill", number_key(number))
    return _U64.unpack(found)[0] if found else 0


def put_epoch(txn: KvWriter, ref: EpochRef) -> None:
    """Note an epoch that an entry names."""
    put_struct(txn, "meta", EPOCH + ref.number.to_bytes(8, "big"), ref)


def epoch_refs(txn: KvReader) -> list[EpochRef]:
    """All epochs that entries name, ascending by number."""
    return read_meta(txn, EPOCH, EpochRef)


def epoch_count(txn: KvReader) -> int:
    """How many epochs are sealed: their numbers are those below."""
    found: int | None = get_struct(txn, "meta", b"sealed", int)
    return found or 0


def last_condemned(txn: KvReader) -> int:
    """Number of the newest entry that condemned packs or sealed entries; -1 before the first."""
    found: int | None = get_struct(txn, "meta", b"condemned", int)
    return -1 if found is None else found


def get_struct(txn: KvReader, table: str, key: bytes, kind: Any) -> Any:
    """The decoded row, or None."""
    value = txn.get(table, key)
    return None if value is None else msgspec.msgpack.decode(value, type=kind)


def put_struct(txn: KvWriter, table: str, key: bytes, value: Any) -> None:
    txn.put(table, key, wire.encode(value))


def read_applied(txn: KvReader) -> Applied | None:
    return get_struct(txn, "meta", b"applied", Applied)  # type: ignore[no-any-return]


def next_number(txn: KvWriter, counter: bytes) -> int:
    """Take the next number of a counter kept in `meta`, starting at 0."""
    number: int = get_struct(txn, "meta", counter, int) or 0
    put_struct(txn, "meta", counter, number + 1)
    return number


def read_meta(txn: KvReader, prefix: bytes, kind: type[T]) -> list[T]:
    """All `meta` rows whose key starts with `prefix` (PENDING, BAD)."""
    return [msgspec.msgpack.decode(value, type=kind) for _, value in _scan_meta(txn, prefix)]


def unread_objects(txn: KvReader) -> list[ObjectId]:
    """Live manifests and nodes that could not be read."""
    return [ObjectId(key[len(UNCOUNTED) :]) for key, value in _scan_meta(txn, UNCOUNTED) if value != UNDECODABLE]


def _scan_meta(txn: KvReader, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    return txn.scan("meta", prefix, prefix + b"\xff" * (DIGEST_SIZE + 1))


def put_bad(txn: KvWriter, bad: BadEntry) -> None:
    put_struct(txn, "meta", BAD + bad.seq.to_bytes(8, "big"), bad)


def find_snapshots(txn: KvReader, prefix: bytes, limit: int = 3) -> list[SnapshotId]:
    """Up to `limit` snapshot ids that start with `prefix`."""
    found: list[SnapshotId] = []
    for key, _ in txn.scan("snaps", prefix, None):
        if not key.startswith(prefix) or len(found) == limit:
            break
        found.append(SnapshotId(key))
    return found


def places_of(txn: KvReader, object_id: ObjectId) -> list[Place]:
    """All places of an object, the preferred one first."""
    row = txn.get("objects", object_id)
    return decode_object(row)[1] if row else []
