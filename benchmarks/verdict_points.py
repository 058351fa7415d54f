"""What verdicts are made of, point by point, so that they can be judged again without network and training set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import whence
from whence.influence import Calibration, Explanation
from whence.influence.explanation import SourceScore, isotonic_threshold, leave_one_out_ratios
from whence.influence.fitted import evenly_spaced, inputs_of, using_model, variance_terms

SAMPLE = 500
"""Training examples, each left out, that predictions are compared with."""

STEPS = 2001
"""Leave-one-out leverages that are kept of those of all training examples, evenly spaced by rank."""


@dataclass(frozen=True)
class Points:
    """Test points, training examples that were left out, and the leverages of all training examples.

    Attributes:
        test: (m,) each: "ho", "hec3", "effective", "noise" (around the point, see `SourceScore`) and "leverage".
        left_out: (s,) each: "ratio" (HeC3 / Ho), "own" (the noise of the example itself), "noise" and "leverage".
        leverages: (q,) leave-one-out leverages, ascending: evenly spaced ones of those of all n training examples.
        n: how many training examples there are.
        mean: of the squared leave-one-out residuals over the noise.
        variance: of the same.
    """

    test: dict[str, Tensor]
    left_out: dict[str, Tensor]
    leverages: Tensor
    n: int
    mean: float
    variance: float

    def explained(self, level: float) -> Explanation:
        """Verdicts and sources as `Tracer.explain` gives them, without names of training examples."""
        ho, hec3 = self.test["ho"], self.test["hec3"]
        limit = isotonic_threshold(self.left_out["ratio"], self.left_out["own"])
        every = self.leverages[torch.linspace(0, len(self.leverages) - 1, self.n).round().long()]
        calibration = Calibration(every, self.mean, self.variance, limit)
        none = torch.zeros(len(ho), 0, dtype=torch.long)
        variances = ho, hec3, hec3 / ho
        leverage, effective = self.test["leverage"], self.test["effective"]
        found = Explanation.of(calibration, level, leverage, variances, effective, (none, none))
        score = SourceScore(ho, ho, ho).standardized(self.left_out["noise"], self.left_out["leverage"])
        if score is not None:
            found.source.copy_(score.score(self.test["noise"], leverage))
        return found


def points_of(tracer: whence.Tracer, tests: list[Tensor], sample: int = SAMPLE) -> Points:
    """Of a fit, on the CPU.

    Args:
        tracer: the fit.
        tests: batches of test inputs.
        sample: how many training examples to leave out.
    """
    calibration = Calibration.of(tracer, sample)
    with using_model(tracer):
        score = SourceScore.of(tracer)
        assert score is not None
        index = evenly_spaced(tracer.counted.nonzero().squeeze(1), sample)
        left_out = {
            "ratio": leave_one_out_ratios(tracer, index),
            "own": (score.own_noise / score.noise_variance)[index],
            "noise": score.local_noise_without(tracer, index),
            "leverage": score.leverages[index],
        }
        parts = [_asked(tracer, score, inputs) for inputs, _ in inputs_of(tracer, tests)]
    test = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
    steps = torch.linspace(0, len(calibration.leverages) - 1, min(STEPS, len(calibration.leverages))).round().long()
    left = {name: value.cpu() for name, value in left_out.items()}
    kept = calibration.leverages.cpu()[steps]
    return Points(test, left, kept, len(calibration.leverages), calibration.mean, calibration.variance)


def _asked(tracer: whence.Tracer, score: SourceScore, inputs: Any) -> dict[str, Tensor]:
    laplace = tracer.sandwich.predict(inputs).covariances["laplace"]
    found: dict[str, list[Tensor]] = {"ho": [], "hec3": [], "effective": [], "noise": []}
    for _, terms in variance_terms(tracer, inputs):
        ho = terms.ho.sum(1)
        found["ho"].append(ho)
        found["hec3"].append(terms.hec3.sum(1))
        found["effective"].append(1.0 / (terms.ho / ho.unsqueeze(1)).square().sum(1))
        found["noise"].append(score.local_noise(terms.alignment.square()))
    leverage = torch.diagonal(laplace, dim1=1, dim2=2).sum(1)
    return {**{name: torch.cat(values) for name, values in found.items()}, "leverage": leverage}
