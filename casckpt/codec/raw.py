"""Codec 0: the payload is the plain bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from casckpt.codec.contract import RAW, Buffer, Decoder, Encoded, damaged


def encode(plain: memoryview, rejected: str | None = None) -> Encoded:
    """The chunk as it is; no copy, the payload is `plain` itself."""
    return Encoded(RAW, 1, b"", plain, len(plain), rejected)


def copy_into(out: memoryview, plain: Buffer) -> None:
    """`out[:] = plain`, but without holding the GIL while the memory moves."""
    np.frombuffer(out, np.uint8)[:] = np.frombuffer(plain, np.uint8)


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    if params:
        raise damaged("raw", f"{len(params)} bytes of parameters, expected none")
    if len(payload) != len(out):
        raise damaged("raw", f"payload has {len(payload)} bytes, expected {len(out)}")
    copy_into(out, payload)


DECODERS = {1: Decoder("raw", _decode)}
