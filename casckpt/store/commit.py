"""State to snapshot: captured components hashed, written, and published as the head of a branch.

A handle stands at a *position*: the snapshot that its next commit continues. While that is the branch's head, the
commit extends the branch and carries the head it expects; when another writer has moved it, that is a `ConflictError`,
never a merge. After a resume at another snapshot the commit opens a new branch.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from casckpt.codec.level import Level
from casckpt.digest import digest
from casckpt.errors import (
    CasckptError,
    ConcurrentMutationError,
    ConflictError,
    CorruptionError,
    FencedError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    StepOrderError,
    StorageError,
    StoreWarning,
)
from casckpt.format import wire
from casckpt.format.entry import Body, Commit, Entry, Envelope, Supersede, decode_entry, encode_entry
from casckpt.format.record import CONTEXT, SNAPSHOT, RecordHeader
from casckpt.format.snapshot import (
    SNAPSHOT_VERSION,
    ComponentRef,
    Context,
    Snapshot,
    decode_context,
    encode_snapshot,
)
from casckpt.ids import ObjectId, SnapshotId, StoreId, WriteId, short
from casckpt.index.tables import Applied, BranchRow, NoteRow
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.timeline import Timeline
from casckpt.objects.writer import ObjectWriter, Written
from casckpt.replay.ring import StoredRing
from casckpt.storage.process import System
from casckpt.store.catalog import Catalog, describe
from casckpt.store.components import Added, Components, Known, read_chunk
from casckpt.store.draft import Draft
from casckpt.store.values import Snapshot as SnapshotValue
from casckpt.store.wholeness import FLAWS, WholenessCheck


@dataclass
class Position:
    """Where a handle stands in its run.

    Attributes:
        branch: the branch of the next commit; a new one when `is_fork`.
        snapshot: what the next commit continues, None before the first.
        step: its step.
        content: the snapshot object itself, kept so that damage to it does not stop the training that made it.
        is_fork: the next commit opens `branch`.
        attempts: snapshots that this handle tried to publish without learning the outcome (an interrupt, a failed
            folder sync): a head among them is this handle's own.
    """

    branch: str
    snapshot: SnapshotId | None = None
    step: int = -1
    content: Snapshot | None = None
    is_fork: bool = False
    attempts: set[bytes] = field(default_factory=set)


class Committer:
    """Commits for one store handle; used by one thread at a time."""

    def __init__(
        self,
        root: str,
        store_id: StoreId,
        system: System,
        timeline: Timeline,
        keeper: IndexKeeper,
        catalog: Catalog,
        *,
        run: str,
        verify: str,
        level: Level,
        chunk_size: int,
        on_fenced: Callable[[], None],
    ) -> None:
        self.places = (root, store_id, system, timeline, keeper, catalog)
        self.options: dict[str, Any] = {"run": run, "verify": verify, "level": level, "chunk_size": chunk_size}
        self.options["on_fenced"] = self._on_fenced = on_fenced
        self._root = root
        self._store_id = store_id
        self._system = system
        self._timeline = timeline
        self._keeper = keeper
        self._catalog = catalog
        self._run = run
        self._verify = verify
        self._components = Components(catalog, chunk_size, level)
        self.position = Position("main")
        self.restored: SnapshotId | None = None  # what this handle restored last: a new run is likely a fork of it
        self.generation = 0  # of this handle; see `casckpt.store.generations`
        self._context: tuple[bytes, Context] | None = None

    def note_superseded(self, old: SnapshotId, new: SnapshotId, content: Snapshot, known: Mapping[str, Known]) -> None:
        """Take in that `new` stands in place of `old`, with components captured later than those that the position has.

        What was added is inherited by the next commit, also where the position is a later step of that branch.

        Args:
            old, new: ids of two snapshots of one step.
            content: the new one.
            known: what was added to it, as it lies in the store.
        """
        position, parent = self.position, self._parent()
        if parent is None or (parent.run, parent.branch) != (content.run, content.branch) or position.is_fork:
            return
        if position.snapshot == old:
            attempts = position.attempts - {new}  # whose outcome is known
            self.position = Position(position.branch, new, position.step, content, attempts=attempts)
            self._components.take_in(known)
            return
        newer = {
            name: content.components[name]
            for name in known
            if name not in parent.components or parent.components[name].step < content.components[name].step
        }
        position.content = msgspec.structs.replace(parent, components={**parent.components, **newer})
        self._components.take_in({name: known[name] for name in newer})

    def stand_at(self, position: Position) -> None:
        """Move to another snapshot; nothing is written."""
        self.position = position
        self._components.stand_at({})

    # --- commit ---

    def commit(self, draft: Draft) -> SnapshotValue:
        """Publish a draft; see `Store.commit`."""
        self._keeper.catch_up()
        self._keeper.settle()
        self._adopt_attempt()
        self._check_generation()
        self._check_head(self._head())
        parent = self._parent()
        self._components.start_from(self._origin() if parent is None else None)
        if draft.inherits_rest and parent is not None:
            draft.inherit = sorted(set(parent.components) - set(draft.names) - set(draft.drop))
        self._check_components(draft, parent)
        while True:
            try:
                return self._attempt(draft, parent)
            except _CondemnedMeanwhile:
                continue  # nothing is published: look again at what is there, and store what is not

    def _attempt(self, draft: Draft, parent: Snapshot | None) -> SnapshotValue:
        condemned = self._keeper.last_condemned()  # before the first look at what is there
        check = WholenessCheck(self._timeline, self._keeper, self._catalog)
        writer = ObjectWriter(
            self._root,
            self._store_id,
            self._system,
            check.are_present,
            verify=self._verify,
            reader=self._keeper.reader,
        )
        try:
            with _expecting_folders():
                return self._write(draft, parent, writer, check, condemned)
        except OutOfSpaceError as error:
            error.facts["needed_bytes"] = error.needed_bytes = writer.unwritten_bytes  # type: ignore[attr-defined]
            raise
        except CorruptionError as error:
            raise self._mutation(draft, error) or error from None
        finally:
            writer.abort()

    def _write(
        self, draft: Draft, parent: Snapshot | None, writer: ObjectWriter, check: WholenessCheck, condemned: int
    ) -> SnapshotValue:
        added = self._components.add(draft, parent, writer, check, condemned)
        context = self._add_context(draft, writer)
        same = self._same_step(draft, parent, added.refs) if parent is not None and draft.step == parent.step else None
        if same is not None:
            draft.settle({name: ref.manifest for name, ref in added.refs.items()})
            return same
        self._check_unmoved(draft)
        if writer.rejected_count:
            warnings.warn(
                f"step {draft.step}: {writer.rejected_count} chunks did not decode to what was encoded and are stored "
                "raw. A compression library or this machine's memory is at fault: run `casckpt doctor`.",
                StoreWarning,
                stacklevel=5,
            )
        written = writer.publish()
        entry, snapshot = self._publish(draft, added, context, written, condemned)
        self._keeper.catch_up_after_commit(entry, written.rows)
        body = entry.envelope.body
        assert isinstance(body, Commit | Supersede)
        self.position = Position(body.branch, SnapshotId(body.snapshot), draft.step, snapshot)
        self._components.stand_at(added.known, added.relations)
        draft.settle({name: ref.manifest for name, ref in added.refs.items()})
        return describe(entry, body, snapshot, NoteRow({}, {}))

    def _origin(self) -> Snapshot | None:
        """What a run that has nothing yet may be a fork of: what was restored last, else the newest head of another."""
        origin = self.restored
        if origin is None:
            runs = (self._catalog.branch_rows(run).values() for run in self._catalog.runs() if run != self._run)
            newest = max((row for rows in runs for row in rows), key=lambda row: row.last_seq, default=None)
            origin = SnapshotId(newest.head) if newest is not None else None
        try:
            return None if origin is None else self._catalog.load(origin)
        except FLAWS:
            return None  # it would only have saved bytes

    def _parent(self) -> Snapshot | None:
        position = self.position
        if position.content is None and position.snapshot is not None:
            position.content = self._catalog.load(position.snapshot)
        return position.content

    def context(self) -> Context | None:
        """The context of the position; None before the first commit."""
        parent = self._parent()
        address = parent.context if parent else b""
        if not address:
            return None
        if self._context is None or self._context[0] != address:
            try:
                plain = self._keeper.reader.read(ObjectId(address))
                self._context = address, decode_context(plain, f"context {short(address)}")
            except (CorruptionError, IncompleteError, NotFoundError) as error:
                warnings.warn(
                    f"config and schema version of step {self.position.step} cannot be read ({error.message}): the "
                    "next commit takes neither over. Give them again.",
                    StoreWarning,
                    stacklevel=4,
                )
                return None
        return self._context[1]

    def stored_ring(self, name: str) -> StoredRing | None:
        """The ring of that name that the next commit continues, if all of its rows are where they should be."""
        check = WholenessCheck(self._timeline, self._keeper, self._catalog)
        return self._components.stored_ring(name, self._parent(), check)

    # --- checks ---

    def _head(self) -> BranchRow | None:
        return self._catalog.branch_row(self._run, self.position.branch)

    def settle(self) -> None:
        """Stand at an own earlier attempt if it was published after all."""
        if self.position.attempts:
            self._keeper.catch_up()
            self._adopt_attempt()

    def _adopt_attempt(self) -> None:
        """Take an own earlier attempt that turns out to be published as the position."""
        if not self.position.attempts:
            return
        for name, row in self._catalog.branch_rows(self._run).items():
            if row.head in self.position.attempts:
                self.stand_at(Position(name, SnapshotId(row.head), row.head_step))
                return

    def _check_head(self, head: BranchRow | None) -> None:
        position = self.position
        if position.is_fork or head is None:
            if position.is_fork:
                position.branch = self._free_branch_name(position.branch)
            return
        if head.head == (position.snapshot or b""):
            return
        writer = self._timeline.read(head.last_seq).envelope
        raise ConflictError(
            f"run {self._run!r}, branch {position.branch!r}: its head is step {head.head_step} "
            f"({short(head.head)}), committed by pid {writer.pid} on host {writer.host!r}; this handle stands at "
            f"{'step ' + str(position.step) if position.snapshot else 'the beginning'}. Two learners on one branch are "
            "a mistake: stop one, or give it another run name, or call `resume()` to continue from the new head.",
            run=self._run,
            branch=position.branch,
            step=head.head_step,
            host=writer.host,
            pid=writer.pid,
        )

    def _check_generation(self) -> None:
        """Raise when the run was recovered by somebody else since this handle was opened.

        Raises:
            FencedError: it was; names the newer generation and who opened it.
        """
        newest, own = self._catalog.generation(self._run), self._own_generation()
        if newest.number <= own:
            return
        writer = self._timeline.read(newest.seq).envelope
        self._on_fenced()
        raise FencedError(
            f"run {self._run!r}: generation {newest.number} was opened by pid {writer.pid} on host {writer.host!r}; "
            f"this handle belongs to {own}. Nothing was committed: the run goes on there. Stop this process, or "
            "recover the run here.",
            run=self._run,
            generation=own,
            newer=newest.number,
            host=writer.host,
            pid=writer.pid,
        )

    def _own_generation(self) -> int:
        return self.generation

    def _free_branch_name(self, wanted: str) -> str:
        """`wanted`, with a number when a branch or a tag has that name: a reference must mean one thing."""
        taken = {*self._catalog.branch_rows(self._run), *self._catalog.tags(self._run)}
        names = (wanted, *(f"{wanted}-{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _check_components(self, draft: Draft, parent: Snapshot | None) -> None:
        if parent is not None and draft.step < parent.step:
            raise StepOrderError(
                f"run {self._run!r}, branch {self.position.branch!r}: step {draft.step} does not come after "
                f"{parent.step}. To continue from an earlier step, call `resume({draft.step})` first: the next commit "
                "then opens a branch.",
                step=draft.step,
                parent_step=parent.step,
            )
        there = set(parent.components) if parent else set()
        for option, names in (("inherit", draft.inherit), ("drop", draft.drop)):
            unknown = sorted(set(names) - there)
            if unknown:
                raise InvalidInputError(f"{option}={unknown}: the parent snapshot has no such component", names=unknown)
            given = sorted(set(names) & set(draft.names))
            if given:
                raise InvalidInputError(f"{option}={given}: also given in the state", names=given)
        thinned = self._catalog.thinned(self.position.snapshot) if self.position.snapshot else []
        withdrawn = sorted(set(thinned) & set(draft.inherit))
        if withdrawn:
            raise InvalidInputError(
                f"inherit={withdrawn}: withdrawn from the parent snapshot (step {self.position.step} is thinned). Give "
                "them in the state, or name them in drop=.",
                names=withdrawn,
            )
        left_out = sorted(there - set(draft.names) - set(draft.inherit) - set(draft.drop))
        if left_out:
            raise InvalidInputError(
                f"step {draft.step}: the parent snapshot has {left_out}, which this commit neither gives nor names in "
                "inherit= (kept as of its own step) or drop=. Nothing is left out in silence.",
                names=left_out,
            )

    def _check_unmoved(self, draft: Draft) -> None:
        moved = [path for captured in draft.captured.values() for path in captured.moved()]
        if moved:
            raise ConcurrentMutationError(
                f"step {draft.step}: {', '.join(moved[:5])}{' …' if len(moved) > 5 else ''} changed while the commit "
                "was reading. Nothing was committed. Commit from the thread that trains, between updates.",
                paths=moved,
            )

    def _mutation(self, draft: Draft, error: CorruptionError) -> CasckptError | None:
        """Tell a disk that lies from memory that moved: the memory no longer hashes to what was to be written."""
        wanted = getattr(error, "object_id", None)
        for key, captured in draft.captured.items() if wanted else ():
            layout = self._components.layout(key, captured)
            for chunk, size in enumerate(layout.chunk_sizes):
                if wanted == digest(read_chunk(captured, layout.parts(chunk), size)):
                    return None  # the memory still holds it: it was the disk
        if wanted is None:
            return None
        return ConcurrentMutationError(
            f"step {draft.step}: memory changed while the commit was reading it (what was written is not what was "
            "hashed, and no memory holds it any more). Nothing was committed. Commit from the thread that trains, "
            "between updates.",
            object_id=wanted,
        )

    def _add_context(self, draft: Draft, writer: ObjectWriter) -> bytes:
        (address,) = writer.add_all([(CONTEXT, wire.encode(draft.context))])
        self._context = address, draft.context
        return address

    # --- publishing ---

    def _same_step(self, draft: Draft, parent: Snapshot, refs: dict[str, ComponentRef]) -> SnapshotValue | None:
        """A commit of the position's own step: the snapshot there is, when equal; else an error, or None to go on."""
        assert self.position.snapshot is not None
        changed = sorted(
            name
            for name in {*refs, *parent.components}
            if name not in refs
            or name not in parent.components
            or refs[name].manifest != parent.components[name].manifest
        )
        if changed:
            raise StepOrderError(
                f"run {self._run!r}, branch {self.position.branch!r}: step {draft.step} is committed already, and "
                f"{changed} differ now. Commit under a later step.",
                step=draft.step,
                parent_step=parent.step,
                changed=changed,
            )
        self._timeline.make_durable(self._keeper.applied().seq)
        return self._catalog.info(self.position.snapshot)

    def _publish(
        self,
        draft: Draft,
        added: Added,
        context: bytes,
        written: Written,
        condemned: int,
    ) -> tuple[Entry, Snapshot]:
        """Write the entry under the next free number, re-checking the head each time the number was taken.

        Raises:
            _CondemnedMeanwhile: a collector condemned packs after this commit looked at what is there.
        """
        while True:
            applied = self._keeper.applied()  # before the head: whatever is published after it takes its number
            if self._keeper.last_condemned() != condemned:
                raise _CondemnedMeanwhile
            head = self._head()
            self._check_generation()
            self._check_head(head)
            snapshot = self._snapshot(draft, context, added)
            plain = encode_snapshot(snapshot)
            snapshot_id = SnapshotId(digest(plain))
            body = self._body(draft, snapshot_id, head, added, written)
            header = RecordHeader(
                kind=SNAPSHOT,
                codec=0,
                codec_version=1,
                object_id=ObjectId(snapshot_id),
                plain_size=len(plain),
                stored_size=len(plain),
                payload_check=snapshot_id[:16],
            )
            self.position.attempts.add(snapshot_id)
            entry = self.append(body, applied, [*written.inline, (header, plain)])
            if entry is not None:
                return entry, snapshot

    def _snapshot(self, draft: Draft, context: bytes, added: Added) -> Snapshot:
        position = self.position
        parent = position.snapshot or b""
        return Snapshot(SNAPSHOT_VERSION, self._run, position.branch, draft.step, parent, context, added.refs)

    def _body(
        self, draft: Draft, snapshot_id: SnapshotId, head: BranchRow | None, added: Added, written: Written
    ) -> Commit | Supersede:
        """What the entry says of a snapshot: that it is the head of its branch from now on."""
        return Commit(
            self._run,
            self.position.branch,
            draft.step,
            snapshot_id,
            head.head if head else b"",
            written.packs,
            draft.metrics,
            draft.labels,
            {name: size for name, size in added.new_bytes.items() if size},
        )

    def append(self, body: Body, applied: Applied, records: Sequence[tuple[RecordHeader, bytes]] = ()) -> Entry | None:
        """Try to publish an entry after `applied`; None when another writer took the number (now applied).

        Args:
            body: what it says, true as of `applied`: read that first, then what the body was decided on.
            applied: how far the timeline had been applied then.
            records: what it carries inline.

        Raises:
            StorageError: an entry before it cannot be read, so nobody knows what the body should say.
        """
        if self._keeper.settle():
            return None
        seq = applied.seq + 1
        envelope = Envelope(
            WriteId(self._system.random_bytes(16)),
            applied.digest,
            self._system.time_ns(),
            self._system.host,
            self._system.pid(),
            body,
        )
        encoded = encode_entry(seq, self._store_id, envelope, list(records))
        with _expecting_folders():
            is_ours = self._timeline.append(seq, encoded, is_verified=self._verify != "off")
        if is_ours:
            return decode_entry(encoded, seq, f"timeline entry {seq}")
        if self._keeper.catch_up() < seq and not self._keeper.settle():
            self._keeper.rebuild()  # the number is taken by something that is no entry: list, and step over it
        return None


class _CondemnedMeanwhile(Exception):
    """What a commit found stored may lie in packs that were condemned since; nothing of it is published."""


@contextlib.contextmanager
def _expecting_folders() -> Iterator[None]:
    """A name that is not there, where only the store's own folders can be missing, as a typed error."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{error.filename}: no such folder; was it taken away while the store is open? Nothing was committed. Run "
            "`casckpt doctor`.",
            path=error.filename,
            errno=errno.ENOENT,
        ) from error
