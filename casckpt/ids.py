"""Identifiers: distinct types over plain bytes, and how they are written for people.

An `ObjectId` is the blake3 digest (32 bytes) of an object's plain bytes, whatever form they are stored in. A
`SnapshotId` is the `ObjectId` of a snapshot record. `PackId`, `StoreId` and `WriteId` are 16 random bytes: a
content-derived pack name could come back after a collector condemned it.
"""

from __future__ import annotations

from typing import NewType

ObjectId = NewType("ObjectId", bytes)
SnapshotId = NewType("SnapshotId", bytes)
EntryDigest = NewType("EntryDigest", bytes)
PackId = NewType("PackId", bytes)
StoreId = NewType("StoreId", bytes)
WriteId = NewType("WriteId", bytes)

DIGEST_SIZE = 32
PACK_ID_SIZE = 16
NO_DIGEST = EntryDigest(bytes(DIGEST_SIZE))


def short(identifier: bytes) -> str:
    """The first 12 hex digits: enough to recognise, and a valid snapshot prefix."""
    return identifier.hex()[:12]
