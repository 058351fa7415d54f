"""How the pictures look: colours that colour-blind readers tell apart, quiet axes, matplotlib's settings untouched."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.results import Uncertainty

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]

# Okabe and Ito's palette.
BLUE, VERMILLION, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
PURPLE, ORANGE, YELLOW, BLACK = "#CC79A7", "#E69F00", "#F0E442", "#000000"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK)
GREY, LINE, INK = "#9aa0a6", "#6b7178", "#3c4147"

# Groups differ by colour and by shape: colour, marker, size, opacity.
STYLES = {
    "noise": (BLUE, "o", 20, 0.9),
    "scarcity": (VERMILLION, "D", 20, 0.9),
    "plain": (GREY, "o", 9, 0.5),
}

NAMES = {"ho": "Ho", "laplace": "Laplace", "ratio": "HeC3/Ho", **{f"hec{i}": f"HeC{i}" for i in range(4)}}
# Colours and dashes of the estimators, and of curves that have none of their own; neighbours differ in both.
COLOURS = {"hec3": BLUE, "ho": VERMILLION, "ratio": GREEN, "laplace": PURPLE, "jackknife": ORANGE}
DASHES: dict[str, Any] = {"hec3": "-", "ho": (0, (5, 2)), "ratio": (0, (1, 1.2)), "laplace": (0, (6, 2, 1, 2))}
FURTHER: tuple[tuple[str, Any], ...] = (
    (PURPLE, "-"),
    (ORANGE, (0, (5, 2))),
    (BLACK, (0, (1, 1.2))),
    (SKY, (0, (6, 2, 1, 2))),
)


def axes(ax: Axes | None) -> Axes:
    """The axes to draw on: those given, or new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # an extra: only plots need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected matplotlib for plots. Install it: pip install 'whence[report]'.") from error

    return plt.subplots(layout="constrained")[1]


def quiet(ax: Axes) -> Axes:
    """Leave out the lines and ticks that say nothing."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(LINE)
    ax.tick_params(colors=INK, which="both")
    ax.tick_params(which="minor", length=0)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(INK)
    return ax


def column(values: Any, count: int, what: str, of: str = "prediction") -> Numbers:
    """One number for each of `count` things, from a tensor, an array or a list."""
    given = values.detach().cpu() if isinstance(values, Tensor) else values
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"expected numbers as {what}, got {type(values).__name__}.") from None
    if found.size != count or len(found) != count:
        raise ShapeError(f"expected {count} {what}, one for each {of}, got shape {tuple(found.shape)}.")
    return found.reshape(count)


def check_count(given: Sized | None, count: int, what: str, of: str = "prediction") -> None:
    """Raise unless there is one of something for each of `count` things, or none at all."""
    if given is not None and len(given) != count:
        raise ShapeError(f"expected {count} {what}, one for each {of}, got {len(given)}.")


def score(uncertainty: Uncertainty, by: str) -> Tensor:
    """(m,) the ratio, or the total variance by an estimator."""
    return uncertainty.ratio if by == "ratio" else uncertainty.trace(by)
