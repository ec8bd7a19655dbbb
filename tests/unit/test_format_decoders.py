"""(S22, S26) Decoders of records, packs, entries, snapshots and the document: what they refuse, and at what cost.

Bytes are made by hand (struct, MessagePack, blake3), with every check made right again after a number was forged: an
attacker can do that too. Both sides of each limit are tried.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from casckpt.errors import CorruptionError, UnsupportedFormatError
from casckpt.format import entry, pack, record, snapshot, wire
from casckpt.format.document import StoreDocument, decode_document, encode_document, unknown_features
from casckpt.ids import NO_DIGEST, ObjectId, PackId, StoreId, WriteId

ID, OTHER = ObjectId(bytes(range(32))), ObjectId(bytes(32))
STORE, PACK = StoreId(b"s" * 16), PackId(b"p" * 16)
FORGED = (0, 1, -1, 1 << 31, (1 << 63) - 1)
MEMORY_MAX = 1 << 20


def check(data: bytes) -> bytes:
    return blake3(data).digest(16)


def cheaply(decode: Callable[[], Any]) -> None:
    """It is refused with a typed error, and little memory was used before that."""
    tracemalloc.start()
    try:
        with pytest.raises((CorruptionError, UnsupportedFormatError)):
            decode()
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


# --- records ---


def header(**fields: Any) -> bytes:
    """A record header by the byte table, with its check."""
    values = {
        "magic": b"CREC", "size": 96, "codec": 0, "version": 1, "bases": 0, "kind": 1, "params": 0, "depth": 0,
        "cost": 0, "plain": 5, "stored": 5, "id": ID, "payload_check": bytes(16), "tail": b"", **fields,
    }  # fmt: skip
    tail = values.pop("tail")
    fixed = struct.pack("<4sIBBBBHBBQQ32s16s", *values.values())
    return fixed + check(fixed + tail) + tail


def test_record_header_by_hand_is_the_encoders() -> None:
    made = record.RecordHeader(
        kind=1, codec=0, codec_version=1, object_id=ID, plain_size=5, stored_size=5, payload_check=bytes(16)
    )
    assert record.encode_header(made, is_aligned=False) == header()
    assert record.decode_header(header() + b"12345", "x", limit=101) == msgspec.structs.replace(made, header_size=96)


def test_record_with_bases_parameters_and_padding_comes_back() -> None:
    made = record.RecordHeader(
        kind=2, codec=7, codec_version=3, object_id=ID, plain_size=9, stored_size=4, payload_check=b"c" * 16,
        params=b"abc", bases=(OTHER, ID), depth=3, cost=200,
    )  # fmt: skip
    for is_aligned, size in ((False, 96 + 64 + 3), (True, 192)):
        encoded = record.encode_header(made, is_aligned=is_aligned)
        assert len(encoded) == size
        assert record.decode_header(encoded, "x") == msgspec.structs.replace(made, header_size=size)


@pytest.mark.parametrize("field", ["size", "params", "plain", "stored"])
def test_forged_length_in_a_record_is_refused(field: str) -> None:
    width = {"size": 32, "params": 16}.get(field, 64)
    for number in (*FORGED, (1 << width) - 1, 95, 97, 161):
        if number == 5 or (field == "plain" and 0 <= number <= 64 << 20) or (field == "stored" and number in (0, 1)):
            continue  # a possible size; the payload decides
        if field == "params" and number % (1 << width) == 0:
            continue
        cheaply(
            lambda number=number: record.decode_header(
                header(**{field: number % (1 << width)}) + b"12345", "x", limit=101
            )
        )


def test_record_limits_lie_where_they_are_said_to() -> None:
    record.decode_header(header(plain=64 << 20), "x")
    cheaply(lambda: record.decode_header(header(plain=(64 << 20) + 1), "x"))
    record.decode_header(header(stored=128 << 20), "x")
    cheaply(lambda: record.decode_header(header(stored=(128 << 20) + 1), "x"))
    tail = bytes(32768)
    found = record.decode_header(header(size=96 + 32768, params=32768, tail=tail), "x")
    assert found.params == tail
    cheaply(lambda: record.decode_header(header(size=96 + 32769, params=32769, tail=tail + b"\0"), "x"))
    most = header(size=96 + 255 * 32, bases=255, tail=bytes(255 * 32))
    assert len(record.decode_header(most, "x").bases) == 255
    cheaply(lambda: record.decode_header(header(size=96 + 65, tail=bytes(65)), "x"))  # more padding than 64


@pytest.mark.parametrize("at", [0, 4, 8, 9, 10, 11, 12, 16, 24, 40, 64, 80, 95])
def test_every_part_of_a_record_header_is_guarded(at: int) -> None:
    data = bytearray(header())
    data[at] ^= 1
    with pytest.raises(CorruptionError):
        record.decode_header(bytes(data), "record at 64 of pack x")


def test_record_cut_short_is_refused() -> None:
    for size in (0, 1, 95):
        with pytest.raises(CorruptionError, match="at least 96"):
            record.decode_header(header()[:size], "x")


# --- packs ---


def rows(**fields: Any) -> list[pack.PackRow]:
    values = {"offset": 64, "header_size": 128, "stored_size": 5, "plain_size": 5, "kind": 1, "codec": 0, "version": 1}
    values.update(fields)
    return [pack.PackRow(ID, *values.values())]  # type: ignore[arg-type]


def test_pack_parts_come_back() -> None:
    assert pack.decode_pack_header(pack.encode_pack_header(PACK, STORE), "x") == (PACK, STORE)
    footer = pack.encode_footer(rows(), 256, PACK)
    size = 256 + len(footer)
    offset, footer_size, footer_check, found = pack.decode_trailer(footer[-80:], size, "x")
    assert (offset, footer_size, found) == (256, len(footer) - 80, PACK)
    assert pack.decode_footer(footer[:-80], footer_check, 256, "x") == rows()


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 63}, {"offset": -64}, {"offset": 192}, {"offset": 1 << 63}, {"header_size": 95}, {"header_size": -1},
        {"header_size": 1 << 31, "stored_size": -(1 << 31)}, {"header_size": 65536, "offset": 64}, {"stored_size": -1},
        {"stored_size": 1 << 62}, {"plain_size": -1}, {"plain_size": (64 << 20) + 1}, {"codec": 256}, {"codec": -1},
        {"kind": 256}, {"version": -1},
    ],
)  # fmt: skip
def test_impossible_row_of_a_footer_is_refused(fields: dict[str, int]) -> None:
    encoded = msgspec.msgpack.encode(rows(**fields))
    cheaply(lambda: pack.decode_footer(encoded, check(encoded), 256, "x"))


def test_forged_trailer_is_refused() -> None:
    footer = pack.encode_footer(rows(), 256, PACK)
    for column in range(3):
        for number in (*FORGED, 63, 257):
            fields = list(struct.unpack("<8sQQQ16s16s", footer[-80:-16]))
            if fields[1 + column] == number % (1 << 64) or (column == 2 and number in (0, 1)):
                continue  # the count is compared with what can be there; the rows themselves say how many there are
            fields[1 + column] = number % (1 << 64)
            fixed = struct.pack("<8sQQQ16s16s", *fields)
            cheaply(lambda fixed=fixed: pack.decode_trailer(fixed + check(fixed), 256 + len(footer), "x"))


def test_pack_of_a_newer_version_is_unsupported_and_a_damaged_one_corrupt() -> None:
    fixed = struct.pack("<8sII16s16s", b"CASPACK1", 2, 0, PACK, STORE)
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        pack.decode_pack_header(fixed + check(fixed), "x")
    with pytest.raises(CorruptionError):
        pack.decode_pack_header(fixed + bytes(16), "x")


# --- MessagePack with counts that are not there ---

COUNTS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff",
]
KINDS = [snapshot.Snapshot, snapshot.Manifest, snapshot.Context, entry.Envelope, list[pack.PackRow]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "rows"))
def test_counts_beyond_the_bytes_cost_no_memory(kind: Any) -> None:
    for count in COUNTS:
        for before in (b"", b"\x97\x01\xa1a", b"\x94\x01"):
            cheaply(lambda data=before + count + b"\x01" * 64: wire.decode(kind, data, "x"))


def test_deep_nesting_is_refused_and_does_not_overflow() -> None:
    for depth in (1_000, 100_000):
        cheaply(lambda depth=depth: wire.decode(snapshot.Snapshot, b"\x91" * depth + b"\x01", "x"))


# --- entries ---


def entry_of(body: Any) -> bytes:
    envelope = entry.Envelope(WriteId(b"w" * 16), NO_DIGEST, 1, "host", 1, body)
    return entry.encode_entry(1, STORE, envelope, [])


def commit(**fields: Any) -> entry.Commit:
    values = {
        "run": "main", "branch": "main", "step": 1, "snapshot": ID, "expected_head": b"", "packs": [], "metrics": {},
        "labels": {}, "new_bytes": {}, **fields,
    }  # fmt: skip
    return entry.Commit(**values)


def supersede(**fields: Any) -> entry.Supersede:
    values = {
        "run": "main", "branch": "main", "step": 1, "snapshot": ID, "replaced": OTHER, "packs": [], "metrics": {},
        "labels": {}, "new_bytes": {}, **fields,
    }  # fmt: skip
    return entry.Supersede(**values)


def test_every_kind_of_entry_comes_back() -> None:
    bodies = [
        supersede(), supersede(step=0, metrics={"a": 1.5}, new_bytes={"replay": 1}),
        entry.Create(b"{}"), commit(), commit(step=(1 << 63) - 1, expected_head=OTHER, metrics={"a": 1.5, "b": "x"}),
        entry.Annotate(ID, {"a": True}, {"b": "c"}), entry.Tag("main", "good", ID), entry.Tag("main", "good", b""),
        entry.Retire(ID), commit(packs=[entry.PackRef(PACK, (1 << 64) - 1, bytes(16))], run="é" * 100),
        entry.Thin(ID, ["optimizer", "é"]), entry.Condemn([PACK, bytes(16)], [entry.PackRef(PACK, 1, bytes(16))]),
        entry.Condemn([], []), entry.Prune([ID, OTHER]),
        entry.Generation("main", 1, b"", []), entry.Generation("é", (1 << 63) - 1, ID, ["why", ""]),
    ]  # fmt: skip
    for body in bodies:
        assert entry.decode_entry(entry_of(body), 1, "x").envelope.body == body


@pytest.mark.parametrize(
    "body",
    [
        supersede(step=-1), supersede(replaced=b""), supersede(replaced=b"x"), supersede(snapshot=b""),
        supersede(replaced=ID),
        supersede(run=""), supersede(branch="\n"), supersede(packs=[entry.PackRef(b"p", 1, bytes(16))]),
        commit(step=-1), commit(step=1 << 63), commit(step=(1 << 64) - 1), commit(run=""), commit(run="a\0b"),
        commit(run="x" * 201), commit(run="é" * 101), commit(branch=""), commit(branch="\n"), commit(branch="x" * 1000),
        commit(snapshot=b""), commit(snapshot=b"x" * 31), commit(expected_head=b"x"),
        commit(packs=[entry.PackRef(b"p", 1, bytes(16))]), commit(packs=[entry.PackRef(PACK, -1, bytes(16))]),
        commit(packs=[entry.PackRef(PACK, 1, b"")]), entry.Annotate(b"", {}, {}), entry.Annotate(b"x", {}, {}),
        entry.Retire(b""), entry.Retire(b"x" * 33), entry.Tag("", "a", ID), entry.Tag("main", "", ID),
        entry.Thin(b"x", ["a"]), entry.Thin(ID, []), entry.Thin(ID, [""]), entry.Thin(ID, ["a", "x" * 201]),
        entry.Generation("", 1, ID, []), entry.Generation("a\0b", 1, ID, []), entry.Generation("main", 0, ID, []),
        entry.Generation("main", -1, ID, []), entry.Generation("main", 1 << 63, ID, []),
        entry.Generation("main", 1, b"x", []),
        entry.Prune([]), entry.Prune([b"x"]), entry.Condemn([b"x"], []), entry.Condemn([PACK] * 65537, []),
        entry.Condemn([], [entry.PackRef(PACK, 1, b"")]),
        entry.Tag("main", "x" * 201, ID), entry.Tag("main", "a\0b", ID), entry.Tag("main", "a", b"x"),
    ],
)  # fmt: skip
def test_entry_whose_fields_no_key_could_carry_is_refused(body: Any) -> None:
    with pytest.raises(CorruptionError, match="malformed"):
        entry.decode_entry(entry_of(body), 1, "x")


def test_entry_with_more_packs_than_allowed_is_refused() -> None:
    packs = [entry.PackRef(PACK, 1, bytes(16))] * 65536
    assert len(entry.decode_entry(entry_of(commit(packs=packs)), 1, "x").envelope.body.packs) == 65536
    with pytest.raises(CorruptionError, match="65537 packs"):
        entry.decode_entry(entry_of(commit(packs=[*packs, packs[0]])), 1, "x")


def test_forged_length_in_an_entry_is_refused() -> None:
    data = entry_of(commit())
    for at in (8, 16, 24):
        (real,) = struct.unpack_from("<Q", data, at)
        for number in {*FORGED, real + 1, real - 1} - {real}:
            changed = bytearray(data)
            struct.pack_into("<Q", changed, at, number % (1 << 64))
            changed[48:64] = check(bytes(changed[:48]))
            changed[-32:] = blake3(bytes(changed[:-32])).digest()
            cheaply(lambda changed=bytes(changed): entry.decode_entry(changed, 1, "x"))


def test_every_byte_of_an_entry_is_guarded() -> None:
    data = entry_of(commit())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CorruptionError):
            entry.decode_entry(bytes(changed), 1, "x")
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            entry.decode_entry(data[:size], 1, "x")


def test_entry_of_an_unknown_kind_is_unsupported_and_an_oversized_one_corrupt() -> None:
    class Merge(msgspec.Struct, frozen=True, array_like=True, tag="merge"):
        upto: int

    with pytest.raises(UnsupportedFormatError, match=r"does not know.*Upgrade casckpt"):
        entry.decode_entry(entry_of(Merge(5)), 1, "timeline entry 1")
    oversized = b"CASENTR1" + bytes((4 << 20) - 7)
    cheaply(lambda: entry.decode_entry(oversized, 1, "x"))


# --- snapshots and manifests ---


def test_snapshot_and_manifest_come_back() -> None:
    ref = snapshot.ComponentRef(ID, 3, 100, snapshot.DROPPABLE)
    made = snapshot.Snapshot(1, "main", "main", 5, b"", OTHER, {"policy": ref})
    assert snapshot.decode_snapshot(wire.encode(made), "x") == made
    manifest = snapshot.Manifest(1, ID, 4096, 5, 4097, 2, ID + OTHER)
    assert snapshot.decode_manifest(wire.encode(manifest), "x") == manifest
    large = snapshot.Manifest(1, ID, 4096, 0, 1025 * 4096, 1025, ID + OTHER)
    assert snapshot.decode_manifest(wire.encode(large), "x").has_nodes


@pytest.mark.parametrize(
    "components",
    [
        {"": (ID, 1, 1, 0)}, {"x" * 201: (ID, 1, 1, 0)}, {"a\0b": (ID, 1, 1, 0)}, {"a": (b"x", 1, 1, 0)},
        {"a": (ID, -1, 1, 0)}, {"a": (ID, 1, -1, 0)}, {"a": (ID, 1, 1, 3)}, {"a": (ID, 1, 1, -1)},
    ],
)  # fmt: skip
def test_snapshot_with_impossible_components_is_refused(components: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError):
        snapshot.decode_snapshot(msgspec.msgpack.encode([1, "main", "main", 5, b"", b"", components]), "x")


@pytest.mark.parametrize("field", range(2, 6))
def test_forged_number_in_a_manifest_is_refused(field: int) -> None:
    for number in (*FORGED, (1 << 64) - 1):
        values: list[Any] = [1, ID, 4096, 5, 4097, 2, ID + OTHER]
        if number == values[field] or (field == 3 and number in (0, 1)) or (field == 4 and number == 5):
            continue
        values[field] = number
        if field == 2 and number == 0:
            values[4] = values[3] = 0
        cheaply(lambda values=list(values): snapshot.decode_manifest(msgspec.msgpack.encode(values), "x"))


PART = [ID, 5, 1, 0]


def test_ring_manifest_comes_back() -> None:
    ring = snapshot.RingManifest(
        2, ID, 4096, 5, 5, 1, ID, 7, (snapshot.Part(OTHER, 5, 1, 0), snapshot.Part(ID, 1, 2, 3))
    )
    assert snapshot.decode_manifest(wire.encode(ring), "x") == ring
    assert snapshot.parts_of(ring) == ring.parts
    assert snapshot.parts_of(snapshot.Manifest(1, ID, 4096, 5, 5, 1, ID)) == ()


@pytest.mark.parametrize(
    ("first_row", "parts"),
    [
        (-1, [PART]),
        (1 << 63, []),
        ((1 << 63) - 3, [PART]),
        (0, [[ID[:-1], 5, 1, 0]]),
        (0, [[ID, 0, 1, 0]]),
        (0, [[ID, -5, 1, 0]]),
        (0, [[ID, 1 << 63, 1, 0]]),
        (0, [[ID, 5, -1, 0]]),
        (0, [[ID, 5, 1, -1]]),
        (0, [[ID, 5, 1, 9]]),
    ],
)
def test_ring_manifest_with_impossible_parts_is_refused(first_row: int, parts: list[Any]) -> None:
    values = [2, ID, 4096, 5, 5, 1, ID, first_row, parts]
    cheaply(lambda: snapshot.decode_manifest(msgspec.msgpack.encode(values), "x"))
    good = [2, ID, 4096, 5, 5, 1, ID, 0, [PART]]
    assert snapshot.decode_manifest(msgspec.msgpack.encode(good), "x").parts[0].row_count == 5


def test_ring_manifest_of_another_version_is_told_apart() -> None:
    with pytest.raises(UnsupportedFormatError, match="version 3"):
        snapshot.decode_manifest(msgspec.msgpack.encode([3, ID, 4096, 5, 5, 1, ID, 0, []]), "x")
    with pytest.raises(CorruptionError):
        snapshot.decode_manifest(msgspec.msgpack.encode([1, ID, 4096, 5, 5, 1, ID, 0, []]), "x")


@pytest.mark.parametrize(
    ("decode", "values"),
    [
        (snapshot.decode_snapshot, [2, "main", "main", 5, b"", b"", {}]),
        (snapshot.decode_manifest, [2, ID, 4096, 5, 4097, 2, ID + OTHER]),
        (snapshot.decode_context, [2, 1, b"", {}]),
    ],
)
def test_object_of_a_newer_version_is_unsupported(decode: Callable[..., Any], values: list[Any]) -> None:
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        decode(msgspec.msgpack.encode(values), "x")


def test_one_value_has_one_encoding() -> None:
    made = snapshot.Snapshot(1, "main", "main", 5, b"", b"", {})
    good = wire.encode(made)
    long_form = good.replace(b"\x05", b"\xcc\x05")  # the same 5, in two bytes
    for data in (good + b"\0", long_form, good[:-1], b""):
        with pytest.raises(CorruptionError):
            wire.decode(snapshot.Snapshot, data, "x")


@pytest.mark.parametrize("size", [1, 31, 33])
def test_ids_that_are_no_whole_number_are_refused(size: int) -> None:
    with pytest.raises(CorruptionError):
        snapshot.split_ids(bytes(size), "x")
    assert snapshot.split_ids(bytes(64), "x") == [bytes(32)] * 2


# --- the document ---


def document(**fields: Any) -> bytes:
    plain = {"casckpt_format": 1, "store_id": "00" * 16, "created_by": "test", "chunk_size": 4096, **fields}
    return json.dumps(plain).encode()


def test_document_comes_back_with_fields_that_it_does_not_know() -> None:
    made = StoreDocument(1, "ab" * 16, "casckpt 1", chunk_size=8192)
    assert decode_document(encode_document(made), "x") == made
    assert decode_document(document(later="field"), "x").chunk_size == 4096


@pytest.mark.parametrize(
    "fields",
    [
        {"casckpt_format": 0}, {"casckpt_format": -1}, {"casckpt_format": "1"}, {"casckpt_format": None},
        {"store_id": "00"}, {"store_id": "zz" * 16}, {"store_id": 5}, {"chunk_size": 0}, {"chunk_size": -1},
        {"chunk_size": 4095},
        {"chunk_size": (16 << 20) + 1}, {"chunk_size": 1 << 63}, {"chunk_size": 1 << 70}, {"features": []},
        {"features": {"read": "x"}},
    ],
)  # fmt: skip
def test_impossible_document_is_refused(fields: dict[str, Any]) -> None:
    cheaply(lambda: decode_document(document(**fields), "x"))


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000, b"{}"])
def test_bytes_that_are_no_document_are_refused(data: bytes) -> None:
    cheaply(lambda: decode_document(data, "x"))


def test_newer_format_is_unsupported_whatever_else_it_holds() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"store format 2.*up to 1.*Upgrade"):
        decode_document(document(casckpt_format=2, store_id=None, chunk_size="huge"), "x")


def test_unknown_features_are_told_by_need() -> None:
    found = decode_document(document(features={"read": ["b", "a"], "write": ["c"]}), "x")
    assert [unknown_features(found, need) for need in ("read", "write", "collect")] == [["a", "b"], ["c"], []]
