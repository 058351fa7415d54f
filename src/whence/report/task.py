"""The data of a report, and the meaning of a network's outputs: predictions and labels in the terms of the task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from whence.data.batches import Inputs, batch_size, batches_of, in_order, split_targets, take
from whence.display import listing, number, percent
from whence.errors import InputError, ShapeError
from whence.influence.classes import Codes, class_codes
from whence.influence.fitted import Fitted
from whence.influence.intervals import Intervals
from whence.influence.training import change_without, label_suspicion
from whence.jacobian.leaves import LeafSum
from whence.likelihoods import Likelihood
from whence.results import Uncertainty


@dataclass(frozen=True)
class Examples:
    """Batches of examples that can be read several times, for a model with `positional` positional inputs."""

    batches: Iterable[Any]
    positional: int

    @classmethod
    def of(cls, data: Any, positional: int) -> Examples:
        """From a batch, a pair of inputs and targets, or a loader."""
        batches = batches_of(data, "to report on")
        return cls(list(batches) if isinstance(batches, Iterator) else in_order(batches, []), positional)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Inputs of each batch, and its targets if there are any."""
        for at, batch in enumerate(self.batches):
            inputs, given = split_targets(batch, self.positional)
            targets = given.detach() if isinstance(given, Tensor) and given.ndim else None
            size = batch_size(inputs, f"batch {at}")
            if targets is not None and len(targets) != size:
                raise ShapeError(f"expected {size} targets for {size} inputs in batch {at}, got {len(targets)}.")
            yield inputs, targets

    def select(self, examples: Sequence[int]) -> Iterator[Inputs]:
        """The inputs of some examples, in the order of the data."""
        wanted, start = torch.tensor(sorted(examples), dtype=torch.long, device="cpu"), 0
        for inputs, _ in self:
            end = start + batch_size(inputs, "this batch")
            rows = wanted[(wanted >= start) & (wanted < end)] - start
            if len(rows):
                yield take(inputs, rows)
            start = end


def rows_of_trees(
    model: LeafSum, test: Any, names: Sequence[str] | None, views: tuple[Any, Any, Any]
) -> tuple[Any, Sequence[str] | None, tuple[Any, Any, Any]]:
    """Test rows of trees as batches of leaf numbers; shown as rows of a table."""
    test = test if isinstance(test, tuple) else (test,)
    if all(view is None for view in views):
        views = (None, None, (test[0], model.table))
    if names is None and model.ensemble.classes is not None:
        names = [str(label) for label in model.ensemble.classes]
    return model.batches(*test, missing=True), names, views


Kind = Literal["classification", "multilabel", "regression"]
UNKNOWN = -1  # the class of an example whose label is not known
QUANTILE = NormalDist().inv_cdf(0.975)  # half the width of a 95 % range, in standard deviations


@dataclass(frozen=True)
class Task:
    """How to read outputs and targets: one class an example, several yes-or-no labels, or numbers."""

    kind: Kind
    names: tuple[str, ...]  # names of the classes, or of the outputs
    likelihood: Likelihood
    outputs: int
    low: float = 0.0  # the target of the other classes, if classes were learned with squared error
    high: float = 1.0  # the target of the class itself

    @classmethod
    def of(cls, likelihood: Likelihood, k: int, codes: Codes, names: Sequence[str] | None) -> Task:
        """From the likelihood of k outputs, and the `class_codes` of the training targets.

        Examples:
            >>> from whence import Gaussian
            >>> Task.of(Gaussian(), 1, (-1.0, 1.0), ["cat", "dog"]).kind
            'classification'
            >>> Task.of(Gaussian(), 1, None, None).names
            ('prediction',)
        """
        kind: Kind = "multilabel" if likelihood.name == "bernoulli" and k > 1 else "classification"
        if codes is None:
            kind, codes = "regression", (0.0, 1.0)
        two = kind == "classification" and k == 1
        if names is None and two:
            names = ["no", "yes"] if likelihood.has_classes else [f"{code:+g}" for code in codes]
        elif names is None:
            word = {"regression": "output ", "multilabel": "", "classification": "class "}[kind]
            names = ["prediction"] if k == 1 else [f"{word}{at}" for at in range(k)]
        elif isinstance(names, str) or len(names) != (2 if two else k):
            got = f"the text {names!r}" if isinstance(names, str) else str(len(names))
            what = "classes" if kind == "classification" else "outputs"
            raise ShapeError(f"expected {2 if two else k} names, one for each of the {what}, got {got}.")
        return cls(kind, tuple(map(str, names)), likelihood, k, *codes)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """(m, c) probabilities of the classes, from outputs.

        After squared error, the mean of a target that is `high` for the class and `low` elsewhere gives the probability
        of the class. It may lie outside the range from 0 to 1.
        """
        values = self.likelihood.probabilities(outputs) if self.likelihood.has_classes else outputs
        scaled = (values - self.low) / (self.high - self.low)
        one_output = self.kind == "classification" and values.shape[1] == 1
        return torch.cat([1.0 - scaled, scaled], 1) if one_output else scaled

    def decide(self, probabilities: Tensor) -> Tensor:
        """(m,) the most probable class; for multilabel tasks (m, k) of 0 and 1."""
        return (probabilities > 0.5).long() if self.kind == "multilabel" else probabilities.argmax(1)

    def read_targets(self, targets: Tensor) -> Tensor:
        """Targets as (m,) classes, (m, k) labels of 0 and 1, or (m, k) numbers; -1 and NaN if not known."""
        if self.kind == "regression":
            return _rows(targets).double()
        if self.kind == "multilabel":
            rows = _rows(targets).double()
            return torch.where(rows.isnan(), UNKNOWN, (rows > 0.5).long())
        if targets.ndim > 1 and targets.shape[1] > 1:
            return torch.where(targets.isnan().any(1), UNKNOWN, targets.argmax(1))
        flat = targets.reshape(len(targets)).double()
        if self.outputs == 1:
            return torch.where(flat.isnan(), UNKNOWN, (flat > (self.low + self.high) / 2).long())
        return torch.where((flat >= 0) & (flat < len(self.names)), flat, UNKNOWN).long()

    def text(self, value: Tensor) -> str:
        """A class, some labels or some numbers, as text."""
        if self.kind == "classification":
            return "unknown" if int(value) == UNKNOWN else self.names[int(value)]
        if self.kind == "multilabel":
            return listing([name for name, on in zip(self.names, value.tolist(), strict=True) if on == 1], 4) or "none"
        numbers = ["unknown" if math.isnan(one) else number(one) for one in value.tolist()]
        if len(numbers) == 1:
            return numbers[0]
        return listing([f"{name} {one}" for name, one in zip(self.names, numbers, strict=True)], 4)


