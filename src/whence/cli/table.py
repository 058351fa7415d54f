"""`whence table`: train a network or trees on a table in a file, and report on it."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import pandas
import torch
from typer import Argument, Option

from whence.cli import console
from whence.cli.console import Output, figure, stop
from whence.display import count, cut, number, percent
from whence.errors import TargetError
from whence.runtime.execution import Progress
from whence.tabular.columns import ExcludedColumn, detect_column, guess_comma
from whence.tabular.files import TextTable, read_table, write_corrected, write_csv
from whence.tabular.fitted import FittedTable, Prepared, fit_table, prepare, save_table
from whence.tabular.labels import (
    apply_answers,
    doubtful_rows,
    estimate_wrong,
    judge_labels,
    read_answers,
    suggestions,
    work_items,
    write_items,
)
from whence.tabular.predictions import CHECK_INPUT, RowPredictions, affordable_rows, predict_rows
from whence.tabular.target import Task, detect_target

ADVICE = {
    "confident": "nothing to do",
    "noisy labels nearby": "similar training rows err more than others: check the labels of those named in `check`",
    "scarce data": "few training rows are similar: collect more like these",
    "both": "check the labels, and collect more",
    CHECK_INPUT: "its columns hold impossible values: correct the input",
}
SUSPECTS = 5
CELL = 40  # characters of a cell in the list of columns
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
    save: Annotated[Path | None, Option(help="Save the fit in this file, for predict, explain and report.")] = None,
    export: Annotated[
        Path | None,
        Option(help="Write labels to check and rows to label: .csv, or .json for Label Studio.", dir_okay=False),
    ] = None,
    export_rows: Annotated[int, Option(min=1, help="At most this many of each in --export.")] = 100,
    answers: Annotated[
        Path | None, Option("--import", help="The CSV of --export with answers: trains again with them.")
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
    - `whence table bank.csv -t y -x duration --save bank.whence` leaves a column out, and keeps the fit
    - `whence table big.parquet -t y --rows 20000 --json > result.json`
    - `whence table bank.csv -t y --export todo.csv` writes the labels to check
    - `whence table bank.csv -t y --import todo.csv` trains again with the answers in it, and compares
    """
    began = time.perf_counter()
    stem = data.name.split(".")[0] or "table"
    report_path = None if no_report else out or Path(f"{stem}-report.html")
    csv_path = csv or Path(f"{stem}-rows.csv")
    console.check_writable(report_path, csv_path, export, corrected, save, read=(data, answers))
    if export is not None and export.suffix.lower() not in (".csv", ".json"):
        stop(f"expected a file ending in .csv or .json for the work items, got {export}.")
    if corrected is not None and answers is None:
        stop("expected --import with the answers for --corrected, got none.")
    output = Output(as_json)
    read = read_table(data, rows, delimiter=delimiter, seed=seed, progress=Progress(not quiet))
    if target is None:
        _list_columns(output, data, read, {"--export": export, "--import": answers, "--save": save})
        return
    prepared = prepare(
        read.frame, target, task, ignore or (), groups, test=held_out, width=width, seed=seed, delimiter=read.delimiter
    )
    given, unanswered = (None, 0) if answers is None else read_answers(answers, prepared)
    if corrected is not None and len(read.frame) < read.total:
        stop(f"expected all {read.total:,} rows for --corrected, got {len(read.frame):,} of them. Pass --rows 0.")
    before, prepared = prepared, prepared if given is None else apply_answers(prepared, given)
    split, content = prepared.split, {"data": data, **_data_summary(read, prepared)}
    _print_data(output, content)
    options: dict[str, Any] = {"structure": structure or "auto", "seed": seed, "progress": not quiet}
    fitted = fit_table(before, learner=model, **options)
    explained = _rows_to_explain(prepared, fitted, verdicts)
    predictions = predict_rows(fitted, before.frame, explained)
    judged = judge_labels(predictions, before.split.train)
    if given is not None:
        fitted = fit_table(prepared, learner=fitted.model.learner, **options)  # the same kind, to compare
        first, predictions = (predictions, judged), predict_rows(fitted, prepared.frame, explained)
        judged = judge_labels(predictions, split.train)
        content["import"] = {
            "unanswered": unanswered,
            **_changes(before, prepared, given, first, (predictions, judged)),
        }
        answered = prepared.frame.index.get_indexer(given.index)
        judged.loc[answered, "contradicted"] = False  # a person has looked at these labels
    content |= _fit_summary(prepared, fitted, predictions, judged)
    write_csv(csv_path, predictions.rows_frame(split.names(), suggestions(judged, fitted.model.target)))
    if report_path is not None:
        words = "; ".join(_model_words(content["model"]))
        _write_report(report_path, prepared, fitted, data.name, f"Model: {words}.", content["notes"])
    if save is not None:
        save_table(fitted, save)
    content["files"] = {"csv": csv_path, "report": report_path, "saved": save}
    if corrected is not None:
        changed = sorted(content["import"]["changed"] + content["import"]["labelled"])
        write_corrected(corrected, read, prepared.frame.loc[changed, target])
        content["files"]["corrected"] = corrected
    if export is not None:
        items = work_items(prepared, fitted, judged, export_rows)
        write_items(export, items, fitted.model.target)
        content["files"]["worklist"] = export
        content["export"] = dict(Counter(items["todo"]))
    content["seconds"] = round(time.perf_counter() - began, 1)
    _print_fit(output, content)
    output.finish(content)


