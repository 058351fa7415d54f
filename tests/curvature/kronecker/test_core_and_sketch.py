"""The core and the sketch: exact when they are complete, honest about what they leave out when they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import networks
import oracles
import whence
from whence.curvature.core import OPERATIONS, QUICK_SIZE, SKETCH_SHARE, allot, orthonormal, quick_size
from whence.curvature.primal import primal_bytes

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")
EVERYTHING = whence.Core(size=10**6, tolerance=0.0)
WHOLE_SKETCH = whence.Sketch(size=10**6)


def fit(case: networks.Case, structure: Any, ridge: Any = 0.6, **options: Any) -> whence.Tracer:
    return whence.fit(case.model, case.batches(40), structure=structure, ridge=ridge, progress=False, **options)


def many(case: networks.Case, n: int = 40) -> networks.Case:
    """More examples than weights, so that no direction is without information."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(n, *case.inputs.shape[1:], dtype=torch.float64, generator=generator)
    return replace(case, inputs=inputs, targets=torch.randn(n, 2, dtype=torch.float64, generator=generator))


def assert_alike(got: whence.Tracer, wanted: whence.Tracer, inputs: Any, rtol: float = 1e-8) -> None:
    one, two = got.predict(inputs), wanted.predict(inputs)
    for name in ESTIMATORS:
        covariance = two.covariance(name)
        torch.testing.assert_close(
            one.covariance(name), covariance, rtol=rtol, atol=rtol * float(covariance.abs().max())
        )
    torch.testing.assert_close(one.mean, two.mean, rtol=rtol, atol=rtol)
    for name in ("residuals", "leverage", "loo_residuals", "sigma"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=rtol, atol=rtol)
    assert got.degrees_of_freedom == pytest.approx(wanted.degrees_of_freedom, rel=rtol)
    assert got.diagnostics["Newton step"] == pytest.approx(wanted.diagnostics["Newton step"], rel=1e-6)


# --- Complete: the exact algebra, terms between layers included ------------------------------------------------------


@pytest.mark.parametrize("structure", [EVERYTHING, WHOLE_SKETCH], ids=["core", "sketch"])
@pytest.mark.parametrize("recenter", [False, True])
@pytest.mark.parametrize("name", ["mlp", "convolution", "norms", "attention", "tied", "recurrent"])
def test_complete_is_exact(structure: whence.Structure, name: str, recenter: bool) -> None:
    case = many(networks.build(name), 100)
    exact = fit(case, whence.Exact(road="primal"), recenter=recenter)
    assert_alike(fit(case, structure, recenter=recenter), exact, case.test_inputs)


@pytest.mark.parametrize("structure", [EVERYTHING, WHOLE_SKETCH], ids=["core", "sketch"])
@pytest.mark.parametrize("name", networks.NAMES)
def test_complete_is_exact_with_fewer_examples_than_weights(structure: whence.Structure, name: str) -> None:
    case = networks.build(name)
    assert_alike(fit(case, structure), fit(case, whence.Exact(road="dual")), case.test_inputs)


@pytest.mark.parametrize("options", [{"loo": "output"}, {"noise": "unbiased"}, {"parameters": "*bias"}], ids=str)
def test_complete_is_exact_with_any_option(options: dict[str, Any]) -> None:
    case = many(networks.build("mlp"))
    exact = fit(case, whence.Exact(road="primal"), **options)
    for structure in (EVERYTHING, WHOLE_SKETCH):
        assert_alike(fit(case, structure, **options), exact, case.test_inputs)


@pytest.mark.parametrize("structure", [EVERYTHING, WHOLE_SKETCH], ids=["core", "sketch"])
def test_complete_is_exact_with_cross_entropy(structure: whence.Structure) -> None:
    case = many(networks.build("convolution"))
    labels = replace(case, targets=torch.arange(len(case.targets)) % 2)
    exact = fit(labels, whence.Exact(road="primal"), likelihood="categorical")
    assert_alike(fit(labels, structure, likelihood="categorical"), exact, case.test_inputs)


