"""Answers that people gave to a worklist: read, put in the place of labels, and what they changed.

They come as the CSV file of `whence.tabular.worklist` with the column `answer` filled in, or as Label Studio exports
them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from whence.display import listing
from whence.errors import InputError, WhenceError, did_you_mean
from whence.tabular.files import TextTable, read_table
from whence.tabular.fitted import FittedTable, Prepared
from whence.tabular.labels import RowLabels, row_batches
from whence.tabular.predictions import RowPredictions, affordable_rows
from whence.tabular.target import RowSplit, Target
from whence.tabular.worklist import row_key

MOVED = 5
"""Rows that are named whose prediction moved most."""


@dataclass(frozen=True)
class Answer:
    """What a person said of one row; a number where the file held one."""

    row: str
    key: str
    value: str | float


def read_answers(path: Path) -> tuple[list[Answer], int]:
    """Answers from a CSV file or a JSON export of Label Studio, and how many rows there are without one."""
    if not path.is_file():
        raise InputError(f"expected a file with answers, got {path}, which does not exist.")
    found = _read_json(path) if path.suffix.lower() == ".json" else _read_csv(path)
    given = [answer for answer in found if not (isinstance(answer.value, str) and not answer.value.strip())]
    if not given:
        raise InputError(
            f"expected answers in {path.name}, got none in {len(found)} rows. Fill in the column `answer` of a CSV "
            "file, or submit annotations in Label Studio and export them as JSON."
        )
    return given, len(found) - len(given)


def _read_csv(path: Path) -> list[Answer]:
    columns = read_table(path, 0).columns
    absent = [name for name in ("row", "key", "answer") if name not in columns]
    if absent:
        raise InputError(
            f"expected the columns row, key and answer in {path.name}, as `whence table --export` writes them, got "
            f"none named {listing(absent)}. Columns there are: {listing(list(columns), 20)}."
        )
    cells = zip(*(columns[name] for name in ("row", "key", "answer")), strict=True)
    return [Answer(str(row), str(key), str(value)) for row, key, value in cells]


def _read_json(path: Path) -> list[Answer]:
    """Label Studio's JSON, with the task under `data`, or its JSON-MIN, with everything side by side."""
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"expected JSON as Label Studio exports it, got {path}, which is damaged: {error}.") from error
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise InputError(f"expected a list of tasks in {path}, as Label Studio exports it as JSON, got something else.")
    answers = []
    for at, task in enumerate(tasks):
        data = task.get("data", task)
        if not isinstance(data, dict) or not {"row", "key"} <= set(data):
            raise InputError(
                f"expected `row` and `key` in every task of {path.name}, as `whence table --export label-studio` "
                f"writes them, got none in task {at + 1}. Is it the export of another project?"
            )
        values = _annotated(task) if "data" in task else [task.get("answer", "")]
        answers += [Answer(str(data["row"]), str(data["key"]), _plain(value)) for value in values or [""]]
    return answers


def _annotated(task: dict[str, Any]) -> list[Any]:
    """What the annotations of a task say that were not skipped."""
    kept = [one for one in task.get("annotations", ()) if isinstance(one, dict) and not one.get("was_cancelled")]
    results = [result for one in kept for result in one.get("result", ()) if isinstance(result, dict)]
    return [result.get("value", "") for result in results if result.get("from_name") == "answer"]


def _plain(value: Any) -> str | float:
    """A class or a number, from the ways in which Label Studio writes them.

    Examples:
        >>> [_plain(value) for value in ({"choices": ["red"]}, [{"number": 3}], "blue", 2.5)]
        ['red', 3.0, 'blue', 2.5]
    """
    while isinstance(value, (dict, list)):
        values = list(value.values()) if isinstance(value, dict) else value
        value = values[0] if values else ""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Answered:
    """A table with answers in place of labels; positions of rows are those of the table."""

    prepared: Prepared  # with new labels; rows that had none train now, held-out rows stay held out
    changed: Any  # positions whose label is another one now
    confirmed: Any  # positions whose label stays
    labelled: Any  # positions that had none


