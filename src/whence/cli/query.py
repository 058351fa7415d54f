"""`whence predict`, `whence explain` and `whence report`: query a saved fit about new rows or inputs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy
import pandas
import torch
from typer import Argument, Option

import whence
from whence.cli import console
from whence.cli.console import Output, figure
from whence.cli.fit import LanguageModel, SpecFile, Text, read_texts, write_report
from whence.cli.table import ADVICE, count_verdicts, print_verdicts, report_rows
from whence.display import count, listing, number, percent
from whence.errors import InputError
from whence.io import read_attached
from whence.results import MAX_OUTPUTS, MAX_STD, probability_text
from whence.runtime.execution import Progress
from whence.tabular.files import read_table, write_csv
from whence.tabular.fitted import FittedTable, load_table
from whence.tabular.predictions import CHECK_INPUT, NUMBERS, RowPredictions, Score, predict_rows, verdicts_frame

SHOWN = 10  # predictions that are printed
OUTPUTS = 4  # outputs of a prediction that are printed
# Columns of predictions that are printed, if they are there.
COLUMNS = ("row", "class", "prediction", "mean", *(f"mean_{output}" for output in range(OUTPUTS)), "lower", "upper")
COLUMNS += ("std", "probability", "probability_std", "ho", "hec3", "ratio", "verdict")
MOST_UNCERTAIN = 3  # rows that are explained if none are named

Saved = Annotated[Path, Argument(help="What `whence table --save` or `whence fit --save` wrote.")]
Data = Annotated[Path | None, Argument(help="New rows, CSV or parquet; new texts, JSONL; none for a network.")]
Spec = Annotated[
    Path | None, Option(help="The Python file passed to `whence fit`, which is run; or the language model's folder.")
]
InUse = Annotated[
    bool,
    Option("--pool", help="Use these rows also as a pool: kinds frequent here and rare in training are called scarce."),
]
PREDICTED = ("prediction", "lower", "upper", "std", "probability", "probability_std")  # of a row of a table
NAMED = 3  # rows that cannot be right, named in a note


@console.handle_errors
def predict(
    saved: Saved,
    data: Data = None,
    csv: Annotated[Path | None, Option(help="The CSV file to write.", dir_okay=False)] = None,
    spec: Spec = None,
    rows: console.Rows = 0,
    delimiter: console.Delimiter = None,
    verdicts: Annotated[bool, Option(help="Also say why predictions are uncertain, which takes longer.")] = True,
    pool: InUse = False,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Predict new rows with their variances, by a saved fit.

    Examples:
    - `whence predict bank.whence new.csv` writes new-predictions.csv
    - `whence predict bank.whence new.csv --json > rows.json`
    - `whence predict bank.whence new.csv --pool` finds kinds of rows that are new
    - `whence predict network.whence --spec network.py` for a fit made by `whence fit`
    """
    console.check_writable(csv, read=(saved, data, spec))
    if pool and not verdicts:
        raise InputError("expected --pool with verdicts, which it changes, got --no-verdicts. Leave out one of them.")
    output = Output(as_json)
    query = _load(saved, data, spec, rows, delimiter, not quiet)
    query.in_use = pool
    path = csv or (None if as_json else Path(f"{query.stem}-predictions.csv"))
    console.check_writable(path, read=(saved, data, spec))
    frame = query.frame(verdicts)
    if path is not None:
        write_csv(path, frame)
    output.notes(query.notes)
    output.head(count(len(frame), "prediction") + (f", the first {SHOWN}" if len(frame) > SHOWN else ""))
    hidden = ("ho", "hec3") if {"std", "probability"} & {*frame.columns} else ()  # squares of units, or of logits
    heads = [name for name in COLUMNS if name in frame.columns and name not in hidden]
    right = [index for index, name in enumerate(heads) if name != "verdict"]
    output.rows(frame[heads].head(SHOWN).itertuples(index=False), heads, right)
    if verdicts:
        print_verdicts(output, count_verdicts(frame["verdict"]), "Why are predictions uncertain?")
    scores = query.scores()
    if scores:
        output.head("Scores, by the targets in the data")
        output.rows(scores, right=(1,))
    output.say()
    output.files({"csv": path})
    found = {"rows": frame.to_dict(orient="records"), "scores": {one.name: one.value for one in scores}}
    output.finish({**found, "notes": query.notes, "files": {"csv": path}})


