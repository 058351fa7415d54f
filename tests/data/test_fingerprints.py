"""Numbers that tell tensors apart, bit by bit and place by place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whence.runtime.model_state import PIECE, checksum

SPAN = 2**12

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_have_equal_marks(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.randn(5, 7).mul(3).to(torch.complex128 if dtype.is_complex else torch.float64)
    tensor = values.real.to(dtype) if not dtype.is_complex else values.to(dtype)
    assert (
        checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.to(device)) == checksum(tensor.T.contiguous().T)
    )
    changed = tensor.clone()
    changed[3, 2] = 0 if bool(changed[3, 2]) else 1
    assert checksum(changed) != checksum(tensor)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([torch.float64, torch.float32, torch.int64]))
def test_exchanged_elements_are_seen(i: int, j: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(301).to(dtype)
    other = tensor.clone()
    other[i], other[j] = tensor[j], tensor[i]
    assert (checksum(other) == checksum(tensor)) == (i == j)


@pytest.mark.parametrize("distance", [1, 2, SPAN // 2, SPAN, 2 * SPAN, 3 * SPAN + 5])
@pytest.mark.parametrize("pair", [(1.0, -1.0), (0.0, 1.0), (2.0, 4.0), (0.0, -0.0)])
def test_simple_numbers_far_apart(distance: int, pair: tuple[float, float]) -> None:
    """Their lower bits are zeros, which plain sums of products would lose."""
    tensor = torch.zeros(distance + 3, dtype=torch.float64)
    other = tensor.clone()
    tensor[1], tensor[1 + distance] = pair
    other[1 + distance], other[1] = pair
    assert checksum(tensor) != checksum(other)


def test_nan_and_infinity_are_like_other_numbers() -> None:
    strange = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert checksum(strange) == checksum(strange.clone())
    assert checksum(strange) != checksum(strange.flip(0))


def test_large_tensors_are_seen_to_the_end() -> None:
    tensor = torch.zeros(PIECE["cpu"] + 10, dtype=torch.uint8)
    other = tensor.clone()
    other[-1] = 1
    assert checksum(tensor) != checksum(other)


def test_empty_and_single() -> None:
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0])) != checksum(torch.tensor(4.0))


def test_sparse_tensors() -> None:
    dense = torch.eye(3)
    assert checksum(dense.to_sparse()) == checksum(dense)
