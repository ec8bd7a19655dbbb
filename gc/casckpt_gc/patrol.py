"""Looking for silent damage a little at a time: files checked in turn, the one checked longest ago first.

A patrol reads packs and epochs within a budget of bytes and seconds. It compares every record of a pack with its own
check, and every epoch with the digest that its seal names: bit rot is found whether anybody restores that step or not.
Which file was checked when is kept in the file `patrol` of the store, in numbers of checks, not in times; losing it
only means to begin anew. Objects that cannot be had any more are noted in the index, so that commits store them again
as soon as they have them in memory; so are entries, so that nothing is collected meanwhile. Both are reported by run,
branch, step and component.

It also looks at the disk: how much is free, and how long a small durable write takes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Sized
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from casckpt.arguments import NUMBER, ORDERED, check, within
from casckpt.digest import check16
from casckpt.errors import CorruptionError, IncompleteError, NotFoundError, StorageError
from casckpt.format.entry import EpochRef
from casckpt.format.pack import PackRow
from casckpt.format.record import decode_header
from casckpt.ids import ObjectId, PackId, SnapshotId
from casckpt.index.tables import (
    CONDEMNED,
    BranchRow,
    decode_object,
    decode_pack_row,
    decode_snap,
    epoch_refs,
    key_number,
    split_name_key,
)
from casckpt.objects import graph
from casckpt.objects.epochs import entries_of
from casckpt.objects.packs import check_frame, pack_path, read_rows
from casckpt.objects.timeline import Timeline
from casckpt.storage.fs import File, is_about_file, read_file, replace_file, write_file
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt_gc.mark import objects_below, roots

PATROL = "patrol"
_EPOCH = "epoch-"  # then a number: names of epochs in that file, and in findings
_STATE_SIZE_MAX = 64 << 20
_KEPT_EVERY_S = 10.0  # who is killed checks so much again
_SHOWN_MAX = 20

User = tuple[str, str, int, str]


class Finding(NamedTuple):
    """A record that is not as it was written, or, with offset −1, what is wrong with a whole pack or epoch.

    `pack` is the pack's id, or `epoch-` and the number of an epoch of the timeline.
    """

    pack: str
    offset: int
    object_id: str
    reason: str


@dataclass(frozen=True)
class Limits(Value):
    """What is too little room or too slow a disk: `warn` speaks, `stop` means that saving should not go on."""

    warn_free_bytes: int = 5 << 30
    stop_free_bytes: int = 256 << 20
    warn_write_s: float = 2.0
    stop_write_s: float = 60.0

    def __post_init__(self) -> None:
        check(dict.fromkeys(vars(self), ORDERED), vars(self))


LIMITS = Limits()


@dataclass(frozen=True)
class Health(Value):
    """The disk of a store: bytes free, seconds for a small durable write, and "good", "warn" or "stop"."""

    free_bytes: int
    write_s: float
    state: str


@dataclass(frozen=True)
class Patrolled(Value):
    """What a patrol saw.

    Attributes:
        checked_count, file_count: packs and epochs checked now, and packs and epochs in all.
        read_bytes: of them.
        findings: damage in those checked now.
        needed_by: (run, branch, step, component) that cannot be restored because of it; of a snapshot whose entry
            cannot be read the component is not known, and empty.
        health: of the disk.
    """

    checked_count: int
    file_count: int
    read_bytes: int
    findings: tuple[Finding, ...]
    needed_by: tuple[User, ...]
    health: Health

    @property
    def ok(self) -> bool:
        """No damage, and a disk that is well."""
        return not self.findings and self.health.state == "good"

    def __str__(self) -> str:
        lines = [f"checked {self.checked_count} of {self.file_count} packs and epochs: {len(self.findings)} findings"]
        lines += [f"{_titled(each.pack)}: {each.reason}" for each in self.findings[:_SHOWN_MAX]]
        lines += _more(self.findings)
        lines += [f"needed by {user_text(each)}" for each in self.needed_by[:_SHOWN_MAX]]
        lines += _more(self.needed_by)
        lines.append(f"disk: {_MEANINGS[self.health.state]}{health_text(self.health)}")
        return "\n".join(lines)


_MEANINGS = {"good": "", "warn": "take care, ", "stop": "not fit to save to, "}


def health_text(found: Health) -> str:
    """Room and speed of a disk, for people."""
    return f"{found.free_bytes} bytes are free, and a small write takes {found.write_s:.3f} s"


def _titled(name: str) -> str:
    return name.replace("-", " ") if name.startswith(_EPOCH) else f"pack {name[:12]}"


def _more(rows: Sized) -> list[str]:
    return [f"… and {len(rows) - _SHOWN_MAX} more"] if len(rows) > _SHOWN_MAX else []


def user_text(user: User) -> str:
    """Run, branch, step and component, for people."""
    run, branch, step, component = user
    return f"{run}/{branch}@{step}, " + (f"component {component!r}" if component else "all of it")


def patrol(store: Store, *, budget_bytes: int = 1 << 30, budget_s: float = 60.0, limits: Limits = LIMITS) -> Patrolled:
    """Check packs and epochs until a budget is used up; at least one.

    Args:
        store: open for writing, or what was seen is not kept.
        budget_bytes: of files read.
        budget_s: seconds of this process's monotonic clock.
        limits: for the disk.

    What was checked is kept every few seconds: one that is killed is gone on with where it was.

    Raises:
        InvalidInputError: a budget is no number from 0 on.
        StorageError: a file cannot be looked at now, which says nothing of its content. What was found before is noted.
    """
    check(dict.fromkeys(("budget_bytes", "budget_s"), within(NUMBER, 0)), locals())
    store._keeper.catch_up()
    packs, epochs = packs_of(store), epochs_of(store)
    checked = {name: number for name, number in _read_state(store).items() if name in packs or name in epochs}
    turn = max(checked.values(), default=0)
    started_s = kept_s = store._system.monotonic_s()
    findings: list[Finding] = []
    lost: set[ObjectId] = set()
    unreadable: set[int] = set()
    done = read = 0
    for name in sorted([*packs, *epochs], key=lambda each: (checked.get(each, -1), each)):
        if name in packs:
            size, found = check_pack(store, PackId(bytes.fromhex(name)), packs[name])
            found = _noted(store, name, found)
            lost |= _note_lost(store, found, is_of_size=size == packs[name])
        else:
            size, found = check_epoch(store, epochs[name])
            unreadable |= note_unreadable(store, epochs[name]) if found else set()
        findings += found
        turn += 1
        checked[name] = turn
        done, read = done + 1, read + size
        now_s = store._system.monotonic_s()
        if read >= budget_bytes or now_s - started_s >= budget_s:
            break
        if now_s - kept_s >= _KEPT_EVERY_S:
            kept_s = now_s
            _write_state(store, checked)
    _write_state(store, checked)
    users = needed_by(store, lost, unreadable)
    return Patrolled(done, len(packs) + len(epochs), read, tuple(findings), users, health(store, limits))


def _noted(store: Store, name: str, findings: list[Finding]) -> list[Finding]:
    """Findings in a pack, with records that could not even be found; none where a collector took it meanwhile."""
    if not findings:
        return []
    store._keeper.catch_up()
    return with_missing(store, findings) if name in packs_of(store) else []


def _note_lost(store: Store, findings: Iterable[Finding], *, is_of_size: bool) -> set[ObjectId]:
    """Remember those objects of findings that no record gives any more; returns them.

    Not of a pack that is missing or short: it may be on its way, and commits see that by its size.
    """
    reasons = {ObjectId(bytes.fromhex(each.object_id)): each.reason for each in findings if each.object_id}
    lost = {each for each in reasons if not is_readable(store, each)}
    if lost and is_of_size:
        store._keeper.mark_damage({each: reasons[each] for each in lost})
    return lost


def is_readable(store: Store, object_id: ObjectId) -> bool:
    """Whether any record gives an object, proven by its address."""
    try:
        store._keeper.reader.read(object_id)
    except (CorruptionError, IncompleteError):
        return False
    except StorageError as error:
        if not is_about_file(error):
            raise
        return False
    return True


def with_missing(store: Store, findings: Iterable[Finding]) -> list[Finding]:
    """Findings, and for packs that are bad as a whole those records that the index knows and nobody finds in them.

    Costs one pass over the rows of all objects where there is such a pack.
    """
    found = list(findings)
    packs = {each.pack for each in found if each.offset < 0}
    if not packs:
        return found
    named = {(each.pack, each.offset) for each in found}
    there = {(pack, row.offset) for pack in packs for row in rows_of(store, PackId(bytes.fromhex(pack)))}
    with store._keeper.kv.read() as txn:
        keys = {pack: txn.get("pack_ids", bytes.fromhex(pack)) for pack in packs}
        numbers = {key_number(key): pack for pack, key in keys.items() if key is not None}
        for object_id, row in txn.scan("objects"):
            for place in decode_object(row)[1]:
                pack = numbers.get(place.pack_no)
                if pack is not None and (pack, place.offset) not in there | named:
                    reason = f"record at offset {place.offset}: cannot be found"
                    found.append(Finding(pack, place.offset, object_id.hex(), reason))
    return found


def rows_of(store: Store, pack_id: PackId) -> list[PackRow]:
    """The records that can be found in a pack, if any."""
    try:
        return read_rows(store._timeline.fs, store.path, pack_id, store.store_id)[0]
    except (FileNotFoundError, CorruptionError):
        return []


def check_pack(store: Store, pack_id: PackId, expected_size: int) -> tuple[int, list[Finding]]:
    """Read one pack and compare everything with its checks; returns bytes read, and what is wrong."""
    fs, root, name = store._timeline.fs, store.path, pack_id.hex()
    size = fs.size(pack_path(root, pack_id))
    if size is None:
        return 0, [Finding(name, -1, "", "is missing")]
    findings: list[Finding] = []
    if size != expected_size:
        findings.append(Finding(name, -1, "", f"has {size} bytes, expected {expected_size}"))
    try:
        with contextlib.suppress(FileNotFoundError):
            check_frame(fs, root, pack_id, store.store_id)
    except CorruptionError as error:
        findings.append(Finding(name, -1, "", error.message))
    try:
        rows, _ = read_rows(fs, root, pack_id, store.store_id)
        file = fs.open(pack_path(root, pack_id))
    except (CorruptionError, FileNotFoundError) as error:
        return size, [*findings, Finding(name, -1, "", f"cannot be read: {error}")]
    try:
        for row in rows:
            store._leases.pulse()
            reason = _wrong(file, row.offset, row.header_size, row.stored_size)
            if reason is not None:
                findings.append(Finding(name, row.offset, row.object_id.hex(), reason))
    finally:
        file.close()
    return size, findings


def _wrong(file: File, offset: int, header_size: int, stored_size: int) -> str | None:
    data = memoryview(bytearray(header_size + stored_size))
    what = f"record at offset {offset}"
    try:
        count = file.read_into(data, offset)
        header = decode_header(data[:count], what, limit=count)
    except CorruptionError as error:
        return error.message
    except StorageError as error:
        if not is_about_file(error):
            raise
        return f"{what}: {error.message}"
    return None if check16(data[header_size:]) == header.payload_check else f"{what}: its content is not as written"


def needed_by(store: Store, lost: Collection[ObjectId], unreadable: Collection[int]) -> tuple[User, ...]:
    """Run, branch, step and component of everything that cannot be restored without these objects and entries."""
    users = [*(_needing(store, lost) if lost else ()), *(_listed_at(store, unreadable) if unreadable else ())]
    return tuple(sorted(set(users)))


def _needing(store: Store, lost: Collection[ObjectId]) -> list[User]:
    snapshots = {}
    for snapshot_id in sorted(roots(store)):
        with contextlib.suppress(CorruptionError, IncompleteError):
            snapshots[snapshot_id] = store._catalog.load(snapshot_id)
    found = []
    is_lost: dict[bytes, bool] = {}
    for snapshot_id, snapshot in snapshots.items():
        thinned = store._catalog.thinned(SnapshotId(snapshot_id))
        for name, ref in snapshot.components.items():
            if name in thinned:
                continue
            if ref.manifest not in is_lost:
                is_lost[ref.manifest] = _needs(store, ObjectId(ref.manifest), lost)
            if is_lost[ref.manifest]:
                found.append((snapshot.run, snapshot.branch, snapshot.step, name))
    return found


def _needs(store: Store, manifest: ObjectId, lost: Collection[ObjectId]) -> bool:
    try:
        objects = objects_below(store, manifest, set())
    except (CorruptionError, IncompleteError):
        return True  # the manifest itself
    with store._keeper.kv.read() as txn:
        places = graph.reach(objects, txn)
    good = graph.settle(places, lambda each, _: each not in lost, {})
    return any(each not in good for each in objects)


# --- epochs ---


def epochs_of(store: Store) -> dict[str, EpochRef]:
    """Epochs that are sealed, by name."""
    with store._keeper.kv.read() as txn:
        return {f"{_EPOCH}{ref.number}": ref for ref in epoch_refs(txn)}


def check_epoch(store: Store, ref: EpochRef) -> tuple[int, list[Finding]]:
    """Read one epoch and compare it with what its seal says; returns bytes read, and what is wrong.

    One that is missing while its entries have files of their own is not made yet, and no finding.
    """
    timeline = store._timeline
    size = timeline.fs.size(timeline.epochs.path(ref.number))
    if size is None and all(timeline.fs.size(timeline.path(seq)) is not None for seq in entries_of(ref.number)):
        return 0, []
    try:
        timeline.epochs.check(ref)
    except CorruptionError as error:
        return size or 0, [Finding(f"{_EPOCH}{ref.number}", -1, "", error.message)]
    return ref.size, []


def note_unreadable(store: Store, ref: EpochRef) -> set[int]:
    """Remember those entries of a damaged epoch that cannot be read any more; returns them."""
    timeline = Timeline(store.path, store.store_id, store._system)  # one that remembers no table
    reasons = {}
    for seq in entries_of(ref.number):
        try:
            timeline.read(seq)
        except (CorruptionError, NotFoundError) as error:
            reasons[seq] = error.message
    store._keeper.mark_bad(reasons)
    return set(reasons)


def _listed_at(store: Store, seqs: Collection[int]) -> list[User]:
    """Snapshots that stay and whose entries are among these; the index still knows them."""
    with store._keeper.kv.read() as txn:
        names = {
            msgspec.msgpack.decode(value, type=BranchRow).number: split_name_key(key)
            for key, value in txn.scan("branches")
        }
        rows = [decode_snap(value) for _, value in txn.scan("snaps")]
    return [(*names[row.branch_no], row.step, "") for row in rows if row.seq in seqs and not row.is_retired]


# --- the disk ---


def health(store: Store, limits: Limits = LIMITS) -> Health:
    """Room and speed of a store's disk. Writes and removes one small file."""
    free = shutil.disk_usage(store.path).free
    write_s = 0.0 if store.is_read_only else _time_write(store)
    is_bad = free < limits.stop_free_bytes or write_s > limits.stop_write_s
    is_odd = free < limits.warn_free_bytes or write_s > limits.warn_write_s
    return Health(free, write_s, "stop" if is_bad else "warn" if is_odd else "good")


