"""Cost and memory against the number of outputs: `python -m benchmarks.outputs`.

One hidden layer and a last layer of k outputs, trained not at all: time and memory do not depend on it. Seconds are
told as multiples of one forward and one backward pass of the cross-entropy over the same examples. Every size runs in a
process of its own, so that its peak of resident memory is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence

from .memory import METHOD, extra_bytes
from .record import save, say, surroundings

SIZES = (10, 100, 1_000, 10_000, 50_000)
EXAMPLES, TESTS, BATCH, WIDTH, INPUTS = 256, 64, 64, 64, 32
COLUMNS = 16
LONG = 5.0
ALL = 1_000
"""Up to so many outputs all are looked at too, for comparison."""


def seconds(work: Callable[[], object]) -> float:
    """Of the processor, which others on the machine do not lengthen by waiting; the shorter of two short runs."""
    found = [spent(work)]
    if found[0] < LONG:
        found.append(spent(work))
    return min(found)


def spent(work: Callable[[], object]) -> float:
    """Of one run."""
    start = time.process_time()
    work()
    return time.process_time() - start


def one_pass(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward, once over the data."""
    for x, y in batches:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()


def measure(outputs: int) -> dict[str, Any]:
    """Multiples and peaks for one number of outputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)).eval()
    x, test = torch.randn(EXAMPLES, INPUTS), torch.randn(TESTS, INPUTS)
    y = torch.randint(0, outputs, (EXAMPLES,))
    batches = [(x[low : low + BATCH], y[low : low + BATCH]) for low in range(0, EXAMPLES, BATCH)]
    train = seconds(lambda: one_pass(net, batches))
    predict = seconds(lambda: one_pass(net, [(test, y[:TESTS])]))
    net.zero_grad()
    tracer: whence.Tracer
    first = 0.0

    def fit(columns: Any) -> whence.Tracer:
        return whence.fit(net, batches, "categorical", "ekfac", ridge=1.0, hessian_columns=columns, progress=False)

    def kept(columns: Any) -> None:
        nonlocal tracer, first
        start = time.process_time()
        tracer = fit(columns)
        first = time.process_time() - start

    found: dict[str, Any] = {
        "outputs": outputs,
        "parameters": sum(p.numel() for p in net.parameters()),
        "forward and backward, seconds": train,
        "weights, bytes": 4 * sum(p.numel() for p in net.parameters()),
        "peak of fit, bytes": extra_bytes(lambda: kept(COLUMNS)),
        "fit": min(first, seconds(lambda: fit(COLUMNS)) if first < LONG else first) / train,
        "peak of predicted, bytes": extra_bytes(lambda: tracer.predict(test, outputs="predicted")),
        "predicted": seconds(lambda: tracer.predict(test, outputs="predicted")) / predict,
    }
    if outputs <= ALL:
        found["all"] = seconds(lambda: tracer.predict(test, outputs="all")) / predict
        if outputs <= ALL // 10:
            found["fit, all"] = seconds(lambda: fit("all")) / train
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """As it stands in the documentation."""
    names = ("fit", "fit, all", "predicted", "all")
    peaks = ("peak of fit, bytes", "peak of predicted, bytes")
    lines = [
        f"| outputs | weights | fit, {COLUMNS} columns | fit, all | predicted class | all outputs | peak of fit | of "
        "predicted class |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        times = [f"{row[name]:.1f}" if name in row else "" for name in names]
        sizes = [f"{row[name] / 2**20:.0f} MiB" for name in peaks]
        lines.append("| " + " | ".join([f"{row['outputs']:,}", f"{row['parameters']:,}", *times, *sizes]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every size in a process of its own and write everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/outputs.json"))
    parser.add_argument("--only", type=int, help="one size, printed as JSON")
    given = parser.parse_args()
    if given.only is not None:
        say(json.dumps(measure(given.only)))
        return
    rows = []
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.outputs", "--only", str(size)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        say(rows[-1])
    setting = {
        "training examples": EXAMPLES,
        "test examples": TESTS,
        "batch": BATCH,
        "columns": COLUMNS,
        "times": "multiples of one forward and one backward pass over the same examples; processor time, one thread, "
        f"the shortest of two runs or more where one takes less than {LONG:.0f} s",
        "peaks": METHOD,
    }
    save(given.out, {"surroundings": surroundings(), "setting": setting, "rows": rows})
    say(table(rows))


if __name__ == "__main__":
    main()
