"""Language models that predict the next token: their labels are their inputs, and count one place further on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .batches import Batch, Batches
from .forward import Network

IGNORED = -100
"""Labels that Hugging Face's models leave out of their own loss."""


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels (n, t) of the next position; the last one has none.

    Examples:
        >>> next_labels(torch.tensor([[3, 4, 5]]), -100)
        tensor([[   4,    5, -100]])
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], dim=1)


def follow_own_loss(network: Network, batches: Batches, first: Batch, ignore_index: int | None) -> None:
    """Shift labels by one where the model's own loss does, and say so.

    A Hugging Face model given labels tells its loss. On the first batch it is compared with the cross-entropy of the
    labels as they stand and of the labels one place further on: whichever it is, is what the model was trained with.

    Args:
        network: the model.
        batches: the training data, whose labels are shifted from now on if need be.
        first: their first batch.
        ignore_index: of the likelihood; `None` if it is not for class indices.
    """
    labels = first.targets
    if ignore_index is None or labels.ndim != 2 or labels.is_floating_point() or labels.shape[1] < 2:
        return
    own = _own_loss(network, first)
    if own is None:
        return
    with torch.no_grad():
        outputs = network.shaped(first.inputs).double()
    if outputs.shape[:-1] != labels.shape:
        return
    plain, shifted = (_mean_loss(outputs, one) for one in (labels, next_labels(labels, IGNORED)))
    near = 1e-3 * abs(own) + 1e-6
    if abs(shifted - own) <= near and abs(shifted - own) < abs(plain - own):
        batches.retarget = lambda targets: next_labels(targets, ignore_index)
        batches.notes.append(
            "the model predicts the next token, as its own loss shows: outputs at a position were compared with the "
            "label of the next one"
        )
    elif abs(plain - own) > near:
        batches.notes.append(
            f"the model's own loss on the first batch ({own:.4g}) is neither the cross-entropy of the labels as they "
            f"stand ({plain:.4g}) nor of the next ones ({shifted:.4g}); they were taken as they stand"
        )


def _own_loss(network: Network, batch: Batch) -> float | None:
    """The mean loss that the model itself computes from labels; `None` if it does not."""
    if not isinstance(batch.inputs, Mapping):
        return None
    try:
        with torch.no_grad():
            answer = network.model(**batch.inputs, labels=batch.targets)
    except Exception:  # a model that takes no labels, or none of this kind
        return None
    loss = answer.get("loss") if isinstance(answer, Mapping) else getattr(answer, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not bool(torch.isfinite(loss)):
        return None
    return float(loss)


def _mean_loss(outputs: Tensor, labels: Tensor) -> float:
    return float(cross_entropy(outputs.flatten(0, 1), labels.reshape(-1).long(), ignore_index=IGNORED))
