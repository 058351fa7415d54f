"""One run of a model under watch: every call that uses a followed parameter is recorded with its place in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from whence.tangents.layout import candidates
from whence.tangents.rules import READERS
from whence.tangents.rules.base import Followed, Root, Use, View


@contextmanager
def differentiable() -> Iterator[None]:
    """Build graphs, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


Event = tuple[str, tuple[str, ...], int]
"""A choice met on the way: its kind, the parameters behind it, and how many like it came before."""


@dataclass(frozen=True)
class Record:
    """A use of parameters, and where its output stands in the graph.

    Attributes:
        feeds: where the other tensors that went in stand.
        guessed: whether nothing is known of uses like it from the proof.
    """

    use: Use
    roles: Mapping[str, Followed]
    edge: GradientEdge
    output: tuple[torch.Size, torch.dtype, torch.device]
    event: Event | None
    feeds: tuple[tuple[Any, int], ...] = ()
    guessed: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the output."""
        return self.output[0]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What this use has in common with those of the same line of code in other batches."""
        names = tuple(
            (role, root.parameter, source.view is None or (source.view.transposed, source.view.rows is None))
            for role, source in self.roles.items()
            for root in source.roots
        )
        return (type(self.use).__name__, self.use.groups, self.use.transposed, names, len(self.shape))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are used."""
        return tuple(root.parameter for source in self.roles.values() for root in source.roots)


@dataclass
class Choices:
    """Whether an output has the examples on one of its axes: guessed from its shape and proved, once, then kept.

    Args:
        refuted: Events for which "yes" has been proved wrong.
        made: The answers of the last run, in order.
        settled: Whether the answers of another run are repeated, and only what did not come up in it is guessed.
        learnt: Events of later runs for which "yes" has been proved right.
    """

    refuted: set[Event] = field(default_factory=set)
    made: dict[tuple[str, tuple[str, ...]], list[bool]] = field(default_factory=dict)
    settled: bool = False
    learnt: set[Event] = field(default_factory=set)

    def answer(self, event: Event, guess: Callable[[], bool]) -> bool:
        """Yes or no for one event."""
        if not self.settled:
            yes = guess() and event not in self.refuted
            self.made.setdefault(event[:2], []).append(yes)
            return yes
        known = self.known(event)
        if known is not None:
            return known
        made = set(self.made.get(event[:2], []))  # all alike, as of a cell that is called once for every token
        return made.pop() if len(made) == 1 else guess()

    def known(self, event: Event) -> bool | None:
        """The answer of the proof, `None` if the event did not come up then."""
        made = self.made.get(event[:2], [])
        if event[2] < len(made):
            return made[event[2]]
        return True if event in self.learnt else None


class Watch(TorchFunctionMode):
    """Reads the calls of one forward pass. Nothing is hung on the model; leaving the mode ends it.

    Args:
        parameters: The parameters to follow.
        examples: n.
        choices: The answers of the first run, or where to put them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], examples: int, choices: Choices) -> None:
        """Start with the parameters themselves."""
        super().__init__()
        self.examples = examples
        self.choices = choices
        self.records: list[Record] = []
        self._event: Event | None = None
        self._arguments: tuple[Any, ...] = ()
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._followed = {
            id(parameter): Followed(parameter, (Root(name, parameter),), View())
            for name, parameter in parameters.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass the call on, read by its rule if it has one."""
        reader = READERS.get(func)
        if reader is None:
            return func(*args, **(kwargs or {}))
        self._arguments = (*args, *kwargs.values()) if kwargs else args
        return reader(self, func, args, kwargs or {})

    def follows(self, *tensors: Any) -> bool:
        """Whether any of these is a followed tensor."""
        followed = self._followed
        return any(id(tensor) in followed for tensor in tensors)

    def source(self, tensor: Any) -> Followed | None:
        """What is known of a followed tensor."""
        return self._followed.get(id(tensor))

    def record(self, use: Use, output: Tensor, **roles: Tensor | None) -> None:
        """Note that `output` used the followed ones among the tensors in `roles`."""
        event, self._event = self._event, None
        if not output.requires_grad:  # run without gradients by the model itself
            return
        sources = {role: self._followed[id(tensor)] for role, tensor in roles.items() if id(tensor) in self._followed}
        place = (output.shape, output.dtype, output.device)
        guessed = event is not None and self.choices.settled and self.choices.known(event) is None
        feeds = self._feeds(sources) if use.fed else ()
        self.records.append(Record(use, sources, get_gradient_edge(output), place, event, feeds, guessed))

    def _feeds(self, sources: Mapping[str, Followed]) -> tuple[tuple[Any, int], ...]:
        """Where the tensors that went into the call stand, but for those in roles."""
        own = {id(source.tensor) for source in sources.values()}
        found = []
        for value in self._arguments:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Tensor) and one.requires_grad and id(one) not in own:
                    edge = get_gradient_edge(one)
                    found.append((edge.node, edge.output_nr))
        return tuple(found)

    def derive(self, output: Any, *sources: Followed, view: View | None = None, index: Tensor | None = None) -> None:
        """Follow `output`, which is made of followed tensors only."""
        self._event = None
        if not isinstance(output, Tensor) or not output.requires_grad or id(output) in self._followed:
            return
        if index is not None:
            roots: tuple[Root, ...] = (Root(sources[0].roots[0].parameter, output, index),)
        else:
            roots = tuple({id(root.tensor): root for source in sources for root in source.roots}.values())
        self._followed[id(output)] = Followed(output, roots, view)

    def carries_examples(self, kind: str, sources: Sequence[Followed], shape: Sequence[int]) -> bool:
        """Whether an output of this shape has the examples on one of its axes; what it is not, it is derived."""
        names = tuple(root.parameter for source in sources for root in source.roots)
        event = (kind, names, self._seen[kind, names])
        self._seen[kind, names] += 1
        axes = range(len(shape))
        yes = self.choices.answer(event, lambda: next(candidates(axes, shape, self.examples), None) is not None)
        self._event = event if yes else None
        return yes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read calls made inside a reader, too."""
        with self:
            yield
