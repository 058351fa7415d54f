"""What outputs and targets mean: the same for every way to write a class down."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whence
from whence import Bernoulli, Categorical, Gaussian, ShapeError, one_hot
from whence.report.task import Task, TrainingLabels

LABELS = torch.tensor([0, 2, 1, 2])


def fit(targets: torch.Tensor, weights: torch.Tensor | None = None) -> whence.Tracer:
    """A fit of twenty copies of these targets (n, k) by squared error."""
    y = targets.double().repeat(20, 1)
    x = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = (x, y) if weights is None else (x, y, weights.double().repeat(20))
    return whence.fit(nn.Linear(4, y.shape[1]).double(), [given], ridge=0.5, progress=False)


def test_classes_by_squared_error_and_by_entropy_read_the_same() -> None:
    squared = Task.of(Gaussian(), 3, (-1.0, 1.0), ["a", "b", "c"])
    entropy = Task.of(Categorical(), 3, (0.0, 1.0), ["a", "b", "c"])
    for task in (squared, entropy):
        assert task.kind == "classification"
        assert task.read_targets(LABELS).equal(LABELS)
        assert task.read_targets(one_hot(LABELS, 3)).equal(LABELS)
    outputs = torch.tensor([[0.9, -0.9, -1.1]])
    torch.testing.assert_close(squared.probabilities(outputs), torch.tensor([[0.95, 0.05, -0.05]]))
    torch.testing.assert_close(entropy.probabilities(outputs), outputs.softmax(1))
    assert (
        squared.decide(squared.probabilities(outputs)).tolist()
        == entropy.decide(entropy.probabilities(outputs)).tolist()
        == [0]
    )


@pytest.mark.parametrize(
    ("likelihood", "low"),
    [(Gaussian(), -1.0), (Bernoulli(), 0.0)],
)
def test_two_classes_with_one_output(likelihood: Gaussian | Bernoulli, low: float) -> None:
    task, targets = Task.of(likelihood, 1, (low, 1.0), ["left", "right"]), torch.tensor([low, 1.0, 1.0])
    assert task.read_targets(targets).tolist() == task.read_targets(targets.unsqueeze(1)).tolist() == [0, 1, 1]
    probabilities = task.probabilities(torch.tensor([[-0.5], [0.5]]))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
    assert task.decide(probabilities).tolist() == [0, 1]


def test_numbers_are_numbers_even_when_some_repeat() -> None:
    targets = torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    task = TrainingLabels.of(fit(targets), None).task
    assert task.kind == "regression"
    assert task.names == ("output 0", "output 1")
    assert task.read_targets(targets).equal(targets.double())


def test_two_values_in_several_outputs_without_one_class_each_are_numbers() -> None:
    tracer = fit(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))
    assert TrainingLabels.of(tracer, None).task.kind == "regression"


@pytest.mark.parametrize(
    ("targets", "weights", "classes"),
    [
        ([[0.0], [1.0], [0.5]], [1.0, 1.0, 0.0], True),  # the last row of weight zero has no label
        ([[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]], [1.0, 2.0, 0.0], True),
        ([[0.0], [1.0], [1.0 + 1e-5]], [1.0, 1.0, 1.0], True),  # a code that was rounded
        ([[0.0], [1.0], [0.5]], [1.0, 1.0, 1.0], False),
    ],
)
def test_reports_and_verdicts_agree_whether_targets_are_classes(
    targets: list[list[float]], weights: list[float], classes: bool
) -> None:
    tracer = fit(torch.tensor(targets), torch.tensor(weights))
    found = TrainingLabels.of(tracer, None)
    assert (found.task.kind == "classification") == classes
    assert tracer.explain(torch.zeros(2, 4, dtype=torch.float64)).classes == classes
    if classes:
        assert found.labels[:2].tolist() == ([0, 1] if len(targets[0]) == 1 else [1, 0])


def test_what_is_not_known_stays_unknown() -> None:
    entropy = Task.of(Categorical(), 3, (0.0, 1.0), None)
    assert entropy.read_targets(torch.tensor([0, -100, 7])).tolist() == [0, -1, -1]
    nan = float("nan")
    assert Task.of(Bernoulli(), 1, (0.0, 1.0), None).read_targets(torch.tensor([nan, 1.0])).tolist() == [
        -1,
        1,
    ]
    assert Task.of(Bernoulli(), 2, (0.0, 1.0), None).read_targets(torch.tensor([[nan, 1.0]])).tolist() == [[-1, 1]]


def test_a_text_is_not_a_list_of_names() -> None:
    with pytest.raises(ShapeError, match="expected 3 names, one for each of the classes, got the text 'abc'"):
        Task.of(Categorical(), 3, (0.0, 1.0), "abc")
