"""Checks of a fit: a level, the numbers behind it, and a sentence that says what they mean and what to do.

The results come first (`Check`, `Trust`), then the rules that turn numbers into levels and words, then the checks that
every fit makes of itself (`trust_of_fit`). One of these asks whether a fit sees the gradients that HeC3 consists of, on
a sample of training examples. Where a network is certain of a wrong label there is almost no curvature. A core, which
follows the curvature, then misses the gradient of that label, and an eigenbasis is not made for it: its directions
there are rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.curvature.accumulate import working_precision
from whence.curvature.base import times_hessian
from whence.curvature.core import LARGEST_SAMPLE, SAMPLES, affordable_sample
from whence.curvature.leaves import LeafFeatures
from whence.curvature.primal import FittedPrimal, Projected
from whence.curvature.spectral import FittedSpectral
from whence.data.batches import Inputs, take
from whence.display import Column, Shown, Table, count, number
from whence.influence.fitted import Fitted, evenly_spaced, training_examples
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.leaves import LeafSum
from whence.results import frame
from whence.runtime.memory import is_full

if TYPE_CHECKING:
    import pandas

FINE, CAREFUL, NOT, SKIPPED = "fine", "careful", "do not trust", "not checked"
LEVELS = (FINE, CAREFUL, NOT)
MEANING = {
    FINE: "read variances and verdicts as they are",
    CAREFUL: "rank predictions by these numbers; standard errors may be off by a factor of two, those of trees by more",
    NOT: "standard errors may be off by more than a factor of two, or the order of predictions may be wrong",
    SKIPPED: "nothing was checked",
}
PHRASES = {  # numbers of checks in words; others are shown after their names
    "ho": "Ho is {} times the exact one",
    "hec3": "HeC3 is {} times the exact one",
    "ho rank": "rank correlation of Ho {}",
    "hec3 rank": "of HeC3 {}",
    "ratio rank": "of HeC3/Ho {}",
    "worst": "worst single factor {}",
    "solved": "solved to {}",
    "step": "the step is {} of the size of the weights",
    "after the step": "HeC3 is {} times that after the step",
    "standard errors": "which moves predictions by {} standard errors",
    "leave-one-out": "error without influential examples {} of the change",
    "own": "on these examples {}",
    "Newton": "along the step to the optimum {} standard errors",
    "found": "{} found",
    "of": "of {}",
    "exact": "{} by the exact curvature",
    "error": "give or take {}",
    "guarded": "{} guarded",
}


@dataclass(frozen=True)
class Check:
    """One property of a fit that was checked.

    Attributes:
        name: name of the property.
        level: "fine", "careful", "do not trust", or "not checked" if it could not be checked.
        numbers: the measured numbers, by name.
        words: the reason for the level, and what to do about it.

    Examples:
        >>> Check("leverage", "careful", {"guarded": 3, "of": 200}, "Some leverages are impossible.").text
        'Some leverages are impossible. (3 guarded, of 200)'
    """

    name: str
    level: str
    numbers: Mapping[str, float]
    words: str

    @property
    def figures(self) -> str:
        """The numbers on one line."""
        return ", ".join(PHRASES.get(name, f"{name} {{}}").format(number(one)) for name, one in self.numbers.items())

    @property
    def text(self) -> str:
        """The words, followed by the numbers if there are any."""
        return f"{self.words} ({self.figures})" if self.numbers else self.words


@dataclass(frozen=True, repr=False)
class Trust(Shown):
    """How far to trust a fit.

    Attributes:
        checks: the checks, all independent of each other.
        sample: how many predictions were checked.
        seconds: how long it took.

    Examples:
        >>> check = Check("linearization", "careful", {"error": 0.2}, "Outputs are not linear.")
        >>> trust = Trust((check,), sample=8, seconds=1.0)
        >>> trust.level, trust["linearization"].numbers["error"]
        ('careful', 0.2)
        >>> print(trust)
        careful: rank predictions by these numbers; standard errors may be off by a
        factor of two, those of trees by more (1 of 1 checks not fine; 8 predictions,
        1.0 s)
        level    check          why, and what to do
        careful  linearization  Outputs are not linear. (give or take 0.2)
    """

    checks: tuple[Check, ...]
    sample: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in self.checks}[name]

    @property
    def level(self) -> str:
        """The worst level of all checks."""
        return worst(check.level for check in self.checks)

    @property
    def headline(self) -> str:
        """The level, what it means, and how many checks it rests on."""
        skipped = sum(check.level == SKIPPED for check in self.checks)
        rest = f", {skipped} not checked" if skipped else ""
        sample = f"; {count(self.sample, 'prediction')}, {self.seconds:.1f} s" if self.sample else ""
        checked = f"{len(self.not_fine)} of {len(self.checks)} checks not fine{rest}{sample}"
        return f"{self.level}: {MEANING[self.level]} ({checked})"

    @property
    def not_fine(self) -> tuple[Check, ...]:
        """The checks whose level is not fine, the worst first."""
        flagged = (check for check in self.checks if check.level in (CAREFUL, NOT))
        return tuple(sorted(flagged, key=lambda check: -LEVELS.index(check.level)))

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per check."""
        return frame({name: self._all(name) for name in ("name", "level", "figures", "words")})

    def __repr__(self) -> str:
        return f"Trust({self.headline})"

    def _table(self) -> Table:
        columns = {"level": "level", "check": "name", "why, and what to do": "text"}
        return Table(self.headline, tuple(Column(title, self._all(name), left=True) for title, name in columns.items()))

    def _all(self, name: str) -> tuple[str, ...]:
        return tuple(getattr(check, name) for check in self.checks)


