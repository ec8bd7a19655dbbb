"""Programs and services that find equal pieces in files: borg, restic, casync, hf-xet.

They are handed what their users would hand them: the state saved as one uncompressed file, under the same name each
time, by `torch.save` or by safetensors. Writing that file and reading it back are part of the commit and the restore,
but the file itself is not durable and not counted: the repository is. Caches and configuration go to scratch.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import abstractmethod
from importlib import import_module
from typing import Any

import torch

from benchmarks.peers._disk import run_program, size_below, sync_file_system
from benchmarks.peers.contract import REPOSITORY, SYNCED, Peer, State, Wait, nothing_left
from benchmarks.peers.tensor_files import load_safetensors, save_safetensors

TORCH, SAFETENSORS = "torch.save", "safetensors"
FILE = "state"
PASSWORD = "benchmark"  # restic encrypts always


class Repository(Peer):
    """A store of one file's versions; `level` is the file's format."""

    restores = REPOSITORY

    @abstractmethod
    def put(self, index: int, path: str) -> None:
        """Store the file as version `index`, durably."""

    @abstractmethod
    def get(self, index: int, path: str) -> None:
        """Write version `index` to the file."""

    def load(self) -> None:
        """The file format's library."""
        import_module("safetensors.torch")

    def begin(self, index: int, state: Any) -> Wait:
        """Write the file, then store it."""
        path = os.path.join(self.scratch, FILE)
        if self.level == SAFETENSORS:
            save_safetensors(state, path)
        else:
            torch.save(state, path)
        self.put(index, path)
        return nothing_left

    def restore(self, index: int, template: State | None) -> State:
        """Write the file out, then load it."""
        folder = os.path.join(self.scratch, f"restored-{index:05}")
        os.makedirs(folder)
        path = os.path.join(folder, FILE)
        self.get(index, path)
        state: State = load_safetensors(path) if self.level == SAFETENSORS else torch.load(path, weights_only=True)
        shutil.rmtree(folder)
        return state


class Borg(Repository):
    """borg without encryption, with zstd at level 3 in place of its default lz4: slower, and smaller."""

    product = "borg"
    program = "borg"
    durability = "its own"

    def version(self) -> str:
        """That of the program."""
        return _first_line(["borg", "--version"]).split()[1]

    def start(self) -> None:
        """An empty repository."""
        self._run("init", "--encryption", "none", self.folder)

    def put(self, index: int, path: str) -> None:
        """One archive."""
        folder, name = os.path.split(path)
        self._run("create", "--compression", "zstd,3", f"{self.folder}::{index:05}", name, folder=folder)

    def get(self, index: int, path: str) -> None:
        """Extract it."""
        self._run("extract", f"{self.folder}::{index:05}", folder=os.path.dirname(path))

    def _run(self, *arguments: str, folder: str | None = None) -> None:
        environment = {"BORG_BASE_DIR": self.scratch, "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
        run_program(["borg", *arguments], folder=folder, environment=environment)


class Restic(Repository):
    """restic, which compresses with zstd by default since 0.14, and always encrypts."""

    product = "restic"
    program = "restic"
    durability = "its own"

    def version(self) -> str:
        """That of the program."""
        return _first_line(["restic", "version"]).split()[1]

    def start(self) -> None:
        """An empty repository."""
        self._run("init")

    def put(self, index: int, path: str) -> None:
        """One snapshot with a tag."""
        folder, name = os.path.split(path)
        self._run("backup", "--tag", f"{index:05}", name, folder=folder)

    def get(self, index: int, path: str) -> None:
        """Restore the tag's snapshot."""
        self._run("restore", "latest", "--tag", f"{index:05}", "--target", os.path.dirname(path))

    def _run(self, command: str, *arguments: str, folder: str | None = None) -> None:
        environment = {"RESTIC_PASSWORD": PASSWORD, "RESTIC_CACHE_DIR": os.path.join(self.scratch, "cache")}
        run_program(["restic", command, "--repo", self.folder, *arguments], folder=folder, environment=environment)


class Casync(Repository):
    """casync with its default chunks (64 KiB on average, cut by content, zstd) and one index file for each version."""

    product = "casync"
    program = "casync"
    durability = SYNCED

    def version(self) -> str:
        """That of the program."""
        return _first_line(["casync", "--version"]).split()[1]

    def put(self, index: int, path: str) -> None:
        """New chunks, and an index."""
        run_program(["casync", "make", self._store(), self.path(index) + ".caibx", path])
        sync_file_system(self.folder)

    def get(self, index: int, path: str) -> None:
        """Put the chunks together."""
        run_program(["casync", "extract", self._store(), self.path(index) + ".caibx", path])

    def _store(self) -> str:
        return f"--store={os.path.join(self.folder, 'chunks.castr')}"


class HfXet(Repository):
    """hf-xet against a store in a local folder (its `local://` endpoint) instead of a server.

    Counted are xorbs, shards and what a repository keeps for each file (its hash and size), but no client-side cache
    and no lookup database of the server. On a network the transfer would come on top.
    """

    product = "hf-xet"
    packages = ("hf-xet", "safetensors", "torch")
    durability = SYNCED

    def load(self) -> None:
        """Import it; keep its logs and caches in scratch."""
        super().load()
        os.environ["HF_HOME"] = self.scratch
        self._session = import_module("hf_xet").XetSession()

    def put(self, index: int, path: str) -> None:
        """Upload into the folder, and note what names the file."""
        commit = self._session.new_upload_commit(endpoint=self._endpoint())
        commit.start_upload_file(path)
        (stored,) = commit.wait_to_finish().uploads.values()
        with open(self.path(index) + ".json", "wb") as stream:
            stream.write(json.dumps([stored.xet_info.hash, stored.xet_info.file_size]).encode())
        sync_file_system(self.folder)

    def get(self, index: int, path: str) -> None:
        """Download from the folder."""
        with open(self.path(index) + ".json", "rb") as stream:
            facts = import_module("hf_xet").XetFileInfo(*json.load(stream))
        with self._session.new_file_download_group(endpoint=self._endpoint()) as group:
            group.start_download_file(facts, path)

    def _endpoint(self) -> str:
        return f"local://{os.path.join(self.folder, 'cas')}"

    def size(self) -> int:
        """What a server would keep."""
        return size_below(self.folder, skipping=("shard-cache", "shard-session", "global_dedup_lookup.redb"))


def _first_line(command: list[str]) -> str:
    return run_program(command).decode().splitlines()[0]
