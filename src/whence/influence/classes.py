"""What targets and outputs say about classes, for every loss that is used for them."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.influence.fitted import Fitted, predicted_outputs

Codes = tuple[float, float] | None
"""Target values for other classes and for the class itself; `None` if targets are not classes."""


def class_codes(fitted: Fitted) -> Codes:
    """Zero and one for one choice among classes, or for yes and no with one or more outputs.

    Squared error on coded classes, such as zeros and a one, counts as classes too: two values, the larger one once in
    every row, or a single output with two values.
    """
    problem = fitted.problem
    if problem.likelihood.has_classes:
        return (0.0, 1.0)
    if problem.sketch is not None or problem.targets is None:
        return None
    targets = problem.targets.reshape(-1, problem.width)
    targets = targets[fitted.counted.repeat_interleave(len(targets) // problem.n)].double()
    if not len(targets):
        return None
    low, high = float(targets.min()), float(targets.max())
    near = 1e-3 * (high - low)  # outputs may be in single precision
    own, others = (targets - high).abs() <= near, (targets - low).abs() <= near
    once = own.sum(1) == 1 if problem.width > 1 else own.sum(1) <= 1
    coded = bool((once & (own | others).all(1)).all())
    return (round(low, 6), round(high, 6)) if coded and high > low else None


def has_several_labels(fitted: Fitted) -> bool:
    """Whether there are several outputs, each with its own yes-or-no label."""
    likelihood = fitted.problem.likelihood
    return likelihood.has_classes and not likelihood.couples_outputs and fitted.problem.width > 1


def has_yes_or_no(fitted: Fitted) -> bool:
    """Whether each output is a label of its own, yes or no."""
    return fitted.problem.width == 1 or has_several_labels(fitted)


def number_of_classes(fitted: Fitted, labels: Tensor | None) -> int:
    """How many labels there are: of an output if each has its own, else of all training examples, with labels (n,)."""
    if has_yes_or_no(fitted):
        return 2
    return fitted.problem.width if labels is None else max(2, len(labels[fitted.counted].unique()))


def class_labels(fitted: Fitted, codes: Codes) -> Tensor | None:
    """(n,) the class of each training example; `None` unless each has exactly one that is known."""
    problem = fitted.problem
    if codes is None or has_several_labels(fitted):
        return None
    if not fitted.all_outputs:
        return labels_of_batches(fitted)
    targets = problem.targets
    if targets is None:
        return None
    return (targets[:, 0] > sum(codes) / 2).long() if targets.shape[1] == 1 else targets.argmax(1)


def labels_of_batches(fitted: Fitted) -> Tensor | None:
    """(n,) the class of each training example, from a pass over the data: a sketch of many outputs does not keep it."""
    if not fitted.problem.likelihood.has_classes:
        return None
    found = []
    for batch in fitted.problem.batches.unsketched(None):
        if batch.targets.dim() != 1 or batch.targets.is_floating_point():
            return None
        found.append(batch.targets.long())
    labels = torch.cat(found)
    return labels if len(labels) == len(fitted.counted) else None


def positions_of_batches(fitted: Fitted) -> Tensor | None:
    """(n,) how many positions of each training example count, from a pass over the data; `None` if not known."""
    ignored = getattr(fitted.problem.likelihood, "ignore_index", None)
    found = []
    for batch in fitted.problem.batches.unsketched(None):
        if batch.targets.dim() != 2 or batch.targets.is_floating_point() or ignored is None:
            return None
        found.append((batch.targets != ignored).sum(1))
    counts = torch.cat(found)
    known = len(counts) == len(fitted.counted) and int(counts[fitted.counted].sum()) == fitted.problem.counted_units
    return counts if known else None


def predicted_classes(fitted: Fitted, outputs: Tensor, codes: Codes) -> Tensor | None:
    """(m,) the class that outputs (m, k) predict; `None` unless they are one choice among classes."""
    if codes is None or has_several_labels(fitted) or outputs[0].numel() != outputs.shape[-1]:
        return None
    flat = outputs.reshape(len(outputs), -1)
    if flat.shape[1] == 1:
        middle = 0.0 if fitted.problem.likelihood.has_classes else sum(codes) / 2  # for logits, and for codes
        return (flat.squeeze(1) > middle).long()
    predicted = predicted_outputs(fitted, outputs)
    return flat.argmax(1) if predicted is None else predicted.squeeze(1)


def predicted_probability(
    fitted: Fitted, outputs: Tensor, codes: Codes, examples: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(m,) probability of the predicted class, and how often two labels drawn from the network's probabilities differ.

    For outputs (m, ..., k); `nan` without classes. The mean over positions, of those in a mask (m, positions), and over
    outputs with their own labels. If inputs are training `examples` (m,), -1 for others, the second uses the fit
    without them, if that is known.
    """
    problem, likelihood = fitted.problem, fitted.problem.likelihood
    if codes is None:
        none = torch.full((len(outputs),), float("nan"), dtype=problem.dtype, device=outputs.device)
        return none, none
    flat, scale = outputs.reshape(-1, outputs.shape[-1]).double(), codes[1] - codes[0]
    p = without = likelihood.probabilities(flat) if likelihood.has_classes else (flat - codes[0]) / scale
    if examples is not None and problem.sketch is None:
        change = (fitted.residuals[examples] - fitted.loo_residuals[examples]) / scale
        without = p + torch.where(examples.unsqueeze(1) >= 0, change, 0.0).reshape(p.shape)
    if likelihood.has_classes and not likelihood.couples_outputs:
        p, without = p.clamp(0.0, 1.0), without.clamp(0.0, 1.0)
        best, differ = torch.maximum(p, 1 - p).mean(1), (2 * without * (1 - without)).mean(1)
    else:
        pair = ((one if one.shape[1] > 1 else torch.cat([one, 1 - one], 1)) for one in (p, without))
        p, without = (nearest_probabilities(one) for one in pair)
        best, differ = p.amax(1), 1 - without.square().sum(1)
    both = torch.stack([best, differ]).reshape(2, len(outputs), -1)
    weights = torch.ones_like(both[0]) if mask is None else mask.to(both)
    both = ((both * weights).sum(2) / weights.sum(1).clamp_min(1.0)).to(problem.dtype)
    return both[0], both[1]


def nearest_probabilities(values: Tensor) -> Tensor:
    """(m, k) probabilities nearest to values (m, k): not negative, with sum one.

    Examples:
        >>> nearest_probabilities(torch.tensor([[1.2, 0.1, -0.1], [0.6, 0.5, 0.2]]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.4000, 0.1000]])
    """
    ordered = values.sort(dim=1, descending=True).values
    excess = (ordered.cumsum(1) - 1.0) / torch.arange(1, values.shape[1] + 1, device=values.device)
    last = (ordered > excess).sum(1, keepdim=True) - 1
    found: Tensor = (values - excess.gather(1, last)).clamp_min(0.0)
    return found
