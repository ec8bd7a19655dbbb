"""New objects written: hashed, looked up, encoded and written in one pipeline, in bounded memory.

Pool threads take batches of about 8 MiB and encode what is new in them (`chunks`). The calling thread writes what comes
back, in order, straight from the memory it lies in. Finished packs are synced and read back by other threads while the
next is written.

Nothing is visible to anybody before `publish` moves the packs to their names, and even then nothing refers to them
until the timeline entry is written. A commit that brings little (INLINE_LIMIT) makes no pack: its records go into the
entry.

Invariant: what `publish` returns is durable, and was read back through a fresh descriptor unless verification is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from casckpt.codec import Encoded, encode
from casckpt.digest import CHECK_SIZE, check16, digest
from casckpt.errors import CorruptionError
from casckpt.format.entry import PackRef
from casckpt.format.pack import (
    HEADER_SIZE,
    TRAILER_SIZE,
    PackRow,
    encode_footer,
    encode_pack_header,
    row_of,
)
from casckpt.format.record import CHUNK, CODEC_RAW, PAYLOAD_CHECK_AT, RecordHeader, encode_header, padding
from casckpt.ids import ObjectId, PackId, StoreId
from casckpt.limits import BATCH_SIZE, CHUNK_SIZE, INLINE_LIMIT, PACK_TARGET_SIZE, SINGLE_THREAD_SIZE
from casckpt.objects import pool
from casckpt.objects.bases import IsPresent
from casckpt.objects.chunks import ChunkEncoder, ChunkTask, Outcome, moved
from casckpt.objects.packs import pack_path
from casckpt.objects.reader import ObjectReader
from casckpt.storage.fs import File
from casckpt.storage.process import System

VERIFY_MODES = ("reread", "media", "off")


class Written(NamedTuple):
    """What a commit added: packs with their rows, and inline records."""

    packs: list[PackRef]
    rows: dict[bytes, list[PackRow]]
    inline: list[tuple[RecordHeader, bytes]]


class ObjectWriter:
    """The objects of one commit. Used by one thread; `abort` or `publish` ends it.

    Args:
        root: the store's folder.
        is_present: for each id, whether a good, existing record of it is in the store. Called from pool threads.
        verify: "reread" (fresh descriptor), "media" (the page cache is dropped first) or "off".
        reader: of the store, for the bases of new chunks; None: they get none.
        may_inline: whether a little may be left to the timeline entry instead of a pack.
    """

    def __init__(
        self,
        root: str,
        store_id: StoreId,
        system: System,
        is_present: IsPresent,
        *,
        verify: str,
        reader: ObjectReader | None = None,
        may_inline: bool = True,
    ) -> None:
        self._root = root
        self._store_id = store_id
        self._system = system
        self._is_present = is_present
        self._verify = verify
        self._reader = reader
        self._seen: dict[ObjectId, int] = {}  # with the depth of the record
        self._held: list[tuple[RecordHeader, memoryview]] = []  # records so far, while they may still go inline
        self._held_size = 0
        self._may_inline = may_inline
        self._pack: _PackFile | None = None
        self._sealing: list[tuple[_PackFile, Future[None]]] = []
        self._published: list[str] = []
        self.rejected_count = 0
        self._waiting_bytes = 0

    @property
    def unwritten_bytes(self) -> int:
        """What this commit still had to write: chunks that are in no pack yet, and bytes that packs hold back."""
        packs = [*(pack for pack, _ in self._sealing), *([self._pack] if self._pack else [])]
        held = sum(len(payload) for _, payload in self._held)
        return self._waiting_bytes + held + sum(pack.size - pack.flushed_size for pack in packs)

    def add_chunks(self, tasks: Sequence[ChunkTask], *, is_own_memory: bool = False) -> list[tuple[ObjectId, bool]]:
        """Store what is new among `tasks`; returns (id, whether this call stored it) in order.

        `is_own_memory`: nobody else writes to what the tasks read.

        Memory: at most two batches per pool thread are under way.
        """
        results: list[tuple[ObjectId | None, bool]] = [(task.known_id, False) for task in tasks]
        sizes = [task.size for task in tasks]
        self._waiting_bytes = sum(sizes)
        encoder = ChunkEncoder(tasks, self._is_present, self._reader, is_own_memory=is_own_memory)
        with contextlib.closing(self._processed(encoder)) as batches:
            for batch, outcomes in batches:
                self._waiting_bytes -= sum(sizes[at] for at in batch) - sum(outcome.size for outcome in outcomes)
                if self._reader is not None:
                    self._reader.pulse()
                for outcome in outcomes:
                    results[outcome.position] = outcome.object_id, self._take(outcome)
                    self._waiting_bytes -= outcome.size
        return results  # type: ignore[return-value]  # what has no outcome has the id that was known

    def _processed(self, encoder: ChunkEncoder) -> Generator[tuple[Sequence[int], list[Outcome]], None, None]:
        """Batches of positions, each with its outcomes."""
        if self._waiting_bytes <= SINGLE_THREAD_SIZE:
            batch = range(len(encoder.tasks))
            yield batch, encoder.process(batch)  # handing it to a thread would take longer than doing it
            return
        batches = encoder.batches()
        results = pool.map_ordered(encoder.process, batches, ahead=2 * pool.thread_count())
        with contextlib.closing(results):
            yield from zip(batches, results, strict=True)

    def _take(self, outcome: Outcome) -> bool:
        """Add a chunk that was encoded, unless this commit has it; returns whether it is new.

        One that is less deep than the record there is added too: what was built on it relies on its depth.
        """
        kept_depth = self._seen.get(outcome.object_id)
        if outcome.encoded is not None and (kept_depth is None or outcome.depth < kept_depth):
            if outcome.is_tied:
                self._leave_inline()
            self._add(CHUNK, outcome.object_id, outcome.size, outcome.encoded, outcome)
        return outcome.encoded is not None and kept_depth is None

    def add_all(self, objects: Iterable[tuple[int, bytes]]) -> list[ObjectId]:
        """Store those small objects (kind, plain bytes) that are not there; returns their ids in order."""
        given = [(kind, plain, digest(plain)) for kind, plain in objects]
        ids = [object_id for _, _, object_id in given]
        present = self._is_present(ids) if ids else ()
        for (kind, plain, object_id), is_present in zip(given, present, strict=True):
            if not is_present and object_id not in self._seen:
                self._add(kind, object_id, len(plain), encode(memoryview(plain), 1))
        return ids

    def add_record(self, header: RecordHeader, payload: memoryview) -> None:
        """Store one record as it is: a copy of a good one that lies elsewhere in this store."""
        self._leave_inline()
        self._pack_with_room(len(payload)).append(header, payload)

    def publish(self) -> Written:
        """Make everything durable and give packs their names.

        Raises:
            StorageError, CorruptionError: nothing refers to what was written; call `abort`.
        """
        if self._pack is None:
            inline = [(header, bytes(payload)) for header, payload in self._held]
            return Written([], {}, inline)
        last = self._pack
        last.finish()
        self._pack, done = None, Future[None]()
        self._sealing.append((last, done))
        try:
            self._seal(last)  # here: there is nothing else for this thread to do meanwhile
        finally:
            done.set_result(None)
        for _, future in self._sealing:
            future.result()
        shards = set()
        for pack, _ in self._sealing:
            target = pack_path(self._root, pack.pack_id)
            shard = target.rpartition("/")[0]
            if shard not in shards:
                shards.add(shard)
                self._system.file_system.make_folder(shard)
            self._system.file_system.rename(pack.path, target)
            self._published.append(pack.path)
        for shard in sorted(shards):
            self._system.file_system.sync_folder(shard)
        self._system.file_system.sync_folder(f"{self._root}/packs")
        packs = [pack.ref for pack, _ in self._sealing if pack.ref is not None]
        rows = {pack.pack_id: pack.rows for pack, _ in self._sealing}
        return Written(packs, {bytes(k): v for k, v in rows.items()}, [])

    def abort(self) -> None:
        """Remove this commit's temporary files. Packs that have their names already stay, unreferenced."""
        pool.settle(future for _, future in self._sealing)
        for pack in [*(pack for pack, _ in self._sealing), *([self._pack] if self._pack else [])]:
            with contextlib.suppress(OSError):
                pack.file.close()
            if pack.path not in self._published:
                with contextlib.suppress(OSError):
                    self._system.file_system.unlink(pack.path)
        self._pack = None
        self._sealing = []

    # --- writing side ---

    def _add(
        self, kind: int, object_id: ObjectId, plain_size: int, form: Encoded, outcome: Outcome | None = None
    ) -> None:
        self._seen[object_id] = outcome.depth if outcome else 0
        self.rejected_count += form.rejected is not None
        payload = memoryview(form.payload)
        bases, depth, cost = (outcome.bases, outcome.depth, outcome.cost) if outcome else ((), 0, 0)
        header = header_of(kind, object_id, plain_size, form, bases, depth, cost)
        if self._may_inline and self._held_size + form.stored_size <= INLINE_LIMIT:
            # Held bytes are copied: the memory they lie in is reused, or the user's and may have moved since the hash.
            held = bytes(payload)
            if form.codec == CODEC_RAW and digest(held) != object_id:
                raise moved(object_id)
            self._held.append((header, memoryview(held)))
            self._held_size += form.stored_size
            return
        self._leave_inline()
        self._pack_with_room(len(payload)).append(header, payload)

    def _leave_inline(self) -> None:
        """From here on everything goes into packs, what was held included."""
        held, self._held = self._held, []
        for header, payload in held:
            self._pack_with_room(len(payload)).append(header, payload)
        self._may_inline = False

    def _pack_with_room(self, payload_size: int) -> _PackFile:
        if self._pack is not None and self._pack.rows and self._pack.size + payload_size > PACK_TARGET_SIZE:
            self._close_pack()
        if self._pack is None:
            pack_id = PackId(self._system.random_bytes(16))
            path = self._system.temporary_path(self._root)
            self._pack = _PackFile(self._system.file_system.create(path), path, pack_id, self._store_id)
        return self._pack

    def _close_pack(self) -> None:
        pack = self._pack
        assert pack is not None
        pack.finish()
        self._sealing.append((pack, pool.submit_io(self._seal, pack)))
        self._pack = None

    def _seal(self, pack: _PackFile) -> None:
        pack.file.sync()
        if self._verify == "media":
            pack.file.drop_cache(0, pack.size)
        pack.file.close()
        if self._verify != "off":
            self._reread(pack)

    def _reread(self, pack: _PackFile) -> None:
        """Read a finished pack through a fresh descriptor and compare everything with what was meant."""
        file = self._system.file_system.open(pack.path)
        try:
            buffer = memoryview(bytearray(CHUNK_SIZE + 2 * HEADER_SIZE))
            is_good = file.read_into(buffer[:HEADER_SIZE], 0) == HEADER_SIZE and buffer[:HEADER_SIZE] == pack.header
            for row, header in zip(pack.rows, pack.record_headers, strict=True):
                size = row.header_size + row.stored_size
                if size > len(buffer):
                    buffer = memoryview(bytearray(size))
                count = file.read_into(buffer[:size], row.offset)
                payload = buffer[row.header_size : size]
                payload_check = header[PAYLOAD_CHECK_AT : PAYLOAD_CHECK_AT + CHECK_SIZE]
                if count != size or buffer[: row.header_size] != header or check16(payload) != payload_check:
                    raise CorruptionError(
                        f"pack {pack.pack_id.hex()[:12]}…, record at offset {row.offset}: what was read back is not "
                        "what was to be written. Nothing was committed. Check this disk (`casckpt doctor`).",
                        object_id=ObjectId(row.object_id),
                    )
            tail = bytearray(len(pack.footer))
            if not is_good or file.read_into(tail, pack.footer_offset) != len(tail) or tail != pack.footer:
                raise CorruptionError(
                    f"pack {pack.pack_id.hex()[:12]}…: its header or footer was not read back as written. Nothing was "
                    "committed. Check this disk (`casckpt doctor`).",
                    pack_id=pack.pack_id,
                )
            if pack.size >= PACK_TARGET_SIZE // 2:
                # Training's own data needs the page cache more than bytes that are only read after a crash.
                file.drop_cache(0, pack.size)
        finally:
            file.close()


