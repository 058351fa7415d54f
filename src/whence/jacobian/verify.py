"""Checks of a capture on one batch: nothing missed, nothing counted twice, no examples mixed.

Three facts are checked. First, gradients pulled back from only some of the examples are zero for all others, in the
layout found for each use; the sets of examples are such that a leak between any two would show. Second, for a random
cotangent, the captured gradients of all examples add up to autograd's gradient of the unmodified model. Third, the
outputs under capture are the model's own, whichever examples are in the batch. `whence.jacobian.capture` says which
checks run on which batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map

from whence.data.batches import Call, Inputs, batch_size, take
from whence.errors import ShapeError, UncapturedParameterError
from whence.jacobian.gradients import Kronecker, Layout, Tangent, normal_numbers
from whence.jacobian.record import differentiable, output_gradients
from whence.jacobian.rules import READERS
from whence.jacobian.rules.base import Arguments, Function, Intercept, Keywords, Record, flat_arguments
from whence.linalg import gradients_not_finite

# --- Autograd's gradients, to compare with ----------------------------------------------------------------------------

BATCH_SIZES = (7, 5, 3, 2)  # for verification: unlikely to equal a width, head count or sequence length


@dataclass(frozen=True)
class AutogradReference:
    """Autograd's gradients of the model for one random cotangent."""

    inputs: Inputs
    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the lowest precision inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None if the outputs do not depend on the parameter

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


def autograd_reference(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> AutogradReference:
    """Run the model on a few of the examples, without capture, and differentiate it."""
    n = batch_size(inputs, "the first batch")
    if n == 1:  # with a single example every axis of size one could be the batch axis
        inputs = tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, inputs)
    n = next(size for size in BATCH_SIZES if size <= max(n, 2))
    inputs = take(inputs, slice(0, n))
    with differentiable():
        outputs = call(inputs)
    if outputs.dim() != 2 or len(outputs) != n:
        raise ShapeError(f"expected outputs of shape ({n}, k) on the first batch, got {tuple(outputs.shape)}.")
    precision = _check_independent(call, inputs, outputs.detach())
    reference = reference_on_graph(outputs, inputs, parameters, precision)
    for name, gradient in reference.gradients.items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise gradients_not_finite(f"in {name} on the first batch")
    return reference


def reference_on_graph(
    outputs: Tensor, inputs: Inputs, parameters: Mapping[str, Tensor], precision: torch.dtype
) -> AutogradReference:
    """Autograd's gradients of outputs with a graph; the graph is kept."""
    cotangent = normal_numbers(outputs.shape, len(outputs), outputs)
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(parameters, dense, strict=True))
    return AutogradReference(inputs, outputs.detach(), precision, cotangent, gradients)


def _check_independent(call: Call, inputs: Inputs, outputs: Tensor) -> torch.dtype:
    """Raise if the outputs of an example depend on the others in the batch; return the precision of the model."""
    half = (len(outputs) + 1) // 2
    dtypes = [torch.float64]  # dtypes inside the model: one in float32 may use bfloat16

    def noted(function: Function, args: Arguments, kwargs: Keywords) -> Any:
        out = function(*args, **kwargs)
        dtypes.extend([out.dtype] if isinstance(out, Tensor) and out.is_floating_point() else [])
        return out

    with torch.no_grad(), Intercept(noted):
        alone = call(take(inputs, slice(0, half)))
    precision = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if not close(alone, outputs[:half], tolerance(precision, outputs.device), outputs.double().norm()):
        raise UncapturedParameterError(
            f"expected the outputs of an example not to depend on the others in its batch, got a difference of "
            f"{float((alone - outputs[:half]).abs().max()):.3g} between a batch and its first half. Call model.eval(), "
            "and use no layer that mixes examples (batch statistics, attention or pooling across the batch)."
        )
    return precision


def close(one: Tensor, other: Tensor, relative: float, scale: Tensor | None = None) -> bool:
    """Whether two tensors differ by at most a share of a scale, by default the norm of the second."""
    if one.shape != other.shape:
        return False
    size = other.double().norm() if scale is None else scale
    return bool((one.double() - other.double()).norm() <= relative * size + torch.finfo(torch.float32).tiny)


