"""Noise apart from design, for every training example.

HeC3 is the variance of a prediction over new training sets, inputs and labels alike. By the law of total variance it is
the variance over new labels at the same inputs (noise) plus that of the mean prediction over new inputs (design), and
the second is there because the model is not the truth. With alignments a_i and leave-one-out residuals u_i = b_i +
noise_i, to first order,

    noise part = sum_i a_i Var(noise_i) a_i^T          design part = sum_i a_i b_i b_i^T a_i^T

This module estimates Var(noise_i) and b_i b_i^T from u_i and what its neighbours in tangent space predict for it; see
`kriging`. Two things are accounted for on the way. A fit ties the residuals of neighbours together: noise in one of
them pulls the other's prediction, so that Cov(u_i, u_j) = -(2 - r) P_i L_i H_ij S P_j^T / 2 + its transpose, even
where there is no b. And the u_i vary more than the noise, since the predictions they are left out of vary too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError
from whence.tangents.batches import take

from .alignments import alignments
from .fitted import Fitted
from .kriging import Neighbours, krige, nearest

ROUNDS = 3
"""How often noise and its share in the products of neighbours are found from each other."""


@dataclass(frozen=True)
class Sources:
    """Where each training example's leave-one-out residual comes from, on average.

    Attributes:
        noise: (n, k, k) estimates of the noise covariance, without sample weights. Each rests on one residual: they
            mean something in sums over many examples only, and may be negative.
        design: (n, k, k) estimates of b_i b_i^T, the same.
        anchors: how many examples served as neighbours.
        lengths: squared length over which b varies, for each output, in medians of the squared distances in tangent
            space; `nan` where plain means of neighbours were asked for.
        nuggets: noise variance over the variance of b; 1e9 where neighbours have nothing in common.

    Examples:
        >>> noise, design = torch.tensor([[[2.0]], [[-1.0]], [[2.0]]]), torch.zeros(3, 1, 1)
        >>> Sources(noise, design, anchors=3, lengths=(1.0,), nuggets=(1e9,)).noise.mean().item()
        1.0
    """

    noise: Tensor
    design: Tensor
    anchors: int
    lengths: tuple[float, ...]
    nuggets: tuple[float, ...]


def sources_of(fitted: Fitted, neighbours: int | None, anchors: int) -> Sources:
    """Estimate both sources; see `Tracer.split` for the arguments. The model must be borrowed."""
    problem = fitted.problem
    if problem.sketch is not None:
        raise InputError(
            "expected a fit that looks at all outputs to tell noise from design, got one of some mixtures, which "
            'differ from example to example. Fit with outputs="all".'
        )
    counts = torch.ones(problem.n, dtype=problem.dtype, device=problem.device)
    if problem.sample_weights is not None:
        counts = problem.sample_weights.to(problem.dtype)
    index = (counts > 0).nonzero().squeeze(1)
    if len(index) < 3:
        raise InputError(f"expected three training examples or more to tell noise from design, got {len(index)}.")
    if len(index) > anchors:
        index = index[torch.linspace(0, len(index) - 1, anchors, device=index.device).round().long()]
    problem.budget.require(
        (4.0 + 2.0 * problem.k) * len(index) * problem.n * problem.outputs.element_size(),
        f"the distances of {len(index)} training examples to all",
        "Pass a smaller number of anchors.",
    )
    rows = _Rows(fitted, index)
    distances, repeat = _distances(fitted, rows)
    values = fitted.loo_residuals
    if neighbours is None:
        found = krige(distances, index, values)
    else:
        found = nearest(distances, index, values, min(neighbours, len(index) - 1))
    return _apart(fitted, rows, found, counts, repeat)


class _Rows:
    """J_a F_lam^-1 J_i^T of some training examples (anchors) with all, kept where memory allows."""

    def __init__(self, fitted: Fitted, index: Tensor) -> None:
        self.fitted, self.index = fitted, index
        problem = fitted.problem
        self.size = problem.n * problem.k**2 * problem.outputs.element_size()  # bytes of one anchor
        self.kept: list[tuple[slice, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which anchors, rows (m, k, n, k)), as many as memory allows."""
        if self.kept is not None:
            yield from self.kept
            return
        limit = self.fitted.problem.budget.limit
        seen: list[tuple[slice, Tensor]] | None = [] if len(self.index) * self.size <= 0.2 * limit else None
        for part in self._read(max(1, int(0.05 * limit) // self.size)):
            if seen is not None:
                seen.append(part)
            yield part
        self.kept = seen

    def _read(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        done = 0
        for batch in self.fitted.problem.read("neighbours"):
            here = self.index[(self.index >= batch.start) & (self.index < batch.start + batch.size)] - batch.start
            for part in here.split(most):
                if not len(part):
                    continue
                some = take(batch.inputs, part)
                for _, chunks in alignments(self.fitted, some):
                    rows = torch.cat([aligned for _, aligned in chunks], dim=2)
                    yield slice(done, done + len(rows)), rows
                    done += len(rows)


def _distances(fitted: Fitted, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Squared distances |J_a - J_i|^2 in the metric of the inverse curvature (r, n), and r_i (n,).

    r_i = tr (H L H)_ii / tr H_ii is one without a ridge and less with one; an example that is no anchor has that of the
    nearest.
    """
    index, roots = rows.index, fitted.problem.hessian_roots
    traces = fitted.bread.hats.diagonal(dim1=1, dim2=2).sum(1)
    found = traces.new_empty(len(index), fitted.problem.n)
    twice = traces.new_empty(len(index))
    for where, part in rows:
        found[where] = torch.einsum("mknk->mn", part)
        curved = part if roots is None else torch.einsum("mkni,niq->mknq", part, roots)
        twice[where] = curved.square().sum((1, 2, 3))
    found = traces[index].unsqueeze(1) + traces - 2.0 * found
    found[torch.arange(len(index), device=index.device), index] = 0.0
    if fitted.weighing.policy != "exact":
        return found.clamp_min(0.0), torch.ones_like(traces)
    repeat = (twice / traces[index].clamp_min(torch.finfo(twice.dtype).tiny)).clamp(0.0, 1.0)
    return found.clamp_min(0.0), repeat[found.argmin(0)]


def _apart(fitted: Fitted, rows: _Rows, found: Neighbours, counts: Tensor, repeat: Tensor) -> Sources:
    """Split u_i u_i^T into noise and design with the neighbours' predictions."""
    values = fitted.loo_residuals
    predicted = torch.einsum("kna,ak->nk", found.weights, values[rows.index])
    whole = values.unsqueeze(2) * values.unsqueeze(1)
    plain = _symmetric(values.unsqueeze(2) * predicted.unsqueeze(1)) + _doubt(found, values)
    shrink = _shrink(fitted, repeat)
    design, noise = plain, _congruent(shrink, whole - plain)
    if bool(found.weights.any()):
        share = counts.reshape(-1, 1, 1)
        for _ in range(ROUNDS):
            tied = _tied(fitted, rows, found.weights, share * noise)
            design = plain + (1.0 - repeat / 2.0).reshape(-1, 1, 1) * tied
            noise = _congruent(shrink, whole - design)
    noise, design = (fitted.weighing.within(part) for part in (noise, design))
    return Sources(noise, design, len(rows.index), found.lengths, found.nuggets)


def _doubt(found: Neighbours, values: Tensor) -> Tensor:
    """(n, k, k) covariance of b given the neighbours; outputs as correlated as their residuals are."""
    sizes = values.norm(dim=0)
    unit = values / sizes.clamp_min(torch.finfo(values.dtype).tiny)
    root = found.doubt.sqrt()
    correlated: Tensor = unit.T @ unit
    return root.unsqueeze(2) * root.unsqueeze(1) * correlated


def _tied(fitted: Fitted, rows: _Rows, weights: Tensor, noise: Tensor) -> Tensor:
    """(n, k, k) sum_j P_i (L_i H_ij S_j + S_i H_ij L_j) P_j^T w_ij, made symmetric; S times the sample weights."""
    grow, hessians = _growth(fitted), _hessians(fitted)
    anchors = rows.index
    ours = torch.stack([noise[anchors], hessians[anchors]], 1) @ grow[anchors].transpose(1, 2).unsqueeze(1)
    sums = noise.new_zeros(2, *noise.shape)
    for where, part in rows:  # H_aj as (a, k of a, n, k of n)
        sums += torch.einsum("ina,alnj,asij->snli", weights[:, :, where], part.permute(0, 3, 2, 1), ours[where].mT)
    total = grow @ (hessians @ sums[0] + noise @ sums[1])
    return _symmetric(total)


def _growth(fitted: Fitted) -> Tensor:
    """(n, k, k) P_i with u_i = P_i e_i. The products of an approximate curvature are those of fits without: no P."""
    if fitted.weighing.policy != "exact":
        eye = torch.eye(fitted.problem.k, dtype=fitted.problem.dtype, device=fitted.problem.device)
        return eye.expand(fitted.problem.n, -1, -1)
    return _spectral(fitted, lambda h: 1.0 / (1.0 - h).clamp_min(torch.finfo(h.dtype).eps))


def _shrink(fitted: Fitted, repeat: Tensor) -> Tensor:
    """(n, k, k) T_i with noise = T_i E[u_i u_i^T] T_i^T where there is no b."""
    if fitted.weighing.policy != "exact":
        return _spectral(fitted, lambda q: (1.0 + q).rsqrt())

    def factor(h: Tensor) -> Tensor:
        left = (1.0 - h).clamp_min(torch.finfo(h.dtype).eps)
        return left / torch.maximum(1.0 - (2.0 - repeat.unsqueeze(1)) * h, left.square()).sqrt()

    return _spectral(fitted, factor)


def _spectral(fitted: Fitted, function: Callable[[Tensor], Tensor]) -> Tensor:
    """(n, k, k) function of L_i H_ii, or of its blocks where positions or outputs are left out singly."""
    hats, roots = fitted.weighing.within(fitted.bread.hats), fitted.problem.hessian_roots
    eye = torch.eye(hats.shape[1], dtype=hats.dtype, device=hats.device)
    inner = hats if roots is None else roots.transpose(1, 2) @ hats @ roots
    if fitted.weighing.by_output:
        return function(inner.diagonal(dim1=1, dim2=2).clamp_min(0.0)).diag_embed()
    values, vectors = torch.linalg.eigh(_symmetric(inner))
    values = values.clamp_min(1e-12)
    change = vectors * ((function(values) - 1.0) / values).unsqueeze(1) @ vectors.transpose(1, 2)
    found: Tensor = eye + (change if roots is None else roots @ change @ roots.transpose(1, 2)) @ hats
    return found


def _hessians(fitted: Fitted) -> Tensor:
    """(n, k, k) L_i without sample weights."""
    problem = fitted.problem
    roots = problem.hessian_roots
    if roots is None:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device).expand(problem.n, -1, -1)
    found = roots @ roots.transpose(1, 2)
    if problem.sample_weights is None:
        return found
    weights = problem.sample_weights.to(found.dtype)
    return torch.where(weights > 0, 1.0 / weights, 0.0).reshape(-1, 1, 1) * found


def _congruent(factors: Tensor, matrices: Tensor) -> Tensor:
    return factors @ matrices @ factors.transpose(1, 2)


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.transpose(1, 2)) / 2
