"""Verdicts for the rows of a studied table, and the files about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from whence.cli.options import Verdicts
from whence.io.files import replacing
from whence.tabular.columns import Column, Date, Number, label
from whence.tabular.model import TableModel
from whence.tabular.reading import Table
from whence.tabular.results import Results, affordable, trace_rows
from whence.tabular.study import Study
from whence.tabular.texts import read_dates, read_numbers

if TYPE_CHECKING:
    import pandas

TRACED, ALL_TRACED = 500, 2000
"""Predictions that a report traces to training rows, and how many are all traced."""


def trace(done: Study, verdicts: Verdicts) -> Results:
    """Predict all rows, and explain those that get a verdict."""
    parts, model = done.parts, done.model
    everything = numpy.arange(len(done.table))
    held_out = numpy.concatenate([parts.test, parts.unknown])
    explained = {
        Verdicts.all: everything,
        Verdicts.held_out: numpy.sort(held_out),
        Verdicts.none: everything[:0],
        Verdicts.auto: numpy.sort(
            affordable(everything, held_out, len(parts.train), model.target.outputs, model.weights)
        ),
    }[verdicts]
    rows = done.table.rows[parts.train]
    return trace_rows(model, done.tracer, done.table, done.inputs, done.values, explained, rows)


def suspicion(done: Study) -> Any:
    """(m,) how doubtful the label of each training row is; NaN for others."""
    found = numpy.full(len(done.table), numpy.nan)
    found[done.parts.train] = done.tracer.training_frame()["suspicion"].to_numpy()
    return found


def write_csv(path: Path, frame: pandas.DataFrame) -> None:
    """Write a table, whole or not at all."""
    with replacing(path) as file:
        frame.to_csv(file, index=False, float_format="%.6g")


def write_report(path: Path, done: Study, name: str) -> None:
    """Write the report on the held-out rows."""
    parts, model, target = done.parts, done.model, done.model.target
    tested = parts.test
    many = len(tested) > ALL_TRACED
    values = torch.as_tensor(done.values[tested], device="cpu")
    inputs = done.inputs[torch.as_tensor(tested, device="cpu")]
    labels = values.long() if target.outputs > 1 else values.to(inputs.dtype).unsqueeze(1)
    train, test = done.table.take(parts.train), done.table.take(tested)
    done.tracer.report(
        path,
        (inputs, labels),
        names=list(target.classes) or [target.name],
        table=(shown(model, test), shown(model, train)),
        ids=(rows_of(test), rows_of(train)),
        title=f"{target.name}: how uncertain are predictions, and why?",
        about=[
            f"{len(tested):,} rows of {name} that the network was not trained on. Rows are counted from 1, below the "
            "names of the columns."
            + (" Verdicts of rows that were not traced are estimated here; the CSV file has them exactly." * many)
        ],
        traced=TRACED if many else len(tested),
    )


def rows_of(table: Table) -> list[str]:
    """What the rows are called."""
    return [f"row {row}" for row in table.rows]


def shown(model: TableModel, table: Table) -> dict[str, Any]:
    """The columns that are used, for people."""
    columns: dict[str, Any] = {}
    for column in model.columns:
        cells = table.columns[column.name]
        columns[column.name] = _numbers(column, cells) if isinstance(column, Number) else _words(column, cells)
    return columns


def _numbers(column: Number, cells: Any) -> Any:
    values = read_numbers(cells, column.style)
    whole = numpy.isfinite(values).all() and (values == numpy.round(values)).all() and numpy.abs(values).max() < 2**53
    return values.astype(numpy.int64) if whole else values


def _words(column: Column, cells: Any) -> Any:
    """Categories by their names. Dates as such, which have an order, where all that are given can be read."""
    words = numpy.array([label(cell) for cell in cells], dtype=object)
    if isinstance(column, Date):
        days = read_dates(cells, column.format)
        if (numpy.isfinite(days) | (words == label(""))).all():
            seconds = numpy.where(numpy.isfinite(days), days, 0.0) * 86_400
            return numpy.where(numpy.isfinite(days), seconds.round().astype("datetime64[s]"), numpy.datetime64("NaT"))
    return words
