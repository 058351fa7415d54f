"""Cross-entropy of yes-or-no outputs: one logit, or many that are not mutually exclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from whence.errors import InputError, ShapeError, TargetError
from whence.likelihoods.base import Likelihood, shaped_as_outputs
from whence.likelihoods.categorical import class_weights


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Cross-entropy of sigmoid(f), summed over outputs, with the option of `torch.nn.BCEWithLogitsLoss`.

    With p = sigmoid(f) and targets y the residual is y - p and the Hessian L = diag(p (1 - p)). With a weight c of the
    positive class they are c y (1 - p) - (1 - y) p and (c y + 1 - y) p (1 - p).

    Targets are 0 and 1, or probabilities, in the shape of the outputs (or (n,) for a single output).

    Args:
        pos_weight: weight of the positive class, one number or one for each output.

    Examples:
        >>> import torch
        >>> Bernoulli().residuals(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.5000, -0.5000]])
    """

    name: ClassVar[str] = "bernoulli"
    has_classes: ClassVar[bool] = True
    pos_weight: float | Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        """Raise for invalid options, and convert weights to plain numbers."""
        if self.pos_weight is not None:
            object.__setattr__(self, "pos_weight", class_weights(self.pos_weight, "pos_weight", alone=True))

    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Targets as floats in the shape of the outputs."""
        weight = self._positive(outputs)
        if len(weight) not in (1, outputs.shape[1]):
            raise ShapeError(
                f"expected one pos_weight, or one for each of the {outputs.shape[1]} outputs, got {len(weight)} in "
                "Bernoulli(pos_weight=...)."
            )
        _check_logits(outputs, where)
        advice = 'For one class out of many use likelihood="categorical".' if targets.ndim == 1 else ""
        flat = shaped_as_outputs(targets, outputs, where, advice)
        wrong = ((flat < 0) | (flat > 1)).any(1)
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            raise TargetError(
                f"expected targets between 0 and 1, got {flat[at].tolist()} in {where} (example {at} of the batch). "
                "Labels -1 and +1 become (labels + 1) / 2."
            )
        return flat.to(outputs.dtype)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The residuals c y (1 - p) - (1 - y) p."""
        return self._positive(outputs) * targets * (-outputs).sigmoid() - (1.0 - targets) * outputs.sigmoid()

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The square root of (c y + 1 - y) p (1 - p), on the diagonal."""
        return self._root(outputs, targets).diag_embed()

    def root_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """R v, for the diagonal root R."""
        return self._root(outputs, targets).unsqueeze(2) * vectors

    def log_residuals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """For targets 1 and 0, logarithms of c (1 - p) and p, from the log-odds against them, which order ties."""
        odds = torch.where(targets == 1.0, -outputs, outputs)
        hard = (targets == 0.0) | (targets == 1.0)
        logarithms = self._sizes(outputs, targets).log() + logsigmoid(odds)
        found = torch.where(hard, logarithms, self.residuals(outputs, targets).abs().log())
        return found.amax(1), torch.where(hard, odds, 0.0).amax(1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """sigmoid(f)."""
        return outputs.sigmoid()

    def contrasts(self, outputs: Tensor) -> Tensor:
        """Each output is a separate decision, by its distance from zero: (m, k, k)."""
        return torch.where(outputs < 0, -1.0, 1.0).to(outputs.dtype).diag_embed()

    def _root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self._sizes(outputs, targets) * outputs.sigmoid() * (-outputs).sigmoid()).sqrt()

    def _sizes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._positive(outputs) * targets + 1.0 - targets

    def _positive(self, outputs: Tensor) -> Tensor:
        given = (1.0,) if self.pos_weight is None else self.pos_weight
        return torch.as_tensor(given, dtype=outputs.dtype, device=outputs.device)


def _check_logits(outputs: Tensor, where: str) -> None:
    """Raise if the model ends in a sigmoid: outputs that cover the interval from zero to one and never leave it."""
    if len(outputs) < 10:
        return
    low, high = (float(end) for end in outputs.aminmax())
    if 0 <= low < 0.1 and 0.9 < high <= 1:
        raise InputError(
            f"expected logits as outputs, got numbers between {low:.3g} and {high:.3g} in {where}, which look like "
            "probabilities. Leave the sigmoid at the end of the model out, or wrap the model in a module that returns "
            "torch.logit of them."
        )
