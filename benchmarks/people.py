"""Labels and doubts of people: CIFAR-10N for wrong labels, CIFAR-10H for what people themselves disagree about.

    python -m benchmarks.people --data DIR --device cuda --labels aggregate worst --folds 5 --out results/people.json

A ResNet-18 is trained by cross-entropy, with augmentation, on labels that people gave (`aggregate`, of which 9 % are
wrong, or `worst`, 40 %). Which labels are wrong: AUROC of the suspicion of one fit, of the plain loss of the same
network, of both over flipped and shifted copies of each image, of the labels of 50 neighbours in its last
features, and of cleanlab's self-confidence and margin with probabilities from cross-validation of the same network and
epochs. Which test images do people disagree about: rank correlation of each score with the entropy of some 51 answers,
and the mean of that entropy for every verdict. `--tiny` is a small network on a few hundred images, to try it out.

The record is saved after every part. The row of a run that was stopped names the parts it lacks under `missing`, which
a complete row does not have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence.influence.explanation import VERDICTS
from whence_paper.feature_scores import answers_and_features, neighbour_scores, probability_scores

from . import networks
from .data import Split, Task, batches, one_hot, read_cifar
from .record import save, say
from .scores import auroc, ranks, spearman
from .studied import open_record, options, put
from .training import augment
from .verdicts import CASES, MEMORY, Case, at_once, execution, trained

CLASSES = 10
VIEWS = 8
"""Flipped and shifted copies of an image, over which a loss is averaged."""


def people(folder: Path, images: int, test: int) -> tuple[dict[str, Tensor], Tensor]:
    """(n,) labels by people, under "aggregate" and "worst", and (m, 10) shares of people's answers for test images."""
    home = folder / "cifar-10"
    said = {name: torch.from_numpy(values.astype(np.int64)) for name, values in np.load(home / "cifar-10n.npz").items()}
    counts = torch.from_numpy(np.load(home / "cifar-10h.npz")["counts"].astype(np.float64))
    return {name: labels[:images] for name, labels in said.items()}, F.normalize(counts[:test], p=1.0, dim=1)


