"""What a peer is: something that keeps a series of states on disk, driven the same way whatever it is.

A worker process makes one peer for one folder, calls `load` and `start`, and then `prepare` (outside the clock) and
`begin` for each commit. `begin` returns when the caller may train on; what it returned is called next, and returns
when the commit is **durable**: it would survive a power cut. Where a peer does not promise that by itself, its
adapter adds what a user would have to add, and `durability` says what. A restore runs in another process, with a new
peer over the same folder.

A peer over libraries or programs that are not here says so (`why_not`), and is listed with that reason.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from typing import Any, ClassVar

from benchmarks.peers._disk import size_below

State = dict[str, Any]
Wait = Callable[[], None]

OWN_FILES = "own files"  # a snapshot is restored from files of its own
REPOSITORY = "repository"  # from pieces that snapshots share; none needs another to be restored first
BOUNDED = "bounded differences"  # from pieces, some of which are differences to others, up to a stated depth
REPLAY = "chain replay"  # from the first snapshot and every difference after it

FILE_DURABILITY = "none of its own; added: fsync of the file, rename, fsync of the folder"
SYNCED = "none in a local folder; added: sync of the file system, cheaper than fsync of each new file"


def nothing_left() -> None:
    """What `begin` returns when it was durable already."""


class Peer(ABC):
    """One product with one choice of its options. Making one costs nothing and touches nothing."""

    product: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()  # Python distributions; the first one's version stands for the peer
    program: ClassVar[str | None] = None  # command that must be on the path
    restores: ClassVar[str] = OWN_FILES
    durability: ClassVar[str]
    needs_template: ClassVar[bool] = False  # restore is given a state of the right form to load into

    def __init__(self, folder: str, scratch: str, *, level: str = "") -> None:
        self.folder = folder  # everything that counts as stored
        self.scratch = scratch  # caches, the file handed to a repository, and other things that are not the store
        self.level = level

    @property
    def is_asynchronous(self) -> bool:
        """Whether training goes on before the commit is durable."""
        return False

    def version(self) -> str:
        """The release in use."""
        return metadata.version(self.packages[0])

    def why_not(self) -> str | None:
        """Why this peer cannot run here; None when it can."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not on the path"
        for package in self.packages:
            try:
                metadata.version(package)
            except metadata.PackageNotFoundError:
                return f"Python package {package} is not installed"
        return None

    def load(self) -> None:  # noqa: B027 - many have nothing to do here, nor in the next ones
        """Import what the peer needs: outside every clock."""

    def start(self) -> None:  # noqa: B027
        """Make the empty store, if there is such a thing."""

    def prepare(self, state: State) -> Any:
        """The state in the form in which this product's users hold it in memory; outside the clock."""
        return state

    @abstractmethod
    def begin(self, index: int, state: Any) -> Wait:
        """Commit what `prepare` returned as number `index`: see the module's text for what returning means."""

    @abstractmethod
    def restore(self, index: int, template: State | None) -> State:
        """The state of commit `index`, in memory that may be written to."""

    def close(self) -> None:  # noqa: B027
        """After the last commit: stop threads, close files."""

    def size(self) -> int:
        """Apparent bytes of everything stored."""
        return size_below(self.folder)

    @property
    def can_forget(self) -> bool:
        """Whether a snapshot's files may be removed without harm to the others, to free disk in a long run."""
        return self.restores == OWN_FILES

    def forget(self, index: int) -> None:
        """Remove the files of one snapshot; only where `can_forget`."""
        path = self.path(index)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def path(self, index: int) -> str:
        """The file or folder of one snapshot, where it has one of its own."""
        return os.path.join(self.folder, f"{index:05}")
