"""A handle that hears of a collection late: packs go while it applies the entries that speak of them.

Such a handle has an index of its own, as on another machine; nobody waits for it, since it reads nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from casckpt_gc import Retention

from casckpt.index.tables import CONDEMNED, decode_object, decode_pack_row, key_number
from casckpt.objects import keeper
from casckpt.testing.invariants import index_counts
from casckpt.testing.trees import difference
from tests.gc.collecting import collect, commit, noise, tree
from tests.unit.stores import open_store


@pytest.mark.parametrize("is_open", [False, True], ids=["opening", "open"])
@pytest.mark.parametrize("is_read", [False, True], ids=["before", "after"])
def test_pack_that_goes_while_its_table_is_read_leaves_no_wrong_places(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool, is_read: bool
) -> None:
    swept: list[int] = []
    read_rows = keeper._Packs.rows

    def rows(self: Any, pack_id: bytes) -> Any:
        found = read_rows(self, pack_id) if is_read else None
        if not swept:
            swept.append(1)  # first, for a collection reads packs as well
            collect(store, Retention(latest=1))
        return read_rows(self, pack_id) if found is None else found

    with open_store(store_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr("casckpt.index.place.INDEX_NAME", "index-elsewhere")
            if is_open:
                late = open_store(store_path, create=False)
                commit(store, 1, 2, 3, 4)
                patch.setattr(keeper._Packs, "rows", rows)
            else:
                commit(store, 1, 2, 3, 4)
                patch.setattr(keeper._Packs, "rows", rows)
                late = open_store(store_path, create=False)
            assert late.steps() == [4] and swept
        with late:
            other_table = tree(5) | {"frozen": {"table": noise(5)}}
            store.commit(5, other_table)
            collect(store, Retention(latest=1))
            assert late.steps() == [5]
            assert difference(other_table, late.restore()) is None
            assert index_counts(late) == index_counts(store)
            with late._keeper.kv.read() as txn:
                places = [place for _, row in txn.scan("objects") for place in decode_object(row)[1]]
                packs = {key_number(key): decode_pack_row(row)[1] for key, row in txn.scan("packs")}
            assert places and not any(packs[place.pack_no] == CONDEMNED for place in places if not place.is_inline)
