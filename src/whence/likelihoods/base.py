"""The interface of a likelihood: residuals, the Hessian of the loss in the outputs, and the noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError


@dataclass(frozen=True)
class Noise:
    """The covariance of the residuals according to the model itself.

    Attributes:
        covariance: (k, k) mean over the examples.
        roots: a root of each example's covariance, (n, k, q), or (1, k, q) if all share it.
        scale: factor that turns F_lam^-1 into the covariance of a posterior: the noise variance for squared error, the
            dispersion for other losses.

    Examples:
        >>> import torch
        >>> Noise(covariance=torch.tensor([[4.0]]), roots=torch.tensor([[[2.0]]]), scale=4.0).scale
        4.0
    """

    covariance: Tensor
    roots: Tensor
    scale: float = 1.0


class Likelihood(ABC):
    """The loss a network was trained with, as a function of its outputs.

    A likelihood is a small object without state. Subclass it to add a loss. `check_targets`, `residuals` and
    `hessian_root` are enough for any loss whose noise is determined by the model, as for counts or classes.

    The loss is a sum over examples, and the objective is loss + lambda / 2 ||w||^2 (for squared error, half of the
    "sum of squared errors + lambda ||w||^2"). `whence` multiplies by the sample weights: no method here gets them.

    Methods get outputs and residuals (n, k), targets as `check_targets` returns them, and roots R_i (n, k, q) of the
    loss's Hessian. Degrees of freedom are those of the fit, for an unbiased estimate of the noise; `None` for maximum
    likelihood.

    Attributes:
        has_classes: whether the outputs are logits of classes, with probabilities and margins.
        couples_outputs: whether the loss's Hessian couples the outputs of an example, so that single outputs cannot be
            left out.
        squared_error: whether the loss's Hessian in the outputs is the identity, as for all likelihoods without a
            `hessian_root`.
    """

    name: ClassVar[str]
    has_classes: ClassVar[bool] = False
    couples_outputs: ClassVar[bool] = False

    squared_error: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        """Set `squared_error`."""
        super().__init_subclass__()
        cls.squared_error = cls.hessian_root is Likelihood.hessian_root

    @abstractmethod
    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        """The loader's targets in the shape that `residuals` expects; raise `TargetError`, naming the batch `where`."""

    @abstractmethod
    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the gradient of the loss in the outputs, (n, k)."""

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """A root R (n, k, q) of the loss's Hessian in the outputs, L = R R^T; `None` means the identity."""
        return None

    def log_residuals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms (n,) of the largest residual of each example, and numbers (n,) that order ties, for classes.

        Logarithms are needed because a label of which the outputs are certain has a residual below the smallest float.
        The second part orders labels whose residuals round to one.
        """
        found = self.residuals(outputs, targets).abs().amax(1).log()
        return found, torch.zeros_like(found)

    def root_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """R v for vectors (n, q, c). With thousands of outputs, a likelihood with q = k does it without forming R."""
        root = self.hessian_root(outputs, targets)
        return vectors if root is None else root @ vectors

    def counted(self, targets: Tensor) -> Tensor | None:
        """(n,) which examples the loss counts, if it leaves some out; `None` for all."""
        return None

    def numbers(self, outputs: int) -> int:
        """How many of an example's k residuals can vary freely."""
        return outputs

    def noise(self, residuals: Tensor, outputs: Tensor, roots: Tensor, degrees_of_freedom: float | None) -> Noise:
        """The model-based covariance of the residuals of examples that count: L_i, as for any natural link."""
        return Noise(torch.einsum("nkq,njq->kj", roots, roots) / len(roots), roots)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """(m, k) probabilities of the classes, if there are classes."""
        raise self._without_classes("probabilities")

    def predicted(self, outputs: Tensor) -> Tensor:
        """(m,) index of the predicted class's output."""
        raise InputError(
            f'expected a likelihood with one class for each example for outputs="predicted", got {self.name!r}. Name '
            "the outputs, for example outputs=[0]."
        )

    def contrasts(self, outputs: Tensor) -> Tensor:
        """(m, c, k) the difference of outputs that decides for the predicted class, for each of c decisions."""
        raise self._without_classes("a margin")

    def _without_classes(self, wanted: str) -> InputError:
        return InputError(
            f"expected a likelihood with classes for {wanted}, got {self.name!r}. Fit with "
            'likelihood="categorical" or "bernoulli" if the network was trained with cross-entropy.'
        )


def shaped_as_outputs(targets: Tensor, outputs: Tensor, where: str, advice: str = "", what: str = "targets") -> Tensor:
    """Reshape targets to the outputs, or raise; (n,) is accepted for a single output."""
    flat = targets.unsqueeze(-1) if targets.ndim == outputs.ndim - 1 and outputs.shape[-1] == 1 else targets
    if flat.shape != outputs.shape:
        raise ShapeError(
            f"expected {what} of shape {tuple(outputs.shape)}, as the model's outputs, got {tuple(targets.shape)} in "
            f"{where}. {advice or 'Make the loader, or the model, give the other shape.'}"
        )
    return flat


def residual_degrees(numbers: int, degrees_of_freedom: float | None) -> float:
    """Residual degrees of freedom: the number of residuals minus the effective degrees of freedom of the fit."""
    left = numbers - (degrees_of_freedom or 0.0)
    if left <= 1e-9 * numbers:
        raise InputError(
            f"expected more numbers ({numbers}) than effective degrees of freedom ({degrees_of_freedom:.1f}) for "
            "noise='unbiased'. Raise the ridge, or use noise='mle'."
        )
    return left
