"""Cross-entropy: of mutually exclusive classes (softmax), and of yes-or-no outputs (sigmoid), one or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from whence.errors import InputError, ShapeError, TargetError
from whence.likelihoods.base import Likelihood, shaped_as_outputs

FEW = 256  # rows whose sums are checked for a softmax in the model
NEAR_ONE = 1e-4  # tolerance for probabilities to sum to one, unless the precision of their dtype is larger


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Cross-entropy of softmax(f), with the options of `torch.nn.CrossEntropyLoss`.

    With p = softmax(f) and targets y the residual is y - p and the Hessian L = diag(p) - p p^T. With class weights c
    and smoothed or soft targets they are s (y' - p) and s L, with s = sum_c c_c y_c and y' = c y / s.

    Targets are class indices (n,), or probabilities (n, k) that sum to one.

    Args:
        weight: weight of each class, as in `CrossEntropyLoss(weight=...)`.
        ignore_index: examples with this class index do not count.
        label_smoothing: share of the target that is spread evenly over the classes.

    Examples:
        >>> import torch
        >>> loss = Categorical()
        >>> targets = loss.check_targets(torch.tensor([1]), torch.zeros(1, 2), "batch 0")
        >>> loss.residuals(torch.zeros(1, 2), targets)
        tensor([[-0.5000,  0.5000]])
    """

    name: ClassVar[str] = "categorical"
    has_classes: ClassVar[bool] = True
    couples_outputs: ClassVar[bool] = True
    weight: Sequence[float] | Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Raise for invalid options, and convert weights to plain numbers."""
        ignored: Any = self.ignore_index
        if not isinstance(ignored, int) or not -(2**63) <= ignored < 2**63:
            raise InputError(f"expected ignore_index to be a whole number of 64 bits, got {ignored!r}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise InputError(f"expected label_smoothing at least 0 and below 1, got {self.label_smoothing}.")
        if self.weight is not None:
            object.__setattr__(self, "weight", class_weights(self.weight, "weight"))

    def check_targets(self, targets: Tensor, outputs: Tensor, where: str) -> Tensor:
        """Targets c y (n, k) with class weights and smoothing; rows of zeros for examples that do not count."""
        k = outputs.shape[1]
        if targets.is_floating_point():
            self._check_outputs(outputs, where)
            _check_probabilities(targets, outputs, where)
            encoded, counts = targets.to(outputs.dtype), None
        else:
            labels, _ = self.check_labels(targets, outputs, where)
            encoded, counts = one_hot(labels, k).to(outputs.dtype), targets != self.ignore_index
        if self.label_smoothing:
            encoded = (1.0 - self.label_smoothing) * encoded + self.label_smoothing / k
        if self.weight is not None:
            encoded = encoded * torch.as_tensor(self.weight, dtype=encoded.dtype, device=encoded.device)
        return encoded if counts is None else encoded * counts.unsqueeze(1)

    def check_labels(self, targets: Tensor, outputs: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """Check class indices, and return the result of `labels`."""
        self._check_outputs(outputs, where)
        _check_indices(targets, targets != self.ignore_index, outputs, where)
        return self.labels(targets, outputs.dtype)

    def labels(self, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Classes and class weights from class indices; both are 0 for examples that do not count."""
        counts = targets != self.ignore_index
        labels = torch.where(counts, targets, 0).long()
        if self.weight is None:
            return labels, counts.to(dtype)
        return labels, torch.as_tensor(self.weight, dtype=dtype, device=targets.device)[labels] * counts

    def _check_outputs(self, outputs: Tensor, where: str) -> None:
        k = outputs.shape[1]
        if k < 2:
            raise ShapeError(
                f"expected at least two outputs for the categorical likelihood, got {k} in {where}. "
                'For a single logit use likelihood="bernoulli".'
            )
        first = outputs[:FEW]
        if len(first) > 1 and bool((first >= 0).all()) and bool(((first.sum(1) - 1).abs() < 1e-3).all()):
            raise InputError(  # the likelihood would apply another softmax
                f"expected logits as outputs, got probabilities in {where}: each row is positive and sums to one. "
                "Leave the softmax at the end of the model out, or wrap the model in a module that returns their "
                "logarithm."
            )
        if self.weight is not None and len(self.weight) != k:
            raise ShapeError(
                f"expected one class weight for each of the {k} outputs, got {len(self.weight)} in "
                "Categorical(weight=...)."
            )

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The residuals c y - s p with s = sum c y, as c y (1 - p) - (s - c y) p: exact for a single label."""
        p = outputs.softmax(1)
        top = p.argmax(1, keepdim=True)
        rest = (1.0 - p).scatter(1, top, p.scatter(1, top, 0.0).sum(1, keepdim=True))  # 1 - p, accurate to all digits
        return targets * rest - (targets.sum(1, keepdim=True) - targets) * p

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """R = sqrt(s) (diag(sqrt(p)) - p sqrt(p)^T), for which R R^T = s (diag(p) - p p^T)."""
        p = outputs.softmax(1)
        roots = p.sqrt()
        return targets.sum(1).sqrt().reshape(-1, 1, 1) * (roots.diag_embed() - p.unsqueeze(2) * roots.unsqueeze(1))

    def log_residuals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """For a single label log(c (1 - p)), from the log-odds of all other classes against it, which order ties."""
        weight, label = targets.max(1, keepdim=True)
        odds = outputs.scatter(1, label, -torch.inf).logsumexp(1) - outputs.gather(1, label).squeeze(1)
        hard = (targets > 0).sum(1) == 1
        soft = self.residuals(outputs, targets).abs().amax(1).log()
        return torch.where(hard, weight.squeeze(1).log() + logsigmoid(odds), soft), torch.where(hard, odds, 0.0)

    def root_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """The products sqrt(s) (sqrt(p) v - p sqrt(p)^T v)."""
        p = outputs.softmax(1).unsqueeze(2)
        moved = p.sqrt() * vectors
        return targets.sum(1).sqrt().reshape(-1, 1, 1) * (moved - p * moved.sum(1, keepdim=True))

    def counted(self, targets: Tensor) -> Tensor | None:
        """Examples whose class is not ignored and has a weight above zero."""
        counts = targets.sum(1) > 0
        return None if bool(counts.all()) else counts

    def numbers(self, outputs: int) -> int:
        """One less than the classes, since residuals sum to zero."""
        return outputs - 1

    def probabilities(self, outputs: Tensor) -> Tensor:
        """softmax(f)."""
        return outputs.softmax(1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The most probable class."""
        return outputs.argmax(1)

    def contrasts(self, outputs: Tensor) -> Tensor:
        """The largest output less the second largest: (m, 1, k)."""
        first, second = outputs.topk(2, dim=1).indices.unbind(1)
        found = one_hot(first, outputs.shape[1]) - one_hot(second, outputs.shape[1])
        return found.to(outputs.dtype).unsqueeze(1)


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
        low, high = (float(end) for end in outputs.aminmax())
        if len(outputs) >= 10 and 0 <= low < 0.1 and 0.9 < high <= 1:  # all of the interval, and nothing beyond
            raise InputError(
                f"expected logits as outputs, got numbers between {low:.3g} and {high:.3g} in {where}, which look like "
                "probabilities. Leave the sigmoid at the end of the model out, or wrap the model in a module that "
                "returns torch.logit of them."
            )
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


