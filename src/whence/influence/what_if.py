"""Where the outputs of changed examples settle, when their loss is not a parabola.

A label that is turned round moves its own output far: one Newton step, with the Hessian of before, goes much too far
where that Hessian was small, as it is for a label that was certain. So the loss of the changed examples is taken as it
is, and that of all others by its parabola. With F dw = J_S^T g the outputs of the set move by Q g, and at the new
optimum

    g = n v(Q g) - e + L Q g

with n how often each example counts, v its new residual at its new output, e and L residual and Hessian of before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.data.batches import Inputs, take
from whence.display import Column, Shown, Table, count, numbers, places, rows_shown
from whence.errors import InputError, SingularCurvatureError
from whence.influence.fitted import Fitted, alignments
from whence.likelihoods import Likelihood

STEPS, CLOSE = 200, 1e-12
"""Most Newton steps, and what is left of the equation after the last, over the size of g."""

SMALLEST, DECREASE = 1e-12, 1e-4
"""Smallest part of a Newton step, and by how much of a step's part what is left must shrink at least: losses that are
flat on both sides of the solution, as those of large logits are, would otherwise be crossed to and fro for ever."""

SETTLED = 1e-6
"""What may be left of the equation where rounding ends Newton's method early."""


@dataclass(frozen=True)
class Settled:
    """The changed examples after the change.

    Attributes:
        push: (s k,) g.
        roots: (s, k, q) roots of the Hessians at the new outputs, sample weights included.
        residuals: (s, k) at the new outputs, the same.
    """

    push: Tensor
    roots: Tensor
    residuals: Tensor


def expected_targets(likelihood: Likelihood, outputs: Tensor, where: str) -> Tensor:
    """Targets as the network expects them, where there are none."""
    if likelihood.has_classes:
        return likelihood.check_targets(likelihood.probabilities(outputs), outputs, where)
    return outputs


