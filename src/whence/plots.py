"""Plots of results with matplotlib. Each function takes an `Axes`, or makes one, and returns it.

Colours are Okabe and Ito's, which colour-blind readers can distinguish: blue for noise, vermillion for scarcity.
No setting of matplotlib is changed.

Examples:
    Those of the functions go on from here.

    >>> import torch, whence
    >>> from matplotlib.figure import Figure
    >>> from whence import plots
    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
    >>> net, y = torch.nn.Linear(1, 1).double(), 2 * x + (99 * x).sin()
    >>> tracer = whence.fit(net, [(x, y)], recenter=True, progress=False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.curvature import RidgePath
from whence.display import number
from whence.errors import InputError, ShapeError
from whence.influence.explanation import TONES
from whence.influence.training import cooks_distance, label_suspicion
from whence.likelihoods import Bernoulli, Categorical
from whence.report.charts import kept_risk
from whence.results import Uncertainty
from whence.tracer import Tracer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "bands",
    "decision_regions",
    "leverage_residual",
    "rank_scatter",
    "ridge_path",
    "risk_coverage",
]

Numbers = NDArray[np.float64]
Tone = Literal["plain", "scarcity", "both", "noise"]

# Okabe and Ito's palette.
BLUE, VERMILLION, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
PURPLE, ORANGE, YELLOW, BLACK = "#CC79A7", "#E69F00", "#F0E442", "#000000"
CLASSES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, YELLOW, BLACK)
GREY, LINE, INK = "#9aa0a6", "#6b7178", "#3c4147"

# Groups of marks differ by colour and by shape; later ones lie on top.
STYLES: dict[str, dict[str, Any]] = {
    "plain": {"c": GREY, "marker": "o", "s": 9, "alpha": 0.5, "linewidths": 0},
    "scarcity": {"c": VERMILLION, "marker": "D", "s": 20, "alpha": 0.9, "linewidths": 0},
    "both": {"c": BLUE, "marker": "o", "s": 20, "alpha": 0.9, "edgecolors": VERMILLION, "linewidths": 1.2},
    "noise": {"c": BLUE, "marker": "o", "s": 20, "alpha": 0.9, "linewidths": 0},
}

NAMES = {"ho": "Ho", "laplace": "Laplace", "ratio": "HeC3/Ho", **{f"hec{i}": f"HeC{i}" for i in range(4)}}
# Colours and dashes of the estimators, and of other curves; neighbours differ in both.
DASHED, DOTTED, MIXED = (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2))
LINES: dict[str, tuple[str, Any]] = {
    "hec3": (BLUE, "-"),
    "ho": (VERMILLION, DASHED),
    "ratio": (GREEN, DOTTED),
    "laplace": (PURPLE, MIXED),
}
FURTHER: tuple[tuple[str, Any], ...] = ((PURPLE, "-"), (ORANGE, DASHED), (BLACK, DOTTED), (SKY, MIXED))
MARGIN, BATCH = 0.15, 4096  # around inputs in a plane, as a share of their range; and places predicted together
FEWEST = 2.0  # per cent of the predictions whose mean error sets the height of a plot; that of fewer is random


def axes(ax: Axes | None) -> Axes:
    """The axes to draw on: those given, or new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # an extra: needed only for plots
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected matplotlib for plots. Install it: pip install 'whence[report]'.") from error

    return plt.subplots(layout="constrained")[1]


