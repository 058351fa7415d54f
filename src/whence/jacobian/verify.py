"""Checks of a capture on one batch: nothing missed, nothing counted twice, no examples mixed.

Two facts are checked. First, if the cotangent of an example is scaled, its gradients scale by the same factor, in the
layout found for each use. Second, for a random cotangent, the captured gradients of all examples add up to autograd's.
`whence.jacobian.capture` says which checks run on which batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.jacobian.gradients import Kronecker, Layout, Tangent, normal_numbers
from whence.jacobian.record import output_gradients
from whence.jacobian.rules.base import Record

# --- Autograd's gradients, to compare with ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AutogradReference:
    """Autograd's gradients of the model for one random cotangent."""

    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the lowest precision inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None if the outputs do not depend on the parameter

    @classmethod
    def of(cls, outputs: Tensor, parameters: Mapping[str, Tensor], precision: torch.dtype) -> AutogradReference:
        """From outputs with a graph, which is kept."""
        cotangent = normal_numbers(outputs.shape, len(outputs), outputs)
        leaves = list(parameters.values())
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if outputs.requires_grad:
            found = torch.autograd.grad(outputs, leaves, cotangent, retain_graph=True, allow_unused=True)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        return cls(outputs.detach(), precision, cotangent, dict(zip(parameters, dense, strict=True)))

    @property
    def tolerance(self) -> float:
        """Expected relative error between two ways of computing the same numbers."""
        return tolerance(self.precision, self.outputs.device)

    def mismatches(self, tangents: Sequence[Tangent]) -> dict[str, str]:
        """Parameters whose captured gradients, summed over examples, differ from autograd's; and by how much."""
        scale = math.hypot(*(float(g.double().norm()) for g in self.gradients.values() if g is not None))
        floor = scale * max(min(100 * torch.finfo(self.precision).eps, 1e-2), self.tolerance**2)  # if terms cancel
        wrong: dict[str, str] = {}
        for tangent in tangents:
            total, norm_of_terms = _sum_over_examples(tangent)
            for name, got in tangent.block.from_matrix(total).items():
                truth = self.gradients[name]
                expected = torch.zeros_like(got) if truth is None else truth.double()
                gap, norm = float((got - expected).norm()), float(expected.norm())
                if not gap <= self.tolerance * (norm + norm_of_terms) + floor:
                    wrong[name] = f"norm {norm:.6g}, got norm {float(got.norm()):.6g}, difference {gap:.3g}"
        return wrong


def _sum_over_examples(tangent: Tangent) -> tuple[Tensor, float]:
    """The sum for one cotangent, as the block's matrix, and the norm of its terms, which may cancel."""
    if not isinstance(tangent, Kronecker):
        each = tangent.materialize().double()[:, 0]
        return each.sum(0), float(each.norm())
    a, g = tangent.inputs().double(), tangent.grads().double()
    norm = (a.square().sum(-1).unsqueeze(1) * g.square().sum(-1)).sum().sqrt()
    return torch.einsum("nceto,neti->eoi", g, a), float(norm)


def tolerance(precision: torch.dtype, device: torch.device) -> float:
    """Expected relative error between two ways of computing outputs or gradients."""
    fast = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and fast and precision == torch.float32:
        return 1e-2
    return {torch.float64: 1e-8, torch.float16: 3e-2, torch.bfloat16: 1e-1}.get(precision, 1e-3)


def close(one: Tensor, other: Tensor, relative: float) -> bool:
    """Whether two tensors differ by at most a share of the norm of the second."""
    if one.shape != other.shape:
        return False
    gap, size = (one.double() - other.double()).norm(), other.double().norm()
    return bool(gap <= relative * size + torch.finfo(torch.float32).tiny)


# --- Where the examples are -------------------------------------------------------------------------------------------


def find_layouts(outputs: Tensor, records: Sequence[Record]) -> list[Record]:
    """Give uses a layout in which every example's gradients scale with its cotangent, or `None` if there is none.

    Uses without a gradient stay as they are; the others are returned. Factors are powers of two, such that any two
    examples have different ones in at least one of a few backward passes.
    """
    n, cotangent = len(outputs), normal_numbers(outputs.shape, len(outputs), outputs)
    plain = zip(records, output_gradients(outputs, records, cotangent), strict=True)
    found = [
        (record, grads, record.possible_layouts(n)) for record, grads in plain if grads is not None and grads.any()
    ]
    used = [record for record, *_ in found]
    for factors in _factors(outputs) if found else ():
        scaled = output_gradients(outputs, used, factors.unsqueeze(1) * cotangent)
        for (_, before, layouts), after in zip(found, scaled, strict=True):
            layouts[:] = [one for one in layouts if after is not None and _scales(before, after, one, factors)]
    for record, _, layouts in found:
        record.layout = next(iter(layouts), None)
    return used


def _factors(outputs: Tensor) -> Iterator[Tensor]:
    """Powers of two (n,) for each digit of the numbers of the examples."""
    base = 7 if outputs.dtype == torch.float16 else 15  # number of powers of two within the range of the precision
    number, place = torch.arange(len(outputs), device=outputs.device), 1
    while place == 1 or place < len(outputs):
        yield torch.pow(2.0, (number // place % base - base // 2).double()).to(outputs.dtype)
        place *= base


def _scales(before: Tensor, after: Tensor, layout: Layout, factors: Tensor) -> bool:
    """Whether the gradients of every example were multiplied by its factor."""
    n = len(factors)
    wanted = layout.canonical(before, n).reshape(n, -1).double() * factors.double().unsqueeze(1)
    gap = (layout.canonical(after, n).reshape(n, -1).double() - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    floor = min(100 * torch.finfo(before.dtype).eps, 1e-2) * float(size.max())
    return bool((gap <= tolerance(before.dtype, before.device) * size + floor).all())
