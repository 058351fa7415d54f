"""A saved table together with new rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from whence import Explanation
from whence.cli.output import figure, percent
from whence.cli.table_output import advice_for
from whence.cli.table_results import rows_of, shown
from whence.errors import InputError
from whence.tabular.reading import Table
from whence.tabular.results import Results, trace_rows
from whence.tabular.saved import Saved
from whence.tabular.scores import Score

if TYPE_CHECKING:
    import pandas

LARGEST_SPREAD = 0.5
"""No probability has a larger standard deviation; where one comes out, to first order, nothing is known."""


class OpenedTable:
    """Rows of a table, asked of a saved fit.

    Args:
        kept: the fit.
        table: the rows.
        data: where they came from.
    """

    unit = "row"
    heads = ("label", "without it")

    def __init__(self, kept: Saved, table: Table, data: Path) -> None:
        """Encode the rows."""
        self.kept = kept
        self.table = table
        self.name = data.name
        self.stem = data.name.split(".")[0] or "table"
        self.inputs = kept.model.encode(table)
        self.values = kept.model.targets(table)
        self.notes = [*table.notes, *kept.model.strange(table)]
        self._results: Results | None = None

    def frame(self, verdicts: bool) -> pandas.DataFrame:
        """One line for each row."""
        everything = numpy.arange(len(self.table) if verdicts else 0)
        frame = self._trace(everything).frame()
        return frame if verdicts else frame.drop(columns="verdict")

    def scores(self) -> list[Score]:
        """By the targets that came along."""
        results = self._results or self._trace(numpy.arange(0))
        return results.scores(numpy.arange(len(self.table)))

    def places(self, rows: list[int] | None) -> list[int]:
        """Places of rows by their numbers in the file; those with the largest HeC3 when none were named."""
        if rows is None:
            hec3 = self._trace(numpy.arange(0)).predicted.hec3
            return [int(at) for at in numpy.argsort(-hec3, kind="stable")[:3]]
        places = {int(row): place for place, row in enumerate(self.table.rows)}
        beyond = [row for row in rows if row not in places]
        if beyond:
            raise InputError(
                f"expected rows from 1 to {self.table.total:,} of {self.name}, got {', '.join(map(str, beyond))}."
            )
        return [places[row] for row in rows]

    def explain(self, places: list[int], top: int) -> list[dict[str, Any]]:
        """Verdicts, and the training rows with the largest shares."""
        inputs = self.inputs[torch.as_tensor(places, device="cpu")]
        tracer = self.kept.tracer
        verdicts = tracer.explain(inputs, top=top)
        shares = tracer.attribute(inputs, top=top, matrix=True)
        assert shares.ho.matrix is not None  # asked for
        none = numpy.arange(0)
        rows = self.table.take(places)
        results = trace_rows(self.kept.model, tracer, rows, inputs, self.values[places], none, none)
        found = []
        for number, place in enumerate(places):
            at = shares.hec3.index[number].tolist()
            causes = [
                {
                    "row": int(self.kept.training_rows[one]),
                    "hec3": float(shares.hec3.share[number, rank]),
                    "ho": float(shares.ho.matrix[number, one]),
                    **self._left_out(one),
                }
                for rank, one in enumerate(at)
            ]
            found.append(
                {
                    "row": int(self.table.rows[place]),
                    "prediction": self._answer(results, number),
                    "verdict": verdicts.verdicts[number],
                    "advice": advice_for(verdicts.verdicts[number]),
                    "because": _because(verdicts, number),
                    "ratio": float(verdicts.ratio[number]),
                    "noise_p": float(verdicts.noise_p[number]),
                    "scarcity_p": float(verdicts.scarcity_p[number]),
                    "causes": causes,
                }
            )
        return found

    def report(self, out: Path) -> None:
        """The report; with targets where all rows have one."""
        model, target = self.kept.model, self.kept.model.target
        test: Any = self.inputs
        if numpy.isfinite(self.values).all():
            values = torch.as_tensor(self.values, device="cpu")
            test = (test, values.long() if target.outputs > 1 else values.to(test.dtype).unsqueeze(1))
        self.kept.tracer.report(
            out,
            test,
            names=list(target.classes) or [target.name],
            table=shown(model, self.table),
            ids=(rows_of(self.table), [f"training row {row}" for row in self.kept.training_rows]),
            title=f"{target.name}: how uncertain are predictions, and why?",
            about=[f"{len(self.table):,} rows of {self.name}."],
        )

    def _trace(self, explained: Any) -> Results:
        kept = self.kept
        self._results = trace_rows(
            kept.model, kept.tracer, self.table, self.inputs, self.values, explained, kept.training_rows
        )
        return self._results

    def _answer(self, results: Results, number: int) -> str:
        columns = {name: values[number] for name, values in results.prediction().items()}
        if self.kept.model.target.task == "regression":
            low, high = figure(float(columns["lower"])), figure(float(columns["upper"]))
            return f"{figure(float(columns['prediction']))}, between {low} and {high} with 95 % confidence"
        spread = float(columns["probability_std"])
        known = (
            f"+- {spread:.3f}" if spread <= LARGEST_SPREAD else "that another training set could turn into any other"
        )
        return f"{columns['prediction']}, probability {columns['probability']:.3f} {known}"

    def _left_out(self, at: int) -> dict[str, str]:
        """The label of a training row, and what the fit without that row says: a number, or the label's probability."""
        target = self.kept.model.target
        value = float(self.kept.values[at])
        left_out = self.kept.tracer.loo_residuals[at]
        if target.task == "regression":
            return {"label": figure(value), "without": figure(value - float(left_out[0]))}
        place = int(value)
        own = 1.0 - float(left_out[place]) if target.outputs > 1 else 1.0 - abs(float(left_out[0]))
        return {"label": target.classes[place], "without": f"p = {min(max(own, 0.0), 1.0):.2f}"}


def _because(verdicts: Explanation, number: int) -> str:
    noise, chance = float(verdicts.noise[number]), float(verdicts.noise_p[number])
    calm = chance <= 1 - verdicts.level and not bool(verdicts.noisier[number])
    usual = ", which is usual among rows that are no noisier than others" if calm else ""
    return (
        f"squared errors of similar training rows are {noise:.2g} times the average (p = {chance:.2g}){usual}; "
        f"{percent(float(verdicts.scarcity_p[number]))} of the training rows have as few others around them"
    )
