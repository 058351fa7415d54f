"""What `whence table --export` and `--import` say and write."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from whence.cli.console import Output, figure, stop
from whence.display import count
from whence.io.files import replacing
from whence.tabular.answers import Answered
from whence.tabular.files import TextTable
from whence.tabular.target import Target
from whence.tabular.worklist import WorkItem, write_items_csv, write_label_studio

FORMATS = {"label-studio": ".json", "csv": ".csv"}


def export_path(given: str, stem: str) -> Path:
    """Where to write: a file whose ending says the format, or a format, with a name after the data's.

    Examples:
        >>> str(export_path("label-studio", "bank")), str(export_path("todo.csv", "bank"))
        ('bank-tasks.json', 'todo.csv')
    """
    path = Path(f"{stem}-tasks{FORMATS[given]}") if given in FORMATS else Path(given)
    if path.suffix.lower() not in FORMATS.values():
        stop(
            f"expected --export label-studio, --export csv, or a file that ends in .json (for Label Studio) or .csv, "
            f"got {given}."
        )
    return path


def write_worklist(path: Path, items: list[WorkItem], target: Target) -> dict[str, Path]:
    """Write the worklist in the format that its ending says; the files by what they are."""
    if path.suffix.lower() == ".csv":
        write_items_csv(path, items, target)
        return {"worklist": path}
    return {"worklist": path, "labelling": write_label_studio(path, items, target)}


def check_corrected(path: Path | None, answered: Answered | None, table: TextTable) -> None:
    """Exit where a corrected table is asked for without answers, or not all of the table was read."""
    if path is None:
        return
    if answered is None:
        stop("expected --import with the answers for --corrected, got none.")
    if len(table) < table.total:
        stop(f"expected all {table.total:,} rows for --corrected, got {len(table):,} of them. Pass --rows 0.")


def write_corrected(path: Path | None, table: TextTable) -> dict[str, Path]:
    """Write a table as a CSV file, cell by cell as it was read, where that is asked for; the file by what it is."""
    if path is None:
        return {}
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows(zip(*table.columns.values(), strict=True))
    return {"corrected": path}


def print_answers(output: Output, changes: dict[str, Any], rows: int) -> None:
    """What answers changed, for people; so many rows are held out."""
    amounts = {
        "changed": count(len(changes["changed"]), "label") + " changed",
        "confirmed": f"{len(changes['confirmed']):,} confirmed",
        "labelled": count(len(changes["labelled"]), "row") + " labelled",
        "unanswered": count(changes["unanswered"], "row") + " without an answer",
    }
    output.head("What the answers changed: " + ", ".join(words for name, words in amounts.items() if changes[name]))
    output.say(f"  On {count(rows, 'held-out row')}, by the labels as they are now:")
    numbers = {**changes["scores"], "mean std": changes["std"]}
    lines = [[name, *(figure(one[when]) for when in ("before", "expected", "after"))] for name, one in numbers.items()]
    output.rows(lines, ["", "before", "expected", "after"], right=(1, 2, 3))
    doubtful = changes["contradicted"]
    output.say(f"  Labels that the other rows contradict: {doubtful['before']:,} before, {doubtful['after']:,} after")
    output.say(f"  Predictions that changed: {changes['predictions_changed']:,}")
    if changes["moved"]:
        cells = [[str(one["row"]), *(_shown(one[when]) for when in ("before", "after"))] for one in changes["moved"]]
        output.rows(cells, ["row", "before", "after"], right=(0,))


def _shown(prediction: Any) -> str:
    return prediction if isinstance(prediction, str) else figure(float(prediction))
