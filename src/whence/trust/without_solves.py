"""What a fit shows of itself: checks that solve nothing, so that every fit makes them.

One of them asks whether a fit sees the gradients that HeC3 consists of, on a sample of training examples. Where a
network is certain of a wrong label there is almost no curvature. A core, which follows the curvature, then misses the
gradient of that label, and an eigenbasis is not made for it: its directions there are rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.accumulate import working_precision
from whence.curvature.base import times_hessian
from whence.curvature.core import LARGEST_SAMPLE, SAMPLES, affordable_sample
from whence.curvature.leaves import LeafFeatures
from whence.curvature.primal import FittedPrimal, Projected
from whence.curvature.spectral import FittedSpectral
from whence.data.batches import Inputs, take
from whence.influence.fitted import Fitted, evenly_spaced, training_examples
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.leaves import LeafSum
from whence.runtime.memory import is_full
from whence.trust import checks
from whence.trust.checks import Check, Trust, judged, level_of, not_checked

# Estimated shares of HeC3 within a core. A sample is rough: it gave .90 to 1.00 if the true share was .97 or more,
# .72 for .94, .36 for .55, and .40, .13 and .08 for .08, .05 and .04, where the network was certain of wrong labels.
INSIDE = (0.7, 0.35)
# HeC3 in a Kronecker eigenbasis over that of a sample of gradients. On networks that were not certain of wrong labels
# it was .42 to 1.02, with HeC3 .57 to 6.6 times the exact one; on others .006 to .26, with HeC3 .01 to .27 times.
DIAGONAL = (0.4, 0.15)
MOST_OUTPUTS = 32  # gradients are not checked with more outputs: each source takes a backward pass for each


def trust_of_fit(fitted: Fitted) -> Trust:
    """What a fit shows of itself: the structure's own step, degrees of freedom, leverages, and gradients it misses.

    Standard errors are the typical one of training predictions: noise times the root of degrees of freedom per number.
    """
    problem, recentered = fitted.problem, fitted.loo.recenter
    change = problem.isometric(times_hessian(fitted.step.change, problem.hessian_roots))
    noise = float(problem.isometric(fitted.meats.roots["hec0"]).square().sum())
    error = noise * min(fitted.bread.degrees_of_freedom / max(problem.numbers, 1), 1.0)
    in_errors = (float(change.square().sum()) / error) ** 0.5 if error > 0 and not recentered else 0.0
    factor = 1.0 if recentered else checks.factor_after_step(fitted, fitted.step.change)
    trees = isinstance(problem.network.model, LeafSum)
    stationarity = checks.stationarity(fitted.step.relative, in_errors, factor, recentered, far=True, trees=trees)
    return Trust((stationarity, *checks_without_solves(fitted)))


def checks_without_solves(fitted: Fitted, freedom: Tensor | None = None) -> tuple[Check, ...]:
    """The checks of every fit; `freedom` are estimates of the degrees of freedom, if solves gave any."""
    own = checks.degrees_of_freedom(fitted, freedom), checks.leverage(fitted)
    return *own, *checks.hessian_columns(fitted), *missed_gradients(fitted)


def missed_gradients(fitted: Fitted) -> Iterator[Check]:
    """Whether a core, or an eigenbasis, contains the gradients that HeC3 consists of: at most one check.

    None for sketched fits, groups, data of other processes, a core of a network with outputs at several positions, and
    an eigenbasis for squared error, where gradients have as much curvature as length.
    """
    problem, core = fitted.problem, isinstance(fitted.bread, FittedPrimal)
    if problem.k > MOST_OUTPUTS or problem.sketch is not None or fitted.loo.groups is not None:
        return
    if not problem.passes.process_group.alone:
        return
    name, bounds, where = "outside the core", INSIDE, "outside the core"
    if not core:
        name, bounds, where = "diagonal meat", DIAGONAL, "where the eigenbasis consists of rounding errors"
    problem.passes.trim_memory()
    try:
        share = share_inside_core(fitted) if core else share_in_eigenbasis(fitted)
    except RuntimeError as error:
        if not is_full(error):
            raise
        share = math.nan
    if share is None:
        return
    if math.isnan(share):
        yield not_checked(
            name,
            "Gradients of the most doubtful examples were not checked: that needs more memory than allowed. "
            "Tracer.trust(x) compares HeC3 with exact solves.",
        )
        return
    yield judged(
        name,
        level_of(share, bounds),
        {"share": share},
        "HeC3 has the size that gradients of the most doubtful examples give it, as far as a sample shows.",
        f"Gradients of examples with large residuals lie {where}, because there is almost no curvature where the "
        "network is certain of a wrong label. HeC3 is too small, by a factor of about `share`. Use "
        f'structure="exact" or "sketch"{", or a core with a larger `size`" * core}.',
    )


def share_inside_core(fitted: Fitted, size: tuple[int, int, int] | None = None) -> float | None:
    """HeC3 of the core over HeC3 including what lies outside of it: the median over some training inputs.

    NaN if that needs more memory than allowed, `None` if there is no core or nothing outside of it. `size` is the
    number of sources, of points, and of columns of each source's Hessian root.
    """
    core, problem, d = fitted.bread, fitted.problem, fitted.problem.selection.size
    if not isinstance(core, FittedPrimal) or not isinstance(core.features, Projected | LeafFeatures):
        return None
    features = core.features
    if problem.dense or core.ridge <= 0 or not features.orthonormal or features.size >= d:
        return None
    size = size or affordable_sample(d, problem.k, problem.budget.limit)
    if size is None:
        return math.nan
    sample, columns = Sample.draw(fitted, *size[:2]), min(size[2], problem.k)
    residuals, precision = fitted.adjusted.hec3, working_precision(problem)

    def split(cotangents: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Gradients of examples, for some cotangents (q, k) each: whitened coordinates in the core, and the rest."""
        outside = torch.empty(sum(len(some) for _, some in cotangents), d, device=problem.device)
        inside: list[Tensor] = []
        for at, some in cotangents:
            left = sample.gradients(at, some).to(precision)
            coordinates = features.into(left)
            left -= features.lift(coordinates.to(precision))
            left -= features.lift(features.into(left).to(precision))  # the part of the basis that rounding left
            start = sum(map(len, inside))
            outside[start : start + len(left)] = left
            inside.append(core.whiten(coordinates).double())
        return torch.cat(inside), outside

    def root(at: int) -> Tensor:
        """The largest columns (q, k) of the root of an example's Hessian, if not all."""
        vectors, values, _ = torch.linalg.svd(problem.hessian_roots[at], full_matrices=False)
        largest: Tensor = (vectors * values)[:, :columns].T
        return largest

    points_in, points_out = split([*sample.signs.items()])
    pulls_in, pulls_out = split([(at, residuals[at].unsqueeze(0)) for at in sample.counts])
    columns_out = split([(at, count**0.5 * root(at)) for at, count in sample.counts.items()])[1]
    inside = points_in @ pulls_in.T
    gram = _products(columns_out, columns_out)
    gram.diagonal().add_(core.ridge)
    left, right = _products(points_out, columns_out), _products(pulls_out, columns_out)
    # Outside the core the curvature is lambda + the sources' own columns, by the Woodbury identity.
    whole = inside + (_products(points_out, pulls_out) - left @ torch.linalg.solve(gram, right.T)) / core.ridge
    counts = torch.tensor([*sample.counts.values()], device="cpu").to(whole)
    return _median_ratio(*((one.square() * counts).sum(1) for one in (inside, whole)))


