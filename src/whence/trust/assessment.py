"""What is looked at: some predictions, some mixtures of their outputs, and the examples that move them most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from whence.curvature import conjugate_gradients
from whence.data.batches import Inputs, batch_size, take
from whence.errors import InputError, SingularCurvatureError, TooLargeError
from whence.estimators import assemble
from whence.influence import verdicts
from whence.influence.calibration import Calibration
from whence.influence.fitted import Fitted, alignments, inputs_of, using_model
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.linearization import Linearization
from whence.linalg import largest
from whence.runtime.model_state import rounded_products
from whence.trust import checks as rules
from whence.trust.checks import Check, Trust, guards


@dataclass(frozen=True)
class Points:
    """Some inputs, in pieces that came together.

    Attributes:
        pieces: inputs.
        sizes: how many inputs each piece has.
    """

    pieces: list[Inputs]
    sizes: list[int]

    def __len__(self) -> int:
        """Number of inputs."""
        return sum(self.sizes)

    def __iter__(self) -> Iterator[tuple[slice, Inputs]]:
        """Yield (which inputs, the inputs)."""
        low = 0
        for size, piece in zip(self.sizes, self.pieces, strict=True):
            yield slice(low, low + size), piece
            low += size

    def first(self, most: int) -> Points:
        """Fewer of them; they are in random order within a piece, and so are the pieces' shares."""
        pieces: list[Inputs] = []
        sizes: list[int] = []
        share = min(1.0, most / max(len(self), 1))
        for size, piece in zip(self.sizes, self.pieces, strict=True):
            kept = min(size, max(1, round(share * size)), most - sum(sizes))
            if kept > 0:
                pieces.append(take(piece, slice(0, kept)))
                sizes.append(kept)
        return Points(pieces, sizes)


def draw_points(fitted: Fitted, x: Any, most: int, generator: torch.Generator) -> Points:
    """Up to `most` inputs at random: of x, or of the training set where there is none. Never holds more than that."""
    kept: list[tuple[Tensor, Inputs]] = []  # a random number for each input, and the inputs with the smallest ones
    for inputs, allowed in _training(fitted) if x is None else ((one, None) for one, _ in inputs_of(fitted, x)):
        numbers = torch.rand(batch_size(inputs, "this batch"), generator=generator, dtype=torch.float64, device="cpu")
        if allowed is not None:
            numbers[~allowed] = torch.inf
        kept.append((numbers, inputs))
        every = torch.cat([one for one, _ in kept])
        bound = every.sort().values[min(most, len(every)) - 1]
        kept = [_smallest(numbers, inputs, bound) for numbers, inputs in kept]
        kept = [(numbers, inputs) for numbers, inputs in kept if len(numbers)]
    if not kept:
        raise InputError("expected at least one input to look at, got none.")
    return Points([inputs for _, inputs in kept], [len(numbers) for numbers, _ in kept])


def _training(fitted: Fitted) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Training inputs, and which of them count."""
    weights = fitted.problem.sample_weights
    for batch in fitted.problem.read("trust, sample"):
        yield batch.inputs, None if weights is None else (weights[batch.rows] > 0).cpu()


def _smallest(numbers: Tensor, inputs: Inputs, bound: Tensor) -> tuple[Tensor, Inputs]:
    """Inputs whose number is at most the bound, in the order of their numbers."""
    order = numbers.argsort()
    index = order[(numbers[order] <= bound) & torch.isfinite(numbers[order])]
    return numbers[index], take(inputs, index)  # type: ignore[arg-type]  # tensors take positions as they take slices


def mix(fitted: Fitted, points: Points, generator: torch.Generator) -> list[Tensor]:
    """Random signs of the outputs that are looked at, (m, k) for each piece: one mixture of outputs a point."""
    problem = fitted.problem
    return [
        signs((size, problem.output_count(one)), problem.outputs, generator)
        for size, one in zip(points.sizes, points.pieces, strict=True)
    ]


def signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs; drawn on the CPU, so that every device sees the same."""
    drawn = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
    return drawn.to(like)