def _list_columns(output: Output, data: Path, read: TextTable, files: dict[str, Path | None]) -> None:
    """Print what each column holds, whether it can be predicted, and the command to run next.

    Exits if there are files that only a target makes sense of.
    """
    if needing := [name for name, file in files.items() if file is not None]:
        stop(f"expected --target with {', '.join(needing)}, got none. Without these, the columns are listed.")
    notes, columns, comma = list(read.notes), [], guess_comma(read.frame, read.delimiter)
    for name, cells in read.frame.items():
        found = detect_column(cells, notes, comma)
        try:
            classes = detect_target(cells, None, [], comma).classes
            predicted = count(len(classes), "class", "classes") if classes else "amounts"
        except TargetError:
            predicted = None
        used = f"left out: {found.reason}" if isinstance(found, ExcludedColumn) else found.kind
        example = next(iter(cells.dropna()), None)
        columns.append([name, used, int(cells.isna().sum()), example, predicted])
    likely = next((str(name) for name, *_, predicted in reversed(columns) if predicted), "COLUMN")
    command = shlex.join(["whence", "table", str(data), "--target", likely])
    output.fact("Data", f"{count(read.total, 'row')}, {count(len(columns), 'column')}")
    output.notes(notes)
    output.head("Columns: what each would be used as, and what it would be as the target")
    shown = [[cut("-" if cell is None else str(cell), CELL) for cell in column] for column in columns]
    output.rows(shown, ["column", "used as", "missing", "such as", "as the target"], right=(2,))
    output.head("Name the column to predict, for example:")
    output.say(command, indent=2)
    keys = ("name", "used_as", "missing", "example", "as_target")
    listed = [dict(zip(keys, column, strict=True)) for column in columns]
    output.finish({"data": data, "rows": read.total, "columns": listed, "notes": notes, "next": command})


def _rows_to_explain(prepared: Prepared, fitted: FittedTable, verdicts: Verdicts) -> Any:
    everything = numpy.arange(len(prepared.frame))
    held_out = numpy.concatenate([prepared.split.test, prepared.split.unlabelled])
    if verdicts == "auto":
        return numpy.sort(affordable_rows(everything, held_out, fitted))
    return numpy.sort({"all": everything, "held-out": held_out, "none": everything[:0]}[verdicts])


def _write_report(path: Path, prepared: Prepared, fitted: FittedTable, name: str, model: str, notes: list[str]) -> None:
    """Write the report on the held-out rows, and on those without a label."""
    split = prepared.split
    test = prepared.frame.iloc[numpy.concatenate([split.test, split.unlabelled])]
    unlabelled = f", {len(split.unlabelled):,} of them without a label" if len(split.unlabelled) else ""
    about = (
        f"{len(test):,} rows of {name} that the model was not trained on{unlabelled}. Rows are counted from 1, below "
        f"the names of the columns. {model}"
    )
    traced = TRACED if len(test) > ALL_TRACED else len(test)
    report_rows(path, fitted, test, about, notes, prepared.frame.iloc[split.train], traced)


