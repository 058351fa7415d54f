"""Products in the order and the layout that a processor likes are still the same products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whence.curvature import rotation
from whence.curvature.kronecker import Factors, second_moment
from whence.curvature.primal import times_lower
from whence.curvature.rotation import Factored, directional_derivatives, weighted_sum
from whence.jacobian.gradients import Block, Dense, Kronecker, Whole
from whence.linalg import NARROWEST, WIDEST, add_gram, mirror


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


LEAST = 2 * NARROWEST
"""Columns from which on a symmetric product is made of panels."""


@pytest.mark.parametrize("shape", [(30, 3), (7, LEAST), (1, 9, LEAST + 3), (2, 5, LEAST), (8, 785)])
def test_a_second_moment_in_panels(shape: tuple[int, ...]) -> None:
    rows = normal(*shape)
    torch.testing.assert_close(
        second_moment(rows), torch.einsum("...mi,...mj->...ij", rows, rows), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("size", [1, NARROWEST, LEAST + 3, 4 * WIDEST + 5])
def test_products_of_which_half_is_known(size: int) -> None:
    rows, before = normal(6, size), normal(size, size)
    before = before + before.T
    sums = before.clone()
    add_gram(sums, rows)
    mirror(sums)
    torch.testing.assert_close(sums, before + rows.T @ rows, rtol=1e-12, atol=1e-12)
    triangle = normal(size, size).tril()
    torch.testing.assert_close(times_lower(rows, triangle), rows @ triangle.T, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("c", [1, 2, 3])
def test_mixtures_and_inner_products_of_cotangents(c: int, dtype: torch.dtype) -> None:
    g, weights, moved = normal(5, c, 1, 6, 4).to(dtype), normal(5, c, 3).to(dtype), normal(5, 1, 6, 4).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for given in (g, g.transpose(3, 4).contiguous().transpose(3, 4)):  # as rows, and as images are
        wanted = torch.einsum("ncetO,ncq->nqetO", given.double(), weights.double())
        torch.testing.assert_close(rotation.mix(given, weights).double(), wanted, rtol=tolerance, atol=2 * tolerance)
        wanted = torch.einsum("ncetO,netO->nc", given.double(), moved.double())
        found = rotation.inner_products(given, moved)
        assert found.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)  # sums have more digits
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("given", "formed"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_matrices_from_half_precision(given: torch.dtype, formed: torch.dtype) -> None:
    a, g = normal(3, 1, 40, 6).to(given), normal(3, 2, 1, 40, 5).to(given)
    wanted, found = torch.einsum("nceto,neti->nceoi", g.double(), a.double()), rotation.gradient_matrices(a, g)
    assert found.dtype == formed
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)


def test_gradients_in_no_particular_form() -> None:
    block = Block("norm", ("w", "b"), ((3,), (2,)), "dense")
    values = normal(6, 2, 5)
    dense = Dense(block, values)
    direction = normal(5)
    torch.testing.assert_close(directional_derivatives(dense, direction), values @ direction, rtol=1e-13, atol=1e-13)
    weights = normal(6, 2)
    torch.testing.assert_close(weighted_sum(dense, weights), torch.einsum("nc,ncp->p", weights, values))


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("columns", [3, 8, 13])
@pytest.mark.parametrize("n", [5, 500])
def test_columns_that_are_filled_up(n: int, columns: int, ones: bool) -> None:
    factor, basis = Whole(normal(n, 1, 1, 6), ones), normal(1, 6 + ones, columns)
    torch.testing.assert_close(factor.project(basis), factor.tensor() @ basis[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("groups", "positions"), [(1, 1), (1, 4), (3, 1), (2, 5)])
def test_factors_of_inputs_whose_ones_are_not_built(groups: int, positions: int) -> None:
    shapes = ((2 * groups, 3), (2 * groups,))
    block = Block("w", ("w", "b"), shapes, "kronecker", groups)
    inputs = Whole(normal(7, groups, positions, 3), ones=True)
    factors = Factors(block, torch.device("cpu"))
    factors.add(Kronecker(block, inputs, Whole(normal(7, 1, groups, positions, 2))))
    wanted = torch.einsum("neti,netj->eij", inputs.tensor(), inputs.tensor())
    torch.testing.assert_close(factors.inputs, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("o", "i"), [(7, 3), (3, 7), (1, 5), (5, 1)])
def test_forms_of_single_outer_products(o: int, i: int) -> None:
    a, g = normal(11, 1, i), normal(11, 1, 1, o)
    phi = torch.einsum("no,ni->noi", g.flatten(1), a.flatten(1))
    weights, direction = normal(4, 1, o, i), normal(1, o, i)
    wanted = torch.einsum("noi,woi->wn", phi.square(), weights[:, 0])
    torch.testing.assert_close(Factored(a, g).variances(weights), wanted.unsqueeze(2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Factored(a, g).grams(weights), wanted.reshape(4, 11, 1, 1), rtol=1e-12, atol=1e-12)
    wanted = torch.einsum("noi,oi->n", phi, direction[0]).unsqueeze(1)
    tangent = Kronecker(Block("w", ("w",), ((o, i),), "kronecker"), Whole(a.unsqueeze(2)), Whole(g.unsqueeze(3)))
    torch.testing.assert_close(directional_derivatives(tangent, direction), wanted, rtol=1e-12, atol=1e-12)
