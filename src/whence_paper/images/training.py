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

from whence_paper import replayed


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
    cuda, captured = inputs.is_cuda, recipe.schedule == "constant" and replayed.can_capture(inputs)
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

    step = replayed.Captured(plain, recipe.batch) if captured else plain
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