def apply_answers(prepared: Prepared, answers: list[Answer], source: str) -> Answered:
    """Put answers in place of labels, or say which cannot be used; `source` names their file."""
    table, target = prepared.table, prepared.model.target
    places = {int(row): at for at, row in enumerate(table.rows)}
    found: dict[int, str] = {}
    for answer in answers:
        at = _place(answer, places, table, target.name, source)
        cell = _cell(answer, target, source)
        if found.setdefault(at, cell) != cell:
            raise InputError(
                f"expected one answer for row {answer.row} in {source}, got {found[at]!r} and {cell!r}. Keep one."
            )
    which = numpy.array(sorted(found), dtype=int)
    answer_cells = numpy.array([found[place] for place in which], dtype=object)
    cells, values = table.columns[target.name].copy(), prepared.values.copy()
    before, values[which] = prepared.values[which], target.parse(answer_cells)
    differs = values[which] != before
    cells[which[differs]] = answer_cells[differs]
    split, labelled = prepared.split, which[~numpy.isfinite(before)]
    new = replace(
        prepared,
        table=replace(table, columns={**table.columns, target.name: cells}),
        values=values,
        split=RowSplit(
            numpy.sort(numpy.concatenate([split.train, labelled])),
            split.validation,
            split.test,
            numpy.setdiff1d(split.unlabelled, labelled),
        ),
    )
    return Answered(new, which[numpy.isfinite(before) & differs], which[~differs], labelled)


def _place(answer: Answer, places: dict[int, int], table: TextTable, target: str, source: str) -> int:
    try:
        at = places.get(int(float(answer.row)))
    except ValueError:
        at = None
    if at is None:
        drawn = f" {len(table):,} of its {table.total:,} rows were drawn: pass the same --rows and --seed as before."
        raise InputError(
            f"expected rows of this table in {source}, got row {answer.row!r}, which it does not have."
            + drawn * (len(table) < table.total)
        )
    if row_key(table, target, at) != answer.key.strip():
        raise InputError(
            f"expected answers to this table in {source}, but row {answer.row} has other cells there than here. Was "
            "the file exported from another table, or were columns changed since? Export again, or take the old table."
        )
    return at


def _cell(answer: Answer, target: Target, source: str) -> str:
    """An answer as a cell of the target's column."""
    value = answer.value
    if isinstance(value, float):
        value = f"{value:.15g}"
        if target.style == "decimal comma":
            value = value.replace(".", ",")
    value = value.strip()
    if numpy.isfinite(target.parse(numpy.array([value], dtype=object))).all():
        return value
    if not target.classes:
        raise InputError(f"expected a number as the answer for row {answer.row} in {source}, got {value!r}.")
    meant = did_you_mean(value, target.classes)
    raise InputError(
        f"expected one of the classes {listing(list(map(repr, target.classes)), 10)} as the answer for row "
        f"{answer.row} in {source}, got {value!r}.{meant}"
    )


