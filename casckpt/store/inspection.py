"""A store looked at from outside: runs, histories with what is wrong in them, and what a snapshot is made of.

`Inspection` answers for every run of an open store, whatever run the handle belongs to. Damage is an answer here, not
an exception: a snapshot that cannot be read is a row with a state and a reason. A file that cannot be looked at now
(StorageError) is no damage, and raised. Nothing is changed, and no state is read but the small objects that describe
it.

States, the first that applies: "damaged" (bytes are wrong or cut), "incomplete" (a file is not here, as in a copy under
way), "retired", "thinned" (components were withdrawn), "mixed", "consistent". Of a retired snapshot nothing is owed
once a collector has been at work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from casckpt.errors import NotFoundError, StorageError
from casckpt.format.entry import Envelope
from casckpt.format.snapshot import Manifest, parts_of
from casckpt.format.structure import decode_structure
from casckpt.ids import ObjectId, SnapshotId
from casckpt.index.kv import KvReader
from casckpt.index.tables import (
    BranchRow,
    SnapRow,
    decode_snap,
    line_key,
    split_name_key,
)
from casckpt.storage.fs import is_about_file
from casckpt.store.choose import Chooser
from casckpt.store.contents import Contents
from casckpt.store.store import Store
from casckpt.store.values import Branch, Component, Snapshot, Value
from casckpt.store.wholeness import FLAWS, Flaw, WholenessCheck

_STEP_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Row(Value):
    """One line of a history: a snapshot, or a timeline entry that cannot be read (then most of it is unknown).

    Attributes:
        seq: timeline entry; with `last_seq` > `seq`, a range of entries that are missing.
        state: see the module.
        reason: what is wrong; empty when nothing is.
        snapshot: None when it cannot be read; `run`, `branch`, `step` and `id` then say what the index still knows.
    """

    seq: int
    last_seq: int
    state: str
    reason: str
    run: str
    branch: str
    step: int | None
    id: str
    tags: tuple[str, ...] = ()
    snapshot: Snapshot | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "snapshot"}
        return {**found, "tags": list(self.tags), "snapshot": self.snapshot and self.snapshot.to_dict()}


@dataclass(frozen=True)
class History:
    """Rows, newest first; whether older ones were left out, and how many retired ones were."""

    rows: list[Row]
    has_more: bool
    hidden_count: int


@dataclass(frozen=True)
class Run(Value):
    """A training in a store. `last_seq` is the timeline entry of its newest commit."""

    name: str
    last_seq: int
    snapshot_count: int
    branches: tuple[Branch, ...]
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part(Value):
    """A component of one snapshot as it lies in the store.

    Attributes:
        facts: what the snapshot says of it.
        stored_bytes: records of its chunks, structure and manifest, shared or not; 0 when unknown.
        state: "whole", "damaged", "incomplete" or "thinned", with `reason`.
    """

    name: str
    facts: Component
    leaf_count: int
    chunk_count: int
    stored_bytes: int
    state: str
    reason: str


class Inspection:
    """Looks into one open store. Its answers are those of the moment it was made."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._catalog, self._keeper, self._timeline = store._catalog, store._keeper, store._timeline
        self._keeper.catch_up()
        self._check = WholenessCheck(self._timeline, self._keeper, self._catalog)

    # --- runs and references ---

    def runs(self) -> list[Run]:
        """All runs, the one written last at the end. Costs counting their snapshots."""
        found = []
        for name in self._catalog.runs():
            rows = self._catalog.branch_rows(name)
            current = self._catalog.current_branch(name)
            with self._keeper.kv.read() as txn:
                count = sum(1 for row in rows.values() for _ in _steps(txn, row.number, _STEP_MAX))
            found.append(
                Run(
                    name,
                    max(row.last_seq for row in rows.values()),
                    count,
                    tuple(self._catalog.branches(name, current)),
                    self._catalog.tags(name),
                )
            )
        return sorted(found, key=lambda run: run.last_seq)

    def last_run(self) -> str | None:
        """The run that was written last; None in an empty store."""
        with self._keeper.kv.read() as txn:
            rows = [(key, msgspec.msgpack.decode(value, type=BranchRow)) for key, value in txn.scan("branches")]
        return split_name_key(max(rows, key=lambda pair: pair[1].last_seq)[0])[0] if rows else None

    def check_run(self, run: str) -> str:
        """`run`, if the store has it.

        Raises:
            NotFoundError: it has not; the message lists those it has.
        """
        runs = self._catalog.runs()
        if run not in runs:
            listed = ", ".join(runs[:8]) + (f" and {len(runs) - 8} more" if len(runs) > 8 else "")
            raise NotFoundError(f"no run {run!r} in this store; it has {listed or 'none'}.", run=run)
        return run

    def find(self, ref: Any, run: str) -> Snapshot:
        """The snapshot that a reference means in `run`; see `Store.snapshot`.

        Raises:
            NotFoundError, InvalidInputError, IncompleteError, CorruptionError
        """
        chooser = Chooser(self._timeline, self._keeper, self._catalog, run)
        position = chooser.head_position()
        if ref == "latest":
            return self._catalog.info(chooser.latest(position, allow_mixed=False)[0])
        try:
            return self._catalog.info(chooser.resolve(ref, position))
        except NotFoundError as error:
            others = self._branches_with(ref, run)
            if not others:
                raise
            raise NotFoundError(
                f"{error.message} Other branches have it: {', '.join(f'{name}@{ref}' for name in others)}.",
                **error.facts,
            ) from error

    def _branches_with(self, ref: Any, run: str) -> list[str]:
        """The branches of a run on whose own line a step lies."""
        if not str(ref).isdigit() or int(ref) > _STEP_MAX:
            return []
        with self._keeper.kv.read() as txn:
            rows = self._catalog.branch_rows(run)
            return [name for name, row in rows.items() if txn.get("lines", line_key(row.number, int(ref))) is not None]

    def envelope(self, snapshot: Snapshot) -> Envelope:
        """Who wrote a snapshot's timeline entry, and when."""
        return self._timeline.read(snapshot.seq).envelope

    # --- histories ---

    def history(
        self, run: str | None = None, branch: str | None = None, *, limit: int | None = None, with_retired: bool = False
    ) -> History:
        """Snapshots and unreadable timeline entries, newest first.

        Args:
            run: None for all runs.
            branch: one line of `run`: the branch and its ancestors. None for all branches.
            limit: at most so many snapshots; unreadable entries are listed all the same.
            with_retired: list retired snapshots too.

        Cost: one entry read per row, and one look-up per chunk of each distinct component.

        Raises:
            NotFoundError: no such branch.
        """
        names = self._branch_names()
        tags = self._tags_by_id()
        hidden = 0
        chosen: list[tuple[SnapRow, SnapshotId]] = []
        with self._keeper.kv.read() as txn:
            streams = [_steps(txn, number, stop) for number, stop in self._segments(run, branch)]
            for row, snapshot_id in heapq.merge(*streams, key=lambda pair: -pair[0].seq):
                if row.is_retired and not with_retired:
                    hidden += 1
                    continue
                if limit is not None and len(chosen) > limit:
                    break
                chosen.append((row, snapshot_id))
        has_more = limit is not None and len(chosen) > limit
        rows = [self._row(row, snapshot_id, names, tags) for row, snapshot_id in chosen[:limit]]
        rows += self._unreadable()
        return History(sorted(rows, key=lambda each: -each.seq), has_more, hidden)

    def _segments(self, run: str | None, branch: str | None) -> Iterable[tuple[int, int]]:
        if run is None:
            return [(number, _STEP_MAX) for number in self._branch_names()]
        if branch is None:
            return [(row.number, _STEP_MAX) for row in self._catalog.branch_rows(run).values()]
        line = self._catalog.line(run, branch)
        if not line:
            raise NotFoundError(
                f"run {run!r} has no branch {branch!r}; it has {', '.join(self._catalog.branch_rows(run))}.",
                branch=branch,
            )
        return line

    def _branch_names(self) -> dict[int, tuple[str, str]]:
        with self._keeper.kv.read() as txn:
            rows = list(txn.scan("branches"))
        return {msgspec.msgpack.decode(value, type=BranchRow).number: split_name_key(key) for key, value in rows}

    def _tags_by_id(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for run in self._catalog.runs():
            for tag, snapshot_id in self._catalog.tags(run).items():
                found[snapshot_id] = (*found.get(snapshot_id, ()), tag)
        return found

    def _row(
        self,
        row: SnapRow,
        snapshot_id: SnapshotId,
        names: dict[int, tuple[str, str]],
        tags: dict[str, tuple[str, ...]],
    ) -> Row:
        snapshot, flaw = None, None
        try:
            snapshot = self._catalog.info(snapshot_id)
            if not (row.is_retired and self._keeper.last_condemned() >= 0):  # else nothing is owed of it
                left = {name: c for name, c in snapshot.components.items() if name not in snapshot.thinned}
                flaw = self._check.first_flaw({name: bytes.fromhex(c.manifest) for name, c in left.items()})
        except FLAWS as error:
            flaw = Flaw.of(error)
        except StorageError as error:
            flaw = _unreadable_now(error)
        kinds = {"retired": row.is_retired, "thinned": row.is_thinned, "mixed": row.is_mixed}
        whole = next((kind for kind, is_it in kinds.items() if is_it), "consistent")
        run, branch = names.get(row.branch_no, ("", ""))
        return Row(
            row.seq,
            row.seq,
            flaw.state if flaw else whole,
            flaw.reason if flaw else "",
            run,
            branch,
            row.step,
            snapshot_id.hex(),
            tags.get(snapshot_id.hex(), ()),
            snapshot,
        )

    def _unreadable(self) -> Iterator[Row]:
        """Entries of which the index knows nothing but that they are damaged; missing ones in ranges."""
        missing: list[int] = []
        for entry in self._catalog.bad_entries():
            if entry.found_size < 0:
                missing.append(entry.seq)
            else:
                yield Row(entry.seq, entry.seq, "damaged", entry.reason, "", "", None, "")
        for first, last in _ranges(sorted(missing)):
            what = f"timeline entry {first} is" if first == last else f"timeline entries {first} to {last} are"
            yield Row(first, last, "incomplete", f"{what} missing", "", "", None, "")

    # --- one snapshot ---

    def parts(self, snapshot: Snapshot) -> list[Part]:
        """Its components, each with what is wrong with it."""
        return [
            Part(name, component, 0, 0, 0, "thinned", "withdrawn on purpose")
            if name in snapshot.thinned
            else self._part(name, component)
            for name, component in snapshot.components.items()
        ]

    def _part(self, name: str, component: Component) -> Part:
        address = ObjectId(bytes.fromhex(component.manifest))
        flaw: Flaw | None = None
        leaf_count = chunk_count = stored = 0
        try:
            flaw = self._check.component_flaw(address)
            manifest = self._catalog.manifest(address)
            ids, chunk_count = self._objects(address, manifest)
            stored = sum(
                places[0].header_size + places[0].stored_size
                for places in self._keeper.reader.locate(list(dict.fromkeys(ids)))
                if places
            )
            leaf_count = len(decode_structure(self._keeper.reader.read(ObjectId(manifest.structure))).leaves)
        except FLAWS as error:
            flaw = flaw or Flaw.of(error)
        except StorageError as error:
            flaw = flaw or _unreadable_now(error)
        state, reason = flaw or Flaw("whole", "")
        return Part(name, component, leaf_count, chunk_count, stored, state, reason)

    def _objects(self, address: ObjectId, manifest: Manifest) -> tuple[list[ObjectId], int]:
        """Everything below a manifest, parts of a ring included, and how many chunks that are."""
        chunks = self._catalog.chunk_ids(manifest)
        ids, count = [address, ObjectId(manifest.structure), *chunks], len(chunks)
        for part in parts_of(manifest):
            below, more = self._objects(ObjectId(part.manifest), self._catalog.manifest(part.manifest))
            ids += below
            count += more
        return ids, count

    def contents(self, snapshot: Snapshot, component: str) -> Contents:
        """A component, ready to be read leaf by leaf.

        Raises:
            CorruptionError, IncompleteError, NotFoundError: with `component`.
        """
        ref = self._catalog.load(SnapshotId(bytes.fromhex(snapshot.id))).components[component]
        return Contents(self._store._restorer, self._store._restorer.load(component, ref))


def _steps(txn: KvReader, number: int, stop: int) -> Iterator[tuple[SnapRow, SnapshotId]]:
    """The snapshots of a branch up to step `stop`, newest first."""
    bounds = line_key(number, 0), line_key(number, stop) + b"\0"
    for _, snapshot_id in txn.scan("lines", *bounds, reverse=True):
        row = txn.get("snaps", snapshot_id)
        if row is not None:
            yield decode_snap(row), SnapshotId(snapshot_id)


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, last) of runs without a gap."""
    rest = iter(numbers)
    first = last = next(rest, None)
    if first is None or last is None:
        return
    for number in rest:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _unreadable_now(error: StorageError) -> Flaw:
    """A medium that refuses one file must not hide the others; what says nothing of the file is raised."""
    if not is_about_file(error):
        raise error
    return Flaw("damaged", error.message)
