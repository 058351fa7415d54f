"""Is it worth it for cross-entropy? Noisy, missing and misclassified test points, ranked by everything at hand.

    python -m benchmarks.worth --data DIR --out results/worth.json

Two tasks on each data set: the paper's (classes merged at random into two, one class with random labels, one missing),
and all ten classes with random labels in one of them. The same network is trained once with cross-entropy and once
with squared error. AUROC of every score, draw by draw: of the noisy class among all test points, of the missing one,
and of the misclassified points among all, and among those of neither class.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

import whence

from . import networks
from .data import Split, Task, batches, corrupt
from .record import save, say
from .scores import auroc
from .studied import WEIGHT_DECAY, Study, adjusted, arguments, open_record, options, put, read
from .trained import LOSSES, trained
from .training import accuracy
from .worth_scores import Scores, laplace, ours, plain

CASES: dict[str, Study] = {
    "digits": Study(
        "digits", 1000, 497, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 60, ("exact", "core:size=512", "ekfac")
    ),
    "mnist": Study(
        "mnist",
        3000,
        1000,
        lambda k: networks.mlp(784, 128, 128, k),
        "MLP 784-128-128",
        15,
        ("core:size=1024", "ekfac"),
    ),
    "fashion-mnist": Study(
        "fashion-mnist",
        3000,
        1000,
        lambda k: networks.cnn(k, (8, 16, 32)),
        "CNN of 8, 16, 32 channels",
        15,
        ("core:size=1024", "ekfac"),
    ),
    "mnist, large": Study(
        "mnist",
        6000,
        2000,
        lambda k: networks.mlp(784, 256, 256, k),
        "MLP 784-256-256",
        20,
        ("core:size=2048", "ekfac"),
    ),
    "fashion-mnist, large": Study(
        "fashion-mnist", 6000, 2000, networks.cnn, "CNN of 32, 64, 128, 256 channels", 20, ("core:size=2048", "ekfac")
    ),
}
TASKS = {"two classes": True, "ten classes": False}
"""Whether classes are merged and one is missing."""

SUBSETS = ("last_layer", "all")
"""Of laplace-torch."""


def questions(task: Task, outputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Which test points to find, and among which."""
    labels = task.test_labels.cpu()
    noisy = labels == task.noisy
    missing = labels == task.missing if task.missing is not None else torch.zeros_like(noisy)
    wrong = outputs.argmax(1) != task.test_answers.cpu()
    every = torch.ones_like(noisy)
    found = {"noisy": (noisy, every), "missing": (missing, every), "wrong": (wrong, every)}
    found["wrong, ordinary"] = (wrong, ~noisy & ~missing)
    return {name: pair for name, pair in found.items() if pair[0].any()}


def judge(scores: Scores, task: Task, outputs: Tensor) -> dict[str, dict[str, float]]:
    """AUROC of every score for every question."""
    asked = questions(task, outputs)
    return {
        name: {question: auroc(values.cpu()[among], target[among]) for question, (target, among) in asked.items()}
        for name, values in scores.items()
    }


def by_whence(
    network: nn.Module, task: Task, targets: Tensor, loss: str, study: Study
) -> tuple[Scores, list[dict[str, Any]]]:
    """Scores under every structure, and what each fit cost."""
    entropy = loss == "cross-entropy"
    ridge = whence.ridge_from_weight_decay(
        WEIGHT_DECAY, len(targets), loss="cross_entropy" if entropy else "sum_of_squares"
    )
    scores: Scores = {}
    fits = []
    for text in study.structures:
        start = time.perf_counter()
        tracer = whence.fit(
            network,
            batches(task.inputs, targets, 500),
            likelihood="categorical" if entropy else "gaussian",
            ridge=ridge,
            progress=False,
            **options(text),
        )
        fitted = time.perf_counter()
        found = tracer.predict(list(task.test_inputs.split(500)), covariance=True)
        scores |= ours(found, loss, text)
        fits.append(
            {
                "structure": text,
                "fit_s": fitted - start,
                "predict_s": time.perf_counter() - fitted,
                "degrees_of_freedom": tracer.degrees_of_freedom,
                "newton_change": tracer.diagnostics["Newton change"],
                "median_ho": float(found.trace("ho").median()),
                "median_hec3": float(found.trace("hec3").median()),
            }
        )
    return scores, fits


