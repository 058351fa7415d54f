"""Findings in words: the answer, the actions, the galleries, the suspects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.display import count
from whence.ordering import largest_first

from .actions import Action
from .causes import Traced
from .content import TONES, Card, Gallery, Tile
from .ids import Ids
from .items import Item, Shown
from .page import Row, Table
from .predictions import Predictions
from .training import Training, say
from .words import number, percent

SHOWN = 24
ODD = 3
"""Unusual columns that are named."""


def codes(traced: Traced) -> Tensor:
    """(m,) verdicts as numbers."""
    return traced.explanation.noisy.long() + 2 * traced.explanation.scarce.long()


def answer(traced: Traced) -> tuple[str, ...]:
    """How many predictions are uncertain, for which source, and how many would be by chance."""
    m = len(traced.explanation)
    _, noisy, scarce, both = torch.bincount(codes(traced), minlength=4).tolist()
    uncertain = noisy + scarce + both
    rate = 1.0 - traced.explanation.level
    chance = m * (1.0 - (1.0 - rate) ** 2)
    if not uncertain:
        return (f"None of the {m:,} predictions stands out as uncertain, neither by noisy labels nor by scarce data.",)
    parts = [
        f"{noisy:,} because training labels near them are noisy" if noisy else "",
        f"{scarce:,} because there is little training data near them" if scarce else "",
        f"{both:,} for both reasons" if both else "",
    ]
    told = [part for part in parts if part]
    listing = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
    return (
        f"{uncertain:,} of {count(m, 'prediction')} {'is' if uncertain == 1 else 'are'} uncertain: {listing}.",
        f"If labels were equally noisy everywhere and inputs like those in training, about {chance:,.0f} would be "
        f"called so by chance ({100 * rate:.3g} % for each reason)."
        + (" No more than that were found." if uncertain <= chance else ""),
    )


def together(todo: Sequence[Action]) -> str:
    """What the actions of each kind come to."""
    sums = {kind: [action.benefit for action in todo if action.kind == kind] for kind in ("label", "region")}
    words = []
    for kind, benefits in sums.items():
        if len(benefits) > 1:
            sum_ = percent(sum(benefits))
            about = "" if sum_.startswith("less") else "up to " if kind == "label" else "about "
            words.append(f"{count(len(benefits), kind)} together: {about}{sum_}")
    return f"The {', the '.join(words)}." if words else ""


def by_class(predictions: Predictions, traced: Traced, most: int = 30) -> Table | None:
    """How many predictions of each class are uncertain, for which source; the most uncertain class first."""
    if predictions.meaning.kind != "classes":
        return None
    known = predictions.known is not None and predictions.truth is not None
    classes = predictions.truth if known else predictions.answers
    assert classes is not None
    code, rows = codes(traced), []
    for place, name in enumerate(predictions.meaning.names):
        here = classes == place
        total = int(here.sum())
        if not total:
            continue
        counts = torch.bincount(code[here], minlength=4).tolist()
        cells = [f"{total:,}", *(f"{found:,} ({percent(found / total)})" for found in counts[1:])]
        if known:
            cells.append(percent(float((~predictions.right[here]).double().mean())))
        rows.append((counts[0] / total, Row(name, tuple(cells))))
    rows.sort(key=lambda one: one[0])
    return Table(
        caption=f"Predictions by {'true' if known else 'predicted'} class, the most uncertain class first"
        + (f"; {most} of {len(rows)} classes." if len(rows) > most else "."),
        columns=("class", "predictions", "noisy labels nearby", "scarce data", "both", *(("wrong",) if known else ())),
        rows=tuple(row for _, row in rows[:most]),
    )


def tiles(traced: Traced) -> tuple[Tile, ...]:
    """A count for each verdict."""
    counts = torch.bincount(codes(traced), minlength=4).tolist()
    words = (
        "confident: nothing unusual",
        "noisy labels nearby: check labels",
        "scarce data: collect more like these",
        "both: check labels and collect",
    )
    return tuple(Tile(counts[code], words[code], TONES[code]) for code in (1, 2, 3, 0))


def action_cards(
    todo: Sequence[Action],
    predictions: Predictions,
    traced: Traced,
    training: Training,
    shown: Shown,
    ids: Ids,
) -> tuple[Card, ...]:
    """What to do, with reasons."""
    return tuple(
        _check(action, training, shown, ids)
        if action.kind == "label"
        else _region(action, predictions, traced, shown, ids)
        for action in todo
    )


def _check(action: Action, training: Training, shown: Shown, ids: Ids) -> Card:
    doubt = training.doubt(action.at)
    return Card(
        title=f"Check the label of {ids.example(action.at)}",
        lines=(
            f"It says {training.label(action.at)}; the other examples say {training.opinion(action.at)}.",
            f"{doubt[0].upper()}{doubt[1:]}.",
        ),
        tone="noise",
        item=shown.train.get(action.at),
        badge=f"up to {percent(action.benefit)} of the variance",
    )


def _region(action: Action, predictions: Predictions, traced: Traced, shown: Shown, ids: Ids) -> Card:
    item = shown.test.get(action.at)
    place = int((traced.chosen == action.at).nonzero()[0])
    near = ids.examples(traced.near.index[place, :3].tolist())
    like = f"It stands for {action.stands_for} of {action.among} scarce predictions." if action.stands_for > 1 else ""
    odd = _odd(item, shown.columns)
    return Card(
        title=f"Collect and label inputs like {ids.prediction(action.at)}",
        lines=tuple(
            line
            for line in (
                f"Predicted: {predictions.say(action.at)}.",
                like,
                f"Unusual: {odd}." if odd else "",
                f"Nearest in training: {near}.",
            )
            if line
        ),
        tone="scarcity",
        item=item,
        prediction=action.at,
        badge=f"{'about ' if action.benefit >= 0.001 else ''}{percent(action.benefit)} of the variance",
    )


def _odd(item: Item | None, columns: Sequence[str]) -> str:
    if item is None or not item.odd:
        return ""
    return "; ".join(f"{columns[place]} {item.cells[place]}, {words}" for place, words in item.odd[:ODD])


def galleries(predictions: Predictions, traced: Traced, shown: Shown, ids: Ids) -> tuple[Gallery, ...]:
    """The most uncertain of the traced predictions by source."""
    explanation, code = traced.explanation, codes(traced)
    kinds = (
        (1, "Noisy labels nearby", "Highest HeC3/Ho first. Check the training labels behind them.", explanation.ratio),
        (2, "Scarce data", "Highest Ho first. Collect and label more inputs like these.", explanation.ho),
        (3, "Both", "Highest HeC3 first. Few training examples, and bad labels among them.", explanation.hec3),
    )
    found = []
    for number_, title, intro, score in kinds:
        some = traced.chosen[code[traced.chosen] == number_]
        best = some[largest_first(score[some])[:SHOWN]].tolist()
        if best:
            cards = tuple(_prediction(one, predictions, traced, shown, ids) for one in best)
            found.append(Gallery(title, intro, TONES[number_], cards))
    return tuple(found)


def _prediction(at: int, predictions: Predictions, traced: Traced, shown: Shown, ids: Ids) -> Card:
    explanation, known = traced.explanation, predictions.known
    truth = ""
    if known is not None and bool(known[at]):
        assert predictions.truth is not None
        told = say(predictions.meaning, predictions.truth[at])
        numbers, good = predictions.meaning.kind == "numbers", bool(predictions.right[at])
        truth = f"observed {told}" if numbers else "✓ right" if good else f"✗ truly {told}"
    code = int(codes(traced)[at])
    return Card(
        title=predictions.say(at),
        lines=tuple(
            line
            for line in (
                truth,
                f"HeC3/Ho {number(float(explanation.ratio[at]), 2)}",
                f"Ho {number(float(explanation.ho[at]), 2)}",
            )
            if line
        ),
        tone=TONES[code],
        item=shown.test.get(at),
        prediction=at,
        badge=ids.prediction(at),
    )


def suspect_cards(doubted: Sequence[int], training: Training, shown: Shown, ids: Ids) -> tuple[Card, ...]:
    """Training examples whose labels to doubt first."""
    return tuple(
        Card(
            title=f"labelled {training.label(at)}",
            lines=(
                f"others say {training.opinion(at)}",
                training.doubt(at),
            ),
            tone="noise" if bool(training.contradicted[at]) else "plain",
            item=shown.train.get(at),
            badge=ids.example(at),
        )
        for at in doubted
    )
