"""Meats in a basis of their own against dense matrices, built anew from the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature_matrices as dense
import oracles
import whence
from capture_models import MODELS, Model
from capture_modules import Flat, images
from curvature_matrices import tangents_of
from whence.curvature import rotation as measure

Array = np.ndarray
RIDGE = 0.7
close = partial(dense.close, rtol=1e-7)


def fit(model: nn.Module, inputs: Any, structure: whence.Structure, outputs: int = 2, **options: Any) -> whence.Tracer:
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    targets = torch.randn(len(first), outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return whence.fit(model, [(inputs, targets)], structure=structure, ridge=RIDGE, progress=False, **options)


def two_bases(tolerance: float = 0.0, corner: int | None = None, **options: Any) -> whence.EKFAC:
    return whence.EKFAC(tolerance=tolerance, meat="two_bases", corner=corner, **options)


# --- The dense formula -----------------------------------------------------------------------------------------------


def turned_meat(block: dense.Dense, shape: tuple[int, ...], corner: int | None, residual: Array, rows: Array) -> Array:
    """The meat of rows (m, d) in one block: V D V^T among leading coordinates, diagonal in U elsewhere.

    V is the Kronecker eigenbasis of the residual-weighted rows, among the last `corner` coordinates of each side.
    """
    inside, outside = block.squares(rows)
    if block.block.kind == "rows" or (block.block.kind == "dense" and set(np.unique(block.directions)) <= {0.0, 1.0}):
        return block.spread(inside, outside)
    matrix = (1, 1, *shape) if block.block.kind == "dense" else shape
    e, o, i = matrix
    left = np.arange(e * o * i).reshape(matrix)[:, -(corner or o) :, -(corner or i) :]
    inside = inside.copy()
    inside[left.reshape(-1)] = 0.0
    found = block.spread(inside, outside)
    for group in left:  # (o, i) positions of the leading coordinates
        U = block.directions[:, group.reshape(-1)]
        seen = (residual @ U).reshape(-1, *group.shape)
        above = np.linalg.eigh(np.einsum("moi,mpi->op", seen, seen))[1]
        below = np.linalg.eigh(np.einsum("moi,moj->ij", seen, seen))[1]
        V = U @ np.kron(above, below)
        found = found + (V * ((rows @ V) ** 2).sum(0)) @ V.T
    return found


def meats_of(tracer: whence.Tracer, tangents: Array) -> dict[str, Array]:
    return dense.meats_of(np.asarray(tracer.residuals), np.asarray(tracer.loo_residuals), tangents)


def dense_covariances(tracer: whence.Tracer, corner: int | None, tangents: Array, tested: Array) -> dict[str, Array]:
    """J F_lam^-1 M F_lam^-1 J^T for the meats of HeC0, HeC3 and the jackknife."""
    bread = tracer.bread
    meats = meats_of(tracer, tangents)
    damped = dense.curvature_of(bread) + tracer.ridge * np.eye(tangents.shape[2])
    solved = np.stack([np.linalg.solve(damped, one.T).T for one in tested])
    found = {}
    for name in ("hec0", "hec3", "jackknife"):
        M = sum(
            turned_meat(block, basis.shape, corner, meats["hec0"], meats[name])
            for block, basis in zip(dense.blocks_of(bread), [one.basis for one in bread.blocks], strict=True)
        )
        found[name] = solved @ M @ solved.transpose(0, 2, 1)
    return found


def check(model: nn.Module, inputs: Any, tested: Any, structure: whence.EKFAC, outputs: int = 2) -> whence.Tracer:
    """Covariances and variances of both readings against the dense formula; what one basis gives stays as it was."""
    tracer = fit(model, inputs, structure, outputs)
    tangents, test_tangents = tangents_of(model, inputs), tangents_of(model, tested)
    wanted = dense_covariances(tracer, structure.corner, tangents, test_tangents)
    found = tracer.predict([(tested, None)] if isinstance(tested, tuple) else tested)
    for name, value in wanted.items():
        close(getattr(found, name), np.einsum("mcc->mc", value))
        close(found.covariance(name), value)
    plain = fit(model, inputs, replace(structure, meat="one_basis"), outputs)
    alike = plain.predict([(tested, None)] if isinstance(tested, tuple) else tested)
    for name in ("ho", "laplace"):
        close(found.covariance(name), alike.covariance(name))
    close(tracer.loo_residuals, plain.loo_residuals)
    return tracer


# --- Every layer, every form -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_every_layer(case: Model) -> None:
    model = case.build().double().eval()
    check(model, case.inputs(5), case.inputs(3), two_bases(corner=2))


SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: Flat(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)), lambda n: torch.randn(n, 7).double()),
    "few tokens": (lambda: Flat(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)), lambda n: torch.randn(n, 2, 9).double()),
    "convolution": (lambda: Flat(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3)), images(2, 6, 6)),
    "groups": (lambda: Flat(nn.Conv2d(4, 6, 2, groups=2)), images(4, 4, 4)),
    "norm": (lambda: Flat(nn.Linear(5, 6), nn.LayerNorm(6)), lambda n: torch.randn(n, 5).double()),
}
every_shape = pytest.mark.parametrize(("build", "draw"), SHAPES.values(), ids=SHAPES.keys())


@every_shape
@pytest.mark.parametrize("corner", [None, 3])
@pytest.mark.parametrize("basis", ["positions", "gradients"])
def test_all_directions_and_some(build: Any, draw: Any, corner: int | None, basis: str) -> None:
    # Enough examples that the residual-weighted factors have full rank: else some directions of V are arbitrary.
    torch.manual_seed(2)
    check(build().double().eval(), draw(16), draw(3), two_bases(corner=corner, basis=basis))


@pytest.mark.parametrize("tolerance", [0.05, 0.3])
@pytest.mark.parametrize("corner", [None, 2])
def test_within_a_corner_of_the_curvature(tolerance: float, corner: int | None) -> None:
    torch.manual_seed(3)
    decay = 0.5 ** torch.arange(9).double()
    model = Flat(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)).double().eval()
    tracer = check(model, torch.randn(9, 9) * decay, torch.randn(3, 9) * decay, two_bases(tolerance, corner))
    assert any(block.basis.missing for block in tracer.bread.blocks)


def test_one_output() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    check(model, torch.randn(9, 4).double(), torch.randn(3, 4).double(), two_bases(corner=3), outputs=1)


def test_chunks_of_examples_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    model = Flat(nn.Linear(5, 4), nn.Tanh(), nn.Conv1d(3, 4, 2)).double().eval()
    inputs, tested = torch.randn(6, 3, 5).double(), torch.randn(5, 3, 5).double()
    at_once = fit(model, inputs, two_bases(corner=3)).predict(tested).covariance("hec3")
    monkeypatch.setitem(measure.CHUNK_NUMBERS, "cpu", 40)
    close(fit(model, inputs, two_bases(corner=3)).predict(tested).covariance("hec3"), at_once, rtol=1e-10)


# --- What it is for --------------------------------------------------------------------------------------------------


def test_one_datum_is_exact_in_its_own_basis_only() -> None:
    # One gradient matrix is its own Kronecker eigenbasis up to its singular values; the curvature's sums two of them.
    torch.manual_seed(6)
    model = Flat(nn.Linear(4, 5)).double().eval()
    inputs, tested = torch.randn(1, 4).double(), torch.randn(6, 4).double()
    tangents, test_tangents = tangents_of(model, inputs), tangents_of(model, tested)
    targets = torch.randn(1, 2, dtype=torch.float64)
    found = {
        meat: whence.fit(
            model, [(inputs, targets)], structure=whence.EKFAC(tolerance=0.0, meat=meat), ridge=RIDGE, progress=False
        )
        for meat in ("one_basis", "two_bases")
    }
    [row] = meats_of(found["two_bases"], tangents)["hec0"]
    damped = oracles.curvature(tangents) + RIDGE * np.eye(tangents.shape[2])
    exact = (test_tangents @ np.linalg.solve(damped, row)) ** 2
    close(found["two_bases"].predict(tested).hec0, exact)
    assert not np.allclose(found["one_basis"].predict(tested).hec0, exact, rtol=0.05)


@pytest.mark.parametrize("loo", ["example", "output"])
@pytest.mark.parametrize("recenter", [False, True])
def test_jackknife_is_centred_and_positive(loo: str, recenter: bool) -> None:
    torch.manual_seed(7)
    model = Flat(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    tracer = fit(model, torch.randn(8, 4).double(), two_bases(corner=3), loo=loo, recenter=recenter)
    found = tracer.predict(torch.randn(5, 4).double())
    assert bool((found.jackknife > 0).all())
    assert bool((found.jackknife < found.hec3).all())


@pytest.mark.parametrize("corner", [None, 3])
@pytest.mark.parametrize(("loo", "width"), [("example", 6), ("position", 2), ("output", 1)])
def test_what_is_left_out_of_several_positions(loo: str, width: int, corner: int | None) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    inputs, tested = torch.randn(8, 3, 4).double(), torch.randn(3, 3, 4).double()
    targets = torch.randn(8, 3, 2, dtype=torch.float64)
    tracer = whence.fit(
        model, [(inputs, targets)], structure=two_bases(corner=corner), ridge=RIDGE, loo=loo, progress=False
    )
    tangents, test_tangents = tangents_of(model, inputs), tangents_of(model, tested)
    bread = tracer.bread
    meats = dense.meats_of(np.asarray(tracer.residuals), np.asarray(tracer.loo_residuals), tangents, width)
    weighted = meats_of(tracer, tangents)["hec0"]  # the basis is that of whole examples, whatever is left out
    damped = dense.curvature_of(bread) + RIDGE * np.eye(tangents.shape[2])
    leverage_blocks = np.stack([one @ np.linalg.solve(damped, one.T) for one in tangents])
    together = np.kron(np.eye(6 // width), np.ones((width, width)))
    residuals = np.asarray(tracer.residuals)
    close(tracer.loo_residuals, residuals + np.einsum("nij,nj->ni", leverage_blocks * together, residuals))
    solved = np.stack([np.linalg.solve(damped, one.T).T for one in test_tangents])
    found = tracer.predict(tested)
    for name in ("hec0", "hec3", "jackknife"):
        meat = sum(
            turned_meat(block, basis.shape, corner, weighted, meats[name])
            for block, basis in zip(dense.blocks_of(bread), [one.basis for one in bread.blocks], strict=True)
        )
        wanted = np.einsum("mcp,pq,mcq->mc", solved, meat, solved)
        close(getattr(found, name).flatten(1), wanted)


def test_classes() -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    inputs, labels = torch.randn(9, 4).double(), torch.randint(0, 3, (9,))
    tracer = whence.fit(model, [(inputs, labels)], "categorical", two_bases(corner=3), ridge=RIDGE, progress=False)
    tangents, tested = tangents_of(model, inputs), torch.randn(3, 4).double()
    wanted = dense_covariances(tracer, 3, tangents, tangents_of(model, tested))
    found = tracer.predict(tested)
    close(found.covariance("hec0"), wanted["hec0"])
    close(found.covariance("hec3"), wanted["hec3"])


def test_the_diagnostics_tell() -> None:
    torch.manual_seed(9)
    model = Flat(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    diagnostics = str(fit(model, torch.randn(8, 6).double(), two_bases()).diagnostics)
    assert "the meats of HeC0, HeC2 and HeC3 have a basis of their own" in diagnostics


# --- Other choices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"meat": "both"}, {"basis": "kfac"}, {"corner": 0}])
def test_unknown_choices_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(whence.InputError, match=f"EKFAC's {next(iter(options))}"):
        whence.EKFAC(**options)
