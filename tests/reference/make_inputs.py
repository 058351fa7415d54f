"""The regression sets behind the committed R numbers, all of them shipped with scikit-learn.

Run as a script it writes each set as CSV for `make_reference.R`; the tests call `load` for the very same arrays.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn import datasets

LINEAR = ("diabetes", "linnerud", "wine", "breast_cancer")
BINARY = "malignancy"
_TEST_ROWS = 5


@dataclass(frozen=True)
class RegressionSet:
    """Training rows and a few test rows; the design starts with a column of ones."""

    design: np.ndarray  # (n, p)
    targets: np.ndarray  # (n, k)
    test_design: np.ndarray  # (m, p)


def _standardized(columns: np.ndarray) -> np.ndarray:
    """Zero mean and unit variance a column: collinear units (area, perimeter) would only measure conditioning."""
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


def _split(features: np.ndarray, targets: np.ndarray) -> RegressionSet:
    design = np.column_stack([np.ones(len(features)), _standardized(features)])
    rows = len(design) - _TEST_ROWS
    return RegressionSet(design[:rows], targets[:rows].reshape(rows, -1), design[rows:])


def load(name: str) -> RegressionSet:
    """One of the sets named in `LINEAR`, or `BINARY` (targets 0 and 1)."""
    if name == "diabetes":  # disease progression from ten measurements
        bunch = datasets.load_diabetes()
        return _split(bunch.data, bunch.target)
    if name == "linnerud":  # weight, waist and pulse, three outputs at once, from three exercises; 15 rows
        bunch = datasets.load_linnerud()
        return _split(bunch.data, bunch.target)
    if name == "wine":  # alcohol from the twelve other chemical measurements
        data = datasets.load_wine().data
        return _split(data[:, 1:], data[:, 0])
    # Every other patient, so that both diagnoses occur and the committed file stays small.
    bunch = datasets.load_breast_cancer()
    data, benign = bunch.data[::2], bunch.target[::2]
    if name == "breast_cancer":  # mean fractal dimension from the nine other mean features
        return _split(data[:, :9], _standardized(data[:, 9]))
    if name == BINARY:  # texture, smoothness and symmetry: classes overlap, so the logistic fit is finite
        return _split(data[:, [1, 4, 8]], 1.0 - benign)
    raise ValueError(f"expected one of {(*LINEAR, BINARY)}, got {name!r}")


def write(name: str, directory: Path) -> None:
    """`NAME_train.csv` (x1, x2, ..., y1, ...) and `NAME_test.csv` (x1, x2, ...), without the column of ones."""
    chosen = load(name)
    x_names = [f"x{j}" for j in range(1, chosen.design.shape[1])]
    y_names = [f"y{c + 1}" for c in range(chosen.targets.shape[1])]
    train = np.column_stack([chosen.design[:, 1:], chosen.targets])
    for part, names, table in (("train", x_names + y_names, train), ("test", x_names, chosen.test_design[:, 1:])):
        path = directory / f"{name}_{part}.csv"
        np.savetxt(path, table, fmt="%.17g", delimiter=",", header=",".join(names), comments="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the CSV files (made if missing)")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*LINEAR, BINARY):
        write(name, directory)


if __name__ == "__main__":
    main()
