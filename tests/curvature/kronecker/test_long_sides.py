"""Leading directions of sides too long for a factor of their own, beside eigenvectors of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from whence.curvature.long_sides import LongSide, rows_of, side_bytes
from whence.runtime.processes import ALONE


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("vectors", "count"), [(30, 12), (200, 5), (7, 10)])
def test_they_are_eigenvectors(vectors: int, count: int) -> None:
    given = draw(vectors, 40) * torch.linspace(0.3, 4.0, 40, dtype=torch.float64).exp2()
    side = LongSide.empty(0, 2, 40, ALONE, torch.device("cpu"))
    side.add(given[:3])
    side.add(given[3:])
    found = side.leading(count, ALONE, "here", torch.float64)
    values, wanted = torch.linalg.eigh(given.T @ given)
    torch.testing.assert_close(found.values[0], values[-count:].clamp_min(0), rtol=1e-9, atol=1e-9 * float(values[-1]))
    assert found.trace == pytest.approx(float(given.square().sum()))
    columns = found.vectors[0]
    torch.testing.assert_close(columns.T @ columns, torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-12)
    known = min(count, vectors)  # beyond the rank, any direction will do
    ours, theirs = columns[:, -known:], wanted[:, -known:]
    torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=1e-6)


def test_rows_are_cut_as_torch_cuts() -> None:
    for size in (1, 5, 12, 17):
        for parts in (1, 2, 4, 7):
            slices = [rows_of(size, parts, part) for part in range(parts)]
            lengths = [one.stop - one.start for one in slices]
            theirs = [len(one) for one in torch.arange(size).chunk(parts)]
            assert lengths == theirs + [0] * (parts - len(theirs))


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(33, 9, bias=bias), nn.Tanh(), nn.Linear(9, 25, bias=bias), nn.Tanh(), nn.Linear(25, 3, bias=bias)
    return nn.Sequential(*layers).double().eval()


def fit(model: nn.Module, **options: Any) -> whence.Tracer:
    x = draw(16, 33, seed=2)
    structure = whence.EKFAC(**{"tolerance": 0.0, **options.pop("structure", {})})
    y = torch.arange(16) % 3
    return whence.fit(model, [(x[:9], y[:9]), (x[9:], y[9:])], "categorical", structure, ridge=0.5, progress=False)


def test_as_many_as_the_rank_are_all_there_is() -> None:
    """16 examples with 2 free outputs each: no factor here has a rank above 25, the length of one side."""
    model, asked = network(), draw(5, 33, seed=4)
    wanted, found = fit(model), fit(model, structure={"largest_side": 20, "leading": 26})
    torch.testing.assert_close(found.leverage, wanted.leverage, rtol=1e-9, atol=1e-11)
    for name in wanted.predict(asked).estimators:
        torch.testing.assert_close(
            found.predict(asked).variance(name), wanted.predict(asked).variance(name), rtol=1e-8, atol=1e-10, msg=name
        )
    torch.testing.assert_close(
        found.attribute(asked).hec3.share, wanted.attribute(asked).hec3.share, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("meat", ["one_basis", "two_bases"])
def test_what_is_left_out_is_told_and_variances_stay_variances(meat: str) -> None:
    tracer = fit(network(), structure={"largest_side": 20, "leading": 4, "meat": meat})
    facts = str(tracer.diagnostics)
    assert "of the 34 inputs of 0.weight the 4 leading directions have a basis" in facts
    assert "of the 25 outputs of 2.weight the 4 leading directions have a basis" in facts
    found = tracer.predict(draw(5, 33, seed=4))
    assert all(bool((found.variance(name) > 0).all()) for name in ("ho", "hec0", "hec3", "laplace"))
    without = fit(network(), structure={"largest_side": 20})
    assert "are too many for a basis of their own" in str(without.diagnostics)


def test_a_fit_with_leading_directions_is_saved_and_loaded(tmp_path: Any) -> None:
    model, asked = network(), draw(5, 33, seed=4)
    tracer = fit(model, structure={"largest_side": 20, "leading": 4})
    tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", model, progress=False)
    torch.testing.assert_close(again.predict(asked).hec3, tracer.predict(asked).hec3, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"leading": 0}, "leading to be at least 1"), ({"leading": 4, "meat": "joint"}, "'one_basis' or 'two_bases'")],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(whence.InputError, match=words):
        whence.EKFAC(**options)


def test_memory_is_told_and_refused() -> None:
    model = nn.Sequential(nn.Linear(3000, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    x, y = torch.randn(20, 3000), torch.randn(20, 2)
    structure = whence.EKFAC(largest_side=1000, leading=10)
    assert whence.estimate(model, [(x, y)], structure=structure).memory > 8 * 3001**2
    blocks = fit(network()).bread.stream.known.blocks
    assert side_bytes(blocks, 30, 5, 1) > side_bytes(blocks, 30, 5, 4) > 8 * 34 * 9
    with pytest.raises(whence.TooLargeError, match="Kronecker factors"):
        whence.fit(model, [(x, y)], structure=structure, max_memory=2**26, progress=False)
