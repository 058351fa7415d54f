"""`whence demo`: noisy labels and missing data, told apart on handwritten digits."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.leaving import LACKING, guarded, stop


@guarded
def demo(
    draws: Annotated[int, typer.Option(min=1, help="How many times to draw groups, faults and a network.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first draw; each next one adds one.")] = 0,
    out: Annotated[Path, typer.Option(help="The report to write.", dir_okay=False)] = Path("report.html"),
    quick: Annotated[
        bool, typer.Option("--quick", help="At most two small draws: seconds instead of a minute.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="Also draw the pictures of the first draw as PNG files in this folder.")
    ] = None,
) -> None:
    """Tell noisy labels from missing data on handwritten digits.

    A small network sorts the digits that come with scikit-learn into two random groups. One digit has random labels in
    training, one is never shown. Prints how well both are found, and writes a report with the digits.

    Examples: `whence demo`, `whence demo --quick`, `whence demo --draws 20 --out twenty.html`
    """
    check_parent(out)
    try:
        # by name, and late: the library itself does not depend on the experiments
        program = import_module("whence_paper.demo_run")
    except ModuleNotFoundError as error:
        stop(f"`whence demo` needs {error.name}. Install it with: pip install 'whence[paper]'", LACKING)
    program.run(draws=draws, seed=seed, out=out, quick=quick, figures=figures)


def check_parent(*files: Path | None) -> None:
    """Leave before any work where a file could not be written."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            stop(f"expected a folder that exists, got {file.parent}. Make it first: mkdir -p {file.parent}")
        if file is not None and file.is_dir():
            stop(f"expected the name of a file to write, got the folder {file}.")
