"""One problem, all its retrainings and comparisons, as a record that tables and figures are made from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .agreement import Agreement, Estimates, agreement, estimate
from .montecarlo import SOURCES, Plan, Source, Trials, retrain, scatter
from .problems import Problem


def run(problem: Problem, plan: Plan, grid: Tensor, regions: Mapping[str, Tensor]) -> dict[str, Any]:
    """Retrain, estimate, compare.

    Args:
        problem: where data come from.
        plan: how networks are trained.
        grid: (m, i) points at which variances are compared.
        regions: (m,) masks by name; "data" is where the comparison counts.
    """
    began = time.process_time()
    sources = [source for source in SOURCES if source != "homoscedastic" or not problem.equal_noise]
    trials = {source: retrain(problem, plan, source) for source in sources}
    predictions = {source: rows.predictions(grid) for source, rows in trials.items()}
    estimates = {source: estimate(rows, plan.ridge, grid) for source, rows in trials.items()}
    recentered = estimate(trials["full"], plan.ridge, grid, recenter=True) if plan.optimiser == "paper" else None
    return {
        "problem": problem.name,
        "title": problem.title,
        "plan": plan.as_dict(),
        "agreement": {
            name: {row: value.as_dict() for row, value in _compare(predictions, estimates, recentered, mask).items()}
            for name, mask in regions.items()
        },
        "diagnostics": {source: _facts(value) for source, value in estimates.items()},
        "curves": _curves(predictions, estimates),
        "trials": {source: _log(rows) for source, rows in trials.items()},
        "first_draw": {"x": rounded(trials["full"].x[0], 4), "y": rounded(trials["full"].y[0], 4)},
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _compare(
    predictions: Mapping[Source, Tensor],
    estimates: Mapping[Source, Estimates],
    recentered: Estimates | None,
    region: Tensor,
) -> dict[str, Agreement]:
    full, label = estimates["full"].variances, estimates["label"].variances
    rows = {
        "HeC3 / full": agreement(full["hec3"], full["hec3"][0], predictions["full"], region),
        "Ho / label": agreement(label["ho"], full["ho"][0], predictions["label"], region),
        "Ho / full": agreement(full["ho"], full["ho"][0], predictions["full"], region),
        "HeC3 / label": agreement(label["hec3"], full["hec3"][0], predictions["label"], region),
    }
    if "homoscedastic" in predictions:
        rows["Ho / homoscedastic"] = agreement(label["ho"], full["ho"][0], predictions["homoscedastic"], region)
    if recentered is not None:
        hec3 = recentered.variances["hec3"]
        rows["recentered HeC3 / full"] = agreement(hec3, hec3[0], predictions["full"], region)
        rows["recentered HeC3 / recentered full"] = agreement(hec3, hec3[0], recentered.mean, region)
    return rows


def _curves(predictions: Mapping[Source, Tensor], estimates: Mapping[Source, Estimates]) -> dict[str, Any]:
    curves = {f"{source} variance": rounded(scatter(rows)) for source, rows in predictions.items()}
    curves["prediction"] = rounded(predictions["full"][0, :, 0])
    shown: tuple[tuple[str, Source], ...] = (("hec3", "full"), ("ho", "label"))
    for name, source in shown:
        draws = estimates[source].variances[name]
        curves[f"{name} average"] = rounded(draws.mean(0))
        for side, level in (("low", 0.1), ("high", 0.9)):
            curves[f"{name} {side}"] = rounded(draws.quantile(level, dim=0))
        curves[f"{name} first"] = rounded(estimates["full"].variances[name][0])
    curves["ho full average"] = rounded(estimates["full"].variances["ho"].mean(0))
    return curves


def _facts(estimates: Estimates) -> dict[str, Any]:
    facts = {
        "largest leverage": estimates.leverage,
        "degrees of freedom": estimates.freedom,
        "Newton change": estimates.newton,
    }
    return {
        name: {"median": rounded(values.median()), "largest": rounded(values.max())} for name, values in facts.items()
    }


def _log(trials: Trials) -> dict[str, Any]:
    trained = trials.trained
    return {
        "seeds": trials.seeds,
        "objective": rounded(trained.objective, 6),
        "gradient": rounded(trained.gradient, 3),
        "iterations": trained.iterations.tolist(),
    }


def rounded(values: Tensor, digits: int = 4) -> Any:
    """Nested lists of numbers with so many significant digits.

    Examples:
        >>> import torch
        >>> rounded(torch.tensor([3.14159, 1234.567]), 3)
        [3.14, 1230.0]
    """
    listed = values.detach().double().tolist()
    return _round(listed, digits)


def _round(values: Any, digits: int) -> Any:
    return [_round(value, digits) for value in values] if isinstance(values, list) else float(f"{values:.{digits}g}")
