"""The estimators, each as the weight it gives to a training example.

With alignments a_i = J F_lam^-1 J_i^T every variance is sum_i a_i W_i W_i^T a_i^T:

    Ho       W_i W_i^T = Sigma             homoscedastic noise, inputs fixed
    HeC0     W_i = e_i                     White's sandwich, the infinitesimal jackknife
    HeC1     HeC0 times n k / (n k - dof)
    HeC2     W_i = (I - H_ii)^-1/2 e_i
    HeC3     W_i = (I - H_ii)^-1 e_i       leave one example out: the jackknife
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats, NewtonStep, Sandwich
from whence.curvature.base import Groups
from whence.data.batches import Inputs
from whence.data.targets import Positions, block_diagonal
from whence.errors import InputError
from whence.jacobian.linearization import Folds, Linearization
from whence.likelihoods import Noise
from whence.linalg import eigh
from whence.runtime.memory import few_at_once

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def hc1_factor(problem: Linearization, bread: FittedCurvature, groups: int | None) -> float:
    """HeC1 over HeC0: n k / (n k - dof), with Stata's correction for few clusters where groups are left out."""
    numbers = problem.numbers
    left = numbers - bread.degrees_of_freedom
    factor = numbers / left if left > 0 else float("inf")
    return factor if groups is None else factor * (groups / (groups - 1)) * ((numbers - 1) / numbers)


Policy = Literal["exact", "one_plus_q", "clip"]

CLIP = 1e-4
"""The paper clips leverages to 1 - 1e-4 when the curvature is approximate."""

NEAR_ONE = 1e-6
"""A leverage within this distance of one is reported: the example decides its own prediction."""


@dataclass(frozen=True)
class LeftOut:
    """Residuals of the training examples after leaving them out.

    Attributes:
        hec2: (n, k) halfway residuals (I - H_ii)^-1/2 e_i.
        hec3: (n, k) leave-one-out residuals u_i = (I - H_ii)^-1 e_i.
        leverage: (n, k) diagonal of the hat blocks R^T Q R after the policy; its sum over outputs is the trace of H.
        guarded: how many of those that are left out, one after the other, the policy had to guard.
    """

    hec2: Tensor
    hec3: Tensor
    leverage: Tensor
    guarded: int


def leave_one_out(
    residuals: Tensor, leverage_blocks: Tensor, roots: Tensor | None, policy: Policy, by_output: bool
) -> LeftOut:
    """Leave each example out in turn, in closed form.

    With blocks Q_i = J_i F_lam^-1 J_i^T and the output Hessian L_i = R_i R_i^T the hat block is H_i = L_i Q_i and
    u_i = (I - H_i)^-1 e_i. Policies for the eigenvalues h of R^T Q R:

    * "exact": 1 / (1 - h), for curvatures that contain the example itself, where 0 <= h < 1;
    * "one_plus_q": 1 + h, for approximate curvatures, which behave as if they did not contain it;
    * "clip": 1 / (1 - min(h, 1 - 1e-4)), as in the paper.

    Args:
        residuals: e (n, k).
        leverage_blocks: Q (n, k, k).
        roots: R (n, k, q), or `None` for the identity.
        policy: what to do with the leverages.
        by_output: leave single outputs out, with scalar leverages, instead of whole examples (the paper's stacked
            reading; the same for k = 1).
    """
    inner = leverage_blocks if roots is None else roots.transpose(1, 2) @ leverage_blocks @ roots
    plain = _diagonal(leverage_blocks, roots, inner)
    grow = _growth(policy)
    if by_output or (roots is None and residuals.shape[1] == 1):  # of a single output there is nothing to turn
        shrunk = plain.clamp_min(0.0)
        return LeftOut(
            residuals * grow(shrunk).sqrt(),
            residuals * grow(shrunk),
            _leverage(policy, plain),
            _guarded(policy, plain.reshape(-1, 1)),
        )
    pairs = [eigh(some) for some in few_at_once((inner + inner.transpose(1, 2)) / 2)]
    values, vectors = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    values = values.clamp_min(0.0)
    # u = e + R f(S) R^T Q e with S = R^T Q R and f(s) = (grow(s) - 1) / s, so that no root is ever inverted.
    seen = (leverage_blocks @ residuals.unsqueeze(-1)).squeeze(-1)
    along = _apply(vectors.transpose(1, 2), seen if roots is None else _apply(roots.transpose(1, 2), seen))

    def grown(growth: Callable[[Tensor], Tensor], slope: float) -> Tensor:
        tiny = values < 1e-12
        factor = torch.where(tiny, slope, (growth(values) - 1.0) / values.clamp_min(1e-300))
        moved = _apply(vectors, along * factor)
        return residuals + (moved if roots is None else _apply(roots, moved))

    return LeftOut(
        grown(lambda s: grow(s).sqrt(), 0.5), grown(grow, 1.0), _leverage(policy, plain), _guarded(policy, values)
    )


