"""`whence predict`, `whence explain` and `whence report`: ask a saved fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whence.cli import options as shared
from whence.cli.demo import check_parent
from whence.cli.leaving import guarded, stop
from whence.cli.opened import open_saved
from whence.cli.output import Output, figure, percent
from whence.cli.table_output import ADVICE
from whence.cli.table_results import write_csv

SHOWN = 10
OUTPUTS = 4

Folder = Annotated[Path, typer.Argument(help="A folder written by `whence table --save` or `whence fit --save`.")]
Data = Annotated[
    Path | None, typer.Argument(help="New rows, CSV or parquet, for a saved table; test_loader() for a spec.")
]
Loader = Annotated[str, typer.Option(help="The function of the spec that gives the inputs.")]


@guarded
def predict(
    folder: Folder,
    data: Data = None,
    csv: Annotated[Path | None, typer.Option(help="The CSV file to write.", dir_okay=False)] = None,
    spec: shared.Spec = None,
    loader: Loader = "test_loader",
    rows: shared.Rows = 0,
    delimiter: shared.Delimiter = None,
    verdicts: Annotated[bool, typer.Option(help="Also say why predictions are uncertain, which takes longer.")] = True,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Predict new rows with their variances, by a saved fit.

    Examples:
    - `whence predict bank-fit new.csv` writes new-rows.csv
    - `whence predict bank-fit new.csv --json > rows.json`
    - `whence predict fitted --spec network.py` for a fit made by `whence fit`
    """
    check_parent(csv)
    output = Output(as_json)
    opened = open_saved(folder, data, spec, loader, rows, delimiter, progress=not quiet)
    path = csv or Path(f"{opened.stem}-rows.csv")
    frame = opened.frame(verdicts)
    if not as_json or csv is not None:
        check_parent(path)
        if data is not None and path.exists() and path.samefile(data):
            stop(f"expected another file for the results than the data themselves, got {path} for both.")
        write_csv(path, frame)
    for note in opened.notes:
        output.fact("Note", note)
    output.head(f"{len(frame):,} predictions" + (f", the first {SHOWN}" if len(frame) > SHOWN else ""))
    means = [name for name in frame.columns if name.startswith("mean_")] if "class" not in frame.columns else []
    wanted = ["row", "class", "prediction", "mean", *means[:OUTPUTS], "lower", "upper", "probability"]
    heads = [name for name in (*wanted, "ho", "hec3", "ratio", "verdict") if name in frame.columns]
    shown = [[_cell(value) for value in row] for row in frame[heads].head(SHOWN).itertuples(index=False)]
    output.rows(heads, shown, right=[place for place, name in enumerate(heads) if name not in ("verdict",)])
    if "verdict" in frame.columns:
        counts = frame["verdict"].value_counts()
        output.head("Why are predictions uncertain?")
        found = {name: int(counts.get(name, 0)) for name in ADVICE}
        told = [[name, f"{count:,}", percent(count / len(frame)), ADVICE[name]] for name, count in found.items()]
        output.rows(["", "", "", ""], told, right=(1, 2))
    scores = opened.scores()
    if scores:
        output.head("How good they are, by the targets that came along")
        output.rows(["", "", ""], [[one.name, figure(one.value), one.words] for one in scores], right=(1,))
    output.say()
    if not as_json:
        output.file("All rows", path)
    output.finish(
        {
            "rows": frame.to_dict(orient="records"),
            "scores": {one.name: one.value for one in scores},
            "notes": opened.notes,
            "files": {"csv": csv},
        }
    )


@guarded
def explain(
    folder: Folder,
    data: Data = None,
    row: Annotated[
        list[int] | None,
        typer.Option("--row", "-r", min=1, help="A row of the data, from 1; may be repeated."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many training examples to name.")] = 5,
    spec: shared.Spec = None,
    loader: Loader = "test_loader",
    delimiter: shared.Delimiter = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Say for some rows why their predictions are uncertain, and which training rows are behind it.

    Without --row the three most uncertain rows are explained.

    Examples: `whence explain bank-fit new.csv --row 3 --row 17`, `whence explain bank-fit new.csv --json`
    """
    output = Output(as_json)
    opened = open_saved(folder, data, spec, loader, 0, delimiter, progress=not quiet)
    places = opened.places(row)
    content = opened.explain(places, top)
    for one in content:
        output.head(f"{opened.unit} {one['row']}: {one['prediction']}")
        output.say(f"  {one['verdict']}: {one['advice']}")
        output.say(f"  {one['because']}")
        heads = [f"training {opened.unit}", "share of HeC3", *opened.heads]
        listed = [
            [str(cause["row"]), percent(cause["hec3"]), cause["label"], cause["without"]] for cause in one["causes"]
        ]
        output.rows(heads, listed, right=(0, 1, 2, 3))
    output.say()
    output.say("without it: the same as the fit would have it without that training " + opened.unit + ".")
    output.finish(content)


@guarded
def report(
    folder: Folder,
    data: Data = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The report to write.", dir_okay=False)] = Path(
        "report.html"
    ),
    spec: shared.Spec = None,
    loader: Loader = "test_loader",
    rows: shared.Rows = 10_000,
    delimiter: shared.Delimiter = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
) -> None:
    """Write the HTML report of a saved fit on new rows.

    Examples: `whence report bank-fit new.csv --out new.html`, `whence report fitted --spec network.py`
    """
    check_parent(out)
    output = Output(as_json)
    opened = open_saved(folder, data, spec, loader, rows, delimiter, progress=not quiet)
    opened.report(out)
    for note in opened.notes:
        output.fact("Note", note)
    output.file("Report", out)
    output.finish({"report": out, "notes": opened.notes})


def _cell(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)
