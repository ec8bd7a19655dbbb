"""Orbax (its first version's interface), which writes all arrays of a snapshot into one OCDBT database.

What Orbax gets are named arrays: numpy arrays over the tensors' own memory, as a user of torch would hand them over,
or arrays of JAX made outside the clock, as its own users hold them. The skeleton goes into a small file beside.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

from benchmarks.peers._arrays import to_array, to_tensor
from benchmarks.peers._disk import durable_file, fsync_below
from benchmarks.peers._tree import dtype_name, flatten, unflatten
from benchmarks.peers.contract import Peer, State, Wait, nothing_left

SYNC, ASYNC, ASYNC_JAX = "sync", "async", "async, JAX arrays"


class Orbax(Peer):
    """One folder per snapshot with the defaults of `save` and `save_async`; `level` is one of three ways."""

    product = "Orbax/OCDBT"
    packages = ("orbax-checkpoint", "jax", "ml_dtypes")
    durability = "fsync of the database; added: fsync of its other files and folders"

    @property
    def is_asynchronous(self) -> bool:
        """Whether training goes on before the commit is durable."""
        return self.level != SYNC

    def load(self) -> None:
        """Import it, with 64-bit types, which JAX would otherwise narrow in silence."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_ENABLE_X64"] = "1"
        self._library = import_module("orbax.checkpoint").v1

    def prepare(self, state: State) -> Any:
        """Skeleton, dtypes and named arrays."""
        skeleton, tensors = flatten(state)
        arrays: dict[str, Any] = {f"{n:05}": to_array(tensor, extended=True) for n, tensor in enumerate(tensors)}
        if self.level == ASYNC_JAX:
            numpy = import_module("jax.numpy")
            arrays = {name: numpy.array(array, copy=True).block_until_ready() for name, array in arrays.items()}
        return {"skeleton": skeleton, "dtypes": [dtype_name(tensor.dtype) for tensor in tensors]}, arrays

    def begin(self, index: int, state: Any) -> Wait:
        """One folder, and one small file."""
        facts, arrays = state
        if not self.is_asynchronous:
            self._library.save(self.path(index), arrays)
            self._finish(index, facts)
            return nothing_left
        response = self._library.save_async(self.path(index), arrays)

        def wait() -> None:
            response.result()
            self._finish(index, facts)

        return wait

    def _finish(self, index: int, facts: dict[str, Any]) -> None:
        fsync_below(self.path(index))
        with durable_file(self.path(index) + ".json") as stream:
            stream.write(json.dumps(facts).encode())

    def restore(self, index: int, template: State | None) -> State:
        """All arrays, as Orbax recorded them."""
        with open(self.path(index) + ".json", "rb") as stream:
            facts = json.load(stream)
        arrays = self._library.load(self.path(index))
        named = [arrays[name] for name in sorted(arrays)]
        tensors = [to_tensor(array, dtype) for array, dtype in zip(named, facts["dtypes"], strict=True)]
        state: State = unflatten(facts["skeleton"], tensors)
        return state
