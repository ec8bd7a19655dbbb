"""Epochs: where old timeline entries are once a collector has sealed them (`format.epoch`).

An epoch is made once, complete and durable, under a name that follows from its number, and never changed. From then on
it stands for its entries: numbers in it are taken for ever, and a file that is under one of them still, or again, says
nothing. Whoever takes an entry's file away has made its epoch before; so who looks for the file first and for the epoch
afterwards finds one of the two.
"""

from __future__ import annotations

import contextlib
import re
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

from casckpt.digest import digest
from casckpt.errors import CorruptionError, StorageError
from casckpt.format.entry import HEADER_SIZE, TRAILER_SIZE, Entry, EpochRef, decode_entry
from casckpt.format.epoch import Row, Sealed, decode_head, decode_image, decode_table, framed_size, table_size
from casckpt.ids import NO_DIGEST, EntryDigest, StoreId
from casckpt.limits import ENTRIES_PER_EPOCH
from casckpt.storage.fs import File, is_about_file, write_file
from casckpt.storage.process import System

EPOCHS = "epochs"  # the folder, in that of the timeline
_NAME = re.compile("[0-9]{18}")
_TABLES_MAX = 64  # kept in memory: 6 KiB each
_READ_SIZE = 1 << 20


def epoch_of(seq: int) -> int:
    """Number of the epoch that entry `seq` belongs to."""
    return seq // ENTRIES_PER_EPOCH


def entries_of(number: int) -> range:
    """Numbers of the entries in epoch `number`."""
    return range(number * ENTRIES_PER_EPOCH, (number + 1) * ENTRIES_PER_EPOCH)


