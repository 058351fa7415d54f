"""EKFAC and KFAC where they are exact, and everywhere against the dense truth in their own basis."""

from __future__ import annotations

from collections.abc import Callable
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
from curvature_matrices import close, tangents_of
from whence.curvature import kronecker as factors

WHOLE = whence.EKFAC(tolerance=0.0)


def fit(
    model: nn.Module, inputs: Any, structure: whence.Structure, outputs: int = 2, ridge: float = 0.3, **options: Any
) -> whence.Tracer:
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    targets = torch.randn(len(first), outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return whence.fit(model, [(inputs, targets)], structure=structure, ridge=ridge, progress=False, **options)


# --- Every layer -----------------------------------------------------------------------------------------------------


def check_spectrum(tracer: whence.Tracer, tangents: np.ndarray) -> None:
    """Directions are orthonormal, and eigenvalues are the truth's squares along them; the trace is the truth's."""
    rows = tangents.reshape(-1, tangents.shape[2])
    seen = np.zeros(tangents.shape[2], dtype=int)
    blocks = dense.blocks_of(tracer.bread)
    for block, found in zip(blocks, [one.curvature for one in tracer.bread.blocks], strict=True):
        seen += block.owned
        V = block.directions
        close(V.T @ V, np.eye(V.shape[1]), 1e-10)
        inside, outside = block.squares(rows)
        close(found.inside.reshape(-1), inside)
        assert found.outside == pytest.approx(outside, rel=1e-8, abs=1e-12 * float((rows**2).max()))
    assert (seen == 1).all()
    close(np.trace(dense.curvature_of(tracer.bread)), (rows**2).sum())


def check_predictions(tracer: whence.Tracer, tangents: np.ndarray, inputs: Any, test_tangents: np.ndarray) -> None:
    """Leverage, degrees of freedom and covariances by dense matrices."""
    bread = tracer.bread
    damped = dense.curvature_of(bread) + tracer.ridge * np.eye(tangents.shape[2])
    close(bread.leverage_blocks, np.stack([one @ np.linalg.solve(damped, one.T) for one in tangents]))
    curved = dense.curvature_of(bread)
    assert tracer.degrees_of_freedom == pytest.approx(float(np.trace(np.linalg.solve(damped, curved))), rel=1e-9)
    wanted = dense.covariances(tracer, tangents, test_tangents)
    found = tracer.predict([(inputs, None)] if isinstance(inputs, tuple) else inputs)
    for name, value in wanted.items():
        close(found.covariance(name), value, 1e-7)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_eigenvalues_are_the_true_diagonal_for_every_layer(case: Model) -> None:
    model = case.build().double().eval()
    inputs, test_inputs = case.inputs(5), case.inputs(3)
    tracer = fit(model, inputs, WHOLE)
    kfac = fit(model, inputs, whence.KFAC())
    tangents, test_tangents = tangents_of(model, inputs), tangents_of(model, test_inputs)
    check_spectrum(tracer, tangents)
    check_predictions(tracer, tangents, test_inputs, test_tangents)
    truth = oracles.curvature(tangents)
    errors = [np.linalg.norm(dense.curvature_of(each.bread) - truth) for each in (tracer, kfac)]
    assert errors[0] <= errors[1] + 1e-13 * np.linalg.norm(truth)  # to rounding, where both are exact


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("name", ["linear on a sequence", "Conv2d", "LayerNorm", "Embedding"])
def test_with_many_examples_one_output_of_each_gives_the_basis(
    name: str, likelihood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS[name]
    model = case.build().double().eval()
    inputs, classes = case.inputs(200), torch.arange(200) // 100
    targets = classes if likelihood == "categorical" else nn.functional.one_hot(classes, 2).double()

    def traced() -> whence.Tracer:
        data = [(inputs, targets)]
        return whence.fit(model, data, likelihood=likelihood, structure=WHOLE, ridge=0.3, progress=False)

    exact = traced()
    monkeypatch.setattr(factors, "MANY_EXAMPLES", 200)
    monkeypatch.setattr(factors, "EXAMPLES_PER_SIDE", 1)
    tracer = traced()
    assert "one output of each example" in str(tracer.diagnostics)
    assert "one output of each example" not in str(exact.diagnostics)
    if likelihood == "gaussian":
        check_spectrum(tracer, tangents_of(model, inputs))
    assert tracer.degrees_of_freedom == pytest.approx(exact.degrees_of_freedom, rel=0.1)
    found, wanted = tracer.predict(case.inputs(6)), exact.predict(case.inputs(6))
    assert bool((found.ho.log() - wanted.ho.log()).abs().median() < 1.0)  # another basis of the same layers


def fading(*shape: int) -> Callable[[int], Tensor]:
    """Inputs of which few directions matter."""
    return lambda n: torch.randn(n, *shape) * torch.logspace(0, -2, shape[-1])


CORNERED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: Flat(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)), fading(9)),
    "tokens": (lambda: Flat(nn.Linear(26, 8, bias=False), nn.Tanh(), nn.Linear(8, 2)), fading(2, 26)),
    "convolution": (lambda: Flat(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3)), images(2, 6, 6)),
    "norms between": (lambda: Flat(nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 7)), fading(9)),
}


