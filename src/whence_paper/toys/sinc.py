"""sin(x)/x in three scenarios (the paper's Figure 2 and the curves of its appendix).

`python -m whence_paper.toys.sinc` trains to the optimum, with `--paper` for 100 iterations of L-BFGS with learning
rate 0.1, with `--quick` a smaller thing in seconds.
"""

from __future__ import annotations

from typing import Any

import torch

from whence_paper.provenance import command_line
from whence_paper.records import Record

from . import table
from .experiment import run
from .options import Defaults, Options, end, outside, parse
from .problems import Sinc

USUAL = Defaults(hidden=100, examples=400, ridge=0.01, steps=100, quick_hidden=20, quick_examples=100)


def compute(options: Options) -> dict[str, Any]:
    """All three scenarios; from the record of an earlier run with the same options if there is one."""
    record = Record(
        options.out / f"sinc-{options.variant}.json", "sinc", command_line("whence reproduce sinc", options.typed)
    )
    configuration = {"experiment": "sinc", **options.plan.as_dict(), "scenarios": [1, 2, 3]}
    return options.results(record, configuration, lambda: _scenarios(options))


def _scenarios(options: Options) -> dict[str, Any]:
    grid = torch.linspace(-9, 9, 181, dtype=torch.float64)[:, None]
    distance = grid[:, 0].abs()
    regions = {"data": distance <= 6, "|x| <= 1": distance <= 1, "3 <= |x| <= 6": (distance >= 3) & (distance <= 6)}
    scenarios = [run(Sinc(number), options.plan, grid, regions) for number in (1, 2, 3)]
    return {"grid": grid[:, 0].tolist(), "scenarios": scenarios}


def check(scenarios: list[dict[str, Any]]) -> list[str]:
    """HeC3 is the variance of full resampling; Ho that of new labels, but for unequal noise, which it does not see."""
    lost = []
    for one in scenarios:
        where = one["agreement"]
        lost += outside(f"{one['title']}: HeC3 / full", where["data"]["HeC3 / full"]["average"], 0.4, 2.5)
        if "Ho / homoscedastic" not in where["data"]:
            lost += outside(f"{one['title']}: Ho / label", where["data"]["Ho / label"]["average"], 0.4, 2.5)
            continue
        near, far = (where[name]["Ho / label"]["average"] for name in ("|x| <= 1", "3 <= |x| <= 6"))
        lost += outside(f"{one['title']}: Ho / label amid the noise", near, 0.0, 0.8)
        lost += outside(f"{one['title']}: Ho / label where it is quiet", far, 2.0, float("inf"))
    return lost


def main(arguments: list[str] | None = None) -> None:
    """Compute, print, draw."""
    options = parse(arguments, __doc__ or "", USUAL)
    done = compute(options)
    print("\n".join(line for scenario in done["scenarios"] for line in table.lines(scenario)))
    if options.figures:
        from .figures import draw_sinc  # matplotlib is an extra

        print(f"figure: {draw_sinc(done, options.figures / f'toy-sinc-{options.variant}.png')}")
    end(check(done["scenarios"]), options.quick)


if __name__ == "__main__":
    main()
