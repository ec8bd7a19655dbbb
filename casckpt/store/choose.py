"""Which snapshot a restore or resume means, and where a handle stands afterwards.

"latest" is the newest *whole, consistent* snapshot of the current branch. What is newer and passed over is reported,
never used in silence; and a run without a snapshot is a fresh start only when nothing in the store is in doubt.
"""

from __future__ import annotations

import warnings
from typing import Any

from casckpt.errors import (
    AlreadyExistsError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreWarning,
)
from casckpt.ids import SnapshotId, short
from casckpt.limits import NAME_SIZE_MAX
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.timeline import Timeline
from casckpt.store.catalog import Catalog, TimelineView, check_name
from casckpt.store.commit import Position
from casckpt.store.wholeness import WholenessCheck

Choice = tuple[SnapshotId, list[str]]
_ROOM = 16  # for the number that a taken name gets


class Chooser:
    """Choices for one handle; holds nothing between calls."""

    def __init__(self, timeline: Timeline, keeper: IndexKeeper, catalog: Catalog, run: str) -> None:
        self._timeline = timeline
        self._keeper = keeper
        self._catalog = catalog
        self._run = run

    def head_position(self) -> Position:
        """The head of the branch that the run wrote last."""
        branch = self._catalog.current_branch(self._run)
        row = self._catalog.branch_row(self._run, branch)
        return Position(branch) if row is None else Position(branch, SnapshotId(row.head), row.head_step)

    def view(self, position: Position, branch: str | None = None) -> TimelineView:
        """The line of a branch, or of where a handle stands."""
        if branch is None and position.is_fork and position.snapshot is not None:
            # About to open a branch: its line is the one that it forks from, whoever takes the name meanwhile.
            parent = self._catalog.load(position.snapshot)
            line = [(n, min(stop, position.step)) for n, stop in self._catalog.line(parent.run, parent.branch)]
            return TimelineView(self._catalog, self._keeper, line)
        line = self._catalog.line(self._run, branch or position.branch)
        if not line and branch is not None:
            raise NotFoundError(f"run {self._run!r} has no branch {branch!r}. Run `casckpt log`.", branch=branch)
        return TimelineView(self._catalog, self._keeper, line)

    def resolve(self, ref: Any, position: Position) -> SnapshotId:
        """The snapshot that a reference other than "latest" means to this handle."""
        if position.is_fork and position.snapshot is not None:
            # About to open a branch: steps are those of the line that it forks from.
            parent = self._catalog.load(position.snapshot)
            return self._catalog.resolve(ref, parent.run, parent.branch)
        return self._catalog.resolve(ref, self._run, position.branch)

    def choose(self, ref: Any, position: Position, *, allow_mixed: bool, schema_version: int | None) -> Choice:
        """The snapshot to restore, and newer ones that were passed over.

        Raises:
            NotFoundError, IncompleteError: there is none; see `latest`.
            InvalidInputError: it is mixed, and that was not asked for.
            MismatchError: its schema version is another than `schema_version`.
        """
        skipped: list[str] = []
        if ref == "latest":
            snapshot_id, skipped = self.latest(position, allow_mixed=allow_mixed)
        else:
            snapshot_id = self.resolve(ref, position)
            row = self._catalog.row(snapshot_id)
            if row.is_mixed and not allow_mixed:
                raise InvalidInputError(
                    f"step {row.step} ({short(snapshot_id)}) is mixed: its exact components were captured at "
                    "different steps (`casckpt show` lists them). Pass allow_mixed=True if you want that.",
                    step=row.step,
                )
        if schema_version is not None:
            self._check_schema(snapshot_id, schema_version)
        return snapshot_id, skipped

    def _check_schema(self, snapshot_id: SnapshotId, expected: int) -> None:
        found = self._catalog.context(snapshot_id).schema_version
        if found != expected:
            raise MismatchError(
                f"snapshot {short(snapshot_id)} has schema version {found}, this code expects {expected}. Restore it "
                "with the code that wrote it, or restore() it as values, change them, and commit them anew.",
                expected=expected,
                found=found,
            )

    def latest(self, position: Position, *, allow_mixed: bool) -> Choice:
        """The newest whole consistent snapshot, and why newer ones were passed over.

        Raises:
            NotFoundError: the run has none at all.
            IncompleteError: it has some, and none of them will do.
            StorageError: a newer one could not be looked at now; an older one is no answer to that.
        """
        skipped: list[str] = []
        check = WholenessCheck(self._timeline, self._keeper, self._catalog)
        for snapshot_id in self.view(position).ids(reverse=True):
            row = self._catalog.row(snapshot_id)
            if row.is_mixed and not allow_mixed:
                skipped.append(f"step {row.step} ({short(snapshot_id)}) is mixed")
                continue
            if row.is_thinned:
                skipped.append(f"step {row.step} ({short(snapshot_id)}) is thinned")
                continue
            flaw = check.snapshot_flaw(snapshot_id)
            if flaw is None:
                skipped += self.lost_after(row.seq)
                if skipped:
                    message = f"'latest' is step {row.step}; passed over: {'; '.join(skipped)}"
                    warnings.warn(message, StoreWarning, stacklevel=5)
                return snapshot_id, skipped
            skipped.append(f"step {row.step} ({short(snapshot_id)}) is not whole: {flaw.reason}")
        if skipped:
            raise IncompleteError(
                f"run {self._run!r}: no snapshot can be restored as 'latest': {'; '.join(skipped[:5])}. "
                "Run `casckpt verify`.",
                skipped=skipped,
            )
        doubts = self.doubts()
        hint = f" ({len(doubts)} files of the store are damaged or missing: run `casckpt verify`)" if doubts else ""
        raise NotFoundError(f"run {self._run!r} has no snapshot{hint}. Run `casckpt log --all-runs`.", run=self._run)

    def is_fresh(self) -> bool:
        """Whether the run provably has no snapshot.

        Raises:
            IncompleteError: it has none that can be read, but something in the store is damaged or missing.
        """
        if self._catalog.branch_rows(self._run):
            return False
        doubts = self.doubts()
        if doubts:
            raise IncompleteError(
                f"run {self._run!r} has no readable snapshot, but this store is damaged or incomplete: "
                f"{'; '.join(doubts[:3])}. It is not certain that this is a fresh start. Run `casckpt verify`.",
                doubts=doubts,
            )
        return True

    def lost_after(self, seq: int) -> list[str]:
        """What may have been a newer step than the one of entry `seq`, in words: a later entry that cannot be read."""
        bad = sorted((each for each in self._catalog.bad_entries() if each.seq > seq), key=lambda each: each.seq)
        if not bad:
            return []
        more = f", and {len(bad) - 1} more up to entry {bad[-1].seq}" if len(bad) > 1 else ""
        path, root = self._timeline.path(bad[0].seq), self._timeline.root
        is_gone = bad[0].found_size < 0  # then nothing proves to a repair which file it was
        how = f"copy {path} back" if is_gone else f"take it back (`casckpt repair {root} --from COPY --execute`)"
        return [
            f"a newer step may be lost: {bad[0].reason.partition('. ')[0]}{more}. Before training goes on, {how} from "
            "another copy of this store"
        ]

    def doubts(self) -> list[str]:
        """What is damaged or missing in the timeline and among the packs it names."""
        bad = [entry.reason for entry in self._catalog.bad_entries()]
        return bad + [f"pack {row.pack_id.hex()} is missing or short" for row in self._catalog.pending_packs()]

    def heads(self) -> frozenset[bytes]:
        """The heads of the run's branches, the same before and after a resume chose; see `position_at`."""
        return frozenset(row.head for row in self._catalog.branch_rows(self._run).values())

    def position_at(self, snapshot_id: SnapshotId, branch: str | None, heads: frozenset[bytes]) -> Position:
        """Where a handle stands after resuming: on the snapshot's branch if that is its head, else before a new one.

        `heads` are those at the choice: where another learner moved the head while the resume was reading, the next
        commit is the conflict that it is, not a branch that nobody asked for.
        """
        snapshot = self._catalog.load(snapshot_id)
        rows = self._catalog.branch_rows(self._run)
        if branch is not None:
            self.check_free(branch, "branch")
        head = rows.get(snapshot.branch)
        is_head = head is not None and snapshot_id in heads
        if branch is None and snapshot.run == self._run and is_head:
            return Position(snapshot.branch, snapshot_id, snapshot.step, snapshot)
        name = branch or f"{snapshot.branch}-{snapshot.step}"
        if len(name.encode()) > NAME_SIZE_MAX - _ROOM:  # branches of branches of branches
            name = f"fork-{snapshot.step}"
        return Position(name, snapshot_id, snapshot.step, snapshot, is_fork=True)

    def check_free(self, name: str, what: str) -> None:
        """Raise unless a branch or tag of this run may have this name.

        Raises:
            AlreadyExistsError: it is a tag or a branch.
        """
        check_name(name, what)
        if name in self._catalog.tags(self._run) or name in self._catalog.branch_rows(self._run):
            raise AlreadyExistsError(
                f"run {self._run!r}: {name!r} is a tag or a branch already. Choose another name.", name=name
            )
