"""`whence table`: from a table in a file to a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli import options as shared
from whence.cli.demo import check_parent
from whence.cli.leaving import guarded, stop
from whence.cli.output import Output
from whence.cli.table_output import about_data, about_results, tell_data, tell_results
from whence.cli.table_results import suspicion, trace, write_csv, write_report
from whence.runtime.progress import Progress
from whence.tabular import saved
from whence.tabular.reading import read_table
from whence.tabular.results import Results
from whence.tabular.study import Options, Study, prepare, study


@guarded
def table(
    data: Annotated[Path, typer.Argument(help="A CSV or parquet file with names of columns; .gz, .bz2, .xz too.")],
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The column to predict; lists the columns when not given.")
    ] = None,
    task: Annotated[
        shared.Task | None, typer.Option(help="Predict an amount or a class; found out when not given.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", "-x", help="A column to leave out; may be given several times.")
    ] = None,
    out: shared.Report = None,
    csv: Annotated[Path | None, typer.Option(help="The CSV file with a line for each row.", dir_okay=False)] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep everything in this folder, for predict, explain and report.")
    ] = None,
    rows: shared.Rows = 50_000,
    held_out: Annotated[float, typer.Option(min=0.05, max=0.5, help="Share of the rows kept apart for testing.")] = 0.2,
    verdicts: Annotated[
        shared.Verdicts, typer.Option(help="Which rows get a verdict; auto takes all where that takes a minute or so.")
    ] = shared.Verdicts.auto,
    structure: Annotated[
        shared.Structure | None, typer.Option(help="Of the curvature; exact where it fits when not given, else core.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Of the two hidden layers.")] = None,
    delimiter: shared.Delimiter = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all random draws.")] = 0,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write the CSV file only.")] = False,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Train a network on a table, and tell which rows it is unsure about, and why.

    Finds out what each column holds, fills gaps, encodes, and trains a small network; a fifth of the rows is held out
    for honest numbers. Writes an HTML report on the held-out rows, and a CSV file with the prediction, Ho, HeC3, their
    ratio and a verdict for each row.

    Examples:
    - `whence table houses.csv --target price`
    - `whence table bank.csv -t y -x duration --save bank-fit` leaves a column out, and keeps the fit
    - `whence table big.parquet -t y --rows 20000 --json > result.json`
    """
    began = time.perf_counter()
    stem = data.name.split(".")[0] or "table"
    report_path = None if no_report else out or Path(f"{stem}-report.html")
    csv_path = csv or Path(f"{stem}-rows.csv")
    _check_files(data, csv_path, report_path, save)
    progress, output = Progress(not quiet), Output(as_json)
    read = read_table(data, rows, delimiter=delimiter, seed=seed, progress=progress)
    if target is None:
        stop(f"expected --target with the column to predict. Columns: {', '.join(map(repr, read.columns))}.")
    chosen = Options(
        target=target,
        task=None if task is None else task.value,
        ignore=tuple(ignore or ()),
        held_out=held_out,
        structure=None if structure is None else structure.value,
        width=width,
        seed=seed,
    )
    ready = prepare(read, chosen)
    content = about_data(data, ready)
    tell_data(output, content)
    done = study(ready, chosen, progress, show=not quiet)
    results = trace(done, verdicts)
    content.update(_write(data, done, results, {"csv": csv_path, "report": report_path, "saved": save}))
    content["seconds"] = round(time.perf_counter() - began, 1)
    tell_results(output, content)
    output.finish(content)


def _check_files(data: Path, csv: Path, report: Path | None, save: Path | None) -> None:
    """Leave before any work where something could not be written."""
    check_parent(report, csv)
    if csv.exists() and data.exists() and csv.samefile(data):
        stop(f"expected another file for the results than the data themselves, got {csv} for both.")
    if save is not None:
        saved.check_folder(save)


def _write(data: Path, done: Study, results: Results, files: dict[str, Path | None]) -> dict[str, Any]:
    """Write all files, and return what there is to say."""
    doubts = suspicion(done)
    assert files["csv"] is not None  # it has a name of its own where none was given
    write_csv(files["csv"], results.frame(done.parts.names(len(done.table)), doubts))
    if files["report"] is not None:
        write_report(files["report"], done, data.name)
    content = about_results(done, results, doubts)
    if files["saved"] is not None:
        saved.save(done, files["saved"], {"data": data.name, **_kept(content)})
    return {**content, "files": files}


def _kept(content: dict[str, Any]) -> dict[str, Any]:
    """What is saved of the summary."""
    return {name: content[name] for name in ("network", "scores")}
