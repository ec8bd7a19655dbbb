"""A recovery on paper: what would be done, in which order, and what stands against it. Nothing is touched.

The plan holds the snapshot that the table of decisions names against the live objects (names, shapes, dtypes), the
schema version, the config, the log and the loaders, from structures and tables alone; of the state itself only scalars
of cursors are read. It prints as one screen.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casckpt.arguments import FLAG, MAPPING, STEP, TEXTS, WHOLE, checked, maybe, within
from casckpt.errors import CasckptError, MismatchError
from casckpt.format.snapshot import DROPPABLE
from casckpt.recovery.decision import (
    DAMAGED,
    FRESH,
    STOP,
    Action,
    FailureInfo,
    Policy,
    Situation,
    advice_on,
    decide,
    survey,
)
from casckpt.recovery.loading import config_drift
from casckpt.recovery.migrations import Migrations, registered
from casckpt.recovery.steps import FRESH_STEPS, PlanStep, Structures, steps_of
from casckpt.state.differences import Difference
from casckpt.store.draft import WORLD_SIZE
from casckpt.store.ring_target import make_target
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value
from casckpt.store.wholeness import FLAWS

_SHOWN = 3  # of each kind of finding
_CURSOR, _CURSOR_SIZE_MAX = ("length", "epoch", "position"), 4096  # what the state of a cursor has among others


@dataclass(frozen=True)
class RecoveryPlan(Value):
    """What a recovery would do.

    Attributes:
        action: what the table of decisions says, on `situation`.
        steps: what is done, in order; see `PlanStep`.
        obstacles: why it would be refused as things are; empty when it can go on.
        differences: (path, stored, live) of what does not fit, as far as the structures tell.
        notes: what a person should know: drift of the config, a log ahead of the snapshot, an exhausted loader, another
            number of processes.
        world_sizes: how many processes saved the snapshot, and how many are to continue it; None where nobody said.
        read_bytes: what the restore reads and verifies.
    """

    action: Action
    situation: Situation
    steps: tuple[PlanStep, ...]
    obstacles: tuple[str, ...]
    differences: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    read_bytes: int
    world_sizes: tuple[int | None, int | None] = (None, None)

    @property
    def is_possible(self) -> bool:
        return not self.obstacles

    @property
    def snapshot(self) -> Snapshot | None:
        return self.action.snapshots[0] if self.action.snapshots else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "is_possible": self.is_possible,
            "action": self.action.to_dict(),
            "situation": self.situation.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
            "obstacles": list(self.obstacles),
            "differences": [list(each) for each in self.differences],
            "notes": list(self.notes),
            "read_bytes": self.read_bytes,
            "world_sizes": list(self.world_sizes),
        }

    def __str__(self) -> str:
        what = {FRESH: "start from the beginning", STOP: "stop: a person must decide"}
        head = what.get(self.action.kind, f"resume from {self.snapshot}")
        lines = [f"plan: {head}", *_some("why", self.action.reasons)]
        lines += [f"  {number:>2}. {step}" for number, step in enumerate(self.steps, 1)]
        lines += _some("in the way", [each for each in self.obstacles if each not in self.action.reasons])
        lines += _some("differs", [f"{path}: stored {stored}, live {live}" for path, stored, live in self.differences])
        lines += [f"  do: {self.action.advice}"] if self.action.advice else []
        return "\n".join(lines + _some("note", self.notes))


def _some(what: str, texts: Sequence[str]) -> list[str]:
    """Lines of a screen; `to_dict()` has all of them."""
    more = [f"  {what}: … and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return [*(f"  {what}: {text}" for text in texts[:_SHOWN]), *more]


@checked(
    store=Store,
    targets=maybe(MAPPING),
    failure=maybe(FailureInfo),
    policy=maybe(Policy),
    schema_version=maybe(WHOLE),
    migrations=Migrations,
    fatal=TEXTS,
    logged_step=maybe(STEP),
    world_size=maybe(within(WHOLE, 1)),
    allow_fresh=FLAG,
)
def make_plan(
    store: Store,
    targets: Mapping[str, Any] | None = None,
    *,
    failure: FailureInfo | None = None,
    policy: Policy | None = None,
    schema_version: int | None = None,
    migrations: Migrations = registered,
    config: Any = None,
    fatal: Sequence[str] = (),
    logged_step: int | None = None,
    world_size: int | None = None,
    allow_fresh: bool = False,
) -> RecoveryPlan:
    """Plan the recovery of a handle's run.

    Args:
        store: an open store; read-only will do.
        targets: component name → live object that would be filled; None to look at the store alone.
        failure: how the training ended.
        policy: the table of decisions.
        schema_version, migrations, config, fatal: see `load_into`.
        logged_step: the last step that the training's log has.
        world_size: how many processes are to go on; None for WORLD_SIZE of the environment, as launchers set it.
        allow_fresh: see `decide`.

    Cost: as `survey`, and reading the structures of the chosen snapshot.
    """
    chosen = policy or Policy()
    situation = survey(store, chosen)
    action = decide(situation, failure or FailureInfo(), chosen, allow_fresh=allow_fresh)
    left: set[str] = set()  # droppable components that cannot be read
    structures: Structures | None = None
    while action.snapshots:
        snapshot = action.snapshots[0]
        live = None if targets is None else {name: each for name, each in targets.items() if name not in left}
        try:
            structures = structures or Structures(store, snapshot)
            obstacles, notes = _context_findings(store, snapshot, schema_version, migrations, config, fatal)
            is_migrated = schema_version not in (None, store.context(snapshot).schema_version)  # what fits shows after
            found = compare_targets(structures, live, leave=left) if live is not None and not is_migrated else []
            notes += [f"droppable {name!r} is damaged: from an older snapshot, if one has it" for name in sorted(left)]
            notes += _log_notes(snapshot, logged_step) + _loader_notes(store, snapshot, left)
            sizes = _world_sizes(store, snapshot, world_size)
            names = {*snapshot.components} - left if live is None else {*snapshot.components} & {*live}
            steps = steps_of(structures, action.snapshots, names)
        except FLAWS as error:  # a recovery will find that out too, and fill in what it may, or go on with the next
            name = error.facts.get("component")
            if chosen.fill_droppable and name not in left and _may_leave(structures, name):
                left.add(str(name))
            else:
                action, left, structures = _without_first(store, action, error.message), set(), None
        else:
            return _plan_of(situation, action, steps, obstacles, notes, found, sizes)
    fresh_steps = FRESH_STEPS if action.kind == FRESH else ()
    return RecoveryPlan(action, situation, fresh_steps, action.reasons if action.kind == STOP else (), (), (), 0)


def _may_leave(structures: Structures | None, name: Any) -> bool:
    """Whether a component that cannot be read may be left out, and taken from an older snapshot."""
    ref = None if structures is None else structures.components.get(name)
    return ref is not None and ref.necessity == DROPPABLE


def _without_first(store: Store, action: Action, why: str) -> Action:
    first, *others = action.snapshots
    reasons = (*action.reasons, f"step {first.step} cannot be restored: {why}")
    if others:
        return Action(action.kind, tuple(others), reasons)
    return Action(STOP, (), reasons, advice_on(store, DAMAGED))


def _plan_of(
    situation: Situation,
    action: Action,
    steps: tuple[PlanStep, ...],
    obstacles: list[str],
    notes: list[str],
    found: Sequence[Difference],
    sizes: tuple[int | None, int | None],
) -> RecoveryPlan:
    """The plan for the first snapshot of an action, from what was found about it."""
    if found:
        obstacles.append(f"{len(found)} differences between snapshot and live objects: incompatible")
    if None not in sizes and sizes[0] != sizes[1]:
        notes.append(
            f"{sizes[0]} processes saved this, {sizes[1]} are to go on: shards, streams and cursors of each process do "
            "not line up by themselves"
        )
    differences = tuple((each.path, each.expected, each.found) for each in found)
    read_bytes = next(step.size_bytes for step in steps if step.kind == "verify")
    return RecoveryPlan(action, situation, steps, tuple(obstacles), differences, tuple(notes), read_bytes, sizes)


def compare_targets(
    structures: Structures, targets: Mapping[str, Any], *, leave: Collection[str] = ()
) -> list[Difference]:
    """What does not fit between a snapshot and live objects, by path: missing, extra and changed. Touches nothing.

    Args:
        leave: components that need no target.
    """
    named = {*targets, *leave}
    found = [Difference(name, "a component", "no target") for name in structures.components if name not in named]
    for name, live in targets.items():
        if name not in structures.components:
            found.append(Difference(name, "nothing", "a target"))
            continue
        stored = structures[name]
        try:
            found += make_target(live, stored, structures.restorer, strict=True, cast=False).differences
        except MismatchError as error:  # of another kind altogether
            found += [Difference(*each) for each in error.facts["differences"]]
    return found


def _context_findings(
    store: Store,
    snapshot: Snapshot,
    schema_version: int | None,
    migrations: Migrations,
    config: Any,
    fatal: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Obstacles and notes from schema version and config."""
    obstacles, notes = [], []
    stored = store.context(snapshot).schema_version
    try:
        chain = migrations.chain(stored, stored if schema_version is None else schema_version)
        notes += [f"{len(chain)} migrations lead from schema version {stored} to {schema_version}"] if chain else []
    except MismatchError as error:
        obstacles.append(error.message)
    if config is not None:
        try:
            notes += [f"config: {change}" for change in config_drift(store, config, snapshot, fatal=fatal)]
        except MismatchError as error:
            obstacles.append(error.message)
    return obstacles, notes