def share_in_eigenbasis(fitted: Fitted) -> float | None:
    """HeC3 of EKFAC or KFAC over HeC3 of a sample of gradients in the same curvature: the median over some inputs.

    NaN if that needs too much memory, `None` for a diagonal, and for squared error.
    """
    bread, problem = fitted.bread, fitted.problem
    if not isinstance(bread, FittedSpectral) or not any(one.basis.tensors for one in bread.blocks):
        return None
    if problem.identity_hessians:
        return None
    (sources, points, _), d = SAMPLES[0], problem.selection.size
    if d * (4.0 * points + 8.0 * 4) > min(LARGEST_SAMPLE, 0.1 * problem.budget.limit):
        return math.nan
    sample = Sample.draw(fitted, sources, points)
    solved, variances = torch.empty(len(sample.signs), d, device=problem.device), []
    for place, (at, signs) in enumerate(sample.signs.items()):
        solved[place] = bread.precondition(sample.gradients(at, signs).double())[0]
        variances.append((signs @ fitted.sandwich.predict(sample.inputs[at]).covariances["hec3"][0] @ signs.T)[0, 0])
    hec3 = torch.zeros(len(solved), dtype=torch.float64, device=problem.device)
    for at, count in sample.counts.items():
        hec3 += count * _products(solved, sample.gradients(at, fitted.meats.roots["hec3"][at].T)).square().sum(1)
    return _median_ratio(torch.stack(variances).double(), hec3)


