"""The commands: parse, call, print."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from whence import WhenceError, __version__

app = typer.Typer(
    name="whence",
    help="How uncertain is a trained network, and whence comes its doubt?",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whence {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """How uncertain is a trained network, and whence comes its doubt?"""


@app.command()
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

    Examples: `whence demo`, `whence demo --quick`, `whence demo --draws 20 --out twenty.html`.
    """
    _check_folder(out.parent)
    program = _load("whence_paper.demo_run", "demo")
    try:
        program.run(draws=draws, seed=seed, out=out, quick=quick, figures=figures)
    except WhenceError as error:
        _stop(str(error))


def _load(module: str, command: str) -> ModuleType:
    """Import a program by its name: the library itself does not depend on the experiments."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        _stop(f"`whence {command}` needs {error.name}. Install it with: pip install 'whence[paper]'")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        _stop(f"expected a folder that exists, got {folder}. Make it first: mkdir -p {folder}")


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]whence:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1)
