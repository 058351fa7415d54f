"""Sums over rotated gradients, whatever form they are held in, against the gradient matrices themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from whence.curvature import rotation as measure
from whence.curvature.rotation import Basis, BasisView, Factored, Full, Rotated, Sparse
from whence.jacobian.gradients import Block, Dense, Kronecker, Rows, Whole

sizes = st.integers(1, 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(draw: Any) -> int:
    return draw(sizes)


@st.composite
def factored(draw: Any) -> tuple[Factored, Tensor]:
    n, c, e, o, i = (whole(draw) for _ in range(5))
    a, g = normal(n, e, i), normal(n, c, e, o, seed=1)
    return Factored(a, g), g[..., None] * a[:, None, :, None, :]


@st.composite
def full(draw: Any) -> tuple[Full, Tensor]:
    n, c, e, o, i = (whole(draw) for _ in range(5))
    phi, padding = normal(n, c, e, o, i), draw(st.integers(0, 2))
    padded = nn.functional.pad(phi, (0, padding))
    return Full(padded.reshape(n, c, -1), (e, o, i), padding), phi


@st.composite
def sparse(draw: Any) -> tuple[Sparse, Tensor]:
    n, c, rows, d = (whole(draw) for _ in range(4))
    phi = normal(n, c, rows, d)
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=n * rows, max_size=n * rows))).reshape(n, rows)
    phi = phi * kept[:, None, :, None]
    examples, at = kept.nonzero(as_tuple=True)
    return Sparse(at, examples, phi[examples, :, at], n, (rows, d)), phi


def check(form: Rotated, phi: Tensor) -> None:
    """Every sum, by its definition."""
    n, c, *shape = phi.shape

    def same(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)

    weights = normal(3, c, seed=2)
    same(form.squares(weights.unsqueeze(1)), torch.einsum("qc,nc...->q...", weights, phi.square()))
    weights = normal(3, n, c, seed=7)
    same(form.squares(weights), torch.einsum("qnc,nc...->q...", weights, phi.square()))
    weights = normal(2, *shape, seed=3)
    flat = phi.reshape(n, c, -1)
    same(form.grams(weights), torch.einsum("wp,ncp,ndp->wncd", weights.reshape(2, -1), flat, flat))
    numel = flat.shape[2]
    index = torch.randperm(numel, generator=torch.Generator().manual_seed(numel))[: max(1, numel // 2)]
    for chosen in (index, index.sort().values, torch.arange(numel), index[:0]):
        same(form.gather(chosen), flat[:, :, chosen])


def check_mixed(form: Rotated, phi: Tensor) -> None:
    weights = normal(*phi.shape[:2], 3, seed=6)
    check(form.mix(weights), torch.einsum("nc...,ncq->nq...", phi, weights))


@pytest.mark.parametrize("forms", [factored(), full(), sparse()], ids=["factored", "full", "sparse"])
def test_sums_are_those_of_the_gradients(forms: st.SearchStrategy[tuple[Rotated, Tensor]]) -> None:
    @given(forms)
    def holds(case: tuple[Rotated, Tensor]) -> None:
        check(*case)
        check_mixed(*case)

    holds()


# --- From tangents to rotated forms ----------------------------------------------------------------------------------


def kronecker(n: int, c: int, e: int, t: int, o: int, i: int, bias: bool = False) -> Kronecker:
    block = Block("w", ("w", "b")[: 1 + bias], ((e * o, i), (e * o,))[: 1 + bias], "kronecker", e)
    return Kronecker(block, Whole(normal(n, e, t, i), ones=bias), Whole(normal(n, c, e, t, o, seed=1)))


def orthogonal(*shape: int) -> Tensor:
    return torch.linalg.qr(normal(*shape, shape[-1])).Q.contiguous()


def basis_of(block: Block) -> Basis:
    if block.kind == "kronecker":
        e, o, i = block.matrix_shape
        return Basis(block, orthogonal(e, i), orthogonal(e, o))
    if block.kind == "rows":
        return Basis(block, inputs=orthogonal(block.matrix_shape[1]))
    return Basis(block, inputs=orthogonal(block.numel))


def corner_of(block: Block) -> Basis:
    """A basis with fewer columns than rows."""
    whole = basis_of(block)
    parts = [
        None if part is None else part[..., : (part.shape[-1] + 1) // 2].contiguous()
        for part in (whole.inputs, whole.outputs)
    ]
    return Basis(block, *parts)


def turned(phi: Tensor, basis: Basis) -> Tensor:
    """U^T phi by a dense matrix U."""
    block = basis.block
    if block.kind == "dense":
        return phi if basis.inputs is None else phi @ basis.inputs
    if block.kind == "rows":
        dense = torch.kron(torch.eye(block.matrix_shape[0], dtype=torch.float64), basis.inputs)
        return (phi.flatten(2) @ dense).reshape(*phi.shape[:2], *basis.shape)
    parts = []
    for group in range(block.groups):
        dense = torch.kron(basis.outputs[group], basis.inputs[group])
        parts.append((phi[:, :, group].flatten(2) @ dense).reshape(*phi.shape[:2], *basis.shape[1:]))
    return torch.stack(parts, 2)


def check_rotation(tangent: Any, basis: Basis) -> list[type]:
    phi = turned(tangent.materialize(), basis)
    kinds, seen = [], 0
    for part, rotated in BasisView(tangent, basis).chunks():
        start, stop, _ = part.indices(len(phi))
        assert start == seen
        seen = stop
        check(rotated, phi[part])
        check_mixed(rotated, phi[part])
        kinds.append(type(rotated))
    assert seen == len(phi)
    return kinds


@given(st.tuples(sizes, sizes, sizes, st.integers(1, 6), sizes, sizes), st.booleans(), st.booleans())
def test_any_kronecker_tangent_is_rotated(shape: tuple[int, ...], bias: bool, corner: bool) -> None:
    tangent = kronecker(*shape, bias=bias)
    basis = corner_of(tangent.block) if corner else basis_of(tangent.block)
    kinds = check_rotation(tangent, basis)
    assert set(kinds) == {Factored if tangent.positions == 1 else Full}


FORMS: dict[str, tuple[tuple[int, ...], type]] = {
    "seen once": ((5, 3, 2, 1, 4, 3), Factored),
    "few positions": ((4, 1, 2, 2, 6, 6), Full),
    "many positions": ((4, 2, 2, 30, 3, 2), Full),
}


@pytest.mark.parametrize(("shape", "kind"), FORMS.values(), ids=FORMS.keys())
def test_forms(shape: tuple[int, ...], kind: type) -> None:
    tangent = kronecker(*shape)
    assert check_rotation(tangent, basis_of(tangent.block)) == [kind]


@pytest.mark.parametrize("positions", [3, 30])
def test_formed_matrices_come_in_chunks(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tangent = kronecker(7, 2, 2, positions, 3, 2)
    monkeypatch.setitem(measure.CHUNK_NUMBERS, "cpu", 3 * 2 * 2 * 3 * 2)
    assert check_rotation(tangent, basis_of(tangent.block)) == [Full] * 3


def no_basis(block: Block) -> Basis:
    return Basis(block)


@pytest.mark.parametrize("shape", [form[0] for form in FORMS.values()], ids=FORMS.keys())
def test_without_a_basis_nothing_turns(shape: tuple[int, ...]) -> None:
    tangent = kronecker(*shape, bias=True)
    phi = tangent.materialize()
    for part, rotated in BasisView(tangent, no_basis(tangent.block)).chunks():
        check(rotated, phi[part])


@pytest.mark.parametrize("make", [basis_of, corner_of, no_basis])
def test_dense_and_rows_tangents_are_rotated(make: Callable[[Block], Basis]) -> None:
    dense = Dense(Block("p", ("p",), ((2, 3),), "dense"), normal(4, 2, 6))
    block = Block("e", ("e",), ((5, 3),), "rows")
    index = torch.tensor([[0, 4, 0], [1, 1, 1], [2, 3, 4]])
    factors = torch.tensor([[1.0, 0.5, 2.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])[:, None, :, None]
    rows = Rows(block, index, factors * normal(3, 2, 3, 3))
    for tangent, kind in ((dense, Full), (rows, Sparse)):
        basis = make(tangent.block)
        phi = tangent.materialize()
        [(part, rotated)] = BasisView(tangent, basis).chunks()
        assert isinstance(rotated, kind)
        check(rotated, phi[part] if make is no_basis else turned(phi, basis))


@pytest.mark.parametrize("kind", ["kronecker", "rows", "dense"])
def test_a_basis_goes_there_and_back(kind: Any) -> None:
    shapes = {"kronecker": ((6, 4), (6,)), "rows": ((6, 4),), "dense": ((2, 3), (5,))}[kind]
    names = ("w", "b")[: len(shapes)]
    block = Block("w", names, shapes, kind, 2 if kind == "kronecker" else 1)
    basis, matrix = basis_of(block), normal(3, 2, *block.matrix_shape)
    torch.testing.assert_close(basis.to_coordinates(matrix), turned(matrix, basis), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(basis.from_coordinates(basis.to_coordinates(matrix)), matrix, rtol=1e-12, atol=1e-12)
    assert Basis(block).to_coordinates(matrix) is matrix
    assert basis.to(torch.float32).to_coordinates(matrix.float()).dtype == torch.float32


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_before_it_is_squared(half: torch.dtype) -> None:
    tangent = kronecker(3, 2, 1, 1, 4, 3)
    low = Kronecker(tangent.block, Whole(tangent.inputs().to(half)), Whole(tangent.grads().to(half)))
    [(_, rotated)] = BasisView(low, Basis(tangent.block)).chunks()
    assert isinstance(rotated, Factored)
    assert rotated.a.dtype == rotated.g.dtype == torch.float32
