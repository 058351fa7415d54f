"""How many labels of classes are wrong in all, from what models say that did not see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

LEAST_LABELS = 200
"""With fewer labels an estimate would rest on a handful of rows."""

MOST_CONTRADICTED, MOST_OVERLAP = 0.2, 0.1
"""Nothing is said where more labels than this are contradicted, in all or because classes overlap: wrong labels and
hard cases cannot be told apart there."""

BINS = 60
SHARES = numpy.linspace(0.0, MOST_CONTRADICTED, 201)
HEIGHTS, POWERS = numpy.linspace(-10.0, 3.0, 40), numpy.array([1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0])
DROP = 1.92
"""Of the log-likelihood at the ends of a 95 % interval."""


@dataclass(frozen=True)
class WrongLabels:
    """An estimate of the share of wrong labels, with a 95 % interval.

    Examples:
        >>> print(WrongLabels(0.05, 0.039, 0.062))
        about 5 % of labels look wrong (3.9 to 6.2 %)
        >>> print(WrongLabels(0.001, 0.0, 0.012))
        at most 1.2 % of labels look wrong
    """

    share: float
    lower: float
    upper: float

    def __str__(self) -> str:
        """In words."""
        share, lower, upper = (f"{100 * value:.2g}" for value in (self.share, self.lower, self.upper))
        if self.lower == 0.0:
            return f"at most {upper} % of labels look wrong"
        return f"about {share} % of labels look wrong ({lower} to {upper} %)"


def wrong_labels(labels: Any, suggested: Any, probability: Any, classes: int) -> WrongLabels | None:
    """The share of wrong labels, or `None` where it cannot be known.

    Where classes overlap, the other rows contradict right labels too, but the more rarely the surer they are; a wrong
    label is contradicted wherever it is. So the share r of wrong labels is what is left among the surest rows. With q
    the rank of a row by the probability of its suggested label, from 0 for the surest to 1, a label is contradicted
    with probability

        r + (1 - r c / (c - 1)) e(q),  logit e(q) = a + b logit(q),  b >= 1

    for c classes, wrong labels being as likely in every row and of every class: a psychometric function with a lapse
    rate. Maximum likelihood, with a profile likelihood interval.

    Args:
        labels: (n,) indices of classes.
        suggested: (n,) the most probable class by a model that did not see the label.
        probability: (n,) of that class.
        classes: how many there are.
    """
    contradicted = numpy.asarray(labels) != numpy.asarray(suggested)
    n = len(contradicted)
    if n < LEAST_LABELS or contradicted.mean() > MOST_CONTRADICTED:
        return None
    order = numpy.argsort(-numpy.asarray(probability), kind="stable")
    total, found = (
        numpy.array([part.sum() for part in numpy.array_split(values, BINS)], dtype=float)
        for values in (numpy.ones(n), contradicted[order])
    )
    q = (numpy.arange(BINS) + 0.5) / BINS
    logit = HEIGHTS[:, None, None] + POWERS[:, None] * numpy.log(q / (1 - q))
    overlap = 1 / (1 + numpy.exp(-logit))

    def profile(share: float) -> float:
        p = numpy.clip(share + (1 - share * classes / (classes - 1)) * overlap, 1e-12, 1 - 1e-12)
        return float((found * numpy.log(p) + (total - found) * numpy.log1p(-p)).sum(-1).max())

    likelihood = numpy.array([profile(share) for share in SHARES])
    best = int(likelihood.argmax())
    share = float(SHARES[best])
    if contradicted.mean() - share > MOST_OVERLAP:
        return None
    inside = SHARES[likelihood >= likelihood[best] - DROP]
    return WrongLabels(share, float(inside[0]), float(inside[-1]))
