"""From a table to a fitted network: the columns to use, the split of the rows, training, and the fit of `whence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from whence import Tracer, fit, ridge_from_weight_decay
from whence.errors import InputError
from whence.runtime.memory import RESERVE, free_memory
from whence.runtime.progress import Progress
from whence.tabular.cells import is_missing
from whence.tabular.columns import (
    MAX_DISTANCE,
    Column,
    ExcludedColumn,
    Number,
    column_from_json,
    describe_styles,
    detect_column,
)
from whence.tabular.files import Table
from whence.tabular.network import build_network, choose_width, count_weights, initialize, train
from whence.tabular.target import Split, Target, Task, check_row_count, detect_target, find_column, split_rows

EXACT_WORK = 4e12
"""Floating-point operations of an exact fit, about a minute on two cores; above, the structure is core."""

LARGE_MEAN = 1e4
"""Standard deviations of the target: with a larger mean, few of the digits that are shown say anything."""

FAR_FROM_OPTIMUM = 0.1
"""Newton change, the move of the training residuals that is left, above which the fit is recentered."""


@dataclass(frozen=True)
class TableModel:
    """How rows become inputs, and outputs predictions.

    Attributes:
        columns: those that are used.
        excluded: those that are not, and why.
        target: what is predicted.
        width: of the hidden layers.
    """

    columns: tuple[Column, ...]
    excluded: tuple[ExcludedColumn, ...]
    target: Target
    width: int

    @property
    def inputs(self) -> list[str]:
        """Names of the network's inputs."""
        return [name for column in self.columns for name in column.inputs]

    @property
    def weights(self) -> int:
        """Number of the network's weights."""
        return count_weights(len(self.inputs), self.width, self.target.outputs)

    def network(self) -> nn.Sequential:
        """The network, without its weights."""
        return build_network(len(self.inputs), self.width, self.target)

    def encode(self, table: Table) -> Tensor:
        """(m, inputs) the rows of a table."""
        absent = [column.name for column in self.columns if column.name not in table.columns]
        if absent:
            shown = ", ".join(map(repr, absent[:8])) + (", ..." if len(absent) > 8 else "")
            raise InputError(
                f"expected the columns that the network was trained with, got none named {shown}. "
                f"Columns there are: {', '.join(list(table.columns)[:20])}."
            )
        encoded = [column.encode(table.columns[column.name]) for column in self.columns]
        return torch.from_numpy(numpy.concatenate(encoded, axis=1).astype(numpy.float32))

    def unrecognized(self, table: Table) -> list[str]:
        """Values that training never saw in a column, in words."""
        notes = []
        for column in self.columns:
            cells = table.columns[column.name]
            odd = column.unrecognized(cells)
            if odd.any():
                shown = ", ".join(repr(str(cell)) for cell in list(dict.fromkeys(cells[odd]))[:3])
                what = "a category that training never had" if column.kind == "category" else f"no {column.kind}"
                notes.append(f"{column.name!r} holds {what} in {int(odd.sum())} of {len(odd)} rows, such as {shown}")
        return notes + self.clipped(table)

    def clipped(self, table: Table) -> list[str]:
        """Extreme numbers that are clipped, in words."""
        notes = []
        for column in self.columns:
            cells = table.columns[column.name]
            far = column.clipped(cells) if isinstance(column, Number) else numpy.zeros(0, dtype=bool)
            if far.any():
                notes.append(
                    f"{column.name!r} holds extreme values in {int(far.sum())} of {len(far)} rows, such as "
                    f"{str(cells[far][0])!r}; taken for {MAX_DISTANCE:g} standard deviations from the median"
                )
        return notes

    def targets(self, table: Table) -> Any:
        """(m,) as numbers, NaN where there is none; all NaN where the table has no such column."""
        if self.target.name not in table.columns:
            return numpy.full(len(table), numpy.nan)
        return self.target.parse(table.columns[self.target.name])

    def batch(self, inputs: Tensor, values: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets as `whence.fit` takes them."""
        targets = torch.as_tensor(values, device="cpu")
        if self.target.outputs > 1:
            return inputs, targets.long()
        return inputs, targets.to(torch.float64 if self.target.task == "regression" else inputs.dtype).unsqueeze(1)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TableModel:
        """The model whose `dataclasses.asdict` was written as JSON."""
        return cls(
            columns=tuple(column_from_json(column) for column in fields["columns"]),
            excluded=tuple(ExcludedColumn(**column) for column in fields["excluded"]),
            target=Target(**{**fields["target"], "classes": tuple(fields["target"]["classes"])}),
            width=int(fields["width"]),
        )


@dataclass(frozen=True)
class Prepared:
    """A table before the training.

    Attributes:
        table: all rows.
        model: how rows become inputs.
        split: which rows train.
        values: (m,) all targets, NaN where there is none.
        notes: what was guessed, excluded or repaired.
    """

    table: Table
    model: TableModel
    split: Split
    values: Any
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FittedTable:
    """A trained network and its fit.

    Attributes:
        model: how rows become inputs.
        tracer: the fit.
        inputs: (n, inputs) the encoded training rows.
        values: (n,) their targets.
        rows: number of each training row in its file.
        weight_decay: of the training; `None` if the fit was loaded, as for what follows.
        structure: of the curvature.
        recentered: whether the fit took the last step to the optimum itself.
    """

    model: TableModel
    tracer: Tracer
    inputs: Tensor
    values: Any
    rows: Any
    weight_decay: float | None = None
    structure: str | None = None
    recentered: bool | None = None


def prepare(
    table: Table,
    target: str,
    *,
    task: Task | None = None,
    ignore: Sequence[str] = (),
    test: float = 0.2,
    width: int | None = None,
    seed: int = 0,
) -> Prepared:
    """Detect the target and the columns, and split the rows: all that can be wrong with a table is found here.

    Args:
        table: all rows.
        target: name of the column to predict.
        task: regression or classification; guessed when `None`.
        ignore: columns to exclude.
        test: share of the rows that are held out.
        width: of the hidden layers; chosen by size when `None`.
        seed: of the split.
    """
    names, notes = list(table.columns), list(table.notes)
    name = find_column(target, names)
    ignored = {find_column(one, names) for one in ignore}
    check_row_count(int((~is_missing(table.columns[name])).sum()), name)
    detected = detect_target(name, table.columns[name], task, notes)
    values = detected.parse(table.columns[name])
    split = split_rows(values, detected, test, seed)
    if len(split.unlabelled):
        notes.append(f"rows without a value of {name!r}: {len(split.unlabelled):,}; predicted, but not trained on")
    if detected.task == "regression":
        mean, std = float(values[split.train].mean()), float(values[split.train].std()) or 1.0
        detected = replace(detected, shift=mean, scale=std)
        if abs(mean) > LARGE_MEAN * std:
            notes.append(
                f"{name!r} varies little ({std:.3g}) around its mean ({mean:.3g}); subtract the mean from the column "
                "to see more digits of the predictions"
            )
    found = [
        ExcludedColumn(one, "as you asked")
        if one in ignored
        else detect_column(one, table.columns[one][split.train], notes, table.rows[split.train])
        for one in names
        if one != name
    ]
    columns = tuple(one for one in found if not isinstance(one, ExcludedColumn))
    excluded = tuple(one for one in found if isinstance(one, ExcludedColumn))
    if not columns:
        reasons = "; ".join(f"{one.name!r}: {one.reason}" for one in excluded[:5]) or "it has no other column"
        raise InputError(f"expected columns to predict {name!r} from, got none that can be used ({reasons}).")
    inputs = sum(len(column.inputs) for column in columns)
    width = width or choose_width(inputs, detected.outputs, len(split.train))
    model = TableModel(columns, excluded, detected, width)
    return Prepared(table, model, split, values, (*notes, *describe_styles(columns), *model.clipped(table)))


def fit_table(
    prepared: Prepared, *, structure: str | None = None, seed: int = 0, progress: bool = False
) -> FittedTable:
    """Train a network, and fit `whence` to it.

    Args:
        prepared: the table, its columns and its split.
        structure: of the curvature; chosen by size when `None`.
        seed: of the first weights.
        progress: whether to show how far along training and fit are.
    """
    model, train_rows = prepared.model, prepared.split.train
    inputs, values = model.encode(prepared.table.take(train_rows)), prepared.values[train_rows]
    network = model.network()
    initialize(network, torch.Generator("cpu").manual_seed(seed))
    folds = [torch.from_numpy(numpy.isin(train_rows, rows)) for rows in prepared.split.validation]
    weight_decay = train(network, model.target, inputs, torch.from_numpy(values), folds, Progress(progress))
    structure = structure or choose_structure(len(values), model.target.outputs, model.weights)
    options: dict[str, Any] = {
        "likelihood": model.target.likelihood,
        "structure": structure,
        "ridge": ridge(model.target, weight_decay, len(values)),
        "progress": progress,
    }
    tracer = fit(network.eval(), [model.batch(inputs, values)], **options)
    recenter = float(tracer.diagnostics["Newton change"]) > FAR_FROM_OPTIMUM
    if recenter:
        tracer = fit(network, [model.batch(inputs, values)], recenter=True, **options)
    return FittedTable(
        model, tracer, inputs, values, prepared.table.rows[train_rows], weight_decay, structure, recenter
    )


def ridge(target: Target, weight_decay: float, rows: int) -> float:
    """Lambda on the sum scale, in units of the target squared.

    Examples:
        >>> ridge(Target("y", "regression", scale=10.0), 0.01, 200)
        100.0
    """
    if target.task == "classification":
        return ridge_from_weight_decay(weight_decay, n=rows, loss="cross_entropy")
    return ridge_from_weight_decay(weight_decay, n=rows) * target.scale**2


def choose_structure(rows: int, outputs: int, weights: int) -> str:
    """Exact where it takes no longer than a minute or two and fits in memory, else the core.

    Examples:
        >>> choose_structure(16_000, 1, 1377), choose_structure(40_000, 20, 40_000)
        ('exact', 'core')
    """
    numbers = rows * outputs
    primal = 14.0 * numbers * weights**2, 9.0 * 8 * weights**2
    dual = 2.0 * numbers**2 * weights + 4.0 * numbers**3, 8.0 * 8 * numbers**2
    work, memory = primal if weights <= numbers else dual
    fits = memory < RESERVE * free_memory(torch.device("cpu"))
    return "exact" if work <= EXACT_WORK and fits else "core"
