"""What a measurement needs to be read later: versions, hardware, the commit."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import whence
from whence_paper.provenance import command_line, commit, hardware


def surroundings(made: str | None = None) -> dict[str, Any]:
    """Time, command line, commit, versions, hardware.

    Args:
        made: the commit, where there is no repository to ask.
    """
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(f"python -m benchmarks.{Path(sys.argv[0]).stem}", sys.argv[1:]),
        "commit": made or commit(Path(__file__).parent),
        "whence": whence.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **hardware(),
    }


def installed(package: str) -> str:
    """The version of a package, or that it is not there.

    Examples:
        >>> installed("no such package")
        'not installed'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def save(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps(content, indent=1) + "\n")
    partly.replace(path)


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


def failed(error: Exception) -> dict[str, str]:
    """What stands in the place of a measurement that a peer did not get through.

    Examples:
        >>> failed(ValueError("no such thing"))
        {'failed': 'ValueError: no such thing'}
    """
    kind = "not installed" if isinstance(error, ModuleNotFoundError) else type(error).__name__
    first = (str(error).splitlines() or [""])[0]
    return {"failed": f"{kind}: {first[:200]}"}


def attempt(row: dict[str, Any], measure: Callable[[], dict[str, Any]], summary: Callable[[Any], str]) -> str:
    """Put what is measured into a row, or why it failed; and say it in a line."""
    try:
        row.update(measure())
        return summary(row)
    except (whence.WhenceError, RuntimeError) as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        return str(row["failed"])


def measured(path: Path, key: str, **same: Any) -> list[dict[str, Any]]:
    """Rows of an earlier run with the same settings, so that a long measurement can be done in parts.

    Args:
        path: where they would be.
        key: of the rows in the file.
        same: settings in the file that must be as given.
    """
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    rows: list[dict[str, Any]] = content.get(key, []) if all(content.get(k) == v for k, v in same.items()) else []
    return rows
