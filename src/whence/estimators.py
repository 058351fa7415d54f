"""Estimators of the covariance of predictions, each defined by its weights of the training examples.

With alignments a_i = J F_lam^-1 J_i^T, residuals e_i, hat blocks H_ii = L_i J_i F_lam^-1 J_i^T (L_i is the Hessian of
the loss in the outputs, the identity for squared error) and the noise covariance Sigma, every covariance is
sum_i a_i W_i W_i^T a_i^T:

    Ho         W_i W_i^T = Sigma            homoscedastic noise, inputs fixed
    HeC0       W_i = e_i                    White's sandwich, the infinitesimal jackknife
    HeC1       HeC0 times n k / (n k - dof)
    HeC2       W_i = (I - H_ii)^-1/2 e_i
    HeC3       W_i = (I - H_ii)^-1 e_i      leave-one-out residuals: the jackknife around f(x)
    jackknife  (n - 1) / n times (HeC3 - s s^T / n) with s = sum_i a_i W_i: the jackknife around its own mean

If groups are left out, a_i W_i is summed over each group before it is squared: HeC0, HeC2 and HeC3 are then the
cluster-robust sandwiches CR0, CR2 and CR3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats
from whence.curvature.base import Groups, times_hessian
from whence.data.targets import block_diagonal, diagonal_blocks
from whence.errors import InputError
from whence.jacobian.linearization import Folds, Linearization
from whence.likelihoods import Noise
from whence.linalg import eigh

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")

Policy = Literal["exact", "one_plus_q", "clip"]
Unit = Literal["example", "position", "output"]

CLIP = 1e-4  # the paper clips leverages to 1 - 1e-4 when the curvature is approximate
NEAR_ONE = 1e-6  # leverages this close to one are reported: the example determines its own prediction


@dataclass(frozen=True)
class LeveragePolicy:
    """How leave-one-out uses a leverage h."""

    inflation: Callable[[Tensor], Tensor]  # (I - H)^-1 as a function of h
    leverage: Callable[[Tensor], Tensor]  # the reported leverage
    limit: float  # leverages from here on are counted as guarded


POLICIES: Mapping[Policy, LeveragePolicy] = {
    # 1 / (1 - h), for curvatures that contain the example itself, where 0 <= h < 1. Rounding may push h to one; the
    # floor is far below any difference that the dtype resolves.
    "exact": LeveragePolicy(lambda h: 1.0 / (1.0 - h).clamp_min(torch.finfo(h.dtype).eps), lambda h: h, 1.0 - NEAR_ONE),
    # 1 + h, for approximate curvatures, which behave as if they did not contain the example.
    "one_plus_q": LeveragePolicy(lambda h: 1.0 + h, lambda h: h / (1.0 + h), 1.0),
    # 1 / (1 - min(h, 1 - 1e-4)), as in the paper.
    "clip": LeveragePolicy(
        lambda h: 1.0 / (1.0 - h.clamp(0.0, 1.0 - CLIP)), lambda h: h.clamp(0.0, 1.0 - CLIP), 1.0 - CLIP
    ),
}


@dataclass(frozen=True)
class AdjustedResiduals:
    """Residuals of the training examples, adjusted for their leverages."""

    hec2: Tensor  # (n, k) (I - H_ii)^-1/2 e_i
    hec3: Tensor  # (n, k) leave-one-out residuals u_i = (I - H_ii)^-1 e_i
    # (n, k) diagonal of the hat blocks R^T Q R after the policy; its sum over outputs is the trace of H
    leverage: Tensor
    guarded: int  # how many of the units left out had a leverage at the policy's limit


def leave_one_out(residuals: Tensor, leverage_blocks: Tensor, roots: Tensor, policy: Policy) -> AdjustedResiduals:
    """Leave each example out in turn, in closed form: u_i = (I - L_i Q_i)^-1 e_i with Q_i = J_i F_lam^-1 J_i^T.

    With L_i = R_i R_i^T and the policy's inflation g of the eigenvalues h of R_i^T Q_i R_i,

        u_i = e_i + R_i f(R_i^T Q_i R_i) R_i^T Q_i e_i,    f(h) = (g(h) - 1) / h,

    so that no root is ever inverted. HeC2 uses the square root of g.

    For residuals e (n, k), leverage blocks Q (n, k, k) and roots R (n, k, q).
    """
    rule, hats = POLICIES[policy], hat_blocks(leverage_blocks, roots)
    if roots.shape == leverage_blocks.shape:
        leverage = torch.diagonal(hats, dim1=1, dim2=2)
    else:  # a root with fewer columns than outputs: the diagonal of L Q, which has the same sum
        leverage = (roots * (leverage_blocks @ roots)).sum(2)
    if residuals.shape[1] == hats.shape[1] == 1:  # calls take longer than numbers here
        values, inflation = leverage, rule.inflation(leverage.clamp_min(0.0))
        hec2, hec3 = residuals * inflation.sqrt(), residuals * inflation
    else:
        roots, values = hat_roots(hats, roots)
        coordinates = _times(roots.mT, _times(leverage_blocks, residuals))
        inflation, small = rule.inflation(values), values < 1e-12
        hec2, hec3 = (
            residuals + _times(roots, coordinates * torch.where(small, slope, (one - 1.0) / values.clamp_min(1e-300)))
            for slope, one in ((0.5, inflation.sqrt()), (1.0, inflation))
        )
    return AdjustedResiduals(hec2, hec3, rule.leverage(leverage), int((values >= rule.limit).any(1).sum()))


def hat_blocks(leverage_blocks: Tensor, roots: Tensor) -> Tensor:
    """R_i^T Q_i R_i (n, q, q)."""
    return leverage_blocks if are_identity(roots) else roots.mT @ leverage_blocks @ roots


def hat_roots(hats: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Roots R_i (n, k, q) of the same Hessians L_i for which R_i^T Q_i R_i is diagonal, and its diagonals h (n, q)."""
    values, vectors = eigh((hats + hats.mT) / 2)
    return vectors if are_identity(roots) else roots @ vectors, values.clamp_min(0.0)


