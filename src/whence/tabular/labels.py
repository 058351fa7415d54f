"""What models that did not see a row's label say of it: how doubtful it is, and which label they suggest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from whence.influence.wrong_labels import WrongLabels, wrong_labels
from whence.tabular.files import TextTable
from whence.tabular.fitted import FittedTable
from whence.tabular.predictions import RowPredictions
from whence.tabular.target import Target

DOUBTFUL = 2.0
"""Standard deviations from which on the other rows contradict a number."""


def row_batches(fitted: FittedTable, table: TextTable) -> Any:
    """The rows of a table as a tracer takes them."""
    return fitted.batches(fitted.model.encode(table))


@dataclass(frozen=True)
class RowLabels:
    """Labels of the rows of a table, and what the other rows say in their place.

    Training rows are judged by the fit without them, all others by the prediction itself, by the same formula: for
    classes suspicion is 1 - p(label), for numbers |label - suggested| over the standard deviation of an observation.
    """

    target: Target
    labels: Any  # (m,) numbers, or indices of classes; NaN where there is none
    suggested: Any  # (m,) the same, by a model that did not see the label
    sure: Any  # (m,) probability of the suggested class, or the standard deviation of an observation around a number
    suspicion: Any  # (m,) NaN where there is no label
    order: Any  # positions of the rows with a label, the most doubtful label first
    counted: Any  # (m,) which labels the share of wrong ones is estimated from

    @classmethod
    def of(cls, predictions: RowPredictions, train: Any) -> RowLabels:
        """From predictions of all rows, and the positions of the training rows among them."""
        target, tracer = predictions.fitted.model.target, predictions.fitted.tracer
        labels, m = predictions.values, len(predictions.table)
        rank = numpy.zeros(m)
        if target.classes:
            suggested, sure = (getattr(predictions.probabilities, name)(1) for name in ("argmax", "max"))
            known = numpy.where(numpy.isfinite(labels), labels, 0).astype(int)
            suspicion = 1.0 - predictions.probabilities[numpy.arange(m), known]
        else:
            predicted = tracer.predict(row_batches(predictions.fitted, predictions.table))
            suggested = predicted.mean[:, 0].cpu().numpy()
            sure = (predicted.laplace[:, 0].cpu() + tracer.noise_scale).sqrt().numpy()
            suspicion = numpy.abs(labels - suggested) / sure
        suggested, sure = suggested.astype(float), sure.astype(float)
        frame = tracer.training_frame()
        suggested[train] = frame["suggested"]
        sure[train] = frame["suggested_probability" if target.classes else "suggested_std"]
        suspicion[train], rank[train] = frame["suspicion"], frame["suspect_rank"]
        suspicion = numpy.where(numpy.isfinite(labels), suspicion, numpy.nan)
        order = numpy.lexsort((rank, -suspicion))  # ranks order what rounds to the same suspicion; NaN comes last
        counted = numpy.isfinite(labels)
        order = order[: int(counted.sum())]
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
        known = self.counted
        if not self.target.classes:
            return None
        return wrong_labels(self.labels[known], self.suggested[known], self.sure[known], len(self.target.classes))

    def columns(self) -> dict[str, Any]:
        """Columns for a file: the suggested label, how sure it is, and the suspicion."""
        sure = "suggested_probability" if self.target.classes else "suggested_std"
        return {"suggested": self.suggested_cells(), sure: self.sure, "suspicion": self.suspicion}

    def suggested_cells(self) -> Any:
        """(m,) names of classes, or numbers."""
        if not self.target.classes:
            return self.suggested
        return numpy.array(self.target.classes, dtype=object)[self.suggested.astype(int)]
