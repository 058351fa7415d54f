"""Verdicts on the paper's protocol: one class with random labels, another missing from the training set.

    python -m benchmarks.verdicts --data DIR --out results/verdicts.json

Classes are merged at random into two, a network is trained with squared error, and `tracer.explain` is asked about test
points of all classes. Recorded for each draw: how often each verdict fell on points of the noisy class, of the missing
class and of the others; how well `source` tells noisy from missing among the points of these classes that were not
called confident, and among all of them (AUROC), with HeC3 / Ho, the paper's score, beside it; and how well each
question is answered against all other points. "fashion-mnist, paper" is the paper's network on all images, which wants
a GPU (`--device cuda`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence.tracing import Explanation
from whence.tracing.verdicts import VERDICTS

from . import networks
from .data import Split, Task, batches, corrupt
from .record import save, say
from .scores import auroc
from .studied import WEIGHT_DECAY, Study, adjusted, arguments, open_record, options, put, read
from .trained import trained
from .training import accuracy

CASES: dict[str, Study] = {
    "digits": Study(1000, 497, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 60, ("exact",)),
    "mnist": Study(6000, 1000, lambda k: networks.mlp(784, 256, 256, k), "MLP 784-256-256", 20, ("core:size=1024",)),
    "fashion-mnist": Study(
        6000, 1000, lambda k: networks.cnn(k, (8, 16, 32)), "CNN of 8, 16, 32 channels", 20, ("core:size=1024",)
    ),
    "fashion-mnist, paper": Study(
        54_000, 1000, networks.cnn, "CNN of 32, 64, 128, 256 channels, constant rate", 20, ("core:size=2048",)
    ),
    "fashion-mnist, paper, fewer": Study(
        6000, 1000, networks.cnn, "CNN of 32, 64, 128, 256 channels, constant rate", 20, ("core:size=2048",)
    ),
}
"""The first word of a name is the data set; "paper" has the paper's network and rate."""
OPTIMISERS = ("adam", "adamw")
"""Adam with the weight decay in its loss, as the paper writes, and AdamW, which decouples it."""

LEVEL = 0.95


def groups(task: Task) -> dict[str, Tensor]:
    """(m,) which test points are of the noisy class, of the missing one, and of neither."""
    noisy, missing = task.test_labels == task.noisy, task.test_labels == task.missing
    return {"noisy": noisy, "missing": missing, "other": ~noisy & ~missing}


def area(score: Tensor, noisy: Tensor, among: Tensor) -> float | None:
    """How well a score tells the noisy among some points; `None` where they are all noisy, or all missing."""
    if not bool(noisy[among].any()) or bool(noisy[among].all()):
        return None
    return auroc(score[among], noisy[among])


def judge(found: Explanation, task: Task, network: nn.Module) -> dict[str, Any]:
    """The confusion matrix and the areas of one draw."""
    truth = groups(task)
    noisy, missing = truth["noisy"], truth["missing"]
    either = noisy | missing
    uncertain = either & (found.noisy | found.scarce).cpu()
    ratio, leverage, source = found.ratio.cpu(), found.leverage.cpu(), found.source.cpu()
    said = [VERDICTS.index(verdict) for verdict in found.verdicts]
    counts = {
        name: torch.bincount(torch.tensor(said)[where], minlength=len(VERDICTS)).tolist()
        for name, where in truth.items()
    }
    other = truth["other"]
    return {
        "confusion": counts,
        "noisy_from_missing_uncertain": area(source, noisy, uncertain),
        "noisy_from_missing": area(source, noisy, either),
        "noisy_from_missing_uncertain_ratio": area(ratio, noisy, uncertain),
        "noisy_from_missing_ratio": area(ratio, noisy, either),
        "noisy_from_rest": auroc(ratio, noisy),
        "missing_from_other": auroc(leverage[missing | other], missing[missing | other]),
        "accuracy_other": accuracy(network, task.test_inputs[other], task.test_answers[other].to(task.inputs.device)),
    }


def run_draw(
    name: str, study: Study, split: Split, optimiser: str, seed: int, keep: Path, device: str
) -> list[dict[str, Any]]:
    """Train one network and explain its predictions with every structure."""
    task = corrupt(split, study.n, study.test, seed, meta=True)
    moved = {part: getattr(task, part).to(device) for part in ("inputs", "targets", "test_inputs")}
    task = replace(task, **moved)
    network = trained(
        keep,
        f"verdicts-{name.replace(', ', '-')}",
        lambda: study.make(2).to(device),
        task.inputs,
        task.targets,
        loss="squared error",
        epochs=study.epochs,
        seed=seed,
        decoupled=optimiser == "adamw",
        constant="paper" in name,
    )
    n = len(task.inputs)
    rows = []
    for text in study.structures:
        start = time.process_time()
        tracer = whence.fit(
            network,
            batches(task.inputs, task.targets, 500),
            ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, n, loss="sum_of_squares"),
            progress=False,
            **options(text),
        )
        fitted = time.process_time()
        found = tracer.explain(list(task.test_inputs.split(500)), level=LEVEL)
        rows.append(
            {
                "case": name,
                "optimiser": optimiser,
                "structure": text,
                "seed": seed,
                "n": n,
                "test": len(task.test_labels),
                "noisy_class": task.noisy,
                "missing_class": task.missing,
                **judge(found, task, network),
                "newton_change": tracer.diagnostics["Newton change"],
                "degrees_of_freedom": tracer.degrees_of_freedom,
                "fit_cpu_s": fitted - start,
                "explain_cpu_s": time.process_time() - fitted,
            }
        )
    return rows


def main() -> None:
    """Run the cases, optimisers and draws that were asked for."""
    parser = arguments(__doc__, CASES, "verdicts")
    parser.add_argument("--optimisers", nargs="+", choices=OPTIMISERS, default=list(OPTIMISERS))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    record = open_record(given.out, given.append, level=LEVEL, verdicts=VERDICTS)
    for name in given.cases:
        study = adjusted(CASES[name], given)
        split = read(name.split(",")[0], given.data)
        for optimiser in given.optimisers:
            for seed in given.seeds:
                for row in run_draw(name, study, split, optimiser, seed, given.keep, given.device):
                    described = {**row, "network": study.describe, "epochs": study.epochs}
                    put(record, described, ("case", "optimiser", "structure", "seed"))
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
