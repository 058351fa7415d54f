"""One line for each row: prediction, variances, verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from whence import Explanation, Tracer
from whence.tabular.model import TableModel
from whence.tabular.reading import Table
from whence.tabular.scores import Predicted, Score, score

if TYPE_CHECKING:
    import pandas

BATCH = 1024
EXPLAIN_WORK = 3e12
"""Floating-point operations of all verdicts, about a minute on two cores; above, held-out rows come first."""


@dataclass(frozen=True)
class Results:
    """Predictions of rows, and verdicts for as many as were asked for.

    Attributes:
        model: of the table.
        table: the rows.
        values: (m,) what was observed, NaN where nothing was.
        predicted: the predictions.
        explanation: of the rows in `explained`.
        explained: places of rows.
        training_rows: row of the file of each training example.
    """

    model: TableModel
    table: Table
    values: Any
    predicted: Predicted
    explanation: Explanation | None
    explained: Any
    training_rows: Any

    def verdicts(self) -> list[str]:
        """A verdict for each row, empty where none was asked for."""
        words = [""] * len(self.table)
        if self.explanation is not None:
            for place, verdict in zip(self.explained.tolist(), self.explanation.verdicts, strict=True):
                words[place] = verdict
        return words

    def scores(self, which: Any) -> list[Score]:
        """How good the predictions of some rows are."""
        known = which[numpy.isfinite(self.values[which])]
        return score(self.model.target, self.predicted.take(known), self.values[known])

    def prediction(self) -> Mapping[str, Any]:
        """Columns with what is predicted: numbers with a 95 % interval of a new observation, or classes."""
        found = self.predicted
        if self.model.target.task == "regression":
            return {"prediction": found.center, "lower": found.low, "upper": found.high, "std": found.spread}
        names = numpy.array(self.model.target.classes, dtype=object)
        probability = found.probabilities.max(1)
        return {"prediction": names[found.center], "probability": probability, "probability_std": found.spread}

    def frame(self, parts: list[str] | None = None, suspicion: Any = None) -> pandas.DataFrame:
        """One row each; `check` and `near` name rows of the file that was trained on.

        Args:
            parts: which part each row belongs to.
            suspicion: (m,) how doubtful the label of each training row is, NaN for others.
        """
        import pandas  # an extra: only tables need it

        target, found = self.model.target, self.predicted
        columns: dict[str, Any] = {"row": self.table.rows}
        if parts is not None:
            columns["part"] = parts
        columns.update({name: self.table.columns[name] for name in self._identifiers()})
        if target.name in self.table.columns:
            columns[_free(target.name, columns)] = self.table.columns[target.name]
        columns.update({_free(name, columns): cells for name, cells in self.prediction().items()})
        columns.update(ho=found.ho, hec3=found.hec3, ratio=found.ratio, verdict=self.verdicts())
        columns.update(self._behind())
        if suspicion is not None:
            columns["suspicion"] = suspicion
        return pandas.DataFrame(columns)

    def _identifiers(self) -> list[str]:
        return [name for name in self.model.identifiers if name in self.table.columns]

    def _behind(self) -> dict[str, Any]:
        """What the verdicts rest on."""
        found = self.explanation
        if found is None:
            return {}
        columns: dict[str, Any] = {}
        for name in ("noise_p", "scarcity_p"):
            columns[name] = numpy.full(len(self.table), numpy.nan)
            columns[name][self.explained] = getattr(found, name).numpy()
        for name in ("check", "near"):
            listed = self.training_rows[getattr(found, name).numpy()]
            columns[name] = [""] * len(self.table)
            for place, rows in zip(self.explained.tolist(), listed.tolist(), strict=True):
                columns[name][place] = " ".join(map(str, rows))
        return columns


def trace_rows(
    model: TableModel, tracer: Tracer, table: Table, inputs: Tensor, values: Any, explained: Any, training_rows: Any
) -> Results:
    """Predict all rows, and explain some.

    Args:
        model: of the table.
        tracer: the fit.
        table: the rows.
        inputs: (m, inputs) the same, encoded.
        values: (m,) what was observed.
        explained: places of the rows to explain.
        training_rows: row of the file of each training example.
    """
    noise = noise_of(tracer) if model.target.task == "regression" else 0.0
    predicted = Predicted.of(model.target, tracer.predict(list(inputs.split(BATCH)), covariance=True), noise)
    explanation = None
    if len(explained):
        explanation = tracer.explain(list(inputs[torch.as_tensor(explained, device="cpu")].split(BATCH)))
    return Results(model, table, values, predicted, explanation, explained, training_rows)


def noise_of(tracer: Tracer) -> float:
    """Variance of a label around its mean: residual times leave-one-out residual, e^2 / (1 - h), on average.

    In a linear model without a ridge this has no bias, however many weights there are.
    """
    return max(float((tracer.residuals * tracer.loo_residuals).mean()), 0.0)


def affordable(rows: Any, first: Any, examples: int, outputs: int, weights: int) -> Any:
    """The rows whose verdicts take a minute or so: all, or the first ones, or as many of these as can be.

    Examples:
        >>> len(affordable(numpy.arange(500), numpy.arange(100), 400, 1, 1000))
        500
    """
    each = 6.0 * examples * outputs**2 * weights
    if each * len(rows) <= EXPLAIN_WORK:
        return rows
    return first[: max(1, int(EXPLAIN_WORK / each))]


def _free(name: str, columns: Mapping[str, Any]) -> str:
    """A name that no column has yet."""
    while name in columns:
        name += "_"
    return name
