"""The paper's three tables beside ours, in a few lines: `python -m whence_paper.summary results/paper`.

Writes `reproduction.md` into the folder of the records; `python -m whence_paper.pages README.md results/paper` puts it
into a page, between `<!-- reproduction -->` and `<!-- /reproduction -->`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from .cifar import table3_shown
from .images import table1, table2
from .records import Record, Run
from .tables import Table, write_tables

SCORES = ("Ho", "HeC3", "HeC3/Ho")
FASHION = {
    "network": "CNN 32-64-128-256 max",
    "size": "all",
    "optimiser": "adam",
    "schedule": "constant",
    "fit": "two-bases-whole",
}
SHOWN: dict[tuple[str, str], dict[str, Any]] = {
    ("table1", "mnist"): {"size": "all", "optimiser": "adamw", "schedule": "constant", "fit": "two-bases"},
    ("table2", "mnist"): {"size": "all", "optimiser": "adamw", "schedule": "constant", "fit": "two-bases"},
    ("table1", "fashion-mnist"): FASHION,
    ("table2", "fashion-mnist"): FASHION,
}
"""The runs that stand for a case, of all that its record has."""
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
METHODS = {
    "deep ensemble, variance": "deep ensemble",
    "Ho, EKFAC, all layers": "Ho, EKFAC",
    "HeC3, EKFAC, all layers": "HeC3, EKFAC",
    "Ho, dense, last layer": "Ho, last layer",
    "HeC3, dense, last layer": "HeC3, last layer",
    "margin": "margin of the output",
}
BEYOND = "hec3: margin over its error"


def pair(paper: str, ours: list[float]) -> str:
    """The paper's mean and ours; a dash for one that does not exist.

    Examples:
        >>> pair("0.92±0.02", [0.9, 0.92])
        '0.92, **0.91**'
    """
    return f"{paper.partition('±')[0] or '–'}, {f'**{fmean(ours):.2f}**' if ours else '–'}"


def draws(folder: Path, experiment: str, case: str) -> list[Run]:
    """The first five of a case."""
    runs = Record(folder / f"{experiment}.json", experiment).runs(case=case, **SHOWN[experiment, case])
    return [run for run in runs if run.configuration["seed"] < table1.DRAWS]


def sources(folder: Path) -> Table:
    """Tables 1 and 2."""
    table = Table(
        "Five draws of a noisy and a missing class: AUROC, the paper's, then ours",
        ("which test points?", *SCORES),
    )
    for case, name in TITLES.items():
        runs = draws(folder, "table1", case)
        for which, words in (("noisy", "of the class with random labels"), ("missing", "of the class left out")):
            ours = [[run.results[f"{which}_auroc"][score] for run in runs] for score in SCORES]
            table.add(f"{name}, {words}", *map(pair, table1.PAPER[case, which], ours))
    for case, name in TITLES.items():
        runs = draws(folder, "table2", case)
        size = SHOWN["table2", case]["size"]
        name += "" if size == "all" else f" ({size:,} images)"
        for which, words in (("clean", "put right by true labels"), ("add", "put right by adding the class")):
            ours = [[run.results[which]["auroc"][score] for run in runs] for score in SCORES]
            table.add(f"{name}, {words}", *map(pair, table2.PAPER[case, which], ours))
    return table


def mistakes(folder: Path) -> Table:
    """Table 3."""
    title = "Wrong predictions on CIFAR-10: AUROC, the paper's, then ours"
    table = Table(title, ("score", "ResNet-18", "ViT"))
    record, beyond = Record(folder / "table3.json", "table3"), Record(folder / "beyond.json", "beyond")
    columns, members = [], []
    for architecture, paper in table3_shown.PAPER.items():
        runs = table3_shown.alike(record.runs(architecture=architecture))
        areas = {name: values for name, values, _ in table3_shown.rows(runs)}
        members += [max(run.configuration.get("members", 0) for run in runs)] if runs else []
        column = [pair(paper.get(method, ""), areas.get(method, [])) for method in METHODS]
        recipe = {key: runs[0].configuration[key] for key in table3_shown.RECIPE} if runs else {}
        judged = table3_shown.main_fits(beyond.runs(architecture=architecture, **recipe), "EKFAC, all layers")
        columns.append([*column, pair("", [run.results["scores"][BEYOND][1] for run in judged])])
    first, *names = METHODS.values()
    names = [
        f"{first} of {' and '.join(dict.fromkeys(map(str, members)))}",
        *names,
        "margin over its standard error by HeC3",
    ]
    for row in zip(names, *columns, strict=True):
        table.add(*row)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Write the tables into the folder of the records."""
    [folder] = map(Path, sys.argv[1:] if arguments is None else arguments)
    write_tables(folder / "reproduction.md", [sources(folder), mistakes(folder)])


if __name__ == "__main__":
    main()
