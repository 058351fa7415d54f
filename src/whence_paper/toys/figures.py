"""The figures of the toy experiments, drawn from their records.

Colours are those of Okabe and Ito, told apart by readers with any colour vision; Monte-Carlo curves are dashed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from whence_paper.pictures import save

Array = numpy.ndarray[Any, Any]
MAPS = ("cividis", "RdBu")
HEC3, HO, EQUAL, DATA = "#0072B2", "#D55E00", "#009E73", "#999999"  # as in whence.plots: blue for HeC3


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
    """Estimates above, Monte-Carlo ground truth below: the variances of Ho, those of HeC3, and their ratio."""
    axis, curves = numpy.array(record["maps"]["axis"]), record["curves"]
    rows = (
        ("estimated from one training set", ("Ho", "ho first"), ("HeC3", "hec3 first")),
        (
            "Monte Carlo",
            ("new labels, noise equal everywhere", "homoscedastic variance"),
            ("new data", "full variance"),
        ),
    )
    region = _square(record["maps"]["data"], axis, log=False)
    logs = numpy.stack([[_square(curves[name], axis) for _, name in panels] for _, *panels in rows])
    low, high = numpy.quantile(logs[:, :, region > 0], [0.01, 0.99])
    ratios = logs[:, 1] - logs[:, 0]
    reach = numpy.ceil(4 * numpy.quantile(numpy.abs(ratios[:, region > 0]), 0.98)) / 4
    levels = numpy.arange(numpy.floor(4 * low) / 4, high + 0.5, 0.25), numpy.arange(-reach, reach + 0.25, 0.25)
    figure = Figure(figsize=(10, 7.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    drawn = []
    for row, (name, *panels) in enumerate(rows):
        titles = [title for title, _ in panels] + [" / ".join(title.split(",")[0] for title, _ in reversed(panels))]
        for column, values in enumerate([*logs[row], ratios[row]]):
            panel, kind = axes[row, column], column // 2
            drawn.append(panel.contourf(axis, axis, values, levels[kind], cmap=MAPS[kind], extend="both"))
            panel.contour(axis, axis, region, [0.5], colors=("white", "black")[kind], linewidths=0.9)
            panel.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1])
            panel.set_title(titles[column], fontsize=11)
        axes[row, 0].set_ylabel(name, fontsize=11)
    _examples(axes[0, 2], record)
    for image, columns, label in ((drawn[0], axes[:, :2], "log10 variance"), (drawn[2], axes[:, 2], "log10 ratio")):
        bar = figure.colorbar(image, ax=columns, label=label, location="bottom", shrink=0.7, aspect=25, pad=0.02)
        bar.set_ticks(
            [tick for tick in range(-5, 3) if low - 0.5 < tick < high + 0.25] if columns.ndim > 1 else [-1, 0, 1]
        )
    return save(figure, path)


def _examples(panel: Axes, record: dict[str, Any]) -> None:
    points, labels = numpy.array(record["first_draw"]["x"]), numpy.array(record["first_draw"]["y"])[:, 0]
    for sign, marker, colour in ((1, "o", "black"), (-1, "^", "white")):
        chosen = points[labels * sign > 0]
        panel.scatter(chosen[:, 0], chosen[:, 1], s=7, marker=marker, color=colour, linewidths=0.3, edgecolors="black")
    panel.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))


def _square(values: Any, axis: Array, log: bool = True) -> Array:
    square = numpy.array(values, dtype=float).reshape(len(axis), len(axis)).T  # rows are the second coordinate
    return numpy.log10(square) if log else square


def draw_steps(scenarios: dict[str, Any], path: Path) -> Path:
    """How the agreement grows with the iterations of the optimiser, as it is and recentered."""
    lines = (
        ("HeC3 / full", "HeC3 / scatter of stopped networks", HEC3, "o", "-"),
        ("recentered / recentered", "recentered HeC3 / scatter of recentered networks", HO, "s", "--"),
        ("recentered / full", "recentered HeC3 / scatter of stopped networks", EQUAL, "^", ":"),
    )
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = numpy.atleast_1d(figure.subplots(1, len(scenarios), sharey=True))
    for panel, (title, scenario) in zip(axes, scenarios.items(), strict=True):
        places = range(len(scenario["rows"]))
        panel.axhspan(0.8, 1.25, color="black", alpha=0.08, linewidth=0)
        for shift, (key, label, colour, marker, style) in enumerate(lines):
            values = [row[key] for row in scenario["rows"]]
            middle = numpy.array([value["average"] for value in values])
            spread = [middle - [value["low"] for value in values], [value["high"] for value in values] - middle]
            at = [place + 0.12 * (shift - 1) for place in places]
            panel.errorbar(
                at, middle, spread, color=colour, marker=marker, linestyle=style, markersize=5, label=label, capsize=2
            )
        panel.set_xticks(list(places), [row["iterations"].replace("converged", "all") for row in scenario["rows"]])
        panel.set(yscale="log", xlabel="iterations of L-BFGS", title=title)
        panel.set_yticks([0.5, 0.8, 1, 1.25, 2, 4], ["0.5", "0.8", "1", "1.25", "2", "4"], minor=False)
        panel.minorticks_off()
    axes[0].set_ylabel("median ratio")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save(figure, path)
