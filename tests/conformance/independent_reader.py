"""A second reader of the store format, written from docs/format.md alone.

It imports the standard library, blake3, zstandard and the `independent_` files beside it: nothing of casckpt, no
NumPy, no torch, no MessagePack library. What it restores is therefore evidence about the files, not about the code that
wrote them. It is slow, reads everything into memory, and raises `Damaged` at the first byte that is not as the document
says.

    python independent_reader.py STORE      lists every snapshot with a digest of each component
"""

from __future__ import annotations

import json
import struct
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

try:
    from independent_codecs import Damaged, decode_codec, need  # run as a program
    from independent_epochs import read_epochs
except ImportError:
    from tests.conformance.independent_codecs import Damaged, decode_codec, need
    from tests.conformance.independent_epochs import read_epochs

TORCH_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def check(data: bytes) -> bytes:
    return blake3(data).digest(16)


# --- MessagePack, canonical form only (§1) ---


class Extension(NamedTuple):
    code: int
    data: bytes


class _Unpacker:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        need(self.at + count <= len(self.data), "MessagePack ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int, least: int, signed: bool = False) -> int:
        value = int.from_bytes(self.take(size), "big", signed=signed)
        need(value < least if signed else value >= least, "MessagePack number is not in its shortest form")
        return value

    def value(self) -> Any:
        head = self.take(1)[0]
        if head <= 0x7F or head >= 0xE0:
            return head if head <= 0x7F else head - 256
        if head <= 0x8F:
            return self.map(head & 15)
        if head <= 0x9F:
            return self.array(head & 15)
        if head <= 0xBF:
            return self.text(head & 31)
        simple = {0xC0: None, 0xC2: False, 0xC3: True}
        if head in simple:
            return simple[head]
        return self.sized(head)

    def sized(self, head: int) -> Any:
        if head in (0xC4, 0xC5, 0xC6):
            size = 1 << (head - 0xC4)
            return self.take(self.number(size, 0 if size == 1 else 1 << 4 * size))
        if head in (0xC7, 0xC8, 0xC9):
            size = 1 << (head - 0xC7)
            count = self.number(size, 0 if size == 1 else 1 << 4 * size)
            need(count not in (1, 2, 4, 8, 16), "MessagePack extension is not in its shortest form")
            return Extension(self.take(1)[0], self.take(count))
        if head == 0xCB:
            return struct.unpack(">d", self.take(8))[0]
        if 0xCC <= head <= 0xCF:
            size = 1 << (head - 0xCC)
            return self.number(size, 128 if size == 1 else 1 << 4 * size)
        if 0xD0 <= head <= 0xD3:
            size = 1 << (head - 0xD0)
            return self.number(size, -32 if size == 1 else -1 << (4 * size - 1), signed=True)
        if 0xD4 <= head <= 0xD8:
            return Extension(self.take(1)[0], self.take(1 << (head - 0xD4)))
        if head in (0xD9, 0xDA, 0xDB):
            size = 1 << (head - 0xD9)
            return self.text(self.number(size, 32 if size == 1 else 1 << 4 * size))
        if head in (0xDC, 0xDD):
            return self.array(self.number(2 << (head - 0xDC), 16 if head == 0xDC else 1 << 16))
        if head in (0xDE, 0xDF):
            return self.map(self.number(2 << (head - 0xDE), 16 if head == 0xDE else 1 << 16))
        raise Damaged(f"MessagePack head {head:#x} is never written")

    def text(self, size: int) -> str:
        return self.take(size).decode()

    def array(self, count: int) -> list[Any]:
        need(count <= len(self.data) - self.at, "MessagePack array is longer than its data")
        return [self.value() for _ in range(count)]

    def map(self, count: int) -> dict[Any, Any]:
        pairs = [(self.value(), self.value()) for _ in range(min(count, len(self.data)))]
        keys = [key.encode() for key, _ in pairs]
        need(keys == sorted(set(keys)) and len(keys) == count, "MessagePack map keys do not ascend")
        return dict(pairs)


def unpack(data: bytes) -> Any:
    unpacker = _Unpacker(data)
    value = unpacker.value()
    need(unpacker.at == len(data), "bytes after a MessagePack value")
    return value


# --- records and codecs (§4, §5) ---


@dataclass
class Record:
    kind: int
    codec: int
    version: int
    object_id: bytes
    plain_size: int
    params: bytes
    bases: list[bytes]
    payload: bytes
    end: int  # where its payload ends in the file
    header_size: int
    offset: int
    depth: int
    cost: int


def read_record(data: bytes, at: int, is_aligned: bool) -> Record:
    need(at + 96 <= len(data) and data[at : at + 4] == b"CREC", f"no record at {at}")
    header_size, codec, version, base_count, kind = struct.unpack_from("<IBBBB", data, at + 4)
    params_size, depth, cost, plain_size, stored_size = struct.unpack_from("<HBBQQ", data, at + 12)
    object_id, payload_check, header_check = data[at + 32 : at + 64], data[at + 64 : at + 80], data[at + 80 : at + 96]
    used = 96 + 32 * base_count + params_size
    need(header_size == (used + -used % 64 if is_aligned else used), f"record at {at}: header size {header_size}")
    need(at + header_size + stored_size <= len(data), f"record at {at} is cut off")
    header = data[at : at + header_size]
    need(check(header[:80] + header[96:]) == header_check, f"record at {at}: header check")
    need(not any(header[used:]), f"record at {at}: header padding")
    payload = data[at + header_size : at + header_size + stored_size]
    need(check(payload) == payload_check, f"record at {at}: payload check")
    need(plain_size <= 67_108_864 and params_size <= 1_048_576 and 1 <= kind <= 6, f"record at {at}: bounds")
    bases = [header[96 + 32 * i : 128 + 32 * i] for i in range(base_count)]
    params = header[96 + 32 * base_count : used]
    end = at + header_size + stored_size
    return Record(
        kind, codec, version, object_id, plain_size, params, bases, payload, end, header_size, at, depth, cost
    )


def decode(record: Record, objects: Mapping[bytes, bytes]) -> bytes:
    """The object of a record; `objects` has its bases."""
    need(record.version == 1, f"codec {record.codec} version {record.version}: unknown")
    bases = [objects[base] for base in record.bases]
    plain = decode_codec(record.codec, record.params, record.payload, record.plain_size, bases)
    need(len(plain) == record.plain_size, "plain size")
    need(blake3(plain).digest() == record.object_id, f"object {record.object_id.hex()}: digest")
    return plain


def decode_all(records: list[Record], in_packs: set[bytes], *, is_collected: bool = False) -> dict[bytes, bytes]:
    """Every record decoded and compared with its address, bases first.

    In a store from which something was collected, records that nobody needs may have lost their bases.
    """
    if is_collected:
        return _decode_what_can_be(records)
    least: dict[bytes, int] = {}
    for record in records:
        need((record.depth == 0) == (not record.bases), f"object {record.object_id.hex()}: depth {record.depth}")
        least[record.object_id] = min(record.depth, least.get(record.object_id, 255))
    objects: dict[bytes, bytes] = {}
    for record in sorted(records, key=lambda record: record.depth):
        for base in record.bases:
            need(base in in_packs, f"base {base.hex()} is in no pack")
            need(least[base] < record.depth, f"object {record.object_id.hex()}: depth does not fall")
        objects[record.object_id] = decode(record, objects)
    return objects


def _decode_what_can_be(records: list[Record]) -> dict[bytes, bytes]:
    objects: dict[bytes, bytes] = {}
    while True:
        later = [record for record in records if not all(base in objects for base in record.bases)]
        objects.update((record.object_id, decode(record, objects)) for record in records if record not in later)
        if len(later) == len(records):
            return objects
        records = later


# --- packs and entries (§6, §7) ---


def read_pack(path: Path, store_id: bytes) -> tuple[list[Record], bytes]:
    """All records of a pack, and its footer check. Footer and records must agree."""
    data = path.read_bytes()
    pack_id = bytes.fromhex(path.name)
    need(data[:16] == b"CASPACK1" + struct.pack("<II", 1, 0), f"{path}: pack magic or version")
    need(data[16:48] == pack_id + store_id and data[48:64] == check(data[:48]), f"{path}: pack header")
    trailer = data[-80:]
    magic, footer_at, footer_size, count, trailer_id, footer_check = struct.unpack("<8sQQQ16s16s", trailer[:64])
    need(magic == b"CASPEND1" and check(trailer[:64]) == trailer[64:] and trailer_id == pack_id, f"{path}: trailer")
    need(footer_at + footer_size + 80 == len(data), f"{path}: footer does not end at the trailer")
    footer = data[footer_at : footer_at + footer_size]
    need(check(footer) == footer_check, f"{path}: footer check")
    records, at = [], 64
    while at < footer_at:
        record = read_record(data[:footer_at], at, is_aligned=True)
        at = record.end + -record.end % 64
        need(at <= footer_at and not any(data[record.end : at]), f"{path}: padding")
        records.append(record)
    rows = [_row(record) for record in records]
    written = [row + [0, 0] * (len(row) == 9) for row in unpack(footer)]  # earlier writers left depth and cost out
    need(written == rows and count == len(rows), f"{path}: footer says something else than the records")
    return records, footer_check


def _row(record: Record) -> list[Any]:
    sizes = [record.offset, record.header_size, len(record.payload), record.plain_size]
    coding = [record.kind, record.codec, record.version, b"".join(record.bases), record.depth, record.cost]
    return [record.object_id, *sizes, *coding]


@dataclass
class Entry:
    seq: int
    previous: bytes
    what: list[Any]
    records: list[Record]
    digest: bytes


def read_entry(path: Path, store_id: bytes | None) -> tuple[Entry, bytes]:
    """One entry, and the store id in it."""
    seq = int(path.name)
    need(len(path.name) == 20 and path.parent.name == f"{seq // 1000:014d}", f"{path}: name")
    return parse_entry(path.read_bytes(), seq, str(path), store_id)


def parse_entry(data: bytes, seq: int, path: str, store_id: bytes | None) -> tuple[Entry, bytes]:
    """An entry's bytes, or its image's."""
    need(96 <= len(data) <= 4_194_304 and data[:8] == b"CASENTR1", f"{path}: not an entry")
    need(blake3(data[:-32]).digest() == data[-32:], f"{path}: digest")
    found_seq, body_size, inline_size = struct.unpack_from("<QQQ", data, 8)
    need(found_seq == seq and check(data[:48]) == data[48:64], f"{path}: header")
    need(64 + body_size + inline_size + 32 == len(data), f"{path}: sizes")
    need(store_id in (None, data[32:48]), f"{path}: another store's")
    write_id, previous, _, _, _, what = unpack(data[64 : 64 + body_size])
    need(len(write_id) == 16 and len(previous) == 32, f"{path}: envelope")
    records, at = [], 64 + body_size
    while at < len(data) - 32:
        records.append(read_record(data[:-32], at, is_aligned=False))
        at = records[-1].end
    return Entry(seq, previous, what, records, data[-32:]), data[32:48]


# --- objects, structure, scalars (§8 to §10) ---


@dataclass(frozen=True)
class Leaf:
    """One leaf: what it is, and its elements' bytes in C order. Leaves with equal `block` share memory."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    flags: int
    block: int
    offset: int
    data: bytes = field(repr=False)


@dataclass
class Component:
    step: int
    necessity: int
    manifest: bytes
    leaves: dict[str, Leaf]
    scalars: dict[str, Any]
    containers: dict[str, str]  # path to kind, roots and empty ones included
    opaque: list[str]
    rows: dict[str, bytes] = field(default_factory=dict)  # of a ring: column to the rows it holds, oldest first


@dataclass
class Snapshot:
    seq: int
    id: bytes
    run: str
    branch: str
    step: int
    parent: bytes
    metrics: dict[str, Any]
    labels: dict[str, str]
    components: dict[str, Component] = field(default_factory=dict)
    config: Any = None
    environment: dict[str, str] = field(default_factory=dict)
    schema_version: int | None = None
    is_retired: bool = False
    noted: tuple[dict[str, Any], dict[str, str]] = field(default_factory=lambda: ({}, {}))  # by annotations
    withdrawn: set[str] = field(default_factory=set)


@dataclass
class Store:
    document: dict[str, Any]
    snapshots: list[Snapshot]  # in the order of commitment
    tags: dict[tuple[str, str], bytes]  # (run, name) to snapshot id
    heads: dict[tuple[str, str], bytes]  # (run, branch) to snapshot id
    records: list[Record]
    entry_count: int
    generations: dict[str, int] = field(default_factory=dict)  # run to the newest

    @property
    def codecs(self) -> set[int]:
        """Those that occur."""
        return {record.codec for record in self.records}


def read_store(root: str | Path) -> Store:
    """Read and verify everything in a store; the index is not looked at."""
    root = Path(root)
    entries, document = _read_timeline(root)
    store_id = bytes.fromhex(document["store_id"])
    inline = [record for entry in entries for record in entry.records]
    packed = [
        record for path in sorted(root.glob("packs/??/*")) for record in _read_named_pack(path, store_id, entries)
    ]
    is_collected = any(entry.what[0] in ("condemn", "seal") for entry in entries)
    objects = decode_all([*inline, *packed], {record.object_id for record in packed}, is_collected=is_collected)
    store = Store(document, [], {}, {}, [*inline, *packed], len(entries))
    by_id: dict[bytes, Snapshot] = {}
    for entry in entries:
        _apply(entry, store, by_id, objects)
    for snapshot in store.snapshots:
        if not (snapshot.is_retired and is_collected and snapshot.id not in store.tags.values()):
            _fill(snapshot, objects)
    return store


def _read_timeline(root: Path) -> tuple[list[Entry], dict[str, Any]]:
    paths = {int(path.name): path for path in root.glob("timeline/*/" + 20 * "[0-9]")}
    first, store_id = read_entry(paths[0], None)
    sealed = read_epochs(root, store_id)
    need(first.seq == 0 and first.what[0] == "create", "entry 0 creates the store")
    document = json.loads(first.what[1])
    noted = json.loads((root / "casckpt.json").read_bytes())
    need({**noted, "features": {}} == {**document, "features": {}}, "casckpt.json and entry 0 differ")
    need(document["casckpt_format"] == 1 and bytes.fromhex(document["store_id"]) == store_id, "document")
    flags = {flag for each in noted.get("features", {}).values() for flag in each}
    need(flags <= {"collected", "generations", "sealed", "superseded"}, "an unknown feature")
    entries = [first]
    for seq in sorted((paths.keys() | sealed.images.keys()) - {0}):
        if seq in sealed.images:
            entry = parse_entry(sealed.images[seq].data, seq, f"image of entry {seq}", store_id)[0]
            entry.digest = sealed.images[seq].digest
        else:
            entry = read_entry(paths[seq], store_id)[0]
        need(seq == entries[-1].seq + 1 and entry.previous == entries[-1].digest, f"entry {seq}: link")
        entries.append(entry)
    sealed.compare([ref for entry in entries if entry.what[0] == "seal" for ref in entry.what[1]])
    need(first.previous == bytes(32), "entry 0 links to something")
    return entries, document


def _read_named_pack(path: Path, store_id: bytes, entries: list[Entry]) -> list[Record]:
    records, footer_check = read_pack(path, store_id)
    lists = {"commit": 6, "supersede": 6, "condemn": 2, "seal": 2}
    refs = [ref for entry in entries if entry.what[0] in lists for ref in entry.what[lists[entry.what[0]]]]
    if any(entry.what[0] == "condemn" and bytes.fromhex(path.name) in entry.what[1] for entry in entries):
        return []
    wanted = [bytes.fromhex(path.name), path.stat().st_size, footer_check]
    named = [ref for ref in refs if ref[0] == wanted[0]]
    need(all(ref == wanted for ref in named), f"{path}: an entry says something else of it")
    return records if named else []


def _apply(entry: Entry, store: Store, by_id: dict[bytes, Snapshot], objects: dict[bytes, bytes]) -> None:
    kind, *fields = entry.what
    if kind in ("commit", "supersede"):
        run, branch, step, snapshot_id, before, _, metrics, labels, _ = fields
        need(kind == "supersede" or store.heads.get((run, branch), b"") == before, f"entry {entry.seq}: expected head")
        inline = [record for record in entry.records if record.object_id == snapshot_id]
        need(len(inline) == 1 and (inline[0].kind, inline[0].codec) == (5, 0), f"entry {entry.seq}: snapshot record")
        found = _read_snapshot(objects, snapshot_id, entry.seq, dict(metrics), dict(labels))
        need((found.run, found.branch, found.step) == (run, branch, step), f"entry {entry.seq}: snapshot")
        if kind == "supersede":
            _replace(store, by_id, before, found)
        else:
            store.heads[run, branch] = snapshot_id
        store.snapshots.append(found)
        by_id[snapshot_id] = found
    elif kind == "annotate":
        noted = by_id[fields[0]]
        for of_commit, later, new in zip((noted.metrics, noted.labels), noted.noted, fields[1:], strict=True):
            of_commit.update(new)
            later.update(new)
    elif kind == "tag":
        run, name, snapshot_id = fields
        store.tags.pop((run, name), None)
        if snapshot_id:
            store.tags[run, name] = by_id[snapshot_id].id
    elif kind in ("retire", "prune"):
        for snapshot_id in [fields[0]] if kind == "retire" else fields[0]:
            by_id[snapshot_id].is_retired = True
    elif kind == "thin":
        by_id[fields[0]].withdrawn.update(fields[1])
    elif kind == "generation":
        run, number, snapshot_id, _ = fields
        need(number > store.generations.get(run, 0), f"entry {entry.seq}: generation {number}")
        need(not snapshot_id or snapshot_id in by_id, f"entry {entry.seq}: continues an unknown snapshot")
        store.generations[run] = number
    elif kind not in ("condemn", "seal"):  # seen to where files are read
        need(kind == "create" and entry.seq == 0, f"entry {entry.seq}: kind {kind!r}")


def _replace(store: Store, by_id: dict[bytes, Snapshot], replaced: bytes, found: Snapshot) -> None:
    """`found` stands in place of the snapshot `replaced`, whose id means it from now on."""
    old = by_id[replaced]
    need((old.run, old.branch, old.step) == (found.run, found.branch, found.step), "supersedes another step")
    old.is_retired = True
    found.noted = old.noted
    found.metrics.update(old.noted[0])
    found.labels.update(old.noted[1])
    head = by_id[store.heads[found.run, found.branch]]
    if head is old or head.step <= found.step:
        store.heads[found.run, found.branch] = found.id
    store.tags.update({key: found.id for key, value in store.tags.items() if value == old.id})
    by_id[replaced] = found


def _read_snapshot(
    objects: dict[bytes, bytes], snapshot_id: bytes, seq: int, metrics: dict[str, Any], labels: dict[str, str]
) -> Snapshot:
    version, run, branch, step, parent, context, _ = unpack(objects[snapshot_id])
    need(version == 1 and len(parent) in (0, 32) and len(context) in (0, 32), "snapshot")
    return Snapshot(seq, snapshot_id, run, branch, step, parent, metrics, labels)


def _fill(found: Snapshot, objects: dict[bytes, bytes]) -> None:
    """Context and components of a snapshot that is owed."""
    *_, context, components = unpack(objects[found.id])
    if context:
        version, found.schema_version, config, found.environment = unpack(objects[context])
        need(version == 1, "context")
        found.config = json.loads(config) if config else None
    for name, (manifest, captured_at, logical_bytes, necessity) in components.items():
        if name in found.withdrawn:
            continue
        component, size = _read_component(objects, manifest, name, captured_at, necessity)
        need(size == logical_bytes, f"{name}: logical bytes")
        found.components[name] = component


def _read_component(
    objects: dict[bytes, bytes], manifest: bytes, name: str, step: int, necessity: int
) -> tuple[Component, int]:
    version, structure_id, chunk_size, scalars_size, plain_size, chunk_count, ids, *ring = unpack(objects[manifest])
    need(
        version == (2 if ring else 1) and 4096 <= chunk_size <= 16_777_216 and necessity in (0, 1, 2),
        f"{name}: manifest",
    )
    version, tree, leaves, blocks = unpack(objects[structure_id])
    need(version == 1, f"{name}: structure")
    if chunk_count > 1024:
        nodes = _cut(ids, 32)
        need(all(len(objects[node]) == 1024 * 32 for node in nodes[:-1]), f"{name}: node size")
        ids = b"".join(objects[node] for node in nodes)
    chunks = [objects[chunk] for chunk in _cut(ids, 32)]
    need(len(chunks) == chunk_count and sum(map(len, chunks)) == plain_size, f"{name}: chunks")
    scalar_block, memory = _lay_out(chunks, scalars_size, blocks, chunk_size)
    walk = _Walk(scalar_block, leaves, memory)
    walk.node(name, tree)
    need(walk.next_scalar == len(walk.values), f"{name}: scalars that no node has")
    component = Component(step, necessity, manifest, walk.leaves, walk.scalars, walk.containers, walk.opaque)
    if ring:
        plain_size += _read_rows(objects, component, name, *ring)
    return component, plain_size


def _read_rows(objects: dict[bytes, bytes], ring: Component, name: str, first_row: int, parts: list[list[Any]]) -> int:
    """The rows that a ring holds, put together from its segments; their size in bytes."""
    capacity, head, count, total = (ring.scalars[f"{name}/{key}"] for key in ("capacity", "head", "count", "total"))
    need(0 <= head < capacity and 0 <= count <= min(total, capacity), f"{name}: position")
    columns = {path: leaf for path, leaf in ring.leaves.items() if path.startswith(f"{name}/columns/")}
    pieces: dict[str, list[bytes]] = {path: [] for path in columns}
    row = first_row
    for manifest, row_count in _segments(objects, parts, name, 9):
        segment, _ = _read_component(objects, manifest, f"{name}/columns", 0, 0)
        need(segment.leaves.keys() == columns.keys(), f"{name}: columns of a segment")
        for path, leaf in segment.leaves.items():
            whole = columns[path]
            need(leaf.shape == (row_count, *whole.shape[1:]) and whole.shape[0] == 0, f"{path}: shape")
            need((leaf.kind, leaf.dtype, leaf.strides) == (whole.kind, whole.dtype, None), f"{path}: another column")
            pieces[path].append(leaf.data)
        row += row_count
    need(row == total and first_row <= total - count, f"{name}: rows {first_row} to {row}, its position says {total}")
    size = 0
    for path, leaf in columns.items():
        row_size = prod(leaf.shape[1:]) * _itemsize(leaf.kind, leaf.dtype)
        data = b"".join(pieces[path])
        ring.rows[path.removeprefix(f"{name}/columns/")] = data[len(data) - count * row_size :]
        size += count * row_size
    return size


def _segments(
    objects: dict[bytes, bytes], parts: list[list[Any]], name: str, below: int
) -> Iterator[tuple[bytes, int]]:
    for manifest, row_count, _, level in parts:
        need(row_count > 0 and 0 <= level < below, f"{name}: a part of {row_count} rows, level {level}")
        if level == 0:
            yield manifest, row_count
            continue
        version, *_, chunk_count, ids, first_row, members = unpack(objects[manifest])
        need((version, chunk_count, ids, first_row) == (2, 0, b"", 0), f"{name}: group")
        need(sum(member[1] for member in members) == row_count, f"{name}: rows of a group")
        yield from _segments(objects, members, name, level)


def _cut(data: bytes, size: int) -> list[bytes]:
    need(len(data) % size == 0, "ids")
    return [data[at : at + size] for at in range(0, len(data), size)]


def _lay_out(
    chunks: list[bytes], scalars_size: int, blocks: list[list[int]], chunk_size: int
) -> tuple[bytes, dict[int, bytes]]:
    """The scalar block and each block, cut out of the chunks by §11."""
    small: dict[int, list[int]] = {}
    large = []
    for index, (size, itemsize) in enumerate(blocks):
        if size < 65_536:
            small.setdefault(itemsize, []).append(index)
        else:
            large.append([index])
    memory: dict[int, bytes] = {}
    at = 0
    for section in [[-1], *(small[itemsize] for itemsize in sorted(small)), *large]:
        sizes = [scalars_size if index < 0 else blocks[index][0] for index in section]
        count = -(-sum(sizes) // chunk_size)
        need(all(len(chunk) == chunk_size for chunk in chunks[at : at + count - 1]), "chunk size")
        data = b"".join(chunks[at : at + count])
        at += count
        need(len(data) == sum(sizes), "section size")
        position = 0
        for index, size in zip(section, sizes, strict=True):
            memory[index] = data[position : position + size]
            position += size
    need(at == len(chunks), "chunks that belong to no section")
    return memory.pop(-1), memory


class _Walk:
    """A tree turned into paths: leaves, scalars, containers."""

    def __init__(self, scalar_block: bytes, described: list[list[Any]], memory: dict[int, bytes]) -> None:
        self.values = raise_value(unpack(scalar_block))
        self.described, self.memory = described, memory
        self.next_scalar = 0
        self.leaves: dict[str, Leaf] = {}
        self.scalars: dict[str, Any] = {}
        self.containers: dict[str, str] = {}
        self.opaque: list[str] = []

    def node(self, path: str, node: Any) -> None:
        if node is None:
            self.scalars[path] = self.values[self.next_scalar]
            self.next_scalar += 1
        elif isinstance(node, int):
            self.leaves[path] = self.leaf(node)
        elif node[0] == 4:
            self.opaque.append(path)
            self.leaves[path] = self.leaf(node[2])
        elif node[0] == 3:
            self.containers[path] = f"rng:{node[1]}"
            self.node(path, node[2])
        else:
            kind, keys, children = self.container(node)
            self.containers.setdefault(path, kind)  # a generator's state has the generator's path
            for key, child in zip(keys, children, strict=True):
                text = key if isinstance(key, str) else repr(key)
                self.node(f"{path}/{text.replace('~', '~0').replace('/', '~1')}", child)

    def container(self, node: list[Any]) -> tuple[str, list[Any], list[Any]]:
        if node[0] == 0:
            _, kind, keys, children = node
            return kind, raise_value(keys), children
        if node[0] == 1:
            _, kind, children, bound = node
            return kind if bound is None else f"{kind}:{bound}", list(range(len(children))), children
        need(node[0] == 2, f"unknown node {node[0]}")
        _, name, fields, children = node
        return f"namedtuple:{name}", fields, children

    def leaf(self, index: int) -> Leaf:
        kind, block, offset, dtype, shape, strides, flags = self.described[index]
        itemsize = _itemsize(kind, dtype)
        data = b""
        if block >= 0:
            data = b"".join(self.elements(self.memory[block], offset, shape, strides, itemsize, kind))
        need(len(data) == prod(shape) * itemsize, "leaf size")
        return Leaf(kind, dtype, tuple(shape), None if strides is None else tuple(strides), flags, block, offset, data)

    def elements(
        self, memory: bytes, offset: int, shape: list[int], strides: list[int] | None, itemsize: int, kind: str
    ) -> Iterator[bytes]:
        if strides is None:
            need(offset + prod(shape) * itemsize <= len(memory), "leaf outside its block")
            yield memory[offset : offset + prod(shape) * itemsize]
            return
        unit = itemsize if kind == "torch" else 1
        for index in product(*map(range, shape)):
            at = offset + unit * sum(i * stride for i, stride in zip(index, strides, strict=True))
            need(0 <= at <= len(memory) - itemsize, "element outside its block")
            yield memory[at : at + itemsize]


def _itemsize(kind: str, dtype: str) -> int:
    if kind == "torch":
        return TORCH_SIZES[dtype]
    if kind == "bytes":
        need(dtype == "", "bytes with a dtype")
        return 1
    if dtype.startswith("{"):
        return int(json.loads(dtype)["itemsize"])
    digits = int(dtype[2:].split("[")[0])
    return digits * 4 if dtype[1] == "U" else digits


def raise_value(wire: Any) -> Any:
    """A scalar from its wire form (§10). Foreign values become ("foreign", kind, payload)."""
    if isinstance(wire, list):
        return [raise_value(item) for item in wire]
    if not isinstance(wire, Extension):
        return wire
    code, data = wire
    if code == 1:
        value = int.from_bytes(data, "big", signed=True)
        need(len(data) == value.bit_length() // 8 + 1 and not -(1 << 63) <= value < 1 << 64, "big integer")
        return value
    if code == 2:
        return complex(*struct.unpack(">dd", data))
    if code == 3:
        return data.decode("utf-8", "surrogatepass")
    items = unpack(data)
    if code == 4:
        return tuple(raise_value(items))
    if code == 5:
        return set(raise_value(items))
    if code == 6:
        return frozenset(raise_value(items))
    if code == 7:
        return deque(raise_value(items[1]), items[0])
    need(code == 8, f"unknown extension {code}")
    return ("foreign", items[0], raise_value(items[1]))


def main() -> None:
    for snapshot in read_store(sys.argv[1]).snapshots:
        print(f"{snapshot.seq:>8} {snapshot.run}/{snapshot.branch}@{snapshot.step} {snapshot.id.hex()[:16]}")
        for name, component in snapshot.components.items():
            whole = blake3()
            for path, leaf in component.leaves.items():
                whole.update(f"{path} {leaf.kind} {leaf.dtype} {leaf.shape}\n".encode() + leaf.data)
            print(f"{'':>8}   {name:<20} {len(component.leaves):>6} leaves {whole.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
