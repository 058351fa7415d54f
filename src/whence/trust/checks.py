"""What the checks say, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.curvature.core import Projected
from whence.curvature.primal import FittedPrimal
from whence.data.batches import Inputs, take
from whence.display import Column, Shown, Table
from whence.influence.calibration import evenly
from whence.influence.fitted import Fitted, frame
from whence.runtime.memory import is_full

if TYPE_CHECKING:
    import pandas


FINE, CAREFUL, NOT, SKIPPED = "fine", "careful", "do not trust", "not checked"
LEVELS = (FINE, CAREFUL, NOT)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        level: "fine", "careful", "do not trust", or "not checked" where it could not be looked at.
        numbers: what was found, by name.
        words: why that level, and what to do about it.

    Examples:
        >>> Check("lambda", "careful", {"same": 0.75, "ten times": 1.0}, "Verdicts change with lambda.").figures
        'same 0.75, ten times 1'
    """

    name: str
    level: str
    numbers: Mapping[str, float]
    words: str

    @property
    def figures(self) -> str:
        """The numbers on one line."""
        return ", ".join(f"{name} {value:.3g}" for name, value in self.numbers.items())

    @property
    def told(self) -> str:
        """The numbers, where there are any, and the words."""
        return f"{self.figures}. {self.words}" if self.numbers else self.words


