"""UMAP projections of last layers, coloured by class, by HeC3 against Ho, and by HeC3.

Bank marketing (MLP), MNIST (MLP), Fashion-MNIST (CNN) and CIFAR-10 (ResNet-18), as in the appendix. `--only embed`
trains and fits where umap-learn is not installed, `--projection pca` does without it. The table says in numbers what
the eye sees: whether doubt lies where classes meet.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record, Run
from whence_paper.scores import auroc, spearman
from whence_paper.tables import Table, write_tables

from .cases import CASES, add_options, configuration, embedded, wanted
from .drawing import draw
from .embedding import Embedded, mixed, principal

BORDER = 0.2
"""Share of neighbours of other classes from which on a point lies where classes meet."""


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the cases, and of the projection."""
    add_options(parser)
    add = parser.add_argument
    add("--projection", choices=("umap", "pca"), default="umap", help="default umap, of the package umap-learn")
    add("--neighbours", type=int, default=15, help="of UMAP (default 15, the package's)")
    add("--only", choices=("embed", "all"), default="all", help="embed: train, fit and keep the embeddings, no more")


def project(points: Tensor, how: str, neighbours: int, seed: int) -> Tensor:
    """(n, 2) points in the plane."""
    if how == "pca":
        return (points - points.mean(0)) @ principal(points, 2)
    try:
        from umap import UMAP  # an extra, and slow to import
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"expected umap-learn for this projection; {error.name} is missing. Install it: pip install "
            "'whence[paper]'; or take --projection pca."
        ) from None
    made = UMAP(n_neighbors=neighbours, random_state=seed, n_jobs=1).fit_transform(points.numpy())
    return torch.from_numpy(made)


def judge(settings: Settings, name: str, seed: int) -> dict[str, Any]:
    """One projection, and where doubt lies."""
    found = embedded(name, settings, seed)
    plane = project(torch.cat([found.train, found.test]), settings.projection, settings.neighbours, seed)
    plane = (plane - plane.mean(0)) / plane.std(0)
    n = len(found.train)
    meets = mixed(found)
    scores = {"Ho": found.ho, "HeC3": found.hec3, "HeC3/Ho": found.hec3 / found.ho}
    wrong = found.predicted != found.test_labels
    return {
        "accuracy": float((~wrong).double().mean()),
        "border": int((meets >= BORDER).sum()),
        "border_auroc": {key: auroc(value, meets >= BORDER) for key, value in scores.items()},
        "wrong_auroc": {key: auroc(value, wrong) for key, value in scores.items()},
        "rank_correlation": spearman(found.ho, found.hec3),
        "train": {**_places(plane[:n]), "labels": found.train_labels.tolist()},
        "test": {**_places(plane[n:]), "labels": found.test_labels.tolist(), **_levels(found)},
    }


def _places(plane: Tensor) -> dict[str, list[float]]:
    return {side: [round(value, 2) for value in plane[:, column].tolist()] for column, side in enumerate("xy")}


def _levels(found: Embedded) -> dict[str, list[int]]:
    """Places of the test points among each other, in thousandths."""
    m = len(found.ho)
    order = {"ho": found.ho.argsort().argsort(), "hec3": found.hec3.argsort().argsort()}
    return {name: (value * 1000 // m).tolist() for name, value in order.items()}


def compute(settings: Settings, record: Record) -> None:
    """All cases."""
    for name in wanted(settings):
        for seed in settings.seeds:
            if settings.only == "embed":
                embedded(name, settings, seed)
                continue
            asked = {**configuration(name, settings, seed), "projection": settings.projection}
            run = record.once({**asked, "neighbours": settings.neighbours}, partial(judge, settings, name, seed))
            areas = run.results["border_auroc"]
            print(
                f"{name} {seed}: where classes meet " + " ".join(f"{k} {v:.3f}" for k, v in areas.items()), flush=True
            )


def show(settings: Settings, record: Record) -> list[Path]:
    """A figure a run, and a table of all."""
    runs = record.runs()
    if not runs:
        return []
    names = tuple(runs[0].results["border_auroc"])
    heads = ("network", "accuracy", "points where classes meet", *names, *(f"{name}, wrong" for name in names))
    title = "AUROC for test points where classes meet, and for wrong predictions"
    table = Table(title, (*heads, "rank correlation of Ho and HeC3"))
    for run in sorted(runs, key=lambda run: CASES.index(run.configuration["case"])):
        found, what = run.results, run.configuration
        areas = [*found["border_auroc"].values(), *found["wrong_auroc"].values(), found["rank_correlation"]]
        name = ", ".join(str(what[key]) for key in ("case", "optimiser") if key in what)
        name += f", seed {what['seed']}" if what["seed"] else ""
        table.add(name, f"{found['accuracy']:.3f}", str(found["border"]), *(f"{value:.3f}" for value in areas))
    written = write_tables(settings.out / f"{record.path.stem}.md", [table])
    return [*written, *(draw(run, settings.out / _file(record, run)) for run in runs)]


def _file(record: Record, run: Run) -> str:
    what = run.configuration
    how = "" if what["projection"] == "umap" else f"-{what['projection']}"
    how += "-adamw" if what.get("optimiser") == "adamw" else ""
    return f"{record.path.stem}{how}-{what['case']}-{what['seed']}.png"


def check(settings: Settings, record: Record) -> list[str]:
    """HeC3 is higher where classes meet, and by more than Ho is."""
    lost = []
    for run in record.runs():
        areas = run.results["border_auroc"]
        said = f"{run.configuration['case']}: where classes meet HeC3 is higher, AUROC {areas['HeC3']:.2f}"
        if areas["HeC3"] < 0.6:
            lost.append(f"{said}, expected 0.6 or more")
        if areas["HeC3"] < areas["Ho"]:
            lost.append(f"{said}, by more than Ho, {areas['Ho']:.2f}")
    return lost


EXPERIMENT = Experiment("umap", __doc__ or "", compute, show, check, options, runs=(1, 1))
main = EXPERIMENT.main

if __name__ == "__main__":
    main()
