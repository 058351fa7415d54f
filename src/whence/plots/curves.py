"""Curves: predictions in one dimension with their bands, what uncertainty is good for, how the ridge was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.curvature import RidgePath
from whence.display import number
from whence.errors import InputError
from whence.plots.style import (
    BLUE,
    COLOURS,
    DASHES,
    FURTHER,
    GREY,
    INK,
    LINE,
    NAMES,
    Numbers,
    axes,
    column,
    quiet,
    score,
)
from whence.report.charts import kept_risk
from whence.results import Uncertainty

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST = 2.0
"""Per cent of the predictions whose mean error sets the height of the picture; that of fewer is chance."""


def bands(
    x: Any,
    uncertainty: Uncertainty,
    train: tuple[Any, Any] | None = None,
    *,
    estimators: Sequence[str] = ("hec3", "ho"),
    level: float = 0.95,
    output: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Predictions of one number from one number: the curve, and confidence bounds of it by each estimator.

    Args:
        x: (m,) or (m, 1) where the predictions were made, in any order.
        uncertainty: of these m predictions.
        train: inputs and targets of the training examples, drawn as dots.
        estimators: whose bounds to draw; the first as an area, the others as lines.
        level: of the bounds, which are for the curve itself; single observations scatter more.
        output: which output of the network.
        ax: where to draw.

    Examples:
        >>> ax = plots.bands(x, tracer.predict(x), ax=Figure().subplots())
        >>> ax.get_legend_handles_labels()[1][-1]
        'prediction'
    """
    x = column(x, len(uncertainty), "places x")
    order = np.argsort(x, kind="stable")
    x = x[order]
    curve = uncertainty.mean[:, output].detach().cpu().numpy()[order]
    ax = axes(ax)
    shown = [curve]
    if train is not None:
        inputs = column(train[0], len(train[0]), "training inputs", "training example")
        targets = np.asarray(train[1].detach().cpu() if hasattr(train[1], "detach") else train[1])
        targets = targets[:, output] if targets.ndim > 1 else targets
        targets = column(targets, len(inputs), "training targets", "training example")
        shown.append(targets)
        ax.scatter(inputs, targets, s=9, c=GREY, alpha=0.7, linewidths=0, label="training examples", zorder=2)
    bounds: list[Numbers] = []
    for place, name in enumerate(estimators):
        low, high = (bound[:, output].cpu().numpy()[order] for bound in uncertainty.interval(level, name))
        bounds += [low, high]
        label, colour = f"{NAMES.get(name, name)}, {level:.0%}", COLOURS.get(name, FURTHER[place % len(FURTHER)][0])
        if place == 0:
            ax.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0, label=label, zorder=1)
        else:
            style = {"color": colour, "linewidth": 1.3, "linestyle": DASHES.get(name, (0, (5, 2))), "zorder": 3}
            ax.plot(x, low, label=label, **style)
            ax.plot(x, high, **style)
    ax.plot(x, curve, color=INK, linewidth=1.8, label="prediction", zorder=4)
    ax.set(xlabel="input", ylabel="output", xlim=(x.min(), x.max()), ylim=_limits(shown, bounds))
    labelled = list(zip(*ax.get_legend_handles_labels(), strict=True))[::-1]
    labelled.sort(key=lambda pair: pair[1] != "prediction")
    handles, labels = zip(*labelled, strict=True)
    ax.legend(handles, labels, frameon=False, fontsize="small")
    return quiet(ax)


def risk_coverage(
    uncertainty: Uncertainty,
    errors: Any,
    by: Sequence[str] = ("hec3", "ho"),
    others: Mapping[str, Any] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Mean error of the predictions that are kept, as the most uncertain are set aside.

    The lower a curve, the better its score finds the predictions that are wrong. The legend tells the area under each.

    Args:
        uncertainty: of m predictions.
        errors: (m,) error of each, such as 0 and 1 for right and wrong, or the absolute error.
        by: "ho", "hec3", "ratio" or another estimator, by whose size predictions are set aside.
        others: scores of your own by name, large where uncertain; for instance minus the margin.
        ax: where to draw.

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
        colour, dashes = FURTHER[(place - len(by)) % len(FURTHER)]
        style = {"color": COLOURS.get(name, colour), "linestyle": DASHES.get(name, dashes), "linewidth": 1.8}
        ax.plot(coverage, risk, label=f"{NAMES.get(name, name)} ({number(risk.mean())})", **style)
    best = kept_risk(errors, errors)
    ax.plot(coverage, best, color=LINE, linewidth=1, label=f"knowing the errors ({number(best.mean())})")
    ax.axhline(chance, color=LINE, linewidth=1, linestyle=(0, (1, 2)), label=f"by chance ({number(chance)})")
    ax.set(xlim=(0, 100), xlabel="predictions kept, %", ylabel="mean error of those kept")
    ax.set_ylim(min(0.0, float(best.min())), 1.08 * top if top > 0 else None)
    ax.legend(frameon=False, fontsize="small", title="set aside by (area)", title_fontsize="small", alignment="left")
    return quiet(ax)


def ridge_path(path: RidgePath | None, ax: Axes | None = None) -> Axes:
    """Leave-one-out error against the ridge, with the smallest marked.

    Args:
        path: `tracer.ridge_path` of a fit with `ridge="loo"`.
        ax: where to draw.

    Examples:
        >>> tracer = whence.fit(net, [(x, y)], ridge="loo", progress=False)
        >>> ax = plots.ridge_path(tracer.ridge_path, ax=Figure().subplots())
        >>> ax.get_xscale()
        'log'
    """
    if path is None:
        raise InputError('expected a path of ridges, got None. Fit with ridge="loo" to have one.')
    ridges, errors = (values.detach().cpu().numpy() for values in (path.ridges, path.errors))
    ax = axes(ax)
    ax.plot(ridges, errors, color=LINE, linewidth=1.5, marker="o", markersize=3.5, zorder=2)
    best = int(errors.argmin())
    ax.axvline(path.best, color=BLUE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ax.plot(ridges[best : best + 1], errors[best : best + 1], "o", color=BLUE, markersize=8, zorder=3)
    right = best > len(ridges) / 2
    ax.annotate(
        f"λ = {path.best:.3g}{', at the end of the grid' if best in (0, len(ridges) - 1) else ''}",
        (path.best, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if right else 6, -4),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        color=BLUE,
    )
    ax.set(xscale="log", xlabel="ridge λ, on the sum scale", ylabel="leave-one-out error")
    if errors.min() > 0 and errors.max() / errors.min() > 20:
        ax.set_yscale("log")
    return quiet(ax)


def _limits(shown: Sequence[Numbers], bounds: Sequence[Numbers]) -> tuple[float, float]:
    """Room for curve and dots, and for bounds as far as they do not flatten both."""
    low, high = min(part.min() for part in shown), max(part.max() for part in shown)
    lowest, highest = min([low, *(part.min() for part in bounds)]), max([high, *(part.max() for part in bounds)])
    room = max(high - low, 1e-12)
    return max(low - 0.6 * room, lowest - 0.05 * room), min(high + 0.6 * room, highest + 0.05 * room)
