"""The tables of docs/sources.md, from the results.

python -m benchmarks.sources_tables results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .record import say
from .tables import table


def what_if_table(content: dict[str, Any]) -> str:
    """One row a case and kind of change, seeds listed."""
    heads = ["network", "change", "rank correlation, each seed", "slope", "explained", "of Ho", "of HeC3"]
    rows = []
    for case in dict.fromkeys(run["case"] for run in content["runs"]):
        runs = [run["kinds"] for run in content["runs"] if run["case"] == case]
        for kind in runs[0]:
            found = [run[kind] for run in runs]
            cells = [listed(found, key) for key in ("spearman", "slope", "explained", "spearman_ho", "spearman_hec3")]
            rows.append([case, kind, *cells])
    return table(" | ".join(heads), rows)


def listed(found: Sequence[dict[str, float]], key: str) -> str:
    """Each seed's number."""
    return " ".join(f"{one[key]:.2f}" for one in found if key in one) or "-"


def buy_table(content: dict[str, Any]) -> str:
    """Mean error after each round, and against how many seeds it is below random's on average over the rounds."""
    heads = [
        "data",
        "strategy",
        "labels to begin with",
        "after each round",
        "mean over rounds",
        "each seed",
        "below random",
    ]
    rows = []
    for case in dict.fromkeys(run["case"] for run in content["runs"]):
        runs = [run["labels_to_buy"] for run in content["runs"] if run["case"] == case]
        means = {name: torch.tensor([run[name] for run in runs]) for name in runs[0]}
        for name, errors in means.items():
            after, random = errors[:, 1:].mean(1), means["random"][:, 1:].mean(1)
            rows.append(
                [
                    case,
                    name,
                    f"{float(errors[:, 0].mean()):.3f}",
                    " ".join(f"{value:.3f}" for value in errors[:, 1:].mean(0).tolist()),
                    f"{float(after.mean()):.4f}",
                    " ".join(f"{value:.3f}" for value in after.tolist()),
                    "-" if name == "random" else f"{int((after < random).sum())} of {len(after)}",
                ]
            )
    return table(" | ".join(heads), rows)


def check_table(content: dict[str, Any]) -> str:
    """Errors after checking, and wrong labels found."""
    heads = [
        "data",
        "budget",
        "unchecked",
        "suggest",
        "loss",
        "random",
        "all correct",
        "found by suggest",
        "loss",
        "random",
    ]
    rows = []
    for case in dict.fromkeys(run["case"] for run in content["runs"]):
        runs = [run["labels_to_check"] for run in content["runs"] if run["case"] == case]
        for place in range(len(runs[0])):
            found = [run[place] for run in runs]
            cells = [f"{mean(one['nothing'] for one in found):.3f}"]
            cells += [f"{mean(one[name]['error'] for one in found):.3f}" for name in ("suggest", "loss", "random")]
            cells.append(f"{mean(one['everything'] for one in found):.3f}")
            cells += [
                f"{mean(one[name]['found'] for one in found):.1f} of {found[0]['wrong']}"
                for name in ("suggest", "loss", "random")
            ]
            rows.append([case, str(found[0]["budget"]), *cells])
    return table(" | ".join(heads), rows)


def mean(values: Iterable[float]) -> float:
    """Of some numbers."""
    listed_ = list(values)
    return sum(listed_) / len(listed_)


TABLES: dict[str, list[Callable[[dict[str, Any]], str]]] = {
    "what_if": [what_if_table],
    "suggest": [buy_table, check_table],
}


def main() -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, makers in TABLES.items():
        path = folder / f"{name}.json"
        if path.exists():
            content = json.loads(path.read_text())
            for make in makers:
                say(f"\n{name}\n\n{make(content)}")


if __name__ == "__main__":
    main()
