"""The part of a store handle that saves in the background: copies now, commits later.

A base class of `Store`, for nothing but the size of that file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast

from casckpt.format.document import SUPERSEDED
from casckpt.format.entry import MetricValue
from casckpt.store.background import IN_FLIGHT_MAX, SaveHandle
from casckpt.store.catalog import check_name
from casckpt.store.commit import Committer
from casckpt.store.draft import REST, Options
from casckpt.store.in_flight import Interrupted, interrupted
from casckpt.store.saver import Saver
from casckpt.store.turns import Turns

if TYPE_CHECKING:
    from casckpt.store.store import Store


class SavesInBackground:
    """See `Store`, which has what is declared here."""

    run: str
    _saver: Saver
    _committer: Committer
    _turns: Turns
    _writing: Callable[..., AbstractContextManager[None]]

    def commit_async(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, MetricValue] | None = None,
        labels: Mapping[str, str] | None = None,
        config: Any = None,
        schema_version: int | None = None,
        inherit: Sequence[str] | Literal["*"] = (),
        drop: Sequence[str] = (),
        necessity: Mapping[str, str] | None = None,
        levels: Mapping[str, str] | None = None,
        allow_pickle: bool = False,
    ) -> SaveHandle:
        """Copy `state` aside and commit the copy in the background; arguments as for `commit`.

        When this returns, the state may change: the values committed are those of the call. Nothing is durable
        before the handle's `result()` returns. Two saves may be under way; a third waits for the first.

        Cost for the caller: one copy of the state into buffers that are kept for the next call (`stall_s`).

        Raises:
            SaveFailedError: an earlier background commit failed and nobody had asked.
            ConcurrentMutationError: a tensor changed while it was copied.
            Otherwise as `commit`, as far as it shows before writing.
        """
        options = Options(metrics, labels, config, schema_version, inherit, drop, necessity, levels, allow_pickle)
        with self._writing("commit_async", wait=False):
            return self._saver.save(step, state, options)

    def supersede_async(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, MetricValue] | None = None,
        labels: Mapping[str, str] | None = None,
        necessity: Mapping[str, str] | None = None,
        levels: Mapping[str, str] | None = None,
        allow_pickle: bool = False,
    ) -> SaveHandle:
        """Copy components aside, and add them in the background to the snapshot of a step that has none or older ones.

        When the handle's `result()` returns, a new snapshot of the same step is durable: that of before with these
        components in place. It takes over tags and annotations; the one before is retired, and restores by its id.
        Until then the step is what it was. Other commits may go on meanwhile; the first after it inherits what was
        added.

        Args:
            step: the last step committed by this handle, which may still be under way in the background.
            Others as for `commit`.

        Raises:
            StepOrderError: this handle does not stand at `step`.
            Otherwise as `commit_async`.
        """
        options = Options(metrics, labels, None, None, REST, (), necessity, levels, allow_pickle)
        with self._writing("supersede_async", wait=False):
            return self._saver.supersede(step, state, options)

    def _announce_superseded(self) -> None:
        from casckpt.store.opening import add_feature  # which makes stores

        add_feature(cast("Store", self), SUPERSEDED)

    def interrupted(self) -> tuple[Interrupted, ...]:
        """Large background saves of this run that a process did not live to finish, by step.

        A hint for people, kept until a collector clears the temporary files of dead processes: what such a save
        published is listed like any other snapshot, and the rest is not there.
        """
        root, _, system, *_ = self._committer.places
        return interrupted(root, system.file_system, self.run)

    def reserve(self, state: Mapping[str, Any], *, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        """Allocate what `commit_async` needs to copy these components: its first calls are then as fast as later ones.

        Args:
            state: component name → state, as for `commit`.
            in_flight_max: how many saves may be under way before `commit_async` waits; at least two copies are kept.

        Cost: so many copies of the state into fresh memory; held until the store is closed. Nothing is reserved for
        rings, of which a save copies what is new.

        Raises:
            UnsupportedStateError: a leaf cannot be stored; `path` names it.
        """
        with self._writing("reserve", wait=False):
            self._saver.reserve({check_name(name, "component"): value for name, value in state.items()}, in_flight_max)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all background commits.

        Raises:
            SaveFailedError: one of them failed and nobody had asked.
            BusyError: one is still under way after `timeout_s`.
        """
        self._turns.check()
        self._saver.wait(timeout_s)
        self._saver.raise_failures()
