"""What a core leaves out: the part of HeC3 that lies outside its coordinates, estimated on a sample.

A core keeps the coordinates in which the curvature is large. Where a network is certain, its loss has hardly any
curvature, and gradients of labels that are wrong all the same may lie outside of the core: their variance is missing,
and no count of degrees of freedom tells. Outside, with the curvature B B^T of some training examples,

    a_i = J F_lam^-1 J_i^T + J_out (B B^T + lambda)^-1 J_i,out^T

so that HeC3 with and without the second term can be compared for a few predictions and the examples that matter most.
A few examples have curvature in fewer directions than all of them, so that this overstates what is missing where the
core leaves out much curvature; where there is none outside it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.kronecker.projected import Projected
from whence.curvature.primal import PrimalBread
from whence.tangents.batches import Inputs, take
from whence.tracing.fitted import Fitted
from whence.tracing.surroundings import evenly

SOURCES, POINTS = 24, 12
"""Training examples whose gradients are taken: half of the sources have the largest leave-one-out residuals, the others
stand for the rest of the training set, and predictions of the points are looked at."""

BYTES = 2**26
"""Memory for these gradients. Where they take more (networks of more than some ten thousand weights) this check is left
to `Tracer.trust`, so that a fit takes no more memory than was estimated."""

COPIES = 4
"""Of the gradients that are held at once."""

OUTPUTS = 32
"""With more outputs than that nothing is looked at: each source takes a backward pass for each."""


def share_inside(fitted: Fitted) -> float | None:
    """HeC3 of the core over HeC3 with what lies outside of it: the median over some training inputs.

    NaN where that would take too much memory. `None` where there is nothing outside, for other structures, for networks
    that answer at several positions, for mixtures of outputs, groups, and where processes share a fit.
    """
    bread, problem = fitted.bread, fitted.problem
    if not isinstance(bread, PrimalBread) or not isinstance(bread.features, Projected) or bread.ridge <= 0:
        return None
    features, d = bread.features, problem.selection.size
    plain = not problem.dense and problem.sketch is None and problem.k <= OUTPUTS
    alone = problem.passes.crew.alone and problem.passes.layers.alone and fitted.weighing.groups is None
    if not features.orthonormal or features.size >= d or not plain or not alone:
        return None
    room = min(BYTES, 0.1 * problem.budget.limit) / (8.0 * COPIES * d)
    if room < POINTS + SOURCES * (problem.k + 1):
        return math.nan
    found = _gradients(fitted)
    pulls, points, columns = (_parted(bread, features, part) for part in (found.pulls, found.points, found.columns))
    inside = points.white @ pulls.white.T
    beyond = points.outside @ pulls.outside.T
    overlap = columns.outside @ columns.outside.T
    overlap.diagonal().add_(bread.ridge)
    left, right = (part.outside @ columns.outside.T for part in (points, pulls))
    whole = inside + (beyond - left @ torch.linalg.solve(overlap, right.T)) / bread.ridge
    kept, all_ = ((one.square() * found.counts).sum(1) for one in (inside, whole))
    known = torch.isfinite(all_) & (all_ > 0)
    return float((kept[known] / all_[known]).median()) if bool(known.any()) else None


@dataclass(frozen=True)
class _Gradients:
    """Gradients among the selected weights.

    Attributes:
        pulls: (s, d) J_i^T u_i of the sources.
        counts: (s,) how many training examples each source stands for.
        points: (m, d) J_j^T v_j of the points, with random signs v_j.
        columns: (c, d) J_i^T R_i of the sources, times the root of what they stand for.
    """

    pulls: Tensor
    counts: Tensor
    points: Tensor
    columns: Tensor


@dataclass(frozen=True)
class _Parted:
    """Whitened coordinates in the core, (q, r), and what lies outside of it, (q, d)."""

    white: Tensor
    outside: Tensor


def _parted(bread: PrimalBread, features: Projected, vectors: Tensor) -> _Parted:
    within = features.into(vectors)
    outside = vectors - features.lift(within).to(vectors.dtype)
    outside = outside - features.lift(features.into(outside)).to(vectors.dtype)
    return _Parted(bread.whiten(within).double(), outside)


def _gradients(fitted: Fitted) -> _Gradients:
    problem, left_out = fitted.problem, fitted.left_out.hec3
    n, k, device = problem.n, problem.k, problem.device
    sizes = left_out.square().sum(1)
    first = sizes.topk(min(SOURCES // 2, n)).indices
    rest = torch.ones(n, dtype=torch.bool, device=device).index_fill(0, first, False).nonzero().squeeze(1)
    others = evenly(rest, SOURCES // 2)
    points = evenly(torch.arange(n, device=device), POINTS)
    counts = {int(at): 1.0 for at in first} | {int(at): len(rest) / max(len(others), 1) for at in others}
    wanted = {int(at) for at in points}
    generator = torch.Generator().manual_seed(0)
    signs = {at: torch.randint(0, 2, (k,), generator=generator) * 2.0 - 1.0 for at in sorted(wanted)}
    pulls, weights, looks, columns = [], [], [], []
    for at, inputs in _inputs(fitted, sorted(counts.keys() | wanted)):
        rows = [left_out[at]] if at in counts else []
        rows += [signs[at].to(left_out)] if at in wanted else []
        if at in counts:
            root = torch.eye(k, dtype=left_out.dtype, device=device)
            if problem.hessian_roots is not None:
                root = problem.hessian_roots[at].T
            rows += list(root * counts[at] ** 0.5)
        found = problem.jacobian().vjp(inputs, torch.stack(rows).unsqueeze(1)).double()
        if at in counts:
            pulls.append(found[0])
            weights.append(counts[at])
            columns.append(found[1 + (at in wanted) :])
        if at in wanted:
            looks.append(found[int(at in counts)])
    each = torch.tensor(weights, dtype=torch.float64, device=device)
    return _Gradients(torch.stack(pulls), each, torch.stack(looks), torch.cat(columns))


def _inputs(fitted: Fitted, index: list[int]) -> list[tuple[int, Inputs]]:
    """Training inputs by their numbers, one by one."""
    found = []
    for batch in fitted.problem.batches.read(None):
        here = [at for at in index if batch.start <= at < batch.start + batch.size]
        found += [(at, take(batch.inputs, slice(at - batch.start, at - batch.start + 1))) for at in here]
    return found
