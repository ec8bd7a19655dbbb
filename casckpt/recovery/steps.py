"""What a recovery does, step by step: the kind of each step, what it touches, and how many bytes that is.

Which part of a state is what, is told by the structures of the snapshot alone: an optimizer has `state` and
`param_groups`, a ring says so itself, generators are leaves of their own kind. Only environments and buffers that are
kept as plain trees are told by their names. A component may have parts of several kinds.

Everything is filled in one pass over the data; of what is filled, only random streams have a place of their own: last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from casckpt.engine.roles import IN_BUFFERS, TEMPLATES
from casckpt.format.snapshot import RingManifest
from casckpt.format.structure import Mapping, Node, Opaque, Rng, children_of, keys_of
from casckpt.ids import SnapshotId
from casckpt.store.restore import Stored
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value

METADATA, WEIGHTS, OPTIMIZERS, BUFFERS = "metadata", "weights", "optimizers", "buffers"
ENVIRONMENTS, STREAMS = "environments", "streams"
_SHOWN = 3  # names in a line
_FILLED = (
    (METADATA, "counters, cursors and other plain values"),
    (WEIGHTS, "tensors in place"),
    (OPTIMIZERS, "moments and groups in place, schedules"),
    (BUFFERS, "rows in place, and where the next one goes"),
    (ENVIRONMENTS, "in the middle of their episodes"),
)
_ENVIRONMENT = re.compile(next(role.path for role in TEMPLATES["sac"].roles if role.name == "environment"))
_BUFFER = re.compile(IN_BUFFERS)


@dataclass(frozen=True)
class PlanStep(Value):
    """One step of a recovery.

    Attributes:
        kind: enumerate, compare, fence, verify, metadata, weights, optimizers, buffers, environments, check, streams,
            post-steps or continue.
        text: what is done, for people.
        touches: what it is done to: component names, snapshots, the timeline.
        size_bytes: that it reads or fills.
    """

    kind: str
    text: str
    touches: tuple[str, ...] = ()
    size_bytes: int = 0

    def __str__(self) -> str:
        more = f" and {len(self.touches) - _SHOWN} more" if len(self.touches) > _SHOWN else ""
        names = f": {', '.join(self.touches[:_SHOWN])}{more}" if self.touches else ""
        size = f" ({self.size_bytes:,} bytes)" if self.size_bytes else ""
        return f"{self.kind:<12} {self.text}{names}{size}"


FRESH_STEPS = (
    PlanStep("fence", "a new generation: no older learner commits from here on", ("timeline",)),
    PlanStep("continue", "from the beginning"),
)


class Structures:
    """The structures of a snapshot's components, each read when it is first asked for.

    Attributes:
        components: what the snapshot says of each.

    Raises:
        CorruptionError, IncompleteError: the snapshot cannot be read; or a structure, with its `component`.
    """

    def __init__(self, store: Store, snapshot: Snapshot) -> None:
        self.restorer = store._restorer
        self.components = store._catalog.load(SnapshotId(bytes.fromhex(snapshot.id))).components
        self._read: dict[str, Stored] = {}

    def __getitem__(self, name: str) -> Stored:
        if name not in self._read:
            self._read[name] = self.restorer.load(name, self.components[name])
        return self._read[name]


def steps_of(structures: Structures, snapshots: Collection[Snapshot], names: Collection[str]) -> tuple[PlanStep, ...]:
    """The steps of a recovery from the first of some snapshots, of these components.

    Raises:
        CorruptionError, IncompleteError: a structure cannot be read.
    """
    first = next(iter(snapshots))
    sizes: dict[str, dict[str, int]] = {}
    for name in sorted(names):
        for kind, size in _sizes(structures[name], first.components[name].logical_bytes).items():
            sizes.setdefault(kind, {})[name] = size
    whole = tuple(sorted(names)), sum(sum(each.values()) for each in sizes.values())

    def fill(kind: str, text: str) -> PlanStep:
        return PlanStep(kind, text, tuple(sizes[kind]), sum(sizes[kind].values()))

    return (
        PlanStep("enumerate", "whole consistent snapshots, in this order", tuple(f"step {s.step}" for s in snapshots)),
        PlanStep("compare", "names, shapes, dtypes, schema, config with the live objects; or refuse", whole[0]),
        FRESH_STEPS[0],
        PlanStep("verify", "every byte read and hashed before anything is touched", *whole),
        *(fill(kind, text) for kind, text in _FILLED if kind in sizes),
        PlanStep("check", "finite weights and moments, schedules, reference outputs; else the next snapshot", whole[0]),
        *([fill(STREAMS, "put back, last of all")] if STREAMS in sizes else []),
        PlanStep("post-steps", "push weights to samplers; they hold their samples until they know the version"),
        PlanStep("continue", f"at the step after {first.step}"),
    )


def _sizes(stored: Stored, size: int) -> dict[str, int]:
    """Kind → bytes of a component that has `size` bytes in all."""
    if isinstance(stored.manifest, RingManifest):
        return {BUFFERS: size}
    structure = stored.structure
    found: dict[str, int] = {}
    done: set[int] = set()
    for kind, leaf in _kinds(structure.tree, _kind_of(structure.tree, stored.name)):
        block = -1 if leaf is None else structure.leaves[leaf].block
        default = METADATA if leaf is None or structure.leaves[leaf].kind != "torch" else WEIGHTS
        found.setdefault(kind or default, 0)
        if block >= 0 and block not in done:
            done.add(block)
            found[kind or default] += structure.blocks[block][0]
    scalars = METADATA if METADATA in found or not found else next(iter(found))  # they lie together
    found[scalars] = found.get(scalars, 0) + size - sum(found.values())
    return found


def _kinds(tree: Node, kind: str | None) -> Iterator[tuple[str | None, int | None]]:
    """For each leaf and scalar: the kind of what it is a part of, if that has one, and the leaf's index."""
    pending: list[tuple[Node, str | None]] = [(tree, kind)]
    while pending:
        node, kind = pending.pop()
        if node is None or isinstance(node, int):
            yield kind, node
        elif isinstance(node, Opaque):
            yield kind, node.leaf
        elif isinstance(node, Rng):
            pending.append((node.state, kind or STREAMS))
        else:
            pending += [(child, kind or _kind_of(child, str(key))) for key, child in children_of(node)]


def _kind_of(node: Node, name: str) -> str | None:
    """The kind of all that is in a container; None when its parts must tell."""
    if node is None or isinstance(node, int | Opaque | Rng):
        return None
    keys = set(keys_of(node)) if isinstance(node, Mapping) else set()
    if keys >= {"state", "param_groups"} or keys & {"last_epoch", "_last_lr"}:
        return OPTIMIZERS
    if keys >= {"python", "extra"}:  # an `RngState`
        return STREAMS
    if "not_captured" in keys or _ENVIRONMENT.search(name.lower()):
        return ENVIRONMENTS
    return BUFFERS if _BUFFER.search(name.lower()) else None
