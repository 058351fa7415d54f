"""Verdicts for the rows of a studied table, and the files about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from whence.persist.atomic import replacing
from whence.tabular.model import TableModel
from whence.tabular.reading import Table
from whence.tabular.results import Results, affordable, trace_rows
from whence.tabular.study import Study

from .options import Verdicts

if TYPE_CHECKING:
    import pandas


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
    parts, target = done.parts, done.model.target
    tested = parts.test
    values = torch.as_tensor(done.values[tested])
    inputs = done.inputs[torch.as_tensor(tested)]
    labels = values.long() if target.outputs > 1 else values.to(inputs.dtype).unsqueeze(1)
    train, test = done.table.take(parts.train), done.table.take(tested)
    done.tracer.report(
        path,
        (inputs, labels),
        names=list(target.classes) or [target.name],
        table=(cells(done.model, test), cells(done.model, train)),
        ids=[f"row {row}" for row in test.rows],
        title=f"{target.name}: how uncertain are predictions, and why?",
        about=[
            f"{len(tested):,} rows of {name} that the network was not trained on. Rows are counted from 1, below the "
            "names of the columns."
        ],
    )


def cells(model: TableModel, table: Table) -> pandas.DataFrame:
    """The rows as they were in the file: number, identifiers, target and the columns that are used."""
    import pandas  # an extra: only tables need it

    names = [*model.identifiers, model.target.name, *(column.name for column in model.columns)]
    found = {name: table.columns[name] for name in names if name in table.columns}
    return pandas.DataFrame({"row": table.rows, **found})
