"""A timeline entry turned into index rows.

`apply_entry` is deterministic: the same entries in the same order give the same rows, whether applied one by one as
they are committed or all at once by a rebuild. Counts follow the rule "an edge counts once per live unique owner":
a snapshot is live while it is committed and not retired; an object is live while its count is above zero; only live
owners hold edges, to their children and to the bases of their records. `fill` follows the counts: how many bytes of a
pack are records of live objects.

Condemned packs are gone for every look-up from the moment their entry is applied, whether their files still are there
or not; their rows stay as marks, so that who located a record before still learns which file it was in.

What cannot be read is recorded instead of raised: a pack that is missing or short makes the entry *pending* (its
objects appear when the index is rebuilt after the pack arrived), an unreadable entry is *bad* (noted by the caller), a
manifest or node is *uncounted* as long as it lives. None hides the others.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from casckpt.errors import CasckptError, CorruptionError, StorageError
from casckpt.format.entry import (
    Annotate,
    Commit,
    Condemn,
    Entry,
    Generation,
    PackRef,
    Prune,
    Retire,
    Seal,
    Supersede,
    Tag,
    Thin,
)
from casckpt.format.pack import PackRow
from casckpt.format.record import SNAPSHOT
from casckpt.format.snapshot import EXACT, Snapshot, decode_manifest, decode_snapshot, parts_of, split_ids
from casckpt.ids import ObjectId
from casckpt.index.kv import KvWriter
from casckpt.index.tables import (
    CONDEMNED,
    FLAG_MIXED,
    FLAG_RETIRED,
    FLAG_THINNED,
    INEXACT,
    INLINE,
    PENDING,
    UNCOUNTED,
    UNDECODABLE,
    UNTOLD,
    Applied,
    BranchRow,
    GenerationRow,
    NoteRow,
    Pending,
    Place,
    SnapRow,
    ThinRow,
    add_fill,
    add_place,
    decode_object,
    decode_pack_row,
    decode_snap,
    encode_object,
    encode_pack_row,
    encode_snap,
    epoch_count,
    generation_key,
    get_struct,
    inline_offset,
    key_number,
    line_key,
    name_key,
    next_number,
    number_key,
    place_of,
    put_epoch,
    put_struct,
    run_prefix,
)
from casckpt.objects.epochs import entries_of
from casckpt.storage.fs import is_about_file

ReadObject = Callable[[ObjectId, KvWriter], bytes]


class PackGone(Exception):
    """A pack was condemned, and swept before this index heard of it, or entries were sealed before it applied them:
    what they held, and what manifests in them counted, is not known any more. The index is to be made anew."""


class PackSource(Protocol):
    """Where the rows of packs come from: the commit that wrote them, or the files."""

    def size(self, pack_id: bytes) -> int:
        """Size of the pack's file in bytes; -1 when there is none, UNREADABLE when its rows could not be read."""

    def rows(self, pack_id: bytes) -> Sequence[PackRow]:
        """All rows that can be found; none when the pack is missing or not a pack."""

    def inlined(self, seqs: Iterable[int]) -> set[ObjectId] | None:
        """Ids of the objects inlined in these entries; None when the file of one is gone or unreadable."""


def is_consistent(snapshot: Snapshot) -> bool:
    """All exact components were captured at one step."""
    return len({ref.step for ref in snapshot.components.values() if ref.necessity == EXACT}) <= 1


def snapshot_of(entry: Entry) -> tuple[ObjectId, Snapshot] | None:
    """The snapshot object that a commit or what supersedes one carries, or None for other entries."""
    body = entry.envelope.body
    if not isinstance(body, Commit | Supersede):
        return None
    for record in entry.records:
        if record.header.kind == SNAPSHOT and record.header.object_id == body.snapshot:
            what = f"snapshot {body.snapshot.hex()[:12]} in entry {entry.seq}"
            found = decode_snapshot(record.payload, what)
            if (found.run, found.branch, found.step) != (body.run, body.branch, body.step):
                raise CorruptionError(f"{what}: it is of {found.run}/{found.branch}@{found.step}", seq=entry.seq)
            return record.header.object_id, found
    raise CorruptionError(f"timeline entry {entry.seq}: carries no snapshot {body.snapshot.hex()}", seq=entry.seq)


