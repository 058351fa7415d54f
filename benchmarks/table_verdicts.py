"""Verdicts of `whence table` where the answer is known: classes with hardly any labels, coins for labels, clean tables.

    python -m benchmarks.table_verdicts --penguins penguins.csv --out results/table_verdicts.json

Rows without a label are predicted, not trained on. `penguins.csv` comes with the package palmerpenguins; the digits are
scikit-learn's. Recorded for each table and seed: the share of each verdict among the rows in question, and among the
others.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from typer.testing import CliRunner

from whence.cli.app import app
from whence.influence.explanation import VERDICTS

from .record import save, say
from .studied import open_record, put

Rows = np.ndarray[Any, np.dtype[np.bool_]]


def few_labels(frame: pd.DataFrame, target: str, rare: Any, kept: int, seed: int) -> tuple[pd.DataFrame, Rows]:
    """All labels of a class but a few are removed; the rows in question are those without."""
    places = np.flatnonzero((frame[target] == rare).to_numpy())
    hidden = np.random.default_rng(seed).permutation(places)[kept:]
    asked = np.zeros(len(frame), dtype=bool)
    asked[hidden] = True
    return frame.assign(**{target: frame[target].astype(object).where(~asked, None)}), asked


def coins(frame: pd.DataFrame, target: str, two: tuple[Any, Any], seed: int) -> tuple[pd.DataFrame, Rows]:
    """Coins for the labels of two classes; the rows in question are those of both."""
    asked = frame[target].isin(two).to_numpy()
    heads = np.random.default_rng(seed).random(len(frame)) < 0.5
    labels = np.where(asked, np.where(heads, *two), frame[target])
    return frame.assign(**{target: labels}), asked


def of(loaded: Any) -> pd.DataFrame:
    """A table of scikit-learn's, its classes by name."""
    return pd.DataFrame(loaded.data).add_prefix("x").assign(label=[f"class {one}" for one in loaded.target])


def tables(penguins: Path | None) -> Iterator[tuple[str, str, Callable[[int], tuple[pd.DataFrame, Rows]]]]:
    """Name, target, and a function of the seed that makes the table and says which rows are in question."""
    digits = of(load_digits())
    if penguins is not None:
        birds = pd.read_csv(penguins)
        yield (
            "penguins, 6 Chinstraps labelled",
            "species",
            lambda seed: few_labels(birds, "species", "Chinstrap", 6, seed),
        )
        yield "penguins, clean", "species", lambda seed: (birds, np.zeros(len(birds), dtype=bool))
    yield "digits, eight 9s labelled", "label", lambda seed: few_labels(digits, "label", "class 9", 8, seed)
    yield "digits, coins for 3 and 5", "label", lambda seed: coins(digits, "label", ("class 3", "class 5"), seed)
    for name, load in (
        ("digits", load_digits),
        ("iris", load_iris),
        ("wine", load_wine),
        ("cancer", load_breast_cancer),
    ):
        frame = of(load())
        yield f"{name}, clean", "label", lambda seed, frame=frame: (frame, np.zeros(len(frame), dtype=bool))


def measure(frame: pd.DataFrame, target: str, asked: Rows, seed: int) -> dict[str, Any]:
    """Run the command as a user would, and read the CSV file that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "table.csv", Path(folder) / "verdicts.csv"
        frame.to_csv(path, index=False)
        done = CliRunner().invoke(
            app,
            [
                "table",
                str(path),
                "-t",
                target,
                "--verdicts",
                "all",
                "--no-report",
                "--csv",
                str(out),
                "--seed",
                str(seed),
            ],
        )
        if done.exit_code:
            raise RuntimeError(f"whence table ended with {done.exit_code}: {done.output}")
        found = pd.read_csv(out)
    if len(found) != len(frame):
        raise RuntimeError(f"expected a line for each of {len(frame)} rows, got {len(found)}.")
    verdicts = found["verdict"].to_numpy()
    shares = {
        name: {verdict: round(float((verdicts[which] == verdict).mean()), 4) for verdict in VERDICTS}
        for name, which in (("asked", asked), ("others", ~asked))
        if which.any()
    }
    return {"rows": len(frame), "asked": int(asked.sum()), **shares}


def main() -> None:
    """Run every table with every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--penguins", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tables", nargs="+", default=[""], help="Beginnings of names; all when not given.")
    parser.add_argument("--append", action="store_true", help="Keep the rows of the record that is there.")
    parser.add_argument("--out", type=Path, default=Path("results/table_verdicts.json"))
    given = parser.parse_args()
    record = open_record(given.out, given.append)
    for name, target, make in tables(given.penguins):
        for seed in given.seeds if name.startswith(tuple(given.tables)) else ():
            frame, asked = make(seed)
            row = {"table": name, "seed": seed, **measure(frame, target, asked, seed)}
            put(record, row, ("table", "seed"))
            save(given.out, record)
            say(f"{name}, seed {seed}: {row.get('asked')} {row.get('others')}")


if __name__ == "__main__":
    main()
