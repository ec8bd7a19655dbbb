"""Which large saves were under way when a process ended: notes that a save leaves while it lasts.

A note is a small file in `tmp/` whose name says which process wrote it, as the names of all temporary files do. The
save takes it away when it ends; what is left belongs to a process that was killed meanwhile, and goes when a collector
takes the other temporary files of dead processes. A note is a hint for people: it is not synced, and failing to write
it fails nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from casckpt.errors import StorageError
from casckpt.limits import PACK_TARGET_SIZE
from casckpt.storage.fs import FileSystem, read_file
from casckpt.storage.process import System, owner_of
from casckpt.store.values import Value

LARGE = PACK_TARGET_SIZE  # bytes of a state whose save is noted: smaller ones are over before anybody looks
_MAGIC = b"CASSAVE1"
_SIZE_MAX = 64 << 10


@dataclass(frozen=True)
class Interrupted(Value):
    """A save that had not ended when its process did: nothing of it is in the store beyond what listings show.

    Attributes:
        run, step, components: what was being saved.
        pid: of the process.
    """

    run: str
    step: int
    components: tuple[str, ...]
    pid: int | None

    def __str__(self) -> str:
        return f"{self.run} step {self.step} ({', '.join(self.components)}), by pid {self.pid}"


class _Note(msgspec.Struct, frozen=True):
    run: str
    step: int
    components: list[str]


@contextlib.contextmanager
def noted(root: str, system: System, run: str, step: int, components: Sequence[str]) -> Iterator[None]:
    """While the block is open, a note says what is being saved."""
    path = system.temporary_path(root)
    content = _MAGIC + msgspec.json.encode(_Note(run, step, list(components)))
    with contextlib.suppress(StorageError):  # a full disk fails the save itself, which says so
        file = system.file_system.create(path)
        try:
            file.write([content], 0)
        finally:
            file.close()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a leftover is the collector's to remove
            system.file_system.unlink(path)


def interrupted(root: str, fs: FileSystem, run: str) -> tuple[Interrupted, ...]:
    """The saves of a run that a process left unfinished, by step."""
    found = []
    for name in fs.list(f"{root}/tmp"):
        pid, state = owner_of(name)
        note = None if state == "running" else _read(fs, f"{root}/tmp/{name}")
        if note is not None and note.run == run:
            found.append(Interrupted(note.run, note.step, tuple(note.components), pid))
    return tuple(sorted(found, key=lambda each: each.step))


def _read(fs: FileSystem, path: str) -> _Note | None:
    try:
        if (fs.size(path) or 0) > _SIZE_MAX:
            return None
        content = read_file(fs, path, _SIZE_MAX)
        return msgspec.json.decode(content[len(_MAGIC) :], type=_Note) if content[:8] == _MAGIC else None
    except (OSError, msgspec.DecodeError):  # gone, torn, or no note at all
        return None
