"""The proof that a capture is right, on one batch: nothing missed, nothing counted twice, no examples mixed.

Three facts are checked. Gradients pulled back from some of the examples alone vanish on all others, in the layout that
was found for each use; the sets of examples are such that a leak between any two would show. For a random cotangent,
the captured gradients of all examples add up to autograd's gradient, taken on the model as it is. And the outputs under
capture are the model's, whichever examples are in the batch.

What a few examples could not show is looked at on later batches: uses that had no gradient or did not occur, when they
first have one, and rows that a model may have reordered, on every batch; see `whence.tangents.capture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from whence.errors import ShapeError, SingularCurvatureError, UncapturedParameterError
from whence.tangents.backward import pull
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.forms import Kronecker, Tangent
from whence.tangents.generic import Call
from whence.tangents.layout import Layout, candidates, halves, separates
from whence.tangents.recorder import Record, differentiable

PRIMES = (7, 5, 3, 2)
"""Sizes of the batch for the proof: a number that no width, head count or sequence length is likely to share."""


@dataclass(frozen=True)
class Evidence:
    """What autograd says of the model as it is."""

    inputs: Inputs
    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the coarsest that occurs inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None where the outputs do not depend on the parameter
    sets: Tensor  # (s, n) of bool: sets of examples that tell any two apart

    @property
    def tolerance(self) -> float:
        """Relative error to be expected between two ways of computing the same thing."""
        return tolerance(self.precision, self.outputs.device)

    @property
    def floor(self) -> float:
        """Absolute error to be expected in a gradient whose terms cancel, in units of all gradients together."""
        return max(min(100 * torch.finfo(self.precision).eps, 1e-2), self.tolerance**2)

    @property
    def scale(self) -> float:
        """Norm of all gradients together."""
        return math.hypot(*(float(g.double().norm()) for g in self.gradients.values() if g is not None))


class _Precision(TorchFunctionMode):
    """Finds the coarsest dtype in which a model computes: a float32 model may use bfloat16 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.coarsest = max(self.coarsest, out.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out


def tolerance(precision: torch.dtype, device: torch.device) -> float:
    """Relative error to be expected between two ways of computing outputs or gradients."""
    fast = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and fast and precision == torch.float32:
        return 1e-2
    return {torch.float64: 1e-8, torch.float16: 3e-2, torch.bfloat16: 1e-1}.get(precision, 1e-3)


def gather(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> Evidence:
    """Run the model as it is on a few of the examples, and differentiate it."""
    inputs = _few(inputs)
    n = batch_size(inputs, "the first batch")
    with differentiable():
        outputs = call(inputs)
    if outputs.dim() != 2 or len(outputs) != n:
        raise ShapeError(f"expected outputs of shape ({n}, k) on the first batch, got {tuple(outputs.shape)}.")
    precision = _refuse_mixing(call, inputs, outputs.detach())
    cotangent = _draw(outputs)
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(parameters.values()), cotangent, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(parameters, dense, strict=True))
    for name, gradient in gradients.items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise SingularCurvatureError(
                f"expected finite gradients of the outputs in the weights, got NaN or infinity in {name} on the first "
                "batch. Look for a square root, a logarithm or a norm at zero in the model; gradients of a float16 "
                "model may overflow: use float32."
            )
    return Evidence(inputs, outputs.detach(), precision, cotangent, gradients, halves(n).to(outputs.device))


def _refuse_mixing(call: Call, inputs: Inputs, outputs: Tensor) -> torch.dtype:
    """Raise if the outputs of an example depend on which others are in the batch; the precision of the model."""
    half = (len(outputs) + 1) // 2
    with torch.no_grad(), _Precision() as mode:
        alone = call(take(inputs, slice(0, half)))
    gap = (alone.double() - outputs[:half].double()).norm()
    if not gap <= tolerance(mode.coarsest, outputs.device) * outputs.double().norm() + torch.finfo(torch.float32).tiny:
        raise UncapturedParameterError(
            f"expected the outputs of an example not to depend on the others in its batch, got a difference of "
            f"{float((alone - outputs[:half]).abs().max()):.3g} between a batch and its first half. Call model.eval(), "
            "and use no layer that mixes examples (batch statistics, attention or pooling across the batch)."
        )
    coarsest: torch.dtype = mode.coarsest
    return coarsest


def _few(inputs: Inputs) -> Inputs:
    n = batch_size(inputs, "the first batch")
    if n == 1:  # with a single example every axis of size one could be the examples'
        return tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, inputs)
    return take(inputs, slice(0, next(prime for prime in PRIMES if prime <= n)))


def find_layout(
    record: Record,
    pulled: Sequence[Tensor | None],
    sets: Tensor,
    other: tuple[Sequence[int], int] | None = None,
) -> tuple[Layout | None, bool]:
    """Where the examples are, and whether that is proved: gradients of zero everywhere prove nothing.

    Args:
        record: The use.
        pulled: Gradients in its output, each from one set of examples alone.
        sets: (s, n) of bool.
        other: the shape of the output for another number of examples, where that is known.
    """
    n = sets.shape[1]
    possible = (layout for layout in _possible(record, n) if other is None or layout.fits(*other))
    known = [(gradient, chosen) for gradient, chosen in zip(pulled, sets, strict=True) if gradient is not None]
    proved = any(bool(gradient.any()) for gradient, _ in known)
    for layout in possible:
        if all(separates(layout, gradient, chosen) for gradient, chosen in known):
            return layout, proved
    return None, proved


