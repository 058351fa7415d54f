"""One record of many: the rows of studies that ran as several processes, or on several machines.

    python -m benchmarks.merge_records results/verdicts.json part1.json part2.json
    python -m benchmarks.merge_records results/paper/disentanglement.json part.json

The first file is written; if it is there, rows are added to it, in place of those with the same case or table, seed,
loss, structure and number of examples. The row of a run that was stopped (it has `missing`) takes no complete row's
place. Records of `whence reproduce` are merged as it does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from whence_paper.records import Record

from .record import save, say
from .tables import origin

KEYS = ("case", "table", "seed", "loss", "structure", "n")


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of all parts, later ones in place of earlier ones, with all commands and where each part was measured.

    All else is the last part's.

    Examples:
        >>> with_all = {"when": "2026-11-17T20", "gpu": "H200", "torch": "2.11", "commit": "abc"}
        >>> one = {"command": "a", "rows": [{"case": "x", "seed": 0, "v": 1}, {"case": "x", "seed": 1, "v": 2}]}
        >>> two = {"command": "b", "rows": [{"case": "x", "seed": 1, "v": 3}, {"case": "x", "seed": 1, "n": 9, "v": 4}]}
        >>> found = merged([{**with_all, **one}, {**with_all, **two, "commit": "def"}])
        >>> found["commands"], [row["v"] for row in found["rows"]]
        (['a', 'b'], [1, 3, 4])
        >>> found["origins"][1]
        'Measured 2026-11-17 on H200, torch 2.11, commit def.'
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    commands: list[str] = []
    for part in parts:
        for row in part["rows"]:
            key = tuple(row.get(name) for name in KEYS)
            if row.get("missing") and key in rows and not rows[key].get("missing"):
                continue
            rows.pop(key, None)
            rows[key] = row
        commands += [one for one in part.get("commands", [part["command"]]) if one not in commands]
    origins = list(dict.fromkeys(one for part in parts for one in part.get("origins", [origin(part)])))
    return {**parts[-1], "commands": commands, "origins": origins, "rows": list(rows.values())}


def main() -> None:
    """Merge, and say how many rows there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    given = parser.parse_args()
    contents = [json.loads(path.read_text()) for path in given.parts]
    if "experiment" in contents[0]:
        record = Record(given.into, contents[0]["experiment"])
        for path in given.parts:
            record.merge(path)
        say(f"{given.into}: {len(record.runs())} runs")
        return
    old = [json.loads(given.into.read_text())] if given.into.exists() else []
    found = merged([*old, *contents])
    save(given.into, found)
    say(f"{given.into}: {len(found['rows'])} rows")


if __name__ == "__main__":
    main()
