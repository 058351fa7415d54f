"""Decisions in a plane, leverages beside residuals, and a path of ridges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from plotted import class_fit, line_fit
from whence import InputError, ShapeError
from whence.curvature import RidgePath
from whence.plots import decision_regions, leverage_residual, ridge_path


@pytest.mark.parametrize("outputs", [1, 2])
def test_each_side_of_the_border_has_the_colour_of_its_class(outputs: int) -> None:
    tracer, x, y = class_fit(outputs)
    ax = Figure().subplots()
    assert decision_regions(tracer, x, y, steps=21, ax=ax) is ax
    picture = np.asarray(ax.images[0].get_array())  # rows from the bottom up
    assert (picture[:, :9, 2] > picture[:, :9, 0]).all(), "blue left, where the first input is negative"
    assert (picture[:, -9:, 0] > picture[:, -9:, 2]).all(), "vermillion right"
    assert picture[10, 10].min() > picture[10, 0].min(), "paler at the border than far from it"
    drawn = {str(part.get_label()): np.asarray(part.get_offsets()).tolist() for part in ax.collections}
    assert drawn == {"class 0": x[y == 0].tolist(), "class 1": x[y == 1].tolist()}


def test_three_classes_have_three_regions() -> None:
    tracer, x, _ = class_fit(3)
    ax = decision_regions(tracer, 2 * x, steps=31, ax=Figure().subplots())
    picture = np.asarray(ax.images[0].get_array())
    hues = [int(np.argmax(picture[row, at])) for row, at in ((28, 0), (28, 30), (0, 15))]
    assert hues == [2, 0, 1], "blue upper left, vermillion upper right, green at the bottom"
    assert ax.get_legend() is None


def test_inputs_of_a_plane_are_checked() -> None:
    tracer, x, y = class_fit(2)
    with pytest.raises(ShapeError, match=r"expected inputs of shape \(n, 2\), got \(6, 1\)"):
        decision_regions(tracer, x[:, :1], y)
    with pytest.raises(ShapeError, match="expected 6 labels, one for each input, got"):
        decision_regions(tracer, x, y[:2], steps=3, ax=Figure().subplots())


def test_leverages_and_residuals_are_those_of_least_squares() -> None:
    tracer, x, y = line_fit()
    ax = leverage_residual(tracer, top=1, ax=Figure().subplots())
    design = np.c_[x.numpy(), np.ones(12)]
    hat = design @ np.linalg.inv(design.T @ design) @ design.T
    residual, h = y.squeeze(1).numpy() - hat @ y.squeeze(1).numpy(), np.diag(hat)
    studentized = residual / np.sqrt((residual**2).mean() * (1 - h))
    assert np.asarray(ax.collections[0].get_offsets()) == pytest.approx(np.c_[h, studentized], rel=1e-3, abs=1e-5)
    assert [text.get_text() for text in ax.texts] == ["9"]


def test_ridge_path_marks_the_smallest_error() -> None:
    ax = ridge_path(RidgePath(torch.tensor([0.1, 1.0, 10.0]), torch.tensor([3.0, 2.0, 4.0])), Figure().subplots())
    curve, mark = ax.lines
    assert curve.get_xydata() == pytest.approx(np.array([[0.1, 3.0], [1.0, 2.0], [10.0, 4.0]]))
    assert mark.get_xydata().tolist() == [[1.0, 2.0]]
    assert mark.get_label() == "λ = 1"
    short = RidgePath(torch.tensor([0.1, 1.0]), torch.tensor([3.0, 2.0]))
    assert "at the end of the grid" in str(ridge_path(short, Figure().subplots()).lines[1].get_label())
    with pytest.raises(InputError, match='Fit with ridge="loo"'):
        ridge_path(None)
