"""Where the examples of a batch lie in a tensor inside the network.

A layer rarely sees examples on any axis but the first, yet sequences may come first, and tokens, windows or frames may
be folded into the batch. A `Layout` says where the examples are, without saying how many there are, so what was found
on one batch holds for a batch of another size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Examples along one axis: alone ("whole"), or folded with positions as the "outer" or the "inner" index.

    Example:
        >>> folded = torch.arange(6)  # 2 examples with 3 positions each
        >>> Layout(0, "outer").canonical(folded, 2).tolist()
        [[0, 1, 2], [3, 4, 5]]
        >>> Layout(0, "inner").canonical(folded, 2).tolist()
        [[0, 2, 4], [1, 3, 5]]
    """

    axis: int = 0
    place: Literal["whole", "outer", "inner"] = "whole"

    def fits(self, shape: Sequence[int], n: int) -> bool:
        """Whether a tensor of this shape can hold n examples in this way."""
        if self.axis >= len(shape):
            return False
        size = shape[self.axis]
        return size == n if self.place == "whole" else size % n == 0

    def canonical(self, tensor: Tensor, n: int, lead: int = 0) -> Tensor:
        """Move the examples to the front: (..., n or n*m, ...) to (n, ..., ...) or (n, ..., m, ...).

        Args:
            tensor: The tensor, with `lead` axes more in front than the layout knows of.
            n: Number of examples.
            lead: Number of axes in front; they follow the examples in the result.
        """
        axis = self.axis + lead
        if self.place == "whole":
            return tensor if axis == 0 else tensor.movedim(axis, 0)
        shape, m = tensor.shape, tensor.shape[axis] // n
        sizes, at = ((n, m), axis) if self.place == "outer" else ((m, n), axis + 1)
        return tensor.reshape(*shape[:axis], *sizes, *shape[axis + 1 :]).movedim(at, 0)


def candidates(axes: Iterable[int], shape: Sequence[int], n: int) -> Iterator[Layout]:
    """Every layout that n examples could have on these axes, the likeliest first."""
    axes = tuple(axes)
    yield from (Layout(axis) for axis in axes if shape[axis] == n)
    for axis in axes:
        if shape[axis] > n and shape[axis] % n == 0:
            yield Layout(axis, "outer")
            yield Layout(axis, "inner")


def halves(n: int) -> Tensor:
    """Sets of examples (s, n) of bool such that, for any two examples, one set has the first and not the second.

    Example:
        >>> halves(3).int().tolist()
        [[0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0]]
    """
    digits = [(torch.arange(n, device="cpu") >> bit) % 2 == 1 for bit in range(max(n - 1, 1).bit_length())]
    return torch.stack([side for digit in digits for side in (digit, ~digit)])


def separates(layout: Layout, gradient: Tensor, chosen: Tensor) -> bool:
    """Whether a gradient pulled back from the chosen examples alone, (n,) of bool, vanishes on all others."""
    return not bool(layout.canonical(gradient, len(chosen))[~chosen].any())
