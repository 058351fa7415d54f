"""`whence` inside the training loops of other libraries: `whence.integrations.lightning` and `.transformers`.

Each module needs its library, and is imported separately. This one holds what they share: the ridge that corresponds to
the weight decay of a training loop. The scikit-learn estimators are in `whence.sklearn`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whence.api import Loss, ridge_from_weight_decay
from whence.data.batches import Batch, Batches
from whence.jacobian.network import Network, follow_own_loss
from whence.likelihoods import Categorical, Likelihood
from whence.runtime.execution import Progress
from whence.runtime.model_state import preserved

OVER_OUTPUTS: dict[str, Loss] = {"gaussian": "mse", "bernoulli": "binary_cross_entropy"}
"""Losses that torch averages over all numbers of the targets; others are means over examples and positions."""


def decay_of(optimizers: Iterable[Any]) -> float:
    """The largest weight decay of all parameter groups; biases and norms often have none of their own."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)


def ridge_of(
    decay: float, loader: Iterable[Any], likelihood: str | Likelihood, model: nn.Module
) -> float | Literal["auto"]:
    """Lambda on the sum scale, for a mean loss over the training data; "auto" without a weight decay.

    The loader is read once, to count the terms of the mean: labels that are not `ignore_index`, weighted by class
    weights as in torch, and by sample weights. The model, in evaluation mode, is run to see whether there are outputs
    at several positions, and whether its own loss compares them with the next label (language models).

    Examples:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> ridge_of(0.01, [(torch.zeros(50, 3), torch.zeros(50, 2))] * 2, "gaussian", net)
        1.0
    """
    if not decay > 0:
        return "auto"
    loss = Categorical() if likelihood == "categorical" else likelihood
    name = loss if isinstance(loss, str) else loss.name
    with preserved(model):
        network = Network(model)
        batches = Batches(loader, network.device, Progress(False))
        first = batches.first()
        axes = first.targets.ndim  # of the targets, along which the loss is a mean
        if name not in OVER_OUTPUTS:
            axes = 1
            if first.targets.ndim > 1:
                with torch.no_grad():
                    axes = network.shaped(first.inputs).ndim - 1
                follow_own_loss(network, batches, first, getattr(loss, "ignore_index", None))
        terms = sum(float(_terms(batch, loss, axes).sum()) for batch in batches)
    return ridge_from_weight_decay(decay, terms, loss=OVER_OUTPUTS.get(name, "cross_entropy"))


def _terms(batch: Batch, loss: str | Likelihood, axes: int) -> Tensor:
    """How much each term of the sum of losses counts in the number that the mean divides by."""
    targets, weights = batch.targets, batch.weights
    if isinstance(loss, Categorical) and not targets.is_floating_point():
        _, counts = loss.labels(targets, torch.float64)
    else:
        counts = torch.ones(targets.shape[:axes], dtype=torch.float64, device=targets.device)
    if weights is None:
        return counts
    return counts * weights.double().reshape(*weights.shape, *[1] * (counts.ndim - weights.ndim))