def settle(
    fitted: Fitted, index: Tensor, counts: Tensor, within: Tensor, given: Tensor, targets: Tensor
) -> Settled | None:
    """Newton's method on g; `None` for squared error and recentered fits, whose losses are parabolas.

    For networks that answer once an example, of which all outputs are looked at.

    Args:
        fitted: the fit.
        index: (s,) the changed examples.
        counts: (s,) how often each is to count.
        within: (s k, s k) Q.
        given: (s, k) residuals with the new labels at the old outputs, sample weights included.
        targets: (s, ...) targets, as the likelihood encodes them.
    """
    problem = fitted.problem
    likelihood, outputs = problem.likelihood, problem.outputs[index]
    if problem.hessian_roots is None or fitted.weighing.recenter or not len(index):
        return None
    if likelihood.hessian_root(outputs, targets) is None:
        return None
    before, old = problem.hessian_roots[index], fitted.meats.roots["hec0"].sum(2)[index]
    weights = torch.ones_like(counts) if problem.sample_weights is None else problem.sample_weights[index]
    often, share = counts.reshape(-1, 1), weights.to(outputs.dtype).reshape(-1, 1)
    start = likelihood.residuals(outputs, targets)
    eye = torch.eye(within.shape[0], dtype=within.dtype, device=within.device)

    def looks(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moved = (within @ g).reshape(outputs.shape)
        fresh = given + share * (likelihood.residuals(outputs + moved, targets) - start)
        lost = (before @ (before.transpose(1, 2) @ moved.unsqueeze(2))).squeeze(2)
        return moved, fresh, g - (often * fresh - old + lost).reshape(-1)

    def roots_at(moved: Tensor) -> Tensor:
        found = likelihood.hessian_root(outputs + moved, targets)
        assert found is not None
        return share.sqrt().unsqueeze(2) * found

    push = torch.zeros_like(eye[0])
    moved, fresh, off = looks(push)
    for _ in range(STEPS):
        if _left(off, push) <= CLOSE:
            break
        step = torch.linalg.solve(eye + _blocks(often, roots_at(moved), before) @ within, off)
        size, best = 1.0, looks(push - step)
        while not float(best[2].norm()) <= (1 - DECREASE * size) * float(off.norm()) and size > SMALLEST:
            size /= 2
            best = looks(push - size * step)
        if size <= SMALLEST:
            break
        push, (moved, fresh, off) = push - size * step, best
    if not _left(off, push) <= SETTLED:
        raise SingularCurvatureError(
            f"expected changed examples whose outputs settle, got {_left(off, push):.1e} of their residuals left after "
            "Newton's method in what_if: the loss of examples with large logits is flat on both sides of the solution. "
            "Raise `ridge`, change fewer examples at once, or fit with recenter=True."
        )
    return Settled(push, roots_at(moved), fresh)


def _left(off: Tensor, push: Tensor) -> float:
    """What is left of the equation for g, over the size of g where that is above one."""
    return float(off.abs().max()) / max(1.0, float(push.abs().max()))


def _blocks(often: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """The block-diagonal matrix of n L' - L, (s k, s k)."""
    each = often.unsqueeze(2) * (after @ after.transpose(1, 2)) - before @ before.transpose(1, 2)
    found: Tensor = torch.block_diag(*each)
    return found


@dataclass(frozen=True)
class WhatIf(Shown):
    """Predictions and variances after a change of the training set.

    Attributes:
        change: (m, k) f'(x) - f(x).
        ho, hec3: (m, k) variances before.
        new_ho, new_hec3: (m, k) variances after, with the noise covariance of before.

    Examples:
        >>> one = torch.ones(1, 1)
        >>> WhatIf(change=-0.5 * one, ho=one, hec3=2 * one, new_ho=one, new_hec3=one)
        WhatIf(1 predictions move by 0.5 on average, their mean HeC3 from 2 to 1)
    """

    change: Tensor
    ho: Tensor
    hec3: Tensor
    new_ho: Tensor
    new_hec3: Tensor

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.change)

    def __repr__(self) -> str:
        """Sizes and means."""
        before, after = (float(values.sum(1).mean()) for values in (self.hec3, self.new_hec3))
        return (
            f"WhatIf({len(self)} predictions move by {float(self.change.norm(dim=1).mean()):.3g} on average, their "
            f"mean HeC3 from {before:.3g} to {after:.3g})"
        )

    def _table(self) -> Table:
        m, k = self.change.shape
        rows, more = rows_shown(m, "change, new_ho, new_hec3")
        moved = self.change[:, 0] if k == 1 else self.change.norm(dim=1)
        variances = {"Ho": self.ho, "Ho after": self.new_ho, "HeC3": self.hec3, "HeC3 after": self.new_hec3}
        columns = [places(rows), Column("moves by", numbers(moved[:rows].tolist()))]
        columns += [Column(name, numbers(values.sum(1)[:rows].tolist())) for name, values in variances.items()]
        return Table(f"{count(m, 'prediction')} after a change of the training set", tuple(columns), more)


@dataclass(frozen=True)
class Change:
    """A change of the training set, ready to be applied to predictions.

    Attributes:
        index: (s,) the examples concerned.
        counts: (n,) how often each example counts afterwards.
        push: (s k,) M (C e + (I + C) d), or where the changed examples settle.
        bend: (s k, n k) M C L H_S, by which alignments with all examples lose; with new Hessians where they settle.
        left_out: (n, k) leave-one-out residuals afterwards.
    """

    index: Tensor
    counts: Tensor
    push: Tensor
    bend: Tensor
    left_out: Tensor


def prepare(fitted: Fitted, counts: Tensor, shift: Tensor, relabel: Mapping[int, Tensor]) -> Change:
    """Solve for a change.

    Args:
        fitted: a fit with true leverages.
        counts: (n,) how often each example is to count; 1 leaves it as it is.
        shift: (n, k) by how much residuals change, sample weights included.
        relabel: new targets, as the likelihood encodes them.
    """
    problem = fitted.problem
    k, roots = problem.k, problem.hessian_roots
    index = ((counts != 1) | (shift != 0).any(1)).nonzero().squeeze(1)
    rows, said = _rows_of(fitted, index)  # H_S: (s, k, n, k)
    s = len(index)
    extra = (counts - 1)[index].reshape(s, 1)
    residuals = fitted.meats.roots["hec0"].sum(2)
    new = residuals + shift
    within = rows[:, :, index].reshape(s * k, s * k)
    eye = torch.eye(k, dtype=rows.dtype, device=rows.device)
    blocks = extra.reshape(s, 1, 1) * (eye if roots is None else roots[index] @ roots[index].transpose(1, 2))
    settled = None
    if not (problem.dense or problem.sketch is not None):
        settled = settle(fitted, index, counts[index], within, new[index], _targets(fitted, index, said, relabel))
    if settled is not None and roots is not None:
        old = roots[index] @ roots[index].transpose(1, 2)
        blocks = counts[index].reshape(s, 1, 1) * (settled.roots @ settled.roots.transpose(1, 2)) - old
        roots = roots.index_copy(0, index, settled.roots)
    inner = torch.eye(s * k, dtype=rows.dtype, device=rows.device) + _times(blocks, within)
    bend = _solved(inner, _times(blocks, rows.reshape(s * k, problem.n * k)))
    score = extra * residuals[index] + (1 + extra) * shift[index]
    push = _solved(inner, score.reshape(-1)) if settled is None else settled.push
    flat = rows.reshape(s * k, problem.n, k)
    moved = torch.einsum("anj,a->nj", flat, push)  # how far the outputs move
    leverage_blocks = fitted.bread.leverage_blocks - torch.einsum("anj,anl->njl", flat, bend.reshape(flat.shape))
    after = new - fitted.weighing.lost(slice(0, problem.n), moved)
    if settled is not None:
        after = after.index_copy(0, index, settled.residuals)
        _check_resolved(settled.roots, leverage_blocks[index], within, counts[index])
    left_out = fitted.weighing.leave_out(after, leverage_blocks, roots)
    return Change(index, counts, push, bend, left_out.hec3)


def _check_resolved(roots: Tensor, leverage_blocks: Tensor, within: Tensor, counts: Tensor) -> None:
    """Raise where one minus a new leverage, by which HeC3 divides, is less than what rounding adds to it.

    New leverages are differences of old ones, which may be larger by orders of magnitude where the old loss was flat.
    """
    h = torch.linalg.eigvalsh(roots.transpose(1, 2) @ leverage_blocks @ roots).amax(1)
    rounding = torch.finfo(within.dtype).eps * within.abs().max() * roots.square().sum((1, 2))
    lost = (counts > 0) & (1 - h < 100 * rounding) & (rounding > 1e-12)
    if bool(lost.any()):
        raise SingularCurvatureError(
            "expected leverages after the change that can be told from one, got a changed example with large logits "
            f"that decides its own prediction ({float((1 - h)[lost].min()):.1e} below one, with a rounding error of "
            f"{float(rounding[lost].max()):.1e}). Raise `ridge`, change other examples, or fit with recenter=True."
        )


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """M^-1 times something, or an error where what is left of the training set tells nothing."""
    solved = torch.linalg.solve_ex(matrix, right.unsqueeze(1) if right.ndim == 1 else right)
    found: Tensor = solved.result
    if bool(solved.info.any()) or not bool(torch.isfinite(found).all()):
        raise SingularCurvatureError(
            "expected a curvature that keeps its inverse after the change, got one without: the examples that leave "
            "decide their own predictions (leverage one to the last digit). Raise `ridge`, or change other examples."
        )
    return found.squeeze(1) if right.ndim == 1 else found


def _times(blocks: Tensor, values: Tensor) -> Tensor:
    """A block-diagonal matrix (s, k, k) times (s k, q)."""
    s, k = blocks.shape[:2]
    return (blocks @ values.reshape(s, k, values.shape[1])).reshape(values.shape)


def _targets(fitted: Fitted, index: Tensor, said: Sequence[Tensor], relabel: Mapping[int, Tensor]) -> Tensor:
    """(s, ...) targets of the changed examples, as the likelihood encodes them: those of the data, or new ones.

    Args:
        fitted: the fit.
        index: (s,) the changed examples.
        said: their targets, as the loader gives them, batch by batch.
        relabel: new targets, encoded.
    """
    outputs = fitted.problem.outputs[index]
    if not len(index):
        return outputs
    where = "the examples to change"
    found = fitted.problem.likelihood.check_targets(torch.cat([*said]), outputs, where).clone()
    for place, at in enumerate(index.tolist()):
        if at in relabel:
            found[place] = relabel[at]
    return found


def apply(fitted: Fitted, inputs: Inputs, change: Change) -> WhatIf:
    """Predictions of one batch after a change."""
    problem = fitted.problem
    noise, left_out = fitted.meats.roots["ho"], fitted.meats.roots["hec3"]
    after = fitted.weighing.column(change.left_out)
    kept = change.counts.clamp_min(0.0).sqrt().reshape(problem.n, 1, 1)
    parts: list[list[Tensor]] = [[] for _ in range(5)]
    for _, chunks in alignments(fitted, inputs):
        aligned = torch.cat([part for _, part in chunks], dim=2)  # (m, k, n, k)
        ours = aligned[:, :, change.index].flatten(2)
        bent = aligned - (ours @ change.bend).reshape(aligned.shape)
        values = (
            ours @ change.push,
            _variance(aligned, noise),
            _variance(aligned, left_out),
            _variance(bent, kept * noise),
            _variance(bent, kept * after),
        )
        for column, value in zip(parts, values, strict=True):
            column.append(value)
    return WhatIf(*(torch.cat(column) for column in parts))


def join(parts: Sequence[WhatIf]) -> WhatIf:
    """Several batches as one."""
    names = WhatIf.__dataclass_fields__
    return WhatIf(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def read_change(
    fitted: Fitted, remove: Sequence[int], repeat: Sequence[int], relabel: Mapping[int, Any]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Counts (n,), shifts of residuals (n, k) and targets as the likelihood encodes them, from what a user says."""
    problem = fitted.problem
    if fitted.weighing.policy != "exact":
        raise InputError(
            "expected a structure with true leverages to take examples out of a fit, got an approximate one. "
            'Fit with structure="exact", "core" or "sketch".'
        )
    counts = torch.ones(problem.n, dtype=problem.dtype, device=problem.device)
    for chosen, by in ((remove, -1.0), (repeat, 1.0)):
        for example in chosen:
            counts[_position(example, problem.n)] += by
    if bool((counts < 0).any()):
        raise InputError("expected every example to be removed once at most, got one that is named twice in `remove`.")
    shift = torch.zeros_like(problem.residuals)
    if relabel and (problem.dense or problem.sketch is not None):
        raise InputError(
            "expected a fit that looks at all outputs of a network that answers once an example for new labels, got "
            "one with several positions, or of some mixtures of outputs. Change the labels in the data and fit again."
        )
    targets: dict[int, Tensor] = {}
    for example, target in relabel.items():
        at = _position(example, problem.n)
        said = torch.as_tensor(target, device=problem.device)
        if said.is_floating_point() and not isinstance(target, Tensor):  # torch reads Python's numbers as float32
            said = torch.as_tensor(target, dtype=problem.dtype, device=problem.device)
        outputs = problem.outputs[at : at + 1]
        checked = problem.likelihood.check_targets(said.unsqueeze(0), outputs, f"the new label of example {example}")
        fresh = problem.likelihood.residuals(outputs, checked)
        targets[at] = checked[0]
        weight = 1.0 if problem.sample_weights is None else float(problem.sample_weights[at])
        shift[at] = weight * fresh[0] - problem.residuals[at]
    return counts, shift, targets


def _position(example: Any, n: int) -> int:
    at = int(example)
    if at != example or not 0 <= at < n:
        raise InputError(f"expected training examples by their positions 0 to {n - 1}, got {example!r}.")
    return at


def _rows_of(fitted: Fitted, index: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Alignments of some training examples with all of them, (s, k, n, k), and targets as the loader gives them."""
    problem = fitted.problem
    need = len(index) * problem.k * problem.n * problem.k * problem.outputs.element_size()
    problem.budget.require(4.0 * need, f"a change of {len(index)} training examples", "Change fewer at once.")
    found, targets = [], []
    for batch in problem.read("examples to change"):
        here = index[(index >= batch.start) & (index < batch.start + batch.size)] - batch.start
        if len(here):
            some = take(batch.inputs, here)  # type: ignore[arg-type]  # tensors take positions as they take slices
            targets.append(batch.targets[here])
            for _, chunks in alignments(fitted, some):
                found.append(torch.cat([part for _, part in chunks], dim=2))
    none = problem.outputs.new_zeros(0, problem.k, problem.n, problem.k)
    return torch.cat(found) if found else none, targets


def _variance(aligned: Tensor, roots: Tensor) -> Tensor:
    """Diagonal of sum_i a_i W_i W_i^T a_i^T: (m, k, n, k) with (n or 1, k, q) to (m, k)."""
    weighted = torch.einsum("mkni,niq->mknq", aligned, roots.expand(aligned.shape[2], -1, -1))
    return weighted.square().sum((2, 3))
