"""Predictions for some outputs of a network, or for random sketches of many, at every position of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from whence.data.batches import Inputs, combine, take
from whence.data.targets import diagonal_blocks
from whence.errors import InputError
from whence.jacobian.views import OutputMixtures, OutputView, SelectedOutputs
from whence.likelihoods import Likelihood
from whence.results import MAX_OUTPUTS, ChosenOutputs, Uncertainty

MAX_SKETCH_BYTES = 64 * 2**20  # of the random signs of one chunk

ViewVariances = Callable[[OutputView, bool], dict[str, Tensor]]
"""From a view of some inputs to covariances (m, c, c) by name; or, where the flag is false, to variances (m, c)."""


@dataclass(frozen=True)
class OutputChoice:
    """Which outputs to predict."""

    # all outputs, that of the predicted class, some by their positions, or random sketches of all
    kind: Literal["all", "predicted", "some", "sketches"]
    index: tuple[int, ...] = ()  # positions, where they are given
    sketches: int = 0  # how many random sketches

    @classmethod
    def parse(cls, given: Any) -> OutputChoice:
        """Read the option `outputs` of `Tracer.predict`.

        Examples:
            >>> OutputChoice.parse("predicted").kind, OutputChoice.parse([3, 1]).index, OutputChoice.parse(16).sketches
            ('predicted', (3, 1), 16)
        """
        if isinstance(given, str) and given in ("all", "predicted"):
            return cls("all" if given == "all" else "predicted")
        if _is_integer(given):
            if int(given) < 2:
                raise InputError(
                    f"expected at least two random sketches, for a standard error, got outputs={given}. "
                    f"A single output goes into a list: outputs=[{given}]."
                )
            return cls("sketches", sketches=int(given))
        listed = given.tolist() if isinstance(given, Tensor) and given.ndim == 1 else given
        several = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
        if several and all(map(_is_integer, listed)):
            return cls("some", tuple(int(one) for one in listed))
        raise InputError(
            'expected outputs to be "all", "predicted", a list of positions such as [0, 3], or a number of random '
            f"sketches, got {given!r}."
        )

    def positions(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """(N, c) which of outputs (N, k) are chosen."""
        n, k = outputs.shape
        if self.kind == "predicted":
            return likelihood.predicted(outputs).unsqueeze(1)
        listed = range(k) if self.kind == "all" else self.index
        wrong = [one for one in listed if not 0 <= one < k]
        if wrong:
            raise InputError(f"expected positions of outputs between 0 and {k - 1}, got {wrong[0]} in outputs=[...].")
        return torch.tensor(list(listed), device=outputs.device).expand(n, -1)

    def predict(
        self,
        likelihood: Likelihood,
        inputs: Inputs,
        outputs: Tensor,
        variances_of: ViewVariances,
        covariance: bool,
        generator: torch.Generator,
    ) -> Uncertainty:
        """Variances of the chosen ones of outputs (m, ..., k) for a batch, in views that fit in memory."""
        k, shape = outputs.shape[-1], outputs.shape[:-1]
        flat = outputs.reshape(-1, k)
        if self.kind == "sketches":
            found = _sketched(self.sketches, inputs, outputs, variances_of, generator)
            variances = {name: value.reshape(*shape, self.sketches) for name, value in found.items()}
            all_mixed = ChosenOutputs(None, None, True)
            return Uncertainty(outputs, {}, variances, likelihood=likelihood, chosen=all_mixed)
        index = self.positions(likelihood, flat)
        c = index.shape[1]
        full = covariance and c <= MAX_OUTPUTS
        found = _picked(inputs, index.reshape(shape[0], -1, c), k, variances_of, full)
        shaped = {name: value.reshape(*shape, *value.shape[2:]) for name, value in found.items()}
        chosen = None
        if self.kind != "all":
            chances = likelihood.probabilities(flat).gather(1, index) if likelihood.has_classes else None
            shaped_chances = None if chances is None else chances.reshape(*shape, c)
            chosen = ChosenOutputs(index.reshape(*shape, c), shaped_chances, False)
        mean = flat.gather(1, index).reshape(*shape, c)
        return Uncertainty(mean, shaped if full else {}, {} if full else shaped, likelihood=likelihood, chosen=chosen)


def _picked(inputs: Inputs, index: Tensor, k: int, variances_of: ViewVariances, full: bool) -> dict[str, Tensor]:
    """Covariances (m, t, c, c) of outputs (m, t, c) at t positions, or variances (m, t, c)."""
    _, t, c = index.shape
    places = index + k * torch.arange(t, device=index.device).reshape(1, t, 1)
    parts = []
    for some in places.split(max(1, MAX_OUTPUTS // c), dim=1):
        flat = some.flatten(1)
        views = [SelectedOutputs(inputs, part) for part in flat.split(flat.shape[1] if full else MAX_OUTPUTS, dim=1)]
        found = combine([variances_of(view, full) for view in views], partial(torch.cat, dim=1))
        shaped = {
            name: diagonal_blocks(values, some.shape[1]) if full else values.reshape(some.shape)
            for name, values in found.items()
        }
        parts.append(shaped)
    return combine(parts, partial(torch.cat, dim=1))


def _sketched(
    sketches: int, inputs: Inputs, outputs: Tensor, variances_of: ViewVariances, generator: torch.Generator
) -> dict[str, Tensor]:
    """v^T C v (m, t, s) of random signs v, one position after the other: its mean is the trace of C."""
    k, m = outputs.shape[-1], len(outputs)
    t = outputs.numel() // (m * k)
    rows = max(1, MAX_SKETCH_BYTES // (k * sketches * outputs.element_size()))
    parts = []
    for low in range(0, m, rows):
        some, pieces = take(inputs, slice(low, low + rows)), []
        shape = (min(rows, m - low), k, sketches)
        for at in range(t):
            signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
            found = variances_of(OutputMixtures(some, (2 * signs - 1).to(outputs), at * k), False)
            pieces.append({name: values.unsqueeze(1) for name, values in found.items()})
        parts.append(combine(pieces, partial(torch.cat, dim=1)))
    return combine(parts, torch.cat)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)
