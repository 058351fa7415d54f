"""Per-example gradients of a block of parameters, in one of three forms: Kronecker, Rows and Dense.

Axis letters: n examples, c cotangents, e groups, t shared positions, i layer inputs, o layer outputs, r columns of a
basis.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["kronecker", "rows", "dense"]


@dataclass(frozen=True)
class Block:
    """Parameters whose gradients are kept together, and the matrix they form.

    A kronecker block is a weight, and its bias if both are selected. The weight is read as `(e, o, i)`: its first axis
    is split into `groups`, and the axes after it are flattened. With `transposed` it is stored as `(e, i, o)`
    (transposed convolutions, weights stored input first). The bias is the last column, so `i` is fan-in + 1.

    Example:
        >>> block = Block("fc", ("fc.weight", "fc.bias"), ((2, 3), (2,)), "kronecker")
        >>> block.matrix_shape, block.numel, block.has_bias
        ((1, 2, 4), 8, True)
        >>> block.to_matrix({"fc.weight": torch.zeros(2, 3), "fc.bias": torch.ones(2)})
        tensor([[[0., 0., 0., 1.],
                 [0., 0., 0., 1.]]])
    """

    name: str  # name of the first parameter, for reports
    parameters: tuple[str, ...]  # names of the parameters, weight first
    shapes: tuple[tuple[int, ...], ...]  # shapes of the parameters, in the same order
    kind: Kind  # "kronecker", "rows" (one matrix V x d) or "dense" (all parameters flattened, one after the other)
    groups: int = 1  # e, for kronecker blocks
    transposed: bool = False  # whether the weight is stored input first, for kronecker blocks

    @functools.cached_property
    def numel(self) -> int:
        """Number of scalar parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def restricted_to(self, name: str) -> Block:
        """The block of one of the parameters without the others: a bias alone has no particular form."""
        at = self.parameters.index(name)
        if at:
            return Block(name, (name,), (self.shapes[at],), "dense")
        return replace(self, parameters=(name,), shapes=self.shapes[:1])

    @property
    def has_bias(self) -> bool:
        """Whether the last column of a kronecker block's matrix is the bias."""
        return self.kind == "kronecker" and len(self.parameters) == 2

    @functools.cached_property
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
        """Arrange tensors of the parameters' shapes, `(..., *shape)`, as `(..., *matrix_shape)`."""
        tensors = [parameters[name] for name in self.parameters]
        lead = tensors[0].shape[: tensors[0].dim() - len(self.shapes[0])]
        if self.kind == "dense":
            flat = [tensor.reshape(*lead, math.prod(shape)) for tensor, shape in zip(tensors, self.shapes, strict=True)]
            return flat[0] if len(flat) == 1 else torch.cat(flat, -1)
        if self.kind == "rows":
            return tensors[0].reshape(*lead, *self.matrix_shape)
        e, o, i = self.matrix_shape
        i -= self.has_bias
        weight = tensors[0].reshape(*lead, e, *((i, o) if self.transposed else (o, i)))
        weight = weight.transpose(-1, -2) if self.transposed else weight
        return torch.cat([weight, tensors[1].reshape(*lead, e, o, 1)], -1) if self.has_bias else weight

    def from_matrix(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `to_matrix`."""
        lead = matrix.shape[: matrix.dim() - len(self.matrix_shape)]
        if self.kind == "dense":
            parts: Sequence[Tensor] = matrix.split([math.prod(shape) for shape in self.shapes], -1)
        else:
            weight = matrix[..., :-1] if self.has_bias else matrix
            weight = weight.transpose(-1, -2) if self.transposed else weight
            parts = [weight, matrix[..., -1]] if self.has_bias else [weight]
        each = zip(self.parameters, self.shapes, parts, strict=True)
        return {name: part.reshape((*lead, *shape)) for name, shape, part in each}


@dataclass(frozen=True)
class Kronecker:
    """Gradients that are sums of outer products: sum over t of g_t a_t^T for every example, cotangent and group.

    Convolutions are unfolded in `inputs()` and `grads()`; nothing is cached, so keep what you use twice.

    Example:
        >>> block = Block("fc", ("fc.weight",), ((2, 3),), "kronecker")
        >>> tangent = Kronecker(block, Whole(torch.ones(5, 1, 4, 3)), Whole(torch.ones(5, 7, 1, 4, 2)))
        >>> tangent.positions, tuple(tangent.materialize().shape)
        (4, (5, 7, 1, 2, 3))
    """

    block: Block
    a: Factor  # (n, e, t, i)
    g: Factor  # (n, c, e, t, o)

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
        return torch.einsum("nceto,neti->nceoi", *promoted(self.grads(), self.inputs()))


@dataclass(frozen=True)
class Rows:
    """Gradients of an embedding: position t of example n adds grads[n, :, t] to row index[n, t].

    Example:
        >>> block = Block("emb", ("emb.weight",), ((4, 1),), "rows")
        >>> tangent = Rows(block, torch.tensor([[2, 2, 0]]), torch.ones(1, 1, 3, 1))
        >>> rows, examples, values = tangent.aggregate()
        >>> rows.tolist(), examples.tolist(), values.flatten().tolist()
        ([0, 2], [0, 0], [1.0, 2.0])
    """

    block: Block
    index: Tensor  # (n, t)
    grads: Tensor  # (n, c, t, d)

    def aggregate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Nonzero rows (u,) of the gradients, their examples (u,) and values (u, c, d), each such pair once.

        They are sums over the positions of an example that look up the same row, to be made before squaring.
        """
        n, size = self.index.shape[0], self.block.matrix_shape[0]
        values = self.grads.transpose(1, 2).flatten(0, 1)  # (n t, c, d)
        key = (torch.arange(n, device=self.index.device)[:, None] * size + self.index).flatten()
        pairs, inverse = torch.unique(key, return_inverse=True)
        sums = values.new_zeros(len(pairs), *values.shape[1:]).index_add_(0, inverse, values)
        return pairs % size, pairs.div(size, rounding_mode="floor"), sums

    def materialize(self) -> Tensor:
        """The gradient matrices: (n, c, V, d)."""
        rows, examples, values = self.aggregate()
        out = values.new_zeros(self.index.shape[0], self.grads.shape[1], *self.block.matrix_shape)
        out[examples, :, rows] = values
        return out


@dataclass(frozen=True)
class Dense:
    """Gradients in no particular form."""

    block: Block
    values: Tensor  # (n, c, p)

    def materialize(self) -> Tensor:
        """The gradients: (n, c, p)."""
        return self.values


Tangent: TypeAlias = Kronecker | Rows | Dense


def concatenate(tangents: Sequence[Any]) -> Tangent:
    """Concatenate tangents of several batches; missing positions are filled with zeros."""
    block = tangents[0].block
    if block.kind == "dense":
        return Dense(block, torch.cat([one.values for one in tangents]))

    def joined(parts: Sequence[Tensor], axis: int) -> Tensor:
        most = max(part.shape[axis] for part in parts)
        return torch.cat([F.pad(part, (*(0, 0) * (-axis - 1), 0, most - part.shape[axis])) for part in parts])

    if block.kind == "rows":
        return Rows(block, joined([one.index for one in tangents], -1), joined([one.grads for one in tangents], -2))
    a, g = joined([one.inputs() for one in tangents], -2), joined([one.grads() for one in tangents], -2)
    return Kronecker(block, Whole(a), Whole(g))


# --- The factors of a Kronecker tangent -------------------------------------------------------------------------------


class Factor(ABC):
    """One side of a `Kronecker` tangent, perhaps not yet computed: a tensor (..., e, t, i)."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of `tensor()`, known without computing it."""

    @property
    def numel(self) -> int:
        """Number of values it stores, possibly before `tensor()` expands them."""
        return math.prod(self.shape)

    @abstractmethod
    def tensor(self) -> Tensor:
        """The factor as a tensor (..., e, t, i)."""

    @abstractmethod
    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` for a basis (e, i, r), by the cheapest way, in `matched` precision: (..., e, t, r)."""

    def total(self, g: Tensor) -> Tensor:
        """sum_n sum_t g_t a_t^T for inputs a (n, e, t, i) and gradients (n, e, t, o): (e, o, i)."""
        a = self.tensor().to(g.dtype)
        if is_transposed_in_memory(a) and g.shape[3] <= g.shape[2]:  # copying many positions would take longer
            return (g.mT @ a).sum(0)
        left, right = (one.transpose(0, 1).flatten(1, 2) for one in (g, a))  # (e, n t, ...)
        return transposed_product(left, right)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """`left.mT @ right` for rows (..., n, o) and (..., n, i); up to 7 times as fast with the shorter rows first."""
    return (right.mT @ left).mT if right.shape[-1] < left.shape[-1] else left.mT @ right


@dataclass(frozen=True)
class Whole(Factor):
    """A factor stored as a tensor (..., e, t, i), to which a column of ones is appended if `ones`."""

    values: Tensor
    ones: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i)."""
        return (*self.values.shape[:-1], self.values.shape[-1] + self.ones)

    def tensor(self) -> Tensor:
        """The values, with the column of ones."""
        if not self.ones:
            return self.values
        return torch.cat([self.values, self.values.new_ones(()).expand(*self.values.shape[:-1], 1)], -1)

    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` without building the column of ones."""
        values, basis = matched(self.values, basis)
        if cotangents_first(values):
            return Whole(values.transpose(0, 1), self.ones).project(basis).transpose(0, 1)
        linear, constant = (basis[:, :-1], basis[:, -1:]) if self.ones else (basis, None)
        if len(basis) == 1 and not is_transposed_in_memory(values):  # rows, in half the time of a batched product
            bias = None if constant is None else constant.flatten()
            rows: Tensor = F.linear(values.flatten(0, -2), linear[0].T, bias)
            return rows.reshape(*values.shape[:-1], basis.shape[-1])
        # with one group, a batched product would copy the basis for every example
        projected = values @ linear if len(basis) > 1 else (linear[0].T @ values.squeeze(-3).mT).mT.unsqueeze(-3)
        return projected if constant is None else projected + constant


def promoted(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to a common dtype: in mixed precision, inputs and gradients differ."""
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def matched(values: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to the precision of the basis, or on a GPU to float16 if values are: as many digits as TF32."""
    if values.is_cuda and values.dtype == torch.float16:
        return values, basis.to(values.dtype)
    return values.to(basis.dtype), basis


def normal_numbers(shape: Sequence[int], seed: int, like: Tensor) -> Tensor:
    """Normal random numbers, the same in every call and on every device, with the dtype and device of `like`."""
    cpu = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=cpu, dtype=torch.float64, device="cpu").to(like.detach())


HALVES = (torch.float16, torch.bfloat16)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product; half precision gives a result in single precision, in which a GPU's tensor units sum.

    Examples:
        >>> product(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if left.dtype not in HALVES:
        return left @ right
    if left.is_cuda and left.dim() == right.dim():
        shape = (*left.shape[:-1], right.shape[-1])
        rows, columns = (one.reshape(-1, *one.shape[-2:]) for one in (left, right))
        found = left.new_empty(len(rows), *shape[-2:], dtype=torch.float32)
        multiply_into(rows, columns, found)
        return found.reshape(shape)
    return left.float() @ right.float()


def multiply_into(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Write the products of two stacks of matrices into a third, which may have higher precision.

    Examples:
        >>> into = torch.empty(1, 2, 1)
        >>> multiply_into(torch.ones(1, 2, 3), torch.ones(1, 3, 1), into)
        >>> into.flatten().tolist()
        [3.0, 3.0]
    """
    if left.dtype == into.dtype:
        torch.bmm(left, right, out=into)
        return
    try:
        torch.bmm(left, right, out_dtype=into.dtype, out=into)
    except (TypeError, RuntimeError) as error:  # torch before 2.8
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        torch.bmm(left.to(into.dtype), right.to(into.dtype), out=into)


def fused_kernels(values: Tensor) -> Any:
    """The module of kernels that read half-precision gradients once, if they run here; else `None`."""
    return _kernels_on(values.device) if values.is_cuda and values.dtype in HALVES else None


@functools.cache
def _kernels_on(device: torch.device) -> Any:
    try:
        from whence.jacobian import fused  # Triton comes only with torch for GPUs
    except ImportError:
        return None
    return fused if fused.available(device) else None


def is_transposed_in_memory(values: Tensor) -> bool:
    """Whether the last two axes are stored in reverse order, as positions and channels of images are."""
    return values.shape[-1] > 1 and values.shape[-2] > 1 and values.stride(-1) > values.stride(-2)


def cotangents_first(values: Tensor) -> bool:
    """Whether gradients (n, c, e, t, o) are stored with the cotangents before the examples, as vmap returns them."""
    return values.dim() == 5 and min(values.shape[:2]) > 1 and values.stride(1) > values.stride(0)


# --- Where the examples are in a layer's output -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Which axis holds the examples: alone ("whole"), or folded with positions, as the "outer" or "inner" index.

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
        size = shape[self.axis] if self.axis < len(shape) else -1
        return size == n if self.place == "whole" else size >= 0 and size % n == 0

    def canonical(self, tensor: Tensor, n: int, lead: int = 0) -> Tensor:
        """(*lead, ..., n or n m, ...) to (n, *lead, ...) or (n, *lead, ..., m, ...); `lead` is a number of axes."""
        axis = self.axis + lead
        if self.place == "whole":
            return tensor if axis == 0 else tensor.movedim(axis, 0)
        shape, m = tensor.shape, tensor.shape[axis] // n
        sizes, at = ((n, m), axis) if self.place == "outer" else ((m, n), axis + 1)
        return tensor.reshape(*shape[:axis], *sizes, *shape[axis + 1 :]).movedim(at, 0)


def possible_layouts(axes: Iterable[int], shape: Sequence[int], n: int) -> Iterator[Layout]:
    """Every layout in which these axes could hold n examples, most likely first."""
    axes = tuple(axes)
    yield from (Layout(axis) for axis in axes if shape[axis] == n)
    for axis in axes:
        if shape[axis] > n and shape[axis] % n == 0:
            yield Layout(axis, "outer")
            yield Layout(axis, "inner")
