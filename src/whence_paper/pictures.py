"""Figures, drawn from records: small files, colours of Okabe and Ito, matplotlib's settings untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#9aa0a6"
RED = "#e00000"
STYLES = {
    "HeC3": (BLUE, "-", "o"),
    "Ho": (VERMILLION, "--", "D"),
    "HeC3/Ho": (GREEN, ":", "s"),
    "Laplace": (PURPLE, "-.", "^"),
    "margin": (GREY, "-", "v"),
}
"""Colour, dashes and marker of each score: told apart in grey as well."""


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    from matplotlib.figure import Figure  # an extra: only figures need it

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, dpi: int = 110) -> Path:
    """Write a PNG that is small enough for a repository."""
    from PIL import Image  # comes with matplotlib, an extra

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi)
    Image.open(drawn).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def runs_of_scores(ax: Axes, at: Sequence[float], scores: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """For each score the runs at each place as thin marks, and a line through their means with deviations.

    Args:
        ax: where to draw.
        at: places on the horizontal axis.
        scores: by name, for each place the values of the runs.
    """
    for name, values in scores.items():
        colour, dashes, marker = STYLES[name]
        spread = [stdev(runs) if len(runs) > 1 else 0.0 for runs in values]
        means = [fmean(runs) for runs in values]
        ax.errorbar(
            at, means, spread, color=colour, linestyle=dashes, marker=marker, markersize=5, capsize=2, label=name
        )
        for place, runs in zip(at, values, strict=True):
            ax.plot([place] * len(runs), runs, marker, color=colour, markersize=2, alpha=0.45)
    ax.axhline(0.5, color=GREY, linewidth=0.8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
