"""Eigenvectors: how many threads compute them, and those of large matrices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from whence import linalg
from whence.linalg import SMALL, eigh
from whence.runtime.model_state import one_thread


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_matrices_are_left_to_one_thread() -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2  # a thread takes its number when it first computes
        with one_thread():
            assert torch.get_num_threads() == 1
            assert other.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_threads_of_a_service_do_without() -> None:
    """Or a thread that computes for the first time meanwhile would be left with one for good."""

    def inside() -> int:
        with one_thread(), ThreadPoolExecutor(1) as new:
            return new.submit(torch.get_num_threads).result()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(inside).result() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("size", "threads"), [(SMALL, 1), (SMALL + 1, 2)])
def test_only_small_matrices_are(size: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counting(matrices: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_num_threads())
        return matrices.diagonal(), matrices

    monkeypatch.setattr(torch.linalg, "eigh", counting)
    eigh(torch.empty(size, size))
    assert seen == [threads]


@pytest.mark.usefixtures("two_threads")
def test_threads_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), one_thread():
        raise ValueError("no")
    assert torch.get_num_threads() == 2


def test_leading_eigenvectors_of_a_large_matrix_are_those_of_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 40 leading ones of 700, of a kernel of points in three dimensions, whose eigenvalues fall quickly."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(700, 3, generator=draw, dtype=torch.float64)
    kernel = (-torch.cdist(points, points).square() / 2).exp()
    wanted, along = (some[..., -40:] for some in linalg.eigh(kernel))
    monkeypatch.setattr(linalg, "DENSE", 100)  # so that a matrix that a test can afford counts as large
    values, vectors = linalg.leading_eigenvectors(kernel, 40)
    torch.testing.assert_close(values, wanted, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(40, dtype=torch.float64), rtol=0.0, atol=1e-10)
    # They span the same space. The ten smallest are not compared: close to them are eigenvalues that were left out.
    torch.testing.assert_close((along.T @ vectors).square().sum(0)[10:], torch.ones(30).double(), rtol=0.0, atol=1e-8)


def test_few_of_few_rows_are_all() -> None:
    values, vectors = linalg.leading_eigenvectors(torch.diag(torch.tensor([2.0, 1.0])), 5)
    assert values.tolist() == [1.0, 2.0]
    assert vectors.shape == (2, 2)
