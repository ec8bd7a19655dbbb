"""From a dead run to a state that was checked: decide, fence, restore, check, and fall back.

::

    coordinator = RecoveryCoordinator(store, policy=Policy(metric="eval_return"), marker="runs/walker.recovery")
    report = coordinator.recover({"policy": policy, "optimizer": optimizer, "rng": rng})
    print(report)

The order is always the same: a generation is opened first, so that no older learner commits from then on; then the
snapshots that the decision names are tried one after the other, each restored whole (random streams last) and checked,
until one passes. Why others did not is in the report and in the timeline. A snapshot that does not fit the live objects
is refused before anything is fenced or touched.

A recovery may be killed at any point and started again; nothing it did before counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.errors import CorruptionError, IncompleteError, NotFoundError
from casckpt.recovery.checks import Check, find_nonfinite, find_schedule_gaps, run_checks
from casckpt.recovery.decision import FRESH, STOP, Action, FailureInfo, Policy, decide, survey
from casckpt.recovery.marker import RESTORING, Marker
from casckpt.recovery.plan import compare_targets
from casckpt.state.differences import mismatch
from casckpt.state.transfer import Transfer, copy_tree
from casckpt.store.generations import open_generation
from casckpt.store.store import Store
from casckpt.store.values import RestoreReport, Snapshot, Value

DEFAULT_CHECKS: tuple[Check, ...] = (find_nonfinite, find_schedule_gaps)
Load = Callable[[Snapshot], RestoreReport]


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
        marker: path of a small file of the run's own; None to keep none.
    """

    def __init__(
        self,
        store: Store,
        *,
        policy: Policy | None = None,
        checks: Sequence[Check] = DEFAULT_CHECKS,
        marker: str | None = None,
    ) -> None:
        self._store = store
        self._policy = policy or Policy()
        self._checks = checks
        self._marker = None if marker is None else Marker(marker, system=store._system)

    def decide(self, failure: FailureInfo | None = None, *, allow_fresh: bool = False) -> Action:
        """What a recovery would do, and why. Changes nothing."""
        situation = survey(self._store, self._policy)
        return decide(situation, failure or FailureInfo(), self._policy, allow_fresh=allow_fresh)

    def recover(
        self,
        targets: Mapping[str, Any],
        failure: FailureInfo | None = None,
        *,
        allow_fresh: bool = False,
        load: Load | None = None,
        roll_back: bool = False,
    ) -> RecoveryReport:
        """Put the run's state into live objects, and let this handle continue it.

        Args:
            targets: component name → live object.
            failure: how the training ended.
            allow_fresh: start from the beginning where there is no snapshot to go on from, though the store is not
                empty.
            load: how a snapshot is loaded, `lambda each: engine.restore(each.id)` say; None for `Store.resume_into`.
            roll_back: in a training that goes on: when no snapshot passes, put the live objects back to what they were.
                Takes a copy of them in memory meanwhile; rings cannot take part.

        Cost: a restore per snapshot that is tried, and one pass over the weights for the default checks.

        Raises:
            NotFoundError: the store is ambiguous or damaged; nothing was touched.
            IncompleteError: no snapshot passes its checks. The live objects hold the last one that was tried, unless
                they were rolled back.
            MismatchError: the chosen snapshot does not fit the live objects; nothing was fenced or touched.
            FencedError: somebody else recovers this run at the same time.
        """
        action = self.decide(failure, allow_fresh=allow_fresh)
        if action.kind == STOP:
            raise NotFoundError(
                f"run {self._store.run!r} is not recovered: {'; '.join(action.reasons)}. Look with `casckpt log` and "
                "`casckpt verify`; to start from the beginning all the same, pass allow_fresh=True.",
                reasons=action.reasons,
            )
        first = action.snapshots[0] if action.snapshots else None
        if first is not None:
            self._compare(targets, first)
        position = self._store._committer.position
        before = {name: copy_tree(name, live) for name, live in targets.items()} if roll_back else {}
        generation = open_generation(self._store, first, self._told(action, failure))
        attempt = self._begin(first, generation)
        if action.kind == FRESH:
            self._finish(None, generation)
            return RecoveryReport(None, generation, action.reasons, attempt)
        reasons = list(action.reasons)
        for snapshot in action.snapshots:
            restored = self._attempt(targets, snapshot, load, reasons)
            if restored is None:
                continue
            if snapshot is not first:  # what the timeline says is continued must be what is continued
                generation = open_generation(self._store, snapshot, reasons, expected=generation)
            self._finish(snapshot, generation)
            return RecoveryReport(restored, generation, tuple(reasons), attempt)
        if roll_back:
            Transfer(before, targets).fill()
            self._store._committer.stand_at(position)
        raise IncompleteError(
            f"run {self._store.run!r} is not recovered, none of {len(action.snapshots)} snapshots passed: "
            f"{'; '.join(reasons)}. {'The live objects are as they were. ' if roll_back else ''}Run `casckpt verify`.",
            reasons=tuple(reasons),
        )

    def _compare(self, targets: Mapping[str, Any], snapshot: Snapshot) -> None:
        try:
            differences = compare_targets(self._store, targets, snapshot)
        except (CorruptionError, IncompleteError):  # restoring it will say so, and then the next one is tried
            return
        if differences:
            raise mismatch(differences)

    def _attempt(
        self, targets: Mapping[str, Any], snapshot: Snapshot, load: Load | None, reasons: list[str]
    ) -> RestoreReport | None:
        """Restore and check one snapshot; None when it did not pass, with the reason added."""
        try:
            restored = load(snapshot) if load is not None else self._store.resume_into(targets, snapshot)
        except (CorruptionError, IncompleteError) as error:
            reasons.append(f"step {snapshot.step} cannot be restored: {error.message}")
            return None
        problems = run_checks(targets, self._checks)
        if problems:
            reasons.append(f"step {snapshot.step} does not pass: {'; '.join(problems)}")
            return None
        return restored

    def _told(self, action: Action, failure: FailureInfo | None) -> list[str]:
        if failure is None:
            return list(action.reasons)
        at = "" if failure.step is None else f" at step {failure.step}"
        return [f"{failure.kind}{at}{': ' if failure.message else ''}{failure.message}", *action.reasons]

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
