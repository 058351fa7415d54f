"""What predictions and training examples are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whence.errors import ShapeError


@dataclass(frozen=True)
class Ids:
    """Names of predictions and of training examples; their numbers where none are given."""

    test: tuple[str, ...] | None = None
    train: tuple[str, ...] | None = None

    @classmethod
    def of(cls, given: Any, m: int, n: int) -> Ids:
        """From names of the predictions, or a pair of names of predictions and training examples.

        Examples:
            >>> Ids.of((["a", "b"], ["p", "q", "r"]), 2, 3).example(1)
            'q'
            >>> Ids.of(None, 2, 3).example(1)
            'training example 1'
        """
        pair = isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str)
        test, train = given if pair else (given, None)
        return cls(_read(test, m, "prediction"), _read(train, n, "training example"))

    def prediction(self, number: int) -> str:
        """What a prediction is called."""
        return f"prediction {number:,}" if self.test is None else self.test[number]

    def example(self, number: int) -> str:
        """What a training example is called."""
        return f"training example {number:,}" if self.train is None else self.train[number]

    def examples(self, numbers: Sequence[int]) -> str:
        """What some training examples are called, after words that tell what they are."""
        return ", ".join(f"{number:,}" if self.train is None else self.train[number] for number in numbers)


def _read(given: Sequence[Any] | None, count: int, what: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if len(given) != count:
        raise ShapeError(f"expected {count} ids, one for each {what}, got {len(given)}.")
    return tuple(str(one) for one in given)
