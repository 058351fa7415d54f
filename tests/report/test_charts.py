"""Curves, counted by hand and by another library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from whence import Uncertainty
from whence.influence.intervals import Intervals
from whence.report.charts import Chart, confidence_calibration, interval_calibration, kept_risk, risk_coverage


def test_risk_coverage_by_hand() -> None:
    """Kept from the surest: losses 0, 0, 1, 1 by a good score and 1, 1, 0, 0 by its opposite."""
    losses = torch.tensor([1.0, 0.0, 1.0, 0.0])
    good = torch.tensor([3.0, 0.0, 4.0, 1.0])
    chart = risk_coverage("wrong", {("good", "hec3"): good, ("bad", "ho"): -good}, losses)
    assert chart.curves[0].x == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(chart.curves[0].y, [0, 0, 1 / 3, 1 / 2])
    np.testing.assert_allclose(chart.curves[1].y, [1, 1, 2 / 3, 1 / 2])
    assert chart.top == 1.0


def test_equal_scores_share_their_losses() -> None:
    """Their order is chance; the curve must not depend on it."""
    scores, losses = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    expected = [0.0, 0.25, 1 / 3]
    for order in ([0, 1, 2], [0, 2, 1]):
        np.testing.assert_allclose(kept_risk(scores[order].numpy(), losses[order].numpy()), expected)
        chart = risk_coverage("wrong", {("ties", "ho"): scores[order]}, losses[order])
        np.testing.assert_allclose(chart.curves[0].y, expected)


def test_a_better_score_lies_lower(generator: torch.Generator) -> None:
    losses = (torch.rand(500, generator=generator) < 0.3).double()
    scores = {f"{noise}": losses + noise * torch.randn(500, generator=generator) for noise in (0.1, 1.0, 9.0)}
    chart = risk_coverage("wrong", {(name, "ho"): score for name, score in scores.items()}, losses)
    areas = [np.mean(curve.y) for curve in chart.curves]
    ranked = [roc_auc_score(losses, score) for score in scores.values()]
    assert areas == sorted(areas)
    assert ranked == sorted(ranked, reverse=True)


def test_ranges_hold_what_they_promise(generator: torch.Generator) -> None:
    """Errors of the variance that the ranges were calibrated for, and of twice that."""
    m = 20_000
    zeros, one = torch.zeros(m, 1), torch.ones(1, dtype=torch.float64)
    u = Uncertainty(zeros, {}, {"hec3": zeros + 3.0, "ho": zeros + 1.0, "laplace": zeros})
    scores = torch.randn(m, 1, dtype=torch.float64, generator=generator).abs()
    intervals = Intervals(
        noise=one, relative=one, ordinary=one, exponent=0 * one, scales=0 * scores + 2.0, scores=scores
    )
    targets = 2.0 * torch.randn(m, 1, generator=generator)
    right, narrow = (interval_calibration(u, factor * targets, intervals).curves[0] for factor in (1.0, 1.4))
    np.testing.assert_allclose(right.y, right.x, atol=0.02)
    assert all(held < promised for held, promised in zip(narrow.y, narrow.x, strict=True))


def test_confidence_by_hand() -> None:
    confidence = torch.tensor([0.9] * 10 + [0.6] * 10)
    right = torch.tensor([True] * 9 + [False] + [True] * 3 + [False] * 7)
    chart = confidence_calibration(confidence, right)
    assert chart.means == pytest.approx((0.75, 0.6, 0.31))
    np.testing.assert_allclose(chart.curves[0].x, [0.6] * 5 + [0.9] * 5, rtol=1e-6)
    assert sum(chart.curves[0].y) == 6.0


def test_ticks_end_where_the_axis_does() -> None:
    for top in (1e-6, 0.0097, 0.31, 1.0, 7.3, 12_345.0):
        marks = Chart("error", [], top).ticks
        assert marks[0] == 0.0
        assert 0.5 * top < marks[-1] <= top * (1 + 1e-9)
        assert 2 < len(marks) < 8
