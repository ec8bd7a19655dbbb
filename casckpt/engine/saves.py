"""Saves: started, under way, and what follows when one ends.

A save is one capture of some components at one step. Those of the critical lane make the snapshot; the others are
added to it by a second save, which a snapshot of the same step with them replaces. Components that are not captured
are inherited from the snapshot before, whatever that turns out to be.

A save ends on a thread of the store; nothing happens here until the loop's next call looks. Then its cost goes to the
budget, its manifests are compared with the captures before, and a failure is raised: none is ever dropped.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from casckpt.engine.budget import SaveBudget
from casckpt.engine.component import Component
from casckpt.errors import BusyError, StoreWarning
from casckpt.format.entry import MetricValue
from casckpt.store.background import SaveHandle
from casckpt.store.draft import REST
from casckpt.store.store import Store
from casckpt.store.values import Snapshot


@dataclass
class Save:
    """One save.

    Attributes:
        components: what it captured.
        stall_s: how long the loop stood still.
        is_later: whether it adds to a snapshot.
        owed: what the next save has to bring if this one fails.
    """

    handle: SaveHandle
    components: list[Component]
    stall_s: float
    is_later: bool
    owed: Owed


@dataclass(frozen=True)
class Owed:
    """What one save has to bring: labels, and components that its snapshot leaves out for the first time."""

    labels: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a save stores beside components; see `Store.commit`."""

    metrics: Mapping[str, MetricValue] | None = None
    labels: Mapping[str, str] | None = None
    config: Any = None


@dataclass
class Counts:
    """What happened so far, for the report.

    Attributes:
        committed, failed: saves that ended.
        skipped: saves that the overlap policy left out.
        waited, wait_s: saves for which the loop had to wait for an earlier one, and how long calls then took.
    """

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    waited: int = 0
    wait_s: float = 0.0


