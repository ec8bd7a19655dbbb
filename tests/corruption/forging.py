"""Stores with records that no encoder writes, every checksum right: what somebody who wants to do harm can make.

A store with one commit is made by casckpt; then the records of its pack are replaced. Chunks are `chunk(number)`:
4 KiB of one 64-bit number, so that each is an exact difference of any other by one constant.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
from blake3 import blake3

from casckpt.digest import check16
from casckpt.format.entry import Commit, PackRef, decode_entry, encode_entry
from casckpt.format.pack import HEADER_SIZE, PackRow, encode_footer, encode_pack_header, row_of
from casckpt.format.record import CHUNK, RecordHeader, decode_header, encode_header, padding
from casckpt.ids import ObjectId, PackId
from casckpt.objects import writer
from tests.unit.stores import open_store

CHUNK_SIZE = 4096
FIRST, COUNT = 10, 16  # the chunks of the store's one leaf
STATE = {
    "numbers": {"x": np.repeat(np.arange(FIRST, FIRST + COUNT, dtype=np.int64), CHUNK_SIZE // 8)},
    "other": {"y": np.arange(10_000, dtype=np.int32)},
}


class Forged(NamedTuple):
    """A record as it is to stand in a pack."""

    header: RecordHeader
    payload: bytes


def chunk(number: int) -> bytes:
    return struct.pack("<q", number) * (CHUNK_SIZE // 8)


def id_of(number: int) -> ObjectId:
    return ObjectId(blake3(chunk(number)).digest())


def raw(number: int, *, depth: int = 0) -> Forged:
    return _forged(id_of(number), 0, b"", chunk(number), (), depth)


def difference(number: int, base: int, *, depth: int = 1, **changes: Any) -> Forged:
    """`chunk(number)` as `chunk(base)` plus a constant: codec 4, dense, bias 0, items in codec 1."""
    params = b"\x08\x00" + bytes(8) + b"\x01" + struct.pack("<q", number - base)
    return _forged(id_of(number), 4, params, b"", (id_of(base),), depth, **changes)


def doubled(object_id: ObjectId, base: ObjectId, *, depth: int = 1, delta: int = 0) -> Forged:
    """An object predicted from one other that stands for two operands: codec 5, momentum, step size 0."""
    prediction = b"\x05\x00\x00" + struct.pack("<f", 0.0) + b"\x04\x01" + bytes(4) + b"\x04\x01" + bytes(4)
    items = b"\x04\x00" + bytes(4) + b"\x01" + struct.pack("<i", delta)
    return _forged(object_id, 5, prediction + items, b"", (base, base), depth)


def _forged(
    object_id: ObjectId,
    codec: int,
    params: bytes,
    payload: bytes,
    bases: tuple[ObjectId, ...],
    depth: int,
    plain_size: int = CHUNK_SIZE,
    cost: int = 0,
) -> Forged:
    check = object_id[:16] if codec == 0 else check16(payload)
    fields = (CHUNK, codec, 1, object_id, plain_size, len(payload), check, params, bases)
    return Forged(RecordHeader(*fields, depth=depth, cost=cost), payload)


def make(path: Path) -> None:
    """The store before anything is forged."""
    with (
        mock.patch.object(writer, "INLINE_LIMIT", 0),
        open_store(path, create=True, chunk_size=CHUNK_SIZE) as store,
    ):
        store.commit(1, STATE)


def forge(path: Path, records: Sequence[Forged]) -> None:
    """Replace the records of these objects by the given ones; the index is deleted."""
    named = {each.header.object_id for each in records}
    write_pack(path, [*(each for each in records_of(path) if each.header.object_id not in named), *records])
    shutil.rmtree(path / "index", ignore_errors=True)


def write_pack(
    path: Path, records: Sequence[Forged], change_rows: Callable[[list[PackRow]], None] | None = None
) -> None:
    """Write the store's one pack anew under its id, and the entry that names it."""
    (pack,) = path.glob("packs/*/*")
    entry_path = max(path.glob("timeline/*/*"))
    entry = decode_entry(entry_path.read_bytes(), int(entry_path.name), "entry")
    pack_id = PackId(bytes.fromhex(pack.name))
    data, rows = bytearray(encode_pack_header(pack_id, entry.store_id)), []
    assert len(data) == HEADER_SIZE
    for header, payload in records:
        encoded = encode_header(header, is_aligned=True)
        rows.append(row_of(header, len(data), len(encoded)))
        data += encoded + payload
        data += bytes(padding(len(data)))
    if change_rows:
        change_rows(rows)
    footer = encode_footer(rows, len(data), pack_id)
    pack.write_bytes(bytes(data) + footer)
    body = entry.envelope.body
    assert isinstance(body, Commit)
    reference = PackRef(pack_id, len(data) + len(footer), footer[-32:-16])
    envelope = msgspec.structs.replace(entry.envelope, body=msgspec.structs.replace(body, packs=[reference]))
    inline = [(record.header, record.payload) for record in entry.records]
    entry_path.write_bytes(encode_entry(entry.seq, entry.store_id, envelope, inline))


def records_of(path: Path) -> list[Forged]:
    (pack,) = path.glob("packs/*/*")
    data = pack.read_bytes()
    found, at = [], HEADER_SIZE
    while data[at : at + 4] == b"CREC":
        header = decode_header(memoryview(data)[at:], "record")
        start = at + header.header_size
        found.append(Forged(header, data[start : start + header.stored_size]))
        at = start + header.stored_size
        at += padding(at)
    return found
