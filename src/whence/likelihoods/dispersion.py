"""The dispersion of likelihoods whose variance follows from their mean: one, or Pearson's estimate."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from whence.errors import InputError

from .base import Noise

Dispersion = Literal["fixed", "pearson"]


def check_dispersion(given: str) -> None:
    """Raise unless this is a known kind of dispersion."""
    if given not in get_args(Dispersion):
        raise InputError(
            f"expected dispersion to be one of {', '.join(map(repr, get_args(Dispersion)))}, got {given!r}."
        )


def check_unsketched(given: str) -> None:
    """Raise where Pearson's estimate is asked for and not all outputs are looked at."""
    if given == "pearson":
        raise InputError(
            "expected dispersion='fixed' where not all outputs are looked at, got 'pearson', which sums over the "
            "residuals of all. Fit with outputs='all', or with dispersion='fixed'."
        )


def dispersed(
    kind: Dispersion, roots: Tensor, statistic: Tensor, numbers: int, degrees_of_freedom: float | None
) -> Noise:
    """The noise phi L_i, with phi one or Pearson's statistic over what is left of the numbers.

    Args:
        kind: "fixed" or "pearson".
        roots: R_i (n, k, q) with L_i = R_i R_i^T.
        statistic: sum_i r_i^T L_i^-1 r_i.
        numbers: how many independent numbers it sums over.
        degrees_of_freedom: what the fit used up; `None` to divide by all numbers.
    """
    scale = 1.0
    if kind == "pearson":
        left = numbers - (degrees_of_freedom or 0.0)
        if left <= 1e-9 * numbers:
            raise InputError(
                f"expected more numbers ({numbers}) than effective degrees of freedom ({degrees_of_freedom:.1f}) for "
                "Pearson's dispersion with noise='unbiased'. Raise the ridge, use noise='mle', or dispersion='fixed'."
            )
        scale = float(statistic) / left
        if not torch.isfinite(statistic):
            raise InputError(
                "expected a finite Pearson statistic, got a training example whose observed class has probability "
                "zero. Use dispersion='fixed', or look at that example's label."
            )
    mean = torch.einsum("nkq,njq->kj", roots, roots) / len(roots)
    return Noise(scale * mean, scale**0.5 * roots, scale)
