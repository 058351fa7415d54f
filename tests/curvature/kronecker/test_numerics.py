"""Decompositions of rank-deficient factors, sums over a million examples, gradients that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from whence.curvature.kronecker import Factors
from whence.jacobian.gradients import Block, Kronecker, Whole
from whence.linalg import eigenvectors


def dead_units(size: int, dead: int, seed: int, rank: int) -> Tensor:
    """The input factor of a layer that sees `dead` units that are always zero, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    live = torch.randn(300, rank, generator=generator) @ torch.randn(rank, size - dead, generator=generator)
    inputs = torch.zeros(300, size)
    inputs[:, torch.randperm(size, generator=generator)[: size - dead]] = live.relu()
    inputs[:, -1] = 1
    return inputs.double().T @ inputs.double()


# On an AVX-512 machine with MKL 2024.2 and one thread, `torch.linalg.eigh` in float32 does not converge on any of these
# but the second, where it returns NaN without an error; in float64 it does not converge on the last two. Of 306 such
# matrices it failed on 131 in float32 and on 2 in float64, and on none without their rows of zeros.
RANK_DEFICIENT = [
    (1153, 864, 0, 60),
    (124, 111, 5, 4),
    (1025, 922, 0, 26),
    (300, 270, 0, 8),
    (384, 345, 4, 10),
    (384, 345, 11, 10),
]


