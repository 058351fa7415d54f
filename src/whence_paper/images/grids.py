"""Appendix, grids: the 100 test images of highest HeC3 and of highest Ho, and those on which they disagree most.

Ten classes, no noise added: MNIST (MLP), Fashion-MNIST (CNN) and CIFAR-10 (ResNet-18). Mistakes are framed in red.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whence import one_hot
from whence_paper.cifar import cases as cifar
from whence_paper.cifar import table3
from whence_paper.cifar.fits import Predicted
from whence_paper.cifar.scores import of_outputs
from whence_paper.data import Images, read_images
from whence_paper.data.images import Name
from whence_paper.experiment import Experiment, Settings
from whence_paper.pictures import RED, new_figure, save
from whence_paper.records import Configuration, Record, Run
from whence_paper.scores import auroc, ranks

from .cases import FITS, Case, answers, fashion, fitted, mnist
from .tasks import CLASSES
from .training import outputs as network_outputs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 100
GRIDS = {
    "HeC3": "highest HeC3",
    "Ho": "highest Ho",
    "HeC3 over Ho": "ranked higher by HeC3 than by Ho",
    "Ho over HeC3": "ranked higher by Ho than by HeC3",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Which data sets, and how to fit."""
    cifar.add_options(parser)
    parser.set_defaults(architectures=["resnet"])
    add = parser.add_argument
    add("--sets", nargs="+", choices=("mnist", "fashion-mnist", "cifar-10"), help="default all; quick, mnist's network")
    add("--fit", choices=sorted(FITS), default="ekfac", help="default ekfac")
    add("--optimiser", choices=("adam", "adamw"), help="of MNIST and Fashion-MNIST (default adam; quick, adamw)")
    add("--channels", type=int, nargs="+", help="of Fashion-MNIST's convolutions (default 32 64 128 256)")


def plain_case(name: str, settings: Settings) -> Case:
    """The case of Table 1 of that name."""
    case = mnist(settings.quick) if name == "mnist" else fashion(settings.quick, "max", settings.channels)
    usual = case.recipe
    recipe = replace(usual, optimiser=settings.optimiser or usual.optimiser, epochs=settings.epochs or usual.epochs)
    return replace(case, recipe=recipe, size=settings.size, tested=settings.tested)


def configuration(name: str, settings: Settings, seed: int) -> Configuration:
    """Of one run."""
    if name == "cifar-10":
        about = cifar.configuration(cifar.architectures(settings)[0], settings, seed)
    else:
        about = plain_case(name, settings).judged()
    more = {"set": name, "seed": seed, "fit": settings.fit, "ridge share": settings.ridge_share}
    return {**about, **more, "fit size": settings.fit_size}


def network_of(name: str, settings: Settings, seed: int) -> tuple[nn.Module, Images]:
    """A trained network with ten outputs, and its data."""
    if name == "cifar-10":
        one, images = cifar.architectures(settings)[0], cifar.read(settings)
        return cifar.trained(cifar.configuration(one, settings, seed), one, images, settings)[0], images
    case = plain_case(name, settings)
    images = case.read(settings)
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(images.labels), generator=draw)[: case.size].sort().values.to(images.labels.device)
    images = replace(images, inputs=images.inputs[chosen], labels=images.labels[chosen])
    return case.plain(images, settings, seed), images


