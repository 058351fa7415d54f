"""The exact curvature, matrix-free: what an approximate one should have said about a sample.

Everything here is a solve with F_lam = sum_i J_i^T L_i J_i + lambda, by conjugate gradients on products with the
Jacobian, started from the fitted curvature. Leaving something out is a solve with its part of F_lam left out, so that
steps and residuals without it are exact for the linearized model, whatever the fitted leverages are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature import conjugate_gradients
from whence.tangents.batches import take
from whence.tangents.jacobian import Jacobian
from whence.tracing.fitted import Fitted

from .sample import Deletion, Points

HELD = 10
"""Vectors of the size of the weights that a solve holds for each right-hand side."""


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        tolerance: relative residual at which a solve stops; not below the precision of the weights.
        iterations: most steps of a solve.
        until: the time at which solves stop where they are, as `time.monotonic` tells it.
    """

    tolerance: float
    iterations: int
    until: float


@dataclass(frozen=True)
class Quadratics:
    """Exact variances along one mixture of outputs of each point, (m,) each."""

    values: dict[str, Tensor]
    reached: float
    steps: int


@dataclass(frozen=True)
class Steps:
    """Exact steps of the weights.

    Attributes:
        newton: (d,) to the optimum of the linearized model.
        deletions: (t, d) what the weights would change by without each deletion.
        left_out: for each deletion, the residuals (g, k) of its members without it.
        freedom: (h,) independent estimates of the degrees of freedom.
        reached: relative size of what the worst solve left.
        steps: of conjugate gradients.
    """

    newton: Tensor
    deletions: Tensor
    left_out: list[Tensor]
    freedom: Tensor
    reached: float
    steps: int


