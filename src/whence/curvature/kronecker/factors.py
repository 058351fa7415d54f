"""Kronecker factors of every block, in one pass over the training set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from whence.curvature.eigen import eigenvectors
from whence.tangents.forms import Block, Dense, Kronecker, Tangent, Whole
from whence.tangents.linearization import Linearization

from .basis import Basis
from .kept import Cotangents
from .measure import combine, raised
from .second_moments import joint_moment, second_moment, summed, whole_moments
from .stream import LayerStream

LARGEST_SIDE = 8192
"""A layer with more inputs, or outputs, has no basis on that side: its factor would be a matrix of their square."""

LARGEST_CLASSES = 256
"""Nor has a last layer with more outputs than this, where a fit looks at a few mixtures of them."""

MANY_EXAMPLES = 20_000
"""From so many examples on, the factors of layer outputs are taken from one output of each, in turn."""

EXAMPLES_PER_SIDE = 40
"""And from so many for each output of the widest layer: small eigenvalues are then off by a fortieth or so at most."""


class Leading(NamedTuple):
    """Some of the eigenvectors of a factor that nobody has whole.

    Attributes:
        values: (e, r) the largest eigenvalues, ascending.
        vectors: (e, i, r).
        trace: of the factor.
    """

    values: Tensor
    vectors: Tensor
    trace: float


@dataclass
class Factors:
    """Sums of a a^T and g g^T of one block, in float64.

    Attributes:
        inputs: (e, i, i) of a kronecker block, (p, p) of a dense one; `None` where there is none.
        outputs: (e, o, o) of a kronecker block, (1, d, d) of a row block.
        counts: (2,) number of (example, position) pairs summed, counted by the weights of the examples; and of pieces
            whose gradients were summed over positions first, and not counted position by position.
        below: leading directions of the inputs, where these are too many for a factor.
        above: of the outputs, likewise.
    """

    block: Block
    inputs: Tensor | None
    outputs: Tensor | None
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64, device="cpu"))
    below: Leading | None = None
    above: Leading | None = None

    @property
    def positions(self) -> float:
        """Number of (example, position) pairs."""
        return float(self.counts[0])

    def state(self, name: str) -> dict[str, Tensor]:
        """What is summed up, by name."""
        found = {"inputs": self.inputs, "outputs": self.outputs, "counts": self.counts}
        return {f"{name}.{key}": value for key, value in found.items() if value is not None}

    @classmethod
    def empty(
        cls,
        block: Block,
        largest_exact: int,
        device: torch.device,
        alone: int | None = None,
        largest_side: int = LARGEST_SIDE,
    ) -> Factors:
        """Zeros of the right sizes; dense blocks above `largest_exact` entries and very long sides get no matrix.

        Nor do the outputs of a layer that has `alone` of them, see `left_alone`.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        if block.kind == "kronecker":
            e, o, i = block.matrix_shape
            below = zeros(e, i, i) if i <= largest_side else None
            above = zeros(e, o, o) if o <= largest_side and o != alone else None
            return cls(block, below, above)
        if block.kind == "rows":
            d = block.matrix_shape[1]
            return cls(block, None, zeros(1, d, d))
        exact = block.numel <= largest_exact
        return cls(block, zeros(block.numel, block.numel) if exact else None, None)

    def add(self, tangent: Tangent, weights: Tensor | None = None) -> None:
        """Count one piece of the training set; gradients hold the roots of the examples' weights (n,) already."""
        share = _share(weights)
        if isinstance(tangent, Kronecker):
            self.counts[0] += share * tangent.examples * tangent.positions
            if self.inputs is not None:
                _add(self.inputs, _input_moment(tangent, weights))
            if self.outputs is not None:
                _add(self.outputs, summed(raised(tangent.grads()), 2))
        elif isinstance(tangent, Dense):
            if self.inputs is not None:
                _add(self.inputs, joint_moment([raised(part).flatten(0, 1) for part in tangent.parts]))
        else:
            values = raised(tangent.aggregate().values)
            self.counts[0] += share * tangent.index.numel()
            _add(self.outputs, second_moment(values.flatten(0, 1)).unsqueeze(0))

    def add_whole(self, tangent: Tangent, weights: Tensor | None = None) -> None:
        """Count the gradient matrices G of one piece, summed over positions, by G^T G and G G^T."""
        if not isinstance(tangent, Kronecker) or self.inputs is None or self.outputs is None:
            self.add(tangent, weights)
            return
        self.counts[0] += _share(weights) * tangent.examples * tangent.positions
        self.counts[1] += 1.0
        below, above = whole_moments(raised(tangent.inputs()), raised(tangent.grads()))
        _add(self.inputs, below)
        _add(self.outputs, above)

    def join(self, other: Factors) -> None:
        """Replace each factor by the mean of both, the other's scaled to the same trace: one basis for two matrices."""
        for mine, theirs in ((self.inputs, other.inputs), (self.outputs, other.outputs)):
            if mine is not None and theirs is not None:
                sizes = [torch.diagonal(one, dim1=-2, dim2=-1).sum(-1, keepdim=True) for one in (mine, theirs)]
                scale = sizes[0] / sizes[1].clamp_min(torch.finfo(theirs.dtype).tiny)
                mine.add_(theirs * scale.unsqueeze(-1)).div_(2.0)

    def basis(self, facts: list[str]) -> tuple[Basis, Tensor | None]:
        """The Kronecker eigenbasis, and KFAC's eigenvalues in it (kronecker blocks only)."""
        name = self.block.name
        inputs = outputs = spectrum = below = above = None
        if self.inputs is not None:
            below, inputs = eigenvectors(self.inputs, f"the input factor of {name}", facts)
        if self.outputs is not None:
            above, outputs = eigenvectors(self.outputs, f"the output factor of {name}", facts)
        if self.below is not None:
            below, inputs = self.below.values, self.below.vectors
        if self.above is not None:
            above, outputs = self.above.values, self.above.vectors
        if above is not None and below is not None:
            spectrum = above.unsqueeze(-1) * below.unsqueeze(-2)
            tiny = torch.finfo(spectrum.dtype).tiny
            spectrum /= below.sum(-1).clamp_min(tiny).reshape(-1, 1, 1) if self.counts[1] > 0 else self.positions or 1.0
        elif below is not None and self.block.kind == "dense":
            spectrum = below
        if self.block.kind == "kronecker" and (below is None or above is None):
            sides = " and ".join(side for side, one in (("inputs", below), ("outputs", above)) if one is None)
            facts.append(f"the {sides} of {name} are too many for a basis of their own: taken as they are, one by one")
        return Basis(self.block, inputs, outputs), spectrum


