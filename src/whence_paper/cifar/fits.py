"""Fits of a classifier, and all that is kept of its predictions: variances of outputs and of their differences."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import whence

ESTIMATORS = ("ho", "hec0", "hec3", "laplace")
KEPT, RIVALS = ("ho", "hec3"), 4
"""Those whose variances are kept in files, and of how many differences."""
WAYS: dict[str, dict[str, Any]] = {
    "EKFAC, all layers": {"structure": whence.EKFAC()},
    "EKFAC, all layers, clipped": {"structure": whence.EKFAC(), "leverage": "clip", "loo": "output"},
    "dense, last layer": {"structure": whence.Exact(), "parameters": "last_layer"},
    "dense, last layer, lambda by leave-one-out": {
        "structure": whence.Exact(),
        "parameters": "last_layer",
        "ridge": "loo",
    },
}
"""Ways to fit. The second is the paper's letter: leverages clipped, outputs left out one by one."""


class Lens(nn.Module):
    """A network seen as it is, or through the differences between its largest output and each of the others.

    The first column of the differences is the largest output itself; the others follow from the second largest output
    down. They are linear in the outputs of an example, and so are their tangents.

    Attributes:
        network: with outputs (n, k).
        differences: look at these.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.differences = False

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, k) outputs, or their differences."""
        found: Tensor = self.network(inputs)
        if not self.differences:
            return found
        ordered = found.gather(1, found.detach().argsort(dim=1, descending=True, stable=True))
        return torch.cat([ordered[:, :1], ordered[:, :1] - ordered[:, 1:]], 1)


@dataclass(frozen=True)
class Predicted:
    """What is kept of the predictions of a fit, on the CPU.

    Attributes:
        outputs: (m, k).
        variances: (m, k) of the outputs, by estimator.
        differences: (m, k - 1) variances of the largest output less the second largest, the third, ...; from a file the
            first few of them; none where they were not asked for, which saves a prediction.
    """

    outputs: Tensor
    variances: dict[str, Tensor]
    differences: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write a compressed file, in half precision; variances as logarithms, those of `KEPT` alone."""
        arrays = {"outputs": self.outputs.half().numpy()}
        first = {name: values[:, :RIVALS] for name, values in self.differences.items()}
        for kind, values in (("variance", self.variances), ("difference", first)):
            for name in (one for one in KEPT if one in values):
                arrays[f"{kind} {name}"] = values[name].clamp_min(1e-30).log().half().numpy()
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(".part.npz")
        np.savez_compressed(partly, **arrays)  # type: ignore[arg-type]  # the stub takes names for its own options
        partly.replace(path)

    @classmethod
    def load(cls, path: Path) -> Predicted:
        """Read what was saved."""
        with np.load(path) as arrays:
            found = {name: torch.from_numpy(arrays[name].astype(np.float64)) for name in arrays.files}
        parts: dict[str, dict[str, Tensor]] = {"variance": {}, "difference": {}}
        for name, value in found.items():
            kind, _, estimator = name.partition(" ")
            if estimator:
                parts[kind][estimator] = value.exp()
        return cls(found["outputs"], parts["variance"], parts["difference"])


def fit(
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    tests: Tensor,
    way: str,
    share: float,
    likelihood: str = "gaussian",
    batch: int = 1000,
    *,
    differences: bool = True,
) -> tuple[Predicted, dict[str, Any]]:
    """Fit, predict, and look at differences; with seconds and what the fit says of itself.

    Args:
        network: trained, in evaluation mode.
        data: inputs and targets of the examples to fit on.
        tests: inputs to predict.
        way: one of `WAYS`.
        share: lambda as a share of the number of examples.
        likelihood: of the loss; cross-entropy takes "categorical" and labels as targets.
        batch: examples at once.
        differences: predict those of outputs as well.
    """
    inputs, targets = data
    lens = Lens(network).eval()
    loader = list(zip(inputs.split(batch), targets.split(batch), strict=True))
    parts = list(tests.split(batch))
    began = _clock(inputs)
    options = {"ridge": share * len(inputs), **WAYS[way], **({} if likelihood == "gaussian" else {"loo": "example"})}
    tracer = whence.fit(lens, loader, likelihood, progress=False, **options)
    fitted = _clock(inputs)
    plain = tracer.predict(parts, covariance=False)
    predicted = _clock(inputs)
    lens.differences = True
    apart = tracer.predict(parts, covariance=False) if differences else None
    lens.differences = False
    names = [name for name in ESTIMATORS if name in plain.estimators]
    found = Predicted(
        plain.mean.cpu(),
        {name: plain.variance(name).cpu() for name in names},
        {name: apart.variance(name)[:, 1:].cpu() for name in names} if apart is not None else {},
    )
    facts = {
        "fit_s": fitted - began,
        "predict_s": predicted - fitted,
        "degrees_of_freedom": float(tracer.degrees_of_freedom),
        "largest_leverage": float(tracer.leverage.max()),
        "n": len(inputs),
        "ridge": float(tracer.ridge),
        "notes": [finding.value for finding in tracer.diagnostics if finding.name == "note"],
    }
    return found, facts


def _clock(inputs: Tensor) -> float:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter()
