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


COMPARED = ("ho", "hec3", "laplace", "leverage")


def trees(record: dict[str, Any]) -> str:
    """Variances beside those of retrained models; time and memory."""
    beside = [
        [row["model"], row["rule"], _short(row["share"]), _short(row["rank"]), _short(row["to trees kept"])]
        for row in record.get("retrained", [])
    ]
    costs = [
        [
            f"{row['rows']:,}",
            f"{row['trees']:,}",
            f"{row['leaves']:,}",
            row["structure"],
            *(f"{row[what]['cpu']:.1f} ({row[what]['clock']:.0f})" for what in ("fit", "predict", "explain")),
            f"{row['memory'] / 2**30:.1f} GiB",
        ]
        for row in record.get("cost", [])
    ]
    directions = [
        [
            _short(row["rate"]),
            f"{row['size']:,} of {row['leaves']:,}",
            *(
                f"{_short(row[what]['share'])}, {row[what]['rank']:.3f}"
                for what in ("ho", "hec3", "laplace", "leverage")
            ),
            f"{row['verdicts']:.0%}",
        ]
        for row in record.get("core", [])
    ]
    near = "learning rate | directions | Ho: share, rank | HeC3 | Laplace | leverages of training rows | same verdict"
    head = "rows | trees | leaves | structure | fit | predict 10,000 | first explain, 1,000 | memory of the process"
    return "\n\n".join(
        [
            table("model | estimate | share | rank | over trees kept", beside),
            "Leading directions of the leaves beside the exact answer (see below):",
            table(near, directions),
            "CPU seconds of all threads (by the clock), and memory with the model and its data:",
            table(head, costs),
            made(record),
        ]
    )


def _short(value: float) -> str:
    """Three digits."""
    if value > 1000:
        return "over 1,000"
    return f"{value:.3g}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3g}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"tree_quality": tree_quality, "trees": trees}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
