"""Frames: stored forms of the document, forms to refuse, what replay data takes, broken libraries."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from casckpt.codec import Encoded, Hint, decode_into, pictures, zstd
from casckpt.codec.best import Base, encode_best
from casckpt.codec.contract import FRAMES, RAW, TRIAL_INTERVAL
from casckpt.codec.frames import BETWEEN, CHANGES, PLAIN, SMOOTHED, Frames, encode_frames, frames_of
from casckpt.codec.level import LEVELS
from casckpt.codec.memory import Limits, Memory
from casckpt.errors import CorruptionError, InvalidInputError

SIDE = 84
PIXELS = SIDE * SIDE
PICTURE = Frames(PIXELS, SIDE)


def decode(params: bytes, payload: bytes, base: bytes | None, size: int) -> bytes:
    """Decode into the middle of a buffer; what lies around it must stay."""
    whole = bytearray(b"\xee" * (size + 32))
    try:
        decode_into(FRAMES, 1, params, payload, () if base is None else (base,), memoryview(whole)[16 : 16 + size])
    finally:
        assert whole[:16] == whole[16 + size :] == b"\xee" * 16
    return bytes(whole[16 : 16 + size])


# --- stored forms, from docs/format.md ---

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("**Frames.**") : DOCUMENT.index("\n## 6. ")]
GOLDEN = re.findall(r"^\| (\w[^|]*) \| (0\d 0\d 0\d00 .*?) \| (.*?) \| (.*?) \| (.*?) \|$", SECTION, re.MULTILINE)


def test_the_document_has_golden_forms_of_every_method() -> None:
    assert {row[1][:5] for row in GOLDEN} >= {"01 00", "01 01", "02 01", "01 02", "01 03"}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row[0])
def test_golden_form_of_the_document_decodes(row: tuple[str, ...]) -> None:
    params, payload, base, plain = (None if part == "–" else bytes.fromhex(part) for part in row[1:])
    assert params is not None
    assert plain is not None
    assert decode(params, payload or b"", base, len(plain)) == plain


HEAD = struct.Struct("<BBHIIIIIIIII")
FIELDS = (
    "itemsize",
    "method",
    "series",
    "size",
    "width",
    "skip",
    "count",
    "new",
    "base_skip",
    "base",
    "changed",
    "long",
)


def form(parts: list[tuple[int, bytes, bytes]], **fields: int) -> tuple[bytes, bytes]:
    """Parameters and payload of frames of 16 bytes; `parts` are codec, parameters, payload."""
    values = {"itemsize": 1, "method": 0, "series": 1, "size": 16} | fields
    params = HEAD.pack(*(values.get(name, 0) for name in FIELDS))
    for codec, part_params, payload in parts:
        params += struct.pack("<BIB", codec, len(payload), len(part_params)) + part_params
    return params, b"".join(part[2] for part in parts)


def raw(data: bytes) -> tuple[int, bytes, bytes]:
    return RAW, b"", data


def numbers(*values: int) -> tuple[int, bytes, bytes]:
    return raw(struct.pack(f"<{len(values)}H", *values))


ONE, NONE = raw(bytes(16)), raw(b"")
TWO_NEW = {"count": 2, "new": 2}
CHANGED = {"method": 1, "changed": 2, **TWO_NEW}
BETWEEN_TWO = {"method": 2, **TWO_NEW}
GOOD = form([numbers(0, 0), NONE, raw(bytes(32))], **TWO_NEW)
WRONG = {
    # name: (parameters, payload), size of the chunk, base
    "no parameters": ((b"", b""), 32, None),
    "head cut off": ((GOOD[0][: HEAD.size - 1], b""), 32, None),
    "no parts": ((GOOD[0][: HEAD.size], b""), 32, None),
    "item size 0": (form([numbers(0, 0), NONE, raw(bytes(32))], itemsize=0, **TWO_NEW), 32, None),
    "item size 3": (form([numbers(0, 0), NONE, raw(bytes(36))], itemsize=3, **TWO_NEW | {"size": 18}), 36, None),
    "part of an item": (form([numbers(0, 0), NONE, raw(bytes(36))], itemsize=4, **TWO_NEW | {"size": 18}), 36, None),
    "method 4": (form([numbers(0, 0), NONE, raw(bytes(32))], method=4, **TWO_NEW), 32, None),
    "no series": (form([numbers(0, 0), NONE, raw(bytes(32))], series=0, **TWO_NEW), 32, None),
    "frames of 15 bytes": (form([numbers(0, 0), NONE, raw(bytes(30))], **TWO_NEW | {"size": 15}), 30, None),
    "frames of 0 bytes": (form([numbers(), raw(bytes(32))], size=0), 32, None),
    "width of plain frames": (form([numbers(0, 0), NONE, raw(bytes(32))], width=4, **TWO_NEW), 32, None),
    "smoothed without a width": (form([numbers(0, 0), NONE, raw(bytes(32))], method=3, **TWO_NEW), 32, None),
    "smoothed, width of no row": (form([numbers(0, 0), NONE, raw(bytes(32))], method=3, width=5, **TWO_NEW), 32, None),
    "between items of 2 bytes": (form([numbers(0, 0), NONE, raw(bytes(32))], itemsize=2, **BETWEEN_TWO), 32, None),
    "more frames than bytes": (form([numbers(0, 0), NONE, raw(bytes(32))], **TWO_NEW), 31, None),
    "4294967295 frames": (form([numbers(0, 0)], count=0xFFFFFFFF, new=2), 32, None),
    "no frame of 4 GiB": (form([numbers(), raw(bytes(32))], size=0xFFFFFFFF), 32, None),
    "no frame": (form([numbers(), raw(bytes(32))]), 32, None),
    "4294967295 new frames": (form([numbers(0, 0)], count=2, new=0xFFFFFFFF), 32, None),
    "frames begin outside": (form([numbers(0, 0), NONE, raw(bytes(32))], skip=1, **TWO_NEW), 32, None),
    "rests of another size": (form([numbers(0, 0), raw(b"x"), raw(bytes(32))], **TWO_NEW), 32, None),
    "base without frames": (GOOD, 32, bytes(16)),
    "frames of a base that is not there": (form([numbers(0, 0), NONE, raw(bytes(32))], base=1, **TWO_NEW), 32, None),
    "base too short": (form([numbers(0, 0), NONE, raw(bytes(32))], base=1, **TWO_NEW), 32, bytes(15)),
    "base begins outside": (form([numbers(0, 0), NONE, raw(bytes(32))], base=1, base_skip=1, **TWO_NEW), 32, bytes(16)),
    "number of no frame": (form([numbers(0, 1), NONE, raw(bytes(32))], **TWO_NEW), 32, None),
    "number below 0": (form([numbers(65535, 0), NONE, raw(bytes(32))], **TWO_NEW), 32, None),
    "new frame that does not occur": (form([numbers(0, 65535), NONE, raw(bytes(32))], **TWO_NEW), 32, None),
    "new frame that is not counted": (form([numbers(0, 0), NONE, ONE], count=2, new=1), 32, None),
    "too few numbers": (form([numbers(0), NONE, raw(bytes(32))], **TWO_NEW), 32, None),
    "too few pixels": (form([numbers(0, 0), NONE, raw(bytes(31))], **TWO_NEW), 32, None),
    "a part after the last": (form([numbers(0, 0), NONE, raw(bytes(32)), NONE], **TWO_NEW), 32, None),
    "payload after the last part": ((GOOD[0], GOOD[1] + b"x"), 32, None),
    "frames in frames": (form([numbers(0, 0), NONE, (6, GOOD[0][:200], GOOD[1])], **TWO_NEW), 32, None),
    "a difference as pixels": (form([numbers(0, 0), NONE, (4, b"\1\0\0\0", bytes(32))], **TWO_NEW), 32, None),
    "changed items of plain frames": (form([numbers(0, 0), NONE, raw(bytes(32))], changed=1, **TWO_NEW), 32, None),
    "more than half changed": (form([numbers(0, 0), NONE], **CHANGED | {"changed": 33}), 32, None),
    "4294967295 changed": (form([numbers(0, 0), NONE], **CHANGED | {"changed": 0xFFFFFFFF}), 32, None),
    "more long gaps than gaps": (form([numbers(0, 0), NONE], long=3, **CHANGED), 32, None),
    "gap of 0": (form([numbers(0, 0), NONE, raw(b"\1\0"), NONE, raw(b"xy")], **CHANGED), 32, None),
    "first gap of 0": (form([numbers(0, 0), NONE, raw(b"\0\1"), NONE, raw(b"xy")], **CHANGED), 32, None),
    "gap past the end": (form([numbers(0, 0), NONE, raw(b"\1\x20"), NONE, raw(b"xy")], **CHANGED), 32, None),
    "long gap past the end": (
        form([numbers(0, 0), NONE, raw(b"\1\xff"), raw(b"\xff" * 4), raw(b"xy")], long=1, **CHANGED), 32, None
    ),
    "uncounted long gap": (form([numbers(0, 0), NONE, raw(b"\1\xff"), NONE, raw(b"xy")], **CHANGED), 32, None),
    "counted long gap that is none": (
        form([numbers(0, 0), NONE, raw(b"\1\1"), raw(bytes(4)), raw(b"xy")], long=1, **CHANGED), 32, None
    ),
    "too few values": (form([numbers(0, 0), NONE, raw(b"\1\1"), NONE, raw(b"x")], **CHANGED), 32, None),
}  # fmt: skip


def test_the_forms_to_refuse_differ_from_one_that_decodes() -> None:
    assert decode(*GOOD, None, 32) == bytes(32)


@pytest.mark.parametrize("name", WRONG)
def test_malformed_form_is_corruption_and_writes_nothing_outside(name: str) -> None:
    (params, payload), size, base = WRONG[name]
    with pytest.raises(CorruptionError):
        decode(params, payload, base, size)


def test_frames_take_at_most_one_base() -> None:
    with pytest.raises(CorruptionError, match="bases"):
        decode_into(FRAMES, 1, *GOOD, (bytes(16), bytes(16)), memoryview(bytearray(32)))


# --- what replay data takes ---


def stacked(film: np.ndarray, count: int, start: int = 0) -> memoryview:
    """Rows of four pictures that advance by one."""
    rows = np.stack([film[start + row : start + row + 4] for row in range(count)])
    return memoryview(rows.reshape(-1))


def clean(count: int) -> np.ndarray:
    """A picture in which a square of one brightness moves."""
    film = np.repeat((np.arange(PIXELS) % 7 * 30).astype(np.uint8).reshape(1, SIDE, SIDE), count, axis=0)
    for at in range(count):
        x = at * 3 % 76
        film[at, 40:48, x : x + 8] = 250
    return film


def camera(count: int) -> np.ndarray:
    """A smooth pattern that moves, with noise of 6 grey levels."""
    y, x = np.mgrid[:SIDE, :SIDE]
    at = np.arange(count)[:, None, None]
    pattern = 128 + 50 * np.sin(x / 9 + at / 20) + 40 * np.cos(y / 13 - at / 30)
    noise = np.random.default_rng(0).normal(0, 6, (count, SIDE, SIDE))
    return np.clip(np.rint(pattern + noise), 0, 255).astype(np.uint8)


def size_of(encoded: Encoded | None) -> int:
    assert encoded is not None
    assert encoded.rejected is None
    assert encoded.stored_size == len(encoded.payload)
    return encoded.stored_size + len(encoded.params)


def test_noise_in_stacks_of_four_takes_what_its_entropy_says() -> None:
    plain = stacked(camera(40), 36)
    encoded = encode_frames(plain, PICTURE, ceiling=len(plain))
    bits = np.log2(6 * np.sqrt(2 * np.pi * np.e))  # per pixel of Gaussian noise, rounded: 4.63
    assert bits * 39 * PIXELS / 8 < size_of(encoded) < 1.15 * bits * 39 * PIXELS / 8
    assert encoded is not None
    assert encoded.params[1] == SMOOTHED


def test_clean_pictures_take_their_changes() -> None:
    plain = stacked(clean(41), 37)
    encoded = encode_frames(plain, PICTURE, ceiling=len(plain))
    assert size_of(encoded) < 39 * 8 * 6 + 2000  # three columns of eight pixels come and three go, at most a byte each
    assert encoded is not None
    assert encoded.params[1] == CHANGES


def test_the_next_observations_take_their_one_new_picture() -> None:
    film = camera(42)
    plain, base = stacked(film, 37, start=1), stacked(film, 37)
    size = size_of(encode_frames(plain, PICTURE, base, ceiling=len(plain)))
    assert 4.6 / 8 * PIXELS < size < 5.3 / 8 * PIXELS


def test_an_equal_chunk_of_frames_takes_parameters_only() -> None:
    plain = stacked(camera(30), 26)
    assert size_of(encode_frames(plain, PICTURE, plain, ceiling=len(plain))) < 120


def test_the_chunk_before_saves_the_pictures_that_both_have() -> None:
    film = camera(60)
    plain, base = stacked(film, 20, start=20), stacked(film, 20)
    alone = size_of(encode_frames(plain, PICTURE, ceiling=len(plain)))
    after = size_of(encode_frames(plain, PICTURE, base, ceiling=len(plain)))
    assert alone - after > 3 * 4.6 / 8 * PIXELS


def test_environments_that_take_turns_are_compared_with_themselves() -> None:
    rng = np.random.default_rng(7)
    films = [clean(20) + rng.integers(0, 100, (1, SIDE, SIDE), dtype=np.uint8) for _ in range(3)]
    rows = memoryview(np.stack([films[row % 3][row // 3] for row in range(60)]).reshape(-1))
    size = size_of(encode_frames(rows, PICTURE._replace(per_row=3), ceiling=len(rows)))
    assert size < 3 * PIXELS + 60 * 8 * 6 + 2000  # a picture of each, and what moves
    assert encode_frames(rows, PICTURE, ceiling=len(rows)) is None  # in one series nothing follows from the one before


def test_rows_of_numbers_that_come_again_are_stored_once() -> None:
    rows = np.random.default_rng(1).standard_normal((500, 17)).astype(np.float32)
    base, plain = memoryview(rows[:-1].view(np.uint8).reshape(-1)), memoryview(rows[1:].view(np.uint8).reshape(-1))
    size = size_of(encode_frames(plain, Frames(68, itemsize=4), base, ceiling=len(plain)))
    assert 68 <= size < 68 + 150


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_frames_that_neither_repeat_nor_follow_are_left_to_other_codecs(itemsize: int) -> None:
    plain = memoryview(np.random.default_rng(2).bytes(64 * 100))
    assert encode_frames(plain, Frames(64, itemsize=itemsize), ceiling=2 * len(plain)) is None


@pytest.mark.parametrize("size", [0, 63, 64, 127])
def test_fewer_than_two_frames_are_left_to_other_codecs(size: int) -> None:
    assert encode_frames(memoryview(bytes(size)), Frames(64), ceiling=1000) is None


def test_a_base_without_a_whole_frame_is_not_named() -> None:
    assert encode_frames(memoryview(bytes(640)), Frames(64), memoryview(bytes(63)), ceiling=1000) is None


def test_frames_stay_under_their_ceiling_or_are_none() -> None:
    plain, base = stacked(clean(30), 26), stacked(clean(30), 20)
    size = size_of(encode_frames(plain, PICTURE, base, ceiling=len(plain)))
    assert encode_frames(plain, PICTURE, base, ceiling=size + 32) is None
    assert encode_frames(plain, PICTURE, base, ceiling=size + 33) is not None


WRONG_FRAMES = {
    "frames of 15 bytes": Frames(15),
    "items of 3 bytes": Frames(48, itemsize=3),
    "part of an item": Frames(66, itemsize=4),
    "part of a row": Frames(64, 7),
    "negative width": Frames(64, -8),
    "none in a row": Frames(64, per_row=0),
    "negative skip": Frames(64, skip=-1),
    "negative skip of the base": Frames(64, base_skip=-1),
}


@pytest.mark.parametrize("name", WRONG_FRAMES)
def test_frames_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="expected frames of at least 16 bytes"):
        encode_frames(memoryview(bytes(640)), WRONG_FRAMES[name], ceiling=1000)


ROWS = {
    # shape of a row, item size: its frames
    ((4, 84, 84), 1): Frames(7056, 84, 1, 4),
    ((8, 4, 84, 84), 1): Frames(7056, 84, 1, 32),
    ((1, 3, 64, 48), 1): Frames(64 * 48, 48, 1, 3),
    ((84, 84), 1): Frames(7056, 84, 1, 1),
    ((84, 84, 1), 1): Frames(7056, 84, 1, 1),
    ((2, 84, 84, 3), 1): Frames(84 * 84 * 3, 252, 1, 2),
    ((128,), 1): Frames(128, 0, 1, 1),
    ((17,), 4): Frames(68, 0, 4, 1),
    ((5, 17), 8): Frames(136, 0, 8, 5),
    ((64, 64), 4): Frames(256, 0, 4, 64),
    ((64, 1), 4): Frames(256, 0, 4, 1),
    ((8, 3), 4): Frames(96, 0, 4, 1),
    ((4,), 16): Frames(64, 0, 8, 1),
    ((3,), 4): None,
    ((), 8): None,
    ((0,), 8): None,
}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_of_a_shape_are_frames(row: tuple[tuple[int, ...], int]) -> None:
    found = frames_of(*row)
    assert found == ROWS[row]
    if found is not None:
        assert found.size * found.per_row == np.prod(row[0]) * row[1]


# --- arithmetic ---


def test_smoothing_is_the_weighted_mean_of_the_neighbours() -> None:
    rng = np.random.default_rng(3)
    for count, height, width in ((9, 84, 84), (1, 1, 16), (3, 16, 1), (2, 2, 8), (5, 7, 11)):
        stack = rng.integers(0, 256, (count, height * width), dtype=np.uint8)
        padded = np.pad(stack.reshape(count, height, width).astype(int), ((0, 0), (2, 2), (2, 2)), mode="edge")
        weights = (1, 2, 2, 2, 1)
        total = sum(
            v * w * padded[:, y : y + height, x : x + width]
            for y, v in enumerate(weights)
            for x, w in enumerate(weights)
        )
        assert (pictures.smooth(stack, width).reshape(total.shape) == (total + 32) // 64).all()


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u8"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 16, 17, 40])
def test_cumulating_adds_up_along_time(count: int, dtype: str) -> None:
    stack = np.frombuffer(np.random.default_rng(count).bytes(count * 48), dtype).reshape(count, -1).copy()
    expected = np.cumsum(stack, axis=0, dtype=dtype)
    pictures.cumulate(stack)
    assert (stack == expected).all()


@pytest.mark.parametrize("size", [16, 17, 23, 24, 31, 64])
def test_a_change_of_any_byte_changes_the_fingerprint(size: int) -> None:
    base = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    frames = np.repeat(base[None], 1 + 8 * size, axis=0)
    for bit in range(8 * size):
        frames[1 + bit, bit // 8] ^= 1 << bit % 8
    assert len(set(pictures.fingerprints(frames).tolist())) == len(frames)


# --- choice, hints and failures ---


@pytest.mark.parametrize("level", ["balanced", "small"])
def test_the_best_of_a_chunk_of_frames_is_frames_on_the_base_that_pays(level: str) -> None:
    film = camera(80)
    plain, far, near = stacked(film, 20, start=41), stacked(film, 20), stacked(film, 20, start=40)
    limits = Limits(LEVELS[level], 200, price=LEVELS[level].price)
    bases = [Base(0, lambda: None), Base(0, lambda: far), Base(0, lambda: near)]
    found = encode_best(plain, 1, Memory(), bases, limits, PICTURE)
    assert (found.encoded.codec, found.base) == (FRAMES, 2)
    assert encode_best(plain, 1, Memory(), (), limits, PICTURE).encoded.codec == FRAMES
    assert encode_best(plain, 1, Memory(), [Base(199, lambda: near)], limits, PICTURE).base is None
    too_dear = encode_best(plain, 1, Memory(), bases, limits._replace(cost_max=11), PICTURE)
    assert too_dear.encoded.codec != FRAMES


def test_a_chunk_in_which_nothing_repeats_is_encoded_as_if_it_were_no_frames() -> None:
    plain = memoryview(np.random.default_rng(4).integers(0, 16, 64_000, dtype=np.uint8))
    limits = Limits(LEVELS["balanced"], 200)
    with_frames = encode_best(plain, 1, Memory(), (), limits, Frames(64)).encoded
    assert with_frames == encode_best(plain, 1, Memory(), (), limits).encoded


def test_a_hint_forgets_what_paid_when_the_pictures_change() -> None:
    hint = Hint()
    methods = []
    for film in (camera(14), clean(14), camera(14)):
        for _ in range(TRIAL_INTERVAL + 1):
            encoded = encode_frames(stacked(film, 10), PICTURE, hint=hint, ceiling=1 << 30)
            assert encoded is not None
            assert encoded.rejected is None
        methods.append(encoded.params[1])
    assert methods == [SMOOTHED, CHANGES, SMOOTHED]


def test_pictures_that_move_as_a_whole_are_compared_with_both_neighbours() -> None:
    rng = np.random.default_rng(5)
    film = np.cumsum(rng.integers(0, 3, (40, PIXELS)), axis=0).astype(np.uint8)
    encoded = encode_frames(memoryview(film.reshape(-1)), Frames(PIXELS), ceiling=film.size)
    assert size_of(encoded) < film.size / 3
    assert encoded is not None
    assert encoded.params[1] == BETWEEN


def test_repeats_of_what_follows_from_nothing_are_plain() -> None:
    rows = np.random.default_rng(6).integers(0, 256, (20, 256), dtype=np.uint8)
    plain = memoryview(np.concatenate([rows, rows[::-1]]).reshape(-1))
    encoded = encode_frames(plain, Frames(256, 16), ceiling=len(plain))
    assert rows.size <= size_of(encoded) < rows.size + 300
    assert encoded is not None
    assert encoded.params[1] == PLAIN


def test_wrong_fingerprints_cost_space_and_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stacked(camera(14), 10)
    monkeypatch.setattr(pictures, "fingerprints", lambda frames: np.zeros(len(frames), np.uint64))
    encoded = encode_frames(plain, PICTURE, ceiling=len(plain))
    assert encoded is not None
    assert (encoded.codec, encoded.rejected, bytes(encoded.payload)) == (RAW, "frames", bytes(plain))


def test_failing_compressor_costs_space_and_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise zstandard.ZstdError("no memory")

    plain = stacked(camera(14), 10)
    monkeypatch.setattr(zstd, "compress", fail)
    encoded = encode_frames(plain, PICTURE, ceiling=len(plain))
    assert encoded is not None
    assert (encoded.codec, encoded.rejected, bytes(encoded.payload)) == (RAW, "zstd", bytes(plain))
