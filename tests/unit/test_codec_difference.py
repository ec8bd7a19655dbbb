"""Differences: stored forms written by hand, forms to refuse, sizes that data of training reaches, broken libraries."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from casckpt.codec import Encoded, Hint, best, decode_into, difference, encode, forms, zstd
from casckpt.codec.best import Base, encode_best
from casckpt.codec.contract import CONSTANT, DIFFERENCE, PLANES, RAW, TRIAL_INTERVAL
from casckpt.codec.difference import METHOD_DENSE, METHOD_SPARSE, encode_difference
from casckpt.codec.level import COST_MAX, LEVELS
from casckpt.codec.memory import Limits, Memory
from casckpt.errors import CorruptionError, InvalidInputError

MIB = 1 << 20


def decode(params: bytes, payload: bytes, base: bytes, size: int | None = None) -> bytes:
    """Decode into the middle of a buffer; what lies around it must stay."""
    size = len(base) if size is None else size
    whole = bytearray(b"\xee" * (size + 32))
    try:
        decode_into(DIFFERENCE, 1, params, payload, (base,), memoryview(whole)[16 : 16 + size])
    finally:
        assert whole[:16] == whole[16 + size :] == b"\xee" * 16
    return bytes(whole[16 : 16 + size])


# --- stored forms, from docs/format.md ---

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
GOLDEN = re.findall(r"^\| (0[1248] 0[01] .*?) \| (.*?) \| (.*?) \| (.*?) \|$", DOCUMENT, re.MULTILINE)


def test_the_document_has_golden_forms_of_every_item_size_and_method() -> None:
    assert {row[0][:5] for row in GOLDEN} >= {f"0{size} 0{method}" for size in (1, 2, 4, 8) for method in (0, 1)}


@pytest.mark.parametrize("row", GOLDEN, ids=" ".join)
def test_golden_form_of_the_document_decodes(row: tuple[str, ...]) -> None:
    params, payload, base, plain = (bytes.fromhex(part.replace("–", "")) for part in row)
    assert decode(params, payload, base) == plain


SPARSE = struct.Struct("<IBBIB")


def sparse(count: int, width: int, gaps: bytes, values: bytes, *, size: int = 2, gaps_size: int | None = None) -> Any:
    """Parameters and payload of a sparse form with raw parts and bias 0."""
    head = bytes((size, METHOD_SPARSE)) + bytes(size)
    head += SPARSE.pack(count, width, RAW, len(gaps) if gaps_size is None else gaps_size, 0) + bytes((RAW,))
    return head, gaps + values


WRONG = {
    # name: (parameters, payload), size of the chunk and its base
    "no parameters": ((b"", b""), 8),
    "item size alone": ((b"\x02", b""), 8),
    "item size 0": ((b"\x00\x00\x00", bytes(8)), 8),
    "item size 3": ((b"\x03\x00\x00\x00\x00\x00", bytes(9)), 9),
    "item size 16": ((b"\x10\x00" + bytes(16) + b"\x00", bytes(16)), 16),
    "method 2": ((b"\x02\x02\x00\x00\x00", bytes(8)), 8),
    "bias cut off": ((b"\x04\x00\x00\x00\x00", bytes(8)), 8),
    "no form after the bias": ((b"\x02\x00\x00\x00", bytes(8)), 8),
    "dense, payload too short": ((b"\x02\x00\x00\x00\x00", bytes(7)), 8),
    "dense, payload too long": ((b"\x02\x00\x00\x00\x00", bytes(9)), 8),
    "dense, parameters of a raw form": ((b"\x02\x00\x00\x00\x00\x00", bytes(8)), 8),
    "dense, unknown codec": ((b"\x02\x00\x00\x00\x63", bytes(8)), 8),
    "dense, difference in a difference": ((b"\x02\x00\x00\x00\x04\x02\x00\x00\x00\x00", bytes(8)), 8),
    "sparse, head cut off": ((sparse(1, 1, b"\1", b"\0\0")[0][:-3], b"\1\0\0"), 8),
    "sparse, no codec of the differences": ((sparse(1, 1, b"\1", b"\0\0")[0][:-1], b"\1\0\0"), 8),
    "sparse, gap of 0": (sparse(2, 1, b"\1\0", b"\0\0\0\0"), 8),
    "sparse, first gap of 0": (sparse(1, 1, b"\0", b"\0\0"), 8),
    "sparse, gap past the end": (sparse(1, 1, b"\5", b"\0\0"), 8),
    "sparse, gaps add up to more": (sparse(2, 1, b"\3\2", b"\0\0\0\0"), 8),
    "sparse, gaps add up to 2**32": (sparse(2, 4, b"\xff\xff\xff\xff\1\0\0\0", b"\0\0\0\0"), 8),
    "sparse, more than half changed": (sparse(3, 1, b"\1\1\1", bytes(6)), 8),
    "sparse, 4294967295 changed": (sparse(0xFFFFFFFF, 4, b"\1", b"\0\0"), 8),
    "sparse, gaps of 3 bytes": (sparse(1, 3, b"\1\0\0", b"\0\0"), 8),
    "sparse, gaps of 8 bytes": (sparse(1, 8, b"\1\0\0\0\0\0\0\0", b"\0\0"), 8),
    "sparse, gaps of no bytes": (sparse(1, 0, b"", b"\0\0"), 8),
    "sparse, too few gaps": (sparse(2, 1, b"\1", b"\0\0\0\0"), 8),
    "sparse, gaps larger than the payload": (sparse(1, 1, b"\1", b"\0\0", gaps_size=1 << 31), 8),
    "sparse, too few differences": (sparse(2, 1, b"\1\1", b"\0\0"), 8),
    "sparse, trailing payload": (sparse(1, 1, b"\1", b"\0\0\0"), 8),
    "sparse, rest missing": (sparse(1, 1, b"\1", b"\0\0"), 9),
    "sparse, payload shorter than the rest": (sparse(0, 1, b"", b"", size=8), 7),
    "sparse, changes in no item": (sparse(1, 1, b"\1", b""), 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_form_is_corruption_and_writes_nothing_outside(name: str) -> None:
    (params, payload), size = WRONG[name]
    with pytest.raises(CorruptionError):
        decode(params, payload, bytes(size))


@pytest.mark.parametrize("size", [0, 7, 9])
def test_base_of_another_size_is_corruption(size: int) -> None:
    with pytest.raises(CorruptionError, match="base of"):
        decode(b"\x02\x00\x00\x00\x00", bytes(8), bytes(size), 8)


@pytest.mark.parametrize("bases", [(), (bytes(8), bytes(8))])
def test_difference_takes_exactly_one_base(bases: tuple[bytes, ...]) -> None:
    with pytest.raises(CorruptionError, match="bases"):
        decode_into(DIFFERENCE, 1, b"\x02\x00\x00\x00\x00", bytes(8), bases, memoryview(bytearray(8)))


# --- what gets which form ---


def view(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def adam_pair(count: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights before and after a step of Adam: normalised gradients of about 0.3."""
    rng = np.random.default_rng(0)
    before = rng.normal(scale=0.05, size=count).astype(np.float32)
    return before, before - np.float32(rate) * rng.normal(scale=0.3, size=count).astype(np.float32)


