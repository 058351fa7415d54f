"""Networks for CIFAR-10, how they are trained, and where they are kept."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whence import one_hot
from whence_paper import networks
from whence_paper.data import Images, read_images
from whence_paper.experiment import Settings

from .training import Loss, Recipe, train

CLASSES = 10
SMALL = Recipe(30, batch=128, shift=0, mirror=False)
QUICK_SIZE = 400


@dataclass(frozen=True)
class Architecture:
    """A kind of network.

    Attributes:
        name: as in the paper's table, in lower case.
        describe: in words.
        make: untrained, from the colours of the images.
        recipe: how it is trained.
    """

    name: str
    describe: str
    make: Callable[[int], nn.Module]
    recipe: Recipe


def architectures(settings: Settings) -> list[Architecture]:
    """Those asked for: of the paper's size, or tiny ones for 8 x 8 digits."""
    if settings.quick:
        recipe = Recipe(epochs=20, rate=5e-3, batch=50, shift=0, mirror=False)
        found = [
            Architecture(
                "resnet", "ResNet-18, width 4", lambda colours: networks.resnet18(CLASSES, 4, colours), recipe
            ),
            Architecture(
                "vit",
                "ViT, 2 blocks of width 32",
                lambda colours: networks.ViT(8, 2, colours, CLASSES, 32, 2, 2),
                replace(recipe, epochs=45, rate=4e-3),
            ),
        ]
    elif settings.small:
        found = [
            Architecture("resnet", "ResNet-18, width 16", lambda colour: networks.resnet18(CLASSES, 16, colour), SMALL),
            Architecture(
                "vit",
                "ViT, 3 blocks of width 64, patches of 8",
                lambda colours: networks.ViT(32, 8, colours, CLASSES, 64, 3, 4),
                SMALL,
            ),
        ]
    else:
        found = [
            Architecture("resnet", "ResNet-18", lambda colours: networks.resnet18(CLASSES, 64, colours), Recipe(15)),
            Architecture(
                "vit",
                "ViT, 6 blocks of width 192",
                lambda colours: networks.ViT(32, 4, colours, CLASSES, 192, 6, 3),
                Recipe(30, rate=1e-3, shift=0, mirror=False),
            ),
        ]
    if settings.paper_recipe:
        paper = Recipe(50, rate=1e-3, batch=128, shift=0, mirror=False, constant=True)
        found = [replace(one, recipe=replace(paper, epochs=50 if one.name == "resnet" else 100)) for one in found]
    if settings.augment:
        shift = 4 if settings.augment == "yes" else 0
        found = [replace(one, recipe=replace(one.recipe, shift=shift, mirror=shift > 0)) for one in found]
    if settings.epochs:
        found = [replace(one, recipe=replace(one.recipe, epochs=settings.epochs)) for one in found]
    return [one for one in found if one.name in settings.architectures]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What experiments on CIFAR-10 share."""
    add = parser.add_argument
    add("--architectures", nargs="+", choices=("resnet", "vit"), default=["resnet", "vit"])
    add("--epochs", type=int, help="passes over the training set (default 15 for the ResNet, 30 for the ViT)")
    add(
        "--paper-recipe", action="store_true", help="train as the paper says: longer, without moved and mirrored images"
    )
    add("--augment", choices=("yes", "no"), help="move and mirror images (default yes for the ResNet, no for the ViT)")
    add("--size", type=int, help="training images (default all 50,000)")
    add("--small", action="store_true", help="small networks, for a machine without a GPU")
    add("--tested", type=int, help="test images, the first ones (default all)")
    add("--fit-size", type=int, default=10_000, help="training images, drawn at random, that estimators are fitted on")
    add("--ridge-share", type=float, default=0.01, help="lambda as a share of n (default 0.01, the weight decay)")


def read(settings: Settings) -> Images:
    """CIFAR-10, or 8 x 8 digits where it is to be quick; on the device."""
    found = read_images("digits" if settings.quick else "cifar-10", settings.data)
    size = settings.size or (QUICK_SIZE if settings.quick else len(found.labels))
    tests = slice(settings.tested)
    found = replace(found, inputs=found.inputs[:size], labels=found.labels[:size])
    found = replace(found, test_inputs=found.test_inputs[tests], test_labels=found.test_labels[tests])
    return found.to(settings.device)


def configuration(one: Architecture, settings: Settings, seed: int, loss: Loss = "squared error") -> dict[str, Any]:
    """What decides a trained network."""
    return {
        "architecture": one.name,
        "network": one.describe,
        "size": settings.size or ("quick" if settings.quick else "all"),
        **replace(one.recipe, loss=loss).as_dict(),
        **({"tested": settings.tested} if settings.tested else {}),
        "seed": seed,
    }


def trained(wanted: dict[str, Any], one: Architecture, images: Images, settings: Settings) -> tuple[nn.Module, float]:
    """A trained network and the seconds it took; kept beside the record, so that fits need not train it again."""
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    path = settings.out / "networks" / f"{one.name}-{key}.pt"
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator: leave it as it was
        torch.manual_seed(wanted["seed"])
        network = one.make(images.inputs.shape[1]).to(settings.device)
    if path.exists():
        saved = torch.load(path, weights_only=True, map_location=settings.device)
        network.load_state_dict(saved["weights"])
        return network.eval(), saved["seconds"]
    fields = Recipe.__dataclass_fields__
    recipe = Recipe(**{name: value for name, value in wanted.items() if name in fields})
    began = time.perf_counter()
    train(network, images.inputs, images.labels, CLASSES, recipe, wanted["seed"])
    if images.inputs.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(f".{key}.part")
    torch.save({"weights": network.state_dict(), "seconds": seconds}, partly)
    partly.replace(path)
    return network, seconds


def fitting_data(images: Images, size: int, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the training examples that estimators are fitted on."""
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(images.labels), generator=draw)[:size].to(images.labels.device)
    labels = images.labels[chosen]
    return images.inputs[chosen], labels if loss == "cross-entropy" else one_hot(labels, CLASSES)
