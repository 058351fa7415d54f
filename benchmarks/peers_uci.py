"""The UCI part of `quality_peers`: what each method says about new observations.

A fifth of the training part of a published split is held out: conformal prediction needs it, and for every method the
noise is estimated twice, its own way (training residuals, or the method's own estimate) and by the largest likelihood
of the held-out part. Networks see the other four fifths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from torch import Tensor, nn
from torch.distributions import Normal

import whence
from whence_paper.baselines import SWAG, Answer, Baseline, Data, DeepEnsemble, LaplaceTorch, MCDropout, Recipe

from . import peers_ekfac, shipped
from .record import failed
from .training import train

SETS = ("bostonHousing", "concrete", "power-plant", "wine-quality-red", "yacht")
HELD_OUT = 0.2
WIDTH = 50
WEIGHT_DECAY = 3e-3
BATCH = 128
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

PRIORS = (1.0, 10.0, 100.0)
"""Precisions of laplace-torch's prior, beside the one of the largest marginal likelihood."""
LAPLACE = {
    f"laplace-torch {structure}, {weights.replace('_', ' ')}, prior by held-out data": [
        LaplaceTorch(weights, structure, prior, steps=60 if prior is None else 30, subset=500)
        for prior in (None, *PRIORS)
    ]
    for weights, structures in (
        ("all", ("full", "kron", "diag", "lowrank", "gp")),
        ("last_layer", ("full", "kron", "diag")),
    )
    for structure in structures
}
FAMILIES: dict[str, list[Any]] = {
    **LAPLACE,
    **peers_ekfac.families(WEIGHT_DECAY),
    "deep ensemble of 5": [DeepEnsemble(5)],
    "MC dropout": [MCDropout(rate) for rate in (0.01, 0.05, 0.1)],
    "SWAG": [SWAG(rate, epochs=20, weight_decay=WEIGHT_DECAY, batch=BATCH) for rate in (0.03, 0.1, 0.3)],
}
"""Methods with the settings among which the held-out likelihood chooses."""


@dataclass(frozen=True)
class Table:
    """A split in standard units of its training part: trained on, held out, tested on."""

    data: Data
    held: Data
    test: Data
    unit: float


@dataclass(frozen=True)
class Told:
    """What a method says about one set of points. A new observation has variance `variance + noise * shape`.

    Attributes:
        mean: (m,).
        variance: (m,) of the mean function.
        shape: (m,) of the noise: ones, unless a method says that it differs from place to place.
    """

    mean: Tensor
    variance: Tensor
    shape: Tensor

    @classmethod
    def of(cls, answer: Answer) -> Told:
        mean = answer.mean.double().squeeze(1)
        return cls(mean, answer.variance.double().squeeze(1), torch.ones_like(mean))


def read(folder: Path | None, name: str, split: int) -> Table:
    """A published split; the held-out fifth is drawn from its training part, by the number of the split."""
    if folder is None:
        inputs, targets, tested = shipped.diabetes(split)
    else:
        with np.load(folder / "uci" / f"{name}.npz") as found:
            inputs, targets = torch.from_numpy(found["X"]).float(), torch.from_numpy(found["y"]).float().reshape(-1, 1)
            tested = torch.from_numpy(found["test_index"][split].astype(np.int64))
    rest = torch.ones(len(inputs), dtype=torch.bool)
    rest[tested] = False
    order = rest.nonzero().squeeze(1)
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(split))]
    held, kept = order.split([round(HELD_OUT * len(order)), len(order) - round(HELD_OUT * len(order))])
    inputs = (inputs - inputs[kept].mean(0)) / inputs[kept].std(0).clamp_min(1e-6)
    unit = float(targets[kept].std())
    all_of_it = Data(inputs, (targets - targets[kept].mean()) / unit)
    return Table(all_of_it.take(kept), all_of_it.take(held), all_of_it.take(tested), unit)


