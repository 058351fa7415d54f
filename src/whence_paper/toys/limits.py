"""What limits the agreement between HeC3 and the Monte-Carlo variance on sin(x)/x.

    python -m whence_paper.toys.limits steps     iterations of the paper's optimiser, and recentering
    python -m whence_paper.toys.limits ridge     lambda, in training and in the estimator
    python -m whence_paper.toys.limits parts     at the optimum: leverage, linearization, initial weights
    python -m whence_paper.toys.limits examples  at the optimum: fewer examples, and quieter noise in scenario 2

All of it on the first --trials draws of `python -m whence_paper.toys.sinc`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence_paper.provenance import command_line
from whence_paper.records import Record

from .agreement import Estimates, agreement, estimate
from .experiment import rounded
from .montecarlo import Plan, Trials, draw, initial_weights, retrain, scatter
from .network import Architecture
from .options import end
from .problems import Sinc
from .training import train_paper

MARKS = (25, 50, 100, 200, 400, 2000)
RIDGES = (0.001, 0.01, 0.1)
GRID = torch.linspace(-6, 6, 121, dtype=torch.float64)[:, None]
REGION = torch.ones(len(GRID), dtype=torch.bool)
Row = dict[str, Any]


def describe(trials: Trials, estimates: Estimates, name: str = "hec3") -> Row:
    """One row: how well an estimator does, and what state the networks are in."""
    values, predictions = estimates.variances[name], trials.predictions(GRID)
    over = values / scatter(predictions)
    return {
        **agreement(values, values[0], predictions, REGION).as_dict(),
        "worst 1 % of draws and points, over": rounded(over.quantile(0.99), 3),
        "median gradient": rounded(trials.trained.gradient.median(), 2),
        "median Newton change": rounded(estimates.newton.median(), 2),
        "median largest leverage": rounded(estimates.leverage.median(), 3),
        "median degrees of freedom": rounded(estimates.freedom.median(), 3),
    }


def steps(problem: Sinc, plan: Plan) -> list[Row]:
    """After so many iterations: HeC3 as it is, and recentered, against networks stopped there and recentered ones."""
    x, y, seeds = draw(problem, plan, "full")
    net = Architecture(1, plan.hidden, 1)
    stages = train_paper(net, initial_weights(problem, net, plan), x, y, plan.ridge, MARKS)
    trials = {str(mark): Trials(net, x, y, seeds, trained) for mark, trained in stages.items()}
    trials["converged"] = retrain(problem, plan, "full")
    rows = []
    for stage, group in trials.items():
        plain = estimate(group, plan.ridge, GRID)
        moved = estimate(group, plan.ridge, GRID, recenter=True)
        hec3 = moved.variances["hec3"]
        rows.append(
            {
                "iterations": stage,
                "HeC3 / full": describe(group, plain),
                "recentered / full": agreement(hec3, hec3[0], group.predictions(GRID), REGION).as_dict(),
                "recentered / recentered": agreement(hec3, hec3[0], moved.mean, REGION).as_dict(),
                "recentered / converged": agreement(
                    hec3, hec3[0], trials["converged"].predictions(GRID), REGION
                ).as_dict(),
            }
        )
    return rows


def ridge(problem: Sinc, plan: Plan) -> list[Row]:
    """Networks trained to the optimum with one lambda, estimated with the same or another."""
    rows = []
    for trained_with in RIDGES:
        trials = retrain(problem, replace(plan, ridge=trained_with), "full")
        rows += [
            {"trained with": trained_with, "estimated with": other, **describe(trials, estimate(trials, other, GRID))}
            for other in (RIDGES if trained_with == plan.ridge else (trained_with,))
        ]
    return rows


def parts(problem: Sinc, plan: Plan) -> list[Row]:
    """At the optimum: other corrections for leverage, a network that is linear, other initial weights."""
    names = ("hec0", "hec2", "hec3", "jackknife")
    trials = retrain(problem, plan, "full")
    estimates = estimate(trials, plan.ridge, GRID, names=names)
    rows = [{"what": name, **describe(trials, estimates, name)} for name in names]
    straight = linear_retraining(trials, plan.ridge, GRID)
    rows.append(
        {
            "what": "hec3 of linear models on the first network's tangents, against those retrained",
            **agreement(straight.variances["hec3"], straight.variances["hec3"][0], straight.mean, REGION).as_dict(),
        }
    )
    truth = scatter(trials.predictions(GRID))
    others = {"linear": straight.mean}
    for init in ("fresh", "warm"):
        again = retrain(problem, replace(plan, init=init), "full")
        others[init] = again.predictions(GRID)
        rows.append({"what": f"hec3, {init} initial weights", **describe(again, estimate(again, plan.ridge, GRID))})
    for name, predictions in others.items():
        median = (scatter(predictions) / truth).median()
        rows.append({"what": f"Monte-Carlo variance, {name} / same initial weights", "median": rounded(median, 3)})
    return rows


def examples(problem: Sinc, plan: Plan) -> list[Row]:
    """At the optimum, with fewer examples; in scenario 2 also with noise that differs more from place to place."""
    cases = [(problem, count) for count in (100, 200)]
    if problem.scenario == 2:
        cases += [(Sinc(2, quiet=0.02), 200), (Sinc(2, quiet=0.02), 400)]
    rows = []
    for case, count in cases:
        trials = retrain(case, replace(plan, examples=count), "full")
        straight = linear_retraining(trials, plan.ridge, GRID)
        hec3 = straight.variances["hec3"]
        rows.append(
            {
                "what": f"{count} examples" + (f", quiet noise {case.quiet}" if case.scenario == 2 else ""),
                "networks": describe(trials, estimate(trials, plan.ridge, GRID)),
                "linear models": agreement(hec3, hec3[0], straight.mean, REGION).as_dict(),
            }
        )
    return rows


def linear_retraining(trials: Trials, ridge: float, grid: Tensor) -> Estimates:
    """Retrain, in closed form, the linear model in the tangents of the first trial's network; estimate each time."""
    weights = trials.trained.weights[0].double()

    def tangents(x: Tensor) -> tuple[Tensor, Tensor]:
        phi = trials.net.tangents(weights[None], x[None])[0, :, 0]
        return phi, trials.net.predict(weights[None], x)[0] - phi @ weights[:, None]  # f = phi w + the rest

    at_grid, rest_at_grid = tangents(grid)
    means, hec3, facts = [], [], []
    for x, y in zip(trials.x, trials.y, strict=True):
        phi, rest = tangents(x)
        curvature = phi.T @ phi + ridge * torch.eye(len(weights), dtype=phi.dtype)
        model = nn.utils.skip_init(nn.Linear, len(weights), 1, bias=False, dtype=phi.dtype)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.solve(curvature, phi.T @ (y - rest)).T)
        tracer = whence.fit(model, [(phi, y - rest)], ridge=ridge, progress=False)
        answer = tracer.predict(at_grid)
        means.append(answer.mean + rest_at_grid)
        hec3.append(answer.hec3[:, 0])
        facts.append([float(tracer.leverage.max()), float(tracer.degrees_of_freedom), 0.0])
    leverage, freedom, newton = torch.tensor(facts, dtype=torch.float64).T
    return Estimates(torch.stack(means), {"hec3": torch.stack(hec3)}, leverage, freedom, newton)


