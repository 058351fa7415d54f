"""Write the tables of the page on trees from the records under results/.

python -m benchmarks.tree_tables docs/trees.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tables import made, rewrite, table
from .tracing_tables import draws, grouped

QUESTIONS = (
    ("Wrong labels: share of truly wrong ones among the first hundred suspects", "wrong labels", "precision"),
    ("Wrong labels: AUROC", "wrong labels", "auroc"),
    ("Noisy region against ordinary rows: AUROC", "regions", "noise"),
    ("Left-out region against ordinary rows: AUROC", "regions", "scarcity"),
    ("Noisy region against left-out region: AUROC", "regions", "noisy against left out"),
)


def tree_quality(record: dict[str, Any]) -> str:
    """For each question a table: the mean of every score on every data set, best first, and every draw."""
    parts = [f"{made(record)} cleanlab {record['cleanlab']}, scikit-learn {record['scikit-learn']}."]
    for words, training, key in QUESTIONS:
        lines = []
        for (name,), rows in grouped(record["rows"], "table").items():
            scores = {score: [row[training][key][score] for row in rows] for score in rows[0][training][key]}
            ordered = sorted(scores.items(), key=lambda item: -sum(item[1]))
            most = min(1.0, rows[0]["wrong labels"]["wrong"] / record["first"])
            limit = f" (at most {most:.2f})" if key == "precision" and most < 1 else ""
            for score, values in ordered:
                mean = f"{sum(values) / len(values):.3f}".removeprefix("0")
                shown = f"**{score}**" if score.startswith("whence") else score
                lines.append([f"{name}{limit}", shown, mean, draws(values)])
        parts.append(f"{words}.\n\n{table('table | score | mean | each draw', lines)}")
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"tree_quality": tree_quality}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