def make_network(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def trainer(steps: int) -> Callable[[nn.Module, Data, torch.Generator], None]:
    """Adam with a penalty, so many steps, whatever the size of the set."""

    def fit(network: nn.Module, data: Data, generator: torch.Generator) -> None:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        train(
            network,
            data.inputs,
            data.targets,
            epochs=-(-steps * BATCH // len(data)),
            seed=seed,
            rate=0.01,
            weight_decay=WEIGHT_DECAY,
            batch=BATCH,
            decoupled=False,
        )

    return fit


def by_whence(recipe: Recipe, points: list[Tensor]) -> Iterator[tuple[str, list[Told], float]]:
    """Name, what is said about each set of points, own noise variance."""
    n = len(recipe.data)
    usual = whence.ridge_from_weight_decay(WEIGHT_DECAY, n, loss="sum_of_squares")
    variants: list[tuple[str, str, Any]] = [
        ("exact", "exact", usual),
        ("exact, ridge by leave-one-out", "exact", "loo"),
        ("core", "core", usual),
        ("ekfac", "ekfac", usual),
    ]
    for name, structure, ridge in variants:
        tracer = whence.fit(
            recipe.network(),
            recipe.data.batches(1000),
            structure=structure,
            ridge=ridge,
            progress=False,
            noise="mle" if structure == "ekfac" else "unbiased",  # EKFAC counts more freedom than there are examples
        )
        found = [tracer.predict(x) for x in points]
        for estimator in ("ho", "hec3"):
            told = [
                Told(u.mean.squeeze(1), u.variance(estimator).squeeze(1), torch.ones(len(u)).double()) for u in found
            ]
            yield f"whence {name}, {'Ho' if estimator == 'ho' else 'HeC3'}", told, float(tracer.sigma)
        if name == "exact":
            told = [Told(u.mean.squeeze(1), u.hec3.squeeze(1), u.ratio) for u in found]
            yield "whence exact, HeC3, noise by HeC3 / Ho", told, float(tracer.sigma)


def by_baseline(baseline: Baseline, recipe: Recipe, points: list[Tensor]) -> tuple[list[Told], float]:
    """What is said, and the own noise variance: the method's, or the mean squared training residual."""
    fitted = baseline.fit(recipe)
    found = [peers_ekfac.finite(fitted.predict(x)) for x in points]
    if found[0].noise is not None:
        return [Told.of(answer) for answer in found], found[0].noise
    inside = fitted.predict(recipe.data.inputs).mean
    return [Told.of(answer) for answer in found], float((inside - recipe.data.targets).square().mean())


def likeliest_noise(told: Told, targets: Tensor) -> float:
    """The noise variance of the largest likelihood, on a grid of 2 % steps."""
    grid = torch.logspace(-8, 3, 1280, base=10.0, dtype=torch.float64).unsqueeze(1)
    total = told.variance + grid * told.shape
    losses = (total.log() + (targets - told.mean).square() / total).mean(1)
    return float(grid[losses.argmin()])


def measures(told: Told, noise: float, targets: Tensor, unit: float) -> dict[str, float]:
    """Of normal predictive distributions; likelihoods in the units of the data, widths in standard deviations."""
    total = (told.variance + noise * told.shape).clamp_min(1e-12).sqrt()
    far = (targets - told.mean).abs() / total
    inside = {level: float((far <= _reach(level)).double().mean()) for level in LEVELS}
    return {
        "nll": float(-Normal(told.mean, total).log_prob(targets).mean()) + float(np.log(unit)),
        "coverage": inside[0.95],
        "width": float(2 * _reach(0.95) * total.mean()),
        "calibration": float(np.mean([abs(share - level) for level, share in inside.items()])),
    }


def _reach(level: float) -> float:
    return float(Normal(0.0, 1.0).icdf(torch.tensor(0.5 + level / 2, dtype=torch.float64)))


class Regressor(RegressorMixin, BaseEstimator):
    """The network as scikit-learn, and with it MAPIE, knows estimators."""

    def __init__(self, recipe: Recipe | None = None, member: int = 0) -> None:
        self.recipe = recipe
        self.member = member

    def fit(self, X: np.ndarray, y: np.ndarray) -> Regressor:
        assert self.recipe is not None
        data = Data(torch.from_numpy(X), torch.from_numpy(y).float().reshape(-1, 1))
        return self.take(self.recipe.trained(data, self.member))

    def take(self, network: nn.Module) -> Regressor:
        """A network that is trained already."""
        self.network_, self.is_fitted = network, True  # the second is what MAPIE looks for
        return self

    @torch.no_grad()
    def predict(self, X: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self.network_(torch.from_numpy(np.asarray(X))).squeeze(1).double().numpy()
        return answer


def by_conformal(recipe: Recipe, table: Table) -> Iterator[tuple[str, dict[str, float]]]:
    """MAPIE's split conformal on the same network, and its CV+ on networks of five folds of all that is not tested."""
    from mapie.regression import CrossConformalRegressor, SplitConformalRegressor  # a peer, present or not

    held = table.held.inputs.numpy(), table.held.targets.squeeze(1).double().numpy()  # MAPIE refuses rounding
    single = Regressor(recipe).take(recipe.network())
    split = SplitConformalRegressor(single, confidence_level=list(LEVELS), prefit=True).conformalize(*held)
    yield "MAPIE split conformal", intervals(split.predict_interval(table.test.inputs.numpy())[1], table)
    inputs = torch.cat([table.data.inputs, table.held.inputs]).numpy()
    targets = torch.cat([table.data.targets, table.held.targets]).squeeze(1).double().numpy()
    crossed = CrossConformalRegressor(Regressor(recipe), confidence_level=list(LEVELS), cv=5, random_state=0)
    crossed.fit_conformalize(inputs, targets)
    yield "MAPIE CV+ of 5", intervals(crossed.predict_interval(table.test.inputs.numpy())[1], table)


def intervals(found: np.ndarray, table: Table) -> dict[str, float]:
    """Measures of intervals (m, 2, levels)."""
    targets = table.test.targets.numpy()
    inside = ((found[:, 0] <= targets) & (targets <= found[:, 1])).mean(0)
    return {
        "coverage": float(inside[-1]),
        "width": float((found[:, 1, -1] - found[:, 0, -1]).mean()),
        "calibration": float(np.abs(inside - np.array(LEVELS)).mean()),
    }


def run(folder: Path | None, name: str, split: int, steps: int) -> dict[str, Any]:
    """All methods on one split."""
    table = read(folder, name, split)
    recipe = Recipe(lambda: make_network(table.data.inputs.shape[1]), trainer(steps), table.data, seed=1000 * split)
    recipe.network()
    points = [table.held.inputs, table.test.inputs]
    held, tested = (part.targets.double().squeeze(1) for part in (table.held, table.test))
    methods: dict[str, dict[str, Any]] = {}

    def measured_on(told: list[Told], noise: float, seconds: float) -> dict[str, Any]:
        fitted = likeliest_noise(told[0], held)
        return {
            "rmse": float((told[1].mean - tested).square().mean().sqrt()) * table.unit,
            "own": measures(told[1], noise, tested, table.unit),
            "held_out": measures(told[1], fitted, tested, table.unit),
            "held_out_nll": measures(told[0], fitted, held, table.unit)["nll"],
            "cpu_s": round(seconds, 2),
        }

    started = time.process_time()
    with torch.no_grad():
        alone = [Told.of(Answer(recipe.network()(x), torch.zeros(len(x), 1))) for x in points]
        inside = float((recipe.network()(table.data.inputs) - table.data.targets).square().mean())
    methods["network alone"] = measured_on(alone, inside, time.process_time() - started)
    started = time.process_time()
    for method, told, noise in by_whence(recipe, points):
        methods[method] = measured_on(told, noise, time.process_time() - started)
    for label, family in FAMILIES.items():
        tried = {}
        for baseline in family:
            started = time.process_time()
            try:
                told, noise = by_baseline(baseline, recipe, points)
                tried[baseline.name] = measured_on(told, noise, time.process_time() - started)
            except Exception as error:  # a peer that fails is part of the result
                methods.setdefault(label, failed(error))
        if tried:
            best = min(tried, key=lambda one: tried[one]["held_out_nll"])
            methods[label] = {**tried[best], "chosen": best}
            if label != family[0].name and family[0].name in tried and family[0].name.startswith("laplace"):
                methods[family[0].name] = tried[family[0].name]
    try:
        methods |= {method: {"held_out": found} for method, found in by_conformal(recipe, table)}
    except Exception as error:  # as above
        methods["MAPIE"] = failed(error)
    return {"set": name, "split": split, "n": len(table.data), "test": len(tested), "methods": methods}
