"""The only door to blake3.

`digest` is an object's address. `check16` is the short form that guards headers, footers and stored payloads:
detection of accidents, not an address.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from casckpt.ids import ObjectId

CHECK_SIZE = 16


def digest(plain: Any) -> ObjectId:
    """blake3 of a bytes-like object (32 bytes). Single-threaded; releases the GIL while it runs."""
    return ObjectId(blake3(plain).digest())


def check16(stored: Any) -> bytes:
    """The first 16 bytes of blake3, the guard of stored bytes."""
    return blake3(stored).digest(CHECK_SIZE)


def hasher() -> Any:
    """An incremental blake3 with `update(bytes)` and `digest()`."""
    return blake3()
