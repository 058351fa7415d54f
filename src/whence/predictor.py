"""A fitted network: what the fit found, and predictions with their variances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .curvature import Bread, Meats, NewtonStep, RidgePath, Sandwich
from .display import Shown, Table, count
from .errors import InputError, ShapeError
from .estimators import LeftOut, Weighing, finish
from .outputs import AT_ONCE, Look, Seen, blank, join, look_at
from .results import Diagnostics, Uncertainty, findings_table
from .tangents.batches import Inputs, check_finite
from .tangents.linearization import Linearization
from .tangents.views import View
from .tracing.asking import each
from .tracing.input_cache import InputCache
from .tracing.numeric_range import check_variances


@dataclass(frozen=True, repr=False)
class Predictor(Shown):
    """A trained network with its curvature and the weights of its training examples: predictions with variances.

    Attributes:
        sigma: (k, k) covariance of the residuals, as the likelihood has it.
        noise_scale: what the inverse curvature is multiplied by in Laplace's reading: noise variance, or dispersion.
        diagnostics: what was approximated, guarded or repaired.
    """

    problem: Linearization
    bread: Bread
    sandwich: Sandwich
    meats: Meats
    left_out: LeftOut
    step: NewtonStep
    weighing: Weighing
    sigma: Tensor
    noise_scale: float
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
        """(n, k) residuals of the training examples; of the recentered model if it was asked for.

        Minus the gradient of the loss in the outputs: y - f(x) for squared error, y - p for classes. Sample weights are
        not in them; an example of weight zero has none.
        """
        return self.problem.unweighted(self.weighing.residuals(slice(0, self.problem.n), self.step.change))

    @property
    def leverage(self) -> Tensor:
        """(n, k) leverage of each output of each training example."""
        return self.left_out.leverage

    @property
    def loo_residuals(self) -> Tensor:
        """(n, k) residuals each training example would have, had it been left out."""
        return self.problem.unweighted(self.left_out.hec3)

    def predict(
        self,
        x: Any,
        *,
        covariance: bool | None = None,
        outputs: Literal["all", "predicted"] | Sequence[int] | int | None = None,
        generator: torch.Generator | None = None,
    ) -> Uncertainty:
        """Predictions with variances, for one batch or for all batches of a loader.

        Args:
            x: a batch as in training (a tensor, a tuple of positional inputs, a dict of keyword inputs), or a loader
                or list of batches. Targets that come with the inputs are ignored.
            covariance: compute covariances between outputs at once, or only when they are asked for; by default at
                once where that costs little. Until then a copy of the inputs is kept, up to 256 MiB or 5 % of the
                memory of the fit. Larger inputs are read again, and refused where they are not what they were.
            outputs: which to look at, since each costs a backward pass: "all"; "predicted", that of the predicted class
                alone; a list of positions; or a number of random sketches, whose `trace` and `trace_error` estimate
                the total variance of all outputs without bias. By default all, or the predicted class where the fit
                itself did not look at all outputs.
            generator: of the sketches' random signs; by default one with seed 0.
        """
        look = Look.of(self._usual() if outputs is None else outputs)
        if self.problem.dense or self.problem.sketch is not None or look.kind != "all":
            return self._look(x, look, covariance, generator or torch.Generator("cpu").manual_seed(0))
        at_once = covariance or self.problem.k == 1 or not self.sandwich.variances_alone
        cache = None if at_once else InputCache(x, self.problem.budget)
        work = self._predict_batch if at_once else self._variances_of_batch
        means, parts = zip(*each(self, x, work, cache=cache), strict=True)
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if cache is None:
            return Uncertainty(torch.cat(means), joined, likelihood=self.problem.likelihood)
        again = (lambda: self.predict(cache, covariance=True).covariances) if cache.readable else None
        return Uncertainty(torch.cat(means), {}, joined, again, self.problem.likelihood)

    def _usual(self) -> str:
        likelihood = self.problem.likelihood
        classes = likelihood.has_classes and likelihood.couples_outputs
        return "all" if self.problem.sketch is None or not classes else "predicted"

    def _look(self, x: Any, look: Look, covariance: bool | None, generator: torch.Generator) -> Uncertainty:
        at_once = bool(covariance) or not self.sandwich.variances_alone
        cache = None if at_once or look.kind == "sketches" else InputCache(x, self.problem.budget)

        def work(inputs: Inputs, where: str) -> Seen:
            outputs = self._shaped(inputs, where)
            seen = look_at(look, self.problem.likelihood, inputs, outputs, self._answer, at_once, generator)
            return blank(seen, inputs)

        found = join(each(self, x, work, plain=True, cache=cache))
        later = None
        if cache is not None and cache.readable and found.mean.shape[-1] <= AT_ONCE:
            later = lambda: self._look(cache, look, True, generator).covariances  # noqa: E731
        return Uncertainty(
            found.mean, found.covariances, found.variances, later, self.problem.likelihood, chosen=found.chosen
        )

    def _shaped(self, inputs: Inputs, where: str) -> Tensor:
        """(m, ..., k) outputs with their positions."""
        problem = self.problem
        with torch.no_grad():
            shaped = problem.network.shaped(inputs, where).to(problem.dtype)
        if shaped.shape[-1] != problem.width or (shaped.ndim > 2) != problem.dense:
            positions = "positions, " if problem.dense else ""
            raise ShapeError(
                f"expected outputs of shape (n, {positions}{problem.width}) as in training, got {tuple(shaped.shape)} "
                f"in {where}."
            )
        return self._mean(shaped.flatten(1), inputs, where).reshape(shaped.shape)

    def _answer(self, view: View, full: bool) -> dict[str, Tensor]:
        """Covariances of what a view sees; or variances alone."""
        if not full and self.sandwich.variances_alone:
            return self._finish(self.sandwich.variances(view)[1], None)
        predicted = self.sandwich.predict(view)
        found = self._finish(predicted.covariances, predicted.shift)
        return found if full else {name: value.diagonal(dim1=1, dim2=2) for name, value in found.items()}

    def _predict_batch(self, inputs: Inputs, where: str) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            predicted = self.sandwich.predict(inputs)
        except (InputError, ShapeError) as error:
            raise type(error)(f"{error} This was {where}.") from error.__cause__
        mean = self._mean(predicted.outputs, inputs, where)
        found = self._finish(predicted.covariances, predicted.shift)
        check_variances(self.problem, found, where)
        return mean, found

    def _variances_of_batch(self, inputs: Inputs, where: str) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, variances = self.sandwich.variances(inputs)
        mean, found = self._mean(outputs, inputs, where), self._finish(variances, None)
        check_variances(self.problem, found, where)
        return mean, found

    def _mean(self, outputs: Tensor, inputs: Inputs, where: str) -> Tensor:
        problem = self.problem
        check_finite(outputs, "outputs of the model", where)
        if not problem.dense and problem.sketch is None and outputs.shape[1] != problem.k:
            raise ShapeError(f"expected {problem.k} outputs as in training, got {outputs.shape[1]} in {where}.")
        if not self.weighing.recenter:
            return outputs
        assert self.step.direction is not None
        return outputs + problem.jacobian().jvp(inputs, self.step.direction.unsqueeze(0))[0]

    def _finish(self, found: dict[str, Tensor], shift: Tensor | None) -> dict[str, Tensor]:
        """Add the estimators that follow from others, to covariances or variances alike."""
        problem = self.problem
        deletions = self.meats.deletions
        left = problem.numbers - self.bread.degrees_of_freedom
        hc1 = problem.numbers / left if left > 0 else float("inf")
        if self.weighing.groups is not None:  # Stata's correction for few clusters
            hc1 *= (deletions / (deletions - 1)) * ((problem.numbers - 1) / problem.numbers)
        finished = finish(found, shift, deletions, hc1)
        finished["laplace"] = finished["laplace"] * self.noise_scale
        return finished

    def __repr__(self) -> str:
        """Sizes, ridge, noise and degrees of freedom."""
        p = self.problem
        noise = float(self.sigma.diagonal().mean().sqrt())
        return (
            f"{type(self).__name__}({count(p.n, 'training example')}, {count(p.width, 'output')}, "
            f"{count(p.selection.size, 'parameter')}; "
            f"{p.likelihood.name}, ridge {self.ridge:.4g}, noise {noise:.3g}, "
            f"degrees of freedom {self.degrees_of_freedom:.4g})"
        )

    def _table(self) -> Table:
        return findings_table(self.diagnostics, repr(self))
