"""Write the tables of the page on benchmarks from the records under results/.

    python -m benchmarks.tables docs/benchmarks.md

Text between `<!-- name -->` and `<!-- end -->` is replaced by the table of that name; all else stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import cost_tables

FEW = 6
"""Commands of one record that are shown."""
RESULTS = Path(__file__).parent.parent / "results"


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; cells of the head are separated by bars. Every row has as many."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns]
    for row in rows:
        cells = [str(cell) for cell in row]
        if len(cells) != columns:
            raise ValueError(f"expected {columns} cells, as in the head {head!r}, got {len(cells)}: {cells}.")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def origin(record: dict[str, Any]) -> str:
    """Where and with what it was measured; of a record of many, each of its parts."""
    if "origins" in record:
        return " ".join(record["origins"])
    place = record.get("gpu") or f"{record['processor']}, {record['threads']} threads"
    return f"Measured {record['when'][:10]} on {place}, torch {record['torch']}, commit {record['commit'][:12]}."


def made(record: dict[str, Any]) -> str:
    """The same, with the command, or those that made a record in parts: all of a few, or the first of many."""
    given = record.get("commands") or record["command"]
    listed = [given] if isinstance(given, str) else given
    more = f" and {len(listed) - 1} more like it, which the record lists" if len(listed) > FEW else ""
    return f"{origin(record)} {', '.join(f'`{one}`' for one in (listed[:1] if more else listed))}{more}."


def folded(summary: str, body: str) -> str:
    """A long table behind one line, which opens it."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{body}\n\n</details>'


