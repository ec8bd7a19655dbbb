"""Predictions: sizes that real optimizers reach, forms to refuse, the same bits in every float environment.

Steps are torch's own, in each of its kernels, so that what a prediction has to equal comes from outside.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casckpt.codec import Encoded, Hint, decode_into, encode, forms, formulas, zstd
from casckpt.codec.contract import DIFFERENCE, PREDICTION, RAW, TRIAL_INTERVAL
from casckpt.codec.difference import encode_difference
from casckpt.codec.formulas import KINDS, ROUND_BF16, ROUND_FP16, Formula, itemsize_of, predict
from casckpt.codec.models import (
    ADAM_WEIGHT,
    AVERAGE,
    CENTERED_STEP,
    DRIFTING_AVERAGE,
    FIRST_MOMENT,
    MOMENTUM_WEIGHT,
    NESTEROV_WEIGHT,
    ROUNDING,
    SECOND_MOMENT,
    SQUARES,
    Model,
)
from casckpt.codec.prediction import Operand, encode_prediction
from casckpt.errors import CorruptionError, InvalidInputError

COUNT = 30_000
RATE, DECAY, EPS = 3e-4, 0.01, 1e-8
BETAS = (0.9, 0.999)

State = dict[str, np.ndarray]


OPTIMIZERS = {
    "single": lambda given: torch.optim.AdamW(given, lr=RATE, weight_decay=DECAY, foreach=False),
    "foreach": lambda given: torch.optim.AdamW(given, lr=RATE, weight_decay=DECAY, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, lr=RATE, weight_decay=DECAY, fused=True),
    "decay in the gradient": lambda given: torch.optim.Adam(given, lr=RATE, weight_decay=DECAY),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "fused momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "nesterov": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
}
ADAMS = ("single", "foreach", "fused", "decay in the gradient")


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@cache
def train(name: str, *, is_bf16: bool = False, dtype: torch.dtype = torch.float32) -> tuple[State, State, int]:
    """Copies of all state before and after the last of 40 steps on noise, and that step's number; bf16 as bits."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(COUNT) * 0.05).to(dtype))
    scale = torch.rand(COUNT) * 1e-2
    optimizer = OPTIMIZERS[name]([weight])
    states: list[State] = []
    for _ in range(40):
        gradient = torch.randn(COUNT) * scale
        weight.grad = (gradient.bfloat16() if is_bf16 else gradient).to(dtype)
        optimizer.step()
        state = optimizer.state[weight]
        leaves = {"weight": weight.detach(), **{name: state[name] for name in state if name != "step"}}
        states = [*states[-1:], {name: numbers(leaf).copy() for name, leaf in leaves.items()}]
    return states[0], states[1], 40


def adam_models(kind: int, step: int, *, is_decoupled: bool = True, rate: float = RATE) -> list[Model]:
    beta1, beta2 = BETAS
    constants = {
        SECOND_MOMENT: (1 - beta1, beta2, 1 - beta2),
        FIRST_MOMENT: (beta1, 1 - beta1),
        ADAM_WEIGHT: (1 - rate * DECAY * is_decoupled, -rate / (1 - beta1**step), (1 - beta2**step) ** 0.5, EPS),
    }
    return [Model(kind, constants[kind])]


