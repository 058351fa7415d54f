"""Figure 4: test points of one draw of Table 1, ranked by Ho and by HeC3; noisy and missing class in colour."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import whence
from whence.plots import rank_scatter
from whence_paper.experiment import Experiment, Settings
from whence_paper.pictures import new_figure, save
from whence_paper.records import Record
from whence_paper.scores import ranks

from .cases import FITS, Case, add_options, answers, cases, fitted


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, and the way to fit."""
    add_options(parser)
    parser.set_defaults(cases=["mnist"])
    parser.add_argument("--fit", choices=sorted(FITS), default="two-bases", help="default two-bases")


def judge(case: Case, settings: Settings, seed: int) -> dict[str, Any]:
    """Ranks from 0 of all test points, and which are of the noisy (1) and the missing class (2)."""
    task = case.task(case.read(settings), seed)
    network = case.trained(task, settings)
    found = answers(fitted(network, task.training(), settings.fit, settings.ridge_share), task.images.test_inputs)
    kinds = task.test_points_of(task.noisy).int() + 2 * task.test_points_of(task.missing).int()
    places = {name: (ranks(found[name]) - 1).int().tolist() for name in ("Ho", "HeC3")}
    return {**task.describe(), "ranks": places, "kinds": kinds.tolist()}


def compute(settings: Settings, record: Record) -> None:
    """One draw a case."""
    for case in cases(settings):
        for seed in settings.seeds:
            wanted = {**case.judged(), "seed": seed, "fit": settings.fit, "ridge share": settings.ridge_share}
            record.once(wanted, partial(judge, case, settings, seed))


def show(settings: Settings, record: Record) -> list[Path]:
    """A picture a run."""
    written = []
    for run in record.runs():
        found = run.results
        noisy, missing = f"random labels in training: {found['noisy']}", f"missing from training: {found['missing']}"
        groups = [("other classes", noisy, missing)[kind] for kind in found["kinds"]]
        values = {"ho": found["ranks"]["Ho"], "hec3": found["ranks"]["HeC3"]}
        drawn = {name: torch.tensor(value, dtype=torch.float64)[:, None] for name, value in values.items()}
        figure = new_figure(5.4, 6.2)
        ax = figure.subplots()
        uncertainty = whence.Uncertainty(torch.zeros(len(found["kinds"]), 1), {}, drawn)
        rank_scatter(uncertainty, groups, {noisy: "noise", missing: "scarcity"}, ax)
        handles, names = ax.get_legend_handles_labels()
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()  # the figure's own stays clear of the axes
        figure.legend(handles[::-1], names[::-1], loc="outside lower center", frameon=False)
        what = run.configuration
        ax.set_title(f"{what['data']}, {what['network']}, draw {what['seed']}", fontsize="medium")
        name = f"{record.path.stem}-{what['case']}-{what['seed']}.png"
        written.append(save(figure, settings.out / name))
    return written


def check(settings: Settings, record: Record) -> list[str]:
    """The noisy class lies above the diagonal, further than the missing one."""
    lost = []
    for run in record.runs():
        ho, hec3 = (torch.tensor(run.results["ranks"][name]).double() for name in ("Ho", "HeC3"))
        kinds = torch.tensor(run.results["kinds"])
        above = [float((hec3 - ho)[kinds == kind].mean()) / len(kinds) for kind in (1, 2)]
        if above[0] <= max(above[1], 0.0):
            said = f"{run.configuration['case']}, draw {run.configuration['seed']}"
            lost.append(
                f"{said}: the noisy class lies above the diagonal, by {above[0]:.2f}, the missing by {above[1]:.2f}"
            )
    return lost


EXPERIMENT = Experiment("figure4", __doc__ or "", compute, show, check, options, runs=(1, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