def mark_applied(txn: KvWriter, seq: int, digest: bytes, gaps: Iterable[int]) -> None:
    put_struct(txn, "meta", b"applied", Applied(seq, digest, sorted(gaps)))


def add_pack(txn: KvWriter, pack_id: bytes, size: int, rows: Sequence[PackRow]) -> None:
    """Make a pack's records findable."""
    number = next_number(txn, b"next_pack")
    txn.put("packs", number_key(number), encode_pack_row(pack_id, size))
    txn.put("pack_ids", pack_id, number_key(number))
    _add_places(
        txn,
        [
            (row.object_id, place_of(row, number, row.offset, tuple(split_ids(row.bases, "a footer row"))))
            for row in rows
        ],
    )


def inlined_ids(entry: Entry) -> set[ObjectId]:
    """Ids of the objects that an entry carries, its snapshot aside."""
    return {ObjectId(record.header.object_id) for record in entry.records if record.header.kind != SNAPSHOT}


def add_inlined(txn: KvWriter, entry: Entry) -> None:
    """Make the records that an entry carries findable, but for its snapshot's."""
    inline = [
        (
            record.header.object_id,
            place_of(record.header, INLINE, inline_offset(entry.seq, record.offset), record.header.bases),
        )
        for record in entry.records
        if record.header.kind != SNAPSHOT
    ]
    _add_places(txn, inline)


def apply_entry(txn: KvWriter, entry: Entry, packs: PackSource, read_object: ReadObject) -> None:
    """Add what `entry` says.

    Args:
        txn: an open write transaction.
        entry: decoded and checked.
        packs: sizes and rows of the packs that the entry names.
        read_object: plain bytes of an object that is already in the rows; called for manifests seen the first time.

    Raises:
        PackGone: nothing may be kept of this transaction.
    """
    body = entry.envelope.body
    if isinstance(body, Commit | Supersede):
        _apply_commit(txn, entry, body, packs, read_object)
    elif isinstance(body, Annotate):
        _add_note(txn, _successor(txn, body.snapshot), NoteRow(body.metrics, body.labels))
    elif isinstance(body, Tag):
        key = name_key(body.run, body.name)
        if body.snapshot:
            txn.put("tags", key, _successor(txn, body.snapshot))
        else:
            txn.delete("tags", key)
    elif isinstance(body, Retire):
        _apply_retire(txn, body.snapshot, read_object)
    elif isinstance(body, Prune):
        for snapshot_id in body.snapshots:
            _apply_retire(txn, snapshot_id, read_object)
    elif isinstance(body, Thin):
        _apply_thin(txn, body, read_object)
    elif isinstance(body, Condemn):
        _apply_condemn(txn, entry.seq, body, packs)
    elif isinstance(body, Seal):
        _apply_seal(txn, entry.seq, body, packs)
    elif isinstance(body, Generation):
        put_struct(txn, "meta", generation_key(body.run, body.number), GenerationRow(body.number, entry.seq))


def _add_note(txn: KvWriter, snapshot_id: bytes, new: NoteRow) -> None:
    old = get_struct(txn, "notes", snapshot_id, NoteRow) or NoteRow({}, {})
    put_struct(txn, "notes", snapshot_id, NoteRow({**old.metrics, **new.metrics}, {**old.labels, **new.labels}))


def _successor(txn: KvWriter, snapshot_id: bytes) -> bytes:
    """What stands in place of a superseded snapshot: whoever wrote about that one did not know yet."""
    value = txn.get("snaps", snapshot_id)
    row = decode_snap(value) if value is not None else None
    if row is None or not row.is_retired:
        return snapshot_id
    return txn.get("lines", line_key(row.branch_no, row.step)) or snapshot_id


def _apply_commit(
    txn: KvWriter, entry: Entry, body: Commit | Supersede, packs: PackSource, read_object: ReadObject
) -> None:
    _add_named(txn, entry.seq, body.packs, packs)
    add_inlined(txn, entry)
    found = snapshot_of(entry)
    assert found is not None
    snapshot_id, snapshot = found
    branch_no = _move_head(txn, entry.seq, body, snapshot)
    flags = 0 if is_consistent(snapshot) else FLAG_MIXED
    txn.put("snaps", snapshot_id, encode_snap(SnapRow(entry.seq, branch_no, body.step, flags)))
    txn.put("lines", line_key(branch_no, body.step), snapshot_id)
    count_edges(txn, _children_of_snapshot(snapshot), +1, read_object)
    if isinstance(body, Supersede):
        _replace(txn, body, read_object)


