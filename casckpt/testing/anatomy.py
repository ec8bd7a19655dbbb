"""What lies where in the files of an intact store, and who needs it: read without index and without the store's code.

`dissect` walks timeline and packs through the pure `format` layer. It gives every byte range a name and, where the
range is part of an object's record, that object; and it follows each committed snapshot to the objects it reaches. From
this a test computes what damage to a range *must* and what it *may* cost, and which counts an index must hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from casckpt.codec import decode_into
from casckpt.format import entry as entry_format
from casckpt.format import epoch as epoch_format
from casckpt.format import pack as pack_format
from casckpt.format import record as record_format
from casckpt.format.entry import Commit, Condemn, Entry, Prune, Retire, Seal, Supersede, Thin, decode_entry
from casckpt.format.record import RecordHeader, decode_header
from casckpt.format.snapshot import Snapshot, decode_manifest, decode_snapshot, parts_of, split_ids
from casckpt.ids import ObjectId

CONFIG = "config"  # what `verify` calls a snapshot's context


class Region(NamedTuple):
    """A named byte range of a file.

    Attributes:
        path: relative to the store.
        name: what it is: "entry 3 body", "pack 0a1b… record 2 payload", …
        offset: first byte.
        size: bytes.
        object_id: the object whose record it belongs to, or None.
        is_content: whether a change to it changes what some reader of the file needs (paddings are not content).
    """

    path: str
    name: str
    offset: int
    size: int
    object_id: ObjectId | None = None
    is_content: bool = True


@dataclass
class Anatomy:
    """The result of `dissect`.

    Attributes:
        regions: all files but the index, without gaps.
        records: for each object, the paths of files that hold a record of it.
        bases: for each object, the bases of each of its records.
        plain: plain bytes of every object.
        commits: snapshot id to (entry number, snapshot), in timeline order.
        retired: snapshot ids.
        thinned: snapshot id to names of withdrawn components.
        entry_paths: entry number to path of its file or of its epoch.
        pack_ids: packs that an entry names and none condemns; others are files without meaning.
        is_collected: packs were condemned or entries sealed; records that nobody needs may have lost their bases.
    """

    regions: list[Region] = field(default_factory=list)
    records: dict[ObjectId, list[str]] = field(default_factory=dict)
    bases: dict[ObjectId, list[tuple[ObjectId, ...]]] = field(default_factory=dict)
    plain: dict[ObjectId, bytes] = field(default_factory=dict)
    commits: dict[ObjectId, tuple[int, Snapshot]] = field(default_factory=dict)
    retired: set[ObjectId] = field(default_factory=set)
    thinned: dict[ObjectId, set[str]] = field(default_factory=dict)
    entry_paths: dict[int, str] = field(default_factory=dict)
    pack_ids: set[bytes] = field(default_factory=set)
    is_collected: bool = False

    def children(self, snapshot: Snapshot) -> dict[ObjectId, set[ObjectId]]:
        """Every object that a snapshot reaches, with its own children; the context and manifests are at the top."""
        found: dict[ObjectId, set[ObjectId]] = {ObjectId(snapshot.context): set()} if snapshot.context else {}
        for ref in snapshot.components.values():
            found.update(self._below_manifest(ObjectId(ref.manifest)))
        return found

    def reach(self, snapshot: Snapshot) -> dict[str, set[ObjectId]]:
        """Objects that each component of a snapshot needs, and under CONFIG its context."""
        found = {name: set(self._below_manifest(ObjectId(ref.manifest))) for name, ref in snapshot.components.items()}
        return {**found, CONFIG: {ObjectId(snapshot.context)}} if snapshot.context else found

    def damage(self, lost: Iterable[ObjectId], *, as_bases: bool = True) -> dict[ObjectId, set[str]]:
        """Snapshots, and components of them, that need one of the lost objects; a lost snapshot loses all.

        A lost context alone, named CONFIG, does not keep a state from being restored. Without `as_bases`, only those
        that consist of a lost object: what is decoded from one of which some bits are wrong may be right all the same.
        """
        gone = self.undecodable(lost) if as_bases else set(lost)
        damaged: dict[ObjectId, set[str]] = {}
        for snapshot_id, (_, snapshot) in self.commits.items():
            reached = self.reach(snapshot)
            components = {name for name, needed in reached.items() if needed & gone}
            if snapshot_id in gone:
                components = set(reached)
            if components:
                damaged[snapshot_id] = components
        return damaged

    def counts(self) -> dict[ObjectId, int]:
        """For each object reachable from a live snapshot: how many distinct live owners it has."""
        owners: dict[ObjectId, set[ObjectId]] = {}
        for snapshot_id, (_, snapshot) in self.commits.items():
            if snapshot_id in self.retired:
                continue
            gone = self.thinned.get(snapshot_id, set())
            snapshot = msgspec.structs.replace(
                snapshot, components={n: r for n, r in snapshot.components.items() if n not in gone}
            )
            tops = [ObjectId(ref.manifest) for ref in snapshot.components.values()]
            tops += [ObjectId(snapshot.context)] if snapshot.context else []
            for top in tops:
                owners.setdefault(top, set()).add(snapshot_id)
            for owner, below in self.children(snapshot).items():
                for child in below:
                    owners.setdefault(child, set()).add(owner)
        waiting = [object_id for object_id in owners if object_id in self.bases]
        while waiting:
            owner = waiting.pop()
            for base in set().union(*self.bases[owner]):
                if base not in owners:
                    waiting.append(base)
                owners.setdefault(base, set()).add(owner)
        return {object_id: len(found) for object_id, found in owners.items()}

    def undecodable(self, lost: Iterable[ObjectId] = ()) -> set[ObjectId]:
        """Objects without a record whose bases can be decoded in turn: while I8 holds, `lost` and what builds on it."""
        decodable: set[ObjectId] = set()
        gone = set(lost)
        while True:
            more = {
                object_id
                for object_id, forms in self.bases.items()
                if object_id not in decodable | gone and any(map(decodable.issuperset, forms))
            }
            if not more:
                return set(self.bases) - decodable
            decodable |= more

    def _below_manifest(self, manifest_id: ObjectId) -> dict[ObjectId, set[ObjectId]]:
        what = f"manifest {manifest_id.hex()[:12]}"
        manifest = decode_manifest(self.plain[manifest_id], what)
        ids = split_ids(manifest.ids, what)
        found: dict[ObjectId, set[ObjectId]] = {manifest_id: {*ids, ObjectId(manifest.structure)}}
        for child in list(found[manifest_id]):
            below = split_ids(self.plain[child], what) if manifest.has_nodes and child in ids else []
            found[child] = set(below)
            found.update({grandchild: set() for grandchild in below})
        for part in parts_of(manifest):
            found[manifest_id].add(ObjectId(part.manifest))
            found.update(self._below_manifest(ObjectId(part.manifest)))
        return found


def dissect(root: str) -> Anatomy:
    """Read the store at `root`, which must be intact: damage raises, as does a file that is no part of a store."""
    anatomy = Anatomy()
    payloads: list[tuple[RecordHeader, bytes]] = []
    tops = ("timeline/epochs", "timeline")
    for path, data in sorted(_files(root), key=lambda file: (*(not file[0].startswith(top) for top in tops), file[0])):
        top = path.split("/")[0]
        if path.startswith("timeline/epochs"):
            payloads += _dissect_epoch(anatomy, path, data)
        elif top == "timeline" and int(os.path.basename(path)) not in anatomy.entry_paths:
            payloads += _dissect_entry(anatomy, path, data, int(os.path.basename(path)))
        elif top == "packs" and bytes.fromhex(os.path.basename(path)) in anatomy.pack_ids:
            payloads += _dissect_pack(anatomy, path, data)
        else:
            anatomy.regions.append(Region(path, path, 0, len(data)))
    _decode_all(anatomy, payloads)
    return anatomy


def _files(root: str) -> Iterator[tuple[str, bytes]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            if not path.startswith("index"):  # also what was set aside because it was in the index's way
                with open(os.path.join(root, path), "rb") as file:
                    yield path, file.read()


def _dissect_epoch(anatomy: Anatomy, path: str, data: bytes) -> list[tuple[RecordHeader, bytes]]:
    _, first, count, _, _ = entry_format.ENTRY_HEADER.unpack_from(data)
    table_at, name = entry_format.HEADER_SIZE, f"epoch {int(os.path.basename(path))}"
    table = data[table_at : table_at + epoch_format.table_size(count)]
    fields = [("magic", 8), ("first number", 8), ("count", 8), ("size", 8), ("store id", 16), ("check", 16)]
    _add_fields(anatomy, path, name, 0, [*fields, ("table", len(table))])
    found = []
    for seq, row in enumerate(epoch_format.decode_table(table, count, len(data), name), first):
        image = data[row.offset : row.offset + row.size]
        found += _dissect_entry(anatomy, path, image, seq, row.offset)
    _add_fields(anatomy, path, name, len(data) - entry_format.TRAILER_SIZE, [("digest", 32)])
    return found


def _dissect_entry(anatomy: Anatomy, path: str, data: bytes, seq: int, at: int = 0) -> list[tuple[RecordHeader, bytes]]:
    entry = decode_entry(data, seq, path)
    anatomy.entry_paths[seq] = path
    body = entry.envelope.body
    lost = ObjectId(body.snapshot) if isinstance(body, Commit | Supersede) else None
    name = f"entry {seq}"
    inline_start = min((record.offset for record in entry.records), default=len(data) - entry_format.TRAILER_SIZE)
    fields = [("magic", 8), ("number", 8), ("body size", 8), ("inline size", 8), ("store id", 16), ("check", 16)]
    fields.append(("body", inline_start - entry_format.HEADER_SIZE))
    _add_fields(anatomy, path, name, at, fields, lost)
    for i, record in enumerate(entry.records):
        _add_record(anatomy, path, f"{name} record {i}", at + record.offset, record.header)
    _add_fields(anatomy, path, name, at + len(data) - entry_format.TRAILER_SIZE, [("digest", 32)], lost)
    if isinstance(body, Commit | Supersede):
        plain = next(r.payload for r in entry.records if r.header.object_id == body.snapshot)
        anatomy.commits[ObjectId(body.snapshot)] = (seq, decode_snapshot(plain, name))
    _take_effect(anatomy, entry)
    return [(record.header, record.payload) for record in entry.records]


def _take_effect(anatomy: Anatomy, entry: Entry) -> None:
    """What an entry changes of those before it."""
    body = entry.envelope.body
    if isinstance(body, Commit | Supersede):
        anatomy.pack_ids.update(pack.pack_id for pack in body.packs)
    if isinstance(body, Supersede):
        anatomy.retired.add(ObjectId(body.replaced))
    elif isinstance(body, Retire):
        anatomy.retired.add(ObjectId(body.snapshot))
    elif isinstance(body, Prune):
        anatomy.retired.update(map(ObjectId, body.snapshots))
    elif isinstance(body, Thin):
        anatomy.thinned.setdefault(ObjectId(body.snapshot), set()).update(body.components)
    elif isinstance(body, Condemn):
        anatomy.pack_ids.update(pack.pack_id for pack in body.replacements)
        anatomy.pack_ids.difference_update(body.packs)
        anatomy.is_collected = True
    elif isinstance(body, Seal):
        anatomy.pack_ids.update(pack.pack_id for pack in body.replacements)
        anatomy.is_collected = True


def _dissect_pack(anatomy: Anatomy, path: str, data: bytes) -> list[tuple[RecordHeader, bytes]]:
    name = f"pack {os.path.basename(path)[:8]}…"
    fields = [("magic", 8), ("version", 4), ("zeros", 4), ("pack id", 16), ("store id", 16), ("check", 16)]
    _add_fields(anatomy, path, name, 0, fields)
    trailer_at = len(data) - pack_format.TRAILER_SIZE
    footer_at, footer_size, check, _ = pack_format.decode_trailer(data[trailer_at:], len(data), name)
    found = []
    for i, row in enumerate(pack_format.decode_footer(data[footer_at:trailer_at], check, footer_at, name)):
        header = decode_header(data[row.offset : row.offset + row.header_size], name)
        end = _add_record(anatomy, path, f"{name} record {i}", row.offset, header)
        pad = record_format.padding(end)
        if pad:
            anatomy.regions.append(Region(path, f"{name} record {i} padding", end, pad, is_content=False))
        found.append((header, data[row.offset + row.header_size : end]))
    _add_fields(anatomy, path, name, footer_at, [("footer", footer_size)])
    fields = [("end magic", 8), ("footer offset", 8), ("footer size", 8), ("record count", 8), ("end pack id", 16)]
    _add_fields(anatomy, path, name, trailer_at, [*fields, ("footer check", 16), ("end check", 16)])
    return found


def _add_record(anatomy: Anatomy, path: str, name: str, offset: int, header: RecordHeader) -> int:
    """Name a record's parts; returns where it ends."""
    object_id = header.object_id
    anatomy.records.setdefault(object_id, []).append(path)
    anatomy.bases.setdefault(object_id, []).append(header.bases)
    fields = [("magic", 4), ("header size", 4), ("codec", 1), ("codec version", 1), ("base count", 1), ("kind", 1)]
    fields += [("parameters size", 2), ("depth", 1), ("cost", 1), ("plain size", 8), ("stored size", 8)]
    fields += [("object id", 32)]
    fields += [("payload check", 16), ("header check", 16), ("bases", 32 * len(header.bases))]
    fields += [("parameters", len(header.params))]
    used = sum(size for _, size in fields)
    fields += [("header padding", header.header_size - used), ("payload", header.stored_size)]
    _add_fields(anatomy, path, name, offset, fields, object_id)
    return offset + header.header_size + header.stored_size


def _add_fields(
    anatomy: Anatomy, path: str, name: str, offset: int, fields: list[tuple[str, int]], lost: ObjectId | None = None
) -> None:
    for part, size in fields:
        if size:
            anatomy.regions.append(Region(path, f"{name} {part}", offset, size, lost))
        offset += size


def _decode_all(anatomy: Anatomy, payloads: list[tuple[RecordHeader, bytes]]) -> None:
    waiting = payloads
    while waiting:
        later = []
        for header, payload in waiting:
            if not all(base in anatomy.plain for base in header.bases):
                later.append((header, payload))
                continue
            out = bytearray(header.plain_size)
            bases = [anatomy.plain[base] for base in header.bases]
            decode_into(header.codec, header.codec_version, header.params, payload, bases, memoryview(out))
            anatomy.plain[header.object_id] = bytes(out)
        if len(later) == len(waiting) and anatomy.is_collected:
            break
        if len(later) == len(waiting):
            raise ValueError(f"{len(later)} records have bases that are nowhere")
        waiting = later
