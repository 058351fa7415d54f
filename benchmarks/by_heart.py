"""Wrong labels in networks stopped early and trained long: are they found by the loss, or by the fit without them?

    python -m benchmarks.by_heart --data DIR --out results/by_heart.json

Labels are wrong at random, or that of the next class, or, most often for unusual images, that of the most similar image
of another class; one in ten or four in ten. Recorded for each network: AUROC for wrong labels of its own 1 - p of the
label, of the same in the fit without each example, and of the suspect rank, which follows one of the two.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import whence
from whence.influence.training import change_without, label_suspicion

from .data import Split, Task, batches, one_hot
from .record import save, say
from .scores import auroc
from .studied import arguments, open_record, options, put, read
from .verdicts import CASES, Case, trained

SEEDS = (960,)
KINDS = ("uniform", "next class", "similar image")
RATES = (0.1, 0.4)
EPOCHS = (3, 12, 40)
STRUCTURES = ("ekfac", "core:size=512")


def wrong_labels(inputs: Tensor, true: Tensor, kind: str, rate: float, draw: torch.Generator) -> Tensor:
    """(n,) labels, of which about this share is wrong."""
    n, chance = len(true), torch.rand(len(true), generator=draw)
    if kind == "uniform":
        return torch.where(chance < rate, torch.randint(10, (n,), generator=draw), true)
    if kind == "next class":
        return torch.where(chance < 0.9 * rate, (true + 1) % 10, true)
    unit = F.normalize(inputs.flatten(1), dim=1)
    alike, same = (unit @ unit.T).fill_diagonal_(-2.0), true.unsqueeze(1) == true
    others = alike.masked_fill(same, -2.0)
    unusual = (others.amax(1) - alike.masked_fill(~same, -2.0).amax(1)).argsort().argsort() / n
    return torch.where(chance < 2.0 * rate * unusual, true[others.argmax(1)], true)


def run(case: Case, split: Split, kind: str, rate: float, seed: int, structures: list[str]) -> list[dict[str, Any]]:
    """One network, and each structure's judgement of its labels."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(split.labels), generator=draw)[: case.n]
    inputs, true = split.inputs[chosen], split.labels[chosen]
    said = wrong_labels(inputs, true, kind, rate, draw)
    nobody = said[:0]
    network = trained(case, Task(inputs, one_hot(said, 10), inputs[:0], nobody, nobody, -1, None), seed, "cpu")
    rows = []
    for structure in structures:
        given = options(structure)
        tracer = whence.fit(network, batches(inputs, said, 500), likelihood="categorical", progress=False, **given)
        change = change_without(tracer)
        own, without = (tracer.problem.log_residuals_after(one)[0] for one in (torch.zeros_like(change), change))
        order = label_suspicion(tracer).order.argsort().double()
        scores = {"loss": own, "without the example": without, "suspect rank": -order}
        areas = {name: auroc(score, said != true) for name, score in scores.items()}
        learned = 1.0 - float(own.exp().mean() / without.exp().mean())
        rows.append(
            {"structure": structure, "wrong": float((said != true).double().mean()), "learned": learned, **areas}
        )
    return rows


def main() -> None:
    """Every data set, kind of wrong labels, share, and length of training."""
    parser = arguments(__doc__, ("digits", "mnist"), "by_heart", SEEDS)
    given: argparse.Namespace = parser.parse_args()
    record = open_record(given.out, given.append)
    for name in given.cases:
        split = read(name, given.data)
        for seed in given.seeds:
            for kind in KINDS:
                for rate in RATES:
                    for epochs in [given.epochs] if given.epochs else EPOCHS:
                        case = replace(CASES[name], epochs=epochs, n=given.n or 1200)
                        about = {"case": name, "seed": seed, "kind": kind, "rate": rate, "epochs": epochs}
                        for row in run(case, split, kind, rate, seed, given.structures or list(STRUCTURES)):
                            put(record, {**about, **row}, (*about, "structure"))
                            say(about, {key: round(one, 4) for key, one in row.items() if key != "structure"})
                        save(given.out, record)


if __name__ == "__main__":
    main()
