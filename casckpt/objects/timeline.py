"""The one ordered log: entry files under consecutive numbers.

An entry appears under its number by a link that fails when the number is taken: that is the only commit point, and the
only arbiter between writers. Numbers are never used twice: a writer appends after the highest number that it can see,
and never fills a gap.

Old entries lie in epochs, without the objects that were inlined in them (`epochs`). An epoch wins over whatever has one
of its numbers: a writer that was away so long that its number has been sealed and its file's name is free again finds
that out after linking, before it acknowledges.

`tmp/` holds files being written. Their names carry the writer's identity, so that a collector can tell whose they are.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from itertools import pairwise

from casckpt.digest import digest
from casckpt.errors import CorruptionError, NotFoundError
from casckpt.format.entry import TRAILER_SIZE, Entry, decode_entry
from casckpt.ids import NO_DIGEST, EntryDigest, StoreId
from casckpt.limits import ENTRIES_PER_SHARD, ENTRY_SIZE_MAX, GAP_MAX
from casckpt.objects.epochs import Epochs, entries_of, epoch_of
from casckpt.storage.fs import FileSystem, is_about_file, read_file, write_file
from casckpt.storage.process import System

SEQ_DIGITS, SHARD_DIGITS = 20, 14
_SEQ, _SHARD = (re.compile(f"[0-9]{{{digits}}}") for digits in (SEQ_DIGITS, SHARD_DIGITS))


class Timeline:
    """The log of one store. Holds no state that another process could make stale."""

    def __init__(self, root: str, store_id: StoreId, system: System) -> None:
        self.root = root
        self.folder = f"{root}/timeline"
        self.store_id = store_id
        self._system = system
        self.epochs = Epochs(self.folder, store_id, system)

    @property
    def fs(self) -> FileSystem:
        return self._system.file_system

    def path(self, seq: int) -> str:
        return f"{self.folder}/{seq // ENTRIES_PER_SHARD:0{SHARD_DIGITS}d}/{seq:0{SEQ_DIGITS}d}"

    def exists(self, seq: int) -> bool:
        """Whether the number is taken."""
        return self.size(seq) >= 0

    def size(self, seq: int) -> int:
        """Bytes of the file that holds entry `seq`, by itself or with others of its epoch; -1 when there is none."""
        size = self.fs.size(self.path(seq))
        size = self.epochs.size(seq) if size is None else size
        return -1 if size is None else size

    def read(self, seq: int) -> Entry:
        """Entry `seq`, fully checked.

        Raises:
            NotFoundError: there is no such number.
            CorruptionError: damaged, or it belongs to another store.
            StorageError: it could not be read now, which says nothing of its content.
        """
        entry = self.epochs.read(seq, is_known=True)
        if entry is not None:
            return entry
        try:
            found = self.read_file(seq)[0]
        except (NotFoundError, CorruptionError):
            entry = self.epochs.read(seq)
            if entry is None:
                raise
            return entry
        return self.epochs.read(seq) or found  # after the file: see `epochs`

    def read_file(self, seq: int) -> tuple[Entry, bytes]:
        """Entry `seq` from its own file, whether it is in an epoch or not, and that file's bytes.

        Raises:
            As `read`.
        """
        path = self.path(seq)
        try:
            data = read_file(self.fs, path, ENTRY_SIZE_MAX)
        except FileNotFoundError:
            raise NotFoundError(f"timeline entry {seq}: no such file {path}", seq=seq) from None
        except OSError as error:
            if not is_about_file(error):
                raise
            raise CorruptionError(f"timeline entry {seq}: {error}", seq=seq, path=path) from error
        entry = decode_entry(data, seq, f"timeline entry {seq}")
        if entry.store_id != self.store_id:
            raise CorruptionError(
                f"timeline entry {seq} belongs to store {entry.store_id.hex()}, this is {self.store_id.hex()}. "
                "Remove the foreign file from timeline/.",
                seq=seq,
            )
        return entry, data

    def link_digest(self, seq: int) -> EntryDigest:
        """What the entry after `seq` links to: its digest, that of the damaged bytes, or zeros when it is missing."""
        found = self._file_digest(seq)
        with contextlib.suppress(CorruptionError):
            found = self.epochs.digest(seq) or found
        return found

    def _file_digest(self, seq: int) -> EntryDigest:
        try:
            data = read_file(self.fs, self.path(seq), ENTRY_SIZE_MAX)
        except FileNotFoundError:
            return NO_DIGEST
        except OSError as error:
            if not is_about_file(error):
                raise
            return NO_DIGEST
        try:
            return decode_entry(data, seq, "").digest
        except CorruptionError:
            return EntryDigest(digest(data))

    def numbers(self, start: int = 0) -> list[int]:
        """All numbers from `start` on that are taken, ascending. Lists folders: for doubt, not for every call.

        Epochs last: what is sealed meanwhile is met as a file, or there.
        """
        found = self.file_numbers(start)
        taken = {seq for number in self.epochs.numbers(epoch_of(start)) for seq in entries_of(number) if seq >= start}
        found = sorted(taken.union(found)) if taken else found
        jumps = (at for at, (one, two) in enumerate(pairwise([start - 1, *found])) if two - one > GAP_MAX)
        return found[: next(jumps, len(found))]

    def file_numbers(self, start: int = 0) -> list[int]:
        """All numbers from `start` on that have a file of their own, ascending."""
        found = []
        shards = self.fs.list(self.folder)
        first = bisect_left(shards, f"{start // ENTRIES_PER_SHARD:0{SHARD_DIGITS}d}")
        for shard in shards[first:]:
            if not _SHARD.fullmatch(shard):
                continue
            for name in self.fs.list(f"{self.folder}/{shard}"):
                # A number outside its own shard is a stray file: `path` never leads to it.
                if _SEQ.fullmatch(name) and int(name) >= start and int(name) // ENTRIES_PER_SHARD == int(shard):
                    found.append(int(name))
        return sorted(found)

    def append(self, seq: int, encoded: bytes, *, is_verified: bool = True) -> bool:
        """Publish `encoded` under `seq`: durable when this returns True; False when the number is taken.

        Costs one file creation, two syncs (file, folder), and with `is_verified` one read back of the small file.

        Raises:
            StorageError: nothing was published; except when the message says that the entry may be.
        """
        path = self.path(seq)
        shard = path.rpartition("/")[0]
        if seq % ENTRIES_PER_SHARD == 0 or self.fs.size(self.path(seq - 1)) is None:
            self.fs.make_folder(shard)
            self.fs.sync_folder(self.folder)
            if seq and seq % ENTRIES_PER_SHARD == 0:
                self.make_durable(seq - 1)  # nobody syncs that folder again, and its last writer may have died before
        temporary = self._system.temporary_path(self.root)
        try:
            write_file(self.fs, temporary, [encoded])
            if is_verified and read_file(self.fs, temporary, ENTRY_SIZE_MAX) != encoded:
                raise CorruptionError(
                    f"timeline entry {seq}: what was read back is not what was written. Nothing was committed. "
                    "Check this disk (`casckpt doctor`).",
                    seq=seq,
                )
            try:
                self.fs.link(temporary, path)
            except FileExistsError:
                return self._stands(seq, encoded, self._is_ours(path, encoded))
            self.fs.sync_folder(shard)
            return self._stands(seq, encoded, True)
        finally:
            # A leftover temporary file is the collector's to remove; it must not turn a commit into an error.
            with contextlib.suppress(OSError):
                self.fs.unlink(temporary)

    def _stands(self, seq: int, encoded: bytes, is_there: bool) -> bool:
        """Whether what was linked counts: when its number was sealed before, the epoch says whose it is for ever.

        Such a number's own name was free for as long as its file was gone; the link made there is taken back.
        """
        sealed = self.epochs.digest(seq)
        if sealed is None:
            return is_there
        if is_there and sealed != encoded[-TRAILER_SIZE:]:
            with contextlib.suppress(OSError):  # a collector does it, too
                self.fs.unlink(self.path(seq))
        return sealed == encoded[-TRAILER_SIZE:]

    def make_durable(self, last_seq: int) -> None:
        """Sync what is there up to the newest entry, before acknowledging it without an entry of one's own.

        Its writer may have died between link and sync. Older folders were synced when the next one was begun.
        """
        with contextlib.suppress(FileNotFoundError):  # a copy without that folder has nothing in it to lose
            self.fs.sync_folder(self.path(last_seq).rpartition("/")[0])

    def _is_ours(self, path: str, encoded: bytes) -> bool:
        """A lost reply, not a lost race: the file under the number is, byte for byte, the one being published."""
        try:
            found = read_file(self.fs, path, ENTRY_SIZE_MAX)
        except OSError:
            return False
        if found != encoded:
            return False
        self.fs.sync_folder(path.rpartition("/")[0])
        return True
