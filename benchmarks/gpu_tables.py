"""The tables of the page on benchmarks about half precision on a GPU, and about where its seconds go.

python -m benchmarks.gpu_tables docs/benchmarks.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tables import cifar, made, rewrite, table

LEAST = 0.15
"""Seconds of a part that has a column of its own."""


def where(record: dict[str, Any]) -> str:
    """Seconds of the stages of fits, by what was done in them, and by kernels."""
    found = [f"{made(record)} {record['network']}, {record['n']:,} random images."]
    for row in record["rows"]:
        stages = {stage: parts for stage, parts in row["fit"].items() if sum(parts.values()) >= LEAST}
        sums: dict[str, float] = {}
        for parts in stages.values():
            for part, seconds in parts.items():
                sums[part] = sums.get(part, 0.0) + seconds
        shown = sorted((part for part in sums if part != "other" and sums[part] >= LEAST), key=lambda part: -sums[part])
        rows = []
        for stage, parts in stages.items():
            cells = [parts.get(part, 0.0) for part in shown]
            whole = sum(parts.values())
            rows.append([stage, *(f"{one:.2f}" if one >= 0.005 else "" for one in (*cells, whole - sum(cells), whole))])
        kernels = row["fit_kernels"]
        busy = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in kernels["kinds"].items())
        found.append(
            f"`{row['structure']}`, {row['fit_s']:.1f} s with a clock that waits for the GPU after every part:"
        )
        found.append(table(" | ".join(["stage", *shown, "rest", "all"]), rows))
        found.append(f"The kernels of a fit to some of the images, {kernels['seconds']:.1f} s: {busy}.")
    return "\n\n".join(found)


def floors(record: dict[str, Any]) -> str:
    """Seconds of the network's own passes and of eigendecompositions."""
    passes = [
        [
            "bfloat16" if row["bf16"] else "TF32" if row["tf32"] else "float32",
            "last" if row["channels_last"] else "first",
            "together" if row["together"] else "in turn",
            f"{row['seconds']:.2f}",
        ]
        for row in record["passes"]
    ]
    sizes = [[row["size"], row["dtype"].removeprefix("torch."), f"{row['seconds']:.3f}"] for row in record["eigh"]]
    return "\n\n".join(
        [
            f"{made(record)} Passes over {record['n']:,} images, forward and back to the outputs of all layers.",
            table("precision | channels | backward passes for ten outputs | s", passes),
            table("eigendecomposition of | in | s", sizes),
        ]
    )


def pairs(record: dict[str, Any]) -> str:
    """Seconds of a fit, and of the scores of all pairs."""
    head = "structure | parameters | n | queries | fit s | scores of all pairs s"
    rows = [
        [
            f"`{row['structure']}`",
            *(f"{row[key]:,}" for key in ("parameters", "n", "queries")),
            *(f"{row[key]:.1f}" for key in ("fit_s", "pairs_s")),
        ]
        for row in record["rows"]
        if "fit_s" in row
    ]
    return f"{made(record)}\n\n{table(head, rows)}"


def limit(record: dict[str, Any]) -> str:
    """Seconds and memory within a limit."""
    rows = [
        [
            f"`{row['structure']}`",
            f"{row['parameters']:,}",
            f"{row['n']:,}",
            f"{row['fit_s']:.1f}",
            f"{row['peak_gib']:.1f}",
        ]
        for row in record["rows"]
        if "fit_s" in row
    ]
    return f"{made(record)}\n\n{table('structure | parameters | n | fit s | peak GiB', rows)}"


def many(record: dict[str, Any]) -> str:
    """Seconds and memory of fits to ever more images."""
    rows = [
        [f"`{row['structure']}`", f"{one['n']:,}", f"{one['fit_s']:.1f}", f"{one['peak_gib']:.1f}"]
        for row in record["rows"]
        for one in row.get("sizes", ())
    ]
    return f"{made(record)}\n\n{table('structure | n | fit s | peak GiB', rows)}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu_half": cifar,
    "gpu_vit": cifar,
    "gpu_vit_ekfac": cifar,
    "gpu_limit": limit,
    "gpu_growth": many,
    "gpu_where": where,
    "gpu_floors": floors,
    "gpu_pairs": pairs,
}


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), TABLES)
