"""Predictions and training examples as points: by two ranks, on a map, by leverage and residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from whence.display import number
from whence.errors import InputError
from whence.influence import Explanation
from whence.influence.explanation import BOTH, CONFIDENT, NOISY, SCARCE
from whence.influence.fitted import check_ungrouped
from whence.influence.training import cooks_distance, label_suspicion
from whence.plots.style import (
    BLUE,
    GREY,
    INK,
    LINE,
    STYLES,
    VERMILLION,
    Numbers,
    axes,
    check_count,
    column,
    quiet,
    score,
)
from whence.report import Group, Tone
from whence.results import Uncertainty
from whence.tracer import Tracer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 130.0
"""Area of the largest circle of a map, in points squared."""
COOKS_DISTANCES = (0.5, 1.0)
"""Along which lines are drawn, as is usual."""


def rank_scatter(uncertainty: Uncertainty, groups: Sequence[Group] | None = None, ax: Axes | None = None) -> Axes:
    """Rank by Ho against rank by HeC3: above the line noise, to the lower right scarcity.

    Args:
        uncertainty: of m predictions.
        groups: one for each prediction; they set colour, shape and legend.
        ax: where to draw.

    Examples:
        >>> u = tracer.predict(x)
        >>> ax = plots.rank_scatter(u, plots.by_source(u), ax=Figure().subplots())
        >>> len(ax.collections) > 0
        True
    """
    check_count(groups, len(uncertainty), "groups")
    ax = axes(ax)
    x, y = (100 * ranks(score(uncertainty, name)).cpu().numpy() for name in ("ho", "hec3"))
    ax.plot([0, 100], [0, 100], color=LINE, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    for group, chosen in _back_to_front(groups or [Group("predictions")] * len(x)):
        colour, marker, area, opacity = STYLES[group.tone]
        edge = _edge(group)
        style: dict[str, Any] = {"c": colour, "marker": marker, "alpha": opacity, "edgecolors": edge, "zorder": 2}
        width = 0.0 if edge == "white" else 1.2
        ax.scatter(x[chosen], y[chosen], s=area, linewidths=width, label=group.name, **style)
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xlabel="rank by Ho, %", ylabel="rank by HeC3, %")
    if groups is not None:
        handles, names = ax.get_legend_handles_labels()
        style = {"bbox_to_anchor": (0.5, -0.16), "frameon": False, "handletextpad": 0.2}
        ax.legend(handles[::-1], names[::-1], loc="upper center", **style)
    return quiet(ax)


def by_source(uncertainty: Uncertainty, share: float = 0.1) -> list[Group]:
    """A group for each prediction: uncertain by HeC3, uncertain by Ho, or neither.

    Uncertain are the predictions among the highest `share` by either estimator. Each goes with the estimator that ranks
    it higher, which is the side of the diagonal that it has in `rank_scatter`.

    Examples:
        >>> import torch
        >>> variances = {"ho": torch.tensor([1.0, 2.0, 3.0, 9.0]), "hec3": torch.tensor([9.0, 1.0, 2.0, 3.0])}
        >>> u = Uncertainty(torch.zeros(4, 1), {name: v.reshape(4, 1, 1) for name, v in variances.items()})
        >>> [group.tone for group in by_source(u, share=0.25)]
        ['noise', 'plain', 'plain', 'scarcity']
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"expected a share between 0 and 1, got {share!r}.")
    ho, hec3 = (ranks(score(uncertainty, name)) for name in ("ho", "hec3"))
    m = len(uncertainty)
    edge = 1.0 - (max(round(share * m), 1) - 0.5) / max(m - 1, 1)
    noise = Group("uncertain by HeC3: noisy labels nearby", "noise")
    scarcity = Group("uncertain by Ho: few examples nearby", "scarcity")
    plain = Group("neither")
    return [
        plain if max(a, b) < edge else noise if b > a else scarcity
        for a, b in zip(ho.tolist(), hec3.tolist(), strict=True)
    ]