def replaced(text: str, name: str, found: str) -> str:
    """A page with another table between the marks of that name."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda match: f"{match[1]}{found}\n{match[2]}", text, flags=re.S
    )


def rewrite(page: Path, tables: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    """Make the tables of a page anew; one without a record stays as it is."""
    text = page.read_text()
    for name, make in tables.items():
        source = RESULTS / f"{name}.json"
        if source.exists():
            text = replaced(text, name, make(json.loads(source.read_text())))
    page.write_text(text)


def scale(value: float) -> str:
    """Two digits, or a power of ten."""
    return f"{value:.2f}" if 0.005 < value < 1000 else f"{value:.0e}"


def quality(record: dict[str, Any]) -> str:
    """One table a network: every structure and ridge."""
    parts = [made(record)]
    for case in record["cases"]:
        about = (
            f"<b>{case['case']}</b>: {case['data']}, {case['n']} examples, k = {case['outputs']}, "
            f"{case['parameters']:,} parameters, test accuracy {case['accuracy']:.2f} (the noisy class included), "
            f"forward + k backward over the training set {case['reference_s']:.2f} s."
        )
        head = "lambda / n | structure | rank Ho | HeC3 | ratio | scale Ho | HeC3 | AUROC noisy (exact)"
        rows = []
        for row in case["rows"]:
            start = [f"{row['ridge_share']:g}", f"`{row['structure']}`"]
            if "failed" in row:
                rows.append([*start, row["failed"], *[""] * 8])
                continue
            ranks = [f"{row[key]:.3f}" for key in ("rank_ho", "rank_hec3", "rank_ratio")]
            scales = [scale(row["scale_ho"]), scale(row["scale_hec3"])]
            noisy = f"{row['auroc_ratio']:.3f} ({row['auroc_ratio_exact']:.3f})"
            freedom = f"{row['freedom']:.0f} ({row['exact_freedom']:.0f})"
            rows.append([*start, *ranks, *scales, noisy, freedom, f"{row['fit_s']:.2f}", f"{row['predict_s']:.2f}"])
        parts.append(folded(about, table(head + " | freedom (exact) | fit s | predict s", rows)))
    return "\n\n".join(parts)


def cost(record: dict[str, Any]) -> str:
    """Where a peer is ahead, then all subjects of all models."""
    parts = [f"{made(record)} Floors for `ekfac`: {cost_tables.floors()}."]
    ahead = cost_tables.winners(record["rows"])
    if ahead:
        parts.append("The lowest cost of each side; rows where `ekfac` is furthest behind another library come first.")
        parts.append(table("what | best of the peers | `whence`, ekfac | `whence`, cheapest", ahead))
    head = (
        "model | subject | n | fit | predict | batch fit, predict | points timed | extra MB fit, predict"
        " | floor of fit, MB | refs apart"
    )
    return "\n\n".join([*parts, folded("Every run", table(head, cost_tables.every(record["rows"])))])


def cifar(record: dict[str, Any]) -> str:
    """Seconds and memory on a GPU."""
    head = "network | structure | fit s | predict s | again s | peak GiB fit, predict | rank Ho, HeC3, ratio to plain"
    rows = []
    for network in record["networks"]:
        for row in network["rows"]:
            if "failed" in row:
                rows.append([network["network"], f"`{row['structure']}`", row["failed"], *[""] * 4])
                continue
            ranks = (f"rank_{name}_to_plain" for name in ("ho", "hec3", "ratio"))
            agree = [f"{row[key]:.4f}" for key in ranks if key in row]
            rows.append(
                [
                    network["network"],
                    f"`{row['structure']}`",
                    f"{row['fit_s']:.1f}",
                    f"{row['predict_s']:.2f}",
                    f"{row['predict_again_s']:.2f}",
                    f"{row['fit_peak_gib'] or 0:.1f}, {row['predict_peak_gib'] or 0:.1f}",
                    ", ".join(agree),
                ]
            )
    told = "; ".join(
        f"{one['network']}: {one['parameters']:,} parameters, n = {one['n']:,}, {one['test']:,} test images"
        + (
            f", forward + k backward of these {one['reference_test_s']:.1f} s "
            f"({one['reference_test_tf32_s']:.1f} s in TF32)"
            if "reference_test_s" in one
            else ""
        )
        for one in record["networks"]
    )
    repeated = ", repeated with flips and shifts" if record["repeated_with_flips_and_shifts"] else ""
    return f"{made(record)} {record['data']}{repeated}. {told}.\n\n{table(head, rows)}"


def growth(record: dict[str, Any]) -> str:
    """Time and memory over the number of examples."""
    head = "structure | n | fit CPU s | forward + k backward CPU s | multiple | extra MB"
    rows = [
        [
            f"`{row['structure']}`",
            f"{row['n']:,}",
            f"{row['fit_s']:.2f}",
            f"{row['reference_s']:.3f}",
            f"{row['fit_s'] / row['reference_s']:.1f}",
            f"{row['extra_mb']:.0f}",
        ]
        for row in record["rows"]
        if "fit_s" in row
    ]
    return f"{made(record)}\n\n{table(head, rows)}"


def bases(record: dict[str, Any]) -> str:
    """Variants of EKFAC's bases over the draws of each network: means, and every draw's AUROC."""
    parts = [origin(record)]
    draws: dict[str, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        draws.setdefault(case["case"], []).append(case)
    for name, cases in draws.items():
        first = cases[0]
        exact = " ".join(f"{case['rows'][0]['auroc_ratio3']:.3f}" for case in cases)
        about = (
            f"<b>{name}</b>: {first['data']}, {first['n']} examples, k = {first['outputs']}, {first['parameters']:,} "
            f"parameters, {len(cases)} {'draw' if len(cases) == 1 else 'draws'}, AUROC of the exact ratio {exact}."
        )
        found: dict[str, list[dict[str, Any]]] = {}
        for case in cases:
            for row in case["rows"][1:]:
                found.setdefault(row["structure"], []).append(row)
        rows = []
        for variant, each in found.items():
            keys = ("rank_ho", "rank_hec3", "rank_ratio3", "scale_ho", "scale_hec3")
            means = [f"{sum(row[key] for row in each) / len(each):.2f}" for key in keys]
            rows.append([f"`{variant}`", *means, " ".join(f"{row['auroc_ratio3']:.3f}" for row in each)])
        head = "structure | rank Ho | HeC3 | ratio | scale Ho | HeC3 | AUROC noisy, every draw"
        parts.append(folded(about, table(head, rows)))
    return "\n\n".join(parts)


def waited(record: dict[str, Any]) -> str:
    """Seconds and memory by structure and size, and of the verbs."""
    found = {row["name"]: row for row in record["rows"] if "seconds" in row}
    fits = [row for row in found.values() if "weights" in row]
    rows = [
        [
            *(row["what"], f"{row['weights']:,}", f"{row['n']:,}"),
            *(f"{row['seconds']:.1f}", f"{row['mb']:,}", row["commit"][:7]),
        ]
        for row in fits
    ]
    verbs = ", ".join(
        f"`{verb}` {found[f'cnn: {verb}']['seconds']:.1f} s" for verb in ("predict", "explain", "trust", "report")
    )
    return (
        f"{made(record)}\n\n{table('fit | weights | examples | seconds | extra MB | commit', rows)}\n\n"
        f"Of 200 points, after the first of these fits: {verbs}."
    )


def asked(record: dict[str, Any]) -> str:
    """How memory and answers stayed, for every structure that was asked again and again."""
    rows = [
        [
            row["structure"],
            f"{row['predictions']:,}",
            row["batch"],
            f"{row['resident'][0] / 2**20:.1f} MiB",
            f"{row['gained'] / 2**10:+.0f} KiB",
            "the same" if row["worst"] == 0 else f"{row['worst']:.0e}",
        ]
        for row in record["rows"]
    ]
    head = "structure | predictions | at once | memory after a tenth | gained until the end | answers differ by"
    return f"{origin(record)}\n\n{table(head, rows)}"


def ridges(record: dict[str, Any]) -> str:
    """Rules for the ridge against retrained networks: means over problems, and each problem."""
    cases = record["cases"]
    rules = list(dict.fromkeys(row["rule"] for case in cases for row in case["rows"]))

    def mean(chosen: list[dict[str, Any]], structure: str, rule: str, what: str, key: str) -> float | None:
        each = [
            [
                row[what][key]
                for row in case["rows"]
                if (row["structure"], row["rule"]) == (structure, rule) and what in row
            ]
            for case in chosen
        ]
        found = [sum(some) / len(some) for some in each if some]
        return sum(found) / len(found) if found else None

    def cells(chosen: list[dict[str, Any]], structure: str, rule: str) -> list[str]:
        numbers = [
            mean(chosen, structure, rule, f"{name}, same", key)
            for name in ("Ho", "HeC3")
            for key in ("log", "abs_log", "rank", "coverage")
        ]
        numbers += [mean(chosen, structure, rule, f"{name}, fresh", "abs_log") for name in ("Ho", "HeC3")]
        return ["" if one is None else f"{one:.2f}" for one in numbers]

    def measured(rule: str) -> int:
        return sum(any(row["rule"] == rule and "ridge" in row for row in case["rows"]) for case in cases)

    sizes = "log | size of log | rank | coverage"
    head = (
        f"structure | rule | cases | Ho: {sizes} | HeC3: {sizes} | fresh weights, Ho: size of log | HeC3: size of log"
    )
    whole = table(
        head,
        ([f"`{how}`", rule, measured(rule), *cells(cases, how, rule)] for how in ("exact", "ekfac") for rule in rules),
    )
    each = table(
        "problem | weight decay | " + " | ".join(rules),
        (
            [
                case["problem"],
                f"{case['decay']:g}",
                *(
                    ""
                    if (ho := mean([case], "exact", rule, "Ho, same", "abs_log")) is None
                    else f"{ho:.1f}, {mean([case], 'exact', rule, 'HeC3, same', 'abs_log'):.1f}"
                    for rule in rules
                ),
            ]
            for case in cases
        ),
    )
    words = "Every problem: size of log of Ho, of HeC3, for `exact` and the same first weights"
    return f"{made(record)}\n\n{whole}\n\n{folded(words, each)}"


def each(rows: list[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> str:
    """A number of every seed."""
    return " ".join(text(row) for row in rows)


def table_intervals(record: dict[str, Any]) -> str:
    """`whence table`: coverage by table and by verdict, then the model that was taken and its accuracy."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        by_table.setdefault(row["table"], []).append(row)
    covered, accurate = [], []
    pooled: dict[str, list[dict[str, Any]]] = {}
    for name, rows in by_table.items():
        rows.sort(key=lambda row: row["seed"])
        score = "R2" if "R2" in rows[0]["scores"] else "accuracy"
        own = sum(row["scores"][score] for row in rows) / len(rows)
        other = sum(row["boosting"] for row in rows) / len(rows)
        error = "; ".join(", ".join(f"{kind} {value:.4g}" for kind, value in row["validation"].items()) for row in rows)
        taken = ", ".join(dict.fromkeys(row["model"] for row in rows))
        listed = each(rows, lambda row, score=score: f"{row['scores'][score]:.3f}")
        peers = each(rows, lambda row: f"{row['boosting']:.3f}")
        accurate.append([name, score, taken, f"**{own:.3f}** ({listed})", f"{other:.3f} ({peers})", error])
        if "intervals" not in rows[0]:
            continue
        sizes = f"{rows[0]['train']:,} / {rows[0]['test']:,}"
        whole = [row["intervals"]["all"] for row in rows]
        narrower = sum(one["width"] / one["plain_width"] for one in whole) / len(whole)
        mean, plain = (share(whole, key) for key in ("covered", "plain_covered"))
        seeds = each(rows, lambda row: f"{share([row['intervals']['all']], 'covered'):.3f}")
        covered.append([name, sizes, f"**{mean:.3f}** ({seeds})", f"{plain:.3f}", f"{narrower:.2f}"])
        for row in rows:
            for verdict, one in row["intervals"].items():
                pooled.setdefault(verdict, []).append(one)
    verdicts = [
        [
            verdict,
            f"{count(found):,}",
            f"**{share(found, 'covered'):.3f}**",
            f"{share(found, 'plain_covered'):.3f}",
            f"{sum(one['rows'] * one['width'] / one['plain_width'] for one in found) / count(found):.2f}",
        ]
        for verdict, found in pooled.items()
    ]
    return "\n\n".join(
        [
            f"{made(record)} At most {record['most_rows']:,} rows of each table.",
            table("held-out rows of all tables | rows | inside | one width for all | mean width, relative", verdicts),
            table("table | train / held out | inside (every seed) | one width for all | mean width, relative", covered),
            table(
                "table | score | model | `whence table` (every seed) | HistGradientBoosting | validation errors",
                accurate,
            ),
        ]
    )


