"""How a chunk is stored: plain bytes to an encoding and back.

An encoding never changes an object's address (the digest of its *plain* bytes), so `encode` is free to choose, and
does, per chunk, by trial on a small sample. `decode_into` is pure: it needs the fields of the record, the payload and
the plain bytes of the bases, and either fills `out` exactly or raises.

Invariants: everything but raw was decoded and compared before `encode` returned it; what a length field says is
compared with what can be there before anything is allocated; errors of zstandard and NumPy do not leave this package.

NumPy and zstandard are loaded at the first use, so that importing casckpt stays light.
"""

from __future__ import annotations

from casckpt.codec.contract import Buffer, Encoded, Hint
from casckpt.codec.registry import decode_into

__all__ = ["Buffer", "Encoded", "Hint", "decode_into", "encode"]


def encode(plain: memoryview, itemsize: int, hint: Hint | None = None) -> Encoded:
    """Choose and apply the encoding of one chunk; see `casckpt.codec.choose.encode`."""
    from casckpt.codec import choose

    return choose.encode(plain, itemsize, hint)
