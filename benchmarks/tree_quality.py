"""Planted wrong labels, a noisy region and a left-out region on four tables: who finds them, trees, network, or peers.

    python -m benchmarks.tree_quality --data DIR --out results/tree_quality.json

`DIR` holds `california-housing/`, `bank-marketing/` and `uci/`; the digits are scikit-learn's. Two trainings for each
table and seed, of `HistGradientBoosting` and of the network of `whence table`:

- Wrong labels: 5 % of the training labels are wrong, another class or the target of another row. Training rows are
  ranked by `training_frame().suspicion`, and by cleanlab from out-of-sample predictions of the trees in five folds.
- Regions: of ten groups of similar rows, as k-means finds them, two are drawn. In one all labels are random, the other
  one is left out of the training. Held-out rows are ranked by `explain().noise` and by the cross-validated loss of the
  ten nearest training rows, for the noisy group; by `explain().scarcity`, an isolation forest and the distance of the
  ten nearest training rows, for the left-out one; and by `explain().source`, for which of both groups a row is in.
  Groups and distances have the same metric, which favours the distances.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor, IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import whence
from whence.tabular.files import as_text
from whence.tabular.fitted import fit_table, prepare

from .data import read_housing
from .record import failed, installed, save, say, surroundings

WRONG = 0.05
GROUPS, LEAST_GROUP = 10, 0.04
FIRST = 100
"""Suspects that are looked at."""
NEIGHBOURS = 10
HELD_OUT = 0.2
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Table:
    """A table, its target, and the trees for it."""

    x: pd.DataFrame
    y: Array
    trees: dict[str, Any]

    @property
    def classes(self) -> bool:
        """Whether the target is a label."""
        return self.y.dtype.kind in "OU"

    def boosting(self) -> Any:
        """Trees that are not fitted yet."""
        kind = HistGradientBoostingClassifier if self.classes else HistGradientBoostingRegressor
        return kind(early_stopping=False, random_state=0, **self.trees)


def california(data: Path) -> Table:
    """Prices, standardised like the features."""
    inputs, targets = read_housing(data)
    return Table(pd.DataFrame(inputs.numpy()).add_prefix("x"), targets[:, 0].double().numpy(), {"max_leaf_nodes": 16})


def bank(data: Path) -> Table:
    """Whether a client subscribed; without the duration of the call, which is known only after it."""
    raw = pd.read_csv(data / "bank-marketing" / "bank-full.csv.gz", sep=";").drop(columns="duration")
    x = raw.drop(columns="y")
    texts = x.select_dtypes(exclude="number").columns
    x = x.astype(dict.fromkeys(texts, "category"))
    return Table(x, raw["y"].to_numpy(object), {"max_leaf_nodes": 16})


def power_plant(data: Path) -> Table:
    """Power of a plant by the weather."""
    raw = np.load(data / "uci" / "power-plant.npz")
    return Table(pd.DataFrame(raw["X"]).add_prefix("x"), raw["y"].ravel(), {"max_leaf_nodes": 16})


def digits(data: Path) -> Table:
    """Ten classes: fewer and smaller trees for each."""
    raw = load_digits()
    labels = np.array([f"digit {one}" for one in raw.target], dtype=object)
    x = pd.DataFrame(raw.data).add_prefix("pixel ")
    return Table(x, labels, {"max_leaf_nodes": 8, "max_iter": 20, "learning_rate": 0.3})


TABLES: dict[str, Callable[[Path], Table]] = {
    "California housing": california,
    "bank marketing": bank,
    "power plant": power_plant,
    "digits": digits,
}


def wrong_labels(y: Array, classes: bool, seed: int) -> tuple[Array, Array]:
    """Labels of which 5 % are wrong, and which: another class, or the target of another row."""
    draw = np.random.default_rng(seed)
    wrong = np.zeros(len(y), dtype=bool)
    wrong[draw.permutation(len(y))[: round(WRONG * len(y))]] = True
    labels = y.copy()
    if classes:
        names, codes = np.unique(y.astype(str), return_inverse=True)
        labels[wrong] = names[(codes[wrong] + draw.integers(1, len(names), wrong.sum())) % len(names)]
    else:
        labels[wrong] = y[draw.integers(0, len(y), wrong.sum())]
    return labels, wrong


def random_labels(y: Array, where: Array, classes: bool, seed: int) -> Array:
    """Labels that are random in a region: any class, or the target of any row."""
    draw = np.random.default_rng(seed)
    labels = y.copy()
    labels[where] = draw.choice(np.unique(y.astype(str)) if classes else y, where.sum())
    return labels


def regions(points: Array, seed: int) -> tuple[Array, Array]:
    """Two groups of similar points, of ten that k-means finds; those of fewer than 4 % of the points are not drawn."""
    groups = KMeans(GROUPS, random_state=seed).fit_predict(points)
    large = np.flatnonzero(np.bincount(groups) >= LEAST_GROUP * len(points))
    first, second = np.random.default_rng(seed).choice(large, 2, replace=False)
    return groups == first, groups == second


def encoded(x: pd.DataFrame) -> Array:
    """Numbers in standard deviations, and categories as zeros and ones: points for distances."""
    numbers = make_column_selector(dtype_include="number")
    texts = make_column_selector(dtype_exclude="number")
    return np.asarray(
        make_column_transformer((StandardScaler(), numbers), (OneHotEncoder(sparse_output=False), texts)).fit_transform(
            x
        )
    )


def out_of_sample(table: Table, x: pd.DataFrame, labels: Array) -> Array:
    """(n,) predictions, or (n, classes) probabilities, in five folds."""
    method = "predict_proba" if table.classes else "predict"
    return np.asarray(cross_val_predict(table.boosting(), x, labels, cv=5, method=method))


def cleanlab_scores(table: Table, labels: Array, outside: Array) -> dict[str, Array]:
    """High for doubtful labels."""
    if table.classes:
        from cleanlab.rank import get_label_quality_scores  # a peer, present or not

        codes = np.unique(labels.astype(str), return_inverse=True)[1]
        methods = ("self_confidence", "normalized_margin")
        return {f"cleanlab {how}": -get_label_quality_scores(codes, outside, method=how) for how in methods}
    from cleanlab.regression.rank import get_label_quality_scores as regression_scores

    return {f"cleanlab {how}": -regression_scores(labels, outside, method=how) for how in ("outre", "residual")}


def losses(table: Table, labels: Array, outside: Array) -> Array:
    """(n,) squared errors, or cross-entropies, of out-of-sample predictions."""
    if not table.classes:
        return (labels - outside) ** 2
    codes = np.unique(labels.astype(str), return_inverse=True)[1]
    return -np.log(np.maximum(outside[np.arange(len(codes)), codes], 1e-12))


def traced_trees(table: Table, x: pd.DataFrame, labels: Array) -> tuple[whence.Tracer, Callable[[pd.DataFrame], Any]]:
    """A tracer of trees, and what it takes for rows."""
    return whence.fit(table.boosting().fit(x, labels), (x, labels), progress=False), lambda rows: rows


def traced_network(table: Table, x: pd.DataFrame, labels: Array) -> tuple[whence.Tracer, Callable[[pd.DataFrame], Any]]:
    """A tracer of the network of `whence table`, and what it takes for rows."""
    fitted = fit_table(
        prepare(texts(x, labels), "target", test=0.0, task="classification" if table.classes else "regression"),
        learner="network",
    )
    return fitted.tracer, lambda rows: fitted.model.encode(texts(rows, np.full(len(rows), "")))


def texts(x: pd.DataFrame, labels: Array) -> pd.DataFrame:
    """The table as `whence table` reads it."""
    return as_text(x.assign(target=labels).set_axis(np.arange(len(x)) + 1))


MODELS = {"trees": traced_trees, "network": traced_network}


def found_wrong_labels(table: Table, x: pd.DataFrame, y: Array, seed: int) -> dict[str, Any]:
    """Precision among the first suspects, and AUROC, of every score."""
    labels, wrong = wrong_labels(y, table.classes, seed)
    outside = out_of_sample(table, x, labels)
    gone: dict[str, str] = {}
    scores: dict[str, Array] = {}
    for name, traced in MODELS.items():
        tracer, _ = traced(table, x, labels)
        scores[f"whence, {name}"] = tracer.training_frame()["suspicion"].to_numpy()
    try:
        scores |= cleanlab_scores(table, labels, outside)
    except Exception as error:  # a peer that fails is part of the result
        gone["cleanlab"] = failed(error)["failed"]
    scores["loss, out of sample"] = losses(table, labels, outside)
    return {
        "rows": len(labels),
        "wrong": int(wrong.sum()),
        "precision": {name: float(wrong[np.argsort(-score)[:FIRST]].mean()) for name, score in scores.items()},
        "auroc": {name: float(roc_auc_score(wrong, score)) for name, score in scores.items()},
        "did_not_run": gone,
    }


def found_regions(table: Table, x: pd.DataFrame, y: Array, held_out: Array, seed: int) -> dict[str, Any]:
    """AUROC of every score for held-out rows of either region against ordinary ones, and of one against the other."""
    points = encoded(x)
    noisy, left_out = regions(points, seed)
    train = ~held_out & ~left_out
    labels = random_labels(y, noisy, table.classes, seed)[train]
    noise: dict[str, Array] = {}
    scarcity: dict[str, Array] = {}
    apart: dict[str, Array] = {}
    for name, traced in MODELS.items():
        tracer, rows = traced(table, x[train], labels)
        explained = tracer.explain(rows(x[held_out]))
        noise[f"whence, {name}"] = explained.noise.numpy()
        scarcity[f"whence, {name}"] = explained.scarcity.numpy()
        apart[f"whence, {name}"] = explained.source.numpy()
    distance, near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(points[train]).kneighbors(points[held_out])
    noise["loss of near rows, out of sample"] = losses(table, labels, out_of_sample(table, x[train], labels))[
        near
    ].mean(1)
    scarcity["distance of near rows"] = distance.mean(1)
    scarcity["isolation forest"] = -IsolationForest(random_state=0).fit(points[train]).score_samples(points[held_out])
    noisy, left_out = noisy[held_out], left_out[held_out]

    def aurocs(scores: dict[str, Array], inside: Array, others: Array) -> dict[str, float]:
        rows = inside | others
        return {name: float(roc_auc_score(inside[rows], score[rows])) for name, score in scores.items()}

    ordinary = ~noisy & ~left_out
    return {
        "rows": int(train.sum()),
        "held_out": int(held_out.sum()),
        "noise": aurocs(noise, noisy, ordinary),
        "scarcity": aurocs(scarcity, left_out, ordinary),
        "noisy against left out": aurocs(apart, noisy, left_out),
    }


def measure(table: Table, seed: int, rows: int) -> dict[str, Any]:
    """Both trainings of one draw of rows."""
    size = round(rows / (1 - HELD_OUT))
    chosen = np.random.default_rng(seed).permutation(len(table.y))[:size]
    x, y = table.x.iloc[chosen].reset_index(drop=True), table.y[chosen]
    held_out = np.arange(len(y)) >= round((1 - HELD_OUT) * len(y))
    start = time.process_time()
    return {
        "wrong labels": found_wrong_labels(table, x[~held_out], y[~held_out], seed),
        "regions": found_regions(table, x, y, held_out, seed),
        "cpu_s": time.process_time() - start,
    }


def main() -> None:
    """Run every table with every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", type=int, default=2000, help="training rows, of tables that have as many")
    parser.add_argument("--out", type=Path, default=Path("results/tree_quality.json"))
    given = parser.parse_args()
    settings = {"wrong": WRONG, "groups": GROUPS, "first": FIRST, "cleanlab": installed("cleanlab")}
    record: dict[str, Any] = {**surroundings(), **settings, "scikit-learn": installed("scikit-learn"), "rows": []}
    for name in given.tables:
        table = TABLES[name](given.data)
        for seed in given.seeds:
            row = {"table": name, "seed": seed, **measure(table, seed, given.rows)}
            record["rows"].append(row)
            save(given.out, record)
            say(f"{name}, seed {seed}, {row['cpu_s']:.0f} s")
            say(f"  wrong labels: {row['wrong labels']}")
            say(f"  regions: {row['regions']}")


if __name__ == "__main__":
    main()
