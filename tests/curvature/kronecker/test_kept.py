"""Gradients kept from pass to pass: the same numbers, with fewer passes over the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import whence

KEPT = "whence.curvature.kronecker.stream.KEPT_BYTES"


class Counted:
    """Batches that count how often they are read to the end."""

    def __init__(self, outputs: int, kind: str) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(60, 5, generator=draw, dtype=torch.float64)
        numbers = torch.randn(60, outputs, generator=draw, dtype=torch.float64)
        self.y = (numbers > 0).double() if kind == "bernoulli" else numbers
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(25), self.y.split(25), strict=True)
        self.passes += 1


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, outputs))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(("outputs", "kind", "fewer"), [(1, "gaussian", 2), (3, "gaussian", 1), (1, "bernoulli", 2)])
@pytest.mark.parametrize("meat", ["one_basis", "two_bases", "joint"])
def test_kept_or_pulled_back_anew(
    outputs: int,
    kind: Literal["gaussian", "bernoulli"],
    fewer: int,
    meat: Literal["one_basis", "two_bases", "joint"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single output is pulled back once for three passes; of several, the noise wants others in one of them."""
    found, passes = [], []
    for most in (2**30, 0):
        monkeypatch.setattr(KEPT, {"cpu": most, "cuda": most})
        data = Counted(outputs, kind)
        tracer = whence.fit(network(outputs), data, kind, whence.EKFAC(meat=meat), ridge=0.5, progress=False)
        found.append(tracer.predict(data.x))
        passes.append(data.passes)
    for name in found[0].estimators:
        torch.testing.assert_close(found[0].covariance(name), found[1].covariance(name), rtol=1e-9, atol=1e-12)
    assert passes[1] - passes[0] == fewer


def test_nothing_stays_behind() -> None:
    tracer = whence.fit(network(1), Counted(1, "gaussian"), structure="ekfac", ridge=0.5, progress=False)
    kept = tracer.bread.stream._kept
    assert not kept.open
    assert not kept._pieces


def test_a_chunk_size_is_the_most_that_is_held() -> None:
    """Fewer examples at a time than there are: every pass reads the data."""
    passes = []
    for chunk_size in (60, 59):
        data = Counted(1, "gaussian")
        whence.fit(network(1), data, structure="ekfac", ridge=0.5, progress=False, chunk_size=chunk_size)
        passes.append(data.passes)
    assert passes[1] - passes[0] == 2
