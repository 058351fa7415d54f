"""Derivatives of the loss in the outputs of the training examples: residuals, roots of Hessians, weights.

A network may have outputs at several positions of an example (tokens, pixels). The loss of an example is the sum over
its positions, its outputs are those of all positions joined, and its Hessian has one block for each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.data.batches import Batch, Batches, check_finite, describe, no_examples, tensors_of
from whence.errors import InputError, ShapeError, TargetError
from whence.likelihoods import Likelihood
from whence.runtime.model_state import row_checksums


@dataclass(frozen=True)
class Positions:
    """How the outputs of an example divide into positions.

    Attributes:
        weights: (n, t) weight of each position, zero where the loss leaves it out; `None` if all are one.

    Examples:
        >>> Positions((2, 3), 4, None).positions
        6
    """

    shape: tuple[int, ...]  # shape of the positions of an example, (t,) for tokens
    width: int  # outputs k at each position
    weights: Tensor | None

    @property
    def positions(self) -> int:
        """Number t of positions of an example."""
        return prod(self.shape)

    def split(self, blocks: Tensor) -> Tensor:
        """The blocks (n t, k, q) on the diagonals of matrices (n, t k, t q)."""
        return diagonal_blocks(blocks, self.positions).flatten(0, 1)

    def join(self, blocks: Tensor) -> Tensor:
        """Inverse of `split`: blocks (n t, k, q), or one (1, k, q) for all, on the diagonals of (n or 1, t k, t q)."""
        t = self.positions
        shared = blocks.expand(t, -1, -1) if len(blocks) == 1 else blocks
        return block_diagonal(shared.reshape(-1, t, *blocks.shape[1:]))


class LossDerivatives(NamedTuple):
    """Derivatives of the loss in the outputs of some examples, multiplied by their weights."""

    outputs: Tensor  # (n, k), or (n, t k) with t positions
    residuals: Tensor  # the same
    roots: Tensor | None  # (n, k, q); `None` for the identity
    weights: Tensor  # (n,) weight of each example
    position_weights: Tensor  # (n, t) weight of each position
    class_targets: Tensor | None  # (n, k) targets of classes as the likelihood encodes them; `None` for other losses

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, batch: Batch, where: str) -> LossDerivatives:
        """Derivatives of a likelihood at outputs (n, ..., k), position by position."""
        n, k, shape = len(outputs), outputs.shape[-1], tuple(outputs.shape[1:-1])
        flat = outputs.reshape(-1, k)
        weights = position_weights(batch.weights, outputs, where)
        described = f"{where}, whose examples are counted position by position, {prod(shape)} each," if shape else where
        targets = likelihood.check_targets(targets_at(batch.targets, outputs, where), flat, described)
        residuals = likelihood.residuals(flat, targets)
        roots = likelihood.hessian_root(flat, targets)
        check_finite((residuals, roots), f"derivatives of the {likelihood.name} loss", where)
        counted = likelihood.counted(targets)
        weights = weights if counted is None else weights * counted.reshape(weights.shape)
        if batch.weights is not None or type(likelihood).counted is not Likelihood.counted:
            each = weights.reshape(-1, 1)
            roots = torch.eye(k, dtype=flat.dtype, device=flat.device) if roots is None else roots
            roots = each.sqrt().unsqueeze(2) * roots
            residuals = each * residuals
        if roots is not None and shape:
            roots = Positions(shape, k, None).join(roots)
        examples = example_weights(batch.weights, weights)
        classes = targets.reshape(n, -1) if likelihood.has_classes and targets.shape == flat.shape else None
        return cls(outputs.flatten(1), residuals.reshape(n, -1), roots, examples, weights, classes)


def targets_at(targets: Tensor, outputs: Tensor, where: str) -> Tensor:
    """Targets for outputs (n, ..., k), with positions joined: (n t,) or (n t, k)."""
    positions = outputs.shape[1:-1]
    if not positions:
        return targets
    if targets.shape[: outputs.ndim - 1] != outputs.shape[:-1]:
        raise ShapeError(
            f"expected targets of shape {tuple(outputs.shape[:-1])}, one for each position, or "
            f"{tuple(outputs.shape)}, for outputs of shape {tuple(outputs.shape)}, which are read as (examples, "
            f"positions, outputs at each), got {tuple(targets.shape)} in {where}. If classes come before positions, "
            "use outputs.movedim(1, -1); for one row for each example, use outputs.flatten(1)."
        )
    return targets.flatten(0, len(positions))


def position_weights(given: Tensor | None, outputs: Tensor, where: str) -> Tensor:
    """(n, t) weights of the positions of outputs (n, ..., k), given for examples (n,) or positions (n, ...), or one."""
    weights = outputs.new_ones(len(outputs), prod(outputs.shape[1:-1]))
    if given is None:
        return weights
    _check_weights(given, outputs.shape[:-1], where)
    return weights * given.reshape(len(outputs), -1).to(outputs.dtype)


def _check_weights(given: Any, shape: Sequence[int], where: str) -> None:
    """Raise unless these are weights of examples (n,), or of positions (n, ...), finite and not below zero."""
    numbers = isinstance(given, Tensor) and given.dtype != torch.bool and not given.is_complex()
    if not numbers or given.shape not in (shape[:1], shape):
        also = f" or {tuple(shape)}, one for each position," if len(shape) > 1 else ""
        raise (ShapeError if numbers else InputError)(
            f"expected sample weights as numbers of shape ({shape[0]},){also} in {where}, got "
            f"{describe(given) or type(given).__name__}. The third part of a batch (or the key 'sample_weight') is a "
            "tensor with one weight for each example; several inputs go into a tuple: ((a, b), targets)."
        )
    wrong = (~(torch.isfinite(given) & (given >= 0))).nonzero().tolist()
    if wrong:
        raise InputError(
            f"expected sample weights that are finite and not below zero, got {float(given[tuple(wrong[0])])} in "
            f"{where} (example {wrong[0][0]} of the batch). A weight of zero leaves an example out."
        )


def example_weights(given: Tensor | None, units: Tensor) -> Tensor:
    """(n,) weights of examples from weights (n, t) of positions: their own, or one; zero if no position counts."""
    counts = (units > 0).any(1).to(units.dtype)
    return counts if given is None or given.ndim > 1 else counts * given.to(units.dtype)


def diagonal_blocks(matrices: Tensor, count: int) -> Tensor:
    """The t blocks (n, t, k, q) on the diagonals of matrices (n, t k, t q)."""
    n, k, q = matrices.shape
    shaped = matrices.reshape(n, count, k // count, count, q // count)
    return shaped.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def block_diagonal(blocks: Tensor) -> Tensor:
    """Block-diagonal matrices: (groups, size, k, q) to (groups, size k, size q)."""
    groups, size, k, q = blocks.shape
    wide = blocks.new_zeros(groups, size, k, size, q)
    at = torch.arange(size, device=blocks.device)
    wide[:, at, :, at] = blocks.transpose(0, 1)
    return wide.reshape(groups, size * k, size * q)


def check_weights_given(given: Sequence[bool]) -> None:
    """Raise unless every batch has weights or none has."""
    if len(set(given)) > 1:
        raise InputError(
            f"expected sample weights in every batch or in none, got them in batch {given.index(True)} and none in "
            f"batch {given.index(False)}. Give a weight of 1 to examples that count as usual."
        )


def none_if_ones(weights: Tensor) -> Tensor | None:
    """Weights of all examples (n,), or `None` if all are one; raise if none is above zero."""
    if not bool((weights > 0).any()):
        raise TargetError(
            f"expected at least one training example that counts, got {len(weights)} that are all ignored or of "
            "weight zero. Check ignore_index, the class weights and the sample weights."
        )
    return None if bool((weights == 1).all()) else weights


# --- Several processes ------------------------------------------------------------------------------------------------


def example_fingerprints(batches: Batches) -> Tensor:
    """Read all data once; return a fingerprint (n,) of every example of all processes, and note each one's share."""
    passes = batches.passes
    parts: list[Tensor] = []
    for batch in batches.read("data"):
        leaves = [*tensors_of((batch.inputs, batch.weights)), batch.targets]
        each = [(2 * at + 1) * row_checksums(leaf) for at, leaf in enumerate(leaves)]
        parts.append(torch.stack(each).sum(0))
    found = torch.cat(parts) if parts else None
    if passes.process_group.alone and found is not None:
        return found
    sizes = passes.process_group.all_gather_object("the data", 0 if found is None else len(found))
    if not sum(sizes):
        raise no_examples()
    rank = passes.process_group.rank
    passes.offset, passes.local_examples, passes.most_examples = sum(sizes[:rank]), sizes[rank], max(sizes)
    return passes.process_group.all_gather(found, "the data", torch.device("cpu"))
