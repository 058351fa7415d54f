"""Three examples whose variances are fractions, worked out by hand: x = 1, 2, 2 with targets y = 1, 2, 3.

The model is y = w x with sum of squared errors + lambda w^2, which has F = 9 + lambda and w = 11 / F. At x = 1 the
alignments are x_i / F.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import whence

INPUTS, TARGETS = (1, 2, 2), (1, 2, 3)
STRUCTURES = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix-free": whence.Exact(road="matrix_free"),
    "core": whence.Core(),
}


def column(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


@pytest.mark.parametrize(("ridge", "name"), [(0, "primal"), *((1, name) for name in STRUCTURES)])
def test_variances_are_the_fractions(ridge: int, name: str, device: torch.device) -> None:
    curvature = 9 + ridge
    residuals = [y - Fraction(11, curvature) * x for x, y in zip(INPUTS, TARGETS, strict=True)]
    left_out = [e / (1 - Fraction(x * x, curvature)) for e, x in zip(residuals, INPUTS, strict=True)]
    aligned = [Fraction(x, curvature) for x in INPUTS]
    expected = {
        "ho": sum(e * e for e in residuals) / 3 * sum(a * a for a in aligned),
        "hec0": sum((a * e) ** 2 for a, e in zip(aligned, residuals, strict=True)),
        "hec3": sum((a * u) ** 2 for a, u in zip(aligned, left_out, strict=True)),
    }
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64, device=device)
    with torch.no_grad():
        model.weight.fill_(11 / curvature)
    data = [(column(INPUTS, device), column(TARGETS, device))]
    tracer = whence.fit(model.eval(), data, structure=STRUCTURES[name], ridge=float(ridge), progress=False)
    u = tracer.predict(column((1,), device))
    assert {one: float(getattr(u, one)) for one in expected} == pytest.approx(
        {one: float(value) for one, value in expected.items()}, abs=1e-10
    )
    assert float(tracer.leverage.max()) == pytest.approx(4 / curvature, abs=1e-10)


def test_the_fractions_without_a_ridge() -> None:
    """HeC3 by hand: left-out residuals -1/4, -4/5 and 1, times 1/9, 2/9 and 2/9, squared and summed."""
    squares = [(Fraction(1, 9) * Fraction(-1, 4)) ** 2, (Fraction(2, 9) * Fraction(-4, 5)) ** 2, Fraction(2, 9) ** 2]
    assert sum(squares) == Fraction(883, 10800)
