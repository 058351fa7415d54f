"""Labels to check and rows to label, as files that people fill in: a CSV file, or tasks for Label Studio.

Both name each row by its number and by a key, a checksum of its other columns, so that answers are never given to a row
of another table. `whence.tabular.answers` reads them back.
"""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from whence.display import number, percent
from whence.io.files import replacing
from whence.tabular.files import TextTable
from whence.tabular.fitted import FittedTable, Prepared
from whence.tabular.labels import RowLabels, row_batches
from whence.tabular.target import Target

CHECK, LABEL = "check the label", "label"
POOL = 1_500
"""Outputs of rows without a label among which those to label first are sought; rows with the largest variances."""


@dataclass(frozen=True)
class WorkItem:
    """One row that a person should look at."""

    row: int  # in the file; the first row of data is 1
    key: str  # checksum of its cells, but for the label
    todo: str  # check the label, or label
    cells: dict[str, str]  # all columns but the target
    label: str  # as in the file; empty where there is none
    suggested: str
    sure: float  # probability of the suggested class, or standard deviation of an observation around the number
    suspicion: float | None  # `None` without a label


def work_items(prepared: Prepared, fitted: FittedTable, labels: RowLabels, most: int) -> list[WorkItem]:
    """Labels that the other rows contradict, the most doubtful first, then rows to label first; so many of each."""
    table, target = prepared.table, prepared.model.target
    check = [int(at) for at in labels.doubtful[:most]]
    suggested = labels.suggested_cells()

    def item(at: int, todo: str) -> WorkItem:
        told = suggested[at] if target.classes else f"{suggested[at]:.6g}"
        return WorkItem(
            row=int(table.rows[at]),
            key=row_key(table, target.name, at),
            todo=todo,
            cells={name: str(cells[at]) for name, cells in table.columns.items() if name != target.name},
            label=str(table.columns[target.name][at]).strip() if todo == CHECK else "",
            suggested=str(told),
            sure=float(labels.sure[at]),
            suspicion=float(labels.suspicion[at]) if todo == CHECK else None,
        )

    first = rows_to_label(prepared, fitted, most)
    return [*(item(at, CHECK) for at in check), *(item(at, LABEL) for at in first)]


def rows_to_label(prepared: Prepared, fitted: FittedTable, most: int) -> list[int]:
    """Positions of rows without a label whose labels would take away most of the variance of all of them."""
    unlabelled = prepared.split.unlabelled
    if not len(unlabelled):
        return []
    pool = max(1, POOL // prepared.model.target.outputs)
    if len(unlabelled) > pool:
        variance = fitted.tracer.predict(row_batches(fitted, prepared.table.take(unlabelled))).hec3.sum(1)
        unlabelled = unlabelled[variance.argsort(descending=True)[:pool].sort().values.cpu().numpy()]
    batches = row_batches(fitted, prepared.table.take(unlabelled))
    chosen = fitted.tracer.suggest(min(most, len(unlabelled)), pool=batches).index
    return [int(at) for at in unlabelled[chosen.cpu().numpy()]]


def row_key(table: TextTable, target: str, at: int) -> str:
    """A checksum of the cells of a row, but for the target; it starts with a letter, so that no program reads a number.

    Examples:
        >>> table = TextTable({"a": ["1", "2"], "y": ["no", "yes"]}, [1, 2], 2)
        >>> row_key(table, "y", 0), row_key(table, "y", 0) == row_key(table, "y", 1)
        ('k057c4949', False)
    """
    cells = [f"{name}\x1f{values[at]}" for name, values in table.columns.items() if name != target]
    return "k" + hashlib.blake2b("\x1e".join(cells).encode(), digest_size=4).hexdigest()


def write_items_csv(path: Path, items: list[WorkItem], target: Target) -> None:
    """Write a CSV file with an empty column `answer` to fill in."""
    sure = "suggested_probability" if target.classes else "suggested_std"
    heads = ["row", "key", "todo", "answer", "label", "suggested", sure, "suspicion"]
    names = list(items[0].cells) if items else []
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*heads, *(_unique(name, heads) for name in names)])
        for item in items:
            numbers = ["" if one is None else f"{one:.6g}" for one in (item.sure, item.suspicion)]
            front = [item.row, item.key, item.todo, "", item.label, item.suggested, *numbers]
            writer.writerow([*front, *item.cells.values()])


def _unique(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "_"
    return name


def write_label_studio(path: Path, items: list[WorkItem], target: Target) -> Path:
    """Write tasks that Label Studio imports as they are, and beside them the labelling configuration they need.

    The suggested label is a prediction with its probability as score. Returns where the configuration is.
    """
    config = path.with_suffix(".xml")
    with replacing(path) as file:
        tasks = [_task(item, target) for item in items]
        file.write_text(json.dumps(tasks, ensure_ascii=False, indent=1), encoding="utf-8")
    with replacing(config) as file:
        file.write_text(label_studio_config(target), encoding="utf-8")
    return config


def _task(item: WorkItem, target: Target) -> dict[str, Any]:
    """As https://labelstud.io/guide/tasks#Basic-Label-Studio-JSON-format has it."""
    said = f"The file says {item.label}." if item.todo == CHECK else "The file has no label."
    spread = f"{percent(item.sure)}" if target.classes else f"± {number(item.sure, 3)}"
    question = f"Row {item.row}: {target.name}? {said} The other rows suggest {item.suggested} ({spread})."
    value = {"choices": [item.suggested]} if target.classes else {"number": float(item.suggested)}
    kind = "choices" if target.classes else "number"
    result = {"from_name": "answer", "to_name": "row", "type": kind, "value": value}
    prediction: dict[str, Any] = {"model_version": "whence", "result": [result]}
    if target.classes:
        prediction["score"] = round(item.sure, 6)
    front = {"row": item.row, "key": item.key, "todo": item.todo, "label": item.label, "suspicion": item.suspicion}
    return {"data": {**front, "question": question, "columns": item.cells}, "predictions": [prediction]}


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
