"""Parts of a page made from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.results import Diagnostics, Uncertainty

from .images import png
from .page import Card, Facts, Gallery, Group, Point, Scatter
from .ranking import SCORES, ranks, score, top

T = TypeVar("T")

REST = Group("predictions")


def rank_scatter(
    uncertainty: Uncertainty,
    groups: Sequence[Group] | None = None,
    labels: Sequence[str] | None = None,
    caption: str = "Each point is a prediction: its place by Ho, left to right, and by HeC3, bottom to top.",
) -> Scatter:
    """The paper's picture: rank by Ho against rank by HeC3.

    Args:
        uncertainty: of m predictions.
        groups: one for each prediction; points of a toned group are drawn on top.
        labels: what to show for each prediction when pointed at.
        caption: below the picture.
    """
    m = len(uncertainty)
    kinds = _one_each(groups, REST, m, "groups")
    texts = _one_each(labels, "", m, "labels")
    x, y = (ranks(score(uncertainty, name)).tolist() for name in ("ho", "hec3"))
    points = [Point(*point) for point in zip(x, y, kinds, texts, strict=True)]
    return Scatter(
        points=tuple(sorted(points, key=lambda point: point.group.tone != "plain")),
        x_label="rank by Ho",
        y_label="rank by HeC3",
        caption=caption,
        left_hint="far above the line: noise",
        right_hint="far right: scarcity",
    )


def most_uncertain(
    uncertainty: Uncertainty,
    by: str,
    count: int = 24,
    *,
    names: Sequence[str] | None = None,
    images: Tensor | None = None,
    groups: Sequence[Group] | None = None,
    lines: Sequence[Sequence[str]] | None = None,
    caption: str = "",
) -> Gallery:
    """The predictions with the highest score, the highest first.

    Args:
        uncertainty: of m predictions.
        by: "ratio" or the name of an estimator.
        count: how many to show.
        names: title of each prediction; its number when not given.
        images: (m, h, w) grey or (m, h, w, 3) colour, between 0 and 1.
        groups: one for each prediction.
        lines: more text for each prediction, under its score.
        caption: below the gallery.
    """
    if count < 1:
        raise InputError(f"expected a count of at least 1, got {count}.")
    m = len(uncertainty)
    titles = [f"no. {number}" for number in range(m)] if names is None else _one_each(names, "", m, "names")
    kinds = [None] * m if groups is None else _one_each(groups, REST, m, "groups")
    texts = _one_each(lines, (), m, "lines")
    if images is not None and len(images) != m:
        raise ShapeError(f"expected {m} images, one for each prediction, got {len(images)}.")
    values = score(uncertainty, by)
    cards = [
        Card(
            title=titles[place],
            lines=(f"{SCORES.get(by, by)} {float(values[place]):#.2g}", *texts[place]),
            picture=None if images is None else png(images[place]),
            group=kinds[place],
        )
        for place in top(values, count)
    ]
    return Gallery(tuple(cards), caption)


def facts(diagnostics: Diagnostics) -> Facts:
    """What was approximated, guarded or repaired.

    Examples:
        >>> from whence import Finding
        >>> facts(Diagnostics((Finding("ridge", 5.0, "lambda on the sum scale"),))).rows
        (('ridge', '5', 'lambda on the sum scale'),)
    """
    return Facts(
        tuple(
            (finding.name, finding.value if isinstance(finding.value, str) else f"{finding.value:.4g}", finding.words)
            for finding in diagnostics
        )
    )


def _one_each(given: Sequence[T] | None, otherwise: T, m: int, what: str) -> list[T]:
    if given is None:
        return [otherwise] * m
    if len(given) != m:
        raise ShapeError(f"expected {m} {what}, one for each prediction, got {len(given)}.")
    return list(given)
