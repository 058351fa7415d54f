"""The linearized training problem: everything a curvature needs to know, gathered in one first pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import ShapeError
from whence.likelihoods import Likelihood
from whence.memory import Budget
from whence.progress import Progress

from .batches import Batch, Batches, check_finite
from .forward import Network
from .jacobian import CHUNK_BYTES, Jacobian
from .select import Selection

CHUNK_SHARE = 0.05
"""A chunk of Jacobian rows takes at most this share of the memory budget."""


@dataclass(frozen=True)
class Linearization:
    """A trained network, linearized in the selected parameters around its weights, with its training data.

    Attributes:
        outputs: (n, k) what the network says about the training examples.
        residuals: (n, k) minus the gradient of the loss in the outputs; y - f(x) for squared error.
        hessian_roots: (n, k, q) roots of the loss's Hessian in the outputs; `None` for squared error (identity).
    """

    network: Network
    selection: Selection
    batches: Batches
    likelihood: Likelihood
    outputs: Tensor
    residuals: Tensor
    hessian_roots: Tensor | None
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
    def device(self) -> torch.device:
        """Where the network lives."""
        return self.network.device

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
    outputs: list[Tensor] = []
    residuals, roots = [], []
    for number, batch in enumerate(batches.read("outputs")):
        where = f"batch {number}"
        with torch.no_grad():
            out = network(batch.inputs, where)
        if outputs and out.shape[1] != outputs[0].shape[1]:
            raise ShapeError(
                f"expected {outputs[0].shape[1]} outputs as in batch 0, got {out.shape[1]} in {where}. "
                "Wrap the model in a module that returns the same number of outputs for every batch."
            )
        check_finite(out, "outputs of the model", where)
        out = out.detach().to(dtype)
        targets = likelihood.check_targets(batch.targets, out, where)
        outputs.append(out)
        residuals.append(likelihood.residuals(out, targets))
        root = likelihood.hessian_root(out)
        if root is not None:
            roots.append(root)
    return Linearization(
        network,
        selection,
        batches,
        likelihood,
        torch.cat(outputs),
        torch.cat(residuals),
        torch.cat(roots) if roots else None,
        dtype,
        budget,
        progress,
        chunk_size,
    )
