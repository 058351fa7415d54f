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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from whence.linalg import smallest_singular_value

NEWTON_STEPS, CONVERGED = 200, 1e-12  # most Newton steps, and the size of the last one relative to g
ACCEPTED = 1e-6  # the same size if rounding ends Newton's method early, in float64
# The smallest part of a Newton step, and the share of a step by which the remainder must shrink. Otherwise a loss that
# is flat on both sides of the solution, as with large logits, would be crossed back and forth for ever.
SMALLEST_STEP, DECREASE = 1e-12, 1e-4
SAME_LABEL = 64  # a new label equals the old one if the residual differs by at most so many rounding errors
# The rounding error of a new leverage, relative to its distance from one, above which that distance is not used; and
# the largest rounding error for which there is an answer at all.
HIDDEN, LARGEST_ROUNDING = 1e-9, 1e-3


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
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Counts (n,), changes of residuals (n, k) and encoded targets, from a user's arguments."""
    problem = fitted.problem
    if fitted.loo.policy != "exact":
        raise InputError(
            "expected a structure with true leverages to take examples out of a fit, got an approximate one. "
            'Fit with structure="exact", "core" or "sketch".'
        )
    counts = torch.ones(problem.n, dtype=problem.dtype, device="cpu")
    for chosen, by in ((remove, -1.0), (repeat, 1.0)):
        places = torch.tensor([_position(example, problem.n) for example in chosen], dtype=torch.int64, device="cpu")
        counts.index_add_(0, places, torch.full((len(places),), by, dtype=counts.dtype, device="cpu"))
    counts = counts.to(problem.device)
    if bool((counts < 0).any()):
        raise InputError("expected every example to be removed once at most, got one that is named twice in `remove`.")
    if relabel and not fitted.all_outputs:
        raise InputError(
            "expected a fit of all outputs, with one output vector for each example, for new labels, got one with "
            "several positions or with mixtures of outputs. Change the labels in the data and fit again."
        )
    shift = torch.zeros_like(problem.residuals)
    targets: dict[int, Tensor] = {}
    for example, target in relabel.items():
        at, where = _position(example, problem.n), f"the new label of example {example}"
        if isinstance(problem.network.model, LeafSum):
            target = problem.network.model.targets([target], where)[0]
        given = torch.as_tensor(target, device=problem.device)
        if given.is_floating_point() and not isinstance(target, Tensor):  # torch reads Python's numbers as float32
            given = torch.as_tensor(target, dtype=problem.dtype, device=problem.device)
        outputs = problem.outputs[at : at + 1]
        checked = problem.likelihood.check_targets(given.unsqueeze(0), outputs, where)
        targets[at] = checked[0]
        weight = 1.0 if problem.sample_weights is None else float(problem.sample_weights[at])
        new, old = weight * problem.likelihood.residuals(outputs, checked)[0], problem.residuals[at]
        # a label that is the same up to the rounding of another batch is no change
        size = outputs.abs().max()
        size = (1 + size) * old.abs().max() if problem.likelihood.has_classes else size + old.abs().max()
        rounding = SAME_LABEL * torch.finfo(new.dtype).eps * size
        shift[at] = torch.where((new - old).abs().max() <= rounding, torch.zeros_like(new), new - old)
    return counts, shift, targets


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
    loo_residuals: Tensor  # (n, k) leave-one-out residuals afterwards; zero for those in `left_out`
    # (s k, p) factor of the alignments of a prediction with S that gives its change without a changed example, times
    # the root of its count. For examples whose own alignment and leave-one-out residual afterwards would multiply a
    # number near zero by one near infinity.
    left_out: Tensor


