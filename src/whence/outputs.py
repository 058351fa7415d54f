"""Which outputs of a prediction are looked at: all, the predicted one, some of them, or random sketches of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import InputError
from .likelihoods import Likelihood
from .tangents.batches import Inputs, take
from .tangents.views import Mixed, Picked, View

AT_ONCE = 64
"""Outputs whose covariances are computed together; of more, variances come so many at a time, without covariances."""

SKETCH_BYTES = 64 * 2**20
"""Random signs of one piece are kept under this size."""

Answer = Callable[[View, bool], dict[str, Tensor]]
"""From a view of some inputs to covariances (m, c, c) by name; or, if told that they serve, to variances (m, c)."""


@dataclass(frozen=True)
class Look:
    """What a user wants to see of the outputs.

    Attributes:
        kind: all outputs, that of the predicted class, some by their positions, or random sketches of all.
        index: positions, where they are given.
        sketches: how many, where they are asked for.
    """

    kind: Literal["all", "predicted", "some", "sketches"]
    index: tuple[int, ...] = ()
    sketches: int = 0

    @classmethod
    def of(cls, given: Any) -> Look:
        """Read what a user says.

        Examples:
            >>> Look.of("predicted").kind, Look.of([3, 1]).index, Look.of(16).sketches
            ('predicted', (3, 1), 16)
        """
        if isinstance(given, str) and given in ("all", "predicted"):
            return cls("all" if given == "all" else "predicted")
        if _whole(given):
            if int(given) < 2:
                raise InputError(
                    f"expected at least two random sketches, for a standard error, got outputs={given}. "
                    f"A single output goes into a list: outputs=[{given}]."
                )
            return cls("sketches", sketches=int(given))
        listed = given.tolist() if isinstance(given, Tensor) and given.ndim == 1 else given
        several = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
        if several and all(map(_whole, listed)):
            return cls("some", tuple(int(one) for one in listed))
        raise InputError(
            'expected outputs to be "all", "predicted", a list of positions such as [0, 3], or a number of random '
            f"sketches, got {given!r}."
        )

    def positions(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """(N, c) which of outputs (N, k) are looked at."""
        n, k = outputs.shape
        if self.kind == "predicted":
            return likelihood.predicted(outputs).unsqueeze(1)
        listed = range(k) if self.kind == "all" else self.index
        wrong = [one for one in listed if not 0 <= one < k]
        if wrong:
            raise InputError(f"expected positions of outputs between 0 and {k - 1}, got {wrong[0]} in outputs=[...].")
        return torch.tensor(list(listed), device=outputs.device).expand(n, -1)


@dataclass(frozen=True)
class Chosen:
    """What was looked at, where it was not all outputs.

    Attributes:
        index: (m, ..., c) positions of the outputs among all k; `None` for sketches.
        probabilities: (m, ..., c) of these classes, where the likelihood has classes.
        sketches: whether the variances are of random sketches, each with the trace of the covariance as its mean.
    """

    index: Tensor | None
    probabilities: Tensor | None
    sketches: bool


@dataclass(frozen=True)
class Seen:
    """What was found for one batch, with m predictions at positions of any shape.

    Attributes:
        mean: (m, ..., c) outputs that were looked at; all k of them for sketches.
        chosen: which they are; `None` if all.
        covariances: (m, ..., c, c) by name; empty where variances alone were computed.
        variances: (m, ..., c) by name, or of sketches (m, ..., s).
    """

    mean: Tensor
    chosen: Chosen | None
    covariances: dict[str, Tensor]
    variances: dict[str, Tensor]


def look_at(
    look: Look,
    likelihood: Likelihood,
    inputs: Inputs,
    outputs: Tensor,
    answer: Answer,
    covariance: bool,
    generator: torch.Generator,
) -> Seen:
    """Variances of what is looked at, in as many views as memory wants.

    Args:
        look: what to see.
        likelihood: knows the predicted class.
        inputs: a batch of m.
        outputs: (m, ..., k) of the network for it.
        answer: a sandwich.
        covariance: whether covariances between the outputs of a position are wanted.
        generator: for random signs.
    """
    k, shape = outputs.shape[-1], outputs.shape[:-1]
    flat = outputs.reshape(-1, k)
    if look.kind == "sketches":
        found = _sketched(look.sketches, inputs, outputs, answer, generator)
        variances = {name: value.reshape(*shape, look.sketches) for name, value in found.items()}
        return Seen(outputs, Chosen(None, None, True), {}, variances)
    index = look.positions(likelihood, flat)
    c = index.shape[1]
    full = covariance and c <= AT_ONCE
    found = _picked(inputs, index.reshape(shape[0], -1, c), k, answer, full)
    shaped = {name: value.reshape(*shape, *value.shape[2:]) for name, value in found.items()}
    mean = flat.gather(1, index).reshape(*shape, c)
    chosen = None
    if look.kind != "all":
        chances = likelihood.probabilities(flat).gather(1, index).reshape(*shape, c) if likelihood.has_classes else None
        chosen = Chosen(index.reshape(*shape, c), chances, False)
    return Seen(mean, chosen, shaped if full else {}, {} if full else shaped)


def blank(seen: Seen, inputs: Inputs) -> Seen:
    """NaN, or -1 for positions of outputs, where the inputs' "attention_mask" says that there is only padding."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    shape = seen.mean.shape[:-1]
    if not isinstance(mask, Tensor) or mask.shape != shape or len(shape) == 1:
        return seen
    hidden = mask == 0

    def without(values: Tensor) -> Tensor:
        shown = hidden.reshape(*shape, *[1] * (values.ndim - len(shape)))
        return values.masked_fill(shown, float("nan") if values.is_floating_point() else -1)

    chosen = seen.chosen
    if chosen is not None:
        index, chances = (None if one is None else without(one) for one in (chosen.index, chosen.probabilities))
        chosen = Chosen(index, chances, chosen.sketches)
    covariances, variances = (
        {name: without(value) for name, value in one.items()} for one in (seen.covariances, seen.variances)
    )
    return Seen(without(seen.mean), chosen, covariances, variances)


