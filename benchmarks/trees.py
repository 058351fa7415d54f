"""Trees: time and memory against rows and leaves, and variances beside those of retrained models.

    python -m benchmarks.trees cost --out results/trees.json
    python -m benchmarks.trees core --rows 3000 --trees 300 --out results/trees.json
    python -m benchmarks.trees retrained --out results/trees.json

Cost: LightGBM with 31 leaves a tree, one process for each size. Seconds are CPU time of all threads, and by the clock;
memory is the largest of the whole process, the model and its data included. Core: the leading directions of the leaves
beside the exact answer. Retrained: the variance of predictions over models that were trained again on bootstrap
samples, trees and all, beside Ho and HeC3 for several ridges, beside the weights of the same trees with only their leaf
values fitted again ("trees kept"), and beside forestci's infinitesimal jackknife for forests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import whence

from .record import save, say, surroundings

Array = NDArray[np.float64]
SIZES = ((10_000, 100), (10_000, 500), (30_000, 500), (100_000, 100), (100_000, 500))
PREDICTED = 10_000
EXPLAINED = 1_000
FRESH = 300


def rows(n: int, seed: int) -> tuple[Array, Array]:
    """Ten columns, and numbers that are noisier on one side."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1, 1, (n, 10))
    y = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) + 0.5 * np.sin(4 * x[:, 4] * x[:, 5])
    return x, y + 0.2 * (1 + 2 * (x[:, 6] > 0.3)) * draw.standard_normal(n)


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What comes out, and the seconds it took: of all threads, and by the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    found = work()
    return found, {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}


def one_cost(n: int, trees: int) -> dict[str, Any]:
    """Fit, predict and explain at one size."""
    import lightgbm

    x, y = rows(n, 0)
    fresh, _ = rows(PREDICTED, 1)
    model = lightgbm.LGBMRegressor(n_estimators=trees, num_leaves=31, verbose=-1, random_state=0).fit(x, y)
    tracer, fit = timed(lambda: whence.fit(model, (x, y), progress=False))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _, predict = timed(lambda: tracer.predict(fresh))
    _, explain = timed(lambda: tracer.explain(fresh[:EXPLAINED]))
    return {
        "rows": n,
        "trees": trees,
        "leaves": tracer.problem.selection.size,
        "structure": tracer.diagnostics["structure"],
        "fit": fit,
        "predict": predict,
        "explain": explain,
        "memory": memory,
    }


def cost(sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """One process for each size."""
    found = []
    for n, trees in sizes:
        command = [sys.executable, "-m", "benchmarks.trees", "one", "--rows", str(n), "--trees", str(trees)]
        surrounding = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=surrounding)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        say(found[-1])
    return found


def core(n: int, trees: int) -> list[dict[str, Any]]:
    """Leading directions of the leaves against the exact answer."""
    import lightgbm

    from whence.curvature.leaves import LeafCore

    x, y = rows(n, 0)
    fresh, _ = rows(FRESH, 1)
    found = []
    for rate in (0.1, 0.03):
        options = {"n_estimators": trees, "num_leaves": 31, "learning_rate": rate, "verbose": -1, "random_state": 0}
        model = lightgbm.LGBMRegressor(**options).fit(x, y)
        exact = whence.fit(model, (x, y), structure="exact", progress=False)
        truth, verdicts = exact.predict(fresh), exact.explain(fresh).verdicts
        for size in (256, 1024):
            tracer = whence.fit(model, (x, y), structure=LeafCore(size=size), progress=False)
            predicted = tracer.predict(fresh)
            pairs = {name: (getattr(predicted, name), getattr(truth, name)) for name in ("ho", "hec3", "laplace")}
            pairs["leverage"] = tracer.leverage, exact.leverage
            same = np.mean([a == b for a, b in zip(tracer.explain(fresh).verdicts, verdicts, strict=True)])
            row = {"rate": rate, "size": size, "leaves": exact.problem.selection.size, "verdicts": float(same)}
            for name, (one, other) in pairs.items():
                share = float((one / other).median())
                row[name] = {"share": share, "rank": rank_correlation(one[:, 0].numpy(), other[:, 0].numpy())}
            say(row)
            found.append(row)
    return found


