"""The demo's comparison notices one bit, wherever it is."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason='needs the extra "demo"')

from casckpt.demo._proof import Claim, first_divergence, value_digest


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_each_single_bit_of_a_tensor_changes_its_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    bits = tensor.numel() * tensor.element_size() * 8
    digests = {value_digest({"w": flipped(tensor, bit)}) for bit in range(bits)}
    assert len(digests) == bits
    assert value_digest({"w": tensor}) not in digests


NAN_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.0, -0.0),
        (float("nan"), NAN_PAYLOAD),
        (1, 1.0),
        (1, True),
        ("1", b"1"),
        ([1, 2], (1, 2)),
        ([[1], 2], [1, [2]]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1 << 128, (1 << 128) + 1),
        (np.zeros(2, "f4"), np.zeros(2, "i4")),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(()), 0.0),
        (torch.zeros(2), np.zeros(2, "f4")),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(0), torch.zeros(0, 3)),
    ],
)
def test_values_that_differ_only_in_kind_sign_shape_or_order_differ(left: Any, right: Any) -> None:
    assert value_digest(left) != value_digest(right)


def test_equal_values_in_other_memory_have_one_digest() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert value_digest(matrix.T) == value_digest(matrix.T.contiguous())
    assert value_digest(torch.nn.Parameter(matrix)) == value_digest(matrix.clone())
    assert value_digest(np.asfortranarray(matrix.numpy())) == value_digest(matrix.numpy())


def test_a_leaf_without_a_defined_digest_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        value_digest({"a": [object()]})


def test_a_claim_holds_only_if_every_source_agrees() -> None:
    assert Claim("policy", "values", {"a": "x", "b": "x", "c": "x"}).holds
    assert not Claim("policy", "values", {"a": "x", "b": "x", "c": "y"}).holds


def line(*steps: tuple[int, dict[str, str]]) -> list[Any]:
    return [
        SimpleNamespace(step=step, components={n: SimpleNamespace(manifest=m) for n, m in manifests.items()})
        for step, manifests in steps
    ]


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        (line((1, {"p": "a", "v": "b"}), (2, {"p": "c", "v": "d"})), None),
        (line((1, {"p": "a", "v": "b"}), (2, {"p": "c", "v": "!"})), "step 2, component 'v'"),
        (line((1, {"p": "!", "v": "b"}), (2, {"p": "!", "v": "!"})), "step 1, component 'p'"),
        (line((1, {"p": "a", "v": "b"}), (2, {"p": "c"})), "step 2, component 'v'"),
        (line((1, {"p": "a", "v": "b"}), (3, {"p": "c", "v": "d"})), "step 2 against step 3"),
        (line((1, {"p": "a", "v": "b"})), "2 steps against 1"),
    ],
)
def test_the_first_divergence_is_named_by_step_and_component(right: list[Any], expected: str | None) -> None:
    left = line((1, {"p": "a", "v": "b"}), (2, {"p": "c", "v": "d"}))
    assert first_divergence(left, right) == expected
