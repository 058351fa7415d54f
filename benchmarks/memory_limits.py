"""Whether `max_memory` is respected: peaks of real processes, for fits of every structure under several limits.

    python -m benchmarks.memory_limits --out results/memory_limits.json

The fits are those of `tests/measured_fits.py`, each in a process of its own; the peak is of its resident set, beside
what was resident before the fit. Every fit is measured several times, and the highest peak is told.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .memory import METHOD
from .record import save, say, surroundings

ROOT = Path(__file__).resolve().parents[1]


def asked(*words: str) -> list[dict[str, Any]]:
    """What the measuring program prints."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "measured_fits.py"), *words]
    where = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=where, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/memory_limits.json"))
    parser.add_argument("--limits", type=int, nargs="+", default=[60_000_000, 70_000_000, 100_000_000, 150_000_000])
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for limit in given.limits:
        worst: dict[str, dict[str, Any]] = {}
        for _ in range(given.times):
            for found in asked("all", str(limit)):
                before = worst.setdefault(found["name"], {**found, "limit": limit})
                before["peak"] = max(before["peak"], found["peak"])
                before["refused"] = before["refused"] or found["refused"]
        rows += worst.values()
        say(limit, max(row["peak"] for row in worst.values()), sum(row["refused"] for row in worst.values()))
        save(given.out, {"surroundings": surroundings(), "memory": METHOD, "times": given.times, "rows": rows})


if __name__ == "__main__":
    main()