def worst(levels: Iterable[str]) -> str:
    """The worst of some levels; "not checked" does not count.

    Examples:
        >>> worst(["fine", "not checked", "careful"])
        'careful'
    """
    return max((level for level in levels if level in LEVELS), key=LEVELS.index, default=SKIPPED)


def level_of(value: float, bounds: tuple[float, float]) -> str:
    """Fine up to the first bound, careful up to the second. Decreasing bounds are lower bounds.

    Examples:
        >>> level_of(0.3, (0.25, 1.0)), level_of(0.97, (0.95, 0.8)), level_of(math.nan, (0.95, 0.8))
        ('careful', 'fine', 'do not trust')
    """
    first, second = bounds
    if first > second:
        value, first, second = -value, -first, -second
    return FINE if value <= first else CAREFUL if value <= second else NOT


def fold_change(factor: float) -> float:
    """By how many times a factor is too large or too small."""
    return max(factor, 1.0 / factor) if factor > 0 else math.inf


# Bounds of "fine" and of "careful" for each rule; docs/trust.md explains them.
FOLD = (1.25, 2.0)  # factors on a variance. Intervals meant to cover 95 % then cover 92 to 97 %, and 83 to 99 %.
RANK = (0.95, 0.8)  # rank correlations with the exact variances: below, the order suffers, and is lost
STOPPED = (1.5, 8.0)  # HeC3 over that after a Newton step; up to 8 standard errors are within twice those of retraining
NEWTON_CHANGE = (0.25, 1.0)  # root mean square change of predictions by a Newton step, or its error, in standard errors
LONGEST_STEP = 1.25  # longest Newton step, in lengths of the weights; beyond, the network is near no optimum at all
LINEARIZATION_ERROR = (0.3, 1.0)  # linearization error of a change of outputs, relative to the change
NEARLY_ALL = 0.9  # degrees of freedom over the numbers in the targets, above which residuals say little about noise
# Shares of examples whose leverage was guarded, by policy.
GUARDED = {"exact": (0.0, 0.01), "one_plus_q": (0.01, 0.2), "clip": (0.0, 0.0)}
UNCONVERGED = 0.1  # relative residual of an exact solve above which nothing is concluded from it


