"""A problem from a seed: a network, data and loader, a loss, the options of a fit. Nothing here imports whence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import whence

from . import networks
from .dense import Loss

Inputs = Any


@dataclass
class Problem:
    """What is fitted, and how.

    Attributes:
        inputs, targets, weights: of all training examples in the order of their index.
        loader: gives them in batches.
        test: inputs to predict for.
        structure: by name, see `compare.STRUCTURES`.
        options: of the fit, but for likelihood and structure; `parameters` is left out where all count.
        selected: names of the parameters that count.
    """

    seed: int
    drawn: networks.Drawn
    inputs: Inputs
    targets: Tensor
    weights: Tensor | None
    loader: Any
    test: Inputs
    loss: Loss
    structure: str
    options: dict[str, Any]
    selected: list[str]
    words: list[str] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.drawn.model

    @property
    def n(self) -> int:
        return len(self.targets)

    def __str__(self) -> str:
        options = {name: value for name, value in self.options.items() if name not in ("groups", "parameters")}
        marks = [name for name in ("groups", "parameters") if name in self.options]
        told = {name: value for name, value in vars(self.loss).items() if value not in (None, 0.0, "fixed", -100)}
        parts = ["; ".join(self.drawn.words), ", ".join(self.words), self.structure]
        return " | ".join([*parts, str(told), str(options) + (" with " + ", ".join(marks) if marks else "")])


def pick(inputs: Inputs, rows: Any) -> Inputs:
    """Some examples of any inputs."""
    if isinstance(inputs, dict):
        return {name: value[rows] for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[rows] for value in inputs)
    return inputs[rows]


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in another precision."""

    def one(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(inputs, dict):
        return {name: one(value) for name, value in inputs.items()}
    return tuple(map(one, inputs)) if isinstance(inputs, tuple) else one(inputs)


def draw(seed: int) -> Problem:
    """The problem of a seed. Torch's own generator is left in another state."""
    rng = Random(seed)
    torch.manual_seed(seed)
    positions = rng.random() < 0.22
    loss, k = draw_loss(rng)
    drawn = networks.draw(rng, k, positions)
    model = drawn.model.double()
    if loss.kind == "categorical" and rng.random() < 0.04:
        model.scale = rng.choice([60.0, 60.0, 2000.0])
        drawn.words.append("large logits")
    structure = draw_structure(rng, drawn)
    n = rng.randint(5, 16) if positions else rng.randint(5, 28)
    n = 5 if structure == "matrix free" else n  # every example takes solves of its own
    inputs, words = drawn.inputs(n), []
    if rng.random() < 0.35:
        inputs = pick(inputs, drawn.key(inputs).argsort(stable=True, descending=rng.random() < 0.3))
        words.append("sorted")
    with torch.no_grad():
        outputs = call(model, inputs)
    targets = draw_targets(rng, loss, outputs, words)
    weights = draw_weights(rng, outputs, words)
    dtype = torch.float32 if rng.random() < 0.04 else torch.float64
    options = draw_options(rng, loss, outputs, structure, dtype)
    parameters, selected = draw_parameters(rng, drawn.model, structure)
    if parameters is not None:
        options["parameters"] = parameters
    if dtype == torch.float32:
        words.append("float32")
        drawn.model.float()
        inputs = cast(inputs, dtype)
        targets = targets.to(dtype) if targets.is_floating_point() else targets
        weights = None if weights is None else weights.to(dtype)
    make = drawn.other if drawn.other is not None and rng.random() < 0.25 else drawn.inputs
    words += ["tests of another length"] if make is drawn.other else []
    test = cast(make(rng.randint(1, 4)), dtype)
    loader = draw_loader(rng, inputs, targets, weights, words)
    return Problem(seed, drawn, inputs, targets, weights, loader, test, loss, structure, options, selected, words)


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


# --- Losses and data ------------------------------------------------------------------------------------------------


def draw_loss(rng: Random) -> tuple[Loss, int]:
    """A loss and the number of outputs."""
    kind = rng.choice(["gaussian", "gaussian", "categorical", "bernoulli"])
    rng.random()  # not used; without it a seed would give another problem
    if kind == "gaussian":
        return Loss("gaussian"), rng.choice([1, 1, 2, 3])
    if kind == "bernoulli":
        k = rng.choice([1, 1, 2, 3])
        weight = rng.choice([None, None, (2.5,), tuple(0.5 + c for c in range(k))])
        return Loss("bernoulli", weight=weight), k
    k = rng.choice([2, 3, 4])
    return (
        Loss(
            "categorical",
            weight=tuple(0.5 + 0.7 * c for c in range(k)) if rng.random() < 0.2 else None,
            smoothing=0.1 if rng.random() < 0.2 else 0.0,
        ),
        k,
    )


def draw_targets(rng: Random, loss: Loss, outputs: Tensor, words: list[str]) -> Tensor:
    shape, k = outputs.shape[:-1], outputs.shape[-1]
    if loss.kind == "gaussian":
        targets = outputs + torch.randn_like(outputs) if rng.random() < 0.5 else torch.randn_like(outputs)
        return targets.squeeze(-1) if k == 1 and rng.random() < 0.3 else targets
    if loss.kind == "bernoulli":
        if rng.random() < 0.15:
            words.append("soft targets")
            return torch.rand_like(outputs)
        targets = (torch.rand_like(outputs) < 0.5).to(outputs.dtype)
        return targets.squeeze(-1) if k == 1 and outputs.ndim == 2 and rng.random() < 0.3 else targets
    if rng.random() < 0.15:
        words.append("soft targets")
        return torch.rand_like(outputs).softmax(-1)
    labels = torch.randint(0, k, shape)
    if rng.random() < 0.15:
        words.append("some ignored")
        labels[torch.rand(shape) < 0.2] = loss.ignore_index
        labels.reshape(-1)[0] = 0
    return labels


def draw_weights(rng: Random, outputs: Tensor, words: list[str]) -> Tensor | None:
    if rng.random() < 0.75:
        return None
    shape = outputs.shape[:-1] if rng.random() < 0.4 else outputs.shape[:1]
    weights = 0.2 + 2 * torch.rand(shape, dtype=torch.float64)
    if rng.random() < 0.3:
        weights[torch.rand(shape) < 0.2] = 0.0
        weights.reshape(-1)[-1] = 1.0
    elif rng.random() < 0.1:
        weights = torch.ones(shape, dtype=torch.float64)
    words.append("weights" + (" of positions" if weights.ndim > 1 else ""))
    return weights


# --- Options --------------------------------------------------------------------------------------------------------

EXACT = ("auto", "primal", "dual", "matrix free", "core", "sketch")


def draw_structure(rng: Random, drawn: networks.Drawn) -> str:
    if drawn.plain and rng.random() < 0.5:
        return rng.choice(["ekfac", "kfac", "ekfac of gradients", "ekfac, two bases", "ekfac"])
    if rng.random() < 0.004:
        return "matrix free"
    return rng.choice(["auto", "auto", "primal", "dual", "core", "core", "core", "sketch", "diagonal", "diagonal"])


def draw_options(rng: Random, loss: Loss, outputs: Tensor, structure: str, dtype: torch.dtype) -> dict[str, Any]:
    n, positions = len(outputs), outputs.ndim > 2
    options: dict[str, Any] = {"ridge": 10 ** rng.uniform(-1.5 if dtype == torch.float64 else 0.0, 1.0)}
    exact = structure in EXACT
    if exact and structure != "matrix free" and rng.random() < 0.12:
        options["ridge"] = rng.choice(["loo", "loo", "loo", 0.0])
    if rng.random() < 0.25:
        options["recenter"] = True
    if rng.random() < 0.3:
        options["noise"] = "unbiased"
    if rng.random() < 0.4 and structure != "matrix free":
        options["execution"] = whence.Execution(chunk_size=rng.randint(1, 7))
    units = ["example"] + ["output"] * (loss.kind != "categorical") + ["position", "position"] * positions
    loo = rng.choice(units) if rng.random() < 0.5 else "example"
    if exact and structure != "matrix free" and loo == "example" and rng.random() < 0.15:
        count = rng.randint(2, max(2, n // 2))
        options["groups"] = [rng.randrange(count) for _ in range(n)]
        options["groups"][:2] = [0, 1]
    elif loo != "example":
        options["loo"] = loo
    if not exact and rng.random() < 0.25:
        options["leverage"] = rng.choice(["clip", "one_plus_q"])
    if rng.random() < 0.2 and loo == "example" and "groups" not in options:
        size = outputs[0].numel()
        options["hessian_columns"] = rng.choice(["all", size, size + 1, max(1, size - 1)])
        if not exact and structure != "diagonal":  # the last layer's factor may be a multiple of the identity, up to
            del options["hessian_columns"]  # rounding, which then chooses the basis
    return options


def draw_parameters(rng: Random, model: nn.Module, structure: str) -> tuple[Any, list[str]]:
    """The option `parameters`, `None` for all, and the names that are meant."""
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    kronecker = structure not in (*EXACT, "diagonal")
    if rng.random() < 0.2 and len(names) > 1 and not kronecker:
        selected = [name for name in names if rng.random() < 0.6] or [names[-1]]
        return selected if rng.random() < 0.5 else _among(selected), selected
    head = [name for name in names if name.startswith("head.")]
    if rng.random() < 0.07 and isinstance(model.head, nn.Linear) and head:
        return "last_layer", head
    return None, names


def _among(selected: list[str]) -> Callable[[str, Any], bool]:
    return lambda name, parameter: name in selected


# --- Loaders --------------------------------------------------------------------------------------------------------


class Again:
    """Batches made anew each time they are asked for."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Rows(Dataset):
    """A data set of single examples."""

    def __init__(self, inputs: Inputs, targets: Tensor, weights: Tensor | None, named: bool) -> None:
        self.inputs, self.targets, self.weights, self.named = inputs, targets, weights, named

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, at: int) -> Any:
        return together(
            pick(self.inputs, at), self.targets[at], None if self.weights is None else self.weights[at], self.named
        )


def together(inputs: Inputs, targets: Tensor, weights: Tensor | None, named: bool) -> Any:
    """A batch, or an example, in one of the forms that loaders give."""
    if named and isinstance(inputs, dict):
        extra = {} if weights is None else {"sample_weight": weights}
        return {**inputs, "labels": targets, **extra}
    return (inputs, targets) if weights is None else (inputs, targets, weights)


def batch_sizes(rng: Random, n: int, words: list[str]) -> list[int]:
    how = rng.choice(["one batch", "even", "even", "uneven", "first of one", "ones"])
    words.append(how)
    if how == "one batch":
        return [n]
    if how == "ones":
        return [1] * n
    if how == "even":
        size = rng.randint(2, 8)
        return [min(size, n - low) for low in range(0, n, size)]
    sizes = [1] if how == "first of one" else []
    while sum(sizes) < n:
        sizes.append(min(rng.randint(1, 8), n - sum(sizes)))
    return sizes


def draw_loader(rng: Random, inputs: Inputs, targets: Tensor, weights: Tensor | None, words: list[str]) -> Any:
    n, named = len(targets), rng.random() < 0.6
    how = rng.choice(["list", "list", "again", "DataLoader", "shuffling DataLoader"])
    words.append(how)
    if how.endswith("DataLoader"):
        size = rng.randint(1, n)
        return DataLoader(Rows(inputs, targets, weights, named), batch_size=size, shuffle=how.startswith("shuffling"))
    sizes = batch_sizes(rng, n, words)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]

    def make() -> Iterator[Any]:
        for start, size in zip(starts, sizes, strict=True):
            rows = slice(start, start + size)
            yield together(pick(inputs, rows), targets[rows], None if weights is None else weights[rows], named)

    return list(make()) if how == "list" else Again(make)
