"""What a collection would do, as a value: shown, compared, and executed once.

`plan` decides with the rules of `retention` which snapshots of one branch are retired and which components are
withdrawn, marks what is needed *as if that were done*, and names every pack that nothing needs then. Executing it is
the same code with the same rules: retire, look again at what is needed by then, condemn, sweep (`collect`). So the
bytes that a plan promises are those that its execution frees, unless somebody commits in between.

Cost: one row per snapshot, one timeline entry per snapshot of the branch, names of all packs. Where nothing is to be
retired or withdrawn and no pack has lost enough, nothing more is looked at; else one pass over the rows of all objects
and over all manifests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from casckpt.errors import InvalidInputError, NotFoundError
from casckpt.ids import PackId, SnapshotId
from casckpt.index.tables import (
    CONDEMNED,
    decode_pack_row,
    decode_snap,
    key_number,
    line_key,
    read_fill,
    split_name_key,
)
from casckpt.objects.packs import list_packs, pack_path
from casckpt.storage.process import owner_of
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt.store.wholeness import WholenessCheck
from casckpt_gc.compaction import COMPACTION, Compaction
from casckpt_gc.mark import Census, Mark, PackState, census, check_certain, roots
from casckpt_gc.recode import Recoding, find_recoding
from casckpt_gc.retention import NEWEST, AnyOf, Candidate, Retention, Thinning, newest
from casckpt_gc.seal import replaceable, sealable

if TYPE_CHECKING:
    from casckpt_gc.collect import Report

_STEP_MAX = (1 << 63) - 1
_OVERHEAD = 4096  # bytes of a pack of a few small records that are header and footer: no reason to rewrite it


@dataclass(frozen=True)
class Fate(Value):
    """What becomes of a snapshot: it stays for `reasons` (none: it is retired), without the components `withdrawn`."""

    id: str
    step: int
    reasons: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackFate(Value):
    """What becomes of one pack: "drop", "rewrite", or "unfinished" (no entry names it; dropped if that stays so)."""

    pack: str
    what: str
    size_bytes: int
    needed_bytes: int = 0


@dataclass(frozen=True)
class Plan(Value):
    """A collection to be done; see the module. Prints as a table; `execute` does it, once.

    Attributes:
        path, run, branch: of the store and of the branch that the rules were applied to.
        seq: the timeline entry up to which everything was looked at.
        fates: every snapshot of the branch that is not retired.
        unknown_metrics: those that rules look at and no snapshot of the branch has, so that these rules keep nothing.
        unknown_components: those that are to be withdrawn and no snapshot of the branch has or had.
        packs: packs that go, or are rewritten.
        leftovers: temporary files of dead processes: name, size in bytes.
        sealed_count, sealed_bytes: timeline entries whose files go, one epoch for each hundred in their place.
        freed_object_count: records in packs that go.
        recoded_count, recoded_bytes: objects to be encoded anew, and their plain bytes: the most that is written for
            them.
        postponed_count, postponed_bytes: packs that would be rewritten too, had the budget room, and what is needed of
            them.
        postponed_object_count: objects that would be encoded anew too.
        live_bytes, held_bytes: records in packs that snapshots reach afterwards, and records that these are only
            decoded from; 0 when nothing had to be marked.
    """

    path: str
    run: str
    branch: str
    seq: int
    fates: tuple[Fate, ...]
    unknown_metrics: tuple[str, ...]
    unknown_components: tuple[str, ...]
    packs: tuple[PackFate, ...]
    leftovers: tuple[tuple[str, int], ...]
    sealed_count: int
    sealed_bytes: int
    freed_object_count: int
    recoded_count: int
    recoded_bytes: int
    postponed_count: int
    postponed_bytes: int
    postponed_object_count: int
    live_bytes: int
    held_bytes: int
    _store: Store = field(repr=False, compare=False)
    _compaction: Compaction | None = field(repr=False, compare=False)
    _tagged: frozenset[str] = field(repr=False, compare=False)
    _used: list[bool] = field(default_factory=list, repr=False, compare=False)

    @property
    def retired(self) -> tuple[Fate, ...]:
        """Snapshots that go, oldest first."""
        return tuple(fate for fate in self.fates if not fate.reasons)

    @property
    def kept(self) -> tuple[Fate, ...]:
        """Snapshots that stay, oldest first."""
        return tuple(fate for fate in self.fates if fate.reasons)

    @property
    def thinned(self) -> tuple[Fate, ...]:
        """Snapshots that stay and lose components."""
        return tuple(fate for fate in self.kept if fate.withdrawn)

    @property
    def freed_bytes(self) -> int:
        """Bytes of files that go; of packs, `rewritten_bytes` are written anew, and of entries, what epochs hold."""
        left = sum(size for _, size in self.leftovers)
        return sum(each.size_bytes for each in self.packs) + left + self.sealed_bytes

    @property
    def rewritten_bytes(self) -> int:
        """Bytes of records that are copied out of packs that go."""
        return sum(each.needed_bytes for each in self.packs)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (
            self.retired or self.thinned or self.packs or self.leftovers or self.sealed_count or self.recoded_count
        )

    def execute(self, *, grace_s: float | None = None) -> Report:
        """Do it; returns what was done. Waits for readers, and at least twice `grace_s` when packs go.

        Raises:
            InvalidInputError: it was executed before, or `grace_s` is no time.
            Otherwise as `collect`.
        """
        from casckpt_gc.collect import GRACE_S, Collection

        if self._used:
            raise InvalidInputError("this plan was executed before. Make a new one: the store is another now.")
        collection = Collection(self, grace_s=GRACE_S if grace_s is None else grace_s)
        self._used.append(True)
        return collection.run()

    def to_dict(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        found = {name: getattr(self, name) for name in names}
        lists = {name: [each.to_dict() for each in found[name]] for name in ("fates", "packs")}
        sums = {"freed_bytes": self.freed_bytes, "rewritten_bytes": self.rewritten_bytes}
        return {**found, **lists, **sums, "retired_count": len(self.retired)}

    def __str__(self) -> str:
        from casckpt_gc.screen import plan_text

        return plan_text(self)


def plan(
    store: Store,
    retention: Retention | AnyOf | None = None,
    thinning: Thinning | Sequence[Thinning] = (),
    *,
    branch: str | None = None,
    compaction: Compaction | None = COMPACTION,
) -> Plan:
    """What a collection would do now. Changes nothing.

    Args:
        store: open for writing; its run is the one that the rules apply to.
        retention: which snapshots of the branch stay; None: all.
        thinning: which components are withdrawn from those that stay.
        branch: None for the one that the run wrote last. Other branches and runs are never touched.
        compaction: which packs are rewritten because little of them is needed, and whether old timeline entries are
            sealed; None: only packs of which nothing is needed go. The first pack of a run always holds something that
            stays.

    Raises:
        InvalidInputError: a rule is none.
        NotFoundError: no such branch.
        CorruptionError, IncompleteError: it is not certain what is needed; nothing is planned.
    """
    rules = (thinning,) if isinstance(thinning, Thinning) else tuple(thinning)
    check_rules(retention, rules, compaction)
    store._keeper.catch_up()
    seq = store._keeper.applied().seq
    name = store._catalog.current_branch(store.run) if branch is None else branch
    check_certain(store)
    line = _line(store, name)
    fates = _fates(line, retention, rules)
    leaving = {SnapshotId(bytes.fromhex(fate.id)) for fate in fates if not fate.reasons}
    withdrawn = {bytes.fromhex(fate.id): fate.withdrawn for fate in fates if fate.withdrawn}
    unfinished = unnamed_packs(store)
    packs = [PackFate(pack_id.hex(), "unfinished", size) for pack_id, size in unfinished.items()]
    found = NOTHING
    is_thorough = compaction is not None and (compaction.is_thorough or compaction.cold_after is not None)
    if leaving or withdrawn or is_thorough or may_have_garbage(store, compaction):
        mark = Mark(store, withdrawn)
        mark.add(roots(store) - leaving)
        found = find(store, mark, compaction)
        check_plausible(store, mark, found.states.values())
    sealed = replaceable(store, sealable(store, compaction))
    postponed = [] if compaction is None else compaction.postponed(found.states, found.chosen)
    return Plan(
        store.path,
        store.run,
        name,
        seq,
        fates,
        _unknown_metrics(line, retention),
        _unknown_components(store, line, rules),
        (*packs, *found.fates()),
        leftovers(store),
        len(sealed),
        sum(sealed.values()),
        sum(found.found.dead_counts[each] for each in found.dropped),
        len(found.recoding.bases),
        found.recoding.plain_bytes,
        len(postponed),
        sum(each.needed_bytes for each in postponed),
        found.recoding.postponed_count,
        found.found.live_bytes,
        found.found.held_bytes,
        store,
        compaction,
        frozenset(each.id for each in line if each.tags),
    )


def check_rules(retention: object, thinning: Sequence[object], compaction: object) -> None:
    """Raise where a rule is none."""
    wanted = [("retention", retention, Retention | AnyOf | None), ("compaction", compaction, Compaction | None)]
    for name, rule, kind in [*wanted, *(("thinning", each, Thinning) for each in thinning)]:
        if not isinstance(rule, kind):
            raise InvalidInputError(f"{name}={rule!r:.80}: expected {getattr(kind, '__name__', kind)}.")


@dataclass(frozen=True)
class Findings:
    """What is needed and where it lies, and what is to be done about it: the same for a plan and for its execution.

    Attributes:
        needed: the mark as it will be, `recoding` done.
        recoding: what is encoded anew.
        found: of packs and entries, as seen by `needed`.
        chosen: packs to be rewritten.
    """

    needed: Mark | None
    recoding: Recoding
    found: Census
    chosen: dict[PackId, PackState]
    compaction: Compaction | None

    @property
    def states(self) -> dict[PackId, PackState]:
        """All packs."""
        return self.found.packs

    @property
    def dropped(self) -> list[PackId]:
        """Packs of which nothing is needed."""
        return [pack_id for pack_id, state in self.states.items() if not state.needed_bytes]

    def fates(self) -> list[PackFate]:
        """What becomes of packs."""
        dropped = (self.states[number] for number in self.dropped)
        fates = [PackFate(each.pack_id.hex(), "drop", each.size_bytes) for each in dropped]
        chosen = self.chosen.values()
        return fates + [PackFate(each.pack_id.hex(), "rewrite", each.size_bytes, each.needed_bytes) for each in chosen]

    def without_recoding(self, store: Store, mark: Mark) -> Findings:
        """The same with nothing encoded anew; `mark` is what is needed then."""
        if not self.recoding.bases:
            return self
        found = census(store, mark)
        chosen = self.compaction.chosen(found.packs) if self.compaction is not None else {}
        return Findings(mark, Recoding(), found, chosen, self.compaction)


NOTHING = Findings(None, Recoding(), Census({}, Counter(), 0, 0), {}, None)


def find(store: Store, mark: Mark, compaction: Compaction | None) -> Findings:
    """What is to be done about packs, when `mark` is what is needed.

    Raises:
        CorruptionError, IncompleteError: it is not certain.
    """
    found, recoding = census(store, mark), Recoding()
    if compaction is not None:
        recoding = find_recoding(store, mark, found, compaction, store._committer.options["level"])
    if recoding.bases:
        mark = mark.recode(recoding.foreseen())
        found = census(store, mark)
    chosen = compaction.chosen(found.packs, recoding.packs) if compaction is not None else {}
    return Findings(mark, recoding, found, chosen, compaction)


def _line(store: Store, branch: str) -> list[Candidate]:
    """`candidates`; none in a run that has no snapshots yet."""
    if store._catalog.branch_row(store.run, branch) is not None:
        return candidates(store, branch)
    if store._catalog.branch_rows(store.run):
        raise NotFoundError(
            f"run {store.run!r} has no branch {branch!r}. Run `casckpt branches`.", run=store.run, branch=branch
        )
    return []


def _fates(
    line: Sequence[Candidate], retention: Retention | AnyOf | None, rules: Sequence[Thinning]
) -> tuple[Fate, ...]:
    reasons = {each.id: ["all"] for each in line} if retention is None else retention.kept(line)
    for each in newest(line) if retention is None else ():
        reasons[each.id].append(NEWEST)
    staying = [each for each in line if each.id in reasons]
    withdrawn: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        for snapshot_id, names in rule.withdrawn(staying).items():
            withdrawn[snapshot_id] = tuple(dict.fromkeys((*withdrawn.get(snapshot_id, ()), *names)))
    for each in staying:
        if len(withdrawn.get(each.id, ())) == len(each.components):
            withdrawn.pop(each.id, None)  # several rules together: a snapshot of nothing is none
    return tuple(Fate(each.id, each.step, tuple(reasons.get(each.id, ())), withdrawn.get(each.id, ())) for each in line)


def _unknown_metrics(line: Sequence[Candidate], retention: Retention | AnyOf | None) -> tuple[str, ...]:
    known = {metric for each in line for metric in each.metrics}
    return tuple(sorted(retention.names - known)) if retention is not None and line else ()


def _unknown_components(store: Store, line: Sequence[Candidate], rules: Sequence[Thinning]) -> tuple[str, ...]:
    unknown = {name for rule in rules for name in rule.components}
    unknown -= {name for each in line for name in each.components}
    if unknown:  # or withdrawn everywhere
        infos = (store._catalog.info(SnapshotId(bytes.fromhex(each.id))) for each in line)
        unknown -= {name for each in infos for name in each.components}
    return tuple(sorted(unknown)) if line else ()


def candidates(store: Store, branch: str) -> list[Candidate]:
    """The snapshots of a branch itself, not of its ancestors, that are not retired; oldest first.

    Whether one is whole is looked up from the newest back to the first that is, and taken for granted before; where
    damage is on record, all of them are looked at.
    """
    row = store._catalog.branch_row(store.run, branch)
    assert row is not None
    tags: dict[str, list[str]] = {}
    with store._keeper.kv.read() as txn:
        for key, snapshot_id in txn.scan("tags"):
            tags.setdefault(snapshot_id.hex(), []).append(split_name_key(key)[1])
        bounds = line_key(row.number, 0), line_key(row.number, _STEP_MAX) + b"\0"
        ids = [SnapshotId(value) for _, value in txn.scan("lines", *bounds)]
        rows = dict(zip(ids, txn.get_many("snaps", ids), strict=True))
        has_damage = txn.count("damage") > 0
    ids = [each for each, value in rows.items() if value is not None and not decode_snap(value).is_retired]
    check = WholenessCheck(store._timeline, store._keeper, store._catalog)
    found: list[Candidate] = []
    is_settled = False
    for snapshot in (store._catalog.info(each) for each in reversed(ids)):
        is_whole = not snapshot.thinned
        if not is_settled and is_whole:
            is_whole = check.snapshot_flaw(SnapshotId(bytes.fromhex(snapshot.id))) is None
            is_settled = is_whole and snapshot.is_consistent and not has_damage
        found.append(
            Candidate(
                snapshot.id,
                snapshot.step,
                snapshot.created_at.timestamp(),
                snapshot.is_consistent,
                is_whole,
                snapshot.metrics,
                tuple(tags.get(snapshot.id, ())),
                tuple(name for name in snapshot.components if name not in snapshot.thinned),
            )
        )
    return found[::-1]


def unnamed_packs(store: Store) -> dict[PackId, int]:
    """Pack files that no entry names or condemns, with their sizes: of commits under way, or that never finished."""
    fs, root = store._timeline.fs, store.path
    files = list(list_packs(fs, root))
    with store._keeper.kv.read() as txn:
        known = txn.get_many("pack_ids", files)
    unnamed = (pack_id for pack_id, row in zip(files, known, strict=True) if row is None)
    sizes = {pack_id: fs.size(pack_path(root, pack_id)) for pack_id in unnamed}
    return {pack_id: size for pack_id, size in sizes.items() if size is not None}


def leftovers(store: Store) -> tuple[tuple[str, int], ...]:
    """Temporary files whose process is dead."""
    fs, folder = store._timeline.fs, f"{store.path}/tmp"
    dead = [name for name in fs.list(folder) if owner_of(name)[1] == "dead"]
    sizes = {name: fs.size(f"{folder}/{name}") for name in dead}
    return tuple((name, size) for name, size in sizes.items() if size is not None)


def check_plausible(store: Store, mark: Mark, packs: Iterable[PackState]) -> None:
    """Raise when nothing at all is needed: a store that holds something always needs something.

    Raises:
        InvalidInputError: no snapshot is left.
    """
    if not mark.live and any(True for _ in packs):
        raise InvalidInputError(
            f"store {store.path}: no snapshot is left that needs anything, so all of it would go. Nothing is "
            "collected. To remove a store, remove its folder.",
            path=store.path,
        )


def may_have_garbage(store: Store, compaction: Compaction | None) -> bool:
    """By the counts kept in the index: whether some pack has lost all that was live in it, or enough of it."""
    share = 0.0 if compaction is None else compaction.needed_share_max
    tiny = 0
    with store._keeper.kv.read() as txn:
        for key, row in txn.scan("packs"):
            _, size = decode_pack_row(row)
            if size == CONDEMNED:
                continue
            if read_fill(txn, key_number(key)) <= max(0, share * (size - _OVERHEAD)):
                return True
            tiny += compaction is not None and size < compaction.tiny_size_bytes
    return compaction is not None and tiny >= compaction.tiny_count_min
