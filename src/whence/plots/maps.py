"""Predictions on a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.display import number
from whence.errors import ShapeError
from whence.report.page import Group, in_order
from whence.results import Uncertainty

from .ranks import by_source
from .style import GREY, STYLES, Numbers, axes, column, quiet, rim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 130.0
"""Area of the largest circle, in points squared."""


def source_map(
    longitude: Any,
    latitude: Any,
    uncertainty: Uncertainty,
    errors: Any = None,
    *,
    groups: Sequence[Group] | None = None,
    share: float = 0.1,
    ax: Axes | None = None,
) -> Axes:
    """Predictions as circles on a map: the size tells the error, the colour whence the doubt comes.

    Blue: uncertain by HeC3, noisy labels nearby. Vermillion: uncertain by Ho, few examples nearby. Grey: neither.

    Args:
        longitude: (m,) in degrees.
        latitude: (m,) in degrees.
        uncertainty: of m predictions.
        errors: (m,) absolute error of each; circles of one size without.
        groups: one for each prediction, such as `by_verdict(tracer.explain(x))`; `by_source` when not given.
        share: of the predictions that count as uncertain by an estimator, when there are no groups.
        ax: where to draw.

    Examples:
        >>> east, north = torch.rand(2, 40, generator=torch.Generator().manual_seed(0))
        >>> u = tracer.predict(x)
        >>> ax = plots.source_map(east, north, u, (u.mean - y)[:, 0], ax=Figure().subplots())
        >>> len(ax.collections) > 0
        True
    """
    m = len(uncertainty)
    east, north = column(longitude, m, "longitudes"), column(latitude, m, "latitudes")
    kinds = by_source(uncertainty, share) if groups is None else list(groups)
    if len(kinds) != m:
        raise ShapeError(f"expected {m} groups, one for each prediction, got {len(kinds)}.")
    wrong = None if errors is None else np.abs(column(errors, m, "errors"))
    top = 1.0 if wrong is None else max(float(np.quantile(wrong, 0.99)), 1e-300)
    areas = np.full(m, 14.0) if wrong is None else _areas(wrong, top)
    ax = axes(ax)
    for depth, group in enumerate(reversed(in_order(kinds))):  # plain ones first, so that the others lie on top
        chosen = np.flatnonzero([kind == group for kind in kinds])
        chosen = chosen[np.argsort(-areas[chosen], kind="stable")]  # small circles on top of large ones
        colour = STYLES[group.tone][0]
        plain = group.tone == "plain"
        ax.scatter(
            east[chosen],
            north[chosen],
            s=areas[chosen],
            c=colour,
            alpha=0.3 if plain else 0.65,
            linewidths=0 if plain else 0.4 if rim(group) == "white" else 1.2,
            edgecolors=rim(group),
            label=group.name,
            zorder=2 + depth,
        )
    middle = math.radians(float(np.clip(north, -85, 85).mean()))
    ax.set(xlabel="longitude, °", ylabel="latitude, °", aspect=1.0 / math.cos(middle))
    quiet(ax)
    _legend(ax, None if wrong is None else top)
    return ax


def _areas(wrong: Numbers, top: float) -> Numbers:
    areas: Numbers = 2.0 + (LARGEST - 2.0) * np.minimum(wrong / top, 1.0)
    return areas


def _legend(ax: Axes, top: float | None) -> None:
    handles, names = ax.get_legend_handles_labels()
    handles, names = handles[::-1], names[::-1]
    if top is not None:
        for value in (_rounded(top / 8), _rounded(top)):
            area = float(_areas(np.array([value]), top)[0])
            handles.append(ax.scatter([], [], s=area, c=GREY, alpha=0.6, linewidths=0))
            names.append(f"error {number(value)}")
    legend = ax.legend(handles, names, framealpha=0.85, edgecolor="none", fontsize="small", loc="best")
    for handle in legend.legend_handles[: len(handles) - (0 if top is None else 2)]:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([36.0])
            handle.set_alpha(0.9)


def _rounded(value: float) -> float:
    """To one digit.

    Examples:
        >>> _rounded(0.234), _rounded(17.0)
        (0.2, 20.0)
    """
    return float(f"{value:.1g}")