STUDIES: dict[str, Callable[[Sinc, Plan], list[Row]]] = {
    "steps": steps,
    "ridge": ridge,
    "parts": parts,
    "examples": examples,
}


def main(arguments: list[str] | None = None) -> None:
    """Compute what the record has not, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("study", choices=sorted(STUDIES), nargs="?", default="steps", help="default steps")
    add("--trials", type=int, help="retrainings (default 50; quick 6)")
    add("--scenarios", type=int, nargs="+", help="default all three; quick the second")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out/toys"))
    add("--figures", type=Path, help="folder of the figure (default: that of the results)")
    add("--again", action="store_true", help="compute again even where results with these options exist")
    add("--redraw", action="store_true", help="draw from the record, compute nothing")
    add("--quick", action="store_true", help="a small version in seconds; fails where a finding is lost")
    typed = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(typed)
    size = {"hidden": 12, "examples": 80, "trials": 6} if given.quick else {"hidden": 100, "examples": 400}
    plan = Plan(
        **{"trials": 50, **size, **({"trials": given.trials} if given.trials else {})}, ridge=0.01, seed=given.seed
    )
    configuration = {"experiment": f"limits {given.study}", **plan.as_dict()}
    file = given.out / f"limits-{given.study}{'-quick' if given.quick else ''}.json"
    record = Record(file, "limits", command_line("whence reproduce limits", typed))
    found = {}
    for number in given.scenarios or ([2] if given.quick else [1, 2, 3]):
        wanted = {**configuration, "scenario": number}  # can be computed one at a time
        if given.redraw and record.find(wanted) is None:
            raise SystemExit(f"expected scenario {number} in {file} to draw again, got none. Run without --redraw.")
        done = record.once(wanted, partial(_rows, given.study, number, plan), again=given.again)
        found[number] = done.results["rows"]
        print(f"scenario {number}")
        print("\n".join(line for row in found[number] for line in _show(row)), flush=True)
    if given.study == "steps":
        from .figures import draw_steps  # matplotlib is an extra

        runs = sorted(record.runs(**configuration), key=lambda run: int(run.configuration["scenario"]))
        scenarios = {f"scenario {run.configuration['scenario']}": run.results for run in runs}
        print(f"figure: {draw_steps(scenarios, (given.figures or given.out) / f'toy-{file.stem[7:]}.png')}")
        end([words for number, rows in found.items() for words in check(number, rows)], given.quick)


def _rows(study: str, number: int, plan: Plan) -> Row:
    began = time.process_time()
    rows = STUDIES[study](Sinc(number), plan)
    return {"rows": rows, "cpu_seconds": round(time.process_time() - began, 1)}


def check(number: int, rows: list[Row]) -> list[str]:
    """At the optimum HeC3 is nearer to the variance of full resampling than where training was stopped early."""
    early, late = (abs(math.log(rows[at]["HeC3 / full"]["average"])) for at in (0, -1))
    if late <= early:
        return []
    off = f"by a factor of {math.exp(late):.2f} at the optimum, of {math.exp(early):.2f} early"
    return [f"scenario {number}: HeC3 / full is off {off}"]


def _show(row: Row) -> list[str]:
    label = "  " + ", ".join(f"{key} {value}" for key, value in row.items() if key in LABELS)
    groups = {key: value for key, value in row.items() if isinstance(value, dict)} or {"": row}
    return [
        f"{label} {name}: " + ", ".join(f"{key} {value:g}" for key, value in group.items() if key not in LABELS)
        for name, group in groups.items()
    ]


LABELS = {"iterations", "trained with", "estimated with", "what"}

if __name__ == "__main__":
    main()
