"""Leverage against residual, as least squares has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from plotted import class_fit, line_fit
from whence import InputError
from whence.plots import leverage_residual


def test_points_are_those_of_least_squares() -> None:
    tracer, x, y = line_fit()
    ax = Figure().subplots()
    assert leverage_residual(tracer, top=1, ax=ax) is ax
    design = np.c_[x.numpy(), np.ones(12)]
    hat = design @ np.linalg.inv(design.T @ design) @ design.T
    residual = y.squeeze(1).numpy() - hat @ y.squeeze(1).numpy()
    h = np.diag(hat)
    studentized = residual / np.sqrt((residual**2).mean() * (1 - h))
    rest, named = (np.asarray(part.get_offsets()) for part in ax.collections[:2])
    assert named == pytest.approx(np.array([[h[9], studentized[9]]]), rel=1e-4)
    others = np.delete(np.arange(12), 9)
    assert rest == pytest.approx(np.c_[h, studentized][others], rel=1e-3, abs=1e-5)
    assert [text.get_text() for text in ax.texts if "Cook" not in text.get_text()] == ["9"]


def test_lines_of_cooks_distance_pass_where_it_is_that() -> None:
    tracer, _, _ = line_fit()
    ax = leverage_residual(tracer, ax=Figure().subplots())
    curves = [line for line in ax.lines if len(line.get_xdata()) > 2]
    assert curves
    for line in curves:
        h, r = line.get_data()
        distance = np.asarray(r) ** 2 * h / (1 - np.asarray(h)) / 2  # two parameters
        assert distance == pytest.approx(np.full(len(h), distance[0]), rel=1e-4)
        assert round(float(distance[0]), 3) in (0.5, 1.0)


def test_several_outputs() -> None:
    tracer, x, _ = class_fit(3)
    ax = leverage_residual(tracer, top=2, ax=Figure().subplots())
    assert {text.get_text() for text in ax.texts} <= set("012345")
    assert len(ax.texts) == 2
    assert ax.get_ylim()[0] == 0.0
    assert ax.get_xlabel() == "leverage, summed over outputs"
    drawn = torch.cat([torch.tensor(part.get_offsets()) for part in ax.collections])
    assert drawn[:, 0].sort().values.tolist() == pytest.approx(tracer.leverage.sum(1).sort().values.tolist())
    assert len(drawn) == len(x)


def test_what_cannot_be_drawn_is_refused() -> None:
    grouped, _, _ = line_fit(groups=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    with pytest.raises(InputError, match="expected a fit without groups"):
        leverage_residual(grouped)
