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

import math
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.display import number
from whence.errors import InputError, ShapeError
from whence.influence import Explanation
from whence.influence.explanation import BOTH, CONFIDENT, NOISY, SCARCE
from whence.report import Group, Tone
from whence.report.charts import kept_risk
from whence.results import Uncertainty

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "bands",
    "by_source",
    "by_verdict",
    "gallery",
    "rank_scatter",
    "risk_coverage",
    "source_map",
]

Numbers = NDArray[np.float64]

# Okabe and Ito's palette.
BLUE, VERMILLION, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
PURPLE, ORANGE, BLACK = "#CC79A7", "#E69F00", "#000000"
GREY, LINE, INK = "#9aa0a6", "#6b7178", "#3c4147"

# Groups differ by colour and by shape: colour, marker, size, opacity.
STYLES = {
    "noise": (BLUE, "o", 20, 0.9),
    "scarcity": (VERMILLION, "D", 20, 0.9),
    "plain": (GREY, "o", 9, 0.5),
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


def check_count(given: Sized | None, count: int, what: str, of: str = "prediction") -> None:
    """Raise unless there is one value for each of `count` items, or none at all."""
    if given is not None and len(given) != count:
        raise ShapeError(f"expected {count} {what}, one for each {of}, got {len(given)}.")


def score(uncertainty: Uncertainty, by: str) -> Tensor:
    """(m,) the ratio, or the total variance of an estimator."""
    return uncertainty.ratio if by == "ratio" else uncertainty.trace(by)


FEWEST = 2.0  # per cent of the predictions whose mean error sets the height of the plot; that of fewer is random


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


LARGEST = 130.0  # area of the largest circle of a map, in points squared


def rank_scatter(uncertainty: Uncertainty, groups: Sequence[Group] | None = None, ax: Axes | None = None) -> Axes:
    """Plot the rank by Ho against the rank by HeC3: above the line noise, to the lower right scarcity.

    Args:
        uncertainty: m predictions.
        groups: one for each prediction; they set colour, shape and legend.
        ax: axes to draw on.

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
        style = {**_edge(group, 0.0), "marker": marker, "alpha": opacity, "zorder": 2}
        ax.scatter(x[chosen], y[chosen], area, colour, label=group.name, **style)
    ax.set(xlim=(-2, 102), ylim=(-2, 102), aspect="equal", xlabel="rank by Ho, %", ylabel="rank by HeC3, %")
    if groups is not None:
        handles, names = ax.get_legend_handles_labels()
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        ax.legend(handles[::-1], names[::-1], frameon=False, handletextpad=0.2, **place)
    return quiet(ax)


def by_source(uncertainty: Uncertainty, share: float = 0.1) -> list[Group]:
    """A group for each prediction: uncertain by HeC3, uncertain by Ho, or neither.

    Predictions among the highest `share` by either estimator are uncertain. Each is assigned to the estimator that
    ranks it higher, which is its side of the diagonal in `rank_scatter`.

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
    pairs = zip(ho.tolist(), hec3.tolist(), strict=True)
    return [Group("neither") if max(a, b) < edge else noise if b > a else scarcity for a, b in pairs]


def by_verdict(explanation: Explanation) -> list[Group]:
    """A group for each prediction of `tracer.explain(x)`; those with both causes in blue with a vermillion edge.

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
    ax: Axes | None = None,
) -> Axes:
    """Plot predictions as circles on a map: the size shows the error, the colour the source of the uncertainty.

    Blue: uncertain by HeC3, noisy labels nearby. Vermillion: uncertain by Ho, few examples nearby. Grey: neither.

    Args:
        longitude: (m,) in degrees.
        latitude: (m,) in degrees.
        uncertainty: m predictions.
        errors: (m,) absolute error of each; without it all circles have one size.
        groups: one for each prediction, such as `by_verdict(tracer.explain(x))`; by default `by_source`.
        ax: axes to draw on.

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
    for depth, (group, members) in enumerate(_back_to_front(groups or by_source(uncertainty))):
        chosen = members[np.argsort(-areas[members], kind="stable")]  # small circles on top of large ones
        plain = group.tone == "plain"
        style = {**_edge(group, 0.0 if plain else 0.4), "alpha": 0.3 if plain else 0.65, "zorder": 2 + depth}
        ax.scatter(east[chosen], north[chosen], areas[chosen], STYLES[group.tone][0], label=group.name, **style)
    middle = math.radians(float(np.clip(north, -85, 85).mean()))
    ax.set(xlabel="longitude, °", ylabel="latitude, °", aspect=1.0 / math.cos(middle))
    _map_legend(ax, scale)
    return quiet(ax)


def ranks(values: Tensor) -> Tensor:
    """Rank of each value, from 0 for the smallest, or NaN, to 1 for the largest; ties in their original order."""
    known = torch.where(values.isnan(), -torch.inf, values)
    return known.argsort(stable=True).argsort() / max(len(values) - 1, 1)


def _back_to_front(groups: Sequence[Group]) -> list[tuple[Group, Any]]:
    """Each group with its members: plain ones first, noise last, so that it lies on top."""
    front_first = sorted(dict.fromkeys(groups), key=lambda group: get_args(Tone).index(group.tone))
    return [(group, np.flatnonzero([other == group for other in groups])) for group in reversed(front_first)]


def _edge(group: Group, width: float) -> dict[str, Any]:
    """White edges of this width in points around a group's markers; vermillion around blue for both sources."""
    both = group.tone == "noise" and group.name == BOTH
    return {"edgecolors": VERMILLION if both else "white", "linewidths": 1.2 if both else width}


def _areas(errors: Any, scale: float) -> Any:
    return 2.0 + (LARGEST - 2.0) * np.minimum(errors / scale, 1.0)


def _map_legend(ax: Axes, scale: float | None) -> None:
    """Groups with circles of one size, and two errors with the corresponding sizes."""
    handles, names = ax.get_legend_handles_labels()
    groups = len(handles)
    handles, names = handles[::-1], names[::-1]
    for error in [] if scale is None else [float(f"{scale / 8:.1g}"), float(f"{scale:.1g}")]:
        handles.append(ax.scatter([], [], s=_areas(error, scale or 1.0), c=GREY, alpha=0.6, linewidths=0))
        names.append(f"error {number(error)}")
    legend = ax.legend(handles, names, framealpha=0.85, edgecolor="none", fontsize="small", loc="best")
    for handle in legend.legend_handles[:groups]:
        if handle is not None:
            handle.set(sizes=[36.0], alpha=0.9)


def gallery(
    images: Tensor,  # (m, h, w) or (m, h, w, 3), between 0 and 1
    names: Sequence[str] | None = None,
    groups: Sequence[Group] | None = None,
    columns: int = 8,
    ax: Axes | None = None,
) -> Axes:
    """Show images in rows, the first at the top left, each with its name below and a frame in its group's colour.

    Examples:
        >>> ax = plots.gallery(torch.rand(3, 8, 8), names=["a", "b", "c"], columns=2, ax=Figure().subplots())
        >>> len(ax.images), ax.texts[2].get_text()
        (3, 'c')
    """
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise ShapeError(f"expected images of shape (m, h, w) or (m, h, w, 3), got {tuple(images.shape)}.")
    check_count(names, len(images), "names", "image")
    check_count(groups, len(images), "groups", "image")
    ax = axes(ax)
    from matplotlib.patches import Rectangle  # an extra: needed only for plots

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
