"""Threads that a decomposition takes, and leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

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
