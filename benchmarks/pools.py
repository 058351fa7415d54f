"""How many inputs of use a pool needs, and how frequent a class that was never shown must be among them.

    python -m benchmarks.pools --data DIR --cases mnist --seeds 423 424 425 --out results/pools.json

The networks of `benchmarks.verdicts`: one class with random labels, another missing. All test points are explained,
beside pools of some of them: fewer and fewer, with the missing class as frequent as the others; and 5,000, or as many
as there are, with fewer and fewer of the missing class. A pool without any of it is the control: it should change
little. Of larger pools `explain` takes 5,000.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import whence

from .data import batches
from .record import save, say
from .studied import arguments, open_record, options, put, read
from .verdicts import CASES, GROUPS, LEVEL, VERDICTS, answers_and_features, at_once, drawn, groups, judged, trained

SIZES = (50, 100, 300, 1000, 3000, 10_000)
SHARES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.0)
LARGE = 5000


def pools(missing: Tensor, seed: int) -> dict[tuple[int, float], Tensor]:
    """Which test points (m,) are in each pool, by its size and the share of the missing class."""
    order = torch.randperm(len(missing), generator=torch.Generator().manual_seed(seed))
    natural = float(missing.double().mean())
    found = {(size, natural): order[:size] for size in SIZES if size <= len(order)}
    new, known = order[missing[order]], order[~missing[order]]
    for share in SHARES:
        size = min(LARGE, int(len(known) / (1.0 - share)))
        if share < natural:
            some = round(share * size)
            found[size, share] = torch.cat([new[:some], known[: size - some]])
    return found


def run_draw(name: str, seed: int, data: Any, structure: str | None) -> list[dict[str, Any]]:
    """Explain all test points of one draw beside each pool."""
    case = CASES[name]
    task = drawn(case, read(case.data, data), seed)
    network = trained(case, task, seed, "cpu")
    likelihood = "categorical" if case.loss == "cross-entropy" else "gaussian"
    targets = task.targets.argmax(1) if case.loss == "cross-entropy" else task.targets
    told = options(structure or case.structure)
    loader = batches(task.inputs, targets, at_once("cpu"))
    tracer = whence.fit(network, loader, likelihood=likelihood, progress=False, **told)
    points = list(task.test_inputs.split(at_once("cpu")))
    right = answers_and_features(network, task.test_inputs)[0].argmax(1) == task.test_answers
    truth, rows = groups(task, right), []
    for (size, share), chosen in {(0, 0.0): None, **pools(truth["missing"], seed)}.items():
        pool = None if chosen is None else task.test_inputs[chosen]
        found = tracer.explain(points, level=LEVEL, top=0, pool=pool)
        part = judged(found, {}, truth, right)
        about = {"case": name, "seed": seed, "structure": structure or case.structure, "pool": size, "share": share}
        rows.append({**about, **part})
        called = {
            key: [round(x / max(sum(part["verdicts"][key]), 1), 2) for x in part["verdicts"][key]] for key in GROUPS
        }
        say(f"{name} {seed}: {size} inputs, {share:.3f} of the missing class: {called}")
    return rows


def main() -> None:
    """Run the draws that were asked for."""
    parser = arguments(__doc__, CASES, "pools", seeds=(423, 424, 425))
    given: argparse.Namespace = parser.parse_args()
    record = open_record(given.out, given.append, level=LEVEL, verdicts=VERDICTS)
    for name in given.cases:
        for seed in given.seeds:
            structure = given.structures[0] if given.structures else None
            for row in run_draw(name, seed, given.data, structure):
                put(record, row, ("case", "seed", "structure", "pool", "share"))
            save(given.out, record)


if __name__ == "__main__":
    main()
