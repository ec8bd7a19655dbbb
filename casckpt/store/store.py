"""The store handle: the public face of everything below.

A handle belongs to one run and to the process that opened it. Its methods may be called from several threads: commits
take turns, reads run beside them. `restore` and everything that lists are pure reads; only `commit` and
`resume` move the handle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from casckpt.codec.level import Level
from casckpt.errors import (
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    ReadOnlyError,
    StorageError,
    UnsupportedFormatError,
)
from casckpt.format.document import StoreDocument, unknown_features
from casckpt.format.entry import Annotate, MetricValue, Prune, Retire, Tag, Thin
from casckpt.ids import SnapshotId, StoreId, short
from casckpt.index.lifecycle import IndexHome
from casckpt.index.tables import TABLES
from casckpt.limits import DRAIN_TIMEOUT_S
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.timeline import Timeline
from casckpt.state.peek import next_draws
from casckpt.storage.process import System
from casckpt.store.catalog import Catalog, check_name
from casckpt.store.choose import Choice, Chooser
from casckpt.store.commit import Committer
from casckpt.store.compare import Diff, compare
from casckpt.store.draft import Draft, Drafter, Options
from casckpt.store.leases import Leases
from casckpt.store.restore import Restorer
from casckpt.store.saver import Saver
from casckpt.store.saving import SavesInBackground
from casckpt.store.settle import plain_labels, plain_metrics
from casckpt.store.turns import Turns
from casckpt.store.usage import measure
from casckpt.store.values import Branch, Context, RestoreReport, Snapshot, Stats, VerifyReport
from casckpt.store.verify import Progress, Verifier

Names = TypeVar("Names", bound=Sequence[str] | None)


class Store(SavesInBackground):
    """A snapshot store opened for one run. Made by `casckpt.open`; a context manager."""

    def __init__(
        self,
        root: str,
        document: StoreDocument,
        system: System,
        *,
        run: str,
        read_only: bool,
        verify: str,
        level: Level,
        lock_timeout_s: float,
    ) -> None:
        self.path = root
        self.run = check_name(run, "run")
        self.is_read_only = read_only
        self.store_id = StoreId(bytes.fromhex(document.store_id))
        self.document = document
        self._system = system
        self._turns = Turns(root, lock_timeout_s)
        self._timeline = Timeline(root, self.store_id, system)
        home = IndexHome(root, self.store_id, TABLES, read_only=read_only, lock_timeout_s=lock_timeout_s)
        self._keeper = IndexKeeper(root, self.store_id, self._timeline, home, read_only=read_only)
        self._catalog = Catalog(self._timeline, self._keeper)
        self._restorer = Restorer(self._keeper, self._catalog)
        self._leases = Leases(root, system, is_silent=read_only)
        self.on_progress: Callable[[], None] = lambda: None  # often, by any thread, while much is read or written
        self.on_fenced: Callable[[bool], None] = lambda is_fenced: None  # any thread: a FencedError, or a way out of it
        self._keeper.reader.pulse = self._pulse
        self._committer = Committer(
            root,
            self.store_id,
            system,
            self._timeline,
            self._keeper,
            self._catalog,
            run=run,
            verify=verify,
            level=level,
            chunk_size=document.chunk_size,
            on_fenced=lambda: self.on_fenced(True),
        )
        self._chooser = Chooser(self._timeline, self._keeper, self._catalog, run)
        self._drafter = Drafter(self._committer.stored_ring)
        self._saver = Saver(
            self._committer,
            self._drafter,
            self._turns,
            self._commit,
            self._announce_superseded,
            self._annotate,
            system.monotonic_s,
        )
        self._keeper.open()
        self._committer.stand_at(self._chooser.head_position())
        self._committer.generation = self._catalog.generation(run).number

    def _pulse(self) -> None:
        self._leases.pulse()
        self.on_progress()

    # --- commit ---

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, MetricValue] | None = None,
        labels: Mapping[str, str] | None = None,
        config: Any = None,
        schema_version: int | None = None,
        inherit: Sequence[str] | Literal["*"] = (),
        drop: Sequence[str] = (),
        necessity: Mapping[str, str] | None = None,
        levels: Mapping[str, str] | None = None,
        allow_pickle: bool = False,
    ) -> Snapshot:
        """Make an immutable snapshot of `state` at `step`; it is durable when this returns.

        Args:
            step: an integer after the parent snapshot's step.
            state: component name → a Checkpointable (has `state_dict()`) or a plain tree of dicts, lists, tuples,
                scalars, numpy arrays, torch tensors and random generators.
            metrics: name → number or text; they can be added later with `annotate`.
            labels: name → text.
            config: anything JSON-like, kept with its digest; when it differs from the parent's, a
                `ConfigDriftWarning` names the items. None keeps the parent's.
            schema_version: version of the state's own layout; None keeps the parent's (1 at first).
            inherit: components of the parent to keep as of their own step; "*" for all others.
            drop: components of the parent to leave out from now on.
            necessity: component → "exact" (default), "reloadable" or "droppable"; kept by later commits.
            levels: component → "fast", "balanced" or "small", where it is another than the store was opened with.
            allow_pickle: store what nothing else represents as a marked pickle, which only a restore with the same
                option reads.

        Cost: one hash of the state; writing what no earlier snapshot has; at least two fsyncs. A step that is
        committed already with equal content is not written again; its new metrics are added.

        Others see the snapshot when it is whole and durable, and nothing before.

        Raises:
            StepOrderError: the step does not come after its parent's.
            ConflictError: another writer moved this branch.
            InvalidInputError: a component of the parent is neither given nor in `inherit` or `drop`, or an argument
                is wrong.
            UnsupportedStateError: a leaf cannot be stored; `path` names it.
            ConcurrentMutationError: a tensor changed while it was read.
            OutOfSpaceError, StorageError: nothing was committed; `needed_bytes` says what was left to write.
            SaveFailedError: an earlier `commit_async` failed and nobody had asked.
        """
        options = Options(metrics, labels, config, schema_version, inherit, drop, necessity, levels, allow_pickle)
        with self._writing("commit"):
            self._saver.raise_failures()
            return self._saver.save_now(step, state, options)

    def _commit(self, draft: Draft) -> Snapshot:
        before = self._committer.position.snapshot
        try:
            snapshot = self._committer.commit(draft)
        finally:
            draft.settle({})
        if before is not None and snapshot.id == before.hex():  # the step was there already, with equal content
            return self._annotate(before, draft.metrics, draft.labels)
        return snapshot

    # --- restore ---

    def restore(
        self,
        ref: Any = "latest",
        *,
        only: Sequence[str] | None = None,
        device: Any = None,
        allow_mixed: bool = False,
        allow_pickle: bool = False,
        schema_version: int | None = None,
    ) -> dict[str, Any]:
        """A snapshot's state as new objects, every byte verified. A pure read: the handle does not move.

        Args:
            ref: see `snapshot`.
            only: component names or leaf paths (`policy/0.weight`); None for all.
            device: where tensors go; None for the CPU, where arrays always stay.
            allow_mixed: accept components of different steps.
            allow_pickle: run the pickles of opaque leaves. Only for stores that you trust.
            schema_version: what the caller's code expects; refuse anything else.

        Returns:
            Component name → its tree. What was committed as a Checkpointable comes as what its `state_dict()` gave.
            Nothing in it shares memory with the store.

        Raises:
            NotFoundError, InvalidInputError: `ref` or `only` means nothing, or a mixed snapshot.
            CorruptionError, IncompleteError: names component, leaves and chunk.
            UnsupportedStateError: an opaque leaf without `allow_pickle`.
        """
        self._turns.check()
        with self._reading():
            snapshot_id, _ = self._choose(ref, allow_mixed, schema_version)
            with self._noting_damage(snapshot_id):
                return self._restorer.values(snapshot_id, _listed(only), device, allow_pickle=allow_pickle)

    def restore_into(
        self,
        targets: Mapping[str, Any],
        ref: Any = "latest",
        *,
        strict: bool = True,
        atomic: bool = True,
        cast: bool = False,
        allow_mixed: bool = False,
        allow_pickle: bool = False,
        schema_version: int | None = None,
    ) -> RestoreReport:
        """Fill live objects from a snapshot, in place: parameters keep their identity. The handle does not move.

        Random streams are restored last.

        Args:
            targets: component name → live object (module, optimizer, tree of tensors, `RngState`, …).
            strict: names, shapes and dtypes must agree. Lists and deques of a plain tree take the snapshot's length,
                and a live None takes what is stored. Without it, stored names that the live object lacks are added,
                and other shapes replaced, where a plain container can take them; targets that the snapshot does not
                have are left alone and reported.
            atomic: read and verify everything before the first target is touched (two passes over the data).
            cast: allow another dtype; the report gives the largest change per leaf.
            Others as for `restore`.

        Raises:
            MismatchError: stored and live differ; all differences are listed, nothing was touched.
            IncompleteError: it stopped half way; `touched` lists the leaves that may hold new values.
            Otherwise as `restore`, with nothing touched when `atomic`.
        """
        self._turns.check()
        with self._reading():
            snapshot_id, skipped = self._choose(ref, allow_mixed, schema_version)
            return self._restore_into(targets, snapshot_id, skipped, strict, atomic, cast, allow_pickle)

    def resume(
        self,
        ref: Any = "latest",
        *,
        only: Sequence[str] | None = None,
        device: Any = None,
        branch: str | None = None,
        allow_mixed: bool = False,
        allow_pickle: bool = False,
        schema_version: int | None = None,
    ) -> dict[str, Any] | None:
        """`restore`, and move this handle: the next commit continues from that snapshot.

        When it is not the head of its branch, the next commit opens a branch, named `branch` or after the step; the
        line that is left stays addressable.

        Returns:
            The state; None for a fresh start, which only a provably new run gives (see `resume_into`).
        """
        with self._writing("resume"), self._reading():
            self._saver.raise_failures()
            found, heads = self._find_start(ref, allow_mixed, schema_version)
            if found is None:
                return None
            position = self._chooser.position_at(found[0], branch, heads)
            with self._noting_damage(found[0]):
                state = self._restorer.values(found[0], _listed(only), device, allow_pickle=allow_pickle)
            self._committer.stand_at(position)
            return state

    def resume_into(
        self,
        targets: Mapping[str, Any],
        ref: Any = "latest",
        *,
        strict: bool = True,
        atomic: bool = True,
        cast: bool = False,
        branch: str | None = None,
        leave: Sequence[str] = (),
        allow_mixed: bool = False,
        allow_pickle: bool = False,
        schema_version: int | None = None,
    ) -> RestoreReport:
        """`restore_into`, and move this handle: the next commit continues from that snapshot.

        With `strict`, every component of the snapshot needs a target or its name in `leave`, so that nothing starts
        over in silence.

        Returns:
            A report that prints as one screen. `is_fresh` is true when nothing of this run is in the store and
            nothing in the store is damaged or missing; then no target was touched.

        Raises:
            IncompleteError: the run has no readable snapshot, but something in the store is damaged or missing.
            Otherwise as `restore_into`.
        """
        with self._writing("resume_into"), self._reading():
            self._saver.raise_failures()
            found, heads = self._find_start(ref, allow_mixed, schema_version)
            if found is None:
                return RestoreReport(None)
            self._check_given(found[0], targets, _listed(leave, "leave"), strict)
            position = self._chooser.position_at(found[0], branch, heads)
            report = self._restore_into(targets, *found, strict, atomic, cast, allow_pickle)
            self._committer.stand_at(position)
            return report

    def _restore_into(
        self,
        targets: Mapping[str, Any],
        snapshot_id: SnapshotId,
        skipped: Sequence[str],
        strict: bool,
        atomic: bool,
        cast: bool,
        allow_pickle: bool,
    ) -> RestoreReport:
        with self._noting_damage(snapshot_id):
            facts, casts = self._restorer.into(
                targets, snapshot_id, strict=strict, atomic=atomic, cast=cast, allow_pickle=allow_pickle
            )
        snapshot = self._catalog.info(snapshot_id)
        draws = {name: value for target in targets.values() for name, value in next_draws(target).items()}
        left = tuple(sorted(set(snapshot.components) - set(targets)))
        not_stored = tuple(sorted(set(targets) - set(snapshot.components)))
        return RestoreReport(snapshot, facts, left, tuple(skipped), casts, draws, not_stored)

    def _check_given(
        self, snapshot_id: SnapshotId, targets: Collection[str], leave: Sequence[str], strict: bool
    ) -> None:
        both = sorted({*targets} & {*leave})
        if both:
            raise InvalidInputError(f"{both} have targets and are in leave= too. Name each in one of them.", names=both)
        left = sorted({*self._catalog.load(snapshot_id).components} - {*targets, *leave})
        if left and strict:
            raise MismatchError(
                f"the snapshot also has {left}, for which no target is given; they would start over in silence. Give "
                "them, name them in leave=, or pass strict=False.",
                differences=[(name, "a component", "no target") for name in left],
            )

    def _choose(self, ref: Any, allow_mixed: bool, schema_version: int | None) -> Choice:
        """The snapshot for a restore: one under way is waited for, everything published by now is seen."""
        pending = self._saver.find(ref)
        if pending is not None:
            pending.result()
        self._keeper.catch_up()
        choice = self._chooser.choose(
            ref, self._committer.position, allow_mixed=allow_mixed, schema_version=schema_version
        )
        self._committer.restored = choice[0]
        return choice

    def _find_start(
        self, ref: Any, allow_mixed: bool, schema_version: int | None
    ) -> tuple[Choice | None, frozenset[bytes]]:
        """Where to resume, None for a provably new run; and the branch heads among which that was chosen."""
        while True:
            self._keeper.catch_up()
            heads = self._chooser.heads()
            is_fresh = ref == "latest" and self._chooser.is_fresh()
            found = None if is_fresh else self._choose(ref, allow_mixed, schema_version)
            if heads == self._chooser.heads():
                return found, heads

    # --- looking ---

    @property
    def branch(self) -> str:
        """The branch that this handle stands on, or will open with its next commit."""
        return self._committer.position.branch

    @property
    def step(self) -> int | None:
        """The step that the next commit continues; None before the first."""
        position = self._committer.position
        return position.step if position.snapshot is not None else None

    def timeline(self, branch: str | None = None, *, all_runs: bool = False) -> Sequence[Snapshot]:
        """Snapshots of a branch (default: the current one) and its ancestors, oldest first, without retired ones.

        `timeline()[-1]` costs the same in a long history as in a short one. With `all_runs`, every snapshot of every
        run and branch in the order of publication. A snapshot whose entry is damaged is left out of lists, with a
        `StoreWarning`.
        """
        self._turns.check()
        self._keeper.catch_up()
        if all_runs:
            shown = [each for each in self._all_ids() if not self._catalog.row(each).is_retired]
            return list(self._catalog.readable(shown))
        return self._chooser.view(self._committer.position, branch)

    def _all_ids(self) -> list[SnapshotId]:
        with self._keeper.kv.read() as txn:
            ids = [SnapshotId(key) for key, _ in txn.scan("snaps")]
        return sorted(ids, key=lambda each: self._catalog.row(each).seq)

    def steps(self) -> list[int]:
        """Committed steps of the current branch and its ancestors, ascending."""
        self._turns.check()
        self._keeper.catch_up()
        return self._chooser.view(self._committer.position).steps()

    def snapshot(self, ref: Any = "latest") -> Snapshot:
        """One snapshot.

        Args:
            ref: a step of the current branch and its ancestors (int); "latest" (newest whole consistent one), a tag,
                a branch (its head), "branch@step", or a snapshot id or a prefix of at least 8 hex digits.

        Raises:
            NotFoundError, InvalidInputError: nothing or several things are meant.
        """
        self._turns.check()
        self._keeper.catch_up()
        if ref == "latest":
            return self._catalog.info(self._chooser.latest(self._committer.position, allow_mixed=False)[0])
        return self._catalog.info(self._chooser.resolve(ref, self._committer.position))

    def context(self, ref: Any = "latest") -> Context:
        """Schema version, config and library versions recorded with a snapshot."""
        return self._catalog.context(SnapshotId(bytes.fromhex(self.snapshot(ref).id)))

    def runs(self) -> list[str]:
        """Names of all runs in this store."""
        self._turns.check()
        self._keeper.catch_up()
        return self._catalog.runs()

    def branches(self) -> list[Branch]:
        """This run's branches."""
        self._turns.check()
        self._keeper.catch_up()
        return self._catalog.branches(self.run, self._catalog.current_branch(self.run))

    def tags(self) -> dict[str, str]:
        """This run's tags: name → snapshot id."""
        self._turns.check()
        self._keeper.catch_up()
        return self._catalog.tags(self.run)

    def diff(self, a: Any, b: Any) -> Diff:
        """What differs between two snapshots, by component and leaf. Equal components are not read."""
        self._turns.check()
        with self._reading():
            first, second = (SnapshotId(bytes.fromhex(self.snapshot(ref).id)) for ref in (a, b))
            return compare(self._catalog, self._restorer, first, second)

    def stats(self) -> Stats:
        """Sizes of the whole store. Lists its folders."""
        self._turns.check()
        self._keeper.catch_up()
        return measure(self.path, self._timeline, self._keeper, self._catalog, self._all_ids())

    def opaque_leaves(self, ref: Any = "latest") -> list[str]:
        """Paths of the leaves of a snapshot that are stored as pickles."""
        found, _ = self._restorer.components(SnapshotId(bytes.fromhex(self.snapshot(ref).id)), None)
        return [path for stored in found for path in stored.opaque_paths()]

    # --- timeline entries other than commits ---

    def tag(self, name: str, ref: Any = "latest") -> Snapshot:
        """Give a snapshot a name of its own; a tag keeps what it names through any retention.

        Raises:
            AlreadyExistsError: the name is a tag or branch of this run already.
            InvalidInputError: the snapshot is retired.
        """
        with self._writing("tag"):
            snapshot = self.snapshot(ref)
            snapshot_id = SnapshotId(bytes.fromhex(snapshot.id))
            self._append(Tag(self.run, name, snapshot_id), lambda: self._check_tag(name, snapshot_id))
            return snapshot

    def _check_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        self._chooser.check_free(name, "tag")
        if self._catalog.row(snapshot_id).is_retired:
            raise InvalidInputError(
                f"tag {name!r}: snapshot {short(snapshot_id)} is retired, and a collector may take its data at any "
                "time. Commit what `restore` still gives of it, and tag that.",
                name=name,
            )

    def untag(self, name: str) -> None:
        """Take a tag away."""
        with self._writing("untag"):
            if name not in self.tags():
                raise NotFoundError(f"run {self.run!r} has no tag {name!r}", name=name)
            self._append(Tag(self.run, name, b""))

    def annotate(
        self,
        ref: Any,
        *,
        metrics: Mapping[str, MetricValue] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """Add metrics and labels to a snapshot; later values of a name win. Its id does not change."""
        with self._writing("annotate"):
            pending = self._saver.find(ref)
            if pending is not None:
                pending.result()
            snapshot = self.snapshot(ref)
            return self._annotate(
                SnapshotId(bytes.fromhex(snapshot.id)), plain_metrics(metrics or {}), plain_labels(labels or {})
            )

    def _annotate(self, snapshot_id: SnapshotId, metrics: dict[str, MetricValue], labels: dict[str, str]) -> Snapshot:
        if metrics or labels:
            self._append(Annotate(snapshot_id, metrics, labels))
        return self._catalog.info(snapshot_id)

    def retire(self, ref: Any) -> Snapshot:
        """Hide a snapshot from listings and from "latest". Nothing is deleted here; its id restores until a collector
        has taken what only it needs."""
        with self._writing("retire"):
            self._keeper.catch_up()
            position = self._committer.position
            if ref == "latest":
                snapshot_id, _ = self._chooser.latest(position, allow_mixed=False)
            else:
                snapshot_id = self._chooser.resolve(ref, position)
            if self._catalog.row(snapshot_id).is_retired:
                self._timeline.make_durable(self._keeper.applied().seq)
                return self._catalog.info(snapshot_id)
            self._append(Retire(snapshot_id))
            return self._catalog.info(snapshot_id)

    def _append(self, body: Annotate | Tag | Retire | Prune | Thin, check: Callable[[], None] = lambda: None) -> None:
        """Publish an entry; `check` raises when, by what is published before it, it may not be."""
        while True:
            self._keeper.catch_up()
            applied = self._keeper.applied()
            check()
            entry = self._committer.append(body, applied)
            if entry is not None:
                self._keeper.catch_up_after_commit(entry, {})
                return

    # --- health ---

    def verify(self, *, read_data: bool = True, progress: Progress | None = None) -> VerifyReport:
        """Look for damage; `report.ok` says whether there is none.

        Args:
            read_data: read and hash every object (costs reading the store); otherwise only what files and tables say.
            progress: called with (objects done, objects in all).

        Damage found is remembered in the index, so that later commits store such objects again.
        """
        self._turns.check()
        with self._reading():
            report = Verifier(self._timeline, self._keeper, self._catalog).run(
                self._all_ids(), read_data=read_data, progress=progress
            )
        self._keeper.mark_damage(
            {bytes.fromhex(each.object_id): each.message for each in report.problems if each.kind == "corrupt"},
            forget_others=read_data,
        )
        return report

    @contextlib.contextmanager
    def _noting_damage(self, snapshot_id: SnapshotId) -> Iterator[None]:
        """Remember objects that turn out damaged while reading, and say which step needed them."""
        try:
            yield
        except (CorruptionError, IncompleteError, NotFoundError, StorageError) as error:
            object_id = error.facts.get("object_id")
            is_damage = isinstance(error, CorruptionError) or isinstance(error.__cause__, CorruptionError)  # half way
            if is_damage and object_id is not None:
                self._keeper.mark_damage({bytes(object_id): error.message})
            is_name = isinstance(error, NotFoundError) and object_id is None  # in `only`: not the store's fault
            if is_name or "step" in error.facts:
                raise
            row = self._catalog.row(snapshot_id)
            step = row.step
            is_gone = isinstance(error, IncompleteError | NotFoundError)
            if is_gone and row.is_retired and self._keeper.last_condemned() >= 0:
                raise NotFoundError(
                    f"step {step} (snapshot {short(snapshot_id)}) was retired, and a collector has taken data of it. "
                    "Run `casckpt log` for the steps that are there.",
                    step=step,
                    snapshot_id=snapshot_id,
                ) from error
            kind = IncompleteError if isinstance(error, NotFoundError) else type(error)
            text = f"step {step} (snapshot {short(snapshot_id)}): {error.message}"
            raise kind(text, **{**error.facts, "step": step}) from error

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        """While this is open, a collector takes nothing away that is listed now."""
        return self._leases.hold(self._keeper.catch_up())

    # --- life ---

    @property
    def protection(self) -> str:
        """What keeps a collector from taking what this handle is reading.

        "lease": a file says that it reads, and the collector waits for it. "grace": it cannot write one, because it is
        read-only or the last attempt failed; a read then has the collector's grace time to finish (60 s by default, at
        two points), and what has gone after that is an error, never wrong data.
        """
        return self._leases.protection

    def close(self, timeout_s: float | None = DRAIN_TIMEOUT_S) -> None:
        """Finish background commits and let go of everything.

        Args:
            timeout_s: how long to wait for commits under way; None for as long as they take.

        Raises:
            SaveFailedError: a background commit failed and nobody had asked. The store is closed all the same.
            BusyError: one is still under way after `timeout_s`. The store stays open, and the end of the process
                waits for the commit.
        """
        if self._turns.is_over:
            return
        self._saver.wait(timeout_s)
        try:
            self._saver.raise_failures()
        finally:
            self._turns.end()
            self._keeper.close()
            self._saver.forget()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<casckpt store {self.path!r}, run {self.run!r}, branch {self.branch!r}, step {self.step}>"

    @contextlib.contextmanager
    def _writing(self, what: str, *, wait: bool = True) -> Iterator[None]:
        self._turns.check()
        if self.is_read_only:
            raise ReadOnlyError(f"store {self.path} is open read-only: {what} is not possible", path=self.path)
        unknown = unknown_features(self.document, "write")
        if unknown:
            raise UnsupportedFormatError(
                f"store {self.path} needs {unknown} for writing, which this release does not know. Upgrade casckpt.",
                features=unknown,
            )
        if not wait:
            yield
            return
        self._saver.wait()
        with self._turns.take(what):
            yield


def _listed(names: Names, option: str = "only") -> Names:
    if isinstance(names, str):
        raise InvalidInputError(f"{option}={names!r}: expected a list of names. Write `{option}=[{names!r}]`.")
    return names
