"""Gradients kept from pass to pass: the same numbers, with fewer passes over the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import whence
from whence.curvature.accumulate import LEAST_CHUNK_SHARE, LayerSizes, fits_in_cache
from whence.runtime.memory import Budget

ROOM = "whence.curvature.accumulate"
KEPT = f"{ROOM}.CACHE_BYTES"


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
@pytest.mark.parametrize("meat", ["one_basis", "two_bases"])
def test_kept_or_pulled_back_anew(
    outputs: int,
    kind: Literal["gaussian", "bernoulli"],
    fewer: int,
    meat: Literal["one_basis", "two_bases"],
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
    assert tracer.bread.gradients._cache is None


def test_a_chunk_size_is_the_most_that_is_held() -> None:
    """Fewer examples at a time than there are: every pass reads the data."""
    passes = []
    for chunk_size in (60, 59):
        data = Counted(1, "gaussian")
        whence.fit(
            network(1),
            data,
            structure="ekfac",
            ridge=0.5,
            progress=False,
            execution=whence.Execution(chunk_size=chunk_size),
        )
        passes.append(data.passes)
    assert passes[1] - passes[0] == 2


def test_gradients_are_kept_where_all_of_them_take_little_memory() -> None:
    known, cpu = LayerSizes((), activations=400.0, gradients=1200.0), torch.device("cpu")
    assert fits_in_cache(known, 1, 10_000, cpu, Budget(cpu, 2**33))
    assert not fits_in_cache(known, 1, 10_000, cpu, Budget(cpu, 2**28))  # chunks need it
    assert not fits_in_cache(known, 1, 10**6, cpu, Budget(cpu, 2**40))
    assert 2 * 10_000 * known.example(1) <= LEAST_CHUNK_SHARE * 2**33


@pytest.mark.parametrize("interrupted", [False, True])
def test_one_thread_and_then_as_many_as_before(interrupted: bool) -> None:
    """Small networks are computed with by one thread; whatever happens, the others come back."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(1)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            if interrupted and seen[-1] == 1:
                raise KeyboardInterrupt
            return self.inner(x)  # type: ignore[no-any-return]

    try:
        data = Counted(1, "gaussian")
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                whence.fit(Watched(), data, structure="ekfac", ridge=0.5, progress=False)
        else:
            whence.fit(Watched(), data, structure="ekfac", ridge=0.5, progress=False).predict(data.x)
        assert set(seen) == {1, 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
