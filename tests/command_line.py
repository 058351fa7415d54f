"""Calls of the command line, and tables to call it with."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

from whence.cli.app import app


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(path: Path, columns: dict[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def houses(rows: int = 150) -> dict[str, Any]:
    """Prices that depend on the area, and scatter in one town."""
    generator = np.random.default_rng(0)
    area = generator.uniform(50, 150, rows)
    town = generator.choice(["quiet", "loud"], rows)
    price = 100 + 2 * area + np.where(town == "loud", 30.0, 1.0) * generator.normal(size=rows)
    gaps = generator.random(rows) < 0.1
    return {
        "house_id": [f"H{number:05d}" for number in range(rows)],
        "area": [f"{value:.1f}" for value in area],
        "town": town,
        "rooms": ["" if gap else str(number % 5) for number, gap in enumerate(gaps)],
        "country": ["DE"] * rows,
        "mixed": [("?", "12", "x", "3")[number % 4] for number in range(rows)],
        "built": [f"{1990 + number % 30}-0{1 + number % 9}-15" for number in range(rows)],
        "price": [f"{value:.2f}" for value in price],
    }
