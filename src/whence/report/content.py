"""The content of a report: computed from a fit and test inputs, read by the templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.influence.fitted import Fitted, check_count, check_level, check_ungrouped, using_model
from whence.influence.intervals import Intervals
from whence.influence.training import WrongLabels, wrong_labels
from whence.jacobian.leaves import LeafSum
from whence.linalg import largest_first
from whence.report.charts import charts
from whence.report.inputs import as_pair, show_inputs
from whence.report.task import UNKNOWN, Examples, Predictions, TrainingLabels, rows_of_trees
from whence.report.traced import actions, trace
from whence.trust import Trust, trust_of_fit

TITLE = "How uncertain are these predictions, and why?"
TONES = ("plain", "noise", "scarcity", "both", "input")
"""Tones of the verdicts, in the order of `whence.influence.explanation.VERDICTS`; the last is for impossible inputs."""
CHECK_INPUT = 4  # the verdict on impossible inputs, which only their columns show
SUSPECTS = 24  # training examples whose labels are shown as doubtful
GALLERY = 24  # predictions shown for each verdict


class Report:
    """A whole report. `whence.Tracer.report` describes the arguments; views are its images, texts and table."""

    def __init__(
        self,
        fitted: Fitted,
        test: Any,
        names: Sequence[str] | None,
        views: tuple[Any, Any, Any],
        *,
        ids: Any = None,
        title: str = TITLE,
        about: str | Sequence[str] = (),
        sections: Mapping[str, Sequence[Any]] | None = None,
        trust: Trust | None = None,
        level: float = 0.95,
        traced: int = 500,
        intervals: Intervals | None = None,
        examples: Any = None,
        pool: Any = None,
    ) -> None:
        check_level(level)
        check_count(traced, "traced")
        check_ungrouped(fitted)
        _check_outputs(fitted)
        batches, model = fitted.problem.batches, fitted.problem.network.model
        if isinstance(model, LeafSum):
            test, names, views = rows_of_trees(model, test, names, views)
        self.fitted, self.title, self.sections = fitted, title, sections or {}
        self.about = [about] if isinstance(about, str) else about  # paragraphs below the title
        test_data, train_data = (Examples.of(data, batches.positional) for data in (test, batches.loader))
        self.training = TrainingLabels.of(fitted, names)
        self.predictions = Predictions.of(fitted, test_data, self.training.task, intervals)
        sizes = len(self.predictions), len(self.training)
        test_ids, train_ids = as_pair(ids)
        self.test_ids = _as_ids(test_ids, sizes[0], "prediction")
        self.train_ids = _as_ids(train_ids, sizes[1], "training example")
        self.traced = trace(fitted, test_data, self.predictions.uncertainty, float(level), traced, examples, pool)
        with using_model(fitted):
            self.trust = trust_of_fit(fitted) if trust is None else trust
        self.charts = charts(self.predictions)
        todo = actions(fitted, self.traced, self.training.contradicted)
        self.suspects = self.training.order[:SUSPECTS].tolist()  # training examples whose labels to doubt
        needed = [action.at for action in todo if action.kind == "label"] + self.suspects
        self.inputs = show_inputs(views, test_data, train_data, sizes, self.traced, needed)
        impossible = self.inputs.impossible
        self.actions = [action for action in todo if action.kind == "label" or action.at not in impossible]
        self.wrong_labels = _wrong_labels(self.training, self.predictions, isinstance(model, LeafSum))

    def prediction_id(self, prediction: int) -> str:
        """The name of a prediction."""
        return f"prediction {prediction:,}" if self.test_ids is None else self.test_ids[prediction]

    def example_id(self, example: int) -> str:
        """The name of a training example."""
        return f"training example {example:,}" if self.train_ids is None else self.train_ids[example]

    def nearest(self, prediction: int) -> str:
        """The training examples nearest to a traced prediction."""
        place = int((self.traced.chosen == prediction).nonzero()[0])
        examples = self.traced.near.examples[place, :3].tolist()
        return ", ".join(f"{one:,}" if self.train_ids is None else self.train_ids[one] for one in examples)

    @cached_property
    def verdicts(self) -> Tensor:
        """(m,) verdicts as numbers: 0 confident, 1 noisy labels, 2 scarce data, 3 both, 4 impossible input."""
        found = self.traced.explanation.noisy.long() + 2 * self.traced.explanation.scarce.long()
        found[list(self.inputs.impossible)] = CHECK_INPUT
        return found

    @cached_property
    def counts(self) -> list[int]:
        """Number of predictions with each verdict."""
        return _counts(self.verdicts)

    @property
    def uncertain(self) -> int:
        """Number of uncertain predictions, not counting impossible inputs."""
        return sum(self.counts[1:CHECK_INPUT])

    @property
    def undecided(self) -> bool:
        """Whether the model itself is undecided about predictions that are called scarce."""
        return bool((self.traced.explanation.undecided & (self.verdicts == 2)).any())

    @cached_property
    def galleries(self) -> dict[int, list[int]]:
        """The most uncertain traced predictions of each verdict: by noise, by scarcity, and by doubt for both."""
        explanation, chosen = self.traced.explanation, self.traced.chosen
        galleries = {}
        for verdict, score in ((1, explanation.noise), (2, explanation.scarcity), (3, explanation.doubt)):
            some = chosen[self.verdicts[chosen] == verdict]
            if len(some):
                galleries[verdict] = some[largest_first(score[some])[:GALLERY]].tolist()
        if self.inputs.impossible:
            galleries[CHECK_INPUT] = list(self.inputs.impossible)[:GALLERY]
        return galleries

    @property
    def expected_by_chance(self) -> float:
        """Number of predictions that would be called uncertain if all were like the training examples."""
        return len(self.predictions) * (1.0 - self.traced.explanation.level**2)

    @cached_property
    def classes(self) -> list[tuple[str, list[int], float]]:
        """For each class its name, how many predictions have each verdict, and the share of wrong ones.

        Classes are the targets, or the answers if no target is known; the most uncertain class comes first.
        """
        predictions, known = self.predictions, self.predictions.known is not None
        classes = predictions.targets if known else predictions.answers
        if predictions.task.kind != "classification" or classes is None:
            return []
        rows = []
        for place, name in enumerate(predictions.task.names):
            here = classes == place
            if bool(here.any()):
                wrong = float((~predictions.right[here]).double().mean()) if known else math.nan
                rows.append((name, _counts(self.verdicts[here]), wrong))
        return sorted(rows, key=lambda row: row[1][0] / sum(row[1]))


def _counts(verdicts: Tensor) -> list[int]:
    counts: list[int] = torch.bincount(verdicts, minlength=len(TONES)).tolist()
    return counts


def _check_outputs(fitted: Fitted) -> None:
    """Raise if an example has no single answer, or not all of its outputs are known."""
    problem = fitted.problem
    if problem.dense:
        raise InputError(
            "expected a network with one output vector for each example, got one with outputs at several positions, "
            "which reports do not support yet. Use `predict` and `explain`, or fit a model that returns one position."
        )
    if problem.sketch is not None:
        raise InputError(
            f"expected a fit of all {problem.width} outputs, got one of {problem.k} mixtures of them. "
            'For a report call whence.fit with hessian_columns="all".'
        )


def _wrong_labels(training: TrainingLabels, predictions: Predictions, trees: bool) -> WrongLabels | None:
    """How many labels are wrong in all, including those of the predictions, by models that did not see them.

    The splits of trees have learned the labels of training rows, so only the other rows count for trees.
    """
    if training.task.kind != "classification":
        return None
    some = slice(0, 0 if trees else len(training))
    labels, probabilities = training.labels[some], training.other_probabilities[some]
    if predictions.targets is not None:
        labels = torch.cat([labels, predictions.targets])
        probabilities = torch.cat([probabilities.double(), predictions.probabilities])
    known = labels != UNKNOWN
    sure, suggested = probabilities[known].max(1)
    return wrong_labels(labels[known].numpy(), suggested.numpy(), sure.numpy(), len(training.task.names))


def _as_ids(ids: Sequence[Any] | None, total: int, what: str) -> tuple[str, ...] | None:
    if ids is not None and len(ids) != total:
        raise ShapeError(f"expected {total} ids, one for each {what}, got {len(ids)}.")
    return None if ids is None else tuple(map(str, ids))