# --- Where the examples are -------------------------------------------------------------------------------------------


def find_layouts(outputs: Tensor, records: Sequence[Record]) -> list[Record]:
    """Give uses a layout in which gradients from some examples are zero for all others, or `None` if there is none.

    Uses without a gradient stay as they are; the others are returned.
    """
    n, cotangent = len(outputs), normal_numbers(outputs.shape, len(outputs), outputs)
    plain = zip(records, output_gradients(outputs, records, cotangent), strict=True)
    found = [record for record, gradient in plain if gradient is not None and bool(gradient.any())]
    possible = [record.possible_layouts(n) for record in found]
    for examples in separating_sets(n).to(outputs.device) if found else ():
        grads = output_gradients(outputs, found, cotangent * examples[:, None])
        for layouts, gradient in zip(possible, grads, strict=True):
            if gradient is not None:
                layouts[:] = [one for one in layouts if not bool(one.canonical(gradient, n)[~examples].any())]
    for record, layouts in zip(found, possible, strict=True):
        record.layout = next(iter(layouts), None)
    return found


def separating_sets(n: int) -> Tensor:
    """Boolean sets of examples (s, n): for any two examples, one set has the first and not the second.

    Example:
        >>> separating_sets(3).int().tolist()
        [[0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0]]
    """
    digits = [(torch.arange(n, device="cpu") >> bit) % 2 == 1 for bit in range(max(n - 1, 1).bit_length())]
    return torch.stack([side for digit in digits for side in (digit, ~digit)])


def rows_are_in_place(outputs: Tensor, records: Sequence[Record]) -> bool:
    """Whether every example's gradients are where the layouts say, on a batch whose rows may have been reordered.

    If an example's cotangent is multiplied by a power of two, its gradients must be multiplied by that power. Powers
    are digits of the examples' numbers, so any two examples differ in at least one of a few such cotangents.
    """
    n = len(outputs)
    base = 7 if outputs.dtype == torch.float16 else 15  # number of powers of two within the range of the precision
    cotangent, number = normal_numbers(outputs.shape, len(outputs), outputs), torch.arange(n, device=outputs.device)
    records = [record for record in records if record.layout is not None]
    plain = output_gradients(outputs, records, cotangent)
    for place in takewhile(lambda place: place == 1 or place < n, (base**digit for digit in count())):
        power = torch.pow(2.0, (number // place % base - base // 2).double()).to(outputs.dtype)
        scaled = output_gradients(outputs, records, power.unsqueeze(1) * cotangent)
        for before, after, record in zip(plain, scaled, records, strict=True):
            if before is not None and after is not None and not _multiplied(before, after, record.layout, power):
                return False
    return True


def _multiplied(before: Tensor, after: Tensor, layout: Layout | None, power: Tensor) -> bool:
    assert layout is not None
    n = len(power)
    wanted = layout.canonical(before, n).reshape(n, -1).double() * power.double().unsqueeze(1)
    gap = (layout.canonical(after, n).reshape(n, -1).double() - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    floor = 100 * torch.finfo(before.dtype).eps * float(size.max())
    return bool((gap <= tolerance(before.dtype, before.device) * size + floor).all())


# --- What no rule covers, in words ------------------------------------------------------------------------------------


def uncovered_calls(call: Call, parameter: Tensor, inputs: Inputs) -> str:
    """Say in words what a model does with a parameter that no rule covers."""
    names: set[str] = set()

    def noted(function: Function, args: Arguments, kwargs: Keywords) -> Any:
        out = function(*args, **kwargs)
        uses_it = any(one is parameter for one in flat_arguments(args, kwargs))
        if function not in READERS and uses_it and isinstance(out, (Tensor, tuple, list)):
            names.add(resolve_name(function) or getattr(function, "__name__", repr(function)))
        return out

    with torch.no_grad(), Intercept(noted):
        call(inputs)
    return f"it goes into {', '.join(sorted(names))}" if names else "it is used in a way no rule covers"
