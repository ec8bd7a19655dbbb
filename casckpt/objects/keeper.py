"""The index kept in step with the timeline: opened, caught up, rebuilt, or replaced by one in memory.

The timeline is the truth; the index is how far somebody has read it. Every operation of a store begins with `catch_up`,
which looks for the next number and, when it is there, applies it and all that follow.

When the index on disk cannot be trusted it is rebuilt into a new generation while others go on with theirs. When
it cannot be written (read-only store, full disk) the same rows are made in memory. After a commit point nothing here
raises: a warning says so, and the next `catch_up` applies what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from casckpt.errors import (
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StoreWarning,
    cut,
)
from casckpt.format.entry import Entry
from casckpt.format.pack import PackRow
from casckpt.ids import NO_DIGEST, ObjectId, StoreId
from casckpt.index.kv import Kv, KvWriter, MemoryKv
from casckpt.index.lifecycle import IndexHome
from casckpt.index.tables import (
    BAD,
    CONDEMNED,
    INEXACT,
    PENDING,
    TABLES,
    UNREADABLE,
    UNTOLD,
    Applied,
    BadEntry,
    Pending,
    decode_pack_row,
    epoch_count,
    last_condemned,
    put_bad,
    read_applied,
    read_meta,
    unread_objects,
)
from casckpt.objects.apply import PackGone, add_inlined, add_pack, apply_entry, inlined_ids, mark_applied
from casckpt.objects.epochs import entries_of, epoch_of
from casckpt.objects.packs import list_packs, pack_path, read_rows
from casckpt.objects.reader import ObjectReader
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import is_about_file, is_of_medium

_MARK_LENGTH_MAX = 200  # characters of why an object is damaged: a row of the index is small
_ENTRIES_PER_TRANSACTION = 2000  # bounds the dirty pages of a rebuild
_NOTHING = Applied(-1, NO_DIGEST, [])


class IndexKeeper:
    """The index of one store handle. Thread-safe."""

    def __init__(self, root: str, store_id: StoreId, timeline: Timeline, home: IndexHome, *, read_only: bool) -> None:
        self._root = root
        self._store_id = store_id
        self._timeline = timeline
        self._home = home
        self._read_only = read_only
        self._lock = threading.RLock()
        self._kv: Kv | None = None
        self._condemned = -1  # the newest condemnation at the last look
        self._unread: dict[int, CasckptError] = {}  # entries, new since `open`, that the medium refused to give
        self.reader = ObjectReader(root, timeline, lambda: self.kv)

    @property
    def kv(self) -> Kv:
        kv = self._kv
        if kv is None:
            raise InvalidInputError(f"store {self._root}: this handle is closed. Open it again.", path=self._root)
        return kv

    def open(self) -> None:
        """Find a trusted index or make one, and catch up."""
        with self._lock:
            self._kv = self._home.open()
            if self._kv is None or self._is_doubtful():
                self.rebuild(at_least=-1 if self._kv is None else self._last_known())
            if not self._read_only:
                self._apply_from_listing()
            self.catch_up()
            while self._unread:  # … still: it counts as lost, or one bad sector would shut the store
                self.rebuild()
                self._unread = {}
                self.catch_up()  # another process's index, if that was faster, may end before it

    def close(self) -> None:
        with self._lock:
            self.reader.forget_files()
            if self._kv is not None:
                self._home.close(self._kv)
                self._kv = None

    # --- catching up ---

    def catch_up(self, own: Entry | None = None, rows: Mapping[bytes, Sequence[PackRow]] | None = None) -> int:
        """Apply every entry after the last applied one; returns the number of the last.

        One that the medium refuses to give now ends it, with a warning: what it says may change what all later ones
        mean. The next call tries again; who writes asks `settle`.

        Args:
            own: an entry just written by this process, which need not be read back.
            rows: the rows of its packs.

        Raises:
            BusyError: another process holds the index's write lock.
        """
        with self._lock:
            while True:
                try:
                    return self._catch_up(own, rows or {})
                except PackGone:
                    self.rebuild()
                except (CorruptionError, StorageError) as error:
                    if "index_path" not in error.facts:
                        raise  # not the index: a file of the store could not be read now
                    self._replace_unusable(error)

    def _catch_up(self, own: Entry | None, rows: Mapping[bytes, Sequence[PackRow]]) -> int:
        """`catch_up`; after any rebuild it goes on from what there is: another process's index, if that was faster."""
        with self.kv.read() as txn:
            applied = read_applied(txn) or _NOTHING
            is_exact = txn.get("meta", INEXACT) is None
            condemned = last_condemned(txn)
        if condemned != self._condemned:
            self._condemned = condemned
            self.reader.forget_files()  # a file that somebody has open keeps its space after it is unlinked
        if not is_exact or any(seq <= applied.seq and self._is_readable(seq) for seq in self._unread):
            self.rebuild()
            applied = self.applied()
        if own is None and not self._timeline.exists(applied.seq + 1):
            return applied.seq
        if self.kv.is_read_only:
            self._use_memory()
            return self.applied().seq
        return self._apply_next(own, rows)

    def _replace_unusable(self, error: CasckptError) -> None:
        is_damaged = isinstance(error, CorruptionError)
        what = "was damaged and is rebuilt" if is_damaged else "cannot be used, one in memory takes its place"
        warnings.warn(f"the index {what}: {error}", StoreWarning, stacklevel=3)
        if is_damaged:
            self.rebuild()
        else:
            self._use_memory()

    def catch_up_after_commit(self, own: Entry, rows: Mapping[bytes, Sequence[PackRow]]) -> None:
        """`catch_up` that never raises: the commit stands whatever happens to the index."""
        try:
            self.catch_up(own, rows)
        except (CasckptError, OSError, MemoryError) as error:
            warnings.warn(
                f"step committed; the index will catch up at the next operation ({error})", StoreWarning, stacklevel=3
            )

    def _apply_next(self, own: Entry | None, rows: Mapping[bytes, Sequence[PackRow]]) -> int:
        packs, reads = _Packs(self._timeline, rows), _Reads(self.reader)
        with self.kv.write() as txn:
            applied = read_applied(txn) or _NOTHING
            seq = applied.seq
            digest = applied.digest
            while True:
                found = own if own is not None and own.seq == seq + 1 else None
                if found is None and not self._timeline.exists(seq + 1):
                    break
                try:
                    digest, is_sealed = self._apply_one(txn, seq + 1, found, packs, reads)
                except _Unread as error:
                    warnings.warn(f"nothing new is seen: {error}", StoreWarning, stacklevel=5)
                    break
                seq += 1
                if is_sealed:
                    raise PackGone
            mark_applied(txn, seq, digest, applied.gaps)
            if reads.has_failed or packs.unreadable:
                txn.put("meta", INEXACT, b"")  # it may have been for once
        return seq

    def settle(self) -> bool:
        """For who decides something about to be published: make sure that no entry is left out that can be read.

        Returns:
            Whether one was: then decide again.

        Raises:
            StorageError: one still cannot be read, and nothing is known of what it says.
        """
        with self._lock:
            if not self._unread:
                return False
            self.catch_up()
            for seq, error in self._unread.items():
                raise StorageError(
                    f"{error.message.rstrip('.')}. Nothing was published, for it may say what must not be used any "
                    "more. Try again; if it stays so, open the store anew: then the entry counts as lost, until "
                    "`casckpt repair --from` a copy brings it back.",
                    seq=seq,
                    errno=errno.EIO,
                ) from error
            return True

    def _apply_one(
        self, txn: KvWriter, seq: int, entry: Entry | None, packs: _Packs, reads: _Reads, *, may_skip: bool = False
    ) -> tuple[bytes, bool]:
        """Apply one entry, or note that it is bad; returns what the next entry links to, and whether it is sealed.

        Raises:
            _Unread: the medium refuses to give it, and that is not to be taken for damage.
        """
        try:
            entry = entry or self._timeline.read(seq)
            self._unread.pop(seq, None)
            apply_entry(txn, entry, packs, reads)
        except (CorruptionError, IncompleteError, NotFoundError) as error:
            if entry is None and not isinstance(error, CorruptionError):
                raise
            if entry is None and is_of_medium(error):
                self._unread[seq] = error
                if not may_skip:
                    raise _Unread(str(error)) from error
            put_bad(txn, BadEntry(seq, self._timeline.size(seq), str(error)))
            return self._timeline.link_digest(seq), False
        return entry.digest, entry.is_sealed

    def _apply_from_listing(self) -> None:
        """Before writing: entries beyond a number that is missing (a copy under way) must be seen, or their numbers
        would be used twice.

        Where all is here up to a seal, epochs are only listed where files raise the doubt: they hold what is older than
        these. Before the first seal there are none, but in a copy, where no file of an entry may be here yet.
        """
        with self.kv.read() as txn:
            applied, sealed = read_applied(txn) or _NOTHING, epoch_count(txn)
        start, numbers = applied.seq + 1, self._timeline.numbers
        look = self._timeline.file_numbers if sealed and not applied.gaps else numbers
        if not _follow(start, look(start)) and not _follow(start, numbers(start)):
            self.rebuild()

    def applied(self) -> Applied:
        """How far the index is: last number (-1: none), its digest, gaps."""
        with self.kv.read() as txn:
            return read_applied(txn) or _NOTHING

    def last_condemned(self) -> int:
        """Number of the newest applied entry that condemned packs; -1 when there is none."""
        with self.kv.read() as txn:
            return last_condemned(txn)

    def mark_damage(self, found: Mapping[bytes, str], *, forget_others: bool = False) -> None:
        """Remember damaged objects, so that commits store them again; a hint, so failing to write it is no error.

        Args:
            found: object id → reason.
            forget_others: a full verification found no other.
        """
        if self._read_only:
            return
        with contextlib.suppress(CasckptError), self._lock, self.kv.write() as txn:
            old = [key for key, _ in txn.scan("damage")] if forget_others else []
            for object_id in old:
                if object_id not in found:
                    txn.delete("damage", object_id)
            txn.put_many(
                "damage", [(object_id, cut(reason, _MARK_LENGTH_MAX).encode()) for object_id, reason in found.items()]
            )

    def mark_bad(self, found: Mapping[int, str]) -> None:
        """Remember entries that cannot be read any more; a hint, so failing to write it is no error.

        Their rows stay: what they said is known as long as this index is.

        Args:
            found: number → reason.
        """
        if self._read_only or not found:
            return
        with contextlib.suppress(CasckptError), self._lock, self.kv.write() as txn:
            for seq, reason in found.items():
                put_bad(txn, BadEntry(seq, self._timeline.size(seq), reason))

    # --- doubt and rebuilding ---

    def _is_doubtful(self) -> bool:
        """Whether the last entry is another one, or something that was missing or unreadable has changed since."""
        timeline = self._timeline
        try:
            with self.kv.read() as txn:
                applied = read_applied(txn)
                pending = read_meta(txn, PENDING, Pending)
                bad = read_meta(txn, BAD, BadEntry)
                unread = unread_objects(txn)
        except CasckptError:
            return True
        packs = _Packs(self._timeline, {})
        return (
            applied is None
            or self._is_of_another_history(applied)
            or any(timeline.exists(seq) for seq in applied.gaps)
            or any(packs.has_changed(row) for row in pending)
            or any(self._can_read(each) for each in unread)
            or any(timeline.size(row.seq) != row.found_size or self._is_readable(row.seq) for row in bad)
        )

    def _is_of_another_history(self, applied: Applied) -> bool:
        """Whether the last entry that was applied is gone or another one: files were put back from elsewhere."""
        if self._timeline.link_digest(applied.seq) == applied.digest:
            return False
        if not self._timeline.exists(applied.seq):
            warnings.warn(
                f"timeline entry {applied.seq} was here before and is missing now; so may be steps after the last one "
                "listed. If an older copy was put back on purpose, all is well.",
                StoreWarning,
                stacklevel=5,
            )
        return True

    def _is_readable(self, seq: int) -> bool:
        try:
            self._timeline.read(seq)
        except (CorruptionError, NotFoundError):
            return False
        return True

    def _can_read(self, object_id: ObjectId) -> bool:
        try:
            self.reader.read(object_id)
        except (CorruptionError, IncompleteError):
            return False
        except StorageError as error:
            if not is_about_file(error):
                raise
            return False  # a sector that stays bad must not shut the store
        return True

    def _last_known(self) -> int:
        try:
            return self.applied().seq
        except CasckptError:
            return -1

    def rebuild(self, *, at_least: int = -1) -> None:
        """Make all rows again from packs and timeline, into a new generation or, if that cannot be, into memory.

        Args:
            at_least: a number that is known to have been taken: what is missing up to it is reported, not used again.

        Raises:
            StorageError: a file of the store could not be read now; nothing is concluded from that.
        """
        with self._lock:
            if self._read_only:
                self._use_memory(at_least)
                return
            self.reader.forget_files()
            kv = self._home.rebuild(lambda kv: self._fill(kv, at_least))
            if kv is not None:
                self._replace(kv)
                if self.applied().seq < at_least:
                    self.rebuild(at_least=at_least)  # another process's, which does not know that number
            else:
                warnings.warn(
                    f"the index on disk cannot be used, one in memory takes its place: {self._home.reason}",
                    StoreWarning,
                    stacklevel=3,
                )
                self._use_memory(at_least)

    def _fill(self, kv: Kv, at_least: int) -> None:
        """The rows of everything that is here; from the start again when a collector sweeps meanwhile.

        Of entries that this handle knew already, those that were taken for lost stay so.
        """
        unread, last = set(self._unread), -1 if self._kv is None else self._last_known()
        try:
            while True:
                try:
                    return self._fill_once(kv, at_least)
                except PackGone:
                    with kv.write() as txn:
                        _clear(txn)
        finally:
            self._unread = {seq: error for seq, error in self._unread.items() if seq in unread or seq > last}

    def _use_memory(self, at_least: int = -1) -> None:
        kv = MemoryKv(TABLES)
        self._fill(kv, at_least)
        self._replace(kv)

    def _replace(self, kv: Kv) -> None:
        """Use another index. The old one is closed once the last thread that has taken it lets go of it."""
        old = self._kv  # its last user closes it, not here where a lock is held
        with self.reader.renumbering():
            self._kv = kv
        del old

    def _fill_once(self, kv: Kv, at_least: int) -> None:
        """The rows that applying entry after entry gives.

        Where one is lost, all packs that are here are looked into: it must not take objects away from later snapshots.
        Otherwise those that no entry names are no part of the store.

        Where packs were condemned or entries sealed, the others are looked into first: a manifest may lie in a later
        one than that of the commit that needs it. So they are where epochs are here and the entry that sealed them is
        not, as in a copy that was made meanwhile: what was inlined in their entries lies in files that are left, or in
        packs that nothing names yet.
        """
        fs = self._timeline.fs
        packs = _Packs(self._timeline, {})
        is_told = self._apply_all(kv, at_least, packs)
        with kv.read() as txn:
            applied = read_applied(txn)
            is_whole = is_told and applied is not None and not applied.gaps and not read_meta(txn, BAD, BadEntry)
            if is_whole and last_condemned(txn) < 0:
                return
            known = dict(decode_pack_row(row) for _, row in txn.scan("packs"))
            sealed = epoch_count(txn)
        with kv.write() as txn:
            _clear(txn)
            for pack_id in list_packs(fs, self._root):
                is_wanted = known.get(pack_id) != CONDEMNED and not (is_whole and pack_id not in known)
                rows = packs.rows(pack_id) if is_wanted else ()
                if rows:
                    add_pack(txn, pack_id, packs.size(pack_id), rows)
            for seq in self._timeline.file_numbers(entries_of(sealed).start) if sealed or not is_told else ():
                with contextlib.suppress(CorruptionError, NotFoundError):
                    add_inlined(txn, self._timeline.read_file(seq)[0])
        self._apply_all(kv, at_least, packs)
        if not is_told:
            with kv.write() as txn:
                txn.put("meta", UNTOLD, b"")

    def _apply_all(self, kv: Kv, at_least: int, packs: _Packs) -> bool:
        """Everything that is here, in order; returns whether all that is in epochs was sealed by an entry that is here.

        Raises:
            PackGone: entries were sealed meanwhile, and the entry that says so is not among those applied.
        """
        reads = _Reads(ObjectReader(self._root, self._timeline, lambda: kv))
        numbers = self._timeline.numbers()
        digest: bytes = NO_DIGEST
        last_sealed = -1
        for start in range(0, len(numbers), _ENTRIES_PER_TRANSACTION):
            with kv.write() as txn:
                for seq in numbers[start : start + _ENTRIES_PER_TRANSACTION]:
                    digest, is_sealed = self._apply_one(txn, seq, None, packs, reads, may_skip=True)
                    if is_sealed:
                        last_sealed = seq
                        packs.sealed[epoch_of(seq)] += 1
        last = max([0, at_least, *numbers[-1:]])  # number 0 is taken in every store, even where its file is lost
        present = set(numbers)
        digest = digest if last in present else NO_DIGEST
        with kv.write() as txn:
            is_told = last_sealed < entries_of(epoch_count(txn)).start
            mark_applied(txn, last, digest, (seq for seq in range(last + 1) if seq not in present))
        if not is_told and self._timeline.exists(last + 1):
            raise PackGone
        return is_told


