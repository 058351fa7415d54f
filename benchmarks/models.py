"""The four networks of the cost benchmark, with sizes of data and batches to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from . import networks


@dataclass(frozen=True)
class Model:
    """A network with the shape and number of its inputs. Weights and data are random: only time is measured.

    Attributes:
        sweep: batch sizes to try.
        points: batch sizes to try for predictions of peers, whose cost grows with the square of the batch.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int
    n: int
    test: int
    sweep: tuple[int, ...]
    points: tuple[int, ...]

    def network(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        return self.make().eval()

    def data(self, n: int, test: int) -> tuple[Tensor, Tensor, Tensor]:
        """Training inputs, targets, and test inputs."""
        draw = torch.Generator().manual_seed(1)
        inputs = torch.randn(n + test, *self.shape, generator=draw)
        return inputs[:n], torch.randn(n, self.outputs, generator=draw), inputs[n:]


MODELS = {
    "M1": Model(
        partial(networks.mlp, 784, 1024, 1024, 10), (1, 28, 28), 10, 10_000, 2000, (250, 1000, 2500), (1, 4, 10)
    ),
    "M2": Model(partial(networks.cnn, 10), (1, 28, 28), 10, 2000, 500, (50, 125, 250, 500), (5, 20)),
    "M3": Model(partial(networks.ViT, 32, 4, 3, 10), (3, 32, 32), 10, 1000, 200, (25, 50, 100), (5, 20)),
    "M4": Model(networks.tabular, (8,), 1, 16_000, 2000, (500, 2000, 16_000), (10, 50, 200)),
}
