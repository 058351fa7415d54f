"""Three roads to the same numbers: which is taken, how they agree, and what each one holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import batches, fit, inputs_and_targets, mlp
from whence.curvature.cost import ProblemSizes
from whence.curvature.exact import matrix_bytes

NAMES = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def notes(tracer: whence.Tracer) -> str:
    return "; ".join(str(finding.value) for finding in tracer.diagnostics if finding.name == "note")


def assert_agree(one: whence.Tracer, other: whence.Tracer, x: Tensor, tolerance: float) -> None:
    """Relative to the largest number of each kind, in every number that a user can ask for."""

    def near(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))

    for name in ("leverage", "loo_residuals", "residuals", "sigma"):
        near(getattr(one, name), getattr(other, name))
    assert one.degrees_of_freedom == pytest.approx(other.degrees_of_freedom, rel=tolerance)
    assert one.diagnostics["Newton step"] == pytest.approx(other.diagnostics["Newton step"], rel=tolerance)
    ours, theirs = one.predict(x), other.predict(x)
    near(ours.mean, theirs.mean)
    for name in NAMES:
        near(ours.covariance(name), theirs.covariance(name))


@pytest.mark.parametrize(
    ("road", "recenter", "ridge"),
    [
        *(("dual", recenter, ridge) for recenter in (False, True) for ridge in (1e-3, 0.5, 100.0)),
        ("matrix_free", False, 1e-3),
        ("matrix_free", True, 0.5),
        ("matrix_free", True, 100.0),
    ],
)
def test_roads_agree(road: Any, recenter: bool, ridge: float, device: torch.device) -> None:
    x, _ = inputs_and_targets(device)
    options: dict[str, Any] = {"ridge": ridge, "recenter": recenter}
    primal = fit(mlp(device), batches(device), structure=whence.Exact(road="primal"), **options)
    other = fit(mlp(device), batches(device), structure=whence.Exact(road=road), **options)
    assert_agree(other, primal, x, 1e-8)


@pytest.mark.parametrize("loo", ["example", "output"])
@pytest.mark.parametrize("noise", ["mle", "unbiased"])
def test_roads_agree_on_every_reading(loo: Any, noise: Any) -> None:
    x, _ = inputs_and_targets()
    tracers = [
        fit(mlp(), batches(), structure=whence.Exact(road=road), loo=loo, noise=noise) for road in ("primal", "dual")
    ]
    assert_agree(*tracers, x, 1e-8)


def test_roads_agree_when_the_ridge_is_chosen(device: torch.device) -> None:
    x, _ = inputs_and_targets(device)
    primal, dual = (
        fit(mlp(device), batches(device), structure=whence.Exact(road=road), ridge="loo", recenter=True)
        for road in ("primal", "dual")
    )
    assert primal.ridge_path is not None
    assert dual.ridge_path is not None
    assert primal.ridge == pytest.approx(dual.ridge, rel=1e-9)
    torch.testing.assert_close(primal.ridge_path.ridges, dual.ridge_path.ridges, rtol=1e-9, atol=0)
    well = dual.ridge_path.ridges > 1e-4 * dual.ridge_path.ridges[-1]  # where leverages are away from one
    torch.testing.assert_close(primal.ridge_path.errors[well], dual.ridge_path.errors[well], rtol=1e-7, atol=0)
    assert_agree(dual, primal, x, 1e-8)


def test_more_numbers_than_weights() -> None:
    """The dual road where the kernel is singular and the curvature is not."""
    x, y = inputs_and_targets()
    for road in ("dual", "matrix_free"):
        primal = fit(nn.Linear(3, 2, dtype=torch.float64), [(x, y)], structure=whence.Exact(road="primal"))
        model = primal.problem.network.model
        assert_agree(fit(model, [(x, y)], structure=whence.Exact(road=road)), primal, x, 1e-8)


@pytest.mark.parametrize(("n", "ridge", "road"), [(8, 0.5, "dual"), (13, 0.5, "primal"), (20, 0.0, "primal")])
def test_the_smaller_road_is_taken(n: int, ridge: float, road: str) -> None:
    x, y = inputs_and_targets(n=n)
    tracer = fit(mlp(), [(x, y)], ridge=ridge)
    assert f"exact algebra, {road} road" in notes(tracer)


@pytest.mark.parametrize("road", ["primal", "dual"])
def test_the_forced_road_is_taken(road: Any) -> None:
    for n in (4, 20):
        tracer = fit(mlp(), [inputs_and_targets(n=n)], structure=whence.Exact(road=road))
        assert f"exact algebra, {road} road" in notes(tracer)


def test_float32_algebra() -> None:
    x, _ = inputs_and_targets()
    for road in ("primal", "dual"):
        single = fit(
            mlp(), batches(), structure=whence.Exact(road=road), execution=whence.Execution(dtype=torch.float32)
        )
        assert single.leverage.dtype == single.predict(x).hec3.dtype == torch.float32
        double = fit(mlp(), batches(), structure=whence.Exact(road=road))
        torch.testing.assert_close(single.predict(x).hec3.double(), double.predict(x).hec3, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.05)])
@pytest.mark.parametrize("road", ["primal", "dual", "matrix_free"])
def test_models_of_lower_precision(road: Any, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    x, y = inputs_and_targets(device)
    tracer = fit(mlp(device, dtype), [(x.to(dtype), y)], structure=whence.Exact(road=road))
    rounded = mlp(device, dtype).double()
    expected = fit(rounded, [(x.to(dtype).double(), y)])
    got, wanted = tracer.predict(x.to(dtype)), expected.predict(x.to(dtype).double())
    assert got.hec3.dtype == torch.float64
    for name in NAMES:
        scale = float(wanted.covariance(name).abs().max())
        torch.testing.assert_close(got.covariance(name), wanted.covariance(name), rtol=0, atol=tolerance * scale)


# --- Conjugate gradients --------------------------------------------------------------------------------------------


def test_solves_that_do_not_converge() -> None:
    few = whence.Exact(road="matrix_free", iterations=2)
    message = r"conjugate gradients to converge within 2 steps, got a relative residual of [\d.e+-]+\. Raise `ridge` or"
    with pytest.raises(whence.SingularCurvatureError, match=message):
        fit(mlp(), batches(), structure=few, ridge=1e-4)


def test_the_precision_reached_is_told() -> None:
    assert "matrix-free road, solves to a relative residual of" in notes(
        fit(mlp(), batches(), structure=whence.Exact(road="matrix_free"))
    )


def test_choosing_a_ridge_needs_a_matrix() -> None:
    message = r'a number as ridge, got "loo", which needs true leverages at many ridges, .* Use structure="core"'
    with pytest.raises(whence.InputError, match=message):
        fit(mlp(), batches(), structure=whence.Exact(road="matrix_free"), ridge="loo")


def test_a_coarser_tolerance_is_coarser_but_near() -> None:
    x, _ = inputs_and_targets()
    exact = fit(mlp(), batches()).predict(x).hec3
    rough = fit(mlp(), batches(), structure=whence.Exact(road="matrix_free", tolerance=1e-4)).predict(x).hec3
    gap = float((rough - exact).abs().max() / exact.abs().max())
    assert 1e-12 < gap < 1e-2


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_memory_grows_with_the_square_of_the_smaller_side() -> None:
    execution = whence.Execution(chunk_size=1)
    tracers = (fit(mlp(), [inputs_and_targets(n=n)], execution=execution) for n in (10, 20))
    small, large = (ProblemSizes.of(tracer.problem) for tracer in tracers)
    assert matrix_bytes(large, "primal") == matrix_bytes(small, "primal")
    assert 3.5 < matrix_bytes(large, "dual") / matrix_bytes(small, "dual") < 4.0


@pytest.mark.parametrize("road", ["primal", "dual"])
@pytest.mark.parametrize("max_memory", [None, 60_000])
def test_predictions_in_blocks_give_the_same(road: Any, max_memory: int | None) -> None:
    """Memory for a few rows at a time: many test points come in several blocks."""
    x, _ = inputs_and_targets(n=40)
    tracer = fit(mlp(), batches(), structure=whence.Exact(road=road), execution=whence.Execution(max_memory=max_memory))
    whole = tracer.predict(x)
    parts = [tracer.predict(part) for part in x.split(7)]
    for name in NAMES:
        torch.testing.assert_close(whole.covariance(name), torch.cat([part.covariance(name) for part in parts]))


def test_blocks_of_a_prediction_stay_within_their_share() -> None:
    x, _ = inputs_and_targets(n=40)
    tracer = fit(mlp(), batches(), structure=whence.Exact(road="dual"), execution=whence.Execution(max_memory=60_000))
    left = tracer.bread.problem.budget.limit  # type: ignore[attr-defined]
    blocks = list(tracer.bread.blocks(x))  # type: ignore[attr-defined]
    assert len(blocks) > 1
    assert all(block.numel() * 8 <= max(0.1 * left, 2 * 26 * 8) for block in blocks)
    assert sum(len(block) for block in blocks) == 40


@pytest.mark.parametrize(
    ("road", "chunk_size"), [("primal", 1), ("primal", 5), ("dual", 1), ("dual", 5), ("matrix_free", 3)]
)
def test_chunks_and_batches_do_not_matter(road: Any, chunk_size: int, device: torch.device) -> None:
    x, y = inputs_and_targets(device)
    options: dict[str, Any] = {"structure": whence.Exact(road=road), "ridge": 100.0}  # few steps of a solve
    expected = fit(mlp(device), [(x, y)], **options)
    found = fit(mlp(device), batches(device, size=4), **options, execution=whence.Execution(chunk_size=chunk_size))
    assert_agree(found, expected, x, 1e-9)


def test_models_that_vmap_cannot_follow() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.net(x if x.sum().item() < 1e9 else -x)
            return outputs

    x, _ = inputs_and_targets()
    tracer = fit(Asking(), batches())
    assert_agree(tracer, fit(mlp(), batches()), x, 1e-10)
