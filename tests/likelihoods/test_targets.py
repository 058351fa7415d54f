"""Targets and options that do not suit a likelihood are refused, with where and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from classification import inputs, labels, network

N = 8


def fit(targets: Tensor, likelihood: Any, outputs: int = 3) -> whence.Tracer:
    x = inputs(N)
    batches = list(zip(x.split(5), targets.split(5), strict=True))
    return whence.fit(network(outputs), batches, likelihood, progress=False)


def soft() -> Tensor:
    return inputs(N).softmax(1)


def spoiled(targets: Tensor, value: Any, at: int = 6) -> Tensor:
    targets = targets.clone()
    targets[at] = value
    return targets


# --- Classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, 100, -1, -99])
def test_class_indices_out_of_range(value: int) -> None:
    message = (
        rf"class indices between 0 and 2, as the model has 3 outputs, got {value} in batch 1 \(example 1 of the batch\)"
        r"\. Count classes from 0; .*ignore_index"
    )
    with pytest.raises(whence.TargetError, match=message):
        fit(spoiled(labels(3, N), value), "categorical")


def test_another_ignored_index_makes_minus_100_wrong() -> None:
    with pytest.raises(whence.TargetError, match="between 0 and 2, as the model has 3 outputs, got -100"):
        fit(spoiled(labels(3, N), -100), whence.Categorical(ignore_index=0))


def test_classes_counted_from_one() -> None:
    with pytest.raises(whence.TargetError, match=r"got 3 in batch 0.*Count classes from 0"):
        fit(torch.full((N,), 3), "categorical")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_one_hot_as_integers(dtype: torch.dtype) -> None:
    onehot = torch.nn.functional.one_hot(labels(3, N), 3).to(dtype)
    message = r"class indices of shape \(5,\), got torch\.\w+ of shape \(5, 3\) in batch 0, which looks one-hot\. Pass"
    with pytest.raises(whence.TargetError, match=message):
        fit(onehot, "categorical")


def test_labels_as_floats() -> None:
    message = r"class indices as integers, got torch\.float32 of shape \(5,\) in batch 0\. Call \.long\(\)"
    with pytest.raises(whence.TargetError, match=message):
        fit(labels(3, N).float(), "categorical")


def test_labels_as_booleans() -> None:
    with pytest.raises(whence.TargetError, match=r'got torch\.bool in batch 0\. Call \.long\(\), or use .*"bernoulli"'):
        fit(labels(2, N).bool(), "categorical", outputs=2)


@pytest.mark.parametrize("shape", [(N, 1), (N, 2), (N, 1, 1)])
def test_class_indices_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    wrong = labels(3, N).reshape(N, 1, *([1] * (len(shape) - 2))).expand(shape)
    message = r"class indices of shape \(5,\), one for each example, got shape \(5,.*in batch 0\. Flatten them"
    with pytest.raises(whence.ShapeError, match=message):
        fit(wrong, "categorical")


@pytest.mark.parametrize("shape", [(N, 2), (N, 3, 1)])
def test_probabilities_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(whence.ShapeError, match=r"probabilities of shape \(5, 3\), as the model's outputs, got \(5,"):
        fit(torch.full(shape, 0.5), "categorical")


@pytest.mark.parametrize(
    ("row", "total", "least"),
    [
        ([0.5, 0.4, 0.0], "0.9", "0"),
        ([0.6, 0.6, -0.2], "1", "-0.2"),
        ([1.0, 1.0, 1.0], "3", "1"),
        ([0.0, 0.0, 0.0], "0", "0"),
    ],
)
def test_probabilities_that_are_none(row: list[float], total: str, least: str) -> None:
    message = (
        rf"sum to one, got a row with sum {total} and smallest entry {least} in batch 1 \(example 1 of the batch\)"
    )
    with pytest.raises(whence.TargetError, match=message):
        fit(spoiled(soft(), torch.tensor(row, dtype=torch.float64)), "categorical")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_are_as_good_as_their_precision(dtype: torch.dtype) -> None:
    assert fit(soft().to(dtype), "categorical").residuals.shape == (N, 3)


def test_all_examples_ignored() -> None:
    message = r"at least one training example that counts, got 8 that are all ignored.*Check ignore_index, the class w"
    with pytest.raises(whence.TargetError, match=message):
        fit(torch.full((N,), -100), "categorical")
    with pytest.raises(whence.TargetError, match="got 8 that are all ignored"):
        fit(torch.zeros(N, dtype=torch.long), whence.Categorical(weight=[0.0, 1.0, 1.0]))


def test_a_whole_batch_ignored_is_no_error() -> None:
    y = labels(3, N)
    y[:5] = -100
    assert bool((fit(y, "categorical").residuals[:5] == 0).all())


def test_a_single_output_has_no_classes() -> None:
    with pytest.raises(whence.ShapeError, match=r"at least two outputs .* got 1 in batch 0.*\"bernoulli"):
        fit(torch.zeros(N, dtype=torch.long), "categorical", outputs=1)


@pytest.mark.parametrize("weight", [[1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan")], 2.0, "abc", [[1.0], [2.0]]])
def test_class_weights_that_are_none(weight: Any) -> None:
    with pytest.raises(whence.InputError, match="weight to be one number for each class, finite, not below zero and"):
        whence.Categorical(weight=weight)


def test_class_weights_of_the_wrong_number() -> None:
    with pytest.raises(whence.ShapeError, match="one class weight for each of the 3 outputs, got 2"):
        fit(labels(3, N), whence.Categorical(weight=[1.0, 2.0]))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_smoothing_out_of_range(smoothing: float) -> None:
    with pytest.raises(whence.InputError, match="label_smoothing at least 0 and below 1, got"):
        whence.Categorical(label_smoothing=smoothing)


def test_hessians_that_do_not_fit_in_memory() -> None:
    message = r"the Hessians of the categorical loss for 5 training examples or more and 3 outputs to fit in 500 B, but"
    with pytest.raises(whence.TooLargeError, match=message):
        whence.fit(
            network(3),
            [(inputs(5), labels(3, 5))],
            "categorical",
            progress=False,
            execution=whence.Execution(max_memory=500),
        )


# --- Yes or no -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, 1.5, 2.0])
def test_targets_outside_zero_and_one(value: float) -> None:
    message = rf"targets between 0 and 1, got \[{value}\] in batch 1 \(example 1 of the batch\)\. Labels -1 and \+1 bec"
    with pytest.raises(whence.TargetError, match=message):
        fit(spoiled(labels(2, N).double(), value), "bernoulli", outputs=1)


def test_labels_minus_one_and_one_as_integers() -> None:
    with pytest.raises(whence.TargetError, match=r"between 0 and 1, got \[-1\]"):
        fit(torch.full((N, 1), -1), "bernoulli", outputs=1)


def test_class_indices_for_many_logits() -> None:
    message = r"targets of shape \(5, 3\), as the model's outputs, got \(5,\) in batch 0\. For one class out"
    with pytest.raises(whence.ShapeError, match=message):
        fit(labels(3, N), "bernoulli")


@pytest.mark.parametrize("shape", [(N, 2), (N, 3, 1), (N, 1)])
def test_yes_or_no_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(whence.ShapeError, match=r"targets of shape \(5, 3\), as the model's outputs, got .* Make the"):
        fit(torch.zeros(shape), "bernoulli")


@pytest.mark.parametrize("weight", [-1.0, [1.0, -2.0], float("nan"), 0.0, "abc", [[1.0]]])
def test_positive_weights_that_are_none(weight: Any) -> None:
    with pytest.raises(whence.InputError, match="pos_weight to be one number for each class, finite, not below zero"):
        whence.Bernoulli(pos_weight=weight)


def test_positive_weights_of_the_wrong_number() -> None:
    with pytest.raises(whence.ShapeError, match="one pos_weight, or one for each of the 3 outputs, got 2"):
        fit(torch.zeros(N, 3), whence.Bernoulli(pos_weight=[1.0, 2.0]))


def test_targets_that_are_not_finite() -> None:
    for targets, likelihood in ((soft(), "categorical"), (soft(), "bernoulli")):
        with pytest.raises(whence.InputError, match="finite targets, got NaN or infinity in batch 1"):
            fit(spoiled(targets, float("nan")), likelihood)


def test_likelihoods_by_name_and_as_objects() -> None:
    with pytest.raises(whence.InputError, match="one of 'gaussian', 'categorical', 'bernoulli' or a Likelihood, got"):
        fit(labels(3, N), "softmax")
    by_name, by_object = fit(labels(3, N), "categorical"), fit(labels(3, N), whence.Categorical())
    torch.testing.assert_close(by_name.loo_residuals, by_object.loo_residuals)
    assert repr(by_name).startswith("Tracer(8 training examples, 3 outputs, 31 parameters; categorical")
    assert whence.Categorical(weight=torch.tensor([1.0, 2.0])) == whence.Categorical(weight=[1.0, 2.0])


# --- What newcomers do -----------------------------------------------------------------------------------------------


def test_a_softmax_at_the_end_of_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1))
    with pytest.raises(whence.InputError, match=r"expected logits as outputs, got probabilities in batch 0.*softmax"):
        whence.fit(model, [(torch.randn(9, 4), labels(3, 9))], "categorical", progress=False)
    logs = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LogSoftmax(1))  # as good as logits
    assert whence.fit(logs, [(torch.randn(9, 4), labels(3, 9))], "categorical", progress=False).residuals.shape == (
        9,
        3,
    )


def test_a_sigmoid_at_the_end_of_the_model() -> None:
    x = torch.linspace(-9, 9, 20).unsqueeze(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sigmoid())
    model[0].weight.data.fill_(1.0)
    with pytest.raises(whence.InputError, match=r"got numbers between .* which look like probabilities.*sigmoid"):
        whence.fit(model, [(x, (x > 0).float())], "bernoulli", progress=False)
    assert whence.fit(model[0], [(x, (x > 0).float())], "bernoulli", progress=False).residuals.shape == (20, 1)


def test_class_labels_with_the_likelihood_left_out() -> None:
    with pytest.raises(whence.TargetError, match='cross-entropy pass likelihood="categorical"'):
        whence.fit(network(3), [(inputs(N), labels(3, N))], progress=False)


def test_class_labels_as_floats_for_squared_error() -> None:
    with pytest.raises(whence.ShapeError, match=r"got \(5,\) in batch 0\. Class labels become whence\.one_hot"):
        fit(labels(3, N).double(), "gaussian")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (torch.nn.CrossEntropyLoss(), 'Cross-entropy is "categorical"'),
        ("cross_entropy", 'Cross-entropy is "categorical"'),
        ("regression", 'Squared error is "gaussian"'),
        (torch.nn.BCEWithLogitsLoss(), 'Binary cross-entropy is "bernoulli"'),
    ],
)
def test_names_that_losses_have_elsewhere(given: Any, hint: str) -> None:
    with pytest.raises(whence.InputError, match=hint):
        fit(labels(3, N), given)
