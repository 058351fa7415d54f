"""Data sets with the networks that learn them, and ways to fit: what the experiments on images share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence import one_hot
from whence_paper import networks
from whence_paper.data import Images, read_images
from whence_paper.data.images import Name
from whence_paper.experiment import Settings

from .tasks import CLASSES, OUTPUTS, Task
from .training import Recipe, initialised, train

GPU_MEMORY = 40e9
POOLINGS = ("max", "mean", "stride", "none")


def conv_net(outputs: int, channels: tuple[int, ...], pooling: str) -> nn.Sequential:
    """3 x 3 convolutions with ReLU, then a linear layer. How sizes fall between, the paper does not say.

    Args:
        outputs: of the network.
        channels: of the convolutions.
        pooling: "max" and "mean" over 2 x 2 pixels after all but the last convolution, "stride" in all but the first;
            "none" leaves sizes as they are. A mean over the picture comes before the linear layer in each.
    """
    layers: list[nn.Module] = []
    below, last = 1, len(channels) - 1
    for place, above in enumerate(channels):
        stride = 2 if pooling == "stride" and place > 0 else 1
        layers += [nn.Conv2d(below, above, 3, stride, 1), nn.ReLU()]
        if place < last and pooling in ("max", "mean"):
            layers.append(nn.MaxPool2d(2) if pooling == "max" else nn.AvgPool2d(2))
        below = above
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(below, outputs))


@dataclass(frozen=True)
class Case:
    """A data set, the network that learns it, and how it is trained.

    Attributes:
        name: as the paper's tables call it in lower case.
        source: of the images.
        describe: the network in words.
        make: the untrained network, from the number of outputs.
        recipe: how it is trained.
        size: training examples before a class is taken out; `None` for all.
        tested: how many of the test images, the first ones; `None` for all.
    """

    name: str
    source: Name
    describe: str
    make: Callable[[int], nn.Module]
    recipe: Recipe
    size: int | None = None
    tested: int | None = None

    def read(self, settings: Settings) -> Images:
        """The images, on the device."""
        found = read_images(self.source, settings.data)
        tests = slice(self.tested)
        found = replace(found, test_inputs=found.test_inputs[tests], test_labels=found.test_labels[tests])
        return found.to(settings.device)

    def task(self, images: Images, seed: int, noise: float = 1.0) -> Task:
        """One draw of noisy and missing classes."""
        return Task(images, seed, self.size, noise)

    def configuration(self) -> dict[str, Any]:
        """What decides a trained network, beside its task and seed."""
        size = self.size or "all"
        return {"case": self.name, "data": self.source, "network": self.describe, "size": size, **self.recipe.as_dict()}

    def judged(self) -> dict[str, Any]:
        """The same with what else decides numbers: how many images are tested."""
        return {**self.configuration(), **({"tested": self.tested} if self.tested else {})}

    def trained(self, task: Task, settings: Settings) -> nn.Module:
        """A network trained on a task; kept beside the record, so that other experiments need not train it again."""
        return self._kept(f"noise{task.noise:g}", OUTPUTS, task.training, settings, task.seed)

    def plain(self, images: Images, settings: Settings, seed: int) -> nn.Module:
        """A network trained on all ten classes as they are; kept likewise."""
        return self._kept("plain", CLASSES, lambda: (images.inputs, one_hot(images.labels, CLASSES)), settings, seed)

    def _kept(
        self, kind: str, outputs: int, data: Callable[[], tuple[Tensor, Tensor]], settings: Settings, seed: int
    ) -> nn.Module:
        """From the disk, or trained and put there."""
        recipe = self.recipe
        words = f"{self.describe}-{recipe.optimiser}-{recipe.schedule}-e{recipe.epochs}-n{self.size}-{kind}"
        file = f"{self.name}-{words}-{seed}.pt".replace(" ", "-").replace(",", "")
        path = settings.out / "networks" / file
        network = initialised(lambda: self.make(outputs), seed, settings.device)
        if path.exists():
            network.load_state_dict(torch.load(path, weights_only=True, map_location=settings.device))
            return network.eval()
        train(network, *data(), recipe, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(f".{os.getpid()}.part")
        torch.save(network.state_dict(), partly)
        partly.replace(path)
        return network


def mnist(quick: bool) -> Case:
    """The paper's MLP: two hidden layers of 1,024; quick, one of 64 on 8 x 8 digits."""
    if quick:
        recipe = Recipe(epochs=50, optimiser="adamw", rate=3e-3)
        return Case("mnist", "digits", "MLP 64-64", lambda k: networks.mlp(64, 64, k), recipe)
    return Case("mnist", "mnist", "MLP 784-1024-1024", lambda k: networks.mlp(784, 1024, 1024, k), Recipe())


