"""What a measurement needs to be read later: versions, hardware, the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import whence


def surroundings(commit: str | None = None) -> dict[str, Any]:
    """Versions, hardware, threads, commit, and the command line."""
    found: dict[str, Any] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *map(_short, sys.argv[1:])]),
        "commit": commit or _commit(),
        "whence": whence.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def _short(argument: str) -> str:
    """Folders of this machine tell nobody anything."""
    return Path(argument).name if argument.startswith("/") else argument


def _commit() -> str:
    """The commit, marked when the package or the benchmarks have changes that are not in it."""
    root = Path(__file__).parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "src/whence", "benchmarks"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (", with changes" if changed.stdout.strip() else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def save(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(".part")
    partly.write_text(json.dumps(content, indent=1) + "\n")
    partly.replace(path)


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


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
