"""A self-check against numbers worked out by hand, as fractions.

Three examples x = 1, 2, 2 with targets y = 1, 2, 3, and the model y = w x with sum of squared errors + lambda w^2:

    lambda = 0: F = 9, w = 11/9, residuals -2/9, -4/9, 5/9, leverages 1/9, 4/9, 4/9, left out -1/4, -4/5, 1.
    lambda = 1: F = 10, w = 11/10, residuals -1/10, -2/10, 8/10, leverages 1/10, 4/10, 4/10, left out -1/9, -1/3, 4/3.

At x = 1 the alignments are x_i / F, and the variances follow by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

import whence

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Check:
    """One number, computed and worked out by hand."""

    name: str
    found: float
    expected: float

    @property
    def passed(self) -> bool:
        """Whether they agree to ten digits."""
        return abs(self.found - self.expected) <= TOLERANCE * max(1.0, abs(self.expected))


def by_hand(ridge: int) -> dict[str, Fraction]:
    """Ho, HeC0, HeC3 and the largest leverage, as fractions.

    Examples:
        >>> by_hand(0)["hec3"], by_hand(0)["ho"]
        (Fraction(883, 10800), Fraction(5, 243))
    """
    inputs, targets = (1, 2, 2), (1, 2, 3)
    curvature = 9 + ridge
    weight = Fraction(11, curvature)
    residuals = [y - weight * x for x, y in zip(inputs, targets, strict=True)]
    leverages = [Fraction(x * x, curvature) for x in inputs]
    left_out = [e / (1 - h) for e, h in zip(residuals, leverages, strict=True)]
    aligned = [Fraction(x, curvature) for x in inputs]
    noise = Fraction(sum(e * e for e in residuals)) / 3
    return {
        "ho": noise * sum(a * a for a in aligned),
        "hec0": Fraction(sum(a * a * e * e for a, e in zip(aligned, residuals, strict=True))),
        "hec3": Fraction(sum(a * a * u * u for a, u in zip(aligned, left_out, strict=True))),
        "leverage": max(leverages),
    }


def self_check(device: torch.device) -> list[Check]:
    """Fit the three examples by several roads, and compare."""
    roads: list[tuple[str, int, str | whence.Structure]] = [
        ("exact, primal", 0, whence.Exact(road="primal")),
        ("exact, dual", 1, whence.Exact(road="dual")),
        ("exact, matrix-free", 1, whence.Exact(road="matrix_free")),
        ("core", 1, "core"),
    ]
    checks = []
    for name, ridge, structure in roads:
        expected = by_hand(ridge)
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(11 / (9 + ridge))
        model = model.eval().to(device)
        inputs = torch.tensor([[1.0], [2.0], [2.0]], dtype=torch.float64, device=device)
        targets = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, device=device)
        tracer = whence.fit(model, [(inputs, targets)], structure=structure, ridge=float(ridge), progress=False)
        u = tracer.predict(inputs[:1])
        found = {key: float(getattr(u, key)) for key in ("ho", "hec0", "hec3")}
        found["leverage"] = float(tracer.leverage.max())
        checks += [Check(f"{key}, {name}", found[key], float(expected[key])) for key in expected]
    return checks
