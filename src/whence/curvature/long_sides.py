"""Leading directions of sides of layers that are too long for one process to hold their factor.

Of a side with i inputs the factor is an i x i matrix. Processes that share the layers keep some of its rows each, from
the first sum to the last product, as a tensor of `torch.distributed.tensor` that is sharded by rows. Nobody ever has it
whole, and none decomposes it: products with a few vectors are all that its leading directions take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from whence.curvature.kronecker import Leading, weighted_inputs
from whence.curvature.rotation import combine, raised
from whence.curvature.stream import LayerGradients, working_precision
from whence.jacobian.gradients import Block, Kronecker
from whence.jacobian.linearization import Linearization
from whence.linalg import check_finite_sums
from whence.runtime.processes import Processes

ROWS = 256
"""Rows of a factor that are added at once: what is added takes no more memory than that."""

MORE = 16
"""Directions that are followed beside those that are wanted, so that these converge."""

ITERATIONS = 40
"""Products with the factor at most. Where eigenvalues are so close that directions have not settled by then, they span
nearly the same: eigenvalues are measured in whatever basis is found."""

SETTLED = 1e-12
"""What of a direction a product turns away at most, over the largest eigenvalue, once it is found; or so many times the
precision of what was summed."""

ROUNDING = 32.0

INPUTS, OUTPUTS = 2, 1
"""Where a side is in the shape of a block's matrix."""


