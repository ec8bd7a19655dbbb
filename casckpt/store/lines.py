"""Two lines of steps compared: up to which step they are bit-identical, and what differs first.

A *line* is a snapshot with everything that it continues, by step. After a crash at step 900 and a resume at 500 the
steps above 500 are committed again, on a branch; the line that was lost is still there. Each step that both have is
compared by the addresses of its components: equal addresses are equal bits. Only the snapshot objects are read, a few
hundred bytes a step, and the components that differ at the first step that does.

Every common step is looked at until one differs, not a sample of them: a claim that steps are equal is then one about
all of them, whether or not what once differs goes on differing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from casckpt.arguments import TEXT, checked, maybe
from casckpt.errors import CorruptionError, IncompleteError, NotFoundError
from casckpt.ids import SnapshotId
from casckpt.store.catalog import TimelineView
from casckpt.store.compare import Diff
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value

_PATHS_SHOWN = 4


@dataclass(frozen=True)
class Divergence(Value):
    """The first step at which two lines are not the same.

    Attributes:
        components: names of those that differ or that one side lacks.
        diff: the leaves that differ; None where one side's data is withdrawn or damaged, as `reason` says.
    """

    step: int
    components: tuple[str, ...]
    diff: Diff | None
    reason: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Leaf paths that differ; a component's name where its leaves are not known."""
        if self.diff is None:
            return self.components
        changed = (component for component in self.diff.components if component.change != "equal")
        return tuple(path for each in changed for path in ([leaf.path for leaf in each.leaves] or [each.name]))

    def to_dict(self) -> dict[str, Any]:
        diff = None if self.diff is None else self.diff.to_dict()
        return {"step": self.step, "components": list(self.components), "diff": diff, "reason": self.reason}

    def __str__(self) -> str:
        paths = self.paths
        more = f" and {len(paths) - _PATHS_SHOWN} more" if len(paths) > _PATHS_SHOWN else ""
        note = f" ({self.reason})" if self.reason else ""
        return f"first divergence {self.step}: {', '.join(paths[:_PATHS_SHOWN])}{more}{note}"


@dataclass(frozen=True)
class LineComparison(Value):
    """What two lines have in common.

    Attributes:
        a, b: the snapshots whose lines were compared.
        shared_step: the last step at which both are one and the same snapshot; None when they share none.
        equal_steps: common steps after it, ascending, that are bit-identical although they were committed twice.
        divergence: the first common step that is not; None when there is none.
        only_a, only_b: how many steps after the shared one the other line lacks.
        unreadable: (step, reason) of common steps that could not be compared.
    """

    a: Snapshot
    b: Snapshot
    shared_step: int | None
    equal_steps: tuple[int, ...]
    divergence: Divergence | None
    only_a: int
    only_b: int
    unreadable: tuple[tuple[int, str], ...] = ()

    @property
    def is_proof(self) -> bool:
        """Whether steps were committed twice, and each of them is bit-identical."""
        return bool(self.equal_steps) and self.divergence is None and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "shared_step": self.shared_step,
            "equal_steps": list(self.equal_steps),
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "unreadable": [list(each) for each in self.unreadable],
            "is_proof": self.is_proof,
        }

    def __str__(self) -> str:
        parts = []
        if self.equal_steps:
            first, last = self.equal_steps[0], self.equal_steps[-1]
            steps = f"{first}–{last}" if last > first else f"{first}"
            parts.append(f"{steps} bit-identical ({len(self.equal_steps)} committed twice)")
        if self.divergence is not None:
            parts.append(str(self.divergence))
        parts += [f"step {step} not compared: {reason}" for step, reason in self.unreadable]
        return "; ".join(parts) or "no step was committed twice: nothing to compare"


def line_of(store: Store, snapshot: Snapshot) -> dict[int, SnapshotId]:
    """Step → snapshot, ascending, of the line that ends in `snapshot`; without retired ones. Reads the index alone."""
    catalog = store._catalog
    segments = [(n, min(stop, snapshot.step)) for n, stop in catalog.line(snapshot.run, snapshot.branch)]
    view = TimelineView(catalog, store._keeper, segments)
    return {catalog.row(snapshot_id).step: snapshot_id for snapshot_id in view.ids()}


@checked(store=Store)
def compare_lines(store: Store, a: Any, b: Any) -> LineComparison:
    """Compare the lines that end in two snapshots, step by step, up to the first difference.

    Args:
        store: an open store, of whichever run.
        a, b: references (see `Store.snapshot`), or snapshots of any run of this store.

    Cost: two small reads per common step after the shared one; the components that differ at the first that does.

    Raises:
        NotFoundError, InvalidInputError: a reference means nothing, or several things.
    """
    first, second = store.snapshot(a), store.snapshot(b)
    one, other = (line_of(store, each) for each in (first, second))
    shared = max((step for step in one if other.get(step) == one[step]), default=None)
    start = -1 if shared is None else shared
    common = sorted(step for step in one if step > start and step in other)
    equal: list[int] = []
    unreadable: list[tuple[int, str]] = []
    divergence = None
    for step in common:
        try:
            names = _differing(store, one[step], other[step])
        except (CorruptionError, IncompleteError) as error:
            unreadable.append((step, error.message))
            continue
        if names:
            divergence = _explain(store, step, names, one[step], other[step])
            break
        equal.append(step)
    only_a = sum(step > start and step not in other for step in one)
    only_b = sum(step > start and step not in one for step in other)
    return LineComparison(first, second, shared, tuple(equal), divergence, only_a, only_b, tuple(unreadable))


@checked(store=Store, branch=maybe(TEXT), run=maybe(TEXT))
def continuation(store: Store, branch: str | None = None, *, run: str | None = None) -> LineComparison | None:
    """The proof of a resume: the steps of a branch against the line that it left.

    Args:
        store: an open store.
        branch: None for the one that the run wrote last.
        run: None for the handle's.

    Returns:
        None when the branch left no line: it continues nothing, or what was the last step of the other.

    Raises:
        NotFoundError: no such branch.
    """
    catalog = store._catalog
    store._keeper.catch_up()
    owner = store.run if run is None else run
    name = catalog.current_branch(owner) if branch is None else branch
    rows = catalog.branch_rows(owner)
    if name not in rows:
        if branch is None:
            return None  # nothing is committed yet
        raise NotFoundError(f"run {owner!r} has no branch {name!r}. Run `casckpt branches`.", branch=name)
    if not rows[name].fork:
        return None
    left = catalog.info(SnapshotId(rows[name].fork))
    lost = rows.get(left.branch) if left.run == owner else None
    if lost is None or lost.head.hex() == left.id:
        return None
    return compare_lines(store, lost.head.hex(), rows[name].head.hex())


def _differing(store: Store, a: SnapshotId, b: SnapshotId) -> tuple[str, ...]:
    """Names of the components whose addresses differ, or that one of them lacks."""
    one, other = ({name: ref.manifest for name, ref in store._catalog.load(each).components.items()} for each in (a, b))
    return tuple(name for name in sorted({*one, *other}) if one.get(name) != other.get(name))


def _explain(store: Store, step: int, names: tuple[str, ...], a: SnapshotId, b: SnapshotId) -> Divergence:
    try:
        return Divergence(step, names, store.diff(store._catalog.info(a), store._catalog.info(b)))
    except (CorruptionError, IncompleteError, NotFoundError) as error:  # the addresses are proof enough
        return Divergence(step, names, None, error.message)
