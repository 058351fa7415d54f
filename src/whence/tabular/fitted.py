"""From a table to a fitted model: columns to use, split of the rows, training, the fit, and saving it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy
import pandas
import torch
from torch import Tensor, nn

from whence import Tracer, fit, load, ridge_from_weight_decay
from whence.display import listing
from whence.errors import InputError, did_you_mean
from whence.influence import Explanation
from whence.influence.intervals import Intervals
from whence.io import read_attached, save
from whence.report.usual import UsualValues, frame_of
from whence.runtime.execution import Progress
from whence.runtime.files import fitting_together
from whence.runtime.model_state import one_thread
from whence.tabular.boosting import Trees, grow
from whence.tabular.columns import (
    STYLES,
    Column,
    ExcludedColumn,
    column_from_json,
    detect_column,
    examples,
    guess_comma,
    leave_out_copies,
    repeats_as_id,
)
from whence.tabular.network import Trained, build_network, choose_width, initialize, mean_loss, train
from whence.tabular.target import RowSplit, Target, Task, detect_target, find_column, leak_notes, split_rows

Learner = Literal["network", "trees"]

LARGE_MEAN = 1e4  # standard deviations of the target: with a larger mean, few of the digits shown carry information
BATCH = 1024
ONE_THREAD = 10_000  # models of tables with up to this many rows are trained by one thread
FAR_FROM_OPTIMUM = 0.1  # a fit recenters if the Newton change, the remaining move of training residuals, is above this


@dataclass(frozen=True)
class TableModel:
    """How rows become inputs, and how outputs become predictions. Tables are data frames of `as_text`."""

    columns: tuple[Column, ...]  # those that are used
    excluded: tuple[ExcludedColumn, ...]  # those that are not, and why
    target: Target  # what is predicted
    width: int  # of the hidden layers of a network
    learner: Learner = "network"  # a network, or gradient boosting

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs."""
        return [name for column in self.columns for name in column.inputs]

    @property
    def complete(self) -> frozenset[str]:
        """Columns of numbers and dates in which every training row has a value."""
        return frozenset(column.name for column in self.columns if column.kind != "category" and not column.gaps)

    def network(self) -> nn.Sequential:
        """The network, without its weights."""
        return build_network(len(self.inputs), self.width, self.target)

    def encode(self, frame: pandas.DataFrame) -> Tensor:
        """(m, inputs) the rows of a table. For trees, codes of categories come first."""
        absent = [column.name for column in self.columns if column.name not in frame.columns]
        if absent:
            raise InputError(
                f"expected the columns that the model was trained with, got none named "
                f"{listing(list(map(repr, absent)), 8)}. Columns there are: {listing(list(frame.columns), 20)}."
                + did_you_mean(absent[0], frame.columns)
            )
        trees = self.learner == "trees"
        ordered = sorted(self.columns, key=lambda column: trees and column.kind != "category")
        encoded = [column.encode(frame[column.name], codes=trees) for column in ordered]
        return torch.from_numpy(numpy.concatenate(encoded, axis=1).astype(numpy.float32))

    def unrecognized(self, frame: pandas.DataFrame) -> list[str]:
        """Values that were never in a column in training, in words; and targets that cannot be read."""
        odd = {column.name: column.unrecognized(frame[column.name]) for column in self.columns}
        kinds = {column.name: column.kind for column in self.columns}
        if self.target.name in frame.columns:
            cells = frame[self.target.name]
            odd[self.target.name] = numpy.isnan(self.target.parse(cells)) & cells.notna().to_numpy()
            kinds[self.target.name] = "category" if self.target.classes else "number"
        notes = []
        for name, which in odd.items():
            if which.any():
                what = "a category that was not in the training data"
                what = what if kinds[name] == "category" else f"text that is not a {kinds[name]}"
                rows = f"{which.sum()} of {len(frame)} rows"
                notes.append(f"{name!r} holds {what} in {rows}, such as {examples(frame[name][which])}")
        return notes

    def shown(self, frame: pandas.DataFrame) -> pandas.DataFrame:
        """The columns of a table in readable form."""
        return frame_of({column.name: column.display(frame[column.name]) for column in self.columns})

    def targets(self, frame: pandas.DataFrame) -> Any:
        """(m,) targets as numbers, NaN if missing; all NaN if the table has no such column."""
        known = self.target.name in frame.columns
        return self.target.parse(frame[self.target.name]) if known else numpy.full(len(frame), numpy.nan)

    def fitted_with(self, predictor: nn.Module | Trees, inputs: Tensor, values: Any) -> tuple[Any, Any]:
        """Model and data for `whence.fit` and `whence.load`."""
        if isinstance(predictor, Trees):
            return predictor.ensemble(self.target), (inputs, values)
        targets = torch.as_tensor(values, device="cpu")
        if self.target.outputs > 1:
            return predictor, [(inputs, targets.long())]
        dtype = torch.float64 if self.target.task == "regression" else inputs.dtype
        return predictor, [(inputs, targets.to(dtype).unsqueeze(1))]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TableModel:
        """The model whose `dataclasses.asdict` was written as JSON."""
        return cls(
            columns=tuple(column_from_json(column) for column in fields["columns"]),
            excluded=tuple(ExcludedColumn(**column) for column in fields["excluded"]),
            target=Target(**{**fields["target"], "classes": tuple(fields["target"]["classes"])}),
            width=int(fields["width"]),
            learner=fields["learner"],
        )