def test_terms_between_layers_matter() -> None:
    # Without them the complete core would be EKFAC with exact blocks; the test above would not tell if they were small.
    case = many(networks.build("mlp"))
    exact, ekfac = (fit(case, each).predict(case.test_inputs).ho for each in (EVERYTHING, whence.EKFAC(tolerance=0.0)))
    assert float((ekfac / exact - 1).abs().max()) > 0.1


# --- Incomplete ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-8, 1e-3, 1.0])
@pytest.mark.parametrize("structure", [whence.Core(size=7), whence.Core(), whence.Sketch(size=9)], ids=str)
def test_leverages_are_true_leverages(structure: whence.Structure, ridge: float) -> None:
    case = many(networks.build("mlp"))
    tracer = fit(case, structure, ridge=ridge)
    assert float(tracer.leverage.min()) >= 0
    assert float(torch.linalg.eigvalsh(tracer.bread.leverage_blocks).max()) < 1
    assert tracer.diagnostics["guarded leverages"] == 0
    assert tracer.degrees_of_freedom <= tracer.bread.features.size
    assert tracer.degrees_of_freedom == pytest.approx(float(tracer.leverage.sum()))


def test_the_core_is_the_exact_algebra_on_its_coordinates() -> None:
    # The rows z of the features, refitted without each example in turn, give the same leave-one-out residuals.
    case = many(networks.build("mlp"))
    tracer = fit(case, whence.Core(size=9), recenter=True)
    rows = np.concatenate([np.asarray(part) for _, part in tracer.bread.rows.read("again")])
    assert rows.shape == (40, 2, 9)
    leverage_blocks = oracles.leverage_blocks(rows, 0.6)
    np.testing.assert_allclose(tracer.bread.leverage_blocks, leverage_blocks, rtol=1e-9, atol=1e-12)
    start = np.asarray(tracer.bread.features.weights())
    residuals = np.asarray(tracer.problem.residuals)
    targets = residuals + rows @ start
    wanted = targets - np.stack([row @ w for row, w in zip(rows, oracles.refits(rows, targets, 0.6), strict=True)])
    np.testing.assert_allclose(tracer.loo_residuals, wanted, rtol=1e-8, atol=1e-10)


def test_the_core_takes_the_largest_coordinates_of_all_layers_together() -> None:
    case = many(networks.build("mlp"))
    spectrum = [block.curvature for block in fit(case, whence.EKFAC(tolerance=0.0)).bread.blocks]
    ordered = torch.cat([one.inside.reshape(-1) for one in spectrum]).sort(descending=True).values
    for size in (1, 5, 20):
        bread = fit(case, whence.Core(size=size, tolerance=0.0)).bread
        assert bread.features.size == size
        squares = sum(rows.square().sum((0, 1)) for _, rows in bread.rows.read("again"))
        torch.testing.assert_close(squares.sort(descending=True).values, ordered[:size], rtol=1e-9, atol=1e-12)


