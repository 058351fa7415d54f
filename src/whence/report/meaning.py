"""What the outputs of a network mean: a class for each example, several yes-or-no answers, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.errors import ShapeError
from whence.likelihoods import Likelihood

Kind = Literal["classes", "answers", "numbers"]
UNKNOWN = -1
"""The class of an example whose label is not known."""


@dataclass(frozen=True)
class Meaning:
    """How to read outputs and targets.

    Attributes:
        kind: "classes" for one class an example, "answers" for several yes-or-no outputs, "numbers" for quantities.
        names: of the classes, or of the outputs.
        likelihood: of the network.
        outputs: how many the network has.
        low: the code of the other classes, where classes were learned with squared error.
        high: the code of the class.
    """

    kind: Kind
    names: tuple[str, ...]
    likelihood: Likelihood
    outputs: int
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, likelihood: Likelihood, k: int, targets: Tensor, names: Sequence[str] | None) -> Meaning:
        """From the likelihood, and for squared error from the training targets: two values only are two classes.

        Examples:
            >>> from whence import Gaussian
            >>> Meaning.of(Gaussian(), 1, torch.tensor([[1.0], [-1.0], [1.0]]), ["cat", "dog"]).kind
            'classes'
            >>> Meaning.of(Gaussian(), 1, torch.tensor([[1.0], [2.5], [1.3]]), None).names
            ('prediction',)
        """
        if likelihood.has_classes:
            several = likelihood.name == "bernoulli" and k > 1
            kind: Kind = "answers" if several else "classes"
            low, high = 0.0, 1.0
        else:
            codes = _codes(targets, k) if likelihood.name == "gaussian" else None
            kind, (low, high) = ("numbers", (0.0, 1.0)) if codes is None else ("classes", codes)
        count = 2 if kind == "classes" and k == 1 else k
        return cls(kind, _names(names, kind, count, k, (low, high), likelihood), likelihood, k, low, high)

    def beliefs(self, outputs: Tensor) -> Tensor:
        """(m, c) how much the network believes in each class: probabilities, or what squared error makes of them.

        The mean of a code that is `high` for the class and `low` elsewhere tells the probability of the class.
        """
        return self.spread(self.likelihood.probabilities(outputs) if self.likelihood.has_classes else outputs)

    def spread(self, values: Tensor) -> Tensor:
        """(m, c) beliefs from probabilities, or from outputs in the code of the targets."""
        scaled = (values - self.low) / (self.high - self.low)
        return torch.cat([1.0 - scaled, scaled], 1) if self.kind == "classes" and values.shape[1] == 1 else scaled

    def values(self, outputs: Tensor) -> Tensor:
        """(m, k) outputs on the scale of the targets."""
        return self.likelihood.probabilities(outputs) if self.likelihood.has_classes else outputs

    def decide(self, beliefs: Tensor) -> Tensor:
        """(m,) the class believed in most; for several answers (m, k) of 0 and 1."""
        return (beliefs > 0.5).long() if self.kind == "answers" else beliefs.argmax(1)

    def truth(self, targets: Tensor) -> Tensor:
        """Targets as (m,) classes, (m, k) answers of 0 and 1, or (m, k) numbers; -1 and NaN where not known."""
        if self.kind == "numbers":
            return _rows(targets).double()
        if self.kind == "answers":
            rows = _rows(targets).double()
            return torch.where(rows.isnan(), UNKNOWN, (rows > 0.5).long())
        if targets.ndim > 1 and targets.shape[1] > 1:
            return torch.where(targets.isnan().any(1), UNKNOWN, targets.argmax(1))
        flat = targets.reshape(len(targets)).double()
        if self.outputs == 1:
            found = (flat > (self.low + self.high) / 2).long()
            return torch.where(flat.isnan(), UNKNOWN, found)
        known = (flat >= 0) & (flat < len(self.names))
        return torch.where(known, flat, UNKNOWN).long()


def _rows(targets: Tensor) -> Tensor:
    return targets.unsqueeze(1) if targets.ndim == 1 else targets


def _codes(targets: Tensor, k: int) -> tuple[float, float] | None:
    """The two codes of classes that were learned with squared error, or none where targets are quantities."""
    values = targets.unique()
    if len(values) != 2:
        return None
    low, high = values.tolist()
    alone = k == 1 or bool(((_rows(targets) == high).sum(1) == 1).all())
    return (low, high) if alone else None


def _names(
    given: Sequence[str] | None,
    kind: Kind,
    count: int,
    k: int,
    codes: tuple[float, float],
    likelihood: Likelihood,
) -> tuple[str, ...]:
    if given is not None:
        if isinstance(given, str) or len(given) != count:
            got = f"the text {given!r}" if isinstance(given, str) else str(len(given))
            what = "classes" if kind == "classes" else "outputs"
            raise ShapeError(f"expected {count} names, one for each of the {what}, got {got}.")
        return tuple(str(name) for name in given)
    if kind == "numbers":
        return ("prediction",) if k == 1 else tuple(f"output {output}" for output in range(k))
    if kind == "classes" and k == 1:
        return ("no", "yes") if likelihood.has_classes else tuple(f"{code:+g}" for code in codes)
    return tuple(f"class {one}" for one in range(count)) if kind == "classes" else tuple(map(str, range(k)))