def compare(
    answered: Answered, before: tuple[RowPredictions, RowLabels], after: tuple[RowPredictions, RowLabels]
) -> dict[str, Any]:
    """What the answers changed: scores of the held-out rows, their deviations, doubtful labels, and predictions.

    Scores before and after are by the labels as they are now. What was expected is the answer of `what_if` for changed
    labels, and of `suggest` for new ones, before the training; NaN where that would take long or cannot be computed.
    """
    (old, old_labels), (new, new_labels) = before, after
    test = answered.prepared.split.test
    old = replace(old, values=new.values)
    expected, expected_std = _expected(answered, old)
    rows = {"before": old, "expected": expected, "after": new}
    scores: dict[str, dict[str, float]] = {}
    for when, predictions in rows.items():
        for score in [] if predictions is None else predictions.scores(test):
            scores.setdefault(score.name, dict.fromkeys(rows, float("nan")))[when] = score.value
    deviation = "probability_std" if old.fitted.model.target.classes else "std"
    std = {when: float(one.frame[deviation].iloc[test].mean()) for when, one in (("before", old), ("after", new))}
    moved = _moves(old, new)
    order = numpy.argsort(-moved, kind="stable")[: min(MOVED, int((moved > 0).sum()))]
    return {
        "changed": [int(row) for row in new.table.rows[answered.changed]],
        "confirmed": [int(row) for row in new.table.rows[answered.confirmed]],
        "labelled": [int(row) for row in new.table.rows[answered.labelled]],
        "scores": scores,
        "std": {"before": std["before"], "expected": expected_std, "after": std["after"]},
        "contradicted": {
            "before": int(old_labels.contradicted.sum()),
            "after": int(new_labels.contradicted.sum()),
        },
        "predictions_changed": int((moved > 0).sum()),
        "moved": [
            {"row": int(new.table.rows[at]), **{name: one.frame["prediction"].iloc[at] for name, one in both}}
            for both in [(("before", old), ("after", new))]
            for at in order
        ],
    }


def _moves(old: RowPredictions, new: RowPredictions) -> Any:
    """(m,) how far predictions moved: of classes if it is another one, of numbers if by more than their deviation."""
    if old.fitted.model.target.classes:
        far = numpy.abs(new.probabilities - old.probabilities).sum(1)
        return numpy.where(old.probabilities.argmax(1) != new.probabilities.argmax(1), far, 0.0)
    far = numpy.abs(new.frame["prediction"] - old.frame["prediction"]).to_numpy() / old.frame["std"].to_numpy()
    return numpy.where(far > 1.0, far, 0.0)


def _expected(answered: Answered, old: RowPredictions) -> tuple[RowPredictions | None, float]:
    """Predictions that the first fit expects of one with the answers, and the mean deviation of the held-out rows.

    The deviation of probabilities is expected where no label was changed: labels change the logits, and with them what
    a deviation of logits means.
    """
    prepared, fitted = answered.prepared, old.fitted
    target, test, tracer = fitted.model.target, prepared.split.test, fitted.tracer
    if len(affordable_rows(test, test, len(fitted.rows), target.outputs, tracer.problem.selection.size)) < len(test):
        return None, float("nan")
    inputs = row_batches(fitted, prepared.table.take(test))
    try:
        found = tracer.what_if(inputs, relabel=_relabelled(answered, fitted))
        left = 1.0
        if len(answered.labelled):
            pool = row_batches(fitted, prepared.table.take(answered.labelled))
            label = tracer.suggest(len(answered.labelled), pool=pool, test=inputs)
            left = float(label.total[-1] / (label.total[-1] + label.score.sum()))
        outputs = tracer.predict(inputs).mean + found.change
    except WhenceError:
        return None, float("nan")
    frame, probabilities, std = old.frame.copy(), old.probabilities.copy(), float("nan")
    if target.classes:
        p = tracer.problem.likelihood.probabilities(outputs).cpu().numpy()
        probabilities[test] = p if p.shape[1] > 1 else numpy.concatenate([1 - p, p], axis=1)
        if not len(answered.changed):
            std = left**0.5 * float(frame["probability_std"].iloc[test].mean())
    else:
        for name in ("prediction", "lower", "upper"):
            frame.iloc[test, frame.columns.get_loc(name)] += found.change[:, 0].cpu().numpy()
        std = left**0.5 * float(found.new_hec3.clamp_min(0.0).sqrt().mean())
    return replace(old, frame=frame, probabilities=probabilities), std


def _relabelled(answered: Answered, fitted: FittedTable) -> dict[int, Any]:
    """New targets of training rows, by their position in the first fit."""
    prepared = answered.prepared
    rows = prepared.table.rows[answered.changed]
    places = {int(row): at for at, row in enumerate(fitted.rows)}
    targets = fitted.model.batch(torch.zeros(0, device="cpu"), prepared.values[answered.changed])[1]
    return {places[int(row)]: one for row, one in zip(rows, targets, strict=True) if int(row) in places}