def class_weights(given: float | Sequence[float] | Tensor, name: str, alone: bool = False) -> tuple[float, ...]:
    """Check weights and convert them to plain numbers; with `alone`, a single number is allowed."""
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        weights = torch.tensor(float("nan"), device="cpu")
    if alone and weights.ndim == 0:
        weights = weights.reshape(1)
    if weights.ndim != 1 or not bool(torch.isfinite(weights).all() & (weights >= 0).all() & (weights > 0).any()):
        raise InputError(
            f"expected {name} to be one number for each class, finite, not below zero and not all zero, got {given!r}."
        )
    return tuple(weights.tolist())


def _check_indices(targets: Tensor, counts: Tensor, outputs: Tensor, where: str) -> None:
    k = outputs.shape[1]
    if targets.shape == outputs.shape:
        raise TargetError(
            f"expected class indices of shape ({len(outputs)},), got {targets.dtype} of shape {tuple(targets.shape)} "
            f"in {where}, which looks one-hot. Pass targets.argmax(1); probabilities go in as floats, targets.float()."
        )
    if targets.dtype == torch.bool:
        raise TargetError(
            f'expected class indices, got torch.bool in {where}. Call .long(), or use likelihood="bernoulli".'
        )
    if targets.shape != outputs.shape[:1]:
        raise ShapeError(
            f"expected class indices of shape ({len(outputs)},), one for each example, got shape "
            f"{tuple(targets.shape)} in {where}. Flatten them, for example with targets.squeeze(1)."
        )
    wrong = counts & ((targets < 0) | (targets >= k))
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise TargetError(
            f"expected class indices between 0 and {k - 1}, as the model has {k} outputs, got {int(targets[at])} in "
            f"{where} (example {at} of the batch). Count classes from 0; examples to leave out carry "
            "Categorical(ignore_index=...), -100 by default."
        )


def _check_probabilities(targets: Tensor, outputs: Tensor, where: str) -> None:
    if targets.ndim == 1:
        raise TargetError(
            f"expected class indices as integers, got {targets.dtype} of shape {tuple(targets.shape)} in {where}. "
            "Call .long() if these are labels; probabilities have the shape of the outputs, "
            f"{tuple(outputs.shape)}."
        )
    shaped_as_outputs(targets, outputs, where, what="probabilities")
    off = (targets.sum(1).double() - 1.0).abs()
    wrong = (off > max(NEAR_ONE, 4 * torch.finfo(targets.dtype).eps)) | (targets < 0).any(1)
    if bool(wrong.any()):
        at = int(wrong.int().argmax())
        raise TargetError(
            f"expected probabilities that are not below zero and sum to one, got a row with sum "
            f"{float(targets[at].sum()):.6g} and smallest entry {float(targets[at].min()):.6g} in {where} "
            f"(example {at} of the batch). Divide each row by its sum, or pass class indices as integers."
        )
