"""How many labels are wrong in all: the estimate, confident learning, and the plain count of contradictions.

    python -m benchmarks.wrong_labels          # a few minutes on one core

Labels are changed to another class: at random, in one class only (up to half of it), or every second one in one place.
Probabilities are those of cross-validated logistic regression, so that the estimate alone is measured: it needs nothing
but out-of-sample probabilities. For each table and share of wrong labels: mean error of each estimate over the draws,
how many intervals hold the true share (and how many do once the other contradictions are added to their upper end),
their mean width, and in how many draws nothing is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from whence.influence.training import WrongLabels, wrong_labels

SHARES, DRAWS = (0.0, 0.02, 0.05, 0.1), 6
STRENGTHS = (0.003, 0.03, 0.3)
Table = tuple[np.ndarray, np.ndarray]


class Planted(NamedTuple):
    """One draw of wrong labels."""

    truth: float  # share of labels that are wrong
    estimate: WrongLabels
    confident_learning: float
    contradicted: float


def digits() -> Table:
    from sklearn.datasets import load_digits  # an extra

    return load_digits(return_X_y=True)  # type: ignore[no-any-return]


def breast_cancer() -> Table:
    from sklearn.datasets import load_breast_cancer  # an extra

    return load_breast_cancer(return_X_y=True)  # type: ignore[no-any-return]


def penguins() -> Table:
    """Three normal classes with means and deviations as those of the penguins."""
    generator = np.random.default_rng(0)
    means = np.array([[38.8, 18.3, 190, 3700], [48.8, 18.4, 196, 3733], [47.5, 15.0, 217, 5076]])
    deviations = np.array([[2.7, 1.2, 6.5, 458], [3.3, 1.1, 7.1, 384], [3.1, 1.0, 6.5, 504]])
    y = generator.choice(3, 344, p=[0.44, 0.2, 0.36])
    return means[y] + deviations[y] * generator.normal(size=(344, 4)), y


def diabetes() -> Table:
    """Above 140 or not: classes that overlap everywhere."""
    from sklearn.datasets import load_diabetes  # an extra

    x, y = load_diabetes(return_X_y=True)
    return x, (y > 140).astype(int)


TABLES: dict[str, Callable[[], Table]] = {
    "digits": digits,
    "breast cancer": breast_cancer,
    "penguins": penguins,
    "diabetes": diabetes,
}


def plant(table: Table, share: float, seed: int, where: str = "everywhere") -> Planted:
    """Change labels, predict all rows by models that did not see theirs, and estimate.

    Args:
        table: inputs and classes.
        share: of labels that are changed.
        seed: of the draw.
        where: "everywhere", "class" (all in one class), or "place" (every second one of the rows nearest to one).
    """
    x, y = table
    generator = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    wrong = generator.random(len(y)) < share
    if where != "everywhere":
        scaled = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
        at, many = generator.integers(len(y)), round(share * len(y))
        near = np.argsort(((scaled - scaled[at]) ** 2).sum(1))[: 2 * many]
        rows = near if where == "place" else np.flatnonzero(y == y[at])
        wrong = np.isin(np.arange(len(y)), generator.permutation(rows)[: min(many, len(rows) // 2)])
    labels = np.where(wrong, (y + generator.integers(1, classes, len(y))) % classes, y)
    p = min((out_of_sample(x, labels, strength, seed) for strength in STRENGTHS), key=lambda p: log_loss(p, labels))
    found = wrong_labels(labels, p.argmax(1), p.max(1), classes)
    return Planted(float(wrong.mean()), found, confident_learning(p, labels), float((p.argmax(1) != labels).mean()))


def out_of_sample(x: np.ndarray, labels: np.ndarray, strength: float, seed: int) -> np.ndarray:
    """(n, classes) probabilities by five-fold cross-validation."""
    # scikit-learn is an extra
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300))
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cross_val_predict(model, x, labels, cv=folds, method="predict_proba")  # type: ignore[no-any-return]


def log_loss(p: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.log(np.maximum(p[np.arange(len(labels)), labels], 1e-12)).mean())


def confident_learning(p: np.ndarray, labels: np.ndarray) -> float:
    """The share off the diagonal of the calibrated confident joint (Northcutt et al., 2021)."""
    classes = p.shape[1]
    thresholds = np.array([p[labels == one, one].mean() for one in range(classes)])
    above = np.where(p >= thresholds, p, -1.0)
    sure = above.max(1) >= 0
    joint = np.zeros((classes, classes))
    np.add.at(joint, (labels[sure], above.argmax(1)[sure]), 1)
    joint *= (np.bincount(labels, minlength=classes) / np.maximum(joint.sum(1), 1))[:, None]
    return float(1 - np.trace(joint) / joint.sum())


def line(draws: list[Planted]) -> list[Any]:
    """Silent draws, mean errors of the three estimates, intervals that hold the truth, and their mean width."""
    said = [(one, one.estimate) for one in draws if not one.estimate.unknown]
    error = np.mean([found.share - one.truth for one, found in said]) if said else np.nan
    width = np.mean([found.upper - found.lower for _, found in said]) if said else np.nan
    others = (
        np.mean([value - one.truth for one in draws for value in [getattr(one, name)]]) for name in Planted._fields[2:]
    )
    held = sum(found.lower <= one.truth <= found.upper for one, found in said)
    wider = sum(found.lower <= one.truth <= found.upper + found.overlap for one, found in said)
    return [len(draws) - len(said), error, *others, f"{held} ({wider}) of {len(said)}", width]


if __name__ == "__main__":
    print("| table | where | wrong | silent | error | confident learning | contradicted | intervals hold | width |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, where in product(TABLES, ("everywhere", "class", "place")):
        for share in SHARES if where == "everywhere" else SHARES[1:]:
            cells = line([plant(TABLES[name](), share, seed, where) for seed in range(DRAWS)])
            shown = [f"{cell:+.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
            print(f"| {name} | {where} | {share:g} | {' | '.join(shown)} |", flush=True)
