"""Squared error: the paper's setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whence.errors import TargetError
from whence.likelihoods.base import Likelihood, Noise, residual_degrees, shaped_as_outputs


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Squared error, summed over outputs, with the same noise covariance Sigma = E^T E / n for all examples.

    Examples:
        >>> import torch
        >>> Gaussian().residuals(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
        tensor([[2.]])
    """

    name: ClassVar[str] = "gaussian"

    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Targets as floats in the shape of the outputs."""
        if not targets.is_floating_point():
            raise TargetError(
                f"expected floating-point targets for the Gaussian likelihood, got {targets.dtype} in {where}. "
                'For class labels and cross-entropy pass likelihood="categorical"; for class labels and squared error '
                "encode them as the network was trained (for example with whence.one_hot(labels, classes), +1 and -1 "
                "as in the paper); for quantities call .float()."
            )
        labels = (
            'Class labels become whence.one_hot(labels, classes), or go with likelihood="categorical" if the network '
            "was trained with cross-entropy."
        )
        short = targets.ndim == outputs.ndim - 1 and outputs.shape[-1] > 1  # raises below
        whole = short and not bool((targets % 1).any())
        return shaped_as_outputs(targets, outputs, where, labels if whole else "").to(outputs.dtype)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """E = y - f(x)."""
        return targets - outputs

    def noise(self, residuals: Tensor, outputs: Tensor, roots: Tensor, degrees_of_freedom: float | None) -> Noise:
        """Sigma = E^T E / n, or its unbiased version E^T E / (n - dof / k).

        The scale is the mean variance: with a prior of precision lambda / sigma^2 the posterior is sigma^2 F_lam^-1.
        """
        n, k = residuals.shape
        sigma = residuals.T @ residuals / (residual_degrees(n * k, degrees_of_freedom) / k)
        values, vectors = torch.linalg.eigh(sigma)
        root = vectors * values.clamp_min(0.0).sqrt()
        return Noise(sigma, root.unsqueeze(0), float(sigma.diagonal().mean()))


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Class labels as targets of a squared-error network: +1 for the class and -1 elsewhere, as in the paper.

    Examples:
        >>> import torch
        >>> one_hot(torch.tensor([0, 2]), 3)
        tensor([[ 1., -1., -1.],
                [-1., -1.,  1.]])
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise TargetError(
            f"expected integer labels of shape (n,), got {labels.dtype} of shape {tuple(labels.shape)}. "
            "Pass class indices 0 .. classes - 1."
        )
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise TargetError(
            f"expected labels between 0 and {classes - 1}, got {int(labels.min())} to {int(labels.max())}. "
            "Raise `classes` or fix the labels."
        )
    encoded = torch.full((len(labels), classes), -1.0, device=labels.device)
    return encoded.scatter_(1, labels.long().unsqueeze(1), 1.0)
