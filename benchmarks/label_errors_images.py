"""Finding replaced labels of natural images: a ResNet-9 on 5,000 images of CIFAR-10, as in dattri.

    python -m benchmarks.label_errors_images --data DIR --device cuda --out results/label_errors_images.json

A tenth of the labels are replaced by another class at random, and a network is trained on them as dattri does: gradient
descent with momentum, no augmentation. Recorded is the AUROC of each score for the replaced ones: the order in which
`suggest` names labels to check, for every structure; the plain loss of the same network; the labels of 50 neighbours in
its last features; cleanlab's two label quality scores, in-sample and with probabilities of five-fold cross-validation;
and how much an example changes its own loss by kronfluence, where that is installed (`--peers`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence_paper.feature_scores import answers_and_features

from . import influences, networks
from .data import Split, batches, one_hot, read_cifar
from .label_errors import CLASSES, FLIPPED, FOLDS, LATER, Flipped, flip, losses
from .people import label_quality, places, voting
from .record import failed, save, say
from .scores import auroc
from .studied import Study, adjusted, arguments, open_record, options, put
from .training import descend
from .verdicts import MEMORY

DAMPINGS: dict[str, float | None] = {"its own rule": None}
"""Of kronfluence: a tenth of the mean eigenvalue. The network is trained without a penalty."""
CASES = {
    "cifar-10": Study(
        "cifar-10", 5000, 1000, lambda k: networks.resnet9(k), "ResNet-9", 10, ("sketch:size=1024", "core:size=1024")
    )
}
TINY = replace(CASES["cifar-10"], make=lambda k: networks.resnet9(k, width=2), describe="ResNet-9 of width 2")


def learned(study: Study, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A trained network."""
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator
        torch.manual_seed(seed)
        network = study.make(CLASSES)
    return descend(
        network.to(inputs.device), inputs, labels, epochs=study.epochs, batch=64, rate=0.01, momentum=0.9, seed=seed
    )


def by_quality(outputs: Tensor, task: Flipped, where: str) -> dict[str, Tensor]:
    """The loss and cleanlab's scores, from outputs in-sample or not."""
    p, labels = outputs.softmax(1).cpu(), task.labels.cpu()
    quality = {f"cleanlab {name}, {where}": values for name, values in label_quality(p, labels).items()}
    return {f"loss, {where}": losses(outputs, task, "cross-entropy").cpu(), **quality}


def cross_validated(study: Study, task: Flipped, seed: int) -> Tensor:
    """(n, k) outputs for each example by a network that did not see it."""
    fold = (torch.arange(len(task.labels)) % FOLDS).to(task.labels.device)  # the draw is in random order
    found = torch.empty(len(task.labels), CLASSES, device=task.labels.device)
    for number in range(FOLDS):
        kept = fold != number
        network = learned(study, task.inputs[kept], task.labels[kept], seed + 1000 * (number + 1))
        found[~kept] = answers_and_features(network, task.inputs[~kept])[0]
    return found


def run_draw(study: Study, split: Split, seed: int, device: str, peers: bool) -> dict[str, Any]:
    """One network and its five folds."""
    task = flip(split, study.n, seed)
    task = Flipped(task.inputs.to(device), task.labels.to(device), task.flipped)
    start = time.perf_counter()
    network = learned(study, task.inputs, task.labels, seed)
    outputs, features = answers_and_features(network, task.inputs)
    once = time.perf_counter()
    scores: dict[str, Tensor] = {}
    for text in study.structures:
        tracer = whence.fit(
            network,
            batches(task.inputs, task.labels, 500),
            likelihood="categorical",
            progress=False,
            execution=whence.Execution(max_memory=MEMORY * 2**30 if device == "cuda" else None),
            **options(text),
        )
        scores[f"whence {text}"] = places(tracer.suggest(len(task.labels)))
    ours = time.perf_counter()
    scores |= by_quality(outputs, task, "in-sample")
    votes = voting(features, one_hot(task.labels, CLASSES))
    scores["labels of 50 neighbours"] = label_quality(votes, task.labels.cpu())["self-confidence"]
    scores |= by_quality(cross_validated(study, task, seed), task, "cross-validated")
    gone = {}
    if peers:
        try:
            found = influences.self_influences(network, task.inputs, task.labels, True, DAMPINGS, seed)
            scores |= {f"kronfluence self-influence, {name}": value.cpu() for name, value in found.items()}
        except Exception as error:  # a peer that fails is part of the result
            gone["kronfluence"] = failed(error)["failed"]
    tests = split.test_inputs[: study.test].to(device)
    right = outputs.argmax(1).cpu() == task.labels.cpu()
    answers = answers_and_features(network, tests)[0].argmax(1).cpu()
    return {
        "n": len(task.labels),
        "flipped_learned": float(right[task.flipped].double().mean()),
        "others_learned": float(right[~task.flipped].double().mean()),
        "accuracy": float((answers == split.test_labels[: study.test]).double().mean()),
        "auroc": {name: auroc(values.double(), task.flipped) for name, values in scores.items()},
        "did_not_run": gone,
        "train_s": round(once - start, 2),
        "whence_s": round(ours - once, 2),
        "all_s": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    """Every draw that was asked for."""
    parser = arguments(__doc__, CASES, "label_errors_images", LATER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", action="store_true", help="kronfluence, too")
    parser.add_argument("--tiny", action="store_true", help="a small network on the first 10,000 images")
    given = parser.parse_args()
    record = open_record(given.out, given.append, flipped=FLIPPED, folds=FOLDS)
    study = adjusted(TINY if given.tiny else CASES["cifar-10"], given)
    split = read_cifar(given.data, 1 if given.tiny else 5)
    for seed in given.seeds:
        row = run_draw(study, split, seed, given.device, given.peers)
        about = {"case": "cifar-10", "loss": "cross-entropy", "seed": seed, "network": study.describe}
        put(record, {**about, "epochs": study.epochs, **row}, ("case", "seed"))
        save(given.out, record)
        say(seed, {name: round(value, 3) for name, value in row["auroc"].items()})
        say({name: row[name] for name in ("flipped_learned", "others_learned", "accuracy", "did_not_run", "all_s")})


if __name__ == "__main__":
    main()
