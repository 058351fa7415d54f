"""Numbers that are no numbers, shapes that do not fit, targets of the wrong kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import whence
from doubles import Wrapped, batches, fit, inputs_and_targets, mlp
from networks import build

BAD = [float("nan"), float("inf"), -float("inf")]


def spoiled(part: int, value: float) -> list[Any]:
    """Batch 1 of the data with one bad number in the inputs (0) or the targets (1) of its second example."""
    found = [[x.clone(), y.clone()] for x, y in batches()]
    found[1][part][1, 0] = value
    return [tuple(pair) for pair in found]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("part", "what"), [(0, "inputs"), (1, "targets")])
def test_data_that_are_not_finite(part: int, what: str, value: float) -> None:
    message = rf"expected finite {what}, got NaN or infinity in batch 1 \(first at example 1 of the batch\). Remove or"
    with pytest.raises(whence.InputError, match=message):
        fit(mlp(), spoiled(part, value))


@pytest.mark.parametrize("value", BAD)
def test_outputs_that_are_not_finite(value: float) -> None:
    class Fragile(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).where(x[:, :1] != batches()[1][0][2, 0], value)

    message = (
        r"finite outputs of the model, got NaN or infinity in batch 1 \(first at example 2 of the batch\). Check that "
        "example"
    )
    with pytest.raises(whence.InputError, match=message):
        fit(Fragile(), batches())


@pytest.mark.parametrize("value", BAD)
def test_weights_that_are_not_finite(value: float) -> None:
    model = mlp()
    model[2].bias.data[1] = value
    with pytest.raises(
        whence.InputError, match=r"finite weights, got NaN or infinity in 2\.bias\. The training has div"
    ):
        fit(model, batches())


@pytest.mark.parametrize("value", BAD)
def test_inputs_to_predict_that_are_not_finite(value: float) -> None:
    tracer = fit(mlp(), batches())
    good = inputs_and_targets()[0]
    bad = good.clone()
    bad[4, 0] = value
    with pytest.raises(
        whence.InputError, match=r"finite inputs, got NaN.* in batch 1 of the inputs to predict \(first at example 4"
    ):
        tracer.predict([good, bad])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_integer_targets(dtype: torch.dtype) -> None:
    x, y = inputs_and_targets()
    with pytest.raises(
        whence.TargetError,
        match=rf"for the Gaussian likelihood, got {dtype} in batch 0\. For class labels.*one_hot",
    ):
        fit(mlp(), [(x, (y > 0).to(dtype))])


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3), (8, 2, 1), (16,)])
def test_targets_of_another_shape_than_outputs(shape: tuple[int, ...]) -> None:
    x, _ = inputs_and_targets()
    got = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(whence.ShapeError, match=rf"got (shape )?{got}"):
        fit(mlp(), [(x, torch.zeros(shape, dtype=torch.float64))])


def test_the_message_about_shapes_says_both_and_where() -> None:
    first, (x, _), _ = batches()
    with pytest.raises(
        whence.ShapeError, match=r"targets of shape \(3, 2\), as the model's outputs, got \(3,\) in batch 1\. "
    ):
        fit(mlp(), [first, (x, torch.zeros(3))])


def test_flat_targets_of_a_single_output() -> None:
    x, y = inputs_and_targets(outputs=1)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.testing.assert_close(fit(model, [(x, y[:, 0])]).residuals, fit(model, [(x, y)]).residuals)


def test_more_targets_than_inputs() -> None:
    x, y = inputs_and_targets()
    with pytest.raises(
        whence.ShapeError, match=r"8 targets for the 8 inputs in batch 0, got shape \(7, 2\)\. Make the loader"
    ):
        fit(mlp(), [(x, y[:7])])


@pytest.mark.parametrize("targets", [[1.0] * 8, None, 3.0, np.zeros((8, 2)), torch.tensor(1.0)])
def test_targets_that_are_no_batch_of_numbers(targets: Any) -> None:
    x, _ = inputs_and_targets()
    with pytest.raises(whence.ShapeError, match="expected a tensor of 8 targets for the 8 inputs in batch 0, got"):
        fit(mlp(), [(x, targets)])


@pytest.mark.parametrize("inputs", [np.zeros((8, 3)), [0.0] * 8, None, "text", {}])
def test_inputs_that_are_no_tensors(inputs: Any) -> None:
    _, y = inputs_and_targets()
    with pytest.raises(
        whence.InputError, match=r"expected tensors as inputs in batch 0, got \w+ without any. Convert arrays"
    ):
        fit(mlp(), [(inputs, y)])


def test_inputs_of_different_batch_sizes() -> None:
    case = build("two_inputs")
    left, right = case.inputs
    with pytest.raises(
        whence.ShapeError,
        match=r"one common first axis \(examples\) in batch 0, got shapes \(9, 3\), \(8, 2\)\. Give",
    ):
        fit(case.model, [((left, right[:8]), case.targets)])


def test_an_input_without_axes() -> None:
    case = build("two_inputs")
    with pytest.raises(whence.ShapeError, match=r"got shapes \(9, 3\), \(\)"):
        fit(case.model, [((case.inputs[0], torch.tensor(1.0)), case.targets)])


@pytest.mark.parametrize("keys", [("left", "right"), ("left", "right", "labels", "y")], ids=["none", "two"])
def test_targets_missing_in_dict_batches(keys: tuple[str, ...]) -> None:
    case = build("bare_parameters")
    batch = {key: case.inputs.get(key, case.targets) for key in keys}
    with pytest.raises(
        whence.InputError,
        match=r"one of the keys labels, label, targets, target, y in batch 0, got the keys .*left, right.*Rename",
    ):
        fit(case.model, [batch])


def test_training_inputs_of_another_width_than_the_model() -> None:
    _, y = inputs_and_targets()
    message = r"the model accepts, got RuntimeError from its forward on batch 0 with inputs \(8, 4\) float64: .*mat1"
    with pytest.raises(whence.InputError, match=message):
        fit(mlp(), [(torch.zeros(8, 4, dtype=torch.float64), y)])


def test_training_inputs_of_another_dtype_than_the_model() -> None:
    x, y = inputs_and_targets()
    with pytest.raises(whence.InputError, match=r"\(8, 3\) float32: mat1 and mat2 must have the same dtype"):
        fit(mlp(), [(x.float(), y)])
