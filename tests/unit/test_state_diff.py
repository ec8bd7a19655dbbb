"""Element-wise differences of leaves, with expected values counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from casckpt.state import diff_leaf


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_changed_elements_are_counted_by_bits_and_the_change_by_value() -> None:
    a = torch.tensor([1.0, 2.0, 0.0, 4.0])
    b = torch.tensor([1.0, 2.5, -0.0, 1.0])
    assert diff_leaf("torch", "float32", raw(a), raw(b)) == (3, 3.0)
    assert diff_leaf("torch", "float32", raw(a), raw(a)) == (0, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint64])
def test_every_kind_of_number_is_compared_as_a_number(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]).to(dtype), torch.tensor([1.0, 4.0, 3.0]).to(dtype)
    assert diff_leaf("torch", str(dtype).removeprefix("torch."), raw(a), raw(b)) == (1, 2.0)


def test_special_values_are_reported_and_never_hidden() -> None:
    nan, inf = math.nan, math.inf
    a, b = np.array([nan, nan, inf, 1.0]), np.array([nan, 1.0, inf, 1.0])
    assert diff_leaf("numpy", "<f8", a.tobytes(), b.tobytes()) == (1, inf)
    assert diff_leaf("numpy", "<f8", np.array([inf]).tobytes(), np.array([1.0]).tobytes()) == (1, inf)
    quiet = np.array([0x7FF8000000000001], np.uint64).tobytes()
    assert diff_leaf("numpy", "<f8", np.array([nan]).tobytes(), quiet) == (1, 0.0), "two NaNs that differ in payload"


def test_other_dtypes_count_and_have_a_change_only_where_they_are_numbers() -> None:
    assert diff_leaf("numpy", ">i2", b"\0\1\0\2", b"\0\1\1\2") == (1, 256.0)
    assert diff_leaf("numpy", "<c16", np.array([3j]).tobytes(), np.array([4]).astype("<c16").tobytes()) == (1, 5.0)
    assert diff_leaf("numpy", "<U2", np.array(["ab"]).tobytes(), np.array(["ac"]).tobytes()) == (1, None)
    assert diff_leaf("numpy", "<M8[s]", b"\1" + bytes(7), b"\3" + bytes(7)) == (1, 2.0)
    assert diff_leaf("bytes", "", b"abcd", b"abxy") == (2, None)
    assert diff_leaf("torch", "bool", b"\0\1", b"\1\1") == (1, 1.0)
    assert diff_leaf("torch", "float32", b"", b"") == (0, 0.0)


def test_leaves_of_different_size_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        diff_leaf("torch", "float32", bytes(4), bytes(8))
    with pytest.raises(ValueError, match="cannot be compared"):
        diff_leaf("torch", "float32", bytes(3), bytes(3))