LEVELS = {torch.float16: 7}
"""Powers of two that tell examples apart, 15 where the precision has room for them."""


def keeps_rows(outputs: Tensor, records: Sequence[Record], layouts: Sequence[Layout]) -> bool:
    """Whether every example's gradients are where the layouts say, on a batch whose rows may have been reordered.

    A cotangent is pulled back as it is, and with a power of two for each example: gradients in the rows of an example
    must be multiplied by its power, exactly. Powers are the digits of the examples' numbers, so that any two examples
    differ in one of a few such cotangents.
    """
    n = len(outputs)
    base = LEVELS.get(outputs.dtype, 15)
    places = 1
    while base**places < n:
        places += 1
    cotangent = _draw(outputs)
    number = torch.arange(n, device=outputs.device)
    plain = pull(outputs, records, cotangent[None], last=False)[0]
    for place in range(places):
        power = torch.pow(2.0, (number // base**place % base - base // 2).double()).to(outputs.dtype)
        scaled = pull(outputs, records, (power.unsqueeze(1) * cotangent)[None], last=False)[0]
        for before, after, layout in zip(plain, scaled, layouts, strict=True):
            if before is not None and after is not None and not _multiplied(before, after, layout, power):
                return False
    return True


def _multiplied(before: Tensor, after: Tensor, layout: Layout, power: Tensor) -> bool:
    n = len(power)
    wanted = layout.canonical(before, n).reshape(n, -1).double() * power.double().unsqueeze(1)
    gap = (layout.canonical(after, n).reshape(n, -1).double() - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    floor = 100 * torch.finfo(before.dtype).eps * float(size.max())
    return bool((gap <= tolerance(before.dtype, before.device) * size + floor).all())


def layouts_here(outputs: Tensor, records: Sequence[Record]) -> list[Layout | None]:
    """Where the examples of the batch at hand are, told apart by sets of them; `None` for records without a place."""
    n, cotangent = len(outputs), _draw(outputs)
    left = [_possible(record, n) for record in records]
    for chosen in halves(n).to(outputs.device):
        pulled = pull(outputs, records, (cotangent * chosen[:, None])[None], last=False)[0]
        left = [
            layouts if one is None else [layout for layout in layouts if separates(layout, one, chosen)]
            for layouts, one in zip(left, pulled, strict=True)
        ]
    return [layouts[0] if layouts else None for layouts in left]


def _possible(record: Record, n: int) -> list[Layout]:
    """Every layout that n examples could have in the output of a use, the likeliest first."""
    found = candidates(record.use.axes(record.shape), record.shape, n)
    return [layout for layout in found if record.use.accepts(layout, record.shape, n)]


def has_gradient(outputs: Tensor, records: Sequence[Record]) -> list[bool]:
    """Which records the outputs of this batch depend on, to first order."""
    pulled = pull(outputs, records, _draw(outputs)[None], last=False)[0]
    return [one is not None and bool(one.any()) for one in pulled]


def evidence_of(outputs: Tensor, inputs: Inputs, parameters: Mapping[str, Tensor], precision: torch.dtype) -> Evidence:
    """What autograd says of the graph at hand."""
    cotangent = _draw(outputs)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True
    )
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    sets = halves(len(outputs)).to(outputs.device)
    gradients = dict(zip(parameters, dense, strict=True))
    return Evidence(inputs, outputs.detach(), precision, cotangent, gradients, sets)


def _draw(outputs: Tensor) -> Tensor:
    """A random cotangent, the same whenever it is asked for."""
    generator = torch.Generator("cpu").manual_seed(len(outputs))
    return torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs.detach())


def same(evidence: Evidence, outputs: Tensor) -> bool:
    """Whether these outputs are the model's."""
    gap = (outputs.detach().double() - evidence.outputs.double()).norm()
    return bool(gap <= evidence.tolerance * evidence.outputs.double().norm() + torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Mismatch:
    """A parameter whose captured gradients do not add up to autograd's."""

    expected: float
    got: float
    gap: float


def compare(evidence: Evidence, tangents: Sequence[Tangent]) -> dict[str, Mismatch]:
    """Sum the captured gradients over examples and compare with autograd's, parameter by parameter."""
    wrong: dict[str, Mismatch] = {}
    floor = evidence.floor * evidence.scale
    for tangent in tangents:
        total, spread = _total(tangent)
        for name, got in tangent.block.from_matrix(total).items():
            truth = evidence.gradients[name]
            expected = torch.zeros_like(got) if truth is None else truth.double()
            gap = float((got - expected).norm())
            if not gap <= evidence.tolerance * (float(expected.norm()) + spread) + floor:
                wrong[name] = Mismatch(float(expected.norm()), float(got.norm()), gap)
    return wrong


def _total(tangent: Tangent) -> tuple[Tensor, float]:
    """Sum over the examples, one cotangent, and the size of what may have cancelled in it."""
    if isinstance(tangent, Kronecker):
        a, g = tangent.inputs().double(), tangent.grads().double()
        spread = float((a.square().sum(-1).unsqueeze(1) * g.square().sum(-1)).sum().sqrt())
        return torch.einsum("nceto,neti->eoi", g, a), spread
    each = tangent.materialize().double()[:, 0]
    return each.sum(0), float(each.norm())
