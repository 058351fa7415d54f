"""What outputs and targets mean: the same for every way to write a class down."""

from __future__ import annotations

import pytest
import torch

from whence import Bernoulli, Categorical, Gaussian, ShapeError, one_hot
from whence.report.meaning import Meaning

LABELS = torch.tensor([0, 2, 1, 2])


def test_classes_by_squared_error_and_by_entropy_read_the_same() -> None:
    squared = Meaning.of(Gaussian(), 3, one_hot(LABELS, 3), ["a", "b", "c"])
    entropy = Meaning.of(Categorical(), 3, LABELS, ["a", "b", "c"])
    for meaning in (squared, entropy):
        assert meaning.kind == "classes"
        assert meaning.truth(LABELS).equal(LABELS)
        assert meaning.truth(one_hot(LABELS, 3)).equal(LABELS)
    outputs = torch.tensor([[0.9, -0.9, -1.1]])
    torch.testing.assert_close(squared.beliefs(outputs), torch.tensor([[0.95, 0.05, -0.05]]))
    torch.testing.assert_close(entropy.beliefs(outputs), outputs.softmax(1))
    assert squared.decide(squared.beliefs(outputs)).tolist() == entropy.decide(entropy.beliefs(outputs)).tolist() == [0]


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [(Gaussian(), torch.tensor([-1.0, 1.0, 1.0])), (Bernoulli(), torch.tensor([0.0, 1.0, 1.0]))],
)
def test_two_classes_with_one_output(likelihood: Gaussian, targets: torch.Tensor) -> None:
    meaning = Meaning.of(likelihood, 1, targets, ["left", "right"])
    assert meaning.truth(targets).tolist() == meaning.truth(targets.unsqueeze(1)).tolist() == [0, 1, 1]
    beliefs = meaning.beliefs(torch.tensor([[-0.5], [0.5]]))
    torch.testing.assert_close(beliefs.sum(1), torch.ones(2))
    assert meaning.decide(beliefs).tolist() == [0, 1]


def test_numbers_are_numbers_even_when_some_repeat() -> None:
    targets = torch.tensor([[1.0, 2.0], [1.0, 3.0]])
    meaning = Meaning.of(Gaussian(), 2, targets, None)
    assert meaning.kind == "numbers"
    assert meaning.names == ("output 0", "output 1")
    assert meaning.truth(targets).equal(targets.double())


def test_two_values_in_several_outputs_without_one_class_each_are_numbers() -> None:
    assert Meaning.of(Gaussian(), 2, torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), None).kind == "numbers"


def test_what_is_not_known_stays_unknown() -> None:
    entropy = Meaning.of(Categorical(), 3, LABELS, None)
    assert entropy.truth(torch.tensor([0, -100, 7])).tolist() == [0, -1, -1]
    nan = float("nan")
    assert Meaning.of(Bernoulli(), 1, torch.tensor([0.0, 1.0]), None).truth(torch.tensor([nan, 1.0])).tolist() == [
        -1,
        1,
    ]
    assert Meaning.of(Bernoulli(), 2, torch.eye(2), None).truth(torch.tensor([[nan, 1.0]])).tolist() == [[-1, 1]]


def test_a_text_is_not_a_list_of_names() -> None:
    with pytest.raises(ShapeError, match="expected 3 names, one for each of the classes, got the text 'abc'"):
        Meaning.of(Categorical(), 3, LABELS, "abc")
