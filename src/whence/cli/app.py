"""The program: its commands, and what holds for all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from whence import __version__
from whence.cli.doctor import doctor
from whence.cli.experiments import demo, reproduce
from whence.cli.fit import fit
from whence.cli.query import explain, predict, report
from whence.cli.table import table

EPILOG = (
    "Exit codes: 0 done; 1 a fault of whence, or a self-check failed; 2 an option, a file or a model cannot be used; "
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
        bool, typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """How uncertain is a trained network, and whence comes its doubt?"""


app.command(no_args_is_help=True)(table)
app.command()(demo)
app.command(no_args_is_help=True)(fit)
app.command(no_args_is_help=True)(predict)
app.command(no_args_is_help=True)(explain)
app.command(no_args_is_help=True)(report)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(reproduce)
app.command()(doctor)