def _diagonal(leverage_blocks: Tensor, roots: Tensor | None, inner: Tensor) -> Tensor:
    """(n, k) leverages of the outputs: the diagonal of R^T Q R, which lies between zero and one, as H's need not.

    Where outputs do not depend on each other the two are the same. Roots without a column for each output leave H's.
    """
    if roots is None or inner.shape == leverage_blocks.shape:
        return torch.diagonal(inner, dim1=1, dim2=2)
    return torch.einsum("nkq,nkq->nk", roots, leverage_blocks @ roots)


def _growth(policy: Policy) -> Callable[[Tensor], Tensor]:
    if policy == "one_plus_q":
        return lambda h: 1.0 + h
    if policy == "clip":
        return lambda h: 1.0 / (1.0 - h.clamp(0.0, 1.0 - CLIP))
    # Rounding may push an exact leverage to one; the floor is far below any difference that float64 resolves.
    return lambda h: 1.0 / (1.0 - h).clamp_min(torch.finfo(h.dtype).eps)


def _leverage(policy: Policy, plain: Tensor) -> Tensor:
    if policy == "one_plus_q":
        return plain / (1.0 + plain)
    return plain.clamp(0.0, 1.0 - CLIP) if policy == "clip" else plain


def _guarded(policy: Policy, values: Tensor) -> int:
    limit = {"exact": 1.0 - NEAR_ONE, "one_plus_q": 1.0, "clip": 1.0 - CLIP}[policy]
    return int((values >= limit).any(1).sum())


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def leave_groups_out(
    residuals: Tensor, alone: LeftOut, roots: Tensor | None, policy: Policy, blocks: Iterable[tuple[Tensor, Tensor]]
) -> LeftOut:
    """u_g = (I - L_g Q_gg)^-1 r_g for each group g, with Q_gg = J_g F_lam^-1 J_g^T over all its members together.

    The heteroscedastic estimators then sum over groups: HeC0 is White's cluster-robust sandwich, HeC3 the jackknife
    over groups (CR3), HeC2 the one in between (CR2).

    Args:
        residuals: r (n, k).
        alone: the same with examples left out one by one, for its leverages.
        roots: R (n, k, q) with L = R R^T, or `None` for the identity.
        policy: what to do with the leverages.
        blocks: gives (members (groups, size), Q_gg (groups, size k, size k)).
    """
    hec2, hec3 = torch.empty_like(residuals), torch.empty_like(residuals)
    guarded = 0
    for members, leverage_blocks in blocks:
        flat = residuals[members].flatten(1)
        joint = None if roots is None else block_diagonal(roots[members])
        found = leave_one_out(flat, leverage_blocks.to(flat.dtype), joint, policy, by_output=False)
        hec2[members] = found.hec2.reshape(*members.shape, -1)
        hec3[members] = found.hec3.reshape(*members.shape, -1)
        guarded += found.guarded
    return LeftOut(hec2, hec3, alone.leverage, guarded)