@console.handle_errors
def explain(
    saved: Saved,
    data: Data = None,
    row: Annotated[list[int] | None, Option("--row", "-r", min=1, help="Row of the data, from 1; repeatable.")] = None,
    top: Annotated[int, Option(min=1, help="How many training examples to name.")] = 5,
    spec: Spec = None,
    delimiter: console.Delimiter = None,
    pool: InUse = False,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Say for some rows why their predictions are uncertain, and which training rows are behind it.

    Without --row the three most uncertain rows are explained.

    Examples:
    - `whence explain bank.whence new.csv --row 3 --row 17`
    - `whence explain network.whence --spec network.py --row 3`
    - `whence explain texts.whence new.jsonl --spec model-folder` for texts: the training texts behind them
    """
    output = Output(as_json)
    query = _load(saved, data, spec, 0, delimiter, not quiet)
    query.in_use = pool
    content = query.explain(row, top)
    output.notes(query.notes)
    for one in content:
        output.head(f"{query.unit} {one['row']}: {one['words']}")
        output.say(f"{one['verdict']}: {one['advice']}", indent=2)
        output.say(one["because"], indent=2)
        names = list(one["causes"][0])
        causes = [[percent(cell) if "share" in name else cell for name, cell in c.items()] for c in one["causes"]]
        heads = [name.replace("_", " ").replace("hec3", "HeC3").replace("of ho", "of Ho") for name in names]
        output.rows(causes, heads, right=[at for at, name in enumerate(names) if name != "begins"])
    output.say()
    output.say(query.legend)
    output.finish(content)


@console.handle_errors
def report(
    saved: Saved,
    data: Data = None,
    out: Annotated[Path, Option("--out", "-o", help="The report to write.", dir_okay=False)] = Path("report.html"),
    spec: Spec = None,
    rows: console.Rows = 10_000,
    delimiter: console.Delimiter = None,
    pool: InUse = False,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Write the HTML report of a saved fit on new rows.

    Examples: `whence report bank.whence new.csv --out new.html`, `whence report network.whence --spec network.py`
    """
    console.check_writable(out, read=(saved, data, spec))
    output = Output(as_json)
    query = _load(saved, data, spec, rows, delimiter, not quiet)
    query.in_use = pool
    query.report(out)
    output.notes(query.notes)
    output.files({"report": out})
    output.finish({"report": out, "notes": query.notes})


def _load(
    saved: Path, data: Path | None, spec: Path | None, rows: int, delimiter: str | None, progress: bool
) -> SavedNetwork:
    """Load what was saved, and read the rows or inputs of the query."""
    if not saved.is_file():
        raise InputError(f"expected a file written by `whence table --save` or `whence fit --save`, got {saved}.")
    about = read_attached(saved)[0] or {}
    if "table" in about:
        if data is None or spec is not None:
            needed = ", ".join(str(column["name"]) for column in about["table"]["columns"])
            got = "none" if data is None else "--spec"
            raise InputError(f"expected a file with new rows for a table, got {got}. Columns it needs: {needed}.")
        read = read_table(data, rows, delimiter=delimiter, progress=Progress(progress))
        fitted = load_table(saved, progress)
        notes = [*read.notes, *read.missing_labels(fitted.model.target.name)]
        return SavedTable(fitted, read.frame, notes, data.name)
    if "texts" in about:
        if data is None or spec is None:
            missing = "--spec" if spec is None else "new texts"
            raise InputError(f"expected --spec with the folder of the model, and new texts, got no {missing}.")
        model = LanguageModel(spec, Path(about["texts"]), about["tokens"])
        tracer = whence.load(saved, model.model(), model.train_loader(), progress=progress)
        return SavedTexts(tracer, model, read_texts(data), data.stem)
    if data is not None or spec is None:
        raise InputError(
            f"expected --spec with the Python file that {saved} was fitted with, whose test_loader() gives the "
            f"inputs, and no other data, got {'no --spec' if spec is None else f'the data {data}'}."
        )
    file = SpecFile(spec)
    inputs = file.test_loader()
    if inputs is None:
        raise InputError(f"expected {spec} to define a function test_loader(), got none.")
    return SavedNetwork(whence.load(saved, file.model(), file.train_loader(), progress=progress), inputs, [], spec.stem)


class SavedNetwork:
    """Inputs of a loader, predicted by the saved fit of a user's own network."""

    unit = "example"
    variance = "hec3"  # whose shares order training examples
    in_use = False  # whether all inputs together are a pool of those that the model meets in use
    legend = (
        "Examples are counted from 1, in the order of test_loader() and of train_loader(). Without it: the size of the "
        "residual of that training example in the fit without it."
    )

    def __init__(self, tracer: whence.Tracer, inputs: Any, notes: list[str], stem: str) -> None:
        self.tracer, self.inputs, self.notes, self.stem = tracer, inputs, notes, stem
        self.examples = numpy.arange(tracer.problem.n) + 1  # numbers of training examples, for people

    @property
    def pool(self) -> Any:
        """The pool of inputs that the model meets in use; `None` without one."""
        return self.inputs if self.in_use else None

    @cached_property
    def _uncertainty(self) -> whence.Uncertainty:
        return self.tracer.predict(self.inputs)

    @cached_property
    def _training(self) -> pandas.DataFrame:
        return self.tracer.training_frame()

    @cached_property
    def _answers(self) -> dict[str, torch.Tensor] | None:
        """Class, probability and, for few outputs, its standard deviation, where one class of several is predicted."""
        u, known = self._uncertainty, self.tracer.problem.likelihood
        if not (known.has_classes and known.couples_outputs and u.chosen is None):
            return None
        chance, best = u.probabilities.max(dim=-1)
        answers = {"class": best, "probability": chance}
        if u.mean.ndim == 2 and u.mean.shape[1] <= MAX_OUTPUTS:
            answers["probability_std"] = u.probability_std().gather(1, best.unsqueeze(1)).squeeze(1)
        return answers

    def frame(self, verdicts: bool) -> pandas.DataFrame:
        """The results of `predict` and `explain`, side by side."""
        frame = self._uncertainty.to_frame()
        frame.insert(0, "row", range(1, len(frame) + 1))
        if self._answers is not None:
            for place, (name, values) in enumerate(self._answers.items(), 1):
                frame.insert(place, name, values.flatten().tolist())
        if verdicts:
            explanation = self.tracer.explain(self.inputs, pool=self.pool)
            frame = frame.join(verdicts_frame(explanation, self.examples))
            self.notes.extend(explanation.notes)
        return frame

    def scores(self) -> list[Score]:
        """Return none: only the user knows what the targets mean."""
        return []

    def report(self, out: Path) -> None:
        """Write the report on all inputs."""
        write_report(self.tracer, out, self.inputs, pool=self.pool)

    def explain(self, rows: list[int] | None, top: int) -> list[dict[str, Any]]:
        """Verdicts, and training examples with the largest shares; of the most doubtful rows if none are named."""
        verdicts = self.tracer.explain(self.inputs, top=top, pool=self.pool)
        numbers = range(1, len(verdicts) + 1)
        shares = getattr(self.tracer.attribute(self.inputs, top=top), self.variance)
        places = choose_places(rows, numbers, verdicts.doubt)
        return [self.explained(at, numbers[at], verdicts, shares) for at in places]

    def explained(
        self, at: int, number: int, verdicts: whence.Explanation, shares: Any, impossible: str = ""
    ) -> dict[str, Any]:
        """The explanation of one input, which has a number for people; `impossible` says why it cannot be right."""
        verdict = CHECK_INPUT if impossible else verdicts.verdicts[at]
        names = (*NUMBERS, "ratio", *["frequency"] * verdicts.has_pool)
        behind = zip(shares.index[at].tolist(), shares.share[at].tolist(), strict=True)
        prediction = self.prediction(at)
        return {
            "row": number,
            **prediction,
            "words": in_words(prediction),
            "verdict": verdict,
            "because": impossible or verdicts.reason(at),
            "advice": ADVICE[verdict].replace("in `check`", "below"),
            **{name: float(getattr(verdicts, name)[at]) for name in names},
            "causes": [
                {
                    f"training_{self.unit}": int(self.examples[example]),
                    f"share_of_{self.variance}": share,
                    **self.left_out(example),
                }
                for example, share in behind
            ],
        }

    def prediction(self, at: int) -> dict[str, Any]:
        """A prediction in numbers: the class and its probability, or the outputs."""
        mean = self._uncertainty.mean
        if self._answers is None or mean.ndim > 2:
            return {"mean": mean[at].flatten().tolist()}
        return {name: values[at].tolist() for name, values in self._answers.items()}

    def left_out(self, example: int) -> dict[str, Any]:
        """The size of the residual of a training example, as fitted and in the fit without it."""
        row = self._training.loc[example]
        return {"residual": float(row["residual"]), "residual_without_it": float(row["loo_residual"])}


class SavedTexts(SavedNetwork):
    """New texts, and the training texts behind a language model's predictions in them; all are numbered from one."""

    unit = "text"
    variance = "ho"  # finds the texts behind an answer; those of HeC3 are texts that nobody could predict
    legend = (
        "Texts are counted from 1, as lines of their files. Without it: the size of the residual of that training text "
        "in the fit without it."
    )

    def __init__(self, tracer: whence.Tracer, source: LanguageModel, new: list[Text], stem: str) -> None:
        inputs = [{name: one for name, one in batch.items() if name != "labels"} for batch in source.batches(new)]
        super().__init__(tracer, inputs, [], stem)
        self.texts, self.new = source.texts, new

    def prediction(self, at: int) -> dict[str, Any]:
        """The beginning of a text: there is a prediction for each of its tokens."""
        return {"begins": self.new[at].beginning}

    def left_out(self, example: int) -> dict[str, Any]:
        """The beginning of a training text, and the size of its residual in the fit without it."""
        residuals = super().left_out(example)
        return {"begins": self.texts[example].beginning, "residual_without_it": residuals["residual_without_it"]}


class SavedTable(SavedNetwork):
    """Rows of a table, predicted by a saved fit."""

    unit = "row"
    legend = (
        "Rows are counted from 1, below the names of the columns, in the new file and in that of the training. Without "
        "it: what the fit without that training row predicts for it; for classes, the probability of its label."
    )

    def __init__(self, fitted: FittedTable, rows: pandas.DataFrame, notes: list[str], name: str) -> None:
        inputs = fitted.batches(rows)
        notes = [*notes, *fitted.model.unrecognized(rows)]
        super().__init__(fitted.tracer, inputs, notes, name.split(".")[0] or "table")
        self.fitted, self.rows, self.name, self.examples = fitted, rows, name, fitted.rows
        reasons = numpy.array(fitted.impossible(rows, targets=True), dtype=object)
        self.wrong = reasons != ""
        unscored = "; not in the scores" if fitted.model.target.name in rows.columns else ""
        for row in numpy.flatnonzero(self.wrong)[:NAMED]:
            self.notes.append(f"row {rows.index[row]} cannot be right: {reasons[row]}{unscored}")
        if self.wrong.sum() > NAMED:
            self.notes.append(f"{self.wrong.sum() - NAMED:,} more rows cannot be right{unscored}")

    @property
    def pool(self) -> pandas.DataFrame | None:
        """The rows, if they are a pool."""
        return self.rows if self.in_use else None

    @cached_property
    def _predictions(self) -> RowPredictions:
        """Predictions without verdicts."""
        return predict_rows(self.fitted, self.rows)

    def frame(self, verdicts: bool) -> pandas.DataFrame:
        """One line for each row."""
        if not verdicts:
            return self._predictions.rows_frame().drop(columns="verdict")
        self._predictions = predict_rows(self.fitted, self.rows, numpy.arange(len(self.rows)), self.pool)
        return self._predictions.rows_frame()

    def scores(self) -> list[Score]:
        """Scores by the targets in the table, without rows that cannot be right."""
        return self._predictions.scores(~self.wrong)

    def report(self, out: Path) -> None:
        """Write the report on all rows; those that cannot be right are not in its scores."""
        rows, target = self.rows.copy(), self.fitted.model.target.name
        if target in rows.columns:
            rows.loc[self.wrong, target] = numpy.nan
        about = f"{count(len(rows), 'row')} of {self.name}."
        report_rows(out, self.fitted, rows, about, self.notes, in_use=self.in_use)

    def explain(self, rows: list[int] | None, top: int) -> list[dict[str, Any]]:
        """Explain rows; a table may have too many rows to explain all of them."""
        if rows is None and self.pool is not None:
            scores = self.fitted.explain(self.rows, 0, self.pool).doubt
        else:
            predicted = self._predictions.frame if rows is None else {}
            scores = predicted.get("probability_std", predicted.get("hec3", ()))
        places = choose_places(rows, self.rows.index, scores)
        some = SavedTable(self.fitted, self.rows.iloc[places], [], self.name)
        verdicts = self.fitted.explain(some.rows, top, self.pool)
        shares = self.tracer.attribute(some.inputs, top=top).hec3
        impossible = self.fitted.impossible(some.rows)
        return [
            some.explained(at, int(number), verdicts, shares, impossible[at])
            for at, number in enumerate(some.rows.index)
        ]

    def prediction(self, at: int) -> dict[str, Any]:
        """A prediction in numbers: an amount with its interval, or a class with its probability."""
        row = self._predictions.frame.iloc[at]
        return {name: row[name] for name in PREDICTED if name in row}

    def left_out(self, example: int) -> dict[str, Any]:
        """The label of a training row, and the prediction without that row: a number, or the label's probability."""
        value, row = float(self.fitted.values[example]), self._training.loc[example]
        classes = self.fitted.model.target.classes
        if not classes:
            return {"label": value, "prediction_without_it": float(row["suggested"])}
        return {"label": classes[int(value)], "probability_without_it": 1.0 - float(row["suspicion"])}


def in_words(prediction: dict[str, Any]) -> str:
    """A prediction as text: the beginning of a text, an amount with its interval, a class, or outputs.

    Examples:
        >>> in_words({"prediction": "yes", "probability": 0.9, "probability_std": 0.02}), in_words({"mean": [1.5, 2.0]})
        ('yes, probability 0.900 ± 0.020', '1.5, 2')
    """
    if "begins" in prediction:
        return str(prediction["begins"])
    if "lower" in prediction:
        mean, low, high = (figure(float(prediction[name])) for name in ("prediction", "lower", "upper"))
        return f"{mean}, between {low} and {high} with 95 % confidence"
    if "probability" not in prediction:
        return listing([number(value, 4) for value in prediction["mean"]], OUTPUTS)
    answer = prediction["prediction"] if "prediction" in prediction else f"class {prediction['class']}"
    chance = [float(prediction[name]) for name in ("probability", "probability_std") if name in prediction]
    unknown = ": another training set could give any other class" if max(chance[1:], default=0.0) > MAX_STD else ""
    return f"{answer}, probability {probability_text(*chance)}{unknown}"


def choose_places(named: list[int] | None, numbers: Any, scores: Any) -> list[int]:
    """Positions of the rows with the named numbers, or of those with the largest scores.

    Examples:
        >>> choose_places(None, [1, 2, 3], [1.0, 5.0, 3.0]), choose_places([3], [1, 2, 3], [1.0, 5.0, 3.0])
        ([1, 2, 0], [2])
    """
    if named is None:
        return [int(at) for at in numpy.argsort(-numpy.asarray(scores), kind="stable")[:MOST_UNCERTAIN]]
    places = {int(number): place for place, number in enumerate(numbers)}
    beyond = [number for number in named if number not in places]
    if beyond:
        raise InputError(f"expected rows from 1 to {len(places):,}, got {', '.join(map(str, beyond))}.")
    return [places[number] for number in named]