def quiet(ax: Axes) -> Axes:
    """Remove lines and ticks that carry no information."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(LINE)
    ax.tick_params(colors=INK, which="both")
    ax.tick_params(which="minor", length=0)
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)
    return ax


def column(values: Any, count: int, what: str, of: str = "prediction") -> Numbers:
    """One number for each of `count` items, from a tensor, an array or a list."""
    given = values.detach().cpu() if isinstance(values, Tensor) else values
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"expected numbers as {what}, got {type(values).__name__}.") from None
    if found.size != count or len(found) != count:
        raise ShapeError(f"expected {count} {what}, one for each {of}, got shape {tuple(found.shape)}.")
    return found.reshape(count)


def bands(
    x: Any,
    uncertainty: Uncertainty,
    train: tuple[Any, Any] | None = None,
    *,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """Plot predictions of one number from one number: the curve, and its confidence bounds by HeC3 (area), Ho (lines).

    Args:
        x: (m,) or (m, 1) inputs of the predictions, in any order.
        uncertainty: the m predictions.
        train: inputs and targets of the training examples, drawn as dots.
        level: level of the bounds, which are for the curve itself; single observations scatter more.
        ax: axes to draw on.

    Examples:
        >>> ax = plots.bands(x, tracer.predict(x), ax=Figure().subplots())
        >>> ax.get_legend_handles_labels()[1][-1]
        'prediction'
    """
    x = column(x, len(uncertainty), "places x")
    order = np.argsort(x, kind="stable")
    x, curve = x[order], uncertainty.mean[:, 0].detach().cpu().numpy()[order]
    ax = axes(ax)
    shown = [curve]
    if train is not None:
        inputs = column(train[0], len(train[0]), "training inputs", "training example")
        shown.append(targets := column(train[1], len(inputs), "training targets", "training example"))
        ax.scatter(inputs, targets, s=9, c=GREY, alpha=0.7, linewidths=0, label="training examples", zorder=2)
    intervals = (uncertainty.interval(level, name) for name in ("hec3", "ho"))
    area, lines = ([bound[:, 0].cpu().numpy()[order] for bound in interval] for interval in intervals)
    ax.fill_between(x, area[0], area[1], color=BLUE, alpha=0.25, linewidth=0, label=f"HeC3, {level:.0%}", zorder=1)
    for line, label in zip(lines, (f"Ho, {level:.0%}", None), strict=True):
        ax.plot(x, line, color=VERMILLION, linewidth=1.3, linestyle=DASHED, label=label, zorder=3)
    ax.plot(x, curve, color=INK, linewidth=1.8, label="prediction", zorder=4)
    low, high = min(part.min() for part in shown), max(part.max() for part in shown)
    room = max(high - low, 1e-12)  # for curve and dots, and for the bounds unless they would flatten both
    bottom = max(low - 0.6 * room, min(low, *(part.min() for part in area + lines)) - 0.05 * room)
    top = min(high + 0.6 * room, max(high, *(part.max() for part in area + lines)) + 0.05 * room)
    ax.set(xlabel="input", ylabel="output", xlim=(x.min(), x.max()), ylim=(bottom, top))
    ax.legend(frameon=False, fontsize="small", reverse=True)
    return quiet(ax)


def risk_coverage(
    uncertainty: Uncertainty,
    errors: Any,
    by: Sequence[str] = ("hec3", "ho"),
    others: Mapping[str, Any] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the mean error of the remaining predictions as the most uncertain are removed.

    The lower a curve, the better its score finds wrong predictions. The legend gives the area under each.

    Args:
        uncertainty: m predictions.
        errors: (m,) error of each, such as 0 and 1 for right and wrong, or the absolute error.
        by: "ho", "hec3", "ratio" or another estimator; predictions are removed in decreasing order of it.
        others: your own scores by name, large if uncertain; for instance minus the margin.
        ax: axes to draw on.

    Examples:
        >>> errors = (tracer.predict(x).mean - 2 * x).abs()[:, 0]
        >>> ax = plots.risk_coverage(tracer.predict(x), errors, ax=Figure().subplots())
        >>> ax.get_xlabel() != ""
        True
    """
    m = len(uncertainty)
    errors = column(errors, m, "errors")
    scores = {name: score(uncertainty, name).cpu().numpy() for name in by}
    scores |= {name: column(values, m, f"scores {name!r}") for name, values in (others or {}).items()}
    ax = axes(ax)
    coverage = 100 * np.arange(1, m + 1) / m
    chance = float(errors.mean())
    top = chance
    for place, (name, values) in enumerate(scores.items()):
        risk = kept_risk(values, errors)
        top = max(top, float(risk[coverage >= FEWEST].max()))
        colour, dashes = LINES.get(name, FURTHER[(place - len(by)) % len(FURTHER)])
        label = f"{NAMES.get(name, name)} ({number(risk.mean())})"
        ax.plot(coverage, risk, color=colour, linestyle=dashes, linewidth=1.8, label=label)
    best = kept_risk(errors, errors)
    ax.plot(coverage, best, color=LINE, linewidth=1, label=f"best possible ({number(best.mean())})")
    ax.axhline(chance, color=LINE, linewidth=1, linestyle=(0, (1, 2)), label=f"by chance ({number(chance)})")
    ax.set(xlim=(0, 100), xlabel="predictions kept, %", ylabel="mean error of those kept")
    ax.set_ylim(min(0.0, float(best.min())), 1.08 * top if top > 0 else None)
    ax.legend(frameon=False, fontsize="small", title="removed by (area)", title_fontsize="small", alignment="left")
    return quiet(ax)


