"""How far to trust a fit: compare a sample of predictions with exact solves.

The exact curvature F_lam = sum_i J_i^T L_i J_i + lambda is never formed. Conjugate gradients on products with the
Jacobian solve it. They give the variances of a sample of predictions, the Newton step, the steps without the most
influential examples, and degrees of freedom. The network's outputs after such a step give the linearization error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.curvature import conjugate_gradients
from whence.curvature.aligned import curvature_times
from whence.curvature.base import times_hessian
from whence.data.batches import Inputs, batch_size, take
from whence.errors import InputError
from whence.influence.fitted import Fitted, alignments, inputs_of, join_batches, training_examples, using_model
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.linalg import largest
from whence.runtime.model_state import rounded_products
from whence.trust import checks
from whence.trust.checks import FINE, Check, Trust, fold_change, if_solved, level_of, worst

ITERATIONS = 1000  # most iterations of an exact solve
PARTS = ("the sample", "exact steps", "exact variances")  # shown in the progress line


def assess(fitted: Fitted, x: Any, sample: int, seed: int, tolerance: float, seconds: float) -> Trust:
    """Check a sample of predictions; see `Tracer.trust`."""
    start = time.monotonic()
    # Not the seed itself: data drawn with the same seed would select itself, smallest numbers first.
    generator = torch.Generator("cpu").manual_seed((seed * 2_654_435_761 + 104_729) % 2**63)
    problem = fitted.problem
    part = iter(problem.progress.track(PARTS, "trust, part", len(PARTS)))  # each `next` starts a part
    with using_model(fitted):
        next(part)
        drawn = draw_sample(fitted, x, sample, generator)
        shapes = [(batch_size(inputs, "the sample"), problem.output_count(inputs)) for inputs in drawn]
        directions = [random_signs(shape, problem.outputs, generator) for shape in shapes]
        ours = _structure_variances(fitted, drawn, directions)
        deletions = most_influential(fitted, drawn, min(max(1, sample // 4), 8))
        next(part)
        with rounded_products(False):
            columns = problem.k if problem.hessian_roots is None else problem.hessian_roots.shape[2]
            signs = random_signs((max(2, sample // 8), problem.n, columns), problem.outputs, generator)
            first = ExactSolver(fitted, tolerance, ITERATIONS, start + 0.5 * seconds)
            steps = first.steps(deletions, signs)
            next(part)
            second = ExactSolver(fitted, tolerance, ITERATIONS, start + seconds)
            exact = second.variances(drawn, directions)
            factor = float(_ratio(ours["hec3"], exact["hec3"]).median())  # scales standard errors to the exact ones
            errors = (ours["trace"] / factor if factor > 0 else ours["trace"]).clamp_min(0.0).sqrt()
            solved = first.residual <= checks.UNCONVERGED
            found = (
                _check_variances(ours, exact, second.residual),
                _check_loo_residuals(fitted, deletions, steps, first.residual),
                *_check_steps(first, drawn, deletions, steps, errors),
                checks.degrees_of_freedom(fitted, steps.degrees_of_freedom if solved else None),
                checks.leverage(fitted),
                *checks.trust_of_columns(fitted),
                *checks.trust_of_gradients(fitted),
            )
    return Trust(found, len(errors), time.monotonic() - start)


def _structure_variances(fitted: Fitted, sample: list[Inputs], directions: list[Tensor]) -> dict[str, Tensor]:
    """(m,) Ho and HeC3 by the fit, along one direction of the outputs of each prediction, and the trace of HeC3."""
    found = []
    for inputs, some in zip(sample, directions, strict=True):
        covariances = fitted.sandwich.predict(inputs).covariances
        along = {name: torch.einsum("mk,mkl,ml->m", some, covariances[name], some) for name in ("ho", "hec3")}
        found.append(along | {"trace": torch.diagonal(covariances["hec3"], dim1=1, dim2=2).sum(1)})
    return join_batches(found)


def _check_variances(ours: dict[str, Tensor], exact: dict[str, Tensor], residual: float) -> Check:
    """How far variances are from those of the exact curvature, in size and in order.

    Ranks count only if single predictions deviate from the typical factor.
    """
    pairs = {name: (ours[name], exact[name]) for name in ("ho", "hec3")}
    pairs["ratio"] = _ratio(ours["hec3"], ours["ho"]), _ratio(exact["hec3"], exact["ho"])
    factors = {name: _ratio(*pair) for name, pair in pairs.items()}
    typical = {name: float(one.median()) for name, one in factors.items()}
    ranks = {name: rank_correlation(*pair) for name, pair in pairs.items()}
    largest = {name: max(fold_change(float(one)) for one in factors[name]) for name in ("ho", "hec3")}
    scattered = [
        ranks[name]
        for name, middle in typical.items()
        if middle <= 0 or max(fold_change(float(one) / middle) for one in factors[name]) > checks.FOLD[0]
    ]
    size = worst(level_of(fold_change(typical[name]), checks.FOLD) for name in largest)
    order = worst([FINE, *(level_of(rank, checks.RANK) for rank in scattered if not math.isnan(rank))])
    words = "Variances have the size and order that the exact curvature gives."
    if order != FINE:
        words = "Not even the order of predictions is that of the exact curvature."
    elif size != FINE:
        words = "Variances are off by a factor, but predictions keep their order: rank by them, do not scale by them."
    if (level := worst([size, order])) != FINE:
        words += ' Use structure="core" (or "exact" where it fits in memory) to read variances as variances.'
    numbers = {name: typical[name] for name in largest} | {f"{name} rank": rank for name, rank in ranks.items()}
    numbers |= {"worst": max(largest.values()), "solved": residual}
    return if_solved(Check("distance", level, numbers, words), residual)


def _check_loo_residuals(fitted: Fitted, deletions: list[Deletion], steps: ExactSteps, residual: float) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    if not deletions:
        words = "There are no residuals, so that leaving an example out changes nothing."
        return checks.not_checked("leave-one-out", words)

    def size(one: Deletion, residuals: Tensor) -> float:
        return float(fitted.problem.isometric(residuals, one.members)[:, one.outputs].square().sum())

    ours = [size(one, fitted.adjusted.hec3[one.members]) for one in deletions]
    exact = [size(one, residuals) for one, residuals in zip(deletions, steps.loo_residuals, strict=True)]
    factor = sum(ours) / sum(exact) if sum(exact) > 0 else 1.0
    largest = max(fold_change(a / b) if b > 0 else math.inf for a, b in zip(ours, exact, strict=True))
    check = checks.judged(
        "leave-one-out",
        worst([level_of(fold_change(factor), checks.FOLD), FINE if largest <= checks.FOLD[0] else checks.CAREFUL]),
        {"factor": factor, "worst": largest, "examples": float(len(deletions))},
        "Leave-one-out residuals of the most influential examples, squared, are those of the exact curvature.",
        "Leave-one-out residuals of the most influential examples, squared, are off by a factor, and HeC3 with "
        'them: this structure\'s leverages are not true. Use structure="core" or "exact".',
    )
    return if_solved(check, residual)


def _check_steps(
    solver: ExactSolver, sample: list[Inputs], deletions: list[Deletion], steps: ExactSteps, errors: Tensor
) -> tuple[Check, Check]:
    """Stationarity and linearization: effect of exact steps on predictions, linearized and by the network itself."""
    fitted, problem, recentered = solver.fitted, solver.problem, solver.fitted.loo.recenter
    direction = fitted.step.direction if recentered else None
    remaining = steps.newton if direction is None else steps.newton - direction
    size = float(remaining.norm() / problem.weights().norm().clamp_min(torch.finfo(remaining.dtype).tiny))
    change = _root_mean_square(solver.output_change(sample, remaining).norm(dim=1), errors)
    newton_step = steps.newton if direction is None else direction
    along_newton, _, hidden = linearization_error(solver, sample, None, newton_step.unsqueeze(0))
    newton = _root_mean_square(along_newton[0], errors)
    training = (batch.inputs for batch in problem.read("trust, step"))
    factor = checks.factor_after_step(fitted, solver.output_change(training, steps.newton))
    far, trees = newton > checks.NEWTON_CHANGE[1], isinstance(problem.network.model, LeafSum)
    stationarity = checks.stationarity(size, change, factor, recentered, far, trees)
    if recentered or not trees:  # for trees nothing is concluded from the solves
        stationarity = if_solved(stationarity, solver.residual)
    loo, own = 0.0, 0.0
    if deletions:
        _, loo, hidden = linearization_error(solver, sample, direction, steps.deletions)
        own = own_linearization_error(solver, deletions, direction, steps.deletions)
    return stationarity, if_solved(checks.linearization(loo, own, newton, recentered, hidden), solver.residual)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation, ties in the order given; NaN for fewer than three values.

    Examples:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.1, 0.3, 0.2]))
        0.5
    """
    if len(one) < 3:
        return math.nan
    ranks = torch.stack([values.double().argsort(stable=True).argsort().double() for values in (one, other)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _root_mean_square(values: Tensor, errors: Tensor) -> float:
    """Root mean square of values over standard errors."""
    return float(_ratio(values, errors, otherwise=0.0).square().mean().sqrt())


def _ratio(one: Tensor, other: Tensor, otherwise: float = 1.0) -> Tensor:
    """The ratio; `otherwise` where both are zero."""
    zero = (one == 0) & (other == 0)
    return torch.where(zero, otherwise, one / torch.where(zero, 1.0, other))


VECTORS_PER_SOLVE = 10  # vectors of the size of the weights that a solve keeps per right-hand side
ROUNDING = 16  # units in the last place by which outputs may differ from their linearization


def draw_sample(fitted: Fitted, x: Any, most: int, generator: torch.Generator) -> list[Inputs]:
    """Draw up to `most` inputs at random, from x or else from the training set. Never holds more than that."""
    kept: list[tuple[Tensor, Inputs]] = []  # a random number for each input; the smallest numbers are kept
    weights = fitted.problem.sample_weights if x is None else None
    training = ((one.inputs, one.rows) for one in fitted.problem.read("trust, sample"))
    batches: Iterable[tuple[Inputs, Any]] = training if x is None else inputs_of(fitted, x)
    for inputs, rows in batches:
        numbers = torch.rand(batch_size(inputs, "this batch"), generator=generator, dtype=torch.float64, device="cpu")
        if weights is not None:  # examples of weight zero do not count
            numbers[(weights[rows] <= 0).cpu()] = torch.inf
        order = numbers.argsort()[: int(torch.isfinite(numbers).sum())]
        kept.append((numbers[order], take(inputs, order)))
        smallest = torch.cat([numbers for numbers, _ in kept]).sort().values[:most]
        sized = [(int(torch.isin(numbers, smallest).sum()), numbers, inputs) for numbers, inputs in kept]
        kept = [(numbers[:size], take(inputs, slice(0, size))) for size, numbers, inputs in sized if size]
    if not kept:
        raise InputError("expected at least one input to check, got none.")
    return [inputs for _, inputs in kept]


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, drawn on the CPU so that they are the same on every device."""
    return (torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1).to(like)


@dataclass(frozen=True)
class Deletion:
    """A unit that is left out at once: an example, some of its outputs, or a group."""

    members: Tensor  # (g,) positions of the examples
    # the outputs that are left out: all, unless single outputs or positions are left out
    outputs: slice = field(default_factory=lambda: slice(None))


def most_influential(fitted: Fitted, sample: list[Inputs], most: int) -> list[Deletion]:
    """The units that would change the predictions most if left out, according to this fit."""
    influence = _squared_influence(fitted, sample)  # (n or groups, q)
    flat = influence.flatten()
    count = min(most, int((flat > 0).sum()))
    top = largest(flat, count)[1] if count else flat.new_zeros(0, dtype=torch.long)
    groups, width = fitted.loo.groups, fitted.loo.width or fitted.problem.k
    found = []
    for at in top.tolist():
        unit, column = divmod(at, influence.shape[1])
        members = top.new_tensor([unit]) if groups is None else (groups.index == unit).nonzero().squeeze(1)
        found.append(Deletion(members, slice(column * width, (column + 1) * width)))
    return found


def _squared_influence(fitted: Fitted, sample: list[Inputs]) -> Tensor:
    """(n or groups, q) sums over the sample of |a_i W_i|^2 for each column of the weights of HeC3."""
    problem, roots, groups = fitted.problem, fitted.meats.roots["hec3"], fitted.meats.pooled("hec3")
    units = problem.n if groups is None else groups.total
    total = torch.zeros(units, roots.shape[2], dtype=problem.dtype, device=problem.device)
    for inputs in sample:
        for _, chunks in alignments(fitted, inputs):
            pooled: Tensor | None = None
            for rows, aligned in chunks:  # (m, k, n, k)
                weighted = torch.einsum("mkni,niq->mknq", aligned, roots[rows]).flatten(0, 1)
                if groups is None:
                    total[rows] += weighted.square().sum(0)
                    continue
                pooled = weighted.new_zeros(len(weighted), units, roots.shape[2]) if pooled is None else pooled
                pooled.index_add_(1, groups.index[rows], weighted)
            if pooled is not None:
                total += pooled.square().sum(0)
    return total


@dataclass(frozen=True)
class ExactSteps:
    """Exact steps of the weights."""

    newton: Tensor  # (d,) to the optimum of the linearized model
    deletions: Tensor  # (t, d) change of the weights without each deletion
    loo_residuals: list[Tensor]  # for each deletion, the residuals (g, k) of its members without it
    degrees_of_freedom: Tensor  # (h,) independent estimates


class ExactSolver:
    """Solves with the exact curvature of a fit, preconditioned by the fitted curvature.

    A solve stops at a relative residual (not below the precision of the weights), after a number of iterations, or at
    the deadline, a time of `time.monotonic`.
    """

    def __init__(self, fitted: Fitted, tolerance: float, most_iterations: int, deadline: float) -> None:
        self.fitted, self.problem = fitted, fitted.problem
        self.jacobian = fitted.problem.jacobian()
        self.tolerance = max(tolerance, 4 * self.jacobian.precision)
        self.most_iterations, self.deadline = most_iterations, deadline
        self.residual, self.iterations = 0.0, 0  # the largest relative residual, and all iterations, so far

    def variances(self, sample: list[Inputs], directions: list[Tensor]) -> dict[str, Tensor]:
        """(m,) Laplace, Ho and HeC3 along directions v of the outputs, (m, k) per batch: v^T J F^-1 M F^-1 J^T v.

        HeC3 uses the weights that the fit gave to its examples, so that only the curvature is compared.
        """
        found, most = [], self.chunk_size()
        for inputs, every in zip(sample, directions, strict=True):
            for low in range(0, len(every), most):
                some = every[low : low + most]
                # One right-hand side for each input: (m, m, k) -> (m, d).
                cotangents = torch.diag_embed(some.T).permute(1, 2, 0)
                right = self.jacobian.vjp(take(inputs, slice(low, low + len(some))), cotangents)
                solved = self.solve(right)
                found.append({"laplace": (right * solved).sum(1), **self._meat_forms(solved)})
        return join_batches(found)

    def steps(self, deletions: list[Deletion], signs: Tensor) -> ExactSteps:
        """The Newton step, the steps without each deletion, and the trace of the hat matrix along signs (h, n, q)."""
        problem, fitted = self.problem, self.fitted
        n, k = problem.n, problem.k
        newton = self._transposed(problem.residuals.unsqueeze(0)) - fitted.bread.ridge * problem.weights()
        residuals = fitted.weighted_residuals
        first_trace = 1 + len(deletions)
        masks = torch.zeros(first_trace + len(signs), n, k, dtype=torch.bool, device=residuals.device)
        for mask, one in zip(masks[1:first_trace], deletions, strict=True):
            mask[one.members, one.outputs] = True
        roots = problem.hessian_roots
        traced = signs if roots is None else torch.einsum("nkq,hnq->hnk", roots, signs)
        right = torch.cat([newton, self._transposed(masks[1:first_trace] * residuals), self._transposed(traced)])
        chunks = zip(right.split(self.chunk_size()), masks.split(self.chunk_size()), strict=True)
        solved = torch.cat([self.solve(*chunk) for chunk in chunks])
        traces = (right[first_trace:] * solved[first_trace:]).sum(1)
        without = solved[1:first_trace]
        return ExactSteps(solved[0], -without, self._loo_residuals(deletions, without, residuals), traces)

    def solve(self, right: Tensor, gone: Tensor | None = None) -> Tensor:
        """F_lam^-1 v for right-hand sides (q, d), without the terms of F_lam marked in `gone` (q, n, k)."""

        def multiply(vectors: Tensor, at: Tensor) -> Tensor:
            left_out = None if gone is None else gone[at]
            return curvature_times(vectors, self.problem, self.jacobian, self.fitted.bread.ridge, left_out)

        found = conjugate_gradients(
            multiply,
            right,
            tolerance=self.tolerance,
            iterations=self.most_iterations,
            precondition=self.fitted.bread.precondition,
            going=lambda: time.monotonic() < self.deadline,
        )
        self.residual = max(self.residual, float(found.reached.max()))
        self.iterations += found.steps
        return found.solution

    def output_change(self, batches: Iterable[Inputs], step: Tensor) -> Tensor:
        """J v (m, k) for batches of inputs."""
        return torch.cat([self.jacobian.jvp(inputs, step.unsqueeze(0))[0] for inputs in batches])

    def chunk_size(self) -> int:
        """How many right-hand sides fit in memory at once."""
        row = VECTORS_PER_SOLVE * self.problem.selection.size * self.problem.outputs.element_size()
        return max(1, int(0.3 * self.problem.budget.limit) // row)

    def _transposed(self, cotangents: Tensor) -> Tensor:
        """sum_i J_i^T u_i (q, d) for cotangents (q, n, k), without passes over examples whose cotangents are zero."""
        problem = self.problem
        total = torch.zeros(len(cotangents), problem.selection.size, dtype=problem.dtype, device=problem.device)
        some = cotangents.flatten(2).any(2).any(0).nonzero().squeeze(1)
        for which, inputs, _ in training_examples(self.fitted, some) if len(some) else ():
            total += self.jacobian.vjp(inputs, cotangents[:, which])
        return total

    def _meat_forms(self, solved: Tensor) -> dict[str, Tensor]:
        """sum_i |W_i^T J_i z|^2 for solutions z (q, d), summed within groups if the fit has some."""
        meats, q = self.fitted.meats, len(solved)
        totals = {name: solved.new_zeros(q) for name in ("ho", "hec3")}
        pooled: dict[str, Tensor] = {}
        for batch in self.problem.read("trust, meats"):
            outputs = self.jacobian.jvp(batch.inputs, solved)
            for name in totals:
                roots = meats.roots[name].expand(self.problem.n, -1, -1)[batch.rows]
                weighted = torch.einsum("qnk,nkp->qnp", outputs, roots)
                groups = meats.pooled(name)
                if groups is None:
                    totals[name] += weighted.square().sum((1, 2))
                    continue
                if name not in pooled:
                    pooled[name] = solved.new_zeros(q, groups.total, roots.shape[2])
                pooled[name].index_add_(1, groups.index[batch.rows], weighted)
        return totals | {name: sums.square().sum((1, 2)) for name, sums in pooled.items()}

    def _loo_residuals(self, deletions: list[Deletion], solved: Tensor, residuals: Tensor) -> list[Tensor]:
        """Residuals e + L J s of the members of each deletion, where s is the solution without it."""
        found = []
        for one, step in zip(deletions, solved, strict=True):
            without = residuals.clone()
            for which, inputs, _ in training_examples(self.fitted, one.members):
                change = self.jacobian.jvp(inputs, step.unsqueeze(0))
                without[which] += times_hessian(change, self.problem.hessian_roots, which)[0]
            found.append(without[one.members])
        return found


def linearization_error(
    solver: ExactSolver, sample: list[Inputs], start: Tensor | None, steps: Tensor
) -> tuple[Tensor, float, float]:
    """Take steps (q, d) from the weights, or from the end of the step `start`, and compare outputs on a sample.

    Returns norms (q, m) of the difference between the network's outputs and the linear change, minus possible rounding;
    the same relative to the linear change; and the share of the change that rounding may hide.
    """
    found = [_compare_outputs(solver, inputs, start, steps) for inputs in sample]
    linear, error, floor = (torch.cat([one.norm(dim=2) for one in some], dim=1) for some in zip(*found, strict=True))
    return error, _relative_norm(error, linear), _relative_norm(floor, linear)


def own_linearization_error(
    solver: ExactSolver, deletions: list[Deletion], start: Tensor | None, steps: Tensor
) -> float:
    """The relative error on the unit left out, along the step without it: that of leave-one-out residuals."""
    found = [
        _compare_outputs(solver, inputs, start, step.unsqueeze(0))
        for one, step in zip(deletions, steps, strict=True)
        for _, inputs, _ in training_examples(solver.fitted, one.members)
    ]
    linear, error, _ = (torch.cat([one.flatten() for one in some]) for some in zip(*found, strict=True))
    return _relative_norm(error, linear)


def _relative_norm(some: Tensor, whole: Tensor) -> float:
    size = float(whole.norm())
    return float(some.norm()) / size if size > 0 else 0.0


def _compare_outputs(
    solver: ExactSolver, inputs: Inputs, start: Tensor | None, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, m, k) each: the linear change of outputs, its error, and the rounding that was subtracted from the error."""
    problem = solver.problem
    weights = problem.weights().double()
    before = _as_stored(problem, weights if start is None else weights + start)
    base = _outputs(problem, before, inputs)
    after = [_as_stored(problem, before + step) for step in steps]
    taken = torch.stack([one - before for one in after])  # the step that remains after rounding to single precision
    linear = solver.jacobian.jvp(inputs, taken.to(problem.dtype)).double()
    change = torch.stack([_outputs(problem, one, inputs) for one in after]) - base
    coarsest = max(torch.finfo(p.dtype).eps for p in problem.selection.parameters.values())
    floor = ROUNDING * coarsest * base.abs().amax(1, keepdim=True).expand_as(base).expand_as(linear)
    return linear, ((change - linear).abs() - floor).clamp_min(0.0), floor


def _as_stored(problem: Linearization, weights: Tensor) -> Tensor:
    """Weights (d,) rounded to the precision of the parameters."""
    stored = problem.selection.unflatten(weights, cast=True)
    return problem.selection.flatten({name: p.double() for name, p in stored.items()})


def _outputs(problem: Linearization, weights: Tensor, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return problem.network.with_parameters(problem.selection.unflatten(weights, cast=True), inputs).double()
