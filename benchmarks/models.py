"""The four networks of the cost benchmark, with sizes of data and batches to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from whence import one_hot

from . import networks
from .data import read_cifar, read_digits, read_housing
from .training import train


@dataclass(frozen=True)
class Model:
    """A network with the shape and number of its inputs.

    Attributes:
        source: the data set it is trained on, where one is at hand.
        sweep: batch sizes to try.
        points: batch sizes to try for predictions of peers, whose cost grows with the square of the batch.
        few: training examples and test points of a small run, and of peers that do not end with all.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int
    source: str
    n: int
    test: int
    sweep: tuple[int, ...]
    points: tuple[int, ...]
    few: tuple[int, int]

    def prepare(self, folder: Path | None, n: int, test: int, path: Path) -> None:
        """Save a network and its data: trained for two epochs on real data, or all at random without them.

        Random inputs are full of directions that all matter, which real ones are not, and so the worst case for
        structures that leave small directions out.
        """
        torch.manual_seed(0)
        network = self.make()
        if folder is None:
            draw = torch.Generator().manual_seed(1)
            inputs = torch.randn(n + test, *self.shape, generator=draw)
            targets, tests = torch.randn(n, self.outputs, generator=draw), inputs[n:]
            inputs = inputs[:n]
        else:
            inputs, targets, tests = self._read(folder, n, test)
            train(network, inputs, targets, epochs=2)
        torch.save({"weights": network.state_dict(), "data": (inputs, targets, tests)}, path)

    def load(self, path: Path) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
        """The network in evaluation mode, training inputs, targets, and test inputs."""
        saved = torch.load(path, weights_only=True)
        network = self.make()
        network.load_state_dict(saved["weights"])
        return network.eval(), *saved["data"]

    def _read(self, folder: Path, n: int, test: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.source == "housing":
            inputs, targets = read_housing(folder)
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
            inputs, targets = inputs[order], targets[order]
            return inputs[:n].clone(), targets[:n].clone(), inputs[n : n + test].clone()
        split = read_cifar(folder, 1) if self.source == "cifar" else read_digits(folder, self.source)
        return split.inputs[:n].clone(), one_hot(split.labels[:n], 10), split.test_inputs[:test].clone()


MODELS = {
    "M1": Model(
        partial(networks.mlp, 784, 1024, 1024, 10),
        (1, 28, 28),
        10,
        "mnist",
        10_000,
        2000,
        (250, 1000, 2500),
        (1, 4, 10),
        (250, 10),
    ),
    "M2": Model(
        partial(networks.cnn, 10),
        (1, 28, 28),
        10,
        "fashion-mnist",
        2000,
        500,
        (50, 125, 250, 500),
        (5, 20),
        (100, 20),
    ),
    "M3": Model(
        partial(networks.ViT, 32, 4, 3, 10), (3, 32, 32), 10, "cifar", 1000, 200, (25, 50, 100), (5, 20), (50, 20)
    ),
    "M4": Model(networks.tabular, (8,), 1, "housing", 16_000, 2000, (500, 2000, 16_000), (10, 50, 200), (16_000, 2000)),
}
