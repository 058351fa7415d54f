"""Options that mean nothing: every one is refused at the door, and the message lists what would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whence
from doubles import batches, fit, inputs_and_targets, mlp

RIDGES = [-1.0, float("nan"), float("inf"), -0.001, torch.tensor(-2.0), "best", "1.0", None, [1.0], {}, torch.ones(2)]


@pytest.mark.parametrize("ridge", RIDGES, ids=repr)
def test_a_ridge_that_is_none(ridge: Any) -> None:
    words = r'ridge to be a finite number >= 0, "auto" or "loo", got .*ridge_from_weight_decay'
    with pytest.raises(whence.InputError, match=words):
        fit(mlp(), batches(), ridge=ridge)


UNKNOWN = {
    "likelihood": r"likelihood to be one of 'gaussian'.* or a Likelihood, got 'nonsense'",
    "structure": r"structure to be one of 'auto', 'exact'.* or a Structure, got 'nonsense'",
    "noise": r"noise to be one of 'mle', 'unbiased', got 'nonsense'",
    "loo": r"loo to be one of 'example', 'position', 'output', got 'nonsense'",
    "leverage": r"leverage to be one of 'auto', 'exact', 'one_plus_q', 'clip', got 'nonsense'",
    "execution": r"execution to be a whence\.Execution, got 'nonsense'",
}
UNKNOWN_TO_EXECUTION = {
    "chunk_size": r"chunk_size to be a whole number of examples, at least 1, got 'nonsense'",
    "max_memory": r"max_memory to be a number of bytes, at least 1, got 'nonsense'",
    "dtype": r"dtype to be torch\.float64 or torch\.float32, for the algebra, got 'nonsense'",
    "checkpoint_seconds": r"checkpoint_seconds to be a number of seconds, not below zero, got 'nonsense'",
}


@pytest.mark.parametrize("option", UNKNOWN)
def test_unknown_words(option: str) -> None:
    with pytest.raises(whence.InputError, match=UNKNOWN[option]):
        fit(mlp(), batches(), **{option: "nonsense"})


@pytest.mark.parametrize("option", UNKNOWN_TO_EXECUTION)
def test_unknown_words_of_the_execution(option: str) -> None:
    with pytest.raises(whence.InputError, match=UNKNOWN_TO_EXECUTION[option]):
        whence.Execution(**{option: "nonsense"})


@pytest.mark.parametrize(
    "option", ["chunk_size", "max_memory", "dtype", "precision", "generator", "checkpoint", "outputs"]
)
def test_options_of_the_execution_are_no_options_of_fit(option: str) -> None:
    for call in (fit, whence.estimate):
        with pytest.raises(TypeError, match=option):
            call(mlp(), batches(), **{option: None})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("likelihood", 3),
        ("structure", 3),
        ("noise", None),
        ("loo", True),
        ("leverage", 0.5),
        ("execution", {"chunk_size": 3}),
        ("hessian_columns", 0),
    ],
)
def test_other_values(option: str, value: Any) -> None:
    with pytest.raises(whence.InputError, match=rf"expected {option} .*got"):
        fit(mlp(), batches(), **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", 2.5),
        ("max_memory", 0),
        ("max_memory", float("nan")),
        ("max_memory", -1e9),
        ("dtype", torch.float16),
        ("dtype", torch.int64),
        ("checkpoint", 3),
        ("checkpoint_seconds", -1.0),
        ("checkpoint_seconds", float("nan")),
    ],
)
def test_other_values_of_the_execution(option: str, value: Any) -> None:
    with pytest.raises(whence.InputError, match=rf"expected {option} .*got"):
        whence.Execution(**{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"road": "scenic"}, r"road to be one of 'auto', 'primal', 'dual', 'matrix_free', got 'scenic'"),
        ({"tolerance": 0.0}, r"tolerance > 0 and at least one of iterations, got 0\.0 and 10000"),
        ({"tolerance": float("nan")}, "got nan"),
        ({"iterations": 0}, "got 1e-12 and 0"),
    ],
)
def test_options_of_the_exact_structure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(whence.InputError, match=message):
        whence.Exact(**options)


def test_sizes_given_as_floats_of_bytes_are_fine() -> None:
    x, _ = inputs_and_targets()
    assert fit(mlp(), batches(), execution=whence.Execution(max_memory=1e9)).predict(x).hec3.shape == (8, 2)


def test_no_parameter_selected() -> None:
    for nothing in ([], lambda name, parameter: False):
        message = (
            r"at least one selected parameter, got none with .*Trainable: 0\.weight, 0\.bias.*frozen .*: none.*Use par"
        )
        with pytest.raises(whence.InputError, match=message):
            fit(mlp(), batches(), parameters=nothing)


@pytest.mark.parametrize("choice", ["all", lambda name, parameter: True])
def test_everything_frozen(choice: Any) -> None:
    message = r"got none with .*Trainable: none; frozen \(requires_grad=False\): 0\.weight.*call requires_grad_\(True\)"
    with pytest.raises(whence.InputError, match=message):
        fit(mlp().requires_grad_(False), batches(), parameters=choice)


def test_the_last_layer_of_a_frozen_model() -> None:
    with pytest.raises(
        whence.InputError, match=r'trainable parameters for parameters="last_layer", got none that runs'
    ):
        fit(mlp().requires_grad_(False), batches(), parameters="last_layer")


def test_patterns_without_a_match() -> None:
    message = r"got no match for 'head\.\*'. The model has: 0\.weight, 0\.bias, 2\.weight, 2\.bias"
    with pytest.raises(whence.InputError, match=message):
        fit(mlp(), batches(), parameters=["2.*", "head.*"])


def test_patterns_that_match_frozen_parameters_only() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with pytest.raises(
        whence.InputError, match=r"no match for '0\.\*'. Frozen \(requires_grad=False\): 0\.weight, 0\.bias"
    ):
        fit(model, batches(), parameters="0.*")


@pytest.mark.parametrize("choice", [None, 3, [1, 2], [None]])
def test_parameters_of_another_kind(choice: Any) -> None:
    with pytest.raises(
        whence.InputError, match=r'parameters to be "all", "last_layer", names or patterns, or a function'
    ):
        fit(mlp(), batches(), parameters=choice)


def test_complex_parameters() -> None:
    class Turning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.angle = torch.nn.Parameter(torch.ones(2, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.net(x) * self.angle).real

    with pytest.raises(
        whence.InputError, match=r"real floating-point parameters, got torch\.complex128 in angle\. Select"
    ):
        fit(Turning(), batches())
    assert fit(Turning(), batches(), parameters="net.*").diagnostics["parameters"] == 26


def test_a_ridge_that_is_lost_in_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.curvature.primal.QR_SIZE", 0)  # as with more features than fit a QR
    generator = torch.Generator().manual_seed(0)
    few, wide = torch.randn(1500, 3, generator=generator), torch.randn(3, 400, generator=generator)
    x = few @ wide + 1e-3 * torch.randn(1500, 400, generator=generator)
    model, y = torch.nn.Linear(400, 1), torch.randn(1500, 1, generator=generator)
    message = r"rounding that hides them: gradients are in float32 here, and `model\.double\(\)`"
    with pytest.raises(whence.SingularCurvatureError, match=message):
        fit(model, [(x, y)], ridge=1e-6, structure="sketch")
    assert bool((fit(model.double(), [(x.double(), y.double())], ridge=1e-6).predict(x[:5].double()).ho > 0).all())


class TestRidgeZero:
    """Without a penalty the curvature must have an inverse of its own."""

    @pytest.mark.parametrize("road", ["auto", "primal", "dual", "matrix_free"])
    def test_fewer_numbers_than_weights(self, road: Any) -> None:
        message = (
            r"invertible curvature, got at least 10 of 26 directions without information at ridge=0\. Raise `ridge`"
        )
        with pytest.raises(whence.SingularCurvatureError, match=message):
            fit(mlp(), batches(), ridge=0, structure=whence.Exact(road=road))

    @pytest.mark.parametrize("max_memory", [None, 11_200], ids=["rows-kept", "rows-computed-again"])
    def test_duplicated_columns(self, max_memory: int | None) -> None:
        x, y = inputs_and_targets()
        model = torch.nn.Linear(6, 2, bias=False, dtype=torch.float64)
        with pytest.raises(
            whence.SingularCurvatureError, match=r"got at least \d+ of 12 directions without information"
        ):
            fit(model, [(torch.cat([x, x], 1), y)], ridge=0.0, execution=whence.Execution(max_memory=max_memory))

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("max_memory", [None, 3_800], ids=["rows-kept", "rows-computed-again"])
    def test_columns_that_are_sums_of_others(self, seed: int, max_memory: int | None) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        x = torch.cat([x, x @ torch.randn(3, 3, generator=generator, dtype=torch.float64)], 1)
        model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
        with pytest.raises(whence.SingularCurvatureError, match=r"got at least \d of 6 directions"):
            fit(model, [(x, x[:, :1])], ridge=0.0, execution=whence.Execution(max_memory=max_memory))

    def test_a_column_of_zeros(self) -> None:
        x, y = inputs_and_targets()
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        with pytest.raises(whence.SingularCurvatureError, match="got at least 2 of 8 directions"):
            fit(model, [(x * torch.tensor([1.0, 0.0, 1.0]), y)], ridge=0.0)

    @pytest.mark.parametrize("road", ["dual", "matrix_free"])
    def test_roads_that_cannot_tell(self, road: Any) -> None:
        x, y = inputs_and_targets()
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        with pytest.raises(
            whence.SingularCurvatureError, match=rf'ridge > 0 for the {road} road, got 0\. Use Exact\(road="primal"'
        ):
            fit(model, [(x, y)], ridge=0.0, structure=whence.Exact(road=road))

    def test_plenty_of_data(self) -> None:
        x, y = inputs_and_targets()
        tracer = fit(torch.nn.Linear(3, 2, dtype=torch.float64), [(x, y)], ridge=0.0)
        assert tracer.degrees_of_freedom == pytest.approx(8)


def test_weight_decay_out_of_range() -> None:
    with pytest.raises(whence.InputError, match=r"weight_decay >= 0, n >= 1 and outputs >= 1, got -1, 10 and 1"):
        whence.ridge_from_weight_decay(-1, 10)
    with pytest.raises(whence.InputError, match=r"one of 'mse', .* 'binary_cross_entropy', got 'hinge'"):
        whence.ridge_from_weight_decay(1, 10, loss="hinge")  # type: ignore[arg-type]
