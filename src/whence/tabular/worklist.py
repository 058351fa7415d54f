"""Labels to check and rows to label, as a CSV file that people fill in; their answers are read back and applied.

The file identifies each row by its number and by a key, a checksum of its other columns, so that answers are never
applied to a row of another table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from whence.display import listing
from whence.errors import InputError, did_you_mean
from whence.tabular.files import TextTable, read_table
from whence.tabular.fitted import FittedTable, Prepared
from whence.tabular.predictions import RowLabels, RowPredictions
from whence.tabular.target import Target

if TYPE_CHECKING:
    import pandas

CHECK, LABEL = "check the label", "label"
POOL = 1_500  # outputs of rows without a label, those with the largest variances, from which rows are chosen
NEEDED = ("row", "key", "answer")  # columns of a file with answers
WHEN = ("before", "after")  # scores before and after the answers


def work_items(prepared: Prepared, fitted: FittedTable, labels: RowLabels, most: int) -> pandas.DataFrame:
    """Labels that the other rows contradict, the most doubtful first, then rows to label first; at most `most` of each.

    Columns are `row` in the file, `key`, `todo`, an empty `answer`, `label`, `suggested`, how sure that is,
    `suspicion`, and the cells of all columns except the target.
    """
    import pandas  # an extra: only tables need it

    table, target, suggested = prepared.table, prepared.model.target, labels.columns()["suggested"]
    todo = dict.fromkeys(labels.doubtful[:most].tolist(), CHECK)
    todo |= dict.fromkeys(rows_to_label(prepared, fitted, most), LABEL)
    at = numpy.array(list(todo), dtype=int)
    check = numpy.array([one == CHECK for one in todo.values()], dtype=bool)
    columns: dict[str, Any] = {
        "row": table.rows[at],
        "key": [row_key(table, target.name, row) for row in at],
        "todo": list(todo.values()),
        "answer": "",
        "label": numpy.where(check, [str(cell).strip() for cell in table.columns[target.name][at]], ""),
        "suggested": [str(one) if target.classes else f"{one:.6g}" for one in suggested[at]],
        "suggested_probability" if target.classes else "suggested_std": labels.sure[at],
        "suspicion": numpy.where(check, labels.suspicion[at], numpy.nan),
    }
    for name in table.columns:
        unique = name
        while unique in columns:
            unique += "_"
        if name != target.name:
            columns[unique] = table.columns[name][at]
    return pandas.DataFrame(columns)


def rows_to_label(prepared: Prepared, fitted: FittedTable, most: int) -> list[int]:
    """Positions of rows without a label whose labels would reduce the variance of all of them most."""
    unlabelled = prepared.split.unlabelled
    if not len(unlabelled):
        return []
    pool = max(1, POOL // prepared.model.target.outputs)
    if len(unlabelled) > pool:
        variance = fitted.tracer.predict(fitted.row_batches(prepared.table.take(unlabelled))).hec3.sum(1)
        unlabelled = unlabelled[variance.argsort(descending=True)[:pool].sort().values.cpu().numpy()]
    batches = fitted.row_batches(prepared.table.take(unlabelled))
    chosen = fitted.tracer.suggest(min(most, len(unlabelled)), pool=batches).index
    return [int(at) for at in unlabelled[chosen.cpu().numpy()]]


def row_key(table: TextTable, target: str, at: int) -> str:
    """A checksum of the cells of a row, except the target. It starts with a letter so that it is not read as a number.

    Examples:
        >>> table = TextTable({"a": ["1", "2"], "y": ["no", "yes"]}, [1, 2], 2)
        >>> row_key(table, "y", 0), row_key(table, "y", 0) == row_key(table, "y", 1)
        ('k057c4949', False)
    """
    cells = [f"{name}\x1f{values[at]}" for name, values in table.columns.items() if name != target]
    return "k" + hashlib.blake2b("\x1e".join(cells).encode(), digest_size=4).hexdigest()


class Answer(NamedTuple):
    """A person's answer for one row, as text."""

    row: str
    key: str
    value: str


