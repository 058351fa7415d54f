"""Verdicts on the paper's protocol: one class with random labels, another missing from the training set.

    python -m benchmarks.verdicts --data DIR --out results/verdicts.json

Classes are merged at random into two, a network is trained with squared error, and test points of all classes are
explained as `tracer.explain` does it. Recorded for each draw: how often each verdict fell on points of the noisy class,
of the missing class and of the others, and on how many of the others that were predicted wrongly; how well `source`
tells noisy from missing among the points of these classes that were not called confident, and among all of them
(AUROC), with HeC3 / Ho, the paper's score, beside it; and how well each question is answered against all other points.
"mnist, paper" and "fashion-mnist, paper" are the paper's networks on all images, which want a GPU (`--device cuda`).
`--points DIR` keeps what verdicts are made of, and `--judge DIR` judges what was kept there, without training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import whence
from whence.influence.explanation import VERDICTS
from whence_paper.images import training

from . import networks
from .data import Split, Task, batches, corrupt
from .record import save, say
from .scores import auroc
from .studied import WEIGHT_DECAY, Study, adjusted, arguments, open_record, options, put, read
from .trained import trained
from .verdict_points import Points, points_of

CASES: dict[str, Study] = {
    "digits": Study(1000, 497, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 60, ("exact",)),
    "mnist": Study(6000, 1000, lambda k: networks.mlp(784, 256, 256, k), "MLP 784-256-256", 20, ("core:size=1024",)),
    "fashion-mnist": Study(
        6000, 1000, lambda k: networks.cnn(k, (8, 16, 32)), "CNN of 8, 16, 32 channels", 20, ("core:size=1024",)
    ),
    "mnist, paper": Study(
        60_000, 2000, lambda k: networks.mlp(784, 1024, 1024, k), "MLP 784-1024-1024", 20, ("core:size=4096",)
    ),
    "fashion-mnist, paper": Study(
        60_000, 2000, networks.cnn, "CNN of 32, 64, 128, 256 channels", 20, ("core:size=2048",)
    ),
}
"""The first word of a name is the data set; "paper" has the paper's network, loss and rate, and all images."""
OPTIMISERS = ("adam", "adamw")
"""Adam with the weight decay in its loss, as the paper writes, and AdamW, which decouples it."""

LEVEL = 0.95


def groups(labels: Tensor, noisy: int, missing: int) -> dict[str, Tensor]:
    """(m,) which test points are of the noisy class, of the missing one, and of neither."""
    first, second = labels == noisy, labels == missing
    return {"noisy": first, "missing": second, "other": ~first & ~second}


def area(score: Tensor, noisy: Tensor, among: Tensor) -> float | None:
    """How well a score tells the noisy among some points; `None` where they are all noisy, or all missing."""
    if not bool(noisy[among].any()) or bool(noisy[among].all()):
        return None
    return auroc(score[among], noisy[among])


def confusion(said: Tensor, truth: dict[str, Tensor]) -> dict[str, list[int]]:
    """How often each verdict fell on some points."""
    return {name: torch.bincount(said[where], minlength=len(VERDICTS)).tolist() for name, where in truth.items()}


def judged(points: Points, truth: dict[str, Tensor], wrong: Tensor) -> dict[str, Any]:
    """The confusion matrix and the areas of one draw."""
    found = points.explained(LEVEL)
    noisy, missing, other = truth["noisy"], truth["missing"], truth["other"]
    either = noisy | missing
    uncertain = either & (found.noisy | found.scarce)
    said = torch.tensor([VERDICTS.index(verdict) for verdict in found.verdicts])
    by_chance = replace(found, noisier=torch.ones_like(found.noisier)).verdicts
    return {
        "confusion": confusion(said, truth),
        "confusion_without_limit": confusion(torch.tensor([VERDICTS.index(verdict) for verdict in by_chance]), truth),
        "noisy_from_missing_uncertain": area(found.source, noisy, uncertain),
        "noisy_from_missing": area(found.source, noisy, either),
        "noisy_from_missing_uncertain_ratio": area(found.ratio, noisy, uncertain),
        "noisy_from_missing_ratio": area(found.ratio, noisy, either),
        "noisy_from_rest": auroc(found.ratio, noisy),
        "missing_from_other": auroc(found.leverage[missing | other], missing[missing | other]),
        "limit": found.limit,
        "wrong_other": confusion(said, {"other": other & wrong})["other"],
    }


