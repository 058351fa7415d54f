"""Curves are where the numbers say, and say what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from plotted import line_fit, results
from whence import ShapeError
from whence.plots import bands, risk_coverage
from whence.report.charts import kept_risk


def test_bands_are_the_intervals_in_the_order_of_the_inputs() -> None:
    u = results(ho=[4.0, 1.0, 9.0], hec3=[1.0, 16.0, 4.0], mean=[10.0, 20.0, 30.0])
    ax = Figure().subplots()
    x = torch.tensor([[2.0], [0.0], [1.0]])
    assert bands(x, u, (torch.tensor([[0.5], [1.5]]), torch.tensor([[19.0], [21.0]])), level=0.6826894921, ax=ax) is ax
    drawn = {str(line.get_label()): line for line in ax.lines}
    assert drawn["prediction"].get_xydata().tolist() == [[0.0, 20.0], [1.0, 30.0], [2.0, 10.0]]
    low, high = (line.get_ydata() for line in ax.lines if line is not drawn["prediction"])
    assert np.allclose(low, [19.0, 27.0, 8.0], atol=1e-6), "one standard deviation by Ho below"
    assert np.allclose(high, [21.0, 33.0, 12.0], atol=1e-6)
    area = next(part for part in ax.collections if part.get_label() == "HeC3, 68%")
    corners = {tuple(np.round(point, 5)) for point in area.get_paths()[0].vertices}
    assert corners >= {(0.0, 16.0), (0.0, 24.0), (1.0, 28.0), (1.0, 32.0), (2.0, 9.0), (2.0, 11.0)}
    dots = next(part for part in ax.collections if part.get_label() == "training examples")
    assert dots.get_offsets().tolist() == [[0.5, 19.0], [1.5, 21.0]]
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == ["prediction", "Ho, 68%", "HeC3, 68%", "training examples"]


def test_bands_that_explode_do_not_flatten_the_curve() -> None:
    ax = bands([0.0, 1.0], results([1.0, 1e12], [1.0, 1e12], [0.0, 1.0]), ax=Figure().subplots())
    assert ax.get_ylim() == pytest.approx((-0.6, 1.6))


def test_bands_draw_the_training_examples_and_check_their_inputs() -> None:
    tracer, x, y = line_fit()
    ax = bands(x, tracer.predict(x), (x, y), ax=Figure().subplots())
    assert np.asarray(ax.collections[0].get_offsets())[:, 1] == pytest.approx(y.squeeze(1).numpy())
    with pytest.raises(ShapeError, match="expected 12 places x, one for each prediction, got shape"):
        bands(x[:3], tracer.predict(x))


@pytest.mark.parametrize(
    ("scores", "errors", "expected"),
    [
        ([3.0, 1.0, 2.0], [1.0, 0.0, 0.5], [0.0, 0.25, 0.5]),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]),  # nothing known: chance, whatever the order
    ],
)
def test_risk_of_what_is_kept(scores: list[float], errors: list[float], expected: list[float]) -> None:
    assert kept_risk(np.array(scores), np.array(errors)) == pytest.approx(expected)


def test_risk_coverage_draws_each_score_the_best_and_chance() -> None:
    u = results(ho=[1.0, 2.0, 3.0, 4.0], hec3=[4.0, 3.0, 2.0, 1.0])
    ax = Figure().subplots()
    assert risk_coverage(u, torch.tensor([0.0, 0.0, 1.0, 1.0]), others={"mine": [9.0, 1.0, 2.0, 3.0]}, ax=ax) is ax
    drawn = {str(line.get_label()): line.get_ydata() for line in ax.lines}
    assert drawn["Ho (0.208)"] == pytest.approx([0.0, 0.0, 1 / 3, 0.5])
    assert drawn["HeC3 (0.792)"] == pytest.approx([1.0, 1.0, 2 / 3, 0.5])
    assert drawn["mine (0.417)"] == pytest.approx([0.0, 0.5, 2 / 3, 0.5])
    assert drawn["best possible (0.208)"] == pytest.approx([0.0, 0.0, 1 / 3, 0.5])
    assert list(drawn["by chance (0.5)"]) == [0.5, 0.5]
    assert list(ax.lines[0].get_xdata()) == [25.0, 50.0, 75.0, 100.0]
    looks = {(to_hex(line.get_color()), str(line.get_linestyle()), line.get_linewidth()) for line in ax.lines}
    assert len(looks) == len(ax.lines), "no two curves look the same"


def test_one_early_error_does_not_flatten_the_curves() -> None:
    scores = torch.arange(200.0)
    wrong = torch.zeros(200)
    wrong[[0, 150, 199]] = 1.0
    ax = risk_coverage(results(scores.tolist(), scores.tolist()), wrong, by=["ho"], ax=Figure().subplots())
    assert max(ax.lines[0].get_ydata()) == 1.0
    assert ax.get_ylim() == pytest.approx((0.0, 1.08 / 4)), "that of the first four"