@dataclass(frozen=True)
class Prepared:
    """A table before the training."""

    frame: pandas.DataFrame  # all rows
    model: TableModel  # how rows become inputs
    split: RowSplit  # which rows train
    values: Any  # (m,) all targets, NaN if missing
    notes: tuple[str, ...]  # what was guessed, excluded or repaired


@dataclass(frozen=True)
class FittedTable:
    """A trained network, or trees, and the fit."""

    model: TableModel  # how rows become inputs
    predictor: nn.Module | Trees
    tracer: Tracer  # the fit
    inputs: Tensor  # (n, inputs) the encoded training rows
    values: Any  # (n,) their targets
    rows: Any  # number of each training row in its file
    intervals: Intervals | None  # of new observations; `None` for classes
    usual: UsualValues  # of the columns of the training rows
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the training; empty if the fit was loaded
    validation: Mapping[Learner, float] = field(default_factory=dict)  # of all models tried: RMSE or log loss; the same

    def impossible(self, frame: pandas.DataFrame, targets: bool = False) -> list[str]:
        """For each row why its input, or its target, cannot be right, given those of the training rows; or ""."""
        reasons = self.usual.impossible(self.model.shown(frame))
        for row in numpy.flatnonzero(frame[[column.name for column in self.model.columns]].isna().all(axis=1)):
            reasons[row] = "no value in any column"
        name = self.model.target.name
        if targets and self.intervals is not None:
            far = UsualValues({name: numpy.sort(self.values)}).far(frame_of({name: self.model.targets(frame)}))
            reasons = [reason or other for reason, other in zip(reasons, far, strict=True)]
        return reasons

    def batches(self, frame: pandas.DataFrame) -> Any:
        """The rows of a table as input of the tracer."""
        inputs = self.model.encode(frame)
        return inputs if self.model.learner == "trees" else list(inputs.split(BATCH))

    def training_examples(self, frame: pandas.DataFrame) -> Tensor | None:
        """(m,) the training example that each row is, by its number and its encoded cells, or -1; `None` for numbers.

        A training row does not count as support of its own class.
        """
        if not self.model.target.classes:
            return None
        order = numpy.argsort(self.rows)
        places = order[numpy.searchsorted(self.rows, frame.index, sorter=order).clip(max=len(order) - 1)]
        same = (self.inputs[torch.from_numpy(places)] == self.model.encode(frame)).all(1).numpy()
        return torch.from_numpy(numpy.where(same & (self.rows[places] == frame.index), places, -1))

    def explain(self, frame: pandas.DataFrame, top: int = 5, pool: pandas.DataFrame | None = None) -> Explanation:
        """Verdicts on rows of a table; a pool is rows of the kind that the model meets in use."""
        in_use = None if pool is None else self.batches(pool)
        return self.tracer.explain(self.batches(frame), top=top, examples=self.training_examples(frame), pool=in_use)


