"""The effect of every training example on the fit, how doubtful its label is, and how many labels are wrong in all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from whence.data.batches import Batch, Inputs, batch_size
from whence.display import percent
from whence.errors import InputError
from whence.influence.fitted import Fitted, for_each_batch, leave_one_out_leverage, using_model, variance_terms
from whence.jacobian.leaves import LeafSum
from whence.linalg import few_at_once, largest_first
from whence.results import frame

if TYPE_CHECKING:
    import pandas


def cooks_distance(fitted: Fitted) -> Tensor:
    """(n,) how far the fit moves without an example, relative to how far the fit as a whole may move.

    D_i = (w - w_(-i))^T F_lam (w - w_(-i)) / (dof s^2), which is u_i^T Q_i u_i / (dof s^2) with the leverage block Q_i,
    the leave-one-out residual u_i, the effective degrees of freedom dof and the noise variance (or dispersion) s^2.
    It is Cook's distance if there is no ridge and the noise is unbiased.
    """
    left_out = fitted.adjusted.hec3
    if fitted.loo.policy == "clip":
        left_out = fitted.problem.isometric(left_out)
    found = (left_out * _own_change(fitted)).sum(1).clamp_min(0.0)
    scale = fitted.degrees_of_freedom * fitted.noise_scale
    return found / scale if scale > 0 else torch.zeros_like(found)


def _own_change(fitted: Fitted) -> Tensor:
    """(n, k) how far the outputs of each example move without it: Q_i u_i, for any leverage policy.

    Leave-one-out residuals are u_i = e_i + L_i Q_i u_i with true leverages, and e_i + L_i Q_i e_i with "one_plus_q".
    Only "clip" needs the inverse of L_i, which is nearly singular where probabilities are certain.
    """
    residuals, adjusted, loo = fitted.weighted_residuals, fitted.adjusted.hec3, fitted.loo
    if loo.policy == "clip" and fitted.problem.identity_hessians:
        return adjusted - residuals
    if loo.policy == "clip":
        roots, change = fitted.problem.hessian_roots, adjusted - residuals
        roots, change = (fitted.problem.isometric(one) for one in (roots, change))  # the inverse depends on lengths
        inverse = torch.cat([torch.linalg.pinv(some, hermitian=True) for some in few_at_once(roots @ roots.mT)])
        return (inverse @ change.unsqueeze(2)).squeeze(2)
    vectors = adjusted if loo.policy == "exact" else residuals
    return (loo.within_units(fitted.bread.leverage_blocks) @ vectors.unsqueeze(2)).squeeze(2)


@dataclass(frozen=True)
class Suspicion:
    """How badly each label fits the other examples."""

    score: Tensor  # (n,) the size of the doubt, in the fit without the example
    # (n,) the examples, the most doubtful label first: by their scores, or, for classes, by the network's own doubt. It
    # also orders labels whose scores round to the same number. Examples without a score come last
    order: Tensor


def label_suspicion(fitted: Fitted) -> Suspicion:
    """How badly each label fits the other examples.

    For squared error the size of the studentized residual, (e_i^T u_i / s^2)^1/2, times the root of the example's
    weight. The residual alone is too small for an example that pulls the fit towards its own label. The leave-one-out
    residual alone is too large for one with few others around it. This is their geometric mean:
    e / (s sqrt(1 - leverage)) for one output.

    For other losses the largest entry of the residual at the prediction without the example, f - q e with its
    leave-one-out leverage q: for classes 1 - p of the label there. It is bounded, unlike the first-order u. Examples
    are ordered by its logarithm, there or at the network's own prediction (`judged_change`), and by log-odds where that
    is zero: if the network is certain of a label, 1 - p is below the smallest float. Sketched fits do not know single
    outputs, so their norm is used.
    """
    problem = fitted.problem
    if problem.sketch is not None:
        norms = problem.unweighted(problem.isometric(problem.residuals_after(change_without(fitted)))).norm(dim=1)
        return Suspicion(norms, largest_first(norms))
    if not problem.likelihood.squared_error:
        change = change_without(fitted)
        score = problem.log_residuals_after(change)[0].exp()
        return Suspicion(score, largest_first(*problem.log_residuals_after(judged_change(fitted, change))))
    scale = fitted.noise_scale**0.5
    product = (fitted.residuals / scale * (fitted.adjusted.hec3 / scale)).sum(1).clamp_min(0.0)
    score = product.sqrt() if scale > 0 else torch.zeros_like(product)
    return Suspicion(score, largest_first(score))


def suspicion_over_copies(fitted: Fitted, augment: Callable[[Any], Any], copies: int) -> Suspicion:
    """`label_suspicion` for classes, averaged over predictions from changed copies of each example's input.

    A network that was trained on flipped and shifted images memorises a wrong label more firmly for the image itself
    than for another copy of it. `augment` maps the inputs of a batch to randomly changed ones, as in training.
    """
    problem = fitted.problem
    if problem.sketch is not None or problem.likelihood.squared_error or not problem.likelihood.has_classes:
        kind = "a mixture of outputs" if problem.sketch is not None else repr(problem.likelihood)
        raise InputError(
            f"augment averages the probabilities of labels: expected classes and all outputs, got {kind}. "
            "Leave augment out."
        )

    def of_copies(batch: Batch) -> Tensor:
        given = augment(batch.inputs)
        size = batch_size(given, "what augment returned")
        if size != batch.size:
            raise InputError(
                f"expected augment to return {batch.size} inputs for a batch of {batch.size}, got {size}. It is called "
                "with the inputs of a whole batch."
            )
        return problem.network(given)

    change = change_without(fitted)
    changes = change, judged_change(fitted, change)
    found = []
    with using_model(fitted), torch.no_grad():
        for _ in range(copies):
            outputs = torch.cat([of_copies(batch) for batch in problem.batches.unsketched("copies")])
            moved = outputs.reshape(problem.outputs.shape).to(problem.dtype) - problem.outputs
            without, own = (problem.log_residuals_after(change + moved) for change in changes)
            found.append((without[0], *own))
    logs, judged, ties = map(torch.stack, zip(*found, strict=True))
    score, order = (some.logsumexp(0) - math.log(copies) for some in (logs, judged))
    return Suspicion(score.exp(), largest_first(order, ties.mean(0)))


def change_without(fitted: Fitted) -> Tensor:
    """(n, k) change from the network's outputs to each example's prediction in the fit without it."""
    change = -(leave_one_out_leverage(fitted) @ fitted.weighted_residuals.unsqueeze(2)).squeeze(2)
    return fitted.step.change + change if fitted.loo.recenter else change


LEARNED = 0.5  # a network has memorised its labels if training has removed at least this share of the doubt about them


def judged_change(fitted: Fitted, change: Tensor) -> Tensor:
    """(n, k) change from the network's outputs to the predictions that rank labels: `change_without`, or none.

    A network that has memorised labels is sure of wrong ones too, so labels are judged by the fit without each example.
    It has memorised them if the mean of 1 - p of all labels is less than half of what it is without them. Otherwise,
    for classes, the network's own prediction is used: leverages then add mostly noise and find fewer wrong labels.
    """
    problem = fitted.problem
    if not problem.likelihood.has_classes or not bool(fitted.counted.any()):
        return change
    own = fitted.step.change if fitted.loo.recenter else torch.zeros_like(change)
    doubts = [float(problem.log_residuals_after(one)[0][fitted.counted].exp().mean()) for one in (own, change)]
    return change if doubts[0] <= (1.0 - LEARNED) * doubts[1] else own


def suggested_labels(fitted: Fitted) -> dict[str, Tensor]:
    """Columns (n, c) `label`, `suggested`, and `suggested_probability` for classes or `suggested_std` for numbers.

    The suggestion is the prediction in the fit without the example: the most probable class, yes or no for each output
    of a Bernoulli likelihood, or a number. The standard deviation is that of an observation around it, from
    s^2 (1 / weight + leave-one-out leverage), so that suspicion is |label - suggested| / suggested_std for one output.
    Examples that do not count have no label. Empty if the fit does not know single outputs, or targets are unknown.
    """
    problem = fitted.problem
    likelihood, counted = problem.likelihood, fitted.counted.unsqueeze(1)
    if not fitted.all_outputs:
        return {}
    targets = problem.targets
    if targets is None:
        return {}
    outputs = problem.outputs + change_without(fitted)
    shares = class_names(fitted) is not None and not likelihood.has_classes  # forests average shares of classes
    if not likelihood.has_classes and not shares:
        weights = counted if problem.sample_weights is None else problem.sample_weights.unsqueeze(1)
        leverage = torch.diagonal(leave_one_out_leverage(fitted), dim1=1, dim2=2).clamp_min(0.0)
        std = (fitted.sigma.diagonal() / weights + fitted.noise_scale * leverage).sqrt()
        return {"label": torch.where(counted, targets, torch.nan), "suggested": outputs, "suggested_std": std}
    p = outputs.clamp(0.0, 1.0) if shares else likelihood.probabilities(outputs)
    if likelihood.couples_outputs or shares:
        label, (probability, suggested) = targets.argmax(1, keepdim=True), p.max(1, keepdim=True)
    else:
        label, suggested, probability = (targets > 0.5).long(), (p > 0.5).long(), torch.maximum(p, 1.0 - p)
    if not bool(counted.all()):
        label = torch.where(counted, label.to(p.dtype), torch.nan)
    return {"label": label, "suggested": suggested, "suggested_probability": probability}


def class_names(fitted: Fitted) -> Sequence[Any] | None:
    """The names of the classes of trees; `None` for numbers, and for networks, whose classes are numbers."""
    model = fitted.problem.network.model
    return model.ensemble.classes if isinstance(model, LeafSum) else None


def squared_influence(fitted: Fitted, inputs: Inputs) -> tuple[Tensor, int]:
    """(n,) sum over inputs of |f(x) - f_(-i)(x)|^2, the terms of HeC3, and how many inputs there are."""
    sums = [terms.hec3.sum(0) for _, terms in variance_terms(fitted, inputs)]
    return torch.stack(sums).sum(0), batch_size(inputs, "this batch")


def training_frame(fitted: Fitted, test: Any) -> pandas.DataFrame:
    """One row per training example; see `Tracer.training_frame`."""
    suspicion = label_suspicion(fitted)
    columns = {
        "leverage": fitted.leverage.sum(1),
        "residual": fitted.residuals.norm(dim=1),
        "loo_residual": fitted.loo_residuals.norm(dim=1),
        "cook": cooks_distance(fitted),
    }
    if test is not None:
        totals = for_each_batch(fitted, test, lambda inputs, _: squared_influence(fitted, inputs))
        total = torch.stack([total for total, _ in totals]).sum(0)
        columns["test_influence"] = (total / sum(count for _, count in totals)).sqrt()
        columns["test_share"] = total / total.sum().clamp_min(torch.finfo(total.dtype).tiny)
    for name, values in suggested_labels(fitted).items():
        several = values.shape[1] > 1
        columns |= {f"{name}_{at}" if several else name: column for at, column in enumerate(values.T)}
    columns["suspicion"] = suspicion.score
    columns["suspect_rank"] = suspicion.order.argsort() + 1
    table = frame(columns)
    classes = class_names(fitted)
    if classes is not None and "label" in table:
        table[["label", "suggested"]] = table[["label", "suggested"]].map(dict(enumerate(classes)).get)
    table.index.name = "example"
    return table


LEAST_LABELS = 200  # with fewer labels an estimate would rest on a handful of rows
# There is no estimate if more labels than this are contradicted, in all or because classes overlap: wrong labels and
# hard cases cannot be distinguished there.
MOST_CONTRADICTED, MOST_OVERLAP = 0.2, 0.1
BINS = 60
# The grids of r, a and b, with a uniform prior.
SHARES, HEIGHTS, POWERS = numpy.linspace(0.0, 0.3, 301), numpy.linspace(-10.0, 3.0, 27), numpy.geomspace(0.7, 8.0, 7)
MENTIONED = 0.02  # contradictions beyond those of wrong labels are mentioned from this share on
NONE = 0.15  # the interval starts at zero if the posterior of no wrong label is at least this share of its maximum


@dataclass(frozen=True)
class WrongLabels:
    """An estimate of the share of wrong labels, with a 95 % interval; or the reason why there is none.

    Examples:
        >>> print(WrongLabels(0.05, 0.039, 0.062))
        about 5 % of labels look wrong (3.9 to 6.2 %)
        >>> print(WrongLabels(0.001, 0.0, 0.012))
        at most 1.2 % of labels look wrong
        >>> print(WrongLabels(0.001, 0.0, 0.012, 0.03))  # doctest: +NORMALIZE_WHITESPACE
        at most 1.2 % of labels look wrong where examples are clear; another 3 % are contradicted in places that are
        hard or full of errors
        >>> print(WrongLabels(unknown="30 labels are too few"))
        the share of wrong labels cannot be estimated: 30 labels are too few
    """

    share: float = math.nan
    lower: float = math.nan
    upper: float = math.nan
    overlap: float = 0.0  # share of labels that are contradicted in addition
    unknown: str = ""  # why there is no estimate

    def __str__(self) -> str:
        if self.unknown:
            return f"the share of wrong labels cannot be estimated: {self.unknown}"
        share, lower, upper, rest = (f"{100 * one:.2g}" for one in (self.share, self.lower, self.upper, self.overlap))
        more = f"; another {rest} % are contradicted in places that are hard or full of errors"
        more = more if self.overlap >= MENTIONED else ""
        if self.lower == 0.0:
            return f"at most {upper} % of labels look wrong{' where examples are clear' if more else ''}{more}"
        return f"about {share} % of labels look wrong ({lower} to {upper} %){more}"


def wrong_labels(labels: Any, suggested: Any, probability: Any, classes: int) -> WrongLabels:
    """The share of wrong labels, or why it cannot be known.

    If classes overlap, the other rows contradict right labels too, but more rarely the surer they are. A wrong label is
    contradicted everywhere. So the share r of wrong labels is what remains among the surest rows. With q the rank of a
    row by the probability of its suggested label, from 0 for the surest to 1, a label is contradicted with probability

        r + (1 - r c / (c - 1)) e(q),  logit e(q) = a + b logit(q)

    for c classes, if wrong labels are equally likely in every row and of every class: a psychometric function with a
    lapse rate. The share is the mode of its posterior, and the interval holds 95 % of it. Wrong labels that lie close
    together make the model unsure; they count as overlap, and the share is a lower bound.

    `suggested` (n,) is the most probable class by a model that did not see the label, with its probability (n,).
    """
    contradicted = numpy.asarray(labels) != numpy.asarray(suggested)
    n = len(contradicted)
    if n < LEAST_LABELS:
        return WrongLabels(unknown=f"{n} labels that the model has not seen are too few (less than {LEAST_LABELS})")
    hard = "wrong labels and hard cases cannot be distinguished"
    if contradicted.mean() > MOST_CONTRADICTED:
        return WrongLabels(unknown=f"the model contradicts {percent(float(contradicted.mean()))} of them, and {hard}")
    parts = numpy.array_split(contradicted[numpy.argsort(-numpy.asarray(probability), kind="stable")], BINS)
    total, found = numpy.array([(len(part), part.sum()) for part in parts], dtype=float).T
    q = (numpy.arange(BINS) + 0.5) / BINS
    overlap = 1 / (1 + numpy.exp(-(HEIGHTS[:, None, None] + POWERS[:, None] * numpy.log(q / (1 - q)))))
    logs = numpy.empty((len(SHARES), len(HEIGHTS), len(POWERS)))
    for at, share in enumerate(SHARES):
        p = numpy.clip(share + (1 - share * classes / (classes - 1)) * overlap, 1e-12, 1 - 1e-12)
        logs[at] = (found * numpy.log(p) + (total - found) * numpy.log1p(-p)).sum(-1)
    posterior = numpy.exp(logs - logs.max()).sum((1, 2))
    below = numpy.cumsum(posterior) / posterior.sum()
    share = float(SHARES[posterior.argmax()])
    if contradicted.mean() - share > MOST_OVERLAP:
        return WrongLabels(unknown=f"classes overlap, and {hard}")
    ends = (0.0, 0.95) if posterior[0] >= NONE * posterior.max() else (0.025, 0.975)
    lower, upper = (float(SHARES[numpy.searchsorted(below, end)]) for end in ends)
    return WrongLabels(share, lower, upper, max(0.0, float(contradicted.mean()) - share))