def kept(model: Any, x: Array, fresh: Array) -> Array:
    """(m, n) weight of every training label in every prediction, where trees are kept and leaf values fitted again."""
    ensemble = whence.trees.read(model)
    assert ensemble is not None
    here, there = ensemble.leaves(x), ensemble.leaves(fresh)
    n, boosted = len(x), ensemble.shrinkage * here.shape[1] > 1.5
    left, weights = np.eye(n), np.zeros((len(fresh), n))
    if boosted:  # the first constant is the mean
        left, weights = left - 1 / n, weights + 1 / n
    for tree in range(here.shape[1]):
        members = (here[:, tree][:, None] == np.unique(here[:, tree])).astype(float)
        means = ensemble.shrinkage * (members / members.sum(0)).T @ left
        weights += (there[:, tree][:, None] == np.unique(here[:, tree])).astype(float) @ means
        if boosted:
            left -= members @ means
    return weights


def retrained(repeats: int, n: int) -> list[dict[str, Any]]:
    """Variances of boosting and of a forest, by several rules, against those of retrained models."""
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor

    models = {
        "gradient boosting": lambda seed: GradientBoostingRegressor(n_estimators=100, random_state=seed),
        "random forest": lambda seed: RandomForestRegressor(100, min_samples_leaf=5, random_state=seed),
    }
    x, y = rows(n, 0)
    fresh, _ = rows(FRESH, 1)
    found = []
    for name, make in models.items():
        draw = np.random.default_rng(0)
        again = []
        for seed in range(repeats):
            chosen = draw.integers(0, n, n)
            again.append(make(seed + 1).fit(x[chosen], y[chosen]).predict(fresh))
        truth = np.var(again, axis=0, ddof=1)
        model = make(0).fit(x, y)
        variances: dict[str, Array] = {}
        freedom: dict[str, float] = {}
        for ridge in ("auto", 1.0, 10.0, "loo"):
            tracer = whence.fit(model, (x, y), ridge=ridge, structure="exact", progress=False)
            predicted = tracer.predict(fresh)
            for estimator in ("ho", "hec3"):
                variances[f"{estimator}, ridge {ridge}"] = getattr(predicted, estimator)[:, 0].numpy()
                freedom[f"{estimator}, ridge {ridge}"] = tracer.degrees_of_freedom
        residuals = y - model.predict(x)
        variances["trees kept"] = kept(model, x, fresh) ** 2 @ residuals**2
        if name == "random forest":
            variances["infinitesimal jackknife (forestci)"] = infinitesimal_jackknife(model, x, fresh)
        for rule, values in variances.items():
            row = {
                "model": name,
                "rule": rule,
                "share": float(np.median(values / truth)),
                "rank": rank_correlation(values, truth),
                "to trees kept": float(np.median(values / variances["trees kept"])),
                "degrees of freedom": freedom.get(rule),
            }
            say(row)
            found.append(row)
    return found


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


def infinitesimal_jackknife(model: Any, x: Array, fresh: Array) -> Array:
    """Of a forest, by forestci."""
    import forestci

    found: Array = forestci.random_forest_error(model, x.shape, fresh, calibrate=False)
    return found


def main() -> None:
    """Measure, and add to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "core", "retrained", "one"))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part == "one":
        say(json.dumps(one_cost(given.rows, given.trees)))
        return
    known = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "cost": lambda: cost(SIZES),
        "core": lambda: core(given.rows, given.trees),
        "retrained": lambda: retrained(given.repeats, given.rows),
    }
    found = parts[given.part]()
    here = surroundings()
    commands = sorted({*known.get("commands", []), here["command"]})
    if given.out:
        save(given.out, {**known, **here, "commands": commands, given.part: found})


if __name__ == "__main__":
    main()