def _time_write(store: Store) -> float:
    """Seconds that a durable write of 4 KiB takes; infinite where it fails."""
    system = store._system
    path = system.temporary_path(store.path)
    started_s = system.monotonic_s()
    try:
        write_file(system.file_system, path, [bytes(4096)])
        return system.monotonic_s() - started_s
    except StorageError:
        return float("inf")
    finally:
        with contextlib.suppress(StorageError, FileNotFoundError):
            system.file_system.unlink(path)


def packs_of(store: Store) -> dict[str, int]:
    """Packs of the store by name, with their sizes."""
    with store._keeper.kv.read() as txn:
        rows = [decode_pack_row(row) for _, row in txn.scan("packs")]
    return {pack_id.hex(): size for pack_id, size in rows if size != CONDEMNED}


def _read_state(store: Store) -> dict[str, int]:
    try:
        data = read_file(store._timeline.fs, f"{store.path}/{PATROL}", _STATE_SIZE_MAX)
        return msgspec.json.decode(data, type=dict[str, int])
    except (FileNotFoundError, StorageError, msgspec.DecodeError):
        return {}  # none yet, or torn: the round begins anew


def _write_state(store: Store, checked: dict[str, int]) -> None:
    if store.is_read_only:
        return
    fs, temporary = store._timeline.fs, store._system.temporary_path(store.path)
    with contextlib.suppress(StorageError):  # a full disk: the next patrol checks the same files again
        replace_file(fs, temporary, f"{store.path}/{PATROL}", [msgspec.json.encode(checked)])
