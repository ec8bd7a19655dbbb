"""From a dead run to a state that was checked: decide, fence, restore, check, and fall back.

::

    coordinator = RecoveryCoordinator(store, policy=Policy(metric="eval_return"), marker="runs/walker.recovery")
    report = coordinator.recover({"policy": policy, "optimizer": optimizer, "rng": rng})  # or an engine
    print(report)

The order is always the same: a generation is opened first, so that no older learner commits from then on; then the
snapshots that the decision names (made again, where such a learner went on until it was fenced) are tried one after the
other, each restored whole (random streams last) and checked, until one passes. Why others did not is in the report and
in the timeline. A snapshot that does not fit the live objects is refused before anything is fenced or touched.

A recovery may be killed at any point and started again; nothing it did before counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from casckpt.arguments import FLAG, FUNCTION, FUNCTIONS, PATH, TEXTS, WHOLE, checked, kind_of, maybe
from casckpt.engine.beats import tell_when_fenced
from casckpt.engine.engine import CheckpointEngine
from casckpt.errors import (
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
)
from casckpt.format.snapshot import DROPPABLE, NECESSITIES
from casckpt.objects.spool import Spool
from casckpt.recovery.checks import Check, Reference, find_nonfinite, find_schedule_gaps, run_checks
from casckpt.recovery.decision import FRESH, STOP, Action, FailureInfo, Policy, decide, few, survey
from casckpt.recovery.loading import config_drift, load_into
from casckpt.recovery.marker import RESTORING, Marker
from casckpt.recovery.migrations import Migrate, Migrations, registered
from casckpt.recovery.plan import compare_targets
from casckpt.recovery.steps import Structures
from casckpt.state.differences import mismatch
from casckpt.state.rng import RngState
from casckpt.state.rng_guard import RngGuard
from casckpt.state.transfer import Transfer, copy_tree
from casckpt.store.commit import Position
from casckpt.store.generations import open_generation
from casckpt.store.store import Store
from casckpt.store.values import RestoreReport, Snapshot, Value

DEFAULT_CHECKS: tuple[Check, ...] = (find_nonfinite, find_schedule_gaps)
Load = Callable[[Snapshot], RestoreReport]
LoadMigrated = Callable[[Mapping[str, Any], Snapshot], None]
TARGETS = kind_of(Mapping, CheckpointEngine, words="live objects by component, or a CheckpointEngine")


@dataclass(frozen=True)
class RecoveryReport(Value):
    """What a recovery did.

    Attributes:
        restored: the restore that passed its checks; None for a fresh start.
        generation: the one that the training now belongs to.
        reasons: of the decision, and why snapshots that were tried did not pass.
        attempt: 2 and more when earlier recoveries were killed before their end.
    """

    restored: RestoreReport | None
    generation: int
    reasons: tuple[str, ...]
    attempt: int = 1

    @property
    def is_fresh(self) -> bool:
        return self.restored is None

    @property
    def step(self) -> int | None:
        return None if self.restored is None else self.restored.step

    def to_dict(self) -> dict[str, Any]:
        return {
            "restored": None if self.restored is None else self.restored.to_dict(),
            "generation": self.generation,
            "reasons": list(self.reasons),
            "attempt": self.attempt,
        }

    def __str__(self) -> str:
        head = "fresh start" if self.restored is None else str(self.restored)
        again = f"; attempt {self.attempt}: the last one did not come to its end" if self.attempt > 1 else ""
        return "\n".join([head, f"  generation {self.generation}{again}", *(f"  why: {why}" for why in self.reasons)])


class RecoveryCoordinator:
    """Recovers one run.

    Args:
        store: open for writing, for the run that is to go on.
        policy: the table of decisions.
        checks: run after each restore, on the live objects; see `checks`.
        marker: path of a small file of the run's own, whose folder is made; None to keep none.
        keep_reads: put what is read into files beside the marker too, until the recovery is over: one that is killed
            goes on reading where it stopped. For stores on slow media; needs as much room as the state.
        schema_version, migrations, config, fatal: what today's code expects, and how old snapshots come there; see
            `load_into`. Items of the config that differ are among the reasons, those of `fatal` refuse.

    Raises:
        InvalidInputError: `keep_reads` without a `marker`, or one without a name.
    """

    @checked(
        store=Store,
        policy=maybe(Policy),
        checks=FUNCTIONS,
        marker=maybe(PATH),
        keep_reads=FLAG,
        schema_version=maybe(WHOLE),
        migrations=Migrations,
        fatal=TEXTS,
    )
    def __init__(
        self,
        store: Store,
        *,
        policy: Policy | None = None,
        checks: Sequence[Check] = DEFAULT_CHECKS,
        marker: str | os.PathLike[str] | None = None,
        keep_reads: bool = False,
        schema_version: int | None = None,
        migrations: Migrations = registered,
        config: Any = None,
        fatal: Sequence[str] = (),
    ) -> None:
        if keep_reads and marker is None:
            raise InvalidInputError("keep_reads=True: there is no marker beside which they could lie. Give marker=.")
        if marker is not None and not os.fspath(marker):
            raise InvalidInputError("marker='': expected the path of a file. Give one, or None to keep none.")
        self._store = store
        self._policy = policy or Policy()
        self._checks = checks
        self._marker = None if marker is None else Marker(marker, system=store._system)
        self._spool_path = f"{marker}.reads" if keep_reads else None
        self._schema_version, self._migrations = schema_version, migrations
        self._config, self._fatal = config, fatal

    @checked(failure=maybe(FailureInfo), allow_fresh=FLAG)
    def decide(self, failure: FailureInfo | None = None, *, allow_fresh: bool = False) -> Action:
        """What a recovery would do, and why. Changes nothing."""
        situation = survey(self._store, self._policy)
        situation = replace(situation, passed_over=(*self._lost_by_marker(), *situation.passed_over))
        return decide(situation, failure or FailureInfo(), self._policy, allow_fresh=allow_fresh)

    def _lost_by_marker(self) -> list[str]:
        """A generation that the marker tells of and the timeline does not: its newest entries went without a gap."""
        last = None if self._marker is None else self._marker.read()
        newest = self._store._catalog.generation(self._store.run).number
        if last is None or last.generation <= newest:
            return []
        return [
            f"newer steps may be lost: the marker tells of generation {last.generation} of run {self._store.run!r}, "
            f"the timeline of {newest}. Before training goes on, look whether this is the newest copy of the store"
        ]

    @checked(targets=TARGETS, failure=maybe(FailureInfo), allow_fresh=FLAG, load=maybe(FUNCTION), roll_back=FLAG)
    def recover(
        self,
        targets: Mapping[str, Any] | CheckpointEngine,
        failure: FailureInfo | None = None,
        *,
        allow_fresh: bool = False,
        load: Load | None = None,
        roll_back: bool = False,
    ) -> RecoveryReport:
        """Put the run's state into live objects, and let this handle continue it.

        Args:
            targets: component name → live object; or an engine of this store, whose components they are.
            failure: how the training ended.
            allow_fresh: start from the beginning where there is no snapshot to go on from, though the store is not
                empty. Where the run has steps, its new line is a branch `fresh`.
            load: how a snapshot is loaded, where targets are neither plain nor an engine's.
            roll_back: in a training that goes on: when no snapshot passes, or anything else ends the recovery, put the
                live objects back to what they were. Takes a copy of them in memory meanwhile; rings cannot take part.

        Cost: a restore per snapshot that is tried, and one pass over the weights for the default checks.

        Random streams are as the snapshot has them when this returns, whatever checks drew. Under `casckpt run`, the
        supervisor is told when this handle is fenced later.

        Raises:
            NotFoundError: the store is ambiguous or damaged; nothing was touched.
            IncompleteError: no snapshot fits and passes its checks. The live objects hold the last one that was tried,
                unless they were rolled back; this handle stands where it stood.
            MismatchError: the chosen snapshot, its schema or its config does not fit; nothing was fenced or touched.
                What does not fit after migrations shows when those have run: the generation is open then, as it is
                where the step that does not fit was committed while this fenced its learner. Of older ones, met on
                the way back, that is a reason to pass them over.
            FencedError: somebody else recovers this run at the same time.
        """
        decided = self._decided(failure, allow_fresh)
        action, first = decided.action, decided.first
        if action.kind == STOP:
            raise NotFoundError(
                f"run {self._store.run!r} is not recovered: {few(action.reasons)}. {action.advice}",
                reasons=action.reasons,
            )
        live = _Live(self._store, targets, load)
        drift = [] if first is None else self._compare(live, first)
        if self._marker is not None:
            self._marker.prepare()
        with self._undone_when_it_fails(live, roll_back):
            return self._recover(live, decided, drift)

    def _decided(self, failure: FailureInfo | None, allow_fresh: bool) -> _Decided:
        heads = self._store._chooser.heads()
        return _Decided(failure, allow_fresh, heads, self.decide(failure, allow_fresh=allow_fresh))

    def _recover(self, live: _Live, decided: _Decided, drift: list[str]) -> RecoveryReport:
        first = decided.first
        if not live.is_engine:
            tell_when_fenced(self._store)
        generation = open_generation(self._store, first, decided.told)
        if self._store._chooser.heads() != decided.heads:  # whom this fenced went on until then
            later = self._decided(decided.failure, decided.allow_fresh)
            if later.first is not None:
                decided, drift = later, self._compare(live, later.first)
        action = decided.action
        attempt = self._begin(decided.first, generation)
        if action.kind == FRESH:
            live.start_fresh()
            self._finish(None, generation)
            return RecoveryReport(None, generation, action.reasons, attempt)
        reasons = [*action.reasons, *drift]
        with self._keeping_reads():
            restored, snapshot = self._first_that_passes(live, action.snapshots, reasons)
        if first is None or snapshot.id != first.id:  # the timeline must say what is continued
            generation = open_generation(self._store, snapshot, reasons, expected=generation)
        self._finish(snapshot, generation)
        return RecoveryReport(restored, generation, tuple(reasons), attempt)

    @contextlib.contextmanager
    def _undone_when_it_fails(self, live: _Live, roll_back: bool) -> Iterator[None]:
        position = self._store._committer.position
        before = {name: copy_tree(name, each) for name, each in live.targets.items()} if roll_back else {}
        try:
            yield
        except BaseException:
            if roll_back:
                Transfer(before, live.targets).fill()
            self._store._committer.stand_at(position)  # or the next recovery would not see what is newer
            raise

    def _first_that_passes(
        self, live: _Live, snapshots: Sequence[Snapshot], reasons: list[str]
    ) -> tuple[RestoreReport, Snapshot]:
        """Try one after the other; what was wrong with those before is added to `reasons`."""
        known = len(reasons)
        for snapshot in snapshots:
            try:
                restored = self._attempt(live, snapshot, snapshots, reasons)
            except MismatchError as error:
                if snapshot is snapshots[0]:
                    raise
                reasons.append(f"step {snapshot.step} does not fit: {error.message}")
                continue
            if restored is not None:
                return restored, snapshot
        path = self._store.path
        raise IncompleteError(
            f"run {self._store.run!r} is not recovered, none of {len(snapshots)} snapshots passed: "
            f"{few(reasons[known:])}. Nothing older was tried. Where steps cannot be restored, `casckpt verify "
            f"{path} --read-data` says why. Where they do not pass, `casckpt bisect {path} --check COMMAND` finds the "
            "last that does: label those after it (`casckpt annotate … --label diverged=true`), and start again.",
            reasons=tuple(reasons),
        )

    def _compare(self, live: _Live, snapshot: Snapshot) -> list[str]:
        """Hold a snapshot against what is to take it; returns how the config differs, in words."""
        try:
            chain = self._chain(snapshot)
            known = self._config is not None
            drift = config_drift(self._store, self._config, snapshot, fatal=self._fatal) if known else []
            differences = (
                [] if chain else compare_targets(Structures(self._store, snapshot), live.targets, leave=live.left)
            )
        except (CorruptionError, IncompleteError):  # restoring it will say so, and then the next one is tried
            return []
        if differences:
            raise mismatch(differences)
        return [f"config: {change}" for change in drift]

    def _chain(self, snapshot: Snapshot) -> list[Migrate]:
        """The migrations that a snapshot needs."""
        if self._schema_version is None:
            return []
        return self._migrations.chain(self._store.context(snapshot).schema_version, self._schema_version)

    def _attempt(
        self, live: _Live, snapshot: Snapshot, known: Sequence[Snapshot], reasons: list[str]
    ) -> RestoreReport | None:
        """Restore and check one snapshot; None when it did not pass, with the reason added."""
        damaged: dict[str, str] = {}
        while True:
            try:
                chain = self._chain(snapshot)
                restored = live.load(snapshot, damaged, self._load_migrated if chain else None)
                break
            except (CorruptionError, IncompleteError) as error:
                name = error.facts.get("component")
                if not self._may_fill(name, snapshot, live) or name in damaged:
                    reasons.append(f"step {snapshot.step} cannot be restored: {error.message}")
                    return None
                damaged[str(name)] = error.message
        streams = RngGuard(RngState())
        older = [each for each in known if each.step < snapshot.step]
        filled = [self._fill(name, why, live, snapshot, older) for name, why in damaged.items()]
        problems = [each for each, is_filled in filled if not is_filled]
        checked = {
            name: each for name, each in live.targets.items() if name not in damaged or not isinstance(each, Reference)
        }
        problems += run_checks(checked, self._checks)
        streams.put_back()
        if problems:
            reasons.append(f"step {snapshot.step} does not pass: {'; '.join(problems)}")
            return None
        reasons += [each for each, _ in filled]
        reasons += [f"{len(chain)} migrations led to schema version {self._schema_version}"] if chain else []
        return restored

    def _load_migrated(self, targets: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Load a snapshot of an older schema, and move the store's handle there."""
        load_into(
            self._store,
            targets,
            snapshot,
            schema_version=self._schema_version,
            migrations=self._migrations,
            is_resume=True,
        )

    def _may_fill(self, name: Any, snapshot: Snapshot, live: _Live) -> bool:
        stored = snapshot.components.get(name)
        is_droppable = stored is not None and stored.necessity == NECESSITIES[DROPPABLE]
        return self._policy.fill_droppable and is_droppable and live.can_leave

    def _fill(
        self, name: str, why: str, live: _Live, snapshot: Snapshot, older: Sequence[Snapshot]
    ) -> tuple[str, bool]:
        """Take a damaged droppable component from the nearest older snapshot: what was done, and whether it is well."""
        target = live.targets.get(name)
        if target is None:
            return f"step {snapshot.step}: droppable {name!r} is damaged and not restored", True
        if isinstance(target, Reference):
            return f"step {snapshot.step}: the reference output {name!r} is damaged and not compared: {why}", True
        for each in sorted(older, key=lambda each: -each.step):
            try:
                self._store.restore_into({name: target}, each)
            except CasckptError:  # damaged too, of another shape, or not there: one further back may do
                continue
            return f"step {snapshot.step}: droppable {name!r} was taken from step {each.step}: {why}", True
        return f"droppable {name!r} is damaged, and no older snapshot has it: {why}", False

    @contextlib.contextmanager
    def _keeping_reads(self) -> Iterator[None]:
        """Reads go through a spool in here; it stays when the recovery is interrupted, by a kill or by the store."""
        if self._spool_path is None:
            yield
            return
        reader, spool = self._store._keeper.reader, Spool(self._spool_path, system=self._store._system)
        reader.spool = spool
        try:
            yield
        except BaseException:
            spool.close()
            raise
        else:
            spool.remove()
        finally:
            reader.spool = None

    def _begin(self, snapshot: Snapshot | None, generation: int) -> int:
        if self._marker is None:
            return 1
        return self._marker.begin("" if snapshot is None else snapshot.id, generation).attempt

    def _finish(self, snapshot: Snapshot | None, generation: int) -> None:
        if self._marker is not None:
            self._marker.finish("" if snapshot is None else snapshot.id, generation)

    @property
    def was_interrupted(self) -> bool:
        """Whether the last recovery did not come to its end, as far as its marker says."""
        last = None if self._marker is None else self._marker.read()
        return last is not None and last.state == RESTORING


