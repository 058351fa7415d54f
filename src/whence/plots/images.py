"""Pictures made of pixels: decisions all over a plane, and galleries of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.plots.style import (
    BLUE,
    INK,
    LINE,
    NAMES,
    PALETTE,
    STYLES,
    VERMILLION,
    Numbers,
    axes,
    check_count,
    quiet,
    score,
)
from whence.report import Group
from whence.results import Uncertainty
from whence.tracer import Tracer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH = 4096
"""Places of the plane that are predicted together."""
MARKERS = "osD^vP"
GREYS = ("#1a1a1a", "#ffffff", "#b5b5b5", "#6e6e6e")


def decision_regions(
    tracer: Tracer,
    inputs: Any,  # (n, 2)
    labels: Any = None,
    *,
    show: Literal["doubt", "ho", "hec3", "ratio"] = "doubt",
    names: Sequence[str] | None = None,
    steps: int = 120,
    pad: float = 0.15,
    ax: Axes | None = None,
) -> Axes:
    """What the network decides all over a plane, and how sure it is.

    "doubt" colours each decision and fades to white where another training set may turn it: where the margin is small
    against its HeC3 standard deviation. "ho" and "hec3" show variances on a logarithmic scale, "ratio" their quotient:
    blue where labels are noisy, vermillion where examples are few.

    Args:
        tracer: a fit to inputs of two numbers. One output decides by its sign, several by the largest.
        inputs: examples to draw, which also set the part of the plane that is shown.
        labels: (n,) classes of these examples, from 0; for one output also -1 and 1.
        show: "doubt", "ho", "hec3" or "ratio".
        names: of the classes, for the legend.
        steps: places along each axis.
        pad: what to show beyond the inputs, as a share of their range.
        ax: where to draw.

    Examples:
        >>> corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> net, sides = torch.nn.Linear(2, 1), torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
        >>> two = whence.fit(net, [(corners, sides)], recenter=True, progress=False)
        >>> len(plots.decision_regions(two, corners, sides[:, 0], steps=8, ax=Figure().subplots()).images)
        1
    """
    if show not in ("doubt", "ho", "hec3", "ratio"):
        raise InputError(f'expected show to be "doubt", "ho", "hec3" or "ratio", got {show!r}.')
    points = inputs if isinstance(inputs, Tensor) else torch.as_tensor(inputs, device="cpu")
    if points.ndim != 2 or points.shape[1] != 2:
        raise ShapeError(f"expected inputs of shape (n, 2), got {tuple(points.shape)}.")
    east, north = (_grid(points[:, axis], pad, steps) for axis in (0, 1))
    plane = torch.cartesian_prod(torch.from_numpy(east), torch.from_numpy(north)).to(points)
    found = tracer.predict(list(plane.split(BATCH)), covariance=(show == "doubt" and tracer.problem.k > 1) or None)
    ax = axes(ax)
    if show == "doubt":
        colours = _faded(*decisions(found)).reshape(steps, steps, 3).transpose(1, 0, 2)
        extent = (east[0], east[-1], north[0], north[-1])
        ax.imshow(colours, extent=extent, origin="lower", aspect="auto", interpolation="bilinear")
    else:
        _shade(ax, east, north, score(found, show).cpu().numpy().reshape(steps, steps).T, show)
    for lead in _leads(found.mean):
        _border(ax, east, north, lead.reshape(steps, steps).T)
    _examples(ax, points, labels, names, grey=show != "doubt")
    ax.set(xlim=(east[0], east[-1]), ylim=(north[0], north[-1]), xlabel="first input", ylabel="second input")
    return quiet(ax)


def decisions(uncertainty: Uncertainty) -> tuple[Numbers, Numbers]:
    """(m,) the class decided for, and (m,) how many standard deviations of HeC3 it leads by."""
    mean = uncertainty.mean
    if mean.shape[1] == 1:
        choice, lead = (mean[:, 0] > 0).long(), mean[:, 0].abs()
        variance = uncertainty.variance("hec3")[:, 0]
    else:
        best = mean.topk(2, dim=1)
        choice, lead = best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
        if uncertainty.covariances or uncertainty.later is not None:
            rows, (a, b) = torch.arange(len(mean), device=mean.device), best.indices.T
            covariance = uncertainty.covariance("hec3")
            variance = covariance[rows, a, a] + covariance[rows, b, b] - 2 * covariance[rows, a, b]
        else:
            variance = uncertainty.variance("hec3").gather(1, best.indices).sum(1)
    sigmas = lead / variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    return choice.cpu().numpy(), sigmas.cpu().numpy()


def _leads(mean: Tensor) -> list[Numbers]:
    """For each class (m,) its output less the largest other one: zero along the borders of its region."""
    if mean.shape[1] == 1:
        return [mean[:, 0].cpu().numpy()]
    best = mean.topk(2, dim=1)
    rival = torch.where(mean == best.values[:, :1], best.values[:, 1:], best.values[:, :1])
    return list((mean - rival).T.cpu().numpy())


def _border(ax: Axes, east: Numbers, north: Numbers, values: Numbers) -> None:
    from matplotlib.patheffects import withStroke  # an extra: only plots need it

    if values.min() < 0 < values.max():
        border = ax.contour(east, north, values, levels=[0.0], colors=[INK], linewidths=1.2)
        border.set_path_effects([withStroke(linewidth=2.4, foreground="white")])


def _faded(choice: Numbers, lead: Numbers) -> Numbers:
    """(m, 3) colours of classes, white where a decision is a toss of a coin and pastel where it is firm."""
    from matplotlib.colors import to_rgb  # an extra: only plots need it

    colours = np.array([to_rgb(PALETTE[int(group) % len(PALETTE)]) for group in choice])
    firm = torch.erf(torch.from_numpy(lead) / 2**0.5).numpy()  # 1 - 2 P(the margin turns), for normal errors
    strength = 0.55 * firm[:, None] ** 1.5
    faded: Numbers = 1.0 - strength * (1.0 - colours)
    return faded


def _shade(ax: Axes, east: Numbers, north: Numbers, values: Numbers, show: str) -> None:
    """Variances or their ratio on a logarithmic scale; for the ratio white is one, vermillion below and blue above."""
    from matplotlib.colors import LinearSegmentedColormap  # an extra: only plots need it

    logs = np.log10(np.maximum(values, values[values > 0].min() if (values > 0).any() else 1e-300))
    style: dict[str, Any] = {"cmap": "cividis"}
    if show == "ratio":
        colours = [VERMILLION, "#f3b58c", "#f7f7f5", "#8cbfdc", BLUE]
        limit = max(float(np.quantile(np.abs(logs), 0.99)), 0.05)
        style = {"cmap": LinearSegmentedColormap.from_list("whence", colours), "vmin": -limit, "vmax": limit}
    mesh = ax.pcolormesh(east, north, logs, shading="auto", rasterized=True, **style)
    bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(NAMES[show] if show == "ratio" else f"variance by {NAMES[show]}")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{10**value:.2g}")


def _examples(ax: Axes, points: Tensor, labels: Any, names: Sequence[str] | None, grey: bool) -> None:
    """Draw examples in the colours of their classes; in shades of grey where the background uses the colours."""
    places = points.detach().cpu().numpy()
    if labels is None:
        ax.scatter(places[:, 0], places[:, 1], s=14, c=INK, edgecolors="white", linewidths=0.5, zorder=3)
        return
    classes = torch.as_tensor(labels, device="cpu").reshape(-1).numpy()
    check_count(classes, len(places), "labels", "input")
    shades = GREYS if grey else PALETTE
    for place, label in enumerate(np.unique(classes)):
        colour = place if classes.min() < 0 else int(label)
        chosen = classes == label
        ax.scatter(
            places[chosen, 0],
            places[chosen, 1],
            s=18,
            c=shades[colour % len(shades)],
            marker=MARKERS[colour % len(MARKERS)],
            edgecolors=INK if grey and colour % len(GREYS) else "white",
            linewidths=0.6,
            label=names[colour] if names is not None else f"class {label:g}",
            zorder=3,
        )
    ax.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize="small", loc="best")


def _grid(values: Tensor, pad: float, steps: int) -> Numbers:
    low, high = float(values.min()), float(values.max())
    extra = pad * max(high - low, 1e-9)
    found: Numbers = np.linspace(low - extra, high + extra, steps)
    return found


def gallery(
    images: Tensor,  # (m, h, w) or (m, h, w, 3), between 0 and 1
    names: Sequence[str] | None = None,
    groups: Sequence[Group] | None = None,
    columns: int = 8,
    ax: Axes | None = None,
) -> Axes:
    """Images in rows, the first at the top left, each with its name below and a frame in the colour of its group.

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
