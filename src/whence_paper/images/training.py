"""Training by squared error as in the paper's appendix; what it leaves open is an option."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        epochs: passes over the data.
        optimiser: "adam" adds the penalty of its weight decay to the loss, as the paper says; "adamw" keeps it apart.
        rate: learning rate.
        weight_decay: of the optimiser.
        batch: examples a step.
        schedule: "constant", which the paper's silence suggests, or "cosine" to zero.
    """

    epochs: int = 20
    optimiser: Literal["adam", "adamw"] = "adam"
    rate: float = 1e-3
    weight_decay: float = 1e-2
    batch: int = 128
    schedule: Literal["constant", "cosine"] = "constant"

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def can_capture(inputs: Tensor) -> bool:
    """Whether steps of training are recorded once and replayed: on a GPU they are too small to be started singly."""
    return inputs.is_cuda


class Captured:
    """A step of training as a CUDA graph: the first few are taken as they come, then one is recorded and replayed.

    Attributes:
        step: takes the places of a batch's examples, (b,); asks nothing back from the GPU.
        batch: examples in a full batch; another number of them is never replayed.
    """

    def __init__(self, step: Callable[[Tensor], None], batch: int, first: int = 5) -> None:
        self.step, self.batch, self._first = step, batch, first
        self._graph: torch.cuda.CUDAGraph | None = None
        self._chosen: Tensor | None = None

    def __call__(self, chosen: Tensor) -> None:
        """Take a step."""
        if len(chosen) != self.batch:
            self.step(chosen)
        elif self._first > 0:
            self._first -= 1
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self.step(chosen)
            torch.cuda.current_stream().wait_stream(aside)
        else:
            self._replay(chosen)

    def _replay(self, chosen: Tensor) -> None:
        if self._chosen is None:
            self._chosen = chosen.clone()
        self._chosen.copy_(chosen)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.step(self._chosen)
        self._graph.replay()


def train(network: nn.Module, inputs: Tensor, targets: Tensor, recipe: Recipe, seed: int) -> nn.Module:
    """Minimise the mean squared error over all outputs; the network is changed, and in evaluation mode after.

    Args:
        network: on the device of the data.
        inputs: (n, ...).
        targets: (n, k).
        recipe: how.
        seed: of the order of examples.
    """
    kind = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
    cuda, captured = inputs.is_cuda, recipe.schedule == "constant" and can_capture(inputs)
    optimiser = kind(
        network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay, fused=cuda, capturable=captured
    )
    steps = recipe.epochs * -(-len(inputs) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps) if recipe.schedule == "cosine" else None
    draw = torch.Generator().manual_seed(seed)

    def plain(chosen: Tensor) -> None:
        optimiser.zero_grad(set_to_none=True)
        F.mse_loss(network(inputs[chosen]), targets[chosen]).backward()
        optimiser.step()

    step = Captured(plain, recipe.batch) if captured else plain
    network.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")  # the first steps are not captured
        for _ in range(recipe.epochs):
            for chosen in torch.randperm(len(inputs), generator=draw).to(inputs.device).split(recipe.batch):
                step(chosen)
                if schedule is not None:
                    schedule.step()
    network.zero_grad(set_to_none=True)
    return network.eval()


def initialised(make: Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    """A network with first weights that follow from the seed."""
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator: leave it as it was
        torch.manual_seed(seed)
        network = make()
    return network.to(device)


def retrain(network: nn.Module, inputs: Tensor, targets: Tensor, recipe: Recipe, seed: int) -> nn.Module:
    """A copy of a network, trained further."""
    return train(copy.deepcopy(network), inputs, targets, recipe, seed)


@torch.no_grad()
def outputs(network: nn.Module, inputs: Tensor, batch: int = 1000) -> Tensor:
    """(m, k) on the CPU."""
    return torch.cat([network(some) for some in inputs.split(batch)]).cpu()