@dataclass(frozen=True)
class Deletion:
    """What is left out at once: an example, some of its outputs, or a group.

    Attributes:
        members: (g,) places of the examples.
        outputs: those that are left out; all of them, unless single outputs or positions are.
    """

    members: Tensor
    outputs: slice = field(default_factory=lambda: slice(None))

    def mask(self, n: int, k: int) -> Tensor:
        """(n, k) true where something is left out."""
        found = torch.zeros(n, k, dtype=torch.bool, device=self.members.device)
        found[self.members, self.outputs] = True
        return found


def most_influential(fitted: Fitted, points: Points, most: int) -> list[Deletion]:
    """Those that would move the predictions most if they were left out, as far as this fit knows."""
    moved = _influence(fitted, points)  # (n or groups, q)
    flat = moved.flatten()
    count = min(most, int((flat > 0).sum()))
    top = largest(flat, count)[1] if count else flat.new_zeros(0, dtype=torch.long)
    groups, units = fitted.weighing.groups, fitted.weighing.units
    width = units.width if units is not None else 1 if fitted.weighing.by_output else fitted.problem.k
    found = []
    for at in top.tolist():
        unit, column = divmod(at, moved.shape[1])
        one = torch.tensor([unit], device=flat.device)
        members = one if groups is None else (groups.index == unit).nonzero().squeeze(1)
        found.append(Deletion(members, slice(column * width, (column + 1) * width)))
    return found


def _influence(fitted: Fitted, points: Points) -> Tensor:
    """(n or groups, q) sums over the points of |a_i W_i|^2 for each column of the weights of HeC3."""
    problem, roots, groups = fitted.problem, fitted.meats.roots["hec3"], fitted.meats.pooled("hec3")
    units = problem.n if groups is None else groups.total
    total = torch.zeros(units, roots.shape[2], dtype=problem.dtype, device=problem.device)
    for _, inputs in points:
        for _, chunks in alignments(fitted, inputs):
            pooled: Tensor | None = None
            for there, aligned in chunks:  # (m, k, n, k)
                weighted = torch.einsum("mkni,niq->mknq", aligned, roots[there]).flatten(0, 1)
                if groups is None:
                    total[there] += weighted.square().sum(0)
                    continue
                pooled = weighted.new_zeros(len(weighted), units, roots.shape[2]) if pooled is None else pooled
                pooled.index_add_(1, groups.index[there], weighted)
            if pooled is not None:
                total += pooled.square().sum(0)
    return total


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


ROUNDING = 16
"""Outputs may differ by so many units in the last place before a difference is taken for one."""


@dataclass(frozen=True)
class Bend:
    """How outputs move along some steps: sizes over the outputs of each point.

    Attributes:
        linear: (q, m) as the tangents say.
        gap: (q, m) by how much the network's outputs miss that, less what rounding may be.
        hidden: share of the linear change that rounding may hide.
    """

    linear: Tensor
    gap: Tensor
    hidden: float

    @property
    def error(self) -> float:
        """Size of the gap over the size of the change, all steps together."""
        size = float(self.linear.norm())
        return float(self.gap.norm()) / size if size > 0 else 0.0


def bend(truth: Truth, points: Points, start: Tensor | None, steps: Tensor) -> Bend:
    """Take steps (q, d) from the weights, or from where `start` leads from there, and look at some points."""
    parts = [_bend(truth, inputs, start, steps) for _, inputs in points]
    linear, gap, floor = (torch.cat([part[at].norm(dim=2) for part in parts], dim=1) for at in range(3))
    size = float(linear.norm())
    return Bend(linear, gap, float(floor.norm()) / size if size > 0 else 0.0)


