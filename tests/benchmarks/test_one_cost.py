"""What the benchmarks lend to peers does what it says."""

from __future__ import annotations

import pytest
import torch
from benchmarks.one_cost import retry_in_double


def test_a_failed_eigendecomposition_is_repeated_and_looks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.linalg.eigh

    def failing(matrix: torch.Tensor) -> object:
        if matrix.dtype == torch.float32:
            raise RuntimeError("failed to converge")
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", failing)  # put back afterwards, whatever is set in between
    retry_in_double()
    found = torch.linalg.eigh(torch.diag(torch.tensor([3.0, 1.0])))
    assert found.eigenvalues.tolist() == [1.0, 3.0]
    assert found.eigenvectors.dtype == torch.float32
    values, vectors = found
    assert torch.equal(vectors @ torch.diag(values) @ vectors.T, torch.diag(torch.tensor([3.0, 1.0])))
