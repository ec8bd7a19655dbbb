"""Components that come later than their snapshot: a new snapshot of the same step takes its place.

What is large is written while smaller, more important state is durable already. When it is there, an entry publishes a
snapshot of the same step that has it too, and retires the one before. Steps, tags and annotations then mean the new
one; whoever holds the old one's id can still restore it.

Everything but the publishing runs beside other commits of the same handle. The branch may have moved on meanwhile: its
head stays where it is then, and the next commit inherits what was added.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from casckpt.errors import ConflictError, StepOrderError
from casckpt.format.entry import MetricValue, Supersede
from casckpt.format.snapshot import SNAPSHOT_VERSION, ComponentRef, Snapshot
from casckpt.ids import SnapshotId, short
from casckpt.index.tables import BranchRow
from casckpt.objects.writer import Written
from casckpt.store.commit import Committer, Position
from casckpt.store.components import Added
from casckpt.store.draft import Draft
from casckpt.store.values import Snapshot as SnapshotValue

Annotator = Callable[[SnapshotId, dict[str, MetricValue], dict[str, str]], SnapshotValue]


class Superseder(Committer):
    """Publishes snapshots in place of others; made by `beside`.

    Attributes:
        take_turn: a context manager in which nothing else of this handle publishes.
        announce: makes sure that the store's document has the flag of these entries.
        annotate: adds metrics and labels to a snapshot.
    """

    _main: Committer
    take_turn: Callable[[], AbstractContextManager[None]]
    announce: Callable[[], None]
    annotate: Annotator

    @classmethod
    def beside(
        cls,
        main: Committer,
        take_turn: Callable[[], AbstractContextManager[None]],
        announce: Callable[[], None],
        annotate: Annotator,
    ) -> Superseder:
        """One that works beside the committer of a handle, and tells it what it published."""
        made = cls(*main.places, **main.options)
        made._main, made.take_turn, made.announce, made.annotate = main, take_turn, announce, annotate
        return made

    def supersede(self, draft: Draft, base: SnapshotId) -> SnapshotValue:
        """Publish the snapshot `base`, or what superseded it, with the components of `draft` in place of it.

        Raises:
            ConflictError: `base` was retired meanwhile; nothing was published.
            Otherwise as `Committer.commit`.
        """
        self._keeper.catch_up()
        base = self._newest(base)
        self._stand_beside(base, draft)
        self._check_not_retired(base)
        self._components.narrow(draft.captured)
        return self.commit(draft)

    def _newest(self, base: SnapshotId) -> SnapshotId:
        """What stands in place of `base` by now, where something else has joined its step meanwhile."""
        known = self._catalog.info(base)
        return self._catalog.find_step(known.run, known.branch, known.step) or base

    def _stand_beside(self, base: SnapshotId, draft: Draft) -> None:
        content = self._catalog.load(base)
        content = msgspec.structs.replace(content, components={**content.components, **_continued(content, draft)})
        attempts = self._main.position.attempts  # whoever comes next learns which of them was published after all
        self.position = Position(content.branch, base, content.step, content, attempts=attempts)

    def _check_not_retired(self, base: SnapshotId) -> None:
        if self._catalog.row(base).is_retired:
            raise ConflictError(
                f"step {self.position.step} ({short(base)}) was retired or superseded meanwhile: nothing was added to "
                "it. Commit under a later step.",
                step=self.position.step,
            )

    def _adopt_attempt(self) -> None:
        """The handle's own committer did that before it named the base."""

    def _same_step(self, draft: Draft, parent: Snapshot, refs: dict[str, ComponentRef]) -> SnapshotValue | None:
        assert self.position.snapshot is not None
        if refs != parent.components:
            return None
        self._timeline.make_durable(self._keeper.applied().seq)
        with self.take_turn():
            return self.annotate(self.position.snapshot, draft.metrics, draft.labels)

    def _check_head(self, head: BranchRow | None) -> None:
        """Where the branch stands does not matter."""

    def _own_generation(self) -> int:
        return self._main.generation

    def _publish(self, *facts: Any) -> Any:
        with self.take_turn():
            self.announce()
            self._keeper.catch_up()
            entry, snapshot = super()._publish(*facts)
            body, added = entry.envelope.body, facts[1]
            assert isinstance(body, Supersede)
            known = {name: each for name, each in added.known.items() if name in facts[0].captured}
            self._main.note_superseded(SnapshotId(body.replaced), SnapshotId(body.snapshot), snapshot, known)
            return entry, snapshot

    def _snapshot(self, draft: Draft, context: bytes, added: Added) -> Snapshot:
        base = self.position.content
        assert base is not None
        return Snapshot(SNAPSHOT_VERSION, base.run, base.branch, base.step, base.parent, base.context, added.refs)

    def _body(
        self, draft: Draft, snapshot_id: SnapshotId, head: BranchRow | None, added: Added, written: Written
    ) -> Supersede:
        base = self.position.snapshot
        assert base is not None
        self._check_not_retired(base)
        old = self._catalog.info(base)
        return Supersede(
            old.run,
            old.branch,
            old.step,
            snapshot_id,
            base,
            written.packs,
            {**old.metrics, **draft.metrics},
            {**old.labels, **draft.labels},
            {name: size for name, size in added.new_bytes.items() if size},
        )


def _continued(content: Snapshot, draft: Draft) -> dict[str, ComponentRef]:
    """Rings that those of `draft` continue, where they are not what `content` has.

    The rows of a ring follow those of its last take, which may have joined a step before when `content` was there.
    """
    found = {}
    for name, take in draft.takes.items():
        relied = None if take.relies_on is None else take.relies_on.address
        old = content.components.get(name, ComponentRef(b"", 0, 0))
        if relied not in (None, old.manifest):
            found[name] = msgspec.structs.replace(old, manifest=relied, step=-1)  # is of no snapshot like this
    return found


def check_base(step: int, position: Position) -> SnapshotId:
    """The snapshot of `step` where a handle stands.

    Raises:
        StepOrderError: the handle does not stand at that step, or the next commit opens a branch there.
    """
    if position.snapshot is None or position.step != step or position.is_fork:
        raise StepOrderError(
            f"step {step} is not the last one committed by this handle: nothing can be added to it. Commit under a "
            "later step.",
            step=step,
        )
    return position.snapshot
