"""Icechunk: versioned zarr arrays in one repository, a commit and a tag for each snapshot.

An array that is equal to the one committed last is not written again: versioned arrays make that natural, and
Icechunk would store it a second time otherwise. Finding out costs a copy of the state and a comparison, inside the
clock.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.peers._arrays import Array, to_array, to_tensor
from benchmarks.peers._disk import sync_file_system
from benchmarks.peers._tree import dtype_name, flatten, unflatten
from benchmarks.peers.contract import REPOSITORY, SYNCED, Peer, State, Wait, nothing_left

DEFAULT, SHUFFLED = "default (zstd)", "shuffle + zstd-3"


class Icechunk(Peer):
    """`level`: zarr's default chunks and codec, or its chunks with bytes shuffled and zstd at level 3."""

    product = "Icechunk"
    packages = ("icechunk", "zarr", "torch")
    restores = REPOSITORY
    durability = SYNCED

    def load(self) -> None:
        """Import it."""
        self._library, self._zarr = import_module("icechunk"), import_module("zarr")

    def start(self) -> None:
        """An empty repository."""
        self._repository = self._library.Repository.create(self._storage())
        self._committed: list[Array] = []

    def _storage(self) -> Any:
        return self._library.local_filesystem_storage(self.folder)

    def begin(self, index: int, state: Any) -> Wait:
        """One commit of the arrays that changed."""
        skeleton, tensors = flatten(state)
        session = self._repository.writable_session("main")
        group = self._zarr.open_group(session.store, mode="a")
        for number, tensor in enumerate(tensors):
            array = to_array(tensor, extended=False)
            before = self._committed[number] if number < len(self._committed) else None
            if before is None or not _is_same(before, array):
                self._write(group, number, array)
        group.attrs["skeleton"] = skeleton
        group.attrs["dtypes"] = [dtype_name(tensor.dtype) for tensor in tensors]
        self._repository.create_tag(f"{index:05}", session.commit(f"{index}"))
        sync_file_system(self.folder)
        return nothing_left

    def _write(self, group: Any, number: int, array: Array) -> None:
        name = f"{number:05}"
        if number >= len(self._committed):
            self._committed.append(np.empty(0))
        before = self._committed[number]
        if before.dtype == array.dtype and before.shape == array.shape:
            group[name][...] = array
            before[...] = array
            return
        options: dict[str, Any] = {}
        if self.level == SHUFFLED:
            codecs = self._zarr.codecs
            options["compressors"] = codecs.BloscCodec(cname="zstd", clevel=3, shuffle=codecs.BloscShuffle.shuffle)
        group.create_array(name, data=array, overwrite=True, **options)
        self._committed[number] = array.copy()

    def restore(self, index: int, template: State | None) -> State:
        """Opens the repository at the snapshot's tag."""
        session = self._library.Repository.open(self._storage()).readonly_session(tag=f"{index:05}")
        group = self._zarr.open_group(session.store, mode="r")
        tensors = [to_tensor(group[f"{n:05}"][...], dtype) for n, dtype in enumerate(group.attrs["dtypes"])]
        state: State = unflatten(group.attrs["skeleton"], tensors)
        return state


def _is_same(before: Array, array: Array) -> bool:
    if before.dtype != array.dtype or before.shape != array.shape:
        return False
    return bool((before.reshape(-1).view(np.uint8) == array.reshape(-1).view(np.uint8)).all())
