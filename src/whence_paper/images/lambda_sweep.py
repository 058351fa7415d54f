"""Appendix, lambda: Ho with and without its ridge correction, for the missing class, over many lambdas.

With it, Ho is sigma^2 phi F_lam^-1 F F_lam^-1 phi, the variance of a ridge estimate; without it, as for least squares,
sigma^2 phi F_lam^-1 phi, which is Laplace's.
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

SCORES = ("Ho", "Laplace", "HeC3", "HeC3/Ho")
SHARES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
QUICK = (1e-4, 1e-2, 1.0)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, the way to fit, and the lambdas."""
    add_options(parser)
    parser.add_argument("--fit", choices=sorted(FITS), default="ekfac", help="default ekfac")
    parser.add_argument("--shares", type=float, nargs="+", help="lambdas as shares of n")


def judge(case: Case, settings: Settings, read: Callable[[], Images], seed: int, share: float) -> dict[str, Any]:
    """One lambda of one draw."""
    task = case.task(read(), seed)
    network = case.trained(task, settings)
    tracer = fitted(network, task.training(), settings.fit, share)
    found = answers(tracer, task.images.test_inputs)
    noisy, missing = task.test_points_of(task.noisy), task.test_points_of(task.missing)
    return {
        **task.describe(),
        "missing_auroc": {name: auroc(found[name], missing) for name in SCORES},
        "noisy_auroc": {name: auroc(found[name], noisy) for name in SCORES},
        "degrees_of_freedom": float(tracer.degrees_of_freedom),
    }


def compute(settings: Settings, record: Record) -> None:
    """All lambdas of all draws."""
    for case in cases(settings):
        read = cache(partial(case.read, settings))  # when a run is missing
        for seed in settings.seeds:
            for share in settings.shares or (QUICK if settings.quick else SHARES):
                wanted = {**case.judged(), "seed": seed, "fit": settings.fit, "ridge share": share}
                record.once(wanted, partial(judge, case, settings, read, seed, share))


def _values(runs: list[Run], which: str) -> tuple[list[float], dict[str, list[list[float]]]]:
    shares = sorted({run.configuration["ridge share"] for run in runs})
    at = [[run for run in runs if run.configuration["ridge share"] == share] for share in shares]
    return shares, {name: [[run.results[f"{which}_auroc"][name] for run in some] for some in at] for name in SCORES}


def show(settings: Settings, record: Record) -> list[Path]:
    """A table a case, and a picture."""
    found = [case for case in ("mnist", "fashion-mnist") if record.runs(case=case)]
    tables = []
    figure = new_figure(4.6 * len(found) + 1, 3.8)
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, case in zip(axes, found, strict=True):
        runs = record.runs(case=case)
        for which in ("missing", "noisy"):
            shares, values = _values(runs, which)
            words = f"{case}, {runs[0].configuration['fit']}: AUROC for the {which} class"
            table = Table(words, ("lambda / n", "Ho", "Ho, no ridge correction", "HeC3", "HeC3/Ho"))
            for place, share in enumerate(shares):
                table.add(f"{share:g}", *(mean_and_sd(values[name][place]) for name in SCORES))
            tables.append(table)
        shares, values = _values(runs, "missing")
        title = f"{runs[0].configuration['data']}, {runs[0].configuration['network']}"
        runs_of_scores(ax, shares, {name: values[name] for name in ("Ho", "Laplace")})
        ax.set(xscale="log", xlabel="λ / n", title=title)
    axes[0].set_ylabel("AUROC for the missing class")
    handles, _ = axes[0].get_legend_handles_labels()
    axes[0].legend(handles, ["Ho", "Ho without its ridge correction"], frameon=False)
    written = write_tables(settings.out / f"{record.path.stem}.md", tables)
    return [*written, save(figure, settings.out / f"{record.path.stem}.png")]


def check(settings: Settings, record: Record) -> list[str]:
    """At a lambda near the weight decay, Ho finds the missing class; the correction matters for large lambdas only."""
    lost = []
    for case in ("mnist", "fashion-mnist"):
        runs = record.runs(case=case)
        if not runs:
            continue
        _, values = _values(runs, "missing")
        best = max(sum(some) / len(some) for some in values["Ho"])
        if best < 0.6:
            lost.append(
                f"{case}: Ho finds the missing class at some lambda, best AUROC {best:.2f}, expected 0.6 or more"
            )
        first, last = (
            abs(sum(values["Ho"][at]) - sum(values["Laplace"][at])) / len(values["Ho"][at]) for at in (0, -1)
        )
        if first > last + 0.05:
            lost.append(f"{case}: the correction changes least at the smallest lambda, {first:.2f} against {last:.2f}")
    return lost


EXPERIMENT = Experiment("lambda-sweep", __doc__ or "", compute, show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
