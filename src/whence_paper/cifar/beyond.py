"""Beyond the paper: does a score from ONE network reach the ensemble in telling wrong predictions on CIFAR-10?

From the predictions that `table3` has kept: scores that theory suggests are compared on one half of the test set, among
them sums of margin and log-variance; the best one there, and each one beside it, is reported on the other half.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record, Run
from whence_paper.scores import auroc
from whence_paper.tables import Table, mean_and_sd, write_tables

from . import cases, table3
from .fits import Predicted
from .scores import of_both, of_members, of_outputs, of_probabilities, of_variances, with_largest_output

WEIGHTS = (-1.0, -0.5, -0.2, -0.1, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Of the standardised log-variance beside the standardised margin."""


def standard(values: Tensor) -> Tensor:
    """Mean zero, deviation one."""
    return (values - values.mean()) / values.std()


def candidates(found: Predicted) -> Iterator[tuple[str, Tensor]]:
    """All scores, by name: (m,) each."""
    plain = of_outputs(found.outputs)
    yield from plain.items()
    margin = standard(plain["margin"])
    for estimator in found.variances:
        alone = of_variances(found, estimator)
        scores = {**alone, **of_both(found, estimator), **of_probabilities(found, estimator)}
        yield from ((f"{estimator}: {name}", value) for name, value in scores.items())
        for name, value in alone.items():
            extra = standard(value.log())
            yield from ((f"margin {weight:+g} log {estimator} {name}", margin + weight * extra) for weight in WEIGHTS)


def halves(count: int) -> tuple[Tensor, Tensor]:
    """(m,) masks of the half to choose on and of the half to report on."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    first = torch.zeros(count, dtype=torch.bool)
    first[order[: count // 2]] = True
    return first, ~first


def judge(found: Predicted, members: Tensor | None, truth: Tensor) -> dict[str, Any]:
    """Every score on both halves, the best of the first half, and the ensemble beside it."""
    wrong = found.outputs.argmax(1) != truth
    choose, report = halves(len(truth))

    def areas(score: Tensor) -> list[float]:
        return [auroc(score[half], wrong[half]) for half in (choose, report)]

    scores = {name: areas(value) for name, value in candidates(found)}
    best = max(scores, key=lambda name: scores[name][0])
    results: dict[str, Any] = {"scores": scores, "best": best, "mistakes": int(wrong.sum())}
    results["with largest output"] = with_largest_output(found)
    if members is not None:
        together = of_members(members)
        results["ensemble, for this network's mistakes"] = {name: areas(value) for name, value in together.items()}
        mistakes = members.double().mean(0).argmax(1) != truth
        results["ensemble, for its own mistakes"] = {
            name: [auroc(value[half], mistakes[half]) for half in (choose, report)] for name, value in together.items()
        }
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """Those of Table 3, from whose folder predictions are taken."""
    table3.options(parser)


def compute(settings: Settings, record: Record) -> None:
    """Every fit that Table 3 has kept; where it is to be quick, Table 3 comes first."""
    source = Record(table3.EXPERIMENT.file(settings), "table3", record.command)
    if settings.quick:
        table3.compute(settings, source)
    runs = source.runs()
    fits = [run for run in runs if run.configuration["kind"] == "fit"]
    if not fits:
        raise SystemExit(f"expected fits of table3 in {settings.out}, got none. Run: whence reproduce table3")
    truth = None
    for run in fits:
        if record.find(run.configuration) is not None:
            continue
        path = table3.arrays(settings, run.configuration)
        if not path.exists():
            print(f"left out, its predictions were not kept: {path.name}", flush=True)
            continue
        found = Predicted.load(path)
        if not found.differences:
            print(f"left out, without variances of differences: {path.name}", flush=True)
            continue
        truth = cases.read(settings).test_labels.cpu() if truth is None else truth
        record.add(run.configuration, judge(found, _members(settings, run, runs), truth), 0.0)


def _members(settings: Settings, fit: Run, runs: list[Run]) -> Tensor | None:
    """Outputs (e, m, k) of the networks that were trained as the fit's was, if there are several."""
    same = ("architecture", "loss", "epochs", "shift", "size", "rate")
    wanted = {name: fit.configuration[name] for name in same}
    alike = [
        run.configuration
        for run in runs
        if run.configuration["kind"] == "network" and all(run.configuration[k] == v for k, v in wanted.items())
    ]
    paths = [path for path in (table3.arrays(settings, one) for one in alike) if path.exists()]
    return table3.kept_outputs(paths) if len(paths) > 1 else None


SHOWN = {
    "margin": "margin",
    "hec3: sum": "HeC3, summed over outputs (the paper's)",
    "hec3: predicted output": "HeC3 of the predicted output",
    "hec3: margin's": "HeC3 of the margin",
    "hec3: margin over its error": "margin over its standard error by HeC3",
    "ho: margin over its error": "margin over its standard error by Ho",
    "hec3: smallest difference over its error": "smallest difference over its standard error by HeC3",
    "hec3: chance that another wins": "chance that another output wins, by HeC3",
    "hec3: probability's variance": "variance of the probability by HeC3",
    "hec3: averaged probability": "averaged probability by HeC3",
}
ENSEMBLES = {"ensemble variance": "ensemble's variance", "ensemble margin": "margin of the ensemble's mean"}


def show(settings: Settings, record: Record) -> list[Path]:
    """Of each kind of fit: every score on the second half, what was best on the first half, and the ensemble."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(record.runs(), key=_order):
        about = run.configuration
        ridge = "" if "leave-one-out" in about["way"] else f", lambda {about['ridge share']:g} n"
        words = f"{about['network']}, {about['way']}{ridge}, {about['loss']}, {about['epochs']} epochs"
        groups.setdefault(words, []).append(run)
    tables = [_table(words, runs) for words, runs in groups.items()]
    return write_tables(settings.out / f"{record.path.stem}.md", tables)


def _order(run: Run) -> tuple[Any, ...]:
    about = run.configuration
    return about["architecture"], about["loss"] != "squared error", about["way"], about["seed"]


def _table(words: str, runs: list[Run]) -> Table:
    table = Table(f"{words}: AUROC on the second half", ("score", "mean ± sd", "networks"))

    def add(name: str, areas: list[float]) -> None:
        table.add(name, mean_and_sd(areas), " ".join(f"{area:.3f}" for area in areas))

    for key, name in SHOWN.items():
        add(name, [run.results["scores"][key][1] for run in runs])
    best = [(run.results["scores"][run.results["best"]][1], run.results["best"]) for run in runs]
    each = "; ".join(f"{area:.3f} ({name})" for area, name in best)
    table.add("the best of all on the first half", mean_and_sd([area for area, _ in best]), each)
    for whose in ("this network's", "its own"):
        for key, name in ENSEMBLES.items():
            found = [run.results.get(f"ensemble, for {whose} mistakes", {}).get(key) for run in runs]
            if all(found):
                add(f"{name}, for {whose} mistakes", [areas[1] for areas in found])
    return table


def check(settings: Settings, record: Record) -> list[str]:
    """What is chosen on one half is not worse on the other than the margin, up to chance."""
    lost = []
    for run in record.runs():
        scores, best = run.results["scores"], run.results["best"]
        if scores[best][1] < scores["margin"][1] - 0.03:
            name = f"{run.configuration['architecture']} {run.configuration['seed']}"
            lost.append(f"{name}: {best} {scores[best][1]:.3f} keeps up with the margin {scores['margin'][1]:.3f}")
    return lost


EXPERIMENT = Experiment("beyond", __doc__ or "", compute, show, check, options, runs=table3.EXPERIMENT.runs)
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