@dataclass
class Saves:
    """The saves of one engine.

    Attributes:
        registered: its components by name.
        after_commit: called for each new snapshot.
        in_flight_max: how many snapshots may be under way before the loop waits.
        committed: components of the newest snapshot known to be durable.
        dropped: components that the next snapshot leaves out.
        labels: of the next save, beside its own.
    """

    budget: SaveBudget
    registered: dict[str, Component]
    clock: Callable[[], float]
    after_commit: Callable[[], None]
    in_flight_max: int
    counts: Counts = field(default_factory=Counts)
    under_way: list[Save] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)

    def writing(self) -> list[Save]:
        """Those that have not ended."""
        return [save for save in self.under_way if not save.handle.done()]

    def critical_count(self) -> int:
        """How many snapshots are under way."""
        return sum(not save.is_later for save in self.writing())

    def is_writing(self, component: Component) -> bool:
        """Whether a component is being saved: one of the best-effort lane is not due again until it is not."""
        return any(component in save.components for save in self.writing())

    def known(self) -> set[str]:
        """Components of the snapshot that the next save continues, once all saves under way are durable."""
        return self.committed | {each.name for save in self.under_way for each in save.components}

    # --- starting ---

    def start(self, store: Store, step: int, components: list[Component], facts: Facts) -> SaveHandle:
        """Copy components aside at one step and save them in the background.

        Where the step has a snapshot already, this one takes its place.
        """
        if self._is_there(store, step):
            return self._start_later(store, step, components, facts)
        known = self.known()  # what no snapshot has yet is critical: each must be complete
        critical = [each for each in components if each.name not in known or not each.strategy.is_best_effort]
        later = [each for each in components if each not in critical]
        started_s, has_to_wait = self.clock(), self.critical_count() >= self.in_flight_max
        owed = Owed(self.labels, tuple(sorted(self.dropped & known)))
        given = self._given(critical, facts)
        handle = store.commit_async(step, inherit=REST, drop=owed.dropped, config=facts.config, **given)
        self._note(handle, critical, started_s, step, owed)
        if has_to_wait:
            self.counts.waited += 1
            self.counts.wait_s += self.clock() - started_s
        if later:
            self._start_later(store, step, later, Facts())
        return handle

    def save_now(self, store: Store, step: int, components: list[Component], facts: Facts) -> SaveHandle:
        """The same, durable when it returns, with every component in one snapshot and no copy of the state."""
        if self._is_there(store, step):
            handle = self._start_later(store, step, components, facts)
            handle.result()
            return handle
        started_s = self.clock()
        owed = Owed(self.labels, tuple(sorted(self.dropped & self.known())))
        given = self._given(components, facts)
        snapshot = store.commit(step, inherit=REST, drop=owed.dropped, config=facts.config, **given)
        handle = SaveHandle.of(snapshot, self.clock() - started_s)
        self._note(handle, components, self.clock(), step, owed)
        return handle

    def _is_there(self, store: Store, step: int) -> bool:
        return step in (store.step, *(save.handle.step for save in self.under_way if not save.is_later))

    def _start_later(self, store: Store, step: int, components: list[Component], facts: Facts) -> SaveHandle:
        started_s, owed = self.clock(), Owed(self.labels)
        handle = store.supersede_async(step, **self._given(components, facts))
        self._note(handle, components, started_s, step, owed, is_later=True)
        return handle

    def _given(self, components: list[Component], facts: Facts) -> dict[str, Any]:
        """Arguments of the store that say what is saved and how."""
        return {
            "state": {each.name: each.target for each in components},
            "metrics": facts.metrics,
            "labels": {**self.labels, **(facts.labels or {})},
            "necessity": {each.name: each.strategy.necessity for each in components},
            "levels": {each.name: each.strategy.level for each in components if each.strategy.level is not None},
        }

    def _note(
        self,
        handle: SaveHandle,
        components: list[Component],
        started_s: float,
        step: int,
        owed: Owed,
        *,
        is_later: bool = False,
    ) -> None:
        now_s = self.clock()
        self.under_way.append(Save(handle, components, now_s - started_s, is_later, owed))
        self.labels = {}
        self.dropped -= {*owed.dropped}
        self.committed -= {*owed.dropped}
        for component in components:
            component.count_from(step, now_s)

    # --- ending ---

    def drain(self, timeout_s: float | None) -> None:
        """Wait until all have ended, well or not; None for as long as it takes.

        Raises:
            BusyError: one is still under way after `timeout_s`, in all.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self.under_way:
            try:
                save.handle.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            except BusyError:
                steps = sorted({each.handle.step for each in self.writing()})
                raise BusyError(
                    f"steps {steps} are still being saved after {timeout_s:g} s. The saves go on; wait again, or look "
                    "whether the storage answers.",
                    steps=steps,
                    holder="this store handle's background thread",
                ) from None

    def collect(self) -> None:
        """Take in what has ended.

        Raises:
            SaveFailedError: a save failed and nobody was told yet.
        """
        now_s = self.clock()
        for save in [each for each in self.under_way if each.handle.done() and not each.handle.has_failed]:
            self.under_way.remove(save)  # before what may raise: none is taken in twice, and none is left out
            self._succeeded(save, save.handle.result(), now_s)
        failed = [save for save in self.under_way if save.handle.done() and save.handle.has_failed]
        unknown = [save.handle for save in failed if not save.handle.is_told]
        for save in failed:
            self.under_way.remove(save)
            self._failed(save, now_s)
        if unknown:
            raise unknown[0].failure(unknown[1:]) from unknown[0].exception()

    def _failed(self, save: Save, now_s: float) -> None:
        """Everything is due again: also what the failed save meant to inherit, which may be what was wrong with it."""
        self.counts.failed += 1
        self._spend(save, now_s)
        self.labels = {**save.owed.labels, **self.labels}
        self.dropped |= {*save.owed.dropped} - {*self.registered}
        self.committed |= {*save.owed.dropped}
        for component in self.registered.values():
            component.is_overdue = True

    def _succeeded(self, save: Save, snapshot: Snapshot, now_s: float) -> None:
        self.counts.committed += 1
        self.after_commit()
        self.committed |= {each.name for each in save.components}
        self._spend(save, now_s)
        for component in save.components:
            _compare(component, snapshot)

    def _spend(self, save: Save, now_s: float) -> None:
        layers = {each.strategy.layer for each in save.components}
        self.budget.spend(save.stall_s + save.handle.work_s, layers, now_s)


def _compare(component: Component, snapshot: Snapshot) -> None:
    """Warn, once for each time it begins, when a component that should change does not."""
    stored = snapshot.components.get(component.name)
    if stored is None:
        return
    is_equal = stored.manifest == component.manifest
    component.manifest = stored.manifest
    if not is_equal:
        component.is_told_unchanged = False
    elif component.strategy.expect_change and not component.is_told_unchanged:
        component.is_told_unchanged = True
        warnings.warn(
            f"component {component.name!r} was captured at step {snapshot.step} with the bytes of the time before. "
            "Is its provider connected to what is being trained? (expect_change=False says that this is meant.)",
            StoreWarning,
            stacklevel=5,
        )