def if_solved(check: Check, residual: float) -> Check:
    """The check, if the exact solves behind it converged to a small enough relative residual."""
    if residual <= UNCONVERGED:
        return check
    words = "Exact solves were stopped before they converged: allow more `seconds`, or a smaller sample."
    return Check(check.name, SKIPPED, {"relative residual": residual}, words)


def stationarity(size: float, change: float, factor: float, recentered: bool, far: bool, trees: bool = False) -> Check:
    """Whether the answers are those of the optimum of the penalised loss.

    Most networks stop elsewhere. Variances of retrained networks mostly lie between HeC3 as it is and HeC3 after the
    last step, and standard errors are off by about the cube root of the factor between the two. If predictions move by
    more than a standard error, care is needed.

    `size` is the length of the Newton step (what remains of it if the fit was recentered) relative to that of the
    weights, `change` that of the predictions by it in standard errors, `factor` is HeC3 over HeC3 with the residuals
    after it. `far` says that it is known to be too long for a linearization, `trees` that weights are leaf values.
    """
    numbers = {"after the step": factor, "standard errors": change, "step": size}
    if trees and not recentered:
        words = (
            "Variances of trees say how leaf values depend on the labels if the splits are fixed. Models that are "
            "trained again, with new splits, vary more: about twenty times as much in a study. Compare predictions by "
            "these numbers, and do not take them for standard errors of a whole training."
        )
        return Check("stationarity", CAREFUL, numbers, words)
    size_level, far_off = level_of(fold_change(factor), STOPPED), change > NEWTON_CHANGE[1]
    level = worst([size_level, CAREFUL if far_off else FINE, NOT if size > LONGEST_STEP and not recentered else FINE])
    words = "The network is at the optimum of the penalised loss, as far as standard errors can tell."
    if level == FINE and change > NEWTON_CHANGE[0]:
        words = (
            "The network stopped before the optimum of the penalised loss, but the last step would change its "
            "variances little: read them as those of networks that are trained the same way."
        )
    elif level != FINE and recentered:
        words = (
            "Residuals were recentered with an approximate step, and variances differ after the exact one. Use "
            'structure="exact" or "core", or train longer.'
        )
    elif level != FINE:
        lost = "predictions" if size_level == FINE else "variances"
        off = f"{fold_change(factor) ** (1 / 3):.1f} times too {'large' if factor > 1 else 'small'}"
        guess = f" Standard errors may be about {off}; verdicts hardly change." if size_level != FINE else ""
        words = (
            f"The network is so far from the optimum of the penalised loss that its {lost} would be different there."
            f"{guess} Check that `ridge` is the one of the training (whence.ridge_from_weight_decay), or train longer"
        )
        words += "." if far else ", or let the fit take the last step (recenter=True)."
        if level == NOT and size <= LONGEST_STEP:
            words += " If you can do neither, use the verdicts, and report no standard errors."
    return Check("stationarity", level, numbers, words)


def factor_after_step(fitted: Fitted, change: Tensor) -> float:
    """HeC3 of the fit over HeC3 after the training outputs have changed by (n, k), computed from these alone.

    Over all training inputs together, in the metric of the loss, HeC3 is sum_i u_i^T Q_i u_i: example i contributes
    a_ji u_i to the prediction at j, and sum_j a_ji^T L_j a_ji is Q_i, up to the ridge.
    """
    loo, blocks = fitted.loo, fitted.bread.leverage_blocks
    ours, after = fitted.adjusted.hec3, replace(loo, recenter=True).residuals(slice(0, fitted.problem.n), change)
    if loo.groups is None:
        after = loo.adjust(after, blocks, fitted.problem.hessian_roots).hec3
    else:  # leverages of groups are not stored; the residuals themselves change in the same way
        ours = loo.residuals(slice(0, fitted.problem.n), fitted.step.change)
    before, then = (float(torch.einsum("nk,nkl,nl->", one, blocks.to(one), one)) for one in (ours, after))
    return before / then if then > 0 else 1.0 if before <= 0 else math.inf