def fashion(quick: bool, pooling: str, channels: Sequence[int] | None = None) -> Case:
    """The paper's CNN of 32, 64, 128, 256 channels; quick, of 8 and 16 on 8 x 8 digits."""
    sizes = tuple(channels or ((8, 16) if quick else (32, 64, 128, 256)))
    recipe = Recipe(epochs=30, optimiser="adamw", rate=3e-3, batch=64) if quick else Recipe()
    return Case(
        "fashion-mnist",
        "digits" if quick else "fashion-mnist",
        f"CNN {'-'.join(map(str, sizes))} {pooling}",
        lambda k: conv_net(k, sizes, pooling),
        recipe,
    )


FITS: dict[str, dict[str, Any]] = {
    "ekfac": {"structure": whence.EKFAC()},
    "two-bases": {"structure": whence.EKFAC(meat="two_bases")},
    "two-bases-whole": {"structure": whence.EKFAC(meat="two_bases", basis="gradients")},
    "core": {"structure": whence.Core(size=1024)},
    "paper": {"structure": whence.EKFAC(meat="two_bases", corner=None), "leverage": "clip", "loo": "output"},
    "exact": {"structure": whence.Exact()},
}
"""Ways to fit, by name. "two-bases-whole" decomposes convolutions by gradients summed over positions, the others by
positions one by one; for an MLP that is the same. "paper" is its letter: two full bases, leverages clipped, outputs
left out one by one.
"""


def fitted(network: nn.Module, data: tuple[Tensor, Tensor], how: str, share: float, batch: int = 1000) -> whence.Tracer:
    """Fit with one of `FITS`, lambda being a share of the number of examples.

    On a large GPU it leaves room for others, so that two or three experiments can run side by side.
    """
    inputs, targets = data
    loader = list(zip(inputs.split(batch), targets.split(batch), strict=True))
    limit = GPU_MEMORY if inputs.is_cuda else None
    return whence.fit(
        network,
        loader,
        ridge=share * len(inputs),
        progress=False,
        execution=whence.Execution(max_memory=limit),
        **FITS[how],
    )


def some_of(data: tuple[Tensor, Tensor], size: int | None) -> tuple[Tensor, Tensor]:
    """A random part of a training set, always the same; all of it without a size."""
    if size is None:
        return data
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(data[0]), generator=draw)[:size].to(data[0].device)
    return data[0][chosen], data[1][chosen]


def answers(tracer: whence.Tracer, inputs: Tensor, batch: int = 1000) -> dict[str, Tensor]:
    """(m, ...) on the CPU: the outputs, and of each prediction Ho, HeC3, their ratio, Laplace and the margin."""
    found = tracer.predict(list(inputs.split(batch)))
    top = found.mean.topk(2, 1).values if found.mean.shape[1] > 1 else None
    scores = {
        "Ho": found.trace("ho"),
        "HeC3": found.trace("hec3"),
        "HeC3/Ho": found.ratio,
        "Laplace": found.trace("laplace"),
        "margin": -(top[:, 0] - top[:, 1]) if top is not None else -found.mean[:, 0].abs(),
    }
    return {"outputs": found.mean.cpu(), **{name: value.cpu() for name, value in scores.items()}}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of all experiments on these tasks."""
    add = parser.add_argument
    add("--cases", nargs="+", choices=("mnist", "fashion-mnist"), default=["mnist", "fashion-mnist"])
    add("--optimiser", choices=("adam", "adamw"), help="default adam, its decay in the loss; quick, adamw")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="of the rate (default constant)")
    add("--epochs", type=int, help="passes over the training set (default 20)")
    add("--size", type=int, help="training images before a class is taken out (default all)")
    add("--tested", type=int, help="test images, the first ones (default all)")
    add("--pooling", choices=POOLINGS, default="max", help="between the CNN's convolutions (default max)")
    add("--channels", type=int, nargs="+", help="of the CNN's convolutions (default 32 64 128 256)")
    add("--ridge-share", type=float, default=0.01, help="lambda as a share of n (default 0.01, the weight decay)")


def cases(settings: Settings) -> list[Case]:
    """Those asked for."""
    second = fashion(settings.quick, settings.pooling, settings.channels)
    made = {"mnist": mnist(settings.quick), "fashion-mnist": second}
    found = []
    for name in settings.cases:
        case = made[name]
        recipe = replace(case.recipe, optimiser=settings.optimiser or case.recipe.optimiser, schedule=settings.schedule)
        recipe = replace(recipe, epochs=settings.epochs or recipe.epochs)
        found.append(replace(case, recipe=recipe, size=settings.size or case.size, tested=settings.tested))
    return found