@dataclass(frozen=True)
class Weighing:
    """Residuals and what to do with them.

    Attributes:
        given: (n, k) residuals of the network.
        roots: (n, k, q) roots of the loss's Hessian in the outputs; `None` for the identity.
        policy: what to do with leverages.
        recenter: use the residuals at the optimum of the linearized model.
        by_output: leave out single outputs instead of whole examples.
        groups: leave out whole groups instead of single examples.
        units: leave out these positions of examples, one by one, instead of whole examples.
    """

    given: Tensor
    roots: Tensor | None
    policy: Policy
    recenter: bool
    by_output: bool
    groups: Groups | None = None
    units: Positions | None = None

    def deletions(self, problem: Linearization) -> int:
        """How many are left out, one after the other: groups, positions, outputs or examples, those that count."""
        if self.groups is not None:
            return self.groups.counted
        if self.units is not None:
            return problem.counted_units
        return problem.counted_units * problem.width if self.by_output else problem.counted

    @property
    def folds(self) -> Folds:
        """The same for the choice of a ridge."""
        if self.groups is not None:
            return Folds(self.groups.index)
        if self.units is not None:
            return Folds(width=self.units.width)
        return Folds(width=1 if self.by_output else None)

    @property
    def left_out_name(self) -> str:
        """What is left out, in words."""
        if self.groups is not None:
            return "groups"
        if self.units is not None:
            return "positions"
        return "outputs" if self.by_output else "training examples"

    def residuals(self, where: slice, change: Tensor) -> Tensor:
        """(n, k) residuals after the outputs moved by `change`, if they are to move."""
        given = self.given[where]
        return given - self.lost(where, change) if self.recenter else given

    def lost(self, where: slice, change: Tensor) -> Tensor:
        """L_i times the change of the outputs (n, k): what residuals lose by it, to first order."""
        if self.roots is None:
            return change
        roots = self.roots[where]
        return torch.einsum("nkq,nq->nk", roots, torch.einsum("nkq,nk->nq", roots, change))

    def left_out(self, where: slice, leverage_blocks: Tensor, change: Tensor) -> LeftOut:
        """Leave-one-out residuals."""
        roots = None if self.roots is None else self.roots[where]
        return self.leave_out(self.residuals(where, change), leverage_blocks, roots)

    def leave_out(self, residuals: Tensor, leverage_blocks: Tensor, roots: Tensor | None) -> LeftOut:
        """The same for residuals (n, k), leverage blocks (n, k, k) and roots (n, k, q) at hand."""
        if self.units is None:
            return leave_one_out(residuals, leverage_blocks, roots, self.policy, self.by_output)
        inner = None if roots is None else self.units.split(roots)
        flat = residuals.reshape(-1, self.units.width)
        found = leave_one_out(flat, self.units.split(leverage_blocks), inner, self.policy, by_output=False)
        hec2, hec3, leverage = (part.reshape(residuals.shape) for part in (found.hec2, found.hec3, found.leverage))
        return LeftOut(hec2, hec3, leverage, found.guarded)

    def groups_left_out(self, residuals: Tensor, alone: LeftOut, blocks: Iterable[tuple[Tensor, Tensor]]) -> LeftOut:
        """Leave-one-group-out residuals, from the blocks of whole groups."""
        return leave_groups_out(residuals, alone, self.roots, self.policy, blocks)

    def columns(self, where: slice, leverage_blocks: Tensor, change: Tensor) -> Mapping[str, Tensor]:
        """Weights W (n, k, q) of the examples in each heteroscedastic estimator."""
        return self.roots_of(self.residuals(where, change), self.left_out(where, leverage_blocks, change))

    def roots_of(self, residuals: Tensor, left_out: LeftOut) -> dict[str, Tensor]:
        """The same from residuals and leave-one-out residuals at hand."""
        vectors = {"hec0": residuals, "hec2": left_out.hec2, "hec3": left_out.hec3}
        return {name: self.column(one) for name, one in vectors.items()}

    def column(self, vectors: Tensor) -> Tensor:
        """Vectors (n, k) as weights W (n, k, q), with one column for each that is left out of an example."""
        if self.units is not None:
            return self.units.join(vectors.reshape(-1, self.units.width, 1))
        return vectors.diag_embed() if self.by_output else vectors.unsqueeze(-1)

    def within(self, matrices: Tensor) -> Tensor:
        """Matrices (n, k, k) with zeros between outputs of an example that are not left out together."""
        if self.units is not None:
            return self.units.join(self.units.split(matrices))
        return matrices.diagonal(dim1=1, dim2=2).diag_embed() if self.by_output else matrices


