"""Table 3 from its record: AUROC and seconds of every method, and every run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from whence_paper.experiment import Settings
from whence_paper.records import Record, Run
from whence_paper.tables import Table, mean_and_sd, write_tables

PAPER = {
    "resnet": {
        "deep ensemble, variance": "0.88±0.00",
        "Ho, EKFAC, all layers": "0.85±0.00",
        "HeC3, EKFAC, all layers": "0.86±0.00",
        "Ho, dense, last layer": "0.67±0.03",
        "HeC3, dense, last layer": "0.82±0.01",
    },
    "vit": {
        "deep ensemble, variance": "0.80±0.01",
        "Ho, EKFAC, all layers": "0.75±0.01",
        "HeC3, EKFAC, all layers": "0.75±0.01",
        "Ho, dense, last layer": "0.68±0.02",
        "HeC3, dense, last layer": "0.71±0.02",
    },
}


RECIPE = ("size", "epochs", "rate", "weight_decay", "batch", "shift", "mirror", "constant", "loss")


def alike(runs: list[Run]) -> list[Run]:
    """Those whose networks were trained like most of the networks that were trained by squared error, seed by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(str([run.configuration[key] for key in RECIPE]), []).append(run)
    plain = [some for some in found.values() if some[0].configuration["loss"] == "squared error"]
    most = max(plain, key=lambda some: sum(run.configuration["kind"] == "network" for run in some), default=[])
    return sorted(most, key=lambda run: int(run.configuration["seed"]))


def main_fits(runs: list[Run], way: str) -> list[Run]:
    """Fits at the usual lambda: that of most of them; where two are as frequent, the one on more examples."""
    fits = [run for run in runs if run.configuration["kind"] == "fit" and run.configuration["way"] == way]
    found = Counter((run.configuration["fit size"], run.configuration["ridge share"]) for run in fits)
    usual = max(found, key=lambda one: (found[one], one), default=None)
    return [run for run in fits if (run.configuration["fit size"], run.configuration["ridge share"]) == usual]


def rows(runs: list[Run]) -> list[tuple[str, list[float], float]]:
    """Method, AUROC of every run, and seconds of the fastest, times their number for an ensemble.

    A first run also warms a machine up, and some had to share theirs: the fastest tells what the method takes.
    """
    networks = [run for run in runs if run.configuration["kind"] == "network"]
    ensembles = [run for run in runs if run.configuration["kind"] == "ensemble"]
    training = [run.results["train_s"] for run in networks]
    found: list[tuple[str, list[float], float]] = []
    for run in sorted(ensembles, key=lambda run: int(run.configuration["members"]))[-1:]:
        for name, words in (("ensemble variance", "variance"), ("ensemble margin", "margin of the mean")):
            seconds = min(training) * run.configuration["members"]
            found.append((f"deep ensemble, {words}", [run.results["auroc"][name]], seconds))
            alone = [one[name] for one in run.results["auroc_members"]]
            found.append((f"deep ensemble, {words}, for a member's mistakes", alone, seconds))
    ways = dict.fromkeys(run.configuration["way"] for run in runs if run.configuration["kind"] == "fit")
    for way in ways:
        fits = main_fits(runs, way)
        seconds = min(run.results["fit_s"] + run.results["predict_s"] for run in fits)
        for estimator, words in (("ho", "Ho"), ("hec3", "HeC3")):
            areas = [run.results["auroc"][estimator]["sum"] for run in fits]
            found.append((f"{words}, {way}", areas, seconds))
    plain = {name: [run.results["auroc"][name] for run in networks] for name in ("margin", "largest output", "entropy")}
    return [*found, *((name, areas, 0.0) for name, areas in plain.items() if areas)]


def variants(runs: list[Run]) -> Table:
    """Every score that a fit gives, for every fit."""
    fits = [run for run in runs if run.configuration["kind"] == "fit"]
    names = list(fits[0].results["auroc"]["hec3"])
    table = Table(
        f"{fits[0].configuration['network']}: every score of every fit",
        ("network", "way", "loss", "lambda / n", "n", "estimator", *names),
    )
    for run in fits:
        about = run.configuration
        head = (str(about["seed"]), about["way"], about["loss"], f"{about['ridge share']:g}", str(about["fit size"]))
        for estimator, areas in run.results["auroc"].items():
            table.add(*head, estimator, *(f"{areas[name]:.3f}" if name in areas else "" for name in names))
    return table


def accuracies(runs: list[Run]) -> str:
    """How many networks there are and how well they do; nothing where a record has fits alone (`--only fit`)."""
    networks = [run.results for run in runs if run.configuration["kind"] == "network"]
    if not networks:
        return ""
    right, seen = (mean_and_sd([one[name] for one in networks]) for name in ("accuracy", "training_accuracy"))
    return f", {len(networks)} networks, accuracy {right} (training {seen})"


def show(settings: Settings, record: Record) -> list[Path]:
    """The paper's table with costs, then every score of every fit."""
    tables = []
    for architecture in ("resnet", "vit"):
        runs = record.runs(architecture=architecture)
        plain = alike(runs)
        if not plain:
            continue
        title = f"{plain[0].configuration['network']}{accuracies(plain)}: AUROC for wrong predictions"
        table = Table(title, ("method", "paper", "mean ± sd", "runs", "seconds"))
        for name, areas, seconds in rows(plain):
            each = " ".join(f"{area:.3f}" for area in areas)
            table.add(name, PAPER[architecture].get(name, ""), mean_and_sd(areas), each, f"{seconds:.1f}")
        tables.append(table)
        if any(run.configuration["kind"] == "fit" for run in runs):
            tables.append(variants(runs))
    return write_tables(settings.out / f"{record.path.stem}.md", tables)


def check(settings: Settings, record: Record) -> list[str]:
    """HeC3 from one network tells wrong predictions; the ensemble does at least nearly as well."""
    lost = []
    for architecture in ("resnet", "vit"):
        runs = alike(record.runs(architecture=architecture))
        found: dict[str, Any] = {name: fmean(areas) for name, areas, _ in rows(runs) if areas}
        hec3 = found.get("HeC3, EKFAC, all layers")
        if hec3 is None:
            continue
        if hec3 < 0.6:
            lost.append(f"{architecture}: HeC3 tells wrong predictions, AUROC {hec3:.2f}, expected 0.6 or more")
        together = found.get("deep ensemble, variance")
        if together is not None and together < hec3 - 0.1:
            lost.append(f"{architecture}: an ensemble does as well, {together:.2f} to {hec3:.2f}")
        if (
            "HeC3, dense, last layer" in found
            and found["HeC3, dense, last layer"] < found["Ho, dense, last layer"] - 0.02
        ):
            lost.append(f"{architecture}: on the last layer HeC3 is more robust than Ho")
    return lost
