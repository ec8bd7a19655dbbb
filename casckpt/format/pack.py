"""A pack: many records in one immutable file, with a table of them at the end.

::

    header   64   magic "CASPACK1", format version u32, 4 zero bytes, pack id 16, store id 16,
                  check 16 (over bytes 0..48)
    records       each on RECORD_ALIGNMENT (`record`)
    footer        MessagePack array of rows (`PackRow`), in file order
    trailer  80   magic "CASPEND1", footer offset u64, footer size u64, record count u64, pack id 16,
                  footer check 16, trailer check 16 (over bytes 0..64)

The footer makes an index entry for every record without reading them. When it is gone, records are found by
walking from the header: each says its own size.
"""

from __future__ import annotations

import struct

import msgspec

from casckpt.digest import check16
from casckpt.errors import CorruptionError
from casckpt.format import wire
from casckpt.format.record import FIXED_SIZE, PARAMS_SIZE_MAX, RecordHeader, padding
from casckpt.ids import DIGEST_SIZE, PackId, StoreId
from casckpt.limits import OBJECT_SIZE_MAX, RECORD_ALIGNMENT

HEADER_MAGIC = b"CASPACK1"
TRAILER_MAGIC = b"CASPEND1"
PACK_VERSION = 1
_HEADER = struct.Struct("<8sII16s16s")
HEADER_SIZE = _HEADER.size + 16  # 64
_TRAILER = struct.Struct("<8sQQQ16s16s")
TRAILER_SIZE = _TRAILER.size + 16  # 80
_HEADER_SIZE_MAX = FIXED_SIZE + 255 * DIGEST_SIZE + PARAMS_SIZE_MAX + RECORD_ALIGNMENT  # of a record


class PackRow(msgspec.Struct, frozen=True, array_like=True):
    """One record in a pack: where it is and what the index needs. Sizes and offset in bytes."""

    object_id: bytes
    offset: int
    header_size: int
    stored_size: int
    plain_size: int
    kind: int
    codec: int
    codec_version: int
    bases: bytes = b""
    depth: int = 0
    cost: int = 0


def row_of(header: RecordHeader, offset: int, header_size: int) -> PackRow:
    """The footer row of a record whose header of `header_size` bytes starts at `offset`."""
    return PackRow(
        header.object_id,
        offset,
        header_size,
        header.stored_size,
        header.plain_size,
        header.kind,
        header.codec,
        header.codec_version,
        b"".join(header.bases),
        header.depth,
        header.cost,
    )


def encode_pack_header(pack_id: PackId, store_id: StoreId) -> bytes:
    fixed = _HEADER.pack(HEADER_MAGIC, PACK_VERSION, 0, pack_id, store_id)
    return fixed + check16(fixed)


def decode_pack_header(data: bytes, what: str) -> tuple[PackId, StoreId]:
    """Pack id and store id.

    Raises:
        CorruptionError: short, wrong magic or check.
        UnsupportedFormatError: a newer pack version.
    """
    if len(data) < HEADER_SIZE or data[:8] != HEADER_MAGIC:
        raise CorruptionError(f"{what}: not a pack (starts with {bytes(data[:8])!r})", what=what)
    _, version, _, pack_id, store_id = _HEADER.unpack_from(data)
    if check16(data[: _HEADER.size]) != data[_HEADER.size : HEADER_SIZE]:
        raise CorruptionError(f"{what}: pack header check failed", what=what)
    wire.check_version(version, PACK_VERSION, what)
    return PackId(pack_id), StoreId(store_id)


def encode_footer(rows: list[PackRow], footer_offset: int, pack_id: PackId) -> bytes:
    """Footer and trailer, ready to be written at `footer_offset`."""
    footer = wire.encode(rows)
    fixed = _TRAILER.pack(TRAILER_MAGIC, footer_offset, len(footer), len(rows), pack_id, check16(footer))
    return b"".join((footer, fixed, check16(fixed)))


def decode_trailer(data: bytes, pack_size: int, what: str) -> tuple[int, int, bytes, PackId]:
    """(footer offset, footer size, footer check, pack id) from the last TRAILER_SIZE bytes of a pack."""
    if len(data) != TRAILER_SIZE or data[:8] != TRAILER_MAGIC:
        raise CorruptionError(f"{what}: pack has no trailer (cut short?)", what=what)
    if check16(data[: _TRAILER.size]) != data[_TRAILER.size :]:
        raise CorruptionError(f"{what}: pack trailer check failed", what=what)
    _, offset, size, count, pack_id, check = _TRAILER.unpack_from(data)
    if offset + size + TRAILER_SIZE != pack_size or offset < HEADER_SIZE or count > pack_size // FIXED_SIZE:
        raise CorruptionError(f"{what}: footer of {size} bytes at {offset} in a pack of {pack_size}", what=what)
    return offset, size, check, PackId(pack_id)


def decode_footer(footer: bytes, check: bytes, footer_offset: int, what: str) -> list[PackRow]:
    """The rows; every one lies inside the records area."""
    if check16(footer) != check:
        raise CorruptionError(f"{what}: pack footer check failed", what=what)
    try:
        rows = msgspec.msgpack.decode(footer, type=list[PackRow])
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptionError(f"{what}: pack footer not decodable ({error})", what=what) from error
    for row in rows:
        end = row.offset + row.header_size + row.stored_size
        if (
            len(row.object_id) != 32
            or row.offset < HEADER_SIZE
            or not FIXED_SIZE <= row.header_size <= _HEADER_SIZE_MAX
            or not all(0 <= each <= 255 for each in (row.kind, row.codec, row.codec_version, row.depth, row.cost))
            or row.stored_size < 0
            or not 0 <= row.plain_size <= OBJECT_SIZE_MAX
            or end + padding(end) > footer_offset
            or len(row.bases) % 32
            or len(row.bases) > 255 * 32
        ):
            raise CorruptionError(f"{what}: footer row for {row.object_id.hex()[:12]} is impossible", what=what)
    return rows