def _world_sizes(store: Store, snapshot: Snapshot, world_size: int | None) -> tuple[int | None, int | None]:
    """Processes then and now."""
    then, now = store.context(snapshot).environment.get("world_size", ""), os.environ.get(WORLD_SIZE, "")
    today = world_size if world_size is not None else (int(now) if now.isdecimal() else None)
    return int(then) if then.isdecimal() else None, today


def _log_notes(snapshot: Snapshot, logged_step: int | None) -> list[str]:
    if logged_step is None or logged_step <= snapshot.step:
        return []
    return [
        f"the log has step {logged_step}, {logged_step - snapshot.step} ahead of the snapshot: rewind it to "
        f"{snapshot.step}, or write to a fork of it"
    ]


def _loader_notes(store: Store, snapshot: Snapshot, left: Collection[str]) -> list[str]:
    """Components that look like an `IndexCursor` at its end, with or without live objects."""
    sizes = {name: each.logical_bytes for name, each in snapshot.components.items() if name not in left}
    names = [name for name, size in sizes.items() if size <= _CURSOR_SIZE_MAX]
    notes = []
    for name in names:
        try:
            state = store.restore(snapshot, only=[name])[name]
        except FLAWS:
            raise
        except CasckptError:  # a leaf that only its own library can make: no cursor
            continue
        if not isinstance(state, Mapping) or not all(type(state.get(key)) is int for key in _CURSOR):
            continue
        if state["position"] >= state["length"]:
            notes.append(
                f"loader {name!r} is exhausted: it stands at the end of epoch {state['epoch']}, and a loop over it "
                "does no work until `finish_epoch()`"
            )
    return notes
