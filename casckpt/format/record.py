"""One stored form of an object: a header that says how to decode it, and the payload.

::

    0   4  magic "CREC"
    4   4  header size, including bases, parameters and padding
    8   1  codec            9  1  codec version
    10  1  number of bases  11 1  kind of the object
    12  2  size of the parameters
    14  1  depth: 0 without bases, else more than that of each base
    15  1  cost of decoding, bases included, in eighths of reading and hashing as many plain bytes
    16  8  plain size
    24  8  stored size (of the payload)
    32  32 object id = blake3 of the plain bytes
    64  16 payload check = blake3 of the payload, first 16 bytes
    80  16 header check = the same over bytes 0..80 and everything from 96 to the header size
    96  …  base ids (32 each), parameters, zero padding

In a pack the header is padded so that the payload starts on RECORD_ALIGNMENT, and the payload is followed by zeros up
to the next one. Inline in a timeline entry nothing is padded. For a raw record the payload check is the first half of
the object id, so it costs nothing.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from casckpt.digest import CHECK_SIZE, check16
from casckpt.errors import CorruptionError
from casckpt.ids import DIGEST_SIZE, ObjectId
from casckpt.limits import OBJECT_SIZE_MAX, RECORD_ALIGNMENT

MAGIC = b"CREC"
_FIXED = struct.Struct("<4sIBBBBHBBQQ32s16s")
_CHECK_AT = _FIXED.size  # 80
PAYLOAD_CHECK_AT = _CHECK_AT - CHECK_SIZE
FIXED_SIZE = _CHECK_AT + 16  # 96
PARAMS_SIZE_MAX = 32768  # a header of 255 bases and such parameters has a size that 16 bits hold, as index rows do
HEADER_SIZE_MAX = FIXED_SIZE + 255 * DIGEST_SIZE + PARAMS_SIZE_MAX + RECORD_ALIGNMENT

CODEC_RAW = 0

CHUNK, STRUCTURE, MANIFEST, NODE, SNAPSHOT, CONTEXT = 1, 2, 3, 4, 5, 6
KIND_NAMES = {
    CHUNK: "chunk",
    STRUCTURE: "structure",
    MANIFEST: "manifest",
    NODE: "node",
    SNAPSHOT: "snapshot",
    CONTEXT: "context",
}


class RecordHeader(msgspec.Struct, frozen=True):
    """What a record says about itself. Sizes in bytes; `depth` and `cost` are for choosing, never for believing."""

    kind: int
    codec: int
    codec_version: int
    object_id: ObjectId
    plain_size: int
    stored_size: int
    payload_check: bytes
    params: bytes = b""
    bases: tuple[ObjectId, ...] = ()
    header_size: int = 0
    depth: int = 0
    cost: int = 0


def padding(size: int) -> int:
    """Zeros needed to reach the next RECORD_ALIGNMENT."""
    return -size % RECORD_ALIGNMENT


def encode_header(header: RecordHeader, *, is_aligned: bool) -> bytes:
    """The header's bytes; its `header_size` field is computed here."""
    tail = b"".join(header.bases) + header.params
    if is_aligned:
        tail += bytes(padding(FIXED_SIZE + len(tail)))
    fixed = _FIXED.pack(
        MAGIC,
        FIXED_SIZE + len(tail),
        header.codec,
        header.codec_version,
        len(header.bases),
        header.kind,
        len(header.params),
        header.depth,
        header.cost,
        header.plain_size,
        header.stored_size,
        header.object_id,
        header.payload_check,
    )
    return b"".join((fixed, check16(fixed + tail), tail))


def claimed_size(start: bytes) -> int:
    """What the first bytes of a header claim as its size; unchecked, so only good for deciding how much to read."""
    return int.from_bytes(start[4:8], "little")


def decode_header(data: Any, what: str, *, limit: int | None = None) -> RecordHeader:
    """Read a header from the start of `data` (bytes-like; may be longer than the header).

    Args:
        data: at least the whole header.
        what: where it was read, for messages.
        limit: bytes available from the record's start, if known; header and payload must fit.

    Raises:
        CorruptionError: wrong magic, check, or a length that cannot be.
    """
    view = memoryview(data)
    if len(view) < FIXED_SIZE:
        raise CorruptionError(f"{what}: {len(view)} bytes, a record header has at least {FIXED_SIZE}", what=what)
    fields = _FIXED.unpack_from(view)
    magic, header_size, codec, version, base_count, kind, params_size, depth, cost = fields[:9]
    plain_size, stored_size, object_id, check = fields[9:]
    if magic != MAGIC:
        raise CorruptionError(f"{what}: no record here (magic {bytes(magic)!r}, expected {MAGIC!r})", what=what)
    needed = FIXED_SIZE + base_count * DIGEST_SIZE + params_size
    if params_size > PARAMS_SIZE_MAX or not needed <= header_size <= min(len(view), needed + RECORD_ALIGNMENT):
        raise CorruptionError(f"{what}: record header size {header_size} is impossible", what=what)
    if check16(bytes(view[:_CHECK_AT]) + bytes(view[FIXED_SIZE:header_size])) != view[_CHECK_AT:FIXED_SIZE]:
        raise CorruptionError(f"{what}: record header check failed. Run `casckpt verify --read-data`.", what=what)
    if plain_size > OBJECT_SIZE_MAX or stored_size > 2 * OBJECT_SIZE_MAX:
        raise CorruptionError(f"{what}: record sizes {plain_size} / {stored_size} are over the limit", what=what)
    if limit is not None and header_size + stored_size > limit:
        raise CorruptionError(f"{what}: record of {header_size + stored_size} bytes in {limit}", what=what)
    bases_end = FIXED_SIZE + base_count * DIGEST_SIZE
    bases = tuple(ObjectId(bytes(view[at : at + DIGEST_SIZE])) for at in range(FIXED_SIZE, bases_end, DIGEST_SIZE))
    return RecordHeader(
        kind=kind,
        codec=codec,
        codec_version=version,
        object_id=ObjectId(object_id),
        plain_size=plain_size,
        stored_size=stored_size,
        payload_check=check,
        params=bytes(view[bases_end : bases_end + params_size]),
        bases=bases,
        header_size=header_size,
        depth=depth,
        cost=cost,
    )
