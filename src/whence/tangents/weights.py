"""Sample weights: how much each training example counts, as the loader tells it beside the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError

WEIGHT_KEY = "sample_weight"


def weights_in(raw: Any) -> Any:
    """The third part of a batch, or what a dict holds under "sample_weight"; `None` where there is neither.

    Examples:
        >>> weights_in(("inputs", "targets", "weights")), weights_in(("inputs", "targets"))
        ('weights', None)
    """
    if isinstance(raw, Mapping):
        return raw.get(WEIGHT_KEY)
    return raw[2] if isinstance(raw, (tuple, list)) and len(raw) == 3 else None


def check_weights(weights: Any, size: int, where: str) -> None:
    """Raise unless these are numbers for `size` examples, finite and not below zero."""
    advice = (
        "The third part of a batch (or the key 'sample_weight') is a tensor with one weight for each example; several "
        "inputs go into a tuple: ((a, b), targets)."
    )
    if not isinstance(weights, Tensor):
        raise InputError(f"expected sample weights as a tensor in {where}, got {type(weights).__name__}. {advice}")
    if not weights.ndim or len(weights) != size:  # one for each position is looked at where outputs are known
        raise ShapeError(f"expected sample weights of shape ({size},) in {where}, got {tuple(weights.shape)}. {advice}")
    if weights.dtype == torch.bool or weights.is_complex():
        raise InputError(f"expected sample weights as numbers in {where}, got {weights.dtype}. {advice}")
    wrong = ~(torch.isfinite(weights) & (weights >= 0))
    if weights.ndim > 1 and bool(wrong.any()):  # rather an input than weights of positions
        raise ShapeError(f"expected sample weights of shape ({size},) in {where}, got {tuple(weights.shape)}. {advice}")
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise InputError(
            f"expected sample weights that are finite and not below zero, got {float(weights[at])} in {where} "
            f"(example {at} of the batch). A weight of zero leaves an example out."
        )
