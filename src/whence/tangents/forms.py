"""The forms a per-example gradient takes: blocks of parameters and their tangents.

A block is a set of parameters treated together. Its tangent holds the gradients of one batch, for every example n and
cotangent c, in the cheapest exact form the layer allows:

* `Kronecker`: sums of outer products of layer inputs and output gradients (linear maps, convolutions);
* `Rows`: few non-zero rows of a large matrix (embeddings);
* `Dense`: the gradient itself (norms, biases alone, bare parameters, everything else).

Axis letters: n examples, c cotangents, e groups, t shared positions, o layer outputs, i layer inputs, p parameters.
Every form offers `materialize()`, the gradients in the block's matrix shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from whence.tangents.factors import Factor, Joined, Whole

__all__ = ["Block", "Dense", "Factor", "Joined", "Kind", "Kronecker", "RowSums", "Rows", "Tangent", "Whole"]

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
