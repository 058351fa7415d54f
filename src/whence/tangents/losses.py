"""The loss of the training examples, seen from their outputs: residuals, roots of Hessians, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError, TargetError
from whence.likelihoods import Likelihood

from .batches import Batch, check_finite


@dataclass(frozen=True)
class Rows:
    """What the loss says about one batch, weights multiplied in.

    Attributes:
        outputs: (n, k).
        residuals: (n, k).
        roots: (n, k, q); `None` for the identity.
        weights: (n,) how much each example counts; `None` if all count one.
        given: whether the loader gave weights.
    """

    outputs: Tensor
    residuals: Tensor
    roots: Tensor | None
    weights: Tensor | None
    given: bool

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, batch: Batch, where: str) -> Rows:
        """Ask the likelihood."""
        targets = likelihood.check_targets(batch.targets, outputs, where)
        residuals = likelihood.residuals(outputs, targets)
        roots = likelihood.hessian_root(outputs, targets)
        check_finite((residuals, roots), f"derivatives of the {likelihood.name} loss", where)
        weights = _weights(outputs, batch.weights, likelihood.counted(targets))
        if weights is None:
            return cls(outputs, residuals, roots, None, False)
        scaled = weights.sqrt().reshape(-1, 1, 1) * (_identity(outputs) if roots is None else roots)
        return cls(outputs, weights.unsqueeze(1) * residuals, scaled, weights, batch.weights is not None)


def _weights(outputs: Tensor, given: Tensor | None, counted: Tensor | None) -> Tensor | None:
    if given is None and counted is None:
        return None
    weights = torch.ones_like(outputs[:, 0]) if given is None else given.to(outputs.dtype)
    return weights if counted is None else weights * counted


def _identity(outputs: Tensor) -> Tensor:
    return torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(outputs), -1, -1)


def join(rows: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Outputs, residuals, roots and weights of all batches together; weights only where not all examples count one."""
    given = [row.given for row in rows]
    if len(set(given)) > 1:
        raise InputError(
            f"expected sample weights in every batch or in none, got them in batch {given.index(True)} and none in "
            f"batch {given.index(False)}. Give a weight of 1 to examples that count as usual."
        )
    roots = weights = None
    if any(row.roots is not None for row in rows):
        roots = torch.cat([_identity(row.outputs) if row.roots is None else row.roots for row in rows])
    if any(row.weights is not None for row in rows):
        ones = [torch.ones_like(row.outputs[:, 0]) for row in rows]
        weights = torch.cat([one if row.weights is None else row.weights for one, row in zip(ones, rows, strict=True)])
        if not bool((weights > 0).any()):
            raise TargetError(
                f"expected at least one training example that counts, got {len(weights)} that are all ignored or of "
                "weight zero. Check ignore_index, the class weights and the sample weights."
            )
        if bool((weights == 1).all()):
            weights = None
    return torch.cat([row.outputs for row in rows]), torch.cat([row.residuals for row in rows]), roots, weights
