"""How many labels of classes are wrong in all, from what models say that did not see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy

LEAST_LABELS = 200
"""With fewer labels an estimate would rest on a handful of rows."""

MOST_CONTRADICTED, MOST_OVERLAP = 0.2, 0.1
"""Nothing is said where more labels than this are contradicted, in all or because classes overlap: wrong labels and
hard cases cannot be distinguished there."""

BINS = 60
SHARES = numpy.linspace(0.0, 0.3, 301)
HEIGHTS, POWERS = numpy.linspace(-10.0, 3.0, 27), numpy.geomspace(0.7, 8.0, 7)
"""The grids of r, a and b, each point as likely beforehand."""

MENTIONED = 0.02
"""Contradictions beyond those of wrong labels are mentioned from this share on."""

NONE = 0.15
"""If no wrong label at all is at least this likely, over the most likely share, the interval starts at zero."""


@dataclass(frozen=True)
class WrongLabels:
    """An estimate of the share of wrong labels, with a 95 % interval; or the reason why there is none.

    Examples:
        >>> print(WrongLabels(0.05, 0.039, 0.062))
        about 5 % of labels look wrong (3.9 to 6.2 %)
        >>> print(WrongLabels(0.001, 0.0, 0.012))
        at most 1.2 % of labels look wrong
        >>> print(WrongLabels(0.001, 0.0, 0.012, 0.03))  # doctest: +NORMALIZE_WHITESPACE
        at most 1.2 % of labels look wrong where examples are clear; another 3 % are contradicted in places that are
        hard or full of errors
        >>> print(WrongLabels(unknown="30 labels are too few"))
        it cannot be said how many labels are wrong: 30 labels are too few
    """

    share: float = math.nan
    lower: float = math.nan
    upper: float = math.nan
    overlap: float = 0.0  # share of labels that are contradicted beyond that
    unknown: str = ""  # why there is no estimate

    def __str__(self) -> str:
        """In words."""
        if self.unknown:
            return f"it cannot be said how many labels are wrong: {self.unknown}"
        share, lower, upper, rest = (f"{100 * one:.2g}" for one in (self.share, self.lower, self.upper, self.overlap))
        more = f"; another {rest} % are contradicted in places that are hard or full of errors"
        more = more if self.overlap >= MENTIONED else ""
        if self.lower == 0.0:
            return f"at most {upper} % of labels look wrong{' where examples are clear' if more else ''}{more}"
        return f"about {share} % of labels look wrong ({lower} to {upper} %){more}"


def wrong_labels(labels: Any, suggested: Any, probability: Any, classes: int) -> WrongLabels:
    """The share of wrong labels, or why it cannot be known.

    Where classes overlap, the other rows contradict right labels too, but the more rarely the surer they are; a wrong
    label is contradicted wherever it is. So the share r of wrong labels is what is left among the surest rows. With q
    the rank of a row by the probability of its suggested label, from 0 for the surest to 1, a label is contradicted
    with probability

        r + (1 - r c / (c - 1)) e(q),  logit e(q) = a + b logit(q)

    for c classes, wrong labels being as likely in every row and of every class: a psychometric function with a lapse
    rate. The share is the mode of its posterior, the interval holds 95 % of it. Where wrong labels lie close together
    the model is unsure, they count as overlap, and the share is a lower bound.

    Args:
        labels: (n,) indices of classes.
        suggested: (n,) the most probable class by a model that did not see the label.
        probability: (n,) of that class.
        classes: how many there are.
    """
    contradicted = numpy.asarray(labels) != numpy.asarray(suggested)
    n = len(contradicted)
    if n < LEAST_LABELS:
        return WrongLabels(unknown=f"{n} labels that the model has not seen are too few (less than {LEAST_LABELS})")
    hard = "wrong labels and hard cases cannot be distinguished"
    if contradicted.mean() > MOST_CONTRADICTED:
        return WrongLabels(unknown=f"the model contradicts {contradicted.mean():.0%} of them, and {hard}")
    order = numpy.argsort(-numpy.asarray(probability), kind="stable")
    total, found = (
        numpy.array([part.sum() for part in numpy.array_split(values, BINS)], dtype=float)
        for values in (numpy.ones(n), contradicted[order])
    )
    q = (numpy.arange(BINS) + 0.5) / BINS
    overlap = 1 / (1 + numpy.exp(-(HEIGHTS[:, None, None] + POWERS[:, None] * numpy.log(q / (1 - q)))))
    logs = numpy.empty((len(SHARES), len(HEIGHTS), len(POWERS)))
    for at, share in enumerate(SHARES):
        p = numpy.clip(share + (1 - share * classes / (classes - 1)) * overlap, 1e-12, 1 - 1e-12)
        logs[at] = (found * numpy.log(p) + (total - found) * numpy.log1p(-p)).sum(-1)
    posterior = numpy.exp(logs - logs.max()).sum((1, 2))
    below = numpy.cumsum(posterior) / posterior.sum()
    share = float(SHARES[posterior.argmax()])
    if contradicted.mean() - share > MOST_OVERLAP:
        return WrongLabels(unknown=f"classes overlap, and {hard}")
    ends = (0.0, 0.95) if posterior[0] >= NONE * posterior.max() else (0.025, 0.975)
    lower, upper = (float(SHARES[numpy.searchsorted(below, end)]) for end in ends)
    return WrongLabels(share, lower, upper, max(0.0, float(contradicted.mean()) - share))
