"""`whence table`: train a network or trees on a table in a file, and report on it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import torch
from typer import Argument, Option

from whence.cli import console
from whence.cli.console import Output, figure, stop
from whence.display import count, number, percent
from whence.runtime.execution import Progress
from whence.tabular.files import TextTable, read_table, write_csv
from whence.tabular.fitted import FittedTable, Prepared, check_folder, fit_table, prepare, save_table
from whence.tabular.predictions import CHECK_INPUT, RowLabels, RowPredictions, affordable_rows, predict_rows
from whence.tabular.target import Task
from whence.tabular.worklist import WHEN, apply_answers, compare, read_answers, work_items

ADVICE = {
    "confident": "nothing to do",
    "noisy labels nearby": "similar training rows err more than others: check the labels of those named in `check`",
    "scarce data": "few training rows are similar: collect more like these",
    "both": "check the labels, and collect more",
    CHECK_INPUT: "its columns hold impossible values: correct the input",
}
SUSPECTS = 5
TRACED, ALL_TRACED = 500, 2000  # predictions that a report traces to training rows; all of them up to the second number
NOTES = 4  # notes on the file in a report; the others are only printed

Verdicts = Literal["auto", "all", "held-out", "none"]  # which rows get a verdict
Model = Literal["auto", "network", "trees"]  # what is trained


@console.handle_errors
def table(
    data: Annotated[Path, Argument(help="A CSV or parquet file with names of columns; .gz, .bz2, .xz too.")],
    target: Annotated[str | None, Option("--target", "-t", help="Column to predict; without it, lists them.")] = None,
    task: Annotated[Task | None, console.one_of(Task, "Predict an amount or a class; guessed when not given.")] = None,
    ignore: Annotated[list[str] | None, Option("--ignore", "-x", help="A column to leave out; repeatable.")] = None,
    groups: Annotated[str | None, Option(help="Rows with the same value in this column are held out together.")] = None,
    out: console.Report = None,
    csv: Annotated[Path | None, Option(help="The CSV file with a line for each row.", dir_okay=False)] = None,
    save: Annotated[Path | None, Option(help="Save the fit in this folder, for predict, explain and report.")] = None,
    export: Annotated[
        Path | None, Option(help="Write labels to check and rows to label to this CSV.", dir_okay=False)
    ] = None,
    export_rows: Annotated[int, Option(min=1, help="At most this many of each in --export.")] = 100,
    answers: Annotated[
        Path | None, Option("--import", help="Answers to --export: the CSV filled in; trains again.")
    ] = None,
    corrected: Annotated[
        Path | None, Option(help="With --import, write the table with the answers to this CSV.", dir_okay=False)
    ] = None,
    rows: console.Rows = 50_000,
    held_out: Annotated[float, Option(min=0.05, max=0.5, help="Share of the rows held out for testing.")] = 0.2,
    verdicts: Annotated[
        Verdicts, console.one_of(Verdicts, "Which rows get a verdict; auto: all, if that takes about a minute.")
    ] = "auto",
    structure: console.Structure = None,
    model: Annotated[Model, console.one_of(Model, "What to train; auto: the better one on validation rows.")] = "auto",
    width: Annotated[int | None, Option(min=1, help="Width of the network's two hidden layers.")] = None,
    delimiter: console.Delimiter = None,
    seed: Annotated[int, Option(min=0, help="Seed of all random draws.")] = 0,
    no_report: Annotated[bool, Option("--no-report", help="Write the CSV file only.")] = False,
    as_json: console.AsJson = False,
    quiet: console.Quiet = False,
) -> None:
    """Train a model on a table, and say which rows it is unsure about, and why.

    Detects what each column holds, trains a small network and gradient boosting, and takes the one with the smaller
    error on validation rows; a fifth of the rows is held out for honest numbers. Writes an HTML report on the held-out
    rows, and a CSV file with the prediction, Ho, HeC3, their ratio and a verdict for each row.

    Examples:
    - `whence table houses.csv --target price`
    - `whence table bank.csv -t y -x duration --save bank-fit` leaves a column out, and keeps the fit
    - `whence table big.parquet -t y --rows 20000 --json > result.json`
    - `whence table bank.csv -t y --export todo.csv` writes the labels to check
    - `whence table bank.csv -t y --import answers.csv` trains again with the answers, and compares
    """
    began = time.perf_counter()
    stem = data.name.split(".")[0] or "table"
    report_path = None if no_report else out or Path(f"{stem}-report.html")
    csv_path = csv or Path(f"{stem}-rows.csv")
    if export is not None and export.suffix.lower() != ".csv":
        stop(f"expected a file that ends in .csv for --export, got {export}.")
    console.check_writable(report_path, csv_path, export, corrected, read=(data, answers))
    check_folder(save)
    output = Output(as_json)
    given, unanswered = ([], 0) if answers is None else read_answers(answers)
    read = read_table(data, rows, delimiter=delimiter, seed=seed, progress=Progress(not quiet))
    if target is None:
        stop(f"expected --target with the column to predict. Columns: {', '.join(map(repr, read.columns))}.")
    prepared = prepare(read, target, task, ignore or (), groups, test=held_out, width=width, seed=seed)
    content: dict[str, Any] = {"data": data, **_data_summary(prepared)}
    _print_data(output, content)
    answered = None if answers is None else apply_answers(prepared, given, answers.name)
    if corrected is not None and (answered is None or len(read) < read.total):
        stop(
            f"expected --import with the answers and all {read.total:,} rows for --corrected, got {answers or 'none'} "
            f"and {len(read):,} of them. Pass --rows 0 for all."
        )
    options: dict[str, Any] = {"structure": structure or "auto", "seed": seed, "progress": not quiet}
    fitted, before = fit_table(prepared, learner=model, **options), None
    if answered is not None:
        first = predict_rows(fitted, read)
        before = first, RowLabels.of(first, prepared.split.train)
        prepared, read = answered.prepared, answered.prepared.table
        content["rows"] = _data_summary(prepared)["rows"]
        fitted = fit_table(prepared, learner=fitted.model.learner, **options)  # the same kind, to compare
    predictions = predict_rows(fitted, read, _rows_to_explain(prepared, fitted, verdicts))
    labels = RowLabels.of(predictions, prepared.split.train)
    if answered is not None and before is not None:
        content["import"] = {**compare(answered, before, (predictions, labels)), "unanswered": unanswered}
    content.update(_fit_summary(prepared, fitted, predictions, labels))
    write_csv(csv_path, predictions.rows_frame(prepared.split.names(), labels.columns()))
    if report_path is not None:
        _write_report(report_path, prepared, fitted, data.name, f"Model: {'; '.join(_model_words(content['model']))}.")
    if save is not None:
        save_table(fitted, save, {"data": data.name, "model": content["model"], "scores": content["scores"]})
    content["files"] = {"csv": csv_path, "report": report_path, "saved": save}
    if corrected is not None:
        content["files"]["corrected"] = corrected
        write_csv(corrected, read.columns)
    if export is not None:
        items = work_items(prepared, fitted, labels, export_rows)
        write_csv(export, items)
        content["files"]["worklist"] = export
        content["export"] = dict(Counter(items["todo"]))
    content["seconds"] = round(time.perf_counter() - began, 1)
    _print_fit(output, content)
    output.finish(content)


def _rows_to_explain(prepared: Prepared, fitted: FittedTable, verdicts: Verdicts) -> Any:
    everything = numpy.arange(len(prepared.table))
    held_out = numpy.concatenate([prepared.split.test, prepared.split.unlabelled])
    if verdicts == "auto":
        return numpy.sort(affordable_rows(everything, held_out, fitted))
    return numpy.sort({"all": everything, "held-out": held_out, "none": everything[:0]}[verdicts])


def _write_report(path: Path, prepared: Prepared, fitted: FittedTable, name: str, model: str) -> None:
    """Write the report on the held-out rows, and on those without a label."""
    split = prepared.split
    test = prepared.table.take(numpy.concatenate([split.test, split.unlabelled]))
    unlabelled = f", {len(split.unlabelled):,} of them without a label" if len(split.unlabelled) else ""
    about = (
        f"{len(test):,} rows of {name} that the model was not trained on{unlabelled}. Rows are counted from 1, below "
        f"the names of the columns. {model}"
    )
    notes = [f"Note: {note}." for note in prepared.notes]
    if len(notes) > NOTES:
        notes[NOTES:] = [f"{len(notes) - NOTES} more notes on the file are in the output of the command."]
    traced = TRACED if len(test) > ALL_TRACED else len(test)
    report_rows(path, fitted, test, [about, *notes], prepared.table.take(split.train), traced)


def report_rows(
    path: Path,
    fitted: FittedTable,
    table: TextTable,
    about: list[str],
    train: TextTable | None = None,
    traced: int = TRACED,
) -> None:
    """Write the report on the rows of a table, with targets if some of them have one."""
    model, inputs, values = fitted.model, fitted.model.encode(table), fitted.model.targets(table)
    word = "row" if train is not None else "training row"
    fitted.tracer.report(
        path,
        (inputs, torch.from_numpy(values)) if numpy.isfinite(values).any() else inputs,
        table=(model.shown(table), fitted.usual if train is None else model.shown(train)),
        ids=([f"row {row}" for row in table.rows], [f"{word} {row}" for row in fitted.rows]),
        title=f"{model.target.name}: how uncertain are predictions, and why?",
        names=list(model.target.classes) or [model.target.name],
        about=about,
        traced=traced,
        intervals=fitted.intervals,
        examples=fitted.training_examples(table, inputs),
    )


def _data_summary(prepared: Prepared) -> dict[str, Any]:
    """What is known before the training."""
    model, table = prepared.model, prepared.table
    parts = {name: len(getattr(prepared.split, name)) for name in ("train", "test", "unlabelled")}
    return {
        "rows": {"file": table.total, "used": len(table), **parts},
        "target": {"name": model.target.name, "task": model.target.task, "classes": model.target.classes},
        "columns": [{"name": one.name, "kind": one.kind, "words": one.description} for one in model.columns],
        "left_out": [{"name": one.name, "reason": one.reason} for one in model.excluded],
        "notes": prepared.notes,
    }


def _fit_summary(
    prepared: Prepared, fitted: FittedTable, predictions: RowPredictions, labels: RowLabels
) -> dict[str, Any]:
    """What is known after the training."""
    model, split, tracer = fitted.model, prepared.split, fitted.tracer
    verdicts, wrong = predictions.frame["verdict"], labels.wrong()
    parts = {"held_out": split.test, "unlabelled": split.unlabelled, "all": slice(None)}
    trust = next(one for one in tracer.diagnostics if one.name == "trust")
    sizes = {"inputs": len(model.inputs), "width": model.width, "weights": tracer.problem.selection.size}
    score = "RMSE" if model.target.task == "regression" else "log loss"
    return {
        "model": {
            "kind": model.learner,
            "validation": {"score": score, **(fitted.validation or {})},
            "validation_rows": sum(map(len, split.validation)),
            **(sizes if model.learner == "network" else {}),
            **(fitted.settings or {}),
        },
        "fit": {
            "structure": tracer.diagnostics["structure"],
            "ridge": tracer.ridge,
            "degrees_of_freedom": tracer.degrees_of_freedom,
            "newton_change": float(tracer.diagnostics["Newton change"]),
            "recentered": tracer.loo.recenter,
            "trust": {"level": trust.value, "words": trust.words},
        },
        "scores": {one.name: {"value": one.value, "words": one.words} for one in predictions.scores(split.test)},
        "verdicts": {name: count_verdicts(verdicts.iloc[rows]) for name, rows in parts.items()},
        "suspects": [_suspect(predictions, labels, int(at)) for at in labels.doubtful[:SUSPECTS]],
        "wrong_labels": None if wrong is None else {**vars(wrong), "words": str(wrong)},
    }


def count_verdicts(verdicts: Any) -> dict[str, int]:
    """Count each verdict; empty if there are none."""
    counts = Counter(verdicts)
    return {name: counts[name] for name in ADVICE} if any(verdicts) else {}


def _suspect(predictions: RowPredictions, labels: RowLabels, at: int) -> dict[str, Any]:
    """A row with a doubtful label, and what the other rows say."""
    target, sure = labels.target, float(labels.sure[at])
    row = {"row": int(predictions.table.rows[at]), "suspicion": float(labels.suspicion[at])}
    if target.classes:
        label, suggested = str(predictions.table.columns[target.name][at]), str(labels.columns()["suggested"][at])
        said = {"label": label, "suggested": suggested, "suggested_probability": sure}
        return {**row, **said, "others": f"{suggested} ({percent(sure)})"}
    said = {"label": figure(labels.labels[at]), "suggested": figure(labels.suggested[at]), "suggested_std": sure}
    return {**row, **said, "others": f"{number(labels.suggested[at])} ± {number(sure, 2)}"}


def _print_data(output: Output, content: dict[str, Any]) -> None:
    """Print what was found in the file."""
    rows, target = content["rows"], content["target"]
    kinds = Counter(column["kind"] for column in content["columns"])
    plural = {"number": "numbers", "category": "categories", "date": "dates"}
    listed = ", ".join(count(many, kind, plural[kind]) for kind, many in kinds.items())
    parts = f"{rows['train']:,} to train on, {rows['test']:,} held out"
    parts += f", {rows['unlabelled']:,} without a label" if rows["unlabelled"] else ""
    output.fact("Data", f"{count(rows['used'], 'row')} ({parts}); columns used: {listed}")
    for excluded in content["left_out"]:
        output.fact("", f"left out {excluded['name']!r}: {excluded['reason']}")
    classes = f", {len(target['classes'])} classes" if target["classes"] else ""
    output.fact("Target", f"{target['name']}: {target['task']}{classes}")
    output.notes(content["notes"])


def _print_fit(output: Output, content: dict[str, Any]) -> None:
    """Print what the model found."""
    fit, rows = content["fit"], content["rows"]
    for head, words in zip(("Model", ""), _model_words(content["model"]), strict=False):
        output.fact(head, words)
    exact = "exact algebra" if fit["structure"] == "exact" else f"structure {fit['structure']}, an approximation"
    change = percent(fit["newton_change"])
    optimum = f"the network is near its optimum (a last step would change its errors by {change})"
    if content["model"]["kind"] == "trees":
        optimum = "variances are those of the leaf values, with the trees fixed"
    elif fit["recentered"]:
        optimum = f"the network stopped short of its optimum (by {change} of its errors); the fit took the last step"
    output.fact("Fit", f"{exact} on {rows['train']:,} rows; {optimum}")
    output.fact("Trust", f"{fit['trust']['level']}: {fit['trust']['words']}")
    output.head(f"On {rows['test']:,} held-out rows, never trained on")
    output.rows([[name, *one.values()] for name, one in content["scores"].items()], right=(1,))
    counts, explained = content["verdicts"]["held_out"], sum(content["verdicts"]["held_out"].values())
    if explained:
        some = "" if explained == rows["test"] else f" ({explained:,} of them)"
        print_verdicts(output, counts, f"Why are predictions uncertain? Verdicts on the held-out rows{some}")
        if content["verdicts"]["unlabelled"]:
            head = f"And on the {count(rows['unlabelled'], 'row')} without a label"
            print_verdicts(output, content["verdicts"]["unlabelled"], head)
        if sum(content["verdicts"]["all"].values()) < rows["used"]:
            output.say("  Not all rows have a verdict; --verdicts all gives one to each, which takes longer")
    _print_labels(output, content)
    if "import" in content:
        _print_answers(output, content["import"], rows["test"])
    output.say()
    output.files(content["files"])
    output.fact("Time", f"{content['seconds']:.0f} s")


def _print_labels(output: Output, content: dict[str, Any]) -> None:
    """Print labels to check first, and how many are wrong in all."""
    name, numbers = content["target"]["name"], content["target"]["task"] == "regression"
    if content["suspects"]:
        output.head("Labels to check first")
        doubt = "standard deviations off" if numbers else "chance of the label"
        lines = [
            [
                one["row"],
                one["label"],
                one["others"],
                f"{one['suspicion']:.1f}" if numbers else percent(1 - one["suspicion"]),
            ]
            for one in content["suspects"]
        ]
        output.rows(lines, ["row", f"{name} in the file", "the other rows suggest", doubt], right=(0, 3))
    if content["wrong_labels"]:
        if not content["suspects"]:
            output.say()
        output.rows([[f"In all, {content['wrong_labels']['words']}."]])


def _model_words(model: dict[str, Any]) -> list[str]:
    """The chosen model, and why."""
    scores = dict(model["validation"])
    score = scores.pop("score")
    rows = f"{model['validation_rows']:,} validation rows"
    if model["kind"] == "trees":
        words = f"gradient boosting, {model['trees']:,} trees with {model['leaves']:,} leaves; settings"
    else:
        words = (
            f"network, {model['inputs']} inputs, two hidden layers of {model['width']}, {model['weights']:,} weights; "
            f"weight decay {model['weight_decay']:g},"
        )
    listed = ", ".join(f"{kind} {figure(value)}" for kind, value in scores.items())
    better = [f"chosen for its smaller {score} on {rows}: {listed}"] if len(scores) > 1 else []
    return [f"{words} chosen by {rows}", *better]


def print_verdicts(output: Output, counts: dict[str, int], head: str) -> None:
    """Print how often each verdict was given, and what to do about it."""
    total = sum(counts.values())
    output.head(head)
    lines = [
        [name, f"{number:,}", percent(number / total), ADVICE[name]]
        for name, number in counts.items()
        if number or name != CHECK_INPUT
    ]
    output.rows(lines, right=(1, 2))


def _print_answers(output: Output, changes: dict[str, Any], rows: int) -> None:
    """Print what answers changed; `rows` rows are held out."""
    amounts = {
        "changed": count(len(changes["changed"]), "label") + " changed",
        "confirmed": f"{len(changes['confirmed']):,} confirmed",
        "labelled": count(len(changes["labelled"]), "row") + " labelled",
        "unanswered": count(changes["unanswered"], "row") + " without an answer",
    }
    output.head("What the answers changed: " + ", ".join(words for name, words in amounts.items() if changes[name]))
    output.say(f"  On {count(rows, 'held-out row')}, by the corrected labels:")
    numbers = {**changes["scores"], "mean std": changes["std"]}
    output.rows([[name, *(one[when] for when in WHEN)] for name, one in numbers.items()], ["", *WHEN], right=(1, 2))
    doubtful = changes["contradicted"]
    output.say(f"  Labels that the other rows contradict: {doubtful['before']:,} before, {doubtful['after']:,} after")
    output.say(f"  Predictions that changed: {changes['predictions_changed']:,}")
