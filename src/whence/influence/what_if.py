"""What if: predictions and variances after a change of the training set, without retraining.

Let F be the curvature, e and L the residuals and Hessians of the changed examples S, C how often each counts beyond
once, d the change of its residual and Q = J_S F^-1 J_S^T. One Newton step changes the weights by F^-1 J_S^T g with

    g = (I + C L Q)^-1 (C e + (I + C) d)

and subtracts (I + C L Q)^-1 C L J_S F^-1 from every alignment with S. For squared error and recentered fits this is
exact. It is computed from roots of the Hessians: with C L = U D U^T it is U (I + D U^T Q U)^-1 D U^T J_S F^-1. Q is as
large as 1 / ridge along outputs that do not change the loss, such as a constant added to all logits; U removes them.

For other losses a changed label moves its own output far, and one Newton step is much too long if the Hessian was
small, as for a label that was certain. So the changed examples keep their true loss, and that of all others is
approximated quadratically. The outputs of S change by Q g, and at the new optimum

    g = c v(Q g) - e + L Q g

where c is how often each example counts and v its new residual at its new output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from whence.curvature.base import times_hessian
from whence.data.batches import Inputs
from whence.display import Column, Shown, Table, count, number, numbers, places, rows_shown
from whence.errors import InputError, SingularCurvatureError
from whence.estimators import hat_blocks
from whence.influence.fitted import Fitted, join_batches, training_examples, whole_alignments
from whence.jacobian.leaves import LeafSum
from whence.likelihoods import Likelihood

NEWTON_STEPS, CONVERGED = 200, 1e-12  # most Newton steps, and the size of the last one relative to g, or to residuals
ACCEPTED = 1e-6  # the same size if rounding ends Newton's method early, and a rounding error of new leverages; float64
# The smallest part of a Newton step, and the share of a step by which the remainder must shrink. Otherwise a loss that
# is flat on both sides of the solution, as with large logits, would be crossed back and forth for ever.
SMALLEST_STEP, DECREASE = 1e-12, 1e-4
LARGEST_ROUNDING = 1e-3  # largest rounding error of one minus a leverage, relative to it, for which there is an answer


@dataclass(frozen=True)
class WhatIf(Shown):
    """Predictions and variances after a change of the training set.

    Attributes:
        change: (m, k) f'(x) - f(x).
        ho, hec3: (m, k) variances before.
        new_ho, new_hec3: (m, k) variances after, with the noise covariance of before.
        mean: (m, k) outputs before, if all of them were used.
        likelihood: likelihood of the network, which defines what its outputs mean.

    Examples:
        >>> one = torch.ones(1, 1)
        >>> found = WhatIf(change=-0.5 * one, ho=one, hec3=2 * one, new_ho=one, new_hec3=one, mean=3 * one)
        >>> found
        WhatIf(1 prediction moves by 0.5, its HeC3 from 2 to 1)
        >>> print(found)
        1 prediction after a change of the training set
        no.  prediction  after  HeC3  HeC3 after
          0           3    2.5     2           1
    """

    shared: ClassVar = ("likelihood",)

    change: Tensor
    ho: Tensor
    hec3: Tensor
    new_ho: Tensor
    new_hec3: Tensor
    mean: Tensor | None = None
    likelihood: Likelihood | None = None

    def __len__(self) -> int:
        return len(self.change)

    def __repr__(self) -> str:
        before, after = (float(values.sum(1).mean()) for values in (self.hec3, self.new_hec3))
        moved = number(float(self.change.norm(dim=1).mean()))
        several = f"{count(len(self), 'prediction')} move by {moved} on average, their mean"
        which = f"1 prediction moves by {moved}, its" if len(self) == 1 else several
        return f"WhatIf({which} HeC3 from {number(before)} to {number(after)})"

    def _table(self) -> Table:
        (m, k), likelihood = self.change.shape, self.likelihood
        rows, note = rows_shown(m, "change, new_ho, new_hec3")
        classes = likelihood is not None and likelihood.has_classes
        one_of_many = likelihood is not None and classes and likelihood.couples_outputs and k > 1
        if self.mean is None or (k > 1 and not one_of_many):
            moved = self.change[:, 0] if k == 1 else self.change.norm(dim=1)
            columns = [places(rows), Column("moves by", numbers(moved[:rows].tolist()))]
        elif likelihood is not None and classes:
            columns = [places(rows)]
            for when, outputs in (("", self.mean), (" after", self.mean + self.change)):
                best = likelihood.probabilities(outputs[:rows]).max(dim=1)
                if one_of_many:
                    columns.append(Column(f"class{when}", tuple(map(str, best.indices.tolist()))))
                columns.append(Column(f"probability{when}", tuple(f"{one:.3f}" for one in best.values.tolist())))
            note = f"HeC3 is the variance of the logits.\n{note}".strip()
        else:
            pair = {"prediction": self.mean, "after": self.mean + self.change}
            columns = [places(rows), *(Column(name, numbers(one[:rows, 0].tolist())) for name, one in pair.items())]
        variances = {"HeC3": self.hec3, "HeC3 after": self.new_hec3}
        columns += [Column(name, numbers(values.sum(1)[:rows].tolist())) for name, values in variances.items()]
        return Table(f"{count(m, 'prediction')} after a change of the training set", tuple(columns), note)


def read_change(
    fitted: Fitted, remove: Sequence[int], repeat: Sequence[int], relabel: Mapping[int, Any]
) -> tuple[Tensor, dict[int, Tensor]]:
    """How often each example counts afterwards (n,), and new targets as the likelihood encodes them."""
    problem = fitted.problem
    if fitted.loo.policy != "exact":
        raise InputError(
            "expected a structure with true leverages to take examples out of a fit, got an approximate one. "
            'Fit with structure="exact", "core" or "sketch".'
        )
    counts = torch.ones(problem.n, dtype=problem.dtype, device="cpu")
    for chosen, by in ((remove, -1.0), (repeat, 1.0)):
        for example in chosen:
            counts[_position(example, problem.n)] += by
    if bool((counts < 0).any()):
        raise InputError("expected every example to be removed once at most, got one that is named twice in `remove`.")
    if relabel and not fitted.all_outputs:
        raise InputError(
            "expected a fit of all outputs, with one output vector for each example, for new labels, got one with "
            "several positions or with mixtures of outputs. Change the labels in the data and fit again."
        )
    targets: dict[int, Tensor] = {}
    for example, target in relabel.items():
        at, where = _position(example, problem.n), f"the new label of example {example}"
        if isinstance(problem.network.model, LeafSum):
            target = problem.network.model.targets([target], where)[0]
        given = torch.as_tensor(target, device=problem.device)
        if given.is_floating_point() and not isinstance(target, Tensor):  # torch reads Python's numbers as float32
            given = torch.as_tensor(target, dtype=problem.dtype, device=problem.device)
        targets[at] = problem.likelihood.check_targets(given.unsqueeze(0), problem.outputs[at : at + 1], where)[0]
    return counts.to(problem.device), targets


def _position(example: Any, n: int) -> int:
    at = int(example)
    if at != example or not 0 <= at < n:
        raise InputError(f"expected training examples by their positions 0 to {n - 1}, got {example!r}.")
    return at


@dataclass(frozen=True)
class Change:
    """A change of the training set, ready to be applied to predictions."""

    index: Tensor  # (s,) the changed examples
    counts: Tensor  # (n,) how often each example counts afterwards
    step: Tensor  # (s k,) g
    roots: Tensor  # (s, k, q) U
    downdate: Tensor  # (s q, n k) (I + D U^T Q U)^-1 D U^T J_S F^-1 J^T: alignments with S times U times this go
    loo_residuals: Tensor  # (n, k) leave-one-out residuals afterwards


def prepare(fitted: Fitted, counts: Tensor, relabel: Mapping[int, Tensor]) -> Change:
    """Solve for a change: counts (n,) of the examples, and new targets as `read_change` returns them."""
    problem, residuals = fitted.problem, fitted.weighted_residuals
    k, n = problem.k, problem.n
    index = torch.tensor(sorted({*(counts != 1).nonzero().squeeze(1).tolist(), *relabel}), device=problem.device).long()
    s, count = len(index), counts[index].unsqueeze(1)
    if not s:
        nothing = residuals.new_zeros(0)
        return Change(index, counts, nothing, nothing.reshape(0, k, 1), nothing.reshape(0, n * k), fitted.adjusted.hec3)
    aligned, targets = _changed_examples(fitted, index, relabel)  # J_S F^-1 J^T, (s, k, n, k)
    own = aligned[:, :, index].reshape(s * k, s * k)  # Q
    relabelled = _relabelled_residuals(fitted, relabel)
    solved = _solve_nonlinear(fitted, index, count, own, relabelled[index], targets)
    u, signs = _hessian_change(fitted, index, count, solved)
    d = signs.reshape(-1, 1)
    seen = _times_blocks(u.mT, aligned.reshape(s * k, n * k))  # U^T J_S F^-1 J^T
    inner = d * _times_blocks(u.mT, _times_blocks(u.mT, own).T).T  # D U^T Q U
    inner.diagonal().add_(1.0)
    inverse, info = torch.linalg.inv_ex(inner)
    rounding = torch.finfo(inner.dtype).eps * max(float(inverse.norm()), 1.0)  # at least the largest singular value
    if bool(info) or not 8 * rounding <= LARGEST_ROUNDING:
        raise _singular()  # only the removed examples determine some weights
    downdate = _solve(inner, d * seen)
    score = (count * relabelled[index] - residuals[index]).reshape(-1, 1)  # C e + (I + C) d
    one_step = score - _times_blocks(u, downdate.reshape(-1, n, k)[:, index].flatten(1) @ score)
    step = one_step.squeeze(1) if solved is None else solved.step
    output_change = torch.einsum("anj,a->nj", aligned.reshape(s * k, n, k), step)
    after = relabelled - times_hessian(output_change, problem.hessian_roots)
    rows = seen.reshape(-1, n, k)
    leverage_blocks = fitted.bread.leverage_blocks - torch.einsum("anj,anl->njl", rows, downdate.reshape(rows.shape))
    roots, least = problem.hessian_roots, torch.full_like(counts, rounding / LARGEST_ROUNDING)
    if solved is not None:
        roots, after = roots.index_copy(0, index, solved.roots), after.index_copy(0, index, solved.residuals)
        # new leverages are differences of old ones, which are larger by orders of magnitude if the old loss was flat
        errors = torch.finfo(own.dtype).eps * own.abs().max() * solved.roots.square().sum((1, 2))
        least[index] += errors / _accepted(own.dtype)
    _check_leverages(fitted, counts, roots, leverage_blocks, rounding / LARGEST_ROUNDING, least)
    return Change(index, counts, step, u, downdate, fitted.loo.adjust(after, leverage_blocks, roots).hec3)


def _relabelled_residuals(fitted: Fitted, relabel: Mapping[int, Tensor]) -> Tensor:
    """(n, k) weighted residuals with the new labels, at the old outputs."""
    problem, found = fitted.problem, fitted.weighted_residuals.clone()
    for at, target in relabel.items():
        weight = 1.0 if problem.sample_weights is None else problem.sample_weights[at]
        fresh = problem.likelihood.residuals(problem.outputs[at : at + 1], target.unsqueeze(0))[0]
        found[at] += weight * fresh - problem.residuals[at]
    return found


def _hessian_change(fitted: Fitted, index: Tensor, count: Tensor, solved: Solution | None) -> tuple[Tensor, Tensor]:
    """U (s, k, q) and the diagonal of D (s, q): the Hessians of the changed examples change by U D U^T."""
    old = fitted.problem.hessian_roots[index]
    signs = (count - 1).expand(-1, old.shape[2])
    if solved is None or not bool((count > 0).any()):  # the new Hessian of a removed example counts nothing
        return old, signs
    return torch.cat([solved.roots, old], 2), torch.cat([count.expand_as(signs), -torch.ones_like(signs)], 1)


def _changed_examples(fitted: Fitted, index: Tensor, relabel: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Alignments of the changed examples with all (s, k, n, k), and their new targets, if all outputs are used."""
    problem = fitted.problem
    need = len(index) * problem.k * problem.n * problem.k * problem.outputs.element_size()
    problem.budget.require(4.0 * need, f"a change of {len(index)} training examples", "Change fewer at once.")
    known = fitted.bread.training_alignments(index)
    found, given = [] if known is None else [known], []
    for _, inputs, targets in training_examples(fitted, index, "examples to change"):
        given.append(targets)
        if known is None:
            found += [aligned for _, aligned in whole_alignments(fitted, inputs)]
    if not fitted.all_outputs:
        return torch.cat(found), None
    new = problem.likelihood.check_targets(torch.cat(given), problem.outputs[index], "the changed examples").clone()
    for at, target in relabel.items():
        new[index == at] = target
    return torch.cat(found), new


