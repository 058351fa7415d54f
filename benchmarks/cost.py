"""What fit and predict cost, as multiples of forward + k backward passes over the same data, beside the peers.

    python -m benchmarks.cost --data DIR --out results/cost.json

One process for each pair of model and subject: CPU time of all threads, the smallest of several runs where they are
short; batch sizes are swept for everyone, the reference included, on a part of the data, and the best is used; the
reference is timed before and after in the same process, on a copy of the network that never met the subject. Memory is
measured in a second process. Peers that are not importable are reported as not installed. One that does not end in
time is measured with few examples; so are all with --small, where what does not grow with the examples
(eigendecompositions, above all) weighs more in the multiples.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .memory import RETURNED
from .models import MODELS
from .peers import PEERS
from .record import save, say, surroundings

STRUCTURES = ("ekfac", "core", "sketch", "kfac", "diagonal")
FLOORS = {"M1": (6.0, 2.0), "M2": (6.0, 3.0), "M3": (6.0, 3.0), "M4": (12.0, 5.0)}
"""What the default must not exceed: fit, predict."""
SMALL = ("ekfac",)
"""Structures of a small run."""
STOPPED = "stopped at"


def child(model: str, subject: str, prepared: Path, given: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run one measurement, and keep what it said last, even if it was stopped."""
    surrounding = {
        **os.environ,
        "OMP_NUM_THREADS": str(given.threads),
        "MKL_NUM_THREADS": str(given.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if "--memory" in more:
        surrounding.update(RETURNED)
    command = [sys.executable, "-m", "benchmarks.one_cost", model, subject, str(prepared), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.seconds, env=surrounding)
        out, failed = done.stdout, ""
        if done.returncode:
            failed = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        failed = f"{STOPPED} {given.seconds:g} s"
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    row: dict[str, Any] = json.loads(lines[-1]) if lines else {"model": model}
    if failed:
        row["failed"] = failed
    return row


def measure(model: str, subject: str, prepared: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Time, then memory with the batches that were best."""
    row = {"subject": subject, **child(model, subject, prepared, given)}
    if "missing" in row or "fit_batch" not in row or given.no_memory:
        return row
    batches = (str(row["fit_batch"]), str(row.get("predict_batch", 0)))
    memory = child(model, subject, prepared, given, "--memory", *batches)
    row.update({key: value for key, value in memory.items() if key.endswith("_mb") or key == "memory_method"})
    if "failed" in memory:
        row["memory_failed"] = memory["failed"]
    return row


def room(row: dict[str, Any]) -> float:
    """MB that a fit may take: twice the factors, and a batch's activations and gradients."""
    return float(2.0 * row["factors_mb"] + row["batch_mb"])


def line(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    name = f"{row['subject']} {row.get('version', '')}".strip()
    if row.get("frozen"):
        name += f", {row['frozen']} parameters frozen"
    if "missing" in row:
        return f"| {row['model']} | {name} | - | not installed: {row['missing']} | | | |"

    def number(key: str, digits: str = ".2f") -> str:
        return format(row[key], digits) if key in row else row.get("failed", "-")

    fit = f"{number('fit_multiple')} [{row.get('fit_batch', '')}]"
    predict = f"{number('predict_multiple')} [{row.get('predict_batch', '')}; {row.get('predict_points', '')} points]"
    references = row.get("reference_fit_s", []) + row.get("reference_predict_s", [])
    apart = max((max(pair) / min(pair) for pair in (references[:2], references[2:]) if pair), default=1.0)
    floor = f" of {room(row):.1f}" if "batch_mb" in row else ""
    memory = f"{number('fit_extra_mb', '.1f')}{floor} / {number('predict_extra_mb', '.1f')}"
    return f"| {row['model']} | {name} | {row.get('n', '-')} | {fit} | {predict} | {memory} | {apart:.2f} |"


def prepared_for(model: str, few: bool, given: argparse.Namespace, folder: Path) -> Path:
    """The file of a network and its data, made if it is not there."""
    chosen, path = MODELS[model], folder / f"{model}{'-few' if few else ''}.pt"
    if not path.exists():
        n, test = chosen.few if few else (chosen.n, chosen.test)
        chosen.prepare(given.data, given.n or n, given.test or test, path)
    return path


def best_row(model: str, subject: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All examples, or few where these were asked for or all did not end in time."""
    row = measure(model, subject, prepared_for(model, given.small, given, folder), given)
    if given.small or given.n or not row.get("failed", "").startswith(STOPPED) or "fit_multiple" in row:
        return row
    return {**measure(model, subject, prepared_for(model, True, given, folder), given), "with_all": row["failed"]}


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several, by model; what was measured later takes the place of the same pair, a failure of none."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for row in record["rows"]:
            pair = row["model"], row["subject"]
            if pair not in rows or "failed" not in row:
                rows[pair] = {"commit": record["commit"], **row}  # that of a record put together before stays
    together = sorted(rows.values(), key=lambda row: list(MODELS).index(row["model"]))  # stable
    commands = dict.fromkeys(one for record in records for one in record["command"].split("; "))
    return {**records[-1], "command": "; ".join(commands), "rows": together}


def main() -> None:
    """Measure every pair that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--data", type=Path, help="folder of the data sets; random weights and inputs when not given")
    parser.add_argument("--small", action="store_true", help="few examples, and of the structures the default alone")
    parser.add_argument("--subjects", nargs="+", help="structures or peers (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/cost.json"))
    parser.add_argument("--n", type=int, help="training examples, in place of each model's")
    parser.add_argument("--test", type=int, help="test points, in place of each model's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900, help="after which one measurement is stopped")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one record of several, and measure nothing")
    given = parser.parse_args()
    if given.merge:
        save(given.out, merged([json.loads(path.read_text()) for path in given.merge]))
        return
    record: dict[str, Any] = {**surroundings(), "threads": given.threads, "floors": FLOORS}
    record.update({"trained": given.data is not None, "rows": []})
    say("| model | subject | n | fit x [batch] | predict x [batch; points] | MB fit of floor / predict | refs apart |")
    say("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            for subject in given.subjects or [*(SMALL if given.small else STRUCTURES), *PEERS]:
                row = best_row(model, subject, given, Path(folder))
                record["rows"].append(row)
                save(given.out, record)
                say(line(row))


if __name__ == "__main__":
    main()
