"""Write the tables of the page on tracing from the records under results/.

    python -m benchmarks.tracing_tables docs/tracing.md

Draws on which scores or thresholds were looked at while they were made are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .tables import origin, rewrite, table

Row = dict[str, Any]


def unseen(record: Row) -> list[Row]:
    """Rows that may be published, in a fixed order."""
    keys = ("case", "loss", "optimiser", "structure", "seed")
    rows = [row for row in record["rows"] if row["stage"] == "unseen"]
    return sorted(rows, key=lambda row: [str(row.get(key, "")) for key in keys])


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows with the same values of some keys, together."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def draws(values: Iterable[float]) -> str:
    """Every draw, without the zero before the point."""
    return " ".join(f"{value:.3f}".removeprefix("0") for value in values)


def label_errors(record: Row) -> str:
    """One row a score: AUROC of every draw, by data set, length of training and loss."""
    parts = [f"{origin(record)} cleanlab {record['cleanlab']}."]
    for (case, loss), rows in grouped(unseen(record), "case", "loss").items():
        first = rows[0]
        learned = sum(row["flipped_learned"] for row in rows) / len(rows)
        parts.append(
            f"**{case}**, {loss}: {first['network']}, {first['n']} examples, {first['epochs']} epochs, draws "
            f"{', '.join(str(row['seed']) for row in rows)}; {learned:.0%} of the wrong labels learned."
        )
        names = list(dict.fromkeys(name for row in rows for name in row["auroc"]))
        lines = [[name, draws(row["auroc"].get(name, float("nan")) for row in rows)] for name in names]
        lines = [[name, text.replace("nan", "-")] for name, text in lines]
        called = draws(row["cleanlab_issues"]["hits"] / max(row["cleanlab_issues"]["called"], 1) for row in rows)
        same = draws(row["fits"][0]["hits_among_first"] / max(row["cleanlab_issues"]["called"], 1) for row in rows)
        main = rows[0]["fits"][0]["structure"]
        lines.append(["precision of cleanlab's issues, cross-validated", called])
        lines.append([f"precision of as many first suspects, whence {main}", same])
        parts.append(table("score | AUROC of each draw", lines))
    return "\n\n".join(parts)


def verdicts(record: Row) -> str:
    """Areas and confusion matrices of every draw."""
    parts = [origin(record)]
    head = "draw | noisy, missing class | noisy from missing: uncertain | all | by HeC3/Ho: uncertain | all | truth | "
    head += " | ".join(record["verdicts"])
    kinds = [f"noisy_from_missing{among}{by}" for by in ("", "_ratio") for among in ("_uncertain", "")]
    for (case, optimiser, structure), rows in grouped(unseen(record), "case", "optimiser", "structure").items():
        first = rows[0]
        parts.append(
            f"**{case}**, {first['network']}, {first['n']} examples, {optimiser}, `{structure}`, "
            f"{first['test']} test points:"
        )
        lines: list[list[Any]] = []
        for row in rows:
            for at, (truth, counts) in enumerate(row["confusion"].items()):
                areas = ["-" if row[kind] is None else f"{row[kind]:.3f}" for kind in kinds]
                start = [row["seed"], f"{row['noisy_class']}, {row['missing_class']}", *areas]
                lines.append([*(start if at == 0 else [""] * len(start)), truth, *counts])
        told = [[row[kind] for row in rows if row[kind] is not None] for kind in kinds]
        means = [f"**{sum(values) / len(values):.3f}**" if values else "-" for values in told]
        lines.append(["mean", "", *means, *([""] * (1 + len(record["verdicts"])))])
        parts.append(table(head, lines))
    return "\n\n".join(parts)


def attribution(record: Row) -> str:
    """Forward passes a test point, gaps and memory."""
    counts = list(record["rows"][0]["forward_passes_per_point"])
    head = (
        "network | n | structure | "
        + " | ".join(f"m = {m}" for m in counts)
        + " | gap Ho | gap HeC3 | extra MB (n k d)"
    )
    lines = [
        [
            f"{row['network']}, {row['data']}",
            row["n"],
            f"`{row['structure']}`",
            *(f"{row['forward_passes_per_point'][m]:.2f}" for m in counts),
            f"{row['gap_ho']:.1e}",
            f"{row['gap_hec3']:.1e}",
            f"{row['extra_mb']:.0f} ({row['gradients_mb']:.0f})",
        ]
        for row in record["rows"]
    ]
    return f"{origin(record)}\n\n{table(head, lines)}"


TABLES: dict[str, Callable[[Row], str]] = {
    "label_errors": label_errors,
    "verdicts": verdicts,
    "attribution": attribution,
}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