def rank_scatter(
    uncertainty: Uncertainty,
    groups: Sequence[str] | None = None,
    tones: Mapping[str, Tone] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the rank by Ho against the rank by HeC3: above the line noise, to the lower right scarcity.

    Args:
        uncertainty: m predictions.
        groups: the name of each prediction's group, for the legend, such as `tracer.explain(x).verdicts`.
        tones: "noise", "scarcity", "both" or "plain" by group, which set colour and shape. Verdicts have their own;
            other groups are plain by default.
        ax: axes to draw on.

    Examples:
        >>> ax = plots.rank_scatter(tracer.predict(x), tracer.explain(x).verdicts, ax=Figure().subplots())
        >>> len(ax.collections) > 0
        True
    """
    if groups is not None and len(groups) != len(uncertainty):
        raise ShapeError(f"expected {len(uncertainty)} groups, one for each prediction, got {len(groups)}.")
    ax = axes(ax)
    x, y = (100 * ranks(score(uncertainty, name)).cpu().numpy() for name in ("ho", "hec3"))
    ax.plot([0, 100], [0, 100], color=LINE, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
    names, known = np.array(groups or ["predictions"] * len(x)), {**TONES, **(tones or {})}
    # Plain marks first, so that noise lies on top.
    for name in sorted(dict.fromkeys(names), key=lambda name: list(STYLES).index(known.get(name, "plain"))):
        here = names == name
        ax.scatter(x[here], y[here], label=name, zorder=2, **STYLES[known.get(name, "plain")])
    if groups is not None:
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        ax.legend(frameon=False, handletextpad=0.2, reverse=True, **place)
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xlabel="rank by Ho, %", ylabel="rank by HeC3, %")
    return quiet(ax)


def decision_regions(
    tracer: Tracer, inputs: Any, labels: Any = None, *, steps: int = 120, ax: Axes | None = None
) -> Axes:
    """Plot the decided class over a plane, paler where another training set may change it.

    The colour is white where the margin is zero, and full where it is many standard deviations by HeC3.

    Args:
        tracer: a fit to inputs of two numbers. One output decides by its sign, several by the largest.
        inputs: (n, 2) examples to draw, which also set the visible part of the plane.
        labels: (n,) classes of these examples, from 0.
        steps: points along each axis.
        ax: axes to draw on.

    Examples:
        >>> corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> two = whence.fit(torch.nn.Linear(2, 1), [(corners, corners[:, :1])], recenter=True, progress=False)
        >>> len(plots.decision_regions(two, corners, corners[:, 0], steps=8, ax=Figure().subplots()).images)
        1
    """
    from matplotlib.colors import to_rgb  # an extra: needed only for plots

    points = inputs if isinstance(inputs, Tensor) else torch.as_tensor(inputs, device="cpu")
    if points.ndim != 2 or points.shape[1] != 2:
        raise ShapeError(f"expected inputs of shape (n, 2), got {tuple(points.shape)}.")
    places = points.detach().cpu().double().numpy()
    classes = np.zeros(len(places)) if labels is None else column(labels, len(places), "labels", "input")
    low, high = places.min(0), places.max(0)
    east, north = np.linspace(low - MARGIN * (high - low), high + MARGIN * (high - low), steps).T
    plane = torch.cartesian_prod(torch.from_numpy(east), torch.from_numpy(north)).to(points)
    u = tracer.predict(list(plane.split(BATCH)), covariance=True)
    alone = u.mean.shape[1] == 1
    u = replace(u, likelihood=Bernoulli() if alone else Categorical())  # a margin, whatever the loss
    choice = (u.mean[:, 0] > 0).long() if alone else u.mean.argmax(1)
    variance = u.margin_variance()
    firm = torch.erf(u.margin / (2 * variance.clamp_min(torch.finfo(variance.dtype).tiny)).sqrt())
    full = np.array([to_rgb(CLASSES[one % len(CLASSES)]) for one in choice.tolist()])
    colours = (1 - 0.55 * firm.cpu().numpy()[:, None] * (1 - full)).reshape(steps, steps, 3).transpose(1, 0, 2)
    ax = axes(ax)
    ax.imshow(colours, extent=(east[0], east[-1], north[0], north[-1]), origin="lower", aspect="auto")
    for one in np.unique(classes):
        colour = INK if labels is None else CLASSES[int(one) % len(CLASSES)]
        here = places[classes == one]
        ax.scatter(here[:, 0], here[:, 1], s=18, c=colour, edgecolors="white", linewidths=0.6, label=f"class {one:g}")
    if labels is not None:
        ax.legend(framealpha=0.85, edgecolor="none", fontsize="small")
    ax.set(xlabel="first input", ylabel="second input")
    return quiet(ax)


def leverage_residual(tracer: Tracer, top: int = 5, ax: Axes | None = None) -> Axes:
    """Plot leverage against the studentized residual of every training example.

    To the right: examples that determine their own prediction. Far from zero: labels that the others contradict. Those
    with the largest Cook's distance, which do both, are named.

    Args:
        tracer: the fit. With several outputs leverages are summed, and the size of the residual is shown.
        top: how many examples to name.
        ax: axes to draw on.

    Examples:
        >>> len(plots.leverage_residual(tracer, top=3, ax=Figure().subplots()).texts)
        3
    """
    leverage, residual = tracer.leverage.sum(1).cpu().numpy(), label_suspicion(tracer).score.cpu().numpy()
    if tracer.problem.k == 1:
        residual = residual * np.sign(tracer.residuals[:, 0].cpu().numpy())
    named = np.argsort(-cooks_distance(tracer).cpu().numpy(), kind="stable")[:top]
    ax = axes(ax)
    ax.axhline(0, color=LINE, linewidth=0.8, zorder=1)
    ax.scatter(leverage, residual, c=np.where(np.isin(np.arange(len(leverage)), named), BLUE, GREY), s=16, zorder=2)
    for at in named:
        place = (leverage[at], residual[at])
        ax.annotate(str(at), place, xytext=(4, 3), textcoords="offset points", color=BLUE, fontsize="small")
    ax.set(xlabel="leverage", ylabel="studentized residual")
    return quiet(ax)


def ridge_path(path: RidgePath | None, ax: Axes | None = None) -> Axes:
    """Plot the leave-one-out error against the ridge, with the smallest marked.

    Args:
        path: `tracer.ridge_path` of a fit with `ridge="loo"`.
        ax: axes to draw on.

    Examples:
        >>> path = whence.fit(net, [(x, y)], ridge="loo", progress=False).ridge_path
        >>> plots.ridge_path(path, ax=Figure().subplots()).get_xscale()
        'log'
    """
    if path is None:
        raise InputError('expected a path of ridges, got None. Fit with ridge="loo" to have one.')
    ridges, errors = (values.detach().cpu().numpy() for values in (path.ridges, path.errors))
    best = int(errors.argmin())
    end = ", at the end of the grid" if best in (0, len(ridges) - 1) else ""
    ax = axes(ax)
    ax.plot(ridges, errors, color=LINE, linewidth=1.5, marker="o", markersize=3.5)
    ax.plot(ridges[best], errors[best], "o", color=BLUE, markersize=8, label=f"λ = {ridges[best]:.3g}{end}")
    ax.set(xscale="log", xlabel="ridge λ, on the sum scale", ylabel="leave-one-out error")
    ax.legend(frameon=False)
    return quiet(ax)


def score(uncertainty: Uncertainty, by: str) -> Tensor:
    """(m,) the ratio, or the total variance of an estimator."""
    return uncertainty.ratio if by == "ratio" else uncertainty.trace(by)


def ranks(values: Tensor) -> Tensor:
    """Rank of each value, from 0 for the smallest, or NaN, to 1 for the largest; ties in their original order."""
    known = torch.where(values.isnan(), -torch.inf, values)
    return known.argsort(stable=True).argsort() / max(len(values) - 1, 1)
