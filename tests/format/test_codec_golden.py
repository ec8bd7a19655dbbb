"""Stored forms that every release must decode, written by hand from docs/format.md, and forms that it must refuse.

The zstd frames are assembled from RFC 8878: magic, frame header, blocks of type raw or RLE. One frame with
Huffman-coded literals was made by zstd 1.5.7 and is kept as hex.
"""

from __future__ import annotations

import struct

import pytest

from casckpt.codec import decode_into
from casckpt.errors import CorruptionError, UnsupportedFormatError

RAW, CONSTANT, ZSTD, PLANES = 0, 1, 2, 3

# _letters() through zstd 1.5.7, level 1, hash log 6, minimum match 7
HUFFMAN_FRAME = bytes.fromhex(
    "28b52ffd6000019d0600e6de300ae02d0677cfdccd00aa0b2e002a002e007b23a8d8f478fc517fc8826a1a990cffc71e7fafb6b70b7bda"
    "e32962434f5bfd0ca98270c2cb152121fd7ecfe41bd7eabff52f100384b2b1a3bb6e7fbdeb4756a8aadde72e9bfe39f75cfe10477a36f1"
    "ee3631927ec756e8d71cf673c95241cfd26f04e6f06d1d062789e00f0c62037ecb148ffc05400b09c123f7671cffbf792a5eda0cb23b34"
    "34fb4d907ae580c449a8e6773fa516b5518670b6f3abc497e1daf6e5cffb15fbf9fdfaa3df9132b5b2f67f0400b1b5028280c0141e0198"
    "02"
)


def _letters() -> bytes:
    """512 letters of uneven frequency, chosen by a linear congruential generator."""
    state, letters = 1, bytearray()
    for _ in range(512):
        state = (state * 1103515245 + 12345) % 2**31
        letters.append(b"eeeeeettaanoishr"[state >> 27])
    return bytes(letters)


def frame(*blocks: tuple[str, bytes, int], stated: int | None = None, descriptor: int = 0xA0) -> bytes:
    """A zstd frame: single segment, four-byte content size, then blocks ("raw" or "rle", bytes, count)."""
    size = sum(count for _, _, count in blocks)
    made = b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + struct.pack("<I", size if stated is None else stated)
    for i, (kind, content, count) in enumerate(blocks):
        last, block_type = int(i == len(blocks) - 1), {"raw": 0, "rle": 1}[kind]
        made += struct.pack("<I", last | block_type << 1 | count << 3)[:3] + content
    return made


def decode(
    codec: int, params: bytes, payload: bytes, size: int, version: int = 1, bases: tuple[bytes, ...] = ()
) -> bytes:
    """Decode into the middle of a buffer; what lies around it must stay."""
    whole = bytearray(b"\xee" * (size + 32))
    try:
        decode_into(codec, version, params, payload, bases, memoryview(whole)[16 : 16 + size])
    finally:
        assert whole[:16] == whole[16 + size :] == b"\xee" * 16
    return bytes(whole[16 : 16 + size])


def lane_frame(*blocks: tuple[str, bytes, int]) -> tuple[bytes, bytes]:
    """The parameters after the width, and the payload, of a zstd lane."""
    made = frame(*blocks)
    return b"\x02" + struct.pack("<I", len(made)), made


LANE, LANE_FRAME = lane_frame(("rle", b"\x3f", 2), ("raw", b"\xbf", 1))

