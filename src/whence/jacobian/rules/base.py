"""What a rule is: it reads one function call, and defines the per-example gradients that follow from it.

A rule registers a reader for each function it knows. While a model runs under capture, the `Recorder` passes every call
with a tracked argument to the reader of its function. The reader runs the function and records a `Use`: the call's
inputs, and how a gradient in the call's output becomes a gradient in the parameters. Tracked tensors are the selected
parameters, and tensors computed from these alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from whence.jacobian.gradients import Factor, Kind, Layout, possible_layouts, promoted

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass(frozen=True)
class Root:
    """Where a tracked tensor comes from: a parameter, or rows taken from one by an index common to all examples."""

    parameter: str
    tensor: Tensor
    index: Tensor | None = None


@dataclass(frozen=True)
class Tracked:
    """A tensor that depends on parameters but on no example."""

    tensor: Tensor
    roots: tuple[Root, ...]
    transposed: bool | None = None  # whether it is a transposed parameter; `None` if it is no parameter

    @property
    def parameter(self) -> str | None:
        """The parameter's name, if this is a parameter, perhaps transposed."""
        return None if self.transposed is None else self.roots[0].parameter


class Use(ABC):
    """One call that used parameters in a way that a rule understands."""

    kind: ClassVar[Kind] = "dense"  # the form of the gradient in the role "weight"
    joint: ClassVar[bool] = False  # whether "weight" and "bias" may be one block
    has_inputs: ClassVar[bool] = True  # whether the output depends on anything besides the tensors of its roles
    groups: int = 1  # e, for kronecker uses
    transposed: bool = False  # whether the weight is stored input first, for kronecker uses

    @abstractmethod
    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """Axes of the recorded output, of this shape, that may be the batch axis."""

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Per-example gradients (n, c, ...) in a role's tensor, from gradients (n, c, ...) in the output.

        By default from the factors of a kronecker use: the sum over t of g_t a_t^T for the weight, of g_t for the bias.
        """
        a, g = self.factors(layout, grads, ones=False)
        if role == "bias":
            return g.tensor().sum(3).flatten(2)
        inputs, outputs = promoted(a.tensor(), g.tensor())
        return torch.einsum("neti,nceto->nceio" if self.transposed else "neti,nceto->nceoi", inputs, outputs)

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """The two sides (n, e, t, i) and (n, c, e, t, o) of a kronecker use."""
        raise NotImplementedError(f"{type(self).__name__} has no Kronecker form")

    def rows(self, layout: Layout, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Index (n, t) and gradients (n, c, t, d) of a rows use."""
        raise NotImplementedError(f"{type(self).__name__} has no rows")


CallSite = tuple[str, tuple[str, ...], int]  # kind and parameters of a call, and the number of earlier calls like it


@dataclass(eq=False)
class Record:
    """A use of parameters, and the place of its output in the autograd graph."""

    use: Use
    roles: Mapping[str, Tracked]
    edge: GradientEdge
    output: tuple[torch.Size, torch.dtype, torch.device]  # shape, dtype and device of the output
    input_edges: tuple[tuple[Any, int], ...]  # graph edges of the call's other inputs
    guess: CallSite | None  # the call, if it was only guessed that its output has a batch axis
    layout: Layout | None = None  # where the examples are in the output, once known

    @property
    def shape(self) -> torch.Size:
        """Shape of the output."""
        return self.output[0]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Identifies uses by the same line of code, in any batch."""
        names = tuple(
            (role, root.parameter, source.transposed) for role, source in self.roles.items() for root in source.roots
        )
        return (type(self.use).__name__, self.use.groups, self.use.transposed, names, len(self.shape))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters in use."""
        return tuple(root.parameter for source in self.roles.values() for root in source.roots)

    def possible_layouts(self, n: int) -> list[Layout]:
        """Every layout in which the output could hold n examples, most likely first."""
        return list(possible_layouts(self.use.axes(self.shape), self.shape, n))