@dataclass(frozen=True)
class TrainingLabels:
    """The labels of the training examples, and the network's prediction for each without it."""

    task: Task
    labels: Tensor  # as returned by `Task.read_targets`
    others: Tensor  # (n, k) outputs for each example without it
    suspicion: Tensor  # (n,) size of the studentized residual; for classes 1 - p of the label without the example
    order: Tensor  # (n,) examples, the most doubtful label first

    @classmethod
    def of(cls, fitted: Fitted, names: Sequence[str] | None) -> TrainingLabels:
        """From a fit and its training data."""
        problem = fitted.problem
        targets = torch.cat([batch.targets.cpu() for batch in problem.batches.read(None)])
        task = Task.of(problem.likelihood, problem.k, class_codes(fitted), names)
        others = problem.outputs + change_without(fitted)
        suspicion = label_suspicion(fitted)
        return cls(task, task.read_targets(targets), others.cpu(), suspicion.score.cpu(), suspicion.order.cpu())

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def other_probabilities(self) -> Tensor:
        """(n, c) probabilities of the classes without the example."""
        return self.task.probabilities(self.others)

    @cached_property
    def contradicted(self) -> Tensor:
        """(n,) whether the other examples contradict the label; for numbers, if it is more than two deviations off."""
        if self.task.kind == "regression":
            return self.suspicion > 2.0
        differs = self.task.decide(self.other_probabilities) != self.labels
        return differs & (self.labels != UNKNOWN) if differs.ndim == 1 else differs.any(1)

    def texts(self, example: int) -> tuple[str, str, str]:
        """The label of an example, the prediction of the others, and how badly the label fits that."""
        task, label = self.task, self.labels[example]
        doubt = f"{number(float(self.suspicion[example]), 2)} standard deviations off"
        if task.kind == "regression":
            return task.text(label), task.text(self.others[example]), doubt
        probabilities = self.other_probabilities[example].clamp(0.0, 1.0)
        decided = task.decide(self.other_probabilities[example : example + 1])[0]
        if task.kind == "multilabel":
            doubt = f"others differ in {int((decided != label).sum())} of {len(label)} answers"
            return task.text(label), task.text(decided), doubt
        if int(label) != UNKNOWN:
            doubt = f"others give its label {percent(float(probabilities[label]))}"
        return task.text(label), f"{task.text(decided)} ({percent(float(probabilities.max()))})", doubt