def bend_at_home(truth: Truth, deletions: list[Deletion], start: Tensor | None, steps: Tensor) -> float:
    """The error where it matters to leave-one-out residuals: on what was left out, along the step without it."""
    gaps = sizes = 0.0
    for batch in truth.problem.batches.read(None):
        for one, step in zip(deletions, steps, strict=True):
            here = (one.members >= batch.start) & (one.members < batch.start + batch.size)
            if bool(here.any()):
                some = take(batch.inputs, one.members[here] - batch.start)  # type: ignore[arg-type]  # positions
                linear, gap, _ = _bend(truth, some, start, step.unsqueeze(0))
                gaps, sizes = gaps + float(gap.square().sum()), sizes + float(linear.square().sum())
    return (gaps / sizes) ** 0.5 if sizes > 0 else 0.0


def _bend(truth: Truth, inputs: Inputs, start: Tensor | None, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    problem = truth.problem
    weights = problem.weights().double()
    before = _as_stored(problem, weights if start is None else weights + start)
    base = _outputs(problem, before, inputs)
    after = [_as_stored(problem, before + step) for step in steps]
    taken = torch.stack([there - before for there in after])  # what is left of a small step in single precision
    linear = truth.jacobian.jvp(inputs, taken.to(problem.dtype)).double()
    moved = torch.stack([_outputs(problem, there, inputs) for there in after]) - base
    coarsest = max(torch.finfo(p.dtype).eps for p in problem.selection.parameters.values())
    floor = ROUNDING * coarsest * base.abs().amax(1, keepdim=True).expand_as(base).expand_as(linear)
    return linear, ((moved - linear).abs() - floor).clamp_min(0.0), floor


def _as_stored(problem: Linearization, weights: Tensor) -> Tensor:
    """Weights (d,) rounded to the precision of the parameters."""
    stored = problem.selection.unflatten(weights, cast=True)
    return problem.selection.flatten({name: p.double() for name, p in stored.items()})


def _outputs(problem: Linearization, weights: Tensor, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return problem.network.with_parameters(problem.selection.unflatten(weights, cast=True), inputs).double()


DECADES = (-1.0, 1.0)
"""Powers of ten by which lambda is moved: two decades between the ends."""


EXAMPLES = 200
"""Training examples that say at each lambda what is usual."""


@dataclass(frozen=True)
class Sensitivity:
    """What becomes of verdicts.

    Attributes:
        same: share of predictions whose verdict is the same at all ridges.
        below: share that keeps it a decade below.
        above: share that keeps it a decade above.
    """

    same: float
    below: float
    above: float


def sensitivity(fitted: Fitted, points: Points, level: float) -> Sensitivity | str:
    """Verdicts at other ridges; in words, why there are none."""
    if fitted.weighing.groups is not None:
        return "verdicts are about single examples, and this fit leaves whole groups out"
    if fitted.bread.ridge <= 0:
        return "the fit has no ridge"
    given = _verdicts(fitted, points, level)
    try:
        others = [_verdicts(at_ridge(fitted, fitted.bread.ridge * 10.0**decade), points, level) for decade in DECADES]
    except (InputError, TooLargeError, SingularCurvatureError) as error:
        return str(error).split(". ")[0].removeprefix("expected ")
    kept = [[a == b for a, b in zip(given, other, strict=True)] for other in others]
    below, above = (sum(one) / len(given) for one in kept)
    return Sensitivity(sum(a and b for a, b in zip(*kept, strict=True)) / len(given), below, above)


def at_ridge(fitted: Fitted, ridge: float) -> Fitted:
    """The same fit with another lambda, from the curvature at hand."""
    weighing, problem = fitted.weighing, fitted.problem
    bread = replace(fitted.bread.at(ridge, weighing.columns), tf32=fitted.bread.tf32)
    parts = assemble(problem, bread, weighing, unbiased=False)  # the scale of the noise does not change a verdict
    given = cast(Any, fitted)  # a frozen dataclass, whichever
    return cast(
        Fitted,
        replace(
            given,
            bread=bread,
            sandwich=parts.sandwich,
            meats=parts.meats,
            left_out=parts.left_out,
            step=parts.step,
            sigma=parts.noise.covariance,
            noise_scale=parts.noise.scale,
        ),
    )


def _verdicts(fitted: Fitted, points: Points, level: float) -> list[str]:
    usual = Calibration.of(fitted, EXAMPLES)
    return [word for _, inputs in points for word in verdicts.explain(fitted, inputs, usual, level, 1).verdicts]


ITERATIONS = 1000
VERDICTS = 4
"""Verdicts are looked at for so many times the sample: they cost less than solves."""


def assess(fitted: Fitted, x: Any, sample: int, seed: int, tolerance: float, seconds: float) -> Trust:
    """Look at a sample of predictions; see `Tracer.trust`."""
    start = time.monotonic()
    # Not the seed itself: data drawn with the same one would choose itself, the smallest numbers first.
    generator = torch.Generator("cpu").manual_seed((seed * 2_654_435_761 + 104_729) % 2**63)
    with using_model(fitted):
        many = draw_points(fitted, x, VERDICTS * sample, generator)
        points = many.first(sample)
        mixtures = mix(fitted, points, generator)
        given = _given(fitted, points, mixtures)
        deletions = most_influential(fitted, points, min(max(1, sample // 4), 8))
        with rounded_products(False):
            effort = Effort(tolerance, ITERATIONS, start + 0.4 * seconds)
            steps = Truth(fitted, effort).steps(deletions, _trace_signs(fitted, max(2, sample // 8), generator))
            truth = Truth(fitted, Effort(tolerance, ITERATIONS, start + 0.8 * seconds))
            exact = truth.variances(points, mixtures)
            checks = [
                compare(given, exact),
                compare_left_out(fitted, deletions, steps),
                *follow(truth, points, deletions, steps, given, exact),
                count_freedom(fitted, steps),
                guards(fitted),
            ]
        late = time.monotonic() - start > seconds
        checks.append(vary(fitted, many, late))
    return Trust(tuple(checks), len(points), time.monotonic() - start)


@dataclass(frozen=True)
class Given:
    """What the fit says about the points.

    Attributes:
        along: (m,) variances along the mixtures, by name.
        error: (m,) HeC3, all outputs together.
    """

    along: dict[str, Tensor]
    error: Tensor


def _given(fitted: Fitted, points: Points, mixtures: list[Tensor]) -> Given:
    along: dict[str, list[Tensor]] = {"ho": [], "hec3": [], "laplace": []}
    errors = []
    for inputs, mixed in zip(points.pieces, mixtures, strict=True):
        found = fitted.sandwich.predict(inputs).covariances
        for name, parts in along.items():
            parts.append(torch.einsum("mk,mkl,ml->m", mixed, found[name], mixed))
        errors.append(torch.diagonal(found["hec3"], dim1=1, dim2=2).sum(1))
    return Given({name: torch.cat(parts) for name, parts in along.items()}, torch.cat(errors))


def compare(given: Given, exact: Quadratics) -> Check:
    """Variances of the structure against exact ones."""
    numbers: dict[str, float] = {}
    spread: dict[str, float] = {}
    pairs = {name: (given.along[name], exact.values[name]) for name in ("ho", "hec3")}
    ours, theirs = (_over(side["hec3"], side["ho"]) for side in (given.along, exact.values))
    pairs["ratio"] = (ours, theirs)
    for name, (ours, theirs) in pairs.items():
        factors = _over(ours, theirs)
        typical = float(factors.median())
        if name != "ratio":
            numbers[name] = typical
        numbers[f"{name} rank"] = rank_correlation(ours, theirs)
        spread[name] = max(rules.fold(float(one) / typical) if typical > 0 else math.inf for one in factors)
    numbers["worst"] = max(rules.fold(float(one)) for pair in ("ho", "hec3") for one in _over(*pairs[pair]))
    numbers["solved"] = exact.reached
    return rules.distance(numbers, spread, exact.reached)


def compare_left_out(fitted: Fitted, deletions: list[Deletion], steps: Steps) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    ours, theirs = [], []
    for one, exact in zip(deletions, steps.left_out, strict=True):
        ours.append(float(fitted.left_out.hec3[one.members][:, one.outputs].square().sum()))
        theirs.append(float(exact[:, one.outputs].square().sum()))
    total = sum(theirs)
    factor = sum(ours) / total if total > 0 else 1.0
    pairs = zip(ours, theirs, strict=True)
    largest = max((rules.fold(a / b) if b > 0 else math.inf for a, b in pairs), default=1.0)
    return rules.leave_one_out(factor, largest, len(deletions), steps.reached)


def follow(
    truth: Truth, points: Points, deletions: list[Deletion], steps: Steps, given: Given, exact: Quadratics
) -> tuple[Check, Check]:
    """Stationarity and linearization: what exact steps do to predictions, by tangents and by the network itself."""
    fitted, problem = truth.fitted, truth.problem
    taken = fitted.step.direction if fitted.weighing.recenter else None
    left = steps.newton if taken is None else steps.newton - taken
    errors = _standard_errors(given, exact)
    moves = truth.push(points, left)  # (m,)
    size = float(left.norm() / problem.weights().norm().clamp_min(torch.finfo(left.dtype).tiny))
    still = rules.stationarity(size, _in_errors(moves, errors), taken is not None, steps.reached)
    newton = bend(truth, points, None, (steps.newton if taken is None else taken).unsqueeze(0))
    gap = _in_errors(newton.gap[0], errors)
    if not deletions:
        return still, rules.linearization(0.0, 0.0, gap, taken is not None, newton.hidden, steps.reached)
    without = bend(truth, points, taken, steps.deletions)
    own = bend_at_home(truth, deletions, taken, steps.deletions)
    return still, rules.linearization(without.error, own, gap, taken is not None, without.hidden, steps.reached)


def count_freedom(fitted: Fitted, steps: Steps) -> Check:
    """Degrees of freedom of the structure, and an estimate of the exact ones."""
    if steps.reached > rules.SOLVED:
        return rules.freedom(fitted.bread.degrees_of_freedom, fitted.problem.numbers)
    estimate = float(steps.freedom.mean())
    # The variance of v^T H v over signs v is at most 2 tr H^2, and eigenvalues of H are at most one.
    error = (2.0 * max(estimate, 0.0) / len(steps.freedom)) ** 0.5
    return rules.freedom(fitted.bread.degrees_of_freedom, fitted.problem.numbers, estimate, error)


def vary(fitted: Fitted, points: Points, late: bool) -> Check:
    """Verdicts at other ridges."""
    found = "no seconds were left" if late else sensitivity(fitted, points, 0.95)
    if isinstance(found, Sensitivity):
        return rules.ridges(found.same, found.below, found.above, "")
    return rules.ridges(math.nan, math.nan, math.nan, found)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's, with ties in the order in which they come; not a number for fewer than three.

    Examples:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.1, 0.3, 0.2]))
        0.5
    """
    if len(one) < 3:
        return math.nan
    ranks = torch.stack([values.double().argsort(stable=True).argsort().double() for values in (one, other)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _trace_signs(fitted: Fitted, count: int, generator: torch.Generator) -> Tensor:
    roots = fitted.problem.hessian_roots
    inner = fitted.problem.k if roots is None else roots.shape[2]
    return signs((count, fitted.problem.n, inner), fitted.problem.outputs, generator)


def _standard_errors(given: Given, exact: Quadratics) -> Tensor:
    """(m,) of all outputs together, with the size that the exact curvature gives."""
    factor = float(_over(given.along["hec3"], exact.values["hec3"]).median())
    return (given.error / factor if factor > 0 else given.error).clamp_min(0.0).sqrt()


def _in_errors(values: Tensor, errors: Tensor) -> float:
    """Root mean square of values over standard errors."""
    return float(_over(values, errors, none=0.0).square().mean().sqrt())


def _over(one: Tensor, other: Tensor, none: float = 1.0) -> Tensor:
    """A ratio; where both are zero, what there is none of."""
    zero = (one == 0) & (other == 0)
    return torch.where(zero, none, one / torch.where(zero, 1.0, other))
