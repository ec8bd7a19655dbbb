"""Damage healed from what there is elsewhere: another copy of the store, a second record, or what was built on it.

A pack that another copy of the store has whole takes the place of the bad one. Where there is no such pack, the good
records are copied into a new one, the bad objects are read from wherever they can be had, each proven by its address,
and an entry condemns the old pack in favour of the new. What nothing can give back is named, and its pack stays where
it is: whatever part of it is good keeps being found. A timeline entry that cannot be read comes from the other copy,
where it is proven to be the same.

Where an object can be had, in this order: another record here; the other copy, however that has it stored; its
dependants. If B is stored as a difference to A, and B can be read without A (from the other copy, or from a record that
was made when A was found to be damaged), then A is B less the difference, bit for bit. Predictions and frames lead
nowhere back: many pasts have the same future.

Nothing is discarded: a pack that is replaced has a second name in `quarantine/` first. A repair that dies half way
leaves the store as damaged as before, or less, and is begun again. It does nothing unless it is told to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from casckpt.codec.contract import DIFFERENCE
from casckpt.digest import digest
from casckpt.errors import (
    CasckptError,
    CorruptionError,
    IncompleteError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from casckpt.format.document import COLLECTED
from casckpt.format.entry import TRAILER_SIZE, Condemn, EpochRef, PackRef
from casckpt.format.pack import PackRow
from casckpt.format.record import CHUNK
from casckpt.ids import ObjectId, PackId
from casckpt.index.tables import PENDING, Place, decode_object, epoch_count, epoch_refs, key_number
from casckpt.limits import BATCH_SIZE, ENTRY_SIZE_MAX
from casckpt.objects.epochs import entries_of
from casckpt.objects.packs import pack_path, read_rows
from casckpt.objects.writer import ObjectWriter
from casckpt.storage.fs import FileSystem, read_file, write_file
from casckpt.store.opening import add_feature
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt_gc.compact import pack_writer, read_record
from casckpt_gc.patrol import Finding, check_pack, needing, packs_of

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Heal(Value):
    """What becomes of one bad pack.

    Attributes:
        pack: its id.
        what: "replace" (from the other copy), "rewrite" (good records and healed objects into a new pack), or
            "complete" (healed objects into a new pack; the bad one stays, for something in it is lost).
        healed: objects that are read from elsewhere.
        derived: those of them that are computed from what was built on them.
        lost: objects that nothing gives back.
    """

    pack: str
    what: str
    healed: tuple[str, ...]
    derived: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class EntryHeal(Value):
    """What becomes of one timeline entry that cannot be read: it comes from the other copy, or stays lost."""

    seq: int
    is_healed: bool
    reason: str


@dataclass(frozen=True)
class Repair(Value):
    """What a repair found, and did or would do.

    Attributes:
        heals: one for each bad pack.
        entries: one for each bad timeline entry; what a lost one said, snapshots included, is not known any more.
        findings: the damage in packs.
        lost_by: (run, branch, step, component) that stay damaged.
        epochs: numbers of epochs that are damaged or missing here and whole in the other copy, which replaces them.
        lost_epochs: of those that are whole in neither.
        is_done: it was carried out.
    """

    heals: tuple[Heal, ...]
    entries: tuple[EntryHeal, ...]
    findings: tuple[Finding, ...]
    lost_by: tuple[tuple[str, str, int, str], ...]
    epochs: tuple[int, ...]
    lost_epochs: tuple[int, ...]
    is_done: bool

    def __str__(self) -> str:
        lines = [f"{len(self.findings)} findings in {len(self.heals)} packs"]
        lines += [
            f"pack {each.pack[:12]}: {each.what}, {len(each.healed)} objects healed, {len(each.derived)} of them from "
            f"dependants, {len(each.lost)} lost: no other record, no copy, and no difference leads back to them"
            for each in self.heals
        ]
        lines += [f"epoch {number} of the timeline: replace" for number in self.epochs]
        lines += [f"stays damaged: epoch {number} of the timeline" for number in self.lost_epochs]
        lines += [
            f"timeline entry {each.seq}: {'from the other copy' if each.is_healed else 'lost'} ({each.reason})"
            for each in self.entries
        ]
        lines += [
            f"stays damaged: {run}/{branch}@{step}, component {name!r}" for run, branch, step, name in self.lost_by
        ]
        return "\n".join([*lines, "done" if self.is_done else "nothing was changed: pass execute=True (--execute)"])


def repair(store: Store, source: Store | None = None, *, execute: bool = False) -> Repair:
    """Look at every pack and epoch, and heal what can be healed.

    Args:
        store: open for writing.
        source: another copy of the same store, whole where this one is not; may be read-only.
        execute: do it; otherwise only say what would be done.

    Cost: reads all packs of the store, and of the other copy those that are bad here.

    Raises:
        InvalidInputError: the other store is not a copy of this one.
        StorageError: a file cannot be read or written now.
    """
    if source is not None and source.store_id != store.store_id:
        raise InvalidInputError(
            f"{source.path} is store {source.store_id.hex()[:12]}, not a copy of {store.store_id.hex()[:12]}. Give a "
            "copy of this store.",
            path=source.path,
        )
    store._keeper.catch_up()
    entries = _entries(store, source)
    if execute and any(each.is_healed for each in entries):
        with store._writing("repair"):
            _replace_entries(store, source, entries)
    sizes = packs_of(store)
    findings = [each for pack in sizes for each in check_pack(store, PackId(bytes.fromhex(pack)), sizes[pack])[1]]
    by_pack: dict[str, list[Finding]] = {}
    for each in findings:
        by_pack.setdefault(each.pack, []).append(each)
    healer = _Healer(store, source, by_pack)
    heals = tuple(healer.plan(pack, sizes[pack], found) for pack, found in by_pack.items())
    lost = [each for each in findings if _is_lost(each, heals)]
    lost_by = needing(store, lost) if lost else ()
    epochs = bad_epochs(store)
    lost_epochs = [ref for ref in epochs if source is None or not _is_whole(source, ref)]
    found_epochs = [ref for ref in epochs if ref not in lost_epochs]
    if execute and (heals or found_epochs):
        with store._writing("repair"):
            if heals:
                add_feature(store, COLLECTED)
            for heal in heals:
                healer.carry_out(heal, sizes[heal.pack])
            for ref in found_epochs:
                healer.replace_epoch(ref)
            store._keeper.reader.forget_files()
            if found_epochs or store._catalog.pending_packs():
                store._keeper.rebuild()
    found_numbers, lost_numbers = (tuple(ref.number for ref in refs) for refs in (found_epochs, lost_epochs))
    return Repair(heals, entries, tuple(findings), lost_by, found_numbers, lost_numbers, execute)


def bad_epochs(store: Store) -> list[EpochRef]:
    """Epochs that are not as their seal says; one that is missing, while its entries have files, can still be made."""
    with store._keeper.kv.read() as txn:
        refs = epoch_refs(txn)
    return [ref for ref in refs if not _is_whole(store, ref) and not _can_be_made(store, ref)]


def _is_whole(store: Store, ref: EpochRef) -> bool:
    try:
        store._timeline.epochs.check(ref)
    except CorruptionError:
        return False
    return True


def _can_be_made(store: Store, ref: EpochRef) -> bool:
    timeline = store._timeline
    if timeline.fs.size(timeline.epochs.path(ref.number)) is not None:
        return False
    return all(timeline.fs.size(timeline.path(seq)) is not None for seq in entries_of(ref.number))


def _is_in_epoch(store: Store, seq: int) -> bool:
    """Whether an entry is sealed and has no file of its own that could still become part of its epoch."""
    timeline = store._timeline
    with store._keeper.kv.read() as txn:
        is_sealed = seq < entries_of(epoch_count(txn)).start
    return is_sealed and (timeline.epochs.size(seq) is not None or timeline.fs.size(timeline.path(seq)) is None)


def _entries(store: Store, source: Store | None) -> tuple[EntryHeal, ...]:
    found = []
    for bad in store._catalog.bad_entries():
        if _is_in_epoch(store, bad.seq):
            continue  # healed with the others of its epoch
        is_healed = source is not None and _entry_of(store, source, bad.seq) is not None
        found.append(EntryHeal(bad.seq, is_healed, bad.reason))
    return tuple(found)


def _entry_of(store: Store, source: Store, seq: int) -> bytes | None:
    """The bytes of an entry in the other copy, where they are proven to be this store's: the next entry links to them,
    or the damaged file still ends with their digest. Two copies may have gone on differently."""
    timeline = store._timeline
    try:
        entry = source._timeline.read(seq)
        data = read_file(source._timeline.fs, source._timeline.path(seq), ENTRY_SIZE_MAX)
    except (NotFoundError, CorruptionError, FileNotFoundError):
        return None
    proofs = []
    with contextlib.suppress(NotFoundError, CorruptionError):
        proofs.append(timeline.read(seq + 1).envelope.previous)
    with contextlib.suppress(FileNotFoundError, StorageError):
        proofs.append(read_file(timeline.fs, timeline.path(seq), ENTRY_SIZE_MAX)[-TRAILER_SIZE:])
    return data if entry.digest in proofs and data[-TRAILER_SIZE:] == entry.digest else None


def _replace_entries(store: Store, source: Store | None, entries: Iterable[EntryHeal]) -> None:
    """Put entries of the other copy in place of bad ones, which get a second name first; the index is made anew."""
    assert source is not None
    fs, folder = store._timeline.fs, f"{store.path}/{QUARANTINE}"
    fs.make_folder(folder)
    for each in entries:
        data = _entry_of(store, source, each.seq)
        if data is None:
            continue
        path, temporary = store._timeline.path(each.seq), store._system.temporary_path(store.path)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            fs.link(path, f"{folder}/entry-{each.seq}")
        fs.sync_folder(folder)
        write_file(fs, temporary, [data])
        fs.make_folder(path.rpartition("/")[0])
        fs.rename(temporary, path)
        fs.sync_folder(path.rpartition("/")[0])
    store._keeper.rebuild()


def _is_lost(finding: Finding, heals: Iterable[Heal]) -> bool:
    heal = next(each for each in heals if each.pack == finding.pack)
    return bool(heal.lost) and (finding.object_id in heal.lost or not finding.object_id)


class _Healer:
    """Plans and does what `repair` says, one pack at a time."""

    def __init__(self, store: Store, source: Store | None, packs: Iterable[str]) -> None:
        self._store = store
        self._source = source
        self._hopeless: set[ObjectId] = set()  # what nothing gives back
        self._known: dict[str, set[str]] = {pack: set() for pack in packs}
        with store._keeper.kv.read() as txn:
            keys = {pack: txn.get("pack_ids", bytes.fromhex(pack)) for pack in self._known}
            numbers = {key_number(key): pack for pack, key in keys.items() if key is not None}
            for object_id, row in txn.scan("objects") if numbers else ():
                for place in decode_object(row)[1]:
                    if place.pack_no in numbers:
                        self._known[numbers[place.pack_no]].add(object_id.hex())

    def plan(self, pack: str, size: int, found: list[Finding]) -> Heal:
        """What is bad is everything that the pack should hold and that was not found good in it."""
        pack_id = PackId(bytes.fromhex(pack))
        there = {row.object_id.hex() for row in self._rows(pack_id)}
        bad = {each.object_id for each in found if each.object_id} | (self._known[pack] - there)
        if self._source is not None and not check_pack(self._source, pack_id, size)[1]:
            return Heal(pack, "replace", tuple(sorted(bad)), (), ())
        read = {each for each in bad if self._read(ObjectId(bytes.fromhex(each))) is not None}
        derived = {each for each in bad - read if self._derive(ObjectId(bytes.fromhex(each))) is not None}
        lost = tuple(sorted(bad - read - derived))
        is_understood = bool(there or bad)  # else nobody knows what it held: it may still be replaced one day
        what = "rewrite" if is_understood and not lost else "complete"
        return Heal(pack, what, tuple(sorted(read | derived)), tuple(sorted(derived)), lost)

    def _read(self, object_id: ObjectId) -> bytes | None:
        """An object's plain bytes, proven, from a good record here or from the other copy."""
        for place in (self._store, self._source):
            if place is None:
                continue
            with contextlib.suppress(CorruptionError, IncompleteError, NotFoundError):
                return place._keeper.reader.read(object_id)
        return None

    def _derive(self, object_id: ObjectId) -> bytes | None:
        """An object computed from a difference to it, proven; what was built on it may have to be derived first."""
        from casckpt.codec.difference import base_of

        if object_id in self._hopeless:
            return None
        self._hopeless.add(object_id)
        reader = self._store._keeper.reader
        for user, place in self._users.get(object_id, ()):
            plain = self._read(user) or self._derive(user)
            if plain is None:
                continue
            with contextlib.suppress(CorruptionError, IncompleteError):
                header, payload = reader.read_record(user, place)
                found = bytes(base_of(header.params, payload, memoryview(plain)))
                if digest(found) == object_id:
                    self._hopeless.remove(object_id)
                    return found
        return None

    @functools.cached_property
    def _users(self) -> dict[ObjectId, list[tuple[ObjectId, Place]]]:
        """All differences by their base. Costs one pass over the rows of all objects."""
        users: dict[ObjectId, list[tuple[ObjectId, Place]]] = {}
        with self._store._keeper.kv.read() as txn:
            for object_id, row in txn.scan("objects"):
                for place in decode_object(row)[1]:
                    if place.codec == DIFFERENCE:
                        users.setdefault(place.bases[0], []).append((ObjectId(object_id), place))
        return users

    def carry_out(self, heal: Heal, size: int) -> None:
        """Heal one pack; durable when it returns."""
        self._quarantine(PackId(bytes.fromhex(heal.pack)))
        if heal.what == "replace":
            self._replace(PackId(bytes.fromhex(heal.pack)), size)
            with self._store._keeper.kv.write() as txn:
                for object_id in heal.healed:
                    txn.delete("damage", bytes.fromhex(object_id))
                txn.delete("meta", PENDING + bytes.fromhex(heal.pack))
        elif heal.what == "rewrite" or heal.healed:
            self._write_anew(heal)

    def _quarantine(self, pack_id: PackId) -> None:
        self._keep(pack_path(self._store.path, pack_id), pack_id.hex())

    def _keep(self, path: str, name: str) -> None:
        """Give a file that is to be replaced a second name in `quarantine/`."""
        fs, folder = self._store._timeline.fs, f"{self._store.path}/{QUARANTINE}"
        fs.make_folder(folder)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            fs.link(path, f"{folder}/{name}")
        fs.sync_folder(folder)

    def replace_epoch(self, ref: EpochRef) -> None:
        """Take an epoch from the other copy; durable when it returns."""
        assert self._source is not None
        ours, theirs = (each._timeline.epochs for each in (self._store, self._source))
        self._keep(ours.path(ref.number), f"epoch-{ref.number}")
        self._take(theirs.path(ref.number), ours.path(ref.number), ref.size)

    def _replace(self, pack_id: PackId, size: int) -> None:
        assert self._source is not None
        self._take(pack_path(self._source.path, pack_id), pack_path(self._store.path, pack_id), size)

    def _take(self, path: str, target: str, size: int) -> None:
        """A file of the other copy in place of ours; durable when it returns."""
        assert self._source is not None
        fs = self._store._timeline.fs
        temporary = self._store._system.temporary_path(self._store.path)
        try:
            _copy(self._source._timeline.fs, path, fs, temporary, size)
            folder = target.rpartition("/")[0]
            fs.make_folder(folder)
            fs.rename(temporary, target)
            fs.sync_folder(folder)
        except (CasckptError, OSError):
            with contextlib.suppress(StorageError, FileNotFoundError):
                fs.unlink(temporary)
            raise

    def _write_anew(self, heal: Heal) -> None:
        """A new pack, and the entry that makes it part of the store; the old one is condemned if nothing is lost."""
        store, pack_id = self._store, PackId(bytes.fromhex(heal.pack))
        writer = pack_writer(store)
        try:
            rows = self._rows(pack_id)
            kinds = {row.object_id: row.kind for row in rows}
            if heal.what == "rewrite":
                self._copy_good(pack_id, rows, set(heal.healed), writer)
            for name in heal.healed:
                object_id = ObjectId(bytes.fromhex(name))
                plain = self._read(object_id) or self._derive(object_id)
                if plain is None:
                    raise CorruptionError(
                        f"object {name[:12]} could be read before, and cannot now. Nothing was changed. Run it again.",
                        object_id=object_id,
                    )
                writer.add_all([(kinds.get(object_id, CHUNK), plain)])
            replacements = writer.publish().packs
        finally:
            writer.abort()
        self._publish([pack_id] if heal.what == "rewrite" else [], replacements)

    def _rows(self, pack_id: PackId) -> list[PackRow]:
        store = self._store
        try:
            return read_rows(store._timeline.fs, store.path, pack_id, store.store_id)[0]
        except (FileNotFoundError, CorruptionError):
            return []

    def _copy_good(self, pack_id: PackId, rows: Iterable[PackRow], bad: set[str], writer: ObjectWriter) -> None:
        good = [row for row in rows if row.object_id.hex() not in bad]
        if not good:
            return
        file = self._store._timeline.fs.open(pack_path(self._store.path, pack_id))
        try:
            for row in good:
                writer.add_record(*read_record(file, row))
        finally:
            file.close()

    def _publish(self, packs: list[bytes], replacements: list[PackRef]) -> None:
        keeper = self._store._keeper
        while True:
            keeper.catch_up()
            entry = self._store._committer.append(Condemn(packs, replacements), keeper.applied())
            if entry is not None:
                keeper.catch_up_after_commit(entry, {})
                return


def _copy(source: FileSystem, path: str, fs: FileSystem, target: str, size: int) -> None:
    """A file copied, and durable."""
    reading = source.open(path)
    try:
        buffer = memoryview(bytearray(BATCH_SIZE))
        starts = range(0, size, BATCH_SIZE)
        write_file(fs, target, (buffer[: reading.read_into(buffer[: min(BATCH_SIZE, size - at)], at)] for at in starts))
    finally:
        reading.close()