def prepare(
    frame: pandas.DataFrame,
    target: str,
    task: Task | None = None,
    ignore: Sequence[str] = (),
    groups: str | None = None,
    *,
    test: float = 0.2,
    width: int | None = None,
    seed: int = 0,
    delimiter: str | None = None,
) -> Prepared:
    """Detect the target and the columns, and split the rows. All problems with a table are found here.

    The task and the width of the hidden layers are guessed if `None`. `test` is the share of held-out rows. Rows with
    the same value in the column `groups` are held out together. `delimiter` is that of the file.
    """
    names, notes = list(frame.columns), list[str]()
    left_out = {find_column(one, names): "by --ignore" for one in ignore}
    if groups is not None:
        left_out[find_column(groups, names)] = "names the groups"
        notes.append(
            f"rows with the same {groups!r} are held out together, in testing, validation and the calibration of "
            "intervals; Ho, HeC3 and doubts leave out single rows"
        )
    comma = guess_comma(frame, delimiter)
    detected = detect_target(frame[find_column(target, names)], task, notes, comma)
    values = detected.parse(frame[target])
    split = split_rows(values, detected, test, seed, None if groups is None else frame[groups])
    rows = frame.iloc[split.train]
    if detected.task == "regression":
        mean, std = float(values[split.train].mean()), float(values[split.train].std()) or 1.0
        detected = replace(detected, shift=mean, scale=std)
        if abs(mean) > LARGE_MEAN * std:
            notes.append(
                f"{target!r} varies little ({std:.3g}) around its mean ({mean:.3g}); subtract the mean from the column "
                "to see more digits"
            )
    found = [
        ExcludedColumn(name, left_out[name])
        if name in left_out
        else detect_column(rows[name], [] if name == target else notes, comma)
        for name in names
    ]
    found = leave_out_copies(found, rows, target)
    excluded = tuple(one for one in found if isinstance(one, ExcludedColumn))
    columns = tuple(one for one in found if not isinstance(one, ExcludedColumn))
    if not columns:
        reasons = "; ".join(f"{one.name!r}: {one.reason}" for one in excluded[:5]) or "it has no other column"
        raise InputError(f"expected columns to predict {target!r} from, got none that can be used ({reasons}).")
    for style in list(STYLES)[1:]:
        read = [repr(one.name) for one in columns if one.kind == "number" and one.format == style]
        notes += [f"read with a {style}: {listing(read)}"] if read else []
    notes += leak_notes(columns, rows, detected)
    for name in (one.name for one in found if groups is None and repeats_as_id(rows[one.name])):
        notes.append(
            f"{name!r} looks like an id, and repeats ({rows[name].nunique():,} different ones in {len(rows):,} rows): "
            "where rows of one id are alike, some are trained on and others held out, and scores are too good; "
            f"--groups {name!r} keeps them together"
        )
    inputs = sum(len(column.inputs) for column in columns)
    width = width or choose_width(inputs, detected.outputs, len(split.train))
    return Prepared(frame, TableModel(columns, excluded, detected, width), split, values, tuple(notes))


def fit_table(
    prepared: Prepared,
    *,
    learner: Learner | Literal["auto"] = "auto",
    structure: str = "auto",
    seed: int = 0,
    progress: bool = False,
) -> FittedTable:
    """Train a network, or trees, or both and take the better one on validation rows; then fit `whence` to it.

    `seed` sets the initial weights of the network.
    """
    split, target = prepared.split, prepared.model.target
    values, rows = prepared.values[split.train], prepared.frame.iloc[split.train]
    folds = [torch.from_numpy(numpy.isin(split.train, some)) for some in split.validation]
    learners: list[Learner] = ["network", "trees"] if learner == "auto" else [learner]
    models = [replace(prepared.model, learner=one) for one in learners]
    inputs = [model.encode(rows) for model in models]
    trained = [_train(*given, values, folds, seed, Progress(progress)) for given in zip(models, inputs, strict=True)]
    known = torch.stack([torch.isfinite(one.held_out).all(1) for one in trained]).all(0)
    losses = [float(mean_loss(target, one.held_out[known], torch.from_numpy(values)[known])) for one in trained]
    at = losses.index(min(losses))
    model, best = models[at], trained[at]
    tracer = _fit(model, inputs[at], values, best, structure, progress)
    intervals = None
    if target.task == "regression":
        intervals = Intervals.of(tracer, torch.from_numpy(values).unsqueeze(1) - best.held_out)
        losses = [target.scale * loss**0.5 for loss in losses]
    return FittedTable(
        model=model,
        predictor=best.predictor,
        tracer=tracer,
        inputs=inputs[at],
        values=values,
        rows=rows.index.to_numpy(copy=True),
        intervals=intervals,
        usual=replace(UsualValues.of(model.shown(rows)), complete=model.complete),
        settings=best.settings,
        validation=dict(zip(learners, losses, strict=True)),
    )


