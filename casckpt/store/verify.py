"""Damage found and named: which objects are bad or missing, and which steps and components need them.

Without reading data: every timeline entry is decoded and its link checked, every object of every snapshot must have a
place in a file of the right size. With it, every reachable object is read, decoded and hashed.
Nothing is repaired here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from casckpt.errors import CasckptError, IncompleteError, NotFoundError, StorageError, UnsupportedFormatError
from casckpt.format.snapshot import parts_of
from casckpt.format.structure import decode_structure
from casckpt.ids import NO_DIGEST, ObjectId, SnapshotId, short
from casckpt.index.tables import CONDEMNED, decode_pack_row, epoch_refs
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.packs import check_frame, pack_path
from casckpt.objects.reader import Request
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import is_about_file
from casckpt.store.catalog import Catalog
from casckpt.store.values import Problem, VerifyReport
from casckpt.store.wholeness import WholenessCheck

Progress = Callable[[int, int], None]
_OBJECTS_PER_READ = 4096
User = tuple[str, str, int, str, str]


@dataclass
class _Found:
    """Objects reachable from the snapshots, and who needs them: object → manifests → (snapshot, component)."""

    manifests: dict[ObjectId, list[User]] = field(default_factory=dict)
    contexts: dict[ObjectId, list[User]] = field(default_factory=dict)
    owners: dict[ObjectId, set[ObjectId]] = field(default_factory=dict)  # object → manifests that reach it
    bad: dict[ObjectId, CasckptError] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_bad(self, object_id: ObjectId, error: CasckptError, owner: ObjectId | None = None) -> None:
        """Note a bad object; who needs it is looked up at the end, when all of them are known."""
        _check_is_finding(error)
        self.bad.setdefault(object_id, error)
        if owner is not None and owner != object_id:
            self.owners.setdefault(object_id, set()).add(owner)

    def report(self) -> tuple[Problem, ...]:
        """All problems, each bad object with everybody who needs it."""
        for object_id, error in self.bad.items():
            kind = _kind_of(error)
            users = self.users(object_id)
            self.problems.append(Problem(kind, f"{error.message} {describe_users(users)}", object_id.hex(), users))
        return tuple(self.problems)

    def users(self, object_id: ObjectId) -> tuple[User, ...]:
        seen, pending, users = {object_id}, [object_id], set[User]()
        while pending:
            each = pending.pop()
            users.update(self.manifests.get(each, ()), self.contexts.get(each, ()))
            above = self.owners.get(each, set()) - seen
            seen |= above
            pending += above
        return tuple(sorted(users))


class Verifier:
    """One verification of a whole store."""

    def __init__(self, timeline: Timeline, keeper: IndexKeeper, catalog: Catalog) -> None:
        self._timeline = timeline
        self._keeper = keeper
        self._catalog = catalog

    def run(self, snapshots: Sequence[SnapshotId], *, read_data: bool, progress: Progress | None) -> VerifyReport:
        """Check the timeline and everything that `snapshots` reach."""
        found = _Found()
        found.problems += self._timeline_problems() + self._file_problems()
        is_collected = self._keeper.last_condemned() >= 0
        for snapshot_id in snapshots:
            if not (is_collected and self._catalog.row(snapshot_id).is_retired):  # nothing is owed of those
                self._add_snapshot(snapshot_id, found)
        for manifest in found.manifests:
            self._add_manifest(manifest, found)
        object_ids = sorted({*found.manifests, *found.contexts, *found.owners})
        read_bytes = 0
        if read_data:
            read_bytes = self._read_all(object_ids, found, progress)
        else:
            self._add_missing(object_ids, found)
        return VerifyReport(found.report(), len(snapshots), len(object_ids), read_bytes, read_data)

    def _timeline_problems(self) -> list[Problem]:
        problems = [Problem("timeline", entry.reason) for entry in self._catalog.bad_entries()]
        known_bad = {entry.seq for entry in self._catalog.bad_entries()}
        previous = NO_DIGEST
        for seq in range(self._keeper.applied().seq + 1):
            if seq in known_bad:
                previous = self._timeline.link_digest(seq)
                continue
            try:
                entry = self._timeline.read(seq)
            except CasckptError as error:
                _check_is_finding(error)
                problems.append(Problem("timeline", error.message))
                previous = self._timeline.link_digest(seq)
                continue
            link = entry.envelope.previous
            if seq and link != previous and link != NO_DIGEST:
                problems.append(
                    Problem(
                        "timeline",
                        f"timeline entry {seq} links to {short(link)}, but entry {seq - 1} is {short(previous)}: the "
                        "older one was changed after the newer was written. Compare with another copy of this store.",
                    )
                )
            previous = entry.digest
        return problems + self._epoch_problems()

    def _epoch_problems(self) -> list[Problem]:
        """Epochs that are not, byte for byte, what their seal says; one that is not there yet is no problem."""
        problems = []
        with self._keeper.kv.read() as txn:
            refs = epoch_refs(txn)
        for ref in refs:
            if self._timeline.fs.size(self._timeline.epochs.path(ref.number)) is None:
                continue  # entries that have no file either were named above
            try:
                self._timeline.epochs.check(ref)
            except CasckptError as error:
                _check_is_finding(error)
                problems.append(Problem("timeline", error.message))
        return problems

    def _file_problems(self) -> list[Problem]:
        """Packs whose size, header or table is not as written. What that costs is found by reading."""
        problems, known = [], set()
        for pending in self._catalog.pending_packs():
            known.add(pending.pack_id)
            state = "is missing" if pending.found_size < 0 else f"had {pending.found_size} bytes"
            problems.append(
                Problem(
                    "incomplete",
                    f"pack {pending.pack_id.hex()} (of timeline entry {pending.seq}) {state}. If a copy of this store "
                    "is under way, wait for it and open again; otherwise its objects are lost unless listed elsewhere.",
                )
            )
        with self._keeper.kv.read() as txn:
            packs = [decode_pack_row(row) for _, row in txn.scan("packs")]
        for pack_id, expected in packs:
            is_owed = pack_id not in known and expected != CONDEMNED
            problem = self._pack_problem(pack_id, expected) if is_owed else None
            problems += [problem] if problem else []
        return problems

    def _pack_problem(self, pack_id: bytes, expected: int) -> Problem | None:
        fs, root = self._timeline.fs, self._timeline.root
        found = fs.size(pack_path(root, pack_id))
        if found is None:
            return Problem("incomplete", f"pack {pack_id.hex()} is missing. Copy it back from a copy of this store.")
        if found != expected:
            return Problem("corrupt", f"pack {pack_id.hex()} has {found} bytes, expected {expected}.")
        try:
            check_frame(fs, root, pack_id, self._timeline.store_id)
        except CasckptError as error:
            _check_is_finding(error)
            return Problem(_kind_of(error), f"{error.message}. Its records are found without it.")
        return None

    def _add_snapshot(self, snapshot_id: SnapshotId, found: _Found) -> None:
        try:
            snapshot = self._catalog.load(snapshot_id)
        except UnsupportedFormatError:
            raise
        except CasckptError as error:
            _check_is_finding(error)
            row = self._catalog.row(snapshot_id)
            message = f"snapshot {short(snapshot_id)} of step {row.step} (timeline entry {row.seq}): {error.message}"
            found.problems.append(Problem(_kind_of(error), message, snapshot_id.hex()))
            return
        where = (snapshot.run, snapshot.branch, snapshot.step)
        thinned = self._catalog.thinned(snapshot_id)
        for name, ref in snapshot.components.items():
            if name in thinned:
                continue
            found.manifests.setdefault(ObjectId(ref.manifest), []).append((*where, name, snapshot_id.hex()))
        if snapshot.context:
            found.contexts.setdefault(ObjectId(snapshot.context), []).append((*where, "config", snapshot_id.hex()))

    def _add_manifest(self, address: ObjectId, found: _Found) -> None:
        try:
            manifest = self._catalog.manifest(address)
            for node in self._catalog.node_ids(manifest):
                found.owners.setdefault(node, set()).add(address)
            for object_id in (ObjectId(manifest.structure), *self._catalog.chunk_ids(manifest)):
                found.owners.setdefault(object_id, set()).add(address)
        except CasckptError as error:
            found.add_bad(ObjectId(error.facts.get("object_id", address)), error, address)
            return
        for part in (ObjectId(each.manifest) for each in parts_of(manifest)):  # rings share them: each is read once
            is_met = part in found.owners
            found.owners.setdefault(part, set()).add(address)
            if not is_met:
                self._add_manifest(part, found)
        try:
            decode_structure(self._keeper.reader.read(ObjectId(manifest.structure)))
        except CasckptError as error:
            found.add_bad(ObjectId(manifest.structure), error, address)

    def _add_missing(self, ids: Sequence[ObjectId], found: _Found) -> None:
        """Without reading: objects none of whose places is in a file of the right size."""
        check = WholenessCheck(self._timeline, self._keeper, self._catalog)
        for object_id, flaw in zip(ids, check.flaws(ids, trust_marks=False), strict=True):
            if flaw is not None:
                found.add_bad(object_id, IncompleteError(f"{flaw.reason}."))

    def _read_all(self, ids: Sequence[ObjectId], found: _Found, progress: Progress | None) -> int:
        """Read every object; one bad object does not hide the others."""
        done = 0
        for start in range(0, len(ids), _OBJECTS_PER_READ):
            batch = ids[start : start + _OBJECTS_PER_READ]
            places = self._keeper.reader.locate(batch)
            for object_id, where in zip(batch, places, strict=True):
                if not where:
                    found.add_bad(object_id, IncompleteError(f"object {short(object_id)} is in no pack or entry."))
            pairs = [(each, where) for each, where in zip(batch, places, strict=True) if where]
            requests = [Request(each, where[0].plain_size, (), at) for at, (each, where) in enumerate(pairs)]
            for object_id, error in self._keeper.reader.prove_each(requests, [where for _, where in pairs]):
                found.add_bad(object_id, error)
            done += sum(request.size for request in requests)
            if progress is not None:
                progress(min(start + _OBJECTS_PER_READ, len(ids)), len(ids))
        return done


def _check_is_finding(error: CasckptError) -> None:
    """Raise what says nothing of the data: too many open files, no permission. It is no damage to be remembered."""
    if isinstance(error, StorageError) and not is_about_file(error):
        raise error


def _kind_of(error: CasckptError) -> str:
    if isinstance(error, IncompleteError | NotFoundError):
        return "missing"
    return "unreadable" if isinstance(error, StorageError) else "corrupt"


def describe_users(users: Iterable[User]) -> str:
    """Who needs a damaged object, for people."""
    users = list(users)
    if not users:
        return "No listed snapshot needs it."
    by_component: dict[tuple[str, str, str], list[int]] = {}
    for run, branch, step, component, _ in users:
        by_component.setdefault((run, branch, component), []).append(step)
    parts = []
    for (run, branch, component), steps in sorted(by_component.items())[:6]:
        span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {min(steps)} to {max(steps)}"
        parts.append(f"component {component!r} of {run}/{branch} {span}")
    more = f" and {len(by_component) - 6} more" if len(by_component) > 6 else ""
    return f"Needed by {'; '.join(parts)}{more}."
