"""Three examples whose variances can be computed by hand, in fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

import whence


@pytest.mark.parametrize(
    ("ridge", "structure"),
    [
        (0, whence.Exact(road="primal")),
        (1, whence.Exact(road="dual")),
        (1, whence.Exact(road="matrix_free")),
        (1, "core"),
    ],
)
def test_three_examples(ridge: int, structure: str | whence.Structure, device: torch.device) -> None:
    """y = w x: residuals over one minus leverage, times x / F, squared, summed."""
    inputs, targets, curvature = (1, 2, 2), (1, 2, 3), 9 + ridge
    weight = Fraction(11, curvature)
    residuals = [y - weight * x for x, y in zip(inputs, targets, strict=True)]
    left_out = [e / (1 - Fraction(x * x, curvature)) for e, x in zip(residuals, inputs, strict=True)]
    aligned = [Fraction(x, curvature) for x in inputs]

    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, float(weight))
    x, y = (torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1) for values in (inputs, targets))
    tracer = whence.fit(model.to(device), [(x, y)], structure=structure, ridge=float(ridge), progress=False)
    found = tracer.predict(x[:1])
    expected = {
        "ho": sum(e * e for e in residuals) / 3 * sum(a * a for a in aligned),
        "hec0": sum((a * e) ** 2 for a, e in zip(aligned, residuals, strict=True)),
        "hec3": sum((a * u) ** 2 for a, u in zip(aligned, left_out, strict=True)),
    }
    for name, value in expected.items():
        assert float(getattr(found, name)) == pytest.approx(float(value), rel=0, abs=1e-10)
    assert float(tracer.leverage.max()) == pytest.approx(4 / curvature, rel=0, abs=1e-10)
