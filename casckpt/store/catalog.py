"""Reading the timeline: which snapshot a reference means, and what is known of it. Changes nothing."""

from __future__ import annotations

import contextlib
import datetime
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import msgspec

from casckpt.errors import (
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    StoreWarning,
    UnsupportedFormatError,
)
from casckpt.format.entry import Commit, Entry, Supersede
from casckpt.format.snapshot import (
    NECESSITIES,
    Manifest,
    decode_context,
    decode_manifest,
    decode_snapshot,
    split_ids,
)
from casckpt.format.snapshot import Snapshot as SnapshotObject
from casckpt.ids import ObjectId, SnapshotId, short
from casckpt.index.kv import KvReader
from casckpt.index.tables import (
    BAD,
    PENDING,
    BadEntry,
    BranchRow,
    GenerationRow,
    NoteRow,
    Pending,
    Place,
    SnapRow,
    ThinRow,
    decode_snap,
    find_snapshots,
    generation_bounds,
    get_struct,
    line_key,
    line_step,
    name_key,
    read_meta,
    run_prefix,
    split_name_key,
)
from casckpt.limits import NAME_SIZE_MAX
from casckpt.objects.apply import is_consistent, snapshot_of
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import is_about_file
from casckpt.store.settle import is_text
from casckpt.store.values import Branch, Component, Context, Snapshot

HEX_PREFIX = re.compile(r"[0-9a-f]{8,64}")
_STEP_TEXT = re.compile(r"[0-9]{1,19}")
_STEP_MAX = (1 << 63) - 1


def check_name(name: str, what: str) -> str:
    """A run, branch, tag or component name that index keys, paths and references can carry."""
    if not isinstance(name, str) or not name or not is_text(name) or len(name.encode()) > NAME_SIZE_MAX:
        raise InvalidInputError(
            f"{what} name {name!r:.100}: expected 1 to {NAME_SIZE_MAX} bytes of UTF-8 text", name=name
        )
    if any(ord(c) < 32 or ord(c) == 127 for c in name) or name != name.strip() or name in (".", ".."):
        raise InvalidInputError(
            f"{what} name {name!r:.100}: control characters and outer spaces are not allowed", name=name
        )
    if "/" in name or "\\" in name or (what != "component" and "@" in name):
        raise InvalidInputError(
            f"{what} name {name!r:.100}: '/', '\\' and '@' are not allowed. Use '-' or '.'.", name=name
        )
    if what in ("branch", "tag") and (HEX_PREFIX.fullmatch(name) or name == "latest" or name.isdigit()):
        raise InvalidInputError(f"{what} name {name!r:.100} reads like a snapshot id, a step or 'latest'", name=name)
    return name


def check_step(step: Any) -> int:
    """A step: a non-negative integer (numpy integers too)."""
    try:
        value = step.__index__()
    except (AttributeError, TypeError):
        value = None
    if value is None or isinstance(step, bool) or not 0 <= value <= _STEP_MAX:
        raise InvalidInputError(f"step {step!r:.100}: expected an integer from 0 to 2**63 - 1", step=step)
    return int(value)


def describe(
    entry: Entry,
    body: Commit | Supersede,
    snapshot: SnapshotObject,
    note: NoteRow,
    *,
    is_retired: bool = False,
    thinned: Sequence[str] = (),
) -> Snapshot:
    """The public value for a commit entry and the snapshot it carries."""
    components = {
        name: Component(
            step=ref.step,
            logical_bytes=ref.logical_bytes,
            new_bytes=body.new_bytes.get(name, 0),
            necessity=NECESSITIES[ref.necessity],
            manifest=ref.manifest.hex(),
        )
        for name, ref in snapshot.components.items()
    }
    return Snapshot(
        id=body.snapshot.hex(),
        seq=entry.seq,
        run=snapshot.run,
        branch=snapshot.branch,
        step=snapshot.step,
        parent=snapshot.parent.hex() or None,
        created_at=datetime.datetime.fromtimestamp(entry.envelope.written_at_ns / 1e9, tz=datetime.timezone.utc),
        metrics={**body.metrics, **note.metrics},
        labels={**body.labels, **note.labels},
        is_consistent=is_consistent(snapshot),
        is_retired=is_retired,
        components=components,
        logical_bytes=sum(each.logical_bytes for each in components.values()),
        new_bytes=sum(each.new_bytes for each in components.values()),
        stored_bytes=sum(pack.size for pack in body.packs) + entry.size,
        thinned=tuple(thinned),
    )