@pytest.mark.parametrize("tolerance", [0.01, 0.2])
@pytest.mark.parametrize(("build", "draw"), CORNERED.values(), ids=CORNERED.keys())
def test_outside_the_corner_the_mean_serves(
    build: Callable[[], nn.Module], draw: Callable[[int], Tensor], tolerance: float
) -> None:
    model, inputs, test_inputs = build().double().eval(), draw(8).double(), draw(3).double()
    tracer = fit(model, inputs, whence.EKFAC(tolerance=tolerance), ridge=20.0)
    kept = sum(block.directions.shape[1] for block in dense.blocks_of(tracer.bread))
    size = tracer.diagnostics["parameters"]
    assert kept < 0.9 * size
    assert f"for {kept} of {size} directions" in str(tracer.diagnostics)
    tangents, test_tangents = tangents_of(model, inputs), tangents_of(model, test_inputs)
    check_spectrum(tracer, tangents)
    check_predictions(tracer, tangents, test_inputs, test_tangents)
    exact = [one.basis for one in tracer.bread.blocks if one.basis.block.kind == "dense"]
    assert all(basis.missing for basis in exact)  # those of norms, too
    # The mean of Ho over the training set, sum s^2 / (s + lambda)^2, is kept to the tolerance.
    whole = fit(model, inputs, WHOLE, ridge=20.0)
    sums = [
        sum(float((one.inside / (one.inside + 20.0)).square().sum()) for one in (block.curvature for block in blocks))
        for blocks in (tracer.bread.blocks, whole.bread.blocks)
    ]
    assert sums[1] * (1 - 2 * tolerance) <= sums[0] <= sums[1] * (1 + 1e-9)


def test_diagonal_is_the_true_diagonal() -> None:
    case = MODELS["transformer"]
    model, inputs = case.build().double().eval(), case.inputs(5)
    tangents = tangents_of(model, inputs)
    tracer = fit(model, inputs, whence.Diagonal())
    close(dense.curvature_of(tracer.bread), np.diag(np.diag(oracles.curvature(tangents))))
    check_predictions(tracer, tangents, inputs, tangents)


@pytest.mark.parametrize("name", ["transformer", "LSTM", "tied embedding", "LoRA"])
def test_large_blocks_without_a_kronecker_form_are_diagonal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.curvature.accumulate.LARGEST_EXACT", 0)
    case = MODELS[name]
    model, inputs = case.build().double().eval(), case.inputs(5)
    tangents = tangents_of(model, inputs)
    tracer = fit(model, inputs, whence.EKFAC(tolerance=0.0))
    check_spectrum(tracer, tangents)
    check_predictions(tracer, tangents, inputs, tangents)
    for block in dense.blocks_of(tracer.bread):
        if block.block.kind == "dense":
            assert set(np.unique(block.directions)) == {0.0, 1.0}


# --- Where EKFAC is exact --------------------------------------------------------------------------------------------


def nets(*, linear: bool) -> nn.Module:
    between = nn.Identity() if linear else nn.Tanh()
    return (
        nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 3, bias=False), between, nn.Linear(3, 2)).double().eval()
    )


@pytest.mark.parametrize("structure", [WHOLE, whence.KFAC()], ids=["ekfac", "kfac"])
@pytest.mark.parametrize(("linear", "examples"), [(False, 1), (True, 7)], ids=["one datum", "deep linear net"])
def test_exact(structure: whence.Structure, linear: bool, examples: int) -> None:
    model, inputs = nets(linear=linear), torch.randn(examples, 4, dtype=torch.float64)
    tracer = fit(model, inputs, structure)
    truth = dense.block_diagonal(tracer.bread, oracles.curvature(tangents_of(model, inputs)))
    close(dense.curvature_of(tracer.bread), truth, 1e-10)


def test_not_exact_elsewhere() -> None:
    # The two tests above would be worth little if EKFAC were exact for any data.
    model, inputs = nets(linear=False), torch.randn(7, 4, dtype=torch.float64)
    tracer = fit(model, inputs, WHOLE)
    truth = dense.block_diagonal(tracer.bread, oracles.curvature(tangents_of(model, inputs)))
    assert np.linalg.norm(dense.curvature_of(tracer.bread) - truth) > 1e-2 * np.linalg.norm(truth)


