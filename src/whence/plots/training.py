"""The training examples: which of them matter, which labels to doubt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from whence.errors import ShapeError
from whence.tracer import Tracer
from whence.tracing.fitted import check_ungrouped
from whence.tracing.training import cooks_distance, suspicion

from .style import BLUE, GREY, INK, LINE, Numbers, axes, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTOURS = (0.5, 1.0)
"""Cook's distances along which lines are drawn, as is usual."""


def leverage_residual(tracer: Tracer, top: int = 5, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Leverage against the studentized residual of every training example.

    To the right: examples that decide their own prediction. Up and down: labels that the others contradict. Those with
    the largest Cook's distance, which do both, are named, and lines of equal distance drawn where they fit in.

    Args:
        tracer: the fit. With several outputs leverages are summed, and the size of the residual is shown.
        top: how many examples to name.
        names: one for each training example; their positions when not given.
        ax: where to draw.

    Examples:
        >>> ax = plots.leverage_residual(tracer, ax=Figure().subplots())
        >>> len(ax.collections) + len(ax.lines) > 0
        True
    """
    check_ungrouped(tracer)
    n, k = tracer.problem.n, tracer.problem.k
    if names is not None and len(names) != n:
        raise ShapeError(f"expected {n} names, one for each training example, got {len(names)}.")
    leverage = tracer.leverage.sum(1).cpu().numpy()
    residual = suspicion(tracer).cpu().numpy()
    if k == 1:
        residual = residual * np.sign(tracer.residuals[:, 0].cpu().numpy())
    cook = cooks_distance(tracer).cpu().numpy()
    ax = axes(ax)
    chosen = np.argsort(-cook, kind="stable")[:top]
    rest = np.setdiff1d(np.arange(n), chosen)
    ax.scatter(leverage[rest], residual[rest], s=14, c=GREY, alpha=0.65, linewidths=0, zorder=2)
    ax.scatter(leverage[chosen], residual[chosen], s=24, c=BLUE, linewidths=0, zorder=3)
    for place in chosen:
        below = residual[place] < 0
        ax.annotate(
            str(place) if names is None else names[place],
            (leverage[place], residual[place]),
            xytext=(0, -5 if below else 5),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize="small",
            color=BLUE,
        )
    side = "studentized residual" if k == 1 else "size of the studentized residual"
    ax.set(xlabel="leverage" if k == 1 else "leverage, summed over outputs", ylabel=side)
    ax.margins(x=0.06, y=0.12)
    ax.set_xlim(left=0.0)
    if k == 1:
        ax.axhline(0, color=LINE, linewidth=0.8, zorder=1)
    else:
        ax.set_ylim(bottom=0.0)
    if k == 1 and tracer.problem.hessian_roots is None:  # elsewhere distance is no function of the two
        _contours(ax, tracer.degrees_of_freedom)
    quiet(ax)
    return ax


def _contours(ax: Axes, freedom: float) -> None:
    """Lines of equal Cook's distance, D = r^2 h / (dof (1 - h)), inside the picture."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    h: Numbers = np.linspace(max(left, 1e-6), min(right, 1 - 1e-6), 400)
    for distance in CONTOURS:
        r = np.sqrt(distance * freedom * (1 - h) / h)
        for sign, reach in ((1, top), (-1, -bottom)):
            inside = r <= reach
            if not inside.any():
                continue
            ax.plot(h[inside], sign * r[inside], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
            ax.text(h[-1], sign * r[-1], f" Cook's {distance:g}", color=INK, fontsize="x-small", va="center")
    ax.set(xlim=(left, right), ylim=(bottom, top))
