"""Linear functionals of the outputs: c numbers for each example instead of all its K outputs.

Jacobians, curvatures and sandwiches then take c backward passes, for any K.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree


class OutputFunctional:
    """Inputs, and functionals of the outputs of each of them. It is passed in place of the inputs.

    It is a pytree: like dicts and tuples it can be moved to a device, split into chunks and used with torch.vmap.
    """

    inputs: Any  # inputs of the model

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _pytree.register_pytree_node(cls, lambda one: (one._parts(), None), lambda parts, _: cls(*parts))

    def _parts(self) -> list[Any]:
        return [getattr(self, one.name) for one in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses

    @property
    def count(self) -> int:
        """The number c: size of the last axis of the first field after `inputs`."""
        return int(self._parts()[1].shape[-1])

    @abstractmethod
    def apply(self, outputs: Tensor) -> Tensor:
        """(n, c) from outputs (n, K)."""


@dataclass(frozen=True)
class SelectedOutputs(OutputFunctional):
    """Some outputs of each example.

    Examples:
        >>> SelectedOutputs(None, torch.tensor([[2], [0]])).apply(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        tensor([[3.],
                [4.]])
    """

    inputs: Any
    index: Tensor  # (n, c) positions among the K outputs

    def apply(self, outputs: Tensor) -> Tensor:
        """Select them."""
        return outputs.gather(1, self.index)


@dataclass(frozen=True)
class OutputMixtures(OutputFunctional):
    """Mixtures of the outputs of each example.

    Examples:
        >>> OutputMixtures(None, torch.ones(1, 3, 1)).apply(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[6.]])
    """

    inputs: Any
    weights: Tensor  # (n, K, c)

    def apply(self, outputs: Tensor) -> Tensor:
        """Mix them."""
        return torch.einsum("nk,nkc->nc", outputs, self.weights.to(outputs.dtype))


# --- Columns of the Hessian of cross-entropy, without an array for every position, class and column -------------------
#
# For the most probable class, 1 - p_top is computed as the sum of the other probabilities, and outputs are taken
# relative to the top output: both keep their digits however certain the class is.

CHUNK = {"cpu": 2**20, "cuda": 2**26}  # outputs widened at once


def chunk_of_positions(outputs: Tensor) -> int:
    """Number of rows of outputs (m, k) that are widened at once."""
    return max(1, CHUNK.get(outputs.device.type, CHUNK["cpu"]) // outputs.shape[1])


class Softmax(NamedTuple):
    """Probabilities of rows of outputs (m, k), in at least single precision."""

    outputs: Tensor  # (m, k)
    highest: Tensor  # (m, 1) output of the top class, in the precision of the probabilities
    top: Tensor  # (m, 1) the most probable class
    others: Tensor  # (m, k) probabilities, zero for the top class
    rest: Tensor  # (m, 1) 1 - p_top
    largest: Tensor  # (m, 1) p_top

    @classmethod
    def of(cls, outputs: Tensor) -> Softmax:
        """Softmax of outputs (m, k); half precision is widened.

        Examples:
            >>> Softmax.of(torch.tensor([[0.0, 30.0]])).rest
            tensor([[9.3576e-14]])
        """
        highest, top = outputs.max(1, keepdim=True)
        wide = torch.promote_types(outputs.dtype, torch.float32)
        others = torch.softmax(outputs, 1, dtype=wide)
        largest = others.gather(1, top)
        others[torch.arange(len(others), device=top.device), top[:, 0]] = 0.0  # under vmap, scatter_ would be slow
        return cls(outputs, highest.to(wide), top, others, others.sum(1, keepdim=True), largest)

    def all(self) -> Tensor:
        """(m, k) probabilities of all classes; overwrites `others`."""
        return self.others.scatter_(1, self.top, self.largest)

    def less_mean(self, classes: Tensor) -> Tensor:
        """(m, c) f_y - p . f for these classes y."""
        below = self.outputs - self.highest
        found: Tensor = below.gather(1, classes) - torch.linalg.vecdot(self.others, below).unsqueeze(1)
        return found

    def pick(self, classes: Tensor) -> Tensor:
        """Everything needed for the columns of these classes (m, c): (5, m, c), in double precision.

        In order: the probability p_y; the entry of e_y - p at the top class; what p_y adds elsewhere; y's output minus
        p . f; and the sum of squares of the other probabilities.
        """
        own = classes == self.top
        probability = torch.where(own, self.largest, self.others.gather(1, classes))
        at_top = torch.where(own, self.rest, -self.largest)
        elsewhere = torch.where(own, 0.0, probability)
        values = self.less_mean(classes)
        squares = torch.linalg.vector_norm(self.others, dim=1, keepdim=True).square().expand_as(values)
        return torch.stack([probability, at_top, elsewhere, values, squares]).double()


@dataclass(frozen=True)
class SoftmaxColumns(OutputFunctional):
    """Sums over positions t of h_tj (f_ty - p_t . f_t), y = y_tj, for the softmax p of the outputs f.

    Their gradients in the outputs are h (e_y - p): columns of a root of the Hessian of cross-entropy, or its residual.
    Probabilities are treated as constants.

    Examples:
        >>> columns = SoftmaxColumns(None, torch.tensor([[[1]]]), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
        >>> columns.apply(torch.tensor([[0.0, 2.0]]))  # 2 - 2 / (1 + e^-2)
        tensor([[0.2384]])
    """

    inputs: Any
    classes: Tensor  # (n, t, c) y
    weights: Tensor  # (n, t, c)
    floors: Tensor  # (n, t, c); h is the weight times the root of max(p_y, floor)

    def apply(self, outputs: Tensor) -> Tensor:
        """Sum over positions."""
        n, t, _ = self.classes.shape
        given = (one.flatten(0, 1) for one in (self.classes.long(), self.weights, self.floors))
        columns: Any = Columns.apply
        found: Tensor = columns(outputs.reshape(n * t, -1), *given)[0].unflatten(0, (n, t)).sum(1)
        return found

    def products(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(n, c) as from `apply`, and (n, c, c) inner products of the gradients, for outputs (n, ..., k)."""
        flat, classes = outputs.reshape(-1, outputs.shape[-1]), self.classes.long().flatten(0, 1)
        step = chunk_of_positions(flat)
        parts = zip(flat.split(step), classes.split(step), strict=True)
        picked = torch.cat([Softmax.of(some).pick(each) for some, each in parts], dim=1)
        shape = self.classes.shape[:2]
        probability, at_top, elsewhere, values, squares = picked.unflatten(1, shape).unbind(0)
        h = self.weights.double() * torch.maximum(probability, self.floors.double()).sqrt()
        same = (self.classes.unsqueeze(3) == self.classes.unsqueeze(2)) & (at_top < 0).unsqueeze(3)
        crossed = (h * elsewhere).mT @ h
        gram = (h * at_top).mT @ (h * at_top) - crossed - crossed.mT + (h * squares).mT @ h
        return (h * values).sum(1), gram + torch.einsum("ntc,ntcd,ntd->ncd", h, same.double(), h)


class Columns(torch.autograd.Function):
    """h (f_y - p . f) of every position and column; the derivative in f is h (e_y - p): one product per backward pass.

    Probabilities are kept in the precision of the outputs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        outputs: Tensor, classes: Tensor, weights: Tensor, floors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Values (m, c) of outputs (m, k), and tensors for the derivative."""
        others = torch.empty_like(outputs)
        step, parts = chunk_of_positions(outputs), []
        given = (outputs, classes, weights, floors, others)
        for some, y, weight, floor, kept in zip(*(one.split(step) for one in given), strict=True):
            p = Softmax.of(some)
            probability = torch.where(y == p.top, p.largest, p.others.gather(1, y))
            h = weight.to(probability.dtype) * torch.maximum(probability, floor.to(probability.dtype)).sqrt()
            parts.append((h * p.less_mean(y), h, p.rest, p.top))
            kept.copy_(p.others)
        values, h, rest, top = (torch.cat(each) for each in zip(*parts, strict=True))
        return values, others, h, rest, top

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the probabilities."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[1], *output[1:])
        ctx.save_for_forward(inputs[1], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The sum over columns of u h (e_y - p)."""
        classes, others, h, rest, top = ctx.saved_tensors
        weighted, own = h * grads[0], classes == top
        at_top = (weighted * torch.where(own, rest, rest - 1.0)).sum(1, keepdim=True)
        added = torch.cat([torch.where(own, 0.0, weighted), at_top], dim=1)
        found = others * -weighted.sum(1, keepdim=True).to(others.dtype)
        return found.scatter_add_(1, torch.cat([classes, top], dim=1), added.to(found.dtype)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        """The product h (t_y - p . t)."""
        classes, others, h, rest, top = ctx.saved_tensors
        along = tangents[0]
        highest = along.gather(1, top)
        mean = (others * along).sum(1, keepdim=True) - rest * highest
        found = h * (torch.where(classes == top, 0.0, along.gather(1, classes) - highest) - mean)
        return found, None, None, None, None