def header_of(
    kind: int, object_id: ObjectId, plain_size: int, form: Encoded, bases: tuple[ObjectId, ...], depth: int, cost: int
) -> RecordHeader:
    """The header of a record of this form."""
    payload_check = object_id[:16] if form.codec == CODEC_RAW else check16(memoryview(form.payload))
    return RecordHeader(
        kind=kind,
        codec=form.codec,
        codec_version=form.version,
        object_id=object_id,
        plain_size=plain_size,
        stored_size=form.stored_size,
        payload_check=payload_check,
        params=form.params,
        bases=bases,
        depth=depth,
        cost=cost,
    )


class _PackFile:
    """A pack being written under a temporary name."""

    def __init__(self, file: File, path: str, pack_id: PackId, store_id: StoreId) -> None:
        self.file = file
        self.path = path
        self.pack_id = pack_id
        self.rows: list[PackRow] = []
        self.record_headers: list[bytes] = []
        self.size = HEADER_SIZE
        self.footer = b""
        self.footer_offset = 0
        self.ref: PackRef | None = None
        self.flushed_size = 0
        self.header = encode_pack_header(pack_id, store_id)
        self._pending: list[bytes | memoryview] = [self.header]
        self._preallocated = 0

    def append(self, header: RecordHeader, payload: memoryview) -> None:
        encoded = encode_header(header, is_aligned=True)
        self.rows.append(row_of(header, self.size, len(encoded)))
        self.record_headers.append(encoded)
        self._pending += (encoded, payload)
        self.size += len(encoded) + len(payload)
        if padding(self.size):
            self._pending.append(bytes(padding(self.size)))
            self.size += padding(self.size)
        if self.size - self.flushed_size >= BATCH_SIZE:
            self._flush()

    def _flush(self) -> None:
        if self.size > self._preallocated:
            # A pack that outgrew one batch will likely be a full one: reserve it, so that a full disk shows at once.
            self._preallocated = PACK_TARGET_SIZE if self.size >= BATCH_SIZE else self.size
            self._preallocated = max(self._preallocated, self.size)
            self.file.preallocate(self._preallocated)
        count = self.file.write(self._pending, self.flushed_size)
        self.file.start_writeback(self.flushed_size, count)
        self.flushed_size += count
        self._pending = []

    def finish(self) -> None:
        """Write what is left, the footer, and cut the file to its size. Not synced yet."""
        self.footer_offset = self.size
        self.footer = encode_footer(self.rows, self.size, self.pack_id)
        self._pending.append(self.footer)
        self.size += len(self.footer)
        self._flush()
        if self._preallocated > self.size:
            self.file.truncate(self.size)
        footer_check = self.footer[-TRAILER_SIZE:][48:64]
        self.ref = PackRef(self.pack_id, self.size, footer_check)
