"""The image part of `quality_peers`: which test points each method doubts, and how good its probabilities are.

MNIST and Fashion-MNIST, 14 x 14 pixels (means of 2 x 2), ten classes of which one has random labels in training and one
is missing from it; points of the other data set are out of distribution. Networks are trained by cross-entropy.
Ordinary points are test points of the other eight classes: misclassified ones are looked for among them, and the other
three kinds are compared with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence_paper.baselines import SWAG, Answer, Baseline, Data, DeepEnsemble, LaplaceTorch, MCDropout, Recipe, Sampled
from whence_paper.networks import mlp
from whence_paper.scores import auroc

from . import peers_ekfac, shipped
from .data import Split, read_digits
from .record import failed
from .training import train

SETS = ("mnist", "fashion-mnist")
OUTSIDES = {"mnist": "fashion-mnist", "fashion-mnist": "mnist", shipped.IMAGES: shipped.TURNED}
"""The data set of the points that are out of distribution."""
WIDTH = 64
EPOCHS = 30
WEIGHT_DECAY = 1e-2
BATCH = 64
HELD = 500
TESTED = 1000
OUTSIDE = 300
LEVEL = 0.95

FAMILIES: dict[str, list[Any]] = {
    **{f"laplace-torch {one}, all": [LaplaceTorch("all", one)] for one in ("kron", "diag", "gp")},
    **{f"laplace-torch {one}, last layer": [LaplaceTorch("last_layer", one)] for one in ("full", "kron", "diag")},
    **peers_ekfac.families(WEIGHT_DECAY),
    "deep ensemble of 5": [DeepEnsemble(5)],
    "MC dropout": [MCDropout(rate) for rate in (0.1, 0.3, 0.5)],
    "SWAG": [SWAG(rate, epochs=15, weight_decay=WEIGHT_DECAY, batch=BATCH) for rate in (0.01, 0.03, 0.1)],
}
"""Methods with the settings among which the held-out likelihood chooses."""


@dataclass(frozen=True)
class Task:
    """One draw.

    Attributes:
        data: trained on.
        held: held out, corrupted like the training set.
        test: ordinary, noisy and missing points, with their true labels.
        kinds: by name, which of `test` and the points outside, put together, are such.
        points: the inputs of both.
    """

    data: Data
    held: Data
    labels: Tensor
    kinds: dict[str, Tensor]
    points: Tensor


def draw_task(split: Split, other: Split, n: int, seed: int) -> Task:
    """One class noisy, one missing."""
    draw = torch.Generator().manual_seed(seed)
    noisy, missing = torch.randperm(10, generator=draw)[:2].tolist()
    allowed = (split.labels != missing).nonzero().squeeze(1)
    chosen = allowed[torch.randperm(len(allowed), generator=draw)[: n + HELD]]
    labels = split.labels[chosen].clone()
    wrong = labels == noisy
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
    whole = Data(_small(split.inputs[chosen]), labels)
    tested = torch.randperm(len(split.test_labels), generator=draw)[:TESTED]
    true = split.test_labels[tested]
    outside = _small(other.test_inputs[torch.randperm(len(other.test_labels), generator=draw)[:OUTSIDE]])
    ends = torch.zeros(OUTSIDE, dtype=torch.bool)
    kinds = {
        "ordinary": torch.cat([(true != noisy) & (true != missing), ends]),
        "noisy": torch.cat([true == noisy, ends]),
        "missing": torch.cat([true == missing, ends]),
        "outside": torch.cat([torch.zeros(len(true), dtype=torch.bool), ~ends]),
    }
    held = torch.arange(n, n + HELD)
    points = torch.cat([_small(split.test_inputs[tested]), outside])
    return Task(whole.take(torch.arange(n)), whole.take(held), true, kinds, points)


def _small(images: Tensor) -> Tensor:
    return F.avg_pool2d(images, 2).flatten(1)


def fit_network(network: nn.Module, data: Data, generator: torch.Generator) -> None:
    """Adam with a penalty, cross-entropy."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    train(
        network,
        data.inputs,
        data.targets,
        epochs=EPOCHS,
        seed=seed,
        rate=3e-3,
        weight_decay=WEIGHT_DECAY,
        batch=BATCH,
        loss=lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum"),
        decoupled=True,
    )