def run_draw(
    name: str, study: Study, split: Split, kind: str, loss: str, seed: int, given: argparse.Namespace
) -> dict[str, Any]:
    """One trained network and all scores of its test points."""
    device = torch.device(given.device)
    task = corrupt(split, study.n, study.test, seed, meta=TASKS[kind])
    task = Task(*(part.to(device) if isinstance(part, Tensor) else part for part in vars(task).values()))
    entropy = loss == "cross-entropy"
    classes = task.targets.argmax(1)
    targets = classes if entropy else task.targets
    start = time.perf_counter()
    network = trained(
        given.keep,
        f"worth-{name}-{kind.replace(' ', '-')}",
        lambda: study.make(task.targets.shape[1]).to(device),
        task.inputs,
        targets,
        loss=loss,
        epochs=study.epochs,
        seed=seed,
    )
    training = time.perf_counter() - start
    with torch.no_grad():
        outputs = torch.cat([network(some) for some in task.test_inputs.split(500)]).double().cpu()
    scores, fits = by_whence(network, task, targets, loss, study)
    start = time.perf_counter()
    if entropy:
        ridge = whence.ridge_from_weight_decay(WEIGHT_DECAY, len(targets), loss="cross_entropy")
        for subset in given.laplace:
            scores |= laplace(network, task.inputs, classes, task.test_inputs, ridge, subset)
    return {
        "case": name,
        "task": kind,
        "loss": loss,
        "seed": seed,
        "n": len(targets),
        "test": len(outputs),
        "noisy_class": task.noisy,
        "missing_class": task.missing,
        "accuracy": accuracy(network, task.test_inputs, task.test_answers),
        "wrong": {key: int((at & among).sum()) for key, (at, among) in questions(task, outputs).items()},
        "auroc": judge({**scores, **plain(outputs, loss)}, task, outputs),
        "fits": fits,
        "train_s": training,
        "laplace_s": time.perf_counter() - start,
    }


def summary(row: dict[str, Any]) -> str:
    """A few lines."""
    lines = [f"{row['case']}, {row['task']}, {row['loss']}, draw {row['seed']}, accuracy {row['accuracy']:.3f}"]
    for name, found in row["auroc"].items():
        lines.append("    " + "  ".join(f"{key} {value:.3f}" for key, value in found.items()) + f"  {name}")
    return "\n".join(lines)


def peer() -> str | None:
    """The version of laplace-torch."""
    try:
        return version("laplace-torch")
    except PackageNotFoundError:
        return None


def main() -> None:
    """Run the cases, tasks, losses and draws that were asked for."""
    parser = arguments(__doc__, CASES, "worth")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--laplace", nargs="*", choices=SUBSETS, default=list(SUBSETS), help="weights it looks at")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="where git is not at hand")
    given = parser.parse_args()
    known = {"commit": given.commit} if given.commit else {}
    record = open_record(given.out, given.append, laplace=peer(), **known)
    for name in given.cases:
        study = adjusted(CASES[name], given)
        split = read(CASES[name].data, given.data)
        for kind in given.tasks:
            for loss in given.losses:
                for seed in given.seeds:
                    row = run_draw(name, study, split, kind, loss, seed, given)
                    where = torch.cuda.get_device_name() if given.device == "cuda" else record["processor"]
                    described = {**row, "network": study.describe, "epochs": study.epochs, "where": where}
                    put(record, described, ("case", "task", "loss", "seed"))
                    save(given.out, record)
                    say(summary(row))


if __name__ == "__main__":
    main()
