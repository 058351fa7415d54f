"""The command line shared by the toy experiments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence_paper.records import Record

from .montecarlo import Plan


@dataclass(frozen=True)
class Defaults:
    """What a problem starts from, in full and for a quick look."""

    hidden: int
    examples: int
    ridge: float
    steps: int
    quick_hidden: int
    quick_examples: int


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    plan: Plan
    usual: Defaults
    out: Path
    figures: Path | None
    again: bool
    quick: bool
    redraw: bool
    typed: list[str]

    @property
    def variant(self) -> str:
        """For file names: the optimiser, and what differs from the usual."""
        init = "" if self.plan.init == "same" else f"-{self.plan.init}"
        steps = f"-{self.plan.steps}" if self.plan.optimiser == "paper" and self.plan.steps != self.usual.steps else ""
        return self.plan.optimiser + steps + init

    def results(
        self, record: Record, configuration: dict[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """From the record of an earlier run with the same options if there is one; else computed, unless to redraw."""
        if self.redraw and record.find(configuration) is None:
            raise SystemExit(f"expected results with these options in {record.path}, got none. Run without --redraw.")
        return record.once(configuration, compute, again=self.again).results


def end(lost: list[str], quick: bool) -> None:
    """Tell which findings of the paper do not show; a quick run fails then."""
    for words in lost:
        print(f"not as in the paper: {words}")
    if lost and quick:
        raise SystemExit(1)


def outside(what: str, value: float, least: float, most: float) -> list[str]:
    """A complaint where a ratio is not between two bounds.

    Examples:
        >>> outside("HeC3 / full", 3.0, 0.5, 2.0)
        ['HeC3 / full is 3, expected 0.5 to 2']
    """
    return [] if least <= value <= most else [f"{what} is {value:.3g}, expected {least:g} to {most:g}"]


def parse(arguments: list[str] | None, description: str, usual: Defaults) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--converged", action="store_true", help="train to the optimum, in float64 (the default)")
    how.add_argument("--paper", action="store_true", help="train as in the paper: L-BFGS, learning rate 0.1, --steps")
    add = parser.add_argument
    add("--steps", type=int, default=usual.steps, help=f"iterations with --paper (default {usual.steps})")
    add("--trials", type=int, help="retrainings for each source of new data (default 100; quick 20)")
    add("--examples", type=int, help=f"training examples (default {usual.examples}; quick {usual.quick_examples})")
    add("--hidden", type=int, help=f"hidden units (default {usual.hidden}; quick {usual.quick_hidden})")
    add("--ridge", type=float, default=usual.ridge, help=f"lambda, on the sum scale (default {usual.ridge})")
    add("--init", choices=("same", "fresh", "warm"), default="same", help="initial weights of the retrainings")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out/toys"), help="folder of the results (default out/toys)")
    add("--figures", type=Path, help="folder of the figures (default: that of the results)")
    add("--no-figures", action="store_true", help="tables only")
    add("--again", action="store_true", help="compute again even where results with these options exist")
    add("--redraw", action="store_true", help="draw from the record, compute nothing")
    add("--quick", action="store_true", help="a small version in seconds; fails where a finding is lost")
    typed = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(typed)
    plan = Plan(
        hidden=_first(given.hidden, usual.quick_hidden if given.quick else usual.hidden),
        examples=_first(given.examples, usual.quick_examples if given.quick else usual.examples),
        trials=_first(given.trials, 20 if given.quick else 100),
        ridge=given.ridge,
        optimiser="paper" if given.paper else "converged",
        steps=given.steps,
        init=given.init,
        seed=given.seed,
    )
    figures = None if given.no_figures else _first(given.figures, given.out)
    return Options(plan, usual, given.out, figures, given.again, given.quick, given.redraw, typed)


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
