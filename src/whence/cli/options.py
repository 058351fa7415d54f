"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Structure(str, Enum):
    """Structures of the curvature, by their names."""

    exact = "exact"
    core = "core"
    sketch = "sketch"
    ekfac = "ekfac"


class Task(str, Enum):
    """What a target is."""

    regression = "regression"
    classification = "classification"


class Verdicts(str, Enum):
    """Which rows get a verdict."""

    auto = "auto"
    all = "all"
    held_out = "held-out"
    none = "none"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Delimiter = Annotated[
    str | None, typer.Option(help="Between the cells of a CSV file, such as ';' or '\\t'; found out when not given.")
]
Rows = Annotated[
    int, typer.Option(min=0, help="Use at most so many rows, drawn at random; 0 takes all, if they fit in memory.")
]
Report = Annotated[Path | None, typer.Option("--out", "-o", help="The HTML report to write.", dir_okay=False)]
Spec = Annotated[
    Path | None,
    typer.Option("--spec", help="The Python file that `whence fit` was given, if it was; it is run.", dir_okay=False),
]
