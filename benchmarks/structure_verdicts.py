"""Do all structures give the same verdicts about one network? The share of test points on which each agrees with exact.

    python -m benchmarks.structure_verdicts --data DIR --out results/structure_verdicts.json

The digits of `benchmarks.verdicts`, ten classes, one of them noisy and one missing; networks of 64 hidden units.
"""

from __future__ import annotations

from typing import Any

import whence

from .data import Split, batches
from .record import save, say
from .studied import arguments, open_record, put, read
from .verdicts import CASES, drawn, trained

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"structure": "exact"},
    "core": {"structure": "core"},
    "ekfac": {"structure": "ekfac"},
    "sketch": {"structure": whence.Sketch(size=1024)},
    "last layer": {"structure": "exact", "parameters": "last_layer"},
}
STUDIES = {name: CASES[name] for name in ("digits", "digits, squared error")}


def measure(name: str, split: Split, seed: int) -> dict[str, Any]:
    """Train one network, and explain the same test points by every structure."""
    case = STUDIES[name]
    task = drawn(case, split, seed)
    network = trained(case, task, seed, "cpu")
    classes = case.loss == "cross-entropy"
    data = batches(task.inputs, task.targets.argmax(1) if classes else task.targets, 500)
    verdicts = {
        structure: whence.fit(
            network, data, likelihood="categorical" if classes else "gaussian", progress=False, **options
        )
        .explain(task.test_inputs)
        .verdicts
        for structure, options in OPTIONS.items()
    }
    exact = verdicts["exact"]
    agree = {
        structure: round(sum(map(str.__eq__, found, exact)) / len(exact), 4) for structure, found in verdicts.items()
    }
    confident = {structure: round(found.count("confident") / len(exact), 4) for structure, found in verdicts.items()}
    return {"case": name, "seed": seed, "test": len(exact), "agree_with_exact": agree, "confident": confident}


def main() -> None:
    """Run the cases and draws that were asked for."""
    given = arguments(__doc__, STUDIES, "structure_verdicts").parse_args()
    record = open_record(given.out, given.append)
    split = read("digits", given.data)
    for name in given.cases:
        for seed in given.seeds:
            row = measure(name, split, seed)
            put(record, row, ("case", "seed"))
            save(given.out, record)
            say(name, seed, row["agree_with_exact"])


if __name__ == "__main__":
    main()