@dataclass(frozen=True)
class Predictions:
    """All m predictions, with their targets if there are any."""

    uncertainty: Uncertainty
    task: Task
    intervals: Intervals | None  # of new observations, for regression
    targets: Tensor | None  # as returned by `Task.read_targets`

    @classmethod
    def of(cls, fitted: Fitted, source: Examples, task: Task, intervals: Intervals | None) -> Predictions:
        """Predict, and read the targets that come with the inputs."""
        given: list[Tensor | None] = []

        def inputs() -> Iterator[Inputs]:
            for batch, targets in source:
                given.append(targets)
                yield batch

        uncertainty = fitted.predict(inputs())
        if intervals is None and task.kind == "regression":
            intervals = Intervals.of(fitted)
        known = [targets.cpu() for targets in given if targets is not None]
        if not known:
            return cls(uncertainty, task, intervals, None)
        if len(known) != len(given):
            raise InputError("expected targets with all test batches or with none, got them with some only.")
        read, shape = task.read_targets(torch.cat(known)), uncertainty.mean.shape
        shape = shape[:1] if task.kind == "classification" else shape
        if read.shape != shape:
            raise ShapeError(f"expected test targets of shape {tuple(shape)}, got {tuple(read.shape)}.")
        return cls(uncertainty, task, intervals, read)

    def __len__(self) -> int:
        return len(self.uncertainty)

    @cached_property
    def probabilities(self) -> Tensor:
        """(m, c) probabilities of each class, or of each label."""
        return self.task.probabilities(self.uncertainty.mean.cpu().double())

    @cached_property
    def answers(self) -> Tensor:
        """(m,) classes, (m, k) labels of 0 and 1, or (m, k) numbers."""
        if self.task.kind == "regression":
            return self.uncertainty.mean.cpu().double()
        return self.task.decide(self.probabilities)

    @cached_property
    def confidence(self) -> Tensor:
        """(m,) probability of the answer; for several labels the smallest. After squared error it may exceed 1."""
        if self.task.kind == "multilabel":
            return torch.maximum(self.probabilities, 1.0 - self.probabilities).amin(1)
        return self.probabilities.amax(1)

    @cached_property
    def half_width(self) -> Tensor:
        """(m, k) half the 95 % range of the mean by HeC3."""
        return QUANTILE * self.uncertainty.hec3.cpu().double().sqrt()

    @cached_property
    def new_half_width(self) -> Tensor:
        """(m, k) half the 95 % range of a new observation."""
        assert self.intervals is not None
        return self.intervals.half_width(self.uncertainty)

    @cached_property
    def known(self) -> Tensor | None:
        """(m,) whether the target is known; `None` if none is."""
        if self.targets is None:
            return None
        missing = self.targets.isnan() if self.task.kind == "regression" else self.targets == UNKNOWN
        known = ~(missing if missing.ndim == 1 else missing.any(1))
        return known if bool(known.any()) else None

    @cached_property
    def right(self) -> Tensor:
        """(m,) whether the answer is right; for regression, whether the observed value lies in its 95 % range."""
        assert self.targets is not None
        if self.task.kind == "regression":
            return ((self.targets - self.answers).abs() <= self.new_half_width).all(1)
        same = self.answers == self.targets
        return same if same.ndim == 1 else same.all(1)

    @cached_property
    def scores(self) -> list[tuple[str, str]]:
        """Scores of the predictions with known targets, as names and values; for several outputs, of the first."""
        known = self.known
        if known is None or self.targets is None:
            return []
        right = float(self.right[known].double().mean())
        if self.task.kind == "regression":
            targets, answers = self.targets[known][:, 0], self.answers[known][:, 0]
            mean_square, variance = float((targets - answers).square().mean()), float(targets.var(correction=0))
            r2 = f"{1 - mean_square / variance:.2f}" if variance > 0 else "unknown"
            which = f" of {self.task.names[0]}" if self.task.outputs > 1 else ""
            errors = [(f"R2{which}", r2), (f"RMSE{which}", number(mean_square**0.5))]
            return [*errors, ("inside their 95 % ranges", percent(right))]
        if self.task.kind == "multilabel":
            return [("accuracy", percent(right))]
        most = float(torch.bincount(self.targets[known]).max() / int(known.sum()))
        return [("accuracy", percent(right)), ("the most frequent class alone", percent(most))]

    def text(self, prediction: int) -> str:
        """The prediction: a number with half its 95 % range, or a class with its probability."""
        text = self.task.text(self.answers[prediction])
        if self.task.kind == "classification":
            return f"{text}, {percent(float(self.confidence[prediction].clamp(0.0, 1.0)))}"
        one = self.task.kind == "regression" and self.task.outputs == 1
        return f"{text} ± {number(float(self.half_width[prediction]), 2)}" if one else text

    def probability_half_width(self, again: Uncertainty) -> Tensor:
        """(t,) half the 95 % range of the probability of the answer, to first order, for predictions made again.

        NaN if there are too many outputs to compute their covariances for this alone.
        """
        if not self.task.likelihood.has_classes:
            deviation = again.hec3.sqrt() / (self.task.high - self.task.low)
        elif "hec3" in again.covariances:
            deviation = again.probability_std()
        else:
            return torch.full((len(again),), float("nan"), device="cpu")
        p = self.task.probabilities(again.mean.cpu().double())
        answer = torch.maximum(p, 1.0 - p).argmin(1) if self.task.kind == "multilabel" else self.task.decide(p)
        column = answer.clamp_max(deviation.shape[1] - 1)  # both of two classes share one output
        return QUANTILE * deviation.cpu().double().gather(1, column.unsqueeze(1)).squeeze(1)


def _rows(targets: Tensor) -> Tensor:
    return targets.unsqueeze(1) if targets.ndim == 1 else targets
