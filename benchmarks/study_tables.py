"""Write the tables of the studies against retraining, people and other structures, from the records under results/.

    python -m benchmarks.study_tables docs/sources.md

and the same for docs/tracing.md and docs/benchmarks.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .tables import made, rewrite, table
from .tracing_tables import draws, grouped, mean

Row = dict[str, Any]


def datamodeling(record: Row) -> str:
    """One table a data set: the score of every method, in every draw."""
    parts = [made(record)]
    for (case,), rows in grouped(record["rows"], "case").items():
        first, seeds = rows[0], ", ".join(str(row["seed"]) for row in rows)
        parts.append(
            f"**{case}**: {first['network']}, {first['n']:,} examples, {first['epochs']} epochs, {first['halves']} "
            f"random halves, {first['test']} test points, draws {seeds}; accuracy "
            f"{mean(row['accuracy'] for row in rows):.3f}.{stopped(rows)}"
        )
        columns = {"mean | every draw": "score"}
        if "documents" in first:
            columns = {
                "random halves: mean | every draw": "score",
                "without one review: mean | every draw": "documents",
            }
        lines: dict[str, list[str]] = {name: [name] for row in rows for name in row["score"]}
        for key in columns.values() if lines else ():
            found = {name: [row[key][name] for row in rows if name in row[key]] for name in lines}
            best = max(mean(values) for values in found.values())
            for name, values in found.items():
                lines[name] += [bold(mean(values), best), draws(values)]
        parts.append(table(" | ".join(["method", *columns]), lines.values()))
    return "\n\n".join(parts)


def stopped(rows: Iterable[Row]) -> str:
    """A sentence for every run that was stopped before its end."""
    early = (row for row in rows if "missing" in row)
    return "".join(
        f" The run of {row['case']}, seed {row['seed']}, was stopped without {', '.join(row['missing'])}."
        for row in early
    )


def bold(value: float, best: float) -> str:
    """Three digits, the best in bold."""
    return f"**{value:.3f}**" if value == best else f"{value:.3f}"


def structures(record: Row) -> str:
    """One row a data set and structure: agreement with the exact one, every draw."""
    head = "data | weights | structure | same verdict as exact: mean | every draw | "
    head += "rank correlation of noise, of scarcity | " + " / ".join(record["verdicts"])
    lines = []
    for (case, structure), rows in grouped(record["rows"], "case", "structure").items():
        same = [row["same_verdict"] for row in rows]
        ranks = [f"{mean(row[key] for row in rows):.3f}" for key in ("rank_noise", "rank_scarcity")]
        counts = [sum(column) for column in zip(*(row["verdicts"] for row in rows), strict=True)]
        shares = " / ".join(f"{100 * one / sum(counts):.0f} %" for one in counts)
        where = [case, f"{rows[0]['parameters']:,}", f"`{structure}`"]
        lines.append([*where, f"**{100 * mean(same):.1f} %**", draws(same), ", ".join(ranks), shares])
    return f"{made(record)}\n\n{table(head, lines)}"


def price(record: Row) -> str:
    """Seconds of predictions and explanations."""
    head = "network | n | predictions | structure | fit s | predict s | first explain s | explain s | explain / predict"
    head += " | naming five s | same verdicts | inputs as a pool, / predict"
    lines = []
    for row in record["rows"]:
        start = [row["network"], f"{row['n']:,}", f"{row['test']:,}", f"`{row['structure']}`"]
        if "failed" in row:
            lines.append([*start, row["failed"], *[""] * 7])
            continue
        keys = ("fit_s", "predict_s", "first_explain_s", "explain_s")
        times, same = f"**{row['explain_over_predict']:.1f}**", f"{100 * row['same_verdicts']:.1f} %"
        pool = f"{row['pool_s'] / row['predict_s']:.1f}" if "pool_s" in row else "-"
        named = f"{row['naming_five_s']:.2f}"
        lines.append([*start, *(f"{row[key]:.2f}" for key in keys), times, named, same, pool])
    return f"{made(record)}\n\n{table(head, lines)}"


def people(record: Row) -> str:
    """Areas for wrong labels, rank correlations with people's disagreement, and what people say of each verdict."""
    groups = grouped(record["rows"], "case")
    about = "; ".join(
        f"{case}: {rows[0]['n']:,} images, {100 * rows[0]['wrong_labels']:.0f} % of the labels wrong, test accuracy "
        f"{mean(row['accuracy'] for row in rows):.3f}, seeds {', '.join(str(row['seed']) for row in rows)}"
        for (case,), rows in groups.items()
    )
    first = record["rows"][0]
    head = f"{made(record)} {first['network']}, {first['epochs']} epochs, `{first['structure']}`. {about}."
    parts = [head + stopped(record["rows"])]
    for key, words in (("auroc_wrong", "which labels are wrong: AUROC"), ("spearman_people", "rank correlation")):
        names = list(dict.fromkeys(name for row in record["rows"] for name in row[key]))
        lines = [[name, *(every(rows, key, name) for rows in groups.values())] for name in names]
        parts.append(table(" | ".join([words, *(case for (case,) in groups)]), lines))
    verdicts = dict.fromkeys(verdict for row in record["rows"] for verdict in row["verdicts"])
    lines = [[verdict, *(asked(rows, verdict) for rows in groups.values())] for verdict in verdicts]
    parts.append(table(" | ".join(["verdict: test images, mean entropy of people", *(c for (c,) in groups)]), lines))
    return "\n\n".join(parts)


def every(rows: Iterable[Row], key: str, name: str) -> str:
    """A score in every seed."""
    return draws(row[key][name] for row in rows if name in row[key]) or "-"


def asked(rows: list[Row], verdict: str) -> str:
    """How many images have a verdict, and how far people disagree about them; sums over seeds."""
    found = [row["verdicts"][verdict] for row in rows if row["verdicts"]]
    points = sum(one["points"] for one in found)
    people = sum(one["points"] * (one["people"] or 0.0) for one in found) / max(points, 1)
    return f"{points:,}, {people:.3f}" if points else "0"


TABLES: dict[str, Callable[[Row], str]] = {
    "datamodeling": datamodeling,
    "structures": structures,
    "price": price,
    "people": people,
}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