def read_answers(path: Path) -> tuple[list[Answer], int]:
    """Answers from a CSV file, and the number of rows without one."""
    if not path.is_file():
        raise InputError(f"expected a file with answers, got {path}, which does not exist.")
    columns = read_table(path, 0).columns
    absent = [name for name in NEEDED if name not in columns]
    if absent:
        raise InputError(
            f"expected the columns row, key and answer in {path.name}, as `whence table --export` writes them, got "
            f"none named {listing(absent)}. Columns there are: {listing(list(columns), 20)}."
        )
    found = [Answer(*map(str, cells)) for cells in zip(*(columns[name] for name in NEEDED), strict=True)]
    given = [answer for answer in found if answer.value.strip()]
    if not given:
        raise InputError(f"expected answers in {path.name}, got none in {len(found)} rows. Fill in column `answer`.")
    return given, len(found) - len(given)


@dataclass(frozen=True)
class Answered:
    """A table with answers instead of labels; positions of rows are those of the table."""

    prepared: Prepared  # with new labels; rows that had none train now, held-out rows stay held out
    changed: Any  # positions whose label has changed
    confirmed: Any  # positions whose label stays
    labelled: Any  # positions that had none


def apply_answers(prepared: Prepared, answers: list[Answer], source: str) -> Answered:
    """Replace labels by answers, or say which cannot be used; `source` names their file."""
    table, target = prepared.table, prepared.model.target
    places = {int(row): at for at, row in enumerate(table.rows)}
    found: dict[int, str] = {}
    for answer in answers:
        at = _place(answer, places, table, target.name, source)
        cell = _cell(answer, target, source)
        if found.setdefault(at, cell) != cell:
            both = f"{found[at]!r} and {cell!r}"
            raise InputError(f"expected one answer for row {answer.row} in {source}, got {both}. Keep one.")
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
        split=replace(
            split, train=numpy.union1d(split.train, labelled), unlabelled=numpy.setdiff1d(split.unlabelled, labelled)
        ),
    )
    return Answered(new, which[numpy.isfinite(before) & differs], which[~differs], labelled)


def _place(answer: Answer, places: dict[int, int], table: TextTable, target: str, source: str) -> int:
    try:
        at = places[int(float(answer.row))]
    except (ValueError, KeyError):
        drawn = f" {len(table):,} of its {table.total:,} rows were drawn: pass the same --rows and --seed as before."
        raise InputError(
            f"expected rows of this table in {source}, got row {answer.row!r}, which it does not have."
            + drawn * (len(table) < table.total)
        ) from None
    if row_key(table, target, at) != answer.key.strip():
        raise InputError(
            f"expected answers to this table in {source}, but row {answer.row} has other cells there than here. Was "
            "the file exported from another table, or were columns changed since? Export again, or take the old table."
        )
    return at


def _cell(answer: Answer, target: Target, source: str) -> str:
    """An answer as a cell of the target's column."""
    value = answer.value.strip()
    if numpy.isfinite(target.parse(numpy.array([value], dtype=object))).all():
        return value
    if not target.classes:
        raise InputError(f"expected a number as the answer for row {answer.row} in {source}, got {value!r}.")
    raise InputError(
        f"expected one of the classes {listing(list(map(repr, target.classes)), 10)} as the answer for row "
        f"{answer.row} in {source}, got {value!r}.{did_you_mean(value, target.classes)}"
    )


def compare(
    answered: Answered, before: tuple[RowPredictions, RowLabels], after: tuple[RowPredictions, RowLabels]
) -> dict[str, Any]:
    """What the answers changed: scores of the held-out rows, their deviations, doubtful labels, and predictions.

    Scores before and after use the labels as they are now.
    """
    (old, old_labels), (new, new_labels) = before, after
    test, classes = answered.prepared.split.test, old.fitted.model.target.classes
    old = replace(old, values=new.values)
    scores: dict[str, dict[str, float]] = {}
    for when, predictions in zip(WHEN, (old, new), strict=True):
        for score in predictions.scores(test):
            scores.setdefault(score.name, {})[when] = score.value
    ends = dict(zip(WHEN, ((old, old_labels), (new, new_labels)), strict=True))
    one, other = (predictions.frame["prediction"] for predictions in (old, new))
    # predictions of another class, or of a number that differs by more than its deviation
    moved = one != other if classes else (other - one).abs() > old.frame["std"]
    deviation = "probability_std" if classes else "std"
    return {
        **{name: new.table.rows[getattr(answered, name)].tolist() for name in ("changed", "confirmed", "labelled")},
        "scores": scores,
        "std": {when: float(one.frame[deviation].iloc[test].mean()) for when, (one, _) in ends.items()},
        "contradicted": {when: int(labels.contradicted.sum()) for when, (_, labels) in ends.items()},
        "predictions_changed": int(moved.sum()),
    }
