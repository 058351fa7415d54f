"""The figures of the toy experiments, drawn from their records.

Colours are those of Okabe and Ito, told apart by readers with any colour vision; Monte-Carlo curves are dashed.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

Array = numpy.ndarray[Any, Any]
HEC3, HO, EQUAL, DATA = "#D55E00", "#0072B2", "#009E73", "#999999"


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG that is small enough for a repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    Image.open(drawn).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def draw_sinc(record: dict[str, Any], path: Path) -> Path:
    """Above, networks with confidence bands; below, their variances beside the Monte-Carlo ground truth."""
    x = numpy.array(record["grid"])
    figure = Figure(figsize=(11.5, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="row")
    for column, scenario in enumerate(record["scenarios"]):
        _bands(axes[0, column], x, scenario)
        _variances(axes[1, column], x, scenario)
        axes[0, column].set_title(scenario["title"])
        axes[1, column].set_xlabel("x")
    axes[0, 0].set_ylabel("prediction, 95 % band\nfrom one training set")
    axes[1, 0].set_ylabel("variance of the prediction")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    return save(figure, path)


def _bands(axes: Axes, x: Array, scenario: dict[str, Any]) -> None:
    curves = scenario["curves"]
    centre = numpy.array(curves["prediction"])
    axes.scatter(scenario["first_draw"]["x"], scenario["first_draw"]["y"], s=6, color=DATA, zorder=1, linewidths=0)
    for name, source, colour in (("hec3", "full", HEC3), ("ho", "label", HO)):
        reach = 1.96 * numpy.sqrt(curves[f"{name} first"])
        axes.fill_between(x, centre - reach, centre + reach, color=colour, alpha=0.3, linewidth=0, zorder=2)
        truth = 1.96 * numpy.sqrt(curves[f"{source} variance"])
        for side in (centre - truth, centre + truth):
            axes.plot(x, side, color=colour, linestyle="--", linewidth=1.1, zorder=3)
    axes.plot(x, numpy.sinc(x / numpy.pi), color="black", linewidth=1, zorder=4)
    axes.set(xlim=(-6, 6), ylim=(-0.6, 1.5))


def _variances(axes: Axes, x: Array, scenario: dict[str, Any]) -> None:
    curves = scenario["curves"]
    for name, source, colour in (("hec3", "full", HEC3), ("ho", "label", HO)):
        axes.fill_between(
            x, curves[f"{name} low"], curves[f"{name} high"], color=colour, alpha=0.2, linewidth=0, zorder=1
        )
        axes.plot(x, curves[f"{name} average"], color=colour, linewidth=1.8, zorder=3)
        axes.plot(x, curves[f"{source} variance"], color=colour, linestyle="--", linewidth=1.4, zorder=4)
    if "homoscedastic variance" in curves:
        axes.plot(x, curves["homoscedastic variance"], color=EQUAL, linestyle=":", linewidth=2, zorder=4)
    rows = scenario["agreement"]["data"]
    axes.set(yscale="log", ylim=(3e-5, 1e-1))
    axes.text(
        0.5,
        0.97,
        f"HeC3 / full {rows['HeC3 / full']['average']:.2f},  Ho / label {rows['Ho / label']['average']:.2f}",
        transform=axes.transAxes,
        ha="center",
        va="top",
        fontsize=9,
    )


def _legend() -> list[Line2D | Patch]:
    return [
        Line2D([], [], color=HEC3, linewidth=1.8, label="HeC3, average over draws"),
        Line2D([], [], color=HEC3, linestyle="--", label="Monte Carlo, new data"),
        Line2D([], [], color=HO, linewidth=1.8, label="Ho, average over draws"),
        Line2D([], [], color=HO, linestyle="--", label="Monte Carlo, new labels"),
        Line2D([], [], color="black", linewidth=1, label="sin(x)/x"),
        Line2D([], [], color=EQUAL, linestyle=":", linewidth=2, label="Monte Carlo, new labels of equal noise"),
        Line2D([], [], color=DATA, marker=".", linestyle="", label="training examples"),
        Patch(color="black", alpha=0.2, linewidth=0, label="above one draw, below 80 % of draws"),
    ]


def draw_spirals(record: dict[str, Any], path: Path) -> Path:
    """Maps of the variances, each estimator beside its ground truth, and of their ratio."""
    axis = numpy.array(record["maps"]["axis"])
    curves = record["curves"]
    panels = [
        ("Ho", "ho first"),
        ("Monte Carlo, labels with equal noise", "homoscedastic variance"),
        ("HeC3", "hec3 first"),
        ("Monte Carlo, new data", "full variance"),
    ]
    maps = {title: _square(curves[name], axis) for title, name in panels}
    low, high = numpy.quantile(numpy.stack(list(maps.values())), [0.02, 0.98])
    region = _square(record["maps"]["data"], axis, log=False)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    left, right = numpy.ravel(numpy.array(figure.subfigures(1, 2, width_ratios=(1.45, 1))))
    axes = left.subplots(2, 2, sharex=True, sharey=True)
    for panel, (title, values) in zip(axes.flat, maps.items(), strict=True):
        panel.pcolormesh(axis, axis, values, cmap="cividis", vmin=low, vmax=high, shading="gouraud")
        panel.contour(axis, axis, region, [0.5], colors="white", linewidths=0.7)
        panel.set_title(title, fontsize=10)
        panel.set_aspect("equal")
    scale = ScalarMappable(Normalize(low, high), "cividis")
    left.colorbar(scale, ax=axes, label="log10 variance", shrink=0.8)
    _disagreement(right, axis, maps["HeC3"] - maps["Ho"], record)
    return save(figure, path)


def _disagreement(figure: Any, axis: Array, values: Array, record: dict[str, Any]) -> None:
    panel = figure.subplots()
    reach = float(numpy.quantile(numpy.abs(values), 0.98))
    image = panel.pcolormesh(axis, axis, values, cmap="RdBu", vmin=-reach, vmax=reach, shading="gouraud")
    points, labels = numpy.array(record["first_draw"]["x"]), numpy.array(record["first_draw"]["y"])[:, 0]
    for sign, marker, colour in ((1, "o", "black"), (-1, "^", "#E69F00")):
        chosen = points[labels * sign > 0]
        panel.scatter(*chosen.T, s=9, marker=marker, color=colour, linewidths=0.3, edgecolors="white")
    panel.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]), aspect="equal")
    panel.set_title("HeC3 against Ho, and the training examples", fontsize=10)
    figure.colorbar(image, ax=panel, label="log10 HeC3 / Ho", shrink=0.6)


def _square(values: Any, axis: Array, log: bool = True) -> Array:
    square = numpy.array(values, dtype=float).reshape(len(axis), len(axis)).T  # rows are the second coordinate
    return numpy.log10(square) if log else square
