"""Sums over tangents in any form against the same sums over the gradients themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whence.curvature import kronecker as moments
from whence.curvature import rotation as weighting
from whence.curvature.kronecker import Factors, MomentSums, gradient_moments
from whence.curvature.rotation import (
    CHUNK_NUMBERS,
    Basis,
    BasisView,
    directional_derivatives,
    gram_matrices,
    mix_cotangents,
    parts_outside,
    squared_lengths,
    weighted_sum,
)
from whence.jacobian.gradients import Block, Dense, Kronecker, Rows, Tangent, Whole

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def kronecker(n: int, c: int, e: int, t: int, o: int, i: int) -> Kronecker:
    block = Block("w", ("w", "b"), ((e * o, i), (e * o,)), "kronecker", e)
    return Kronecker(block, Whole(normal(n, e, t, i), ones=True), Whole(normal(n, c, e, t, o, seed=1)))


def rows(n: int, c: int, *, padded: bool) -> Rows:
    index = torch.randint(0, 5, (n, 4), generator=torch.Generator().manual_seed(n))
    grads = normal(n, c, 4, 3)
    return Rows(
        Block("e", ("e",), ((5, 3),), "rows"), index, grads * (index != 0)[:, None, :, None] if padded else grads
    )


def bare(n: int, c: int) -> Dense:
    return Dense(Block("p", ("p", "q"), ((2, 3), (4,)), "dense"), normal(n, c, 10))


TANGENTS: dict[str, Callable[[int], Tangent]] = {
    "linear": lambda c: kronecker(6, c, 1, 1, 4, 3),
    "linear, groups": lambda c: kronecker(6, c, 3, 1, 2, 3),
    "positions": lambda c: kronecker(6, c, 1, 5, 4, 3),
    "positions, groups": lambda c: kronecker(6, c, 2, 2, 4, 3),
    "rows": lambda c: rows(6, c, padded=False),
    "rows, padded": lambda c: rows(6, c, padded=True),
    "dense": lambda c: bare(6, c),
}
every_tangent = pytest.mark.parametrize("make", TANGENTS.values(), ids=TANGENTS.keys())
KRONECKER = {name: make for name, make in TANGENTS.items() if isinstance(make(1), Kronecker)}
every_kronecker_tangent = pytest.mark.parametrize("make", KRONECKER.values(), ids=KRONECKER.keys())
every_count = pytest.mark.parametrize("count", [1, 3])


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def corner(block: Block, keep: float) -> Basis:
    """Some orthonormal columns of each side; all of them if gradients have no Kronecker form."""

    def columns(keep: float, *shape: int) -> Tensor:
        return torch.linalg.qr(normal(*shape, shape[-1])).Q[..., : max(1, int(keep * shape[-1]))].contiguous()

    if block.kind == "kronecker":
        e, o, i = block.matrix_shape
        return Basis(block, columns(keep, e, i), columns(keep, e, o))
    return Basis(block, inputs=columns(1.0, block.matrix_shape[-1]))


@every_tangent
@every_count
def test_sums_of_tangents_are_sums_of_gradients(make: Callable[[int], Tangent], count: int) -> None:
    tangent = make(count)
    phi = tangent.materialize()  # (n, c, *shape)
    flat = phi.flatten(2)
    if not isinstance(tangent, Rows):
        same(gram_matrices(tangent), flat @ flat.transpose(1, 2))
        same(squared_lengths(tangent), flat.square().sum(2))
    shares = normal(len(phi), count, seed=5)
    same(weighted_sum(tangent, shares), torch.einsum("nc...,nc->...", phi, shares))
    direction = normal(*phi.shape[2:], seed=3)
    same(directional_derivatives(tangent, direction), flat @ direction.reshape(-1))
    weights = normal(6, count, 4, seed=4)
    mixed = mix_cotangents(tangent, weights)
    same(mixed.materialize(), torch.einsum("nc...,ncq->nq...", phi, weights))
    same(BasisView(tangent, corner(tangent.block, 0.6)).tangent.materialize(), phi)


@every_kronecker_tangent
@every_count
def test_what_lies_outside_a_corner_is_measured_without_a_difference(
    make: Callable[[int], Kronecker], count: int
) -> None:
    tangent = make(count)
    basis = corner(tangent.block, 0.6)
    assert basis.inputs is not None
    outside = tangent.materialize() - basis.from_coordinates(basis.to_coordinates(tangent.materialize()))
    flat, parts = outside.flatten(2), parts_outside(tangent, basis, tangent.a.project(basis.inputs))
    same(torch.stack([gram_matrices(part) for part in parts]).sum(0), flat @ flat.transpose(1, 2))
    same(torch.stack([squared_lengths(part) for part in parts]).sum(0), flat.square().sum(2))


@every_tangent
@every_count
@pytest.mark.parametrize("rounded", [False, True])
def test_weighted_lengths_inside_and_outside_a_corner(
    make: Callable[[int], Tangent], count: int, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighting, "products_are_rounded", lambda device: rounded)
    tangent = make(count)
    basis = corner(tangent.block, 0.6)
    pairs = [(normal(*basis.shape, seed=seed).abs(), 0.5 * seed) for seed in (7, 8)]
    moments = [weighting.DiagonalMoments(*pair) for pair in pairs]
    weights = weighting.Weights.of(basis, moments, len(pairs), torch.float64)
    phi = tangent.materialize()
    inside = basis.to_coordinates(phi).flatten(2)
    rest = (phi - basis.from_coordinates(basis.to_coordinates(phi))).flatten(2)
    wanted = [(inside * w.reshape(-1)) @ inside.transpose(1, 2) + v * rest @ rest.transpose(1, 2) for w, v in pairs]
    view = BasisView(tangent, basis, rounded)
    same(weights.variances(view), torch.diagonal(torch.stack(wanted), dim1=2, dim2=3))
    same(weights.grams(view), torch.stack(wanted))
    same(weights.variances(view), torch.diagonal(torch.stack(wanted), dim1=2, dim2=3))


@every_tangent
@every_count
@pytest.mark.parametrize("keep", [1.0, 0.6])
@pytest.mark.parametrize("rounded", [False, True])
def test_squares_inside_and_outside_a_corner(
    make: Callable[[int], Tangent], count: int, keep: float, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "products_are_rounded", lambda device: rounded)
    tangent = make(count)
    basis = corner(tangent.block, keep)
    sums = MomentSums(basis, 2, CPU)
    weights, summed = normal(2, count, seed=5).abs(), normal(6, count, seed=6)
    for _ in range(2):
        sums.add(BasisView(tangent, basis, rounded), weights, summed)
    phi = tangent.materialize()
    inside = basis.to_coordinates(phi)  # (n, c, *shape)
    same(sums.total, 2 * torch.einsum("nc,nc...->...", summed, phi))
    lengths = 2 * torch.einsum("qc,nc->q", weights, phi.flatten(2).square().sum(2))
    for found, row, length in zip(sums.finish(), weights, lengths, strict=True):
        wanted = 2 * torch.einsum("c,nc...->...", row, inside.square())
        same(found.inside, wanted)
        assert (basis.missing > 0) == (found.outside > 0)
        assert found.outside * basis.missing == pytest.approx(float(length - wanted.sum()), abs=1e-9)


@every_tangent
@every_count
@pytest.mark.parametrize("keep", [1.0, 0.6])
@pytest.mark.parametrize("rounded", [False, True])
def test_squares_of_combined_cotangents(
    make: Callable[[int], Tangent], count: int, keep: float, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "products_are_rounded", lambda device: rounded)
    tangent = make(count)
    basis = corner(tangent.block, keep)
    combinations = normal(6, count, 3, seed=6)
    masks, summed = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]).double(), torch.tensor([0.0, 1.0, 2.0]).double()
    sums, wanted = MomentSums(basis, 2, CPU), MomentSums(basis, 2, CPU)
    view = BasisView(tangent, basis, rounded)
    for _ in range(2):
        sums.add(view, masks, combinations @ summed, combinations)
        wanted.add(BasisView(mix_cotangents(tangent, combinations), basis, rounded), masks, summed.expand(6, -1))
    same(sums.total, wanted.total)
    for one, two in zip(sums.finish(), wanted.finish(), strict=True):
        same(one.inside, two.inside)
        assert one.outside == pytest.approx(two.outside)


@every_tangent
@every_count
@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_directions_seen_from_a_basis(make: Callable[[int], Tangent], count: int, keep: float) -> None:
    tangent = make(count)
    basis = corner(tangent.block, keep)
    direction = normal(*tangent.block.matrix_shape, seed=3)
    view = BasisView(tangent, basis)
    list(view.chunks())  # the rotation leaves the gradients
    found = directional_derivatives(view.tangent, direction)
    same(found, tangent.materialize().flatten(2) @ direction.reshape(-1))


# --- Factors ---------------------------------------------------------------------------------------------------------


@every_tangent
def test_factors_are_second_moments_of_inputs_and_gradients(make: Callable[[int], Tangent]) -> None:
    tangent = make(2)
    factors = Factors(tangent.block, CPU)
    for _ in range(3):
        factors.add(tangent)
    if isinstance(tangent, Kronecker):
        a, g = tangent.inputs(), tangent.grads()
        same(factors.inputs, 3 * torch.einsum("neti,netj->eij", a, a))
        same(factors.outputs, 3 * torch.einsum("nceto,ncetp->eop", g, g))
        assert factors.positions == 3 * 6 * a.shape[2]
    elif isinstance(tangent, Dense):
        same(factors.inputs, 3 * torch.einsum("ncp,ncq->pq", tangent.values, tangent.values))
        assert factors.outputs is None
    else:
        phi = tangent.materialize()
        same(factors.inputs, 3 * torch.einsum("ncvd,ncve->de", phi, phi))
        assert factors.outputs is None


@every_tangent
def test_whole_factors_are_second_moments_of_whole_gradients(make: Callable[[int], Tangent]) -> None:
    tangent = make(2)
    factors = Factors(tangent.block, CPU)
    factors.add(tangent, whole=True)
    if isinstance(tangent, Kronecker):
        phi = tangent.materialize()
        same(factors.inputs, torch.einsum("nceoi,nceoj->eij", phi, phi))
        same(factors.outputs, torch.einsum("nceoi,ncepi->eop", phi, phi))


@pytest.mark.parametrize("positions", [1, 2, 5])
def test_whole_factors_in_chunks(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tangent = kronecker(6, 2, 1, positions, 4, 3)
    phi = tangent.materialize()
    for most in (1, 100, 10_000):
        monkeypatch.setitem(CHUNK_NUMBERS, "cpu", most)
        below, above = gradient_moments(tangent.inputs(), tangent.grads())
        same(below, torch.einsum("nceoi,nceoj->eij", phi, phi))
        same(above, torch.einsum("nceoi,ncepi->eop", phi, phi))


def test_eigenvalues_guessed_from_whole_factors_keep_the_trace() -> None:
    tangent = kronecker(6, 2, 3, 4, 4, 3)
    factors = Factors(tangent.block, CPU)
    factors.add(tangent, whole=True)
    factors.add(tangent, whole=True)
    _, spectrum = factors.basis([])
    assert spectrum is not None
    same(spectrum.sum((1, 2)), 2 * tangent.materialize().square().sum((0, 1, 3, 4)))


def test_large_dense_blocks_get_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    tangent = bare(3, 2)
    monkeypatch.setattr("whence.curvature.accumulate.LARGEST_EXACT", 10)
    assert Factors(tangent.block, CPU).inputs is not None
    monkeypatch.setattr("whence.curvature.accumulate.LARGEST_EXACT", 9)
    factors = Factors(tangent.block, CPU)
    factors.add(tangent)
    basis, spectrum = factors.basis([])
    assert factors.inputs is None
    assert basis.inputs is None
    assert spectrum is None


@every_tangent
def test_eigenbases_diagonalise_their_factors(make: Callable[[int], Tangent]) -> None:
    tangent = make(2)
    factors = Factors(tangent.block, CPU)
    factors.add(tangent)
    basis, spectrum = factors.basis([])
    for factor, vectors in ((factors.inputs, basis.inputs), (factors.outputs, basis.outputs)):
        if factor is not None and vectors is not None:
            turned = vectors.transpose(-1, -2) @ factor @ vectors
            same(turned, torch.diag_embed(torch.diagonal(turned, dim1=-2, dim2=-1)))
    if isinstance(tangent, Kronecker):
        assert spectrum is not None
        # The trace of A (x) B over the number of positions.
        a, g = torch.einsum("eii->e", factors.inputs), torch.einsum("eoo->e", factors.outputs)
        same(spectrum.sum((1, 2)), a * g / factors.positions)
