"""Looking for silent damage a little at a time: packs checked in turn, the one checked longest ago first.

A patrol reads packs within a budget of bytes and seconds and compares every record with its own check: bit rot is found
whether anybody restores that step or not. Which pack was checked when is kept in the file `patrol` of the store, in
numbers of checks, not in times; losing it only means to begin anew. What is damaged is noted in the index, so that
commits store it again as soon as they have it in memory, and reported by run, branch, step and component.

It also looks at the disk: how much is free, and how long a small durable write takes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from casckpt.digest import check16
from casckpt.errors import CorruptionError, IncompleteError, InvalidInputError, StorageError
from casckpt.format.record import decode_header
from casckpt.ids import ObjectId, PackId, SnapshotId
from casckpt.index.tables import CONDEMNED, decode_pack_row, key_number
from casckpt.objects import graph
from casckpt.objects.packs import check_frame, pack_path, read_rows
from casckpt.storage.fs import File, is_about_file, read_file, write_file
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt_gc.mark import objects_below, roots

PATROL = "patrol"
_STATE_SIZE_MAX = 64 << 20


class Finding(NamedTuple):
    """A record that is not as it was written, or, with offset −1, a pack that is missing or has no table."""

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
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInputError(f"{name}={value!r}: expected a number.")


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
        checked_count, pack_count: packs checked now, and packs in all.
        read_bytes: of packs.
        findings: damage in those checked now.
        needed_by: (run, branch, step, component) that cannot be restored because of it.
        health: of the disk.
    """

    checked_count: int
    pack_count: int
    read_bytes: int
    findings: tuple[Finding, ...]
    needed_by: tuple[tuple[str, str, int, str], ...]
    health: Health

    @property
    def ok(self) -> bool:
        """No damage, and a disk that is well."""
        return not self.findings and self.health.state == "good"

    def __str__(self) -> str:
        lines = [f"checked {self.checked_count} of {self.pack_count} packs: {len(self.findings)} findings"]
        lines += [f"pack {each.pack[:12]}: {each.reason}" for each in self.findings[:20]]
        users = self.needed_by[:20]
        lines += [f"needed by {run}/{branch}@{step}, component {name!r}" for run, branch, step, name in users]
        lines.append(f"disk: {self.health.free_bytes} bytes free, a small write takes {self.health.write_s:.3f} s")
        return "\n".join(lines)


def patrol(store: Store, *, budget_bytes: int = 1 << 30, budget_s: float = 60.0, limits: Limits = LIMITS) -> Patrolled:
    """Check packs until a budget is used up; at least one.

    Args:
        store: open for writing, or what was seen is not kept.
        budget_bytes: of packs read.
        budget_s: seconds of this process's monotonic clock.
        limits: for the disk.

    Raises:
        StorageError: a file cannot be looked at now, which says nothing of its content.
    """
    store._keeper.catch_up()
    packs = packs_of(store)
    checked = {pack: number for pack, number in _read_state(store).items() if pack in packs}
    started_s = store._system.monotonic_s()
    findings: list[Finding] = []
    done = read = 0
    for pack in sorted(packs, key=lambda each: (checked.get(each, -1), each)):
        size, found = check_pack(store, PackId(bytes.fromhex(pack)), packs[pack])
        findings += found
        checked[pack] = max(checked.values(), default=0) + 1
        done, read = done + 1, read + size
        if read >= budget_bytes or store._system.monotonic_s() - started_s >= budget_s:
            break
    needed_by: tuple[tuple[str, str, int, str], ...] = ()
    if findings:
        store._keeper.catch_up()
        still = packs_of(store)  # not those that a collector took meanwhile
        findings = [each for each in findings if each.pack in still]
    if findings:
        store._keeper.mark_damage({bytes.fromhex(each.object_id): each.reason for each in findings if each.object_id})
        needed_by = needing(store, findings)
    if not store.is_read_only:
        _write_state(store, checked)
    return Patrolled(done, len(packs), read, tuple(findings), needed_by, health(store, limits))


def check_pack(store: Store, pack_id: PackId, expected_size: int) -> tuple[int, list[Finding]]:
    """Read one pack and compare everything with its checks; returns bytes read, and what is wrong."""
    fs, root, name = store._timeline.fs, store.path, pack_id.hex()
    size = fs.size(pack_path(root, pack_id))
    if size is None:
        return 0, [Finding(name, -1, "", "is missing")]
    findings = []
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
        return 0, [*findings, Finding(name, -1, "", f"cannot be read: {error}")]
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


def needing(store: Store, findings: Iterable[Finding]) -> tuple[tuple[str, str, int, str], ...]:
    """Run, branch, step and component of everything that cannot be decoded because of these findings."""
    bad_packs, bad_places = _places(store, findings)
    snapshots = {}
    for snapshot_id in sorted(roots(store)):
        with contextlib.suppress(CorruptionError, IncompleteError):
            snapshots[snapshot_id] = store._catalog.load(snapshot_id)
    found = []
    lost: dict[bytes, bool] = {}
    for snapshot_id, snapshot in snapshots.items():
        thinned = store._catalog.thinned(SnapshotId(snapshot_id))
        for name, ref in snapshot.components.items():
            if name in thinned:
                continue
            if ref.manifest not in lost:
                lost[ref.manifest] = _is_lost(store, ObjectId(ref.manifest), bad_packs, bad_places)
            if lost[ref.manifest]:
                found.append((snapshot.run, snapshot.branch, snapshot.step, name))
    return tuple(sorted(found))


def _is_lost(store: Store, manifest: ObjectId, bad_packs: set[int], bad_places: set[tuple[int, int]]) -> bool:
    try:
        objects = objects_below(store, manifest, set())
    except (CorruptionError, IncompleteError):
        return True  # the manifest itself
    with store._keeper.kv.read() as txn:
        places = graph.reach(objects, txn)
    good = graph.settle(
        places, lambda _, place: place.pack_no not in bad_packs and (place.pack_no, place.offset) not in bad_places, {}
    )
    return any(each not in good for each in objects)


def _places(store: Store, findings: Iterable[Finding]) -> tuple[set[int], set[tuple[int, int]]]:
    """Findings by the index's numbers: packs that are bad as a whole, and places of records."""
    packs, places = set(), set()
    with store._keeper.kv.read() as txn:
        for each in findings:
            key = txn.get("pack_ids", bytes.fromhex(each.pack))
            if key is None:
                continue
            if each.offset < 0 and "missing" in each.reason:
                packs.add(key_number(key))
            elif each.offset >= 0:
                places.add((key_number(key), each.offset))
    return packs, places


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
    fs, temporary = store._timeline.fs, store._system.temporary_path(store.path)
    with contextlib.suppress(StorageError):  # a full disk: the next patrol checks the same packs again
        file = fs.create(temporary)
        try:
            file.write([msgspec.json.encode(checked)], 0)
        finally:
            file.close()
        fs.rename(temporary, f"{store.path}/{PATROL}")