def changed_bf16(density: float) -> tuple[memoryview, memoryview]:
    """Base and chunk of bf16 weights of which a share moved by one unit in the last place, up or down."""
    rng = np.random.default_rng(1)
    base = bf16(rng.normal(scale=0.05, size=MIB // 2))
    moved = rng.random(len(base)) < density
    return view(base), view(base + np.where(moved, rng.choice([1, 65535], len(base)), 0).astype(np.uint16))


def share(encoded: Encoded | None, plain: memoryview) -> float:
    assert encoded is not None
    assert encoded.rejected is None
    assert encoded.stored_size == len(encoded.payload)
    return (encoded.stored_size + len(encoded.params)) / len(plain)


@pytest.mark.parametrize(
    ("density", "ratio"), [(0.0, 0.0001), (0.001, 0.0011), (0.01, 0.0069), (0.05, 0.0239), (0.1, 0.04), (0.3, 0.09)]
)
def test_scattered_changes_cost_little_more_than_their_entropy(density: float, ratio: float) -> None:
    """Entropy of positions and signs: 0.00078, 0.0057, 0.0210, 0.0356, 0.0738 of the chunk."""
    base, plain = changed_bf16(density)
    encoded = encode_difference(plain, base, 2, ceiling=MIB)
    assert share(encoded, plain) <= ratio
    assert encoded is not None and encoded.params[1] == METHOD_SPARSE


def test_fp32_weights_one_step_apart_reach_the_expected_ratio() -> None:
    before, after = adam_pair(MIB // 4, 1e-6)
    base, plain = view(before), view(after)
    encoded = encode_difference(plain, base, 4, ceiling=MIB)
    assert encoded is not None and encoded.params[1] == METHOD_DENSE
    assert share(encoded, plain) <= 0.33  # design §9: 0.316 on real ones
    assert share(encode(plain, 4), plain) > 0.8


def test_decaying_moments_are_stored_without_bias() -> None:
    """All differences have one sign and nearly one size: a bias would only spread them over more byte values."""
    rng = np.random.default_rng(0)
    before = (rng.normal(size=MIB // 4) ** 2).astype(np.float32)
    plain = view(before * np.float32(0.999**16))
    encoded = encode_difference(plain, view(before), 4, ceiling=MIB)
    assert encoded is not None and encoded.params[2:6] == bytes(4)
    assert share(encoded, plain) < share(encode(plain, 4), plain) - 0.03


def test_rows_that_changed_are_stored_alone() -> None:
    """An embedding of which 40 % of the rows got a gradient: the others cost next to nothing."""
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**32, (1024, 256), dtype=np.uint32)
    after = before.copy()
    rows = rng.permutation(1024)[:410]
    after[rows] = rng.integers(0, 2**32, (410, 256), dtype=np.uint32)
    assert share(encode_difference(view(after), view(before), 4, ceiling=MIB), view(after)) < 410 / 1024 + 0.01


def test_item_sizes_beyond_the_codecs_are_cut_down() -> None:
    before = np.random.default_rng(0).normal(size=6000)
    for itemsize, size in ((16, 8), (12, 4), (6, 2), (3, 1), (64, 8), (7, 1)):
        encoded = encode_difference(view(before + 1e-9), view(before), itemsize, ceiling=48_000)
        assert encoded is not None and encoded.params[0] == size


def test_difference_that_misses_the_ceiling_is_none() -> None:
    base, plain = changed_bf16(0.01)
    encoded = encode_difference(plain, base, 2, ceiling=MIB)
    assert encoded is not None
    needed = encoded.stored_size + len(encoded.params) + 32  # with the id of the base
    assert encode_difference(plain, base, 2, ceiling=needed) is None
    assert encode_difference(plain, base, 2, ceiling=needed + 1) is not None


@pytest.mark.parametrize("ceiling", [MIB, 100, 0, -5])
def test_unrelated_chunk_is_none(ceiling: int) -> None:
    rng = np.random.default_rng(0)
    assert encode_difference(memoryview(rng.bytes(MIB)), memoryview(rng.bytes(MIB)), 4, ceiling=ceiling) is None


def test_base_of_another_size_gives_none() -> None:
    assert encode_difference(memoryview(bytes(8)), memoryview(bytes(12)), 4, ceiling=100) is None


def test_item_size_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="item size 0"):
        encode_difference(memoryview(b"abc"), memoryview(b"abc"), 0, ceiling=3)


def test_encoded_is_deterministic() -> None:
    for base, plain in (changed_bf16(0.1), (view(adam_pair(9000, 1e-6)[0]), view(adam_pair(9000, 1e-6)[1]))):
        one, other = (encode_difference(plain, base, 2, ceiling=MIB) for _ in range(2))
        assert one is not None and other is not None
        assert (one.params, bytes(one.payload)) == (other.params, bytes(other.payload))


# --- hints ---


def test_hint_skips_the_trials_and_tries_again_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []
    trial = difference.choose.choose
    monkeypatch.setattr(difference.choose, "choose", lambda *given: trials.append(1) or trial(*given))
    before, after = adam_pair(9000, 1e-6)
    hint = Hint()
    sizes = {
        share(encode_difference(view(after), view(before), 4, hint, ceiling=36_000), view(after))
        for _ in range(2 * TRIAL_INTERVAL)
    }
    assert len(trials) == 3 * 2  # two biases; the first use, and one per interval
    assert len(sizes) == 1


def test_hint_of_a_leaf_that_gains_nothing_spares_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base, plain = memoryview(rng.bytes(MIB)), memoryview(rng.bytes(MIB))
    hint = Hint()
    assert encode_difference(plain, base, 4, hint, ceiling=MIB * 9 // 10) is None
    monkeypatch.setattr(difference, "encode_part", None)  # would fail if anything were encoded
    assert encode_difference(plain, base, 4, hint, ceiling=MIB * 9 // 10) is None


def test_hint_of_other_data_does_not_stop_a_difference_of_few_items() -> None:
    rng = np.random.default_rng(0)
    hint = Hint()
    assert encode_difference(memoryview(rng.bytes(MIB)), memoryview(rng.bytes(MIB)), 2, hint, ceiling=MIB) is None
    base, plain = changed_bf16(0.01)
    assert share(encode_difference(plain, base, 2, hint, ceiling=MIB), plain) < 0.007


# --- a compressor that is wrong ---


def pairs() -> dict[str, tuple[memoryview, memoryview]]:
    before, after = adam_pair(20_000, 1e-6)
    base, plain = changed_bf16(0.05)
    return {"dense": (view(before), view(after)), "sparse": (base, plain)}


def flipping(compress: Callable[..., bytes]) -> Callable[..., bytes]:
    """Compress something that has one wrong bit."""

    def wrong(plain: memoryview, profile: zstd.Profile) -> bytes:
        copy = bytearray(plain)
        copy[len(copy) // 2] ^= 4
        return compress(memoryview(copy), profile)

    return wrong


@pytest.mark.parametrize("name", ["dense", "sparse"])
@pytest.mark.parametrize("kind", ["flips", "cuts"])
def test_compressor_that_is_wrong_is_found_and_the_chunk_is_raw(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    base, plain = pairs()[name]
    itemsize = {"dense": 4, "sparse": 2}[name]
    assert encode_difference(plain, base, itemsize, ceiling=len(plain)) is not None
    compress = zstd.compress
    broken = flipping(compress) if kind == "flips" else lambda plain, profile: compress(plain, profile)[:-1]
    monkeypatch.setattr(zstd, "compress", broken)
    encoded = encode_difference(plain, base, itemsize, ceiling=len(plain))
    assert encoded is not None
    assert (encoded.codec, encoded.rejected) == (RAW, "difference")
    assert encoded.payload is plain


def test_compressor_that_fails_leaves_the_chunk_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plain: memoryview, profile: zstd.Profile) -> bytes:
        raise zstandard.ZstdError("out of memory")

    monkeypatch.setattr(zstd, "compress", fail)
    base, plain = pairs()["sparse"]
    encoded = encode_difference(plain, base, 2, ceiling=len(plain))
    assert encoded is not None and (encoded.codec, encoded.rejected) == (RAW, "zstd")


@pytest.mark.parametrize("at", [0, 5, -1])
def test_arithmetic_that_is_wrong_anywhere_is_found(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The proof covers every byte, the rest after the last item included."""
    decode_right = decode_into

    def decode_wrong(codec: int, version: int, params: bytes, payload: Any, bases: Any, out: memoryview) -> None:
        decode_right(codec, version, params, payload, bases, out)
        if bases:  # the whole, not its parts
            out[at] ^= 1

    monkeypatch.setattr(forms, "decode_into", decode_wrong)
    base = bytes(range(251)) * 8 + b"xyz"
    encoded = encode_difference(memoryview(b"\1" + base[1:]), memoryview(base), 4, ceiling=len(base))
    assert encoded is not None and encoded.rejected == "difference"


# --- with or without a base ---


def encode_to(plain: memoryview, itemsize: int, memory: Memory, base: memoryview | None) -> Encoded:
    """The best encoding where cost is no matter."""
    bases = [] if base is None else [Base(0, lambda: base)]
    return encode_best(plain, itemsize, memory, bases, Limits(LEVELS["balanced"], COST_MAX)).encoded


def test_best_without_a_base_is_the_standalone_encoding() -> None:
    for plain in (view(adam_pair(9000, 1e-3)[1]), memoryview(b"text " * 99), memoryview(b""), memoryview(bytes(99))):
        one, other = encode_to(plain, 4, Memory(), None), encode(plain, 4)
        assert (one.codec, one.params, bytes(one.payload)) == (other.codec, other.params, bytes(other.payload))


def test_best_takes_the_base_when_it_saves_the_margin() -> None:
    memory = Memory()
    before, after = adam_pair(MIB // 4, 1e-6)
    for _ in range(3):
        assert encode_to(view(after), 4, memory, view(before)).codec == DIFFERENCE
    for _ in range(3):
        assert encode_to(view(after), 4, memory, view(before[::-1])).codec == PLANES
    assert encode_to(view(after), 4, memory, view(before)[:-4]).codec == PLANES
    assert encode_to(memoryview(bytes(MIB)), 4, memory, view(before)).codec == CONSTANT


def test_best_keeps_standalone_when_the_base_saves_less_than_its_price() -> None:
    """First moments one step apart: 0.82 with a base, 0.84 without."""
    rng = np.random.default_rng(0)
    before = rng.normal(size=MIB // 4).astype(np.float32)
    after = np.float32(0.9) * before + np.float32(0.436) * rng.normal(size=MIB // 4).astype(np.float32)
    with_base = encode_difference(view(after), view(before), 4, ceiling=MIB)
    alone = encode(view(after), 4)
    assert alone.stored_size - 0.03 * MIB < share(with_base, view(after)) * MIB < alone.stored_size
    for price, codec in ((0.1, PLANES), (0.0, DIFFERENCE)):
        limits = Limits(LEVELS["balanced"], COST_MAX, price=price)
        assert encode_best(view(after), 4, Memory(), [Base(0, lambda: view(before))], limits).encoded.codec == codec


def test_best_measures_standalone_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    right = best.choose.encode
    monkeypatch.setattr(best.choose, "encode", lambda *given, **named: measured.append(1) or right(*given, **named))
    memory = Memory()
    before, after = adam_pair(9000, 1e-6)
    for _ in range(2 * TRIAL_INTERVAL):
        assert encode_to(view(after), 4, memory, view(before)).codec == DIFFERENCE
    assert len(measured) == 2


def test_best_reports_a_difference_that_failed_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise CorruptionError("wrong")

    monkeypatch.setattr(forms, "decode_into", fail)
    before, after = adam_pair(9000, 1e-6)
    encoded = encode_to(view(after), 4, Memory(), view(before))
    assert (encoded.codec, encoded.rejected) == (PLANES, "difference")


def test_sixteen_threads_share_a_memory_and_get_their_own_chunks() -> None:
    memory = Memory()
    good = [0] * 16
    start = threading.Barrier(16)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        before = rng.normal(size=9000).astype(np.float32)
        start.wait()
        for step in range(12):
            moved = rng.random(9000) < (0.02, 0.2, 1.0)[step % 3]
            after = np.where(moved, before + np.float32(1e-6) * rng.normal(size=9000), before).astype(np.float32)
            encoded = encode_to(view(after), 4, memory, view(before))
            out = bytearray(36_000)
            bases = (view(before),) if encoded.codec == DIFFERENCE else ()
            decode_into(encoded.codec, 1, encoded.params, encoded.payload, bases, memoryview(out))
            good[number] += out == after.tobytes() and encoded.rejected is None and encoded.codec == DIFFERENCE

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [12] * 16
