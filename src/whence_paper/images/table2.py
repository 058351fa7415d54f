"""Table 2: which wrong predictions become right when the noisy class is cleaned, or the missing one added?

A network trained on a task of Table 1 is trained further, on the same data with true labels of the noisy class
("clean"), or with the missing class and still with the noise ("add"). Scores of the first network are to tell which
test points go from wrong to right: AUROC over all test points.

Training on changes answers by itself, whatever was repaired. So a network is also trained on with nothing repaired, and
each repair is judged twice more: by the points of the repaired class alone, and by those that become right by it only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from whence_paper.data import Images
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record, Run
from whence_paper.scores import auroc
from whence_paper.tables import Table, mean_and_sd, write_tables

from .cases import FITS, Case, add_options, answers, cases, fitted
from .table1 import KEYS, SCORES, first, words
from .tasks import Task
from .training import outputs, retrain

REPAIRS = {"clean": {"clean": True}, "add": {"complete": True}}
PAPER = {
    ("mnist", "clean"): ("0.83±0.02", "0.89±0.02", "0.91±0.03", ""),
    ("mnist", "add"): ("0.80±0.08", "0.81±0.06", "0.73±0.07", ""),
    ("fashion-mnist", "clean"): ("0.70±0.19", "0.80±0.12", "0.94±0.03", ""),
    ("fashion-mnist", "add"): ("0.63±0.16", "0.68±0.16", "0.70±0.15", ""),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the tasks, the ways to fit, and how long to train on."""
    add_options(parser)
    parser.add_argument("--fits", nargs="+", choices=sorted(FITS), default=["two-bases"], help="default two-bases")
    parser.add_argument("--more-epochs", type=int, help="of training after the repair (default as many as before)")


@dataclass(frozen=True)
class Repaired:
    """A network and what becomes of its answers.

    Attributes:
        task: the draw.
        network: as trained on it.
        right: (m,) whether each test point's answer is right, by what was repaired; "none" for nothing.
    """

    task: Task
    network: nn.Module
    right: dict[str, Tensor]


def repaired(case: Case, settings: Settings, read: Callable[[], Images], epochs: int, seed: int) -> Repaired:
    """Train a network, and train it on after every repair and after none."""
    task = case.task(read(), seed)
    network = case.trained(task, settings)
    right = {}
    for name, repair in {"none": {}, **REPAIRS}.items():
        better = retrain(network, *task.training(**repair), replace(case.recipe, epochs=epochs), seed + 1)
        right[name] = outputs(better, task.images.test_inputs).argmax(1) == task.test_answers
    return Repaired(task, network, right)


def judge(settings: Settings, get: Callable[[int], Repaired], how: str, seed: int) -> dict[str, Any]:
    """Both repairs of one draw."""
    made = get(seed)
    task = made.task
    found = answers(fitted(made.network, task.training(), how, settings.ridge_share), task.images.test_inputs)
    before = found["outputs"].argmax(1) == task.test_answers
    share = {name: float(right.double().mean()) for name, right in made.right.items()}
    anyway = made.right["none"] & ~before
    results: dict[str, Any] = {**task.describe(), "accuracy": float(before.double().mean())}
    results["none"] = {"accuracy": share["none"], "improved": int(anyway.sum())}
    for name in REPAIRS:
        improved = made.right[name] & ~before
        mine = task.test_points_of(task.noisy if name == "clean" else task.missing)
        results[name] = {
            "accuracy": share[name],
            "improved": int(improved.sum()),
            "improved_of_the_class": int((improved & mine).sum()),
            "improved_anyway": int((improved & anyway).sum()),
            "auroc": _areas(found, improved, ~improved),
            "auroc_of_the_class": _areas(found, improved & mine, ~improved),
            "auroc_not_anyway": _areas(found, improved & ~anyway, ~improved),
        }
    return results


def _areas(found: dict[str, Tensor], positive: Tensor, negative: Tensor) -> dict[str, float]:
    """AUROC of each score over points of both kinds; points that are neither do not count."""
    kept = positive | negative
    return {score: auroc(found[score][kept], positive[kept]) for score in SCORES}


def compute(settings: Settings, record: Record) -> None:
    """All draws of all cases."""
    for case in cases(settings):
        epochs = settings.more_epochs or case.recipe.epochs // (2 if settings.quick else 1)
        read = cache(partial(case.read, settings))  # when a run is missing
        for seed in settings.seeds:
            get = cache(partial(repaired, case, settings, read, epochs))
            for how in settings.fits:
                about = {"seed": seed, "fit": how, "ridge share": settings.ridge_share, "more epochs": epochs}
                record.once({**case.judged(), **about}, partial(judge, settings, get, how, seed))


MORE = {
    "of the class": ("improved_of_the_class", None),
    "HeC3/Ho, of the class": ("auroc_of_the_class", "HeC3/Ho"),
    "anyway": ("improved_anyway", None),
    "HeC3/Ho, not anyway": ("auroc_not_anyway", "HeC3/Ho"),
}
"""Columns that the paper has not: where they stand in the results."""


def show(settings: Settings, record: Record) -> list[Path]:
    """A table a case, with every draw."""
    tables = []
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(record.runs(), key=lambda run: int(run.configuration["seed"])):
        groups.setdefault(tuple(str(run.configuration[name]) for name in KEYS), []).append(run)
    for key, runs in sorted(groups.items()):
        case, title = key[0], f"{key[0]}: {words(key)}"
        table = Table(title, ("repair", "draw", "became right", *SCORES, *MORE))
        for which in REPAIRS:
            for run in runs:
                one = run.results[which]
                label = f"{run.configuration['seed']}: {run.results['noisy' if which == 'clean' else 'missing']}"
                areas = (f"{one['auroc'][name]:.3f}" for name in SCORES)
                table.add(which, label, str(one["improved"]), *areas, *(_cell(one, column) for column in MORE))
            columns = ([run.results[which]["auroc"][name] for run in first(runs)] for name in SCORES)
            more = (_mean([run.results[which] for run in first(runs)], column) for column in MORE)
            table.add(which, "mean ± sd", "", *map(mean_and_sd, columns), *more)
            table.add(which, "paper", "", *PAPER[case, which], *("" for _ in MORE))
        tables.append(table)
    return write_tables(settings.out / f"{record.path.stem}.md", tables)


def _cell(one: dict[str, Any], column: str) -> str:
    """One draw's entry; nothing where the record is without it."""
    name, score = MORE[column]
    if name not in one:
        return ""
    return str(one[name]) if score is None else f"{one[name][score]:.3f}"


def _mean(draws: list[dict[str, Any]], column: str) -> str:
    name, score = MORE[column]
    if score is None or not all(name in one for one in draws):
        return ""
    return mean_and_sd([one[name][score] for one in draws])


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
