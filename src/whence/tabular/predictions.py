"""Predictions of rows with variances and verdicts, as data frames, their scores, and what they say about labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from whence.display import number
from whence.influence.intervals import LEVEL
from whence.influence.training import WrongLabels, wrong_labels
from whence.results import Uncertainty
from whence.tabular.files import TextTable
from whence.tabular.fitted import FittedTable
from whence.tabular.target import Target

if TYPE_CHECKING:
    import pandas

DOUBTFUL = 2.0  # standard deviations beyond which the other rows contradict a number
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

    table: TextTable
    fitted: FittedTable  # the model of the predictions
    values: Any  # (m,) observed values, NaN if missing
    frame: pandas.DataFrame
    probabilities: Any  # (m, classes) of all classes; (m, 0) for numbers
    uncertainty: Uncertainty

    def scores(self, which: Any = slice(None)) -> list[Score]:
        """Scores of the predictions of some rows, if their targets are known."""
        rows = numpy.arange(len(self.table))[which]
        rows = rows[numpy.isfinite(self.values[rows])]
        values, frame, target = self.values[rows], self.frame.iloc[rows], self.fitted.model.target
        if len(rows) and target.task == "regression":
            return score_numbers(values, *(frame[name].to_numpy() for name in ("prediction", "lower", "upper")))
        return score_classes(values.astype(int), self.probabilities[rows], target.classes) if len(rows) else []

    def rows_frame(self, part: list[str] | None = None, labels: Mapping[str, Any] | None = None) -> pandas.DataFrame:
        """One line for each row of the file: its number, its identifiers and target, and the prediction.

        Also the part of the split that each belongs to, and columns with what the other rows say about its label.
        """
        model, frame = self.fitted.model, self.frame.assign(**labels or {})
        identifiers = [column.name for column in model.excluded if column.identifier]
        for name in reversed([name for name in (*identifiers, model.target.name) if name in self.table.columns]):
            unique = name
            while unique in frame or unique in ("row", "part"):
                unique += "_"
            frame.insert(0, unique, self.table.columns[name])
        if part is not None:
            frame.insert(0, "part", part)
        frame.insert(0, "row", self.table.rows)
        return frame


def predict_rows(fitted: FittedTable, table: TextTable, explain: Any = ()) -> RowPredictions:
    """Predict all rows of a table; those at the positions `explain` get a verdict."""
    import pandas  # an extra: only tables need it

    model, tracer = fitted.model, fitted.tracer
    uncertainty = tracer.predict(fitted.batches(model.encode(table)), covariance=True)
    hec3 = uncertainty.hec3.sum(1).numpy()
    probabilities = numpy.zeros((len(table), 0))
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
    columns.update(ho=uncertainty.ho.sum(1).numpy(), hec3=hec3, ratio=uncertainty.ratio.numpy(), verdict="")
    frame = pandas.DataFrame(columns)
    explained = numpy.asarray(explain, dtype=int)
    if len(explained):
        found = fitted.explain(table.take(explained))
        verdicts: dict[str, Any] = {"verdict": list(found.verdicts)}
        verdicts |= {name: getattr(found, name).numpy() for name in ("noise", "scarcity", "noise_p", "scarcity_p")}
        for name in ("check", "near"):  # training examples by their rows in the file
            verdicts[name] = [" ".join(map(str, some)) for some in fitted.rows[getattr(found, name).numpy()]]
        for name, cells in verdicts.items():
            frame[name] = "" if isinstance(cells[0], str) else numpy.nan
            frame.iloc[explained, frame.columns.get_loc(name)] = cells
        reasons = numpy.array(fitted.impossible(table), dtype=object)
        frame.loc[(reasons != "") & (frame["verdict"] != "").to_numpy(), "verdict"] = CHECK_INPUT
    return RowPredictions(table, fitted, model.targets(table), frame, probabilities, uncertainty)


CHECK_INPUT = "check the input"  # the verdict on impossible rows, which their columns show and no network


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


@dataclass(frozen=True)
class RowLabels:
    """Labels of the rows of a table, and what the other rows predict instead.

    Training rows are judged by the fit without them, all others by the prediction itself, with the same formula: for
    classes suspicion is 1 - p(label), for numbers |label - suggested| over the standard deviation of an observation.
    """

    target: Target
    labels: Any  # (m,) numbers, or indices of classes; NaN if missing
    suggested: Any  # (m,) the same, by a model that did not see the label
    sure: Any  # (m,) probability of the suggested class, or the standard deviation of an observation around a number
    suspicion: Any  # (m,) NaN if there is no label
    order: Any  # positions of the rows with a label, the most doubtful label first
    counted: Any  # (m,) which labels are used to estimate the share of wrong ones

    @classmethod
    def of(cls, predictions: RowPredictions, train: Any) -> RowLabels:
        """From predictions of all rows, and the positions of the training rows among them."""
        target, tracer = predictions.fitted.model.target, predictions.fitted.tracer
        labels, m = predictions.values, len(predictions.table)
        rank, counted = numpy.zeros(m), numpy.isfinite(labels)
        if target.classes:
            suggested, sure = predictions.probabilities.argmax(1), predictions.probabilities.max(1)
            own = numpy.where(counted, labels, 0).astype(int)
            suspicion = 1.0 - predictions.probabilities[numpy.arange(m), own]
        else:
            suggested = predictions.uncertainty.mean[:, 0].numpy()
            sure = (predictions.uncertainty.laplace[:, 0] + tracer.noise_scale).sqrt().numpy()
            suspicion = numpy.abs(labels - suggested) / sure
        suggested, sure = suggested.astype(float), sure.astype(float)
        frame = tracer.training_frame()
        suggested[train] = frame["suggested"]
        sure[train] = frame["suggested_probability" if target.classes else "suggested_std"]
        suspicion[train], rank[train] = frame["suspicion"], frame["suspect_rank"]
        suspicion = numpy.where(counted, suspicion, numpy.nan)
        order = numpy.lexsort((rank, -suspicion))[: int(counted.sum())]  # ranks order ties of suspicion; NaN is last
        if predictions.fitted.model.learner == "trees":  # their splits have learned the labels of training rows
            counted[train] = False
        return cls(target, labels, suggested, sure, suspicion, order, counted)

    @property
    def contradicted(self) -> Any:
        """(m,) which labels the other rows contradict: another class, or a number far from theirs."""
        if self.target.classes:
            return numpy.isfinite(self.labels) & (self.labels != self.suggested)
        return self.suspicion > DOUBTFUL

    @property
    def doubtful(self) -> Any:
        """Positions of the rows whose label the other rows contradict, the most doubtful one first."""
        return self.order[self.contradicted[self.order]]

    def wrong(self) -> WrongLabels | None:
        """How many labels are wrong in all; `None` for numbers."""
        known, classes = self.counted, len(self.target.classes)
        return wrong_labels(self.labels[known], self.suggested[known], self.sure[known], classes) if classes else None

    def columns(self) -> dict[str, Any]:
        """Columns for a file: the suggested label (the name of a class, or a number), how sure it is, the suspicion."""
        names, suggested = self.target.classes, self.suggested
        cells = numpy.array(names, dtype=object)[suggested.astype(int)] if names else suggested
        sure = "suggested_probability" if names else "suggested_std"
        return {"suggested": cells, sure: self.sure, "suspicion": self.suspicion}
