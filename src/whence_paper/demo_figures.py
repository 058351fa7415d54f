"""The pictures of the demonstration as PNG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from whence.plots import gallery, rank_scatter

from .demo_page import groups_of
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
    groups, images = groups_of(trial.task), 1.0 - trial.task.test_inputs.reshape(-1, SIDE, SIDE)
    values = scores(trial.uncertainty)
    for row, (name, words) in enumerate(TITLES.items()):
        ax = figure.add_subplot(grid[row, 0])
        best = values[name].argsort(descending=True, stable=True)[: COLUMNS * ROWS]
        gallery(images[best], groups=[groups[place] for place in best.tolist()], columns=COLUMNS, ax=ax)
        ax.set_title(words, loc="left", fontsize="medium")
    ax = rank_scatter(trial.uncertainty, groups, ax=figure.add_subplot(grid[:, 1]))
    handles, names = ax.get_legend_handles_labels()
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()  # one for the whole figure instead
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3, frameon=False, handletextpad=0.2)
    path = folder / "demo-sources.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path]
