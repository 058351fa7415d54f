"""Disentanglement error (de Jong et al., arXiv 2408.12175): noise and scarcity from one network, and from many.

Networks are trained on 1 to 100 % of the examples, and on all of them with 0 to 100 % of the labels of training and
test set shuffled. Means over the test points of an aleatoric and an epistemic measure are correlated with the accuracy;
the error is the mean distance of the four correlations from their ideals, 0 at best. MC dropout and a deep ensemble of
the same networks stand beside `whence`, which sees the first network of the ensemble alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from whence_paper.baselines import DeepEnsemble, MCDropout
from whence_paper.baselines.base import Data, Recipe, Train
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record, Run
from whence_paper.tables import Table, mean_and_sd, write_tables

from .cases import CASES, Case, drawn, train
from .measures import Found, sampled, traced
from .protocol import SHUFFLED, SIZES, Curve, disentanglement_error, shuffled, smaller

MEMBERS, RATE, PASSES = 5, 0.3, 50
"""Of the ensemble; dropped units and forward passes of MC dropout."""
METHODS = ("whence", "deep ensemble", "MC dropout")
PAIRS: dict[str, tuple[str, str, str]] = {
    "whence: supported noise, variance before training": ("whence", "supported noise", "variance"),
    "whence: supported noise, Ho": ("whence", "supported noise", "Ho"),
    "whence: supported noise, HeC3": ("whence", "supported noise", "HeC3"),
    "whence: noise, variance before training": ("whence", "noise", "variance"),
    "whence: noise, scarcity": ("whence", "noise", "scarcity"),
    "network's entropy, Ho": ("whence", "entropy", "Ho"),
    f"deep ensemble of {MEMBERS}": ("deep ensemble", "expected entropy", "mutual information"),
    f"MC dropout, rate {RATE:g}": ("MC dropout", "expected entropy", "mutual information"),
}
"""Method, aleatoric and epistemic measure."""
PUBLISHED = {
    "wine": "deep ensemble of 10 .342, MC dropout .645",
    "fashion-mnist": "MC dropout .294, deep ensemble of 10 .363",
    "cifar-10": "MC dropout .295, deep ensemble of 10 .350",
}
"""Best and other figures of the paper's notebook, with the published networks and all images."""