def _replace(txn: KvWriter, body: Supersede, read_object: ReadObject) -> None:
    """Retire what is superseded; tags and notes of it go over to what stands in its place."""
    note = get_struct(txn, "notes", body.replaced, NoteRow)
    if note is not None:
        _add_note(txn, body.snapshot, note)
    tags = [key for key, value in txn.scan("tags", *run_prefix(body.run)) if value == body.replaced]
    for key in tags:
        txn.put("tags", key, body.snapshot)
    try:
        _apply_retire(txn, body.replaced, read_object)
    except CasckptError as error:
        _raise_passing(error)
        txn.put("meta", INEXACT, b"")


def _raise_passing(error: CasckptError) -> None:
    """Raise what says nothing of the data and may pass: then nothing of the transaction is kept."""
    if isinstance(error, StorageError) and not is_about_file(error):
        raise error


def _add_named(txn: KvWriter, seq: int, named: Sequence[PackRef], packs: PackSource) -> None:
    """Packs that entry `seq` makes part of the store. One that is noted as missing has no places.

    Raises:
        PackGone: one whose records were found before has been swept.
    """
    for pack in named:
        found_size = packs.size(pack.pack_id)
        if txn.get("pack_ids", pack.pack_id) is None:
            rows = packs.rows(pack.pack_id) if found_size != -1 else ()
            add_pack(txn, pack.pack_id, pack.size, rows)
            found_size = found_size if rows else packs.size(pack.pack_id)  # it could not be read, or was swept just now
        elif found_size == -1 and _may_have_places(txn, pack.pack_id):
            raise PackGone
        if found_size != pack.size:
            put_struct(txn, "meta", PENDING + pack.pack_id, Pending(seq, pack.pack_id, found_size))


def _may_have_places(txn: KvWriter, pack_id: bytes) -> bool:
    """Whether records of a pack that is known were found: not of one that was missing then, or is condemned."""
    row = txn.get("packs", txn.get("pack_ids", pack_id) or b"")
    pending = get_struct(txn, "meta", PENDING + pack_id, Pending)
    is_missing = pending is not None and pending.found_size == -1
    return row is not None and decode_pack_row(row)[1] != CONDEMNED and not is_missing


def _move_head(txn: KvWriter, seq: int, body: Commit | Supersede, snapshot: Snapshot) -> int:
    key = name_key(body.run, body.branch)
    old: BranchRow | None = get_struct(txn, "branches", key, BranchRow)
    if isinstance(body, Supersede) and old is not None and old.head_step > body.step:
        return old.number  # the branch has moved on meanwhile
    number = old.number if old else next_number(txn, b"next_branch")
    fork = old.fork if old else snapshot.parent
    put_struct(txn, "branches", key, BranchRow(number, body.snapshot, body.step, fork, seq))
    return number


def _apply_retire(txn: KvWriter, snapshot_id: bytes, read_object: ReadObject) -> None:
    value = txn.get("snaps", snapshot_id)
    if value is None:
        return
    row = decode_snap(value)
    if row.is_retired:
        return
    txn.put("snaps", snapshot_id, encode_snap(row._replace(flags=row.flags | FLAG_RETIRED)))
    thinned = get_struct(txn, "thinned", snapshot_id, ThinRow) or ThinRow([])
    snapshot = _read_snapshot(txn, snapshot_id, read_object)
    count_edges(txn, _children_of_snapshot(snapshot, thinned.components), -1, read_object)


def _apply_thin(txn: KvWriter, body: Thin, read_object: ReadObject) -> None:
    value = txn.get("snaps", body.snapshot)
    if value is None:
        return
    row = decode_snap(value)
    old: list[str] = (get_struct(txn, "thinned", body.snapshot, ThinRow) or ThinRow([])).components
    new = sorted({*old, *body.components})
    put_struct(txn, "thinned", body.snapshot, ThinRow(new))
    txn.put("snaps", body.snapshot, encode_snap(row._replace(flags=row.flags | FLAG_THINNED)))
    if row.is_retired:
        return
    snapshot = _read_snapshot(txn, body.snapshot, read_object)
    before, after = (_children_of_snapshot(snapshot, names) for names in (old, new))
    gone = {object_id: depth for object_id, depth in before.items() if object_id not in after}
    count_edges(txn, gone, -1, read_object)


