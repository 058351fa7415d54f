"""Intervals and accuracy of `whence table` on held-out rows: coverage by verdict, widths, and which model was taken.

    python -m benchmarks.table_intervals --data DIR --out results/table_intervals.json

DIR holds `uci/*.npz`, `california-housing/cal_housing.csv.gz` and `bank-marketing/bank-full.csv.gz`; other tables come
from scikit-learn and statsmodels, or are drawn. `--csv NAME=PATH:TARGET` adds a table of your own. What the record
already has is not measured again.

Recorded for each table and seed: the model that was taken and the validation errors of both; R2 or accuracy, beside
that of scikit-learn's HistGradientBoosting with its own settings on the same rows; for amounts the share of held-out
rows inside their 95 % intervals, overall and by verdict, with mean widths, beside a plain conformal interval: the same
model, the same validation errors, one width for all rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from statsmodels.datasets import fair, randhie

from whence.influence.explanation import VERDICTS
from whence.influence.intervals import conformal_quantile
from whence.tabular.files import as_text
from whence.tabular.fitted import FittedTable, Prepared, fit_table, prepare
from whence.tabular.predictions import RowPredictions, predict_rows

from .record import measured, save, say, surroundings

UCI = {"boston": "bostonHousing", "concrete": "concrete", "power plant": "power-plant", "wine": "wine-quality-red"}
UCI["yacht"] = "yacht"
Loaded = tuple[pd.DataFrame, str]


def uci(folder: Path, name: str) -> Loaded:
    """One of the UCI tables."""
    with np.load(folder / "uci" / f"{name}.npz") as found:
        return pd.DataFrame(found["X"]).add_prefix("x").assign(y=found["y"]), "y"


def growing_noise() -> Loaded:
    """1,500 rows whose noise grows with the first column, by a factor of e^.8 for each standard deviation."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1500, 4))
    y = 2 * np.sin(x[:, 1]) + x[:, 2] + 0.5 * np.exp(0.8 * x[:, 0]) * draw.normal(size=1500)
    return pd.DataFrame(x).add_prefix("x").assign(y=y), "y"


def grid() -> Loaded:
    """768 rows of a designed experiment, as the energy data of UCI are: few levels a column, little noise."""
    draw = np.random.default_rng(3)
    levels = [(0.62, 0.66, 0.71, 0.76, 0.79, 0.86), (245, 294, 318), (3.5, 7.0), (2, 3, 4, 5), (0, 0.1, 0.25, 0.4)]
    cells = np.stack(np.meshgrid(*levels, np.arange(4), indexing="ij"), -1).reshape(-1, 6)
    some = pd.DataFrame(cells[draw.permutation(len(cells))[:768]], columns=list("abcdef"))
    mean = 10 + 20 * (some.c == 7) + 30 * (some.a - 0.6) ** 2 * some.c + 8 * some.e * (1 + 0.2 * np.sin(some.f))
    return some.assign(y=mean + 0.01 * (some.b - 290) + 0.3 * (1 + 5 * some.e) * draw.normal(size=768)), "y"


def tables(folder: Path, own: list[str]) -> dict[str, Callable[[], Loaded]]:
    """Tables by name."""
    found: dict[str, Callable[[], Loaded]] = {
        name: (lambda file=file: uci(folder, file))  # type: ignore[misc]
        for name, file in UCI.items()
    }
    housing, bank = folder / "california-housing" / "cal_housing.csv.gz", folder / "bank-marketing" / "bank-full.csv.gz"
    cancer = load_breast_cancer(as_frame=True).frame
    found |= {
        "California housing": lambda: (pd.read_csv(housing), "median_house_value"),
        "bank marketing": lambda: (pd.read_csv(bank, sep=";").drop(columns="duration"), "y"),
        "diabetes": lambda: (load_diabetes(as_frame=True).frame, "target"),
        "cancer": lambda: (cancer.assign(target=np.where(cancer.target == 1, "benign", "malignant")), "target"),
        "fair": lambda: (fair.load_pandas().data, "affairs"),
        "doctor visits": lambda: (randhie.load_pandas().data, "mdvis"),
        "growing noise": growing_noise,
        "grid": grid,
    }
    for one in own:
        name, _, rest = one.partition("=")
        path, _, target = rest.rpartition(":")
        found[name] = lambda path=path, target=target: (pd.read_csv(path), target)  # type: ignore[misc]
    return found


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    """As `whence table` reads it from a file."""
    return as_text(frame.rename(columns=str).set_axis(np.arange(len(frame)) + 1))


