"""Sums of one pass in several files, from processes that share the layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

import whence
from whence.io.checkpoint import files_of, fill, path_of, remove_others
from whence.io.files import opened, write

WHOLE = torch.arange(70, dtype=torch.float64).reshape(10, 7)


def save(folder: Path, *parts: Mapping[str, Tensor]) -> None:
    for at, tensors in enumerate(parts):
        write(path_of(folder, 1, at, len(parts)), {"kind": "pass"}, tensors)


def read(folder: Path, state: Mapping[str, Tensor], alone: bool = False) -> None:
    with ExitStack() as stack:
        (paths,) = files_of(folder, 1)
        fill(state, [stack.enter_context(opened(path)) for path in paths], alone=alone)


@pytest.mark.parametrize("there", [1, 2, 3, 4])
@pytest.mark.parametrize("here", [1, 2, 3, 4])
def test_rows_are_cut_anew(there: int, here: int, tmp_path: Path) -> None:
    def cut(parts: int) -> list[dict[str, Tensor]]:
        each = -(-10 // parts)
        return [{f"rows.0@{low}": WHOLE[low : low + each].clone()} for low in range(0, parts * each, each)]

    save(tmp_path, *cut(there))
    for wanted in cut(here):
        state = {name: torch.zeros_like(rows) for name, rows in wanted.items()}
        read(tmp_path, state, alone=here == 1)
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)


def test_each_takes_its_own(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"0.inside": WHOLE, "leverage_blocks": WHOLE[0]},
        {"1.inside": 2 * WHOLE, "leverage_blocks": WHOLE[0]},
        {"leverage_blocks": WHOLE[0]},
    )
    state = {"leverage_blocks": torch.zeros(7).double(), "1.inside": torch.zeros_like(WHOLE)}
    read(tmp_path, state)
    read(tmp_path, {})
    assert torch.equal(state["1.inside"], 2 * WHOLE)
    assert torch.equal(state["leverage_blocks"], WHOLE[0])


def test_a_single_number(tmp_path: Path) -> None:
    save(tmp_path, {"total": WHOLE.sum()})
    state = {"total": torch.zeros((), dtype=torch.float64)}
    read(tmp_path, state, alone=True)
    assert float(state["total"]) == float(WHOLE.sum())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([{"sums@0": WHOLE[:4]}, {"sums@5": WHOLE[5:]}], "rows of sums are missing"),
        ([{"sums@0": WHOLE[:4]}, {"sums@4": WHOLE[4:9]}], "rows of sums are missing"),
        ([{"sums@0": WHOLE[:4]}, {"sums@4": WHOLE[4:].float()}], "another shape"),
        ([{"sums@0": WHOLE[:4]}, {"sums@4": WHOLE[4:, :6]}], "another shape"),
        ([{"sums@0": WHOLE.reshape(-1)}], "another shape"),
        ([{"sums@0": WHOLE.sum()}], "another shape"),
        ([{"sums": WHOLE}], "rows of sums are missing"),
        ([{"sums@-1": WHOLE}], "other sums"),
        ([{"sums@" + 5000 * "9": WHOLE}], "other sums"),
        ([{"sums@0": WHOLE, "more": WHOLE}], "other sums"),
        ([{"other@0": WHOLE}], "other sums"),
    ],
)
def test_files_without_the_sums_that_are_wanted(parts: list[dict[str, Tensor]], words: str, tmp_path: Path) -> None:
    save(tmp_path, *parts)
    state = {"sums@0": torch.zeros_like(WHOLE)}
    with pytest.raises(whence.CorruptArtifactError, match=words):
        read(tmp_path, state, alone=True)
    assert not bool(state["sums@0"].any())  # nothing is taken over before all is found


def test_a_sum_that_is_missing(tmp_path: Path) -> None:
    save(tmp_path, {"0.inside": WHOLE}, {"1.inside": WHOLE})
    with pytest.raises(whence.CorruptArtifactError, match="other sums"):
        read(tmp_path, {"2.inside": torch.zeros_like(WHOLE)})
    with pytest.raises(whence.CorruptArtifactError, match="another shape"):
        read(tmp_path, {"1.inside": torch.zeros(10, 8).double()})


def test_files_count_only_all_together(tmp_path: Path) -> None:
    names = [
        "pass-01-1-of-2",
        "pass-01-3-of-3",
        "pass-01-2-of-3",
        "pass-01-0-of-1",
        "pass-01-1-of-1",
        "pass-10",
        "pass-01-x",
    ]
    for name in [*names, "pass-02-2-of-2", "pass-02-3-of-2", "pass-03-0-of-2", "pass-03-2-of-2"]:
        (tmp_path / f"{name}.whence").touch()
    assert files_of(tmp_path, 1) == files_of(tmp_path, 2) == files_of(tmp_path, 3) == []
    for name in ("pass-01-2-of-2", "pass-01"):
        (tmp_path / f"{name}.whence").touch()
    assert [path.name for path in files_of(tmp_path, 1)[-1]] == ["pass-01-1-of-2.whence", "pass-01-2-of-2.whence"]
    remove_others(tmp_path, 1, 2)
    kept = sorted(path.name for path in tmp_path.glob("pass-01*"))
    assert kept == [f"pass-01-{which}.whence" for which in ("0-of-1", "1-of-1", "1-of-2", "2-of-2", "x")]
    assert (tmp_path / "pass-10.whence").exists()
