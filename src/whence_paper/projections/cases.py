"""Bank marketing, MNIST, Fashion-MNIST and CIFAR-10, with the paper's networks for them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence import one_hot
from whence_paper import networks
from whence_paper.cifar import training as of_cifar
from whence_paper.cifar.cases import Architecture, trained
from whence_paper.data import Images, read_images
from whence_paper.experiment import Settings
from whence_paper.images.cases import FITS, fashion, mnist
from whence_paper.images.training import Recipe, initialised, train
from whence_paper.tabular.problems import bank, of_bank

from .embedding import Embedded, embed

CASES = ("bank", "mnist", "fashion-mnist", "cifar-10")
CLASSES = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases, how they are fitted, and how many points are shown."""
    add = parser.add_argument
    add(
        "--cases", nargs="+", choices=CASES, help="default all; quick: bank and mnist, on invented customers and digits"
    )
    add("--fit", choices=sorted(FITS), default="ekfac", help="default ekfac")
    add("--fit-size", type=int, default=10_000, help="training points, drawn at random, that estimators are fitted on")
    add("--points", type=int, help="training points, and as many test points, that are shown (default 2000; quick 300)")
    add("--epochs", type=int, help="passes over the training set (default the paper's; 15 for CIFAR-10)")
    add("--size", type=int, help="training images (default all)")
    add("--optimiser", choices=("adam", "adamw"), default="adam", help="of MNIST and Fashion-MNIST (default adam)")
    add("--width", type=int, default=64, help="channels of the ResNet-18's first layers (default 64)")
    add("--ridge-share", type=float, default=0.01, help="lambda as a share of n (default 0.01)")


def wanted(settings: Settings) -> tuple[str, ...]:
    """Cases asked for."""
    return tuple(settings.cases or (("bank", "mnist") if settings.quick else CASES))


def configuration(name: str, settings: Settings, seed: int) -> dict[str, Any]:
    """What decides an embedding."""
    return {
        "case": name,
        "seed": seed,
        "data": "invented" if settings.quick and settings.data is None else "real",
        "fit": settings.fit,
        "fit size": settings.fit_size,
        "ridge share": settings.ridge_share,
        "points": points(settings),
        "epochs": settings.epochs or "usual",
        "size": settings.size or "all",
        **({"width": settings.width} if name == "cifar-10" else {}),
        **({"optimiser": settings.optimiser} if name in ("mnist", "fashion-mnist") else {}),
    }


def points(settings: Settings) -> int:
    """How many of each set are shown."""
    return settings.points or (300 if settings.quick else 2000)


def embedded(name: str, settings: Settings, seed: int) -> Embedded:
    """Train, fit and embed; from the disk where that was done before."""
    words = "-".join(f"{value}" for value in configuration(name, settings, seed).values())
    path = settings.out / "embeddings" / f"{words}.npz"
    if not path.exists():
        made = _bank(settings, seed) if name == "bank" else _images(name, settings, seed)
        made.save(path)
    return Embedded.load(path)


def _bank(settings: Settings, seed: int) -> Embedded:
    problem = of_bank(bank(settings), seed)
    epochs = settings.epochs or (40 if settings.quick else 50)
    recipe = Recipe(epochs, "adamw", 1e-2 if settings.quick else 1e-3)
    network = initialised(lambda: networks.tabular(problem.inputs.shape[1]), seed, torch.device("cpu"))
    train(network, problem.inputs, problem.targets, recipe, seed)
    sides = [(problem.inputs, problem.targets), (problem.test_inputs, problem.test_targets)]
    classes = [(inputs, (targets > 0).long().squeeze(1)) for inputs, targets in sides]
    return _look(network, sides[0], classes[0], classes[1], settings, seed)


def _images(name: str, settings: Settings, seed: int) -> Embedded:
    quick = settings.quick and settings.data is None
    source = "digits" if quick else name
    images = read_images(source, settings.data).to(settings.device)  # type: ignore[arg-type]  # one of the choices
    chosen = _some(len(images.labels), settings.size or len(images.labels), 0)
    images = replace(images, inputs=images.inputs[chosen], labels=images.labels[chosen])
    network = _trained(name, images, settings, seed)
    seen, tests = (images.inputs, images.labels), (images.test_inputs, images.test_labels)
    return _look(network, (seen[0], one_hot(seen[1], CLASSES)), seen, tests, settings, seed)


def _trained(name: str, images: Images, settings: Settings, seed: int) -> nn.Module:
    """The network of Table 3 or of the grids, where that is on the disk."""
    quick = settings.quick and settings.data is None
    if name == "cifar-10":
        width = 4 if quick else settings.width
        words = "ResNet-18" + ("" if width == 64 else f", width {width}")
        recipe = of_cifar.Recipe(settings.epochs or (25 if quick else 15), shift=1 if quick else 4, mirror=not quick)
        one = Architecture("resnet", words, lambda colours: networks.resnet18(CLASSES, width, colours), recipe)
        size = settings.size or ("quick" if quick else "all")
        about = {"architecture": one.name, "network": words, "size": size, **recipe.as_dict(), "seed": seed}
        return trained(about, one, images, settings)[0]
    case = mnist(quick) if name == "mnist" else fashion(quick, "max")
    usual = replace(case.recipe, epochs=settings.epochs or case.recipe.epochs, optimiser=settings.optimiser)
    return replace(case, recipe=usual, size=settings.size).plain(images, settings, seed)


def _look(
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    train_points: tuple[Tensor, Tensor],
    test_points: tuple[Tensor, Tensor],
    settings: Settings,
    seed: int,
) -> Embedded:
    """Fit on some of the data, and embed some points of each set."""
    chosen = _some(len(data[0]), settings.fit_size, seed)
    loader = list(zip(data[0][chosen].split(500), data[1][chosen].split(500), strict=True))
    ridge = settings.ridge_share * len(chosen)
    tracer = whence.fit(network, loader, ridge=ridge, progress=False, **FITS[settings.fit])
    shown = [_some(len(part[0]), points(settings), seed + 1) for part in (train_points, test_points)]
    parts = [(part[0][few], part[1][few]) for part, few in zip((train_points, test_points), shown, strict=True)]
    return embed(network, tracer, parts[0], parts[1])


def _some(n: int, most: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:most].sort().values
