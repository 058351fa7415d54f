"""Two spirals (the paper's Figure 3).

`python -m whence_paper.toys.spirals` trains to the optimum, with `--paper` for 200 iterations of L-BFGS with learning
rate 0.1, with `--quick` a smaller thing in seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whence_paper.provenance import command_line
from whence_paper.records import Record

from . import table
from .experiment import rounded, run
from .options import Defaults, Options, end, outside, parse
from .problems import Spirals

USUAL = Defaults(hidden=20, examples=1000, ridge=0.01, steps=200, quick_hidden=10, quick_examples=200)
REACH, POINTS = 1.2, 41


def places(problem: Spirals, grid: Tensor) -> dict[str, Tensor]:
    """Masks: where 95 % of the data are, and therein the centre and the tails."""
    inputs = problem.inputs(20_000, torch.Generator().manual_seed(0))
    data = problem.density(grid) >= problem.density(inputs).quantile(0.05)
    radius = grid.norm(dim=1)
    return {"data": data, "centre": data & (radius < 0.2), "tails": data & (radius > 0.6)}


def compute(options: Options) -> dict[str, Any]:
    """The experiment; from the record of an earlier run with the same options if there is one."""
    problem = Spirals()
    record = Record(
        options.out / f"spirals-{options.variant}.json",
        "spirals",
        command_line("whence reproduce spirals", options.typed),
    )
    configuration = {
        "experiment": "spirals",
        **options.plan.as_dict(),
        "turns": problem.turns,
        "scatter": problem.scatter,
    }
    return options.results(record, configuration, lambda: _maps(problem, options))


def _maps(problem: Spirals, options: Options) -> dict[str, Any]:
    axis = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    masks = places(problem, grid)
    results = run(problem, options.plan, grid, masks)
    maps = {"axis": rounded(axis), "density": rounded(problem.density(grid)), "data": masks["data"].int().tolist()}
    return {**results, "maps": maps}


def check(done: dict[str, Any]) -> list[str]:
    """HeC3 is the variance of full resampling; Ho is too small where the classes overlap, too large in the tails."""
    where = done["agreement"]
    return [
        *outside("HeC3 / full", where["data"]["HeC3 / full"]["average"], 0.4, 2.5),
        *outside("Ho / label in the centre", where["centre"]["Ho / label"]["average"], 0.0, 0.8),
        *outside("Ho / label in the tails", where["tails"]["Ho / label"]["average"], 2.0, float("inf")),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Compute, print, draw."""
    options = parse(arguments, __doc__ or "", USUAL)
    done = compute(options)
    print("\n".join(table.lines(done)))
    if options.figures:
        from .figures import draw_spirals  # matplotlib is an extra

        print(f"figure: {draw_spirals(done, options.figures / f'toy-spirals-{options.variant}.png')}")
    end(check(done), options.quick)


if __name__ == "__main__":
    main()