GOLDEN = {
    "raw": (RAW, "", "00ff10", "00ff10"),
    "raw, empty": (RAW, "", "", ""),
    "constant, empty": (CONSTANT, "", "", ""),
    "constant, zeros": (CONSTANT, "00000000", "", "00" * 16),
    "constant, fp32 ones": (CONSTANT, "0000803f", "", "0000803f" * 5),
    "constant, cut off": (CONSTANT, "010203", "", "01020301020301"),
    "zstd, raw and rle blocks": (ZSTD, "", frame(("raw", b"abc", 3), ("rle", b"z", 5)).hex(), b"abczzzzz".hex()),
    "zstd, empty": (ZSTD, "", frame(("raw", b"", 0)).hex(), ""),
    "zstd, huffman": (ZSTD, "", HUFFMAN_FRAME.hex(), _letters().hex()),
    # three items of four bytes and a tail of two: raw u16 lane, constant lane, zstd lane
    "planes 4: raw2 constant1 zstd1": (
        PLANES,
        "04 03" + "02 01" + "01 00 80" + "01" + LANE.hex(),
        "a1a2b1b2c1c2" + LANE_FRAME.hex() + "7e7f",
        "a1a2803f" + "b1b2803f" + "c1c280bf" + "7e7f",
    ),
    "planes 2: constant, raw": (PLANES, "02 02 01 00 55 01 01", "010203", "550155025503"),
    "planes 3: raw, constant, raw": (PLANES, "03 03 01 01 01 00 09 01 01", "01020304", "010903020904"),
    "planes 8: raw4 constant4": (
        PLANES,
        "08 02 04 01 04 00 11223344",
        "0102030405060708",
        "01020304112233440506070811223344",
    ),
    "planes 2: one wide constant": (PLANES, "02 01 02 00 1234", "ff", "12341234ff"),
    "planes 16: two lanes of eight": (
        PLANES,
        "10 02 08 01 08 00 1122334455667788",
        "0001020304050607",
        "00010203040506071122334455667788",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_form_decodes(name: str) -> None:
    codec, params, payload, plain = GOLDEN[name]
    expected = bytes.fromhex(plain)
    assert decode(codec, bytes.fromhex(params), bytes.fromhex(payload), len(expected)) == expected


WRONG = {
    "raw with parameters": (RAW, b"\x00", b"abc", 3),
    "raw too short": (RAW, b"", b"ab", 3),
    "raw too long": (RAW, b"", b"abcd", 3),
    "constant with a payload": (CONSTANT, b"\x00", b"\x00", 4),
    "constant without a pattern": (CONSTANT, b"", b"", 4),
    "constant with a pattern for nothing": (CONSTANT, b"\x00", b"", 0),
    "constant longer than the chunk": (CONSTANT, bytes(5), b"", 4),
    "constant longer than allowed": (CONSTANT, bytes(65), b"", 1000),
    "zstd with parameters": (ZSTD, b"\x01", frame(("raw", b"abc", 3)), 3),
    "zstd, nothing": (ZSTD, b"", b"", 3),
    "zstd, no frame": (ZSTD, b"", b"abcdefgh", 3),
    "zstd, other size": (ZSTD, b"", frame(("raw", b"abc", 3)), 4),
    "zstd, size forged to match": (ZSTD, b"", frame(("raw", b"abc", 3), stated=4), 4),
    "zstd, content larger than stated": (ZSTD, b"", frame(("raw", b"abcd", 4), stated=3), 3),
    "zstd, size of 4 GiB": (ZSTD, b"", frame(("raw", b"abc", 3), stated=0xFFFFFFFF), 3),
    "zstd, size of 8 EiB": (ZSTD, b"", b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**63) + b"\x19\x00\x00abc", 3),
    "zstd, size not stated": (ZSTD, b"", b"\x28\xb5\x2f\xfd\x00\x58\x19\x00\x00abc", 3),
    "zstd, window of 2 TiB": (ZSTD, b"", b"\x28\xb5\x2f\xfd\x80\xf8\x03\x00\x00\x00\x19\x00\x00abc", 3),
    "zstd, dictionary": (ZSTD, b"", b"\x28\xb5\x2f\xfd\xa1\x07\x03\x00\x00\x00\x19\x00\x00abc", 3),
    "zstd, trailing byte": (ZSTD, b"", frame(("raw", b"abc", 3)) + b"\x00", 3),
    "zstd, second frame": (ZSTD, b"", frame(("raw", b"abc", 3)) * 2, 3),
    "zstd, cut off": (ZSTD, b"", frame(("raw", b"abc", 3))[:-1], 3),
    "zstd, skippable frame": (ZSTD, b"", b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc", 3),
    "zstd, wrong checksum": (ZSTD, b"", frame(("raw", b"abc", 3), descriptor=0xA4) + b"\x00\x00\x00\x00", 3),
    "planes, no parameters": (PLANES, b"", b"", 8),
    "planes, no lanes": (PLANES, b"\x04\x00", bytes(8), 8),
    "planes, item of one byte": (PLANES, b"\x01\x01\x01\x01", bytes(8), 8),
    "planes, item of zero bytes": (PLANES, b"\x00\x00", bytes(8), 8),
    "planes, item of 17 bytes": (PLANES, b"\x11\x11" + b"\x01\x01" * 17, bytes(34), 34),
    "planes, no whole item": (PLANES, b"\x04\x01\x04\x01", bytes(3), 3),
    "planes, empty": (PLANES, b"\x04\x01\x04\x01", b"", 0),
    "planes, lanes cover too little": (PLANES, b"\x04\x01\x02\x01", bytes(4), 8),
    "planes, lanes cover too much": (PLANES, b"\x02\x02\x02\x01\x02\x01", bytes(16), 8),
    "planes, lane of width 3": (PLANES, b"\x06\x02\x03\x01\x03\x01", bytes(12), 12),
    "planes, lane of width 0": (PLANES, b"\x02\x03\x00\x01\x01\x01\x01\x01", bytes(8), 8),
    "planes, lane not aligned": (PLANES, b"\x04\x03\x01\x01\x02\x01\x01\x01", bytes(8), 8),
    "planes, width does not divide the item": (PLANES, b"\x06\x02\x04\x01\x02\x01", bytes(12), 12),
    "planes, unknown mode": (PLANES, b"\x02\x02\x01\x03\x01\x01", bytes(8), 8),
    "planes, parameters cut in a lane": (PLANES, b"\x02\x02\x01\x01\x01", bytes(8), 8),
    "planes, parameters cut in a constant": (PLANES, b"\x02\x01\x02\x00\x07", b"", 8),
    "planes, parameters cut in a length": (PLANES, b"\x02\x01\x02\x02\x08\x00\x00", bytes(8), 8),
    "planes, trailing parameters": (PLANES, b"\x02\x01\x02\x01\x00", bytes(8), 8),
    "planes, payload too short": (PLANES, b"\x02\x01\x02\x01", bytes(7), 8),
    "planes, payload too long": (PLANES, b"\x02\x01\x02\x01", bytes(9), 8),
    "planes, frame of 4 GiB": (PLANES, b"\x02\x01\x02\x02\xff\xff\xff\xff", frame(("raw", bytes(8), 8)), 8),
    "planes, frame of no bytes": (PLANES, b"\x02\x01\x02\x02\x00\x00\x00\x00", b"", 8),
    "planes, frame states another size": (PLANES, b"\x02\x01\x02\x02\x14\0\0\0", frame(("raw", bytes(8), 8)), 10),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_form_is_corruption_and_writes_nothing_outside(name: str) -> None:
    codec, params, payload, size = WRONG[name]
    with pytest.raises(CorruptionError):
        decode(codec, params, payload, size)


@pytest.mark.parametrize("codec", [RAW, CONSTANT, ZSTD, PLANES])
def test_bases_are_refused_by_codecs_that_take_none(codec: int) -> None:
    with pytest.raises(CorruptionError, match="bases"):
        decode(codec, b"", b"", 0, bases=(b"base",))


@pytest.mark.parametrize(("codec", "version"), [(RAW, 0), (ZSTD, 2), (PLANES, 255), (200, 1), (255, 0)])
def test_unknown_codec_or_version_is_named(codec: int, version: int) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"codec {codec}.* version {version}") as caught:
        decode(codec, b"", b"", 0, version=version)
    assert (caught.value.codec, caught.value.version) == (codec, version)  # type: ignore[attr-defined]