class Solution(NamedTuple):
    """The optimum at which the changed examples have their true loss."""

    step: Tensor  # (s k,) g
    roots: Tensor  # (s, k, q) of the Hessians at the new outputs, including weights
    residuals: Tensor  # (s, k) at the new outputs, including weights


def _solve_nonlinear(
    fitted: Fitted, index: Tensor, count: Tensor, own: Tensor, relabelled: Tensor, targets: Tensor | None
) -> Solution | None:
    """Newton's method on g; `None` for squared error and recentered fits, whose losses are quadratic.

    The examples `index` (s,) count `count` (s, 1) times. `own` (s k, s k) is Q, `relabelled` (s, k) are residuals with
    the new labels at the old outputs, and targets are `None` if not all outputs are used.
    """
    problem = fitted.problem
    likelihood, outputs = problem.likelihood, problem.outputs[index]
    if targets is None or fitted.loo.recenter or likelihood.squared_error:
        return None
    old_roots, old_residuals = problem.hessian_roots[index], fitted.weighted_residuals[index]
    weights = torch.ones_like(count) if problem.sample_weights is None else problem.sample_weights[index].unsqueeze(1)
    start = likelihood.residuals(outputs, targets)
    eye = torch.eye(len(own), dtype=own.dtype, device=own.device)

    def evaluate(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The change of the outputs, the new residuals, and g minus the right-hand side."""
        change = (own @ g).reshape(outputs.shape)
        new = relabelled + weights * (likelihood.residuals(outputs + change, targets) - start)
        return change, new, g - (count * new - old_residuals + times_hessian(change, old_roots)).reshape(-1)

    def roots_at(change: Tensor) -> Tensor:
        found = likelihood.hessian_root(outputs + change, targets)
        assert found is not None
        return weights.sqrt().unsqueeze(2) * found

    g = torch.zeros_like(own[0])
    change, new, gap = evaluate(g)
    error, least = torch.inf, max(float(old_residuals.abs().max()), torch.finfo(g.dtype).tiny)
    for _ in range(NEWTON_STEPS):
        new_roots = roots_at(change)
        hessian_change = count.unsqueeze(2) * (new_roots @ new_roots.mT) - old_roots @ old_roots.mT  # C L' - L
        direction = _solve(eye + _times_blocks(hessian_change, own), gap)
        error = float(direction.abs().max()) / max(float(g.abs().max()), least)
        if error <= CONVERGED:
            break
        size, trial = 1.0, evaluate(g - direction)
        while not float(trial[2].norm()) <= (1 - DECREASE * size) * float(gap.norm()) and size > SMALLEST_STEP:
            size /= 2
            trial = evaluate(g - size * direction)
        if size <= SMALLEST_STEP:
            break
        g, (change, new, gap) = g - size * direction, trial
    if not error <= _accepted(g.dtype):
        raise SingularCurvatureError(
            f"expected Newton's method to converge for the changed examples, got a last step of {error:.1e} of the "
            "whole change: the loss of examples with large logits is flat on both sides of the "
            "solution. Raise `ridge`, change fewer examples at once, or fit with recenter=True."
        )
    if likelihood.couples_outputs:  # rounding along a constant for all logits, where Q is as large as 1 / ridge
        g = (g.reshape(outputs.shape) - gap.reshape(outputs.shape).mean(1, keepdim=True)).flatten()
    return Solution(g, roots_at(change), new)


def _accepted(dtype: torch.dtype) -> float:
    """The largest relative error for which there is an answer."""
    return max(ACCEPTED, math.sqrt(torch.finfo(dtype).eps))


def _singular() -> SingularCurvatureError:
    return SingularCurvatureError(
        "expected a curvature that keeps its inverse after the change, got one without: the removed examples "
        "determine their own predictions (leverage one up to rounding). Raise `ridge`, or change other examples."
    )


def _check_leverages(
    fitted: Fitted, counts: Tensor, roots: Tensor, leverage_blocks: Tensor, least_before: float, least: Tensor
) -> None:
    """Raise if examples determine their own predictions after the change, but did not before.

    Leave-one-out residuals divide by one minus a leverage, which is rounding error below `least_before`, and below
    `least` (n,) after the change.
    """
    before, after = (
        1 - torch.linalg.eigvalsh(hat_blocks(fitted.loo.within_units(one), some)).amax(1)
        for one, some in ((fitted.bread.leverage_blocks, fitted.problem.hessian_roots), (leverage_blocks, roots))
    )
    lost = (counts > 0) & (after < least) & (before >= least_before)
    if bool(lost.any()):
        raise SingularCurvatureError(
            f"expected remaining examples that support each other, got {int(lost.sum())} that determine their own "
            "predictions after the change (leverage one up to rounding). Raise `ridge`, change fewer or other "
            "examples, or fit with recenter=True."
        )


def _times_blocks(blocks: Tensor, values: Tensor) -> Tensor:
    """A block-diagonal matrix (s, q, k) times (s k, p): (s q, p)."""
    s, q, k = blocks.shape
    return (blocks @ values.reshape(s, k, values.shape[1])).reshape(s * q, values.shape[1])


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The inverse of a matrix times `right`. Raises if removing examples makes the matrix singular."""
    solved = torch.linalg.solve_ex(matrix, right)
    found: Tensor = solved.result
    if bool(solved.info.any()) or not bool(torch.isfinite(found).all()):
        raise _singular()
    return found


def apply(fitted: Fitted, inputs: Inputs, change: Change) -> WhatIf:
    """Predictions of one batch after a change."""
    noise, loo = fitted.meats.roots["ho"], fitted.meats.roots["hec3"]
    new_loo = fitted.loo.as_root(change.loo_residuals)
    root_counts = change.counts.clamp_min(0.0).sqrt().reshape(-1, 1, 1)
    found = []
    for _, aligned in whole_alignments(fitted, inputs):  # (m, k, n, k)
        own = aligned[:, :, change.index]  # (m, k, s, k)
        seen = torch.einsum("mksj,sjq->mksq", own, change.roots).flatten(2)
        after = aligned - (seen @ change.downdate).reshape(aligned.shape)
        found.append(
            WhatIf(
                change=own.flatten(2) @ change.step,
                ho=_variance(aligned, noise),
                hec3=_variance(aligned, loo),
                new_ho=_variance(after, root_counts * noise),
                new_hec3=_variance(after, root_counts * new_loo),
            )
        )
    return join_batches(found)


def _variance(aligned: Tensor, roots: Tensor) -> Tensor:
    """Diagonal of sum_i a_i W_i W_i^T a_i^T: (m, k, n, k) with (n or 1, k, q) to (m, k)."""
    return torch.einsum("mkni,niq->mknq", aligned, roots.expand(aligned.shape[2], -1, -1)).square().sum((2, 3))
