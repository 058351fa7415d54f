"""Appendix, label noise: which test points are mispredicted, as more labels of the noisy class are random?

The share of random labels in the noisy class of a task of Table 1 goes from none to all; AUROC of Ho, HeC3, HeC3/Ho and
the margin for wrong predictions of test points.
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

from .cases import FITS, Case, add_options, answers, cases, fitted
from .sweeps import Sweep

SCORES = ("Ho", "HeC3", "HeC3/Ho", "margin")
SWEEP = Sweep(
    key="noise",
    head="share of random labels",
    scores={name: name for name in SCORES},
    asked={
        "wrong_auroc": "AUROC for wrong predictions, all test points",
        "wrong_seen_auroc": "AUROC for wrong predictions, without the missing class",
    },
    drawn={name: name for name in SCORES},
    axis={"xlabel": "share of random labels in the noisy class"},
    label="AUROC for wrong predictions",
)
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


def check(settings: Settings, record: Record) -> list[str]:
    """With all labels random, HeC3 tells wrong predictions better than chance, and gains on Ho as noise grows."""
    lost = []
    for case, runs in SWEEP.groups(record):
        _, values = SWEEP.values(runs, "wrong_auroc")
        mean = {name: [sum(some) / len(some) for some in values[name]] for name in SCORES}
        if mean["HeC3"][-1] < 0.6:
            lost.append(f"{case}: HeC3 tells wrong predictions, AUROC {mean['HeC3'][-1]:.2f}, expected 0.6 or more")
        gains = [mean["HeC3"][at] - mean["Ho"][at] for at in (0, -1)]
        if gains[1] < gains[0]:
            lost.append(f"{case}: HeC3's lead over Ho grows with noise, from {gains[0]:.2f} to {gains[1]:.2f}")
    return lost


EXPERIMENT = Experiment("label-noise", __doc__ or "", compute, SWEEP.show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