def label_quality(p: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """(n,) cleanlab's two label quality scores, from probabilities (n, k); turned round: larger is more doubtful.

    Examples:
        >>> found = label_quality(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([1]))
        >>> [round(float(one), 2) for one in found.values()]
        [0.8, 0.75]
    """
    own = p.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = p.scatter(1, labels.unsqueeze(1), -1.0).amax(1)
    return {"self-confidence": 1 - own, "margin": (1 + others - own) / 2}


def entropy(p: Tensor) -> Tensor:
    """Of each row."""
    return probability_scores(p)["entropy"]


@torch.no_grad()
def averaged(network: nn.Module, inputs: Tensor, seed: int) -> Tensor:
    """(n, k) probabilities, the mean over flipped and shifted copies of each image; in half precision on a GPU."""
    draw = torch.Generator().manual_seed(seed)
    total: Tensor = torch.zeros(())
    for _ in range(VIEWS):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
            parts = [network(augment(some, draw)).float().softmax(1) for some in inputs.split(1000)]
        total = total + torch.cat(parts).cpu()
    return total / VIEWS


def cross_validated(case: Case, task: Task, folds: int, seed: int, learn: Learn) -> Tensor:
    """(n, k) probabilities for each example by a network that did not see it."""
    inputs = task.inputs
    held = torch.randint(folds, (len(inputs),), generator=torch.Generator().manual_seed(seed))
    p = torch.zeros(len(inputs), CLASSES)
    for fold in range(folds):
        inside, outside = (held != fold).nonzero().squeeze(1), (held == fold).nonzero().squeeze(1)
        there = inside.to(inputs.device)
        network = learn(case, replace(task, inputs=inputs[there], targets=task.targets[there]), seed + fold)
        p[outside] = answers_and_features(network, inputs[outside.to(inputs.device)])[0].softmax(1).cpu()
    return p


Learn = Callable[[Case, Task, int], nn.Module]
"""Trains the network of a case with a seed."""


def training_task(inputs: Tensor, labels: Tensor, tests: Tensor, answers: Tensor) -> Task:
    """What `trained` takes: the labels that were given, and test images with the true ones."""
    return Task(inputs, one_hot(labels, CLASSES).to(inputs.device), tests, answers, answers, -1, None)


Looked = tuple[Tensor, Tensor]
"""Outputs and last features of a network."""


def label_scores(
    network: nn.Module, tracer: whence.Tracer, inputs: Tensor, labels: Tensor, known: Looked
) -> dict[str, Tensor]:
    """How doubtful each training label is, from one network; the larger, the more."""
    outputs, features = known
    coded = one_hot(labels, CLASSES).to(inputs.device)
    loss = F.cross_entropy(outputs, labels.to(outputs.device), reduction="none").cpu()
    draw = torch.Generator().manual_seed(2)
    place = places(tracer.suggest(len(inputs)))
    copies = places(tracer.suggest(len(inputs), augment=lambda some: augment(some, draw), copies=VIEWS))
    views = averaged(network, inputs, 0)
    voted = voting(features, coded)
    found = {
        "whence suspicion": place,
        "whence suspicion, augmented copies": copies,
        "loss": loss,
        "loss of augmented copies": label_quality(views, labels)["self-confidence"],
        "labels of 50 neighbours": label_quality(voted, labels)["self-confidence"],
    }
    found["ranks of suspicion and neighbours"] = ranks(place) + ranks(found["labels of 50 neighbours"])
    return found


def places(suggested: whence.Suggestion) -> Tensor:
    """(n,) how early each example is suggested; the larger, the earlier."""
    found = torch.empty(len(suggested), dtype=torch.float64)
    found[suggested.index.cpu()] = -torch.arange(len(suggested), dtype=torch.float64)
    return found


def voting(features: Tensor, coded: Tensor, count: int = 50) -> Tensor:
    """(n, k) shares of the labels of each example's nearest neighbours, without itself."""
    unit = F.normalize(features, dim=1)
    found = []
    for low in range(0, len(unit), 1000):
        alike = unit[low : low + 1000] @ unit.T
        own = torch.arange(len(alike), device=alike.device)
        alike[own, low + own] = -2.0
        found.append(coded[alike.topk(min(count, len(unit) - 1), dim=1).indices].mean(1))
    return torch.cat(found).cpu()


def doubt_scores(
    network: nn.Module, found: whence.Explanation, labels: Tensor, tests: Tensor, known: Looked, asked: Looked
) -> dict[str, Tensor]:
    """How doubtful each test image is."""
    outputs, features = asked
    answers, learned = known
    coded = F.one_hot(labels, CLASSES).to(outputs)
    squares = (coded - answers.softmax(1)).square().sum(1)
    scores = {name: getattr(found, name) for name in ("noise", "scarcity", "source", "ratio", "ho", "hec3")}
    scores.update(probability_scores(outputs.softmax(1)))
    scores.update(neighbour_scores(learned, coded, squares, features))
    scores = {name: values.cpu().double() for name, values in scores.items()}
    scores["entropy of augmented copies"] = entropy(averaged(network, tests, 1)).double()
    scores["noise times ambiguity"] = scores["noise"] * found.ambiguity.cpu().double()
    scores["ranks of noise and entropy"] = ranks(scores["noise"]) + ranks(scores["entropy"])
    scores["ranks of noise and copies"] = ranks(scores["noise"]) + ranks(scores["entropy of augmented copies"])
    return scores


def run(
    case: Case,
    split: Split,
    said: Tensor,
    answers: Tensor,
    seed: int,
    folds: int,
    device: str,
    graphs: bool = True,
    memory: float = MEMORY,
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """One network on one set of labels; `keep` gets the row as it is after every part."""
    clock = Clock()
    inputs, tests = split.inputs.to(device), split.test_inputs.to(device)
    task = training_task(inputs, said, tests, split.test_labels)

    def learn(case: Case, task: Task, seed: int) -> nn.Module:
        return trained(case, task, seed, device, graphs)

    network = clock.timed("train", lambda: learn(case, task, seed))
    given = options(case.structure)["structure"]
    tracer = clock.timed(
        "fit",
        lambda: whence.fit(
            network,
            batches(inputs, said.to(device), at_once(device)),
            likelihood="categorical",
            structure=given,
            progress=False,
            execution=execution(device, memory),
        ),
    )
    wrong = said != split.labels[: len(said)]
    known, asked = (answers_and_features(network, some) for some in (inputs, tests))
    row: dict[str, Any] = {
        "n": len(inputs),
        "test": len(tests),
        "wrong_labels": float(wrong.double().mean()),
        "accuracy": float((asked[0].argmax(1).cpu() == split.test_labels).double().mean()),
        "auroc_wrong": {},
        "spearman_people": {},
        "verdicts": {},
        "missing": ["label scores", "verdicts", "doubt scores", *(["cross-validation"] if folds else [])],
        "seconds": clock.seconds,
    }

    def found_out(*parts: str) -> None:
        row["missing"] = [part for part in row["missing"] if part not in parts]
        keep(row)

    def judge(scores: dict[str, Tensor]) -> None:
        row["auroc_wrong"].update({name: auroc(values.double(), wrong) for name, values in scores.items()})

    keep(row)
    judge(clock.timed("label scores", lambda: label_scores(network, tracer, inputs, said, known)))
    found_out("label scores")
    found = clock.timed("explain", lambda: tracer.explain(list(tests.split(at_once(device)))))
    doubts = entropy(answers)
    for verdict in VERDICTS:
        which = torch.tensor([one == verdict for one in found.verdicts])
        people = float(doubts[which].mean()) if bool(which.any()) else None
        row["verdicts"][verdict] = {"points": int(which.sum()), "people": people}
    doubtful = clock.timed("doubt scores", lambda: doubt_scores(network, found, said, tests, known, asked))
    row["spearman_people"] = {name: spearman(values, doubts) for name, values in doubtful.items()}
    found_out("verdicts", "doubt scores")
    if folds:
        p = clock.timed("cross-validation", lambda: cross_validated(case, task, folds, seed, learn))
        quality = label_quality(p, said)
        judge({f"cleanlab {name}, cross-validated": values for name, values in quality.items()})
    del row["missing"]
    keep(row)
    return row


class Clock:
    """Seconds of what is done, by name; each is said."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it."""
        start = time.perf_counter()
        found = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = round(time.perf_counter() - start, 2)
        say(f"{name}: {self.seconds[name]} s")
        return found


def main() -> None:
    """Every set of labels and seed that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--labels", nargs="+", choices=("aggregate", "worst"), default=["aggregate", "worst"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[300])
    parser.add_argument("--folds", type=int, default=0, help="of the cross-validation for cleanlab; 0 for none")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="capture steps on a GPU")
    parser.add_argument("--memory", type=float, default=MEMORY, help="GiB of a GPU that a fit may take")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batches", type=int, default=5, help="of 10,000 training images each")
    parser.add_argument("--structure", default="sketch:size=1024")
    parser.add_argument("--tiny", action="store_true", help="a few hundred images, a small network")
    parser.add_argument("--out", type=Path, default=Path("out/people.json"))
    parser.add_argument("--append", action="store_true")
    given = parser.parse_args()
    case = replace(CASES["cifar-10"], epochs=given.epochs, structure=given.structure)
    split = read_cifar(given.data, 1 if given.tiny else given.batches)
    if given.tiny:
        case = replace(case, make=lambda k: networks.resnet18(k, width=4), describe="ResNet-18 of width 4")
        split = Split(split.inputs[:400], split.labels[:400], split.test_inputs[:200], split.test_labels[:200])
    said, answers = people(given.data, len(split.inputs), len(split.test_inputs))
    record = open_record(given.out, given.append)
    for seed in given.seeds:
        for labels in given.labels:
            about = {
                "case": labels,
                "seed": seed,
                "network": case.describe,
                "epochs": case.epochs,
                "folds": given.folds,
                "structure": case.structure,
            }

            def keep(row: dict[str, Any], about: dict[str, Any] = about) -> None:
                put(record, {**about, **row}, ("case", "seed", "structure"))
                save(given.out, record)

            settings = (seed, given.folds, given.device, given.graphs, given.memory)
            row = run(case, split, said[labels], answers, *settings, keep)
            say(labels, seed, {name: round(value, 3) for name, value in row["auroc_wrong"].items()})
            say({name: round(value, 3) for name, value in row["spearman_people"].items()})
            say(row["verdicts"], f"accuracy {row['accuracy']:.3f}", row["seconds"])


if __name__ == "__main__":
    main()
