"""Targets and averages of weights as predictions from their source: torch's own kernels make what is expected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casckpt.codec.difference import encode_difference
from casckpt.codec.models import AVERAGE, DRIFTING_AVERAGE, Model
from casckpt.codec.prediction import Operand, encode_prediction
from tests.unit.test_codec_prediction import COUNT, decoded, numbers, operands, share, view

FOLLOWERS = {
    "mul and add": lambda target, source, rate: target.mul_(1 - rate).add_(source, alpha=rate),
    "mul and add of many": lambda target, source, rate: (
        torch._foreach_mul_([target], 1 - rate),
        torch._foreach_add_([target], [source], alpha=rate),
    ),
    "lerp": lambda target, source, rate: target.lerp_(source, rate),
    "lerp of many": lambda target, source, rate: torch._foreach_lerp_([target], [source], rate),
    "a copy of the sum": lambda target, source, rate: target.copy_(rate * source + (1 - rate) * target),
    "a step back": lambda target, source, rate: target.sub_(rate * (target - source)),
}


def follow(name: str, rate: float, dtype: torch.dtype, steps: int = 1) -> list[np.ndarray]:
    """A target before and after following a source that moves, and the source before and after."""
    torch.manual_seed(1)
    target = (torch.randn(COUNT) * 0.05).to(dtype)
    source = target + (torch.randn(COUNT) * 0.01).to(dtype)
    drift = (torch.randn(COUNT) * 1e-4).to(dtype)
    found = [target.clone(), source.clone()]
    for _ in range(steps):
        source += drift
        FOLLOWERS[name](target, source, rate)
    return [numbers(each) for each in (found[0], target, found[1], source)]


@pytest.mark.parametrize("rate", [0.005, 0.0005, 0.1, 1 / 17])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_target_that_follows_its_source_takes_next_to_nothing(name: str, rate: float) -> None:
    """The rate is nowhere given."""
    before, after, _, source = follow(name, rate, torch.float32)
    given, plain = operands(before, source), view(after)
    encoded = encode_prediction(plain, [Model(AVERAGE, ())], given, ceiling=len(plain))
    assert share(encoded, plain) <= 0.001
    assert encoded is not None and decoded(encoded, given, len(plain)) == bytes(plain)


@pytest.mark.parametrize(("name", "most"), [("lerp", 0.001), ("mul and add", 0.05)])
def test_bf16_target_takes_little(name: str, most: float) -> None:
    before, after, _, source = follow(name, 0.1, torch.bfloat16)
    given, plain = operands(before, source), view(after)
    encoded = encode_prediction(plain, [Model(AVERAGE, ())], given, ceiling=len(plain))
    assert share(encoded, plain) <= most
    assert encoded is not None and decoded(encoded, given, len(plain)) == bytes(plain)


def test_target_several_steps_later_is_nearer_to_its_fit_than_to_its_past() -> None:
    before, after, old, source = follow("mul and add", 0.005, torch.float32, steps=60)
    plain = view(after)
    past = encode_difference(plain, view(before), 4, ceiling=len(plain))
    assert past is not None
    given = operands(before, source)
    fit = encode_prediction(plain, [Model(AVERAGE, ())], given, ceiling=len(plain))
    given = operands(before, old, source)
    drifting = encode_prediction(plain, [Model(DRIFTING_AVERAGE, ())], given, ceiling=len(plain))
    assert share(drifting, plain) < 0.9 * share(fit, plain) < 0.9 * share(past, plain)
    assert drifting is not None and decoded(drifting, given, len(plain)) == bytes(plain)


def test_average_that_a_sample_does_not_tell_is_no_average() -> None:
    """No way from the target to its source, and numbers of which none is finite."""
    plain = view(np.ones(999, np.float32))
    for before in (plain, view(np.full(999, np.nan, np.float32))):
        given = [Operand((before,), 4), Operand((plain,), 4)]
        assert encode_prediction(plain, [Model(AVERAGE, ())], given, ceiling=len(plain)) is None
