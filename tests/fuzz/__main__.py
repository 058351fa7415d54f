"""Fuzz: `python -m fuzz --seconds 600 --first-seed 0 --jobs 2`, from the folder tests; `--seeds 7 12` for some alone.

Prints a line of JSON for each problem with a difference, and at the end how many problems there were, how many were
refused, and why.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing import get_context

import torch

from .compare import Outcome, examine


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to go on")
    parser.add_argument("--problems", type=int, default=10**9, help="how many problems at most")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, nargs="*", help="these seeds alone")
    asked = parser.parse_args(given)
    seeds: Iterable[int] = range(asked.first_seed, asked.first_seed + asked.problems)
    if asked.seeds:
        seeds = asked.seeds
    totals = Totals()
    for outcome in outcomes(seeds, asked.seconds, asked.jobs):
        totals.add(outcome)
        if outcome.differences or asked.seeds:
            told = [{"name": one.name, "size": one.size, "words": one.words} for one in outcome.differences]
            line = {"seed": outcome.seed, "problem": outcome.told, "refused": outcome.refused, "differences": told}
            print(json.dumps(line), flush=True)
    print(totals)
    return 1 if totals.different else 0


class Totals:
    """Counts over problems."""

    def __init__(self) -> None:
        self.problems = self.different = self.compared = self.undetermined = 0
        self.refusals: Counter[str] = Counter()
        self.examples: dict[str, int] = {}
        self.last = -1

    def add(self, outcome: Outcome) -> None:
        self.problems += 1
        self.compared += outcome.compared
        self.undetermined += outcome.undetermined
        self.different += bool(outcome.differences)
        self.last = max(self.last, outcome.seed)
        if outcome.refused:
            kind = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", outcome.refused)[:150]
            self.refusals[kind] += 1
            self.examples.setdefault(kind, outcome.seed)

    def __str__(self) -> str:
        refused = sum(self.refusals.values())
        share = 100 * refused / max(1, self.problems)
        lines = [
            f"{self.problems} problems (last seed {self.last}), {self.compared} numbers compared: {self.different} "
            f"with a difference, {self.undetermined} numbers not determined, {refused} refused ({share:.1f} %)"
        ]
        lines += [
            f"  {count} refused, as seed {self.examples[kind]}: {kind}" for kind, count in self.refusals.most_common()
        ]
        return "\n".join(lines)


def outcomes(seeds: Iterable[int], seconds: float, jobs: int) -> Iterator[Outcome]:
    """Problems one after the other, for so many seconds."""
    until = time.monotonic() + seconds
    if jobs == 1:
        torch.set_num_threads(1)
        for seed in seeds:
            if time.monotonic() > until:
                return
            yield examine(seed)
        return
    with get_context("spawn").Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for some in batched(seeds, 8 * jobs):
            if time.monotonic() > until:
                return
            yield from pool.imap(examine, some)


def batched(seeds: Iterable[int], size: int) -> Iterator[list[int]]:
    """So many seeds at a time: a pool would read all of them at once."""
    given = iter(seeds)
    while some := list(islice(given, size)):
        yield some


if __name__ == "__main__":
    sys.exit(main())
