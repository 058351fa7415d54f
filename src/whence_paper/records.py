"""Results on disk: one JSON file an experiment, with the numbers of every run and what made them.

A file is written whole or not at all, after each run. Runs that are in it are not made again, so an experiment that
was interrupted goes on where it stopped, and several processes may add to the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .provenance import surroundings

Configuration = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        configuration: all that decides its numbers, among it the seed.
        results: its numbers, as JSON holds them.
        made: when, in how many seconds, and under which key of the record's "surroundings" stands with what.
    """

    configuration: Configuration
    results: dict[str, Any]
    made: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {"configuration": self.configuration, "made": self.made, "results": self.results}


@dataclass(frozen=True)
class Record:
    """The runs of one experiment in a file.

    Attributes:
        path: of the file, which need not exist.
        experiment: its name.
        command: what was typed.

    Examples:
        >>> import tempfile
        >>> record = Record(Path(tempfile.mkdtemp()) / "doubling.json", "doubling", "whence reproduce doubling")
        >>> record.once({"seed": 3}, lambda: {"twice": 6}).results
        {'twice': 6}
        >>> record.once({"seed": 3}, lambda: {"twice": "not computed again"}).results
        {'twice': 6}
    """

    path: Path
    experiment: str
    command: str = ""

    def runs(self, **same: Any) -> list[Run]:
        """All runs, or those whose configuration has the given values, in the order in which they were added."""
        found = [Run(one["configuration"], one["results"], one["made"]) for one in _read(self.path).get("runs", [])]
        wanted = _plain(same)
        return [run for run in found if all(run.configuration.get(key) == value for key, value in wanted.items())]

    def find(self, configuration: Configuration) -> Run | None:
        """The run with exactly this configuration, if there is one."""
        wanted = _plain(configuration)
        return next((run for run in self.runs() if run.configuration == wanted), None)

    def once(self, configuration: Configuration, compute: Callable[[], dict[str, Any]], *, again: bool = False) -> Run:
        """The run with this configuration: from the file, else (or `again`) computed and added to it."""
        done = None if again else self.find(configuration)
        if done is not None:
            return done
        began = time.perf_counter()
        return self.add(configuration, compute(), time.perf_counter() - began)

    def add(self, configuration: Configuration, results: dict[str, Any], seconds: float) -> Run:
        """Put a run into the file, in place of one with the same configuration."""
        around = surroundings(self.command)
        key = hashlib.sha256(json.dumps(around, sort_keys=True).encode()).hexdigest()[:8]
        made = {"when": _now(), "seconds": round(seconds, 2), "with": key}
        run = Run(_plain(configuration), _plain(results), made)
        self._put([run.as_dict()], {key: around})
        return run

    def merge(self, other: Path) -> None:
        """Add all runs of another file of the same experiment, made on another machine say, with what made them."""
        content = _read(other)
        if content.get("experiment") != self.experiment:
            found = content.get("experiment", "no file")
            raise SystemExit(f"expected a record of {self.experiment} at {other}, got {found}.")
        self._put(content["runs"], content["surroundings"])

    def _put(self, new: list[dict[str, Any]], around: dict[str, Any]) -> None:
        with _locked(self.path):
            content = _read(self.path)
            made = [one["configuration"] for one in new]
            runs = [*(one for one in content.get("runs", []) if one["configuration"] not in made), *new]
            known = {**content.get("surroundings", {}), **around}
            used = {name: value for name, value in known.items() if any(one["made"]["with"] == name for one in runs)}
            _write(self.path, {"experiment": self.experiment, "surroundings": used, "runs": runs})


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As they come back from a file: tuples are lists, keys are strings."""
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SystemExit(
            f"expected a record in JSON at {path}, got {error}. Move the file away to start anew."
        ) from None
    if "runs" not in content:
        raise SystemExit(f"expected a record of whence_paper at {path}, got other JSON. Choose another --out.")
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; a list of numbers on one line, every other value on its own."""
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(content, indent=1))
    partly = path.with_suffix(f".{os.getpid()}.part")
    partly.write_text(text + "\n", encoding="utf-8")
    partly.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from the folder between reading and writing; where the system has no locks, trust."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl  # Unix only

    gate = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)  # which gives the lock back