def _read_snapshot(txn: KvWriter, snapshot_id: bytes, read_object: ReadObject) -> Snapshot:
    plain = read_object(ObjectId(snapshot_id), txn)
    return decode_snapshot(plain, f"snapshot {snapshot_id.hex()[:12]}")


def _apply_condemn(txn: KvWriter, seq: int, body: Condemn, packs: PackSource) -> None:
    """Replacements first: no object may be without a record in between.

    Raises:
        PackGone: a pack has been swept already.
    """
    _add_named(txn, seq, body.replacements, packs)
    for pack_id in body.packs:
        key = txn.get("pack_ids", pack_id)
        if key is None:  # no entry ever named it: a commit that did not finish
            key = number_key(next_number(txn, b"next_pack"))
            txn.put("pack_ids", pack_id, key)
        else:
            number = key_number(key)
            pending = get_struct(txn, "meta", PENDING + pack_id, Pending)
            if pending is None or pending.found_size != -1:  # one that was never here has no places
                rows = packs.rows(pack_id)
                if not rows and packs.size(pack_id) == -1:
                    raise PackGone
                ids = {row.object_id for row in rows}
                _remove_places(txn, functools.partial(_is_in_pack, number), ids or None)
            txn.delete("meta", PENDING + pack_id)
            txn.delete("fill", key)
        txn.put("packs", key, encode_pack_row(pack_id, CONDEMNED))
    put_struct(txn, "meta", b"condemned", seq)


def _apply_seal(txn: KvWriter, seq: int, body: Seal, packs: PackSource) -> None:
    """Objects inlined in the sealed entries are found in packs from here on, or not at all.

    Raises:
        PackGone: epochs were here before their seal was, so the rows may lack what lies in the packs that it names.
    """
    if txn.get("meta", UNTOLD) is not None:
        raise PackGone
    _add_named(txn, seq, body.replacements, packs)
    start, stop = epoch_count(txn), max(epoch_count(txn), body.epochs[-1].number + 1)
    for ref in body.epochs:
        put_epoch(txn, ref)
    put_struct(txn, "meta", b"sealed", stop)
    seqs = range(entries_of(start).start, entries_of(stop).start)
    _remove_places(txn, functools.partial(_is_inline_below, seqs.stop), packs.inlined(seqs))
    put_struct(txn, "meta", b"condemned", seq)


def _is_in_pack(number: int, place: Place) -> bool:
    return place.pack_no == number


def _is_inline_below(seq: int, place: Place) -> bool:
    return place.is_inline and place.entry_seq < seq


def _remove_places(txn: KvWriter, is_gone: Callable[[Place], bool], object_ids: Collection[bytes] | None) -> None:
    """Take records that are gone out of the look-up tables.

    Where it is not known of which objects they are, as of a pack that became unreadable, every object is looked at.
    """
    ids = list(object_ids or ())
    found = zip(ids, txn.get_many("objects", ids), strict=True) if object_ids is not None else txn.scan("objects")
    changed: dict[bytes, tuple[int, list[Place]]] = {}
    edges: Counter[ObjectId] = Counter()
    for object_id, row in found:
        count, places = decode_object(row) if row else (0, [])
        left = [place for place in places if not is_gone(place)]
        if len(left) < len(places):
            changed[object_id] = count, left
            if count:
                edges.update(_bases_of(places) - _bases_of(left))
    for object_id, (count, left) in changed.items():
        if count or left:
            txn.put("objects", object_id, encode_object(count, left))
        else:
            txn.delete("objects", object_id)
    if edges:
        _count(txn, edges, -1)


