"""The two sides of a Kronecker tangent, held or still to be computed.

Axis letters: e groups, t shared positions, i the side's own axis (layer inputs or outputs), r columns of a basis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

MANY_ROWS = 500
"""From so many on, filling columns up to eights costs less than it saves."""


class Factor(Protocol):
    """One side of a `Kronecker` tangent, perhaps not yet computed: a tensor (..., e, t, i)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `tensor()`, known without computing it."""
        ...

    def tensor(self) -> Tensor:
        """The factor as a tensor (..., e, t, i)."""
        ...

    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` for a basis (e, i, r), by the cheapest way and in its precision: (..., e, t, r)."""
        ...


@dataclass(frozen=True)
class Whole:
    """A factor held as a tensor (..., e, t, i), with a column of ones to be appended if `ones`."""

    values: Tensor
    ones: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i)."""
        return (*self.values.shape[:-1], self.values.shape[-1] + self.ones)

    def tensor(self) -> Tensor:
        """The values, and the column of ones."""
        if not self.ones:
            return self.values
        return torch.cat([self.values, self.values.new_ones(()).expand(*self.values.shape[:-1], 1)], -1)

    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` without building the column of ones."""
        linear, constant = (basis[:, :-1], basis[:, -1:]) if self.ones else (basis, None)
        # With one group, a batched product would copy the basis for every example.
        one, values = basis.shape[0] == 1, self.values.to(basis.dtype)
        if cotangents_first(values):
            return Whole(values.transpose(0, 1), self.ones).project(basis).transpose(0, 1)
        if one and lies_transposed(values):
            projected = (linear[0].T @ values.squeeze(-3).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-3)
        elif one and values[0].numel() == values.shape[-1]:  # rows, whatever the strides of axes of length 1 say
            return _times(values.reshape(len(values), -1), linear[0], constant).reshape(*values.shape[:-1], -1)
        else:
            projected = (values.squeeze(-3) @ linear[0]).unsqueeze(-3) if one else values @ linear
        return projected if constant is None else projected + constant


def _times(rows: Tensor, linear: Tensor, constant: Tensor | None) -> Tensor:
    """Rows (n, i) times (i, r), plus (1, 1, r). A CPU's products like columns in eights, and are a third faster."""
    size = linear.shape[1]
    missing = 0 if rows.is_cuda or len(rows) < MANY_ROWS else -size % 8
    if missing:
        linear = torch.nn.functional.pad(linear, (0, missing))
        constant = None if constant is None else torch.nn.functional.pad(constant, (0, missing))
    found = rows @ linear if constant is None else torch.addmm(constant[0], rows, linear)
    return found[:, :size]


@dataclass(frozen=True)
class Joined:
    """Factors of several calls of the same weight, one after the other along t."""

    parts: tuple[Factor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i), t summed over the parts."""
        first = self.parts[0].shape
        return (*first[:-2], sum(part.shape[-2] for part in self.parts), first[-1])

    def tensor(self) -> Tensor:
        """All parts."""
        return torch.cat([part.tensor() for part in self.parts], -2)

    def project(self, basis: Tensor) -> Tensor:
        """All parts, each projected by its own way."""
        return torch.cat([part.project(basis) for part in self.parts], -2)


@dataclass(frozen=True)
class Stacked:
    """Gradients of several cotangents, (n, c, e, t, o) with a few of them each, put together only when needed."""

    parts: tuple[Factor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, c, e, t, o), c summed over the parts."""
        n, _, *rest = self.parts[0].shape
        return (n, sum(part.shape[1] for part in self.parts), *rest)

    def tensor(self) -> Tensor:
        """All parts."""
        return join([part.tensor() for part in self.parts])

    def project(self, basis: Tensor) -> Tensor:
        """All parts, each projected before they are put together."""
        return join([part.project(basis) for part in self.parts])


