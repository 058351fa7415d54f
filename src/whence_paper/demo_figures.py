"""The pictures of the demonstration as PNG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from whence.plots import BLUE, LINE, VERMILLION, rank_scatter

from .demo_page import tones_of
from .demo_task import SIDE
from .demo_trial import Trial, scores

COLUMNS = 8
ROWS = 3
TITLES = {"HeC3/Ho": "highest HeC3/Ho: noisy labels nearby", "Ho": "highest Ho: few examples nearby"}


def draw_figures(trial: Trial, folder: Path) -> list[Path]:
    """Draw `demo-sources.png`: the digits that are uncertain for either reason, beside all digits by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.2, 1))
    task, images = trial.task, 1.0 - trial.task.test_inputs.reshape(-1, SIDE, SIDE)
    tones = tones_of(task)
    noisy, missing, others = tones
    groups = [{task.noisy: noisy, task.missing: missing}.get(digit, others) for digit in task.test_digits.tolist()]
    values, colours = scores(trial.uncertainty), {noisy: BLUE, missing: VERMILLION, others: LINE}
    for row, (name, words) in enumerate(TITLES.items()):
        ax = figure.add_subplot(grid[row, 0])
        best = values[name].argsort(descending=True, stable=True)[: COLUMNS * ROWS]
        draw_gallery(images[best], [colours[groups[place]] for place in best.tolist()], ax)
        ax.set_title(words, loc="left", fontsize="medium")
    ax = rank_scatter(trial.uncertainty, groups, tones, ax=figure.add_subplot(grid[:, 1]))
    handles, names = ax.get_legend_handles_labels()
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()  # one for the whole figure instead
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3, frameon=False, handletextpad=0.2)
    path = folder / "demo-sources.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path]


def draw_gallery(images: Tensor, colours: list[str], ax: Axes) -> None:
    """Images (m, h, w) in rows, the first at the top left, each in a frame of its colour."""
    for place, (image, colour) in enumerate(zip(images.numpy(), colours, strict=True)):
        left, top = 1.2 * (place % COLUMNS), -1.2 * (place // COLUMNS)
        ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(left, left + 1, top - 1, top), interpolation="nearest")
        ax.add_patch(Rectangle((left, top - 1), 1, 1, fill=False, edgecolor=colour, linewidth=1.8, clip_on=False))
    ax.set(xlim=(-0.1, 1.2 * COLUMNS - 0.1), ylim=(-1.2 * ROWS + 0.1, 0.1), aspect="equal")
    ax.set_axis_off()
