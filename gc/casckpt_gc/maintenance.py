"""Collections off the commit path: an object that a training calls after it published, and that never makes it wait.

`Maintenance` is what an engine is given. `after_commit` notices that enough commits have passed and begins a
collection in a thread of its own, on a handle of its own; what goes wrong there is kept as `error`, and warned of once.
Retention runs after the new snapshot is durable, never before.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from casckpt.errors import CasckptError, StoreWarning
from casckpt.store.opening import open_store
from casckpt_gc.collect import GRACE_S, POLL_S, Collection, Report
from casckpt_gc.plan import COMPACTION, Compaction, plan
from casckpt_gc.retention import AnyOf, Retention, Thinning

if TYPE_CHECKING:
    from casckpt.store.store import Store

EVERY_COMMITS = 50  # a collection looks at every object: dear beside one commit, cheap beside so many


class Maintenance:
    """Retention at work beside a training; a context manager.

    Args:
        retention: which snapshots stay.
        thinning: which components are withdrawn from those.
        every_commits: a collection begins after so many commits.
        compaction: as for `plan`.
        grace_s: as for `collect`.

    Attributes:
        error: why the last collection failed, or None.
        report: what the last collection that ended did, or None.
    """

    def __init__(
        self,
        retention: Retention | AnyOf | None = None,
        thinning: Thinning | Sequence[Thinning] = (),
        *,
        every_commits: int = EVERY_COMMITS,
        compaction: Compaction | None = COMPACTION,
        grace_s: float = GRACE_S,
    ) -> None:
        self._rules = retention, thinning
        self._every_commits = every_commits
        self._compaction = compaction
        self._grace_s = grace_s
        self._commit_count = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.error: CasckptError | None = None
        self.report: Report | None = None

    def after_commit(self, store: Store) -> None:
        """Say that `store` has published a snapshot. Returns at once."""
        self._commit_count += 1
        is_running = self._thread is not None and self._thread.is_alive()
        if self._commit_count < self._every_commits or is_running:
            return
        self._commit_count = 0
        self._thread = threading.Thread(
            target=self._collect, args=(store.path, store.run, store.branch), name="casckpt-maintenance", daemon=True
        )
        self._thread.start()

    def _collect(self, path: str, run: str, branch: str) -> None:
        retention, thinning = self._rules
        try:
            with open_store(path, run=run) as own:
                found = plan(own, retention, thinning, branch=branch, compaction=self._compaction)
                collection = Collection(found, grace_s=self._grace_s)
                while not collection.advance():
                    if self._stop.wait(POLL_S):
                        return  # what is left is found by the next collection
                self.error, self.report = None, collection.report()
        except CasckptError as error:
            if self.error is None:
                warnings.warn(f"a collection failed, and training goes on: {error.message}", StoreWarning, stacklevel=1)
            self.error = error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a collection that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop at the next place where a collection waits."""
        self._stop.set()
        self.wait()

    def __enter__(self) -> Maintenance:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
