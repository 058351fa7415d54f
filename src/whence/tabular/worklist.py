"""Labels to check and rows to label, as files that people fill in; their answers are read back and applied.

Files are CSV, or tasks for Label Studio. Both identify each row by its number and by a key, a checksum of its other
columns, so that answers are never applied to a row of another table.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy
import torch

from whence.display import listing, number, percent
from whence.errors import InputError, WhenceError, did_you_mean
from whence.io.files import replacing
from whence.tabular.files import TextTable, read_table, write_csv
from whence.tabular.fitted import FittedTable, Prepared
from whence.tabular.predictions import RowLabels, RowPredictions, affordable_rows
from whence.tabular.target import Target

if TYPE_CHECKING:
    import pandas

CHECK, LABEL = "check the label", "label"
POOL = 1_500  # outputs of rows without a label, those with the largest variances, from which rows are chosen
WHEN = ("before", "expected", "after")  # scores before and after the answers
MOVED = 5  # rows listed whose prediction moved most


def work_items(prepared: Prepared, fitted: FittedTable, labels: RowLabels, most: int) -> pandas.DataFrame:
    """Labels that the other rows contradict, the most doubtful first, then rows to label first; at most `most` of each.

    Columns are `row` in the file, `key`, `todo`, an empty `answer`, `label`, `suggested`, how sure that is,
    `suspicion`, and the cells of all columns except the target, whose names are kept as `attrs["names"]`.
    """
    import pandas  # an extra: only tables need it

    table, target, suggested = prepared.table, prepared.model.target, labels.suggested_cells()
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
    names = [name for name in table.columns if name != target.name]
    for name in names:
        unique = name
        while unique in columns:
            unique += "_"
        columns[unique] = table.columns[name][at]
    items = pandas.DataFrame(columns)
    items.attrs["names"] = names
    return items


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


def write_worklist(path: Path, items: pandas.DataFrame, target: Target) -> dict[str, Path]:
    """Write a CSV file, or tasks for Label Studio together with the labelling configuration they need.

    There the suggested label is a prediction, with its probability as score. Returns the files by their role.
    """
    if path.suffix.lower() == ".csv":
        write_csv(path, items)
        return {"worklist": path}
    tasks = [_task(item, items.attrs["names"], target) for item in items.to_dict(orient="split")["data"]]
    found = {"worklist": path, "labelling": path.with_suffix(".xml")}
    texts = json.dumps(tasks, ensure_ascii=False, indent=1), label_studio_config(target)
    for file, text in zip(found.values(), texts, strict=True):
        with replacing(file) as part:
            part.write_text(text, encoding="utf-8")
    return found


def _task(item: list[Any], names: list[str], target: Target) -> dict[str, Any]:
    """The format of https://labelstud.io/guide/tasks#Basic-Label-Studio-JSON-format."""
    row, key, todo, _, label, suggested, sure, suspicion, *cells = item
    kind, value = ("choices", [suggested]) if target.classes else ("number", float(suggested))
    result = {"from_name": "answer", "to_name": "row", "type": kind, "value": {kind: value}}
    score = {"score": round(sure, 6)} if target.classes else {}
    said = f"The file says {label}." if todo == CHECK else "The file has no label."
    spread = percent(sure) if target.classes else f"± {number(sure, 3)}"
    data = {"row": row, "key": key, "todo": todo, "label": label}
    data |= {
        "suspicion": None if math.isnan(suspicion) else suspicion,
        "question": f"Row {row}: {target.name}? {said} The other rows suggest {suggested} ({spread}).",
        "columns": dict(zip(names, cells, strict=True)),
    }
    return {"data": data, "predictions": [{"model_version": "whence", "result": [result], **score}]}


def label_studio_config(target: Target) -> str:
    """The labelling configuration.

    Examples:
        >>> print(label_studio_config(Target("y", "classification", ("no", "yes"))))
        <View>
          <Header value="$question"/>
          <Table name="row" value="$columns"/>
          <Choices name="answer" toName="row" choice="single">
            <Choice value="no"/>
            <Choice value="yes"/>
          </Choices>
        </View>
        <BLANKLINE>
    """
    control = ['  <Number name="answer" toName="row"/>']
    if target.classes:
        choices = [f"    <Choice value={quoteattr(name)}/>" for name in target.classes]
        control = ['  <Choices name="answer" toName="row" choice="single">', *choices, "  </Choices>"]
    front = ["<View>", '  <Header value="$question"/>', '  <Table name="row" value="$columns"/>']
    return "\n".join([*front, *control, "</View>", ""])


