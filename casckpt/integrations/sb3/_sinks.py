"""Where a training is committed to: a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from casckpt.store.store import Store
from casckpt.store.values import RestoreReport


class StoreSink:
    """Commits every component of every snapshot to a store.

    Args:
        store: open for writing; the caller closes it.
        async_mode: return after a copy in memory; failures surface at the next save or at `drain`.
        necessity: by component, what is not "exact".
    """

    def __init__(self, store: Store, *, async_mode: bool, necessity: Mapping[str, str]) -> None:
        self._store = store
        self._async_mode = async_mode
        self._necessity = necessity

    @property
    def place(self) -> str:
        """For messages."""
        return f"run {self._store.run!r} of {self._store.path}"

    @property
    def step(self) -> int | None:
        """The step that the next save continues; None when there is none."""
        return self._store.step

    def save(self, step: int, state: Mapping[str, Any], **about: Any) -> None:
        commit = self._store.commit_async if self._async_mode else self._store.commit
        commit(step, state, necessity=self._necessity, **about)

    def drain(self) -> None:
        """Wait until everything that was saved is durable.

        Raises:
            SaveFailedError: something was not.
        """
        self._store.wait()

    def resume(self, targets: Mapping[str, Any], ref: Any, branch: str | None) -> RestoreReport:
        return self._store.resume_into(targets, ref, branch=branch)