def of_probabilities(probabilities: Tensor) -> dict[str, Tensor]:
    """Doubt that probabilities alone show."""
    return {
        "1 - max p": 1 - probabilities.amax(1),
        "entropy": -(probabilities.clamp_min(1e-12).log() * probabilities).sum(1),
    }


def of_answer(answer: Answer) -> dict[str, Tensor]:
    """Doubt of a baseline: of its probabilities, and the total variance of its logits."""
    assert answer.probabilities is not None
    return {**of_probabilities(answer.probabilities.double()), "variance": answer.variance.double().sum(1)}


def of_draws(fitted: Sampled, points: Tensor) -> dict[str, Tensor]:
    """What draws show beside: how much one learns about the answer from knowing the function."""
    with torch.no_grad():
        drawn = fitted.sample(points).double().softmax(-1)
    within = -(drawn.clamp_min(1e-12).log() * drawn).sum(-1).mean(0)
    return {"mutual information": of_probabilities(drawn.mean(0))["entropy"] - within}


def by_whence(recipe: Recipe, points: Tensor) -> Iterator[tuple[str, dict[str, Tensor], Tensor]]:
    """Name, scores, probabilities averaged over HeC3 by the probit approximation."""
    n = len(recipe.data)
    ridge = whence.ridge_from_weight_decay(WEIGHT_DECAY, n, loss="cross_entropy")
    for name, structure in (("core", whence.Core(size=1024)), ("ekfac", whence.EKFAC())):
        tracer = whence.fit(
            recipe.network(), recipe.data.batches(500), "categorical", structure=structure, ridge=ridge, progress=False
        )
        found = tracer.predict(list(points.split(500)), covariance=True)
        smooth = (found.mean / (1 + torch.pi / 8 * found.hec3).sqrt()).softmax(1)
        margin = found.margin
        scores = {
            "Ho": found.trace("ho"),
            "HeC3": found.trace("hec3"),
            "HeC3 / Ho": found.ratio,
            "HeC3 of probabilities": found.probability_covariance("hec3").diagonal(dim1=1, dim2=2).sum(1),
            "margin over HeC3's deviation": -margin / found.margin_variance("hec3").sqrt(),
            **{f"{key}, HeC3 averaged": value for key, value in of_probabilities(smooth).items()},
        }
        yield f"whence {name}", scores, smooth


class Classifier(ClassifierMixin, BaseEstimator):
    """A network as MAPIE knows classifiers."""

    def __init__(self, network: nn.Module | None = None) -> None:
        self.network = network
        self.classes_ = np.arange(10)
        self.is_fitted = True

    def fit(self, X: np.ndarray, y: np.ndarray) -> Classifier:
        return self

    @torch.no_grad()
    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        assert self.network is not None
        found: np.ndarray = self.network(torch.from_numpy(np.asarray(X))).double().softmax(1).numpy()
        return found / found.sum(1, keepdims=True)

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.predict_proba(X).argmax(1)


def by_conformal(network: nn.Module, task: Task, score: str) -> dict[str, Any]:
    """MAPIE's prediction sets: how large, how often right; the size as a score."""
    from mapie.classification import SplitConformalClassifier  # a peer, present or not

    made = SplitConformalClassifier(
        Classifier(network), confidence_level=LEVEL, conformity_score=score, prefit=True, random_state=0
    ).conformalize(task.held.inputs.numpy(), task.held.targets.numpy())
    sets = torch.from_numpy(made.predict_set(task.points.numpy())[1][:, :, 0])
    ordinary = task.kinds["ordinary"][: len(task.labels)]
    inside = sets[: len(task.labels)].gather(1, task.labels.unsqueeze(1)).squeeze(1)
    size = sets.sum(1).double()
    return {
        "auroc": {"size of the set": areas(size, task, network)},
        "coverage": float(inside[ordinary].double().mean()),
        "set_size": float(size[: len(task.labels)][ordinary].mean()),
    }


