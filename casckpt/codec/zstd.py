"""Codec 2: one zstd frame; and the only door to zstandard.

Every frame that casckpt writes or accepts states its content size, has no dictionary, and is followed by nothing. The
stated size is compared with the expected one before anything is allocated.

Compressors and decompressors are not thread-safe: each thread has its own, and a forked child starts with none.

Three profiles, all ordinary frames (figures in docs/design/0004-codecs.md and 0014-frames.md):

* `match`: level 1, the library's defaults, for data that repeats;
* `entropy`: level 1, a hash table of 64 entries and long minimum matches, which gives up matching at once and leaves
  Huffman coding. For noisy planes of numbers: smaller and about three times as fast;
* `deep`: level 9, for the little that is left of frames that repeat: a tenth smaller at a third of the speed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal, TypeAlias

import zstandard

from casckpt.codec.contract import ZSTD, Buffer, Decoder, Encoded, damaged
from casckpt.codec.raw import copy_into
from casckpt.limits import OBJECT_SIZE_MAX

Profile: TypeAlias = Literal["match", "entropy", "deep"]

ZstdError = zstandard.ZstdError

_WINDOW_SIZE_MAX = OBJECT_SIZE_MAX  # no frame of ours needs more; the format allows 3.75 TiB
_PARAMETERS = {
    "match": zstandard.ZstdCompressionParameters.from_level(1),
    "entropy": zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7),
    "deep": zstandard.ZstdCompressionParameters.from_level(9),
}


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressors = {
            profile: zstandard.ZstdCompressor(compression_params=parameters)
            for profile, parameters in _PARAMETERS.items()
        }
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_SIZE_MAX)


_contexts = _Contexts()


def _forget_contexts() -> None:
    global _contexts
    _contexts = _Contexts()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_contexts)


def compress(plain: Buffer, profile: Profile) -> bytes:
    """One frame. Releases the GIL; costs about 0.2-2 ms per MiB.

    Raises:
        zstandard.ZstdError: the library failed; `choose.encode` answers with raw.
    """
    return _contexts.compressors[profile].compress(plain)


def decompress(frame: Buffer, plain_size: int, codec: str) -> bytes:
    """The `plain_size` bytes of one frame. Releases the GIL; allocates nothing beyond them.

    Raises:
        CorruptionError: not exactly one frame of that content size; `codec` is named in the message.
    """
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != plain_size:
            raise damaged(codec, f"zstd frame states {header.content_size} bytes, expected {plain_size}")
        if header.window_size > _WINDOW_SIZE_MAX or header.dict_id:
            raise damaged(codec, f"zstd frame with window {header.window_size} and dictionary {header.dict_id}")
        plain = _contexts.decompressor.decompress(frame, max_output_size=plain_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise damaged(codec, f"zstd says: {error}") from error
    if len(plain) != plain_size:  # a skippable frame gives nothing, whatever its header says
        raise damaged(codec, f"zstd frame holds {len(plain)} bytes, expected {plain_size}")
    return plain


def encode(plain: Buffer, profile: Profile) -> Encoded:
    """The whole chunk as one frame."""
    frame = compress(plain, profile)
    return Encoded(ZSTD, 1, b"", frame, len(frame))


def _decode(params: bytes, payload: memoryview, bases: Sequence[Buffer], out: memoryview) -> None:
    if params:
        raise damaged("zstd", f"{len(params)} bytes of parameters, expected none")
    copy_into(out, decompress(payload, len(out), "zstd"))


DECODERS = {1: Decoder("zstd", _decode)}