def linearization(loo: float, own: float, newton: float, recentered: bool, hidden: float) -> Check:
    """Whether outputs change linearly in the weights over the steps that matter.

    `loo` is the error of the change of predictions without influential examples, relative to the change, `own` the same
    on those examples themselves, `hidden` the share that rounding may hide, and `newton` the error along the Newton
    step in standard errors, on which predictions depend only if the fit was recentered.
    """
    without = level_of(max(loo, own), LINEARIZATION_ERROR)
    along = level_of(newton, NEWTON_CHANGE) if recentered else FINE
    words = "Outputs are linear in the weights, as far as single training examples move them."
    if without != FINE:
        words = (
            "Without influential examples outputs differ from their linearization by a large share of the change: HeC3 "
            "and what-if are first-order guesses there. A larger ridge, more data, or parameters='last_layer', in "
            "which outputs are linear, makes the error smaller."
        )
    elif along != FINE:
        words = (
            "The step to the optimum, which this fit has taken, is too long for a linearization: its predictions are "
            "not those of the optimum. Train longer, or fit without recenter=True."
        )
    elif hidden > LINEARIZATION_ERROR[0]:
        words = "Rounding hides whether outputs are linear in the weights; use weights of higher precision to see it."
    numbers = {"leave-one-out": loo, "own": own, "Newton": newton}
    return Check("linearization", worst([without, along]), numbers, words)


def degrees_of_freedom(fitted: Fitted, estimates: Tensor | None = None) -> Check:
    """Whether degrees of freedom are possible, compared with Hutchinson's estimates (h,) for the exact curvature."""
    found, numbers = fitted.bread.degrees_of_freedom, fitted.problem.numbers
    figures = {"found": found, "of": float(numbers)}
    share, factor = found / max(numbers, 1), 1.0
    if estimates is not None:
        estimate = float(estimates.mean())
        # The variance of v^T H v over signs v is at most 2 tr H^2, and eigenvalues of H are at most one.
        error = (2.0 * max(estimate, 0.0) / len(estimates)) ** 0.5
        figures |= {"exact": estimate, "error": error}
        if abs(found - estimate) > 2 * error:
            ends = (estimate - 2 * error, estimate + 2 * error)
            factor = min(fold_change(found / end if end else math.inf) for end in ends)
    level = worst([NOT if share > 1.0 else CAREFUL if share > NEARLY_ALL else FINE, level_of(factor, FOLD)])
    words = "Fewer degrees of freedom than there are numbers to fit."
    if share > 1.0:
        words = (
            "More degrees of freedom than there are numbers to fit, which is impossible: the approximation or lambda "
            'is off. Raise `ridge`, or use structure="core" or "exact".'
        )
    elif share > NEARLY_ALL:
        words = "The fit can reproduce nearly every target: residuals say little about noise. Raise `ridge`."
    elif level != FINE:
        words = (
            "The structure has more, or fewer, degrees of freedom than the exact curvature: it is not the curvature of "
            'this network. Use structure="core" or "exact".'
        )
    return Check("degrees of freedom", level, figures, words)


def leverage(fitted: Fitted) -> Check:
    """Whether leverages are possible."""
    guarded, among, policy = fitted.adjusted.guarded, fitted.meats.deletions, fitted.loo.policy
    why = {
        "exact": "determine their own prediction (leverage one): their leave-one-out residuals, and HeC3 near them, "
        "are rounding errors. Raise `ridge`.",
        "one_plus_q": "have an approximate leverage of one or more, which no example has: this structure overstates "
        'the influence of single examples. Raise `ridge`, or use structure="core".',
        "clip": "are clipped, which multiplies their residuals by up to ten thousand: they alone determine HeC3. Use "
        'leverage="one_plus_q", or structure="core".',
    }[policy]
    words = f"{guarded} of {among} {why}" if guarded else "No leverage had to be guarded."
    numbers = {"guarded": float(guarded), "of": float(among), "largest": float(fitted.adjusted.leverage.max())}
    return Check("leverage", level_of(guarded / max(among, 1), GUARDED[policy]), numbers, words)


