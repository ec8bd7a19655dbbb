"""Objects read by address: located, read in pack order, decoded, hashed, and only then believed.

Every byte handed out was hashed against its address (I4). An object may have several places; after a bad one the next
is tried. Raw payloads are read straight into the caller's memory and hashed while they are
in the cache; everything else passes through a scratch buffer per thread.

Objects with bases are decoded in groups (`graph`), and only what was asked for is hashed: a bad base shows in what is
made from it. Then that object is read again by itself, every base hashed, to find which record is bad and whether
another one helps.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from casckpt.codec import decode_into
from casckpt.digest import digest, hasher
from casckpt.errors import CasckptError, CorruptionError, IncompleteError, StorageError, StoreWarning
from casckpt.format.record import CODEC_RAW, RecordHeader, decode_header
from casckpt.ids import ObjectId
from casckpt.index.kv import Kv, KvReader
from casckpt.index.tables import INLINE, Place, decode_pack_row, decode_snap, first_places, number_key, places_of
from casckpt.limits import CHUNK_SIZE, OBJECT_SIZE_MAX, SINGLE_THREAD_SIZE
from casckpt.objects import graph, pool
from casckpt.objects.packs import pack_path, trash_path
from casckpt.objects.spool import Spool
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import File, FileMap, is_out_of_descriptors

_OPEN_PACKS_MAX = 64
_NOT_A_FILE = (errno.EINVAL, errno.ELOOP)  # a folder, a link: damage of the store, not of the disk


class Request(NamedTuple):
    """One chunk wanted: its address, its plain size, and the pieces of memory that receive parts of it.

    `pieces` are (offset in the chunk, writable memory); none means "only prove that it is good". `tag` is for the
    caller, who learns from an error's `request_tag` which request failed.
    """

    object_id: ObjectId
    size: int
    pieces: Sequence[tuple[int, memoryview]]
    tag: int = 0

    @property
    def whole(self) -> memoryview | None:
        """The memory that takes all of the chunk, if there is such a piece."""
        is_whole = len(self.pieces) == 1 and self.pieces[0][0] == 0 and len(self.pieces[0][1]) == self.size
        return self.pieces[0][1] if is_whole else None


_Asked = tuple[Request, list[Place]]
_Failed = Callable[[Request, CasckptError], None]


class ObjectReader:
    """Reads for one store handle. Thread-safe."""

    def __init__(self, root: str, timeline: Timeline, kv: Callable[[], Kv]) -> None:
        self._root = root
        self._timeline = timeline
        self._kv = kv
        self.pulse: Callable[[], None] = lambda: None  # by any thread, for what is read and every batch written
        self.spool: Spool | None = None  # of somebody who reads much and may be killed meanwhile
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
            kv = self._kv()
            try:
                with kv.read() as own:
                    return self.read(object_id, own)
            except (IncompleteError, CorruptionError) as error:
                if isinstance(error, CorruptionError) and self._kv() is kv:
                    raise
            with self._kv().read() as own:  # a collector has rewritten its pack meanwhile, or packs have other numbers
                return self.read(object_id, own)
        places = places_of(txn, object_id)
        if not places:
            snap = txn.get("snaps", object_id)
            if snap is None:
                raise IncompleteError(
                    f"object {object_id.hex()[:12]} is in no pack or entry. Run `casckpt verify`.", object_id=object_id
                )
            return self._read_snapshot(object_id, decode_snap(snap).seq)
        out = bytearray(places[0].plain_size)
        self._fetch(object_id, memoryview(out), places, txn)
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
        jobs = self._jobs(list(zip(requests, places, strict=True)), _raise_tagged)
        if sum(request.size for request in requests) <= SINGLE_THREAD_SIZE:
            for job in jobs:
                job()
        else:
            pool.run_all(_call, jobs)

    def chains(self, ids: Sequence[ObjectId]) -> dict[ObjectId, Place]:
        """The preferred places of those objects that the index knows, and of everything they are decoded from."""
        with self._kv().read() as txn:
            places = dict(zip(ids, first_places(txn.get_many("objects", ids)), strict=True))
            known = {object_id: place for object_id, place in places.items() if place is not None}
            return {**graph.close(known.values(), txn), **known}

    def read_together(self, ids: Sequence[ObjectId]) -> dict[ObjectId, memoryview]:
        """The plain bytes of a few objects that likely share bases, read by this thread.

        Raises:
            CorruptionError, IncompleteError, StorageError: one of them cannot be had.
        """
        unique = list(dict.fromkeys(ids))
        places = self.locate(unique)
        out = [memoryview(bytearray(found[0].plain_size if found else 0)) for found in places]
        requests = [Request(each, len(view), ((0, view),)) for each, view in zip(unique, out, strict=True)]
        for job in self._jobs(list(zip(requests, places, strict=True)), _raise_tagged):
            job()
        return dict(zip(unique, out, strict=True))

    def map(self, object_id: ObjectId, size: int) -> FileMap | None:
        """A raw object's bytes where they lie in a pack, as private memory; None where no good record is raw.

        They are hashed before they are handed out, read through the descriptor: a file that ends too early is an error
        there, and would be the end of the process in the map. What is written to the file after it was mapped, the map
        tells (`FileMap.check`).
        """
        (places,) = self.locate([object_id])
        for place in places:
            if place.is_inline or place.codec != CODEC_RAW or place.plain_size != size:
                continue
            with contextlib.suppress(CasckptError):  # who then reads it is told what is wrong
                file, offset = self._file(place, None)
                start = offset + place.header_size
                found = file.map(start, size)
                if found is not None and self._is_there(object_id, file, start, size):
                    return found
        return None

    def _is_there(self, object_id: ObjectId, file: File, start: int, size: int) -> bool:
        hashed, piece = hasher(), self._scratch("plain", min(size, CHUNK_SIZE))
        for at in range(0, size, CHUNK_SIZE):
            part = piece[: min(CHUNK_SIZE, size - at)]
            if file.read_into(part, start + at) != len(part):
                return False
            hashed.update(part)
        return bool(hashed.digest() == object_id)

    def prove_each(
        self, requests: Sequence[Request], places: Sequence[list[Place]]
    ) -> list[tuple[ObjectId, CasckptError]]:
        """Read and hash objects one by one in parallel; returns those that are bad, with the reason."""

        bad: list[tuple[ObjectId, CasckptError]] = []
        asked = list(zip(requests, places, strict=True))
        pool.run_all(_call, self._jobs(asked, lambda request, error: bad.append((request.object_id, error))))
        return bad

    def _jobs(self, asked: Sequence[_Asked], failed: _Failed) -> list[Callable[[], None]]:
        """The work in pack order: requests by themselves, and those with bases in groups."""
        jobs: list[tuple[tuple[int, int], Callable[[], None]]] = []
        based: dict[ObjectId, list[_Asked]] = {}
        for request, places in asked:
            is_kept = self.spool is not None and request.object_id in self.spool
            if places and places[0].bases and not is_kept:
                based.setdefault(request.object_id, []).append((request, places))
            else:
                start = places[0][:2] if places else (0, 0)
                jobs.append((start, functools.partial(self._read_single, request, places, failed)))
        if based:
            wanted = [(object_id, users[0][1][0]) for object_id, users in based.items()]
            with self._kv().read() as txn:
                below = graph.close((place for _, place in wanted), txn)
            for members in graph.group(wanted, below):
                users = {wanted[at][0]: based[wanted[at][0]] for at in members}
                job = functools.partial(self._read_group, users, below, failed)
                jobs.append((wanted[members[0]][1][:2], job))
        return [job for _, job in sorted(jobs, key=lambda job: job[0])]

    def _read_single(self, request: Request, places: list[Place], failed: _Failed) -> None:
        self.pulse()
        kv = self._kv()
        try:
            try:
                self._read_one(request, places)
            except (IncompleteError, CorruptionError):
                (found,) = self.locate([request.object_id])
                if found == places and self._kv() is kv:
                    raise
                self._read_one(request, found)  # a collector has rewritten its pack, or packs have other numbers now
        except CasckptError as error:
            failed(request, error)

    def _read_group(
        self, group: Mapping[ObjectId, list[_Asked]], below: Mapping[ObjectId, Place], failed: _Failed
    ) -> None:
        """Each object of a group, for all who asked for it."""
        self.pulse()
        wanted = {each: (users[0][1][0], users[0][0].whole) for each, users in group.items()}
        decoding = graph.Decoding(wanted, below, self._decode)
        for object_id, users in group.items():
            plain = self._decoded(object_id, users[0][0].size, decoding)
            for request, places in users:
                if plain is None:
                    self._read_single(request, places, failed)
                elif request.whole is not plain:
                    _scatter(plain, request.pieces)
            if plain is not None:
                if self.spool is not None:
                    self.spool.add(object_id, plain)
                decoding.let_go(object_id)

    def _decoded(self, object_id: ObjectId, size: int, decoding: graph.Decoding) -> memoryview | None:
        """The hashed plain bytes of an object, or None when something on the way is bad."""
        try:
            plain = decoding.plain(object_id)
        except CasckptError:
            return None  # read by itself, it tells what is bad where
        return plain if len(plain) == size and digest(plain) == object_id else None

    def _decode(
        self,
        object_id: ObjectId,
        place: Place,
        bases: Sequence[memoryview],
        out: memoryview,
        txn: KvReader | None = None,
    ) -> None:
        """Fill `out` from one record, not hashed."""
        if place.codec == CODEC_RAW:
            self._read_raw(object_id, out, place, txn)
            return
        header, payload = self.read_record(object_id, place, txn)
        if header.bases != place.bases:
            raise CorruptionError(
                f"{self._where(place, txn)}: names other bases than the pack's table says", object_id=object_id
            )
        try:
            decode_into(header.codec, header.codec_version, header.params, payload, bases, out)
        except CorruptionError as error:
            raise CorruptionError(f"object {object_id.hex()[:12]}: {error}", object_id=object_id) from error

    def _read_one(self, request: Request, places: list[Place]) -> None:
        object_id, size, pieces, _ = request
        if not places:
            raise IncompleteError(
                f"chunk {object_id.hex()[:12]} is in no pack or entry. Run `casckpt verify`.", object_id=object_id
            )
        spool, whole = self.spool, request.whole
        out = self._scratch("plain", size) if whole is None else whole
        if spool is None or not spool.get(object_id, out):
            self._fetch(object_id, out, places, None)
            if spool is not None:
                spool.add(object_id, out)
        if whole is None:
            _scatter(out, pieces)

    # --- one object ---

    def _fetch(self, object_id: ObjectId, out: memoryview, places: Sequence[Place], txn: KvReader | None) -> None:
        """Fill `out` from the first good place; a bad one is told when another one helps."""
        if any(place.bases for place in places):
            if txn is None:
                with self._kv().read() as own:
                    return self._fetch(object_id, out, places, own)
            return self._fetch_based(object_id, out, txn)
        errors: list[CasckptError] = []
        for place in places:
            try:
                self._fetch_from(object_id, place, (), out, txn)
            except CasckptError as error:
                errors.append(error)
                continue
            return _tell_passed_over(errors)
        try:
            raise errors[0]
        finally:
            errors.clear()  # or error, frame and list would keep each other, and the index that was read

    def _fetch_based(self, object_id: ObjectId, out: memoryview, txn: KvReader) -> None:
        """Fill `out`, whatever records of whatever is below are bad, while there are others.

        Each try decodes every base once and hashes it; a record that turns out bad is left out of the next try.
        """
        places = graph.reach([object_id], txn)
        bad: dict[tuple[ObjectId, Place], CasckptError] = {}

        def decode(each: ObjectId, place: Place, bases: Sequence[memoryview], plain: memoryview) -> None:
            try:
                self._fetch_from(each, place, bases, plain, txn)
            except CasckptError as error:
                bad[each, place] = error
                raise

        while True:
            settled = graph.settle(places, lambda each, place: (each, place) not in bad, {})
            if object_id not in settled:
                raise next(iter(bad.values()), None) or _undecodable(object_id, places)
            below = {each: found.place for each, found in settled.items()}
            tried = len(bad)
            try:
                graph.Decoding({object_id: (below[object_id], out)}, below, decode).plain(object_id)
            except CasckptError:
                if len(bad) == tried:
                    raise
                continue
            return _tell_passed_over(list(bad.values()))

    def _fetch_from(
        self, object_id: ObjectId, place: Place, bases: Sequence[memoryview], out: memoryview, txn: KvReader | None
    ) -> None:
        """Fill `out` from one record, hashed."""
        if len(out) != place.plain_size:
            raise CorruptionError(
                f"object {object_id.hex()[:12]}: {place.plain_size} plain bytes, expected {len(out)}",
                object_id=object_id,
            )
        self._decode(object_id, place, bases, out, txn)
        found = digest(out)
        if found != object_id:
            where = self._where(place, txn)
            raise CorruptionError(
                f"{where}: digest mismatch (expected {object_id.hex()[:12]}…, found {found.hex()[:12]}…). "
                "Run `casckpt verify --read-data` to see which steps need it.",
                object_id=object_id,
                where=where,
            )

    def _read_raw(self, object_id: ObjectId, out: memoryview, place: Place, txn: KvReader | None) -> None:
        file, offset = self._file(place, txn)
        count = file.read_into(out, offset + place.header_size)
        if count != len(out):
            raise self._short(object_id, file, offset, count)

    def read_record(
        self, object_id: ObjectId, place: Place, txn: KvReader | None = None
    ) -> tuple[RecordHeader, memoryview]:
        """One record as it is stored, its header checked; the payload is good until this thread reads another.

        Raises:
            CorruptionError, IncompleteError: it is not there, or not that object's.
        """
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
            files = self._files
            file = files.get(place.pack_no)
            if file is not None:
                files.move_to_end(place.pack_no)
                return file, place.offset
        pack_id = self.pack_id(place.pack_no, txn)
        file = self._open_pack(pack_id)
        is_current = txn is None or self._is_number_of(place.pack_no, pack_id)
        with self._lock:
            if files is not self._files or not is_current:
                return file, place.offset  # forgotten meanwhile: the number may mean another pack from now on
            file = self._files.setdefault(place.pack_no, file)
            while len(self._files) > _OPEN_PACKS_MAX:
                self._files.popitem(last=False)  # closed when its last reader lets go of it
        return file, place.offset

    def _is_number_of(self, pack_no: int, pack_id: bytes) -> bool:
        """Whether the index that is in use now calls this pack so."""
        with self._kv().read() as txn:
            row = txn.get("packs", number_key(pack_no))
        return row is not None and decode_pack_row(row)[0] == pack_id

    def _open_pack(self, pack_id: bytes) -> File:
        with _named(f"pack {pack_id.hex()}", pack_id=pack_id):
            with contextlib.suppress(FileNotFoundError):
                return self._open(pack_path(self._root, pack_id))
            return self._open(trash_path(self._root, pack_id))  # where a collector puts it while somebody reads it

    def _open(self, path: str) -> File:
        try:
            return self._timeline.fs.open(path)
        except StorageError as error:
            if not is_out_of_descriptors(error):
                raise
        self.forget_files()  # those of others are theirs; ours can be opened again
        return self._timeline.fs.open(path)

    def _open_entry(self, seq: int) -> File:
        with _named(f"timeline entry {seq}", seq=seq):
            return self._open(self._timeline.path(seq))

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
        """Let go of all open packs."""
        with self.renumbering():
            pass

    @contextlib.contextmanager
    def renumbering(self) -> Iterator[None]:
        """For putting another index in use: who has seen it finds no file that is known by a number of the old one."""
        with self._lock:
            yield
            self._files.clear()
            self._files = OrderedDict()  # a new one: who opens one now sees that it is not to be kept


def _tell_passed_over(errors: Sequence[CasckptError]) -> None:
    if errors:
        warnings.warn(f"a damaged copy was passed over, another one is good: {errors[0]}", StoreWarning, stacklevel=4)


def _undecodable(object_id: ObjectId, places: Mapping[ObjectId, Sequence[Place]]) -> CasckptError:
    """Why an object cannot be decoded though no record was found bad."""
    missing = next((each for each, found in places.items() if not found), None)
    if missing is not None:
        return IncompleteError(
            f"base {missing.hex()[:12]} is in no pack or entry. Run `casckpt verify`.", object_id=missing
        )
    return CorruptionError(
        f"object {object_id.hex()[:12]}: its bases form a circle, or a chain of more than {graph.DEPTH_MAX}",
        object_id=object_id,
    )


def _call(job: Callable[[], None]) -> None:
    job()


def _raise_tagged(request: Request, error: CasckptError) -> None:
    error.facts["request_tag"] = request.tag
    raise error


def _scatter(plain: memoryview, pieces: Sequence[tuple[int, memoryview]]) -> None:
    for offset, target in pieces:
        target[:] = plain[offset : offset + len(target)]


@contextlib.contextmanager
def _named(what: str, **facts: Any) -> Iterator[None]:
    """Say what could not be opened: it is not here, or it is no file."""
    try:
        yield
    except FileNotFoundError:
        raise IncompleteError(
            f"{what} is not here. If a copy of this store is under way, wait for it; otherwise run `casckpt verify`.",
            **facts,
        ) from None
    except StorageError as error:
        if error.errno in _NOT_A_FILE:
            raise CorruptionError(error.message) from error
        raise
