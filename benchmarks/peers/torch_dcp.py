"""torch.distributed.checkpoint (DCP) in one process: blocking, asynchronous, and asynchronous with staging buffers
that are kept.

DCP syncs its files itself. It loads into a state of the right form, so a restore is given one whose memory was never
touched.

Kept staging buffers: `FileSystemWriter(cache_staged_state_dict=True)` pins memory, and fails where there is no
accelerator (torch 2.13). One `DefaultStager` that lives as long as the run keeps its buffers too, without pinning;
that is what is used here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.peers._disk import fsync
from benchmarks.peers.contract import Peer, State, Wait, nothing_left

SYNC, ASYNC, KEPT_BUFFERS = "sync", "async", "async, kept buffers"


class TorchDcp(Peer):
    """One folder per snapshot; `level` is one of the three ways."""

    product = "torch DCP"
    packages = ("torch",)
    durability = "fsync of its files; added: fsync of the folders"
    needs_template = True

    @property
    def is_asynchronous(self) -> bool:
        """Whether training goes on before the commit is durable."""
        return self.level != SYNC

    def load(self) -> None:
        """Import it; make the buffers' owner."""
        self._library = import_module("torch.distributed.checkpoint")
        self._options: dict[str, Any] = {}
        if self.level == KEPT_BUFFERS:
            staging = import_module("torch.distributed.checkpoint.staging")
            plain = staging.StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
            self._options["async_stager"] = staging.DefaultStager(plain)

    def begin(self, index: int, state: Any) -> Wait:
        """One folder with one file of data and one of metadata."""
        path = self.path(index)
        if not self.is_asynchronous:
            self._library.save(state, checkpoint_id=path, no_dist=True)
            self._sync_names(path)
            return nothing_left
        future = self._library.async_save(state, checkpoint_id=path, no_dist=True, **self._options)

        def wait() -> None:
            future.result()
            self._sync_names(path)

        return wait

    def _sync_names(self, path: str) -> None:
        fsync(path)
        fsync(self.folder)

    def restore(self, index: int, template: State | None) -> State:
        """Loads into the template."""
        assert template is not None
        self._library.load(template, checkpoint_id=self.path(index), no_dist=True)
        return template

    def close(self) -> None:
        """Give the buffers back."""
        if "async_stager" in self._options:
            self._options["async_stager"].close()