def _picked(inputs: Inputs, index: Tensor, k: int, answer: Answer, full: bool) -> dict[str, Tensor]:
    """Covariances (m, t, c, c) of outputs (m, t, c) at t positions, or variances (m, t, c)."""
    m, t, c = index.shape
    places = index + k * torch.arange(t, device=index.device).reshape(1, t, 1)
    parts: dict[str, list[Tensor]] = {}
    for low, high in _spans(t, max(1, AT_ONCE // c)):
        pieces: dict[str, list[Tensor]] = {}
        flat = places[:, low:high].reshape(m, -1)
        for start, stop in _spans(flat.shape[1], flat.shape[1] if full else AT_ONCE):
            for name, value in answer(Picked(inputs, flat[:, start:stop]), full).items():
                pieces.setdefault(name, []).append(value)
        for name, values in pieces.items():
            parts.setdefault(name, []).append(_by_position(torch.cat(values, dim=1), high - low, full))
    return {name: torch.cat(values, dim=1) for name, values in parts.items()}


def _by_position(values: Tensor, t: int, full: bool) -> Tensor:
    """(m, t c, t c) to (m, t, c, c), or (m, t c) to (m, t, c)."""
    m = len(values)
    if not full:
        return values.reshape(m, t, -1)
    c = values.shape[1] // t
    return values.reshape(m, t, c, t, c).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _sketched(
    sketches: int, inputs: Inputs, outputs: Tensor, answer: Answer, generator: torch.Generator
) -> dict[str, Tensor]:
    """v^T C v (m, t, s) of random signs v, one position after the other: its mean is the trace of C."""
    k, m = outputs.shape[-1], len(outputs)
    t = outputs.numel() // (m * k)
    rows = max(1, SKETCH_BYTES // (k * sketches * outputs.element_size()))
    parts: dict[str, list[Tensor]] = {}
    for low, high in _spans(m, rows):
        some = take(inputs, slice(low, high))
        pieces: dict[str, list[Tensor]] = {}
        for at in range(t):
            signs = torch.randint(
                0, 2, (high - low, k, sketches), generator=generator, dtype=torch.int8, device=generator.device
            )
            basis = (2 * signs - 1).to(outputs)
            for name, value in answer(Mixed(some, basis, at * k), False).items():
                pieces.setdefault(name, []).append(value)
        for name, values in pieces.items():
            parts.setdefault(name, []).append(torch.stack(values, dim=1))
    return {name: torch.cat(values) for name, values in parts.items()}


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + step, size)) for low in range(0, size, step))


def join(parts: Sequence[Seen]) -> Seen:
    """Several batches as one; where sequences are shorter in one batch than in another, what is missing is NaN."""
    first = parts[0]
    positions = [part.mean.shape[1:-1] for part in parts]
    most = tuple(max(sizes) for sizes in zip(*positions, strict=True))

    def one(values: Sequence[Tensor | None]) -> Tensor | None:
        found = [_padded(value, most) for value in values if value is not None]
        return torch.cat(found) if found else None

    def together(name: str) -> dict[str, Tensor]:
        keys = getattr(first, name)
        return {key: torch.cat([_padded(getattr(part, name)[key], most) for part in parts]) for key in keys}

    chosen = first.chosen
    if chosen is not None:
        several = [part.chosen for part in parts if part.chosen is not None]
        index, chances = one([each.index for each in several]), one([each.probabilities for each in several])
        chosen = Chosen(index, chances, chosen.sketches)
    means = [_padded(part.mean, most) for part in parts]
    return Seen(torch.cat(means), chosen, together("covariances"), together("variances"))


def _padded(values: Tensor, positions: tuple[int, ...]) -> Tensor:
    """(m, t, ...) with more positions: NaN, or -1 among whole numbers, where there is nothing."""
    if values.shape[1 : 1 + len(positions)] == positions:
        return values
    shape = (len(values), *positions, *values.shape[1 + len(positions) :])
    wide = values.new_full(shape, float("nan") if values.is_floating_point() else -1)
    wide[tuple(slice(0, size) for size in values.shape)] = values
    return wide
