"""Old timeline entries sealed: a hundred small files become one epoch, without the objects that were inlined in them.

1. What snapshots need of those objects is copied into packs, record for record, unless a pack has it.
2. A `seal` entry names the epochs by digest, and the packs. It is true of everything below its number, like `condemn`:
   where another entry wins that number, what its snapshots need is looked at again.
3. The epochs are made. Their bytes follow from the entries and nothing else, so a collection that dies here is finished
   by any other one, and two at once make the same.
4. After a gate the entries' own files are unlinked, each only once its epoch was read back as the seal names it.

Entry 0, which says whose store it is, keeps its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from casckpt.errors import CorruptionError, NotFoundError
from casckpt.format.entry import Entry, EpochRef, PackRef, Seal
from casckpt.format.epoch import encode_epoch, seal_entry
from casckpt.format.record import SNAPSHOT, RecordHeader
from casckpt.ids import ObjectId
from casckpt.index.tables import decode_object, epoch_count, epoch_refs
from casckpt.objects.apply import inlined_ids
from casckpt.objects.epochs import entries_of, epoch_of
from casckpt.store.store import Store
from casckpt_gc.compact import pack_writer
from casckpt_gc.compaction import Compaction
from casckpt_gc.mark import Mark, is_condemned, roots


def sealable(store: Store, compaction: Compaction | None) -> range:
    """Numbers of the epochs that are complete and not sealed, the oldest first, as many as one collection does."""
    if compaction is None:
        return range(0)
    with store._keeper.kv.read() as txn:
        start = epoch_count(txn)
    stop = epoch_of(store._keeper.applied().seq + 1)
    return range(start, max(start, min(stop, start + compaction.epoch_count_max)))


def replaceable(store: Store, sealing: range) -> dict[int, int]:
    """Entries with files of their own that are sealed, or will be when `sealing` is: number to size in bytes."""
    timeline = store._timeline
    stop = entries_of(sealing.stop).start
    with store._keeper.kv.read() as txn:
        stop = max(stop, entries_of(epoch_count(txn)).start)
    found = {seq: timeline.fs.size(timeline.path(seq)) for seq in timeline.file_numbers(1) if seq < stop}
    return {seq: size for seq, size in found.items() if size is not None}


class Sealing:
    """Some epochs being sealed.

    Args:
        store: open for writing.
        numbers: of the epochs, as `sealable` gives them.
        mark: what is needed; other inlined objects are left behind.

    Attributes:
        replacements: new packs, after `prepare`.
        copied_bytes: bytes of the records copied.
    """

    def __init__(self, store: Store, numbers: range, mark: Mark) -> None:
        self.replacements: list[PackRef] = []
        self.copied_bytes = 0
        self._store = store
        self._numbers = numbers
        self._mark = mark
        self._refs: list[EpochRef] = []
        self._inlined: set[ObjectId] = set()
        self._copied: set[ObjectId] = set()
        self._writer = pack_writer(store)

    def prepare(self) -> None:
        """Copy what is needed; durable and read back when it returns. Memory: one epoch, one batch of a pack.

        Raises:
            CorruptionError, NotFoundError: an entry cannot be read.
            OutOfSpaceError, StorageError: nothing refers to what was written; call `end`.
        """
        for number in self._numbers:
            encoded = _encode(self._store, number, self._copy)
            self._refs.append(EpochRef(number, len(encoded), encoded[-32:]))
        self.replacements = self._writer.publish().packs

    def _copy(self, entry: Entry) -> None:
        found = inlined_ids(entry)
        self._inlined |= found
        in_packs = self._in_packs(found)
        for record in entry.records:
            object_id = ObjectId(record.header.object_id)
            if record.header.kind != SNAPSHOT and object_id in self._mark and object_id not in in_packs | self._copied:
                self._copied.add(object_id)
                self._writer.add_record(record.header, memoryview(record.payload))
                self.copied_bytes += _size(record.header)

    def _in_packs(self, objects: Iterable[ObjectId]) -> set[ObjectId]:
        """Those of these objects that have a record in a pack."""
        ids = list(objects)
        with self._store._keeper.kv.read() as txn:
            rows = zip(ids, txn.get_many("objects", ids), strict=True)
            return {each for each, row in rows if row and any(not place.is_inline for place in decode_object(row)[1])}

    def verdict(self) -> tuple[Seal | None, int]:
        """The entry, as of what is applied now, and how many entries it seals; none where another one was faster.

        Raises:
            CorruptionError, IncompleteError: what a snapshot needs that came meanwhile cannot be had.
        """
        with self._store._keeper.kv.read() as txn:
            is_next = epoch_count(txn) == self._numbers.start
        self._mark.add(roots(self._store) - self._mark.snapshots)
        needed = {each for each in self._inlined if each in self._mark} - self._copied
        copies = [ref.pack_id for ref in self.replacements]
        if not is_next or needed - self._in_packs(needed) or is_condemned(self._store, copies):
            return None, 0
        return Seal(self._refs, self.replacements), sum(len(entries_of(number)) for number in self._numbers)

    def end(self) -> None:
        """Remove temporary files that are left."""
        self._writer.abort()


def _size(header: RecordHeader) -> int:
    return header.header_size + header.stored_size


def _encode(store: Store, number: int, look: Callable[[Entry], None] = lambda _: None) -> bytes:
    """An epoch, from the files of its entries."""
    found = []
    for seq in entries_of(number):
        entry, data = store._timeline.read_file(seq)
        look(entry)
        found.append(seal_entry(data, entry))
    return encode_epoch(entries_of(number).start, store.store_id, found)


def make_epochs(store: Store) -> Mapping[int, int]:
    """Make the epochs that are sealed and not there; returns the entries whose files they replace, with their sizes.

    Raises:
        CorruptionError: an epoch is not as its seal names it, or an entry that it is to be made of is not; nothing is
            replaced by any.
        OutOfSpaceError, StorageError: not all could be made.
    """
    timeline = store._timeline
    with store._keeper.kv.read() as txn:
        refs = {ref.number: ref for ref in epoch_refs(txn)}
    found = replaceable(store, range(0))
    for ref in (refs[number] for number in sorted({epoch_of(seq) for seq in found} & refs.keys())):
        start = entries_of(ref.number).start
        if timeline.epochs.size(start) is None:
            try:
                encoded = _encode(store, ref.number)
            except NotFoundError as error:
                if timeline.epochs.size(start) is None:  # else another collection was faster: first there, then gone
                    raise CorruptionError(f"epoch {ref.number} is missing, and so is {error.message}") from error
            else:
                if encoded[-32:] == ref.digest:
                    timeline.epochs.publish(ref.number, encoded)
        timeline.epochs.check(ref)
    return {seq: size for seq, size in found.items() if epoch_of(seq) in refs}
