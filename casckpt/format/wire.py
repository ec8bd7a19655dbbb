"""Canonical MessagePack of frozen structs: the same value always gives the same bytes.

Structs are encoded as arrays in field order, mappings with sorted keys. A decoder re-encodes what it read and refuses
bytes that are not the canonical form, so that one value has one address.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from casckpt.errors import CorruptionError, UnsupportedFormatError
from casckpt.limits import NAME_SIZE_MAX, OBJECT_SIZE_MAX

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(order="deterministic")


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(value: Any) -> bytes:
    """The canonical bytes of a struct."""
    return _encoder.encode(value)


def decode(kind: type[T], encoded: bytes | memoryview, what: str, *, canonical: bool = True) -> T:
    """The struct in `encoded`.

    Raises:
        CorruptionError: not a `kind`, larger than OBJECT_SIZE_MAX, or not in canonical form.
    """
    if len(encoded) > OBJECT_SIZE_MAX:
        raise CorruptionError(f"{what}: {len(encoded)} bytes, at most {OBJECT_SIZE_MAX} are allowed", what=what)
    try:
        value: T = _decoder(kind).decode(encoded)  # type: ignore[arg-type]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{what}: not decodable ({error}). Run `casckpt verify`.", what=what) from error
    if canonical and _encoder.encode(value) != encoded:
        raise CorruptionError(f"{what}: not in canonical form. Run `casckpt verify`.", what=what)
    return value


def check_version(found: int, known: int, what: str) -> None:
    """Refuse a newer version before anything else of it is believed."""
    if found > known:
        raise UnsupportedFormatError(
            f"{what}: version {found}, this release reads up to {known}. Upgrade casckpt.", what=what, version=found
        )


def is_name(value: str) -> bool:
    """Whether a run, branch, tag or component may be called so: index keys and messages carry it as it is."""
    return 0 < len(value.encode()) <= NAME_SIZE_MAX and not any(ord(c) < 32 or ord(c) == 127 for c in value)


def check_digests(value: bytes, what: str, *, size: int = 32) -> None:
    """A field that holds one or more concatenated digests."""
    if len(value) % size:
        raise CorruptionError(f"{what}: {len(value)} bytes is not a whole number of {size}-byte ids", what=what)
