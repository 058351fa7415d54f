"""How many training examples, directions and eigenvectors `explain` needs.

    python -m benchmarks.compared --data DIR --out results/compared.json

The networks of `benchmarks.verdicts`: one class with random labels, another missing. The same fit explains all test
points in several ways: compared with 5,000 training examples, 2,000 or all; along all directions in place of the
principal ones; and with twice as many eigenvectors of the kernel. Beside the verdicts stand correlations of the
logarithms of `disagreement` and `scarcity` with those of the first way, and the seconds of the second `explain`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest.mock import patch

import torch

import whence
from whence.influence import neighbours

from .data import batches
from .record import save, say
from .studied import arguments, open_record, options, put, read
from .verdicts import CASES, LEVEL, VERDICTS, answers_and_features, at_once, drawn, groups, judged, trained

EVERY = 10**6
WAYS: dict[str, dict[str, int]] = {
    "5,000 examples": {"COMPARED": neighbours.COMPARED},  # as it is
    "2,000 examples": {"COMPARED": 2000},
    "all examples": {"COMPARED": EVERY},
    "all directions": {"PRINCIPAL": EVERY},
    "twice as many eigenvectors": {"RANK": 2 * neighbours.RANK},
}


def run_draw(name: str, seed: int, data: Any) -> list[dict[str, Any]]:
    """Explain the test points of one draw in each way."""
    case = CASES[name]
    task = drawn(case, read(case.data, data), seed)
    network = trained(case, task, seed, "cpu")
    likelihood = "categorical" if case.loss == "cross-entropy" else "gaussian"
    targets = task.targets.argmax(1) if case.loss == "cross-entropy" else task.targets
    loader = batches(task.inputs, targets, at_once("cpu"))
    tracer = whence.fit(network, loader, likelihood=likelihood, progress=False, **options("ekfac@last_layer"))
    points = list(task.test_inputs.split(at_once("cpu")))
    right = answers_and_features(network, task.test_inputs)[0].argmax(1) == task.test_answers
    rows, first = [], None
    for way, changed in WAYS.items():
        tracer.__dict__.pop("_calibration", None)  # is computed again, with these settings
        with patch.multiple(neighbours, **changed):
            tracer.explain(points, level=LEVEL, top=0)
            clock = time.perf_counter()
            found = tracer.explain(points, level=LEVEL, top=0)
            seconds = time.perf_counter() - clock
        first = first or found
        same = {
            key: float(torch.corrcoef(torch.stack([getattr(first, key).log(), getattr(found, key).log()]))[0, 1])
            for key in ("disagreement", "scarcity")
        }
        part = judged(found, {}, groups(task, right), right)
        about = {"case": name, "seed": seed, "n": len(task.inputs), "structure": "ekfac@last_layer", "way": way}
        rows.append({**about, **part, "correlation": same, "seconds": seconds})
        say(name, seed, way, same, {key: part["auroc"][key] for key in ("disagreement", "noise", "scarcity")})
    return rows


def main() -> None:
    """Run the draws that were asked for."""
    parser = arguments(__doc__, CASES, "compared", seeds=(426, 427, 428))
    given: argparse.Namespace = parser.parse_args()
    record = open_record(given.out, given.append, level=LEVEL, verdicts=VERDICTS)
    for name in given.cases:
        for seed in given.seeds:
            for row in run_draw(name, seed, given.data):
                put(record, row, ("case", "seed", "way"))
            save(given.out, record)


if __name__ == "__main__":
    main()
