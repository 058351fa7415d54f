"""`--pool`: rows of a new file that are frequent there and rare in training are scarce."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call

CENTRES = {"red": (0.0, 0.0), "green": (5.0, 0.0), "blue": (0.0, 5.0), "new": (1.0, 1.0)}


def rows(random: np.random.Generator, kinds: list[str], each: int) -> pd.DataFrame:
    kind = random.permutation(np.repeat(kinds, each))
    place = np.array([CENTRES[one] for one in kind]) + 0.8 * random.normal(size=(len(kind), 2))
    return pd.DataFrame({"a": place[:, 0].round(3), "b": place[:, 1].round(3), "kind": kind})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved fit of three kinds, and new rows of four."""
    folder, random = tmp_path_factory.mktemp("pool"), np.random.default_rng(0)
    rows(random, ["red", "green", "blue"], 100).to_csv(folder / "train.csv", index=False)
    rows(random, [*CENTRES], 60).to_csv(folder / "truth.csv", index=False)
    pd.read_csv(folder / "truth.csv").drop(columns="kind").to_csv(folder / "new.csv", index=False)
    told = ("--save", folder / "kinds.whence", "--model", "network", "--no-report", "--csv", folder / "rows.csv", "-q")
    result = call("table", folder / "train.csv", "-t", "kind", *told)
    assert result.exit_code == 0, result.output
    return folder


def test_rows_of_a_kind_that_is_frequent_only_in_the_new_file_are_scarce(saved: Path) -> None:
    new = (pd.read_csv(saved / "truth.csv").kind == "new").to_numpy()
    scarce = {}
    for name, told in {"alone": (), "pool": ("--pool",)}.items():
        path = saved / f"{name}.csv"
        result = call("predict", saved / "kinds.whence", saved / "new.csv", "--csv", path, "-q", *told)
        assert result.exit_code == 0, result.output
        found = pd.read_csv(path)
        scarce[name] = found.verdict.isin(["scarce data", "both"]).to_numpy()
        assert ("frequency" in found) == (name == "pool")
    assert scarce["pool"][new].mean() > scarce["alone"][new].mean() + 0.1
    assert scarce["pool"][~new].mean() < 0.2
    assert found.frequency[new].median() > 2 > found.frequency[~new].median()


def test_explain_and_report_take_the_pool_too(saved: Path) -> None:
    named = ("--row", "7", "--json", "-q")
    alone, pool = (
        json.loads(call("explain", saved / "kinds.whence", saved / "new.csv", *named, *told).stdout)[0]
        for told in ((), ("--pool",))
    )
    assert "times as frequent in the pool" in pool["because"]
    assert "in the pool" not in alone["because"]
    result = call("report", saved / "kinds.whence", saved / "new.csv", "--pool", "--out", saved / "new.html", "-q")
    assert result.exit_code == 0, result.output
    assert (saved / "new.html").stat().st_size > 10_000
    assert "the more frequent inputs like it are in the pool of those in use" in (saved / "new.html").read_text()
