"""The tables of the page on language models, from the records under results/.

python -m benchmarks.language_tables docs/language-models.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .tables import made, rewrite, table
from .tracing_tables import grouped, mean

Row = dict[str, Any]


def seconds_of(rows: list[Row]) -> str:
    """Means of what the parts of a run took, in words."""
    parts = [key.removeprefix("seconds of ") for key in rows[0] if key.startswith("seconds of ")]
    listed = (f"{part} {mean(row[f'seconds of {part}'] for row in rows):.1f}" for part in parts)
    return f"Seconds: {', '.join(listed)}. Peak {max(row['peak, GiB'] for row in rows):.1f} GiB."


def scored(rows: list[Row], lines: Callable[[str], Iterable[float]]) -> list[list[str]]:
    """One line a score: means over draws, the best of each column in bold."""
    found = {name: list(lines(name)) for name in rows[0]["scores"]}
    best = [max(column) for column in zip(*found.values(), strict=True)]
    return [
        [name, *(f"**{one:.3f}**" if one == top else f"{one:.3f}" for one, top in zip(values, best, strict=True))]
        for name, values in found.items()
    ]


def corrupted(rows: list[Row]) -> str:
    """AUROC for all that is corrupted, and for each kind if there are several; precision among the first 5 %."""
    keys = list(next(iter(rows[0]["scores"].values())))
    keys = keys if len(keys) > 3 else keys[:2]
    names = ["precision at 5 %" if key == "precision" else key for key in keys]
    lines = scored(rows, lambda name: [mean(row["scores"][name][key] for row in rows) for key in keys])
    return table(" | ".join(["score", *names]), lines)


def planted(rows: list[Row]) -> str:
    """How often the document that states the fact is first, or among the first five."""
    kinds = [kind for kind in ("all", "right answers") if all(kind in row["scores"][NAIVE] for row in rows)]
    keys = [(kind, key) for kind in kinds for key in ("first", "first five", "reciprocal")]
    names = [f"{key}, {kind}".replace("reciprocal", "mean reciprocal rank") for kind, key in keys]
    lines = scored(rows, lambda name: [mean(row["scores"][name][a][b] for row in rows) for a, b in keys])
    return table(" | ".join(["method", *names]), lines)


NAIVE = "BM25, question"


def language(record: Row) -> str:
    """One table a task."""
    parts = [made(record)]
    for (task,), rows in grouped(record["rows"], "task").items():
        first, draws = rows[0], ", ".join(str(row["seed"]) for row in rows)
        about = f"**{task}**: {first['model']}, {first['learned']:,} weights learned, "
        if task == "planted":
            right = mean(row["right"] for row in rows)
            about += f"{first['documents']:,} documents, {first['questions']} questions, {right:.0%} answered right"
        else:
            about += f"{first['texts']:,} texts, {first['tokens']:,} tokens"
        about += f", on {first['where']}" if "where" in first else ""
        losses = f"loss of the passes {first['losses'][0]:.2f} to {first['losses'][-1]:.2f}"
        parts.append(f"{about}, draws {draws}; {losses}. {seconds_of(rows)}")
        parts.append(planted(rows) if task == "planted" else corrupted(rows))
    return "\n\n".join(parts)


def tokens_large(record: Row) -> str:
    """What fits of large models cost, and their peers' part: one row a model and structure; then what was refused."""
    lines, refused = [], []
    for run in record["runs"]:
        setting = run["setting"]
        for name, row in run["found"].items():
            if not isinstance(row, dict):
                continue
            found = {**run["found"], **row}  # some blocks alone have passes of their own
            if "refused" in row:
                refused.append(f"- {setting['shape']}, {name.replace('1 columns', '1 column')}: {row['refused']}")
            elif "seconds" in row:
                lines.append(
                    [
                        setting["shape"],
                        f"{found['weights'] / 1e9:.2f}",
                        f"{found['selected'] / 1e9:.2f}",
                        f"{setting['sequences']:,} x {setting['tokens']:,}",
                        f"{found['forward + backward, tokens a second']:,.0f}",
                        " ".join([name.replace("1 columns", "1 column"), row.get("version", "")]).strip(),
                        f"{row['tokens a second']:,.0f}",
                        f"{row['multiple']:.1f}",
                        eigenvectors(row),
                        f"{row['peak, GiB']:.0f}",
                        next((f"{row[key]:.2f}" for key in ASKED if key in row), ""),
                        run["surroundings"]["commit"][:8],
                    ]
                )
    first = record["runs"][0]["surroundings"]
    head = "sizes of | weights, 10⁹ | traced, 10⁹ | sequences x tokens | forward + backward, tokens/s | fit | tokens/s"
    head += " | times forward + backward | of these eigenvectors | peak, GiB | 8 queries, s | commit"
    place = f"Measured {first['when'][:10]} on {first['gpu']}, torch {first['torch']}."
    found_too_large = ["Refused before anything was allocated:\n\n" + "\n".join(refused)] if refused else []
    return "\n\n".join([f"{place} The record has the commands.", table(head, lines), *found_too_large])


def eigenvectors(row: Row) -> str:
    """Times forward + backward that these take, of whichever number of sequences."""
    found = row.get("stages", {}).get("eigenvectors", row.get("eigenvectors, multiple"))
    return "" if found is None else f"{found:.1f}"


ASKED = ("variance of the last word and its sequences, seconds", "queries, seconds")
TABLES: dict[str, Callable[[Row], str]] = {"tokens_large": tokens_large}
TABLES |= dict.fromkeys(("language", "language_small"), language)


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