def beside(record: dict[str, Any]) -> str:
    """Seconds of two versions, in turn."""
    rows = []
    for row in record["rows"]:
        pairs = [f"{row[what][key]:.3g}" for what in ("reference", "fit", "predict") for key in ("before", "now")]
        rows.append([row["model"], f"{row['n']:,}", len(row["rounds"]), *pairs])
    head = "model | n | rounds | forward + backward s, before | now | fit s, before | now | predict s, before | now"
    return f"{made(record)} Before: commit {record['before']}.\n\n{table(head, rows)}"


def share(found: list[dict[str, Any]], key: str) -> float:
    """Of the rows of several parts."""
    return float(sum(one[key] for one in found) / count(found))


def count(found: list[dict[str, Any]]) -> int:
    """Rows of several parts."""
    return sum(int(one["rows"]) for one in found)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "quality": quality,
    "cost": cost,
    "cost_beside": beside,
    "gpu_cifar": cifar,
    "gpu_tf32": cifar,
    "scaling": growth,
    "two_bases": bases,
    "soak": asked,
    "ridge_default": ridges,
    "seconds": waited,
    "table_intervals": table_intervals,
}


def main() -> None:
    """Replace the tables of a page."""
    rewrite(Path(sys.argv[1]), TABLES)


if __name__ == "__main__":
    main()
