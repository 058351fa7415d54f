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
from .options import Defaults, Options, parse
from .problems import Sinc

USUAL = Defaults(hidden=100, examples=400, ridge=0.01, steps=100, quick_hidden=20, quick_examples=100)


def compute(options: Options) -> dict[str, Any]:
    """All three scenarios; from the record of an earlier run with the same options if there is one."""
    record = Record(
        options.out / f"sinc-{options.variant}.json", "sinc", command_line("whence reproduce sinc", options.typed)
    )
    configuration = {"experiment": "sinc", **options.plan.as_dict(), "scenarios": [1, 2, 3]}
    return record.once(configuration, lambda: _scenarios(options), again=options.again).results


def _scenarios(options: Options) -> dict[str, Any]:
    grid = torch.linspace(-9, 9, 181, dtype=torch.float64)[:, None]
    distance = grid[:, 0].abs()
    regions = {"data": distance <= 6, "|x| <= 1": distance <= 1, "3 <= |x| <= 6": (distance >= 3) & (distance <= 6)}
    scenarios = [run(Sinc(number), options.plan, grid, regions) for number in (1, 2, 3)]
    return {"grid": grid[:, 0].tolist(), "scenarios": scenarios}


def main(arguments: list[str] | None = None) -> None:
    """Compute, print, draw."""
    options = parse(arguments, __doc__ or "", USUAL)
    done = compute(options)
    print("\n".join(line for scenario in done["scenarios"] for line in table.lines(scenario)))
    if options.figures:
        from .figures import draw_sinc  # matplotlib is an extra

        print(f"figure: {draw_sinc(done, options.figures / f'toy-sinc-{options.variant}.png')}")


if __name__ == "__main__":
    main()
