"""Fast training of image classifiers: data stay on the device, images are shifted and mirrored there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence import one_hot

Loss = Literal["squared error", "cross-entropy"]


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained.

    The paper has Adam, rate 1e-3, weight decay 1e-2, batches of 128, 50 epochs for the ResNet and 100 for the ViT. This
    one takes a fraction of the time; `--paper-recipe` is the paper's.

    Attributes:
        epochs: passes over the data.
        rate: largest learning rate; it rises in the first quarter of the steps and falls to zero, unless `constant`.
        weight_decay: of AdamW, apart from the loss.
        batch: images a step.
        shift: pixels by which images are moved at random; half of them are mirrored if `mirror`.
        mirror: see there.
        constant: keep the rate.
        loss: "squared error" to +1 and -1, or "cross-entropy".
    """

    epochs: int
    rate: float = 2e-3
    weight_decay: float = 1e-2
    batch: int = 512
    shift: int = 4
    mirror: bool = True
    constant: bool = False
    loss: Loss = "squared error"

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


@contextmanager
def fast_products(on: bool) -> Iterator[None]:
    """Let products and convolutions in float32 be rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


def augmented(padded: Tensor, chosen: Tensor, side: int, mirror: bool, draw: torch.Generator) -> Tensor:
    """Some images, each cut out of its padded picture at a random place, and mirrored or not.

    Args:
        padded: (n, side + 2 shift, side + 2 shift, c): all images, colours last.
        chosen: (b,) which.
        side: of the result.
        mirror: half of them.
        draw: on the device of the images.

    Returns:
        (b, c, side, side), colours last in memory.
    """
    count, room = len(chosen), padded.shape[1] - side + 1
    device = padded.device
    top, left = torch.randint(room, (2, count, 1), generator=draw, device=device)
    steps = torch.arange(side, device=device)
    rows, columns = top + steps, left + steps  # (b, side)
    if mirror:
        flip = torch.rand((count, 1), generator=draw, device=device) < 0.5
        columns = torch.where(flip, columns.flip(1), columns)
    cut = padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]  # (b, side, side, c)
    return cut.permute(0, 3, 1, 2)


def train(network: nn.Module, inputs: Tensor, labels: Tensor, classes: int, recipe: Recipe, seed: int) -> nn.Module:
    """Train a network in place; in evaluation mode after.

    On a GPU the products are in bfloat16, and results differ from run to run in their last digits.
    """
    device, cuda = inputs.device, inputs.is_cuda
    draw = torch.Generator(device=device).manual_seed(seed)
    padded = F.pad(inputs, (recipe.shift,) * 4).permute(0, 2, 3, 1).contiguous()
    targets = one_hot(labels, classes)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from torch's annotations
    optimiser = torch.optim.AdamW(network.parameters(), recipe.rate, weight_decay=recipe.weight_decay, fused=cuda)
    steps = recipe.epochs * -(-len(inputs) // recipe.batch)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.rate, total_steps=steps, pct_start=0.25)
    network.train()
    with fast_products(cuda):
        for _ in range(recipe.epochs):
            for chosen in torch.randperm(len(inputs), generator=draw, device=device).split(recipe.batch):
                some = augmented(padded, chosen, inputs.shape[2], recipe.mirror, draw)
                with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                    found = network(some)
                if recipe.loss == "squared error":
                    value = F.mse_loss(found.float(), targets[chosen])
                else:
                    value = F.cross_entropy(found.float(), labels[chosen])
                optimiser.zero_grad(set_to_none=True)
                value.backward()
                optimiser.step()
                if not recipe.constant:
                    rates.step()
    network.zero_grad(set_to_none=True)
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing from torch's annotations
    return network.eval()


@torch.no_grad()
def outputs(network: nn.Module, inputs: Tensor, batch: int = 1000) -> Tensor:
    """(m, k), in float32, on the device."""
    return torch.cat([network(some) for some in inputs.split(batch)])