def prepare(fitted: Fitted, counts: Tensor, shift: Tensor, relabel: Mapping[int, Tensor]) -> Change:
    """Solve for a change: counts (n,) of the examples, changes (n, k) of their residuals, new targets.

    The shift of the residuals includes sample weights. Targets are encoded by the likelihood.
    """
    problem, roots = fitted.problem, fitted.problem.hessian_roots
    k, n = problem.k, problem.n
    index = ((counts != 1) | (shift != 0).any(1)).nonzero().squeeze(1)
    aligned, targets = _changed_examples(fitted, index, relabel)  # (s, k, n, k)
    s = len(index)
    extra = (counts - 1)[index].reshape(s, 1)
    residuals = fitted.weighted_residuals
    relabelled = residuals + shift
    own = aligned[:, :, index].reshape(s * k, s * k)  # Q
    eye = torch.eye(k, dtype=aligned.dtype, device=aligned.device).expand(s, k, k)
    changed_roots = eye if roots is None else roots[index]  # U
    signs = extra.expand(s, changed_roots.shape[2])  # D
    nonlinear = _solve_nonlinear(fitted, index, counts[index], own, relabelled[index], targets)
    g, new_roots, new_residuals = nonlinear or (None, changed_roots, relabelled[index])
    if nonlinear is not None and roots is not None:
        roots = roots.index_copy(0, index, new_roots)
    if nonlinear is not None and bool((counts[index] > 0).any()):  # the new Hessian of a removed example counts nothing
        signs = torch.cat([counts[index].unsqueeze(1).expand_as(signs), -torch.ones_like(signs)], 1)
        changed_roots = torch.cat([new_roots, changed_roots], 2)
    blocks = (changed_roots * signs.unsqueeze(1)) @ changed_roots.mT  # C L
    matrix = torch.eye(s * k, dtype=aligned.dtype, device=aligned.device) + _times_blocks(blocks, own)
    seen = _times_blocks(changed_roots.mT, aligned.reshape(s * k, n * k))  # U^T J_S F^-1 J^T
    inner = _times_blocks(changed_roots.mT, _times_blocks(changed_roots.mT, own).T).T  # U^T Q U
    inner = torch.eye(len(inner), dtype=aligned.dtype, device=aligned.device) + signs.reshape(-1, 1) * inner
    smallest = smallest_singular_value(inner) if s else 1.0
    if 8 * torch.finfo(inner.dtype).eps > LARGEST_ROUNDING * smallest:
        raise _singular("up to rounding")  # only the removed examples determine some weights
    downdate = _solve(inner, signs.reshape(-1, 1) * seen)
    score = extra * residuals[index] + (1 + extra) * shift[index]
    step = _solve(matrix, score.reshape(-1, 1)).squeeze(1) if g is None else g
    output_change = torch.einsum("anj,a->nj", aligned.reshape(s * k, n, k), step)
    rows = seen.reshape(-1, n, k)
    leverage_blocks = fitted.bread.leverage_blocks - torch.einsum("anj,anl->njl", rows, downdate.reshape(rows.shape))
    after = relabelled - times_hessian(output_change, fitted.problem.hessian_roots)
    left_out, near_one = matrix.new_zeros(s * k, 0), index[:0]
    if nonlinear is not None:
        after = after.index_copy(0, index, new_residuals)
        near_one = _near_one(new_roots, leverage_blocks[index], own, counts[index])
        weights = counts[index].sqrt().reshape(s, 1, 1) * fitted.loo.as_root(new_residuals)
        left_out = _left_out(near_one, weights, new_roots, matrix, own)
    divided = (counts > 0).index_fill(0, index[near_one], False)
    if s:
        _check_leverages(fitted, roots, leverage_blocks, divided, smallest)
    loo_residuals = fitted.loo.adjust(after, leverage_blocks, roots).hec3.index_fill(0, index[near_one], 0.0)
    return Change(index, counts, step, changed_roots, downdate, loo_residuals, left_out)


