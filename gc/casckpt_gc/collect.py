"""A collection carried out: retire, wait, condemn, wait, sweep. Safe beside commits, restores and other collections.

1. *Retire.* One entry retires the snapshots that the plan lets go; others withdraw components. Publishing first: what
   stays is whole before anything goes.
2. *Gate.* Whoever began to read before those entries may still be reading what they let go. Wait (`gate`).
3. *Condemn.* Mark what is needed as of the entries applied, and publish, under the very next number, the packs of which
   nothing is needed. Where another entry wins that number, what its snapshots need is added to the mark, and packs that
   they touch are spared. So the entry is true of everything below its number; commits above it do not use those packs.
   Then seal old entries in the same way (`seal`).
4. *Look again*, at everything published meanwhile. Then move the packs to `trash/`, where who located a record before
   still finds it. Make the epochs of what is sealed.
5. *Gate* again, for those readers. Then unlink, also the files of sealed entries.

Killed at any point, it leaves retired snapshots whose packs are still there, condemned packs, or trash; each is found
and finished by the next collection. The safety argument is in `docs/design/0015-collection.md`.

A full disk: entries need a few hundred bytes, which the file `reserve` holds back; rewriting packs is left out then.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from casckpt.arguments import FINITE, check, within
from casckpt.errors import (
    CorruptionError,
    IncompleteError,
    NotFoundError,
    OutOfSpaceError,
    UnsupportedFormatError,
)
from casckpt.format.document import COLLECTED, SEALED, unknown_features
from casckpt.format.entry import Body, Condemn, PackRef, Prune, Seal, Thin
from casckpt.ids import PackId, SnapshotId
from casckpt.index.tables import CONDEMNED, decode_pack_row
from casckpt.objects.packs import list_packs, pack_path, trash_path
from casckpt.storage.fs import replace_file
from casckpt.store.opening import add_feature
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt_gc.compact import Rewriting, Stopped
from casckpt_gc.compaction import COMPACTION, Compaction
from casckpt_gc.gate import Gate, Observer
from casckpt_gc.mark import Mark, check_certain, is_condemned, packs_with, roots
from casckpt_gc.plan import (
    Fate,
    Findings,
    Plan,
    check_plausible,
    find,
    leftovers,
    may_have_garbage,
    plan,
    unnamed_packs,
)
from casckpt_gc.recode import prove
from casckpt_gc.retention import NEWEST, AnyOf, Retention, Thinning
from casckpt_gc.seal import Sealing, make_epochs, sealable

T = TypeVar("T")

GRACE = within(FINITE, 0)
GRACE_S = 60.0  # readers that cannot hold a lease have so long to finish; twice, since there are two gates
POLL_S = 0.5  # between two looks at the leases
RESERVE, RESERVE_SIZE = "reserve", 256 * 1024
_PACKS_MAX = 20_000  # condemned in one entry: far below what it can hold; the rest waits for the next collection
_PRUNED_PER_ENTRY = 20_000


@dataclass(frozen=True)
class Report(Value):
    """What a collection did.

    Attributes:
        retired_count, thinned_count: snapshots.
        condemned_count: packs condemned by it; rewritten ones are among them.
        sealed_count: timeline entries sealed by it.
        rewritten_bytes: needed bytes of packs written anew as they are.
        recoded_count, recoded_bytes: objects encoded anew, and what their records take now.
        freed_bytes, freed_file_count: files unlinked, leftovers of earlier collections and of dead processes included.
        is_compaction_skipped: packs were to be rewritten or entries sealed, and there was no room, or it was told to
            stop.
    """

    retired_count: int
    thinned_count: int
    condemned_count: int
    sealed_count: int
    rewritten_bytes: int
    recoded_count: int
    recoded_bytes: int
    freed_bytes: int
    freed_file_count: int
    is_compaction_skipped: bool

    def __str__(self) -> str:
        text = (
            f"retired {self.retired_count} snapshots, thinned {self.thinned_count}, condemned {self.condemned_count} "
            f"packs, sealed {self.sealed_count} entries, rewrote {self.rewritten_bytes} bytes, encoded "
            f"{self.recoded_count} objects anew in {self.recoded_bytes} bytes, freed {self.freed_bytes} bytes in "
            f"{self.freed_file_count} files"
        )
        return f"{text}; not all was rewritten or sealed: no room, or stopped" if self.is_compaction_skipped else text


def _newest(kept: Sequence[Fate]) -> SnapshotId | None:
    """The snapshot that rules keep whatever they say: the newest that is whole and consistent, else the last."""
    chosen = next((fate for fate in kept if NEWEST in fate.reasons), kept[-1] if kept else None)
    return None if chosen is None else SnapshotId(bytes.fromhex(chosen.id))


def collect(
    store: Store,
    retention: Retention | AnyOf | None = None,
    thinning: Thinning | Sequence[Thinning] = (),
    *,
    branch: str | None = None,
    compaction: Compaction | None = COMPACTION,
    grace_s: float = GRACE_S,
) -> Report:
    """`plan` and execute; see both.

    Args:
        store, retention, thinning, branch, compaction: as for `plan`.
        grace_s: how long readers without a lease are waited for, at each of two gates, where packs go.

    Raises:
        CorruptionError, IncompleteError: it is not certain what is needed or who reads; nothing more is deleted.
        InvalidInputError: nothing in the store would be left, or an argument is wrong.
        StorageError: the file system refuses.
        UnsupportedFormatError: the store has a feature that this release does not know.
    """
    found = plan(store, retention, thinning, branch=branch, compaction=compaction)
    return found.execute(grace_s=grace_s)


class Collection:
    """One collection on its way: `run` it to the end, or `advance` it whenever there is time.

    `is_stopped` is asked before each record that is written anew: where it says so, no pack is rewritten this time.
    """

    def __init__(
        self,
        found: Plan,
        *,
        grace_s: float,
        sleep: Callable[[float], None] = time.sleep,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        check({"grace_s": GRACE}, {"grace_s": grace_s})
        self._plan = found
        self._store: Store = found._store
        self._grace_s = grace_s
        self._sleep = sleep
        self._is_stopped = is_stopped
        self._observer = Observer(self._store)
        self._mark: Mark | None = None
        self._retired = self._thinned = self._condemned = self._sealed = 0
        self._freed = self._files = 0
        self._rewritten = self._recoded = self._recoded_bytes = 0
        self._is_compaction_skipped = False
        self._phases = self._go()

    def run(self) -> Report:
        """Do all that is left, waiting at the gates."""
        while not self.advance():
            self._sleep(POLL_S)
        return self.report()

    def advance(self) -> bool:
        """Do what can be done without waiting; True when all is done. An error ends it: make a new plan."""
        return next(self._phases, True)

    def report(self) -> Report:
        """What has been done so far."""
        return Report(
            self._retired,
            self._thinned,
            self._condemned,
            self._sealed,
            self._rewritten,
            self._recoded,
            self._recoded_bytes,
            self._freed,
            self._files,
            self._is_compaction_skipped,
        )

    def _go(self) -> Iterator[bool]:
        """Yields False wherever something has to be waited for."""
        store = self._store
        with store._writing("collect"):
            unknown = unknown_features(store.document, "collect")
            if unknown:
                raise UnsupportedFormatError(
                    f"store {store.path} needs {unknown} for collecting, which this release does not know. Upgrade "
                    "casckpt.",
                    features=unknown,
                )
            self._observer.prepare()
            dead_files = dict(leftovers(store))
            self._retire()
        unfinished = {bytes.fromhex(each.pack) for each in self._plan.packs if each.what == "unfinished"}
        rules = self._plan._compaction
        has_garbage = bool(self._plan.packs or self._plan.recoded_count) or may_have_garbage(store, rules)
        if has_garbage or sealable(store, rules):
            yield from self._wait()
            with store._writing("collect"):
                if has_garbage:
                    self._condemn(unfinished)
                self._seal()
        self._move_to_trash()
        replaced = self._make_epochs()
        trash = store._timeline.fs.list(f"{store.path}/trash")
        if trash or dead_files or replaced:
            yield from self._wait()
            self._unlink(f"{store.path}/trash", trash)
            self._unlink_entries(replaced)
            still = dict(leftovers(store))
            self._unlink(f"{store.path}/tmp", [name for name, size in still.items() if dead_files.get(name) == size])
        self._observer.remove_dead()
        with contextlib.suppress(OutOfSpaceError):
            self._keep_reserve()

    def _wait(self) -> Iterator[bool]:
        seq = self._store._keeper.catch_up()
        check_certain(self._store)  # what is above an entry that cannot be read now may have condemned packs
        gate = Gate(self._observer, seq, self._grace_s)
        while not gate.is_open():
            yield False

    # --- retiring ---

    def _retire(self) -> None:
        found = self._plan
        newest = _newest(found.kept)
        leaving = [bytes.fromhex(fate.id) for fate in found.retired]
        for start in range(0, len(leaving), _PRUNED_PER_ENTRY):
            part = leaving[start : start + _PRUNED_PER_ENTRY]
            self._retired += self._publish(functools.partial(self._prune, part, newest))
        for fate in found.thinned:
            snapshot_id = SnapshotId(bytes.fromhex(fate.id))
            self._thinned += self._publish(functools.partial(self._thin, snapshot_id, list(fate.withdrawn), newest))

    def _prune(self, leaving: Sequence[bytes], newest: SnapshotId | None) -> tuple[Body | None, int]:
        """What may still go, by what is published now: nothing tagged, and only while the newest stays."""
        if newest is None or self._is_retired(newest):
            return None, 0
        tagged = self._tagged()
        left = [each for each in leaving if each not in tagged and not self._is_retired(SnapshotId(each))]
        return (Prune(left) if left else None), len(left)

    def _thin(self, snapshot_id: SnapshotId, names: list[str], newest: SnapshotId | None) -> tuple[Body | None, int]:
        """The same of what is withdrawn: the newest keeps everything as long as it is there, and so does what has got
        a tag since the plan was made."""
        is_spared = snapshot_id in self._tagged() and snapshot_id.hex() not in self._plan._tagged
        if newest is None or self._is_retired(newest) or is_spared:
            return None, 0
        is_done = self._is_retired(snapshot_id) or set(names) <= set(self._store._catalog.thinned(snapshot_id))
        return (None, 0) if is_done else (Thin(snapshot_id, names), 1)

    def _tagged(self) -> set[bytes]:
        with self._store._keeper.kv.read() as txn:
            return {value for _, value in txn.scan("tags")}

    def _is_retired(self, snapshot_id: SnapshotId) -> bool:
        return self._store._catalog.row(snapshot_id).is_retired

    def _publish(self, decide: Callable[[], tuple[Body | None, int]]) -> int:
        """Publish what `decide` says as of everything below its number; returns its count."""
        keeper, committer = self._store._keeper, self._store._committer
        while True:
            keeper.catch_up()
            applied = keeper.applied()
            body, count = decide()
            if body is None:
                return 0
            feature = SEALED if isinstance(body, Seal) else COLLECTED
            self._with_room(functools.partial(add_feature, self._store, feature))
            entry = self._with_room(functools.partial(committer.append, body, applied))
            if entry is not None:
                keeper.catch_up_after_commit(entry, {})
                return count

    # --- condemning ---

    def _condemn(self, unfinished: set[bytes]) -> None:
        """Publish what nothing needs, true of everything below the entry's number."""
        store = self._store
        store._keeper.catch_up()
        check_certain(store)
        mark = self._mark = Mark(store)
        mark.add(roots(store))
        found = find(store, mark, self._plan._compaction)
        check_plausible(store, mark, found.states.values())
        if not found.recoding.bases or not self._condemn_found(mark, found, unfinished):
            self._condemn_found(mark, found.without_recoding(store, mark), unfinished)

    def _condemn_found(self, mark: Mark, found: Findings, unfinished: set[bytes]) -> bool:
        """Write anew what is to be, and publish; whether anything was condemned."""
        doomed = set(found.dropped)
        with self._rewriting(found) as rewriting:
            if rewriting is None and found.recoding.bases:
                return False
            needed = prove(mark, rewriting.encoder) if rewriting is not None and found.recoding.bases else mark
            self._condemned = self._publish(functools.partial(self._verdict, needed, doomed, rewriting, unfinished))
            if rewriting is not None and self._condemned:
                self._rewritten = rewriting.copied_bytes
                self._recoded, self._recoded_bytes = len(found.recoding.bases), rewriting.recoded_bytes
                self._mark = None if found.recoding.bases else mark  # the new records are looked up once more
        return self._condemned > 0

    @contextlib.contextmanager
    def _rewriting(self, found: Findings) -> Iterator[Rewriting | None]:
        """The packs to be rewritten, their copies durable; None where there are none, no room, or no time."""
        if not (found.chosen or found.recoding.bases) or found.needed is None:
            yield None
            return
        rewriting = Rewriting(self._store, found.chosen, found.needed, found.recoding, self._is_stopped)
        try:
            try:
                rewriting.copy()
            except (OutOfSpaceError, Stopped):
                self._is_compaction_skipped = True
                yield None
                return
            except (CorruptionError, IncompleteError):
                if not found.recoding.bases:
                    raise
                yield None  # what was to be encoded anew is damaged: the rest goes without it
                return
            yield rewriting
        finally:
            rewriting.end()

    def _verdict(
        self, mark: Mark, doomed: set[PackId], rewriting: Rewriting | None, unfinished: set[bytes]
    ) -> tuple[Body | None, int]:
        """The entry, as of what is applied now. Snapshots that came since the mark spare the packs they touch."""
        check_certain(self._store)
        fresh = mark.add(roots(self._store) - mark.snapshots)
        touched = packs_with(self._store, fresh)
        doomed -= touched
        packs: list[bytes] = sorted(doomed)
        replacements: list[PackRef] = []
        if rewriting is not None and (rewriting.packs or rewriting.encoder.places):
            copies = {ref.pack_id for ref in rewriting.replacements}
            is_late = is_condemned(self._store, [*copies, *rewriting.packs]) or not rewriting.encoder.is_below(fresh)
            if is_late or touched & rewriting.packs.keys():
                return None, 0  # copies that lack something, or come too late: the next collection makes new ones
            packs += rewriting.packs
            replacements = rewriting.replacements
            unfinished = unfinished - copies
        packs = [each for each in packs if not is_condemned(self._store, [each])]
        packs += [pack_id for pack_id in unnamed_packs(self._store) if pack_id in unfinished]
        packs = packs[-_PACKS_MAX:] if rewriting is None else packs
        return (Condemn(packs, replacements), len(packs)) if packs else (None, 0)

    # --- sealing ---

    def _seal(self) -> None:
        """Publish that old entries are sealed, what is needed of them being in packs."""
        store = self._store
        store._keeper.catch_up()
        numbers = sealable(store, self._plan._compaction)
        if not numbers:
            return
        check_certain(store)
        mark = self._mark = self._mark or Mark(store)
        mark.add(roots(store) - mark.snapshots)
        if not mark.live:
            return  # nothing is left that needs anything: not to be believed
        sealing = Sealing(store, numbers, mark)
        try:
            with contextlib.suppress(NotFoundError):  # another collection was faster
                sealing.prepare()
                self._sealed = self._publish(sealing.verdict)
        except OutOfSpaceError:
            self._is_compaction_skipped = True
        finally:
            sealing.end()

    def _make_epochs(self) -> list[int]:
        """The entries whose files may go."""
        try:
            return sorted(self._with_room(functools.partial(make_epochs, self._store)))
        except OutOfSpaceError:
            self._is_compaction_skipped = True
            return []

    def _unlink_entries(self, numbers: Sequence[int]) -> None:
        names = [self._store._timeline.path(seq).rpartition("/") for seq in numbers]
        for folder in dict.fromkeys(each for each, _, _ in names):
            self._unlink(folder, [name for each, _, name in names if each == folder])

    # --- sweeping ---

    def _condemned_files(self) -> list[PackId]:
        """Condemned packs that still have their names, whoever condemned them."""
        with self._store._keeper.kv.read() as txn:
            condemned = {
                PackId(pack_id)
                for pack_id, size in (decode_pack_row(row) for _, row in txn.scan("packs"))
                if size == CONDEMNED
            }
        return [each for each in list_packs(self._store._timeline.fs, self._store.path) if each in condemned]

    def _move_to_trash(self) -> None:
        store = self._store
        store._keeper.catch_up()
        packs = self._condemned_files()
        if not packs:
            return
        self._look_again(packs)
        store._timeline.make_durable(store._keeper.applied().seq)  # who condemned them may have died before it was
        fs, root = store._timeline.fs, store.path
        fs.make_folder(f"{root}/trash")
        for pack_id in packs:
            with contextlib.suppress(FileNotFoundError):  # another collection was faster
                fs.rename(pack_path(root, pack_id), trash_path(root, pack_id))
        for folder in sorted({pack_path(root, pack_id).rpartition("/")[0] for pack_id in packs}):
            fs.sync_folder(folder)
        fs.sync_folder(f"{root}/trash")

    def _look_again(self, packs: Sequence[PackId]) -> None:
        """Every snapshot that must be whole is so without these packs; else nothing is moved.

        The index finds nothing in condemned packs, so a mark that succeeds proves it.

        Raises:
            CorruptionError: something needs them, so a program has broken the protocol; or it is not certain, as where
                the entry that condemned them is gone.
        """
        mark = self._mark or Mark(self._store)
        try:
            check_certain(self._store)
            self._store._timeline.read(self._store._keeper.last_condemned())  # as who commits sees it
            mark.add(roots(self._store) - mark.snapshots)
        except (CorruptionError, IncompleteError, NotFoundError) as error:
            raise CorruptionError(
                f"{len(packs)} condemned packs stay where they are: {error.message.rstrip('.')}. Run `casckpt verify`.",
                packs=[each.hex() for each in packs],
            ) from error

    def _unlink(self, folder: str, names: Sequence[str]) -> None:
        fs = self._store._timeline.fs
        for name in names:
            size = fs.size(f"{folder}/{name}")
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{folder}/{name}")
                self._freed += size or 0
                self._files += 1
        if names:
            fs.sync_folder(folder)

    # --- a full disk ---

    def _with_room(self, write: Callable[[], T]) -> T:
        """Do a small write; on a full disk once more, with the reserve let go."""
        try:
            return write()
        except OutOfSpaceError:
            with contextlib.suppress(FileNotFoundError):
                self._store._timeline.fs.unlink(f"{self._store.path}/{RESERVE}")
            return write()

    def _keep_reserve(self) -> None:
        fs, path = self._store._timeline.fs, f"{self._store.path}/{RESERVE}"
        if fs.size(path) is not None:
            return
        replace_file(fs, self._store._system.temporary_path(self._store.path), path, [bytes(RESERVE_SIZE)])
