"""Appendix, lambda: Ho with and without its ridge correction, for the missing class, over many lambdas.

With it, Ho is sigma^2 phi F_lam^-1 F F_lam^-1 phi, the variance of a ridge estimate; without it, as for least squares,
sigma^2 phi F_lam^-1 phi, which is Laplace's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from whence_paper.data import Images
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record
from whence_paper.scores import auroc

from .cases import FITS, Case, add_options, answers, cases, fitted, some_of
from .sweeps import Sweep

SCORES = ("Ho", "Laplace", "HeC3", "HeC3/Ho")
SWEEP = Sweep(
    key="ridge share",
    head="lambda / n",
    scores={"Ho": "Ho", "Laplace": "Ho, no ridge correction", "HeC3": "HeC3", "HeC3/Ho": "HeC3/Ho"},
    asked={"missing_auroc": "AUROC for the missing class", "noisy_auroc": "AUROC for the noisy class"},
    drawn={"Ho": "Ho", "Laplace": "Ho without its ridge correction"},
    axis={"xscale": "log", "xlabel": "λ / n"},
    label="AUROC for the missing class",
)
SHARES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
QUICK = (1e-4, 1e-2, 1.0)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, the way to fit, and the lambdas."""
    add_options(parser)
    parser.add_argument("--fit", choices=sorted(FITS), default="ekfac", help="default ekfac")
    parser.add_argument("--fit-size", type=int, help="training images, drawn at random, to fit on (default all)")
    parser.add_argument("--shares", type=float, nargs="+", help="lambdas as shares of n")


def judge(case: Case, settings: Settings, read: Callable[[], Images], seed: int, share: float) -> dict[str, Any]:
    """One lambda of one draw."""
    task = case.task(read(), seed)
    network = case.trained(task, settings)
    tracer = fitted(network, some_of(task.training(), settings.fit_size), settings.fit, share)
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
                wanted |= {"fit size": settings.fit_size} if settings.fit_size else {}
                record.once(wanted, partial(judge, case, settings, read, seed, share))


def check(settings: Settings, record: Record) -> list[str]:
    """At a lambda near the weight decay, Ho finds the missing class; the correction matters for large lambdas only."""
    lost = []
    for case, runs in SWEEP.groups(record):
        _, values = SWEEP.values(runs, "missing_auroc")
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


EXPERIMENT = Experiment("lambda-sweep", __doc__ or "", compute, SWEEP.show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