class Answer(NamedTuple):
    """A person's answer for one row; a number if the file held one."""

    row: str
    key: str
    value: str | float


def read_answers(path: Path) -> tuple[list[Answer], int]:
    """Answers from a CSV file or a JSON export of Label Studio, and the number of rows without one."""
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
        values = [task.get("answer", "")]
        if "data" in task:
            done = [
                one for one in task.get("annotations", ()) if isinstance(one, dict) and not one.get("was_cancelled")
            ]
            results = [result for one in done for result in one.get("result", ()) if isinstance(result, dict)]
            values = [result.get("value", "") for result in results if result.get("from_name") == "answer"]
        answers += [Answer(str(data["row"]), str(data["key"]), _plain(value)) for value in values or [""]]
    return answers


def _plain(value: Any) -> str | float:
    """A class or a number, from the forms that Label Studio writes.

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
    raise InputError(
        f"expected one of the classes {listing(list(map(repr, target.classes)), 10)} as the answer for row "
        f"{answer.row} in {source}, got {value!r}.{did_you_mean(value, target.classes)}"
    )


def compare(
    answered: Answered, before: tuple[RowPredictions, RowLabels], after: tuple[RowPredictions, RowLabels]
) -> dict[str, Any]:
    """What the answers changed: scores of the held-out rows, their deviations, doubtful labels, and predictions.

    Scores before and after use the labels as they are now. The expected scores are the results of `what_if` for changed
    labels, and of `suggest` for new ones, before the training; NaN if that would take long or cannot be computed.
    """
    (old, old_labels), (new, new_labels) = before, after
    test = answered.prepared.split.test
    old = replace(old, values=new.values)
    expected, expected_std = _expected(answered, old)
    scores: dict[str, dict[str, float]] = {}
    for when, predictions in zip(WHEN, (old, expected, new), strict=True):
        for score in [] if predictions is None else predictions.scores(test):
            scores.setdefault(score.name, dict.fromkeys(WHEN, float("nan")))[when] = score.value
    deviation = "probability_std" if old.fitted.model.target.classes else "std"
    ends = {"before": (old, old_labels), "after": (new, new_labels)}
    if old.fitted.model.target.classes:  # predictions that are another class, or differ by more than their deviation
        far = numpy.abs(new.probabilities - old.probabilities).sum(1)
        far[old.probabilities.argmax(1) == new.probabilities.argmax(1)] = 0.0
    else:
        far = (new.frame["prediction"] - old.frame["prediction"]).abs().to_numpy() / old.frame["std"].to_numpy()
        far[far <= 1.0] = 0.0
    moved = numpy.argsort(-far, kind="stable")[: int((far > 0).sum())]
    columns = (new.table.rows, old.frame["prediction"].to_numpy(), new.frame["prediction"].to_numpy())
    named = [column[moved[:MOVED]].tolist() for column in columns]
    return {
        **{name: new.table.rows[getattr(answered, name)].tolist() for name in ("changed", "confirmed", "labelled")},
        "scores": scores,
        "std": {"expected": expected_std}
        | {when: float(one.frame[deviation].iloc[test].mean()) for when, (one, _) in ends.items()},
        "contradicted": {when: int(labels.contradicted.sum()) for when, (_, labels) in ends.items()},
        "predictions_changed": len(moved),
        "moved": [dict(zip(("row", "before", "after"), one, strict=True)) for one in zip(*named, strict=True)],
    }


def _expected(answered: Answered, old: RowPredictions) -> tuple[RowPredictions | None, float]:
    """Predictions that the first fit expects from one with the answers, and the mean deviation of the held-out rows.

    The deviation of probabilities is expected only if no label was changed: labels change the logits, and with them
    the meaning of a deviation of logits.
    """
    prepared, fitted = answered.prepared, old.fitted
    target, test, tracer = fitted.model.target, prepared.split.test, fitted.tracer
    if len(affordable_rows(test, test, fitted)) < len(test):
        return None, float("nan")
    inputs = fitted.row_batches(prepared.table.take(test))
    places = {int(row): at for at, row in enumerate(fitted.rows)}
    targets = fitted.model.batch(torch.zeros(0, device="cpu"), prepared.values[answered.changed])[1]
    pairs = zip(prepared.table.rows[answered.changed].tolist(), targets, strict=True)
    try:
        found = tracer.what_if(inputs, relabel={places[row]: one for row, one in pairs if row in places})
        left = 1.0
        if len(answered.labelled):
            pool = fitted.row_batches(prepared.table.take(answered.labelled))
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
