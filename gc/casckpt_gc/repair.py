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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from casckpt.codec.contract import DIFFERENCE
from casckpt.digest import digest
from casckpt.errors import (
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
from casckpt.index.tables import PENDING, Place, decode_object, epoch_count
from casckpt.limits import BATCH_SIZE, ENTRY_SIZE_MAX
from casckpt.objects.epochs import entries_of
from casckpt.objects.packs import pack_path
from casckpt.objects.writer import ObjectWriter
from casckpt.storage.fs import FileSystem, read_file, replace_file
from casckpt.store.opening import add_feature
from casckpt.store.store import Store
from casckpt.store.values import Value
from casckpt_gc.compact import pack_writer, read_record
from casckpt_gc.mark import is_condemned
from casckpt_gc.patrol import (
    Finding,
    User,
    check_epoch,
    check_pack,
    epochs_of,
    is_readable,
    needed_by,
    note_unreadable,
    packs_of,
    rows_of,
    user_text,
    with_missing,
)
from casckpt_gc.seal import remake

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
        epochs: numbers of epochs that are damaged or missing here, and are made anew from what is good here and in the
            other copy, in epochs or in files of entries.
        lost_epochs: of those of which some entry is good in neither.
        is_done: it was carried out.
    """

    heals: tuple[Heal, ...]
    entries: tuple[EntryHeal, ...]
    findings: tuple[Finding, ...]
    lost_by: tuple[User, ...]
    epochs: tuple[int, ...]
    lost_epochs: tuple[int, ...]
    is_done: bool

    def __str__(self) -> str:
        return self.text("pass execute=True")

    def text(self, next_step: str) -> str:
        """For people. `next_step`: how what was only planned is carried out."""
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
        lines += [f"stays damaged: {user_text(each)}" for each in self.lost_by]
        is_needed = self.heals or self.epochs or any(each.is_healed for each in self.entries)
        if is_needed:
            return "\n".join([*lines, "done" if self.is_done else f"nothing was changed: {next_step} to heal"])
        return "\n".join([*lines, "nothing of it can be healed" if self.entries or self.lost_epochs else "all is well"])


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
    found = [each for pack in sizes for each in check_pack(store, PackId(bytes.fromhex(pack)), sizes[pack])[1]]
    findings = with_missing(store, found)
    by_pack: dict[str, list[Finding]] = {}
    for each in findings:
        by_pack.setdefault(each.pack, []).append(each)
    healer = _Healer(store, source)
    heals = tuple(healer.plan(pack, sizes[pack], found) for pack, found in by_pack.items())
    lost = {ObjectId(bytes.fromhex(each)) for heal in heals for each in heal.lost}
    epochs = [ref for ref in epochs_of(store).values() if check_epoch(store, ref)[1]]
    copies = [each for each in (store, source) if each is not None]
    found_epochs = [ref for ref in epochs if remake(copies, ref) is not None]
    lost_epochs = [ref for ref in epochs if ref not in found_epochs]
    unreadable = {seq for ref in lost_epochs for seq in note_unreadable(store, ref)}
    lost_by = needed_by(store, lost, unreadable)
    if execute and (heals or found_epochs):
        with store._writing("repair"):
            if heals:
                add_feature(store, COLLECTED)
            for heal in heals:
                healer.carry_out(heal, sizes[heal.pack])
            for ref in found_epochs:
                healer.replace_epoch(ref, remake(copies, ref))
            store._keeper.reader.forget_files()
            store._keeper.rebuild()  # manifests that come back count from now on
    found_numbers, lost_numbers = (tuple(ref.number for ref in refs) for refs in (found_epochs, lost_epochs))
    return Repair(heals, entries, tuple(findings), lost_by, found_numbers, lost_numbers, execute)


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
        path = store._timeline.path(each.seq)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            fs.link(path, f"{folder}/entry-{each.seq}")
        fs.sync_folder(folder)
        _put(store, path, [data])
    store._keeper.rebuild(at_least=store._keeper.applied().seq)  # a newest entry that is missing stays known


class _Healer:
    """Plans and does what `repair` says, one pack at a time."""

    def __init__(self, store: Store, source: Store | None) -> None:
        self._store = store
        self._source = source
        self._hopeless: set[ObjectId] = set()  # what nothing gives back

    def plan(self, pack: str, size: int, found: list[Finding]) -> Heal:
        """What is bad is everything that the pack should hold and that was not found good in it."""
        pack_id = PackId(bytes.fromhex(pack))
        bad = {each.object_id for each in found if each.object_id}
        if self._source is not None and not check_pack(self._source, pack_id, size)[1]:
            return Heal(pack, "replace", tuple(sorted(bad)), (), ())
        read = {each for each in bad if self._read(ObjectId(bytes.fromhex(each))) is not None}
        derived = {each for each in bad - read if self._derive(ObjectId(bytes.fromhex(each))) is not None}
        lost = tuple(sorted(bad - read - derived))
        # Where nobody knows what it held, it may still be replaced one day.
        is_understood = bool(bad or rows_of(self._store, pack_id))
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
        else:
            while not self._write_anew(heal):
                pass  # a collection took the new pack, which nothing named yet, for one that was left behind

    def _quarantine(self, pack_id: PackId) -> None:
        self._keep(pack_path(self._store.path, pack_id), pack_id.hex())

    def _keep(self, path: str, name: str) -> None:
        """Give a file that is to be replaced a second name in `quarantine/`."""
        fs, folder = self._store._timeline.fs, f"{self._store.path}/{QUARANTINE}"
        fs.make_folder(folder)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            fs.link(path, f"{folder}/{name}")
        fs.sync_folder(folder)

    def replace_epoch(self, ref: EpochRef, encoded: bytes | None) -> None:
        """Put an epoch in its place; durable when it returns."""
        assert encoded is not None
        path = self._store._timeline.epochs.path(ref.number)
        self._keep(path, f"epoch-{ref.number}")
        _put(self._store, path, [encoded])

    def _replace(self, pack_id: PackId, size: int) -> None:
        assert self._source is not None
        with _parts(self._source._timeline.fs, pack_path(self._source.path, pack_id), size) as parts:
            _put(self._store, pack_path(self._store.path, pack_id), parts)

    def _write_anew(self, heal: Heal) -> bool:
        """A new pack, and the entry that makes it part of the store; the old one is condemned if nothing is lost.

        Where it stays, what another record here gives is not written. Returns whether it was published.
        """
        store, pack_id = self._store, PackId(bytes.fromhex(heal.pack))
        is_whole = heal.what == "rewrite"
        wanted = [each for each in heal.healed if is_whole or not is_readable(store, ObjectId(bytes.fromhex(each)))]
        if not (is_whole or wanted):
            return True
        writer = pack_writer(store)
        try:
            rows = rows_of(store, pack_id)
            kinds = {row.object_id: row.kind for row in rows}
            if is_whole:
                self._copy_good(pack_id, rows, set(heal.healed), writer)
            for name in wanted:
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
        return self._publish([pack_id] if is_whole else [], replacements)

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

    def _publish(self, packs: list[bytes], replacements: list[PackRef]) -> bool:
        keeper = self._store._keeper
        while True:
            keeper.catch_up()
            applied = keeper.applied()
            if is_condemned(self._store, [each.pack_id for each in replacements]):
                return False
            entry = self._store._committer.append(Condemn(packs, replacements), applied)
            if entry is not None:
                keeper.catch_up_after_commit(entry, {})
                return True


def _put(store: Store, target: str, parts: Iterable[bytes | memoryview]) -> None:
    """A file in place of a bad or missing one; durable when this returns."""
    fs, folder = store._timeline.fs, target.rpartition("/")[0]
    fs.make_folder(folder)
    replace_file(fs, store._system.temporary_path(store.path), target, parts)
    fs.sync_folder(folder)


@contextlib.contextmanager
def _parts(fs: FileSystem, path: str, size: int) -> Iterator[Iterator[memoryview]]:
    """A file of this size, piece after piece in the same memory."""
    file = fs.open(path)
    try:
        buffer = memoryview(bytearray(BATCH_SIZE))
        yield (buffer[: file.read_into(buffer[: min(BATCH_SIZE, size - at)], at)] for at in range(0, size, BATCH_SIZE))
    finally:
        file.close()
