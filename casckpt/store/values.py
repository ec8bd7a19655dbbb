"""What a store hands out: frozen values that print well and have a plain dict form (`to_dict`)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from casckpt.format.entry import MetricValue


class Value:
    """Base of result values: `to_dict()` is plain and JSON-able."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Component(Value):
    """One component of a snapshot.

    Attributes:
        step: the step at which it was captured; older than the snapshot's when it was inherited.
        logical_bytes: bytes of its state.
        new_bytes: of those, plain bytes that no earlier commit had stored.
        necessity: "exact", "reloadable" or "droppable".
        manifest: hex address; equal manifests mean bit-identical components.
    """

    step: int
    logical_bytes: int
    new_bytes: int
    necessity: str
    manifest: str


@dataclass(frozen=True)
class Snapshot(Value):
    """One committed step.

    Attributes:
        id: hex address of the snapshot.
        seq: number of its timeline entry.
        parent: id of the snapshot it continues, or None.
        created_at: when it was published, by the writer's clock, in UTC.
        metrics, labels: those of the commit, updated by later annotations.
        is_consistent: all exact components were captured at one step.
        is_retired: hidden from listings; its data is there until a collector takes it.
        logical_bytes, new_bytes: sums over components, see `Component`.
        stored_bytes: bytes that its commit added on disk.
        thinned: components that were withdrawn on purpose; the others can be restored.
    """

    id: str
    seq: int
    run: str
    branch: str
    step: int
    parent: str | None
    created_at: datetime.datetime
    metrics: Mapping[str, MetricValue]
    labels: Mapping[str, str]
    is_consistent: bool
    is_retired: bool
    components: Mapping[str, Component]
    logical_bytes: int
    new_bytes: int
    stored_bytes: int
    thinned: tuple[str, ...] = ()

    @property
    def dedup_ratio(self) -> float:
        """Logical bytes per plain byte not stored before."""
        return self.logical_bytes / self.new_bytes if self.new_bytes else float("inf")

    @property
    def compression(self) -> float:
        """Plain new bytes per byte added on disk."""
        return self.new_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "created_at": self.created_at.isoformat()}

    def __str__(self) -> str:
        kind = ("" if self.is_consistent else " mixed") + (" thinned" if self.thinned else "")
        return f"{self.run}/{self.branch}@{self.step} {self.id[:12]}{kind}"


@dataclass(frozen=True)
class Branch(Value):
    """A line of steps in a run. `fork` is the snapshot that its first one continues, if any."""

    name: str
    head: str
    head_step: int
    fork: str | None
    is_current: bool


@dataclass(frozen=True)
class Context(Value):
    """What was recorded around a state: the user's schema version, config, and library versions."""

    schema_version: int
    config: Any
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Problem(Value):
    """Something found damaged, missing or in doubt.

    Attributes:
        kind: "corrupt" (bytes are wrong), "missing", "unreadable" (the medium refused), "incomplete" or "timeline".
        message: what, where, and what to do.
        snapshots: (run, branch, step, component, snapshot id) that need it.
    """

    kind: str
    message: str
    object_id: str = ""
    snapshots: tuple[tuple[str, str, int, str, str], ...] = ()


@dataclass(frozen=True)
class VerifyReport(Value):
    """What a verification looked at and found. `ok` is true when nothing is wrong."""

    problems: tuple[Problem, ...]
    snapshot_count: int
    object_count: int
    read_bytes: int
    is_data_read: bool

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        how = f"{self.read_bytes / 1e6:.1f} MB read and hashed" if self.is_data_read else "data not read"
        head = f"{self.snapshot_count} snapshots, {self.object_count} objects, {how}: "
        if self.ok:
            return head + "no damage found"
        return head + f"{len(self.problems)} problems\n" + "\n".join(f"- {p.message}" for p in self.problems)


@dataclass(frozen=True)
class RestoreReport(Value):
    """What a restore into live objects did.

    Attributes:
        snapshot: what was restored; None for a fresh start.
        components: for each restored one, its step, manifest (hex), bytes, and count of leaves.
        not_restored: components of the snapshot for which no target was given.
        skipped: newer snapshots that were passed over, and why.
        casts: largest absolute change per leaf whose dtype was changed on request.
        next_draws: what each restored random stream gives next.
        not_stored: targets that the snapshot does not have, and that were left alone (only without `strict`).
        interrupted: what large saves were under way when a process ended (only through the engine).
    """

    snapshot: Snapshot | None
    components: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    not_restored: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    casts: Mapping[str, float] = field(default_factory=dict)
    next_draws: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    not_stored: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """True only when the store provably holds nothing of this run."""
        return self.snapshot is None

    @property
    def step(self) -> int | None:
        return None if self.snapshot is None else self.snapshot.step

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "snapshot": self.snapshot and self.snapshot.to_dict(), "is_fresh": self.is_fresh}

    def __str__(self) -> str:
        if self.snapshot is None:
            return "fresh start: the store holds nothing of this run"
        lines = [f"restored {self.snapshot} (committed {self.snapshot.created_at:%Y-%m-%d %H:%M:%S} UTC)"]
        for name, facts in self.components.items():
            lines.append(
                f"  {name:<20} step {facts['step']:<10} {facts['leaf_count']:>6} leaves {facts['bytes']:>14,} B  "
                f"{facts['manifest'][:16]}"
            )
        lines += [f"  {name}: {facts['note']}" for name, facts in self.components.items() if "note" in facts]
        lines += [f"  not restored: {', '.join(self.not_restored)}"] if self.not_restored else []
        lines += [f"  not in the snapshot: {', '.join(self.not_stored)}"] if self.not_stored else []
        lines += [f"  interrupted while it was saved: {save}" for save in self.interrupted]
        lines += [f"  passed over: {reason}" for reason in self.skipped]
        lines += [f"  cast {path}: largest change {change:g}" for path, change in self.casts.items()]
        lines += [
            f"  next draws of {n}: {', '.join(f'{d:.6g}' for d in draws)}" for n, draws in self.next_draws.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Stats(Value):
    """Sizes of a store, in bytes and counts. `logical_bytes` is what the listed snapshots would take as full copies."""

    snapshot_count: int
    run_count: int
    object_count: int
    pack_count: int
    entry_count: int
    logical_bytes: int
    new_bytes: int
    pack_bytes: int
    timeline_bytes: int
    index_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pack_bytes + self.timeline_bytes + self.index_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}
