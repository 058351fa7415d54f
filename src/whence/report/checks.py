"""Whether to trust the numbers of a report, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whence.display import count
from whence.influence.fitted import Fitted
from whence.report.text import number, percent
from whence.report.traced import Traced
from whence.results import Diagnostics, Finding
from whence.trust import Trust


class Check(NamedTuple):
    """Something that was checked: whether it is fine, what it is, and what that means."""

    status: str  # "fine", "careful", "do not trust" or "note"
    title: str
    text: str


def value_text(finding: Finding) -> str:
    """The value of a finding."""
    return finding.value if isinstance(finding.value, str) else number(finding.value, 4)


def checks(fitted: Fitted, traced: Traced, trust: Trust | Diagnostics | None) -> Iterator[Check]:
    """What `Tracer.trust` or other diagnostics found, then what the fit itself tells."""
    if trust is None:
        yield Check(
            "note",
            "Not checked",
            "How far the fit is from the exact curvature was not checked on a sample of predictions. To check it, pass "
            "trust=tracer.trust(inputs).",
        )
    elif isinstance(trust, Diagnostics):
        yield from (Check("note", f"{one.name}: {value_text(one)}", one.words) for one in trust)
    else:
        for one in trust:
            yield Check("note" if one.level == "not checked" else one.level, one.name.capitalize(), one.text)
    yield _optimum(fitted)
    yield _degrees_of_freedom(fitted)
    yield _leverage(fitted)
    yield _sums(traced)
    if traced.agreement is not None:
        yield _estimated_verdicts(traced, traced.agreement)
    yield from (Check("note", "Note", str(one.value)) for one in fitted.diagnostics if one.name == "note")


def _optimum(fitted: Fitted) -> Check:
    change = float(fitted.diagnostics["Newton change"])
    text = f"One more step to the optimum would change the training residuals by {percent(change)} of their size."
    if fitted.loo.recenter:
        return Check("fine", "The step to the optimum was taken", f"{text} It was taken, as asked for (recenter=True).")
    if change <= 0.1:
        return Check("fine", "The network is near its optimum", f"{text} The method assumes that this is small.")
    advice = "Variances assume an optimum: train longer, or fit with recenter=True."
    return Check("careful", "The network is not at its optimum", f"{text} {advice}")


def _degrees_of_freedom(fitted: Fitted) -> Check:
    freedom, numbers = fitted.degrees_of_freedom, fitted.problem.numbers
    text = f"The network uses {number(freedom, 4)} effective degrees of freedom for {numbers:,} training targets"
    if freedom > numbers:
        return Check("careful", "More freedom than data", f"{text}: the approximation is poor, or lambda too small.")
    if freedom > 0.7 * numbers:
        advice = "It nearly reproduces its training labels, so that leave-one-out residuals are poorly determined."
        return Check("careful", "Little data is left to estimate the noise", f"{text}. {advice}")
    return Check("fine", "Enough data is left to estimate the noise", f"{text}.")


def _leverage(fitted: Fitted) -> Check:
    largest, guarded = float(fitted.leverage.max()), int(float(fitted.diagnostics["guarded leverages"]))
    text = f"The largest leverage of an output is {number(largest)}; at one an example decides its own prediction."
    if guarded:
        advice = "The leave-one-out residual of an example that decides its own prediction is a guess."
        return Check("careful", f"{count(guarded, 'leverage')} limited by a guard", f"{text} {advice}")
    return Check("fine", "No training example decides alone", text)


def _sums(traced: Traced) -> Check:
    text = (
        f"The sum of the shares of all training examples differs from the variance by {percent(traced.gap)} (median)."
    )
    if traced.gap > 0.2:
        advice = "The structure of the curvature is an approximation: trust the order more than the size."
        return Check("careful", "Shares and variances disagree", f"{text} {advice}")
    return Check("fine", "Shares add up", text)


def _estimated_verdicts(traced: Traced, agreement: float) -> Check:
    m, t = len(traced.explanation), len(traced.chosen)
    return Check(
        "fine" if agreement >= 0.9 else "careful",
        f"{count(m - t, 'verdict')} about noise estimated",
        f"{t:,} of {m:,} predictions were traced to training examples. Whether labels near the others are noisy is "
        f"estimated from their variances alone; for the traced ones both ways agree in {percent(agreement)}.",
    )