def _train(
    model: TableModel, inputs: Tensor, values: Any, folds: list[Tensor], seed: int, progress: Progress
) -> Trained:
    """Train small tables with one thread: several wait for each other, and on a busy machine that takes minutes."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn: only tables need it

    few = len(inputs) <= ONE_THREAD
    with one_thread(few), threadpool_limits(1 if few else None, user_api="openmp"):
        if model.learner == "trees":
            categories = sum(column.kind == "category" for column in model.columns)
            return grow(model.target, inputs, categories, values, folds, progress)
        network = model.network()
        initialize(network, torch.Generator("cpu").manual_seed(seed))
        return train(network, model.target, inputs, torch.from_numpy(values), folds, progress)


def _fit(model: TableModel, inputs: Tensor, values: Any, trained: Trained, structure: str, progress: bool) -> Tracer:
    predictor, data = model.fitted_with(trained.predictor, inputs, values)
    options: dict[str, Any] = {"structure": structure, "progress": progress}
    if model.learner == "trees":
        return replace(fit(predictor, data, **options), held_out=squared_errors(model.target, trained.held_out, values))
    options["likelihood"] = model.target.likelihood
    options["ridge"] = ridge(model.target, trained.settings["weight_decay"], len(values))
    tracer = fit(predictor, data, **options)
    if float(tracer.diagnostics["Newton change"]) > FAR_FROM_OPTIMUM:
        tracer = fit(predictor, data, recenter=True, **options)
    return tracer


def squared_errors(target: Target, outputs: Tensor, values: Any) -> Tensor | None:
    """(n,) squared distances of labels from the probabilities of outputs (n, k); `None` for numbers.

    Examples:
        >>> squared_errors(Target("y", "classification", ("a", "b")), torch.zeros(2, 1), numpy.array([0.0, 1.0]))
        tensor([0.5000, 0.5000])
    """
    if target.task == "regression":
        return None
    wide = torch.cat([torch.zeros_like(outputs), outputs], 1) if target.outputs == 1 else outputs
    labels = nn.functional.one_hot(torch.as_tensor(values, device="cpu").long(), wide.shape[1])
    return (wide.softmax(1) - labels).square().sum(1)


def ridge(target: Target, weight_decay: float, rows: int) -> float:
    """Lambda on the sum scale, in squared units of the target.

    Examples:
        >>> ridge(Target("y", "regression", scale=10.0), 0.01, 200)
        100.0
    """
    if target.task == "classification":
        return ridge_from_weight_decay(weight_decay, n=rows, loss="cross_entropy")
    return ridge_from_weight_decay(weight_decay, n=rows) * target.scale**2


def save_table(fitted: FittedTable, path: Path) -> None:
    """Write a fitted table to one file, without pickles or anything that is ever run.

    Beside the fit it holds columns and target; the weights of a network, or the nodes of trees; the encoded training
    rows, which verdicts need; the sorted values of each column of numbers, which define what is usual; and the
    calibration of intervals.
    """
    predictor, intervals = fitted.predictor, fitted.intervals
    parts: dict[str, Mapping[str, Any]] = {
        "predictor": vars(predictor) if isinstance(predictor, Trees) else predictor.state_dict(),
        "training": {"inputs": fitted.inputs, "values": fitted.values, "rows": fitted.rows},
        "usual": fitted.usual.numbers,
        "intervals": {} if intervals is None else vars(intervals),
    }
    tensors = {
        f"{part}.{name}": torch.as_tensor(value, device="cpu")
        for part, named in parts.items()
        for name, value in named.items()
    }
    save(fitted.tracer, path, {"table": asdict(fitted.model)}, tensors)


def load_table(path: Path, progress: bool) -> FittedTable:
    """Read what `save_table` wrote."""
    about, tensors = read_attached(path)
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in ("predictor", "training", "usual", "intervals")}
    with fitting_together(repr(str(path))):
        model = TableModel.from_json(about["table"])
        for name, tensor in tensors.items():
            part, _, name = name.partition(".")
            parts[part][name] = tensor
        predictor: nn.Module | Trees
        if model.learner == "trees":
            predictor = Trees(**{name: nodes.numpy() for name, nodes in parts["predictor"].items()})
        else:
            predictor = model.network().eval()
            predictor.load_state_dict(parts["predictor"])
        inputs, values, rows = (parts["training"][name] for name in ("inputs", "values", "rows"))
        intervals = Intervals(**parts["intervals"]) if model.target.task == "regression" else None
        usual = UsualValues({name: one.numpy() for name, one in parts["usual"].items()}, complete=model.complete)
    tracer = load(path, *model.fitted_with(predictor, inputs, values.numpy()), progress=progress)
    return FittedTable(model, predictor, tracer, inputs, values.numpy(), rows.numpy(), intervals, usual)
