"""From a fit and test inputs to everything a report says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whence._version import __version__
from whence.errors import InputError
from whence.results import Diagnostics
from whence.tracing.fitted import check_count, check_level, check_ungrouped
from whence.tracing.trust import Trust

from . import cards
from .actions import actions
from .causes import Traced, trace
from .content import Content, Suspects
from .exhibits import Exhibits
from .fitted import Reportable
from .health import checks, checks_of
from .ids import Ids
from .items import Shown, collect
from .page import Facts, Section
from .payload import payload
from .predictions import Predictions, charts, outcome
from .reading import Source
from .training import Training, targets_of
from .words import number

SUSPECTS = 24


def gather(
    fitted: Reportable,
    test: Any,
    train: Any,
    names: Sequence[str] | None,
    exhibits: tuple[Any, Any, Any],
    *,
    ids: Any,
    title: str,
    about: Sequence[str],
    sections: Sequence[Section],
    trust: Trust | Diagnostics | None,
    level: float,
    traced: int,
) -> Content:
    """Ask the fit about everything that the page shows; see `whence.Tracer.report`."""
    check_level(level)
    check_count(traced, "traced")
    check_ungrouped(fitted)
    check_plain(fitted)
    positional = fitted.problem.batches.positional
    tests = Source.of(test, positional, "test")
    trains = Source.of(_own(fitted) if train is None else train, positional, "train")
    training = Training.of(fitted, targets_of(trains, fitted.problem.n), names)
    predictions, first = predict(fitted, tests, training)
    called = Ids.of(ids, len(predictions), len(training))
    show = Exhibits.of(*exhibits, first)
    found = trace(fitted, tests, predictions.uncertainty, float(level), traced)
    todo = actions(fitted, found, training)
    doubted = training.order[:SUSPECTS].tolist()
    must = [action.at for action in todo if action.kind == "label"] + doubted
    shown = collect(show, tests, trains, (len(predictions), len(training)), found, must)
    return Content(
        title=title,
        about=tuple(about),
        answer=(*cards.answer(found), *filter(None, [outcome(predictions)])),
        tiles=cards.tiles(found),
        actions=cards.action_cards(todo, predictions, found, training, shown, called),
        together=cards.together(todo),
        classes=cards.by_class(predictions, found),
        galleries=cards.galleries(predictions, found, shown, called),
        suspects=Suspects(cards.suspect_cards(doubted, training, shown, called), tuple(doubted)),
        charts=charts(predictions),
        checks=[*checks_of(trust), *checks(fitted, found)],
        facts=how(fitted, predictions, found),
        sections=tuple(sections),
        shown=shown,
        data=payload(predictions, found, training, shown, called),
        bound=bound(found, shown),
        footer=f"Made by whence {__version__}. Nothing on this page was loaded from elsewhere.",
    )


def check_plain(fitted: Reportable) -> None:
    """Raise where an example has no single answer, or not all of its outputs are known."""
    problem = fitted.problem
    if problem.dense:
        raise InputError(
            "expected a network that answers once for each example, got one that answers at several positions, of "
            "which no report can be made yet. Use `predict` and `explain`, or fit a model that returns one position."
        )
    if problem.sketch is not None:
        raise InputError(
            f"expected a fit that looks at all {problem.width} outputs, got one that looks at {problem.k} mixtures of "
            'them. For a report call whence.fit with outputs="all".'
        )


def _own(fitted: Reportable) -> Any:
    """The training data of the fit."""
    batches = fitted.problem.batches
    next(batches.read(None))  # a fit that was loaded without its data says so here
    return batches.loader


def predict(fitted: Reportable, source: Source, training: Training) -> tuple[Predictions, Any]:
    """All predictions, with the targets that came along, and the first batch of inputs."""
    targets: list[Tensor | None] = []
    first: list[Any] = []

    def inputs() -> Any:
        for _, batch, known in source.read():
            targets.append(known)
            if not first:
                first.append(batch)
            yield batch

    uncertainty = fitted.predict(inputs())
    some = [one.cpu() for one in targets if one is not None]
    if some and len(some) != len(targets):
        raise InputError("expected targets with all test batches or with none, got them with some only.")
    joined = torch.cat(some) if some else None
    noise = fitted.sigma.diagonal()
    return Predictions.of(uncertainty, training.meaning, noise, joined), first[0]


def bound(traced: Traced, shown: Shown) -> str:
    """What was left out to keep the page small, in words."""
    m, t = len(traced.explanation), len(traced.chosen)
    words = (
        f"All {m:,} predictions were traced to training examples."
        if t == m
        else (
            f"{t:,} of {m:,} predictions were traced to training examples: the most uncertain by Ho, HeC3 and their "
            "ratio, and others spread evenly over all ranks. The rest is shown with its variances only."
        )
    )
    if shown.form == "none" or not shown.train:
        return words
    return f"{words} {len(shown.test):,} test and {len(shown.train):,} training inputs are part of this page."


def how(fitted: Reportable, predictions: Predictions, traced: Traced) -> Facts:
    """Settings, and what the fit found."""
    problem = fitted.problem
    rows = [
        ("network", type(problem.network.model).__name__, f"{problem.k} outputs, {problem.likelihood.name} likelihood"),
        ("training examples", f"{problem.n:,}", "that the fit was made with"),
        ("predictions", f"{len(predictions):,}", f"{len(traced.chosen):,} of them traced"),
        ("curvature", type(fitted.bread).__name__, "how the inverse of the curvature was represented"),
        (
            "level",
            f"{traced.explanation.level:g}",
            "ordinary predictions are called noisy, or scarce, by chance no more often than one minus this",
        ),
    ]
    rows += [
        (finding.name, finding.value if isinstance(finding.value, str) else number(finding.value, 4), finding.words)
        for finding in fitted.diagnostics
        if finding.name != "note"
    ]
    return Facts(tuple(rows))
