"""The program: its commands, and those of the experiments: the demonstration, and tables and figures of the paper.

Experiments are registered as entry points of the group `whence.experiments`, each a function of a list of arguments.
The library knows none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from whence import __version__
from whence.cli.console import LACKING, AsJson, Output, check_writable, handle_errors, stop
from whence.cli.fit import fit
from whence.cli.query import explain, predict, report
from whence.cli.table import table
from whence.errors import did_you_mean

EPILOG = (
    "Exit codes: 0 done; 1 a bug in whence; 2 an option, a file or a model cannot be used; "
    "3 a package, memory or disk space is missing; 130 interrupted.\n\n"
    "Try: `whence demo --quick` or `whence table DATA.csv --target COLUMN`"
)

app = typer.Typer(
    name="whence",
    help="How uncertain is a trained network, and whence comes its doubt?",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
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
        bool, Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """How uncertain is a trained network, and whence comes its doubt?"""


GROUP = "whence.experiments"
INSTALL = "pip install 'whence[paper]'"


@handle_errors
def demo(
    draws: Annotated[int, Option(min=1, help="How many times to draw groups, faults and a network.")] = 5,
    seed: Annotated[int, Option(min=0, help="Seed of the first draw; each later draw adds one.")] = 0,
    out: Annotated[Path, Option(help="The report to write.", dir_okay=False)] = Path("report.html"),
    quick: Annotated[bool, Option("--quick", help="At most two small draws: seconds instead of a minute.")] = False,
    figures: Annotated[Path | None, Option(help="Also draw pictures of the first draw into this folder.")] = None,
) -> None:
    """Tell noisy labels from missing data on handwritten digits.

    A small network learns the digits that come with scikit-learn: first two random groups of them, then all ten. One
    digit has random labels in training, one is never shown. Prints how well both are found, and writes a report.

    Examples: `whence demo`, `whence demo --quick`, `whence demo --draws 20 --out twenty.html`
    """
    check_writable(out)
    try:
        # by name, and late: the library itself does not depend on the experiments
        program = import_module("whence_paper.demo_run")
    except ModuleNotFoundError as error:
        stop(f"`whence demo` needs {error.name}. Install it with: pip install 'whence[table]'", LACKING)
    program.run(draws=draws, seed=seed, out=out, quick=quick, figures=figures)


@handle_errors
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, Argument(help="Name of the experiment; see --list.")] = None,
    list_all: Annotated[bool, Option("--list", help="List the experiments.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the paper again; the arguments after its name are passed to it.

    Examples: `whence reproduce --list`, `whence reproduce sinc --quick`
    """
    known = {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)}
    if list_all or name is None:
        if not known:
            stop(f"no experiments are installed. Install them with: {INSTALL}", LACKING)
        about = {point: _first_line(known[point]) for point in known}
        output = Output(as_json)
        output.rows(list(about.items()), ["name", "what it does"])
        output.finish([{"name": point, "about": words} for point, words in about.items()])
        return
    if name not in known:
        stop(f"expected one of {', '.join(known) or 'none installed'}, got {name!r}.{did_you_mean(name, known)}")
    try:
        run = known[name].load()
    except ModuleNotFoundError as error:
        stop(f"{name!r} needs {error.name}. Install it with: {INSTALL}", LACKING)
    try:
        run(list(context.args))
    except SystemExit as end:  # argparse exits by itself, after its own message
        raise typer.Exit(end.code if isinstance(end.code, int) else 1) from None


def _first_line(point: EntryPoint) -> str:
    """The first line of the module's docstring."""
    try:
        import_module(point.module)
    except ModuleNotFoundError as error:
        return f"needs {error.name}: {INSTALL}"
    return (sys.modules[point.module].__doc__ or "").strip().splitlines()[0]


for command in (table, demo, fit, predict, explain, report):
    app.command(no_args_is_help=command is not demo)(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(reproduce)
