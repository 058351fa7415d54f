"""The table of uncertain reviews, in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .reviews import Review

LISTS = ("HeC3", "HeC3 / Ho", "Ho")
LABELS = {0: "negative", 1: "positive"}


def opening(review: Review, most: int = 250) -> str:
    """The first words of a review, as in the paper."""
    return review.text if len(review.text) <= most else review.text[:most].rsplit(" ", 1)[0] + " ..."


def write_table(results: dict[str, Any], path: Path) -> Path:
    """One part for each list: reviews with their numbers, each with the training reviews that carry most of HeC3."""
    parts = []
    for name in LISTS:
        rows = [
            f"## Highest {name}",
            "",
            "| review | stars | P(positive) | Ho | HeC3 | opening |",
            "|---|---|---|---|---|---|",
        ]
        for label, word in LABELS.items():
            for at in results["listed"][f"{name}, {label}"]:
                one = results["shown"][str(at)]
                rows.append(
                    f"| {word}, {one['name']} | {one['rating'] or one['kind']} | {one['probability']:.2f} ± "
                    f"{one['deviation']:.2f} | {one['ho']:.3g} | {one['hec3']:.3g} | {cell(one['text'])} |"
                )
                rows += [
                    f"| ← {behind['share']:.0%} of HeC3: {LABELS[behind['label']]}, {behind['name']} | | | | | "
                    f"{cell(behind['text'])} |"
                    for behind in results["behind"][str(at)]
                ]
        parts.append("\n".join(rows))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def cell(text: str) -> str:
    """Text that no Markdown table takes for anything else."""
    return "".join(f"\\{letter}" if letter in "|*_`<>[]\\" else letter for letter in text)
