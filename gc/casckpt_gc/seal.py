"""Old timeline entries sealed: a hundred small files become one epoch, without the objects that were inlined in them.

1. What snapshots need of those objects is copied into packs, record for record: every record that counts (`mark`), for
   it may be there because that in a pack is damaged.
2. A `seal` entry names the epochs by digest, and the packs. It is true of everything below its number, like `condemn`:
   where another entry wins that number, what its snapshots need is looked at again.
3. The epochs are made. Their bytes follow from the entries and nothing else, so a collection that dies here is finished
   by any other one, and two at once make the same.
4. After a gate the entries' own files are unlinked, each only once its epoch was read back as the seal names it.

Entry 0, which says whose store it is, keeps its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from casckpt.errors import CorruptionError, NotFoundError
from casckpt.format.entry import TRAILER_SIZE, Commit, Condemn, Entry, EpochRef, PackRef, Seal, Supersede
from casckpt.format.epoch import Sealed, encode_epoch, seal_entry
from casckpt.format.record import SNAPSHOT, RecordHeader
from casckpt.ids import ObjectId
from casckpt.index.tables import CONDEMNED, decode_pack_row, epoch_count, epoch_refs, inline_offset
from casckpt.objects.apply import inlined_ids
from casckpt.objects.epochs import entries_of, epoch_of
from casckpt.objects.packs import read_rows
from casckpt.store.store import Store
from casckpt_gc.compact import pack_writer
from casckpt_gc.compaction import Compaction
from casckpt_gc.mark import Mark, check_certain, is_condemned, roots


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
            self._refs.append(EpochRef(number, len(encoded), encoded[-TRAILER_SIZE:]))
        self.replacements = self._writer.publish().packs
        if self._store._timeline.epochs.size(entries_of(self._numbers.start).start) is not None:
            self.replacements += _unnamed(self._store)

    def _copy(self, entry: Entry) -> None:
        found = inlined_ids(entry)
        self._inlined |= found
        counting = self._counting(found)
        for record in entry.records:
            if record.header.kind != SNAPSHOT and inline_offset(entry.seq, record.offset) in counting:
                self._copied.add(ObjectId(record.header.object_id))
                self._writer.add_record(record.header, memoryview(record.payload))
                self.copied_bytes += _size(record.header)

    def _counting(self, objects: Iterable[ObjectId]) -> set[int]:
        """Where those records of these objects are that count, and that are sealed away."""
        records = self._mark.records(each for each in objects if each in self._mark)
        stop = entries_of(self._numbers.stop).start
        places = (place for found in records.values() for place in found)
        return {place.offset for place in places if place.is_inline and place.entry_seq < stop}

    def verdict(self) -> tuple[Seal | None, int]:
        """The entry, as of what is applied now, and how many entries it seals; none where another one was faster.

        Raises:
            CorruptionError, IncompleteError: what a snapshot needs that came meanwhile cannot be had.
        """
        check_certain(self._store)
        with self._store._keeper.kv.read() as txn:
            is_next = epoch_count(txn) == self._numbers.start
        self._mark.add(roots(self._store) - self._mark.snapshots)
        copies = [ref.pack_id for ref in self.replacements]
        if not is_next or self._counting(self._inlined - self._copied) or is_condemned(self._store, copies):
            return None, 0
        return Seal(self._refs, self.replacements), sum(len(entries_of(number)) for number in self._numbers)

    def end(self) -> None:
        """Remove temporary files that are left."""
        self._writer.abort()


def _unnamed(store: Store) -> list[PackRef]:
    """Packs that the index has and no entry names.

    A copy that was made while its source was sealed may have epochs without their seal: what was inlined is then found
    in whatever packs are there, until a seal says which. Costs reading all entries.
    """
    with store._keeper.kv.read() as txn:
        rows = [decode_pack_row(row) for _, row in txn.scan("packs")]
    left = {pack_id for pack_id, size in rows if size != CONDEMNED}
    for seq in range(store._keeper.applied().seq + 1):
        body = store._timeline.read(seq).envelope.body
        if isinstance(body, Commit | Supersede):
            left -= {ref.pack_id for ref in body.packs}
        elif isinstance(body, Condemn | Seal):
            left -= {ref.pack_id for ref in body.replacements}
    fs, root = store._timeline.fs, store.path
    return [read_rows(fs, root, pack_id, store.store_id)[1] for pack_id in sorted(left)]


def _size(header: RecordHeader) -> int:
    return header.header_size + header.stored_size


def _encode(store: Store, number: int, look: Callable[[Entry], None] = lambda _: None) -> bytes:
    """An epoch, from the files of its entries; from the epoch itself, as a copy may have it, where there is no file."""
    found = []
    for seq in entries_of(number):
        try:
            entry, data = store._timeline.read_file(seq)
        except NotFoundError:
            sealed = store._timeline.epochs.sealed(seq)
            if sealed is None:
                raise
            found.append(sealed)
        else:
            look(entry)
            found.append(seal_entry(data, entry))
    return encode_epoch(entries_of(number).start, store.store_id, found)


def remake(copies: Sequence[Store], ref: EpochRef) -> bytes | None:
    """An epoch from what is good in copies of one store, in epochs and in files; None where that is not all of it.

    Proven by the digest that its seal names.
    """
    found = [_sealed(copies, seq) for seq in entries_of(ref.number)]
    whole = [each for each in found if each is not None]
    if len(whole) < len(found):
        return None
    encoded = encode_epoch(entries_of(ref.number).start, copies[0].store_id, whole)
    return encoded if encoded[-TRAILER_SIZE:] == ref.digest else None


def _sealed(copies: Sequence[Store], seq: int) -> Sealed | None:
    """What an epoch is to hold of an entry. A file under the number of a sealed one says least: see `epochs`."""
    for timeline in (each._timeline for each in copies):
        with contextlib.suppress(CorruptionError):
            sealed = timeline.epochs.sealed(seq)
            if sealed is not None:
                return sealed
    for timeline in (each._timeline for each in copies):
        with contextlib.suppress(CorruptionError, NotFoundError):
            entry, data = timeline.read_file(seq)
            return seal_entry(data, entry)
    return None


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
    numbers = sorted({epoch_of(seq) for seq in found} & refs.keys())
    if numbers:
        timeline.make_durable(store._keeper.applied().seq)  # who published the seal may have died before it was
    for ref in (refs[number] for number in numbers):
        start = entries_of(ref.number).start
        if timeline.epochs.size(start) is None:
            try:
                encoded = _encode(store, ref.number)
            except NotFoundError as error:
                if timeline.epochs.size(start) is None:  # else another collection was faster: first there, then gone
                    raise CorruptionError(f"epoch {ref.number} is missing, and so is {error.message}") from error
            else:
                if encoded[-TRAILER_SIZE:] == ref.digest:
                    timeline.epochs.publish(ref.number, encoded)
        timeline.epochs.check(ref)
    if numbers:
        timeline.fs.sync_folder(timeline.epochs.folder)  # the same of who gave an epoch its name
    return {seq: size for seq, size in found.items() if epoch_of(seq) in refs}
