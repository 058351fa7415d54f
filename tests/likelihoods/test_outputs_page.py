"""What the page on many outputs prints is what its code gives, and its table is what was recorded."""

from __future__ import annotations

import contextlib
import io
import json
import re
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "many-outputs.md").read_text(encoding="utf-8")


def test_code_prints_what_is_shown() -> None:
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(code, "many-outputs.md", "exec"), {})
    shown = re.search(r"```\n\n((?: {4}[^\n]*\n)+)", TEXT)
    assert shown is not None
    assert printed.getvalue() == re.sub(r"^ {4}", "", shown[1], flags=re.MULTILINE)


def test_table_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "results" / "outputs.json").read_text())["rows"]
    shown = [line for line in TEXT.splitlines() if re.match(r"\| [\d,]+ \|", line)]
    assert [row["outputs"] for row in rows] == [10, 100, 1000, 10_000, 50_000]
    for row, line in zip(rows, shown, strict=True):
        assert line.startswith(f"| {row['outputs']:,} | {row['parameters']:,} | {row['fit']:.1f} |")
        every = f"{row['all']:.1f}" if "all" in row else ""
        assert f" | {row['predicted']:.1f} | {every} | " in line


def test_language_models_are_what_was_measured() -> None:
    found = json.loads((ROOT / "results" / "tokens_cpu.json").read_text())
    names = ("sketch", "core", "ekfac")
    parts = {"": "own derivative of the columns, 32 sequences", ", before": "sampled labels, 32 sequences"}
    for (words, part), columns in product(parts.items(), (1, 4)):
        rows = [found[part].get(f"{name}, {columns} columns") for name in names]
        shown = "|".join(f" {row['multiple']:.1f} " if row else "  " for row in rows)
        assert re.search(rf"\| c = {columns}{words}[^|]*\|{re.escape(shown)}\|", TEXT)
    for columns in (2, 4, 8, 16):
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| c = {columns} |"))
        kinds = [(part, name) for part in ("sampled labels", "before") for name in ("ho", "hec3")]
        wanted = [found[f"errors, {part}"][f"{name}, {columns} columns"]["mean error"] for part, name in kinds]
        for number, value in zip(line.split("|")[2:], wanted, strict=False):
            assert abs(float(number) - value) <= 0.06 * value
