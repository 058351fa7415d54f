"""What the training labels say, and what the other examples say in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.tracing.training import doubts, residuals_without

from .fitted import Reportable
from .meaning import UNKNOWN, Meaning
from .reading import Source
from .words import number, percent


@dataclass(frozen=True)
class Training:
    """The training examples in the words of the task.

    Attributes:
        meaning: of the outputs.
        truth: labels, as `Meaning.truth` has them.
        others: (n, k) what the network would say without the example, on the scale of the targets.
        suspicion: (n,) size of the studentized residual; for classes 1 - p of the label without the example.
        order: (n,) examples, the most doubtful label first.
        leverage: (n,) trace of the leverage.
    """

    meaning: Meaning
    truth: Tensor
    others: Tensor
    suspicion: Tensor
    order: Tensor
    leverage: Tensor

    @classmethod
    def of(cls, fitted: Reportable, targets: Tensor, names: Sequence[str] | None) -> Training:
        """From a fit and its training targets."""
        problem = fitted.problem
        meaning = Meaning.of(problem.likelihood, problem.k, targets, names)
        values = meaning.values(problem.outputs)
        labels = values + problem.unweighted(problem.residuals)
        if problem.likelihood.has_classes:
            others = labels - problem.unweighted(residuals_without(fitted))
        elif problem.likelihood.name == "gaussian":
            others = labels - fitted.loo_residuals
        else:  # residuals of other losses are not on the scale of the targets
            others = values
        doubted = doubts(fitted)
        found = others.cpu(), doubted.score.cpu(), doubted.order.cpu(), fitted.leverage.sum(1).cpu()
        return cls(meaning, meaning.truth(targets), *found)

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.truth)

    @property
    def contradicted(self) -> Tensor:
        """(n,) whether the others say something else than the label; for numbers, more than two deviations off."""
        if self.meaning.kind == "numbers":
            return self.suspicion > 2.0
        differs = self.meaning.decide(self.meaning.spread(self.others)) != self.truth
        return differs & (self.truth != UNKNOWN) if differs.ndim == 1 else differs.any(1)

    def label(self, example: int) -> str:
        """The label of an example, in words."""
        return say(self.meaning, self.truth[example])

    def opinion(self, example: int) -> str:
        """What the other examples say in its place, in words."""
        row = self.others[example]
        if self.meaning.kind == "numbers":
            return say(self.meaning, row)
        return say(self.meaning, self.meaning.decide(self.meaning.spread(row.unsqueeze(0)))[0])

    def doubt(self, example: int) -> str:
        """How little its label fits what the others say, in words."""
        if self.meaning.kind == "classes" and int(self.truth[example]) != UNKNOWN:
            beliefs = self.meaning.spread(self.others[example].unsqueeze(0))[0].clamp(0.0, 1.0)
            return f"others give its label {percent(float(beliefs[self.truth[example]]))}"
        if self.meaning.kind == "answers":
            wrong = (
                self.meaning.decide(self.meaning.spread(self.others[example].unsqueeze(0)))[0] != self.truth[example]
            )
            return f"others differ in {int(wrong.sum())} of {len(wrong)} answers"
        return f"{number(float(self.suspicion[example]), 2)} standard deviations off"


def say(meaning: Meaning, value: Tensor, most: int = 4) -> str:
    """A class, some answers or some numbers, in words."""
    if meaning.kind == "classes":
        return "unknown" if int(value) == UNKNOWN else meaning.names[int(value)]
    if meaning.kind == "answers":
        yes = [name for name, answer in zip(meaning.names, value.tolist(), strict=True) if answer == 1]
        return ", ".join(yes[:most]) + (", …" if len(yes) > most else "") if yes else "none"
    numbers = [number(one) for one in value.tolist()]
    if len(numbers) == 1:
        return numbers[0]
    named = [f"{name} {one}" for name, one in zip(meaning.names, numbers, strict=True)]
    return ", ".join(named[:most]) + (", …" if len(named) > most else "")


def targets_of(source: Source, n: int) -> Tensor:
    """All training targets."""
    found = [targets for _, _, targets in source.read()]
    if not found or any(targets is None for targets in found):
        raise InputError(
            "expected training data with targets in `train`, got none. Pass (inputs, targets), or leave it out: the "
            "report reads the data that the fit was made with."
        )
    joined = torch.cat([targets.cpu() for targets in found if targets is not None])
    if len(joined) != n:
        raise ShapeError(f"expected the {n} training examples of the fit in `train`, got {len(joined)}.")
    return joined