class Catalog:
    """Lookups for one store handle, always through the caught-up index."""

    def __init__(self, timeline: Timeline, keeper: IndexKeeper) -> None:
        self._timeline = timeline
        self._keeper = keeper

    # --- branches ---

    def branch_row(self, run: str, branch: str) -> BranchRow | None:
        with self._keeper.kv.read() as txn:
            return get_struct(txn, "branches", name_key(run, branch), BranchRow)  # type: ignore[no-any-return]

    def branch_rows(self, run: str) -> dict[str, BranchRow]:
        """All branches of a run by name."""
        with self._keeper.kv.read() as txn:
            rows = list(txn.scan("branches", *run_prefix(run)))
        return {split_name_key(key)[1]: msgspec.msgpack.decode(value, type=BranchRow) for key, value in rows}

    def runs(self) -> list[str]:
        with self._keeper.kv.read() as txn:
            return list(dict.fromkeys(split_name_key(key)[0] for key, _ in txn.scan("branches")))

    def current_branch(self, run: str) -> str:
        """The branch that the run wrote last; "main" for a run without commits."""
        rows = self.branch_rows(run)
        return max(rows, key=lambda name: rows[name].last_seq) if rows else "main"

    def branches(self, run: str, current: str) -> list[Branch]:
        return [
            Branch(name, row.head.hex(), row.head_step, row.fork.hex() or None, name == current)
            for name, row in self.branch_rows(run).items()
        ]

    def generations(self, run: str) -> list[GenerationRow]:
        """Recoveries of a run, newest first."""
        with self._keeper.kv.read() as txn:
            rows = list(txn.scan("meta", *generation_bounds(run), reverse=True))
        return [msgspec.msgpack.decode(value, type=GenerationRow) for _, value in rows]

    def generation(self, run: str) -> GenerationRow:
        """The newest generation of a run; number 0 before its first recovery."""
        with self._keeper.kv.read() as txn:
            row = next(txn.scan("meta", *generation_bounds(run), reverse=True), None)
        return GenerationRow() if row is None else msgspec.msgpack.decode(row[1], type=GenerationRow)

    def tags(self, run: str) -> dict[str, str]:
        """Tag → snapshot id in hex."""
        with self._keeper.kv.read() as txn:
            return {split_name_key(key)[1]: value.hex() for key, value in txn.scan("tags", *run_prefix(run))}

    def line(self, run: str, branch: str) -> list[tuple[int, int]]:
        """The branch and its ancestors as (branch number, last step that belongs to the line), newest first."""
        row = self.branch_row(run, branch)
        found = []
        with self._keeper.kv.read() as txn:
            stop = _STEP_MAX
            seen: set[int] = set()
            while row is not None and row.number not in seen:
                seen.add(row.number)
                found.append((row.number, stop))
                fork = txn.get("snaps", row.fork) if row.fork else None
                if fork is None:
                    break
                parent = decode_snap(fork)
                stop = min(stop, parent.step)
                row = self._row_of_number(txn, run, parent.branch_no)
        return found

    def _row_of_number(self, txn: KvReader, run: str, number: int) -> BranchRow | None:
        for _, value in txn.scan("branches", *run_prefix(run)):
            row: BranchRow = msgspec.msgpack.decode(value, type=BranchRow)
            if row.number == number:
                return row
        return None

    def find_step(self, run: str, branch: str, step: int) -> SnapshotId | None:
        """The snapshot of a step on a branch or its ancestors; retired ones count."""
        line = self.line(run, branch)
        with self._keeper.kv.read() as txn:
            for number, stop in line:
                found = txn.get("lines", line_key(number, step)) if step <= stop else None
                if found is not None:
                    return SnapshotId(found)
        return None

    # --- references ---

    def resolve(self, ref: Any, run: str, branch: str) -> SnapshotId:
        """The snapshot that `ref` means; see `Store.snapshot`. "latest" is the caller's business.

        Raises:
            NotFoundError: nothing is meant by it; the message lists what there is.
            InvalidInputError: an id prefix that fits several snapshots.
        """
        if isinstance(ref, Snapshot):
            return self._existing(SnapshotId(bytes.fromhex(ref.id)), ref)
        is_number = isinstance(ref, str) and _STEP_TEXT.fullmatch(ref) is not None
        if isinstance(ref, str) and not is_number:
            return self._resolve_text(ref, run)
        step = check_step(int(ref) if is_number else ref)
        found = self.find_step(run, branch, step)
        if found is None and is_number and HEX_PREFIX.fullmatch(ref):
            return self._resolve_prefix(ref)  # one id in forty starts with eight decimal digits
        if found is None:
            raise NotFoundError(
                f"run {run!r:.100}, branch {branch!r:.100}: no step {step}{self._bad_hint()}. Run `casckpt log`.",
                step=step,
                run=run,
                branch=branch,
            )
        return found

    def _resolve_text(self, ref: str, run: str) -> SnapshotId:
        if not is_text(ref):
            raise InvalidInputError(f"reference {ref!r:.100}: expected UTF-8 text", ref=ref)
        with self._keeper.kv.read() as txn:
            tagged = txn.get("tags", name_key(run, ref))
        if tagged is not None:
            return self._existing(SnapshotId(tagged), ref)
        row = self.branch_row(run, ref)
        if row is not None:
            return SnapshotId(row.head)
        name, at, step = ref.rpartition("@")
        if at and _STEP_TEXT.fullmatch(step) and self.branch_row(run, name) is not None:
            return self.resolve(int(step), run, name)
        if HEX_PREFIX.fullmatch(ref):
            return self._resolve_prefix(ref)
        raise NotFoundError(
            f"{ref!r:.100} is no tag, branch, branch@step or snapshot id in run {run!r:.100}. "
            "Run `casckpt log --all-runs`.",
            ref=ref,
            run=run,
        )

    def _resolve_prefix(self, ref: str) -> SnapshotId:
        with self._keeper.kv.read() as txn:
            found = find_snapshots(txn, bytes.fromhex(ref[: len(ref) // 2 * 2]), limit=1000)
        found = [each for each in found if each.hex().startswith(ref)]
        if len(found) == 1:
            return found[0]
        if found:
            raise InvalidInputError(f"snapshot id {ref!r:.100} fits {len(found)} snapshots. Give more digits.", ref=ref)
        raise NotFoundError(f"no snapshot id starts with {ref!r:.100}. Run `casckpt log --all-runs`.", ref=ref)

    def _existing(self, snapshot_id: SnapshotId, ref: Any) -> SnapshotId:
        with self._keeper.kv.read() as txn:
            if txn.get("snaps", snapshot_id) is None:
                raise NotFoundError(f"{ref!s:.100}: snapshot {short(snapshot_id)} is not in this store", ref=str(ref))
        return snapshot_id

    def _bad_hint(self) -> str:
        bad = self.bad_entries()
        return f" ({len(bad)} timeline entries are damaged or missing: run `casckpt verify`)" if bad else ""

    def bad_entries(self) -> list[BadEntry]:
        """Timeline entries that cannot be read, and numbers that are missing below the last."""
        with self._keeper.kv.read() as txn:
            bad = read_meta(txn, BAD, BadEntry)
        gaps = self._keeper.applied().gaps
        return bad + [BadEntry(seq, -1, f"timeline entry {seq} is missing") for seq in gaps]

    def pending_packs(self) -> list[Pending]:
        """Packs that were missing or of another size when their entry was applied."""
        with self._keeper.kv.read() as txn:
            return read_meta(txn, PENDING, Pending)

    # --- one snapshot ---

    def row(self, snapshot_id: SnapshotId) -> SnapRow:
        with self._keeper.kv.read() as txn:
            value = txn.get("snaps", snapshot_id)
        if value is None:
            raise NotFoundError(f"snapshot {short(snapshot_id)} is not in this store", snapshot_id=snapshot_id)
        return decode_snap(value)

    def load(self, snapshot_id: SnapshotId) -> SnapshotObject:
        """The snapshot object itself.

        Raises:
            CorruptionError, IncompleteError: naming the step.
        """
        row = self.row(snapshot_id)
        with _naming_step(snapshot_id, row):
            plain = self._keeper.reader.read(ObjectId(snapshot_id))
            return decode_snapshot(plain, f"snapshot {short(snapshot_id)}")

    def info(self, snapshot_id: SnapshotId) -> Snapshot:
        """Everything known of a snapshot. Costs reading its timeline entry.

        Raises:
            CorruptionError, IncompleteError: naming the step.
        """
        row = self.row(snapshot_id)
        with _naming_step(snapshot_id, row):
            entry = self._timeline.read(row.seq)
            body = entry.envelope.body
            found = snapshot_of(entry)
            if not isinstance(body, Commit | Supersede) or found is None or body.snapshot != snapshot_id:
                raise CorruptionError(f"timeline entry {row.seq} does not hold it", seq=row.seq)
        with self._keeper.kv.read() as txn:
            note: NoteRow = get_struct(txn, "notes", snapshot_id, NoteRow) or NoteRow({}, {})
        thinned = self.thinned(snapshot_id)
        return describe(entry, body, found[1], note, is_retired=row.is_retired, thinned=thinned)

    def thinned(self, snapshot_id: SnapshotId) -> list[str]:
        """Components that were withdrawn from a snapshot."""
        with self._keeper.kv.read() as txn:
            found: ThinRow | None = get_struct(txn, "thinned", snapshot_id, ThinRow)
        return found.components if found else []

    def check_not_thinned(self, snapshot_id: SnapshotId, names: Iterable[str], step: int) -> None:
        """Raise when one of these components was withdrawn.

        Raises:
            NotFoundError: it was; `components` names all that were, `only` those that are left.
        """
        thinned = self.thinned(snapshot_id)
        gone = sorted(set(names) & set(thinned))
        if not gone:
            return
        left = sorted(set(self.load(snapshot_id).components) - set(thinned))
        raise NotFoundError(
            f"step {step} (snapshot {short(snapshot_id)}) is thinned: {gone} were withdrawn on purpose. Restore what "
            f"is left with only={left}.",
            step=step,
            components=gone,
            only=left,
        )

    def readable(self, ids: Iterable[SnapshotId]) -> Iterator[Snapshot]:
        """`info` of each that can be read; a `StoreWarning` names the others, so that one bad file hides no history."""
        for snapshot_id in ids:
            try:
                yield self.info(snapshot_id)
            except UnsupportedFormatError:
                raise
            except CasckptError as error:
                if isinstance(error, StorageError) and not is_about_file(error):
                    raise
                warnings.warn(f"left out of this list: {error.message}", StoreWarning, stacklevel=3)

    def context(self, snapshot_id: SnapshotId) -> Context:
        address = self.load(snapshot_id).context
        if not address:
            return Context(1, None, {})
        found = decode_context(self._keeper.reader.read(ObjectId(address)), f"context {short(address)}")
        config = msgspec.json.decode(found.config) if found.config else None
        return Context(found.schema_version, config, found.environment)

    def manifest(self, address: bytes) -> Manifest:
        return decode_manifest(self._keeper.reader.read(ObjectId(address)), f"manifest {short(address)}")

    def chunk(self, object_id: ObjectId) -> bytes:
        """Plain bytes of one object, verified."""
        return self._keeper.reader.read(object_id)

    def places(self, ids: Sequence[ObjectId]) -> list[Place | None]:
        """The preferred record of each object; None where the index knows none."""
        return [found[0] if found else None for found in self._keeper.reader.locate(ids)]

    def chunk_ids(self, manifest: Manifest) -> list[ObjectId]:
        """All chunk ids of a component, in payload order."""
        if not manifest.has_nodes:
            return split_ids(manifest.ids, "manifest")
        found: list[ObjectId] = []
        for node in self.node_ids(manifest):
            found += split_ids(self._keeper.reader.read(node), f"node {short(node)}")
        if len(found) != manifest.chunk_count:
            raise CorruptionError(f"manifest: {len(found)} chunk ids, expected {manifest.chunk_count}")
        return found

    def node_ids(self, manifest: Manifest) -> list[ObjectId]:
        """The nodes between a large manifest and its chunks."""
        return split_ids(manifest.ids, "manifest") if manifest.has_nodes else []


@contextlib.contextmanager
def _naming_step(snapshot_id: SnapshotId, row: SnapRow) -> Iterator[None]:
    """Make errors about a snapshot's timeline entry say whose it is."""
    try:
        yield
    except UnsupportedFormatError:
        raise
    except CasckptError as error:
        kind = IncompleteError if isinstance(error, NotFoundError) else type(error)
        text = f"step {row.step} (snapshot {short(snapshot_id)}): {error.message.rstrip('.')}. Run `casckpt verify`."
        raise kind(text, **{**error.facts, "step": row.step, "seq": row.seq}) from error


class TimelineView(Sequence[Snapshot]):
    """Snapshots of a line, oldest first; read from the store when they are looked at. Retired ones are left out.

    Iterating and slicing leave out what cannot be read, with a `StoreWarning`; what is asked for by its place raises.
    """

    def __init__(self, catalog: Catalog, keeper: IndexKeeper, line: list[tuple[int, int]]) -> None:
        self._catalog = catalog
        self._keeper = keeper
        self._line = line
        self._ids: list[SnapshotId] | None = None

    def _scan(self, *, reverse: bool) -> Iterator[tuple[int, SnapshotId]]:
        segments = self._line if reverse else self._line[::-1]
        with self._keeper.kv.read() as txn:
            for number, stop in segments:
                bounds = line_key(number, 0), line_key(number, min(stop, _STEP_MAX)) + b"\0"
                for key, snapshot_id in txn.scan("lines", *bounds, reverse=reverse):
                    row = txn.get("snaps", snapshot_id)
                    if row is not None and not decode_snap(row).is_retired:
                        yield line_step(key), SnapshotId(snapshot_id)

    def ids(self, *, reverse: bool = False) -> Iterator[SnapshotId]:
        """Snapshot ids without reading anything of them."""
        for _, snapshot_id in self._scan(reverse=reverse):
            yield snapshot_id

    def steps(self) -> list[int]:
        return [step for step, _ in self._scan(reverse=False)]

    def _all(self) -> list[SnapshotId]:
        if self._ids is None:
            self._ids = list(self.ids())
        return self._ids

    @overload
    def __getitem__(self, at: int) -> Snapshot: ...
    @overload
    def __getitem__(self, at: slice) -> list[Snapshot]: ...
    def __getitem__(self, at: int | slice) -> Snapshot | list[Snapshot]:
        if isinstance(at, slice):
            return list(self._catalog.readable(self._all()[at]))
        if at == -1:
            newest = next(self.ids(reverse=True), None)
            if newest is None:
                raise IndexError("the timeline is empty")
            return self._catalog.info(newest)
        return self._catalog.info(self._all()[at])

    def __iter__(self) -> Iterator[Snapshot]:
        return self._catalog.readable(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"<timeline of {len(self)} snapshots>"