def _changed_examples(fitted: Fitted, index: Tensor, relabel: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Alignments of the changed examples with all (s, k, n, k), and their encoded targets."""
    problem = fitted.problem
    outputs = problem.outputs[index]
    need = len(index) * problem.k * problem.n * problem.k * problem.outputs.element_size()
    problem.budget.require(4.0 * need, f"a change of {len(index)} training examples", "Change fewer at once.")
    known = fitted.bread.training_alignments(index) if len(index) else None
    found, given = [] if known is None else [known], []
    for _, inputs, targets in training_examples(fitted, index, "examples to change"):
        given.append(targets)
        if known is None:
            found += [aligned for _, aligned in whole_alignments(fitted, inputs)]
    if not found:
        return outputs.new_zeros(0, problem.k, problem.n, problem.k), None
    if not fitted.all_outputs:
        return torch.cat(found), None
    encoded = problem.likelihood.check_targets(torch.cat(given), outputs, "the examples to change").clone()
    for place, at in enumerate(index.tolist()):
        if at in relabel:
            encoded[place] = relabel[at]
    return torch.cat(found), encoded


def _solve_nonlinear(
    fitted: Fitted, index: Tensor, counts: Tensor, own: Tensor, relabelled: Tensor, targets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Newton's method on g; `None` for squared error and recentered fits, whose losses are quadratic.

    The examples `index` (s,) get the counts `counts` (s,). `own` (s k, s k) is Q, `relabelled` (s, k) are residuals
    with the new labels at the old outputs, and targets are `None` if not all outputs are used. Returns g (s k,), and
    roots of the Hessians (s, k, q) and residuals (s, k) at the new outputs, including weights.
    """
    problem = fitted.problem
    likelihood, outputs = problem.likelihood, problem.outputs[index]
    if targets is None or problem.hessian_roots is None or fitted.loo.recenter:
        return None
    if likelihood.hessian_root(outputs, targets) is None:
        return None
    old_roots, old_residuals = problem.hessian_roots[index], fitted.weighted_residuals[index]
    weights = torch.ones_like(counts) if problem.sample_weights is None else problem.sample_weights[index]
    weight = weights.to(outputs.dtype).reshape(-1, 1)
    start = likelihood.residuals(outputs, targets)
    eye = torch.eye(len(own), dtype=own.dtype, device=own.device)

    def evaluate(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The change of the outputs, the new residuals, and g minus the right-hand side."""
        change = (own @ g).reshape(outputs.shape)
        new = relabelled + weight * (likelihood.residuals(outputs + change, targets) - start)
        linear = (old_roots @ (old_roots.mT @ change.unsqueeze(2))).squeeze(2)
        return change, new, g - (counts.reshape(-1, 1) * new - old_residuals + linear).reshape(-1)

    def roots_at(change: Tensor) -> Tensor:
        found = likelihood.hessian_root(outputs + change, targets)
        assert found is not None
        return weight.sqrt().unsqueeze(2) * found

    g = torch.zeros_like(own[0])
    change, new, gap = evaluate(g)
    error = torch.inf
    for _ in range(NEWTON_STEPS):
        new_roots = roots_at(change)
        hessian_change = counts.reshape(-1, 1, 1) * (new_roots @ new_roots.mT) - old_roots @ old_roots.mT  # C L' - L
        direction = _solve(eye + _times_blocks(hessian_change, own), gap)
        error = float(direction.abs().max()) / max(float(g.abs().max()), torch.finfo(g.dtype).tiny)
        if error <= CONVERGED:
            break
        size, trial = 1.0, evaluate(g - direction)
        while not float(trial[2].norm()) <= (1 - DECREASE * size) * float(gap.norm()) and size > SMALLEST_STEP:
            size /= 2
            trial = evaluate(g - size * direction)
        if size <= SMALLEST_STEP:
            break
        g, (change, new, gap) = g - size * direction, trial
    if not error <= max(ACCEPTED, torch.finfo(g.dtype).eps ** 0.5):
        raise SingularCurvatureError(
            f"expected Newton's method to converge for the changed examples, got a last step of {error:.1e} of the "
            "whole change: the loss of examples with large logits is flat on both sides of the "
            "solution. Raise `ridge`, change fewer examples at once, or fit with recenter=True."
        )
    return _seen_by_softmax(likelihood, g, gap, outputs.shape[1]), roots_at(change), new


def _seen_by_softmax(likelihood: Likelihood, g: Tensor, gap: Tensor, k: int) -> Tensor:
    """G (s k,) without its rounding error along a constant for all logits, where Q is as large as 1 / ridge.

    The gap (s k,) is g minus the right-hand side of its equation, which has no such part.
    """
    if not likelihood.couples_outputs:
        return g
    return (g.reshape(-1, k) - gap.reshape(-1, k).mean(1, keepdim=True)).flatten()


def _singular(how_far: str) -> SingularCurvatureError:
    return SingularCurvatureError(
        "expected a curvature that keeps its inverse after the change, got one without: the removed examples "
        f"determine their own predictions (leverage one {how_far}). Raise `ridge`, or change other examples."
    )


def _check_leverages(
    fitted: Fitted, roots: Tensor | None, leverage_blocks: Tensor, divided: Tensor, smallest: float
) -> None:
    """Raise if remaining examples determine their own predictions after the change, but did not before.

    Leave-one-out residuals of the `divided` divide by one minus a leverage, which is then only rounding error. It is
    that of a solve with a matrix whose smallest singular value is `smallest`.
    """
    rounding = torch.finfo(leverage_blocks.dtype).eps / min(smallest, 1.0)
    before, after = (
        1 - torch.linalg.eigvalsh(hat_blocks(fitted.loo.within_units(one), some)).amax(1)
        for one, some in ((fitted.bread.leverage_blocks, fitted.problem.hessian_roots), (leverage_blocks, roots))
    )
    lost = divided & (after * LARGEST_ROUNDING < rounding) & (before * LARGEST_ROUNDING >= rounding)
    if bool(lost.any()):
        raise SingularCurvatureError(
            f"expected remaining examples that support each other, got {int(lost.sum())} that determine their own "
            "predictions after the change (leverage one up to rounding). Raise "
            "`ridge`, or remove fewer examples."
        )


def _near_one(roots: Tensor, leverage_blocks: Tensor, own: Tensor, counts: Tensor) -> Tensor:
    """Positions in S of the changed examples for which rounding matters in one minus their new leverage.

    HeC3 divides by it. New leverages are differences of old ones, which may be larger by orders of magnitude if the old
    loss was flat.
    """
    h = torch.linalg.eigvalsh(roots.mT @ leverage_blocks @ roots).amax(1)
    rounding = torch.finfo(own.dtype).eps * own.abs().max() * roots.square().sum((1, 2))
    if bool((rounding > LARGEST_ROUNDING).any()):
        raise SingularCurvatureError(
            "expected changed examples whose leverages can be computed after the change, got large logits that leave a "
            f"rounding error of {float(rounding.max()):.1e} in them. Raise `ridge`, change other examples, or fit with "
            "recenter=True."
        )
    hidden: Tensor = (counts > 0) & (1 - h < rounding / HIDDEN)
    return hidden.nonzero().squeeze(1)


def _left_out(near_one: Tensor, weights: Tensor, roots: Tensor, matrix: Tensor, own: Tensor) -> Tensor:
    """(s k, p) M_i^-1 W_i for some changed examples i, given by their positions in S.

    W (s, k, q) are residuals with one column for each unit that is left out, and L' the Hessians after the change. Let
    M = I + B Q be the matrix of the change, and M_i = M - L'_i Q that of the change without one more copy of i. Then

        J F'^-1 J_i^T (I - L'_i Q'_ii)^-1 = J F^-1 J_S^T M_i^-1 E_i

    with E_i the columns of i in the identity: the right-hand side contains no leverage near one.
    """
    k, found = weights.shape[1], [matrix.new_zeros(len(matrix), 0)]
    for at in near_one.tolist():
        rows = slice(at * k, (at + 1) * k)
        hessian = roots[at] @ roots[at].mT
        for column in weights[at].T:
            unit = (column != 0) | (weights.shape[2] == 1)  # the outputs that are left out together
            one, right = matrix.clone(), matrix.new_zeros(len(matrix), 1)
            one[rows] -= (hessian * unit.unsqueeze(1) * unit) @ own[rows]
            right[rows, 0] = column
            found.append(_solve(one, right))
    return torch.cat(found, 1)


def _times_blocks(blocks: Tensor, values: Tensor) -> Tensor:
    """A block-diagonal matrix (s, q, k) times (s k, p): (s q, p)."""
    s, q, k = blocks.shape
    return (blocks @ values.reshape(s, k, values.shape[1])).reshape(s * q, values.shape[1])


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The inverse of a matrix times `right`. Raises if removing examples makes the matrix singular."""
    solved = torch.linalg.solve_ex(matrix, right)
    found: Tensor = solved.result
    if bool(solved.info.any()) or not bool(torch.isfinite(found).all()):
        raise _singular("to the last digit")
    return found


def apply(fitted: Fitted, inputs: Inputs, change: Change) -> WhatIf:
    """Predictions of one batch after a change."""
    noise, loo = fitted.meats.roots["ho"], fitted.meats.roots["hec3"]
    new_loo = fitted.loo.as_root(change.loo_residuals)
    root_counts = change.counts.clamp_min(0.0).sqrt().reshape(-1, 1, 1)
    found = []
    for _, aligned in whole_alignments(fitted, inputs):  # (m, k, n, k)
        own = aligned[:, :, change.index]  # (m, k, s, k)
        changed, seen = own.flatten(2), torch.einsum("mksj,sjq->mksq", own, change.roots).flatten(2)
        after = aligned - (seen @ change.downdate).reshape(aligned.shape)
        found.append(
            WhatIf(
                change=changed @ change.step,
                ho=_variance(aligned, noise),
                hec3=_variance(aligned, loo),
                new_ho=_variance(after, root_counts * noise),
                new_hec3=_variance(after, root_counts * new_loo) + (changed @ change.left_out).square().sum(2),
            )
        )
    return join_batches(found)


def _variance(aligned: Tensor, roots: Tensor) -> Tensor:
    """Diagonal of sum_i a_i W_i W_i^T a_i^T: (m, k, n, k) with (n or 1, k, q) to (m, k)."""
    return torch.einsum("mkni,niq->mknq", aligned, roots.expand(aligned.shape[2], -1, -1)).square().sum((2, 3))
