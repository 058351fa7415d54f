"""Write the tables of the page on tracing from the records under results/.

    python -m benchmarks.tracing_tables docs/tracing.md

Draws on which scores or thresholds were looked at while they were made are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .tables import folded, made, rewrite, table

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
    peers = ", ".join(f"{name} {record[name]}" for name in ("cleanlab", "kronfluence") if name in record)
    parts = [f"{made(record)} {peers}."]
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


GROUPS = ("noisy", "missing", "right", "wrong")


def shares(counts: Iterable[Iterable[int]]) -> str:
    """Counts of each verdict, summed over draws, as percentages."""
    sums = [sum(column) for column in zip(*counts, strict=True)]
    return " / ".join(f"{100 * one / max(sum(sums), 1):.0f}" for one in sums)


GOALS = (
    "Goals in brackets; what is missed is in bold. The best other score is the best of entropy and kNN label entropy "
    "for `noise`, of margin, entropy, kNN distance and DDU for missing classes, and of margin, entropy and energy for "
    "wrong predictions."
)
BESIDE_POOL = (
    "The same, where `explain` is given the test points as a pool of inputs of use (without their labels). The best "
    "other score is as above, without the pool."
)
WITH_POOL = ("noise", "scarcity", "source", "doubt", "frequency")
OTHERS = {
    "noisy, rest": ("entropy", "kNN label entropy"),
    "missing, rest": ("margin", "entropy", "kNN distance", "DDU"),
    "wrong, right": ("margin", "entropy", "energy"),
}
"""What can be had without whence, by the question it answers; the best of their means counts."""


def goals(studies: dict[tuple[Any, ...], list[Row]]) -> str:
    """What the verdicts should reach and what they do, means over draws; what is missed is in bold."""
    head = "study | noisy class called noisy (85 %) | missing class uncertain (50 %) | of these scarce alone (70 %) | "
    head += "correct others uncertain (10 %) | source, noisy against missing (.97) | noise; best other | "
    head += "scarcity; doubt; best other | doubt, wrong against right; best other"
    lines = []
    for (case,), rows in studies.items():
        called = {
            group: [[count / max(sum(row["verdicts"][group]), 1) for count in row["verdicts"][group]] for row in rows]
            for group in GROUPS
        }
        uncertain = [1.0 - one[0] for one in called["missing"]]
        alone = [one[2] / share for one, share in zip(called["missing"], uncertain, strict=True) if share]
        shown = [
            (mean(one[1] + one[3] for one in called["noisy"]), 0.85, True),
            (mean(uncertain), 0.5, True),
            (mean(alone), 0.7, True),
            (mean(1.0 - one[0] for one in called["right"]), 0.1, False),
        ]
        cells = [marked(f"{100 * value:.3g} %", (value >= goal) == high) for value, goal, high in shown]
        source = area(rows, "source", "noisy, missing")
        cells.append("-" if math.isnan(source) else marked(f"{source:.3f}", source >= 0.97))
        for contrast, ours in zip(OTHERS, (("noise",), ("scarcity", "doubt"), ("doubt",)), strict=True):
            best = max(area(rows, name, contrast) for name in OTHERS[contrast])
            reached = [area(rows, name, contrast) for name in ours]
            cells.append("; ".join([*(marked(f"{value:.3f}", value >= best) for value in reached), f"{best:.3f}"]))
        lines.append([case, *cells])
    return table(head, lines)


def marked(text: str, reached: bool) -> str:
    """In bold if a goal is missed."""
    return text if reached else f"**{text}**"


def area(rows: list[Row], name: str, contrast: str) -> float:
    """Mean area of a score over draws."""
    return mean(row["auroc"].get(name, {}).get(contrast) for row in rows)


def verdicts(record: Row) -> str:
    """What was to be reached, verdicts and accuracies of each study, areas beside the baselines, then every draw."""
    alone = grouped(unseen(record), "case")
    pool = {case: [{**row, **row["pool"]} for row in rows] for case, rows in alone.items()}
    told = " / ".join(record["verdicts"])
    parts = [made(record), GOALS, goals(alone), BESIDE_POOL, goals(pool)]
    parts += [
        f"Percentage of the points that are called {told}, without a pool and beside it.",
        called_table(alone, pool),
        "AUROC without a pool, means over draws; HeC3/Ho is `ratio`, *wrong, right* are predictions of other classes.",
        areas_table(alone, list(dict.fromkeys(key for row in record["rows"] for key in row["auroc"]))),
        "AUROC beside a pool. *Pool share* and *pool classifier* use the pool too, but not whence.",
        areas_table(pool, [*WITH_POOL, "pool share", "pool classifier"]),
    ]
    for (case,), rows in alone.items():
        first = rows[0]
        heading = f"{case}: {first['network']}, {first['loss']}, {first['n']} examples, {first['test']} test points"
        parts.append(folded(heading, draws_table(rows, told)))
    return "\n\n".join(parts)


def called_table(alone: dict[tuple[Any, ...], list[Row]], pool: dict[tuple[Any, ...], list[Row]]) -> str:
    """Verdicts by group of points, and how often confident and other predictions are right."""
    head = "study | draws | | noisy class | missing class | others, predicted rightly | others, wrongly | "
    head += "right of confident, of uncertain"
    lines = []
    for (case,) in alone:
        for words, rows in (("alone", alone[case,]), ("pool", pool[case,])):
            called = [shares(row["verdicts"][group] for row in rows) for group in GROUPS]
            right = [
                f"{100 * mean(row[key] for row in rows):.0f} %" for key in ("right_of_confident", "right_of_uncertain")
            ]
            lines.append([case, len(rows), words, *called, ", ".join(right)])
    return table(head, lines)


def areas_table(studies: dict[tuple[Any, ...], list[Row]], names: list[str]) -> str:
    """Mean areas of some scores, the best of each line in bold."""
    lines = []
    for (case,), rows in studies.items():
        for contrast in rows[0]["auroc"]["noise"]:
            found = {key: mean(row["auroc"][key][contrast] for row in rows) for key in names if key in rows[0]["auroc"]}
            best = max(found.values())
            cells = {key: f"**{value:.3f}**" if value == best else f"{value:.3f}" for key, value in found.items()}
            lines.append([case, contrast, *(cells.get(key, "") for key in names)])
    return table(" | ".join(["study", "", *names]), lines)


def learned_scores(record: Row) -> str:
    """Areas of combinations that learned from other data sets, beside single scores of ours; means over draws."""
    learned = ("boosting", "logistic", "same draw")
    questions = {
        "missing, rest": ("scarcity", "doubt", *learned),
        "noisy, missing": ("disagreement", "source", *learned),
    }
    lines = []
    for (case,), rows in grouped(record["rows"], "case").items():
        cells = [case]
        for contrast, names in questions.items():
            found = [row["auroc"] for row in rows if row["contrast"] == contrast]
            cells += [f"{mean(areas[name] for areas in found):.3f}" for name in names]
        lines.append(cells)
    head = " | ".join(["study", *(f"{contrast}: {' | '.join(names)}" for contrast, names in questions.items())])
    return f"{made(record)}\n\n{table(head, lines)}"


def mean(values: Iterable[float | None]) -> float:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def draws_table(rows: list[Row], told: str) -> str:
    """Every draw: counts of each verdict by class, and the areas of the two numbers."""
    head = "draw | noisy, missing class | accuracy of others | noise: noisy, rest | noise: noisy, missing | "
    head += "scarcity: missing, rest | separable | " + " | ".join(f"{group}: {told}" for group in GROUPS)
    head += " | missing, beside a pool"
    lines = [
        [
            row["seed"],
            f"{row['noisy_class']}, {row['missing_class']}",
            f"{row['accuracy_other']:.3f}",
            *(f"{row['auroc']['noise'][contrast]:.3f}" for contrast in ("noisy, rest", "noisy, missing")),
            f"{row['auroc']['scarcity']['missing, rest']:.3f}",
            f"{row['separable']:.3f}",
            *(" / ".join(map(str, row["verdicts"][group])) for group in GROUPS),
            " / ".join(map(str, row["pool"]["verdicts"]["missing"])),
        ]
        for row in rows
    ]
    return table(head, lines)


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
    return f"{made(record)}\n\n{table(head, lines)}"


def by_heart(record: Row) -> str:
    """How often and how far two orders of suspects are ahead of the loss of the same network."""
    ways, lines = ("without the example", "suspect rank"), []
    for case, structure in dict.fromkeys((row["case"], row["structure"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["case"], row["structure"]) == (case, structure)]
        cells = [case, f"`{structure}`", len(rows)]
        for way in ways:
            gaps = [row[way] - row["loss"] for row in rows]
            cells += [sum(gap < 0 for gap in gaps), f"{min(gaps):+.4f}", f"{mean(gaps):+.4f}", f"{max(gaps):+.4f}"]
        lines.append(cells)
    head = "data | structure | fits | " + " | ".join(f"{way}: below the loss | worst | mean | best" for way in ways)
    return f"{made(record)}\n\n{table(head, lines)}"


def pools(record: Row) -> str:
    """Verdicts beside pools of several sizes, and with fewer and fewer inputs of the missing class."""
    lines = []
    for (case,), rows in grouped(record["rows"], "case").items():
        smallest = min(row["pool"] for row in rows if row["pool"])
        natural = {row["seed"]: row["share"] for row in rows if row["pool"] == smallest}
        kinds: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            whole = row["share"] == natural[row["seed"]]
            size = "none" if not row["pool"] else f"{row['pool']:,}" if whole else "5,000, or all there are"
            share = "" if not row["pool"] else "as the others" if whole else f"{100 * row['share']:.3g} %"
            kinds.setdefault((size, share), []).append(row)
        for (size, share), some in kinds.items():
            called = {
                group: [
                    [count / max(sum(row["verdicts"][group]), 1) for count in row["verdicts"][group]] for row in some
                ]
                for group in GROUPS
            }
            cells = [
                mean(one[1] + one[3] for one in called["noisy"]),
                mean(1.0 - one[0] for one in called["missing"]),
                mean(one[2] for one in called["missing"]),
                mean(1.0 - one[0] for one in called["right"]),
            ]
            found = f"{area(some, 'scarcity', 'missing, rest'):.3f}"
            lines.append([case, size, share, *(f"{100 * value:.0f} %" for value in cells), found])
    head = "study | inputs in the pool | of the missing class | noisy class called noisy | missing class uncertain | "
    head += "scarce alone | correct others uncertain | AUROC of scarcity, missing against rest"
    return f"{made(record)}\n\n{table(head, lines)}"


def compared(record: Row) -> str:
    """What changes with other numbers of examples, directions and eigenvectors; means over draws."""
    lines = []
    for (case, way), rows in grouped(record["rows"], "case", "way").items():
        right = mean(1.0 - row["verdicts"]["right"][0] / sum(row["verdicts"]["right"]) for row in rows)
        areas = [("disagreement", "noisy, rest"), ("noise", "noisy, rest"), ("scarcity", "missing, rest")]
        same = [f"{min(row['correlation'][key] for row in rows):.4f}" for key in ("disagreement", "scarcity")]
        found = [f"{area(rows, *one):.3f}" for one in areas]
        lines.append([case, way, *found, f"{100 * right:.1f} %", *same, f"{mean(row['seconds'] for row in rows):.1f}"])
    head = "study | compared with, along | disagreement, noisy against rest | noise | scarcity, missing against rest | "
    head += "correct others uncertain | correlation of disagreement, least | of scarcity | explain s"
    return f"{made(record)}\n\n{table(head, lines)}"


def table_verdicts(record: Row) -> str:
    """Verdicts of `whence table` on the rows in question and on all others, every seed."""
    told = " / ".join(next(iter(record["rows"]))["others"])
    lines = []
    for (name,), rows in grouped(record["rows"], "table").items():
        for group in ("asked", "others"):
            found = [row[group] for row in rows if row[group]]
            cells = [" / ".join(f"{100 * share:.0f}" for share in one.values()) for one in found]
            if cells:
                lines.append([name, {"asked": "rows in question", "others": "others"}[group], ", ".join(cells)])
    return f"{made(record)}\n\n{table(f'table | | percentage {told}, every seed', lines)}"


def replaced_labels(record: Row) -> str:
    """AUROC of the replaced labels of images, every draw."""
    names = record["rows"][0]["auroc"]
    lines = [[name, " ".join(f"{row['auroc'][name]:.3f}" for row in record["rows"])] for name in names]
    return f"{made(record)}\n\n{table('score | AUROC of each draw', lines)}"


TABLES: dict[str, Callable[[Row], str]] = {
    "by_heart": by_heart,
    "label_errors": label_errors,
    "verdicts": verdicts,
    "pools": pools,
    "compared": compared,
    "learned_scores": learned_scores,
    "table_verdicts": table_verdicts,
    "label_errors_images": replaced_labels,
    "attribution": attribution,
}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
