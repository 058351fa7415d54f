"""What does not fit in memory is refused before anything is allocated, with sizes and ways out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whence
from doubles import batches, fit, inputs_and_targets, mlp
from whence.runtime.execution import Chunks


@pytest.mark.parametrize(("road", "takes"), [("auto", r"14\.9 KiB"), ("dual", r"14\.9 KiB"), ("primal", r"52\.4 KiB")])
def test_the_message(road: Any, takes: str) -> None:
    message = (
        rf"the exact structure \((dual|primal) road\) to fit in 1\.0 KiB, but it takes about {takes}\. For 8 examples, "
        r"2 outputs and 26 parameters the primal road takes 52\.4 KiB and the dual 14\.9 KiB: take the smaller one.*"
        r"structure='core' or 'ekfac'.*parameters='last_layer'.*hessian_columns=.*chunk_size.*road='matrix_free'.*or a "
        r"larger max_memory"
    )
    with pytest.raises(whence.TooLargeError, match=message) as caught:
        fit(
            mlp(),
            batches(),
            execution=whence.Execution(max_memory=1024, chunk_size=4),
            structure=whence.Exact(road=road),
        )
    assert isinstance(caught.value, MemoryError)


def test_nothing_is_allocated() -> None:
    x, y = inputs_and_targets()
    model = nn.Sequential(nn.Linear(3, 40_000), nn.Linear(40_000, 2)).double()
    with pytest.raises(whence.TooLargeError, match=r"primal road\) to fit in 1\.0 GiB, but it takes about 3\.8 TiB"):
        fit(model, [(x, y)], structure=whence.Exact(road="primal"), execution=whence.Execution(max_memory=2**30))


def test_the_limit_is_the_machine_without_an_option() -> None:
    x, y = inputs_and_targets()
    model = nn.Linear(3, 2).double()
    repeated = [(x.repeat(2_000, 1), y.repeat(2_000, 1))] * 40  # n k = 1,280,000: a kernel of 12 TiB
    with pytest.raises(
        whence.TooLargeError, match=r"dual road\) to fit in [\d.]+ [MGT]iB, but it takes about [\d.]+ TiB"
    ):
        fit(model, repeated, structure=whence.Exact(road="dual"))


def test_pieces_halve_until_they_fit() -> None:
    notes: list[str] = []
    pieces = Chunks(notes, "tangents")

    def work(where: slice) -> int:
        if where.stop - where.start > 2:
            raise torch.cuda.OutOfMemoryError("full")
        return where.start

    assert [where.start for where, _ in pieces.of(20, 30, work)] == list(range(0, 20, 2))
    assert [where.start for where, _ in pieces.of(4, 4, work)] == [0, 2]  # it is remembered
    assert [note.split()[-10] for note in notes] == ["20", "10", "5"]
    with pytest.raises(whence.TooLargeError, match="planned"):
        list(pieces.of(4, 4, planned))


def planned(where: slice) -> int:
    raise whence.TooLargeError("planned, and no fault of the device")


@pytest.mark.parametrize("road", ["primal", "dual"])
def test_rows_that_are_not_kept_give_the_same(road: Any) -> None:
    x, _ = inputs_and_targets()
    structure = whence.Exact(road=road)
    kept = fit(mlp(), batches(), structure=structure, recenter=True)
    need = {"primal": 53_000, "dual": 14_300}[road]
    again = fit(mlp(), batches(), structure=structure, recenter=True, execution=whence.Execution(max_memory=need))
    torch.testing.assert_close(again.leverage, kept.leverage, rtol=1e-10, atol=1e-13)
    ours, theirs = again.predict(x), kept.predict(x)
    for name in theirs.covariances:
        torch.testing.assert_close(ours.covariance(name), theirs.covariance(name), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ours.mean, theirs.mean)
