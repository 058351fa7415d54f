"""The pictures of the page "The idea in pictures": two kinds of doubt, a hundred training sets, one example left out.

python examples/idea.py docs/figures
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.base import clone

from whence.plots import BLUE, GREY, INK, VERMILLION
from whence.sklearn import WhenceRegressor

GRID = np.linspace(-3, 3, 200)[:, None]
SETS = 30


def training_set(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Forty labels that contradict each other on the left, few examples on the right."""
    draw = np.random.default_rng(seed)
    x = np.concatenate([draw.uniform(-3, -1, 40), draw.uniform(-1, 1, 40), draw.uniform(1, 3, 3)])[:, None]
    noise = np.where(x[:, 0] < -1, 0.4, 0.05)
    return x, np.sin(1.5 * x[:, 0]) + noise * draw.standard_normal(len(x))


def trained(x: np.ndarray, y: np.ndarray) -> WhenceRegressor:
    return clone(WhenceRegressor((10,), ridge=0.05, random_state=0)).fit(x, y)


def two_doubts(folder: Path) -> WhenceRegressor:
    x, y = training_set(0)
    model = trained(x, y)
    figure = Figure((7.2, 2.9), layout="constrained")
    ax = figure.subplots()
    ax.plot(x[:, 0], y, "o", color=GREY, markersize=4, label="training examples")
    ax.plot(GRID[:, 0], model.predict(GRID), color=INK, label="the network")
    for left, right, colour, words in (
        (-3, -1, BLUE, "labels contradict\neach other: check them"),
        (1, 3, VERMILLION, "hardly any examples:\ncollect more"),
    ):
        ax.axvspan(left, right, color=colour, alpha=0.12, linewidth=0)
        ax.text((left + right) / 2, 1.55, words, color=colour, ha="center", va="center")
    ax.text(0, 1.55, "confident", color=INK, ha="center", va="center")
    ax.set(ylim=(-2.5, 2.0), xticks=[], yticks=[])
    ax.legend(loc="lower center", ncols=2, frameon=False)
    figure.savefig(folder / "idea-two-doubts.png", dpi=110)
    return model


def many_sets(folder: Path, model: WhenceRegressor) -> None:
    curves = np.stack([trained(*training_set(seed)).predict(GRID) for seed in range(1, SETS + 1)])
    u = model.tracer_.predict(torch.tensor(GRID))
    figure = Figure((7.2, 4.2), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    top.plot(GRID[:, 0], curves.T, color=GREY, linewidth=0.6, alpha=0.7)
    top.plot(GRID[:, 0], model.predict(GRID), color=INK)
    top.set(ylim=(-2.1, 2.0), yticks=[], title=f"the same network, trained on {SETS} other training sets")
    bottom.semilogy(GRID[:, 0], curves.std(0), color=GREY, label="scatter of those networks")
    bottom.semilogy(GRID[:, 0], u.hec3[:, 0].sqrt(), color=BLUE, label="HeC3, from one network")
    bottom.semilogy(GRID[:, 0], u.ho[:, 0].sqrt(), color=VERMILLION, dashes=(5, 2), label="Ho, from one network")
    bottom.set(ylabel="standard deviation", xticks=[])
    bottom.legend(frameon=False)
    figure.savefig(folder / "idea-many-sets.png", dpi=110)


def left_out(folder: Path) -> None:
    x, y = training_set(0)
    figure = Figure((7.2, 2.6), layout="constrained")
    cases = {
        "one of many: nothing moves": np.abs(x[:, 0]).argmin(),
        "the only one out there: the curve moves": x[:, 0].argmax(),
    }
    for ax, (title, at) in zip(figure.subplots(1, 2, sharey=True), cases.items(), strict=True):
        rest = np.arange(len(x)) != at
        ax.plot(x[rest, 0], y[rest], "o", color=GREY, markersize=3)
        ax.plot(x[at, 0], y[at], "o", color=VERMILLION, markersize=7, markerfacecolor="white", markeredgewidth=1.5)
        ax.plot(GRID[:, 0], trained(x, y).predict(GRID), color=INK, label="with it")
        ax.plot(
            GRID[:, 0], trained(x[rest], y[rest]).predict(GRID), color=VERMILLION, dashes=(5, 2), label="without it"
        )
        ax.set(title=title, xticks=[], yticks=[], ylim=(-2.1, 2.0))
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(folder / "idea-left-out.png", dpi=110)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/idea")
    folder.mkdir(parents=True, exist_ok=True)
    model = two_doubts(folder)
    left_out(folder)
    many_sets(folder, model)
    print("drawn:", *sorted(path.name for path in folder.glob("idea-*.png")))
