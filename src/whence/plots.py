"""Pictures of results with matplotlib. Each function takes an `Axes`, or makes one, and returns it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from .errors import ShapeError
from .report.page import Group, in_order
from .report.ranking import ranks, score
from .results import Uncertainty

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by colour-blind readers and by shape: colour, marker, size, opacity.
STYLES = {
    "noise": ("#0064a8", "o", 20, 0.9),
    "scarcity": ("#d95f02", "D", 20, 0.9),
    "plain": ("#9aa0a6", "o", 9, 0.5),
}
LINE = "#6b7178"


def rank_scatter(uncertainty: Uncertainty, groups: Sequence[Group] | None = None, ax: Axes | None = None) -> Axes:
    """Rank by Ho against rank by HeC3: above the line noise, to the lower right scarcity.

    Args:
        uncertainty: of m predictions.
        groups: one for each prediction; they set colour, shape and legend.
        ax: where to draw.
    """
    m = len(uncertainty)
    kinds = [Group("predictions")] * m if groups is None else list(groups)
    if len(kinds) != m:
        raise ShapeError(f"expected {m} groups, one for each prediction, got {len(kinds)}.")
    ax = _axes(ax)
    x, y = (100 * ranks(score(uncertainty, name)).cpu().numpy() for name in ("ho", "hec3"))
    ax.plot([0, 100], [0, 100], color=LINE, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for group in reversed(in_order(kinds)):  # plain ones first, so that the others lie on top
        chosen = np.array([kind == group for kind in kinds])
        colour, marker, area, opacity = STYLES[group.tone]
        ax.scatter(
            x[chosen],
            y[chosen],
            s=area,
            c=colour,
            marker=marker,
            alpha=opacity,
            linewidths=0,
            label=group.name,
            zorder=2,
        )
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xlabel="rank by Ho, %", ylabel="rank by HeC3, %")
    if groups is not None:
        handles, names = ax.get_legend_handles_labels()
        below = (0.5, -0.16)
        ax.legend(
            handles[::-1], names[::-1], loc="upper center", bbox_to_anchor=below, frameon=False, handletextpad=0.2
        )
    return ax


def gallery(
    images: Tensor,  # (m, h, w) or (m, h, w, 3), between 0 and 1
    names: Sequence[str] | None = None,
    groups: Sequence[Group] | None = None,
    columns: int = 8,
    ax: Axes | None = None,
) -> Axes:
    """Images in rows, the first at the top left, each with its name below and a frame in the colour of its group."""
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise ShapeError(f"expected images of shape (m, h, w) or (m, h, w, 3), got {tuple(images.shape)}.")
    for what, given in (("names", names), ("groups", groups)):
        if given is not None and len(given) != len(images):
            raise ShapeError(f"expected {len(images)} {what}, one for each image, got {len(given)}.")
    ax = _axes(ax)
    from matplotlib.patches import Rectangle  # an extra: only plots need it

    pitch = 1.2 if names is None else 1.45  # from one row to the next, in widths of an image
    for place, image in enumerate(images.detach().cpu().numpy()):
        left, top = 1.2 * (place % columns), -pitch * (place // columns)
        ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(left, left + 1, top - 1, top), interpolation="nearest")
        colour = LINE if groups is None else STYLES[groups[place].tone][0]
        ax.add_patch(Rectangle((left, top - 1), 1, 1, fill=False, edgecolor=colour, linewidth=1.8, clip_on=False))
        if names is not None:
            ax.text(left + 0.5, top - 1.07, names[place], ha="center", va="top", fontsize="small", color=colour)
    rows = math.ceil(len(images) / columns)
    ax.set(xlim=(-0.1, 1.2 * columns - 0.1), ylim=(-pitch * rows + 0.1, 0.1), aspect="equal")
    ax.set_axis_off()
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt  # an extra: only plots need it

    return plt.subplots(layout="constrained")[1]