@dataclass(frozen=True)
class Padded:
    """A factor with zeros before and after its last axis: the gradients of some rows of a weight."""

    part: Factor
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, size)."""
        return (*self.part.shape[:-1], self.size)

    def tensor(self) -> Tensor:
        """The part between zeros."""
        values = self.part.tensor()
        return torch.nn.functional.pad(values, (self.start, self.size - self.start - values.shape[-1]))

    def project(self, basis: Tensor) -> Tensor:
        """Only the rows of the basis that meet the part."""
        return self.part.project(basis[:, self.start : self.start + self.part.shape[-1]])


def lies_transposed(values: Tensor) -> bool:
    """Whether the last two axes lie in memory in the other order, as positions and channels of an image do."""
    return values.shape[-1] > 1 and values.shape[-2] > 1 and values.stride(-1) > values.stride(-2)


def cotangents_first(values: Tensor) -> bool:
    """Whether gradients (n, c, e, t, o) lie in memory with the cotangents before the examples, as vmap leaves them."""
    return values.dim() == 5 and min(values.shape[:2]) > 1 and values.stride(1) > values.stride(0)


def join(parts: list[Tensor]) -> Tensor:
    """Put (n, c, e, t, o) together along c, in the order of memory they have: turning them round costs a slow copy."""
    if not lies_transposed(parts[0]):
        return torch.cat(parts, 1)
    return torch.cat([part.transpose(-1, -2) for part in parts], 1).transpose(-1, -2)


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


Kind = Literal["kronecker", "rows", "dense"]


@dataclass(frozen=True)
class Block:
    """Parameters whose gradients are kept together, and the matrix they form.

    A kronecker block is a weight, and its bias when both are selected. The weight is read as `(e, o, i)`: its first
    axis is split into `groups`, the axes after it are flattened; `transposed` says that they come as `(e, i, o)`
    (transposed convolutions, weights stored input first). The bias is the last column, so `i` is fan-in + 1.

    Args:
        name: A name for reports: that of the first parameter.
        parameters: Names of the parameters, weight first.
        shapes: Shapes of the parameters, in the same order.
        kind: "kronecker", "rows" (one matrix V x d) or "dense" (all parameters flattened, one after the other).
        groups: e, for kronecker blocks.
        transposed: Whether the weight is stored input first, for kronecker blocks.

    Example:
        >>> block = Block("fc", ("fc.weight", "fc.bias"), ((2, 3), (2,)), "kronecker")
        >>> block.matrix_shape, block.numel, block.has_bias
        ((1, 2, 4), 8, True)
        >>> block.to_matrix({"fc.weight": torch.zeros(2, 3), "fc.bias": torch.ones(2)})
        tensor([[[0., 0., 0., 1.],
                 [0., 0., 0., 1.]]])
    """

    name: str
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kind: Kind
    groups: int = 1
    transposed: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of scalar parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def has_bias(self) -> bool:
        """Whether the last column of a kronecker block's matrix is the bias."""
        return self.kind == "kronecker" and len(self.parameters) == 2

    @cached_property
    def matrix_shape(self) -> tuple[int, ...]:
        """(e, o, i) for kronecker, (V, d) for rows, (p,) for dense."""
        if self.kind == "dense":
            return (self.numel,)
        weight = self.shapes[0]
        if self.kind == "rows":
            return (weight[0], math.prod(weight[1:]))
        first, rest = weight[0] // self.groups, math.prod(weight[1:])
        o, i = (rest, first) if self.transposed else (first, rest)
        return (self.groups, o, i + self.has_bias)

    def to_matrix(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Lay tensors shaped as the parameters, `(..., *shape)`, out as `(..., *matrix_shape)`."""
        tensors = [parameters[name] for name in self.parameters]
        lead = tensors[0].shape[: tensors[0].dim() - len(self.shapes[0])]
        if self.kind == "dense":
            flat = [tensor.reshape(*lead, math.prod(shape)) for tensor, shape in zip(tensors, self.shapes, strict=True)]
            return flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        if self.kind == "rows":
            return tensors[0].reshape(*lead, *self.matrix_shape)
        e, o, i = self.matrix_shape
        i -= self.has_bias
        if self.transposed:
            weight = tensors[0].reshape(*lead, e, i, o).transpose(-1, -2)
        else:
            weight = tensors[0].reshape(*lead, e, o, i)
        return torch.cat([weight, tensors[1].reshape(*lead, e, o, 1)], -1) if self.has_bias else weight

    def from_matrix(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `to_matrix`."""
        lead = matrix.shape[: matrix.dim() - len(self.matrix_shape)]
        if self.kind == "dense":
            parts: Sequence[Tensor] = matrix.split([math.prod(shape) for shape in self.shapes], -1)
        elif self.kind == "rows":
            parts = [matrix]
        else:
            weight = matrix[..., :-1] if self.has_bias else matrix
            parts = [weight.transpose(-1, -2) if self.transposed else weight]
            if self.has_bias:
                parts = [*parts, matrix[..., -1]]
        return {
            name: part.reshape((*lead, *shape))
            for name, shape, part in zip(self.parameters, self.shapes, parts, strict=True)
        }


@dataclass(frozen=True)
class Kronecker:
    """Gradients that are sums of outer products: sum over t of g_t a_t^T for every example, cotangent and group.

    Both factors may be unfolded only when asked for (convolutions); nothing is cached, so keep what is used twice.

    Example:
        >>> block = Block("fc", ("fc.weight",), ((2, 3),), "kronecker")
        >>> tangent = Kronecker(block, Whole(torch.ones(5, 1, 4, 3)), Whole(torch.ones(5, 7, 1, 4, 2)))
        >>> tangent.examples, tangent.cotangents, tangent.positions, tuple(tangent.materialize().shape)
        (5, 7, 4, (5, 7, 1, 2, 3))
    """

    block: Block
    a: Factor  # (n, e, t, i)
    g: Factor  # (n, c, e, t, o)

    @property
    def examples(self) -> int:
        """Number of examples, n."""
        return self.g.shape[0]

    @property
    def cotangents(self) -> int:
        """Number of cotangents, c."""
        return self.g.shape[1]

    @property
    def positions(self) -> int:
        """Number of shared positions, t."""
        return self.g.shape[3]

    def inputs(self) -> Tensor:
        """a: (n, e, t, i), with the column of ones when the block has a bias."""
        return self.a.tensor()

    def grads(self) -> Tensor:
        """g: (n, c, e, t, o)."""
        return self.g.tensor()

    def materialize(self) -> Tensor:
        """The gradient matrices: (n, c, e, o, i)."""
        a, g = self.inputs(), self.grads()
        dtype = torch.promote_types(a.dtype, g.dtype)
        return torch.einsum("nceto,neti->nceoi", g.to(dtype), a.to(dtype))


class RowSums(NamedTuple):
    """Non-zero rows of per-example gradients, each (example, row) pair once."""

    rows: Tensor  # (u,)
    examples: Tensor  # (u,)
    values: Tensor  # (u, c, d)


@dataclass(frozen=True)
class Rows:
    """Gradients of an embedding: position t of example n adds grads[n, :, t] to row index[n, t].

    Example:
        >>> block = Block("emb", ("emb.weight",), ((4, 1),), "rows")
        >>> tangent = Rows(block, torch.tensor([[2, 2, 0]]), torch.ones(1, 1, 3, 1))
        >>> tangent.aggregate().rows.tolist(), tangent.aggregate().values.flatten().tolist()
        ([0, 2], [1.0, 2.0])
    """

    block: Block
    index: Tensor  # (n, t)
    grads: Tensor  # (n, c, t, d)
    weights: Tensor | None = None  # (n, t): factor of each position, 0 where there is none (padding)

    def aggregate(self) -> RowSums:
        """Sum the positions of one example that fall on one row: what must happen before anything is squared."""
        n = self.index.shape[0]
        values = self.grads.transpose(1, 2).flatten(0, 1)  # (n t, c, d)
        key = torch.arange(n, device=self.index.device)[:, None] * self.block.matrix_shape[0] + self.index
        key = key.flatten()
        if self.weights is not None:
            kept = self.weights.flatten().nonzero().squeeze(1)
            weights = self.weights.flatten()[kept].to(values.dtype)
            key, values = key[kept], values[kept] * weights[:, None, None]
        pairs, inverse = torch.unique(key, return_inverse=True)
        sums = values.new_zeros(len(pairs), *values.shape[1:]).index_add_(0, inverse, values)
        size = self.block.matrix_shape[0]
        return RowSums(pairs % size, pairs.div(size, rounding_mode="floor"), sums)

    def materialize(self) -> Tensor:
        """The gradient matrices: (n, c, V, d)."""
        rows, examples, values = self.aggregate()
        out = values.new_zeros(self.index.shape[0], self.grads.shape[1], *self.block.matrix_shape)
        out[examples, :, rows] = values
        return out


@dataclass(frozen=True)
class Dense:
    """Gradients as they are, in parts side by side: a norm's scale and shift need not be copied next to each other."""

    block: Block
    parts: tuple[Tensor, ...]  # (n, c, p), with the sizes p of the block's parameters, or one for all

    @cached_property
    def values(self) -> Tensor:
        """The gradients: (n, c, p)."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, -1)

    def materialize(self) -> Tensor:
        """The gradients: (n, c, p)."""
        return self.values


Tangent: TypeAlias = Kronecker | Rows | Dense
