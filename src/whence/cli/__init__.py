"""The command `whence`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with the given arguments, and exit with its exit code."""
    try:
        from whence.cli.app import app  # imported late, so that a missing extra is reported in a sentence
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("typer", "rich", "pandas"):
            raise
        print(f"The command line needs {missing}. Install it with: pip install 'whence[table]'", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:  # loading torch takes seconds
        sys.exit(130)
    app(args=None if arguments is None else list(arguments), prog_name="whence")