def check_decomposition(matrix: Tensor, values: Tensor, vectors: Tensor) -> None:
    size = float(matrix.abs().max())
    assert bool((values >= 0).all())
    assert bool((values.diff(dim=-1) >= 0).all())
    rebuilt = (vectors * values.unsqueeze(-2)) @ vectors.transpose(-1, -2)
    torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=1e-12 * size)
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64).expand_as(matrix)
    torch.testing.assert_close(vectors.transpose(-1, -2) @ vectors, eye, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recipe", RANK_DEFICIENT, ids=str)
def test_rank_deficient_factors_are_decomposed(recipe: tuple[int, int, int, int]) -> None:
    matrix, facts = dead_units(*recipe), list[str]()
    values, vectors = eigenvectors(matrix, "the input factor of fc", facts)
    check_decomposition(matrix, values, vectors)
    assert all("second driver" in fact and "fc" in fact for fact in facts)  # told, if it was needed


def test_rows_of_zeros_are_set_aside() -> None:
    # Three groups: some rows of zeros, none, and nothing but zeros.
    matrices = torch.stack([dead_units(12, 7, 0, 4), dead_units(12, 0, 1, 9), torch.zeros(12, 12, dtype=torch.float64)])
    values, vectors = eigenvectors(matrices, "here", [])
    check_decomposition(matrices, values, vectors)
    for matrix, value, vector in zip(matrices, values, vectors, strict=True):
        dead = (matrix.diagonal() == 0).nonzero().squeeze(1)
        assert not value[: len(dead)].any()
        assert torch.equal(vector[:, : len(dead)], torch.eye(12, dtype=torch.float64)[:, dead])


@pytest.mark.parametrize(
    "structure", ["exact", "core", whence.Exact(road="primal"), whence.Exact(road="dual")], ids=str
)
def test_the_ridge_is_chosen_with_dead_inputs(structure: whence.Structure) -> None:
    # The curvature of a linear model is the factor itself.
    generator = torch.Generator().manual_seed(4)
    live = torch.randn(300, 10, generator=generator) @ torch.randn(10, 39, generator=generator)
    inputs = torch.zeros(300, 384, dtype=torch.float64)
    inputs[:, torch.randperm(384, generator=generator)[:39]] = live.relu().double()
    inputs[:, -1] = 1
    targets = torch.randn(300, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(384, 1, bias=False).double().eval()
    tracer = whence.fit(model, [(inputs, targets)], structure=structure, ridge="loo", progress=False)
    assert tracer.ridge_path is not None
    assert bool(torch.isfinite(tracer.ridge_path.errors).all())
    assert bool(torch.isfinite(tracer.predict(inputs[:3]).hec3).all())


def test_a_factor_in_single_precision_is_decomposed_in_double() -> None:
    matrix = dead_units(384, 345, 4, 10).float()
    values, vectors = eigenvectors(matrix, "here", [])
    assert values.dtype == vectors.dtype == torch.float64
    check_decomposition(matrix.double(), values, vectors)


@pytest.mark.parametrize("shape", [(30, 30), (3, 4, 4)])
def test_a_second_driver_decomposes_the_same_and_is_told(
    shape: tuple[int, ...], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, facts = torch.randn(*shape, generator=generator, dtype=torch.float64), list[str]()
    matrix = root @ root.mT
    wanted = torch.linalg.eigh(matrix).eigenvalues

    def fails(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")

    def gives_nan(given: Tensor) -> tuple[Tensor, Tensor]:
        return given[..., 0], torch.full_like(given, torch.nan)

    for broken in (fails, gives_nan):
        monkeypatch.setattr(torch.linalg, "eigh", broken)
        values, vectors = eigenvectors(matrix, "the input factor of fc", facts)
        check_decomposition(matrix, values, vectors)
        torch.testing.assert_close(values, wanted, rtol=1e-10, atol=1e-12)
    assert facts == ["the eigenvectors of the input factor of fc needed a second driver"] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_factor_that_is_not_finite_is_refused(value: float) -> None:
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(whence.SingularCurvatureError, match=r"the input factor of fc.*float32"):
        eigenvectors(matrix, "the input factor of fc", [])


# --- Sums over many examples -----------------------------------------------------------------------------------------


def spread_out(small: float) -> Tensor:
    """A million inputs in float32 whose second moment has eigenvalues 1, 1e-2, 1e-4 and small^2."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    sizes = torch.diag(torch.tensor([1.0, 1e-1, 1e-2, small], dtype=torch.float64))
    return torch.randn(1_000_000, 4, generator=generator) @ (turn @ sizes).T.float()


def one_by_one(rows: Tensor) -> Tensor:
    """The sum of a a^T in float32, one row after the other, as the plainest matrix product has it.

    Libraries sum in blocks of a size that depends on the CPU, and err less.
    """
    a = rows.numpy()
    sums = [[np.add.accumulate(a[:, i] * a[:, j], dtype=np.float32)[-1] for j in range(4)] for i in range(4)]
    return torch.tensor(np.array(sums))


@pytest.mark.parametrize("batch", [1000, 1_000_000])
def test_sums_over_a_million_examples_keep_small_eigenvalues(batch: int) -> None:
    inputs = spread_out(1e-3)
    block = Block("fc", ("fc.weight",), ((2, 4),), "kronecker")
    factors = Factors(block, torch.device("cpu"))
    for a in inputs.split(batch):
        factors.add(Kronecker(block, Whole(a[:, None, None]), Whole(torch.ones(len(a), 1, 1, 1, 2))))
    assert factors.positions == len(inputs)
    assert factors.inputs is not None
    truth = torch.linalg.eigvalsh(inputs.double().T @ inputs.double())
    assert 0.5e-6 < float(truth[0] / truth[-1]) < 2e-6
    torch.testing.assert_close(torch.linalg.eigvalsh(factors.inputs[0]), truth, rtol=0.1, atol=0)
    in_single = torch.linalg.eigvalsh(one_by_one(inputs).double())
    assert abs(float(in_single[0] / truth[0]) - 1) > 0.5  # what float32 would have left of it


def test_ekfac_measures_eigenvalues_that_its_factors_lose() -> None:
    # The smallest eigenvalue is 1e-8 of the largest, below what float32 products of one batch resolve, and it is
    # measured nevertheless, as a sum of squares along its own direction.
    inputs = spread_out(1e-4)
    batches = [(a, a[:, :1]) for a in inputs.split(50_000)]
    truth = torch.linalg.eigvalsh(inputs.double().T @ inputs.double())
    assert 0.5e-8 < float(truth[0] / truth[-1]) < 2e-8
    model, structure = nn.Linear(4, 1, bias=False).eval(), whence.EKFAC(tolerance=0.0)
    tracer = whence.fit(model, batches, structure=structure, ridge=float(truth[0]), progress=False)
    found = tracer.bread.blocks[0].curvature.inside.reshape(-1).sort().values
    torch.testing.assert_close(found, truth, rtol=0.03, atol=0)


@pytest.mark.parametrize("ridge", [10.0, 1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize("structure", [whence.EKFAC(), whence.EKFAC(tolerance=0.05), whence.KFAC()], ids=str)
def test_single_precision_serves_at_any_ridge(structure: whence.Structure, ridge: float) -> None:
    # 1 / (s + lambda) ranges over ten decades; nothing that matters may be the difference of two large numbers.
    # Half of the inputs are always zero, as pixels at the border are, so that a corner holds all there is.
    x = torch.randn(60, 40, dtype=torch.float64) * torch.logspace(1, -2, 40) * (torch.arange(40) % 2)
    y = torch.randn(60, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 2)).double().eval()
    exact = whence.fit(model, [(x, y)], structure=structure, ridge=ridge, progress=False)
    wanted = exact.predict(x[:20])
    found = whence.fit(model.float(), [(x.float(), y.float())], structure=structure, ridge=ridge, progress=False)
    got = found.predict(x[:20].float())
    assert bool((torch.diagonal(found.bread.leverage_blocks, dim1=1, dim2=2) > 0).all())
    torch.testing.assert_close(found.leverage, exact.leverage, rtol=5e-3, atol=0)
    for name in ("ho", "hec0", "laplace"):
        torch.testing.assert_close(got.variance(name), wanted.variance(name), rtol=5e-3, atol=0)
    torch.testing.assert_close(got.hec3, wanted.hec3, rtol=2e-2, atol=0)


# --- Gradients that are not finite -----------------------------------------------------------------------------------

STRUCTURES = {
    "exact, primal": whence.Exact(road="primal"),
    "exact, dual": whence.Exact(road="dual"),
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
    "core": whence.Core(),
    "sketch": whence.Sketch(size=8),
}


class Rooted(nn.Module):
    """Finite everywhere, with an infinite slope where the first input is above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = (x[:, :1] <= 100).to(x.dtype)
        return self.head(torch.sqrt((self.inner(x) * flat).abs()))


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_gradients_that_are_not_finite_are_told(structure: whence.Structure) -> None:
    x = torch.randn(30, 3)
    x[20, 0] = 1000.0
    batches = [(part, torch.ones(len(part), 2)) for part in x.split(5)]
    with pytest.raises(whence.WhenceError, match="NaN or infinity"):
        whence.fit(Rooted().eval(), batches, structure=structure, progress=False)


class Steep(nn.Module):
    """Outputs of zero, whatever the rounding, whose gradients in the first layer exceed float16's largest, 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        with torch.no_grad():
            self.inner.weight.mul_(1e-4)
            self.inner.bias.mul_(1e-4)

    def forward(self, x: Tensor) -> Tensor:
        steep = self.head(self.inner(x) * 1000) * 1000
        return steep - steep.detach()


@pytest.mark.parametrize("name", ["ekfac", "kfac", "diagonal", "core", "sketch"])
def test_gradients_that_overflow_in_half_precision_are_told(name: str) -> None:
    x = torch.randn(30, 3)
    with pytest.raises(whence.WhenceError, match=r"NaN or infinity.*float32"):
        whence.fit(Steep().half().eval(), [(x.half(), torch.ones(30, 2).half())], structure=name, progress=False)
    whence.fit(Steep().eval(), [(x, torch.ones(30, 2))], structure=name, progress=False)  # the remedy works