def by_verdict(explanation: Explanation) -> list[Group]:
    """A group for each prediction of `tracer.explain(x)`; those with both faults in blue with a vermillion edge.

    Examples:
        >>> [group.tone for group in plots.by_verdict(tracer.explain(torch.tensor([[0.0], [30.0]]).double()))]
        ['plain', 'scarcity']
    """
    tones: dict[str, Tone] = {NOISY: "noise", BOTH: "noise", SCARCE: "scarcity", CONFIDENT: "plain"}
    return [Group(verdict, tones[verdict]) for verdict in explanation.verdicts]


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
    """Predictions as circles on a map: the size shows the error, the colour the source of the uncertainty.

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
    check_count(groups, m, "groups")
    areas, scale = np.full(m, 14.0), None
    if errors is not None:
        sizes = np.abs(column(errors, m, "errors"))
        scale = max(float(np.quantile(sizes, 0.99)), 1e-300)
        areas = _areas(sizes, scale)
    ax = axes(ax)
    for depth, (group, members) in enumerate(
        _back_to_front(by_source(uncertainty, share) if groups is None else groups)
    ):
        chosen = members[np.argsort(-areas[members], kind="stable")]  # small circles on top of large ones
        plain, edge = group.tone == "plain", _edge(group)
        width = 0 if plain else 0.4 if edge == "white" else 1.2
        style: dict[str, Any] = {
            "alpha": 0.3 if plain else 0.65,
            "linewidths": width,
            "edgecolors": edge,
            "zorder": 2 + depth,
        }
        ax.scatter(east[chosen], north[chosen], s=areas[chosen], c=STYLES[group.tone][0], label=group.name, **style)
    middle = math.radians(float(np.clip(north, -85, 85).mean()))
    ax.set(xlabel="longitude, °", ylabel="latitude, °", aspect=1.0 / math.cos(middle))
    _map_legend(ax, scale)
    return quiet(ax)


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
    check_count(names, n, "names", "training example")
    leverage, residual = tracer.leverage.sum(1).cpu().numpy(), label_suspicion(tracer).score.cpu().numpy()
    if k == 1:
        residual = residual * np.sign(tracer.residuals[:, 0].cpu().numpy())
    ax = axes(ax)
    largest = np.argsort(-cooks_distance(tracer).cpu().numpy(), kind="stable")[:top]
    rest = np.setdiff1d(np.arange(n), largest)
    ax.scatter(leverage[rest], residual[rest], s=14, c=GREY, alpha=0.65, linewidths=0, zorder=2)
    ax.scatter(leverage[largest], residual[largest], s=24, c=BLUE, linewidths=0, zorder=3)
    for place in largest:
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
    ax.margins(x=0.06, y=0.12)
    ax.set_xlim(left=0.0)
    if k == 1:
        ax.set(xlabel="leverage", ylabel="studentized residual")
        ax.axhline(0, color=LINE, linewidth=0.8, zorder=1)
    else:
        ax.set(xlabel="leverage, summed over outputs", ylabel="size of the studentized residual")
        ax.set_ylim(bottom=0.0)
    if k == 1 and tracer.problem.hessian_roots is None:  # elsewhere the distance is no function of the two
        _cooks_lines(ax, tracer.degrees_of_freedom)
    return quiet(ax)


def ranks(values: Tensor) -> Tensor:
    """Place of each value among all, from 0 for the smallest, or NaN, to 1 for the largest; equal ones as they come.

    Examples:
        >>> import torch
        >>> ranks(torch.tensor([5.0, 1.0, 3.0]))
        tensor([1.0000, 0.0000, 0.5000])
    """
    known = torch.where(values.isnan(), -torch.inf, values)
    return known.argsort(stable=True).argsort() / max(len(values) - 1, 1)


def _back_to_front(groups: Sequence[Group]) -> list[tuple[Group, Any]]:
    """Each group with its members: plain ones first, those of noise last, so that they lie on top."""
    front_first = sorted(dict.fromkeys(groups), key=lambda group: get_args(Tone).index(group.tone))
    return [(group, np.flatnonzero([other == group for other in groups])) for group in reversed(front_first)]


def _edge(group: Group) -> str:
    """The edge of a group's marks: vermillion around blue, where both sources are at work."""
    return VERMILLION if group.tone == "noise" and group.name == BOTH else "white"


def _areas(errors: Numbers, scale: float) -> Numbers:
    areas: Numbers = 2.0 + (LARGEST - 2.0) * np.minimum(errors / scale, 1.0)
    return areas


def _map_legend(ax: Axes, scale: float | None) -> None:
    """Groups with circles of one size, and two errors with the sizes that stand for them."""
    handles, names = ax.get_legend_handles_labels()
    groups = len(handles)
    handles, names = handles[::-1], names[::-1]
    for error in [] if scale is None else [float(f"{scale / 8:.1g}"), float(f"{scale:.1g}")]:
        area = _areas(np.array([error]), scale or 1.0)
        handles.append(ax.scatter([], [], s=area, c=GREY, alpha=0.6, linewidths=0))
        names.append(f"error {number(error)}")
    legend = ax.legend(handles, names, framealpha=0.85, edgecolor="none", fontsize="small", loc="best")
    for handle in legend.legend_handles[:groups]:
        if handle is not None:
            handle.set(sizes=[36.0], alpha=0.9)


def _cooks_lines(ax: Axes, freedom: float) -> None:
    """Lines of equal Cook's distance, D = r^2 h / (dof (1 - h)), inside the picture."""
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    h: Numbers = np.linspace(max(left, 1e-6), min(right, 1 - 1e-6), 400)
    for distance in COOKS_DISTANCES:
        r = np.sqrt(distance * freedom * (1 - h) / h)
        for sign, limit in ((1, top), (-1, -bottom)):
            inside = r <= limit
            if inside.any():
                ax.plot(h[inside], sign * r[inside], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
                ax.text(h[-1], sign * r[-1], f" Cook's {distance:g}", color=INK, fontsize="x-small", va="center")
    ax.set(xlim=(left, right), ylim=(bottom, top))
