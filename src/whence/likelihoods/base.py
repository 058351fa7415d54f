"""What a likelihood must tell: residuals, the curvature of the loss in the outputs, and the noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Likelihood(ABC):
    """The loss a network was trained with, seen from its outputs.

    A likelihood is a small object without state. Subclass it to teach `whence` another loss.
    """

    name: ClassVar[str]

    @abstractmethod
    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Return the targets in the shape `residuals` wants, or raise `TargetError`.

        Args:
            targets: as the loader gave them.
            outputs: (n, k) outputs of the network for the same examples.
            where: names the batch, for the error message.
        """

    @abstractmethod
    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the gradient of the loss in the outputs, (n, k)."""

    def hessian_root(self, outputs: Tensor) -> Tensor | None:
        """A root R (n, k, q) of the loss's Hessian in the outputs, L = R R^T; `None` means the identity."""
        return None

    def noise_scale(self, sigma: Tensor) -> float:
        """What F_lam^-1 is multiplied by to be the covariance of a posterior: one, unless the noise has a size."""
        return 1.0

    @abstractmethod
    def noise(self, residuals: Tensor, outputs: Tensor, degrees_of_freedom: float | None) -> tuple[Tensor, Tensor]:
        """The model-based covariance of the residuals.

        Args:
            residuals: (n, k).
            outputs: (n, k).
            degrees_of_freedom: what the fit used up, for an unbiased estimate; `None` for maximum likelihood.

        Returns:
            The noise covariance (k, k) and a root of each example's, (n, k, q) or (1, k, q) when all share it.
        """
