"""Curves: predictions in one dimension with their bands, what doubt is good for, how the ridge was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.curvature import RidgePath
from whence.display import number as in_digits
from whence.errors import InputError
from whence.report.ranking import score
from whence.results import Uncertainty

from .style import BLUE, COLOURS, DASHES, FURTHER, GREY, INK, LINE, NAMES, Numbers, axes, column, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTLED = 2.0
"""Per cent of the predictions from which on their mean error has room in the picture; that of fewer is chance."""


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
    at = column(x, len(uncertainty), "places x")
    order = np.argsort(at, kind="stable")
    mean = uncertainty.mean[:, output].detach().cpu().numpy()[order]
    ax = axes(ax)
    known = [mean]
    if train is not None:
        inputs = column(train[0], len(train[0]), "training inputs", "training example")
        targets = _targets(train[1], len(inputs), output)
        known.append(targets)
        ax.scatter(inputs, targets, s=9, c=GREY, alpha=0.7, linewidths=0, label="training examples", zorder=2)
    reach: list[Numbers] = []
    for number, name in enumerate(estimators):
        low, high = (bound[:, output].cpu().numpy()[order] for bound in uncertainty.interval(level, name))
        reach += [low, high]
        label, colour = f"{NAMES.get(name, name)}, {level:.0%}", COLOURS.get(name, FURTHER[number % len(FURTHER)][0])
        if number == 0:
            ax.fill_between(at[order], low, high, color=colour, alpha=0.25, linewidth=0, label=label, zorder=1)
            continue
        style = {"color": colour, "linewidth": 1.3, "linestyle": DASHES.get(name, (0, (5, 2))), "zorder": 3}
        ax.plot(at[order], low, label=label, **style)
        ax.plot(at[order], high, **style)
    ax.plot(at[order], mean, color=INK, linewidth=1.8, label="prediction", zorder=4)
    ax.set(xlabel="input", ylabel="output", xlim=(at.min(), at.max()))
    ax.set_ylim(*_limits(known, reach))
    quiet(ax)
    handles, labels = ax.get_legend_handles_labels()
    order_of_legend = sorted(range(len(labels)), key=lambda place: (labels[place] != "prediction", -place))
    ax.legend(
        [handles[place] for place in order_of_legend],
        [labels[place] for place in order_of_legend],
        frameon=False,
        fontsize="small",
    )
    return ax


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
    wrong = column(errors, m, "errors")
    scores = {NAMES.get(name, name): (score(uncertainty, name).cpu().numpy(), name) for name in by}
    scores |= {name: (column(values, m, f"scores {name!r}"), name) for name, values in (others or {}).items()}
    ax = axes(ax)
    coverage = 100 * np.arange(1, m + 1) / m
    top = float(wrong.mean())
    for number, (label, (values, name)) in enumerate(scores.items()):
        risk = kept_risk(values, wrong)
        top = max(top, float(risk[coverage >= SETTLED].max()))
        spare = FURTHER[(number - len(by)) % len(FURTHER)]
        colour, style = COLOURS.get(name, spare[0]), DASHES.get(name, spare[1])
        ax.plot(
            coverage, risk, color=colour, linestyle=style, linewidth=1.8, label=f"{label} ({in_digits(risk.mean())})"
        )
    best = kept_risk(wrong, wrong)
    ax.plot(coverage, best, color=LINE, linewidth=1, label=f"knowing the errors ({in_digits(best.mean())})")
    ax.axhline(
        wrong.mean(), color=LINE, linewidth=1, linestyle=(0, (1, 2)), label=f"by chance ({in_digits(wrong.mean())})"
    )
    ax.set(xlim=(0, 100), xlabel="predictions kept, %", ylabel="mean error of those kept")
    ax.set_ylim(min(0.0, float(best.min())), 1.08 * top if top > 0 else None)
    quiet(ax)
    ax.legend(frameon=False, fontsize="small", title="set aside by (area)", title_fontsize="small", alignment="left")
    return ax


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
    words = ", at the end of the grid" if best in (0, len(ridges) - 1) else ""
    right = best > len(ridges) / 2
    ax.annotate(
        f"λ = {path.best:.3g}{words}",
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
    quiet(ax)
    return ax


def kept_risk(scores: Numbers, errors: Numbers) -> Numbers:
    """(m,) mean error of the j + 1 predictions with the lowest scores; equal scores share their errors.

    Examples:
        >>> kept_risk(np.array([3.0, 1.0, 1.0]), np.array([5.0, 0.0, 1.0])).tolist()
        [0.5, 0.5, 2.0]
    """
    order = np.argsort(scores, kind="stable")
    _, block = np.unique(scores[order], return_inverse=True)
    shared = np.bincount(block, errors[order]) / np.bincount(block)
    risk: Numbers = np.cumsum(shared[block]) / np.arange(1, len(scores) + 1)
    return risk


def _targets(values: Any, count: int, output: int) -> Numbers:
    found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=np.float64)
    return column(found[:, output] if found.ndim > 1 else found, count, "training targets", "training example")


def _limits(known: Sequence[Numbers], reach: Sequence[Numbers]) -> tuple[float, float]:
    """Room for curve and dots, and for bounds as far as they do not flatten both."""
    low, high = min(float(part.min()) for part in known), max(float(part.max()) for part in known)
    room = max(high - low, 1e-12)
    least, most = (
        (min(float(part.min()) for part in reach), max(float(part.max()) for part in reach)) if reach else (low, high)
    )
    return max(low - 0.6 * room, min(least, low) - 0.05 * room), min(high + 0.6 * room, max(most, high) + 0.05 * room)
