"""The default structure: exact where that fits and is quick, else the core; diagnostics say which, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from doubles import batches, fit, inputs_and_targets, mlp
from structures import assert_alike
from whence.curvature.core import Core
from whence.curvature.cost import ProblemSizes
from whence.curvature.exact import OPERATIONS, Auto, Exact
from whence.runtime.memory import readable

GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
LITTLE = 10_000
"""Bytes: less than either road of the exact structure takes for eight examples, two outputs and 26 parameters."""


def told(tracer: whence.Tracer) -> tuple[Any, str]:
    """What the line "structure" of the diagnostics says, and why."""
    (line,) = [one for one in tracer.diagnostics if one.name == "structure"]
    return line.value, line.words


def more(n: int = 30) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """More numbers than the network has weights."""
    x, y = inputs_and_targets(n=n)
    return list(zip(x.split(7), y.split(7), strict=True))


def test_it_is_the_default() -> None:
    tracer, named = fit(mlp(), batches()), fit(mlp(), batches(), structure="auto")
    assert told(tracer) == told(named)
    assert whence.estimate(mlp(), batches()).structure == "exact (dual road)"
    assert fit(mlp(), batches(), structure="ekfac").diagnostics["structure"] == "ekfac"


@pytest.mark.parametrize(("data", "road"), [(batches(), "dual"), (more(), "primal")])
def test_exact_where_it_fits(data: Any, road: Any) -> None:
    tracer = fit(mlp(), data)
    name, why = told(tracer)
    assert name == "exact"
    assert why.startswith(f"{road} road: ")
    assert "operations" in why
    assert_alike(fit(mlp(), data, structure=whence.Exact(road=road)), tracer, inputs_and_targets()[0])


def chosen(n: int, d: int, limit: float = 1e15, device: str = "cpu", dual: bool = True) -> tuple[whence.Structure, str]:
    """For n numbers and d weights in double precision."""
    return Auto().choose(ProblemSizes(n, 1, 0, d, 8, 8, limit, torch.device(device), dual=dual))


def test_operations_are_counted_by_hand() -> None:
    """Both roads multiply tall matrices and factor square ones: s^2 (n k + d) with s the side of the square."""
    structure, why = chosen(10_000, 300)
    assert structure == Exact("primal")
    assert why == f"primal road: {readable(8 * (9 * 300**2 + 3 * 300))}, {300**2 * 10_300:.0e} operations"
    structure, why = chosen(300, 10_000)
    assert structure == Exact("dual")
    assert why == f"dual road: {readable(8 * (5 * 300**2 + 3 * 10_000))}, {300**2 * 10_300:.0e} operations"


def test_the_other_road_where_only_that_fits() -> None:
    assert chosen(3_000, 2_800)[0] == Exact("primal")
    assert chosen(3_000, 2_800, limit=4e8)[0] == Exact("dual")  # five times the square in place of nine
    assert OPERATIONS["cpu"] > 5_000**2 * 5_300
    structure, why = chosen(300, 5_000, dual=False)
    assert structure == Exact("primal")
    assert why.endswith(f", {5_000**2 * 5_300:.0e} operations")


def test_the_core_where_it_would_take_too_long() -> None:
    assert isinstance(chosen(100_000, 20_000)[0], Core)  # 4.8e13 operations
    assert chosen(100_000, 20_000, device="cuda")[0] == Exact("primal")
    structure, why = chosen(100_000, 200_000)
    assert isinstance(structure, Core)
    assert why == "exact would take 372.5 GiB and 3e+15 operations (dual road)"


@pytest.mark.parametrize(
    "options",
    [{}, {"ridge": "loo"}, {"groups": GROUPS}, {"recenter": True, "noise": "unbiased"}, {"loo": "output"}],
    ids=str,
)
def test_the_core_where_memory_is_short(options: dict[str, Any]) -> None:
    execution = whence.Execution(max_memory=LITTLE)
    tracer = fit(mlp(), batches(), execution=execution, **options)
    name, why = told(tracer)
    assert name == "core"
    assert why.startswith("exact would take ")
    assert "KiB" in why
    assert_alike(fit(mlp(), batches(), structure="core", execution=execution, **options), tracer, batches()[0][0])
    with pytest.raises(whence.TooLargeError):
        fit(mlp(), batches(), structure="exact", execution=execution, **options)


@pytest.mark.parametrize("options", [{"ridge": "loo"}, {"groups": GROUPS}, {"ridge": "loo", "groups": GROUPS}], ids=str)
def test_exact_with_other_options(options: dict[str, Any]) -> None:
    tracer = fit(mlp(), batches(), **options)
    assert told(tracer)[0] == "exact"
    assert_alike(fit(mlp(), batches(), structure="exact", **options), tracer, batches()[0][0], rtol=1e-6)


def test_checkpoints_are_of_sums(tmp_path: Path) -> None:
    """The dual road, which would take fewer operations here, is no sum over examples."""
    execution = whence.Execution(checkpoint=tmp_path / "sums")
    tracer = fit(mlp(), batches(), execution=execution)
    assert told(tracer)[0] == "exact"
    assert told(tracer)[1].startswith("primal road")
    assert whence.estimate(mlp(), batches(), execution=execution).structure == "exact (primal road)"
    assert_alike(fit(mlp(), batches(), execution=execution), tracer, batches()[0][0])  # from the sums
    assert_alike(fit(mlp(), batches(), structure="exact"), tracer, batches()[0][0])
    short = whence.Execution(checkpoint=tmp_path / "short", max_memory=LITTLE)
    assert told(fit(mlp(), batches(), execution=short))[0] == "core"


def test_without_a_ridge() -> None:
    """Only the primal road can tell whether there is an inverse."""
    with pytest.raises(whence.SingularCurvatureError, match="10 of 26 directions without information"):
        fit(mlp(), batches(), ridge=0.0)
    x, y = inputs_and_targets()
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    tracer = fit(model, [(x, y)], ridge=0.0)
    assert told(tracer)[1].startswith("primal road")
    assert tracer.degrees_of_freedom == pytest.approx(8)


def test_a_device_that_runs_full_is_planned_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure is chosen again with less memory; the exact one still fits here."""
    right = Exact.fit

    def full(self: Exact, problem: Any, ridge: Any, weigh: Any = None) -> Any:
        if problem.budget.limit > 3e6:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return right(self, problem, ridge, weigh)

    monkeypatch.setattr(Exact, "fit", full)
    tracer = fit(mlp(), batches(), execution=whence.Execution(max_memory=2**23))
    assert told(tracer)[0] == "exact"
    assert "planned again" in str(tracer.diagnostics)


def test_saved_and_loaded(tmp_path: Path) -> None:
    tracer = fit(mlp(), batches())
    tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", mlp(), batches(), progress=False)
    assert told(again) == told(tracer)
    assert repr(Auto()) == "Auto()"
