"""The one ordered log: entry files under consecutive numbers.

An entry appears under its number by a link that fails when the number is taken: that is the only commit point, and the
only arbiter between writers. Numbers are never used twice: a writer appends after the highest number that it can see,
and never fills a gap.

`tmp/` holds files being written. Their names carry the writer's identity, so that a collector can tell whose they are.
"""

from __future__ import annotations

import contextlib
import re
from itertools import pairwise

from casckpt.digest import digest
from casckpt.errors import CorruptionError, NotFoundError
from casckpt.format.entry import Entry, decode_entry
from casckpt.ids import NO_DIGEST, EntryDigest, StoreId
from casckpt.limits import ENTRIES_PER_SHARD, ENTRY_SIZE_MAX, GAP_MAX
from casckpt.storage.fs import FileSystem, is_about_file, read_file
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

    @property
    def fs(self) -> FileSystem:
        return self._system.file_system

    def path(self, seq: int) -> str:
        return f"{self.folder}/{seq // ENTRIES_PER_SHARD:0{SHARD_DIGITS}d}/{seq:0{SEQ_DIGITS}d}"

    def exists(self, seq: int) -> bool:
        return self.fs.size(self.path(seq)) is not None

    def read(self, seq: int) -> Entry:
        """Entry `seq`, fully checked.

        Raises:
            NotFoundError: there is no such number.
            CorruptionError: damaged, or it belongs to another store.
            StorageError: it could not be read now, which says nothing of its content.
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
        return entry

    def link_digest(self, seq: int) -> EntryDigest:
        """What the entry after `seq` links to: its digest, that of the damaged bytes, or zeros when it is missing."""
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
        """All numbers from `start` on that have a file, ascending. Lists folders: for doubt, not for every call."""
        found = []
        for shard in self.fs.list(self.folder):
            if not _SHARD.fullmatch(shard) or (int(shard) + 1) * ENTRIES_PER_SHARD <= start:
                continue
            for name in self.fs.list(f"{self.folder}/{shard}"):
                # A number outside its own shard is a stray file: `path` never leads to it.
                if _SEQ.fullmatch(name) and int(name) >= start and int(name) // ENTRIES_PER_SHARD == int(shard):
                    found.append(int(name))
        found.sort()
        jumps = (at for at, (one, two) in enumerate(pairwise([start - 1, *found])) if two - one > GAP_MAX)
        return found[: next(jumps, len(found))]

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
        file = self.fs.create(temporary)
        try:
            try:
                file.write([encoded], 0)
                file.sync()
            finally:
                file.close()
            if is_verified and read_file(self.fs, temporary, ENTRY_SIZE_MAX) != encoded:
                raise CorruptionError(
                    f"timeline entry {seq}: what was read back is not what was written. Nothing was committed. "
                    "Check this disk (`casckpt doctor`).",
                    seq=seq,
                )
            try:
                self.fs.link(temporary, path)
            except FileExistsError:
                return self._is_ours(path, encoded)
            self.fs.sync_folder(shard)
            return True
        finally:
            # A leftover temporary file is the collector's to remove; it must not turn a commit into an error.
            with contextlib.suppress(OSError):
                self.fs.unlink(temporary)

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
