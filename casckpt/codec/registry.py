"""Which file decodes which codec.

The table is the list of everything a store may contain. Files are imported at first use. A codec id or version that
is not here is `UnsupportedFormatError`, never corruption: a newer casckpt may have written it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module

from casckpt.codec.contract import CONSTANT, DIFFERENCE, FRAMES, PLANES, PREDICTION, RAW, ZSTD, Buffer, Decoder, damaged
from casckpt.errors import UnsupportedFormatError

_MODULES = {
    RAW: "raw",
    CONSTANT: "constant",
    ZSTD: "zstd",
    PLANES: "planes",
    DIFFERENCE: "difference",
    PREDICTION: "prediction",
    FRAMES: "frames",
}


@cache
def decoder(codec: int, version: int) -> Decoder:
    """The decoder of one codec version.

    Raises:
        UnsupportedFormatError: this release does not know it; `codec` and `version` are attributes.
    """
    module = _MODULES.get(codec)
    found: Decoder | None = None
    if module is not None:
        found = import_module(f"casckpt.codec.{module}").DECODERS.get(version)
    if found is None:
        known = "" if module is None else f" ({module})"
        raise UnsupportedFormatError(
            f"codec {codec}{known} version {version} is not known to this release. Use a newer casckpt.",
            codec=codec,
            version=version,
        )
    return found


def decode_into(
    codec: int, version: int, params: bytes, payload: Buffer, bases: Sequence[Buffer], out: memoryview
) -> None:
    """Decode one stored form into `out`, whose length is the record's plain size.

    Args:
        codec: codec id of the record.
        version: codec version of the record.
        params: the record's parameters.
        payload: the whole stored payload (C-contiguous bytes).
        bases: plain bytes of the bases, in the record's order.
        out: writable, C-contiguous, one byte per item; every byte of it is written on success.

    Costs at most one allocation of `len(out)` bytes beside `out`. Pure: no state is read or changed.

    Raises:
        CorruptionError: the form is malformed or does not fit `out`, whose content is then undefined.
        UnsupportedFormatError: unknown codec or version.
    """
    known = decoder(codec, version)
    if len(bases) not in known.base_counts:
        raise damaged(known.name, f"{len(bases)} bases given, the codec takes {known.base_counts}")
    known.decode(bytes(params), memoryview(payload).cast("B"), bases, out)