def are_identity(roots: Tensor) -> bool:
    """Whether roots (n, k, q) are one identity matrix, expanded, as for squared error: products with it cost memory."""
    _, k, q = roots.shape
    if roots.stride(0) != 0 or k != q:
        return False
    return torch.equal(roots[0], torch.eye(k, dtype=roots.dtype, device=roots.device))


def leave_groups_out(
    residuals: Tensor,
    alone: AdjustedResiduals,
    roots: Tensor,
    policy: Policy,
    blocks: Iterable[tuple[Tensor, Tensor]],
) -> AdjustedResiduals:
    """u_g = (I - L_g Q_gg)^-1 e_g for each group g, with Q_gg = J_g F_lam^-1 J_g^T over all its members together.

    Blocks are pairs of members (groups, size) and Q_gg (groups, size k, size k). The reported leverages are those of
    examples left out one by one, `alone`.
    """
    hec2, hec3 = torch.empty_like(residuals), torch.empty_like(residuals)
    guarded = 0
    for members, leverage_blocks in blocks:
        stacked = residuals[members].flatten(1)
        joint = block_diagonal(roots[members])
        found = leave_one_out(stacked, leverage_blocks.to(stacked.dtype), joint, policy)
        hec2[members], hec3[members] = (one.reshape(*members.shape, -1) for one in (found.hec2, found.hec3))
        guarded += found.guarded
    return AdjustedResiduals(hec2, hec3, alone.leverage, guarded)


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class LeaveOneOut:
    """The units that are left out of a fit, one after the other: examples, outputs, positions or groups."""

    problem: Linearization  # with the network's residuals, and roots of the loss's Hessians in the outputs
    policy: Policy  # how to use leverages
    recenter: bool  # use the residuals at the optimum of the linearized model
    unit: Unit = "example"  # leave out whole examples, or their positions or outputs one by one
    groups: Groups | None = None  # leave out whole groups instead of single examples

    @property
    def width(self) -> int | None:
        """How many outputs of an example are left out at once; `None` for all of them."""
        return {"example": None, "position": self.problem.width, "output": 1}[self.unit]

    @property
    def folds(self) -> Folds:
        """The same units as folds, for choosing a ridge."""
        return Folds(None if self.groups is None else self.groups.index, self.width)

    @property
    def unit_name(self) -> str:
        """The name of a unit, in words."""
        if self.groups is not None:
            return "groups"
        return "training examples" if self.unit == "example" else f"{self.unit}s"

    @property
    def deletions(self) -> int:
        """Number of units that are left out; those of weight zero do not count."""
        if self.groups is not None:
            return self.groups.counted
        problem = self.problem
        return problem.counted if self.width is None else problem.counted_units * problem.width // self.width

    def residuals(self, rows: slice, change: Tensor) -> Tensor:
        """(n, k) e - L c with the Newton step's change c of the outputs if `recenter`, else e."""
        given = self.problem.residuals[rows]
        return given - times_hessian(change, self.problem.hessian_roots, rows) if self.recenter else given

    def adjust(self, residuals: Tensor, leverage_blocks: Tensor, roots: Tensor) -> AdjustedResiduals:
        """Leave-one-out residuals from residuals (n, k), leverage blocks (n, k, k) and roots (n, k, q)."""
        folds = self.folds
        blocks = folds.blocks(leverage_blocks), folds.blocks(roots)
        found = leave_one_out(folds.parts(residuals), *blocks, self.policy)
        hec2, hec3, leverage = (one.reshape(residuals.shape) for one in (found.hec2, found.hec3, found.leverage))
        return AdjustedResiduals(hec2, hec3, leverage, found.guarded)

    def meat_roots(self, rows: slice, leverage_blocks: Tensor, change: Tensor) -> Mapping[str, Tensor]:
        """W (n, k, q) of HeC0, HeC2 and HeC3 for some examples, from their leverage blocks and the Newton change."""
        residuals = self.residuals(rows, change)
        adjusted = self.adjust(residuals, leverage_blocks, self.problem.hessian_roots[rows])
        return self.roots_from(residuals, adjusted)

    def roots_from(self, residuals: Tensor, adjusted: AdjustedResiduals) -> dict[str, Tensor]:
        """W (n, k, q) of HeC0, HeC2 and HeC3."""
        vectors = {"hec0": residuals, "hec2": adjusted.hec2, "hec3": adjusted.hec3}
        return {name: self.as_root(one) for name, one in vectors.items()}

    def as_root(self, vectors: Tensor) -> Tensor:
        """Vectors (n, k) as W (n, k, q), with one column for each unit of an example."""
        if self.width is None:
            return vectors.unsqueeze(-1)
        return block_diagonal(vectors.reshape(len(vectors), vectors.shape[1] // self.width, self.width, 1))

    def within_units(self, matrices: Tensor) -> Tensor:
        """Matrices (n, k, k), set to zero between outputs of an example that are not left out together."""
        if self.width is None:
            return matrices
        return block_diagonal(diagonal_blocks(matrices, matrices.shape[1] // self.width))


def assemble(problem: Linearization, bread: FittedCurvature, loo: LeaveOneOut, unbiased: bool) -> dict[str, Any]:
    """The fields of a fit beside its curvature, by name: adjusted residuals, noise, meats, sandwich.

    With `unbiased`, the noise estimate uses degrees of freedom.
    """
    step = bread.newton_step(with_direction=loo.recenter)
    residuals = loo.residuals(slice(0, problem.n), step.change)
    adjusted = loo.adjust(residuals, bread.leverage_blocks, problem.hessian_roots)
    if loo.groups is not None:
        blocks = bread.group_leverage_blocks(loo.groups)
        adjusted = leave_groups_out(residuals, adjusted, problem.hessian_roots, loo.policy, blocks)
    noise = problem.noise(residuals, bread.degrees_of_freedom if unbiased else None)
    _check_range(problem, bread, adjusted, noise)
    roots = {"ho": noise.roots, **loo.roots_from(residuals, adjusted)}
    meats = Meats(roots, adjusted.hec3, loo.deletions, loo.groups)
    found = {"bread": bread, "step": step, "adjusted": adjusted, "meats": meats, "sandwich": bread.sandwich(meats)}
    return {**found, "sigma": noise.covariance, "noise_scale": noise.scale}


def hc1_factor(problem: Linearization, bread: FittedCurvature, groups: int | None) -> float:
    """HeC1 over HeC0: n k / (n k - dof), with Stata's correction for few clusters if groups are left out."""
    numbers = problem.numbers
    left = numbers - bread.degrees_of_freedom
    factor = numbers / left if left > 0 else float("inf")
    return factor if groups is None else factor * (groups / (groups - 1)) * ((numbers - 1) / numbers)


def observation_noise(residuals: Tensor, loo_residuals: Tensor) -> Tensor:
    """(k,) variance of a new observation around the regression function: the mean of e u, with u = e / (1 - h).

    In a linear model without a ridge it is unbiased for any number of weights. The mean of e^2 is too small.
    """
    return (residuals * loo_residuals).mean(0).clamp_min(0.0)


def _check_range(problem: Linearization, bread: FittedCurvature, adjusted: AdjustedResiduals, noise: Noise) -> None:
    """Raise if squares of the fit's residuals, leverages or noise overflow or vanish."""
    squares = {
        "the leverages of the training examples": bread.leverage_blocks,
        "their leave-one-out residuals, squared": adjusted.hec3.square(),
        "the variance of the noise": noise.covariance,
    }
    for what, values in squares.items():
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            raise out_of_range(problem, f"{int(bad.sum())} numbers that are infinite or NaN in {what}")
    size, tiny = float(problem.residuals.abs().max()), torch.finfo(problem.dtype).tiny
    scale = max(size, float(problem.outputs.abs().max()))
    if problem.identity_hessians and size > 0 and scale**2 < tiny:
        raise out_of_range(problem, f"residuals of at most {size:.3g}, whose squares vanish")


def out_of_range(problem: Linearization, got: str) -> InputError:
    """The error for variances that the dtypes cannot represent."""
    used = next(iter(problem.selection.parameters.values())).dtype
    names = sorted({str(one).removeprefix("torch.") for one in (problem.dtype, used)})
    largest = float(problem.outputs.abs().max()), float(problem.isometric(problem.residuals).abs().max())
    return InputError(
        f"expected variances that {' and '.join(names)} can hold, got {got}. Outputs are up to {largest[0]:.3g} here, "
        f"residuals up to {largest[1]:.3g}, and variances are proportional to the squares of these, of gradients, and "
        "of 1 / ridge. Scale inputs and targets to about one, choose a ridge nearer to the size of the curvature, or "
        "use model.double()."
    )
