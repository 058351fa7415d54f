"""How well any combination of scores tells noisy, missing and ordinary points apart, if it learns from other data sets.

    python -m benchmarks.verdicts --ranks FOLDER ...
    python -m benchmarks.learned_scores FOLDER --out results/learned_scores.json

A classifier (gradient boosting, and a logistic regression on ranks and their squares) is given the ranks of the test
points by all scores, ours and those that do not use whence, with the truth, of all data sets but one. It is judged on
the draws of that one (AUROC). If it is not better than a single score, the scores hold no more that is true on every
data set, and a better rule needs other information. *Same draw* is the boosting that learned from other test points of
the same draw: what the scores hold if the truth about this network's points were known.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from .record import save, say, surroundings
from .scores import auroc

SCORES = (
    *("disagreement", "ambiguity", "scarcity", "energy", "margin"),
    *("kNN label entropy", "kNN residual", "kNN distance", "DDU", "Mahalanobis"),
)
CONTRASTS = {"missing, rest": ("missing", ("right", "wrong")), "noisy, missing": ("noisy", ("missing",))}
BOOSTING = HistGradientBoostingClassifier(max_depth=4, max_iter=150, learning_rate=0.05, random_state=0)
MOST = 2000
"""Points of one draw, at random, that a classifier learns from."""


def points(draw: dict[str, Any], contrast: str) -> tuple[Any, Any]:
    """Ranks (m, scores) of the points of a contrast, from zero to one, and which belong to its first group (m,)."""
    first, rest = CONTRASTS[contrast]
    own = draw["truth"][first]
    chosen = own | torch.stack([draw["truth"][group] for group in rest]).any(0)
    ranks = torch.stack([draw["ranks"][name] for name in SCORES], 1).double() / len(own)
    return ranks[chosen].numpy(), own[chosen].numpy()


def family(case: str) -> str:
    """The data set of a case: what is learned on one of its networks may hold for the others."""
    return case.split(",")[0]


def learned(draws: list[dict[str, Any]], contrast: str) -> dict[str, Any]:
    """Classifiers that learned from some draws, each of which counts alike."""
    random = np.random.default_rng(0)
    inputs, truth, weights = [], [], []
    for draw in draws:
        x, y = points(draw, contrast)
        some = random.permutation(len(y))[:MOST]
        inputs.append(x[some])
        truth.append(y[some])
        weights.append(np.full(len(some), 1000.0 / len(some)))
    x, y, w = (np.concatenate(parts) for parts in (inputs, truth, weights))
    logistic = make_pipeline(PolynomialFeatures(2), LogisticRegression(max_iter=2000))
    return {
        "boosting": clone(BOOSTING).fit(x, y, sample_weight=w),
        "logistic": logistic.fit(x, y, logisticregression__sample_weight=w),
    }


def compare(draws: list[dict[str, Any]], contrast: str) -> list[dict[str, Any]]:
    """Areas of the learned combinations and of every single score, a row for each draw."""
    rows = []
    for left_out in sorted({family(draw["case"]) for draw in draws}):
        models = learned([draw for draw in draws if family(draw["case"]) != left_out], contrast)
        for draw in draws:
            if family(draw["case"]) != left_out:
                continue
            x, y = points(draw, contrast)
            truth = torch.from_numpy(y)
            guesses = {name: model.predict_proba(x)[:, 1] for name, model in models.items()}
            guesses["same draw"] = cross_val_predict(BOOSTING, x, y, cv=5, method="predict_proba")[:, 1]
            found = {name: auroc(torch.from_numpy(guess), truth) for name, guess in guesses.items()}
            chosen = draw["truth"][CONTRASTS[contrast][0]].clone()
            for group in CONTRASTS[contrast][1]:
                chosen |= draw["truth"][group]
            found |= {name: auroc(ranks[chosen].double(), truth) for name, ranks in draw["ranks"].items()}
            rows.append({"case": draw["case"], "seed": draw["seed"], "contrast": contrast, "auroc": found})
    return rows


def main() -> None:
    """Learn from the ranks in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/learned_scores.json"))
    given = parser.parse_args()
    draws = [torch.load(path, weights_only=True) for folder in given.folders for path in sorted(folder.glob("*.pt"))]
    if len({family(draw["case"]) for draw in draws}) < 2:
        parser.error("expected draws of two data sets or more, so that one can be left out.")
    rows = [row for contrast in CONTRASTS for row in compare(draws, contrast)]
    save(given.out, {**surroundings(), "scores": SCORES, "rows": rows})
    means: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, value in row["auroc"].items():
            means[row["contrast"], row["case"]][name].append(value)
    for (contrast, case), areas in means.items():
        say(f"{contrast}, {case}: " + ", ".join(f"{name} {np.mean(found):.3f}" for name, found in areas.items()))


if __name__ == "__main__":
    main()