def weighted_inputs(tangent: Kronecker, weights: Tensor | None) -> Tensor:
    """Inputs (n, e, t, i), times the roots of the examples' weights."""
    a = raised(tangent.inputs())
    return a if weights is None else a * weights.sqrt().to(a.dtype).reshape(-1, 1, 1, 1)


def _input_moment(tangent: Kronecker, weights: Tensor | None) -> Tensor:
    """Sum of a a^T, (e, i, i); a column of ones is never built where nothing else weighs the inputs."""
    factor = tangent.a
    if weights is not None or not isinstance(factor, Whole) or not factor.ones:
        return summed(weighted_inputs(tangent, weights), 1)
    values = raised(factor.values)
    n, _, t, i = values.shape
    inner, sums = summed(values, 1), values.sum((0, 2))
    found = inner.new_empty(len(inner), i + 1, i + 1)
    found[:, :i, :i], found[:, :i, i], found[:, i, :i], found[:, i, i] = inner, sums, sums, n * t
    return found


def left_alone(problem: Linearization) -> int | None:
    """The number of the network's own outputs if a layer with so many has no basis there, as these are too many.

    A factor costs their square, where a fit looks at a few mixtures to cost no more than those.
    """
    return problem.width if problem.sketch is not None and problem.width > LARGEST_CLASSES else None


