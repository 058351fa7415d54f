"""Quick training, good enough to measure on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over a batch."""
    return F.mse_loss(outputs, targets, reduction="sum")


def train(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    epochs: int,
    seed: int = 0,
    rate: float = 1e-3,
    weight_decay: float = 1e-2,
    batch: int = 128,
    flips: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
    decoupled: bool = True,
    constant: bool = False,
) -> nn.Module:
    """AdamW or Adam with a rate that falls to zero; data stay on the network's device. Ends in eval mode.

    Args:
        network: is changed.
        inputs: (n, ...).
        targets: (n, k).
        epochs: passes over the data.
        seed: of the order of examples.
        rate: the first learning rate.
        weight_decay: of the optimiser.
        batch: examples a step.
        flips: mirror half of the images and shift all by up to four pixels.
        loss: summed over a batch; its mean over the examples is minimised.
        decoupled: AdamW's weight decay, or a penalty on the loss as Adam has it.
        constant: keep the first rate.
    """
    draw = torch.Generator().manual_seed(seed)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimiser = kind(network.parameters(), lr=rate, weight_decay=weight_decay)
    steps = epochs * -(-len(inputs) // batch)
    schedule = None if constant else torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=draw).to(inputs.device).split(batch):
            some = augment(inputs[chosen], draw) if flips else inputs[chosen]
            optimiser.zero_grad(set_to_none=True)
            (loss(network(some), targets[chosen]) / len(chosen)).backward()
            optimiser.step()
            if schedule is not None:
                schedule.step()
    for parameter in network.parameters():
        parameter.grad = None
    return network.eval()


def augment(images: Tensor, draw: torch.Generator) -> Tensor:
    """Mirror a batch of images, or not, and shift it by up to four pixels."""
    if torch.rand((), generator=draw) < 0.5:
        images = images.flip(3)
    down, right = torch.randint(0, 9, (2,), generator=draw).tolist()
    side = images.shape[2]
    return F.pad(images, (4, 4, 4, 4))[:, :, down : down + side, right : right + side]


@torch.no_grad()
def accuracy(network: nn.Module, inputs: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """Share of the points whose largest output is the label's."""
    right = [network(x).argmax(1) == y for x, y in zip(inputs.split(batch), labels.split(batch), strict=True)]
    return float(torch.cat(right).float().mean())