def test_the_size_follows_the_share_of_the_degrees_of_freedom(monkeypatch: pytest.MonkeyPatch) -> None:
    case = many(networks.build("mlp"))
    spectrum = [block.curvature for block in fit(case, whence.EKFAC(tolerance=0.0)).bread.blocks]
    ordered = torch.cat([one.inside.reshape(-1) for one in spectrum]).sort(descending=True).values
    freedom = (ordered / (ordered + 0.6)).cumsum(0)
    for share in (0.3, 0.9, 0.99):
        monkeypatch.setattr("whence.curvature.core.SHARE", share)
        tracer = fit(case, whence.Core(tolerance=0.0))
        wanted = int((freedom < share * freedom[-1]).sum()) + 1
        assert tracer.bread.features.size == wanted
        told = 100 * float(freedom[wanted - 1] / freedom[-1])
        assert f"core of {wanted} coordinates, {told:.1f} % of the degrees of freedom" in str(tracer.diagnostics)
    sizes = [fit(case, whence.Core(), ridge=ridge).bread.features.size for ridge in (100.0, 1.0, 0.01)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_the_size_is_bounded_by_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = many(networks.build("mlp"))
    room = int(primal_bytes(11)) + 1
    tracer = fit(case, whence.Core(), execution=whence.Execution(max_memory=room))
    assert tracer.bread.features.size == 11
    monkeypatch.setattr("whence.curvature.core.LARGEST", 6)
    assert fit(case, whence.Core()).bread.features.size == 6
    for structure in (whence.Core(size=12), whence.Sketch(size=12)):
        with pytest.raises(whence.TooLargeError, match="Lower `size`"):
            fit(case, structure, execution=whence.Execution(max_memory=room))


def test_more_coordinates_come_closer() -> None:
    case = many(networks.build("mlp"))
    exact = fit(case, whence.Exact(road="primal")).predict(case.test_inputs).ho
    for make in (lambda size: whence.Core(size=size), lambda size: whence.Sketch(size=size)):
        errors = [
            float((fit(case, make(size)).predict(case.test_inputs).ho / exact).log().abs().mean())
            for size in (4, 16, 32)
        ]
        assert errors[-1] < errors[0]
        assert errors[-1] < 0.05


# --- The ridge by leave-one-out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["core", EVERYTHING, "sketch", WHOLE_SKETCH, whence.Core(size=5)], ids=str)
def test_the_ridge_by_leave_one_out(structure: Any) -> None:
    case = many(networks.build("mlp"))
    tracer, exact = fit(case, structure, ridge="loo"), fit(case, whence.Exact(road="primal"), ridge="loo")
    assert tracer.ridge_path is not None
    assert tracer.ridge == tracer.ridge_path.best
    if structure in (EVERYTHING, WHOLE_SKETCH):
        torch.testing.assert_close(tracer.ridge_path.ridges, exact.ridge_path.ridges, rtol=1e-8, atol=0)
        torch.testing.assert_close(tracer.ridge_path.errors, exact.ridge_path.errors, rtol=1e-6, atol=0)
        assert_alike(tracer, exact, case.test_inputs, rtol=1e-6)
    again = fit(case, structure, ridge=tracer.ridge)
    assert again.ridge_path is None


def test_the_smallest_leave_one_out_error_is_that_of_refits() -> None:
    case = many(networks.build("mlp"))
    tracer = fit(case, EVERYTHING, ridge="loo")
    _, tangents, weights = oracles.tangents_of(case.model, case.inputs)
    residuals = np.asarray(tracer.problem.residuals)
    path = tracer.ridge_path
    for at in (10, 24, int(path.errors.argmin())):
        wanted = oracles.loo_error(tangents, residuals, weights, float(path.ridges[at]))
        assert float(path.errors[at]) == pytest.approx(wanted, rel=1e-6)


# --- The sketch ------------------------------------------------------------------------------------------------------


def test_the_sketch_gives_the_kernel_on_average() -> None:
    # E[U U^T] = I, so inner products of sketched gradients are those of the gradients, over many draws.
    case = networks.build("mlp")
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    flat = tangents.reshape(-1, tangents.shape[2])
    truth, draws = flat @ flat.T, []
    for seed in range(100):
        features = fit(case, whence.Sketch(size=12, seed=seed)).bread
        rows = np.concatenate([np.asarray(part) for _, part in features.rows.read("again")])
        rows = rows.reshape(len(flat), -1)
        draws.append(rows @ rows.T)
    mean, spread = np.mean(draws, axis=0), np.std(draws, axis=0) / len(draws) ** 0.5
    assert (abs(mean - truth) < 5 * spread + 1e-12).all()
    assert spread.max() < 0.1 * abs(truth).max()


@pytest.mark.parametrize(("size", "columns"), [(6, 2), (5, 5), (4, 1)])
def test_random_columns_are_orthogonal_and_scaled(size: int, columns: int, generator: torch.Generator) -> None:
    drawn = orthonormal(3, size, columns, generator)
    wanted = size / columns * torch.eye(columns, dtype=torch.float64).expand(3, -1, -1)
    torch.testing.assert_close(drawn.transpose(1, 2) @ drawn, wanted)


def test_the_seed_decides_the_sketch() -> None:
    case = networks.build("mlp")
    one, same, other = (fit(case, whence.Sketch(size=8, seed=seed)).predict(case.test_inputs).ho for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize(("sizes", "total"), [([10, 1000, 1000], 110), ([5], 3), ([3, 3, 3], 100), ([2, 50, 7], 20)])
def test_features_are_shared_out(sizes: list[int], total: int) -> None:
    shares = allot(sizes, total)
    assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))
    assert sum(shares) == min(sum(sizes), total)


