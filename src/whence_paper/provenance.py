"""What a number depends on beside its configuration: versions, hardware, the commit of the sources, the command."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

import whence

SOURCES = Path(__file__).parent.parent
"""The folder of the packages."""


def surroundings(command: str = "") -> dict[str, Any]:
    """For a record: the command, the commit, versions, hardware."""
    versions = {
        "whence": whence.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
    return {"command": command, "commit": commit(), "versions": versions, **hardware()}


def hardware() -> dict[str, Any]:
    """Processor, cores, threads, and the GPU if there is one."""
    found = {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def command_line(name: str, arguments: Iterable[str]) -> str:
    """What to type; folders by their last name only, the others tell nobody anything."""
    return " ".join([name, *(Path(one).name if one.startswith("/") else one for one in arguments)])


def commit(*more: Path) -> str:
    """The commit of the sources, with a + where files have changed since; "unknown" outside of a checkout.

    The variable WHENCE_COMMIT tells it where sources were copied without their repository.

    Args:
        more: folders, beside those of the packages, that count as sources.
    """
    told = os.environ.get("WHENCE_COMMIT")
    if told:
        return told
    folders = [SOURCES / "whence", SOURCES / "whence_paper", *more]
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", *map(str, folders))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
