"""Who is best at what, in the record of `quality_peers`: the best of the peers beside the best of `whence`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from . import shipped

Runs = list[dict[str, Any]]
Found = dict[str, float]
Question = tuple[str, Found, bool]
"""Words, the mean of each entrant, and whether larger is better."""


def means(runs: Runs, names: list[str], *keys: str) -> Found:
    """The mean over runs of each method that has a value under these keys in all of them."""
    found = {}
    for name in names:
        values = [_under(run["methods"].get(name), keys) for run in runs]
        if all(one is not None for one in values):
            found[name] = fmean(one for one in values if one is not None)
    return found


def _under(held: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        held = (held or {}).get(key)
    return held


def on_uci(runs: Runs) -> Iterator[Question]:
    """Likelihood and calibration, with either noise."""
    names = list(dict.fromkeys(name for run in runs for name in run["methods"]))
    tables = dict.fromkeys(run["set"] for run in runs)
    label = shipped.TABLE if list(tables) == [shipped.TABLE] else "UCI"
    for key, words in (("own", "without held-out data"), ("held_out", "with held-out data")):
        for measure, told in (("nll", "negative log-likelihood"), ("calibration", "calibration error")):
            found = means(runs, names, key, measure)
            yield f"{label}: {told}, {words}", found, False


def on_images(runs: Runs) -> Iterator[Question]:
    """AUROC of the best score of each method, and the quality of probabilities."""
    names = list(dict.fromkeys(name for run in runs for name in run["methods"]))
    kind = runs[0]["set"]
    for question in ("misclassified", "noisy", "missing", "outside"):
        found: Found = {}
        for name in names:
            areas = [run["methods"].get(name, {}).get("auroc") for run in runs]
            for score in areas[0] or () if all(areas) else ():  # of those that ran every time
                found[f"{name}: {score}"] = fmean(one[score][question] for one in areas if one)
        yield f"{kind}: AUROC, {question}", found, True
    for measure, told in (("nll", "negative log-likelihood"), ("ece", "calibration error")):
        yield f"{kind}: {told}", means(runs, names, measure), False


def winners(record: dict[str, Any]) -> list[list[str]]:
    """Rows: the question, the best peer, the best of `whence`, the network alone; where a peer wins first."""
    questions = list(on_uci(record["uci"])) if record["uci"] else []
    for name in dict.fromkeys(run["set"] for run in record["images"]):
        questions += on_images([run for run in record["images"] if run["set"] == name])
    rows = []
    for words, found, larger in questions:
        best = max if larger else min
        ours = {name: value for name, value in found.items() if name.startswith("whence")}
        alone = {name: value for name, value in found.items() if name.startswith("network alone")}
        peers = {name: value for name, value in found.items() if name not in ours and name not in alone}
        first, second = best(peers, key=lambda one: peers[one]), best(ours, key=lambda one: ours[one])
        lead = (peers[first] - ours[second]) * (1 if larger else -1)
        plain = f"{best(alone.values()):.3f}" if alone else "-"
        cells = [f"{first} {peers[first]:.3f}", f"{second.removeprefix('whence ')} {ours[second]:.3f}", plain]
        rows.append((lead, [words, *cells]))
    return [row for lead, row in sorted(rows, key=lambda one: -one[0])]
