"""Saves in the background: state is copied aside by the caller, and committed from the copy by a thread.

One `Saver` belongs to one store handle. It owns the staging memory and the thread, and knows the context that the next
save continues while an earlier one is still under way.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from casckpt.errors import ConcurrentMutationError, SaveFailedError, StepOrderError
from casckpt.format.snapshot import Context
from casckpt.ids import SnapshotId
from casckpt.replay.ring import Ring
from casckpt.state.capture import Captured, capture
from casckpt.state.staging import Staging
from casckpt.store.background import IN_FLIGHT_MAX, Background, SaveHandle
from casckpt.store.catalog import check_step
from casckpt.store.commit import Committer
from casckpt.store.draft import Draft, Drafter, Options
from casckpt.store.in_flight import LARGE, noted
from casckpt.store.rings import is_segment
from casckpt.store.supersede import Annotator, Superseder, check_base
from casckpt.store.turns import Turns
from casckpt.store.values import Snapshot

_TRIALS_MAX = 3  # of a commit whose ring is written to meanwhile


class Saver:
    """The background saves of one store handle.

    Args:
        commit: commits a draft; called with the handle's turn taken.
        announce_superseded: called before the first entry that supersedes a snapshot.
        annotate: adds metrics and labels to a snapshot.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        committer: Committer,
        drafter: Drafter,
        turns: Turns,
        commit: Callable[[Draft], Snapshot],
        announce_superseded: Callable[[], None],
        annotate: Annotator,
        clock: Callable[[], float],
    ) -> None:
        self._committer = committer
        self._drafter = drafter
        self._turns = turns
        self._commit = commit
        self.background = Background(clock)
        self._later = Background(clock, name="casckpt-later")
        self._superseder = Superseder.beside(
            committer, lambda: turns.take("superseding commit", is_patient=True), announce_superseded, annotate
        )
        self._staging: Staging | None = None
        self._staged_context: Context | None = None

    def save(self, step: int, state: Mapping[str, Any], options: Options) -> SaveHandle:
        """Stage a commit and start it; see `Store.commit_async`."""
        started = time.perf_counter()
        with self._turns.staging.take(f"staging of step {step}"):
            self.raise_failures()
            _check_step_after(check_step(step), self.background.last_step())
            self.background.make_room(self._turns.timeout_s)
            self._make_room_for(state)
            draft = self._drafter.draft(step, state, self._context_to_come(), options)
            staging = self._staging_memory()
            staged = self._stage(draft, staging)
            self._staged_context = draft.context
            handle = SaveHandle(draft.step)
            self.background.start(handle, functools.partial(self._commit_staged, draft, staged, staging))
            handle.stall_s = time.perf_counter() - started
            return handle

    def supersede(self, step: int, state: Mapping[str, Any], options: Options) -> SaveHandle:
        """Stage components that join the snapshot of `step`; see `Store.supersede_async`."""
        started = time.perf_counter()
        with self._turns.staging.take(f"staging of step {step}"):
            self.raise_failures()
            pending = self.background.find(check_step(step))
            if self.background.last_step() is None:
                self._committer.settle()
            base = check_base(step, self._committer.position) if pending is None else None
            self._later.make_room(self._turns.timeout_s)
            self._make_room_for(state)
            draft = self._drafter.draft(step, state, self._context_to_come(), options)
            staging = self._staging_memory()
            staged = self._stage(draft, staging)
            handle = SaveHandle(draft.step)
            work = functools.partial(self._supersede_staged, draft, staged, staging, base, pending)
            self._later.start(handle, work)
            handle.stall_s = time.perf_counter() - started
            return handle

    def save_now(self, step: int, state: Mapping[str, Any], options: Options) -> Snapshot:
        """Commit state as it lies in memory; again, where a ring moved on under the commit or its rows were lost."""
        trial = 0
        while True:
            trial += 1
            draft = self._drafter.draft(step, state, self._committer.context(), options)
            try:
                return self._commit(draft)
            except (ConcurrentMutationError, SaveFailedError):
                if not draft.takes or trial == _TRIALS_MAX:
                    raise
            finally:
                draft.release()

    def reserve(self, state: Mapping[str, Any], in_flight_max: int) -> None:
        """Allocate staging memory; see `Store.reserve`."""
        with self._turns.staging.take("reserving memory"):
            if in_flight_max != self.background.in_flight_max:
                self.wait()
                self.background.in_flight_max = in_flight_max
                self._staging = None
            captured = [capture(name, value) for name, value in state.items() if not isinstance(value, Ring)]
            try:
                self._staging_memory().reserve(captured)
            finally:
                self._drafter.remember(captured)

    def forget(self) -> None:
        """Let go of the staging memory."""
        self._staging = None

    def _make_room_for(self, state: Mapping[str, Any]) -> None:
        """Wait until each component has room for a copy: both kinds of saves under way may hold one.

        And until a ring may be taken: it continues the rows of what joins an earlier step, once that has.
        """
        if any(isinstance(value, Ring) for value in state.values()):
            self._later.wait(self._turns.timeout_s)
        if not all(map(self._staging_memory().has_room, state)):
            self.wait(self._turns.timeout_s)

    def _stage(self, draft: Draft, staging: Staging) -> list[Captured]:
        """Copy what a draft captured; it speaks of the copies from then on."""
        previous = staging.latest()
        try:
            staged = staging.stage(list(draft.captured.values()))
        except BaseException:
            draft.settle({})
            raise
        finally:
            draft.release()
        draft.previous = previous
        draft.captured = dict(zip(draft.captured, staged, strict=True))
        draft.is_copy = True
        others = (
            [each for each in staging.components() if not is_segment(each)] if draft.inherits_rest else draft.inherit
        )
        staging.keep({*draft.captured, *others} - {*draft.drop})
        return staged

    def _staging_memory(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(max(IN_FLIGHT_MAX, self.background.in_flight_max))
        return self._staging

    def _context_to_come(self) -> Context | None:
        """The context that the next save continues: of the last one under way, else of the position."""
        return self._committer.context() if self.background.last_step() is None else self._staged_context

    def _commit_staged(self, draft: Draft, staged: list[Captured], staging: Staging) -> Snapshot:
        try:
            staging.settle(staged)
            with self._noted(draft), self._turns.take("background commit", is_patient=True):
                return self._commit(draft)
        finally:
            draft.settle({})
            staging.release(staged)

    def _supersede_staged(
        self,
        draft: Draft,
        staged: list[Captured],
        staging: Staging,
        base: SnapshotId | None,
        pending: SaveHandle | None,
    ) -> Snapshot:
        try:
            staging.settle(staged)
            if pending is not None:
                base = SnapshotId(bytes.fromhex(pending.outcome().id))
            assert base is not None
            with self._noted(draft):
                return self._superseder.supersede(draft, base)
        finally:
            draft.settle({})
            staging.release(staged)

    def _noted(self, draft: Draft) -> contextlib.AbstractContextManager[None]:
        """Leave word of a large save while it lasts."""
        if sum(each.logical_bytes for each in draft.captured.values()) < LARGE:
            return contextlib.nullcontext()
        root, _, system, *_ = self._committer.places
        return noted(root, system, self._committer.options["run"], draft.step, draft.names)

    # --- all of them ---

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for everything under way, in all at most `timeout_s`."""
        started = time.monotonic()
        self.background.wait(timeout_s)
        self._later.wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started)))

    def raise_failures(self) -> None:
        """Raise the failures that nobody has seen yet, in one error."""
        try:
            self.background.raise_failures()
        except SaveFailedError:
            self._later.forget_failures()  # of what would have joined a snapshot that there is not
            raise
        self._later.raise_failures()

    def find(self, ref: Any) -> SaveHandle | None:
        """What is under way for a step, the last of it."""
        return self._later.find(ref) or self.background.find(ref)


def _check_step_after(step: int, last: int | None) -> None:
    if last is not None and step <= last:
        raise StepOrderError(f"step {step} does not come after {last}, whose background commit is under way", step=step)
