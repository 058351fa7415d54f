"""Dense algebra on random Kronecker projections of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import LayerGradients, working_precision
from whence.curvature.base import FeatureStructure, MeatRoots
from whence.curvature.core import sketch_cost
from whence.curvature.cost import Cost, ProblemSizes
from whence.curvature.primal import FittedPrimal, Projected, leaving, primal_bytes
from whence.curvature.rotation import Basis
from whence.jacobian.gradients import Block
from whence.jacobian.linearization import Linearization


@dataclass(frozen=True)
class Sketch(FeatureStructure):
    """The exact algebra on random Kronecker projections of the gradients: one pass, no eigendecomposition of factors.

    Args:
        size: number of features over all blocks; small blocks are kept whole.
        seed: of the projections.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> tracer = whence.fit(net, [(x, x**2)], structure=whence.Sketch(size=12), ridge=0.1, progress=False)
        >>> tracer.predict(x[:2]).hec3.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "sketch"
    size: int = 6144
    seed: int = 0

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots | None = None) -> FittedPrimal:
        """Draw the projections, then the primal algebra."""
        features = sketch_features(LayerGradients(problem), self.size, self.seed)
        r = features.size
        problem.budget.require(primal_bytes(r), f"a sketch of {r} features", "Lower `size`.")
        features.notes.append(f"random sketch of {r} features for {problem.selection.size} weights")
        return FittedPrimal.fit(leaving(problem, r), features, ridge)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return sketch_cost(sizes, self.name, min(self.size, sizes.d))


def sketch_features(stream: LayerGradients, size: int, seed: int) -> Projected:
    """Random projections of the gradients to about `size` features, the same in all processes."""
    problem = stream.problem
    generator = torch.Generator("cpu").manual_seed(seed)
    shares = allot([block.numel for block in stream.blocks], size)
    bases = [draw(block, share, generator) for block, share in zip(stream.blocks, shares, strict=True)]
    moved = [basis.to(working_precision(problem), problem.device) for basis in bases]
    problem.passes.process_group.share([one for basis in moved for one in basis.tensors], 0, "the sketch")
    indices = [torch.arange(math.prod(basis.shape), device=problem.device) for basis in moved]
    return Projected(stream, moved, indices, None, list(stream.notes), orthonormal=False)


def allot(sizes: Sequence[int], total: int) -> list[int]:
    """Share features out over blocks: small blocks whole, the rest evenly.

    Examples:
        >>> allot([10, 1000, 1000], 110)
        [10, 50, 50]
    """
    shares = [0] * len(sizes)
    left = total
    for rank, at in enumerate(sorted(range(len(sizes)), key=lambda at: sizes[at])):
        shares[at] = min(sizes[at], max(1, left // (len(sizes) - rank)))
        left -= shares[at]
    return shares


def draw(block: Block, share: int, generator: torch.Generator) -> Basis:
    """A random basis of about `share` coordinates with U U^T equal to the identity on average."""
    if share >= block.numel:
        return Basis(block)
    if block.kind == "dense":
        return Basis(block, inputs=orthonormal(1, block.numel, share, generator)[0])
    if block.kind == "rows":
        columns = max(1, share // block.matrix_shape[0])
        return Basis(block, outputs=orthonormal(1, block.matrix_shape[1], columns, generator))
    e, o, i = block.matrix_shape
    each = max(1, share // e)
    above = min(o, max(1, round(each**0.5)))
    below = min(i, max(1, each // above))
    above = min(o, max(1, each // below))
    return Basis(block, orthonormal(e, i, below, generator), orthonormal(e, o, above, generator))


def orthonormal(groups: int, size: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns scaled so that U U^T is the identity on average: (groups, size, columns)."""
    normal = torch.randn(groups, size, columns, generator=generator, dtype=torch.float64, device="cpu")
    vectors: Tensor = torch.linalg.qr(normal).Q
    scaled: Tensor = vectors * math.sqrt(size / columns)
    return scaled
