"""EKFAC as nngeometry and curvlinops have it, as a baseline: the Laplace variance of the trained network.

Neither has a prediction of its own; their documentation ends at solving with the curvature. What is made of it here is
what laplace-torch makes of its curvature: variances of the outputs, and probabilities by the probit approximation. In
float64, since nngeometry's eigenvectors fail in float32 on the image networks.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence_paper.baselines import Answer, Baseline, Recipe

from .peers import CurvlinopsEKFAC, NNGeometryEKFAC, Subject

SUBJECTS: dict[str, type[Subject]] = {"nngeometry": NNGeometryEKFAC, "curvlinops": CurvlinopsEKFAC}
RIDGES = (1.0, 0.1, 10.0)
"""In units of the ridge that belongs to the weight decay; held-out data choose."""


@dataclass(frozen=True)
class PeerEKFAC(Baseline):
    """A normal posterior of the weights whose precision is a peer's EKFAC and a ridge.

    Attributes:
        peer: whose, a key of `SUBJECTS`.
        weight_decay: of the training.
        times: the ridge, in units of the one that belongs to the weight decay.
        batch: points whose Jacobians are held at once.
    """

    peer: str
    weight_decay: float
    times: float = 1.0
    batch: int = 10

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.peer} EKFAC, ridge times {self.times:g}"

    def fit(self, recipe: Recipe) -> FittedEKFAC:
        """Fit to a copy of the recipe's first network."""
        network = deepcopy(recipe.network()).double()
        n, classes = len(recipe.data), recipe.likelihood == "categorical"
        ridge = whence.ridge_from_weight_decay(
            self.weight_decay, n, loss="cross_entropy" if classes else "sum_of_squares"
        )
        who = SUBJECTS[self.peer]()
        doubled = self.peer == "curvlinops" and not classes  # the Hessian of a square is twice the squared gradient
        who.classes, who.damping = classes, self.times * ridge / n * (2 if doubled else 1)
        inputs, targets = recipe.data.inputs.double(), recipe.data.targets if classes else recipe.data.targets.double()
        fitted = who.fit(network, inputs, targets, 500)
        with torch.no_grad():
            noise = None if classes else float((network(inputs) - targets).square().mean())
        unit = 2.0 if doubled else 1.0 / n if self.peer == "nngeometry" else 1.0  # nngeometry's curvature is a mean
        return FittedEKFAC(network, who, fitted, unit, noise, self.batch)


def finite(answer: Answer) -> Answer:
    """The answer itself, unless some of it is no number, of which nothing could be said."""
    parts = [answer.mean, answer.variance, *([] if answer.probabilities is None else [answer.probabilities])]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise FloatingPointError("some of its answers are not numbers")
    return answer


def families(weight_decay: float) -> dict[str, list[PeerEKFAC]]:
    """For each peer, the settings among which held-out data choose."""
    return {f"{peer} EKFAC": [PeerEKFAC(peer, weight_decay, times) for times in RIDGES] for peer in SUBJECTS}


@dataclass(frozen=True)
class FittedEKFAC:
    """What was fitted.

    Attributes:
        network: a copy.
        who: the peer.
        fitted: what it fitted.
        unit: by which its variances are multiplied.
        noise: mean squared residual of the training set; `None` for classes.
        batch: inputs predicted at once.
    """

    network: nn.Module
    who: Subject
    fitted: Any
    unit: float
    noise: float | None
    batch: int

    def predict(self, x: Tensor) -> Answer:
        """The linearized predictive distribution."""
        x = x.double()
        with torch.no_grad():
            mean = self.network(x)
        found = self.who.predict(self.fitted, x, self.batch)
        assert found is not None
        variance = self.unit * found.detach()
        if self.noise is not None:
            return Answer(mean, self.noise * variance, noise=self.noise)
        return Answer(mean, variance, (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(1))
