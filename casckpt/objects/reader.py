"""Objects read by address: located, read in pack order, decoded, hashed, and only then believed.

Every byte handed out was hashed against its address (I4). An object may have several places; after a bad one the next
is tried. Raw payloads are read straight into the caller's memory and hashed while they are
in the cache; everything else passes through a scratch buffer per thread.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from casckpt.codec import decode_into
from casckpt.digest import digest
from casckpt.errors import CasckptError, CorruptionError, IncompleteError, StorageError, StoreWarning
from casckpt.format.record import CODEC_RAW, RecordHeader, decode_header
from casckpt.ids import ObjectId, StoreId
from casckpt.index.kv import Kv, KvReader
from casckpt.index.tables import INLINE, Place, decode_pack_row, decode_snap, number_key, places_of
from casckpt.limits import CHUNK_SIZE, OBJECT_SIZE_MAX, SINGLE_THREAD_SIZE
from casckpt.objects import pool
from casckpt.objects.packs import pack_path
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import File, is_out_of_descriptors

_OPEN_PACKS_MAX = 64
_NOT_A_FILE = (errno.EINVAL, errno.ELOOP)  # a folder, a link: damage of the store, not of the disk
_BASE_DEPTH_MAX = 64  # no encoder makes chains this long; a forged one ends here


class Request(NamedTuple):
    """One chunk wanted: its address, its plain size, and the pieces of memory that receive parts of it.

    `pieces` are (offset in the chunk, writable memory); none means "only prove that it is good". `tag` is for the
    caller, who learns from an error's `request_tag` which request failed.
    """

    object_id: ObjectId
    size: int
    pieces: Sequence[tuple[int, memoryview]]
    tag: int = 0


class ObjectReader:
    """Reads for one store handle. Thread-safe."""

    def __init__(self, root: str, store_id: StoreId, timeline: Timeline, kv: Callable[[], Kv]) -> None:
        self._root = root
        self._store_id = store_id
        self._timeline = timeline
        self._kv = kv
        self._files: OrderedDict[int, File] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()

    # --- small objects ---

    def read(self, object_id: ObjectId, txn: KvReader | None = None) -> bytes:
        """Plain bytes of one object (a manifest, a structure, a snapshot), verified.

        Raises:
            IncompleteError: the index knows no place for it, or no file of it is here.
            CorruptionError: every place of it is bad; the first reason is given.
            StorageError: it could not be read now, which says nothing of its content.
        """
        if txn is None:
            with self._kv().read() as own:
                return self.read(object_id, own)
        return self._read_within(object_id, txn, 0)

    def _read_within(self, object_id: ObjectId, txn: KvReader, depth: int) -> bytes:
        places = places_of(txn, object_id)
        if not places:
            snap = txn.get("snaps", object_id)
            if snap is None:
                raise IncompleteError(
                    f"object {object_id.hex()[:12]} is in no pack or entry. Run `casckpt verify`.", object_id=object_id
                )
            return self._read_snapshot(object_id, decode_snap(snap).seq)
        out = bytearray(places[0].plain_size)
        self._fetch(object_id, memoryview(out), places, txn, depth)
        return bytes(out)

    def _read_snapshot(self, object_id: ObjectId, seq: int) -> bytes:
        for record in self._timeline.read(seq).records:
            if record.header.object_id == object_id and digest(record.payload) == object_id:
                return record.payload
        raise CorruptionError(f"entry {seq} does not hold snapshot {object_id.hex()[:12]}", object_id=object_id)

    # --- chunks in bulk ---

    def locate(self, ids: Sequence[ObjectId]) -> list[list[Place]]:
        """Places of each object, preferred first; an empty list where the index knows none."""
        with self._kv().read() as txn:
            return [places_of(txn, object_id) for object_id in ids]

    def read_many(self, requests: Sequence[Request], places: Sequence[list[Place]]) -> None:
        """Fill all pieces, in parallel, in pack order. `places` come from `locate`.

        Memory: one chunk of scratch per pool thread.

        Raises:
            CorruptionError, IncompleteError, StorageError: with `object_id` and `request_tag`; other
                requests may or may not have been filled by then, and none is being filled any more.
        """
        order = sorted(range(len(requests)), key=lambda at: places[at][0][:2] if places[at] else (0, 0))
        jobs = [(requests[at], places[at]) for at in order]
        if sum(request.size for request in requests) <= SINGLE_THREAD_SIZE:
            for job in jobs:
                self._read_tagged(job)
        else:
            pool.run_all(self._read_tagged, jobs)

    def prove_each(
        self, requests: Sequence[Request], places: Sequence[list[Place]]
    ) -> list[tuple[ObjectId, CasckptError]]:
        """Read and hash objects one by one in parallel; returns those that are bad, with the reason."""

        bad: list[tuple[ObjectId, CasckptError]] = []

        def prove(at: int) -> None:
            try:
                self._read_one(requests[at], places[at])
            except CasckptError as error:
                bad.append((requests[at].object_id, error))

        pool.run_all(prove, sorted(range(len(requests)), key=lambda at: places[at][0][:2]))
        return bad

    def _read_tagged(self, job: tuple[Request, list[Place]]) -> None:
        try:
            self._read_one(*job)
        except CasckptError as error:
            error.facts["request_tag"] = job[0].tag
            raise

    def _read_one(self, request: Request, places: list[Place]) -> None:
        object_id, size, pieces, _ = request
        if not places:
            raise IncompleteError(
                f"chunk {object_id.hex()[:12]} is in no pack or entry. Run `casckpt verify`.", object_id=object_id
            )
        if len(pieces) == 1 and pieces[0][0] == 0 and len(pieces[0][1]) == size:
            self._fetch(object_id, pieces[0][1], places, None, 0)
            return
        out = self._scratch("plain", size)
        self._fetch(object_id, out, places, None, 0)
        for offset, target in pieces:
            target[:] = out[offset : offset + len(target)]

    # --- one object ---

    def _fetch(
        self, object_id: ObjectId, out: memoryview, places: Sequence[Place], txn: KvReader | None, depth: int
    ) -> None:
        """Fill `out` from the first good place; a bad one is told when another one helps."""
        first: CasckptError | None = None
        for place in places:
            try:
                self._fetch_from(object_id, out, place, txn, depth)
            except CasckptError as error:
                first = first or error
                continue
            if first is not None:
                warnings.warn(
                    f"a damaged copy was passed over, another one is good: {first}", StoreWarning, stacklevel=2
                )
            return
        assert first is not None
        raise first

    def _fetch_from(self, object_id: ObjectId, out: memoryview, place: Place, txn: KvReader | None, depth: int) -> None:
        if len(out) != place.plain_size:
            raise CorruptionError(
                f"object {object_id.hex()[:12]}: {place.plain_size} plain bytes, expected {len(out)}",
                object_id=object_id,
            )
        if place.codec == CODEC_RAW:
            file, offset = self._file(place, txn)
            count = file.read_into(out, offset + place.header_size)
            if count != len(out):
                raise self._short(object_id, file, offset, count)
        else:
            header, payload = self._read_record(object_id, place, txn)
            bases = self._read_bases(header, txn, depth)
            try:
                decode_into(header.codec, header.codec_version, header.params, payload, bases, out)
            except CorruptionError as error:
                raise CorruptionError(f"object {object_id.hex()[:12]}: {error}", object_id=object_id) from error
        found = digest(out)
        if found != object_id:
            where = self._where(place, txn)
            raise CorruptionError(
                f"{where}: digest mismatch (expected {object_id.hex()[:12]}…, found {found.hex()[:12]}…). "
                "Run `casckpt verify --read-data` to see which steps need it.",
                object_id=object_id,
                where=where,
            )

    def _read_bases(self, header: RecordHeader, txn: KvReader | None, depth: int) -> list[bytes]:
        if not header.bases:
            return []
        if depth >= _BASE_DEPTH_MAX:
            raise CorruptionError(
                f"object {header.object_id.hex()[:12]}: its bases form a chain of more than {_BASE_DEPTH_MAX}",
                object_id=header.object_id,
            )
        if txn is None:
            with self._kv().read() as own:
                return self._read_bases(header, own, depth)
        return [self._read_within(base, txn, depth + 1) for base in header.bases]

    def _read_record(self, object_id: ObjectId, place: Place, txn: KvReader | None) -> tuple[RecordHeader, memoryview]:
        file, offset = self._file(place, txn)
        size = place.header_size + place.stored_size
        if size > 2 * OBJECT_SIZE_MAX:
            raise CorruptionError(f"object {object_id.hex()[:12]}: a record of {size} bytes", object_id=object_id)
        buffer = self._scratch("record", size)
        count = file.read_into(buffer, offset)
        if count != size:
            raise self._short(object_id, file, offset, count)
        header = decode_header(buffer, f"record at {offset} of {file.path.rpartition('/')[2]}", limit=size)
        if header.object_id != object_id or header.header_size != place.header_size:
            raise CorruptionError(
                f"{self._where(place, txn)}: holds object {header.object_id.hex()[:12]}, "
                f"expected {object_id.hex()[:12]}",
                object_id=object_id,
            )
        return header, buffer[header.header_size :]

    def _short(self, object_id: ObjectId, file: File, offset: int, count: int) -> CorruptionError:
        return CorruptionError(
            f"{file.path}: ends {count} bytes into the record at {offset} (object {object_id.hex()[:12]}). "
            "Run `casckpt verify`.",
            object_id=object_id,
        )

    # --- files ---

    def _file(self, place: Place, txn: KvReader | None) -> tuple[File, int]:
        """An open file and the record's offset in it."""
        if place.is_inline:
            return self._open_entry(place.entry_seq), place.entry_offset
        with self._lock:
            file = self._files.get(place.pack_no)
            if file is not None:
                self._files.move_to_end(place.pack_no)
                return file, place.offset
        file = self._open_pack(place, txn)
        with self._lock:
            file = self._files.setdefault(place.pack_no, file)
            while len(self._files) > _OPEN_PACKS_MAX:
                self._files.popitem(last=False)  # closed when its last reader lets go of it
        return file, place.offset

    def _open_pack(self, place: Place, txn: KvReader | None) -> File:
        pack_id = self.pack_id(place.pack_no, txn)
        try:
            return self._open(pack_path(self._root, pack_id))
        except FileNotFoundError:
            raise IncompleteError(
                f"pack {pack_id.hex()} is not here. If a copy of this store is under way, wait for it; "
                "otherwise run `casckpt verify`.",
                pack_id=pack_id,
            ) from None
        except StorageError as error:
            if error.errno in _NOT_A_FILE:
                raise CorruptionError(error.message) from error
            raise

    def _open(self, path: str) -> File:
        try:
            return self._timeline.fs.open(path)
        except StorageError as error:
            if not is_out_of_descriptors(error):
                raise
        self.forget_files()  # those of others are theirs; ours can be opened again
        return self._timeline.fs.open(path)

    def _open_entry(self, seq: int) -> File:
        try:
            return self._open(self._timeline.path(seq))
        except FileNotFoundError:
            raise IncompleteError(
                f"timeline entry {seq} is not here. If a copy of this store is under way, wait for it; "
                "otherwise run `casckpt verify`.",
                seq=seq,
            ) from None
        except StorageError as error:
            if error.errno in _NOT_A_FILE:
                raise CorruptionError(error.message) from error
            raise

    def pack_id(self, pack_no: int, txn: KvReader | None = None) -> bytes:
        if txn is None:
            with self._kv().read() as own:
                return self.pack_id(pack_no, own)
        row = txn.get("packs", number_key(pack_no))
        if row is None:
            raise CorruptionError(f"the index knows no pack {pack_no}. Run `casckpt doctor`.", pack_no=pack_no)
        return decode_pack_row(row)[0]

    def _where(self, place: Place, txn: KvReader | None) -> str:
        if place.pack_no == INLINE:
            return f"timeline entry {place.entry_seq}, record at offset {place.entry_offset}"
        return f"pack {self.pack_id(place.pack_no, txn).hex()[:12]}…, record at offset {place.offset}"

    def _scratch(self, name: str, size: int) -> memoryview:
        buffer: bytearray | None = getattr(self._local, name, None)
        if buffer is None or len(buffer) < size:
            buffer = bytearray(max(size, CHUNK_SIZE))
            setattr(self._local, name, buffer)
        return memoryview(buffer)[:size]

    def forget_files(self) -> None:
        """Let go of all open packs: after a rebuild of the index (numbers change) and at close."""
        with self._lock:
            self._files.clear()