def report_rows(
    path: Path,
    fitted: FittedTable,
    rows: pandas.DataFrame,
    about: str,
    notes: list[str],
    train: pandas.DataFrame | None = None,
    traced: int = TRACED,
    in_use: bool = False,
) -> None:
    """Write the report on the rows of a table, with targets if some of them have one.

    If `in_use`, the rows are also the pool of rows that the model meets in use.
    """
    model, inputs, values = fitted.model, fitted.model.encode(rows), fitted.model.targets(rows)
    word = "row" if train is not None else "training row"
    paragraphs = [about, *(f"Note: {note}." for note in notes[:NOTES])]
    if len(notes) > NOTES:
        paragraphs.append(f"{len(notes) - NOTES} more notes on the file are in the output of the command.")
    fitted.tracer.report(
        path,
        (inputs, torch.from_numpy(values)) if numpy.isfinite(values).any() else inputs,
        table=(model.shown(rows), fitted.usual if train is None else model.shown(train)),
        ids=([f"row {row}" for row in rows.index], [f"{word} {row}" for row in fitted.rows]),
        title=f"{model.target.name}: how uncertain are predictions, and why?",
        names=list(model.target.classes) or [model.target.name],
        about=paragraphs,
        traced=traced,
        intervals=fitted.intervals,
        examples=fitted.training_examples(rows),
        pool=inputs if in_use else None,
    )


def _data_summary(read: TextTable, prepared: Prepared) -> dict[str, Any]:
    """What is known before the training."""
    model = prepared.model
    parts = {name: len(getattr(prepared.split, name)) for name in ("train", "test", "unlabelled")}
    return {
        "rows": {"file": read.total, "used": len(read.frame), **parts},
        "target": {name: getattr(model.target, name) for name in ("name", "task", "classes", "style")},
        "columns": [{"name": one.name, "kind": one.kind, "inputs": len(one.inputs)} for one in model.columns],
        "left_out": [{"name": one.name, "reason": one.reason} for one in model.excluded],
        "notes": [*read.notes, *read.missing_labels(model.target.name), *prepared.notes],
    }


