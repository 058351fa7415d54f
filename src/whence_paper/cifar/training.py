"""Fast training of image classifiers: data stay on the device, images are shifted and mirrored there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence import one_hot
from whence_paper import replayed

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


def augmented(padded: Tensor, chosen: Tensor, side: int, moves: Tensor) -> Tensor:
    """Some images, each cut out of its padded picture at its place, and mirrored or not.

    Args:
        padded: (n, side + 2 shift, side + 2 shift, c): all images, colours last.
        chosen: (b,) which.
        side: of the result.
        moves: (3, n) of all images: first row, first column, and whether they are mirrored.

    Returns:
        (b, c, side, side), colours last in memory.
    """
    top, left, flip = moves[:, chosen].unsqueeze(2)  # (b, 1) each
    steps = torch.arange(side, device=padded.device)
    rows, columns = top + steps, left + torch.where(flip > 0, steps.flip(0), steps)  # (b, side)
    cut = padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]  # (b, side, side, c)
    return cut.permute(0, 3, 1, 2)


def draw_moves(moves: Tensor, room: int, mirror: bool, draw: torch.Generator) -> None:
    """Fill (3, n) moves in place: one of `room` places a side, and half of the images mirrored if so asked."""
    moves[:2].random_(0, room, generator=draw)
    moves[2].random_(0, 2 if mirror else 1, generator=draw)


def train(network: nn.Module, inputs: Tensor, labels: Tensor, classes: int, recipe: Recipe, seed: int) -> nn.Module:
    """Train a network in place; in evaluation mode after.

    On a GPU the products are in bfloat16, and results differ from run to run in their last digits.
    """
    device, cuda, captured = inputs.device, inputs.is_cuda, replayed.can_capture(inputs)
    draw = torch.Generator(device=device).manual_seed(seed)
    padded = F.pad(inputs, (recipe.shift,) * 4).permute(0, 2, 3, 1).contiguous()
    moves = torch.zeros(3, len(inputs), dtype=torch.long, device=device)
    targets = one_hot(labels, classes)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from torch's annotations
    rate = torch.tensor(recipe.rate, device=device) if captured else recipe.rate
    decay = recipe.weight_decay
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=decay, fused=cuda, capturable=captured)

    def plain(chosen: Tensor) -> None:
        some = augmented(padded, chosen, inputs.shape[2], moves)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            found = network(some)
        if recipe.loss == "squared error":
            value = F.mse_loss(found.float(), targets[chosen])
        else:
            value = F.cross_entropy(found.float(), labels[chosen])
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        optimiser.step()

    step = replayed.Captured(plain, recipe.batch) if captured else plain
    steps, taken = recipe.epochs * -(-len(inputs) // recipe.batch), 0
    network.train()
    with fast_products(cuda), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")  # the first steps are not captured
        for _ in range(recipe.epochs):
            draw_moves(moves, 2 * recipe.shift + 1, recipe.mirror, draw)
            for chosen in torch.randperm(len(inputs), generator=draw, device=device).split(recipe.batch):
                if not recipe.constant:
                    replayed.set_rate(optimiser, replayed.one_cycle(taken, steps, recipe.rate))
                step(chosen)
                taken += 1
    network.zero_grad(set_to_none=True)
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing from torch's annotations
    return network.eval()


@torch.no_grad()
def outputs(network: nn.Module, inputs: Tensor, batch: int = 1000) -> Tensor:
    """(m, k), in float32, on the device."""
    return torch.cat([network(some) for some in inputs.split(batch)])