class Recorder(TorchFunctionMode):
    """Records the calls of one forward pass of n examples.

    `batch_axes` says whether the outputs of some calls have a batch axis; for all others it is guessed from the shape,
    and noted in `sites`. A reader that calls other functions does so under `with recorder:`, so that these calls are
    read too.
    """

    def __init__(
        self,
        readers: Mapping[Function, Reader],
        parameters: Mapping[str, Tensor],
        examples: int,
        batch_axes: Mapping[CallSite, bool],
    ) -> None:
        super().__init__()
        self.readers = readers
        self.examples = examples
        self.batch_axes = batch_axes
        self.records: list[Record] = []
        self.sites: dict[CallSite, bool] = {}
        self._site: CallSite | None = None
        self._arguments: list[Any] = []
        self._calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._tracked = {
            id(parameter): Tracked(parameter, (Root(name, parameter),), transposed=False)
            for name, parameter in parameters.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, through its reader if there is one and an argument is tracked.

        What any other function makes of tracked tensors alone is tracked.
        """
        keywords = kwargs or {}
        arguments = flat_arguments(args, keywords)
        if not self.tracks(*arguments):
            return func(*args, **keywords)
        reader = self.readers.get(func)
        if reader is not None:
            self._arguments = arguments
            return reader(self, func, args, keywords)
        out = func(*args, **keywords)
        sources = [self.source(one) for one in arguments if isinstance(one, Tensor)]
        tracked = [source for source in sources if source is not None]
        if len(tracked) == len(sources):
            for one in out if isinstance(out, (tuple, list)) else (out,):
                self.track(one, *tracked)
        return out

    def tracks(self, *tensors: Any) -> bool:
        """Whether any of these is a tracked tensor."""
        tracked = self._tracked
        return any(id(tensor) in tracked for tensor in tensors)

    def source(self, tensor: Any) -> Tracked | None:
        """The entry of a tracked tensor, or `None`."""
        return self._tracked.get(id(tensor))

    def record(self, use: Use, output: Tensor, **roles: Tensor | None) -> None:
        """Record that `output` used the tracked tensors among those in `roles`, if there are any."""
        site, self._site = self._site, None
        sources = {role: self._tracked[id(tensor)] for role, tensor in roles.items() if id(tensor) in self._tracked}
        if not sources or not output.requires_grad:  # the model itself disabled gradients
            return
        guess = None if site in self.batch_axes else site
        described = (output.shape, output.dtype, output.device)
        in_roles = {id(source.tensor) for source in sources.values()}
        inputs = [one for one in self._arguments if use.has_inputs and isinstance(one, Tensor) and one.requires_grad]
        edges = [get_gradient_edge(one) for one in inputs if id(one) not in in_roles]
        others = tuple((edge.node, edge.output_nr) for edge in edges)
        self.records.append(Record(use, sources, get_gradient_edge(output), described, others, guess))

    def track(
        self, output: Any, *sources: Tracked, transposed: bool | None = None, index: Tensor | None = None
    ) -> None:
        """Track `output`, which was computed from tracked tensors only."""
        self._site = None
        if not isinstance(output, Tensor) or not output.requires_grad or id(output) in self._tracked:
            return
        roots = {id(root.tensor): root for source in sources for root in source.roots}
        if index is not None:
            roots = {0: Root(sources[0].roots[0].parameter, output, index)}
        self._tracked[id(output)] = Tracked(output, tuple(roots.values()), transposed)

    def has_batch_axis(self, kind: str, sources: Sequence[Tracked], shape: Sequence[int]) -> bool:
        """Whether an output of this shape has a batch axis; if not, it is a function of parameters alone."""
        names = tuple(root.parameter for source in sources for root in source.roots)
        site = (kind, names, self._calls[kind, names])
        self._calls[kind, names] += 1
        found = self.batch_axes.get(site)
        if found is None:
            found = any(possible_layouts(range(len(shape)), shape, self.examples))
        self.sites[site] = found
        self._site = site if found else None
        return found


class Intercept(TorchFunctionMode):
    """Passes every call of a torch function through `call(function, args, kwargs)`."""

    def __init__(self, call: Callable[[Function, Arguments, Keywords], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


def substituted(replacements: Mapping[int, Tensor]) -> Intercept:
    """A mode in which torch's functions get other tensors in place of some, by the identity of these."""

    def replaced(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        return replacements.get(id(value), value)

    def call(function: Function, args: Arguments, kwargs: Keywords) -> Any:
        return function(*map(replaced, args), **{name: replaced(value) for name, value in kwargs.items()})

    return Intercept(call)


Reader: TypeAlias = Callable[[Recorder, Function, Arguments, Keywords], Any]


def flat_arguments(args: Arguments, kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments of a call, with lists and tuples flattened."""
    values = [*args, *kwargs.values()]
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]


def functions(owner: Any, *names: str) -> list[Function]:
    """The functions with these names that exist in this version of torch."""
    return [getattr(owner, name) for name in names if callable(getattr(owner, name, None))]


def bind(names: Sequence[str], args: Arguments, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, for functions whose signature Python cannot see; absent ones are left out."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def positions(tensor: Tensor, trailing: int, lead: int = 1) -> Tensor:
    """Flatten all axes between the first `lead` and the last `trailing` ones into one axis of positions.

    Examples:
        >>> positions(torch.zeros(5, 2, 3, 4), trailing=1).shape
        torch.Size([5, 6, 4])
        >>> positions(torch.zeros(5, 4), trailing=1).shape
        torch.Size([5, 1, 4])
    """
    middle = tensor.dim() - lead - trailing
    if middle == 1:
        return tensor
    return tensor.flatten(lead, lead + middle - 1) if middle else tensor.unsqueeze(lead)
