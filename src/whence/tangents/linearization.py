"""The linearized training problem: everything a curvature needs to know, gathered in one first pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import ShapeError
from whence.likelihoods import Likelihood, Noise
from whence.memory import Budget
from whence.progress import Progress

from .batches import Batch, Batches, Inputs, check_finite
from .forward import Network
from .jacobian import CHUNK_BYTES, Jacobian
from .losses import Rows, join
from .select import Selection
from .views import View

CHUNK_SHARE = 0.05
"""A chunk of Jacobian rows takes at most this share of the memory budget."""


@dataclass(frozen=True)
class Linearization:
    """A trained network, linearized in the selected parameters around its weights, with its training data.

    Attributes:
        outputs: (n, k) what the network says about the training examples.
        residuals: (n, k) minus the gradient of the weighted loss in the outputs; y - f(x) for squared error.
        hessian_roots: (n, k, q) roots of the weighted loss's Hessian in the outputs; `None` for squared error
            (identity).
        sample_weights: (n,) how much each example counts, zero for those the loss leaves out; `None` if all count one.
    """

    network: Network
    selection: Selection
    batches: Batches
    likelihood: Likelihood
    outputs: Tensor
    residuals: Tensor
    hessian_roots: Tensor | None
    sample_weights: Tensor | None
    dtype: torch.dtype
    budget: Budget
    progress: Progress
    chunk_size: int | None

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
        return self.counted * self.likelihood.numbers(self.k)

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

    def read(self, label: str) -> Iterator[Batch]:
        """One pass over the training data."""
        return self.batches.read(label)

    def weights(self) -> Tensor:
        """The selected weights, (d,)."""
        return self.selection.weights(self.dtype)

    def unweighted(self, vectors: Tensor) -> Tensor:
        """(n, k) vectors that hold the sample weights, without them; zero for examples that do not count."""
        weights = self.sample_weights
        if weights is None:
            return vectors
        return torch.where(weights > 0, 1.0 / weights, 0.0).unsqueeze(1) * vectors

    def noise(self, residuals: Tensor, degrees_of_freedom: float | None) -> Noise:
        """The noise of the likelihood for weighted residuals (n, k): of each example, its weight times its noise.

        An example of weight w counts as a residual of variance 1 / w, as in weighted least squares.
        """
        weights, roots = self.sample_weights, self.hessian_roots
        if weights is None:
            return self.likelihood.noise(residuals, self.outputs, roots, degrees_of_freedom)
        assert roots is not None
        seen = weights > 0
        size = weights[seen].sqrt()
        plain = roots[seen] / size.reshape(-1, 1, 1)
        scaled = residuals[seen] / size.unsqueeze(1)
        found = self.likelihood.noise(scaled, self.outputs[seen], plain, degrees_of_freedom)
        each = residuals.new_zeros(self.n, *found.roots.shape[1:])
        each[seen] = size.reshape(-1, 1, 1) * found.roots
        return Noise(found.covariance, each, found.scale)


def linearize(
    network: Network,
    selection: Selection,
    batches: Batches,
    likelihood: Likelihood,
    *,
    dtype: torch.dtype,
    budget: Budget,
    progress: Progress,
    chunk_size: int | None,
) -> Linearization:
    """Run the network once over its training data and check everything on the way."""
    rows: list[Rows] = []
    for number, batch in enumerate(batches.read("outputs")):
        where = f"batch {number}"
        with torch.no_grad():
            out = network(batch.inputs, where)
        if rows and out.shape[1] != rows[0].outputs.shape[1]:
            raise ShapeError(
                f"expected {rows[0].outputs.shape[1]} outputs as in batch 0, got {out.shape[1]} in {where}. "
                "Wrap the model in a module that returns the same number of outputs for every batch."
            )
        check_finite(out, "outputs of the model", where)
        rows.append(Rows.of(likelihood, out.detach().to(dtype), batch, where))
        held = sum(row.roots.numel() for row in rows if row.roots is not None) * rows[0].outputs.element_size()
        budget.require(
            2.0 * held,
            f"the Hessians of the {likelihood.name} loss for {batch.start + batch.size} training examples or more and "
            f"{out.shape[1]} outputs",
            "Use fewer training examples, or a larger max_memory.",
        )
    outputs, residuals, roots, weights = join(rows)
    return Linearization(
        network, selection, batches, likelihood, outputs, residuals, roots, weights, dtype, budget, progress, chunk_size
    )