@dataclass(frozen=True, repr=False)
class Trust(Shown):
    """How far to trust a fit.

    Attributes:
        checks: one after the other, all independent of each other.
        sample: how many predictions were looked at.
        seconds: how long it took.

    Examples:
        >>> trust = Trust((Check("linearization", "careful", {"error": 0.2}, "Outputs bend."),), sample=8, seconds=1.0)
        >>> trust.level, trust["linearization"].numbers["error"]
        ('careful', 0.2)
        >>> print(trust)
        careful: 1 of 1 checks is not fine (8 predictions, 1.0 s)
        level    check          why, and what to do
        careful  linearization  error 0.2. Outputs bend.
    """

    checks: tuple[Check, ...]
    sample: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[Check]:
        """All checks in order."""
        return iter(self.checks)

    def __getitem__(self, name: str) -> Check:
        """A check by its name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    @property
    def level(self) -> str:
        """The worst level of all checks."""
        return worst(check.level for check in self.checks)

    def to_frame(self) -> pandas.DataFrame:
        """One row a check."""
        parts = ("name", "level", "figures", "words")
        return frame({part: [[str(getattr(check, part)) for check in self.checks]] for part in parts})

    @property
    def headline(self) -> str:
        """The level, and how many checks are behind it."""
        odd = sum(check.level in (CAREFUL, NOT) for check in self.checks)
        skipped = sum(check.level == SKIPPED for check in self.checks)
        rest = f", {skipped} not checked" if skipped else ""
        verb = "is" if odd == 1 else "are"
        looked = f" ({self.sample} predictions, {self.seconds:.1f} s)" if self.sample else ""
        return f"{self.level}: {odd} of {len(self.checks)} checks {verb} not fine{rest}{looked}"

    def __repr__(self) -> str:
        """The headline."""
        return f"Trust({self.headline})"

    def _table(self) -> Table:
        words = tuple(check.told for check in self.checks)
        levels, names = (tuple(str(getattr(check, part)) for check in self.checks) for part in ("level", "name"))
        cells = {"level": levels, "check": names, "why, and what to do": words}
        return Table(self.headline, tuple(Column(name, column, left=True) for name, column in cells.items()))


def worst(levels: Iterator[str]) -> str:
    """The worst of some levels; those not checked do not count.

    Examples:
        >>> worst(iter(["fine", "not checked", "careful"]))
        'careful'
    """
    return max((level for level in levels if level in LEVELS), key=LEVELS.index, default=SKIPPED)


FOLD = (1.25, 2.0)
"""Factors on a variance. Intervals meant to cover 95 % then cover 92 to 97 %, and 83 to 99 %."""

RANK = (0.95, 0.8)
"""Rank correlations with the exact variances below which order suffers, and below which it is lost."""

MOVE = (0.25, 1.0)
"""Root mean square of what a Newton step would still move predictions by, in standard errors."""

ERROR = (0.3, 1.0)
"""Share of a predicted change of outputs by which the true change misses it."""

STAYS = (0.9, 0.7)
"""Shares of verdicts that survive a tenth and ten times lambda."""

NEARLY_ALL = 0.9
"""Share of the numbers in the training targets beyond which degrees of freedom leave hardly any noise to see."""

GUARDED = {"exact": (0.0, 0.01), "one_plus_q": (0.01, 0.2), "clip": (0.0, 0.0)}
"""Shares of examples at the guard, by what the guard does."""


INSIDE = (0.7, 0.35)
"""Estimated shares of HeC3 within a core. A sample is rough: it said .90 to 1.00 where the true share was .97 or more,
.72 for .94, .36 for .55, and .40, .13 and .08 for .08, .05 and .04, where the network was certain of wrong labels."""

SOLVED = 0.1
"""Relative residual of exact solves up to which what they say is believed."""


def level_of(value: float, bounds: tuple[float, float]) -> str:
    """Fine up to the first bound, careful up to the second; bounds that fall are lower bounds.

    Examples:
        >>> level_of(0.3, (0.25, 1.0)), level_of(0.97, (0.95, 0.8)), level_of(math.nan, (0.95, 0.8))
        ('careful', 'fine', 'do not trust')
    """
    first, second = bounds
    if (value >= first) if first > second else (value <= first):
        return FINE
    return CAREFUL if ((value >= second) if first > second else (value <= second)) else NOT


def fold(factor: float) -> float:
    """How many times too large or too small.

    Examples:
        >>> fold(0.5), fold(2.0)
        (2.0, 2.0)
    """
    if not factor > 0:
        return math.inf
    return max(factor, 1.0 / factor)


def distance(numbers: Mapping[str, float], spread: Mapping[str, float], solved: float) -> Check:
    """How far the structure is from the exact curvature.

    Args:
        numbers: factors "ho" and "hec3", and rank correlations "ho rank", "hec3 rank" and "ratio rank".
        spread: for "ho", "hec3" and "ratio", the largest factor of a single prediction against the typical one.
        solved: relative residual of the solves.
    """
    size = worst(level_of(fold(numbers[name]), FOLD) for name in ("ho", "hec3"))
    ranks = {name: numbers[f"{name} rank"] for name in spread if spread[name] > FOLD[0]}
    order = worst(iter([FINE, *(level_of(rank, RANK) for rank in ranks.values() if not math.isnan(rank))]))
    found = worst(iter([size, order]))
    advice = ' Use structure="core" (or "exact" where it fits in memory) to read variances as variances.'
    if found == FINE:
        words = "Variances have the size and order that the exact curvature gives."
    elif order == FINE:
        words = "Variances are off by a factor, but predictions keep their order: rank by them, do not scale by them."
        words += advice
    else:
        words = "Not even the order of predictions is that of the exact curvature." + advice
    return _unsolved(Check("distance", found, numbers, words), solved)


def leave_one_out(factor: float, largest: float, count: int, solved: float) -> Check:
    """Whether squared leave-one-out residuals are what the exact curvature gives."""
    numbers = {"factor": factor, "worst": largest, "examples": float(count)}
    if not count:
        return Check("leave-one-out", SKIPPED, {}, "There are no residuals, so that nothing moves without an example.")
    single = FINE if level_of(largest, FOLD) == FINE else CAREFUL
    found = worst(iter([level_of(fold(factor), FOLD), single]))
    words = "Leave-one-out residuals of the most influential examples, squared, are those of the exact curvature."
    if found != FINE:
        words = (
            "Leave-one-out residuals of the most influential examples, squared, are off by this factor, and HeC3 with "
            'them: this structure\'s leverages are not true. Use structure="core" or "exact".'
        )
    return _unsolved(Check("leave-one-out", found, numbers, words), solved)


def stationarity(size: float, moves: float, taken: bool, solved: float = 0.0) -> Check:
    """How far the weights are from the optimum of the penalised loss."""
    found = level_of(moves, MOVE)
    words = (
        "The step to the optimum of the penalised loss would move predictions by little against their standard errors."
    )
    if found != FINE and taken:
        words = (
            "Residuals were recentred with an approximate step, and the exact one would still move predictions against "
            'their standard errors. Use structure="exact" or "core", or train on.'
        )
    elif found != FINE:
        words = (
            "The weights are not at the optimum of the penalised loss: a Newton step would move predictions this many "
            "standard errors. Check that `ridge` is the one of the training (whence.ridge_from_weight_decay), train "
            "on, or describe the optimum with recenter=True."
        )
    return _unsolved(Check("stationarity", found, {"step": size, "moves": moves}, words), solved)


def linearization(loo: float, own: float, newton: float, taken: bool, hidden: float, solved: float) -> Check:
    """Whether outputs move as their tangents say.

    Args:
        loo: error of the change of predictions without influential examples, over the change.
        own: the same on those examples themselves.
        newton: error along the Newton step, in standard errors.
        taken: whether predictions were moved along that step; if not, nothing rests on it but the way out.
        hidden: share of the change that rounding may hide.
        solved: relative residual of the solves.
    """
    without, along = level_of(max(loo, own), ERROR), level_of(newton, MOVE)
    along = CAREFUL if along == NOT and not taken else along
    found = worst(iter([without, along]))
    numbers = {"leave-one-out": loo, "own": own, "Newton": newton}
    words = "Outputs move as their tangents say, without influential examples and along the step to the optimum."
    if without != FINE:
        words = (
            "Without influential examples outputs bend away from their tangents by this share of the change: HeC3 and "
            "what-if are first-order guesses there. A larger ridge, more data, or parameters='last_layer', in which "
            "outputs are linear, bend less."
        )
    elif along != FINE:
        words = (
            "The step to the optimum is too long for tangents: outputs miss them by this many standard errors, so "
            f"that recenter=True {'does' if taken else 'would'} not describe where training ends. Train on."
        )
    elif hidden > ERROR[0]:
        words = "Rounding hides whether outputs move as their tangents say; use weights of higher precision to see it."
    return _unsolved(Check("linearization", found, numbers, words), solved)


def freedom(found: float, numbers: int, estimate: float = math.nan, error: float = math.nan) -> Check:
    """Whether degrees of freedom are possible, and what the exact curvature has.

    Args:
        found: of the structure.
        numbers: in the training targets, which the exact ones cannot exceed.
        estimate: of the exact curvature's, and a bound of its standard error.
        error: the bound.
    """
    figures = {"found": found, "of": float(numbers)}
    share, off = found / max(numbers, 1), 1.0
    if not math.isnan(estimate):
        figures |= {"exact": estimate, "error": error}
        inside = abs(found - estimate) <= 2 * error
        off = 1.0 if inside else min(fold(_over(found, estimate + way * 2 * error)) for way in (-1, 1))
    level = NOT if share > 1.0 else CAREFUL if share > NEARLY_ALL else FINE
    level = worst(iter([level, level_of(off, FOLD)]))
    words = "Fewer degrees of freedom than there are numbers to fit."
    if share > 1.0:
        words = (
            "More degrees of freedom than there are numbers to fit, which is impossible: the approximation or lambda "
            'is off. Raise `ridge`, or use structure="core" or "exact".'
        )
    elif share > NEARLY_ALL:
        words = "The fit can follow nearly every number: residuals say little about noise. Raise `ridge`."
    elif level != FINE:
        words = (
            "The structure counts degrees of freedom that the exact curvature has not, or misses some: it is not the "
            'curvature of this network. Use structure="core" or "exact".'
        )
    return Check("degrees of freedom", level, figures, words)


def leverage(guarded: int, among: int, largest: float, policy: str) -> Check:
    """Whether leverages are possible."""
    share = guarded / max(among, 1)
    found = level_of(share, GUARDED[policy])
    words = {
        "exact": "decide their own prediction (leverage one): their leave-one-out residuals, and HeC3 near them, are "
        "rounding. Raise `ridge`.",
        "one_plus_q": "have an approximate leverage of one or more, which no example has: this structure overstates "
        'how much single examples decide. Raise `ridge`, or use structure="core".',
        "clip": "are clipped, which multiplies their residuals by up to ten thousand: HeC3 is theirs alone. Use "
        'leverage="one_plus_q", or structure="core".',
    }[policy]
    said = f"{guarded} of {among} {words}" if guarded else "No leverage had to be guarded."
    return Check("leverage", found, {"guarded": float(guarded), "of": float(among), "largest": largest}, said)


def outside(share: float) -> Check:
    """Whether a core holds the gradients that HeC3 is made of.

    Args:
        share: HeC3 of the core over HeC3 with what lies outside of it; NaN if that was not looked at.
    """
    if math.isnan(share):
        why = "it would take more memory than is set aside; tracer.trust(x) compares the core with exact solves"
        return Check("outside the core", SKIPPED, {}, f"What lies outside the core was not looked at: {why}.")
    found = level_of(share, INSIDE)
    words = "Gradients of the most doubtful examples lie within the core, as far as a sample of them tells."
    if found != FINE:
        words = (
            "Gradients of examples with large residuals lie outside the core, which follows the curvature of the loss: "
            "where the network is certain of a wrong label there is next to none. HeC3 is too small, to about this "
            'share. Use structure="exact" or "sketch", or a core with a larger `size` or a `share` nearer to one.'
        )
    return Check("outside the core", found, {"share": share}, words)


def ridges(same: float, below: float, above: float, skipped: str) -> Check:
    """Whether verdicts hang on lambda."""
    if skipped:
        return Check("lambda", SKIPPED, {}, f"Verdicts at other ridges were not looked at: {skipped}.")
    found = level_of(same, STAYS)
    words = "Verdicts are the same with a tenth and with ten times lambda."
    if found != FINE:
        words = (
            "Verdicts change with lambda between a tenth and ten times its value. Make sure of lambda (the weight "
            'decay of the training, or ridge="loo"), and believe the verdicts that stay.'
        )
    return Check("lambda", found, {"same": same, "a tenth": below, "ten times": above}, words)


def _over(one: float, other: float) -> float:
    return one / other if other else math.inf


def _unsolved(check: Check, solved: float) -> Check:
    """Nothing is said where conjugate gradients did not come to their end."""
    if solved <= SOLVED:
        return check
    words = (
        f"Exact solves were stopped at a relative residual of {solved:.2g}: allow more `seconds`, or a smaller sample."
    )
    return Check(check.name, SKIPPED, {"solved": solved}, words)


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
    if not isinstance(bread, FittedPrimal) or not isinstance(bread.features, Projected) or bread.ridge <= 0:
        return None
    features, d = bread.features, problem.selection.size
    plain = not problem.dense and problem.sketch is None and problem.k <= OUTPUTS
    alone = problem.passes.process_group.alone and fitted.weighing.groups is None
    if not features.orthonormal or features.size >= d or not plain or not alone:
        return None
    room = min(BYTES, 0.1 * problem.budget.limit) / (8.0 * COPIES * d)
    if room < POINTS + SOURCES * (problem.k + 1):
        return math.nan
    try:
        return _sampled_share(fitted, bread, features)
    except RuntimeError as error:
        if not is_full(error):
            raise
        return math.nan


def _sampled_share(fitted: Fitted, bread: FittedPrimal, features: Projected) -> float | None:
    """The same, from a sample of sources and points."""
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


def _parted(bread: FittedPrimal, features: Projected, vectors: Tensor) -> _Parted:
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
    generator = torch.Generator("cpu").manual_seed(0)
    signs = {at: torch.randint(0, 2, (k,), generator=generator, device="cpu") * 2.0 - 1.0 for at in sorted(wanted)}
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


def trust_of_fit(fitted: Fitted) -> Trust:
    """Degrees of freedom, leverages, how far the structure's own Newton step would go, and what lies outside a core.

    Standard errors are the typical one of training predictions: noise times the root of degrees of freedom a number.
    """
    problem, bread = fitted.problem, fitted.bread
    residuals = fitted.meats.roots["hec0"].sum(2)
    lost = fitted.weighing.lost(slice(0, problem.n), fitted.step.change)
    noise = float(residuals.square().sum())
    error = noise * min(bread.degrees_of_freedom / max(problem.numbers, 1), 1.0)
    moves = (float(lost.square().sum()) / error) ** 0.5 if error > 0 else 0.0
    if fitted.weighing.recenter:
        moves = 0.0  # the step was taken
    checks = [
        stationarity(fitted.step.relative, moves, fitted.weighing.recenter),
        freedom(bread.degrees_of_freedom, problem.numbers),
        guards(fitted),
    ]
    inside = share_inside(fitted)
    if inside is not None:
        checks.append(outside(inside))
    return Trust(tuple(checks))


def guards(fitted: Fitted) -> Check:
    """Counts of guarded leverages."""
    largest = float(fitted.left_out.leverage.max())
    return leverage(fitted.left_out.guarded, fitted.meats.deletions, largest, fitted.weighing.policy)
