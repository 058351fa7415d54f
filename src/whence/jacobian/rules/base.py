"""What a rule is: it reads one function call, and says which per-example gradients follow from it.

A rule registers a reader for each function it knows. The reader gets every call of that function while a model runs
under capture. If a followed parameter takes part, it runs the function and records a `Use`: the call's inputs, and how
a gradient in the call's output becomes a gradient in the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from whence.jacobian.gradients import Factor, Kind, Layout

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass(frozen=True)
class Root:
    """Where a followed tensor comes from: a parameter, or rows taken from one by an index common to all examples."""

    parameter: str
    tensor: Tensor
    index: Tensor | None = None


@dataclass(frozen=True)
class View:
    """A followed tensor that is a matrix parameter, transposed perhaps, or some of its rows."""

    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Followed:
    """A tensor that depends on parameters but on no example. `view` is set where it is (almost) a parameter itself."""

    tensor: Tensor
    roots: tuple[Root, ...]
    view: View | None = None

    @property
    def parameter(self) -> str | None:
        """The parameter's name, if this is nothing but a parameter or a simple view of it."""
        return self.roots[0].parameter if self.view is not None else None

    @property
    def whole(self) -> bool:
        """Whether this is a parameter as it is."""
        return self.view == View()


class Use(ABC):
    """One call that used parameters in a way a rule understands.

    Class attributes:
        kind: The form of the gradient in the role "weight".
        joint: Whether "weight" and "bias" may be one block.
        groups: e, of kronecker uses.
        transposed: Whether the weight is stored input first, of kronecker uses.
        fed: Whether the output depends on anything beside the tensors of its roles.
    """

    kind: ClassVar[Kind] = "dense"
    joint: ClassVar[bool] = False
    fed: ClassVar[bool] = True
    groups: int = 1
    transposed: bool = False

    @abstractmethod
    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """Axes of the recorded output, of this shape, that may hold the examples."""

    @abstractmethod
    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Per-example gradients (n, c, *shape) in a role's tensor, from gradients (n, c, ...) in the output."""

    def ready(self) -> Use:
        """The same use, with what `dense` needs for every cotangent computed once."""
        return self

    def accepts(self, layout: Layout, shape: Sequence[int], n: int) -> bool:
        """Whether n examples may lie in the output in this way."""
        return True

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """The two sides (n, e, t, i) and (n, c, e, t, o) of a kronecker use."""
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def rows(self, layout: Layout, grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Index (n, t), gradients (n, c, t, d) and weights (n, t) of a rows use."""
        raise NotImplementedError(f"{type(self).__name__} has no rows")


class Recorder(Protocol):
    """What a reader can ask of the running capture."""

    def follows(self, *tensors: Any) -> bool:
        """Whether any of these is a followed tensor."""
        ...

    def source(self, tensor: Any) -> Followed | None:
        """What is known of a followed tensor."""
        ...

    def record(self, use: Use, output: Tensor, **roles: Tensor | None) -> None:
        """Note that `output` used the followed ones among the tensors in `roles`."""
        ...

    def derive(self, output: Any, *sources: Followed, view: View | None = None, index: Tensor | None = None) -> None:
        """Follow `output`, which is made of followed tensors only."""
        ...

    def carries_examples(self, kind: str, sources: Sequence[Followed], shape: Sequence[int]) -> bool:
        """Whether an output of this shape has the examples on one of its axes; what it is not, it is derived."""
        ...

    def watching(self) -> AbstractContextManager[Any]:
        """Read calls made inside a reader, too."""
        ...


Reader = Callable[[Recorder, Function, Arguments, Keywords], Any]


def functions(owner: Any, *names: str) -> list[Function]:
    """The functions of these names that this version of torch has."""
    return [getattr(owner, name) for name in names if callable(getattr(owner, name, None))]


def bind(names: Sequence[str], args: Arguments, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, for functions whose signature Python cannot see; absent ones are left out."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def positions(tensor: Tensor, kept: int) -> Tensor:
    """Flatten what lies between the first axis and the last `kept` axes: (n, ..., *kept) to (n, t, *kept)."""
    middle = tensor.dim() - 1 - kept
    if middle == 1:
        return tensor
    if middle == 0:
        return tensor.unsqueeze(1)
    return tensor.flatten(1, middle)


def grad_positions(tensor: Tensor, kept: int) -> Tensor:
    """The same for gradients: (n, c, ..., *kept) to (n, c, t, *kept)."""
    middle = tensor.dim() - 2 - kept
    if middle == 1:
        return tensor
    if middle == 0:
        return tensor.unsqueeze(2)
    return tensor.flatten(2, 1 + middle)


def promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype that holds them all (mixed precision gives inputs and gradients of different ones)."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)
