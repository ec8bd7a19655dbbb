"""An epoch: a run of old timeline entries in one file, each without the objects that were inlined in it.

::

    header 64    magic "CASEPOC1", first number u64, entry count u64, file size u64, store id 16, check 16 (over 0..48)
    table        one row of 56 for each entry: the entry's digest 32, its size u64, offset u64 and size u64 of its image
    check 16     over the table
    images       one after the other
    trailer 32   blake3 of everything before = the epoch's digest

An *image* is an entry (`entry`) with the same number, store id and body, and with its snapshot's record alone; its
trailer is the digest of these bytes. So the bytes of an epoch follow from the entries and nothing else: whoever makes
it makes the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from casckpt.digest import CHECK_SIZE, check16, digest
from casckpt.errors import CorruptionError
from casckpt.format.entry import (
    ENTRY_HEADER,
    HEADER_SIZE,
    TRAILER_SIZE,
    Entry,
    decode_entry,
    frame_entry,
)
from casckpt.format.record import SNAPSHOT
from casckpt.ids import DIGEST_SIZE, EntryDigest, StoreId
from casckpt.limits import ENTRY_SIZE_MAX

MAGIC = b"CASEPOC1"
_ROW = struct.Struct(f"<{DIGEST_SIZE}sQQQ")
ROW_SIZE = _ROW.size  # 56


class Row(NamedTuple):
    """What the table says of an entry: its digest and size as it was, and where its image is in the epoch."""

    digest: EntryDigest
    entry_size: int
    offset: int
    size: int


class Sealed(NamedTuple):
    """An entry made ready for an epoch: its digest and size, and its image."""

    digest: EntryDigest
    entry_size: int
    image: bytes


def seal_entry(data: bytes, entry: Entry) -> Sealed:
    """The image of an intact entry, given its file's bytes and what they decode to."""
    _, seq, body_size, _, store_id = ENTRY_HEADER.unpack_from(data)
    kept = [record for record in entry.records if record.header.kind == SNAPSHOT]
    ends = (record.offset + record.header.header_size + record.header.stored_size for record in kept)
    records = b"".join(data[record.offset : end] for record, end in zip(kept, ends, strict=True))
    body = data[HEADER_SIZE : HEADER_SIZE + body_size]
    return Sealed(entry.digest, len(data), frame_entry(seq, StoreId(store_id), body, records))


def table_size(count: int) -> int:
    """Bytes of the table of `count` entries, its check included."""
    return ROW_SIZE * count + CHECK_SIZE


def encode_epoch(first: int, store_id: StoreId, entries: Sequence[Sealed]) -> bytes:
    """The whole file, of entries with consecutive numbers from `first` on."""
    start = HEADER_SIZE + table_size(len(entries))
    offsets = list(accumulate((len(each.image) for each in entries), initial=start))
    rows = (_ROW.pack(each[0], each[1], at, len(each[2])) for each, at in zip(entries, offsets, strict=False))
    table = b"".join(rows)
    fixed = ENTRY_HEADER.pack(MAGIC, first, len(entries), offsets[-1] + TRAILER_SIZE, store_id)
    content = b"".join((fixed, check16(fixed), table, check16(table), *(each.image for each in entries)))
    return content + digest(content)


def decode_head(head: bytes, first: int, count: int, size: int, what: str) -> StoreId:
    """Check the first `HEADER_SIZE` bytes of an epoch; returns whose it is.

    Args:
        head: these bytes.
        first, count: the entries that it must hold.
        size: of its file, in bytes.
        what: its name, for messages.

    Raises:
        CorruptionError: it is not that epoch, or cut off.
    """
    if len(head) < HEADER_SIZE or head[:8] != MAGIC or check16(head[:48]) != head[48:HEADER_SIZE]:
        raise CorruptionError(f"{what}: not an epoch, or its header is damaged. Run `casckpt verify`.", what=what)
    _, found_first, found_count, found_size, store_id = ENTRY_HEADER.unpack_from(head)
    if (found_first, found_count) != (first, count):
        raise CorruptionError(f"{what}: holds {found_count} entries from {found_first}, expected {count}", what=what)
    if found_size != size:
        raise CorruptionError(f"{what}: has {size} bytes, expected {found_size}", what=what)
    return StoreId(store_id)


def decode_table(table: bytes, count: int, size: int, what: str) -> list[Row]:
    """The rows, from the `table_size(count)` bytes after the header.

    Raises:
        CorruptionError: a byte of it is not as written, or an image lies outside of a file of `size` bytes.
    """
    if len(table) != table_size(count) or check16(table[:-CHECK_SIZE]) != table[-CHECK_SIZE:]:
        raise CorruptionError(f"{what}: its table is damaged. Run `casckpt verify`.", what=what)
    rows = [Row(EntryDigest(each[0]), *each[1:]) for each in _ROW.iter_unpack(table[:-CHECK_SIZE])]
    start = HEADER_SIZE + len(table)
    for row in rows:
        if row.offset != start or not HEADER_SIZE + TRAILER_SIZE <= row.size <= ENTRY_SIZE_MAX:
            raise CorruptionError(f"{what}: an image of {row.size} bytes at {row.offset}", what=what)
        start += row.size
    if start + TRAILER_SIZE != size:
        raise CorruptionError(f"{what}: images end at {start}, expected {size - TRAILER_SIZE}", what=what)
    return rows


def framed_size(header: bytes) -> int:
    """Bytes that an image takes by what its first `HEADER_SIZE` bytes say; 0 where that cannot be."""
    if len(header) < HEADER_SIZE:
        return 0
    _, _, body_size, inline_size, _ = ENTRY_HEADER.unpack_from(header)
    size: int = HEADER_SIZE + body_size + inline_size + TRAILER_SIZE
    return size if size <= ENTRY_SIZE_MAX else 0


def decode_image(image: bytes, row: Row, seq: int, what: str) -> Entry:
    """The entry that an image stands for: with the digest and size that it had, and without inlined objects.

    Raises:
        CorruptionError, UnsupportedFormatError: as `decode_entry`.
    """
    entry = decode_entry(image, seq, what)
    return msgspec.structs.replace(entry, digest=row.digest, size=row.entry_size, is_sealed=True)