@dataclass(frozen=True)
class _Decided:
    """What is to be done: what was asked, the heads of branches that it is true of, and the answer."""

    failure: FailureInfo | None
    allow_fresh: bool
    heads: Collection[bytes]
    action: Action

    @property
    def first(self) -> Snapshot | None:
        """The snapshot to try first."""
        return self.action.snapshots[0] if self.action.snapshots else None

    @property
    def told(self) -> list[str]:
        """Why, for the timeline."""
        failure, reasons = self.failure, self.action.reasons
        if failure is None:
            return list(reasons)
        at = "" if failure.step is None else f" at step {failure.step}"
        return [f"{failure.kind}{at}{': ' if failure.message else ''}{failure.message}", *reasons]


class _Live:
    """What is restored into: plain targets, an engine's components, or whatever a function loads.

    Attributes:
        targets: component name → live object.
        left: components that are no targets and need not be.
        can_leave: whether single components may be left out of a load.
    """

    def __init__(self, store: Store, given: Mapping[str, Any] | CheckpointEngine, load: Load | None) -> None:
        self._store = store
        self._load = load
        self._engine = given if isinstance(given, CheckpointEngine) else None
        if isinstance(given, CheckpointEngine):
            if given.store is not store:
                raise InvalidInputError("the engine saves to another store than this coordinator recovers")
            self.targets, self.left = given.targets(), given.captured_only()
        else:
            self.targets, self.left = dict(given), []
        self.can_leave = load is None

    @property
    def is_engine(self) -> bool:
        return self._engine is not None

    def load(self, snapshot: Snapshot, without: Collection[str], migrated: LoadMigrated | None) -> RestoreReport:
        """Fill all targets but some; by `migrated` where the snapshot is of an older schema."""
        targets = {name: each for name, each in self.targets.items() if name not in without}
        if migrated is not None:
            migrated(targets, snapshot)
            report = RestoreReport(snapshot)
            if self._engine is not None:
                self._engine.begin(report)
            return report
        if self._load is not None:
            return self._load(snapshot)
        if self._engine is not None:
            return self._engine.restore(snapshot.id, leave=sorted(without))
        return self._store.resume_into(targets, snapshot, leave=sorted(without))

    def start_fresh(self) -> None:
        """Continue from nothing; where the run has snapshots, on a branch of its own."""
        if self._store.step is not None:
            self._store._committer.stand_at(Position("fresh", is_fork=True))
        if self._engine is not None:
            self._engine.begin(RestoreReport(None))