def _share(weights: Tensor | None) -> float:
    """How many examples one example of a piece counts for."""
    return 1.0 if weights is None or not len(weights) else float(weights.mean())


def _add(total: Tensor | None, value: Tensor) -> None:
    """Sums of many batches are kept in float64, so that small eigenvalues survive a million examples."""
    assert total is not None
    total.add_(value)


def gather_factors(
    stream: LayerStream,
    largest_exact: int,
    *,
    whole: bool = False,
    residual_weighted: bool = False,
    largest_side: int = LARGEST_SIDE,
) -> tuple[list[Factors], list[Factors]]:
    """One pass: factors of the curvature, and, where asked for, of the residual-weighted meat.

    Factors say in which basis the eigenvalues are summed, and nothing else. Where examples are many, one output of each
    tells as much about it as all of them: inputs are counted for every example, gradients for every k-th output.

    Args:
        stream: tangents of the training set.
        largest_exact: dense blocks above this size get no matrix.
        whole: sum the gradients of layers seen at several positions over them before they are counted.
        residual_weighted: count the gradients J_i^T r_i, too.
        largest_side: longer sides of layers get no matrix.
    """
    problem = stream.problem
    sizes = (largest_exact, problem.device, left_alone(problem), largest_side)
    plain = [Factors.empty(block, *sizes) for block in stream.blocks]
    weighted = [Factors.empty(block, *sizes) for block in stream.blocks if residual_weighted]
    roots = problem.hessian_roots
    sampled = takes_one_output_each(stream, whole or residual_weighted)
    cotangents, count = (_one_each(problem), 1) if sampled else (stream.identity(), problem.k)
    state: dict[str, Tensor] = {}
    for name, factors in (("plain", plain), ("weighted", weighted)):
        for at, one in zip(stream.mine, factors, strict=False):  # there may be no weighted ones
            state.update(one.state(f"{name}.{at}"))
    for where, tangents in stream.read("Kronecker factors", cotangents, count, state):
        for at, tangent in enumerate(tangents):
            weights = None if problem.sample_weights is None else problem.sample_weights[where]
            curved = tangent if roots is None or sampled else combine(tangent, roots[where])
            if whole and isinstance(tangent, Kronecker) and tangent.positions > 1:
                plain[at].add_whole(curved, weights)
            else:
                plain[at].add(curved, weights)
            if residual_weighted:
                weighted[at].add_whole(combine(tangent, problem.residuals[where].unsqueeze(2)))
            del tangent, curved
        stream.spare(tangents)
        del tangents  # the next piece needs the room
    return plain, weighted


def takes_one_output_each(stream: LayerStream, whole: bool) -> bool:
    """Whether the basis is found from one output of each example: never where whole gradients are counted."""
    sides = (block.matrix_shape[1] if block.kind == "kronecker" else block.matrix_shape[-1] for block in stream.blocks)
    largest = max((side for side in sides if side <= LARGEST_SIDE), default=0)
    n = stream.problem.n
    return n >= max(MANY_EXAMPLES, EXAMPLES_PER_SIDE * largest) and stream.problem.k > 1 and not whole


def _one_each(problem: Linearization) -> Cotangents:
    """One output of every example in turn, or one direction of the loss's Hessian, with the weight of all."""
    roots = problem.hessian_roots
    eye = torch.eye(problem.k, dtype=problem.dtype, device=problem.device)

    def chosen(where: slice, n: int) -> Tensor:
        at = torch.arange(where.start, where.stop, device=problem.device)
        count = problem.k if roots is None else roots.shape[2]
        rows = eye[at % count] if roots is None else roots[at, :, at % count]
        return (math.sqrt(count) * rows).unsqueeze(0)

    return chosen
