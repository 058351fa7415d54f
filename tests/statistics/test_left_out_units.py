"""What is left out, one after the other: examples, positions or outputs, against refits without each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature_matrices as dense
import whence

N, T, K, RIDGE = 8, 3, 2, 0.7
WIDTHS = {"example": T * K, "position": K, "output": 1}
EXACT = (
    whence.Exact("primal"),
    whence.Exact("dual"),
    whence.Exact("matrix_free"),
    whence.Core(size=200, tolerance=0),
    whence.Sketch(size=200),
)
SPECTRAL = (whence.EKFAC(tolerance=0.0), whence.KFAC(), whence.Diagonal())
every_unit = pytest.mark.parametrize("loo", WIDTHS)


class Tagger(nn.Module):
    """An answer for every token, with all tokens of its sentence in sight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(2, 3).double(), nn.Linear(3, K).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + hidden.mean(1, keepdim=True))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit(loo: str, structure: Any, weights: Tensor | None = None, **options: Any) -> whence.Tracer:
    batch = (drawn(N, T, 2), drawn(N, T, K, seed=1))
    data = [batch if weights is None else (*batch, weights)]
    return whence.fit(Tagger(), data, structure=structure, ridge=RIDGE, loo=loo, progress=False, **options)


def some_ignored() -> Tensor:
    weights = torch.ones(N, T, dtype=torch.float64)
    weights[0, 1] = weights[3] = 0.0  # one position, and one whole example
    weights[5, 2] = 2.5
    return weights


def refits(loo: str, test: Tensor, weights: Tensor | None) -> np.ndarray:
    """(units, m, t k) f(x) - f_(-u)(x) of the linearized model, fitted again without each unit that counts."""
    model = Tagger()
    rows, tested = dense.tangents_of(model, drawn(N, T, 2)), dense.tangents_of(model, test)
    flat = rows.reshape(N * T * K, -1)
    w0 = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    pseudo = (drawn(N, T, K, seed=1) - model(drawn(N, T, 2))).detach().numpy().reshape(-1) + flat @ w0
    each = np.ones(N * T * K) if weights is None else np.repeat(weights.numpy().reshape(-1), K)

    def solved(counts: np.ndarray) -> np.ndarray:
        damped = (flat.T * counts) @ flat + RIDGE * np.eye(flat.shape[1])
        return np.linalg.solve(damped, flat.T @ (counts * pseudo))

    whole, width, found = solved(each), WIDTHS[loo], []
    for start in range(0, len(each), width):
        left = each.copy()
        left[start : start + width] = 0.0
        if each[start : start + width].any():
            found.append(tested @ (whole - solved(left)))
    return np.stack(found)


@every_unit
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_refits_without_each_unit(structure: Any, weighted: bool, loo: str) -> None:
    test, weights = drawn(2, T, 2, seed=4), some_ignored() if weighted else None
    moved = refits(loo, test, weights)
    tracer = fit(loo, structure, weights, recenter=True)
    found = tracer.predict(test)
    units = len(moved)
    assert tracer.meats.deletions == units
    dense.close(found.hec3.flatten(1), (moved**2).sum(0), 1e-7)
    dense.close(found.jackknife.flatten(1), (units - 1) * moved.var(0), 1e-7)
    assert tracer.diagnostics["guarded leverages"] == 0
    assert f"of {units}" in next(one.words for one in tracer.diagnostics if one.name == "guarded leverages")
    same = tracer.what_if(test, remove=[])
    assert not bool(same.change.any())
    dense.close(same.new_hec3, found.hec3.flatten(1), 1e-8)
    dense.close(same.new_ho, found.ho.flatten(1), 1e-8)


@every_unit
def test_what_if_is_the_fit_without_the_examples(loo: str) -> None:
    test, gone = drawn(2, T, 2, seed=4), [1, 6]
    found = fit(loo, whence.Exact(), recenter=True).what_if(test, remove=gone)
    weights = torch.ones(N, T, dtype=torch.float64)
    weights[gone] = 0.0
    after = fit(loo, whence.Exact(), weights, recenter=True).predict(test)
    dense.close(found.new_hec3, after.hec3.flatten(1), 1e-8)


@every_unit
@pytest.mark.parametrize("structure", SPECTRAL, ids=str)
def test_dense_algebra_in_a_basis(structure: Any, loo: str) -> None:
    model, test, width = Tagger(), drawn(2, T, 2, seed=4), WIDTHS[loo]
    tracer = fit(loo, structure)
    assert tracer.meats.deletions == N * T * K // width
    tangents, tested = dense.tangents_of(model, drawn(N, T, 2)), dense.tangents_of(model, test)
    damped = dense.curvature_of(tracer.bread) + RIDGE * np.eye(tangents.shape[2])
    leverage_blocks = np.stack([one @ np.linalg.solve(damped, one.T) for one in tangents])
    together = np.kron(np.eye(T * K // width), np.ones((width, width)))
    residuals = np.asarray(tracer.residuals)
    dense.close(tracer.loo_residuals, residuals + np.einsum("nij,nj->ni", leverage_blocks * together, residuals), 1e-8)
    wanted = dense.covariances(tracer, tangents, tested, width)
    found = tracer.predict(test)
    for name in ("hec0", "hec3", "jackknife"):
        dense.close(found.variance(name).flatten(1), np.einsum("mcc->mc", wanted[name]), 1e-7)


def test_guards_are_counted_as_what_is_left_out() -> None:
    """At next to no ridge every output decides itself; all that are left out are guarded, whatever they are."""
    for loo, width in WIDTHS.items():
        batch = (drawn(2, T, 9), drawn(2, T, K, seed=1))
        wide = nn.Sequential(nn.Linear(9, K)).double()
        tracer = whence.fit(wide, [batch], ridge=1e-9, loo=loo, progress=False)
        trust = tracer.trust(sample=2)["leverage"].numbers
        assert trust["guarded"] == trust["of"] == 2 * T * K // width
