"""The paper's network for tables, how it is trained, and what `whence` says about its predictions."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence_paper import networks
from whence_paper.experiment import Settings
from whence_paper.images.training import Recipe, initialised, train
from whence_paper.records import Run

from .problems import Problem

STRUCTURES = {
    "exact": whence.Exact(),
    "core": whence.Core(),
    "core-1024": whence.Core(size=1024),
    "ekfac": whence.EKFAC(),
}


def add_options(parser: argparse.ArgumentParser, epochs: int, structure: str) -> None:
    """Hyperparameters: the paper's, and where it is silent those of its other experiments."""
    add = parser.add_argument
    add("--epochs", type=int, help=f"passes over the training set (default {epochs}, the paper's; quick 40)")
    add("--width", type=int, default=100, help="hidden units (default 100, the paper's)")
    add(
        "--optimiser",
        choices=("adam", "adamw"),
        default="adamw",
        help="default adamw: weight decay apart from the loss",
    )
    add("--rate", type=float, default=1e-3, help="learning rate (default 0.001; the paper says none for tables)")
    add("--weight-decay", type=float, default=1e-2, help="default 0.01; the paper says none for tables")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="of the rate (default constant)")
    add("--structure", choices=sorted(STRUCTURES), default=structure, help=f"default {structure}")
    add("--ridge-share", type=float, default=0.01, help="lambda as a share of n (default 0.01)")
    add("--share", type=float, default=0.1, help="of the test points that count as uncertain (default 0.1)")
    add("--size", type=int, help="rows of the data, drawn at random (default all)")
    parser.set_defaults(usual_epochs=epochs)


def recipe_of(settings: Settings) -> Recipe:
    """How the network is trained."""
    epochs = settings.epochs or (40 if settings.quick else settings.usual_epochs)
    rate = 1e-2 if settings.quick and settings.rate == 1e-3 else settings.rate
    return Recipe(epochs, settings.optimiser, rate, settings.weight_decay, schedule=settings.schedule)


def configuration(settings: Settings, seed: int) -> dict[str, Any]:
    """All that decides a run."""
    return {
        "seed": seed,
        "data": "invented" if settings.quick and settings.data is None else "real",
        "size": settings.size or "all",
        "width": settings.width,
        "structure": settings.structure,
        "ridge share": settings.ridge_share,
        "share": settings.share,
        **recipe_of(settings).as_dict(),
    }


def by_setting(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed only, under words that tell the settings apart."""
    told = ("optimiser", "weight_decay", "schedule", "structure", "ridge share", "size")
    found: dict[str, list[Run]] = {}
    for run in runs:
        what = run.configuration
        words = ", ".join(f"{name.replace('_', ' ')} {what[name]}" for name in told)
        words += ", logarithms of incomes" if what.get("income") == "log" else ""
        found.setdefault(words, []).append(run)
    return found


def trained(problem: Problem, settings: Settings, seed: int) -> nn.Module:
    """One hidden layer with LayerNorm and ReLU, trained by squared error."""
    network = initialised(lambda: networks.tabular(problem.inputs.shape[1], settings.width), seed, torch.device("cpu"))
    return train(network, problem.inputs, problem.targets, recipe_of(settings), seed)


def fitted(network: nn.Module, problem: Problem, settings: Settings) -> whence.Tracer:
    """The estimators."""
    ridge = settings.ridge_share * len(problem.inputs)
    structure = STRUCTURES[settings.structure]
    return whence.fit(network, problem.batches(), structure=structure, ridge=ridge, progress=False)


KINDS = ("neither", "HeC3-uncertain", "Ho-uncertain")


def kinds_of(found: whence.Uncertainty, share: float) -> Tensor:
    """(m,) 1 and 2 where a prediction is among the most uncertain and HeC3 or Ho ranks it higher, else 0.

    Examples:
        >>> import torch, whence
        >>> ho, hec3 = torch.tensor([[1.0], [2.0], [9.0], [3.0]]), torch.tensor([[1.0], [9.0], [3.0], [2.0]])
        >>> kinds_of(whence.Uncertainty(torch.zeros(4, 1), {}, {"ho": ho, "hec3": hec3}), 0.25)
        tensor([0, 1, 2, 0])
    """
    ho, hec3 = (found.trace(name).argsort(stable=True).argsort() for name in ("ho", "hec3"))
    uncertain = torch.maximum(ho, hec3) >= len(found) - max(round(share * len(found)), 1)
    return torch.where(uncertain, torch.where(hec3 > ho, 1, 2), 0)


def neighbours(places: Tensor, among: Tensor, count: int = 20, batch: int = 500) -> tuple[Tensor, Tensor]:
    """Distances (m, count) to the nearest of some places, and which these are.

    Examples:
        >>> import torch
        >>> near, which = neighbours(torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0], [-2.0]]), count=2)
        >>> near.tolist(), which.tolist()
        ([[1.0, 2.0]], [[1, 2]])
    """
    parts = [torch.cdist(some, among).topk(count, 1, largest=False) for some in places.split(batch)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
