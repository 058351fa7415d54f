"""The record of `benchmarks.cost` as tables: where a peer is ahead first, then every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .cost import FLOORS, room
from .peers import PEERS

Row = dict[str, Any]
DEFAULT = "ekfac"
"""The structure of `whence` that is nearest to what the peers compute."""

MEASURES = (
    ("fit_multiple", "fit", ".1f", ""),
    ("predict_multiple", "predict", ".1f", ""),
    ("fit_extra_mb", "memory of fit", ".0f", " MB"),
    ("predict_extra_mb", "memory of predict", ".0f", " MB"),
)


def named(row: Row) -> str:
    """The subject with its version, and what it did not take."""
    frozen = f" ({row['frozen']:,} parameters frozen)" if row.get("frozen") else ""
    return f"{row['subject']} {row.get('version', '')}".strip() + frozen


def standings(rows: list[Row]) -> Iterator[tuple[float, list[str]]]:
    """For each model and measure: ours over the best peer's, and that in words."""
    for model in dict.fromkeys(row["model"] for row in rows):
        here = [row for row in rows if row["model"] == model]
        for key, words, digits, unit in MEASURES:
            ours = [row for row in here if row["subject"] not in PEERS and key in row]
            theirs = [row for row in here if row["subject"] in PEERS and key in row]
            default = next((row for row in ours if row["subject"] == DEFAULT), None)
            if not theirs or default is None:
                continue
            best, least = (min(some, key=lambda row: float(row[key])) for some in (theirs, ours))
            cells = [f"{row['subject']} {row[key]:{digits}}{unit}" for row in (best, default, least)]
            yield default[key] / max(best[key], 1e-9), [f"{model}: {words}", *cells]


def winners(rows: list[Row]) -> list[list[str]]:
    """Rows of a table: what, the best peer, our default, our cheapest; where a peer is ahead of the default first."""
    return [cells for _, cells in sorted(standings(rows), key=lambda one: -one[0])]


def every(rows: Iterable[Row]) -> list[list[str]]:
    """All that was measured."""
    found = []
    for row in rows:
        if "missing" in row:
            found.append([row["model"], row["subject"], "-", f"not installed: {row['missing']}", *[""] * 6])
            continue
        references = [row.get("reference_fit_s", []), row.get("reference_predict_s", [])]
        apart = max((max(pair) / min(pair) for pair in references if pair), default=1.0)
        found.append(
            [
                row["model"],
                named(row),
                f"{row['n']:,}" if "n" in row else "-",
                f"{row['fit_multiple']:.1f}" if "fit_multiple" in row else row.get("failed", "-"),
                _predicted(row),
                _pair(row, "fit_batch", "predict_batch"),
                str(row.get("predict_points", "-")),
                _pair(row, "fit_extra_mb", "predict_extra_mb"),
                f"{room(row):.0f}" if "batch_mb" in row else "-",
                f"{apart:.2f}",
            ]
        )
    return found


def floors() -> str:
    """What the default must not exceed."""
    each = "; ".join(f"{model}: fit {fit:g}, predict {predict:g}" for model, (fit, predict) in FLOORS.items())
    return f"{each}; extra memory of a fit: twice the factors, and a batch's activations and gradients"


def _predicted(row: Row) -> str:
    if "predict_multiple" in row:
        return f"{row['predict_multiple']:.1f}"
    return row.get("failed", "-") if "fit_multiple" in row else "-"


def _pair(row: Row, *keys: str) -> str:
    return ", ".join(f"{row[key]:.0f}" if key in row else "-" for key in keys)
