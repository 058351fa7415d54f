"""The linearized training problem: everything a curvature needs to know, gathered in one first pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whence.likelihoods import Likelihood, Noise
from whence.memory import Budget
from whence.progress import Progress

from .batches import Batch, Batches, Inputs
from .folds import Folds
from .forward import Network
from .jacobian import CHUNK_BYTES, Jacobian
from .losses import Units
from .passes import Passes, State
from .select import Selection
from .sketches import Sketch, SketchedBatches
from .views import View

CHUNK_SHARE = 0.05
"""A chunk of Jacobian rows takes at most this share of the memory budget."""


@dataclass(frozen=True)
class Linearization:
    """A trained network, linearized in the selected parameters around its weights, with its training data.

    Attributes:
        outputs: (n, k) what the network says about the training examples; k counts the outputs of all positions where
            it answers at several.
        residuals: (n, k) minus the gradient of the weighted loss in the outputs; y - f(x) for squared error.
        hessian_roots: (n, k, q) roots of the weighted loss's Hessian in the outputs; `None` for squared error
            (identity).
        sample_weights: (n,) how much each example counts, zero for those the loss leaves out; `None` if all count one.
        units: the positions at which the network answers, where there are any.
        sketch: what is known of the outputs, where not all are looked at: then k counts the mixtures of them that are,
            in an orthonormal basis of each example's own.
        passes: how passes over the training data go; several processes may share them.
        folds: what is left out at once, where the ridge is chosen by leave-one-out.
    """

    network: Network
    selection: Selection
    batches: Batches | SketchedBatches
    likelihood: Likelihood
    outputs: Tensor
    residuals: Tensor
    hessian_roots: Tensor | None
    sample_weights: Tensor | None
    dtype: torch.dtype
    budget: Budget
    progress: Progress
    chunk_size: int | None
    units: Units | None = None
    sketch: Sketch | None = None
    passes: Passes = field(default_factory=Passes)
    folds: Folds = field(default_factory=Folds)

    @property
    def n(self) -> int:
        """Number of training examples."""
        return self.outputs.shape[0]

    @property
    def k(self) -> int:
        """Number of outputs."""
        return self.outputs.shape[1]

    @property
    def counted(self) -> int:
        """Number of training examples that count: those of weight above zero."""
        return self.n if self.sample_weights is None else int((self.sample_weights > 0).sum())

    @property
    def total_weight(self) -> float:
        """Sum of the sample weights: n where all count one."""
        return float(self.n if self.sample_weights is None else self.sample_weights.sum())

    @property
    def numbers(self) -> int:
        """How many residuals there are that can vary freely: n k for squared error."""
        return self.counted_units * self.likelihood.numbers(self.width)

    @property
    def width(self) -> int:
        """Number of outputs at each position: k, where there are none."""
        if self.sketch is not None:
            return self.sketch.width
        return self.k if self.units is None else self.units.width

    @property
    def counted_units(self) -> int:
        """Number of positions of training examples that count; of examples, where there are no positions."""
        if self.sketch is not None:
            return self.sketch.counted
        if self.units is None:
            return self.counted
        weights = self.units.weights
        return self.n * self.units.positions if weights is None else int((weights > 0).sum())

    @property
    def dense(self) -> bool:
        """Whether the network answers at several positions of an example."""
        return self.units is not None if self.sketch is None else self.sketch.dense

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return self.network.device

    def seen(self, inputs: Inputs) -> int:
        """How many outputs of these inputs are looked at: all k, or what a view says."""
        return inputs.count if isinstance(inputs, View) else self.k

    def jacobian(self) -> Jacobian:
        """The tangents, through `torch.func`."""
        room = min(CHUNK_BYTES, int(CHUNK_SHARE * self.budget.limit))
        return Jacobian(self.network, self.selection, self.chunk_size, self.dtype, room)

    def read(self, label: str, state: State | None = None, given: Sequence[Tensor] = ()) -> Iterator[Batch]:
        """One pass over the training data.

        Args:
            label: what the pass is for.
            state: tensors, zeros at first, that the reader adds to in place; see `Passes.over`.
            given: what the sums depend on beside model, data and options.
        """
        if state is None:
            return self.batches.read(label)
        return self.passes.over(self.batches.read(label), lambda batch: batch.rows, label, state, self.known(given))

    def known(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What sums depend on, with the bases of the outputs, where each example has one of its own."""
        roots = self.hessian_roots
        return [*given] if self.sketch is None or roots is None else [*given, self.residuals, roots]

    @property
    def share(self) -> int:
        """The most training examples that any process has."""
        return self.n if self.passes.largest is None else self.passes.largest

    @property
    def mine(self) -> slice:
        """The training examples of this process."""
        passes = self.passes
        return slice(passes.offset, passes.offset + (self.n if passes.here is None else passes.here))

    def weights(self) -> Tensor:
        """The selected weights, (d,)."""
        return self.selection.weights(self.dtype)

    def unweighted(self, vectors: Tensor) -> Tensor:
        """(n, k) vectors that hold the sample weights, without them; zero for examples that do not count."""
        weights = self.sample_weights if self.units is None else self.units.weights
        if weights is None:
            return vectors
        inverse = torch.where(weights > 0, 1.0 / weights, 0.0)
        return inverse.reshape(self.n, -1).repeat_interleave(self.k // (weights.numel() // self.n), dim=1) * vectors

    def moved(self, change: Tensor) -> Tensor:
        """(n, k) residuals where the outputs moved by `change`, sample weights multiplied in."""
        shape = self.residuals.shape
        if self.sketch is not None:  # outputs that were not looked at are not known: to first order
            return Likelihood.moved(self.likelihood, self.residuals, self.outputs, self.hessian_roots, change)
        residuals, outputs, roots, weights = self._apart()
        found = self.likelihood.moved(residuals, outputs, roots, change.reshape(outputs.shape))
        return (found if weights is None else weights.unsqueeze(1) * found).reshape(shape)

    def doubt(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """`Likelihood.doubt` of each example (n,) where the outputs moved by `change`: of its most doubtful position.

        Minus infinity for examples that do not count.
        """
        if self.sketch is not None:
            found = self.unweighted(self.moved(change)).abs().amax(1).log()
            return found, torch.zeros_like(found)
        residuals, outputs, roots, weights = self._apart()
        pair = self.likelihood.doubt(residuals, outputs, roots, change.reshape(outputs.shape))
        first, second = (part.reshape(self.n, -1) for part in pair)
        if weights is not None:
            first = torch.where(weights.reshape(self.n, -1) > 0, first, -torch.inf)
        best = torch.where(first == first.amax(1, keepdim=True), second, -torch.inf)
        return first.amax(1), best.amax(1)

    def _apart(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Residuals, outputs and roots position by position, without sample weights, and these weights (N,)."""
        k, units, roots = self.width, self.units, self.hessian_roots
        weights = self.sample_weights if units is None else units.weights
        if units is not None and roots is not None:
            roots = units.split(roots)
        residuals, outputs = self.unweighted(self.residuals).reshape(-1, k), self.outputs.reshape(-1, k)
        if weights is None:
            return residuals, outputs, roots, None
        weights = weights.reshape(-1)
        if roots is not None:
            roots = torch.where(weights > 0, weights.rsqrt(), 0.0).reshape(-1, 1, 1) * roots
        return residuals, outputs, roots, weights

    def noise(self, residuals: Tensor, degrees_of_freedom: float | None) -> Noise:
        """The noise of the likelihood for weighted residuals (n, k): of each example, its weight times its noise.

        An example of weight w counts as a residual of variance 1 / w, as in weighted least squares.
        """
        if self.sketch is not None:
            return self._sketched_noise(residuals, degrees_of_freedom)
        if self.units is None:
            return self._noise(residuals, self.outputs, self.hessian_roots, self.sample_weights, degrees_of_freedom)
        k, weights = self.width, self.units.weights
        roots = None if self.hessian_roots is None else self.units.split(self.hessian_roots)
        flat = None if weights is None else weights.reshape(-1)
        found = self._noise(residuals.reshape(-1, k), self.outputs.reshape(-1, k), roots, flat, degrees_of_freedom)
        return Noise(found.covariance, self.units.join(found.roots), found.scale)

    def _sketched_noise(self, residuals: Tensor, degrees_of_freedom: float | None) -> Noise:
        """As of the likelihood, with one variance for all outputs in its covariance (1, 1)."""
        assert self.hessian_roots is not None
        numbers = self.counted_units * self.width
        plain, roots = residuals, self.hessian_roots
        if self.sample_weights is not None:
            seen = self.sample_weights > 0
            size = self.sample_weights[seen].sqrt().unsqueeze(1)
            plain, roots = residuals[seen] / size, roots[seen] / size.unsqueeze(2)
        scale = self.likelihood.noise_scale(float(plain.square().sum()), numbers, degrees_of_freedom)
        mean = scale * roots.square().sum() / numbers
        return Noise(mean.reshape(1, 1), scale**0.5 * self.hessian_roots, scale)

    def _noise(
        self,
        residuals: Tensor,
        outputs: Tensor,
        roots: Tensor | None,
        weights: Tensor | None,
        degrees_of_freedom: float | None,
    ) -> Noise:
        if weights is None:
            return self.likelihood.noise(residuals, outputs, roots, degrees_of_freedom)
        assert roots is not None
        seen = weights > 0
        size = weights[seen].sqrt()
        plain = roots[seen] / size.reshape(-1, 1, 1)
        scaled = residuals[seen] / size.unsqueeze(1)
        found = self.likelihood.noise(scaled, outputs[seen], plain, degrees_of_freedom)
        each = residuals.new_zeros(len(residuals), *found.roots.shape[1:])
        each[seen] = size.reshape(-1, 1, 1) * found.roots
        return Noise(found.covariance, each, found.scale)
