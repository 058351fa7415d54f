"""What `tracer.attribute` costs, in forward passes of the training set for each test point.

    python -m benchmarks.attribution --data DIR --out results/attribution.json

For networks with ten outputs, every structure, and several numbers m of test points asked about at once: CPU seconds of
`attribute` over m, as a multiple of one forward pass over the training set without gradients. Also: how far the summed
shares are from the structure's own variance (gap), and the memory that the largest m took at its peak beside what the
gradients of all training examples, n k d numbers, would take.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence import one_hot

from . import networks
from .data import Split, batches
from .memory import METHOD, extra_bytes
from .record import save, say
from .reference import cpu_seconds
from .studied import WEIGHT_DECAY, Study, open_record, options, read
from .trained import trained

CLASSES = 10
REPEATS = 5
"""Of which the fastest counts, for forward passes as for attribution: other work on the machine only adds."""
FLOOR = 1.0
"""Forward passes a test point, about, that attribution may take."""

CASES: dict[str, Study] = {
    "mlp": Study(
        "mnist",
        3000,
        100,
        lambda k: networks.mlp(784, 256, 256, k),
        "MLP 784-256-256",
        3,
        ("core:size=1024", "core:size=2048", "sketch:size=1024", "ekfac"),
    ),
    "cnn": Study(
        "fashion-mnist",
        3000,
        100,
        lambda k: networks.cnn(k, (16, 32, 32)),
        "CNN of 16, 32, 32 channels",
        3,
        ("core:size=1024", "core:size=2048", "sketch:size=1024", "ekfac"),
    ),
    "small": Study(
        "digits", 400, 100, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 20, ("exact", "core:size=512", "ekfac")
    ),
}


@torch.no_grad()
def forward(network: nn.Module, parts: Sequence[Tensor]) -> None:
    for inputs in parts:
        network(inputs)


def best(times: list[float]) -> float:
    return min(times)


def measure(tracer: whence.Tracer, tests: Tensor, counts: Sequence[int], unit: float) -> dict[str, Any]:
    """Multiples for every number of test points, gaps and memory for the largest."""
    tracer.attribute(tests[:1])  # warm
    per_point = {}
    for m in counts:
        seconds = best([cpu_seconds(partial(tracer.attribute, tests[:m])) for _ in range(REPEATS)])
        per_point[str(m)] = seconds / m / unit
    most = tests[: max(counts)]
    kept: list[whence.Attribution] = []
    gc.collect()
    taken = extra_bytes(lambda: kept.append(tracer.attribute(most)))
    found = kept[0]
    return {
        "forward_passes_per_point": per_point,
        "gap_hec3": float(found.hec3.gap.abs().median()),
        "gap_ho": float(found.ho.gap.abs().median()),
        "effective_median": float(found.hec3.effective.median()),
        "extra_mb": taken / 1e6,
    }


def run_case(name: str, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Train quickly, then measure every structure; the forward pass is timed before and after each."""
    study = CASES[name]
    split: Split = read(study.data, given.data)
    n = given.n or study.n
    inputs, labels, tests = split.inputs[:n], split.labels[:n], split.test_inputs[: max(given.points)]
    targets = one_hot(labels, CLASSES)
    network = trained(
        given.keep,
        f"attribution-{name}",
        lambda: study.make(CLASSES),
        inputs,
        targets,
        loss="squared error",
        epochs=study.epochs,
        seed=0,
    )
    parts = inputs.split(500)
    d = networks.size(network)
    for text in given.structures or study.structures:
        forward(network, parts)
        before = best([cpu_seconds(lambda: forward(network, parts)) for _ in range(REPEATS)])
        tracer = whence.fit(
            network,
            batches(inputs, targets, 500),
            ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, n, loss="sum_of_squares"),
            progress=False,
            **options(text),
        )
        row: dict[str, Any] = {
            "case": name,
            "data": study.data,
            "network": study.describe,
            "structure": text,
            "n": n,
            "outputs": CLASSES,
            "parameters": d,
            "gradients_mb": n * CLASSES * d * 4 / 1e6,
            **measure(tracer, tests, given.points, before),
        }
        after = best([cpu_seconds(lambda: forward(network, parts)) for _ in range(REPEATS)])
        row["forward_cpu_s"] = [before, after]
        record["rows"].append(row)
        save(given.out, record)
        say(name, text, {key: round(value, 2) for key, value in row["forward_passes_per_point"].items()}, row["gap_ho"])


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/ and fashion-mnist/")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--structures", nargs="+", help="in place of each case's")
    parser.add_argument("--points", nargs="+", type=int, default=[1, 10, 100], help="test points asked about at once")
    parser.add_argument("--n", type=int, help="training examples, in place of each case's")
    parser.add_argument("--keep", type=Path, default=Path("out/networks"), help="where trained networks are kept")
    parser.add_argument("--out", type=Path, default=Path("out/attribution.json"))
    given = parser.parse_args()
    record = open_record(given.out, False, floor=FLOOR, memory_method=METHOD)
    for name in given.cases:
        run_case(name, given, record)


if __name__ == "__main__":
    main()
