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
from collections import OrderedDict
from collections.abc import Iterator

from casckpt.digest import digest
from casckpt.errors import CorruptionError, StorageError
from casckpt.format.entry import HEADER_SIZE, TRAILER_SIZE, Entry, EpochRef
from casckpt.format.epoch import Row, decode_head, decode_image, decode_table, table_size
from casckpt.ids import EntryDigest, StoreId
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

    def numbers(self) -> list[int]:
        """Numbers of all epochs that are here, ascending."""
        return [int(name) for name in self._system.file_system.list(self.folder) if _NAME.fullmatch(name)]

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

    def image(self, seq: int) -> bytes | None:
        """What an epoch holds of entry `seq`, not checked; None while it is not in one."""
        row = self._row(seq)
        return None if row is None else self._image(epoch_of(seq), row)

    def _image(self, number: int, row: Row) -> bytes:
        with self._opened(number) as file:
            image = bytearray(row.size)
            return bytes(image[: file.read_into(image, row.offset)])

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
        what, entries = f"epoch {number}", entries_of(number)
        with self._opened(number) as file:
            head = bytearray(HEADER_SIZE + table_size(len(entries)))
            count = file.read_into(head, 0)
        found = decode_head(bytes(head[:HEADER_SIZE]), entries.start, len(entries), size, what)
        if found != self._store_id:
            raise CorruptionError(f"{what} belongs to store {found.hex()}, this is {self._store_id.hex()}.", what=what)
        return decode_table(bytes(head[HEADER_SIZE:count]), len(entries), size, what)

    def check(self, ref: EpochRef) -> None:
        """Prove that an epoch is, byte for byte, the one that an entry names. Costs reading it.

        Raises:
            CorruptionError: it is not, or it is not here.
        """
        what = f"epoch {ref.number}"
        if self._system.file_system.size(self.path(ref.number)) is None:
            raise CorruptionError(f"{what} is missing. Copy {self.path(ref.number)} back from a copy of this store.")
        with self._opened(ref.number) as file:
            size = file.size()
            data = memoryview(bytearray(size))
            for start in range(0, size, _READ_SIZE):
                file.read_into(data[start : start + _READ_SIZE], start)
        if size != ref.size or digest(data[:-TRAILER_SIZE]) != ref.digest or data[-TRAILER_SIZE:] != ref.digest:
            raise CorruptionError(
                f"{what}: not as it was written. Copy {self.path(ref.number)} back from a copy of this store.",
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
