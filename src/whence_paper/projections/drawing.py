"""One row of the appendix's figure: classes, agreement of HeC3 and Ho, HeC3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence_paper.data.images import CLASSES
from whence_paper.pictures import BLUE, VERMILLION, new_figure, save
from whence_paper.records import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOT = 4.0
TITLES = {
    "bank": "bank marketing, MLP",
    "mnist": "MNIST, MLP",
    "fashion-mnist": "Fashion-MNIST, CNN",
    "cifar-10": "CIFAR-10, ResNet-18",
}


def draw(run: Run, path: Path) -> Path:
    """Three panels: training points by class; test points by rank of HeC3 less that of Ho; by rank of HeC3."""
    from matplotlib.colors import LinearSegmentedColormap  # an extra: only figures need it

    found, name = run.results, run.configuration["case"]
    invented = run.configuration["data"] == "invented"
    figure = new_figure(10.5, 3.6)
    left, middle, right = figure.subplots(1, 3)
    _classes(left, found["train"], _names(name, invented))
    test = found["test"]
    apart = [(hec3 - ho) / 1000 for hec3, ho in zip(test["hec3"], test["ho"], strict=True)]
    order = sorted(range(len(apart)), key=lambda point: abs(apart[point]))
    both = LinearSegmentedColormap.from_list("apart", [VERMILLION, "#e3e3e3", BLUE])
    reach = max(max(map(abs, apart)) * 0.7, 0.05)
    shown = _dots(middle, test, apart, order, cmap=both, vmin=-reach, vmax=reach)
    figure.colorbar(shown, ax=middle, label="rank of HeC3 less rank of Ho", shrink=0.85)
    level = [value / 1000 for value in test["hec3"]]
    shown = _dots(right, test, level, sorted(range(len(level)), key=lambda point: level[point]), cmap="cividis")
    figure.colorbar(shown, ax=right, label="rank of HeC3", shrink=0.85)
    title = TITLES.get(name, "CIFAR-10, ResNet-18") + (" (invented or 8 x 8 digits)" if invented else "")
    figure.suptitle(title, fontsize="medium")
    for ax, words in ((left, "training points"), (middle, "test points"), (right, "test points")):
        ax.set_title(words, fontsize="medium")
        ax.set(xticks=[], yticks=[])
    return save(figure, path)


def _names(name: str, invented: bool) -> tuple[str, ...]:
    return ("no", "yes") if name == "bank" else CLASSES["digits" if invented else name]


def _classes(ax: Axes, points: dict[str, Any], names: tuple[str, ...]) -> None:
    from matplotlib import colormaps  # an extra: only figures need it

    for label, name in enumerate(names):
        chosen = [point for point, own in enumerate(points["labels"]) if own == label]
        x, y = ([points[side][point] for point in chosen] for side in "xy")
        ax.scatter(x, y, s=DOT, color=colormaps["tab10"](label), linewidths=0, label=name)
    ax.legend(fontsize="x-small", markerscale=2.5, handletextpad=0.1, borderpad=0.2, labelspacing=0.2, framealpha=0.7)


def _dots(ax: Axes, points: dict[str, Any], values: list[float], order: list[int], **style: Any) -> Any:
    """Points in an order that leaves the telling ones on top."""
    x, y, c = ([column[point] for point in order] for column in (points["x"], points["y"], values))
    return ax.scatter(x, y, c=c, s=DOT, linewidths=0, **style)
