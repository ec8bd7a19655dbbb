"""Which encoding a chunk gets, what a hint saves, and what happens when a compressor is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from casckpt.codec import Encoded, Hint, choose, decode_into, encode, planes, zstd
from casckpt.codec.contract import CONSTANT, PLANES, RAW, TRIAL_INTERVAL, ZSTD
from casckpt.errors import InvalidInputError

MIB = 1 << 20


def bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.tobytes())


def fp32_weights(count: int = MIB // 4, seed: int = 0) -> memoryview:
    return bytes_of(np.random.default_rng(seed).normal(size=count).astype(np.float32))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16, 100])
def test_incompressible_chunk_is_raw_and_not_copied(itemsize: int) -> None:
    plain = memoryview(os.urandom(MIB))
    encoded = encode(plain, itemsize)
    assert encoded.codec == RAW
    assert encoded.payload is plain


def test_gain_under_three_percent_is_raw() -> None:
    noise = os.urandom(100_000)
    assert encode(memoryview(noise[:98_000] + bytes(2_000)), 1).codec == RAW
    assert encode(memoryview(noise[:80_000] + bytes(20_000)), 1).codec == ZSTD


@pytest.mark.parametrize(
    ("name", "plain", "itemsize", "codec", "ratio"),
    [
        ("fp32 weights", fp32_weights(), 4, PLANES, 0.84),
        (
            "bf16 weights",
            bytes_of((np.frombuffer(fp32_weights(), np.uint32) >> 16).astype(np.uint16)),
            2,
            PLANES,
            0.685,
        ),
        ("fp32 zeros", memoryview(bytes(MIB)), 4, CONSTANT, 0.0),
        ("small int64", bytes_of(np.random.default_rng(0).integers(0, 10, MIB // 8)), 8, PLANES, 0.06),
        ("bf16 values in fp32", bytes_of(np.frombuffer(fp32_weights(), np.uint32) >> 16 << 16), 4, PLANES, 0.35),
        ("JSON", memoryview(b"".join(b'{"step": %d, "loss": %d}\n' % (i, i * i) for i in range(9999))), 1, ZSTD, 0.35),
    ],
)
def test_data_of_training_reaches_the_expected_ratio(
    name: str, plain: memoryview, itemsize: int, codec: int, ratio: float
) -> None:
    """Ratios from design.md §9 (planes + zstd-1) where it has them."""
    encoded = encode(plain, itemsize)
    assert encoded.codec == codec, name
    assert encoded.stored_size / len(plain) <= ratio


def test_low_bytes_of_weights_are_stored_raw_as_wide_lanes() -> None:
    plan = choose.choose(fp32_weights(), 4)
    assert [(lane.width, lane.mode) for lane in plan.lanes] == [
        (2, planes.MODE_RAW),
        (1, planes.MODE_RAW),
        (1, planes.MODE_ZSTD),
    ]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every trial from now on appends the size of its chunk."""
    trials: list[int] = []
    trial = choose.choose

    def counting(plain: memoryview, itemsize: int) -> choose.Plan:
        trials.append(len(plain))
        return trial(plain, itemsize)

    monkeypatch.setattr(choose, "choose", counting)
    return trials


@pytest.mark.parametrize("plain", [memoryview(os.urandom(40_000)), fp32_weights(10_000)], ids=["raw", "planes"])
def test_hint_skips_the_trial_and_tries_again_every_interval(
    monkeypatch: pytest.MonkeyPatch, plain: memoryview
) -> None:
    trials = counted(monkeypatch)
    hint = Hint()
    without_hint = encode(plain, 4)
    trials.clear()
    results = [encode(plain, 4, hint) for _ in range(2 * TRIAL_INTERVAL)]
    assert len(trials) == 3  # the first, and one per interval
    assert {result.stored_size for result in results} == {without_hint.stored_size}