def options(parser: argparse.ArgumentParser) -> None:
    """Data sets, and sizes in place of theirs."""
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["wine", "fashion-mnist"])
    parser.add_argument("--size", type=int, help="training examples, in place of each case's")
    parser.add_argument("--epochs", type=int, help="in place of each case's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="those that are run")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="capture steps on a GPU")


def chosen(settings: Settings) -> list[tuple[str, Case]]:
    """The cases named on the command line; wine alone in a quick run."""
    found = []
    for name in ["wine"] if settings.quick else settings.cases:
        case = CASES[name]
        case = replace(case, n=settings.size or case.n, epochs=settings.epochs or case.epochs)
        found.append((name, replace(case, n=100, epochs=40) if settings.quick else case))
    return found


def looked_at(
    case: Case, learn: Train, data: Data, inputs: torch.Tensor, seed: int, methods: Sequence[str]
) -> dict[str, Found]:
    """What some methods say after training on some data; seconds are printed as progress."""
    recipe = Recipe(lambda: case.make(case.classes), learn, data, "categorical", seed)
    work: dict[str, Callable[[], object]] = {
        "first network": recipe.network,
        "whence": lambda: traced(recipe.network(), data, inputs, case.structure),
        "deep ensemble": lambda: sampled(DeepEnsemble(MEMBERS).fit(recipe), inputs),
        "MC dropout": lambda: sampled(MCDropout(RATE, PASSES).fit(recipe), inputs),
    }
    found, seconds = {}, []
    for name in ("first network", *methods):
        began = time.perf_counter()
        found[name] = work[name]()
        if data.inputs.is_cuda:
            torch.cuda.synchronize()
        seconds.append(f"{name} {time.perf_counter() - began:.1f} s")
    print(f"{len(data)} examples: {', '.join(seconds)}", file=sys.stderr, flush=True)
    return {name: one for name, one in found.items() if isinstance(one, Found)}


def curves(
    case: Case,
    learn: Train,
    known: Data,
    asked: Data,
    seed: int,
    methods: Sequence[str],
    kind: str,
    grid: Sequence[float],
) -> dict[str, Curve]:
    """One of the two experiments, for some methods."""
    accuracy: dict[str, list[float]] = {name: [] for name in methods}
    measures: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    for place, share in enumerate(grid):
        print(f"{kind} {share:g}, {place + 1} of {len(grid)}", file=sys.stderr, flush=True)
        if kind == "size":
            kept = smaller(known.targets.cpu(), share, torch.Generator().manual_seed(seed))
            data, answers = known.take(kept.to(known.inputs.device)), asked.targets.cpu()
        else:
            draw = torch.Generator().manual_seed(1000 * (seed + 1) + place)
            labels = shuffled(known.targets.cpu(), share, draw).to(known.inputs.device)
            data, answers = Data(known.inputs, labels), shuffled(asked.targets.cpu(), share, draw)
        each = looked_at(case, learn, data, asked.inputs, seed, methods)
        for name, found in each.items():
            accuracy[name].append(float((found.predicted == answers).double().mean()))
            for measure, value in found.measures.items():
                measures[name].setdefault(measure, []).append(value)
    return {name: Curve(accuracy[name], dict(measures[name])) for name in methods}


def judge(case: Case, settings: Settings, seed: int) -> dict[str, Any]:
    """One run: what the methods say in both experiments."""
    known, asked = drawn(case, settings.data, seed, settings.device)
    one_kind = partial(curves, case, train(case.epochs, settings.graphs), known, asked, seed, settings.methods)
    every = 2 if settings.quick else 1
    grids = {"noise": SHUFFLED[::every], "size": SIZES[::every]}  # with all examples first: memory is taken once
    return {kind: {name: asdict(curve) for name, curve in one_kind(kind, grid).items()} for kind, grid in grids.items()}


def compute(settings: Settings, record: Record) -> None:
    """All runs of all cases."""
    for name, case in chosen(settings):
        for seed in settings.seeds:
            wanted = {
                "case": name,
                "seed": seed,
                "n": case.n,
                "test": case.test,
                "network": case.describe,
                "epochs": case.epochs,
                "structure": case.structure,
            }
            if settings.methods != list(METHODS):
                wanted["methods"] = settings.methods
            record.once(wanted, partial(judge, case, settings, seed))


def by_case(record: Record) -> dict[str, list[Run]]:
    """Runs of each data set."""
    found: dict[str, list[Run]] = {}
    for run in record.runs():
        found.setdefault(run.configuration["case"], []).append(run)
    return {case: sorted(runs, key=lambda run: int(run.configuration["seed"])) for case, runs in found.items()}


def both(run: Run, of: str) -> tuple[Curve, Curve]:
    """What a method says over sizes, and over shuffled labels."""
    return Curve(**run.results["size"][of]), Curve(**run.results["noise"][of])


def errors(runs: list[Run]) -> dict[str, list[float]]:
    """Of every pair of measures, in every run that has them; pairs that no run has are left out."""
    found: dict[str, list[float]] = {}
    for pair, (of, aleatoric, epistemic) in PAIRS.items():
        have = [run for run in runs if of in run.results["size"]]
        if have:
            found[pair] = [disentanglement_error(*both(run, of), aleatoric, epistemic) for run in have]
    return found


def show(settings: Settings, record: Record) -> list[Path]:
    """A table for each data set: the error, and the four correlations."""
    tables = []
    for name, runs in by_case(record).items():
        about = runs[0].configuration
        title = f"{name}: {about['network']}, {about['n']} examples, {about['epochs']} epochs, {len(runs)} runs"
        title += f"; published: {PUBLISHED[about['case']]}" if about["case"] in PUBLISHED else ""
        table = Table(title, ("measures", "error", "every run", "A, size", "E, size", "A, noise", "E, noise"))
        found = errors(runs)
        for pair, values in found.items():
            of, aleatoric, epistemic = PAIRS[pair]
            have = [run for run in runs if of in run.results["size"]]
            means = [
                f"{fmean(both(run, of)[at].correlation(measure) for run in have):+.2f}"
                for at in (0, 1)
                for measure in (aleatoric, epistemic)
            ]
            table.add(pair, mean_and_sd(values), " ".join(f"{one:.3f}" for one in values), *means)
        tables.append(table)
    return write_tables(settings.out / f"{record.path.stem}.md", tables)


def check(settings: Settings, record: Record) -> list[str]:
    """From one network, `whence` has a lower error than dropout and an ensemble have on average."""
    lost = []
    for name, runs in by_case(record).items():
        mean = {pair: fmean(values) for pair, values in errors(runs).items()}
        ours = mean[next(iter(PAIRS))]
        others = [value for pair, value in mean.items() if PAIRS[pair][0] != "whence"]
        if others and ours > fmean(others):
            lost.append(f"{name}: error of one network {ours:.3f}, of samples {fmean(others):.3f}")
    return lost


EXPERIMENT = Experiment("disentanglement", __doc__ or "", compute, show, check, options, runs=(5, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
