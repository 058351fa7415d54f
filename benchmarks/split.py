"""Noise apart from design, on simulations where both parts are known.

    python -m benchmarks.split --out results/split.json

A problem draws inputs and labels again and again. Truth, at fixed test points: the noise part is the variance of the
prediction over new labels at the same inputs, averaged over inputs; the design part is the variance over inputs of its
mean over labels. Estimates: `Tracer.split` on single draws. Sums over the test points are reported, every draw listed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .record import measured, save, say, surroundings
from .split_problems import Classes, Linear, Problem, SmallNetwork

SEED = 20_000
"""Published draws; development used seeds below 10."""


def settings() -> list[tuple[Problem, int | None, int]]:
    """(problem, neighbours, draws)."""
    found: list[tuple[Problem, int | None, int]] = []
    three = ("noise", "design", "both")
    for n, inputs, draws in ((50, 1, 100), (200, 1, 100), (50, 5, 100), (200, 5, 100), (500, 5, 40), (200, 10, 100)):
        found += [(Linear(name, n, inputs), None, draws) for name in three]
    found += [(Linear("both", 200, 1, ridge=20.0), None, 100)]
    found += [(Linear("rough", 200, inputs), None, 100) for inputs in (1, 5)]
    found += [(Classes(name, 300), None, 100) for name in three]
    found += [(SmallNetwork(name, 200), None, 100) for name in three]
    for inputs, count in ((1, 1), (1, 4), (1, 16), (5, 1), (5, 4), (5, 16)):
        found += [(Linear(name, 200, inputs), count, 100) for name in three]
    return found


def measure(problem: Problem, neighbours: int | None, draws: int, seed: int) -> dict[str, Any]:
    """Truth, and estimates on single draws."""
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    noise, design = problem.truth(generator)
    total = float((noise + design).sum())
    listed, errors = [], []
    for _ in range(draws):
        found = problem.tracer(generator).split(problem.points, neighbours=neighbours)
        parts = [float(part.sum()) for part in (found.hec3, found.noise, found.design)]
        listed.append([part / total for part in parts])
        errors.append(found.design_share - design / (noise + design))
    table = torch.tensor(listed, dtype=torch.float64)
    shares = table[:, 2] / (table[:, 1] + table[:, 2])
    return {
        "problem": str(problem),
        **problem.options(),
        "neighbours": neighbours or "all, kriging",
        "draws": draws,
        "true": {"noise": float(noise.sum()) / total, "design": float(design.sum()) / total},
        "mean": _named(table.mean(0)),
        "sd": _named(table.std(0)),
        "share": {"true": float(design.sum()) / total, **_spread(shares)},
        "share_error_at_single_points": float(torch.stack(errors).abs().mean()),
        "seconds": round(time.perf_counter() - start, 1),
        "every_draw": [[round(value, 4) for value in row] for row in listed],
    }


def _named(values: Tensor) -> dict[str, float]:
    return dict(zip(("hec3", "noise", "design"), values.tolist(), strict=True))


def _spread(values: Tensor) -> dict[str, float]:
    low, high = values.quantile(torch.tensor([0.1, 0.9], dtype=values.dtype)).tolist()
    return {"mean": float(values.mean()), "sd": float(values.std()), "low": low, "high": high}


def main() -> None:
    """Measure all settings, or those whose names contain a word, and keep what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="settings whose names contain this")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--draws", type=int, help="instead of those of each setting")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after these; run again")
    asked = parser.parse_args()
    rows, start = measured(asked.out, "settings", seed=asked.seed), time.perf_counter()
    done = {(row["problem"], row["neighbours"]) for row in rows}
    for number, (problem, neighbours, draws) in enumerate(settings()):
        name = f"{problem}, neighbours {neighbours or 'kriging'}"
        if asked.only not in name or (str(problem), neighbours or "all, kriging") in done:
            continue
        if time.perf_counter() - start > 60 * asked.minutes:
            say("stopped: run again for the rest")
            break
        rows.append(measure(problem, neighbours, asked.draws or draws, asked.seed + number))
        row = rows[-1]
        say(
            f"{name}: share {row['share']['true']:.2f} found {row['share']['mean']:.2f} +- {row['share']['sd']:.2f}; "
            f"of the true variance HeC3 {row['mean']['hec3']:.2f}, noise {row['mean']['noise']:.2f} "
            f"({row['true']['noise']:.2f}), design {row['mean']['design']:.2f} ({row['true']['design']:.2f}); "
            f"{row['seconds']} s"
        )
        save(asked.out, {"surroundings": surroundings(), "seed": asked.seed, "settings": rows})


if __name__ == "__main__":
    main()