def predictions(name: str, settings: Settings, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs and scores of the test images, and their labels; those that Table 3 has kept, if it has."""
    if name == "cifar-10" and settings.fit == "ekfac":
        about = cifar.configuration(cifar.architectures(settings)[0], settings, seed)
        way = {"way": "EKFAC, all layers", "ridge share": settings.ridge_share, "fit size": settings.fit_size}
        path = table3.arrays(settings, {**about, **way, "kind": "fit"})
        if path.exists():
            kept = Predicted.load(path)
            scores = {"Ho": kept.variances["ho"].sum(1), "HeC3": kept.variances["hec3"].sum(1)}
            margin = of_outputs(kept.outputs)["margin"]
            return {"outputs": kept.outputs, **scores, "margin": margin}, cifar.read(settings).test_labels.cpu()
    network, images = network_of(name, settings, seed)
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(images.labels), generator=draw)[: settings.fit_size].to(images.labels.device)
    data = images.inputs[chosen], one_hot(images.labels[chosen], CLASSES)
    tracer = fitted(network, data, settings.fit, settings.ridge_share)
    missed = (network_outputs(network, data[0]).argmax(1) != images.labels[chosen].cpu()).double()
    return {**answers(tracer, images.test_inputs), "missed": missed}, images.test_labels.cpu()


def judge(name: str, settings: Settings, seed: int) -> dict[str, Any]:
    """Which images stand in which grid."""
    found, truth = predictions(name, settings, seed)
    said = found["outputs"].argmax(1)
    wrong = said != truth
    ho, hec3 = ranks(found["Ho"]), ranks(found["HeC3"])
    orders = {"HeC3": hec3, "Ho": ho, "HeC3 over Ho": hec3 - ho, "Ho over HeC3": ho - hec3}
    grids = {}
    for kind, order in orders.items():
        first = order.argsort(descending=True, stable=True)[:SHOWN]
        grids[kind] = {"images": first.tolist(), "wrong": wrong[first].int().tolist(), "said": said[first].tolist()}
    scores = ("HeC3", "Ho", "margin")
    areas = {score: auroc(found[score], wrong) for score in scores}
    results = {"grids": grids, "accuracy": float((~wrong).double().mean()), "auroc": areas, "tested": len(wrong)}
    return results | ({"training_answers_wrong": float(found["missed"].mean())} if "missed" in found else {})


def compute(settings: Settings, record: Record) -> None:
    """One network a set."""
    usual = ("mnist",) if settings.quick else ("mnist", "fashion-mnist", "cifar-10")
    for name in settings.sets or usual:
        for seed in settings.seeds:
            record.once(configuration(name, settings, seed), partial(judge, name, settings, seed))


def draw_grid(ax: Axes, pictures: Tensor, wrong: list[int], columns: int = 10) -> None:
    """Images side by side, (m, colours, side, side) between 0 and 1; wrong ones in a red frame."""
    from matplotlib.patches import Rectangle  # an extra: only figures need it

    for place, picture in enumerate(pictures.permute(0, 2, 3, 1).numpy()):
        left, top = 1.12 * (place % columns), -1.12 * (place // columns)
        shown = picture if picture.shape[2] == 3 else picture[:, :, 0]
        ax.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=(left, left + 1, top - 1, top), interpolation="nearest")
        if wrong[place]:
            ax.add_patch(Rectangle((left, top - 1), 1, 1, fill=False, edgecolor=RED, linewidth=2))
    ax.set(xlim=(-0.1, 1.12 * columns), ylim=(-1.12 * -(-len(pictures) // columns), 0.1), aspect="equal")
    ax.set_axis_off()


def show(settings: Settings, record: Record) -> list[Path]:
    """Four grids a set."""
    written = []
    runs = record.runs()
    for run in runs:
        name = run.configuration["set"]
        others = [one for one in runs if one.configuration["set"] == name and one != run]
        which = f"-{run.configuration['optimiser']}" if others else ""
        source: Name = run.configuration["data"] if name != "cifar-10" else "cifar-10"
        images = read_images(source, settings.data)
        figure = new_figure(9.2, 10)
        for ax, (kind, title) in zip(figure.subplots(2, 2).flat, GRIDS.items(), strict=True):
            grid = run.results["grids"][kind]
            draw_grid(ax, images.brightness(images.test_inputs[grid["images"]]), grid["wrong"])
            ax.set_title(f"{title}: {sum(grid['wrong'])} of {len(grid['wrong'])} wrong", fontsize="medium")
        about = f"{source}, {run.configuration['network']}, accuracy {run.results['accuracy']:.3f}"
        figure.suptitle(f"{about}. Framed: wrong.", fontsize="medium")
        written.append(save(figure, settings.out / f"{record.path.stem}-{name}{which}.png", dpi=90))
    return written


def check(settings: Settings, record: Record) -> list[str]:
    """Mistakes crowd among the images of highest HeC3."""
    return [words for run in record.runs() for words in _lost(run)]


def _lost(run: Run) -> list[str]:
    wrong = run.results["grids"]["HeC3"]["wrong"]
    share, usual = sum(wrong) / len(wrong), 1 - run.results["accuracy"]
    if share > usual:
        return []
    name = run.configuration["set"]
    return [f"{name}: mistakes are more among the highest HeC3, {share:.2f}, than among all, {usual:.2f}"]


EXPERIMENT = Experiment("grids", __doc__ or "", compute, show, check, options, runs=(1, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
