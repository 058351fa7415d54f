"""Shared by all commands: options, printing for people or scripts, and errors as messages with exit codes.

Exit codes: 0 done; 1 a bug in whence, or a failed self-check; 2 an option, a file, a column or a model cannot be used;
3 a package, memory or disk space is missing; 130 interrupted; 141 the output is no longer read, as after `| head`.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, ParamSpec, TypeVar, get_args

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer import Option

from whence import TooLargeError, WhenceError
from whence.display import number
from whence.errors import did_you_mean

FAILED, UNUSABLE, LACKING, INTERRUPTED, UNREAD = 1, 2, 3, 130, 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

P = ParamSpec("P")
R = TypeVar("R")


def one_of(choices: Any, about: str) -> Any:
    """An option with one of the values of a `Literal`, which suggests the nearest value for a wrong one."""
    known = get_args(choices)

    def parse(given: str) -> str:
        if given not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {given!r}.{did_you_mean(given, known)}")
        return given

    return Option(parser=parse, metavar=f"[{'|'.join(known)}]", help=about)


Named = Literal["exact", "core", "sketch", "ekfac"]
Structure = Annotated[Named | None, one_of(Named, "Of the curvature; by default exact if it fits, else a core.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object, for scripts, and nothing else.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.")]
Delimiter = Annotated[str | None, Option(help="Delimiter of a CSV, such as ';' or '\\t'; guessed if not given.")]
Rows = Annotated[int, Option(min=0, help="Use at most this many rows, drawn at random; 0 takes all, if they fit.")]
Report = Annotated[Path | None, Option("--out", "-o", help="The HTML report to write.", dir_okay=False)]


def stop(message: str, code: int = UNUSABLE) -> NoReturn:
    """Print the reason, and exit."""
    Console(stderr=True).print(f"[bold red]whence:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def check_writable(*files: Path | None, read: Sequence[Path | None] = ()) -> None:
    """Exit before any work if a file could not be written, is one of those that are read, or is written twice."""
    written = [file.resolve() for file in filter(None, files)]
    for file in filter(None, files):
        if written.count(file.resolve()) > 1:
            stop(f"expected a file of its own for each result, got {file} for two of them.")
        if not file.parent.is_dir():
            stop(f"expected a folder that exists, got {file.parent}. Make it first: mkdir -p {file.parent}")
        if file.is_dir():
            stop(f"expected the name of a file to write, got the folder {file}.")
        if any(data.exists() and file.exists() and file.samefile(data) for data in filter(None, read)):
            stop(f"expected different files to read and to write, got {file} for both.")


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn exceptions of a command into a message and an exit code."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            Console(stderr=True).print("\nwhence: interrupted; no file was left half-written.", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            stop(*_message(error))

    return run


def _message(error: Exception) -> tuple[str, int]:
    """The message for an error, and the exit code; a traceback is printed for bugs in whence."""
    said = str(error)
    if isinstance(error, (TooLargeError, MemoryError)):
        return said or "there is not enough memory. Take fewer rows, or --structure core.", LACKING
    if isinstance(error, WhenceError):
        return said, UNUSABLE
    if isinstance(error, ModuleNotFoundError):
        advice = f"{error.name} is not installed. Install it with: pip install 'whence[table]'"
        return said if "nstall" in said else advice, LACKING
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        code = LACKING if error.errno in DISK_FULL else UNUSABLE
        return f"the system refused{where}: {error.strerror or error}.", code
    traceback.print_exception(error)
    return f"this is a bug in whence, not an error in your input: {type(error).__name__}: {error}", FAILED


class PipedConsole(Console):
    """A console with an exit code of its own for output that is no longer read."""

    def on_broken_pipe(self) -> None:
        """Exit without a message."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise typer.Exit(UNREAD)


class Output:
    """Prints text for people, or only one JSON object for scripts, at the end."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = PipedConsole(quiet=as_json, highlight=False)

    def _print(self, shown: RenderableType) -> None:
        """Print without the spaces that fill up lines."""
        with self.console.capture() as captured:
            self.console.print(shown)
        for line in captured.get().splitlines():
            self.console.out(line.rstrip(), highlight=False)

    def fact(self, name: str, words: str) -> None:
        """Print one line of a summary: a name and its text."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", width=9)
        grid.add_column(overflow="fold")
        grid.add_row(name, Text(words))
        self._print(grid)

    def notes(self, notes: Iterable[str]) -> None:
        """Print notes, one per line."""
        for note in notes:
            self.fact("Note", note)

    def say(self, words: str = "", indent: int = 0) -> None:
        """Print a paragraph."""
        self._print(Padding(Text(words), (0, 0, 0, indent)))

    def head(self, words: str) -> None:
        """Print a line above a table."""
        self._print(Text(f"\n{words}", style="bold"))

    def rows(self, rows: Iterable[Sequence[Any]], heads: Sequence[str] = (), right: Sequence[int] = ()) -> None:
        """Print a table without lines."""
        table = Table(box=None, pad_edge=False, show_header=bool(heads), header_style="dim", padding=(0, 2, 0, 0))
        cells = [[Text(figure(cell) if isinstance(cell, float) else str(cell)) for cell in row] for row in rows]
        for index, name in enumerate(heads or [""] * max(map(len, cells), default=0)):
            numbers = index in right  # a number on two lines would be read as another number
            table.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
        for row in cells:
            table.add_row(*row)
        self._print(Padding(table, (0, 0, 0, 2)))

    def files(self, files: Mapping[str, Path | None]) -> None:
        """Print where files were written, each on one line, so that it can be copied."""
        for name, path in files.items():
            if path is not None:
                name = "All rows" if name == "csv" else name.capitalize()
                self.console.print(f"[bold]{name:<9}[/]  {escape(str(path))}", soft_wrap=True)

    def finish(self, content: Any) -> None:
        """Print the JSON object, if requested."""
        if self.as_json:
            PipedConsole().out(json.dumps(jsonable(content), ensure_ascii=False, indent=1), highlight=False)


def jsonable(value: Any) -> Any:
    """Convert to what JSON can hold: no NaN, no arrays, no paths.

    Examples:
        >>> jsonable({"a": float("nan"), "b": (1, Path("x"))})
        {'a': None, 'b': [1, 'x']}
    """
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if value is None or isinstance(value, (bool, int, str, float)):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return str(value)


def figure(value: float) -> str:
    """Format a number for people.

    Examples:
        >>> figure(0.81234), figure(48123.4), figure(3.0), figure(0.000123)
        ('0.8123', '48,123', '3', '0.000123')
    """
    return number(value, 4) if math.isfinite(value) else "-"
