"""The whole road: from a table to a traced network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from whence import Tracer, fit, ridge_from_weight_decay
from whence.errors import InputError
from whence.runtime.memory import RESERVE, free_memory
from whence.runtime.progress import Progress
from whence.tabular.kinds import Left, settle, styles
from whence.tabular.model import TableModel
from whence.tabular.network import choose_width, start
from whence.tabular.reading import Table
from whence.tabular.splits import Parts, check_enough, split
from whence.tabular.targets import Target, Task, find_column, settle_target
from whence.tabular.texts import missing
from whence.tabular.training import Trained, train

EXACT_WORK = 4e12
"""Floating-point operations of an exact fit, about a minute on two cores; above, the core serves."""

FAR_FROM_OPTIMUM = 0.1
"""Newton change, the move of the training residuals that is left, above which the fit is recentered."""


@dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        target: name of the column to predict.
        task: regression or classification, found out when `None`.
        ignore: columns to leave out.
        held_out: share of the rows that are kept apart.
        structure: of the curvature, chosen by size when `None`.
        width: of the hidden layers, chosen by size when `None`.
        seed: of splits and weights.
    """

    target: str
    task: Task | None = None
    ignore: Sequence[str] = ()
    held_out: float = 0.2
    structure: str | None = None
    width: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prepared:
    """A table whose columns are settled.

    Attributes:
        table: all rows.
        model: how rows become inputs.
        parts: which rows train.
        values: (m,) all targets, NaN where there is none.
        notes: what was guessed, left out or repaired.
    """

    table: Table
    model: TableModel
    parts: Parts
    values: Any
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Study(Prepared):
    """A traced network, with the table it came from.

    Attributes:
        inputs: (m, inputs) all rows, encoded.
        trained: how the training went.
        tracer: the fit.
        structure: of the curvature.
        recentered: whether the fit took the last step to the optimum itself.
    """

    inputs: Tensor
    trained: Trained
    tracer: Tracer
    structure: str
    recentered: bool


def study(ready: Prepared, options: Options, progress: Progress, show: bool) -> Study:
    """Train and fit.

    Args:
        ready: a table whose columns are settled.
        options: what the user chose.
        progress: shows how far along the training is.
        show: whether the fit shows how far along it is.
    """
    model, parts, values = ready.model, ready.parts, ready.values
    inputs = model.encode(ready.table)
    trained, network = _train(model, parts, inputs, values, options.seed, progress)
    loader = training_data(model, inputs[parts.train], values[parts.train])
    structure = options.structure or choose_structure(len(parts.train), model.target.outputs, model.weights)

    def fitted(recenter: bool) -> Tracer:
        return fit(
            network,
            loader,
            likelihood=model.target.likelihood,
            structure=structure,
            ridge=ridge(model.target, trained.weight_decay, len(parts.train)),
            recenter=recenter,
            progress=show,
        )

    tracer = fitted(recenter=False)
    recentered = float(tracer.diagnostics["Newton change"]) > FAR_FROM_OPTIMUM
    if recentered:
        tracer = fitted(recenter=True)
    return Study(ready.table, model, parts, values, ready.notes, inputs, trained, tracer, structure, recentered)


def prepare(table: Table, options: Options) -> Prepared:
    """Target, parts and columns: everything before the training, and all that can be wrong with a table."""
    names, notes = list(table.columns), list(table.notes)
    name = find_column(options.target, names)
    ignored = {find_column(one, names) for one in options.ignore}
    check_enough(int((~missing(table.columns[name])).sum()), name)
    target = settle_target(name, table.columns[name], options.task, notes)
    values = target.read(table.columns[name])
    parts = split(values, target, options.held_out, options.seed)
    if len(parts.unknown):
        notes.append(f"rows without a value of {name!r}: {len(parts.unknown):,}; predicted, but not trained on")
    if target.task == "regression":
        known = values[parts.train]
        target = replace(target, shift=float(known.mean()), scale=float(known.std()) or 1.0)
    settled = [
        Left(one, "as you asked")
        if one in ignored
        else settle(one, table.columns[one][parts.train], notes, table.rows[parts.train])
        for one in names
        if one != name
    ]
    columns = tuple(one for one in settled if not isinstance(one, Left))
    notes += styles(columns)
    left = tuple(one for one in settled if isinstance(one, Left))
    if not columns:
        reasons = "; ".join(f"{one.name!r}: {one.reason}" for one in left[:5]) or "it has no other column"
        raise InputError(f"expected columns to predict {name!r} from, got none that can be used ({reasons}).")
    inputs = sum(len(column.inputs) for column in columns)
    width = options.width or choose_width(inputs, target.outputs, len(parts.train))
    return Prepared(table, TableModel(columns, left, target, width), parts, values, tuple(notes))


def _train(
    model: TableModel, parts: Parts, inputs: Tensor, values: Any, seed: int, progress: Progress
) -> tuple[Trained, torch.nn.Module]:
    generator = torch.Generator("cpu").manual_seed(seed)
    network = model.network()
    targets = torch.from_numpy(values[parts.train]).to(inputs.dtype)
    folds = sum(number * numpy.isin(parts.train, rows) for number, rows in enumerate(parts.validation, 1))
    validation = torch.from_numpy(folds)
    data = inputs[parts.train], targets
    trained = train(network, lambda one: start(one, generator), model.target, data, validation, progress)
    return trained, network.eval()


def training_data(model: TableModel, inputs: Tensor, values: Any) -> list[tuple[Tensor, Tensor]]:
    """One batch, as `whence.fit` takes it."""
    targets = torch.as_tensor(values, device="cpu")
    if model.target.outputs > 1:
        return [(inputs, targets.long())]
    return [(inputs, targets.to(inputs.dtype).unsqueeze(1))]


def ridge(target: Target, weight_decay: float, rows: int) -> float:
    """Lambda on the sum scale, in units of the target squared.

    Examples:
        >>> ridge(Target("y", "regression", (), scale=10.0), 0.01, 200)
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