@torch.no_grad()
def areas(
    score: Tensor, task: Task, network: nn.Module | None = None, predicted: Tensor | None = None
) -> dict[str, float]:
    """AUROC for each kind of point; mistakes are those of the predictions that the method makes."""
    if predicted is None:
        assert network is not None
        predicted = network(task.points).argmax(1)
    ordinary = task.kinds["ordinary"]
    first = ordinary[: len(task.labels)]
    wrong = predicted[: len(task.labels)][first] != task.labels[first]
    found = {"misclassified": auroc(score[: len(task.labels)][first], wrong)}
    for kind in ("noisy", "missing", "outside"):
        both = ordinary | task.kinds[kind]
        found[kind] = auroc(score[both], task.kinds[kind][both])
    return found


def of_quality(probabilities: Tensor, task: Task) -> dict[str, float]:
    """Accuracy, negative log-likelihood and calibration error of ordinary points."""
    ordinary = task.kinds["ordinary"][: len(task.labels)]
    given, labels = probabilities[: len(task.labels)][ordinary].double(), task.labels[ordinary]
    confidence, predicted = given.max(1)
    right = (predicted == labels).double()
    bins = (confidence * 15).long().clamp_max(14)
    gaps = [
        float((right[bins == one].mean() - confidence[bins == one].mean()).abs()) * float((bins == one).double().mean())
        for one in range(15)
        if bool((bins == one).any())
    ]
    nll = -given.gather(1, labels.unsqueeze(1)).clamp_min(1e-12).log().mean()
    return {"accuracy": float(right.mean()), "nll": float(nll), "ece": sum(gaps)}


def by_baseline(baseline: Baseline, recipe: Recipe, task: Task) -> dict[str, Any]:
    """All measures of a baseline, and its likelihood on the held-out part."""
    fitted = baseline.fit(recipe)
    answer, held = (peers_ekfac.finite(fitted.predict(x)) for x in (task.points, task.held.inputs))
    assert answer.probabilities is not None
    assert held.probabilities is not None
    scores = of_answer(answer) | (of_draws(fitted, task.points) if isinstance(fitted, Sampled) else {})
    predicted = answer.probabilities.argmax(1)
    nll = F.nll_loss(held.probabilities.double().clamp_min(1e-12).log(), task.held.targets)
    return {
        "auroc": {name: areas(value, task, predicted=predicted) for name, value in scores.items()},
        **of_quality(answer.probabilities, task),
        "held_out_nll": float(nll),
    }


def run(folder: Path | None, name: str, seed: int, n: int) -> dict[str, Any]:
    """All methods on one draw."""
    both = name, OUTSIDES[name]
    split, other = (shipped.images(one) if folder is None else read_digits(folder, one) for one in both)
    task = draw_task(split, other, n, seed)
    recipe = Recipe(lambda: mlp(196, WIDTH, 10), fit_network, task.data, "categorical", seed=1000 * seed)
    network = recipe.network()
    with torch.no_grad():
        alone = network(task.points).double()
    top = alone.topk(2, 1).values
    scores = {**of_probabilities(alone.softmax(1)), "margin": top[:, 1] - top[:, 0]}
    methods: dict[str, dict[str, Any]] = {
        "network alone": {
            "auroc": {key: areas(value, task, network) for key, value in scores.items()},
            **of_quality(alone.softmax(1), task),
        }
    }
    started = time.process_time()
    for method, told, smooth in by_whence(recipe, task.points):
        found = {"auroc": {key: areas(value, task, network) for key, value in told.items()}, **of_quality(smooth, task)}
        methods[method] = {**found, "cpu_s": round(time.process_time() - started, 2)}
        started = time.process_time()
    for label, family in FAMILIES.items():
        tried = {}
        for baseline in family:
            started = time.process_time()
            try:
                tried[baseline.name] = by_baseline(baseline, recipe, task)
                tried[baseline.name]["cpu_s"] = round(time.process_time() - started, 2)
            except Exception as error:  # a peer that fails is part of the result
                methods.setdefault(label, failed(error))
        if tried:
            best = min(tried, key=lambda one: tried[one]["held_out_nll"])
            methods[label] = {**tried[best], "chosen": best}
    try:
        methods |= {f"MAPIE {score} sets": by_conformal(network, task, score) for score in ("lac", "aps")}
    except Exception as error:  # as above
        methods["MAPIE"] = failed(error)
    return {"set": name, "draw": seed, "n": n, "test": len(task.labels), "methods": methods}