@dataclass
class LongSide:
    """Rows of the sum of v v^T of one side of a layer, those of this process.

    Attributes:
        at: which block.
        side: `INPUTS` or `OUTPUTS`.
        size: how many rows there are in all processes.
        first: of the rows of this process.
        rows: (some, size), float64.
    """

    at: int
    side: int
    size: int
    first: int
    rows: Tensor

    @classmethod
    def empty(cls, at: int, side: int, size: int, process_group: Processes, device: torch.device) -> LongSide:
        """Zeros."""
        mine = rows_of(size, process_group.size, process_group.rank)
        rows = torch.zeros(mine.stop - mine.start, size, dtype=torch.float64, device=device)
        return cls(at, side, size, mine.start, rows)

    def add(self, vectors: Tensor) -> None:
        """Count vectors (m, size), a few rows at a time."""
        for low in range(0, len(self.rows), ROWS):
            some = self.rows[low : low + ROWS]
            first = self.first + low
            some.add_(vectors[:, first : first + len(some)].T @ vectors)

    def leading(self, count: int, process_group: Processes, where: str, precision: torch.dtype) -> Leading:
        """The largest eigenvalues, ascending, and their eigenvectors (size, count), the same in every process.

        Subspace iteration: a block of vectors is multiplied by the factor and made orthonormal until it settles.

        Args:
            count: how many.
            process_group: the processes that share the rows.
            where: names the factor in messages.
            precision: of the vectors that were summed.
        """
        settled = max(SETTLED, ROUNDING * torch.finfo(precision).eps)
        diagonal = self.rows[:, self.first : self.first + len(self.rows)].diagonal()
        check_finite_sums(diagonal, where)  # which every vector that is not finite has spoilt
        many = min(self.size, count + max(MORE, count // 4))
        generator = torch.Generator("cpu").manual_seed(0)
        block = torch.randn(self.size, many, generator=generator, dtype=torch.float64, device="cpu")
        block = self._same([torch.linalg.qr(block.to(self.rows.device)).Q], process_group, where)[0]
        trace = diagonal.sum().reshape(1)
        process_group.add([trace], where)
        for _ in range(ITERATIONS):
            moved = product(self.rows, block, process_group, where)  # (size, many)
            values, turn = self._same(torch.linalg.eigh(symmetric(block.T @ moved)), process_group, where)
            block, moved = block @ turn, moved @ turn
            left = (moved - block * values)[:, -count:].norm(dim=0).max()
            if float(left) <= settled * float(values[-1]):
                break
            block = self._same([torch.linalg.qr(moved).Q], process_group, where)[0]
        else:
            moved = product(self.rows, block, process_group, where)
            values, turn = self._same(torch.linalg.eigh(symmetric(block.T @ moved)), process_group, where)
            block = block @ turn
        values, block = values[-count:].clamp_min(0.0), block[:, -count:].contiguous()
        return Leading(values.unsqueeze(0), block.unsqueeze(0), float(trace))

    @staticmethod
    def _same(found: Iterable[Tensor], process_group: Processes, where: str) -> list[Tensor]:
        """Those of the first process, for all: unlike machines round, and choose signs, in their own way."""
        tensors = [one.contiguous() for one in found]
        process_group.share(tensors, 0, where)
        return tensors


def product(rows: Tensor, matrix: Tensor, process_group: Processes, what: str) -> Tensor:
    """A square matrix of which every process has some rows (some, i), times one (i, q) that all have: whole, (i, q)."""
    if process_group.alone:
        return rows @ matrix
    tensors: Any = import_module("torch.distributed.tensor")  # here, since it takes a second, which few need
    if not hasattr(tensors, "DTensor"):  # torch 2.4
        tensors = import_module("torch.distributed._tensor")
    process_group.tell(what)
    mesh = process_group.mesh(rows.device)
    if mesh is None:
        return process_group.gather((rows @ matrix).cpu(), what, torch.device("cpu")).to(rows.device)
    shape, stride = (matrix.shape[0], matrix.shape[0]), (matrix.shape[0], 1)
    made, whole = tensors.DTensor.from_local, torch.Size(shape)
    left = made(rows, mesh, [tensors.Shard(0)], run_check=False, shape=whole, stride=stride)
    right = made(matrix, mesh, [tensors.Replicate()], run_check=False)
    with process_group.watched(what):
        found: Tensor = (left @ right).full_tensor()
    return found


def symmetric(matrix: Tensor) -> Tensor:
    """Without the rounding that makes it differ from its transpose."""
    return (matrix + matrix.T) / 2.0


def rows_of(size: int, parts: int, part: int) -> slice:
    """Which of so many rows a process has, as `torch.chunk` cuts them: the last ones may have fewer, or none.

    Examples:
        >>> [rows_of(10, 4, part) for part in range(4)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    each = -(-size // parts)
    return slice(min(part * each, size), min((part + 1) * each, size))


def long_sides(block: Block, largest: int) -> list[tuple[int, int]]:
    """(which side, how long) of those that are longer than the largest that is decomposed whole."""
    if block.kind != "kronecker" or block.groups > 1:
        return []
    return [(side, block.matrix_shape[side]) for side in (OUTPUTS, INPUTS) if block.matrix_shape[side] > largest]


def side_bytes(blocks: Sequence[Block], largest: int, leading: int, processes: int) -> float:
    """Bytes in each process: its rows of all factors of long sides, and what their leading directions take."""
    sizes = [size for block in blocks for _, size in long_sides(block, largest)]
    rows = sum(8.0 * -(-size // processes) * size for size in sizes)
    followed = leading + max(MORE, leading // 4)
    passing = 8.0 * max(sizes, default=0) * (5.0 * followed + ROWS)
    return rows + passing + sum(8.0 * size * leading for size in sizes)


def find_leading(
    stream: LayerGradients, largest: int, leading: int, alone: int | None, facts: list[str]
) -> dict[tuple[str, int], Leading]:
    """One pass: leading directions of all long sides, by the name of the block and the side.

    Args:
        stream: tangents of the training set.
        largest: sides up to this length are decomposed whole, elsewhere.
        leading: directions of each side.
        alone: layers with so many outputs have no basis on that side; see `Factors.empty`.
        facts: is told what is worth telling.
    """
    problem, process_group = stream.problem, stream.problem.passes.layers
    blocks = stream.known.blocks
    found = [
        (at, side, size)
        for at, block in enumerate(blocks)
        for side, size in long_sides(block, largest)
        if block.matrix_shape[OUTPUTS] != alone
    ]
    if not found:
        return {}
    sums = [LongSide.empty(at, side, size, process_group, problem.device) for at, side, size in found]
    _sum_up(stream.watching(sorted({at for at, _, _ in found})), problem, sums)
    vectors = {}
    for one in sums:
        name, kind = blocks[one.at].name, "inputs" if one.side == INPUTS else "outputs"
        count = min(leading, one.size)
        made = one.leading(count, process_group, f"the factor of the {kind} of {name}", working_precision(problem))
        vectors[name, one.side] = made
        share = float(made.values.sum()) / max(made.trace, torch.finfo(torch.float64).tiny)
        facts.append(
            f"of the {one.size} {kind} of {name} the {count} leading directions have a basis, which hold "
            f"{100 * share:.1f} % of their factor; the rest is taken as alike"
        )
    return vectors


def _sum_up(stream: LayerGradients, problem: Linearization, sums: Sequence[LongSide]) -> None:
    names = [block.name for block in stream.blocks]
    places = [names.index(stream.known.blocks[one.at].name) for one in sums]
    roots = problem.hessian_roots
    state = {f"rows.{at}@{one.first}": one.rows for at, one in enumerate(sums)}
    for where, tangents in stream.read("factors of long sides", stream.identity(), problem.k, state):
        weights = None if problem.sample_weights is None else problem.sample_weights[where]
        for one, at in zip(sums, places, strict=True):
            tangent = tangents[at]
            assert isinstance(tangent, Kronecker)
            if one.side == INPUTS:
                one.add(weighted_inputs(tangent, weights).flatten(0, -2))
            else:
                curved = tangent if roots is None else combine(tangent, roots[where])
                assert isinstance(curved, Kronecker)
                one.add(raised(curved.grads()).flatten(0, -2))