@pytest.mark.parametrize("outputs", [1, 3])
def test_last_layer_is_exact(outputs: int) -> None:
    # The last layer's output gradients are the same for every example, so its curvature is one Kronecker product.
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()
    inputs, test_inputs = torch.randn(9, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    options: dict[str, Any] = {"outputs": outputs, "parameters": "last_layer"}
    approximate = fit(model, inputs, WHOLE, **options)
    exact = fit(model, inputs, whence.Exact(road="primal"), **options)
    close(approximate.bread.leverage_blocks, exact.bread.leverage_blocks, 1e-10)
    assert approximate.degrees_of_freedom == pytest.approx(exact.degrees_of_freedom)
    found, wanted = approximate.predict(test_inputs), exact.predict(test_inputs)
    close(found.covariance("laplace"), wanted.covariance("laplace"), 1e-9)
    close(found.ho.sum(1), wanted.ho.sum(1), 1e-9)
    # The exact policy suits an exact curvature, and then the leave-one-out residuals agree too.
    policy = fit(model, inputs, WHOLE, **options, leverage="exact")
    close(policy.loo_residuals, exact.loo_residuals, 1e-9)


# --- Shared weights --------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A linear layer on every token, and the sum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)).sum(1)


def test_positions_are_summed_before_they_are_squared() -> None:
    model, x = Tokens().double().eval(), torch.randn(6, 4, 3, dtype=torch.float64)
    tracer = fit(model, x, WHOLE)
    [block] = tracer.bread.blocks
    basis, found = block.basis, block.curvature
    assert basis.inputs is not None
    assert basis.outputs is not None
    slope = 1 - torch.tanh(model.inner(x)).detach().square()  # (n, t, o)
    summed, apart = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for example, slopes in zip(x, slope, strict=True):
        for output in range(2):
            total = torch.zeros(2, 3, dtype=torch.float64)
            for token, steep in zip(example, slopes, strict=True):
                gradient = torch.zeros(2, 3, dtype=torch.float64)
                gradient[output] = steep[output] * token
                rotated = basis.outputs[0].T @ gradient @ basis.inputs[0]
                total += rotated
                apart += rotated.square()
            summed += total.square()
    close(found.inside[0], summed, 1e-10)
    assert float((summed - apart).abs().max()) > 0.1 * float(summed.max())


@pytest.mark.parametrize("name", ["a module called twice", "tied embedding", "relu in place"])
def test_reuse_keeps_the_trace(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.build().double().eval(), case.inputs(6)
    tracer = fit(model, inputs, WHOLE)
    close(np.trace(dense.curvature_of(tracer.bread)), (tangents_of(model, inputs) ** 2).sum(), 1e-11)


def test_ekfac_is_no_further_from_the_truth_than_kfac() -> None:
    # In Frobenius norm, on several networks and draws; strictly closer where gradients and inputs are dependent.
    closer = 0
    for seed in range(5):
        torch.manual_seed(seed)
        model = Flat(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
        inputs = torch.randn(8, 3, 4, dtype=torch.float64)
        truth = oracles.curvature(tangents_of(model, inputs))
        errors = {
            type(each): np.linalg.norm(dense.curvature_of(fit(model, inputs, each).bread) - truth)
            for each in (WHOLE, whence.KFAC())
        }
        assert errors[whence.EKFAC] <= errors[whence.KFAC]
        closer += errors[whence.EKFAC] < 0.99 * errors[whence.KFAC]
    assert closer >= 3


# --- Other losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [WHOLE, whence.EKFAC(tolerance=0.1), whence.Diagonal()], ids=str)
def test_cross_entropy_weighs_outputs_by_its_hessian(structure: whence.Structure) -> None:
    model, inputs = nets(linear=False), torch.randn(12, 4, dtype=torch.float64)
    labels = torch.arange(12) % 2
    tracer = whence.fit(
        model, [(inputs, labels)], likelihood="categorical", structure=structure, ridge=0.3, progress=False
    )
    tangents = tangents_of(model, inputs)
    p = model(inputs).softmax(1).detach().numpy()
    hessians = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    curved = np.einsum("ncp,ncd,ndq->pq", tangents, hessians, tangents)
    found = dense.curvature_of(tracer.bread)
    close(np.trace(found), np.trace(curved))
    for block, one in zip(dense.blocks_of(tracer.bread), tracer.bread.blocks, strict=True):
        inside = np.einsum("pr,pq,qr->r", block.directions, curved, block.directions)
        close(one.curvature.inside.reshape(-1), inside)
    damped = found + 0.3 * np.eye(len(found))
    solved = np.stack([np.linalg.solve(damped, one.T).T for one in tangents])
    close(tracer.bread.leverage_blocks, tangents @ solved.transpose(0, 2, 1))
    predicted = tracer.predict(inputs)
    close(predicted.covariance("ho"), solved @ found @ solved.transpose(0, 2, 1), 1e-8)
    close(predicted.covariance("laplace"), tangents @ solved.transpose(0, 2, 1), 1e-8)
