"""Finding flipped training labels: the suspect rank of `training_frame`, cleanlab, and the plain loss.

    python -m benchmarks.label_errors --data DIR --out results/label_errors.json

Ten per cent of the training labels are replaced by another class at random; a network is trained on them with squared
error or cross-entropy; every score ranks the training examples, and its AUROC for the replaced ones is recorded, draw
by draw. `whence` sees the trained network and its training set. cleanlab is given what its documentation asks for,
out-of-sample probabilities from five-fold cross-validation (five more networks), and once in-sample probabilities too.
kronfluence, which has influences and no variances, ranks by how much an example changes its own loss.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import whence
from whence import one_hot

from . import influences, networks
from .data import Split, batches
from .record import failed, installed, save, say
from .scores import auroc
from .studied import UNSEEN, WEIGHT_DECAY, Study, adjusted, arguments, open_record, options, put, read
from .trained import LOSSES, trained

LATER = tuple(seed + 100 for seed in UNSEEN)
"""Draws 100 and 101 were looked at with a score for classes that was not the one chosen; these were not."""

PEERS = {name: installed(name) for name in ("cleanlab", "kronfluence")}
DAMPINGS: dict[str, float | None] = {"damping by the penalty": WEIGHT_DECAY}
"""Of kronfluence. Its default of 1e-8, and its own rule (`None`), ranked worse on development draws."""

FLIPPED = 0.1
FOLDS = 5
CLASSES = 10

CASES: dict[str, Study] = {
    "digits": Study(
        "digits", 1000, 0, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 40, ("ekfac", "core:size=512", "exact")
    ),
    "mnist": Study(
        "mnist", 2000, 0, lambda k: networks.mlp(784, 128, 128, k), "MLP 784-128-128", 15, ("ekfac", "core:size=1024")
    ),
    "fashion-mnist": Study(
        "fashion-mnist",
        2000,
        0,
        lambda k: networks.cnn(k, (8, 16, 32)),
        "CNN of 8, 16, 32 channels",
        20,
        ("ekfac", "core:size=1024"),
    ),
}
CASES["mnist, long"] = replace(CASES["mnist"], epochs=60)
"""Trained until most of the wrong labels are learned."""


@dataclass(frozen=True)
class Flipped:
    """A training set with some labels replaced."""

    inputs: Tensor
    labels: Tensor
    flipped: Tensor

    def targets(self, loss: str) -> Tensor:
        """Labels (n,), or +1 and -1 (n, k) for squared error."""
        return self.labels if loss == "cross-entropy" else one_hot(self.labels, CLASSES)


def flip(split: Split, n: int, seed: int) -> Flipped:
    """Draw n examples and give a tenth of them another label."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(split.labels), generator=draw)[:n]
    labels = split.labels[chosen].clone()
    flipped = torch.zeros(len(chosen), dtype=torch.bool)
    flipped[torch.randperm(len(chosen), generator=draw)[: int(FLIPPED * len(chosen))]] = True
    shift = torch.randint(1, CLASSES, (int(flipped.sum()),), generator=draw)
    labels[flipped] = (labels[flipped] + shift) % CLASSES
    return Flipped(split.inputs[chosen], labels, flipped)


def probabilities(outputs: Tensor, loss: str) -> Tensor:
    """Softmax; squared error makes 2 p - 1 of outputs, from which p is cut at zero and scaled to sum to one."""
    if loss == "cross-entropy":
        return outputs.softmax(1)
    positive = ((outputs + 1) / 2).clamp_min(1e-6)
    return positive / positive.sum(1, keepdim=True)


def losses(outputs: Tensor, task: Flipped, loss: str) -> Tensor:
    """(n,) of each example."""
    if loss == "cross-entropy":
        return F.cross_entropy(outputs, task.labels, reduction="none")
    return (outputs - task.targets(loss)).square().sum(1)


@torch.no_grad()
def outputs_of(network: torch.nn.Module, inputs: Tensor) -> Tensor:
    return torch.cat([network(some) for some in inputs.split(500)]).double()


def cleanlab_scores(outputs: Tensor, task: Flipped, loss: str, where: str) -> tuple[dict[str, Tensor], Tensor]:
    """Scores that are high for doubtful labels, and the examples that cleanlab calls issues."""
    from cleanlab.filter import find_label_issues  # a peer, present or not
    from cleanlab.rank import get_label_quality_scores

    given, labels = probabilities(outputs, loss).numpy(), task.labels.numpy()
    found = {
        f"cleanlab {kind}, {where}": -torch.from_numpy(get_label_quality_scores(labels, given, method=method))
        for kind, method in (("self-confidence", "self_confidence"), ("margin", "normalized_margin"))
    }
    return found, torch.from_numpy(find_label_issues(labels, given, n_jobs=1))


