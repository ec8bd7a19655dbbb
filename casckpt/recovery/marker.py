"""The marker of a recovery: a small file of the run's own that says whether the last one came to its end.

It lies beside the training's logs, not in the store. `begin` before the first live object is touched, `finish` when the
training may go on. What a restore fills is memory and dies with the process; so a recovery that was killed is done
again from the start, and the marker says that it is the second time, and from which snapshot the first one was.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from casckpt.errors import InvalidInputError
from casckpt.storage.fs import read_file, replace_file
from casckpt.storage.process import System

RESTORING, RESTORED = "restoring", "restored"
_SIZE_MAX = 65536


class Mark(msgspec.Struct, frozen=True):
    """State (RESTORING or RESTORED), the snapshot's id (empty: a fresh start), generation, and which attempt it is."""

    state: str
    snapshot: str
    generation: int
    attempt: int


class Marker:
    """One file. Only one process recovers a run at a time: generations see to that."""

    def __init__(self, path: str | os.PathLike[str], *, system: System | None = None) -> None:
        self._path = os.fspath(path)
        self._folder = self._path.rpartition("/")[0] or "."
        self._system = system or System()

    def prepare(self) -> None:
        """Make its folder and look at it: a marker that cannot be kept is found out before anybody is fenced.

        Raises:
            InvalidInputError: the folder cannot be made, since the one above it is not there.
            StorageError: something else stands in its place.
        """
        try:
            self._system.file_system.make_folder(self._folder)
        except FileNotFoundError as error:
            raise InvalidInputError(f"marker {self._path}: there is no folder for it. Make {self._folder}.") from error
        self.read()

    def read(self) -> Mark | None:
        """The last mark; None when there is none, or none that can be read: then nothing is known of the last time."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(read_file(self._system.file_system, self._path, _SIZE_MAX), type=Mark)
        return None

    def begin(self, snapshot: str, generation: int) -> Mark:
        """A recovery begins; durable when this returns."""
        last = self.read()
        is_again = last is not None and last.state == RESTORING
        mark = Mark(RESTORING, snapshot, generation, last.attempt + 1 if is_again and last is not None else 1)
        self._write(mark)
        return mark

    def finish(self, snapshot: str, generation: int) -> None:
        """The recovery that was begun is over; durable when this returns."""
        last = self.read()
        self._write(Mark(RESTORED, snapshot, generation, last.attempt if last is not None else 1))

    def _write(self, mark: Mark) -> None:
        """In one piece: a new file in place of the old one."""
        fs = self._system.file_system
        temporary = f"{self._path}.{self._system.random_bytes(8).hex()}"
        replace_file(fs, temporary, self._path, [msgspec.json.encode(mark)])
        fs.sync_folder(self._folder)
