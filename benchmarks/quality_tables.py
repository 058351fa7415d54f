"""Write the tables of `quality_peers`: who is best at what on the UCI sets and on images, with every run.

python -m benchmarks.quality_tables docs/benchmarks.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from .quality_winners import winners
from .tables import folded, made, rewrite, table

Runs = list[dict[str, Any]]
NOISES = {"own": "own noise", "held_out": "noise from held-out data"}
QUESTIONS = ("misclassified", "noisy", "missing", "outside")


def names(runs: Runs) -> list[str]:
    """Of all methods, in the order of the first run."""
    return list(dict.fromkeys(name for run in runs for name in run["methods"]))


def every(values: Iterable[float], digits: int = 2) -> str:
    """Mean, and the runs behind it."""
    kept = [f"{value:.{digits}f}" for value in values]
    if len(kept) < 2:
        return kept[0] if kept else "-"
    return f"{fmean(map(float, kept)):.{digits}f} ({' '.join(kept)})"


def summary(runs: Runs) -> str:
    """Means over all sets and splits; likelihoods relative to the network alone with noise from held-out data."""
    rows = []
    for name in names(runs):
        here = [run for run in runs if "failed" not in run["methods"].get(name, {"failed": ""})]
        if not here:
            continue
        for key, words in NOISES.items():
            found = [
                (run["methods"][name].get(key), run["methods"]["network alone"]["held_out"]["nll"]) for run in here
            ]
            if any(one is None for one, _ in found):
                continue
            gains = [one["nll"] - alone for one, alone in found if "nll" in one]
            cells = [f"{fmean(gains):+.2f}" if gains else "-"]
            cells += [f"{fmean(one[measure] for one, _ in found):.{digits}f}" for measure, digits in SHOWN]
            rows.append([name, words, *cells])
    head = "method | noise | NLL less network alone | calibration error | coverage of 95 % | width, sd of y"
    return table(head, rows) + gone(runs)


def gone(runs: Runs) -> str:
    """Which methods did not run, or not always, and why."""
    why: dict[str, list[str]] = {}
    for run in runs:
        for name, method in run["methods"].items():
            if "failed" in method:
                why.setdefault(name, []).append(method["failed"])
    parts = [
        f"{name}{'' if len(each) == len(runs) else f' in {len(each)} of {len(runs)} runs'} ({each[0]})"
        for name, each in why.items()
    ]
    return f"\n\nDid not run: {'; '.join(parts)}." if parts else ""


SHOWN = (("calibration", 3), ("coverage", 3), ("width", 2))


def by_set(runs: Runs) -> str:
    """Negative log-likelihoods and coverage of every run."""
    sets = list(dict.fromkeys(run["set"] for run in runs))
    rows = []
    for name in names(runs):
        for key, words in NOISES.items():
            cells = []
            for one in sets:
                found = [run["methods"].get(name, {}).get(key) for run in runs if run["set"] == one]
                cells.append(every(value["nll"] for value in found if value is not None and "nll" in value))
            if any(cell != "-" for cell in cells):
                rows.append([name, words, *cells])
    return table(f"method | noise | {' | '.join(sets)}", rows)


def areas(runs: Runs) -> str:
    """AUROC of every score for every question, every draw."""
    rows = []
    for name in names(runs):
        found = [run["methods"][name] for run in runs if "auroc" in run["methods"].get(name, {})]
        for score in found[0]["auroc"] if found else ():
            cells = [every(one["auroc"][score][question] for one in found) for question in QUESTIONS]
            rows.append([name, score, *cells])
    return table("method | score | misclassified | noisy class | missing class | other data set", rows) + gone(runs)


def probabilities(runs: Runs) -> str:
    """Accuracy, likelihood and calibration of probabilities; coverage and size of sets."""
    rows = []
    for name in names(runs):
        found = [run["methods"][name] for run in runs if "failed" not in run["methods"].get(name, {"failed": ""})]
        if found and ("nll" in found[0] or "coverage" in found[0]):
            cells = [every((one[key] for one in found if key in one), digits) for key, digits in JUDGED]
            rows.append([name, *cells])
    return table("method | accuracy | NLL | calibration error | coverage of 95 % sets | their size", rows)


JUDGED = (("accuracy", 3), ("nll", 3), ("ece", 3), ("coverage", 3), ("set_size", 2))


def quality_peers(record: dict[str, Any]) -> str:
    """All of it."""
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    parts = [f"{made(record)} {packages}. {record['cpu_s'] / 60:.0f} minutes of processor time."]
    head = "question | best of the peers | best of `whence` | network alone"
    parts += [
        "The best method of each side; rows where another library is ahead come first.",
        table(head, winners(record)),
    ]
    uci = record["uci"]
    if uci:
        splits = ", ".join(map(str, sorted({run["split"] for run in uci})))
        parts.append(folded(f"<b>UCI sets</b>, published splits {splits}: means over {len(uci)} runs", summary(uci)))
        parts.append(folded("<b>UCI sets</b>, negative log-likelihood: mean (every split)", by_set(uci)))
    for name in dict.fromkeys(run["set"] for run in record["images"]):
        runs = [run for run in record["images"] if run["set"] == name]
        about = f"<b>{name}</b>, {len(runs)} draws, {runs[0]['n']:,} training images: AUROC, mean (every draw)"
        parts.append(folded(about, areas(runs)))
        about = f"<b>{name}</b>, probabilities of ordinary points: mean (every draw)"
        parts.append(folded(about, probabilities(runs)))
    return "\n\n".join(parts)


TABLES = {"quality_peers": quality_peers}


def main() -> None:
    """Replace the tables of the page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
