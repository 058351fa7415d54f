"""What may be handed to `predict`, and what it says about the rest."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import whence
from doubles import Wrapped, batches, fit, inputs_and_targets, mlp
from networks import build


@pytest.fixture(scope="module")
def tracer() -> whence.Tracer:
    return fit(mlp(), batches())


@pytest.fixture(scope="module")
def x() -> Tensor:
    return inputs_and_targets()[0]


def test_inputs_of_another_shape(tracer: whence.Tracer) -> None:
    message = (
        r"that the model accepts, got RuntimeError from its forward on .* with inputs \(2, 5\) float64: .*mat1 and"
    )
    with pytest.raises(whence.InputError, match=message):
        tracer.predict(torch.zeros(2, 5, dtype=torch.float64))


def test_the_batch_is_named(tracer: whence.Tracer, x: Tensor) -> None:
    with pytest.raises(
        whence.InputError, match=r"Check their shapes.* This was batch 2 of the inputs to predict\."
    ) as caught:
        tracer.predict([x, x, x[:, :2]])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_inputs_of_another_dtype(tracer: whence.Tracer, x: Tensor) -> None:
    with pytest.raises(
        whence.InputError, match=r"with inputs \(8, 3\) float32: mat1 and mat2 must have the same dtype"
    ):
        tracer.predict(x.float())


def test_keywords_the_model_does_not_know(tracer: whence.Tracer, x: Tensor) -> None:
    with pytest.raises(
        whence.InputError, match=r"got TypeError from its forward.*unexpected keyword argument 'pixels'"
    ):
        tracer.predict({"pixels": x})


@pytest.mark.parametrize("empty", [torch.zeros(0, 3, dtype=torch.float64), [torch.zeros(0, 3, dtype=torch.float64)]])
def test_no_example(tracer: whence.Tracer, empty: Any) -> None:
    with pytest.raises(whence.InputError, match="at least one input, got an empty batch 0 of the inputs to predict"):
        tracer.predict(empty)


@pytest.mark.parametrize("empty", [[], iter([])], ids=["list", "iterator"])
def test_no_batch(tracer: whence.Tracer, empty: Any) -> None:
    with pytest.raises(whence.InputError, match="at least one batch to predict, got an empty loader"):
        tracer.predict(empty)


@pytest.mark.parametrize("what", [None, 3, "x", b"x", np.zeros((2, 3)), TensorDataset(torch.zeros(2, 3))])
def test_things_that_are_no_batch(tracer: whence.Tracer, what: Any) -> None:
    message = (
        r"a batch \(a tensor, a tuple, a dict\) or a loader to predict, got \w+. Convert arrays with torch\.as_tensor"
    )
    with pytest.raises(whence.InputError, match=message):
        tracer.predict(what)


@pytest.mark.parametrize("what", [[np.zeros((2, 3))], ["x"], {}, ()])
def test_batches_without_tensors(tracer: whence.Tracer, what: Any) -> None:
    with pytest.raises(whence.InputError, match="expected tensors as inputs in batch 0 of the inputs to predict, got"):
        tracer.predict(what)


def test_a_number(tracer: whence.Tracer) -> None:
    with pytest.raises(
        whence.ShapeError, match=r"one common first axis \(examples\) in batch 0 of the inputs to predict"
    ):
        tracer.predict(torch.tensor(1.0))


def test_another_number_of_outputs_than_in_training() -> None:
    class Widening(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            outputs = self.net(x)
            return outputs if len(x) < 4 else torch.cat([outputs, outputs], 1)

    tracer = fit(Widening(), batches())
    with pytest.raises(whence.ShapeError, match=r"2 outputs as in training, got 4 in"):
        tracer.predict(inputs_and_targets()[0])


@pytest.mark.parametrize("form", ["loader", "labelled-loader", "list", "pair", "generator", "lists"])
def test_every_form_gives_the_same(tracer: whence.Tracer, x: Tensor, form: str) -> None:
    _, y = inputs_and_targets()
    whole = tracer.predict(x)
    forms: dict[str, Any] = {
        "loader": DataLoader(TensorDataset(x), batch_size=3),
        "labelled-loader": DataLoader(TensorDataset(x, y), batch_size=3),
        "list": [x[:5], x[5:]],
        "pair": (x, y),
        "generator": (part for part in x.split(3)),
        "lists": [[x[:2], y[:2]], [x[2:], y[2:]]],
    }
    found = tracer.predict(forms[form])
    torch.testing.assert_close(found.mean, whole.mean)
    for name in whole.covariances:
        torch.testing.assert_close(found.covariance(name), whole.covariance(name))


def test_two_positional_inputs() -> None:
    case = build("two_inputs")
    tracer = fit(case.model, case.batches())
    left, right = case.test_inputs
    whole = tracer.predict((left, right))
    assert len(whole) == len(left)
    targets = torch.zeros(len(left), 2)
    for same in (((left, right), targets), [(left, right)], [((left, right), targets)], [[left, right]]):
        torch.testing.assert_close(tracer.predict(same).hec3, whole.hec3)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: a mapping that is no dict."""


def test_mappings_of_any_kind() -> None:
    case = build("bare_parameters")
    expected = fit(case.model, case.batches())
    whole = expected.predict(case.test_inputs)
    tracer = fit(case.model, [Encoding(batch) for batch in case.batches()])
    torch.testing.assert_close(tracer.leverage, expected.leverage)
    targets = torch.zeros(len(whole), 2)
    forms: list[Any] = [
        Encoding(case.test_inputs),
        [Encoding(case.test_inputs)],
        {**case.test_inputs, "labels": targets},
    ]
    forms += [(case.test_inputs, targets), (Encoding(case.test_inputs), targets)]
    for form in forms:
        torch.testing.assert_close(tracer.predict(form).hec3, whole.hec3)
    pairs = [(Encoding({key: b[key] for key in ("left", "right")}), b["labels"]) for b in case.batches()]
    torch.testing.assert_close(fit(case.model, pairs).leverage, expected.leverage)


def test_data_with_a_graph_leave_none_behind() -> None:
    x, y = inputs_and_targets()
    tracer = fit(mlp(), [(x.clone().requires_grad_(), y.clone().requires_grad_())])
    found = tracer.predict(x.clone().requires_grad_())
    for tensor in (
        tracer.residuals,
        tracer.leverage,
        tracer.loo_residuals,
        tracer.sigma,
        found.mean,
        found.hec3,
        found.ho,
    ):
        assert not tensor.requires_grad
    torch.testing.assert_close(found.hec3, fit(mlp(), [(x, y)]).predict(x).hec3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("road", ["primal", "dual", "matrix_free"])
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_callers_without_gradients(mode: Any, road: Any, parameters: str) -> None:
    x, y = inputs_and_targets()
    options: dict[str, Any] = {"structure": whence.Exact(road=road), "parameters": parameters, "recenter": True}
    expected = fit(mlp(), [(x, y)], **options).predict(x)
    with mode():
        tracer = fit(mlp_outside := mlp_made_outside(), [(x.clone(), y.clone())], **options)
        found = tracer.predict(x.clone())
        assert mlp_outside.training is False
    assert not found.hec3.is_inference()
    torch.testing.assert_close(found.hec3, expected.hec3)
    torch.testing.assert_close(tracer.predict(x).mean, expected.mean)


def mlp_made_outside() -> torch.nn.Module:
    with torch.inference_mode(False):
        return mlp()
