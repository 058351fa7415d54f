"""From the weight decay of an optimiser to the ridge on the sum scale."""

from __future__ import annotations

from typing import Literal

from .errors import InputError

Loss = Literal["mse", "sum_of_squares", "cross_entropy"]


def ridge_from_weight_decay(weight_decay: float, n: int, *, outputs: int = 1, loss: Loss = "mse") -> float:
    """The ridge lambda that a weight decay amounts to.

    PyTorch's `weight_decay` adds weight_decay / 2 * ||w||^2 to the mean loss; `whence` counts sums, as the paper does.
    AdamW decouples the decay from the loss, so there this is a starting point, not an identity.

    Args:
        weight_decay: of the optimiser.
        n: number of training examples; the sum of their weights where the mean loss is a weighted one.
        outputs: number k of outputs.
        loss: "mse" for `MSELoss()`, the mean over n k numbers; "sum_of_squares" for the mean over examples of the sum
            over outputs; "cross_entropy" for the mean over examples (objective: sum of cross-entropies plus
            lambda / 2 ||w||^2).

    Examples:
        >>> ridge_from_weight_decay(0.01, 1000, outputs=10)
        50.0
        >>> ridge_from_weight_decay(0.01, 1000, loss="cross_entropy")
        10.0
    """
    if weight_decay < 0 or n < 1 or outputs < 1:
        raise InputError(f"expected weight_decay >= 0, n >= 1 and outputs >= 1, got {weight_decay}, {n} and {outputs}.")
    if loss == "mse":
        return n * outputs * weight_decay / 2
    if loss == "sum_of_squares":
        return n * weight_decay / 2
    if loss == "cross_entropy":
        return n * weight_decay
    raise InputError(f'expected loss "mse", "sum_of_squares" or "cross_entropy", got {loss!r}.')
