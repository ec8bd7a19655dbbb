"""Whether what a snapshot needs is here, told from tables and sizes of files; no state is read.

An object is here when one of its places lies in a file of the right size. What no file holds is damage, unless files
are missing that may hold it: then the snapshot is incomplete, as in a copy under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from casckpt.errors import CasckptError, UnsupportedFormatError
from casckpt.ids import ObjectId, short
from casckpt.index.kv import KvReader
from casckpt.index.tables import Place, decode_object, decode_pack_row, number_key
from casckpt.objects.packs import pack_path
from casckpt.store.store import Store
from casckpt.store.values import Snapshot


class Flaw(NamedTuple):
    """Why something is not whole: "damaged" or "incomplete", and what is wrong where."""

    state: str
    reason: str


class WholenessCheck:
    """Looks at each component and each file once; its answers are those of the moment it was made."""

    def __init__(self, store: Store) -> None:
        self._root, self._fs = store.path, store._timeline.fs
        self._timeline, self._keeper, self._catalog = store._timeline, store._keeper, store._catalog
        packs = [f"pack {row.pack_id.hex()} is" for row in self._catalog.pending_packs() if row.found_size < 0]
        entries = [f"timeline entry {row.seq} is" for row in self._catalog.bad_entries() if row.found_size < 0]
        missing = packs + entries
        self._missing = missing[0] if missing else ""
        if len(missing) > 1:
            self._missing = f"{missing[0]} missing, {len(missing) - 1} more are"
        self._packs: dict[int, Flaw | None] = {}
        self._entry_sizes: dict[int, int | None] = {}
        self._components: dict[ObjectId, Flaw | None] = {}

    def snapshot_flaw(self, snapshot: Snapshot) -> Flaw | None:
        for name, component in snapshot.components.items():
            flaw = self.component_flaw(ObjectId(bytes.fromhex(component.manifest)))
            if flaw:
                return Flaw(flaw.state, f"component {name!r}: {flaw.reason}")
        return None

    def component_flaw(self, address: ObjectId) -> Flaw | None:
        if address not in self._components:
            self._components[address] = self._look(address)
        return self._components[address]

    def _look(self, address: ObjectId) -> Flaw | None:
        flaw = self._flaw_of([address])
        if flaw:
            return flaw
        try:
            manifest = self._catalog.manifest(address)
            top = [ObjectId(manifest.structure), *self._catalog.node_ids(manifest)]
            return self._flaw_of(top) or self._flaw_of(self._catalog.chunk_ids(manifest))
        except UnsupportedFormatError:
            raise
        except CasckptError as error:
            return Flaw("damaged", error.message)

    def _flaw_of(self, ids: Sequence[ObjectId]) -> Flaw | None:
        with self._keeper.kv.read() as txn:
            has_marks = txn.count("damage") > 0
            for object_id, row in zip(ids, txn.get_many("objects", ids), strict=True):
                flaw = self._nowhere(object_id)
                for place in decode_object(row)[1][::-1] if row else ():
                    found = self._place_flaw(place, txn)
                    if found is None:
                        break
                    flaw = found
                else:
                    return flaw
                mark = txn.get("damage", object_id) if has_marks else None
                if mark is not None:
                    return Flaw("damaged", mark.decode(errors="replace"))
        return None

    def _nowhere(self, object_id: ObjectId) -> Flaw:
        """Of an object that no file here holds: while files are missing, it may lie in one of them."""
        what = f"object {short(object_id)} is in no pack or entry"
        return Flaw("incomplete", f"{what}; {self._missing} missing") if self._missing else Flaw("damaged", what)

    def _place_flaw(self, place: Place, txn: KvReader) -> Flaw | None:
        if place.is_inline:
            return self._entry_flaw(place)
        if place.pack_no not in self._packs:
            row = txn.get("packs", number_key(place.pack_no))
            self._packs[place.pack_no] = self._pack_flaw(*decode_pack_row(row)) if row else None
        return self._packs[place.pack_no]

    def _pack_flaw(self, pack_id: bytes, expected: int) -> Flaw | None:
        found = self._fs.size(pack_path(self._root, pack_id))
        if found is None:
            return Flaw("incomplete", f"pack {pack_id.hex()} is missing")
        if found != expected:
            return Flaw("damaged", f"pack {pack_id.hex()} has {found} bytes, expected {expected}")
        return None

    def _entry_flaw(self, place: Place) -> Flaw | None:
        seq = place.entry_seq
        if seq not in self._entry_sizes:
            self._entry_sizes[seq] = self._fs.size(self._timeline.path(seq))
        size = self._entry_sizes[seq]
        if size is None:
            return Flaw("incomplete", f"timeline entry {seq} is missing")
        if place.entry_offset + place.header_size + place.stored_size > size:
            return Flaw("damaged", f"timeline entry {seq} is cut to {size} bytes")
        return None
