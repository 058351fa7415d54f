"""The protocol of noisy and missing classes, counted label by label."""

from __future__ import annotations

import pytest
import torch

from whence_paper.data import read_images
from whence_paper.images.tasks import Task


@pytest.fixture(scope="module")
def digits():
    return read_images("digits", None)


def labels_of(task: Task, inputs: torch.Tensor) -> torch.Tensor:
    """The class of each training image, found again by its pixels."""
    every, known = task.images.inputs.flatten(1), task.images.labels
    return known[torch.cdist(inputs.flatten(1), every).argmin(1)]


def test_the_missing_class_is_missing_and_the_noisy_one_is_random(digits):
    task = Task(digits, seed=3)
    inputs, targets = task.training()
    labels = labels_of(task, inputs)
    assert task.noisy != task.missing
    assert not bool((labels == task.missing).any())
    said, true = targets.argmax(1), task.answers[labels]
    noisy = labels == task.noisy
    assert bool((said == true)[~noisy].all())
    share = float((said == true)[noisy].double().mean())
    assert 0.3 < share < 0.7  # a coin, over about 130 digits


def test_meta_classes_have_five_classes_each(digits):
    assert Task(digits, seed=1).answers.bincount().tolist() == [5, 5]


def test_cleaning_and_completing_change_one_thing_each(digits):
    task = Task(digits, seed=0)
    inputs, targets = task.training()
    cleaned, true = task.training(clean=True)
    assert torch.equal(inputs, cleaned)
    labels = labels_of(task, cleaned)
    assert torch.equal(true.argmax(1), task.answers[labels])
    completed, answers = task.training(complete=True)
    kept = labels_of(task, completed) != task.missing
    assert len(completed) == len(digits.labels)
    assert torch.equal(answers[kept], targets)


def test_noise_levels_are_nested(digits):
    some, more = (Task(digits, seed=0, noise=level).training()[1] for level in (0.3, 0.9))
    clean = Task(digits, seed=0, noise=0.0).training()[1]
    flipped_some, flipped_more = ((targets != clean).any(1) for targets in (some, more))
    assert bool((flipped_more | ~flipped_some).all())
    assert int(flipped_more.sum()) > int(flipped_some.sum()) > 0


def test_a_draw_follows_from_its_seed(digits):
    first, again, other = (Task(digits, seed=seed, size=200) for seed in (5, 5, 6))
    assert torch.equal(first.training()[1], again.training()[1])
    assert first.describe() == again.describe() != other.describe()