class Grouped(nn.Module):
    """Groups, an embedding and bare parameters: every kind of block a sketch can meet."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(9, 6), nn.Conv1d(6, 8, 2, groups=2)
        self.scale, self.head = nn.Parameter(torch.ones(8) * 0.7), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.words(x).mT).mean(2)) * self.scale)


@pytest.mark.parametrize("structure", [whence.Sketch(size=40), whence.Core(size=40)], ids=["sketch", "core"])
def test_every_kind_of_block(structure: whence.Structure) -> None:
    model, x = Grouped().double().eval(), torch.randint(0, 9, (30, 4))
    loader = [(x, torch.randn(30, 2, dtype=torch.float64))]
    tracer = whence.fit(model, loader, structure=structure, ridge=0.1, progress=False, recenter=True)
    assert tracer.bread.features.size <= 40
    _, tangents, _ = oracles.tangents_of(model, x)
    change = tangents @ np.asarray(tracer.step.direction)
    np.testing.assert_allclose(tracer.residuals, np.asarray(tracer.problem.residuals) - change, rtol=1e-8, atol=1e-10)


def test_sizes_go_by_the_work() -> None:
    """n k r^2 is bounded on a CPU; of many examples there are 2048 features all the same."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for numbers in (3_000, 13_000, 23_000):
        r = quick_size(numbers, cpu)
        assert r > QUICK_SIZE
        assert numbers * r**2 <= OPERATIONS["cpu"] < numbers * (r + 1) ** 2
    assert quick_size(10**7, cpu) == quick_size(20_000, cpu, share=0.3) == QUICK_SIZE
    assert primal_bytes(quick_size(3_000, cpu, limit=1e6)) <= 1e6 < primal_bytes(quick_size(3_000, cpu, limit=1e6) + 1)
    assert min(quick_size(500_000, gpu), quick_size(500_000, gpu, share=SKETCH_SHARE)) > 8192


def test_a_core_that_is_not_given_its_size_is_limited_by_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    case = many(networks.build("mlp"))
    free = fit(case, whence.Core())
    monkeypatch.setattr("whence.curvature.core.QUICK_SIZE", 3)
    monkeypatch.setattr("whence.curvature.core.OPERATIONS", {"cpu": 0.0, "cuda": 0.0})
    limited = fit(case, whence.Core())
    assert free.bread.features.size > limited.bread.features.size == 3
    assert fit(case, whence.Sketch()).bread.features.size <= 6  # small blocks are kept whole
    assert fit(case, whence.Core(size=5)).bread.features.size == 5


def test_single_precision_is_factored_without_qr_where_digits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Gram matrix, which gives what QR gives but for rounding; and by QR where the ridge is tiny."""
    case = many(networks.build("mlp"), 100)
    single = replace(case, model=case.model.float(), inputs=case.inputs.float(), targets=case.targets.float())
    inputs, calls = case.test_inputs.float(), []
    right = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda *given, **more: (calls.append(1), right(*given, **more))[1])
    gram = fit(single, EVERYTHING)
    assert not calls
    fit(single, EVERYTHING, ridge=1e-7)
    assert calls
    monkeypatch.setattr("whence.curvature.primal.CONDITION", 0.0)
    assert_alike(gram, fit(single, EVERYTHING), inputs, rtol=1e-5)
