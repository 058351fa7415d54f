"""Memory of curvatures built layer by layer, told before it is taken.

The numbers are those that fits of real processes were seen to take at their peak; `tests/test_estimate.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whence.display import count
from whence.tangents.forms import Block

from .basis import Basis
from .factors import LARGEST_SIDE
from .long_sides import side_bytes
from .room import LEAST_PIECES, PIECES
from .stream import LayerStream, working_precision

SUMS = 26.0
"""Sums, weights and what is made on the way to them, in float64 numbers for each coordinate that is kept."""

HOLES = 1.1
"""A heap in which factors and eigenvectors come and go takes so many times what they do."""

WHOLE = 5.0
"""Scores and steps, in float64 numbers for each weight."""

INSTEAD = (
    "structure=whence.EKFAC(tolerance=0.1) or a core of fewer coordinates, whence.Core(size=...), "
    "fit(..., outputs=16) where outputs are many, or a larger max_memory."
)


def factor_bytes(blocks: Sequence[Block], largest_exact: int, largest_side: int = LARGEST_SIDE) -> tuple[float, float]:
    """Bytes of all Kronecker factors, in float64, and of the largest one."""
    each = []
    for block in blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * side**2 for side in shape[1:] if side <= largest_side]
        elif block.kind == "rows" or block.numel <= largest_exact:
            each.append(shape[-1] ** 2)
    return 8.0 * sum(each), 8.0 * max(each, default=0)


def decomposition_bytes(
    blocks: Sequence[Block], largest_exact: int, copies: int = 1, largest_side: int = LARGEST_SIDE
) -> float:
    """All factors, the eigenvectors of those that are decomposed, and the workspace for the largest."""
    total, largest = factor_bytes(blocks, largest_exact, largest_side)
    return (copies + 1.0) * total + 4.0 * largest


def sums_bytes(kept: float, size: int, working: int) -> float:
    """Everything of the size of the weights, for so many coordinates kept of so many weights."""
    return (SUMS + 6.0 * (working == 8)) * 8.0 * kept + WHOLE * 8.0 * size


def examples_bytes(n: int, k: int, q: int, item: int) -> float:
    """Residuals, leverages and weights of n training examples with k outputs and q columns of the Hessian's root."""
    blocks = 8.0 if q else 3.5  # roots of Hessians and of the noise, leverage blocks, their inverses
    return item * n * (12.0 * k + blocks * k * max(k, q))


def require_factors(
    stream: LayerStream,
    largest_exact: int,
    copies: int = 1,
    largest_side: int = LARGEST_SIDE,
    leading: int | None = None,
) -> None:
    """Raise when the factors and their eigenvectors do not fit."""
    need = decomposition_bytes(stream.blocks, largest_exact, copies, largest_side)
    if leading is not None:
        need += side_bytes(stream.known.blocks, largest_side, leading, stream.problem.passes.layers.size)
    stream.problem.budget.require(
        HOLES * need, f"the Kronecker factors of {count(len(stream.blocks), 'block')} of parameters", _instead(stream)
    )


def require_sums(stream: LayerStream, bases: Sequence[Basis]) -> None:
    """Raise when the sums in these bases, and the weights of the training examples, do not fit; pieces get the rest."""
    problem = stream.problem
    kept = sum(math.prod(basis.shape) for basis in bases)
    roots = problem.hessian_roots
    size = sum(block.numel for block in stream.blocks)
    need = sums_bytes(kept, size, working_precision(problem).itemsize)
    need += examples_bytes(problem.n, problem.k, 0 if roots is None else roots.shape[2], problem.dtype.itemsize)
    what = f"sums over {kept} coordinates, and the weights of {problem.n} examples with {problem.k} outputs,"
    least = max(PIECES * stream.example(problem.k), LEAST_PIECES * problem.budget.limit)
    problem.budget.require(need + least, what, _instead(stream))
    stream.held = need


def require_all(stream: LayerStream) -> None:
    """The same before there are any bases, where all coordinates will be kept."""
    require_sums(stream, [Basis(block) for block in stream.blocks])


def _instead(stream: LayerStream) -> str:
    return (
        "Use " if stream.problem.selection.one_layer else "Use parameters='last_layer' or a list of layers, "
    ) + INSTEAD
