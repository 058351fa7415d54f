"""Do all structures tell the same story? Verdicts of each on the same networks, beside those of the exact curvature.

    python -m benchmarks.structures --data DIR --out results/structures.json

One class has random labels and another is missing (in the regression: noise grows in one half of the inputs' range and
another part of it is missing), so that every verdict occurs. Recorded for each structure: for which share of the test
points it gives the verdict of the exact one, how often each verdict falls, rank correlations of noise and scarcity with
those of the exact structure, and the share of predictions called confident that are right.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence.influence.explanation import VERDICTS

from . import networks, verdicts
from .data import batches, random_table, read_housing
from .record import save, say
from .scores import spearman
from .studied import open_record, options, put, read
from .training import train

STRUCTURES = ("exact", "core:size=1024", "ekfac", "sketch:size=1024", "exact@last_layer")
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Fitted:
    """A trained network, what it was trained on, and test points."""

    network: nn.Module
    loader: list[tuple[Tensor, Tensor]]
    tests: Tensor
    likelihood: str


CLASSIFIERS: dict[str, verdicts.Case] = {
    "digits": verdicts.Case("digits", 1200, 497, lambda k: networks.mlp(64, 32, 32, k), "MLP 64-32-32", 60, "exact"),
    "fashion-mnist": verdicts.Case(
        "fashion-mnist",
        3000,
        1000,
        lambda k: networks.cnn(k, (8, 16, 16)),
        "CNN of 8, 16, 16 channels",
        20,
        "exact",
    ),
}


def classifier(name: str, folder: Path | None, seed: int, device: str) -> Fitted:
    """Ten classes and cross-entropy, one class noisy, another missing."""
    case = CLASSIFIERS[name]
    task = verdicts.drawn(case, read(case.data, folder), seed)
    moved = verdicts.replace(
        task, **{part: getattr(task, part).to(device) for part in ("inputs", "targets", "test_inputs")}
    )
    network = verdicts.trained(case, moved, seed, device)
    loader = batches(moved.inputs, moved.targets.argmax(1), 500)
    return Fitted(network, loader, moved.test_inputs, "categorical")


def housing(name: str, folder: Path | None, seed: int, device: str) -> Fitted:
    """Prices of houses: labels of the western third are permuted, and the north is left out of the training set."""
    draw = torch.Generator().manual_seed(seed)
    inputs, targets = random_table(6000, seed) if folder is None else read_housing(folder)
    order = torch.randperm(len(inputs), generator=draw)[:6000]
    inputs, targets = inputs[order].to(device), targets[order].to(device)
    known, tests = inputs[:5000], inputs[5000:]
    latitude, longitude = known[:, 6], known[:, 7]
    here = latitude <= latitude.quantile(0.85)
    west = (longitude < longitude.quantile(1 / 3)) & here
    said = targets[:5000].clone()
    places = west.nonzero().squeeze(1)
    said[places] = said[places[torch.randperm(len(places), generator=draw).to(device)]]
    known, said = known[here][:2500], said[here][:2500]
    torch.manual_seed(seed)
    network = networks.tabular().to(device)
    train(network, known, said, epochs=60, seed=seed, rate=5e-3)
    return Fitted(network, batches(known, said, 500), tests, "gaussian")


CASES: dict[str, Callable[[str, Path | None, int, str], Fitted]] = {
    "digits": classifier,
    "fashion-mnist": classifier,
    "California housing": housing,
}


def explained(fitted: Fitted, text: str) -> whence.Explanation:
    """By one structure."""
    tracer = whence.fit(fitted.network, fitted.loader, likelihood=fitted.likelihood, progress=False, **options(text))
    return tracer.explain(list(fitted.tests.split(500)), top=1)


def codes(found: whence.Explanation) -> Tensor:
    """(m,) which verdict."""
    return torch.tensor([VERDICTS.index(one) for one in found.verdicts])


def compared(found: whence.Explanation, exact: whence.Explanation) -> dict[str, Any]:
    """How the verdicts and numbers of one structure agree with those of another."""
    return {
        "same_verdict": float((codes(found) == codes(exact)).double().mean()),
        "both_confident_or_not": float(((codes(found) == 0) == (codes(exact) == 0)).double().mean()),
        "verdicts": torch.bincount(codes(found), minlength=len(VERDICTS)).tolist(),
        "rank_noise": spearman(found.noise.cpu(), exact.noise.cpu()),
        "rank_scarcity": spearman(found.scarcity.cpu(), exact.scarcity.cpu()),
        "noise_limit": found.noise_limit,
        "notes": list(found.notes),
    }


def main() -> None:
    """Every case, draw and structure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with fashion-mnist/ and california-housing/")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[300, 301, 302])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/structures.json"))
    parser.add_argument("--append", action="store_true")
    given = parser.parse_args()
    record = open_record(given.out, given.append, verdicts=VERDICTS)
    for name in given.cases:
        for seed in given.seeds:
            fitted = CASES[name](name, given.data, seed, given.device)
            exact = explained(fitted, given.structures[0])
            for text in given.structures:
                row = compared(exact if text == given.structures[0] else explained(fitted, text), exact)
                about = {"case": name, "seed": seed, "structure": text, "parameters": networks.size(fitted.network)}
                put(record, {**about, "n": sum(len(x) for x, _ in fitted.loader), **row}, ("case", "seed", "structure"))
                save(given.out, record)
                say(name, seed, text, f"same {row['same_verdict']:.3f}", row["verdicts"], round(row["rank_noise"], 3))


if __name__ == "__main__":
    main()
