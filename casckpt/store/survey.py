"""Where a store's bytes are: by run and component, by kind of file, and what nothing refers to.

Each record counts once, for the first snapshot in publication order that needs its object: what a later one shares is
free. So the parts add up to the whole. What is needed only by retired snapshots, and what is needed by none, is told
apart: a collector may take both, but only the second is an accident.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from casckpt.format.entry import Commit, Supersede
from casckpt.format.snapshot import parts_of
from casckpt.ids import ObjectId, SnapshotId
from casckpt.index.tables import decode_object, decode_pack_row
from casckpt.objects.packs import list_packs, pack_path
from casckpt.storage.process import owner_of
from casckpt.store.store import Store
from casckpt.store.values import Snapshot, Value
from casckpt.store.wholeness import FLAWS

_MEASURED = ("casckpt.json", "packs", "timeline", "index", "tmp")


@dataclass(frozen=True)
class Share(Value):
    """What one component of one run takes. `logical_bytes` and `new_bytes` are summed over its snapshots."""

    run: str
    component: str
    snapshot_count: int
    logical_bytes: int
    new_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Leftover(Value):
    """A file in `tmp/`. `owner` is "running", "dead", or "unknown" (another machine or boot: perhaps of a copy)."""

    name: str
    size_bytes: int
    pid: int | None
    owner: str


@dataclass(frozen=True)
class Survey(Value):
    """Bytes of a store folder.

    Attributes:
        shares: by run and component; snapshots that are not retired.
        packs, timeline, index, tmp, document, other: (files, bytes).
        retired_bytes: records that only retired snapshots need.
        unreferenced_bytes: records that no readable snapshot needs.
        duplicate_bytes: second and further records of one object.
        unnamed_packs: pack files that no readable timeline entry names: left by commits that never finished, unless
            entries are unreadable.
        unreadable_count: snapshots and timeline entries that cannot be read; what they need counts as not referenced.
    """

    shares: tuple[Share, ...]
    packs: tuple[int, int]
    timeline: tuple[int, int]
    index: tuple[int, int]
    tmp: tuple[int, int]
    document: tuple[int, int]
    other: tuple[int, int]
    retired_bytes: int
    unreferenced_bytes: int
    duplicate_bytes: int
    unnamed_packs: tuple[tuple[str, int], ...]
    leftovers: tuple[Leftover, ...]
    unreadable_count: int

    @property
    def total_bytes(self) -> int:
        kinds = (self.packs, self.timeline, self.index, self.tmp, self.document, self.other)
        return sum(size for _, size in kinds)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "total_bytes": self.total_bytes}


def survey(store: Store, progress: Callable[[int, int], None] | None = None) -> Survey:
    """Measure a store. Costs reading every timeline entry and manifest, and one pass over the index.

    Args:
        store: open; may be read-only.
        progress: called with (snapshots done, snapshots in all).
    """
    store._keeper.catch_up()
    walk = _Walk(store)
    walk.run(progress)
    walk.add_named_packs()
    root = store.path
    names = os.listdir(root)
    pack_sizes = {pack_id: _size(pack_path(root, pack_id)) for pack_id in list_packs(store._timeline.fs, root)}
    held, unreferenced, duplicates = walk.split_records()
    unnamed = sorted((pack_id.hex(), size) for pack_id, size in pack_sizes.items() if pack_id not in walk.named_packs)
    return Survey(
        shares=walk.shares(),
        packs=_measure(f"{root}/packs"),
        timeline=_measure(f"{root}/timeline"),
        index=_measure(f"{root}/index"),
        tmp=_measure(f"{root}/tmp"),
        document=_measure(f"{root}/casckpt.json"),
        other=_sum(_measure(f"{root}/{name}") for name in names if name not in _MEASURED),
        retired_bytes=held,
        unreferenced_bytes=unreferenced,
        duplicate_bytes=duplicates,
        unnamed_packs=tuple(unnamed),
        leftovers=tuple(leftovers(root)),
        unreadable_count=walk.unreadable_count,
    )


def leftovers(root: str) -> Iterator[Leftover]:
    """Files in `tmp/`, and whether the process that made each is still there.

    Names are those of `System.temporary_path`.
    """
    try:
        names = sorted(os.listdir(f"{root}/tmp"))
    except OSError:
        return
    for name in names:
        yield Leftover(name, _size(f"{root}/tmp/{name}"), *owner_of(name))


class _Walk:
    """One pass over all snapshots, first those that are not retired, in the order of publication."""

    def __init__(self, store: Store) -> None:
        self._catalog, self._keeper, self._timeline = store._catalog, store._keeper, store._timeline
        self._ids = store._all_ids()
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._seen: set[ObjectId] = set()
        self._retired_bytes = 0
        self.named_packs: set[bytes] = set()
        self.unreadable_count = len(store._catalog.bad_entries())

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        retired = []
        for done, snapshot_id in enumerate(self._ids, 1):
            if self._catalog.row(snapshot_id).is_retired:
                retired.append(snapshot_id)
            else:
                self._add(snapshot_id, is_retired=False)
            if progress is not None:
                progress(done, len(self._ids))
        for snapshot_id in retired:
            self._add(snapshot_id, is_retired=True)

    def _add(self, snapshot_id: SnapshotId, *, is_retired: bool) -> None:
        try:
            snapshot = self._catalog.info(snapshot_id)
            body = self._timeline.read(snapshot.seq).envelope.body
        except FLAWS:
            self.unreadable_count += 1  # `verify` says why
            return
        if isinstance(body, Commit | Supersede):
            self.named_packs |= {pack.pack_id for pack in body.packs}
        context = self._catalog.load(snapshot_id).context
        stored = self._take([ObjectId(context)]) if context else 0
        self._retired_bytes += stored if is_retired else 0
        self._add_components(snapshot, is_retired=is_retired)

    def _add_components(self, snapshot: Snapshot, *, is_retired: bool) -> None:
        for name, component in snapshot.components.items():
            if name in snapshot.thinned:
                continue
            stored = self._take_component(ObjectId(bytes.fromhex(component.manifest)))
            if is_retired:
                self._retired_bytes += stored
                continue
            sums = self._sums.setdefault((snapshot.run, name), [0, 0, 0, 0])
            for at, value in enumerate((1, component.logical_bytes, component.new_bytes, stored)):
                sums[at] += value

    def _take_component(self, address: ObjectId) -> int:
        if address in self._seen:
            return 0
        try:
            manifest = self._catalog.manifest(address)
            nodes = self._catalog.node_ids(manifest)
            own = self._take([address, ObjectId(manifest.structure), *nodes, *self._catalog.chunk_ids(manifest)])
            return own + sum(self._take_component(ObjectId(part.manifest)) for part in parts_of(manifest))
        except FLAWS:
            return self._take([address])  # what lies below a damaged manifest is not known

    def _take(self, ids: list[ObjectId]) -> int:
        """Stored bytes of those objects that no earlier snapshot needed."""
        fresh = [each for each in dict.fromkeys(ids) if each not in self._seen]
        self._seen.update(fresh)
        places = self._keeper.reader.locate(fresh)
        return sum(found[0].header_size + found[0].stored_size for found in places if found)

    def split_records(self) -> tuple[int, int, int]:
        """Bytes of records that only retired snapshots need, that none needs, and that are not the first of theirs."""
        unreferenced = duplicates = 0
        with self._keeper.kv.read() as txn:
            for object_id, row in txn.scan("objects"):
                sizes = [place.header_size + place.stored_size for place in decode_object(row)[1]]
                if ObjectId(object_id) not in self._seen:
                    unreferenced += sum(sizes)
                else:
                    duplicates += sum(sizes[1:])
        return self._retired_bytes, unreferenced, duplicates

    def add_named_packs(self) -> None:
        """Those that no commit names but a collector's entry: copies of what was needed of others."""
        if self._keeper.last_condemned() >= 0:
            with self._keeper.kv.read() as txn:
                self.named_packs |= {decode_pack_row(row)[0] for _, row in txn.scan("packs")}

    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(run, name, *sums) for (run, name), sums in sorted(self._sums.items()))


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0  # gone since it was listed


def _measure(path: str) -> tuple[int, int]:
    """Files under a path, itself included if it is one, and their bytes. Links are not followed."""
    if not os.path.isdir(path) or os.path.islink(path):
        return (1, _size(path)) if os.path.lexists(path) else (0, 0)
    sizes = [_size(f"{folder}/{name}") for folder, _, names in os.walk(path) for name in names]
    return len(sizes), sum(sizes)


def _sum(measured: Iterator[tuple[int, int]]) -> tuple[int, int]:
    found = list(measured)
    return sum(count for count, _ in found), sum(size for _, size in found)
