"""Quick training, good enough to measure on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence_paper.captured import (
    Adam,
    Loss,
    Momentum,
    Plan,
    Trainer,
    constant,
    drawn_moves,
    in_a_stream,
    in_batches,
    one_cycle,
)

from .record import say

DESCENT = Trainer(Momentum(), lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none"), half=True)
"""Keeps the memory and the captured step of every kind of network that it trained."""
SHIFT = 4
"""Pixels that an image is shifted by at most."""
ENOUGH, LEAST = 1000, 0.4
"""A classifier of images that was trained for so many steps is right about this share of new ones, or it went wrong."""


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


def descend(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch: int,
    rate: float,
    momentum: float,
    seed: int,
) -> nn.Module:
    """Gradient descent with momentum at a constant rate, by cross-entropy; ends in eval mode.

    All networks of one kind share memory on a GPU, where steps are captured once and products are in half precision.

    Args:
        network: is changed.
        inputs: (n, ...).
        labels: (n,).
        epochs: passes over the data, in full batches.
        batch: examples a step.
        rate: the learning rate.
        momentum: of the running mean of gradients.
        seed: of the order of examples.
    """
    index, weight = in_a_stream(len(inputs), epochs, batch, torch.Generator().manual_seed(seed))
    network.train()
    DESCENT(network, inputs, labels, Plan(index, weight, *constant(rate, momentum, len(index))))
    return network.eval()


def losses_of(name: str) -> Loss:
    """(b,) losses to targets (b, k): of squared errors, or cross-entropies to labels (b,)."""
    if name == "cross-entropy":
        return lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")
    return lambda outputs, targets: (outputs - targets).square().sum(1)


def planned(
    n: int, *, epochs: int, batch: int, peak: float, draw: torch.Generator, norms: bool = False, shift: int = 0
) -> Plan:
    """A plan with a rate that rises and falls.

    Args:
        n: examples.
        epochs: passes over them.
        batch: examples a step.
        peak: the largest rate.
        draw: of the order, and of flips and shifts.
        norms: whether the network has batch norm, and needs full batches.
        shift: pixels that images are shifted by at most, each by itself; then half of them are mirrored, too.
    """
    index, weight = (in_a_stream if norms else in_batches)(n, epochs, batch, draw)
    moves = drawn_moves(index, shift, draw) if shift else None
    return Plan(index, weight, *one_cycle(peak, len(index)), moves)


def train_captured(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    loss: str,
    epochs: int,
    batch: int,
    peak: float,
    decay: float,
    seed: int,
    images: bool,
    graphs: bool = True,
) -> nn.Module:
    """AdamW with a rate that rises and falls, every step one launch on a GPU. Ends in eval mode.

    Args:
        network: is changed.
        inputs: (n, ...).
        targets: (n, k), or labels (n,) for cross-entropy.
        loss: "cross-entropy" or "squared error".
        epochs: passes over the data.
        batch: examples a step.
        peak: the largest rate.
        decay: of the weights.
        seed: of the order of examples, and of flips and shifts.
        images: natural ones: flipped and shifted each by itself, and learned in half precision on a GPU.
        graphs: whether steps are captured on a GPU.
    """
    norms = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    shift = SHIFT if images else 0
    draw = torch.Generator().manual_seed(seed)
    plan = planned(len(inputs), epochs=epochs, batch=batch, peak=peak, draw=draw, norms=norms or images, shift=shift)
    network.train()
    trainer = Trainer(Adam(decay), losses_of(loss), half=images, shift=shift, graphs=graphs)
    trainer(network, inputs, targets, plan)
    trainer.kinds.clear()  # gives its memory back
    return network.eval()


@torch.no_grad()
def fault(network: nn.Module, inputs: Tensor, answers: Tensor, steps: int) -> str | None:
    """What is wrong with a classifier of images after training, judged by new ones; nothing, if nothing is.

    Args:
        network: in evaluation mode.
        inputs: (m, ...) new images; there may be none.
        answers: (m,) their classes.
        steps: that it was trained for.
    """
    if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
        return "weights are not finite"
    some, wanted = inputs[:2000], answers[:2000].to(inputs.device)
    right = accuracy(network, some, wanted) if len(some) else 1.0
    return f"accuracy {right:.3f}, below {LEAST}" if steps >= ENOUGH and right < LEAST else None


def or_else(
    quick: Callable[[], nn.Module], plain: Callable[[], nn.Module], judge: Callable[[nn.Module], str | None]
) -> nn.Module:
    """A network by the quick way; by the plain one, which is said, if the quick one fails or its network is no good."""
    try:
        network = quick()
        wrong = judge(network)
    except RuntimeError as error:
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    if wrong is None:
        return network
    say(f"captured training went wrong ({wrong}); trained again by the plain loop")
    return plain()
