"""Table 2: which wrong predictions become right when the noisy class is cleaned, or the missing one added?

A network trained on a task of Table 1 is trained further, on the same data with true labels of the noisy class
("clean"), or with the missing class and still with the noise ("add"). Scores of the first network are to tell which
test points go from wrong to right: AUROC over all test points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from whence_paper.data import Images
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record
from whence_paper.scores import auroc
from whence_paper.tables import Table, mean_and_sd, write_tables

from .cases import FITS, Case, add_options, answers, cases, fitted
from .table1 import KEYS, SCORES, words
from .training import outputs, retrain

REPAIRS = {"clean": {"clean": True}, "add": {"complete": True}}
PAPER = {
    ("mnist", "clean"): ("0.83±0.02", "0.89±0.02", "0.91±0.03", ""),
    ("mnist", "add"): ("0.80±0.08", "0.81±0.06", "0.73±0.07", ""),
    ("fashion-mnist", "clean"): ("0.70±0.19", "0.80±0.12", "0.94±0.03", ""),
    ("fashion-mnist", "add"): ("0.63±0.16", "0.68±0.16", "0.70±0.15", ""),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, the way to fit, and how long to train on."""
    add_options(parser)
    parser.add_argument("--fit", choices=sorted(FITS), default="two-bases", help="default two-bases")
    parser.add_argument("--more-epochs", type=int, help="of training after the repair (default as many as before)")


def judge(case: Case, settings: Settings, read: Callable[[], Images], seed: int, epochs: int) -> dict[str, Any]:
    """Both repairs of one draw."""
    task = case.task(read(), seed)
    network = case.trained(task, settings)
    tests, answer = task.images.test_inputs, task.test_answers
    found = answers(fitted(network, task.training(), settings.fit, settings.ridge_share), tests)
    before = found["outputs"].argmax(1) == answer
    results: dict[str, Any] = {**task.describe(), "accuracy": float(before.double().mean())}
    for name, repair in REPAIRS.items():
        recipe = replace(case.recipe, epochs=epochs)
        better = retrain(network, *task.training(**repair), recipe, task.seed + 1)
        after = outputs(better, tests).argmax(1) == answer
        improved = after & ~before
        results[name] = {
            "accuracy": float(after.double().mean()),
            "improved": int(improved.sum()),
            "auroc": {score: auroc(found[score], improved) for score in SCORES},
        }
    return results


def compute(settings: Settings, record: Record) -> None:
    """All draws of all cases."""
    for case in cases(settings):
        epochs = settings.more_epochs or case.recipe.epochs // (2 if settings.quick else 1)
        read = cache(partial(case.read, settings))  # when a run is missing
        for seed in settings.seeds:
            wanted = {
                **case.judged(),
                "seed": seed,
                "fit": settings.fit,
                "ridge share": settings.ridge_share,
                "more epochs": epochs,
            }
            record.once(wanted, partial(judge, case, settings, read, seed, epochs))


def show(settings: Settings, record: Record) -> list[Path]:
    """A table a case, with every draw."""
    tables = []
    groups: dict[tuple[str, ...], list[Any]] = {}
    for run in sorted(record.runs(), key=lambda run: int(run.configuration["seed"])):
        groups.setdefault(tuple(str(run.configuration[name]) for name in KEYS), []).append(run)
    for key, runs in sorted(groups.items()):
        case, title = key[0], f"{key[0]}: {words(key)}"
        table = Table(title, ("repair", "draw", "became right", *SCORES))
        for which in REPAIRS:
            for run in runs:
                one = run.results[which]
                label = f"{run.configuration['seed']}: {run.results['noisy' if which == 'clean' else 'missing']}"
                table.add(which, label, str(one["improved"]), *(f"{one['auroc'][name]:.3f}" for name in SCORES))
            columns = zip(*([run.results[which]["auroc"][name] for name in SCORES] for run in runs), strict=True)
            table.add(which, "mean ± sd", "", *map(mean_and_sd, columns))
            table.add(which, "paper", "", *PAPER[case, which])
        tables.append(table)
    return write_tables(settings.out / f"{record.path.stem}.md", tables)


def check(settings: Settings, record: Record) -> list[str]:
    """The ratio tells what cleaning repairs; Ho or HeC3 tell what new data repair."""
    lost = []
    for case in ("mnist", "fashion-mnist"):
        runs = [run for run in record.runs(case=case) if all(run.results[which]["improved"] for which in REPAIRS)]
        if not runs:
            continue
        mean = {
            which: {name: sum(run.results[which]["auroc"][name] for run in runs) / len(runs) for name in SCORES}
            for which in REPAIRS
        }
        ratio = mean["clean"]["HeC3/Ho"]
        if ratio < 0.65:
            lost.append(f"{case}: HeC3/Ho tells what cleaning repairs, AUROC {ratio:.2f}, expected 0.65 or more")
        if max(mean["add"]["Ho"], mean["add"]["HeC3"]) < 0.6:
            lost.append(
                f"{case}: Ho {mean['add']['Ho']:.2f} or HeC3 {mean['add']['HeC3']:.2f} tell what new data repair"
            )
    return lost


EXPERIMENT = Experiment("table2", __doc__ or "", compute, show, check, options)
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
