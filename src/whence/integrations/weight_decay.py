"""The ridge that a training loop's weight decay amounts to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from whence.errors import InputError
from whence.likelihoods import Likelihood
from whence.ridge import ridge_from_weight_decay
from whence.tangents.batches import split


def decay_of(optimizers: Iterable[Any]) -> float:
    """The largest weight decay of all parameter groups; biases and norms often have none of their own."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)


def ridge_of(decay: float, loader: Iterable[Any], likelihood: str | Likelihood) -> float:
    """Lambda on the sum scale, for a mean loss over the examples of a loader.

    Args:
        decay: weight decay of the optimiser.
        loader: gives the training batches; it is read once, to count.
        likelihood: "gaussian" for the mean squared error over all numbers, "bernoulli" for the mean cross-entropy over
            all logits, any other for the mean over examples.

    Examples:
        >>> import torch
        >>> ridge_of(0.01, [(torch.zeros(50, 3), torch.zeros(50, 2))] * 2, "gaussian")
        1.0
    """
    if not decay > 0:
        raise InputError(
            "expected a weight decay above zero to take the ridge from, got none. Pass ridge=..., lambda in 'sum of "
            "losses + lambda / 2 ||w||^2' (for squared error without the 2), or train with weight decay."
        )
    n = outputs = 0
    for number, raw in enumerate(loader):
        _, targets = split(raw, f"batch {number}")
        if isinstance(targets, Tensor) and targets.ndim:
            n += len(targets)
            outputs = targets[0].numel()
    name = likelihood if isinstance(likelihood, str) else likelihood.name
    if name == "gaussian":
        return ridge_from_weight_decay(decay, n, outputs=max(outputs, 1))
    return ridge_from_weight_decay(decay, n * max(outputs, 1) if name == "bernoulli" else n, loss="cross_entropy")
