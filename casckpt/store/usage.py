"""How many bytes a store takes, and what for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from casckpt.errors import CasckptError
from casckpt.ids import SnapshotId
from casckpt.objects.keeper import IndexKeeper
from casckpt.objects.packs import list_packs, pack_path
from casckpt.objects.timeline import Timeline
from casckpt.store.catalog import Catalog
from casckpt.store.values import Stats


def measure(
    root: str, timeline: Timeline, keeper: IndexKeeper, catalog: Catalog, snapshots: Sequence[SnapshotId]
) -> Stats:
    """Apparent sizes of all files; logical and new bytes summed over the snapshots that can be read."""
    fs = timeline.fs
    logical = new = 0
    for snapshot_id in snapshots:
        try:
            info = catalog.info(snapshot_id)
        except CasckptError:
            continue  # damaged: `verify` names it; its sizes are unknown
        logical += info.logical_bytes
        new += info.new_bytes
    packs = [fs.size(pack_path(root, pack_id)) or 0 for pack_id in list_packs(fs, root)]
    entries = [fs.size(timeline.path(seq)) or 0 for seq in timeline.file_numbers()]
    entries += [fs.size(timeline.epochs.path(number)) or 0 for number in timeline.epochs.numbers()]
    with keeper.kv.read() as txn:
        object_count = txn.count("objects")
    return Stats(
        snapshot_count=len(snapshots),
        run_count=len(catalog.runs()),
        object_count=object_count,
        pack_count=len(packs),
        entry_count=len(timeline.numbers()),
        logical_bytes=logical,
        new_bytes=new,
        pack_bytes=sum(packs),
        timeline_bytes=sum(entries),
        index_bytes=_folder_size(f"{root}/index"),
    )


def _folder_size(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(f"{folder}/{name}").st_size
            except OSError:
                continue  # a generation that was just replaced
    return total