def by_peers(task: Flipped, outputs: Tensor, outside: Tensor, loss: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Scores of the loss and of cleanlab, and how well cleanlab's own choice of issues does."""
    scores = {
        "loss, in-sample": losses(outputs, task, loss),
        "loss, cross-validated": losses(outside, task, loss),
    }
    flipped = int(task.flipped.sum())
    try:
        inside, _ = cleanlab_scores(outputs, task, loss, "in-sample")
        crossed, issues = cleanlab_scores(outside, task, loss, "cross-validated")
    except Exception as error:  # a peer that fails is part of the result
        return scores, {"called": flipped, "hits": 0, "flipped": flipped, **failed(error)}
    hits = int((issues & task.flipped).sum())
    return {**scores, **inside, **crossed}, {"called": int(issues.sum()), "hits": hits, "flipped": flipped}


def by_influence(network: torch.nn.Module, task: Flipped, loss: str, seed: int) -> dict[str, Tensor]:
    """Scores of kronfluence. Its curvature is a mean over examples, as is the loss that a weight decay is added to."""
    found = influences.self_influences(
        network, task.inputs, task.targets(loss), loss == "cross-entropy", DAMPINGS, seed
    )
    return {f"kronfluence self-influence, {name}": value for name, value in found.items()}


def by_whence(
    network: torch.nn.Module, task: Flipped, loss: str, texts: Sequence[str], called: int
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Suspicion under every structure, seconds, and the hits among as many as cleanlab called."""
    entropy = loss == "cross-entropy"
    ridge = whence.ridge_from_weight_decay(
        WEIGHT_DECAY, len(task.labels), loss="cross_entropy" if entropy else "sum_of_squares"
    )
    loader = batches(task.inputs, task.targets(loss), 500)
    scores, fits = {}, []
    for text in texts:
        start = time.process_time()
        tracer = whence.fit(
            network,
            loader,
            likelihood="categorical" if entropy else "gaussian",
            ridge=ridge,
            progress=False,
            **options(text),
        )
        table = tracer.training_frame()
        seconds = time.process_time() - start
        scores[f"whence {text}"] = torch.from_numpy(table.suspicion.to_numpy(copy=True))
        first = torch.from_numpy(table.suspect_rank.to_numpy(copy=True)) <= called
        fits.append(
            {
                "structure": text,
                "cpu_s": seconds,
                "degrees_of_freedom": tracer.degrees_of_freedom,
                "newton_change": tracer.diagnostics["Newton change"],
                "hits_among_first": int((first & task.flipped).sum()),
            }
        )
    return scores, fits


def run_draw(name: str, study: Study, split: Split, loss: str, seed: int, folder: Path) -> dict[str, Any]:
    """One trained network and its five folds."""
    task = flip(split, study.n, seed)
    targets = task.targets(loss)
    settings: dict[str, Any] = {"loss": loss, "epochs": study.epochs, "seed": seed}

    def make() -> torch.nn.Module:
        return study.make(CLASSES)

    start = time.process_time()
    network = trained(folder, f"flipped-{name}", make, task.inputs, targets, **settings)
    once = time.process_time()
    fold = torch.arange(len(task.labels)) % FOLDS  # the draw is in random order
    outside = torch.empty(len(task.labels), CLASSES, dtype=torch.float64)
    for number in range(FOLDS):
        kept = fold != number
        other = trained(folder, f"flipped-{name}-{number}", make, task.inputs[kept], targets[kept], **settings)
        outside[~kept] = outputs_of(other, task.inputs[~kept])
    crossed = time.process_time()
    outputs = outputs_of(network, task.inputs)
    scores, issues = by_peers(task, outputs, outside, loss)
    ours, fits = by_whence(network, task, loss, study.structures, issues["called"])
    gone = {"cleanlab": issues["failed"]} if "failed" in issues else {}
    asked = time.process_time()
    try:
        scores |= by_influence(network, task, loss, seed)
    except Exception as error:  # as above
        gone |= {"kronfluence": failed(error)["failed"]}
    right = outputs.argmax(1) == task.labels
    return {
        "case": name,
        "loss": loss,
        "seed": seed,
        "n": len(task.labels),
        "flipped_learned": float(right[task.flipped].double().mean()),
        "others_learned": float(right[~task.flipped].double().mean()),
        "train_cpu_s": once - start,
        "cross_validation_cpu_s": crossed - once,
        "kronfluence_cpu_s": time.process_time() - asked,
        "did_not_run": gone,
        "auroc": {key: auroc(value, task.flipped) for key, value in {**ours, **scores}.items()},
        "cleanlab_issues": issues,
        "fits": fits,
    }


def main() -> None:
    """Run the cases, losses and draws that were asked for."""
    parser = arguments(__doc__, CASES, "label_errors", LATER)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    given = parser.parse_args()
    warnings.filterwarnings("ignore", ".torch.cuda.amp.GradScaler", FutureWarning)  # of kronfluence, without a GPU too
    record = open_record(given.out, given.append, **PEERS, flipped=FLIPPED, folds=FOLDS)
    for name in given.cases:
        study = adjusted(CASES[name], given)
        split = read(CASES[name].data, given.data)
        for loss in given.losses:
            for seed in given.seeds:
                row = run_draw(name, study, split, loss, seed, given.keep)
                put(record, {**row, "network": study.describe, "epochs": study.epochs}, ("case", "loss", "seed"))
                save(given.out, record)
                say(name, loss, seed, "  ".join(f"{key} {value:.3f}" for key, value in row["auroc"].items()))
                for peer, why in row["did_not_run"].items():
                    say(f"did not run: {peer}: {why}")


if __name__ == "__main__":
    main()
