"""Collections off the commit path: an object that a training calls after it published, and that never makes it wait.

`Maintenance` is what an engine is given. `after_commit` notices that enough commits have passed and begins a
collection in a thread of its own, on a handle of its own; what goes wrong there is kept as `error`, and warned of once.
Retention runs after the new snapshot is durable, never before. It may patrol as well, a little after each collection,
and watch the disk, after each collection and at least every ten seconds in which a training saves: where it is too full
or too slow, `may_save` says so, and an engine lets saves that are due pass.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from casckpt.arguments import WHOLE, check, kind_of, maybe, within
from casckpt.errors import CasckptError, StoreWarning
from casckpt.limits import DRAIN_TIMEOUT_S
from casckpt.store.opening import open_store
from casckpt_gc.collect import GRACE, GRACE_S, POLL_S, Collection, Report
from casckpt_gc.compaction import COMPACTION, Compaction
from casckpt_gc.patrol import Health, Limits, Patrolled, health, health_text, patrol
from casckpt_gc.plan import check_rules, plan
from casckpt_gc.retention import AnyOf, Retention, Thinning

if TYPE_CHECKING:
    from casckpt.store.store import Store

PATROL_S = 5.0  # at most, or one pack: who closes waits for it
WATCH_S = 10.0  # between two looks at the disk: each opens the store and writes 4 KiB
WATCH_STOPPED_S = 1.0  # while saves are left out
EVERY_COMMITS = 50  # a collection looks at every object: dear beside one commit, cheap beside so many


class Maintenance:
    """Retention at work beside a training; a context manager.

    Args:
        retention: which snapshots stay.
        thinning: which components are withdrawn from those.
        every_commits: a collection begins after so many commits.
        compaction: as for `plan`.
        grace_s: as for `collect`.
        patrol_bytes: of packs checked after each collection; 0: none.
        limits: for the disk, which is watched from the first commit on; None: it is not.

    Attributes:
        error: why the last collection with its patrol, or the last look at the disk, failed; None when both went well.
        report: what the last collection that ended did, or None.
        patrolled: what the last patrol saw, or None. Damage is warned of.
        health: of the disk, as it was last looked at, or None.

    Raises:
        InvalidInputError: names the argument that means nothing.
    """

    def __init__(
        self,
        retention: Retention | AnyOf | None = None,
        thinning: Thinning | Sequence[Thinning] = (),
        *,
        every_commits: int = EVERY_COMMITS,
        compaction: Compaction | None = COMPACTION,
        grace_s: float = GRACE_S,
        patrol_bytes: int = 0,
        limits: Limits | None = None,
    ) -> None:
        rules = (thinning,) if isinstance(thinning, Thinning) else tuple(thinning)
        check_rules(retention, rules, compaction)
        counts = {"every_commits": within(WHOLE, 1), "patrol_bytes": within(WHOLE, 0)}
        check({**counts, "grace_s": GRACE, "limits": maybe(kind_of(Limits, words="Limits(…)"))}, locals())
        self._rules = retention, rules
        self._every_commits = every_commits
        self._compaction = compaction
        self._grace_s = grace_s
        self._patrol_bytes = patrol_bytes
        self._limits = limits
        self._path, self._branch = "", ""
        self._options: dict[str, Any] = {}
        self._commit_count = 0
        self._monotonic_s: Callable[[], float] = time.monotonic
        self._watched_s = -math.inf
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failed: dict[Callable[[Store], None], CasckptError | OSError] = {}
        self.report: Report | None = None
        self.patrolled: Patrolled | None = None
        self.health: Health | None = None

    @property
    def error(self) -> CasckptError | OSError | None:
        return (*self._failed.values(), None)[0]

    def after_commit(self, store: Store) -> None:
        """Say that `store` has published a snapshot. Returns at once."""
        self._commit_count += 1
        self._path, self._branch, self._monotonic_s = store.path, store.branch, store._system.monotonic_s
        committer = store._committer.options  # what is encoded anew must not take longer to restore than what is not
        self._options = {"run": store.run, "verify": committer["verify"], "level": committer["level"].name}
        acts = (self._collect,) if self._limits is None else (self._collect, self._watch)
        if self._commit_count >= self._every_commits and self._begin(*acts):
            self._commit_count = 0
        self._look()

    def may_save(self) -> bool:
        """Whether the disk was well when it was last looked at. It is looked at again meanwhile where it was not, or
        where that is long ago."""
        is_stopped = self._is_stopped()
        self._look()
        return not is_stopped

    def _is_stopped(self) -> bool:
        return self.health is not None and self.health.state == "stop"

    def _look(self) -> None:
        """Look at the disk, off this thread, if that is due. While a collection is under way, that one looks."""
        if self._path and self._is_watch_due() and self._begin(self._watch):
            self._watched_s = self._monotonic_s()  # also when looking fails: it costs the training something

    def _is_watch_due(self) -> bool:
        still_s = self._monotonic_s() - self._watched_s
        return self._limits is not None and still_s >= (WATCH_STOPPED_S if self._is_stopped() else WATCH_S)

    def _begin(self, *acts: Callable[[Store], None]) -> bool:
        """Do something in a thread of its own, unless something is under way or all is over."""
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return False
        self._thread = threading.Thread(target=self._do, args=acts, name="casckpt-maintenance", daemon=True)
        self._thread.start()
        return True

    def _do(self, *acts: Callable[[Store], None]) -> None:
        for act in acts:
            if self._stop.is_set():
                return
            with self._noting(act), open_store(self._path, **self._options) as own:
                act(own)

    @contextlib.contextmanager
    def _noting(self, act: Callable[[Store], None]) -> Iterator[None]:
        """Keep the error of something that fails, until it goes well."""
        try:
            yield
        except (CasckptError, OSError) as error:  # a folder that was taken away is neither
            if not self._failed:
                warnings.warn(f"maintenance failed, and training goes on: {error}", StoreWarning, stacklevel=1)
            self._failed[act] = error
        else:
            self._failed.pop(act, None)

    def _collect(self, own: Store) -> None:
        retention, thinning = self._rules
        found = plan(own, retention, thinning, branch=self._branch, compaction=self._compaction)
        collection = Collection(found, grace_s=self._grace_s, is_stopped=self._stop.is_set)
        while not collection.advance():
            if self._stop.wait(POLL_S):
                return  # what is left is found by the next collection
            if self._is_watch_due():
                with self._noting(self._watch):
                    self._watch(own)
        self.report = collection.report()
        if self._patrol_bytes:
            self.patrolled = patrol(own, budget_bytes=self._patrol_bytes, budget_s=PATROL_S)
            if self.patrolled.findings:
                warnings.warn(f"damage was found: {self.patrolled}", StoreWarning, stacklevel=1)

    def _watch(self, own: Store) -> None:
        assert self._limits is not None
        self._watched_s = self._monotonic_s()
        before, self.health = self.health, health(own, self._limits)
        if self.health.state != "good" and (before is None or before.state != self.health.state):
            what = "saves that are due are left out until that is over" if self.health.state == "stop" else "take care"
            text = f"the disk of {own.path}: {health_text(self.health)}; {what}"
            warnings.warn(text, StoreWarning, stacklevel=1)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a collection that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self, timeout_s: float | None = DRAIN_TIMEOUT_S) -> None:
        """Stop at the next place where a collection waits.

        One that does not come there in time goes on, and ends with the process: the next one finishes what is left.
        """
        self._stop.set()
        self.wait(timeout_s)

    def __enter__(self) -> Maintenance:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