def check_range(problem: Linearization, bread: FittedCurvature, left_out: LeftOut, noise: Noise) -> None:
    """Raise where squares of what the fit is made of are too large, or too small, to be numbers."""
    parts = {
        "the leverages of the training examples": bread.leverage_blocks,
        "their leave-one-out residuals, squared": left_out.hec3.square(),
        "the variance of the noise": noise.covariance,
    }
    for what, values in parts.items():
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            raise _out_of_range(problem, f"{int(bad.sum())} numbers that are infinite or NaN in {what}")
    size, tiny = float(problem.residuals.abs().max()), torch.finfo(problem.dtype).tiny
    scale = max(size, float(problem.outputs.abs().max()))
    if problem.hessian_roots is None and size > 0 and scale**2 < tiny:
        raise _out_of_range(problem, f"residuals of at most {size:.3g}, whose squares vanish")


def check_variances(
    problem: Linearization, found: Mapping[str, Tensor], where: str, inputs: Inputs | None = None
) -> None:
    """Raise where variances of predictions are too large to be numbers; HeC1 may be infinite by its definition.

    Args:
        problem: the linearized training problem.
        found: (m, ...) variances by name.
        where: the predictions are, for messages.
        inputs: of the predictions. One whose own gradient is not finite, as that of a square root at zero, may have
            variances that are not numbers: that is no fault of the scale.
    """
    for name, values in found.items():
        if name == "hec1" or bool(torch.isfinite(values).all()):
            continue
        bad = ~torch.isfinite(values).flatten(1).all(1)
        if inputs is not None:
            bad &= _finite_gradients(problem, inputs)
        if bool(bad.any()):
            count = f"{int(bad.sum())} of {len(values)}"
            raise _out_of_range(problem, f"{name} of {count} predictions in {where} infinite or NaN")


def _finite_gradients(problem: Linearization, inputs: Inputs) -> Tensor:
    """(m,) which inputs have finite gradients of their outputs."""
    rows = problem.jacobian().rows(inputs, problem.k)
    return torch.cat([torch.isfinite(some).flatten(1).all(1) for _, some in rows])


def _out_of_range(problem: Linearization, got: str) -> InputError:
    used = next(iter(problem.selection.parameters.values())).dtype
    names = sorted({str(one).removeprefix("torch.") for one in (problem.dtype, used)})
    largest = float(problem.outputs.abs().max()), float(problem.residuals.abs().max())
    return InputError(
        f"expected variances that {' and '.join(names)} can hold, got {got}. Outputs are up to {largest[0]:.3g} here, "
        f"residuals up to {largest[1]:.3g}, and variances go with the squares of these, of gradients, and of "
        "1 / ridge. Scale inputs and targets to about one, choose a ridge nearer to the size of the curvature, or use "
        "model.double()."
    )


@dataclass(frozen=True)
class Estimators:
    """What follows from a curvature and the choices of a fit."""

    step: NewtonStep
    left_out: LeftOut
    noise: Noise
    meats: Meats
    sandwich: Sandwich


def assemble(problem: Linearization, bread: FittedCurvature, weighing: Weighing, unbiased: bool) -> Estimators:
    """Leave examples out, estimate the noise, and put the meats between the breads.

    Args:
        problem: the linearized training problem.
        bread: its curvature.
        weighing: how training examples are weighed.
        unbiased: whether the noise is scaled for degrees of freedom.
    """
    step = bread.newton_step(with_direction=weighing.recenter)
    everything = slice(0, problem.n)
    residuals = weighing.residuals(everything, step.change)
    left_out = weighing.left_out(everything, bread.leverage_blocks, step.change)
    if weighing.groups is not None:
        left_out = weighing.groups_left_out(residuals, left_out, bread.group_leverage_blocks(weighing.groups))
    noise = problem.noise(residuals, bread.degrees_of_freedom if unbiased else None)
    check_range(problem, bread, left_out, noise)
    roots = {"ho": noise.roots, **weighing.roots_of(residuals, left_out)}
    meats = Meats(roots, left_out.hec3, weighing.deletions(problem), weighing.groups)
    return Estimators(step, left_out, noise, meats, bread.sandwich(meats))
