"""Whether to trust the numbers of a report, in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whence.display import count
from whence.results import Diagnostics
from whence.tracing.trust import Trust
from whence.tracing.trust.result import CAREFUL, FINE, NOT, SKIPPED

from .causes import Traced
from .fitted import Reportable
from .words import number, percent

Status = Literal["good", "caution", "bad", "note"]
STATUSES: dict[str, Status] = {FINE: "good", CAREFUL: "caution", NOT: "bad", SKIPPED: "note"}


@dataclass(frozen=True)
class Check:
    """Something that was checked: whether it is fine, what it is, and what that means."""

    status: Status
    title: str
    words: str


def checks(fitted: Reportable, traced: Traced) -> list[Check]:
    """What the fit itself tells about how far its numbers can be trusted."""
    return [
        _optimum(fitted),
        _room(fitted),
        _leverage(fitted),
        _sums(fitted, traced),
        *_estimates(traced),
        *_notes(fitted),
    ]


def checks_of(trust: Trust | Diagnostics | None) -> list[Check]:
    """Checks of `Tracer.trust`, or findings of other diagnostics."""
    if trust is None:
        words = (
            "How far the fit is from the exact curvature was not checked on a sample of predictions. To see it, pass "
        )
        return [Check("note", "Not checked", words + "trust=tracer.trust(inputs).")]
    if isinstance(trust, Diagnostics):
        told = [
            (one.name, one.value if isinstance(one.value, str) else number(one.value, 4), one.words) for one in trust
        ]
        return [Check("note", f"{name}: {value}", words) for name, value, words in told]
    return [Check(STATUSES[one.level], one.name.capitalize(), one.told) for one in trust]


def _optimum(fitted: Reportable) -> Check:
    moved = float(fitted.diagnostics["Newton change"])
    told = f"One more step to the optimum would change the training residuals by {percent(moved)} of their size."
    if fitted.weighing.recenter:
        return Check("good", "The step to the optimum was taken", f"{told} It was taken, as asked for (recenter=True).")
    if moved <= 0.1:
        return Check("good", "The network is near its optimum", f"{told} The method supposes that this is little.")
    return Check(
        "caution",
        "The network is not at its optimum",
        f"{told} Variances suppose an optimum: train longer, or fit with recenter=True.",
    )


def _room(fitted: Reportable) -> Check:
    freedom, numbers = fitted.degrees_of_freedom, fitted.problem.numbers
    told = f"The network uses {number(freedom, 4)} effective degrees of freedom of {numbers:,} numbers it was shown"
    if freedom > numbers:
        return Check("caution", "More freedom than data", f"{told}: the approximation, or lambda, is off.")
    if freedom > 0.7 * numbers:
        return Check(
            "caution",
            "Little is left to tell noise by",
            f"{told}. It nearly repeats its training labels; leave-one-out residuals then rest on few differences.",
        )
    return Check("good", "There is data to tell noise by", f"{told}.")


def _leverage(fitted: Reportable) -> Check:
    most, guarded = float(fitted.leverage.max()), int(float(fitted.diagnostics["guarded leverages"]))
    told = f"The largest leverage of an output is {number(most)}; at one an example decides its own prediction."
    if guarded:
        return Check(
            "caution",
            f"{count(guarded, 'leverage')} held back by a guard",
            f"{told} Where nothing is left of an example without itself, its leave-one-out residual is a guess.",
        )
    return Check("good", "No training example decides alone", told)


def _sums(fitted: Reportable, traced: Traced) -> Check:
    told = f"The shares of all training examples differ in sum from the variance by {percent(traced.gap)} (median)."
    if traced.gap > 0.2:
        return Check(
            "caution",
            "Shares and variances disagree",
            f"{told} The structure of the curvature is an approximation: trust the order more than the size.",
        )
    return Check("good", "Shares add up", told)


def _estimates(traced: Traced) -> list[Check]:
    if traced.agreement is None:
        return []
    status: Status = "good" if traced.agreement >= 0.9 else "caution"
    told = (
        f"{len(traced.chosen):,} of {len(traced.explanation):,} predictions were traced to training examples. Whether "
        "labels near the others are noisy is told from their variances alone; for the traced ones both ways agree in "
        f"{percent(traced.agreement)}."
    )
    left = len(traced.explanation) - len(traced.chosen)
    return [Check(status, f"{count(left, 'verdict')} about noise estimated", told)]


def _notes(fitted: Reportable) -> list[Check]:
    return [Check("note", "Note", str(finding.value)) for finding in fitted.diagnostics if finding.name == "note"]
