"""The records of one `make bench` as one page: what ran, who is ahead, and every run.

    python -m benchmarks.together out --since TIME --broken cost

TIME, in seconds since 1970, keeps records of an earlier run out of the page. A part that ended with an error is named
at the head of the page, with what it had recorded until then.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .quality_tables import quality_peers
from .record import say
from .tables import cost
from .tracing_tables import label_errors

PARTS = {
    "cost": ("Cost: fit, predict and memory, as multiples of forward + k backward passes", cost),
    "label_errors": ("Wrong labels: AUROC of finding those that were replaced", label_errors),
    "quality_peers": ("Quality: which points are doubted, and how good probabilities and intervals are", quality_peers),
}
"""By the name of the record: a heading, and what makes its tables."""


def page(folder: Path, since: float = 0.0, broken: Collection[str] = ()) -> tuple[str, list[str]]:
    """The tables of all parts that have a record, and what is wrong with the others."""
    parts, faults = [], [f"{name} stopped before its end" for name in broken]
    for name, (heading, make) in PARTS.items():
        path = folder / f"{name}.json"
        if not path.exists() or path.stat().st_mtime < since:
            faults.append(f"{name} left no record")
            continue
        record: dict[str, Any] = json.loads(path.read_text())
        parts.append(f"## {heading}\n\n{make(record)}")
    head = ["# Beside the peers", *([f"**Not whole: {'; '.join(faults)}.**"] if faults else [])]
    return "\n\n".join([*head, *parts]) + "\n", faults


def main() -> None:
    """Write the page, and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the records; the page goes there too")
    parser.add_argument("--since", type=float, default=0.0, help="records older than this are not of this run")
    parser.add_argument("--broken", nargs="*", choices=PARTS, default=[], help="parts that ended with an error")
    given = parser.parse_args()
    text, faults = page(given.folder, given.since, given.broken)
    path = given.folder / "bench.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    say(f"All tables of this run: {path}. Records: {given.folder}/*.json; those of the documentation are in results/.")
    if faults:
        raise SystemExit(f"{'; '.join(faults)}: what is printed above says why.")


if __name__ == "__main__":
    main()
