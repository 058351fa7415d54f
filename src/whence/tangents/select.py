"""Which parameters: all of them, the last layer, names, patterns, a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import InputError

Choice = str | Iterable[str] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Selection:
    """The selected parameters, in the order in which they are laid out in a flat vector of size d."""

    parameters: dict[str, nn.Parameter]

    @property
    def size(self) -> int:
        """The number d of selected weights."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def one_layer(self) -> bool:
        """Whether all of it belongs to one module, so that choosing a layer would not make it smaller."""
        return len({name.rpartition(".")[0] for name in self.parameters}) == 1

    def flatten(self, tensors: dict[str, Tensor], leading: int = 0) -> Tensor:
        """Join tensors shaped (..., *parameter.shape), `leading` axes in front, into one (..., d)."""
        return torch.cat([tensors[name].flatten(leading) for name in self.parameters], dim=-1)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut (..., d) into tensors shaped as the parameters."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        parts = vector.split(sizes, dim=-1)
        return {
            name: part.reshape(*vector.shape[:-1], *parameter.shape)
            for (name, parameter), part in zip(self.parameters.items(), parts, strict=True)
        }

    def like(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut (..., d) into tensors of the parameters' shapes and dtypes."""
        return {name: part.to(self.parameters[name].dtype) for name, part in self.unflatten(vector).items()}

    def detached(self) -> dict[str, Tensor]:
        """The parameters without a graph, to hand to a functional call."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def free(self) -> dict[str, Tensor]:
        """The parameters as leaves of a graph of their own; gradients never reach the model's."""
        return {name: p.detach().requires_grad_() for name, p in self.parameters.items()}

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The current weights as one flat vector."""
        return self.flatten(self.detached()).to(dtype)


def select(model: nn.Module, choice: Choice, last_layer: Callable[[], str] | None = None) -> Selection:
    """Pick parameters of a model. Parameters with `requires_grad=False` are never picked.

    Args:
        model: the network.
        choice: "all"; "last_layer"; a name or a pattern such as "layer4.*" (`*` and `?`); several of them; or a
            function of name and parameter.
        last_layer: finds the name of the module that runs last, for "last_layer".

    Examples:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> list(select(net, "2.*").parameters)
        ['2.weight', '2.bias']
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if isinstance(choice, str) and choice == "all":
        picked = trainable
    elif isinstance(choice, str) and choice == "last_layer":
        if last_layer is None:
            raise InputError("expected a way to find the last layer; name its parameters instead.")
        owned = {id(p) for p in model.get_submodule(last_layer()).parameters()}
        picked = {name: p for name, p in trainable.items() if id(p) in owned}
    elif callable(choice):
        picked = {name: p for name, p in trainable.items() if choice(name, p)}
    else:
        picked = _matching(model, trainable, _patterns(choice))
    if not picked:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        raise InputError(
            f"expected at least one selected parameter, got none with parameters={choice!r}. "
            f"Trainable: {_listing(trainable)}; frozen (requires_grad=False): {_listing(frozen)}. "
            'Use parameters="all", or call requires_grad_(True) on what should count.'
        )
    odd = [name for name, p in picked.items() if not p.is_floating_point()]
    if odd:
        raise InputError(
            f"expected real floating-point parameters, got {picked[odd[0]].dtype} in {_listing(odd)}. "
            "Select others, or call requires_grad_(False) on these."
        )
    return Selection(dict(picked))


def _patterns(choice: Any) -> list[str]:
    patterns = [choice] if isinstance(choice, str) else list(choice) if isinstance(choice, Iterable) else [choice]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(
            'expected parameters to be "all", "last_layer", names or patterns, or a function of name and parameter, '
            f"got {choice!r}."
        )
    return patterns


def _matching(model: nn.Module, trainable: dict[str, nn.Parameter], patterns: list[str]) -> dict[str, nn.Parameter]:
    """Trainable parameters of which some name fits; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    fits = {q: {i for i, known in names.items() if any(fnmatchcase(name, q) for name in known)} for q in patterns}
    wanted = {id(p) for p in trainable.values()}
    unmatched = [q for q, found in fits.items() if not found & wanted]
    if unmatched:
        frozen = [names[i][0] for q in unmatched for i in fits[q]]
        raise InputError(
            f"expected every pattern of `parameters` to match a trainable parameter, got no match for {unmatched}. "
            + (f"Frozen (requires_grad=False): {_listing(frozen)}. " if frozen else "")
            + f"The model has: {_listing(trainable)}."
        )
    chosen = set().union(*fits.values())
    return {name: p for name, p in trainable.items() if id(p) in chosen}


def _listing(names: Iterable[str], most: int = 12) -> str:
    shown = list(names)
    text = ", ".join(shown[:most]) or "none"
    return text if len(shown) <= most else f"{text}, ... ({len(shown)} in all)"
