"""What fits and predictions of two versions of whence cost on this machine, in turn: is the new one slower?

    git worktree add ../before COMMIT
    python -m benchmarks.beside ../before --data DIR --out results/cost_beside.json

Processor time of all threads, in a process of its own for each version, the versions in turn, each first in every other
round. Beside it that of forward + k backward passes over the same data, which says how much the machine itself varies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch

import whence
from benchmarks.models import MODELS  # of the tree on the path, as whence is
from benchmarks.reference import cpu_seconds, forward_backward

SIZES = {"M4": (16_000, 16_000, 9), "M1": (2500, 1000, 2), "M2": (500, 50, 2), "M3": (100, 25, 1)}
"""Training examples, size of batches, and how often a process measures."""
ROOT = Path(__file__).resolve().parents[1]


def measure(name: str, path: Path, threads: int) -> dict[str, float]:
    """The least seconds of some repetitions, with whatever version of whence is on the path."""
    torch.set_num_threads(threads)
    n, batch, repeats = SIZES[name]
    network, inputs, targets, tests = MODELS[name].load(path)
    apart = deepcopy(network)  # never met by whence
    loader = list(zip(inputs[:n].split(batch), targets[:n].split(batch), strict=True))
    parts, asked = [some for some, _ in loader], list(tests.split(batch))
    kept: list[Any] = []

    def fit() -> None:
        kept[:] = [whence.fit(network, loader, structure="ekfac", ridge=0.01 * n, progress=False)]

    forward_backward(apart, parts[:1])
    fit()
    kept[0].predict(asked)
    work = {
        "reference": lambda: forward_backward(apart, parts),
        "fit": fit,
        "predict": lambda: kept[0].predict(asked),
    }
    return {key: min(cpu_seconds(one) for _ in range(repeats)) for key, one in work.items()}


def child(tree: Path, name: str, path: Path, threads: int) -> dict[str, float]:
    """The same in a new process, with the version of another tree."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    command = [sys.executable, __file__, "--child", name, str(path), "--threads", str(threads)]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Every model in every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the other version")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--data", type=Path, help="folder of the data sets; random ones when not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/cost_beside.json"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.child[0], Path(given.child[1]), given.threads)))
        return
    if given.before is None:
        parser.error("expected a checkout of the version to compare with.")
    from benchmarks.record import save, say, surroundings  # which older versions may not have

    trees = {"before": given.before.resolve(), "now": ROOT}
    asked = ["git", "-C", str(trees["before"]), "rev-parse", "--short", "HEAD"]
    before = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {**surroundings(), "threads": given.threads, "before": before, "rows": []}
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            path, n = Path(folder) / "model.pt", SIZES[name][0]
            MODELS[name].prepare(given.data, n, max(20, n // 5), path)
            rounds = []
            for number in range(given.rounds):
                order = list(trees)[:: -1 if number % 2 else 1]  # the process that comes second may be slower
                found = {key: child(trees[key], name, path, given.threads) for key in order}
                rounds.append({key: found[key] for key in trees})
        row: dict[str, Any] = {"model": name, "n": SIZES[name][0], "rounds": rounds}
        for what in ("reference", "fit", "predict"):
            row[what] = {key: median(one[key][what] for one in rounds) for key in trees}
        say(name, {what: {key: round(value, 3) for key, value in row[what].items()} for what in rounds[0]["now"]})
        record["rows"].append(row)
        save(given.out, record)


if __name__ == "__main__":
    main()
