"""The fitted object: predictions with their uncertainty, and what the training set says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .curvature import Bread, NewtonStep, RidgePath, Sandwich
from .errors import InputError, ShapeError, StaleModelError
from .estimators import LeftOut, finish
from .results import Diagnostics, Uncertainty
from .tangents.batches import Inputs, batch_size, check_finite, to_device, without_targets
from .tangents.borrow import borrowed, fingerprint
from .tangents.linearization import Linearization


@dataclass(frozen=True, repr=False)
class Tracer:
    """A trained network with its curvature and the weights of its training examples. Made by `whence.fit`.

    Attributes:
        sigma: (k, k) covariance of the residuals.
        diagnostics: what was approximated, guarded or repaired.
    """

    problem: Linearization
    bread: Bread
    sandwich: Sandwich
    left_out: LeftOut
    step: NewtonStep
    recentered: bool
    sigma: Tensor
    diagnostics: Diagnostics
    marks: Mapping[str, int]

    @property
    def ridge(self) -> float:
        """Lambda, on the sum scale."""
        return self.bread.ridge

    @property
    def ridge_path(self) -> RidgePath | None:
        """The leave-one-out error over ridges, when the ridge was chosen by it."""
        return self.bread.path

    @property
    def degrees_of_freedom(self) -> float:
        """Effective degrees of freedom, the trace of the hat matrix; at most n k for an exact structure."""
        return self.bread.degrees_of_freedom

    @property
    def residuals(self) -> Tensor:
        """(n, k) residuals of the training examples; of the recentered model if it was asked for."""
        return self.problem.residuals - self.step.change if self.recentered else self.problem.residuals

    @property
    def leverage(self) -> Tensor:
        """(n, k) leverage of each output of each training example."""
        return self.left_out.leverage

    @property
    def loo_residuals(self) -> Tensor:
        """(n, k) residuals each training example would have, had it been left out."""
        return self.left_out.hec3

    def predict(self, x: Any) -> Uncertainty:
        """Predictions with variances, for one batch (a tensor, or a dict for models that take keywords) or a loader.

        Batches of a loader may come with targets, which are ignored.
        """
        self._check_fresh()
        means, parts = [], []
        with borrowed(self.problem.network.model):
            for number, inputs in enumerate(self._inputs(x)):
                where = f"batch {number} of the inputs to predict"
                moved = to_device(inputs, self.problem.device)
                if batch_size(moved, where) == 0:
                    raise InputError(f"expected at least one input, got an empty {where}.")
                check_finite(moved, "inputs", where)
                mean, covariances = self._predict_batch(moved, where)
                means.append(mean)
                parts.append(covariances)
        if not means:
            raise InputError("expected at least one batch to predict, got an empty loader.")
        return Uncertainty(torch.cat(means), {name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _predict_batch(self, inputs: Inputs, where: str) -> tuple[Tensor, dict[str, Tensor]]:
        problem = self.problem
        predicted = self.sandwich.predict(inputs)
        mean = predicted.outputs
        check_finite(mean, "outputs of the model", where)
        if mean.shape[1] != problem.k:
            raise ShapeError(f"expected {problem.k} outputs as in training, got {mean.shape[1]} in {where}.")
        if self.recentered:
            assert self.step.direction is not None
            mean = mean + problem.jacobian().jvp(inputs, self.step.direction.unsqueeze(0))[0]
        numbers = problem.n * problem.k
        left = numbers - self.bread.degrees_of_freedom
        hc1 = numbers / left if left > 0 else float("inf")
        return mean, finish(predicted.covariances, predicted.shift, problem.n, hc1)

    def _inputs(self, x: Any) -> Iterator[Inputs]:
        if isinstance(x, (Tensor, Mapping)):
            yield without_targets(x)
        elif isinstance(x, Iterable):
            track = self.problem.progress.track
            total = len(x) if isinstance(x, Sized) else None
            yield from map(without_targets, track(x, "predictions, batch", total))
        else:
            raise InputError(f"expected a tensor, a dict or a loader to predict, got {type(x).__name__}.")

    def _check_fresh(self) -> None:
        now = fingerprint(self.problem.network.model)
        changed = sorted(name for name in self.marks.keys() | now.keys() if self.marks.get(name) != now.get(name))
        if changed:
            shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
            raise StaleModelError(
                f"expected the weights that were fitted, got changes in {shown}. "
                "Call whence.fit again, or load the weights of that time."
            )

    def __repr__(self) -> str:
        """Sizes, ridge, noise and degrees of freedom."""
        p = self.problem
        noise = float(self.sigma.diagonal().mean().sqrt())
        return (
            f"Tracer({p.n} training examples, {p.k} outputs, {p.selection.size} parameters; {p.likelihood.name}, "
            f"ridge {self.ridge:.4g}, noise {noise:.3g}, degrees of freedom {self.degrees_of_freedom:.4g})"
        )
