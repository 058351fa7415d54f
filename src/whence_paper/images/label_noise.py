"""Appendix, label noise: which test points are mispredicted, as more labels of the noisy class are random?

The share of random labels in the noisy class of a task of Table 1 goes from none to all; AUROC of Ho, HeC3, HeC3/Ho and
the margin for wrong predictions of test points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from whence_paper.data import Images
from whence_paper.experiment import Experiment, Settings
from whence_paper.pictures import new_figure, runs_of_scores, save
from whence_paper.records import Record, Run
from whence_paper.scores import auroc
from whence_paper.tables import Table, mean_and_sd, write_tables

from .cases import FITS, Case, add_options, answers, cases, fitted

SCORES = ("Ho", "HeC3", "HeC3/Ho", "margin")
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUICK = (0.0, 1.0)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, the way to fit, and the levels."""
    add_options(parser)
    parser.add_argument("--fit", choices=sorted(FITS), default="two-bases", help="default two-bases")
    parser.add_argument("--levels", type=float, nargs="+", help="shares of random labels in the noisy class")


def judge(case: Case, settings: Settings, read: Callable[[], Images], seed: int, level: float) -> dict[str, Any]:
    """One level of one draw."""
    task = case.task(read(), seed, level)
    network = case.trained(task, settings)
    found = answers(fitted(network, task.training(), settings.fit, settings.ridge_share), task.images.test_inputs)
    wrong = found["outputs"].argmax(1) != task.test_answers
    noisy, missing = task.test_points_of(task.noisy), task.test_points_of(task.missing)
    seen = ~missing
    return {
        **task.describe(),
        "wrong_auroc": {name: auroc(found[name], wrong) for name in SCORES},
        "wrong_seen_auroc": {name: auroc(found[name][seen], wrong[seen]) for name in SCORES},
        "wrong": {
            "noisy": int((wrong & noisy).sum()),
            "missing": int((wrong & missing).sum()),
            "all": int(wrong.sum()),
        },
    }


def compute(settings: Settings, record: Record) -> None:
    """All levels of all draws."""
    for case in cases(settings):
        read = cache(partial(case.read, settings))  # when a run is missing
        for seed in settings.seeds:
            for level in settings.levels or (QUICK if settings.quick else LEVELS):
                wanted = {
                    **case.judged(),
                    "seed": seed,
                    "fit": settings.fit,
                    "ridge share": settings.ridge_share,
                    "noise": level,
                }
                record.once(wanted, partial(judge, case, settings, read, seed, level))


def _values(runs: list[Run], key: str) -> tuple[list[float], dict[str, list[list[float]]]]:
    levels = sorted({run.configuration["noise"] for run in runs})
    at = [[run for run in runs if run.configuration["noise"] == level] for level in levels]
    return levels, {name: [[run.results[key][name] for run in some] for some in at] for name in SCORES}


def show(settings: Settings, record: Record) -> list[Path]:
    """A table a case, and a picture."""
    found = [case for case in ("mnist", "fashion-mnist") if record.runs(case=case)]
    tables = []
    figure = new_figure(4.6 * len(found) + 1, 3.8)
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, case in zip(axes, found, strict=True):
        runs = record.runs(case=case)
        for key, where in (("wrong_auroc", "all test points"), ("wrong_seen_auroc", "without the missing class")):
            levels, values = _values(runs, key)
            table = Table(f"{case}: AUROC for wrong predictions, {where}", ("share of random labels", *SCORES))
            for place, level in enumerate(levels):
                table.add(f"{level:g}", *(mean_and_sd(values[name][place]) for name in SCORES))
            tables.append(table)
        levels, values = _values(runs, "wrong_auroc")
        title = f"{runs[0].configuration['data']}, {runs[0].configuration['network']}"
        runs_of_scores(ax, levels, values)
        ax.set(xlabel="share of random labels in the noisy class", title=title)
    axes[0].set_ylabel("AUROC for wrong predictions")
    axes[0].legend(frameon=False)
    written = write_tables(settings.out / f"{record.path.stem}.md", tables)
    return [*written, save(figure, settings.out / f"{record.path.stem}.png")]


def check(settings: Settings, record: Record) -> list[str]:
    """With all labels random, HeC3 tells wrong predictions better than chance, and gains on Ho as noise grows."""
    lost = []
    for case in ("mnist", "fashion-mnist"):
        runs = record.runs(case=case)
        if not runs:
            continue
        _, values = _values(runs, "wrong_auroc")
        mean = {name: [sum(some) / len(some) for some in values[name]] for name in SCORES}
        if mean["HeC3"][-1] < 0.6:
            lost.append(f"{case}: HeC3 tells wrong predictions, AUROC {mean['HeC3'][-1]:.2f}, expected 0.6 or more")
        gains = [mean["HeC3"][at] - mean["Ho"][at] for at in (0, -1)]
        if gains[1] < gains[0]:
            lost.append(f"{case}: HeC3's lead over Ho grows with noise, from {gains[0]:.2f} to {gains[1]:.2f}")
    return lost


EXPERIMENT = Experiment("label-noise", __doc__ or "", compute, show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
