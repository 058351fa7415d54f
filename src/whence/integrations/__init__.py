"""`whence` inside the training loops of other libraries.

Each module needs its library, and is imported separately:

    from whence.integrations.lightning import WhenceCallback
    from whence.integrations.transformers import fit_trainer
    from whence.integrations import skorch as whence_skorch

The scikit-learn estimators are in `whence.sklearn`.

This module holds what they share: the ridge that corresponds to the weight decay of a training loop.
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


def decay_of(optimizers: Iterable[Any]) -> float:
    """The largest weight decay of all parameter groups; biases and norms often have none of their own."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(group.get("weight_decay") or 0.0) for group in groups), default=0.0)


def ridge_of(
    decay: float, loader: Iterable[Any], likelihood: str | Likelihood, model: nn.Module
) -> float | Literal["auto"]:
    """Lambda on the sum scale, for a mean loss over the training data; "auto" without a weight decay.

    The mean squared error is over all numbers of the targets ("gaussian"), the binary cross-entropy over all logits
    ("bernoulli"), the cross-entropy over all examples, or their tokens or pixels, whose label is not `ignore_index`
    ("categorical", weighted by class weights as in torch), any other loss over all examples and positions. With sample
    weights it is assumed to be a weighted mean. The loader is read once, to count. The model, in evaluation mode, is
    run to see whether there are outputs at several positions, and whether its own loss compares them with the next
    label (language models).

    Examples:
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> ridge_of(0.01, [(torch.zeros(50, 3), torch.zeros(50, 2))] * 2, "gaussian", net)
        1.0
    """
    if not decay > 0:
        return "auto"
    name = likelihood if isinstance(likelihood, str) else likelihood.name
    loss = Categorical() if likelihood == "categorical" else likelihood
    with preserved(model):
        network = Network(model)
        batches = Batches(loader, network.device, Progress(False))
        first = batches.first()
        positions = 1
        if name not in ("gaussian", "bernoulli") and first.targets.ndim > 1:
            with torch.no_grad():
                positions = network.shaped(first.inputs).ndim - 1
            follow_own_loss(network, batches, first, getattr(loss, "ignore_index", None))
        terms = sum(float(_terms(batch, loss, name, positions).sum()) for batch in batches)
    losses: dict[str, Loss] = {"gaussian": "mse", "bernoulli": "binary_cross_entropy"}
    return ridge_from_weight_decay(decay, terms, loss=losses.get(name, "cross_entropy"))


def _terms(batch: Batch, loss: str | Likelihood, name: str, positions: int) -> Tensor:
    """How much each term of the sum of losses counts in the number that the mean divides by."""
    targets = batch.targets
    shape = targets.shape if name in ("gaussian", "bernoulli") else targets.shape[:positions]
    counts = torch.ones(shape, dtype=torch.float64, device=targets.device)
    if isinstance(loss, Categorical) and not targets.is_floating_point():
        kept = targets != loss.ignore_index
        counts = kept.double()
        if loss.weight is not None:
            sizes = torch.as_tensor(loss.weight, dtype=torch.float64, device=targets.device)
            counts = counts * sizes[torch.where(kept, targets, 0).long()]
    if batch.weights is None:
        return counts
    return counts * batch.weights.double().reshape(*batch.weights.shape, *[1] * (counts.ndim - batch.weights.ndim))
