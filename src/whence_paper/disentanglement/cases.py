"""The data sets, with the networks of the published comparison or smaller ones, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence_paper.baselines.base import Data
from whence_paper.captured import Adam, Plan, Trainer, constant, in_batches
from whence_paper.data import read_images
from whence_paper.networks import mlp

BATCH, RATE = 128, 1e-3
"""Of Adam, as published."""


@dataclass(frozen=True)
class Case:
    """A data set and its network.

    Attributes:
        data: name of the data set.
        n, test: how many training and test points are drawn.
        make: the network, from the number of its classes.
        describe: the network in words.
        epochs: passes over the training set, of every size.
        structure: of the fit.
        classes: how many.
    """

    data: str
    n: int
    test: int
    make: Callable[[int], nn.Module]
    describe: str
    epochs: int
    structure: str
    classes: int = 10


def convolutions(outputs: int, colours: int, side: int) -> nn.Sequential:
    """The published network for images: 32, 64 and 64 channels without padding, a hidden layer of 64."""
    left = ((side - 2) // 2 - 2) // 2 - 2
    return nn.Sequential(
        *(nn.Conv2d(colours, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * left * left, 64), nn.ReLU(), nn.Linear(64, outputs)),
    )


CASES: dict[str, Case] = {
    "wine": Case("wine", 142, 36, lambda k: mlp(13, 32, 32, k), "MLP 13-32-32", 100, "exact", classes=3),
    "fashion-mnist": Case("fashion-mnist", 2000, 500, lambda k: mlp(784, 64, 64, k), "MLP 784-64-64", 20, "ekfac"),
    "fashion-mnist, CNN": Case(
        "fashion-mnist", 10_000, 2000, lambda k: convolutions(k, 1, 28), "CNN 32-64-64, 64", 20, "ekfac"
    ),
    "cifar-10": Case("cifar-10", 10_000, 2000, lambda k: convolutions(k, 3, 32), "CNN 32-64-64, 64", 20, "ekfac"),
    "digits": Case("digits", 1437, 360, lambda k: mlp(64, 32, 32, k), "MLP 64-32-32", 50, "ekfac"),
    "cancer": Case("cancer", 455, 114, lambda k: mlp(30, 32, 32, k), "MLP 30-32-32", 100, "exact", classes=2),
}
DEVELOPMENT = ("digits", "cancer")
"""On these the measures were looked at while they were chosen."""


def drawn(case: Case, folder: Path | None, seed: int, device: torch.device) -> tuple[Data, Data]:
    """Training and test points, at random: of tables a split of all rows, of images parts of both sets."""
    draw = torch.Generator().manual_seed(seed)
    if case.data in ("fashion-mnist", "cifar-10"):
        images = read_images(case.data, folder)  # type: ignore[arg-type]
        sides = ((images.inputs, images.labels, case.n), (images.test_inputs, images.test_labels, case.test))
        chosen = [(x, y, torch.randperm(len(y), generator=draw)[:count]) for x, y, count in sides]
        train, test = (Data(x[index].to(device), y[index].to(device)) for x, y, index in chosen)
        return train, test
    inputs, labels = _table(case.data)
    order = torch.randperm(len(labels), generator=draw)
    index, rest = order[: case.n], order[case.n : case.n + case.test]
    dims = 0 if case.data != "digits" else (0, 1)  # pixels have a common scale
    mean, std = inputs[index].mean(dims), inputs[index].std(dims)
    inputs = ((inputs - mean) / std).to(device)
    labels = labels.to(device)
    return Data(inputs[index], labels[index]), Data(inputs[rest], labels[rest])


def _table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets  # an extra

    load = {"wine": datasets.load_wine, "digits": datasets.load_digits, "cancer": datasets.load_breast_cancer}[name]
    found = load()
    return torch.from_numpy(found.data).float(), torch.from_numpy(found.target).long()


def train(epochs: int, graphs: bool = True) -> Callable[[nn.Module, Data, torch.Generator], None]:
    """Adam without weight decay, by cross-entropy, as published; on a GPU captured steps, in the same order."""
    trainer = Trainer(Adam(), lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none"))

    def run(network: nn.Module, data: Data, draw: torch.Generator) -> None:
        if graphs and data.inputs.is_cuda:
            index, weight = in_batches(len(data), epochs, BATCH, draw)
            trainer(network, data.inputs, data.targets, Plan(index, weight, *constant(RATE, 0.9, len(index))))
            return
        network.to(data.inputs.device)
        optimiser = torch.optim.Adam(network.parameters(), lr=RATE, fused=data.inputs.is_cuda)
        for _ in range(epochs):
            for chosen in torch.randperm(len(data), generator=draw).to(data.inputs.device).split(BATCH):
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(network(data.inputs[chosen]), data.targets[chosen]).backward()
                optimiser.step()
        network.zero_grad(set_to_none=True)

    return run