def network_of(name: str, study: Study, task: Task, optimiser: str, seed: int, keep: Path) -> nn.Module:
    """The trained network of a draw."""
    if "paper" in name:
        network = training.initialised(lambda: study.make(2), seed, task.inputs.device)
        recipe = training.Recipe(epochs=study.epochs, optimiser="adamw" if optimiser == "adamw" else "adam")
        return training.train(network, task.inputs, task.targets, recipe, seed)
    return trained(
        keep,
        f"verdicts-{name}",
        lambda: study.make(2).to(task.inputs.device),
        task.inputs,
        task.targets,
        loss="squared error",
        epochs=study.epochs,
        seed=seed,
        decoupled=optimiser == "adamw",
    )


def run_draw(
    name: str, study: Study, split: Split, optimiser: str, seed: int, keep: Path, device: str
) -> Iterator[dict[str, Any]]:
    """Train one network and yield what its verdicts are made of, with every structure."""
    task = corrupt(split, study.n, study.test, seed, meta=True)
    task = replace(task, **{part: getattr(task, part).to(device) for part in ("inputs", "targets", "test_inputs")})
    network = network_of(name, study, task, optimiser, seed, keep)
    n = len(task.inputs)
    loss: Literal["mse", "sum_of_squares"] = "mse" if "paper" in name else "sum_of_squares"
    with torch.no_grad():
        said = torch.cat([network(some).argmax(1) for some in task.test_inputs.split(500)]).cpu()
    for text in study.structures:
        start = time.process_time()
        tracer = whence.fit(
            network,
            batches(task.inputs, task.targets, 500),
            ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, n, outputs=2, loss=loss),
            progress=False,
            **options(text),
        )
        fitted = time.process_time()
        points = points_of(tracer, list(task.test_inputs.split(250)))
        yield {
            "case": name,
            "optimiser": optimiser,
            "structure": text,
            "seed": seed,
            "n": n,
            "test": len(task.test_labels),
            "noisy_class": task.noisy,
            "missing_class": task.missing,
            "newton_change": tracer.diagnostics["Newton change"],
            "degrees_of_freedom": tracer.degrees_of_freedom,
            "fit_cpu_s": fitted - start,
            "explain_cpu_s": time.process_time() - fitted,
            "network": study.describe,
            "epochs": study.epochs,
            "labels": task.test_labels,
            "wrong": said != task.test_answers,
            "points": asdict(points),
        }


def row_of(draw: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a draw."""
    plain = {key: value for key, value in draw.items() if key not in ("labels", "wrong", "points")}
    truth = groups(draw["labels"], draw["noisy_class"], draw["missing_class"])
    return {**plain, **judged(Points(**draw["points"]), truth, draw["wrong"])}


def draws(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those that were kept, or new ones."""
    if given.judge is not None:
        yield from (torch.load(path, weights_only=True) for path in sorted(given.judge.glob("*.pt")))
        return
    for name in given.cases:
        study = adjusted(CASES[name], given)
        split = read(name.split(",")[0], given.data)
        for optimiser in given.optimisers:
            for seed in given.seeds:
                for draw in run_draw(name, study, split, optimiser, seed, given.keep, given.device):
                    if given.points is not None:
                        given.points.mkdir(parents=True, exist_ok=True)
                        words = f"{name.replace(', ', '-')}-{optimiser}-{draw['structure'].replace(':', '-')}-{seed}"
                        torch.save(draw, given.points / f"{words}.pt")
                    yield draw


def main() -> None:
    """Run the cases, optimisers and draws that were asked for."""
    parser = arguments(__doc__, CASES, "verdicts")
    parser.add_argument("--optimisers", nargs="+", choices=OPTIMISERS, default=list(OPTIMISERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=Path, help="keep what verdicts are made of in this folder")
    parser.add_argument("--judge", type=Path, help="judge what was kept in this folder, and train nothing")
    given = parser.parse_args()
    record = open_record(given.out, given.append, level=LEVEL, verdicts=VERDICTS)
    for draw in draws(given):
        row = row_of(draw)
        put(record, row, ("case", "optimiser", "structure", "seed"))
        save(given.out, record)
        say(summary(row))


def summary(row: dict[str, Any]) -> str:
    """One line."""
    shares = {
        name: [round(count / max(sum(counts), 1), 2) for count in counts] for name, counts in row["confusion"].items()
    }
    told = [
        "none" if row[key] is None else f"{row[key]:.3f}"
        for key in (f"noisy_from_missing{among}{by}" for by in ("", "_ratio") for among in ("_uncertain", ""))
    ]
    return (
        f"{row['case']} {row['optimiser']} {row['structure']} draw {row['seed']}: noisy from missing {told[0]} among "
        f"the uncertain, {told[1]} among all (HeC3 / Ho {told[2]}, {told[3]}); verdicts {shares}"
    )


if __name__ == "__main__":
    main()
