"""Write the table of what cross-entropy's estimators are worth from results/worth.json.

    python -m benchmarks.worth_tables docs/classification.md

The record holds more scores than the page: of structures other than the main one, the ratio and the margin alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tables import rewrite, table
from .tracing_tables import Row, draws, grouped, unseen

QUESTIONS = {"noisy": "noisy class", "missing": "missing class", "wrong, ordinary": "misclassified, other classes"}
MAIN = (
    "Ho",
    "HeC3",
    "HeC3 / Ho",
    "Ho of probabilities",
    "HeC3 of probabilities",
    "HeC3 / Ho of probabilities",
    "margin / sd by Ho",
    "margin / sd by HeC3",
)
ALSO = ("HeC3 / Ho", "margin / sd by HeC3")


def worth(record: Row) -> str:
    """One table a data set and task: every score, every question, every draw."""
    parts = []
    for (case, task), rows in grouped(unseen(record), "case", "task").items():
        first = rows[0]
        seeds = sorted({row["seed"] for row in rows})
        losses = {loss: [row for row in rows if row["loss"] == loss] for loss in ("cross-entropy", "squared error")}
        accuracy = ", ".join(
            f"{loss} {draws(row['accuracy'] for row in some)}" for loss, some in losses.items() if some
        )
        parts.append(
            f"**{case}, {task}**: {first['network']}, {first['n']} training examples, {first['test']} test points, "
            f"draws {', '.join(map(str, seeds))}. Accuracy, noisy class included: {accuracy}."
        )
        asked = [name for name in QUESTIONS if name in first["wrong"]]
        head = "score | " + " | ".join(QUESTIONS[name] for name in asked)
        parts.append(table(head, [line for loss, some in losses.items() for line in lines(loss, some, asked)]))
    where = sorted({f"{row['where']} (commit {row['commit'][:12]})" for row in unseen(record)})
    origin = f"Measured on {', '.join(where)}; laplace-torch {record['laplace']}. `{record['command']}`."
    return "\n\n".join([origin, *parts])


def lines(loss: str, rows: list[Row], asked: list[str]) -> Iterator[list[Any]]:
    """One row a score that the page shows."""
    if not rows:
        return
    main = rows[0]["fits"][0]["structure"]
    names = list(rows[0]["auroc"])
    bare = [name for name in names if ":" not in name or name.startswith("laplace")]
    shown = [name for name in bare if not name.startswith("laplace")]
    shown += [f"{main}: {kind}" for kind in MAIN if f"{main}: {kind}" in names]
    others = [fit["structure"] for fit in rows[0]["fits"][1:]]
    shown += [f"{other}: {kind}" for other in others for kind in ALSO]
    shown += [name for name in bare if name.startswith("laplace")]
    short = "squared error, " if loss == "squared error" else ""
    if rows[0]["task"] == "two classes":  # these rank alike there
        shown = [name for name in shown if "entropy" not in name]
    for name in shown:
        cells = [draws(area(row, name, key) for row in rows) for key in asked]
        yield [short + name, *(cell.replace("nan", "-") for cell in cells)]


def area(row: Row, name: str, question: str) -> float:
    """AUROC; not a number where there was nothing to find."""
    found: float = row["auroc"].get(name, {}).get(question, float("nan"))
    return found if row["wrong"].get(question) else float("nan")


TABLES = {"worth": worth}


def main() -> None:
    """Replace the table of the page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
