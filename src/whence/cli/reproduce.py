"""`whence reproduce`: run an experiment by its name.

Experiments announce themselves as entry points of the group `whence.experiments`, each a function of a list of
arguments, so that the library knows none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

from whence.cli.leaving import LACKING, guarded, stop
from whence.cli.options import AsJson
from whence.cli.output import Output

GROUP = "whence.experiments"


@guarded
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Of the experiment; see --list.")] = None,
    wanted: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the paper again; what stands after its name goes to it.

    Examples: `whence reproduce --list`, `whence reproduce sinc --quick`
    """
    known = {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda one: one.name)}
    if wanted or name is None:
        _list(known, Output(as_json))
        return
    if name not in known:
        near = get_close_matches(name, list(known), n=1)
        meant = f" Was {near[0]!r} meant?" if near else ""
        stop(f"expected one of {', '.join(known) or 'none installed'}, got {name!r}.{meant}")
    run = _load(known[name])
    try:
        run(list(context.args))
    except SystemExit as end:  # argparse leaves by itself, after its own message
        raise typer.Exit(end.code if isinstance(end.code, int) else 1) from None


def _list(known: dict[str, EntryPoint], output: Output) -> None:
    if not known:
        stop("no experiments are installed. Install whence with its paper's: pip install 'whence[paper]'", LACKING)
    about = {name: _about(point) for name, point in known.items()}
    output.rows(["name", "what it does"], list(about.items()))
    output.finish([{"name": name, "about": words} for name, words in about.items()])


def _load(point: EntryPoint) -> Callable[[list[str]], Any]:
    try:
        found: Callable[[list[str]], Any] = point.load()
    except ModuleNotFoundError as error:
        stop(f"{point.name!r} needs {error.name}. Install it with: pip install 'whence[paper]'", LACKING)
    return found


def _about(point: EntryPoint) -> str:
    """The first line of the module's description."""
    module = point.value.split(":")[0]
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return f"needs {error.name}: pip install 'whence[paper]'"
    return (sys.modules[module].__doc__ or "").strip().splitlines()[0]
