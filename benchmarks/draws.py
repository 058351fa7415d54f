"""What studies by retraining share: cases that are drawn anew with every seed, measured one after the other."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .record import measured, save, say, surroundings


def run_draws(
    about: str | None,
    cases: Mapping[str, Any],
    seeds: Sequence[int],
    setting: tuple[str, int, str],
    measure: Callable[[Any, int, int], dict[str, Any]],
    tell: Callable[[dict[str, Any]], Iterable[str]],
) -> None:
    """Run the cases and draws that were asked for, and those only that a record does not have yet.

    Args:
        about: what the study is, for its help.
        cases: makes a case from a seed and the folder of data, by name.
        seeds: draws it takes if not told.
        setting: name, usual value and meaning of the number that a study has.
        measure: gets a case, the setting and the seed.
        tell: lines about what was measured.
    """
    name, usual, words = setting
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=list(cases))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument(f"--{name}", type=int, default=usual, help=words)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after these; run again")
    asked = parser.parse_args()
    chosen = {name: getattr(asked, name)}
    rows, start = measured(asked.out, "runs", **chosen), time.perf_counter()
    done = {(row["case"], row["seed"]) for row in rows}
    for case in asked.cases:
        for seed in asked.seeds:
            if (case, seed) in done or time.perf_counter() - start > 60 * asked.minutes:
                continue
            found = measure(cases[case](seed, asked.data), chosen[name], seed)
            rows.append({"case": case, "seed": seed, "about": cases[case].__doc__, **found})
            say(f"{case}, seed {seed}, {found['seconds']} s")
            for line in tell(found):
                say(f"  {line}")
            save(asked.out, {"surroundings": surroundings(), **chosen, "runs": rows})