def _median_ratio(some: Tensor, whole: Tensor) -> float | None:
    known = torch.isfinite(whole) & (whole > 0)
    return float((some[known] / whole[known]).median()) if bool(known.any()) else None


def _products(one: Tensor, two: Tensor, chunk: int = 2**12) -> Tensor:
    """Inner products (p, q) of rows (p, d) and (q, d), in float64, a chunk of columns at a time."""
    total = torch.zeros(len(one), len(two), dtype=torch.float64, device=one.device)
    for left, right in zip(one.split(chunk, dim=1), two.split(chunk, dim=1), strict=True):
        total += left.double() @ right.double().T
    return total


@dataclass(frozen=True)
class Sample:
    """A sample of training examples: sources of variance, and points where it is predicted."""

    jacobian: Jacobian
    inputs: Mapping[int, Inputs]  # each example as a batch of one
    counts: Mapping[int, float]  # for each source, how many training examples it represents
    signs: Mapping[int, Tensor]  # for each point, random signs (1, k) of its outputs

    @classmethod
    def draw(cls, fitted: Fitted, sources: int, points: int) -> Sample:
        """Half of the sources have the largest leave-one-out residuals; the others, and the points, evenly spaced."""
        problem = fitted.problem
        n, k, device = problem.n, problem.k, problem.device
        first = problem.isometric(fitted.adjusted.hec3).square().sum(1).topk(min(sources // 2, n)).indices
        rest = torch.ones(n, dtype=torch.bool, device=device).index_fill(0, first, False).nonzero().squeeze(1)
        others = evenly_spaced(rest, sources // 2)
        counts = {int(at): 1.0 for at in first} | {int(at): len(rest) / max(len(others), 1) for at in others}
        generator = torch.Generator("cpu").manual_seed(0)
        spaced = evenly_spaced(torch.arange(n, device=device), points).tolist()
        signs = {at: torch.randint(0, 2, (1, k), generator=generator, device="cpu") * 2.0 - 1.0 for at in spaced}
        for one in signs.values():
            one[0, 0] = -one[0, -1] if k > 1 else 1.0  # equal signs carry no information: logits have no level
        index = torch.tensor(sorted(counts.keys() | signs.keys()), device=device)
        inputs = {
            at: take(some, slice(place, place + 1))
            for which, some, _ in training_examples(fitted, index)
            for place, at in enumerate(which.tolist())
        }
        return cls(problem.jacobian(), inputs, counts, {at: one.to(problem.residuals) for at, one in signs.items()})

    def gradients(self, at: int, cotangents: Tensor) -> Tensor:
        """Gradients (q, d) of an example's outputs along cotangents (q, k)."""
        return self.jacobian.vjp(self.inputs[at], cotangents.unsqueeze(1))
