"""From the weight decay of an optimiser to the ridge on the sum scale."""

from __future__ import annotations

from typing import Literal

from .errors import InputError

Loss = Literal["mse", "sum_of_squares", "cross_entropy", "binary_cross_entropy"]


def ridge_from_weight_decay(weight_decay: float, n: float, *, outputs: int = 1, loss: Loss = "mse") -> float:
    """The ridge lambda that a weight decay amounts to.

    PyTorch's `weight_decay` adds weight_decay / 2 * ||w||^2 to the mean loss; `whence` counts sums, as the paper does.
    AdamW decouples the decay from the loss, so there this is a starting point, not an identity.

    Args:
        weight_decay: of the optimiser.
        n: how many the mean loss runs over: training examples, or their tokens or pixels that count (for
            `CrossEntropyLoss` those whose label is not -100); the sum of their weights where it is a weighted mean.
        outputs: number k of outputs, for the losses that are means over them too: "mse" and "binary_cross_entropy".
        loss: "mse" for `MSELoss()`, the mean over n k numbers; "sum_of_squares" for the mean over examples of the sum
            over outputs; "cross_entropy" for `CrossEntropyLoss()`, the mean over examples whatever the number of
            classes (objective: sum of cross-entropies plus lambda / 2 ||w||^2); "binary_cross_entropy" for
            `BCEWithLogitsLoss()`, the mean over n k logits (the same objective).

    Examples:
        >>> ridge_from_weight_decay(0.01, 1000, outputs=10)
        50.0
        >>> ridge_from_weight_decay(0.01, 1000, loss="cross_entropy")
        10.0
        >>> ridge_from_weight_decay(0.01, 1000, outputs=8, loss="binary_cross_entropy")
        80.0
    """
    if weight_decay < 0 or n < 1 or outputs < 1:
        raise InputError(f"expected weight_decay >= 0, n >= 1 and outputs >= 1, got {weight_decay}, {n} and {outputs}.")
    if loss == "mse":
        return n * outputs * weight_decay / 2
    if loss == "sum_of_squares":
        return n * weight_decay / 2
    if loss == "binary_cross_entropy":
        return n * outputs * weight_decay
    if loss == "cross_entropy":
        if outputs != 1:
            raise InputError(
                f'expected loss="cross_entropy" without outputs, got outputs={outputs}. CrossEntropyLoss is a mean '
                "over n examples whatever the number of classes: leave outputs out. BCEWithLogitsLoss is a mean over n "
                'k logits: loss="binary_cross_entropy" with outputs=k.'
            )
        return n * weight_decay
    raise InputError(f'expected loss "mse", "sum_of_squares", "cross_entropy" or "binary_cross_entropy", got {loss!r}.')