class Epochs:
    """The epochs of one store. Thread-safe; remembers nothing but tables, which never change."""

    def __init__(self, timeline_folder: str, store_id: StoreId, system: System) -> None:
        self.folder = f"{timeline_folder}/{EPOCHS}"
        self._store_id = store_id
        self._system = system
        self._tables: OrderedDict[int, list[Row]] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, number: int) -> str:
        return f"{self.folder}/{number:018d}"

    def size(self, seq: int) -> int | None:
        """Bytes of the file of the epoch that entry `seq` belongs to; None while there is none."""
        return self._system.file_system.size(self.path(epoch_of(seq)))

    def numbers(self, start: int = 0) -> list[int]:
        """Numbers of all epochs from `start` on that are here, ascending. Lists the folder; looks at no older name."""
        names = self._system.file_system.list(self.folder)
        first = bisect_left(names, f"{start:018d}")
        return [int(name) for name in names[first:] if _NAME.fullmatch(name)]

    def digest(self, seq: int) -> EntryDigest | None:
        """The digest that entry `seq` had; None while it is not in an epoch.

        Raises:
            CorruptionError: there is the epoch, and its table is damaged.
        """
        row = self._row(seq)
        return None if row is None else row.digest

    def read(self, seq: int, *, is_known: bool = False) -> Entry | None:
        """Entry `seq` without inlined objects; None while it is not in an epoch.

        Args:
            seq: its number.
            is_known: look only into epochs that were read before.

        Raises:
            CorruptionError: the epoch's table, or this entry's image, is damaged.
        """
        number = epoch_of(seq)
        if is_known and number not in self._tables:
            return None
        row = self._row(seq)
        if row is None:
            return None
        what = f"timeline entry {seq} in epoch {number}"
        entry = decode_image(self._image(number, row), row, seq, what)
        if entry.store_id != self._store_id:
            raise CorruptionError(f"{what}: belongs to store {entry.store_id.hex()}", seq=seq)
        return entry

    def sealed(self, seq: int) -> Sealed | None:
        """What went into an epoch of entry `seq`; None while it is not in one.

        Raises:
            As `read`.
        """
        number, size = epoch_of(seq), self.size(seq)
        if size is None:
            return None
        row = self._read_head(number, size)[1][seq - entries_of(number).start]  # not one that was found without a table
        image = self._image(number, row)
        decode_image(image, row, seq, f"timeline entry {seq} in epoch {number}")
        return Sealed(row.digest, row.entry_size, image)

    def image(self, seq: int) -> bytes | None:
        """What an epoch holds of entry `seq`, not checked; None while it is not in one."""
        row = self._row(seq)
        return None if row is None else self._image(epoch_of(seq), row)

    def _image(self, number: int, row: Row) -> bytes:
        with self._opened(number) as file:
            return _read(file, row.offset, row.size)

    def _row(self, seq: int) -> Row | None:
        number = epoch_of(seq)
        with self._lock:
            table = self._tables.get(number)
        if table is None:
            size = self.size(seq)
            if size is None:
                return None
            table = self._read_table(number, size)
            with self._lock:
                self._tables[number] = table
                while len(self._tables) > _TABLES_MAX:
                    self._tables.popitem(last=False)
        return table[seq - entries_of(number).start]

    def _read_table(self, number: int, size: int) -> list[Row]:
        """The table of an epoch; where it is damaged, what is found without it.

        Raises:
            CorruptionError: it is of another store, or nothing can be found.
        """
        try:
            found, rows = self._read_head(number, size)
        except CorruptionError:
            rows = self._find_rows(number)
            if not rows[0].size:
                raise
            return rows
        if found != self._store_id:
            raise CorruptionError(f"epoch {number} belongs to store {found.hex()}, this is {self._store_id.hex()}.")
        return rows

    def _read_head(self, number: int, size: int) -> tuple[StoreId, list[Row]]:
        what, entries = f"epoch {number}", entries_of(number)
        with self._opened(number) as file:
            head = _read(file, 0, HEADER_SIZE + table_size(len(entries)))
        found = decode_head(head[:HEADER_SIZE], entries.start, len(entries), size, what)
        return found, decode_table(head[HEADER_SIZE:], len(entries), size, what)

    def _find_rows(self, number: int) -> list[Row]:
        """What the table would say, from the images alone.

        An entry's digest is what the next one links to, and of the last zeros; sizes of files are not known. Behind an
        image that is damaged as well nothing is found: those rows say no bytes.
        """
        rows: list[Row] = []
        at = HEADER_SIZE + table_size(len(entries_of(number)))
        with self._opened(number) as file, contextlib.suppress(CorruptionError):
            for seq in entries_of(number):
                image = _read(file, at, framed_size(_read(file, at, HEADER_SIZE)))
                previous = EntryDigest(decode_entry(image, seq, "").envelope.previous)
                rows[-1:] = [each._replace(digest=previous) for each in rows[-1:]]
                rows.append(Row(NO_DIGEST, len(image), at, len(image)))
                at += len(image)
        return rows + [Row(NO_DIGEST, 0, at, 0)] * (len(entries_of(number)) - len(rows))

    def check(self, ref: EpochRef) -> None:
        """Prove that an epoch is, byte for byte, the one that an entry names. Costs reading it.

        Raises:
            CorruptionError: it is not, or it is not here.
        """
        what = f"epoch {ref.number}"
        if self._system.file_system.size(self.path(ref.number)) is None:
            raise CorruptionError(f"{what} is missing. Copy {self.path(ref.number)} back from a copy of this store.")
        with self._opened(ref.number) as file:  # whatever lies there: no more is read than was meant
            data = _read(file, 0, ref.size) if file.size() == ref.size else b""
        if digest(data[:-TRAILER_SIZE]) != ref.digest or data[-TRAILER_SIZE:] != ref.digest:
            raise CorruptionError(
                f"{what}: not as it was written. Run `casckpt repair --from` with a copy of this store.",
                number=ref.number,
            )

    def publish(self, number: int, encoded: bytes) -> None:
        """Give an epoch its name, unless it is there; durable when this returns.

        Raises:
            StorageError, CorruptionError: there is no such epoch yet.
        """
        fs = self._system.file_system
        fs.make_folder(self.folder)
        fs.sync_folder(self.folder.rpartition("/")[0])
        temporary = self._system.temporary_path(self.folder.rpartition("/timeline/")[0])
        try:
            write_file(fs, temporary, [encoded])
            with contextlib.suppress(FileExistsError):  # its bytes follow from the entries: it is the same
                fs.link(temporary, self.path(number))
            fs.sync_folder(self.folder)
        finally:
            with contextlib.suppress(OSError):
                fs.unlink(temporary)

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[File]:
        path = self.path(number)
        try:
            file = self._system.file_system.open(path)
        except StorageError as error:
            if not is_about_file(error):
                raise
            raise CorruptionError(f"epoch {number}: {error}", number=number, path=path) from error
        try:
            yield file
        except StorageError as error:
            if not is_about_file(error):
                raise
            raise CorruptionError(f"epoch {number}: {error}", number=number, path=path) from error
        finally:
            file.close()


def _read(file: File, offset: int, size: int) -> bytes:
    """Bytes of a file; fewer where it ends before."""
    data = memoryview(bytearray(size))
    count = 0
    while count < size:
        found = file.read_into(data[count : count + _READ_SIZE], offset + count)
        count += found
        if not found:
            break
    return bytes(data[:count])
