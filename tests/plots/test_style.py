"""What all pictures have in common."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes

from plotted import class_fit, line_fit, results
from whence import plots
from whence.errors import InputError
from whence.plots import CLASSES, FURTHER, LINES, STYLES, column

U = results(ho=[1.0, 2.0, 3.0], hec3=[3.0, 2.0, 1.0])
X = [0.0, 1.0, 2.0]

DRAWN: dict[str, Callable[[Axes | None], Axes]] = {
    "bands": lambda ax: plots.bands(X, U, ax=ax),
    "decision_regions": lambda ax: plots.decision_regions(*class_fit(2), steps=4, ax=ax),
    "leverage_residual": lambda ax: plots.leverage_residual(line_fit()[0], ax=ax),
    "rank_scatter": lambda ax: plots.rank_scatter(U, ax=ax),
    "ridge_path": lambda ax: plots.ridge_path(line_fit(ridge="loo", recenter=False)[0].ridge_path, ax=ax),
    "risk_coverage": lambda ax: plots.risk_coverage(U, X, ax=ax),
}


def test_every_plot_is_here() -> None:
    assert set(DRAWN) == set(plots.__all__)


@pytest.fixture(autouse=True)
def _off_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures made by pyplot need no window."""
    plt.switch_backend("agg")


@pytest.mark.parametrize("name", DRAWN)
def test_settings_of_matplotlib_stay_and_axes_are_made(name: str) -> None:
    before = dict(matplotlib.rcParams)
    ax = DRAWN[name](None)
    try:
        assert isinstance(ax, Axes)
        ax.figure.canvas.draw()  # what is drawn late may fail late
        assert dict(matplotlib.rcParams) == before
        assert ax.get_xlabel()
        assert ax.get_ylabel()
    finally:
        plt.close(ax.figure)


def test_colours_are_those_of_okabe_and_ito() -> None:
    published = {"000000", "E69F00", "56B4E9", "009E73", "F0E442", "0072B2", "D55E00", "CC79A7"}
    used = {colour.strip("#") for colour, _ in (*LINES.values(), *FURTHER)}
    assert used < published
    assert {colour.strip("#") for colour in CLASSES} == published
    assert STYLES["noise"]["marker"] != STYLES["scarcity"]["marker"], "noise and scarcity differ by shape too"


def test_numbers_only() -> None:
    with pytest.raises(InputError, match="expected numbers as errors, got list"):
        column(["a"], 1, "errors")
