"""Results on disk: JSON with the configuration, the versions and the commit that made the numbers."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

import whence


def write(path: Path, configuration: dict[str, Any], results: dict[str, Any], command: str) -> dict[str, Any]:
    """Write a record and give it back."""
    record = {
        "command": command,
        "configuration": configuration,
        "versions": {
            "whence": whence.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(record, indent=1))
    path.write_text(text + "\n", encoding="utf-8")  # one line for a list of numbers, one for every other value
    return record


def read(path: Path, configuration: dict[str, Any]) -> dict[str, Any] | None:
    """A record made with the same configuration, if there is one."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record if record.get("configuration") == json.loads(json.dumps(configuration)) else None


def commit() -> str:
    """The commit of the sources, with a + where files have changed since; "unknown" outside of a checkout."""
    here = Path(__file__).parent
    try:
        head = _git("rev-parse", "--short", "HEAD", at=here)
        changed = _git("status", "--porcelain", "--", str(here), str(here.parents[1] / "whence"), at=here)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str, at: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def command_line(module: str) -> str:
    """What was typed."""
    return " ".join(["python", "-m", module, *sys.argv[1:]])
