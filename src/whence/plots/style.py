"""How the pictures look: colours that colour-blind readers tell apart, quiet axes, matplotlib's settings untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.report.page import Group
from whence.tracing.verdicts import BOTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap

Numbers = NDArray[np.float64]

# Okabe and Ito's palette.
BLUE, VERMILLION, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
PURPLE, ORANGE, YELLOW, BLACK = "#CC79A7", "#E69F00", "#F0E442", "#000000"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK)
GREY = "#9aa0a6"
LINE = "#6b7178"
INK = "#3c4147"

# Told apart by colour and by shape: colour, marker, size, opacity.
STYLES = {
    "noise": (BLUE, "o", 20, 0.9),
    "scarcity": (VERMILLION, "D", 20, 0.9),
    "plain": (GREY, "o", 9, 0.5),
}

NAMES = {
    "ho": "Ho",
    "hec0": "HeC0",
    "hec1": "HeC1",
    "hec2": "HeC2",
    "hec3": "HeC3",
    "jackknife": "jackknife",
    "laplace": "Laplace",
    "ratio": "HeC3/Ho",
}
# Colour and dashes of curves without a colour of their own; neighbours differ in both.
FURTHER: tuple[tuple[str, Any], ...] = (
    (PURPLE, "-"),
    (ORANGE, (0, (5, 2))),
    (BLACK, (0, (1, 1.2))),
    (SKY, (0, (6, 2, 1, 2))),
)
COLOURS = {"hec3": BLUE, "ho": VERMILLION, "ratio": GREEN, "laplace": PURPLE, "jackknife": ORANGE}
DASHES: dict[str, Any] = {"hec3": "-", "ho": (0, (5, 2)), "ratio": (0, (1, 1.2)), "laplace": (0, (6, 2, 1, 2))}


def axes(ax: Axes | None) -> Axes:
    """The axes to draw on: those given, or new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # an extra: only plots need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected matplotlib for plots. Install it: pip install 'whence[report]'.") from error

    return plt.subplots(layout="constrained")[1]


def quiet(ax: Axes) -> None:
    """Leave out the lines and ticks that say nothing."""
    ax.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(LINE)
    ax.tick_params(colors=INK, which="both")
    ax.tick_params(which="minor", length=0)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(INK)


def rim(group: Group) -> str:
    """The edge of a group's marks: that of the other source, where both are at work."""
    return VERMILLION if group.tone == "noise" and group.name == BOTH else "white"


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


def colour_map(name: str, *colours: str) -> LinearSegmentedColormap:
    """A colour map from some colours; it is handed over, not registered."""
    from matplotlib.colors import LinearSegmentedColormap  # an extra: only plots need it

    return LinearSegmentedColormap.from_list(name, colours)


def sources() -> LinearSegmentedColormap:
    """From scarcity to noise: vermillion, nearly white, blue."""
    return colour_map("whence sources", VERMILLION, "#f3b58c", "#f7f7f5", "#8cbfdc", BLUE)