class Truth:
    """Solves with the exact curvature of a fit."""

    def __init__(self, fitted: Fitted, effort: Effort) -> None:
        """Remember what to solve."""
        self.fitted = fitted
        self.problem = fitted.problem
        self.jacobian: Jacobian = fitted.problem.jacobian()
        self.effort = effort
        self.tolerance = max(effort.tolerance, 4 * self.jacobian.precision)

    def variances(self, points: Points, mixtures: list[Tensor]) -> Quadratics:
        """Laplace, Ho and HeC3 along mixtures v of the outputs, (m, k) a piece: v^T J F_lam^-1 M F_lam^-1 J^T v.

        HeC3 has the weights that the fit gave to its examples, so that the curvature alone is compared.
        """
        parts: dict[str, list[Tensor]] = {"laplace": [], "ho": [], "hec3": []}
        reached, steps = 0.0, 0
        most = self.at_once()
        for inputs, mixed in zip(points.pieces, mixtures, strict=True):
            for low in range(0, len(mixed), most):
                chosen = mixed[low : low + most]
                some = take(inputs, slice(low, low + len(chosen)))
                rows = self.jacobian.vjp(some, torch.diag_embed(chosen.T).permute(1, 2, 0))  # (m, m, k) -> (m, d)
                solved, left, count = self.solve(rows, None)
                reached, steps = max(reached, left), steps + count
                parts["laplace"].append((rows * solved).sum(1))
                for name, value in self._meats(solved).items():
                    parts[name].append(value)
        return Quadratics({name: torch.cat(values) for name, values in parts.items()}, reached, steps)

    def steps(self, deletions: list[Deletion], signs: Tensor) -> Steps:
        """Newton's step, steps without each deletion, and the trace of the hat matrix along signs (h, n, q)."""
        problem, fitted = self.problem, self.fitted
        n, k = problem.n, problem.k
        newton = self.pull(problem.residuals.unsqueeze(0)) - fitted.bread.ridge * problem.weights()
        residuals = fitted.meats.roots["hec0"].sum(2)
        gone = torch.stack([one.mask(n, k) for one in deletions]) if deletions else residuals.new_zeros(0, n, k).bool()
        roots = problem.hessian_roots
        traced = signs if roots is None else torch.einsum("nkq,hnq->hnk", roots, signs)
        vectors = torch.cat([newton, self.pull(gone * residuals), self.pull(traced)])
        none = gone.new_zeros(1, n, k)
        masks = torch.cat([none, gone, none.expand(len(signs), -1, -1)])
        kept: list[Tensor] = []
        freedom: list[Tensor] = []
        reached, steps, first_trace = 0.0, 0, 1 + len(deletions)
        for low in range(0, len(vectors), self.at_once()):
            here = slice(low, low + self.at_once())
            solved, left, count = self.solve(vectors[here], masks[here])
            reached, steps = max(reached, left), steps + count
            inner = max(first_trace - low, 0)
            kept.append(solved[:inner])
            freedom.append((vectors[here] * solved)[inner:].sum(1))
        found = torch.cat(kept)
        left_out = self._left_out(deletions, found[1:], residuals)
        return Steps(found[0], -found[1:], left_out, torch.cat(freedom), reached, steps)

    def solve(self, vectors: Tensor, gone: Tensor | None) -> tuple[Tensor, float, int]:
        """F_lam^-1 v, without the parts of F_lam that are gone (q, n, k); and how far it came."""
        problem, ridge = self.problem, self.fitted.bread.ridge

        def multiply(some: Tensor, at: Tensor) -> Tensor:
            image = ridge * some
            for batch in problem.batches.read(None):
                curved = self.curved(batch.rows, self.jacobian.jvp(batch.inputs, some))
                if gone is not None:
                    curved = curved.masked_fill(gone[at][:, batch.rows], 0.0)
                image += self.jacobian.vjp(batch.inputs, curved)
            return image

        found = conjugate_gradients(
            multiply,
            vectors,
            tolerance=self.tolerance,
            iterations=self.effort.iterations,
            precondition=self.fitted.bread.precondition,
            going=_before(self.effort.until),
        )
        return found.solution, float(found.reached.max()), found.steps

    def pull(self, cotangents: Tensor) -> Tensor:
        """sum_i J_i^T u_i for cotangents (q, n, k), examples without any passed over: (q, d)."""
        problem = self.problem
        total = torch.zeros(len(cotangents), problem.selection.size, dtype=problem.dtype, device=problem.device)
        if not len(cotangents):
            return total
        for batch in problem.batches.read(None):
            here = cotangents[:, batch.rows]
            rows = here.flatten(2).any(2).any(0).nonzero().squeeze(1)
            if len(rows):
                some = take(batch.inputs, rows)  # type: ignore[arg-type]  # positions as slices
                total += self.jacobian.vjp(some, here[:, rows])
        return total

    def push(self, points: Points, direction: Tensor) -> Tensor:
        """|J v| on the points, (m,)."""
        return torch.cat([self.jacobian.jvp(inputs, direction.unsqueeze(0))[0].norm(dim=1) for _, inputs in points])

    def curved(self, where: slice, along: Tensor) -> Tensor:
        """L_i v_i for (q, n, k)."""
        roots = self.problem.hessian_roots
        if roots is None:
            return along
        some = roots[where]
        return torch.einsum("nkp,qnp->qnk", some, torch.einsum("nkp,qnk->qnp", some, along))

    def at_once(self) -> int:
        """How many right-hand sides memory allows at once."""
        row = HELD * self.problem.selection.size * self.problem.outputs.element_size()
        return max(1, int(0.3 * self.problem.budget.limit) // row)

    def _meats(self, solved: Tensor) -> dict[str, Tensor]:
        """sum_i |W_i^T J_i z|^2 for solutions z (q, d), of groups where the fit has some."""
        meats, q = self.fitted.meats, len(solved)
        totals = {name: solved.new_zeros(q) for name in ("ho", "hec3")}
        pooled: dict[str, Tensor] = {}
        for batch in self.problem.read("trust, meats"):
            along = self.jacobian.jvp(batch.inputs, solved)
            for name in totals:
                root, groups = meats.roots[name], meats.pooled(name)
                part = root.expand(self.problem.n, -1, -1)[batch.rows]
                weighted = torch.einsum("qnk,nkp->qnp", along, part)
                if groups is None:
                    totals[name] += weighted.square().sum((1, 2))
                    continue
                if name not in pooled:
                    pooled[name] = solved.new_zeros(q, groups.total, part.shape[2])
                pooled[name].index_add_(1, groups.index[batch.rows], weighted)
        for name, sums in pooled.items():
            totals[name] = sums.square().sum((1, 2))
        return totals

    def _left_out(self, deletions: list[Deletion], solved: Tensor, residuals: Tensor) -> list[Tensor]:
        """Residuals e + L J s of the members of each deletion, with s the solution without it."""
        found = [residuals[one.members].clone() for one in deletions]
        for batch in self.problem.batches.read(None):
            for number, one in enumerate(deletions):
                here = (one.members >= batch.start) & (one.members < batch.start + batch.size)
                if not bool(here.any()):
                    continue
                rows = one.members[here] - batch.start
                some = take(batch.inputs, rows)  # type: ignore[arg-type]  # positions as slices
                along = self.jacobian.jvp(some, solved[number : number + 1])[0].unsqueeze(2)  # (g, k, 1)
                roots = self.problem.hessian_roots
                if roots is not None:
                    part = roots[one.members[here]]
                    along = part @ (part.transpose(1, 2) @ along)
                found[number][here] += along.squeeze(2)
        return found


def _before(until: float) -> Callable[[], bool]:
    return lambda: time.monotonic() < until
