"""What outputs and targets mean: the same for every way to write a class down."""

from __future__ import annotations

import pytest
import torch

from whence import Bernoulli, Categorical, Gaussian, ShapeError, one_hot
from whence.report.task import Task

LABELS = torch.tensor([0, 2, 1, 2])


def test_classes_by_squared_error_and_by_entropy_read_the_same() -> None:
    squared = Task.of(Gaussian(), 3, one_hot(LABELS, 3), ["a", "b", "c"])
    entropy = Task.of(Categorical(), 3, LABELS, ["a", "b", "c"])
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
    ("likelihood", "targets"),
    [(Gaussian(), torch.tensor([-1.0, 1.0, 1.0])), (Bernoulli(), torch.tensor([0.0, 1.0, 1.0]))],
)
def test_two_classes_with_one_output(likelihood: Gaussian, targets: torch.Tensor) -> None:
    task = Task.of(likelihood, 1, targets, ["left", "right"])
    assert task.read_targets(targets).tolist() == task.read_targets(targets.unsqueeze(1)).tolist() == [0, 1, 1]
    probabilities = task.probabilities(torch.tensor([[-0.5], [0.5]]))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
    assert task.decide(probabilities).tolist() == [0, 1]


def test_numbers_are_numbers_even_when_some_repeat() -> None:
    targets = torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    task = Task.of(Gaussian(), 2, targets, None)
    assert task.kind == "regression"
    assert task.names == ("output 0", "output 1")
    assert task.read_targets(targets).equal(targets.double())


def test_two_values_in_several_outputs_without_one_class_each_are_numbers() -> None:
    assert Task.of(Gaussian(), 2, torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), None).kind == "regression"


def test_what_is_not_known_stays_unknown() -> None:
    entropy = Task.of(Categorical(), 3, LABELS, None)
    assert entropy.read_targets(torch.tensor([0, -100, 7])).tolist() == [0, -1, -1]
    nan = float("nan")
    assert Task.of(Bernoulli(), 1, torch.tensor([0.0, 1.0]), None).read_targets(torch.tensor([nan, 1.0])).tolist() == [
        -1,
        1,
    ]
    assert Task.of(Bernoulli(), 2, torch.eye(2), None).read_targets(torch.tensor([[nan, 1.0]])).tolist() == [[-1, 1]]


def test_a_text_is_not_a_list_of_names() -> None:
    with pytest.raises(ShapeError, match="expected 3 names, one for each of the classes, got the text 'abc'"):
        Task.of(Categorical(), 3, LABELS, "abc")
