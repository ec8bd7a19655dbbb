"""The public face: components registered once, a safe point told at every step, everything else decided here.

::

    engine = casckpt.CheckpointEngine(store)
    engine.register("policy", policy, SaveStrategy(every_steps=500, every_seconds=1200))
    engine.register("counters", counters, SaveStrategy(every_steps=100))
    engine.restore()
    for step in ...:
        train()
        engine.step(step)

Saves happen in `step`, `advance_step` and `save` alone, on the thread that trains: these are the safe points, at which
no component is half way through an update. A request from elsewhere (a signal, another thread, inside an update) is
kept for the next one. All components that are due are copied aside at one of them, and belong to one step; the others
are inherited by the snapshot with the step of their own capture.

Nothing here holds a lock while the loop trains.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from casckpt.engine.alive import Alive
from casckpt.engine.budget import SaveBudget
from casckpt.engine.cadence import due_layers, tell_if_idle, with_more_frequent
from casckpt.engine.component import Component
from casckpt.engine.config import EngineConfig, read_config
from casckpt.engine.coverage import cover
from casckpt.engine.maintenance import Maintenance
from casckpt.engine.report import EngineReport, describe
from casckpt.engine.safe_points import SafePoints
from casckpt.engine.saves import Facts, Saves
from casckpt.engine.signals import listening
from casckpt.engine.strategy import Layer, SaveStrategy
from casckpt.engine.templates import CoverageReport
from casckpt.errors import (
    AlreadyExistsError,
    CasckptError,
    InvalidInputError,
    NotFoundError,
    SaveFailedError,
    StepOrderError,
)
from casckpt.format.entry import MetricValue
from casckpt.limits import DRAIN_TIMEOUT_S
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.seeding import stream_seed
from casckpt.store.background import IN_FLIGHT_MAX, SaveHandle
from casckpt.store.catalog import check_name, check_step
from casckpt.store.opening import open_store
from casckpt.store.store import Store
from casckpt.store.values import RestoreReport, Snapshot

log = logging.getLogger("casckpt.engine")
UNSET: Any = object()  # a setting that was not given here, where None has a meaning


class CheckpointEngine:
    """Saves a training's components by their strategies, and brings them back.

    Args:
        store: an open store; it stays open when the engine is closed.
        config: settings and strategies, as an `EngineConfig`, a mapping, or the path of a JSON or YAML file.
        save_budget: the share of time that saving may take before intervals are lengthened; None for no bound.
        overlap: what a save does that comes while earlier ones are under way: "wait" (two are under way before the loop
            waits), "skip" (it is left out and counted), or "queue" (up to `queue_size` wait, further ones are skipped).
        queue_size: see `overlap`; each place costs one copy of the state in memory.
        async_mode: whether saves run in the background; False for durable ones, which keep the loop waiting.
        training_config: anything JSON-like, kept with every snapshot (`config=` of `Store.commit`).
        maintenance: told of every snapshot that is durable, as `casckpt_gc.Maintenance` wants to be; None for the
            config's, which the engine begins, and ends when it is closed.
        clock: monotonic seconds, for tests.

    Settings given here win over those of `config`.

    Raises:
        InvalidInputError: a setting is wrong; the message names the key.
    """

    def __init__(
        self,
        store: Store,
        *,
        config: EngineConfig | Mapping[str, Any] | str | None = None,
        training_config: Any = None,
        maintenance: Maintenance | None = None,
        clock: Callable[[], float] = time.monotonic,
        save_budget: float | None = UNSET,
        overlap: str = UNSET,
        queue_size: int = UNSET,
        async_mode: bool = UNSET,
    ) -> None:
        given: dict[str, Any] = {
            "save_budget": save_budget,
            "overlap": overlap,
            "queue_size": queue_size,
            "async_mode": async_mode,
        }
        if not isinstance(store, Store):
            raise InvalidInputError(
                f"store={store!r:.60}: expected an open store, as `casckpt.open(path)` gives it; "
                "`CheckpointEngine.open(config)` opens one itself."
            )
        self.store = store
        self.config = replace(read_config(config), **{key: value for key, value in given.items() if value is not UNSET})
        self.training_config = training_config
        self.global_step = store.step or 0
        self._clock = clock
        self._components: dict[str, Component] = {}
        self._budget = SaveBudget(self.config.save_budget)
        in_flight_max = self.config.queue_size + 1 if self.config.overlap == "queue" else IN_FLIGHT_MAX
        self._saves = Saves(self._budget, self._components, clock, self._after_commit, in_flight_max)
        settings = self.config.maintenance if maintenance is None else None
        self._own_maintenance = settings.begin() if settings is not None else None
        self._maintenance = maintenance or self._own_maintenance
        self._is_placed = store.step is None  # nothing to continue, or restored
        self._is_torn = False  # by a restore that stopped half way
        self._points = SafePoints()
        self._alive = Alive(store, self._saves)
        self._request = ""
        self._untaken = set(self.config.components)  # strategies that wait for a component of their name
        self._guards: list[RngGuard] = []  # of the streams that were restored, until the first update
        self._is_covered = self._is_idle_told = False
        self._stop = 0
        self._is_closed = False
        self._owns_store = False

    @classmethod
    def open(cls, config: EngineConfig | Mapping[str, Any] | str, *, training_config: Any = None) -> CheckpointEngine:
        """An engine with a store of its own, as the config's `store` says; both are closed together.

        Raises:
            InvalidInputError: a key is wrong, or there is no `store`.
            Otherwise as `casckpt.open`.
        """
        found = read_config(config)
        if found.store is None:
            raise InvalidInputError("config: there is no `store`. Give `store: {path: …}`, or open one and pass it.")
        made = cls(open_store(**asdict(found.store)), config=found, training_config=training_config)
        made._owns_store = True
        return made

    # --- what is saved ---

    def register(
        self,
        name: str,
        provider: Any,
        strategy: SaveStrategy | None = None,
        *,
        load: Callable[[Any], None] | None = None,
    ) -> None:
        """Name a component, and say where its state is.

        Args:
            name: of the component.
            provider: an object with `state_dict()` and `load_state_dict()`; a tree of dicts, lists, tensors, arrays and
                such objects, which is restored in place; or a function that returns the state, called at every save.
            strategy: when and how to save it; None for the config's, or else with every save.
            load: for a function, what puts a restored state back.

        Cost: reading the state's structure, and touching the memory for two copies of it (more with overlap="queue"),
        so that the first saves are as fast as later ones.

        Raises:
            AlreadyExistsError: the name is taken.
            InvalidInputError, UnsupportedStateError: the state cannot be stored or put back.
        """
        if check_name(name, "component") in self._components:
            raise AlreadyExistsError(f"component {name!r} is registered already. Choose another name.", name=name)
        chosen = self.config.components.get(name, SaveStrategy()) if strategy is None else strategy
        if not isinstance(chosen, SaveStrategy):
            raise InvalidInputError(
                f"component {name!r}: strategy={chosen!r:.60}: expected a casckpt.SaveStrategy(every_steps=…)",
                key="strategy",
            )
        component = Component(name, provider, load, chosen)
        self._reserve([component])
        component.check_restorable()
        component.count_from(self.global_step, self._clock())
        self._components[name] = component
        self._untaken.discard(name)
        self._is_covered = False
        self._saves.dropped.discard(name)

    def coverage(
        self, template: str | None = None, *, aliases: Mapping[str, Sequence[str]] | None = None, strict: bool = False
    ) -> CoverageReport:
        """What of a template is registered, missing, or not capturable.

        Args:
            template: "ppo", "sac", "dqn", "grpo" or "pbt"; None for the config's.
            aliases: role → paths where it is, if names alone do not tell; None for the config's.
            strict: raise when something is missing.

        Raises:
            InvalidInputError: no such template; with `strict`, something is missing (`missing` names it).
        """
        chosen = template or self.config.template
        if chosen is None:
            raise InvalidInputError("coverage: give a template, here or in the config")
        found = self.config.aliases if aliases is None else aliases
        return cover(self._components.values(), chosen, found, strict=strict)

    def drop(self, name: str) -> None:
        """Leave a component out of the next snapshot and all that follow it. Waits for saves under way.

        Raises:
            NotFoundError: neither this engine nor the snapshot that it continues has it.
            Otherwise as `wait`.
        """
        self.wait()
        known = {*self._components, *self._saves.known(), *self._saves.dropped}
        if name not in known:
            raise NotFoundError(
                f"component {name!r}: there is none to drop. There are {', '.join(sorted(known)) or 'none'}.", name=name
            )
        self._components.pop(name, None)
        self._saves.dropped.add(name)

    def _reserve(self, components: list[Component]) -> None:
        if self.config.async_mode:
            state = {each.name: each.target for each in components}
            self.store.reserve(state, in_flight_max=self._saves.in_flight_max)

    # --- safe points ---

    def step(self, global_step: int, metrics: Mapping[str, MetricValue] | None = None) -> SaveHandle | None:
        """Say that the training stands between two steps; saves what is due.

        Args:
            global_step: how far the training is; never less than before.
            metrics: stored with the snapshot if this step is saved.

        Returns:
            The save that was started, or None.

        Raises:
            SaveFailedError: an earlier save failed and nobody was told; this step was not saved.
            StepOrderError: `global_step` goes back.
            InvalidInputError: a training goes on that was not restored, or this is no safe point.
            UnsupportedStateError, ConcurrentMutationError: a component cannot be stored, or changed while it was
                copied; this, and whatever else a provider raises, leaves all that was due due.
            SystemExit: a signal asked for the end (`on_signals`); everything is saved.
        """
        self._enter("step")
        number = check_step(global_step)
        if number < self.global_step:
            raise StepOrderError(
                f"step {number} comes after {self.global_step}. To go back, call `restore({number})`.", step=number
            )
        self.global_step = number
        self._collect()
        self._alive.say(step=number)
        if self._request or self._stop:
            return self._save_all(metrics, {"requested": self._request or "stop"})
        return self._save_due(metrics)

    def advance_step(self, metrics: Mapping[str, MetricValue] | None = None) -> SaveHandle | None:
        """`step` with the next number."""
        return self.step(self.global_step + 1, metrics)

    def save(
        self,
        step: int | None = None,
        async_mode: bool | None = None,
        *,
        metrics: Mapping[str, MetricValue] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SaveHandle | None:
        """Save every component now; the caller says that this is a safe point.

        Args:
            step: which step the state belongs to; None for the last one told.
            async_mode: False to return when the snapshot is durable; None for the engine's setting.
            metrics, labels: stored with the snapshot.

        Returns:
            The save; None when the overlap policy skipped it, which only happens in the background.

        Raises:
            SaveFailedError: this save (without `async_mode`) or an earlier one failed.
            InvalidInputError: called inside an update or by a thread that does not train: use `request_save`.
            StepOrderError: see `step`.
            SystemExit: a signal asked for the end (`on_signals`); the save is durable.
        """
        self._enter("save")
        number = self.global_step if step is None else check_step(step)
        if number < self.global_step:
            raise StepOrderError(f"step {number} comes before {self.global_step}, the last one told", step=number)
        self.global_step = number
        self._collect()
        self._alive.say(step=number)
        is_async = self.config.async_mode if async_mode is None else async_mode
        if is_async and not self._stop and self._is_skipped(list(self._components.values())):
            return None
        handle = self._save_all(metrics, labels or {}, is_async)
        self._collect()
        return handle

    def request_save(self, reason: str = "asked for") -> None:
        """Have every component saved at the next safe point. May be called from anywhere, signal handlers too."""
        self._request = reason

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """State changes in here: `step` and `save` are refused, and `request_save` waits for the next safe point.

        Raises:
            MismatchError: the first time after a restore (not a fresh start), when a random stream of an `RngState`
                moved since; `moved` names it. Something was built after the restore that seeds or draws.
        """
        guards, self._guards = self._guards, []
        for guard in guards:
            guard.check()
        with self._points.update():
            yield

    @contextlib.contextmanager
    def pause(self, phase: str = "paused", *, quiet_s: float = 0.0) -> Iterator[None]:
        """Nothing registered changes in here, as in an evaluation: a signal's deadline may save in the middle of it.

        Args:
            phase: what a supervisor is told meanwhile.
            quiet_s: how long it may take at most, before a supervisor believes that the training hangs; matters where
                it is longer than what `casckpt run --silence` allows.
        """
        self._alive.say(phase=phase, quiet_s=quiet_s)
        try:
            with self._points.pause():
                yield
        finally:
            self._alive.say()

    # --- the end announced ---

    def on_signals(self, deadline_s: float = 20.0) -> contextlib.AbstractContextManager[None]:
        """While the block is open, SIGTERM and SIGINT save once more and end the training; see `engine.signals`.

        The first one saves everything at the next safe point, where `step` or `save` raises SystemExit; after
        `deadline_s` s inside a `pause()`. Where neither comes, the end of the block raises it. The second one ends the
        process at once. Only in the main thread.
        """
        return listening(self, deadline_s)

    def request_stop(self, name: str, number: int) -> None:
        """Save everything at the next safe point, and raise SystemExit there. May be called from anywhere."""
        self._stop = number
        self.request_save(name)

    def save_in_pause(self, name: str) -> bool:
        """Save everything, durably, if the loop stands inside a `pause()`; whether it does. For another thread.

        Before a restore there is nothing to save: what is registered is not what the run was.
        """
        with self._points.in_pause() as is_paused:
            is_saved = is_paused and self._is_placed and not self._is_torn
            if is_saved:
                self._save(list(self._components.values()), None, {"requested": name}, is_async=False)
            return is_saved

    # --- bringing back ---

    def restore(
        self,
        step: int | str = -1,
        *,
        strict: bool = True,
        allow_mixed: bool = False,
        branch: str | None = None,
        leave: Sequence[str] = (),
        allow_pickle: bool = False,
        reseed: int | None = None,
    ) -> RestoreReport:
        """Load the live objects from a snapshot and continue there; random streams come last.

        Args:
            step: a step, or any reference of `Store.snapshot`; -1 for the newest whole consistent snapshot.
            strict: every component of the snapshot must be registered and every registered one must be in it.
            allow_mixed: accept components of different steps; with -1 the newest whole snapshot is taken.
            branch: name of a branch that the next save opens; without it one is opened, and named after the step, when
                this is not the newest step.
            leave: components that keep their live state, or that the snapshot has and nobody registered.
            allow_pickle: run the pickles of opaque leaves. Only for stores that you trust.
            reseed: explore anew: give every stream of every `RngState` a new one derived from this seed. The next
                snapshot has it in its labels (`rng.reseed`).

        Returns:
            A report that prints as one screen, with each component's own step. `is_fresh` is true when the run is
            provably new; then nothing was touched.

        Raises:
            SaveFailedError: an earlier save failed and nobody was told.
            InvalidInputError: `reseed` is no integer from 0 to 2**63 - 1, or no `RngState` is registered.
            NotFoundError: there is no such snapshot, or no component of a name in `leave`.
            IncompleteError with `touched`, or what an object's own `load_state_dict` raises: it stopped half way, and
                `step` and `save` are refused until a restore succeeds.
            Otherwise as `Store.resume_into`; then nothing was touched.
        """
        self._enter("restore", is_placing=True)
        self._alive.say(phase="restoring")
        streams = self._streams(reseed)
        self.wait()
        ref = "latest" if step == -1 else step
        left = self._left(leave, ref)
        targets = {name: target for name, target in self.targets().items() if name not in left}
        try:
            report = self.store.resume_into(
                targets,
                ref,
                strict=strict,
                branch=branch,
                leave=[*left, *self.captured_only()],
                allow_mixed=allow_mixed,
                allow_pickle=allow_pickle,
            )
        except BaseException as error:  # a typed one without `touched` came before anything was touched
            self._is_torn |= not isinstance(error, CasckptError) or "touched" in error.facts
            raise
        self._place(report)
        if reseed is not None:
            for rng in streams:
                self._saves.labels |= rng.reseed(reseed)
        self._guards = [] if report.is_fresh else [RngGuard(rng) for rng in streams]
        return replace(report, interrupted=tuple(map(str, self.store.interrupted())))

    def _left(self, leave: Sequence[str], ref: int | str) -> set[str]:
        """The names in `leave`; one that leaves nothing is refused: what was meant by it would be overwritten."""
        if isinstance(leave, str) or not isinstance(leave, Iterable):
            raise InvalidInputError(f"leave={leave!r:.60}: expected a list of names, as in `leave=['buffer']`.")
        left, known = set(leave), set(self._components)
        if not left <= known:
            found = self.store.timeline()[-1:] if ref == "latest" else [self.store.snapshot(ref)]
            known |= {name for snapshot in found for name in snapshot.components}
        unknown = sorted(left - known, key=repr)
        if unknown:
            raise NotFoundError(
                f"leave={unknown}: no such components; nothing was restored. There are {', '.join(sorted(known))}.",
                names=unknown,
            )
        return left

    def targets(self) -> dict[str, Any]:
        """What a restore fills: component name → live object."""
        return {each.name: each.target for each in self._components.values() if each.is_restorable}

    def captured_only(self) -> list[str]:
        """Components that are saved, and that nothing puts back: functions without `load`."""
        return [each.name for each in self._components.values() if not each.is_restorable]

    def begin(self, report: RestoreReport) -> None:
        """Continue with the live objects as they are: somebody else filled them, and placed the store's handle.

        Args:
            report: from which snapshot; of a fresh start in a run that has steps, say.
        """
        self._enter("begin", is_placing=True)
        self.wait()
        self._place(report)

    def _streams(self, reseed: int | None) -> list[RngState]:
        found = [each.target for each in self._components.values() if isinstance(each.target, RngState)]
        if reseed is not None:
            stream_seed(reseed)  # refuses what is no seed
            if not found:
                raise InvalidInputError(
                    "reseed: no RngState is registered. Register one: `register('rng', RngState())`."
                )
        return found

    def _place(self, report: RestoreReport) -> None:
        snapshot = report.snapshot
        self.global_step = 0 if snapshot is None else snapshot.step
        self._saves.committed = set() if snapshot is None else set(snapshot.components)
        self._saves.labels = {}  # of what was before
        self._is_placed, self._is_torn = True, False
        for component in self._components.values():
            stored = snapshot.components.get(component.name) if snapshot is not None else None
            component.count_from(self.global_step if stored is None else stored.step, self._clock())
            component.manifest = "" if stored is None else stored.manifest
        if snapshot is not None:
            self._reserve(list(self._components.values()))  # what was loaded may be larger than what was registered

    # --- looking ---

    def list_checkpoints(self) -> list[Snapshot]:
        """Snapshots of the current branch and its ancestors, oldest first."""
        return list(self.store.timeline())

    def report(self) -> EngineReport:
        """What was saved, skipped, postponed and waited for, and how far the budget lengthens intervals."""
        return describe(self._saves, self._components)

    # --- the end ---

    def wait(self, timeout_s: float | None = DRAIN_TIMEOUT_S) -> None:
        """Wait until every save under way is durable; None for as long as it takes. In a forked child nothing happens.

        Raises:
            SaveFailedError: one failed and nobody was told.
            BusyError: one is still under way after `timeout_s`, in all; it names the steps.
        """
        if self._points.is_elsewhere:
            return
        self._saves.drain(timeout_s)
        self._collect()

    def close(self, timeout_s: float | None = DRAIN_TIMEOUT_S) -> None:
        """Finish all saves. A store that was opened elsewhere stays open. In a forked child nothing happens.

        Args:
            timeout_s: how long to wait for saves under way; None for as long as they take.

        Raises:
            SaveFailedError: one failed and nobody was told. The engine is closed all the same.
            BusyError: a save is still under way after `timeout_s`. Nothing is lost by that, and nothing closed: the
                save goes on, the end of the process waits for it, and `close` may be called again.
        """
        if self._is_closed or self._points.is_elsewhere:
            return
        self._saves.drain(timeout_s)
        self._is_closed = True
        try:
            self._collect()
        finally:
            self._alive.close()
            if self._own_maintenance is not None:
                self._own_maintenance.close()
            if self._owns_store:
                self.store.close()

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<casckpt engine of {self.store!r}: {len(self._components)} components, step {self.global_step}>"

    # --- inside ---

    def _enter(self, what: str, *, is_placing: bool = False) -> None:
        """Refuse what cannot be a safe point."""
        if self._is_closed:
            raise InvalidInputError(f"{what}: this engine is closed")
        self._points.check(what, is_training=not is_placing)
        if not is_placing:
            self._guards = []  # what moves from here on is training
        if not is_placing and not self._is_placed:
            raise InvalidInputError(
                f"run {self.store.run!r} has snapshots up to step {self.store.step}, and this training was not "
                "restored from them. Call `restore()` first, or open the store under another run name."
            )
        if not is_placing and self._is_torn:
            raise InvalidInputError(
                f"{what}: the last restore stopped half way, and what is registered belongs to no one step. Call "
                "`restore()` again, of another step if need be."
            )

    def _save_due(self, metrics: Mapping[str, MetricValue] | None) -> SaveHandle | None:
        if self._maintenance is not None and not self._maintenance.may_save():
            return None  # which has warned; they stay due, and what `save` asks for is tried all the same
        now_s = self._clock()
        waiting = [each for each in self._components.values() if not self._is_being_added(each)]
        due = due_layers(waiting, self.global_step, now_s)
        if not due and not self._is_idle_told:
            self._is_idle_told = True
            tell_if_idle(self._components.values())
        affordable, postponed = self._budget.affordable(due, now_s)
        for layer in postponed:
            self._tell_interval(layer)
        chosen = with_more_frequent(waiting, affordable)
        if not chosen or self._is_skipped(chosen):
            return None
        handle = self._save(chosen, metrics, {})
        for layer in self._budget.start({each.strategy.layer for each in chosen}):
            log.info("saves of %s: interval is as configured again", self._names(layer))
        return handle

    def _is_being_added(self, component: Component) -> bool:
        return component.strategy.is_best_effort and self._saves.is_writing(component)

    def _after_commit(self) -> None:
        if self._maintenance is not None:
            self._maintenance.after_commit(self.store)

    def _tell_interval(self, layer: Layer) -> None:
        """A busy training has this at every save: told when it begins, and when the count has doubled."""
        known = self._budget.of(layer)
        if known.postponed_count & (known.postponed_count - 1):
            return
        log.warning(
            "save of %s postponed: it takes %.3g s, and a budget of %g of the time allows one in %.3g s; %d so far "
            "(`report()` and the supervisor's metrics count on)",
            self._names(layer),
            known.cost_s,
            self.config.save_budget,
            self._budget.interval_s(layer),
            known.postponed_count,
        )

    def _names(self, layer: Layer) -> str:
        return ", ".join(each.name for each in self._components.values() if each.strategy.layer == layer)

    def _is_skipped(self, components: list[Component]) -> bool:
        """Whether the overlap policy leaves this save out; its interval then begins anew."""
        writing = self._saves.critical_count()
        room = {"wait": writing, "skip": 0, "queue": self.config.queue_size}[self.config.overlap]
        if writing <= room:
            return False
        self._saves.counts.skipped += 1
        if not any(each.is_overdue for each in components):  # which are tried at every step
            log.warning("step %d: save skipped, %d still under way", self.global_step, writing)
        for component in components:
            component.skip(self.global_step, self._clock())
        return True

    def _save_all(
        self, metrics: Mapping[str, MetricValue] | None, labels: Mapping[str, str], is_async: bool | None = None
    ) -> SaveHandle:
        """Save every component, as requests up to now ask; the end of the training, when a signal asked.

        A request that comes while this or another save is under way is kept for the next safe point, and so is one
        whose save fails.
        """
        request, self._request = self._request, ""
        try:
            handle = self._save(list(self._components.values()), metrics, labels, is_async)
            if self._stop:
                self.wait()
        except BaseException:  # whatever a provider raises
            self._request = self._request or request
            raise
        if self._stop:
            raise SystemExit(128 + self._stop)
        return handle

    def _save(
        self,
        chosen: list[Component],
        metrics: Mapping[str, MetricValue] | None,
        labels: Mapping[str, str],
        is_async: bool | None = None,
    ) -> SaveHandle:
        """Capture these components, and those that no snapshot has yet, at one step."""
        if not self._components:
            raise InvalidInputError("there is nothing to save: no component is registered. Call `register` first.")
        if self._untaken:
            names = sorted(self._untaken)
            raise InvalidInputError(
                f"config: components {names} have strategies, and nothing was registered under these names; there are "
                f"{', '.join(self._components) or 'none'}. Correct the names, or take them out of the config.",
                key=f"components.{names[0]}",
            )
        if self.config.template is not None and not self._is_covered:
            self.coverage(strict=True)
            self._is_covered = True
        known = self._saves.known()
        components = [each for each in self._components.values() if each in chosen or each.name not in known]
        facts = Facts(metrics, labels, self.training_config)
        is_async = self.config.async_mode if is_async is None else is_async
        start = self._saves.start if is_async else self._saves.save_now
        self._alive.say(phase="saving")
        try:
            with self._points.saving():
                return start(self.store, self.global_step, components, facts)
        except BaseException:  # whatever a provider raises
            for component in components:
                component.is_overdue = True
            if not any(save.handle.has_failed for save in self._saves.under_way):  # which are counted when taken in
                self._saves.counts.failed += 1
            self._alive.say(phase="save failed")
            raise

    def _collect(self) -> None:
        """Take in the saves that ended.

        Raises:
            SaveFailedError: one failed and nobody was told.
        """
        try:
            self._saves.collect()
        except SaveFailedError:
            self._alive.say(phase="save failed")
            raise
