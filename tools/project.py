"""What pyproject.toml asks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str], path: Path = PROJECT) -> list[str]:
    """Lines of requirements: what the package needs, and what some of its extras and the extras inside them do."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    optional, lines = project["optional-dependencies"], list(project["dependencies"])
    todo, seen = list(extras), set()
    while todo:
        extra = todo.pop()
        if extra not in optional:
            raise SystemExit(f"expected one of the extras {', '.join(sorted(optional))}, got {extra!r}.")
        for line in optional[extra] if extra not in seen else ():
            inside = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            if inside:
                todo += inside[1].split(",")
            else:
                lines.append(line)
        seen.add(extra)
    return lines