def _follow(start: int, numbers: Sequence[int]) -> bool:
    """Whether these begin with `start` and none of them is left out."""
    return list(numbers) == list(range(start, start + len(numbers)))


def _clear(txn: KvWriter) -> None:
    for table in TABLES:
        for key in [key for key, _ in txn.scan(table)]:
            txn.delete(table, key)


class _Unread(Exception):
    """The medium refuses to give an entry: neither it nor what comes after it is applied."""


class _Reads:
    """Objects read while entries are applied.

    Attributes:
        has_failed: one of them could not be read; not that it is not here, as in a copy under way.
    """

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader
        self.has_failed = False

    def __call__(self, object_id: ObjectId, txn: KvWriter) -> bytes:
        try:
            return self._reader.read(object_id, txn)
        except CasckptError as error:
            self.has_failed = self.has_failed or not isinstance(error, IncompleteError)
            raise


class _Packs:
    """Sizes and rows of packs, from the commit that wrote them where it is ours, else from the files."""

    def __init__(self, timeline: Timeline, known: Mapping[bytes, Sequence[PackRow]]) -> None:
        self._timeline = timeline
        self._known = known
        self.unreadable: set[bytes] = set()
        self.sealed: Counter[int] = Counter()  # epoch to how many of its entries were applied as they are in it

    def size(self, pack_id: bytes) -> int:
        if pack_id in self.unreadable:
            return UNREADABLE
        size = self._timeline.fs.size(pack_path(self._timeline.root, pack_id))
        return -1 if size is None else size

    def rows(self, pack_id: bytes) -> Sequence[PackRow]:
        if pack_id in self._known:
            return self._known[pack_id]
        try:
            timeline = self._timeline
            found = read_rows(timeline.fs, timeline.root, pack_id, timeline.store_id)[0]
        except (FileNotFoundError, CorruptionError):
            return ()
        except StorageError as error:
            if not is_about_file(error):
                raise
            self.unreadable.add(pack_id)
            return ()
        self.unreadable.discard(pack_id)
        return found

    def inlined(self, seqs: Iterable[int]) -> set[ObjectId] | None:
        found: set[ObjectId] = set()
        try:
            for seq in seqs:
                if self.sealed[epoch_of(seq)] < len(entries_of(epoch_of(seq))):
                    found |= inlined_ids(self._timeline.read_file(seq)[0])
        except (NotFoundError, CorruptionError):
            return None
        return found

    def has_changed(self, pending: Pending) -> bool:
        """Whether a pack that made an entry pending is another one now, or can be read at last."""
        if pending.found_size == UNREADABLE:
            return bool(self.rows(pending.pack_id))
        return self.size(pending.pack_id) != pending.found_size