def test_hint_notices_within_an_interval_that_noise_became_compressible() -> None:
    hint = Hint()
    noise, weights = memoryview(os.urandom(40_000)), fp32_weights(10_000)
    assert encode(noise, 4, hint).codec == RAW
    codecs = [encode(weights, 4, hint).codec for _ in range(TRIAL_INTERVAL)]
    assert codecs[0] == RAW
    assert codecs[-1] == PLANES


def test_hint_that_no_longer_pays_gives_raw_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = Hint()
    noise = memoryview(os.urandom(40_000))
    encode(fp32_weights(10_000), 4, hint)
    assert encode(noise, 4, hint).codec == RAW
    monkeypatch.setattr(planes, "encode", None)  # would fail if the old plan were tried again
    assert encode(noise, 4, hint).codec == RAW


def test_hint_of_another_item_size_is_not_applied() -> None:
    hint = Hint()
    encode(fp32_weights(10_000), 4, hint)
    plain = bytes_of(np.random.default_rng(0).normal(size=9_000))
    assert encode(plain, 8, hint).stored_size == encode(plain, 8).stored_size


class FlippingCompressor:
    """A release that corrupts what it compresses: one bit of the input is wrong by the time it is coded."""

    def __init__(self, compress: Callable[[memoryview, zstd.Profile], bytes], at: int) -> None:
        self.compress, self.at = compress, at

    def __call__(self, plain: memoryview, profile: zstd.Profile) -> bytes:
        wrong = bytearray(plain)
        wrong[self.at % len(wrong)] ^= 4
        return self.compress(memoryview(wrong), profile)


CHUNKS = {
    "planes": (fp32_weights(20_000), 4),
    "zstd": (memoryview(b"the quick brown fox jumps over the lazy dog " * 900), 1),
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("at", [0, 1000, -1])
def test_compressor_that_flips_a_bit_is_found_and_the_chunk_is_raw(
    monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    plain, itemsize = CHUNKS[name]
    assert encode(plain, itemsize).codec == {"planes": PLANES, "zstd": ZSTD}[name]
    monkeypatch.setattr(zstd, "compress", FlippingCompressor(zstd.compress, at))
    encoded = encode(plain, itemsize)
    assert (encoded.codec, encoded.rejected) == (RAW, name)
    assert encoded.payload is plain


@pytest.mark.parametrize("name", CHUNKS)
def test_compressor_that_damages_its_frame_is_found_and_the_chunk_is_raw(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, itemsize = CHUNKS[name]
    compress = zstd.compress
    monkeypatch.setattr(zstd, "compress", lambda plain, profile: compress(plain, profile)[:-1])
    assert encode(plain, itemsize).rejected == name


def test_compressor_that_fails_leaves_the_chunk_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plain: memoryview, profile: zstd.Profile) -> bytes:
        raise zstandard.ZstdError("out of memory")

    plain, itemsize = CHUNKS["planes"]
    hint = Hint()
    encode(plain, itemsize, hint)
    monkeypatch.setattr(zstd, "compress", fail)
    for encoded in (encode(plain, itemsize, hint), encode(plain, itemsize)):
        assert (encoded.codec, encoded.rejected) == (RAW, "zstd")


def test_item_size_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="item size 0"):
        encode(memoryview(b"abc"), 0)


def test_unaligned_chunks_and_targets_come_back() -> None:
    plain = memoryview(b"x" + bytes(fp32_weights(5_000)))[1:]
    for itemsize in (2, 4, 8, 16):
        encoded = encode(plain, itemsize)
        out = memoryview(bytearray(len(plain) + 1))[1:]
        decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, (), out)
        assert out == plain


def test_encoded_is_deterministic() -> None:
    def fields(encoded: Encoded) -> tuple[int, bytes, bytes]:
        return encoded.codec, encoded.params, bytes(encoded.payload)

    assert fields(encode(fp32_weights(), 4)) == fields(encode(fp32_weights(), 4))


def test_importing_the_codecs_loads_neither_numpy_nor_zstandard() -> None:
    script = "import sys, casckpt.codec; print(sorted({'numpy', 'zstandard', 'torch'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
