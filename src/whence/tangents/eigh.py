"""Eigendecompositions of symmetric matrices, small ones by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SMALL = 512
"""Matrices up to this size are decomposed in less time by one thread than by two."""


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of (..., m, m): eigenvalues, ascending, and eigenvectors.

    Over small matrices several threads mostly wait for one another.

    Examples:
        >>> values, vectors = eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> values.tolist()
        [1.0, 2.0]
    """
    with alone(not matrices.is_cuda and matrices.shape[-1] <= SMALL):
        values, vectors = torch.linalg.eigh(matrices)
    return values, vectors


@contextmanager
def alone(wanted: bool = True) -> Iterator[None]:
    """Let the main thread of Python compute by one thread of torch meanwhile, if that is wanted.

    Torch counts the threads of each of its callers, so that no other is slowed down, but one that makes its very first
    computation meanwhile: it takes the number that it finds. Other threads, as those of a service, do without:
    there, new ones may begin at any time.
    """
    before = torch.get_num_threads()
    if not wanted or before == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
