"""Bank marketing: customers of whose answer the network is HeC3- or Ho-uncertain, and what sets them apart.

The same network as for figure 1, trained by squared error to +1 (subscribed) and -1. The tables say what the two kinds
of doubt go with, and which values of which columns are more frequent among them than among all. The duration of the
call is left out: it is known when the answer is.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from whence_paper.data import Bank
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record
from whence_paper.scores import auroc
from whence_paper.tables import Table, mean_and_sd, write_tables

from .fitting import KINDS, add_options, by_setting, configuration, fitted, kinds_of, neighbours, trained
from .problems import LEFT_OUT, NUMBERS, Problem, bank, of_bank

MEASURES = {
    "customers": 0,
    "subscribed": 3,
    "wrong predictions": 3,
    "distance to the 20th nearest": 2,
    "neighbours with the rarer answer": 3,
    "HeC3 / Ho": 2,
}
"""What is said about each group, and with how many digits."""
SHOWN = 6
"""Values of columns that are named for each group."""


def options(parser: argparse.ArgumentParser) -> None:
    """Those of tables, with 50 epochs."""
    add_options(parser, epochs=50, structure="core-1024")


def judge(settings: Settings, seed: int) -> dict[str, Any]:
    """One split of the customers."""
    data = bank(settings)
    problem = of_bank(data, seed, settings.size)
    network = trained(problem, settings, seed)
    tracer = fitted(network, problem, settings)
    found = tracer.predict(list(problem.test_inputs.split(1000)))
    wrong = (found.mean.sign() != problem.test_targets).squeeze(1)
    kinds = kinds_of(found, settings.share)
    near, which = neighbours(problem.test_inputs, problem.inputs)
    yes = (problem.targets.squeeze(1) > 0).double()[which].mean(1)
    columns = {
        "subscribed": (problem.test_targets > 0).double().squeeze(1),
        "wrong predictions": wrong.double(),
        "distance to the 20th nearest": near[:, -1].double(),
        "neighbours with the rarer answer": torch.minimum(yes, 1 - yes),
        "HeC3 / Ho": found.ratio,
    }
    groups = {
        name: {
            "customers": int((kinds == kind).sum()),
            **{key: float(column[kinds == kind].mean()) for key, column in columns.items()},
            "values": lifts(data, problem, kinds == kind),
        }
        for kind, name in enumerate(KINDS)
    }
    scores = {
        "Ho": found.trace("ho"),
        "HeC3": found.trace("hec3"),
        "HeC3/Ho": found.ratio,
        "margin": -found.mean.abs().sum(1),
    }
    return {
        "accuracy": float((~wrong).double().mean()),
        "always_no": float((problem.test_targets < 0).double().mean()),
        "n": len(problem.inputs),
        "degrees_of_freedom": float(tracer.degrees_of_freedom),
        "groups": groups,
        "wrong_auroc": {name: auroc(value, wrong) for name, value in scores.items()},
    }


def lifts(data: Bank, problem: Problem, chosen: Tensor) -> list[list[Any]]:
    """Values that are most frequent among chosen test customers, over their share among all test customers.

    Each with its share among the chosen; those of at least a twentieth of the chosen count.
    """
    rows, some = problem.rows.tolist(), problem.rows[chosen].tolist()
    found: list[list[Any]] = []
    for name, values in data.columns.items():
        if name in NUMBERS or name in LEFT_OUT:
            continue
        whole, part = Counter(values[row] for row in rows), Counter(values[row] for row in some)
        for value, count in part.items():
            share = count / len(some)
            if share >= 0.05:
                found.append([f"{name} = {value}", share, share * len(rows) / whole[value]])
    return sorted(found, key=lambda one: -one[2])[:SHOWN]


def compute(settings: Settings, record: Record) -> None:
    """All splits."""
    for seed in settings.seeds:
        record.once(configuration(settings, seed), partial(judge, settings, seed))


def show(settings: Settings, record: Record) -> list[Path]:
    """What the groups are like, over all splits; which values are frequent, in the first."""
    runs = next(iter(by_setting(record.runs()).values()))
    title = f"Test customers, mean ± sd over splits {', '.join(str(run.configuration['seed']) for run in runs)}"
    groups = Table(title, ("", *KINDS))
    for name, digits in MEASURES.items():
        groups.add(name, *(mean_and_sd([run.results["groups"][kind][name] for run in runs], digits) for kind in KINDS))
    values = Table("Frequent values, first split: share, and times as frequent as among all", KINDS[1:])
    named = [runs[0].results["groups"][kind]["values"] for kind in KINDS[1:]]
    for place in range(max(map(len, named))):
        cells = [
            f"{one[place][0]}: {one[place][1]:.0%}, {one[place][2]:.1f} times" if place < len(one) else ""
            for one in named
        ]
        values.add(*cells)
    areas = Table("AUROC for wrong predictions", ("split", "accuracy", "always no", *runs[0].results["wrong_auroc"]))
    for run in runs:
        found = run.results
        numbers = [found["accuracy"], found["always_no"], *found["wrong_auroc"].values()]
        areas.add(str(run.configuration["seed"]), *(f"{value:.3f}" for value in numbers))
    return write_tables(settings.out / f"{record.path.stem}.md", [groups, values, areas])


def check(settings: Settings, record: Record) -> list[str]:
    """Ho-uncertain customers are unlike the others; neighbours of HeC3-uncertain ones disagree."""
    groups = [run.results["groups"] for run in record.runs()]
    lost = []
    for name, highest, words in (
        ("distance to the 20th nearest", "Ho-uncertain", "Ho-uncertain customers are unlike others"),
        ("neighbours with the rarer answer", "HeC3-uncertain", "neighbours of HeC3-uncertain customers disagree most"),
    ):
        mean = {kind: fmean(one[kind][name] for one in groups) for kind in KINDS}
        if mean[highest] < max(mean.values()):
            lost.append(f"{words}; {name}: " + ", ".join(f"{kind} {value:.3f}" for kind, value in mean.items()))
    return lost


EXPERIMENT = Experiment("bank", __doc__ or "", compute, show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