def hessian_columns(fitted: Fitted) -> Iterator[Check]:
    """Whether there are enough random columns of the Hessians for an inverse curvature of the right size.

    With x degrees of freedom per column, variances are too large: Ho by 1 / (1 - x), as for the inverse of a Wishart
    matrix, and HeC3 by about the fourth power of that, measured for x up to 0.4.
    """
    problem = fitted.problem
    if problem.sketch is None or isinstance(fitted.bread, FittedSpectral):
        return
    freedom, each = fitted.bread.degrees_of_freedom, problem.sketch.columns
    columns = problem.counted * each
    if columns >= problem.numbers:
        return
    share = min(freedom / columns, 1.0 - 1e-6)
    times = 1.0 / (1.0 - share)
    wanted, level = math.ceil(each * share / (1.0 - FOLD[0] ** -0.25)), level_of(times**4, FOLD)
    words = "Random columns of the loss's Hessian are many times the degrees of freedom."
    if level != FINE:
        words = (
            "Random columns of the loss's Hessian are too few for so many degrees of freedom: variances are too large, "
            f"HeC3 by about {times**4:.3g}. Use hessian_columns={wanted} or more, more training examples, a larger "
            "`ridge`, or a core or sketch of fewer coordinates."
        )
    numbers = {"found": freedom, "of": float(columns), "Ho times": times, "HeC3 times": times**4}
    yield Check("Hessian columns", level, numbers, words)


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
    factor = 1.0 if recentered else factor_after_step(fitted, fitted.step.change)
    trees = isinstance(problem.network.model, LeafSum)
    step = stationarity(fitted.step.relative, in_errors, factor, recentered, far=True, trees=trees)
    return Trust((step, *own_checks(fitted)))


def own_checks(fitted: Fitted, freedom: Tensor | None = None) -> tuple[Check, ...]:
    """The checks of every fit; `freedom` are estimates of the degrees of freedom, if solves gave any."""
    own = degrees_of_freedom(fitted, freedom), leverage(fitted)
    return *own, *hessian_columns(fitted), *missed_gradients(fitted)


def missed_gradients(fitted: Fitted) -> Iterator[Check]:
    """Whether a core, or an eigenbasis, contains the gradients that HeC3 consists of: at most one check.

    None for sketched fits, groups, data of other processes, a core of a network with outputs at several positions, and
    an eigenbasis for squared error, where gradients have as much curvature as length.
    """
    problem, core = fitted.problem, isinstance(fitted.bread, FittedPrimal)
    possible = problem.sketch is None and fitted.loo.groups is None and problem.passes.process_group.alone
    if problem.k > MOST_OUTPUTS or not possible:
        return
    name, bounds, where = "diagonal meat", DIAGONAL, "where the eigenbasis consists of rounding errors"
    if core:
        name, bounds, where = "outside the core", INSIDE, "outside the core"
    problem.passes.trim_memory()
    try:
        share = share_inside_core(fitted) if core else share_in_eigenbasis(fitted)
    except RuntimeError as error:
        if not is_full(error):
            raise
        share = math.nan
    if share is None:
        return
    words = "HeC3 has the size that gradients of the most doubtful examples give it, as far as a sample shows."
    if math.isnan(share):
        words = (
            "Gradients of the most doubtful examples were not checked: that needs more memory than allowed. "
            "Tracer.trust(x) compares HeC3 with exact solves."
        )
        yield Check(name, SKIPPED, {}, words)
        return
    if (level := level_of(share, bounds)) != FINE:
        words = (
            f"Gradients of examples with large residuals lie {where}, because there is almost no curvature where the "
            "network is certain of a wrong label. HeC3 is too small, by a factor of about `share`. Use "
            f'structure="exact" or "sketch"{", or a core with a larger `size`" * core}.'
        )
    yield Check(name, level, {"share": share}, words)


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
    columns_out = split([(at, times**0.5 * root(at)) for at, times in sample.counts.items()])[1]
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
    for at, times in sample.counts.items():
        hec3 += times * _products(solved, sample.gradients(at, fitted.meats.roots["hec3"][at].T)).square().sum(1)
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