def _fit_summary(
    prepared: Prepared, fitted: FittedTable, predictions: RowPredictions, judged: pandas.DataFrame
) -> dict[str, Any]:
    """What is known after the training."""
    model, split, tracer = fitted.model, prepared.split, fitted.tracer
    verdicts, wrong = predictions.frame["verdict"], estimate_wrong(judged, model.target)
    parts = {"held_out": split.test, "unlabelled": split.unlabelled, "all": slice(None)}
    trust = next(one for one in tracer.diagnostics if one.name == "trust")
    sizes = {"inputs": len(model.inputs), "width": model.width, "weights": tracer.problem.selection.size}
    score = "RMSE" if model.target.task == "regression" else "log loss"
    return {
        "model": {
            "kind": model.learner,
            "validation": {"score": score, **fitted.validation},
            "validation_rows": sum(map(len, split.validation)),
            **(sizes if model.learner == "network" else {}),
            **fitted.settings,
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
        "suspects": _suspects(predictions, judged),
        "wrong_labels": None if wrong is None else {**vars(wrong), "words": str(wrong)},
    }


def _changes(
    before: Prepared,
    after: Prepared,
    answers: pandas.Series,
    *ends: tuple[RowPredictions, pandas.DataFrame],
) -> dict[str, Any]:
    """What answers changed: labels, and what the fits before and after predict for the same held-out rows.

    The scores of both are by the labels as they are now.
    """
    places = before.frame.index.get_indexer(answers.index)
    had, same = numpy.isfinite(before.values[places]), before.values[places] == after.values[places]
    parts = {"changed": had & ~same, "confirmed": same, "labelled": ~had}
    classes, test = before.model.target.classes, after.split.test
    compared: dict[str, dict[str, Any]] = {}
    for when, (predictions, judged) in zip(("before", "after"), ends, strict=True):
        deviations = predictions.frame["probability_std" if classes else "std"]
        numbers = {one.name: one.value for one in replace(predictions, values=after.values).scores(test)}
        numbers |= {"mean std": float(deviations.iloc[test].mean())}
        numbers |= count_verdicts(predictions.frame["verdict"].iloc[test])
        numbers |= {"labels contradicted, all rows": int(judged["contradicted"].sum())}
        for name, value in numbers.items():
            compared.setdefault(name, {})[when] = value
    (old, _), (new, _) = ends
    one, other = old.frame["prediction"], new.frame["prediction"]
    moved = one != other if classes else (other - one).abs() > old.frame["std"]
    return {
        **{name: sorted(answers.index[part].tolist()) for name, part in parts.items()},
        "compared": compared,
        "predictions_changed": int(moved.sum()),
    }


def count_verdicts(verdicts: Any) -> dict[str, int]:
    """Count each verdict; empty if there are none."""
    counts = Counter(verdicts)
    return {name: counts[name] for name in ADVICE} if any(verdicts) else {}


def _suspects(predictions: RowPredictions, judged: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows with the most doubtful labels, and what the other rows say."""
    target, at = predictions.fitted.model.target, doubtful_rows(judged)[:SUSPECTS]
    found = suggestions(judged, target).iloc[at]
    found.insert(0, "row", predictions.rows.index[at])
    found.insert(1, "label", predictions.rows[target.name].iloc[at].to_numpy())
    return [{str(name): cell for name, cell in one.items()} for one in found.to_dict(orient="records")]


def _print_data(output: Output, content: dict[str, Any]) -> None:
    """Print what was found in the file."""
    rows, target = content["rows"], content["target"]
    kinds = Counter(column["kind"] for column in content["columns"])
    plural = {"number": "numbers", "category": "categories", "date": "dates"}
    listed = ", ".join(count(many, kind, plural[kind]) for kind, many in kinds.items())
    parts = f"{rows['train']:,} to train on, {rows['test']:,} held out"
    parts += f", {rows['unlabelled']:,} without a label, only predicted" if rows["unlabelled"] else ""
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
        _print_changes(output, content["import"], rows["test"], bool(content["target"]["classes"]))
    output.say()
    output.files(content["files"])
    output.fact("Time", f"{content['seconds']:.0f} s")


def _print_labels(output: Output, content: dict[str, Any]) -> None:
    """Print labels to check first, and how many are wrong in all."""
    name, numbers = content["target"]["name"], content["target"]["task"] == "regression"
    if content["suspects"]:
        output.head("Labels to check first")
        lines = []
        for one in content["suspects"]:
            if numbers:
                others = f"{number(one['suggested'])} ± {number(one['suggested_std'], 2)}"
                if content["target"]["style"] == "decimal comma":  # as in the file, beside its cells
                    others = others.translate(str.maketrans(",.", ".,"))
                lines.append([one["row"], one["label"], others, f"{one['suspicion']:.1f}"])
            else:
                others = f"{one['suggested']} ({percent(one['suggested_probability'])})"
                lines.append([one["row"], one["label"], others, percent(1 - one["suspicion"])])
        doubt = "standard deviations off" if numbers else "chance of the label"
        output.rows(lines, ["row", f"{name} in the file", "the other rows suggest", doubt], right=(0, 3))
    if content["wrong_labels"]:
        if not content["suspects"]:
            output.say()
        output.rows([[f"In all, {content['wrong_labels']['words']}."]])


def _print_changes(output: Output, changes: dict[str, Any], rows: int, classes: bool) -> None:
    """Print what answers changed; `rows` rows are held out."""
    amounts = {
        f"{count(len(changes['changed']), 'label')} changed": changes["changed"],
        f"{len(changes['confirmed']):,} confirmed": changes["confirmed"],
        f"{count(len(changes['labelled']), 'row')} labelled": changes["labelled"],
        f"{count(changes['unanswered'], 'row')} without an answer": changes["unanswered"],
    }
    output.head("What the answers changed: " + ", ".join(words for words, some in amounts.items() if some))
    compared = [[name, *ends.values()] for name, ends in changes["compared"].items()]
    output.rows(compared, [f"{count(rows, 'held-out row')}, by the answers", "before", "after"], right=(1, 2))
    moved = "that are another class now" if classes else "that moved by more than their std"
    output.say(f"  Predictions {moved}, in all rows: {changes['predictions_changed']:,}")


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
