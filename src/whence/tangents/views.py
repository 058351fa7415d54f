"""Views of a network's outputs: inputs that carry along which outputs, or which mixtures of them, are looked at.

A view goes wherever inputs go. The network answers it with c numbers an example instead of all its K outputs, so that
tangents, curvatures and sandwiches cost c backward passes and never learn how many outputs there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True)
class Picked:
    """Some outputs of each example.

    Attributes:
        inputs: what the model is called with.
        index: (n, c) positions among the K outputs.

    Examples:
        >>> Picked(None, torch.tensor([[2], [0]])).see(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        tensor([[3.],
                [4.]])
    """

    inputs: Any
    index: Tensor

    @property
    def count(self) -> int:
        """How many numbers an example are seen."""
        return self.index.shape[-1]

    def see(self, outputs: Tensor) -> Tensor:
        """(n, c) of outputs (n, K)."""
        return outputs.gather(1, self.index)


@dataclass(frozen=True)
class Mixed:
    """Mixtures of neighbouring outputs of each example.

    Attributes:
        inputs: what the model is called with.
        basis: (n, j, c) weights of j outputs in c mixtures.
        start: the first of the j outputs.

    Examples:
        >>> Mixed(None, torch.ones(1, 2, 1), start=1).see(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[5.]])
    """

    inputs: Any
    basis: Tensor
    start: int = 0

    @property
    def count(self) -> int:
        """How many numbers an example are seen."""
        return self.basis.shape[-1]

    def see(self, outputs: Tensor) -> Tensor:
        """(n, c) of outputs (n, K)."""
        some = outputs[:, self.start : self.start + self.basis.shape[-2]]
        return torch.einsum("nj,njc->nc", some, self.basis.to(some.dtype))


View: TypeAlias = Picked | Mixed

# Views are walked through as dicts and tuples are: moved to a device, cut into chunks, mapped over by torch.vmap.


def _mixed(parts: Iterable[Any], start: Any) -> Mixed:
    inputs, basis = parts
    return Mixed(inputs, basis, start)


_pytree.register_pytree_node(Picked, lambda v: ([v.inputs, v.index], None), lambda parts, _: Picked(*parts))
_pytree.register_pytree_node(Mixed, lambda v: ([v.inputs, v.basis], v.start), _mixed)