def _add_places(txn: KvWriter, found: Sequence[tuple[bytes, Place]]) -> None:
    rows: dict[bytes, tuple[int, list[Place]]] = {}
    ids = list({object_id for object_id, _ in found})
    for object_id, old in zip(ids, txn.get_many("objects", ids), strict=True):
        rows[object_id] = decode_object(old) if old else (0, [])
    edges: Counter[ObjectId] = Counter()
    filled: Counter[int] = Counter()
    for object_id, place in found:
        count, places = rows[object_id]
        if place not in places:
            rows[object_id] = count, add_place(places, place)
            if count:
                edges.update(set(place.bases) - _bases_of(places))
                filled[place.pack_no] += place.size
    txn.put_many("objects", [(object_id, encode_object(count, places)) for object_id, (count, places) in rows.items()])
    _fill(txn, filled)
    if edges:
        _count(txn, edges, +1)
    if txn.count("damage"):
        for object_id in ids:
            txn.delete("damage", object_id)  # stored again: the new record was read back before it was published


def _children_of_snapshot(snapshot: Snapshot, thinned: Sequence[str] = ()) -> dict[ObjectId, int]:
    """Child ids of a snapshot, each with the depth of the tree below it; without those of withdrawn components."""
    kept = (ref for name, ref in snapshot.components.items() if name not in thinned)
    children = {ObjectId(ref.manifest): _MANIFEST for ref in kept}
    if snapshot.context:
        children[ObjectId(snapshot.context)] = _LEAF
    return children


_LEAF, _NODE, _MANIFEST = 0, 1, 2


def _children_of(object_id: ObjectId, depth: int, plain: bytes) -> dict[ObjectId, int]:
    what = f"object {object_id.hex()[:12]}"
    if depth == _NODE:
        return dict.fromkeys(split_ids(plain, what), _LEAF)
    manifest = decode_manifest(plain, what)
    children = dict.fromkeys(split_ids(manifest.ids, what), _NODE if manifest.has_nodes else _LEAF)
    children[ObjectId(manifest.structure)] = _LEAF
    children.update((ObjectId(part.manifest), _MANIFEST) for part in parts_of(manifest))
    return children


def count_edges(txn: KvWriter, children: dict[ObjectId, int], change: int, read_object: ReadObject) -> None:
    """Add `change` (+1, -1) to the count of each child; one that comes alive or dies passes it on to its own."""
    for object_id in _count(txn, Counter(dict.fromkeys(children, 1)), change):
        if children[object_id] == _LEAF:
            continue
        if change < 0 and txn.delete("meta", UNCOUNTED + object_id):
            continue  # it never passed anything on
        plain: bytes | None = None
        try:
            plain = read_object(object_id, txn)
            below = _children_of(object_id, children[object_id], plain)
        except CasckptError as error:  # damaged or not here: verify reports it
            _raise_passing(error)
            reason = UNDECODABLE if plain is not None and isinstance(error, CorruptionError) else b""
            txn.put("meta", UNCOUNTED + object_id if change > 0 else INEXACT, reason)
            continue
        count_edges(txn, below, change, read_object)


def _count(txn: KvWriter, edges: Counter[ObjectId], change: int) -> list[ObjectId]:
    """Add `change` times each number to the count of its object; returns those that came alive or died.

    These pass it on to the bases that their records name: an object owns one edge to each, however many records do.
    """
    first: list[ObjectId] | None = None
    filled: Counter[int] = Counter()
    while edges:
        ids = list(edges)
        updates, flipped = [], []
        bases: Counter[ObjectId] = Counter()
        for object_id, old in zip(ids, txn.get_many("objects", ids), strict=True):
            count, places = decode_object(old) if old else (0, [])
            new = max(0, count + change * edges[object_id])
            updates.append((object_id, encode_object(new, places)))
            if (new == 0) != (count == 0):
                flipped.append(object_id)
                bases.update(_bases_of(places))
                for place in places:
                    filled[place.pack_no] += place.size if new else -place.size
        txn.put_many("objects", updates)
        first, edges = flipped if first is None else first, bases
    _fill(txn, filled)
    return first or []


def _fill(txn: KvWriter, changes: Mapping[int, int]) -> None:
    """Change the live bytes of packs; what lies inline in entries belongs to none."""
    add_fill(txn, {number: change for number, change in changes.items() if change and number != INLINE})


def _bases_of(places: Sequence[Place]) -> set[ObjectId]:
    return {base for place in places for base in place.bases}
