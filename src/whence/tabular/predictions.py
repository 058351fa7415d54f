"""Predictions of rows with variances and verdicts, as data frames, and their scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pandas

from whence.display import number
from whence.influence import Explanation
from whence.influence.intervals import LEVEL
from whence.report.usual import frame_of
from whence.results import Uncertainty
from whence.tabular.fitted import FittedTable

CHECK_INPUT = "check the input"  # the verdict on impossible rows, which their columns show and no network
NUMBERS = ("noise", "scarcity", "doubt", "noise_p", "scarcity_p")  # of an explanation, beside its verdict
EXPLAIN_WORK = 3e12  # floating-point operations of all verdicts, about a minute on two cores


class Score(NamedTuple):
    """One number with its name and what it means."""

    name: str
    value: float
    words: str


@dataclass(frozen=True)
class RowPredictions:
    """Predictions of the rows of a table; `docs/cli.md` describes the columns of the frame.

    The verdict, and the numbers behind it, are empty if none was requested.
    """

    rows: pandas.DataFrame  # as in the file
    fitted: FittedTable  # the model of the predictions
    values: Any  # (m,) observed values, NaN if missing
    frame: pandas.DataFrame
    probabilities: Any  # (m, classes) of all classes; (m, 0) for numbers
    uncertainty: Uncertainty

    def scores(self, which: Any = slice(None)) -> list[Score]:
        """Scores of the predictions of some rows, if their targets are known."""
        rows = numpy.arange(len(self.rows))[which]
        rows = rows[numpy.isfinite(self.values[rows])]
        values, frame, target = self.values[rows], self.frame.iloc[rows], self.fitted.model.target
        if not len(rows):
            return []
        if target.classes:
            return score_classes(values.astype(int), self.probabilities[rows], target.classes)
        return score_numbers(values, *(frame[name].to_numpy() for name in ("prediction", "lower", "upper")))

    def rows_frame(self, parts: Any = None, further: pandas.DataFrame | None = None) -> pandas.DataFrame:
        """One line for each row of the file: its number, identifiers and target, the prediction, and further columns.

        `parts` names the part of the split that each belongs to.
        """
        model, rows = self.fitted.model, self.rows
        wanted = [*(column.name for column in model.excluded if column.identifier), model.target.name]
        start = frame_of({"row": rows.index} if parts is None else {"row": rows.index, "part": parts})
        results = self.frame if further is None else self.frame.join(further)
        cells = distinct_names(rows[[name for name in wanted if name in rows.columns]], [*start, *results])
        return start.join(cells).join(results)


def distinct_names(cells: pandas.DataFrame, taken: Iterable[str]) -> pandas.DataFrame:
    """Cells of a file, with a `_` after the names of columns that are taken, and rows numbered from zero."""
    used = set(taken)
    names = []
    for name in cells.columns:
        while name in used:
            name += "_"
        names.append(name)
        used.add(name)
    return cells.set_axis(names, axis=1).reset_index(drop=True)


def predict_rows(
    fitted: FittedTable, rows: pandas.DataFrame, explain: Any = (), pool: pandas.DataFrame | None = None
) -> RowPredictions:
    """Predict all rows of a table; those at the positions `explain` get a verdict, beside a pool of rows if given."""
    model = fitted.model
    uncertainty = fitted.tracer.predict(fitted.batches(rows), covariance=True)
    hec3 = uncertainty.hec3.sum(1).numpy()
    probabilities = numpy.zeros((len(rows), 0))
    columns: dict[str, Any]
    if fitted.intervals is not None:
        mean, half = uncertainty.mean[:, 0].numpy(), fitted.intervals.half_width(uncertainty)[:, 0].numpy()
        columns = {"prediction": mean, "lower": mean - half, "upper": mean + half, "std": numpy.sqrt(hec3)}
    else:
        probabilities, std = uncertainty.probabilities.numpy(), uncertainty.probability_std().numpy()
        if model.target.outputs == 1:
            probabilities, std = numpy.hstack([1 - probabilities, probabilities]), numpy.hstack([std, std])
        best = probabilities.argmax(1)
        columns = {
            "prediction": numpy.array(model.target.classes, dtype=object)[best],
            "probability": probabilities.max(1),
            "probability_std": std[numpy.arange(len(best)), best],
        }
    columns.update(ho=uncertainty.ho.sum(1).numpy(), hec3=hec3, ratio=uncertainty.ratio.numpy())
    frame = frame_of(columns)
    if len(explain):
        some = rows.iloc[explain]
        verdicts = verdicts_frame(fitted.explain(some, pool=pool), fitted.rows)
        verdicts.loc[numpy.array(fitted.impossible(some)) != "", "verdict"] = CHECK_INPUT
        frame = frame.join(verdicts.set_axis(explain))
        frame = frame.fillna(dict.fromkeys(("verdict", "check", "near"), ""))
    else:
        frame["verdict"] = ""
    return RowPredictions(rows, fitted, model.targets(rows), frame, probabilities, uncertainty)


def verdicts_frame(found: Explanation, numbers: Any) -> pandas.DataFrame:
    """Verdicts, the numbers behind them, and the training examples to check and near, by their numbers (n,) for people.

    The examples are one text for each prediction, with spaces between the numbers.
    """
    named = {name: numbers[getattr(found, name).cpu().numpy()] for name in ("check", "near")}
    texts = {name: [" ".join(map(str, some)) for some in rows] for name, rows in named.items()}
    frame = found.to_frame()
    return frame[["verdict", *NUMBERS, *frame.columns.intersection(["frequency"])]].assign(**texts)


def affordable_rows(rows: Any, first: Any, fitted: FittedTable) -> Any:
    """The rows whose verdicts take about a minute: all, or the first ones, or as many of these as possible."""
    parameters = fitted.model.target.outputs * fitted.tracer.problem.selection.size
    each = 6.0 * len(fitted.rows) * min(parameters, 2048)
    return rows if each * len(rows) <= EXPLAIN_WORK else first[: max(1, int(EXPLAIN_WORK / each))]


def score_numbers(values: Any, prediction: Any, lower: Any, upper: Any) -> list[Score]:
    """Scores of predicted numbers and of their intervals, (m,) each."""
    errors = values - prediction
    variance, squares = float(values.var()), float((errors**2).mean())
    covered = float(((values >= lower) & (values <= upper)).mean())
    return [
        Score("R2", 1 - squares / variance if variance > 0 else numpy.nan, "1 is perfect, 0 no better than the mean"),
        Score("RMSE", squares**0.5, f"typical error; always predicting the mean would give {number(variance**0.5, 4)}"),
        Score("MAE", float(numpy.abs(errors).mean()), "mean absolute error"),
        Score("coverage", covered, f"share of rows inside their {100 * LEVEL:.0f} % interval"),
    ]


def score_classes(values: Any, probabilities: Any, classes: tuple[str, ...]) -> list[Score]:
    """Scores of predicted classes with probabilities (m, classes), given the indices (m,) of the true classes."""
    from sklearn.metrics import roc_auc_score  # an extra: only tables need it

    own = probabilities[numpy.arange(len(values)), values]
    most = numpy.bincount(values).max() / len(values)
    right = float((probabilities.argmax(1) == values).mean())
    scores = [
        Score("accuracy", right, f"always predicting the most frequent class would give {most:.3f}"),
        Score("log loss", float(-numpy.log(numpy.maximum(own, 1e-300)).mean()), "mean of -log(p of the true class)"),
        Score("confidence", float(probabilities.max(1).mean()), "mean probability of the predicted class"),
    ]
    if len(classes) == 2 and 0 < values.sum() < len(values):
        area = float(roc_auc_score(values, probabilities[:, 1]))
        scores.insert(1, Score("AUROC", area, f"how well {classes[1]!r} is ranked above {classes[0]!r}"))
    return scores
