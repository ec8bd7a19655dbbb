"""casckpt.json: which format and features a store needs, its id, and the parameters for new data.

The same bytes are the body of timeline entry 0, so that either can be lost. Feature flags: a name in `features.read`
that this release does not know means it must not read the store; one in `features.write` means it may read but not
commit; one in `features.collect` means that it must not delete.
"""

from __future__ import annotations

import msgspec

from casckpt.errors import CorruptionError, UnsupportedFormatError
from casckpt.limits import CHUNK_SIZE, CHUNK_SIZE_MAX, CHUNK_SIZE_MIN

FORMAT_VERSION = 1
COLLECTED = "collected"  # entries of kind `prune`, `thin` or `condemn`
GENERATIONS = "generations"  # entries of kind `generation`
SEALED = "sealed"  # entries of kind `seal`, and epochs
SUPERSEDED = "superseded"  # entries of kind `supersede`
KNOWN_FEATURES: frozenset[str] = frozenset({COLLECTED, GENERATIONS, SEALED, SUPERSEDED})


class Features(msgspec.Struct, frozen=True):
    read: list[str] = []
    write: list[str] = []
    collect: list[str] = []


class StoreDocument(msgspec.Struct, frozen=True):
    """The content of casckpt.json. `store_id` is 32 hex digits; `chunk_size` in bytes."""

    casckpt_format: int
    store_id: str
    created_by: str
    features: Features = Features()
    chunk_size: int = CHUNK_SIZE


def encode_document(document: StoreDocument) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode_document(encoded: bytes, what: str) -> StoreDocument:
    """Check the format version first, then everything else.

    Raises:
        UnsupportedFormatError: a newer format.
        CorruptionError: anything else that is wrong.
    """
    try:
        loose = msgspec.json.decode(encoded)
        version = loose.get("casckpt_format") if isinstance(loose, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{what}: store format {version}, this release reads up to {FORMAT_VERSION}. Upgrade casckpt.",
                what=what,
                version=version,
            )
        document = msgspec.json.decode(encoded, type=StoreDocument)
        is_id_good = len(bytes.fromhex(document.store_id)) == 16
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{what}: not a store document ({error})", what=what) from error
    if not is_id_good or version != FORMAT_VERSION or not CHUNK_SIZE_MIN <= document.chunk_size <= CHUNK_SIZE_MAX:
        raise CorruptionError(f"{what}: store id, version or chunk size is impossible", what=what)
    return document


def unknown_features(document: StoreDocument, need: str) -> list[str]:
    """Flags under `need` ("read", "write", "collect") that this release does not know."""
    return sorted(set(getattr(document.features, need)) - KNOWN_FEATURES)
