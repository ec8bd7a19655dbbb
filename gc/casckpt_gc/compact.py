"""Packs rewritten without what nobody needs: records copied byte for byte into new packs.

A record keeps its codec, its bases and its depth, so everything that is decoded from it, and everything it is decoded
from, stays as it was: the decode graph does not change (I8), but for the objects that are encoded anew (`recode`). A
record whose bytes are not as its own check says is not copied, and its pack stays where it is, for a repair to look at.

The new packs are durable, and named by nobody, until the entry that condemns the old ones names them as replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from casckpt.digest import check16
from casckpt.errors import CorruptionError, IncompleteError
from casckpt.format.entry import PackRef
from casckpt.format.pack import PackRow
from casckpt.format.record import RecordHeader, decode_header
from casckpt.ids import PackId
from casckpt.objects.packs import pack_path, read_rows
from casckpt.objects.writer import ObjectWriter
from casckpt.storage.fs import File
from casckpt.store.store import Store
from casckpt_gc.mark import Mark, PackState
from casckpt_gc.recode import Encoder, Recoding


class Stopped(Exception):
    """A rewriting was told to stop; nothing refers to what it wrote."""


class Rewriting:
    """Some packs being rewritten.

    Args:
        store: open for writing.
        packs: those to be rewritten.
        mark: what is needed; other records, and those of objects that get new ones, are left behind.
        recoding: what is encoded anew; its packs are among `packs`.
        is_stopped: asked before each record.

    Attributes:
        packs: those of which everything needed was copied.
        encoder: of the new records.
        replacements: the new packs, after `copy`.
        copied_bytes, recoded_bytes: of the records copied, and of those encoded anew.
    """

    def __init__(
        self,
        store: Store,
        packs: Mapping[PackId, PackState],
        mark: Mark,
        recoding: Recoding,
        is_stopped: Callable[[], bool],
    ) -> None:
        self.packs = dict(packs)
        self.encoder = Encoder(store, recoding)
        self.replacements: list[PackRef] = []
        self.copied_bytes = self.recoded_bytes = 0
        self._store = store
        self._mark = mark
        self._is_stopped = is_stopped
        self._writer = pack_writer(store)

    def copy(self) -> None:
        """Write all needed records; durable and read back when it returns. Memory: one batch of a pack being written.

        Raises:
            OutOfSpaceError, StorageError, Stopped: nothing refers to what was written; call `end`.
            CorruptionError, IncompleteError: the same; what was to be encoded anew, or its pack, cannot be read.
        """
        for pack_id in list(self.packs):
            try:
                self._copy_pack(pack_id)
            except (CorruptionError, FileNotFoundError) as error:  # damaged, or another collection was faster
                if pack_id in self.encoder.recoding.packs:
                    raise IncompleteError(f"pack {pack_id.hex()} cannot be rewritten: {error}") from error
                del self.packs[pack_id]
        for header, payload in self.encoder.records():
            self.recoded_bytes += self._add(header, payload)
        self.replacements = self._writer.publish().packs

    def _copy_pack(self, pack_id: PackId) -> None:
        fs, root = self._store._timeline.fs, self._store.path
        rows, _ = read_rows(fs, root, pack_id, self._store.store_id)
        file = fs.open(pack_path(root, pack_id))
        try:
            for row in rows:
                if row.object_id in self._mark and row.object_id not in self.encoder.recoding.bases:
                    self.copied_bytes += self._add(*read_record(file, row))
        finally:
            file.close()

    def _add(self, header: RecordHeader, payload: memoryview) -> int:
        if self._is_stopped():
            raise Stopped
        self._writer.add_record(header, payload)
        return header.header_size + len(payload)

    def end(self) -> None:
        """Remove temporary files that are left."""
        self._writer.abort()


def pack_writer(store: Store) -> ObjectWriter:
    """Writes records into packs, whatever of them the store has already."""
    return ObjectWriter(
        store.path,
        store.store_id,
        store._system,
        lambda ids: [False] * len(ids),
        verify=store._committer._verify,
        may_inline=False,
    )


def read_record(file: File, row: PackRow) -> tuple[RecordHeader, memoryview]:
    """A record exactly as it was written.

    Raises:
        CorruptionError: it is not.
    """
    data = memoryview(bytearray(row.header_size + row.stored_size))
    count = file.read_into(data, row.offset)
    header = decode_header(data[:count], f"{file.path}, record at {row.offset}", limit=count)
    payload = data[row.header_size :]
    if header.object_id != row.object_id or header.bases != row_bases(row) or check16(payload) != header.payload_check:
        raise CorruptionError(
            f"{file.path}, record at {row.offset}: not as it was written. Run `casckpt verify`.",
            object_id=row.object_id,
        )
    return header, payload


def row_bases(row: PackRow) -> tuple[bytes, ...]:
    """Ids of a row's bases."""
    return tuple(row.bases[at : at + 32] for at in range(0, len(row.bases), 32))
