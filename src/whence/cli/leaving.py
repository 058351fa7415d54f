"""How the program ends: an exit code that means something, and one clear message.

0: done. 1: a fault of whence itself, or a self-check that failed. 2: what was given cannot be used (an option, a file,
a column, a model). 3: the machine lacks something (a package, memory, room on the disk). 130: interrupted.
"""

from __future__ import annotations

import errno
import functools
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from whence import TooLargeError, WhenceError

FAILED, UNUSABLE, LACKING, INTERRUPTED = 1, 2, 3, 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

P = ParamSpec("P")
R = TypeVar("R")


def stop(message: str, code: int = UNUSABLE) -> NoReturn:
    """Say why, and leave."""
    Console(stderr=True).print(f"[bold red]whence:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a command raises into a message and an exit code."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            Console(stderr=True).print("\nwhence: interrupted; no file was left half-written.", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            sys.stderr.close()  # the reader of a pipe left; nothing can be told to anyone
            raise typer.Exit(FAILED) from None
        except Exception as error:
            stop(*_judge(error))

    return run


def _judge(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit code; a traceback is printed where whence is to blame."""
    if isinstance(error, (TooLargeError, MemoryError)):
        return str(error) or "there is not enough memory. Take fewer rows, or --structure core.", LACKING
    if isinstance(error, WhenceError):
        return str(error), UNUSABLE
    if isinstance(error, ModuleNotFoundError):
        return _missing(error), LACKING
    if isinstance(error, OSError):
        return _refused(error), LACKING if error.errno in NO_ROOM else UNUSABLE
    traceback.print_exception(error)
    return f"this is a fault of whence, not of your input: {type(error).__name__}: {error}", FAILED


def _missing(error: ModuleNotFoundError) -> str:
    said = str(error)
    return said if "nstall" in said else f"{error.name} is not installed. Install it with: pip install 'whence[table]'"


def _refused(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    return f"the system refused{where}: {error.strerror or error}."