def view(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def operands(*arrays: np.ndarray) -> list[Operand]:
    return [Operand((view(array),), array.itemsize) for array in arrays]


def bases_of(given: list[Operand]) -> list[memoryview]:
    return [chunk for operand in given for chunk in operand.chunks]


def share(encoded: Encoded | None, plain: memoryview) -> float:
    assert encoded is not None
    assert encoded.rejected is None
    assert encoded.codec in (PREDICTION, DIFFERENCE)
    assert encoded.stored_size == len(encoded.payload)
    return (encoded.stored_size + len(encoded.params)) / len(plain)


def decoded(encoded: Encoded, given: list[Operand], size: int) -> bytes:
    out = bytearray(size)
    decode_into(encoded.codec, encoded.version, encoded.params, encoded.payload, bases_of(given), memoryview(out))
    return bytes(out)


# --- what real steps take ---


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ADAMS)
def test_adam_step_predicts_second_moment_and_weight(name: str) -> None:
    before, after, step = train(name)
    is_decoupled = name != "decay in the gradient"
    moment = view(after["exp_avg_sq"])
    given = operands(before["exp_avg_sq"], before["exp_avg"], after["exp_avg"])
    encoded = encode_prediction(moment, adam_models(SECOND_MOMENT, step), given, ceiling=len(moment))
    assert share(encoded, moment) <= 0.02  # design §9: 0.017
    weight = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    models = adam_models(ADAM_WEIGHT, step, is_decoupled=is_decoupled)
    encoded = encode_prediction(weight, models, given, ceiling=len(weight))
    assert share(encoded, weight) <= 0.004
    assert encoded is not None and decoded(encoded, given, len(weight)) == bytes(weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_bf16_gradients_make_both_moments_cheap(name: str) -> None:
    before, after, step = train(name, is_bf16=True)
    moment = view(after["exp_avg"])
    given = operands(before["exp_avg"])
    encoded = encode_prediction(moment, adam_models(FIRST_MOMENT, step), given, ceiling=len(moment))
    assert share(encoded, moment) <= 0.39
    assert share(encoded, moment) < (encode(moment, 4).stored_size / len(moment)) / 2
    moment = view(after["exp_avg_sq"])
    given = operands(before["exp_avg_sq"], before["exp_avg"], after["exp_avg"])
    encoded = encode_prediction(moment, adam_models(SECOND_MOMENT, step), given, ceiling=len(moment))
    assert share(encoded, moment) <= 0.002


@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_step_in_bf16_predicts_second_moment_and_weight(name: str) -> None:
    """Weights, gradients and moments of bf16: kernels that round after each operation, and those that round once."""
    before, after, step = train(name, dtype=torch.bfloat16)
    moment = view(after["exp_avg_sq"])
    given = operands(before["exp_avg_sq"], before["exp_avg"], after["exp_avg"])
    encoded = encode_prediction(moment, adam_models(SECOND_MOMENT, step), given, ceiling=len(moment))
    assert share(encoded, moment) <= 0.04
    assert share(encode_difference(moment, view(before["exp_avg_sq"]), 2, ceiling=len(moment)), moment) > 0.2
    weight = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    encoded = encode_prediction(weight, adam_models(ADAM_WEIGHT, step), given, ceiling=len(weight))
    assert share(encoded, weight) <= 0.01  # the fused kernel steps by moments that it has not rounded yet
    assert encoded is not None and decoded(encoded, given, len(weight)) == bytes(weight)


def test_bf16_weight_follows_from_float32_moments() -> None:
    """A step computed in float32 and rounded at the end, as optimizers without master weights do it."""
    before, after, step = train("fused")
    rounded = torch.from_numpy(before["weight"]).bfloat16()
    m, v = torch.from_numpy(after["exp_avg"]), torch.from_numpy(after["exp_avg_sq"])
    model = adam_models(ADAM_WEIGHT, step, rate=0.1)[0]
    keep, rate, correction, eps = model.constants
    new = (rounded.float() * keep + rate * m / (v.sqrt() / correction + eps)).bfloat16()
    given = operands(numbers(rounded), after["exp_avg"], after["exp_avg_sq"])
    encoded = encode_prediction(view(numbers(new)), [model], given, ceiling=2 * COUNT)
    assert share(encoded, view(numbers(new))) <= 0.002
    assert float((new != rounded).float().mean()) > 0.9


@pytest.mark.parametrize("name", ["momentum", "fused momentum"])
def test_sgd_step_predicts_the_weight_exactly(name: str) -> None:
    before, after, _ = train(name)
    plain = view(after["weight"])
    given = operands(before["weight"], after["momentum_buffer"])
    encoded = encode_prediction(plain, [Model(MOMENTUM_WEIGHT, (-0.1,))], given, ceiling=len(plain))
    assert share(encoded, plain) <= 0.001


def test_nesterov_step_predicts_the_weight() -> None:
    before, after, _ = train("nesterov")
    plain = view(after["weight"])
    given = operands(before["weight"], before["momentum_buffer"], after["momentum_buffer"])
    encoded = encode_prediction(plain, [Model(NESTEROV_WEIGHT, (-0.1, 0.9))], given, ceiling=len(plain))
    assert share(encoded, plain) <= 0.02


def test_momentum_buffer_of_bf16_gradients_is_a_first_moment() -> None:
    before, after, _ = train("momentum", is_bf16=True)
    plain = view(after["momentum_buffer"])
    given = operands(before["momentum_buffer"])
    encoded = encode_prediction(plain, [Model(FIRST_MOMENT, (0.9, 1.0))], given, ceiling=len(plain))
    assert share(encoded, plain) <= 0.39


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_copy_costs_parameters_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    master = torch.randn(COUNT) * 10.0 ** torch.randint(-12, 4, (COUNT,))
    copy = view(master.to(dtype).view(torch.int16).numpy())
    encoded = encode_prediction(copy, [Model(ROUNDING, ())], operands(master.numpy()), ceiling=len(copy))
    assert encoded is not None and encoded.stored_size == 0 and share(encoded, copy) < 60 / len(copy)


def test_operand_of_several_chunks_and_an_offset_is_one_run() -> None:
    rng = np.random.default_rng(0)
    master = rng.normal(size=9000).astype(np.float32)
    plain = view(torch.from_numpy(master[700:8700]).bfloat16().view(torch.int16).numpy())
    chunks = tuple(view(master)[start : start + 4096] for start in range(0, 36_000, 4096))
    given = [Operand(chunks, 4, 700)]
    encoded = encode_prediction(plain, [Model(ROUNDING, ())], given, ceiling=len(plain))
    assert encoded is not None and encoded.stored_size == 0
    assert decoded(encoded, given, len(plain)) == bytes(plain)


def test_rows_without_gradient_are_exact() -> None:
    """Zeros everywhere, and weights that only decay."""
    weight = np.random.default_rng(0).normal(size=COUNT).astype(np.float32)
    weight[::3] = 0
    zeros = np.zeros(COUNT, np.float32)
    after = (torch.from_numpy(weight.copy()) * (1 - RATE * DECAY)).numpy()
    given = operands(weight, zeros, zeros)
    encoded = encode_prediction(view(after), adam_models(ADAM_WEIGHT, 5), given, ceiling=4 * COUNT)
    assert encoded is not None and encoded.stored_size == 0


# --- which model, and whether at all ---


def test_trial_finds_the_model_among_others() -> None:
    before, after, step = train("fused")
    plain = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    wrong = [adam_models(ADAM_WEIGHT, step, rate=rate)[0] for rate in (1e-4, 2 * RATE)]
    broken = Model(ADAM_WEIGHT, (float("nan"), -1e-3, 0.5, 1e-8))
    models = [broken, *wrong, *adam_models(ADAM_WEIGHT, step), wrong[0]]
    assert share(encode_prediction(plain, models, given, ceiling=len(plain)), plain) <= 0.001


def test_unrelated_chunk_or_low_ceiling_is_none() -> None:
    before, after, step = train("fused")
    plain = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    models = adam_models(ADAM_WEIGHT, step)
    noise = memoryview(np.random.default_rng(0).bytes(len(plain)))
    assert encode_prediction(noise, models, given, ceiling=len(plain) * 9 // 10) is None
    for ceiling in (0, -5, 96):
        assert encode_prediction(plain, models, given, ceiling=ceiling) is None
    encoded = encode_prediction(plain, models, given, ceiling=len(plain))
    assert encoded is not None
    needed = encoded.stored_size + len(encoded.params) + 3 * 32  # with the ids of the bases
    assert encode_prediction(plain, models, given, ceiling=needed) is None
    assert encode_prediction(plain, models, given, ceiling=needed + 1) is not None


def test_nothing_to_predict_from_is_none() -> None:
    floats = np.ones(1000, np.float32)
    plain = view(floats)
    model = Model(MOMENTUM_WEIGHT, (-0.1,))
    whole = Operand((plain,), 4)
    out_of_bounds = Model(MOMENTUM_WEIGHT, (float("inf"),))
    assert encode_prediction(plain, [], [whole, whole], ceiling=4000) is None
    assert encode_prediction(plain, [out_of_bounds], [whole, whole], ceiling=4000) is None
    assert encode_prediction(plain, [Model(MOMENTUM_WEIGHT, ())], [whole, whole], ceiling=4000) is None
    for short in (Operand((plain,), 4, 1), Operand((plain[:3996],), 4), Operand((), 4), Operand((plain,), 4, 5000)):
        assert encode_prediction(plain, [model], [whole, short], ceiling=4000) is None
    across = Operand((plain[:1001], plain[1001:]), 4)  # an item in two chunks
    assert encode_prediction(plain, [model], [whole, across], ceiling=4000) is None
    many = Operand(tuple(plain[start : start + 200] for start in range(0, 4000, 200)), 4)
    assert encode_prediction(plain, [model], [whole, many], ceiling=4000) is None
    assert encode_prediction(memoryview(b""), [model], [whole, whole], ceiling=4000) is None
    assert encode_prediction(memoryview(b"abc"), [model], [whole, whole], ceiling=4000) is None


def test_operands_and_models_must_fit_their_kind() -> None:
    plain = memoryview(bytes(400))
    operand = Operand((plain,), 4)
    weight, rounding = Model(MOMENTUM_WEIGHT, (-0.1,)), Model(ROUNDING, ())
    for models, given in (
        ([weight], [operand]),
        ([weight], [operand, Operand((plain,), 8)]),
        ([rounding], [Operand((plain,), 2)]),
        ([weight, rounding], [operand, operand]),
        ([Model(99, ())], [operand]),
    ):
        with pytest.raises(InvalidInputError):
            encode_prediction(plain, models, given, ceiling=400)


def test_hint_skips_the_trials_and_tries_again_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, step = train("foreach")
    plain = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    evaluated: list[int] = []
    right = formulas.predict
    monkeypatch.setattr(
        "casckpt.codec.prediction.predict", lambda formula, *rest: evaluated.append(1) or right(formula, *rest)
    )
    hint = Hint()
    models = adam_models(ADAM_WEIGHT, step)
    sizes = {
        share(encode_prediction(plain, models, given, hint, ceiling=len(plain)), plain)
        for _ in range(2 * TRIAL_INTERVAL)
    }
    trial = len(KINDS[ADAM_WEIGHT].variants) + 1  # and one to measure the best
    assert len(evaluated) == 3 * trial + 2 * (2 * TRIAL_INTERVAL)  # the first, one per interval; each use and its proof
    assert len(sizes) == 1


def test_hint_follows_constants_that_change_with_every_step() -> None:
    before, after, step = train("fused")
    plain = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    hint = Hint()
    other = adam_models(ADAM_WEIGHT, step, rate=1e-5)
    for _ in range(3):
        assert share(encode_prediction(plain, adam_models(ADAM_WEIGHT, step), given, hint, ceiling=len(plain)), plain)
    assert hint.recall().ratio < 0.01
    assert encode_prediction(plain, other, given, hint, ceiling=len(plain) // 10) is None
    hint_of_one_more = Hint()
    models = [*other, *adam_models(ADAM_WEIGHT, step)]
    assert encode_prediction(plain, models, given, hint_of_one_more, ceiling=len(plain)) is not None
    assert encode_prediction(plain, models[1:], given, hint_of_one_more, ceiling=len(plain)) is not None


def test_chunk_unlike_the_others_does_not_spoil_the_hint() -> None:
    before, after, step = train("fused")
    plain = view(after["weight"])
    given = operands(before["weight"], after["exp_avg"], after["exp_avg_sq"])
    models = adam_models(ADAM_WEIGHT, step)
    noise = memoryview(np.random.default_rng(0).bytes(len(plain)))
    hint = Hint()
    for _ in range(3):
        assert encode_prediction(plain, models, given, hint, ceiling=len(plain)) is not None
        assert encode_prediction(noise, models, given, hint, ceiling=len(plain)) is None


def test_encoded_is_deterministic() -> None:
    before, after, step = train("foreach", is_bf16=True)
    plain = view(after["exp_avg"])
    one, other = (
        encode_prediction(plain, adam_models(FIRST_MOMENT, step), operands(before["exp_avg"]), ceiling=len(plain))
        for _ in range(2)
    )
    assert one is not None and other is not None
    assert (one.params, bytes(one.payload)) == (other.params, bytes(other.payload))


@pytest.mark.parametrize("kind", ["flips", "cuts"])
def test_compressor_that_is_wrong_is_found_and_the_chunk_is_raw(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    before, after, step = train("foreach", is_bf16=True)
    plain, given = view(after["exp_avg"]), operands(before["exp_avg"])
    compress = zstd.compress

    def flip(part: memoryview, profile: zstd.Profile) -> bytes:
        copy = bytearray(part)
        copy[len(copy) // 2] ^= 4
        return compress(memoryview(copy), profile)

    broken = flip if kind == "flips" else lambda part, profile: compress(part, profile)[:-1]
    monkeypatch.setattr(zstd, "compress", broken)
    encoded = encode_prediction(plain, adam_models(FIRST_MOMENT, step), given, ceiling=len(plain))
    assert encoded is not None
    assert (encoded.codec, encoded.rejected) == (RAW, "prediction")
    assert encoded.payload is plain


def test_compressor_that_fails_leaves_the_chunk_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plain: memoryview, profile: zstd.Profile) -> bytes:
        raise zstd.ZstdError("out of memory")

    monkeypatch.setattr(zstd, "compress", fail)
    before, after, step = train("foreach", is_bf16=True)
    plain = view(after["exp_avg"])
    encoded = encode_prediction(plain, adam_models(FIRST_MOMENT, step), operands(before["exp_avg"]), ceiling=len(plain))
    assert encoded is not None and (encoded.codec, encoded.rejected) == (RAW, "zstd")


def test_arithmetic_that_is_wrong_anywhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = forms.decode_into

    def wrong(codec: int, version: int, params: bytes, payload: Any, bases: Any, out: memoryview) -> None:
        right(codec, version, params, payload, bases, out)
        if codec == PREDICTION:
            out[-1] ^= 1

    monkeypatch.setattr(forms, "decode_into", wrong)
    plain = view(np.linspace(1, 2, 999, dtype=np.float32))
    given = [Operand((plain,), 4), Operand((memoryview(bytes(3996)),), 4)]
    encoded = encode_prediction(plain, [Model(MOMENTUM_WEIGHT, (-0.1,))], given, ceiling=3996)
    assert encoded is not None and encoded.rejected == "prediction"


# --- forms of the document, and forms to refuse ---

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SECTION = DOCUMENT[DOCUMENT.index("**Prediction.**") : DOCUMENT.index("## 6. Pack")]
GOLDEN = re.findall(r"^\| (\w[^|]*) \| (0[\da] 0\d 0\d .*?) \| (.*?) \| (.*?) \| (.*?) \|$", SECTION, re.MULTILINE)


def variants_of(number: int) -> set[int]:
    return {*KINDS[number].variants, *KINDS[number].narrow_variants}


def test_the_document_has_golden_forms_of_every_kind() -> None:
    shown = {tuple(bytes.fromhex(row[1])[:3]) for row in GOLDEN}
    assert {number for number, _, _ in shown} == set(KINDS)
    assert {row[:2] for row in shown} == {(number, variant) for number in KINDS for variant in variants_of(number)}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row[0])
@pytest.mark.parametrize("flushes", [False, True])
def test_golden_form_of_the_document_decodes(row: tuple[str, ...], flushes: bool) -> None:
    _, params, payload, given, plain = row
    bases = [bytes.fromhex(base) for base in given.split("·")]
    expected = bytes.fromhex(plain)
    out = bytearray(b"\xee" * (len(expected) + 32))
    assert not flushes or torch.set_flush_denormal(True)
    try:
        target = memoryview(out)[16:-16]
        decode_into(PREDICTION, 1, bytes.fromhex(params), bytes.fromhex(payload.replace("–", "")), bases, target)
    finally:
        torch.set_flush_denormal(False)
    assert bytes(out) == b"\xee" * 16 + expected + b"\xee" * 16


STEP = struct.pack("<f", -0.5)
REST = b"\x04\x01\0\0\0\0" + b"\0\0\0\0\1\0\0\0\0\0\0\0"  # a sparse form of codec 4 in which nothing changes
TWO = b"\4\1\0\0\0\0" * 2  # two operands of one chunk, nothing skipped
HEAD = bytes((MOMENTUM_WEIGHT, 0, 0))
BASES = (bytes(16), bytes(16))
GRADIENT = bytes((FIRST_MOMENT, 0, ROUND_BF16)) + struct.pack("<ff", 0.9, 0.1) + TWO[:6]


def gradient(codec: int, size: int, params: bytes = b"", params_size: int | None = None) -> bytes:
    stated = len(params) if params_size is None else params_size
    return GRADIENT + struct.pack("<BIB", codec, size, stated) + params + REST


WRONG: dict[str, tuple[bytes, bytes, tuple[bytes, ...], int]] = {
    "no parameters": (b"", b"", BASES, 16),
    "a head alone": (HEAD, b"", BASES, 16),
    "parameters cut in the operands": (HEAD + STEP + TWO[:-1], b"", BASES, 16),
    "nothing after the operands": (HEAD + STEP + TWO, b"", BASES, 16),
    "kind 0": (b"\0\0\0" + STEP + TWO + REST, b"", BASES, 16),
    "kind 99": (b"\x63\0\0" + STEP + TWO + REST, b"", BASES, 16),
    "unknown variant": (bytes((MOMENTUM_WEIGHT, 2, 0)) + STEP + TWO + REST, b"", BASES, 16),
    "rounding of a kind that has none": (bytes((MOMENTUM_WEIGHT, 0, 1)) + STEP + TWO + REST, b"", BASES, 16),
    "rounding without a rounding": (bytes((ROUNDING, 0, 0)) + TWO[:6] + REST, b"", BASES[:1], 8),
    "constant that is a NaN": (HEAD + b"\0\0\xc0\x7f" + TWO + REST, b"", BASES, 16),
    "constant that is infinite": (HEAD + b"\0\0\x80\xff" + TWO + REST, b"", BASES, 16),
    "constant that is subnormal": (HEAD + b"\1\0\0\0" + TWO + REST, b"", BASES, 16),
    "constant that is too large": (HEAD + struct.pack("<f", 1.5) + TWO + REST, b"", BASES, 16),
    "divisor of zero": (
        bytes((SECOND_MOMENT, 0, 0)) + struct.pack("<fff", 0, 0.9, 0.1) + TWO + TWO[:6] + REST,
        b"",
        (*BASES, bytes(16)),
        16,
    ),
    "fewer chunks than bases": (HEAD + STEP + TWO + REST, b"", (*BASES, bytes(16)), 16),
    "more chunks than bases": (HEAD + STEP + b"\4\2\0\0\0\0" * 2 + REST, b"", BASES, 16),
    "operand without a chunk": (HEAD + STEP + b"\4\2\0\0\0\0" + b"\4\0\0\0\0\0" + REST, b"", BASES, 16),
    "operand with items of 3 bytes": (HEAD + STEP + TWO[:6] + b"\3" + TWO[1:6] + REST, b"", BASES, 16),
    "rounding of bf16": (bytes((ROUNDING, 0, 1)) + b"\2" + TWO[1:6] + REST, b"", BASES[:1], 16),
    "first moment of bf16": (gradient(0, 8).replace(TWO[:6], b"\2" + TWO[1:6]), bytes(8), BASES[:1], 16),
    "operand that is too short": (HEAD + STEP + TWO + REST, b"", (bytes(16), bytes(12)), 16),
    "operand skipped past its end": (HEAD + STEP + TWO[:8] + b"\xff\xff\xff\xff" + REST, b"", BASES, 16),
    "operand skipped by one": (HEAD + STEP + TWO[:8] + b"\1\0\0\0" + REST, b"", BASES, 16),
    "item across two chunks": (HEAD + STEP + TWO[:7] + b"\2\0\0\0\0" + REST, b"", (bytes(16), bytes(6), bytes(10)), 16),
    "no whole item": (HEAD + STEP + TWO + REST, b"abc", BASES, 3),
    "no bytes": (HEAD + STEP + TWO + REST, b"", BASES, 0),
    "payload after the form": (HEAD + STEP + TWO + REST, b"a", BASES, 16),
    "form of codec 4 that is damaged": (HEAD + STEP + TWO + b"\x03" + REST[1:], b"", BASES, 16),
    "gradient that is missing": (GRADIENT, b"", BASES[:1], 16),
    "gradient cut off": (GRADIENT + b"\0\0\0", b"", BASES[:1], 16),
    "gradient larger than the payload": (gradient(0, 9), bytes(8), BASES[:1], 16),
    "gradient of 4 GiB": (gradient(0, 0xFFFFFFFF), bytes(8), BASES[:1], 16),
    "gradient too short": (gradient(0, 6), bytes(6), BASES[:1], 16),
    "gradient too long": (gradient(0, 10), bytes(10), BASES[:1], 16),
    "gradient whose parameters are cut off": (gradient(1, 0, b"\0\0", 255), b"", BASES[:1], 16),
    "gradient in a codec with bases": (gradient(PREDICTION, 8), bytes(8), BASES[:1], 16),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_malformed_form_is_corruption_and_writes_nothing_outside(name: str) -> None:
    params, payload, bases, size = WRONG[name]
    whole = bytearray(b"\xee" * (size + 32))
    with pytest.raises(CorruptionError):
        decode_into(PREDICTION, 1, params, payload, bases, memoryview(whole)[16 : 16 + size])
    assert whole[:16] == whole[16 + size :] == b"\xee" * 16


def test_the_forms_above_are_wrong_in_what_they_say_only() -> None:
    out = bytearray(16)
    decode_into(PREDICTION, 1, HEAD + STEP + TWO + REST, b"", BASES, memoryview(out))
    decode_into(PREDICTION, 1, gradient(0, 8), bytes(8), BASES[:1], memoryview(out))
    assert out == bytes(16)


@pytest.mark.parametrize("count", [0, 17])
def test_number_of_bases_is_bounded(count: int) -> None:
    with pytest.raises(CorruptionError, match="bases"):
        decode_into(PREDICTION, 1, HEAD + STEP + TWO + REST, b"", (bytes(16),) * count, memoryview(bytearray(16)))


# --- the same bits in every float environment ---

CONSTANTS = {
    SECOND_MOMENT: (0.1, 0.999, 0.001),
    ADAM_WEIGHT: (0.999, -1e-3, 0.3, 1e-8),
    FIRST_MOMENT: (0.9, 0.1),
    ROUNDING: (),
    MOMENTUM_WEIGHT: (-0.1,),
    NESTEROV_WEIGHT: (-0.1, 0.9),
    AVERAGE: (0.995, 0.005),
    DRIFTING_AVERAGE: (0.73, 0.12, 0.15),
    SQUARES: (0.99, 0.01, 1e-8, 1.0, -7e-4),
    CENTERED_STEP: (0.01, 1e-8, 1.0, -7e-4),
}
EXTREMES = {
    SECOND_MOMENT: (2.0**-16, 2.0**-50, 2.0**-24),
    ADAM_WEIGHT: (2.0**-50, -1.0, 2.0**-20, 2.0**-50),
    FIRST_MOMENT: (2.0**-50, 2.0**-16),
    ROUNDING: (),
    MOMENTUM_WEIGHT: (-1.0,),
    NESTEROV_WEIGHT: (-1.0, 1.0),
    AVERAGE: (2.0**-50, 1.0),
    DRIFTING_AVERAGE: (1.0, -1.0, 2.0**-50),
    SQUARES: (2.0**-50, 1.0, 2.0**-45, 2.0**-50, -(2.0**-50)),
    CENTERED_STEP: (2.0**-16, 2.0**-45, 2.0**-50, 1.0),
}
FORMULAS = [
    Formula(number, variant, rounding, constants[number])
    for constants in (CONSTANTS, EXTREMES)
    for number, kind in KINDS.items()
    for variant in sorted(variants_of(number))
    for rounding in kind.roundings
]


def hostile_floats(count: int, seed: int) -> np.ndarray:
    """Every exponent, subnormal and special numbers among them; from NumPy's frozen generator, the same for ever."""
    rng = np.random.RandomState(seed)
    drawn = [rng.randint(0, 1 << 32, count, dtype=np.uint32) for _ in range(2)]
    near = (drawn[0] & np.uint32(0x807FFFFF)) | (drawn[1] % np.uint32(90) << np.uint32(23))  # 2**-127 to 2**-38
    special = [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF]
    special += [0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345]
    chosen = rng.randint(0, 10, count)
    return np.select([chosen < 4, chosen < 8], [drawn[0], near], rng.choice(np.array(special, np.uint32), count))


def all_predictions(count: int = 20_000) -> dict[tuple[Formula, int], bytes]:
    """What every formula gives on hostile operands of every size; the second and third nearly cancel in every other."""
    bits = [hostile_floats(count, seed) for seed in (0, 1, 2, 4)]
    bits[2][::2] = bits[1][::2] ^ (bits[0][::2] & np.uint32(0x3F))
    gradients = (hostile_floats(count, 3) >> 16).astype(np.uint16)
    found = {}
    for formula in FORMULAS:
        kind = KINDS[formula.kind]
        for size in kind.operand_sizes:
            drawn = [each.view(np.float32) if size == 4 else (each >> 16).astype(np.uint16) for each in bits]
            given = [*drawn[: kind.operand_count], *[gradients] * kind.takes_gradient]
            out = np.empty(count, f"u{itemsize_of(formula.kind, size)}")
            predict(formula, given, out)
            found[formula, size] = out.tobytes()
    return found


def digest(found: dict[tuple[Formula, int], bytes]) -> str:
    return hashlib.sha256(b"".join(found.values())).hexdigest()


# Of 20,000 predictions by each formula; NumPy 1.26 and 2.4, with and without AVX2, agree on it.
DIGEST = "89abd5c5ab7dc9a9722cfb794d054a619a2860e7cb3357816217d4a942130886"


def test_predictions_are_those_of_every_release() -> None:
    assert digest(all_predictions()) == DIGEST


def test_flush_to_zero_changes_no_prediction() -> None:
    plain = all_predictions()
    assert torch.set_flush_denormal(True)
    try:
        assert np.float32(2.0**-126) * np.float32(0.5) == 0, "the mode is on"
        flushed = all_predictions()
    finally:
        torch.set_flush_denormal(False)
    assert [each for each in plain if plain[each] != flushed[each]] == []


def dispatched() -> list[str]:
    core = np._core if hasattr(np, "_core") else np.core
    return list(core._multiarray_umath.__cpu_dispatch__)


@pytest.mark.full
@pytest.mark.skipif(not dispatched(), reason="this NumPy has one set of kernels only")
def test_other_simd_kernels_change_no_prediction() -> None:
    """A new process in which NumPy uses its baseline kernels alone."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_codec_prediction as tests;"
        "print(tests.digest(tests.all_predictions()))"
    )
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched())}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert run.stdout.strip() == DIGEST


def test_where_a_tile_ends_changes_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = all_predictions(5000)
    monkeypatch.setattr(formulas, "TILE_COUNT", 999)
    assert all_predictions(5000) == plain


def test_fp16_and_bf16_roundings_are_torchs() -> None:
    bits = hostile_floats(40_000, 5)
    numbers = bits.view(np.float32)
    is_nan = np.isnan(numbers)
    for rounding, dtype, nan in ((ROUND_BF16, torch.bfloat16, 0x7FC0), (ROUND_FP16, torch.float16, 0x7E00)):
        out = np.empty(len(bits), np.uint16)
        predict(Formula(ROUNDING, 0, rounding, ()), [numbers], out)
        expected = torch.from_numpy(numbers.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert (out == np.where(is_nan, nan, expected)).all()
