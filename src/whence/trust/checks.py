"""Checks of a fit: a level, the numbers behind it, and a sentence that says what they mean and what to do.

The results come first (`Check`, `Trust`), then the rules that turn numbers into levels and words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.curvature.spectral import FittedSpectral
from whence.display import Column, Shown, Table, count, number
from whence.influence.fitted import Fitted
from whence.results import frame

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


def judged(name: str, level: str, numbers: Mapping[str, float], fine: str, otherwise: str) -> Check:
    """A check with one text if it is fine, and another if not."""
    return Check(name, level, numbers, fine if level == FINE else otherwise)


def not_checked(name: str, words: str) -> Check:
    """A check that was not possible, with the reason."""
    return Check(name, SKIPPED, {}, words)


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
    wanted = math.ceil(each * share / (1.0 - FOLD[0] ** -0.25))
    yield judged(
        "Hessian columns",
        level_of(times**4, FOLD),
        {"found": freedom, "of": float(columns), "Ho times": times, "HeC3 times": times**4},
        "Random columns of the loss's Hessian are many times the degrees of freedom.",
        f"Random columns of the loss's Hessian are too few for so many degrees of freedom: variances are too large, "
        f"HeC3 by about {times**4:.3g}. Use hessian_columns={wanted} or more, more training examples, a larger "
        "`ridge`, or a core or sketch of fewer coordinates.",
    )