def boosting(prepared: Prepared) -> float:
    """R2 or accuracy of HistGradientBoosting as it comes, on the same rows."""
    model = replace(prepared.model, learner="trees")
    x, y, split = model.encode(prepared.frame).numpy(), prepared.values, prepared.split
    categories = np.arange(x.shape[1]) < sum(column.kind == "category" for column in model.columns)
    kind = HistGradientBoostingClassifier if model.target.classes else HistGradientBoostingRegressor
    found = kind(categorical_features=categories, random_state=0).fit(x[split.train], y[split.train])
    return float(found.score(x[split.test], y[split.test]))


def coverage(predictions: RowPredictions, fitted: FittedTable) -> dict[str, Any]:
    """Shares of rows inside their intervals and mean widths, by verdict, beside those of one width for all."""
    frame, values = predictions.frame, predictions.values
    assert fitted.intervals is not None
    error = np.abs(values - frame["prediction"].to_numpy())
    half = ((frame["upper"] - frame["lower"]) / 2).to_numpy()
    plain = float(conformal_quantile(fitted.intervals.scores * fitted.intervals.scales, 0.95))
    parts = {"all": np.ones(len(frame), dtype=bool)}
    parts |= {verdict: (frame["verdict"] == verdict).to_numpy() for verdict in VERDICTS}
    scale = fitted.model.target.scale
    return {
        name: {
            "rows": int(some.sum()),
            "covered": int((error <= half)[some].sum()),
            "width": round(float(2 * half[some].mean() / scale), 4),
            "plain_covered": int((error <= plain)[some].sum()),
            "plain_width": round(2 * plain / scale, 4),
        }
        for name, some in parts.items()
        if some.any()
    }


def measure(frame: pd.DataFrame, target: str, seed: int, model: str) -> dict[str, Any]:
    """Fit one table, and score its held-out rows."""
    began = time.perf_counter()
    prepared = prepare(numbered(frame), target, seed=seed)
    fitted = fit_table(prepared, learner=model, seed=seed)  # type: ignore[arg-type]
    fitting = time.perf_counter() - began
    test = prepared.frame.iloc[prepared.split.test]
    predictions = predict_rows(fitted, test, np.arange(len(test)))
    scores = {one.name: round(one.value, 5) for one in predictions.scores()}
    found = {
        "train": len(prepared.split.train),
        "test": len(test),
        "model": fitted.model.learner,
        "validation": {name: round(float(value), 5) for name, value in (fitted.validation or {}).items()},
        "scores": scores,
        "boosting": round(boosting(prepared), 5),
        "seconds": round(fitting, 1),
    }
    return found | ({} if fitted.intervals is None else {"intervals": coverage(predictions, fitted)})


def main() -> None:
    """Measure every table with every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--csv", action="append", default=[], help="NAME=PATH:TARGET, a table of your own")
    parser.add_argument("--tables", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", choices=["auto", "network", "trees"], default="auto")
    parser.add_argument("--rows", type=int, default=6000, help="rows drawn from larger tables")
    parser.add_argument("--out", type=Path, default=Path("results/table_intervals.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"most_rows": given.rows}
    rows = measured(given.out, "rows", **settings)
    record: dict[str, Any] = {**surroundings(), **settings, "rows": rows}
    done = {(row["table"], row["seed"], row["asked"]) for row in rows}
    for name, load in tables(given.data, given.csv).items():
        if given.tables and name not in given.tables:
            continue
        for seed in given.seeds:
            if (name, seed, given.model) in done:
                continue
            frame, target = load()
            some = frame.sample(min(given.rows, len(frame)), random_state=seed) if len(frame) > given.rows else frame
            row = {"table": name, "seed": seed, "asked": given.model, **measure(some, target, seed, given.model)}
            rows.append(row)
            save(given.out, record)
            inside = row.get("intervals", {})
            shares = {part: f"{one['covered'] / one['rows']:.3f}/{one['rows']}" for part, one in inside.items()}
            say(f"{name}, seed {seed}: {row['model']} {row['validation']} {row['scores']} {row['boosting']} {shares}")


if __name__ == "__main__":
    main()
