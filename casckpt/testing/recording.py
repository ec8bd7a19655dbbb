"""Record a workload's file operations, and enumerate what a crash at any moment may leave on the disk.

Mental model of a disk: a *file* is durable content plus the operations on it since its last sync; a *folder* is
durable names plus the changes to its names since it was last synced. Names and contents are independent, so a name
may survive while the content behind it does not. A kill keeps everything (the kernel has it); a power cut keeps any
permitted part. `crash_states` yields, for every prefix of the log, one state per choice of names × choice of data::

    names   kept · undone · without one recent change · one folder cut after its first changes
    data    kept · dropped · zeros · only the last write of each file · last write torn

A torn write has its first bytes only (cut at one byte, sector boundaries, the middle, one byte short), the rest
missing or zeros; it is also what a kill in the middle of a write leaves. Choices that give equal content and the same
marks are one state. Order is deterministic.

The model is harsher than most file systems: a rename between folders may be half done, and a new folder is lost with
all in it unless its parent was synced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from casckpt.storage.fs import FileSystem
from casckpt.testing.wrapping import MUTATING, Operation, WrappedFileSystem

T = TypeVar("T")

SECTOR_SIZE = 512  # what disks write atomically at worst
RECENT_CHANGES_MAX = 6  # name changes per folder undone one by one; older ones only all together


@dataclass(frozen=True)
class Mark:
    """A point of the log named by the test: what was begun or acknowledged there."""

    value: Any


class RecordingFileSystem(WrappedFileSystem):
    """Performs everything on `inner` and keeps the log of what changed the disk.

    Args:
        inner: where operations really happen.
        root: folder that exists and is durable at the start; paths in the log are relative to it, and operations
            outside it are an error of the test.
    """

    def __init__(self, inner: FileSystem, root: str) -> None:
        super().__init__(inner)
        self.log: list[Operation | Mark] = []
        self._root = os.path.join(root, "")
        self._lock = threading.Lock()

    def mark(self, value: Any) -> None:
        """Note in the log that something was begun or acknowledged."""
        with self._lock:
            self.log.append(Mark(value))

    def perform(self, operation: Operation, act: Callable[[], T]) -> T:
        if operation.name not in MUTATING or operation.name == "close":
            return act()
        with self._lock:  # one at a time, so that the log is the order in which the disk saw them
            done = act()
            self.log.append(
                replace(
                    operation,
                    path=self._relative(operation.path),
                    target=operation.target and self._relative(operation.target),
                    file=None,
                )
            )
        return done

    def _relative(self, path: str) -> str:
        relative = os.path.relpath(path, self._root)
        if relative.startswith(".."):
            raise ValueError(f"{path} is outside the recorded folder {self._root}")
        return relative


@dataclass(frozen=True)
class CrashState:
    """One possible content of the disk after a crash.

    Attributes:
        label: how it came to be; unique within a log.
        prefix: operations that had been carried out.
        marks: values marked before the crash.
        files: content by path relative to the recorded folder.
        folders: paths of folders, parents before children.
    """

    label: str
    prefix: int
    marks: tuple[Any, ...]
    files: Mapping[str, bytes]
    folders: tuple[str, ...]

    def write_to(self, folder: str) -> None:
        """Make `folder` (which exists) look like this. Nothing is synced."""
        for path in self.folders:
            os.mkdir(os.path.join(folder, path))
        for path, content in self.files.items():
            with open(os.path.join(folder, path), "xb") as file:
                file.write(content)


def crash_states(log: list[Operation | Mark], prefixes: Container[int] | None = None) -> Iterator[CrashState]:
    """Every distinct state that a crash during the recorded workload may leave. See the module for the model.

    Args:
        log: what was recorded.
        prefixes: after how many operations the power may go; None for any number.

    Cost: states per operation grow with what is unsynced at that moment (tens), not with the length of the log.
    """
    disk = _Disk()
    seen: set[Hashable] = set()
    marks: list[Any] = []
    total = sum(isinstance(step, Operation) for step in log)
    done, last = 0, "start"
    for step in [None, *log]:
        if isinstance(step, Mark):
            marks.append(step.value)
        elif step is not None:
            disk.apply(step)
            done, last = done + 1, str(step)
        if prefixes is not None and done not in prefixes:
            continue
        for choice, files, folders in disk.possible():
            fingerprint = _fingerprint(files, folders, len(marks))
            if fingerprint not in seen:
                seen.add(fingerprint)
                label = f"{done} of {total} ({last}), {len(marks)} marks: {choice}"
                yield CrashState(label, done, tuple(marks), files, folders)


def after_power_cut(log: list[Operation | Mark]) -> CrashState:
    """What is left at the end of a log of everything that was synced, and nothing else."""
    disk = _Disk()
    steps = [step for step in log if isinstance(step, Operation)]
    for step in steps:
        disk.apply(step)
    marks = tuple(step.value for step in log if isinstance(step, Mark))
    files, folders = disk.synced()
    return CrashState(f"power cut after all {len(steps)}", len(steps), marks, files, folders)


def _fingerprint(files: Mapping[str, bytes], folders: tuple[str, ...], mark_count: int) -> Hashable:
    # hash() of bytes is computed once per object, and unchanged files keep theirs: far cheaper than a digest
    return mark_count, folders, tuple((path, len(files[path]), hash(files[path])) for path in sorted(files))


_FOLDER = 0  # value of a name that is a folder; files have positive ids
_GONE = -1
_Change = tuple[str, int]  # a name in one folder, and what it became
_Names = dict[str, int]


class _StoredFile:
    """Durable content and the operations since."""

    def __init__(self) -> None:
        self.durable = b""
        self.pending: list[Operation] = []

    def sync(self) -> None:
        self.durable = self.content("kept")
        self.pending = []

    def content(self, choice: str) -> bytes:
        """What is in the file when the disk chose so for all files (`_DATA_CHOICES`)."""
        if choice == "dropped" or not self.pending:
            return self.durable
        if choice == "zeros":
            size = len(self.content("kept"))
            return self.durable[:size] + bytes(max(0, size - len(self.durable)))
        if choice == "only the last write":
            return _run(self.content("zeros"), self.pending[-1:])
        return _run(self.durable, self.pending)

    def torn(self) -> Iterator[tuple[str, bytes]]:
        """Contents with the last write cut."""
        if not self.pending or self.pending[-1].name != "write":
            return
        last = self.pending[-1]
        before, whole = _run(self.durable, self.pending[:-1]), self.content("kept")
        for cut in _cuts(last.offset, len(last.data)):
            short = _run(before, [replace(last, data=last.data[:cut])])
            yield f"torn after {cut} of {len(last.data)} bytes", short
            if len(short) < len(whole):
                yield f"torn after {cut} of {len(last.data)} bytes, then zeros", short + bytes(len(whole) - len(short))


_DATA_CHOICES = ("kept", "dropped", "zeros", "only the last write")


def _cuts(offset: int, size: int) -> list[int]:
    """Where to tear a write: both ends, the middle, and the sector boundaries next to all three."""
    points = {1, size // 2, size - 1}
    for near in (0, size // 2, size - 1):
        points.add((offset + near) // SECTOR_SIZE * SECTOR_SIZE - offset)
        points.add((offset + near) // SECTOR_SIZE * SECTOR_SIZE - offset + SECTOR_SIZE)
    return sorted(point for point in points if 0 < point < size)


def _run(content: bytes, operations: list[Operation]) -> bytes:
    buffer = bytearray(content)
    for operation in operations:
        if operation.name == "truncate" and operation.size < len(buffer):
            del buffer[operation.size :]
        end = operation.offset + len(operation.data) if operation.name == "write" else operation.size
        buffer.extend(bytes(max(0, end - len(buffer))))
        if operation.name == "write":
            buffer[operation.offset : end] = operation.data
    return bytes(buffer)


class _StoredFolder:
    """Durable names and the changes since."""

    def __init__(self) -> None:
        self.durable: _Names = {}
        self.pending: list[_Change] = []

    def sync(self) -> None:
        self.durable = _change(self.durable, self.pending)
        self.pending = []


def _change(names: _Names, changes: list[_Change]) -> _Names:
    changed = dict(names)
    for name, value in changes:
        if value == _GONE:
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


class _Disk:
    """Files by id and folders by path; "." is the recorded folder."""

    def __init__(self) -> None:
        self._files: dict[int, _StoredFile] = {}
        self._folders: dict[str, _StoredFolder] = {".": _StoredFolder()}
        self._last_written = -1

    def apply(self, step: Operation) -> None:
        if step.name == "create":
            self._files[step.file_id] = _StoredFile()
            self._set(step.path, step.file_id)
        elif step.name in ("write", "preallocate", "truncate"):
            self._files[step.file_id].pending.append(step)
            self._last_written = step.file_id
        elif step.name == "sync":
            self._files[step.file_id].sync()
        elif step.name in ("rename", "link"):
            self._set(step.target, self._get(step.path))
            if step.name == "rename":
                self._set(step.path, _GONE)
        elif step.name == "unlink":
            self._set(step.path, _GONE)
        elif step.name == "make_folder" and step.path not in self._folders:
            self._folders[step.path] = _StoredFolder()
            self._set(step.path, _FOLDER)
        elif step.name == "sync_folder":
            self._folders[step.path].sync()

    def possible(self) -> Iterator[tuple[str, dict[str, bytes], tuple[str, ...]]]:
        """(label, files, folders) of every permitted state, the one after a kill first."""
        for names_label, names in self._possible_names():
            for data in _DATA_CHOICES:
                contents = {i: file.content(data) for i, file in self._files.items()}
                yield f"names {names_label}, data {data}", *_tree(names, contents)
            torn = self._files.get(self._last_written)
            if torn is not None:
                contents = {i: file.content("kept") for i, file in self._files.items()}
                for label, content in torn.torn():
                    contents[self._last_written] = content
                    yield f"names {names_label}, last write {label}", *_tree(names, contents)

    def synced(self) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """Files and folders with what is durable alone."""
        names = {path: folder.durable for path, folder in self._folders.items()}
        return _tree(names, {i: file.content("dropped") for i, file in self._files.items()})

    def _possible_names(self) -> Iterator[tuple[str, dict[str, _Names]]]:
        everything = {path: _change(f.durable, f.pending) for path, f in self._folders.items()}
        yield "kept", everything
        yield "undone", {path: f.durable for path, f in self._folders.items()}
        for path, folder in self._folders.items():
            pending = folder.pending
            for i in range(max(0, len(pending) - RECENT_CHANGES_MAX), len(pending)):
                without = _change(folder.durable, pending[:i] + pending[i + 1 :])
                yield f"without change {i} of {path}", {**everything, path: without}
                yield f"of {path} only the first {i}", {**everything, path: _change(folder.durable, pending[:i])}

    def _get(self, path: str) -> int:
        folder, name = os.path.split(path)
        names = self._folders[folder or "."]
        return _change(names.durable, names.pending)[name]

    def _set(self, path: str, value: int) -> None:
        folder, name = os.path.split(path)
        self._folders[folder or "."].pending.append((name, value))


def _tree(names: dict[str, _Names], contents: dict[int, bytes]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Files and folders that can be reached from the recorded folder."""
    files: dict[str, bytes] = {}
    folders: list[str] = []
    queue = ["."]
    while queue:
        folder = queue.pop(0)
        for name, value in sorted(names[folder].items()):
            path = name if folder == "." else f"{folder}/{name}"
            if value == _FOLDER:
                folders.append(path)
                queue.append(path)
            else:
                files[path] = contents[value]
    return files, tuple(folders)
