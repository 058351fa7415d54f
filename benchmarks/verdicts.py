"""Verdicts on networks people train: one class with random labels, another missing from the training set.

    python -m benchmarks.verdicts --data DIR --device cuda --out results/verdicts.json

Ten classes, cross-entropy or squared error on their labels; and the paper's protocol, two groups of classes and squared
error. Recorded for each draw: how often each verdict fell on points of the noisy class, of the missing class, and on
other points that were predicted rightly and wrongly; how often confident and other predictions are right; and how well
each question is answered by `noise`, `scarcity`, `source` and `doubt`, and by what can be had without whence (AUROC):
entropy, margin and energy of the network's answer; distance to the 50 nearest training examples in its last features,
the entropy of their labels and their mean squared residual; the density of a Gaussian of each class there (DDU), and
the Mahalanobis distance to the nearest class. `uncertain_by_class` says which classes the uncertain ones among the
rightly predicted other points belong to. `separable` is how well a logistic regression on the network's last features
tells points of the noisy class from those of the missing one if it learns from other test points, with their true
classes: what the network does not represent, nobody can read off it.

Under `pool` stands the same where `explain` is also given all test points as a pool of inputs of use; beside it the
share of the pool among the 100 nearest in the last features (*pool share*), and a classifier that tells the pool from
the training examples there (*pool classifier*). `--ranks FOLDER` keeps the ranks of all scores, from which
`python -m benchmarks.learned_scores` learns the best combination.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.influence.explanation import VERDICTS
from whence_paper.feature_scores import (
    answers_and_features,
    class_density,
    class_distance,
    neighbour_scores,
    pool_scores,
    probability_scores,
)
from whence_paper.networks import ViT

from . import networks, studied
from .data import Split, Task, batches, corrupt, one_hot, read_cifar
from .record import save, say
from .scores import auroc
from .studied import arguments, open_record, options, put, read
from .training import augment, fault, or_else, train_captured

LEVEL = 0.95
MEMORY = 30
"""GiB of a GPU that a fit may take, so that several studies share it. With more it waits less for the CPU."""
WEIGHT_DECAY = {"cifar-10": 5e-2}
PEAK = {True: 3e-3, False: 2e-3}
"""Largest learning rate, for natural images and others."""
GROUPS = ("noisy", "missing", "right", "wrong")
OURS = ("noise", "disagreement", "scarcity", "source", "doubt", "ratio")
CONTRASTS = {
    "noisy, rest": ("noisy", "other"),
    "missing, rest": ("missing", "other"),
    "noisy, missing": GROUPS[:2],
    "wrong, right": ("wrong", "right"),
}


@dataclass(frozen=True)
class Case(studied.Case):
    """A data set, the network that learns it, and how."""

    epochs: int
    structure: str
    loss: str = "cross-entropy"
    meta: bool = False  # two groups of classes, the paper's protocol


CASES: dict[str, Case] = {
    "digits": Case("digits", 1200, 497, lambda k: networks.mlp(64, 64, 64, k), "MLP 64-64-64", 60, "ekfac"),
    "fashion-mnist": Case(
        "fashion-mnist",
        10_000,
        10_000,
        lambda k: networks.cnn(k, (32, 64, 128)),
        "CNN of 32, 64, 128 channels",
        20,
        "ekfac",
    ),
    "mnist": Case("mnist", 10_000, 10_000, lambda k: networks.mlp(784, 256, 256, k), "MLP 784-256-256", 20, "ekfac"),
    "cifar-10": Case("cifar-10", 50_000, 10_000, lambda k: networks.resnet18(k), "ResNet-18", 14, "sketch:size=1024"),
    "cifar-10, ViT": Case(
        "cifar-10", 50_000, 10_000, lambda k: ViT(32, 4, 3, k, 192, 6, 3), "ViT of 6 layers", 30, "sketch:size=1024"
    ),
}
CASES.update({f"{name}, all images": replace(CASES[name], n=60_000) for name in ("fashion-mnist", "mnist")})
CASES.update({f"{name}, squared error": replace(case, loss="squared error") for name, case in CASES.items()})
CASES.update(
    {
        f"{name}, paper": replace(CASES[f"{name}, squared error"], meta=True)
        for name in ("digits", "fashion-mnist", "mnist")
    }
)


def drawn(case: Case, split: Split, seed: int) -> Task:
    """Training data with a noisy and a missing class, drawn at random."""
    if case.meta:
        return corrupt(split, case.n, case.test, seed, meta=True)
    draw = torch.Generator().manual_seed(seed)
    noisy, missing = torch.randperm(10, generator=draw)[:2].tolist()
    chosen = torch.randperm(len(split.labels), generator=draw)[: case.n]
    chosen = chosen[split.labels[chosen] != missing]
    said = split.labels[chosen].clone()
    others = torch.tensor([label for label in range(10) if label != missing])
    random = others[torch.randint(9, (len(said),), generator=draw)]
    said = torch.where(said == noisy, random, said)
    tested = torch.randperm(len(split.test_labels), generator=draw)[: case.test]
    true = split.test_labels[tested]
    return Task(split.inputs[chosen], one_hot(said, 10), split.test_inputs[tested], true, true, noisy, missing)


def trained(case: Case, task: Task, seed: int, device: str, graphs: bool = True) -> nn.Module:
    """A network, with AdamW and a rate that rises and falls; images of CIFAR-10 are flipped and shifted.

    On a GPU steps are captured (`graphs`), and each image of CIFAR-10 is flipped and shifted by itself; the plain loop
    moves all images of a batch alike.
    """
    if device != "cuda" or not graphs:
        return trained_plainly(case, task, seed, device)
    natural = case.data == "cifar-10"
    size = batch_size(case, len(task.inputs))
    steps = case.epochs * len(task.inputs) // size
    settings = {"epochs": case.epochs, "batch": size, "peak": PEAK[natural], "decay": weight_decay(case)}

    def quick() -> nn.Module:
        torch.manual_seed(seed)
        network = case.make(task.targets.shape[1]).to(device)
        targets = task.targets.argmax(1) if case.loss == "cross-entropy" else task.targets
        return train_captured(network, task.inputs, targets, loss=case.loss, seed=seed, images=natural, **settings)

    return or_else(
        quick,
        lambda: trained_plainly(case, task, seed, device),
        lambda network: fault(network, task.test_inputs.to(device), task.test_answers, steps),
    )


def weight_decay(case: Case) -> float:
    """Of the data set."""
    return WEIGHT_DECAY.get(case.data, 1e-4)


def batch_size(case: Case, n: int) -> int:
    """Examples a step."""
    return 256 if case.data == "cifar-10" else 128 if n > 2000 else 32


def trained_plainly(case: Case, task: Task, seed: int, device: str) -> nn.Module:
    """The same with a plain loop."""
    torch.manual_seed(seed)
    network = case.make(task.targets.shape[1]).to(device).train()
    draw = torch.Generator().manual_seed(seed)
    natural = case.data == "cifar-10"
    if natural:
        network = network.to(memory_format=torch.channels_last)  # quicker in half precision
    size, decay = batch_size(case, len(task.inputs)), weight_decay(case)
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=decay)
    steps = case.epochs * -(-len(task.inputs) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK[natural], total_steps=steps)
    for _ in range(case.epochs):
        for some in torch.randperm(len(task.inputs), generator=draw).to(device).split(size):
            inputs = augment(task.inputs[some], draw) if natural else task.inputs[some]
            with torch.autocast("cuda", torch.bfloat16, enabled=natural and device == "cuda"):
                outputs = network(inputs).float()
            answers = task.targets[some]
            loss = (
                F.cross_entropy(outputs, answers.argmax(1))
                if case.loss == "cross-entropy"
                else (outputs - answers).square().sum(1).mean()
            )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return network.to(memory_format=torch.contiguous_format).eval()


def execution(device: str, memory: float = MEMORY) -> whence.Execution:
    """Half precision and some GiB of memory on a GPU, which several studies share."""
    if device != "cuda":
        return whence.Execution()
    return whence.Execution(precision="fp16", max_memory=int(memory * 2**30))


def at_once(device: str) -> int:
    """Images in a batch of a fit, or to explain: on a GPU few batches, since the CPU starts every operation."""
    return 2000 if device == "cuda" else 500


def groups(task: Task, right: Tensor) -> dict[str, Tensor]:
    """Which test points (m,) belong to each group; `right` (m,) are those predicted rightly."""
    noisy, missing = task.test_labels == task.noisy, task.test_labels == task.missing
    other = ~noisy & ~missing
    return {"noisy": noisy, "missing": missing, "right": other & right, "wrong": other & ~right, "other": other}


def judged(
    found: whence.Explanation, others: Mapping[str, Tensor], truth: Mapping[str, Tensor], right: Tensor
) -> dict[str, Any]:
    """Verdicts by group of points, and how well ours and other scores (m,) answer each question."""
    said = torch.tensor([VERDICTS.index(verdict) for verdict in found.verdicts])
    confident = said == 0
    scores = {key: getattr(found, key) for key in OURS} | dict(others)
    areas = {
        key: {
            words: auroc(score.cpu()[truth[a] | truth[b]], truth[a][truth[a] | truth[b]])
            for words, (a, b) in CONTRASTS.items()
        }
        for key, score in scores.items()
    }
    return {
        "right_of_confident": float(right[confident].double().mean()) if bool(confident.any()) else None,
        "right_of_uncertain": float(right[~confident].double().mean()) if bool((~confident).any()) else None,
        "verdicts": {key: torch.bincount(said[truth[key]], minlength=4).tolist() for key in GROUPS},
        "auroc": areas,
    }


@torch.no_grad()
def baselines(case: Case, network: nn.Module, task: Task) -> dict[str, Tensor]:
    """Scores that need the network alone, or its features; the larger, the more doubtful."""
    outputs, features = answers_and_features(network, task.test_inputs)
    answers, known = answers_and_features(network, task.inputs)
    labels = task.targets.argmax(1)
    if case.loss == "cross-entropy":
        p, energy, answers = outputs.softmax(1), -outputs.logsumexp(1), answers.softmax(1)
    else:
        coded = (outputs - float(task.targets.min())).clamp_min(1e-6)
        p, energy = F.normalize(coded, p=1.0, dim=1), -outputs.amax(1)
    squares = (task.targets - answers).square().sum(1)
    return {
        **probability_scores(p),
        "energy": energy,
        **neighbour_scores(known, (task.targets > 0).float(), squares, features),
        "DDU": -class_density(known, labels, features),
        "Mahalanobis": class_distance(known, labels, features),
    }


def separable(features: Tensor, noisy: Tensor, missing: Tensor) -> float:
    """AUROC of a cross-validated logistic regression on features (m, d) between points of two classes (m,)."""
    either = (noisy | missing).nonzero().squeeze(1)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    truth = noisy[either].numpy()
    score = cross_val_predict(model, features.cpu()[either].double().numpy(), truth, cv=5, method="decision_function")
    return auroc(torch.from_numpy(score), torch.from_numpy(truth))


def keep_ranks(folder: Path, name: str, seed: int, scores: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
    """Write the ranks of the test points by each score, and the groups that they belong to."""
    ranks = {key: score.cpu().argsort().argsort().to(torch.int16) for key, score in scores.items()}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"case": name, "seed": seed, "ranks": ranks, "truth": {group: truth[group].cpu() for group in GROUPS}}
    torch.save(kept, folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.pt")


def run_draw(
    name: str,
    case: Case,
    split: Split,
    seed: int,
    device: str,
    graphs: bool = True,
    memory: float = MEMORY,
    ranks: Path | None = None,
) -> dict[str, Any]:
    """Train, fit, explain and compare."""
    task = drawn(case, split, seed)
    task = replace(task, **{part: getattr(task, part).to(device) for part in ("inputs", "targets", "test_inputs")})
    clock = time.perf_counter()
    network = trained(case, task, seed, device, graphs)
    seconds = {"train": time.perf_counter() - clock}
    likelihood = "categorical" if case.loss == "cross-entropy" else "gaussian"
    targets = task.targets.argmax(1) if case.loss == "cross-entropy" else task.targets
    clock = time.perf_counter()
    tracer = whence.fit(
        network,
        batches(task.inputs, targets, at_once(device)),
        likelihood=likelihood,
        progress=False,
        structure=options(case.structure)["structure"],
        execution=execution(device, memory),
    )
    seconds["fit"] = time.perf_counter() - clock
    clock = time.perf_counter()
    points = list(task.test_inputs.split(at_once(device)))
    found = tracer.explain(points, level=LEVEL)
    seconds["first explain"] = time.perf_counter() - clock
    clock = time.perf_counter()
    beside = tracer.explain(points, level=LEVEL, pool=points)
    seconds["explain beside a pool"] = time.perf_counter() - clock
    outputs, features = answers_and_features(network, task.test_inputs)
    right = outputs.argmax(1).cpu() == task.test_answers
    truth = groups(task, right)
    others = baselines(case, network, task)
    with_pool = pool_scores(answers_and_features(network, task.inputs)[1], features)
    alone = judged(found, others, truth, right)
    pooled = judged(beside, {"frequency": beside.frequency, **others, **with_pool}, truth, right)
    if ranks is not None:
        kept = {key: getattr(found, key) for key in OURS} | {"ambiguity": found.ambiguity.nan_to_num()} | others
        keep_ranks(ranks, name, seed, kept, truth)
    confident = torch.tensor([verdict == VERDICTS[0] for verdict in found.verdicts])
    of_class = {
        str(label): round(float((~confident)[truth["right"] & (task.test_labels == label)].double().mean()), 4)
        for label in task.test_labels[truth["right"]].unique().tolist()
    }
    return {
        "case": name,
        "seed": seed,
        "n": len(task.inputs),
        "test": len(found),
        "noisy_class": task.noisy,
        "missing_class": task.missing,
        "network": case.describe,
        "epochs": case.epochs,
        "loss": case.loss,
        "structure": case.structure,
        "accuracy_other": float(right[truth["other"]].double().mean()),
        **alone,
        "pool": {"inputs": len(beside), **pooled},
        "uncertain_by_class": of_class,
        "noise_limit": found.noise_limit,
        "scarcity_limit": found.scarcity_limit,
        "separable": separable(features, truth["noisy"], truth["missing"]),
        "seconds": seconds,
    }


def summary(row: dict[str, Any]) -> str:
    """A few lines."""
    lines = [f"{row['case']} draw {row['seed']} ({row['noisy_class']}, {row['missing_class']})"]
    for words, part in (("alone", row), ("beside a pool", row["pool"])):
        shares = {key: [round(x / max(sum(counts), 1), 2) for x in counts] for key, counts in part["verdicts"].items()}
        ours = {key: [round(x, 3) for x in part["auroc"][key].values()] for key in ("scarcity", "doubt", "source")}
        lines.append(f"  {words}: {shares} {ours}")
    lines.append(f"  { {key: round(value, 2) for key, value in row['seconds'].items()} }")
    return "\n".join(lines)


def main() -> None:
    """Run the cases and draws that were asked for."""
    parser = arguments(__doc__, CASES, "verdicts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="capture steps on a GPU")
    parser.add_argument("--memory", type=float, default=MEMORY, help="GiB of a GPU that a fit may take")
    parser.add_argument("--ranks", type=Path, help="folder where the ranks of all scores are kept")
    given: argparse.Namespace = parser.parse_args()
    record = open_record(given.out, given.append, level=LEVEL, verdicts=VERDICTS)
    splits: dict[str, Split] = {}
    for name in given.cases:
        case = CASES[name]
        case = replace(case, n=given.n or case.n, test=given.test or case.test, epochs=given.epochs or case.epochs)
        case = replace(case, structure=given.structures[0]) if given.structures else case
        if case.data not in splits:
            splits[case.data] = read_cifar(Path(given.data)) if case.data == "cifar-10" else read(case.data, given.data)
        for seed in given.seeds:
            row = run_draw(name, case, splits[case.data], seed, given.device, given.graphs, given.memory, given.ranks)
            put(record, row, ("case", "seed"))
            save(given.out, record)
            say(summary(row))


if __name__ == "__main__":
    main()
