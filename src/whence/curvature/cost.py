"""What a structure costs: bytes held in each stage of a fit, work of each step, from the sizes of a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from whence.curvature.kronecker import LARGEST_SIDE
from whence.curvature.primal import CACHE_SHARE, QR_SIZE
from whence.curvature.stream import PIECES
from whence.jacobian.gradients import Block

SUMS = 26.0
"""Sums, weights and what is made on the way to them, in float64 numbers for each coordinate that is kept."""

WHOLE = 5.0
"""Scores and steps, in float64 numbers for each weight."""


@dataclass(frozen=True)
class ProblemSizes:
    """What memory and time depend on.

    Attributes:
        n: training examples.
        k: outputs.
        q: columns of the roots of the loss's Hessian; 0 for squared error.
        d: selected weights.
        item: bytes of a number of the algebra.
        working: bytes of a number of the gradients.
        batch: examples in the largest batch.
        chunk: examples whose rows are held at once.
        piece: examples whose layers are held at once.
        work: bytes that are computed on the way from the layers of one example.
        layers: bytes of an example's activations and output gradients, all cotangents together.
        graph: bytes that a forward pass keeps for an example.
        blocks: of parameters.
        limit: bytes that may be taken.
        device: where it is computed.
        sums_only: whether all passes must be sums over examples, as with a checkpoint.
    """

    n: int
    k: int
    q: int
    d: int
    item: int
    working: int
    batch: int
    chunk: int
    piece: int
    work: float
    layers: float
    graph: float
    blocks: tuple[Block, ...]
    limit: float
    device: torch.device
    sums_only: bool = False

    @property
    def numbers(self) -> int:
        """Residuals in all, n k."""
        return self.n * self.k

    @property
    def example_bytes(self) -> float:
        """Residuals, leverages and weights of the training examples."""
        return examples_bytes(self.n, self.k, self.q, self.item)

    @property
    def layer_bytes(self) -> float:
        """A chunk of a batch with the gradients of all its layers."""
        return self.piece * (PIECES * self.layers + self.graph + self.work)

    @property
    def row_bytes(self) -> float:
        """A chunk of rows of the Jacobian, and the passes that make it."""
        rows = self.chunk * self.k * self.d * (self.working + 2.0 * self.item)
        return rows + self.chunk * (1.0 + self.k) * self.graph

    @property
    def rotations(self) -> float:
        """Operations to bring the gradients of an example into a Kronecker basis."""
        shapes = [block.matrix_shape for block in self.blocks if block.kind == "kronecker"]
        return sum(2.0 * e * (i * i + self.k * o * o) for e, o, i in shapes)


@dataclass(frozen=True)
class Work:
    """Work of a step of a fit, or of a prediction.

    Attributes:
        read: examples that are read.
        forward: examples that are run forward.
        layers: examples whose gradients are computed layer by layer, for all outputs.
        rows: examples whose rows of the Jacobian are computed.
        algebra: floating-point operations in the dtype of the algebra.
        working: floating-point operations in the dtype of the gradients.
        cubes: sizes of the matrices that are decomposed, cubed and summed.
    """

    read: float = 0.0
    forward: float = 0.0
    layers: float = 0.0
    rows: float = 0.0
    algebra: float = 0.0
    working: float = 0.0
    cubes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Memory and work of a structure.

    Attributes:
        name: of the structure.
        stages: bytes held at once in each stage of the fit, beside the model and the data.
        steps: work of each step of the fit, after the outputs of the training examples are there.
        prediction: work of one prediction.
        bounded: whether the memory is an upper bound, since the structure chooses its size from the data.
    """

    name: str
    stages: Mapping[str, float]
    steps: Mapping[str, Work]
    prediction: Work
    bounded: bool = False

    @property
    def memory(self) -> float:
        """Bytes at the peak."""
        return max(self.stages.values())


def factor_bytes(blocks: Sequence[Block], largest_exact: int) -> tuple[float, float]:
    """Bytes of all Kronecker factors, in float64, and of the largest one."""
    each = []
    for block in blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * side**2 for side in shape[1:] if side <= LARGEST_SIDE]
        elif block.kind == "rows" or block.numel <= largest_exact:
            each.append(shape[-1] ** 2)
    return 8.0 * sum(each), 8.0 * max(each, default=0)


def decomposition_bytes(blocks: Sequence[Block], largest_exact: int) -> float:
    """All factors, the eigenvectors of those that are decomposed, and the workspace for the largest."""
    total, largest = factor_bytes(blocks, largest_exact)
    return 2.0 * total + 4.0 * largest


def sums_bytes(kept: float, size: int, working: int) -> float:
    """Everything of the size of the weights, for so many coordinates kept of so many weights."""
    return (SUMS + 6.0 * (working == 8)) * 8.0 * kept + WHOLE * 8.0 * size


def examples_bytes(n: int, k: int, q: int, item: int) -> float:
    """Residuals, leverages and weights of n training examples with k outputs and q columns of the Hessian's root."""
    blocks = 8.0 if q else 3.5  # roots of Hessians and of the noise, leverage blocks, their inverses
    return item * n * (12.0 * k + blocks * k * max(k, q))


# --- The exact structure ----------------------------------------------------------------------------------------------


def primal_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Of the d x d curvature."""
    square = float(sizes.d) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = _in_cache(rows, sizes.limit - 9.0 * square)
    read = sizes.n * (1.0 if kept else 4.0)
    return Cost(
        name,
        stages=_algebra_stages(sizes, sizes.d, rows if kept else 0.0, sizes.row_bytes),
        steps={"rows": Work(read=read, rows=read), "algebra": Work(algebra=_algebra_operations(sizes, sizes.d))},
        prediction=Work(rows=1.0, forward=1.0, algebra=12.0 * sizes.k * float(sizes.d) ** 2),
    )


def dual_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Of the kernel, n k x n k."""
    inner = float(sizes.n * max(sizes.k, sizes.q))
    kernel = inner**2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = _in_cache(rows, sizes.limit - 5.0 * kernel)
    held = rows if kept else 0.0
    assembling = 2.0 * rows if kept else 2.0 * 0.2 * sizes.limit
    blocks = 0.0 if kept else max(1.0, rows / (0.2 * sizes.limit))  # rows are read again for every block of the kernel
    again = 0.0 if kept else sizes.n / 100.0  # a pass for a hundred predictions or so
    read = sizes.n * (1.0 + blocks)
    return Cost(
        name,
        stages={
            "rows and kernel": max(assembling, held + sizes.row_bytes) + kernel,
            "factor and leverages": held + (10.5 if sizes.q else 5.0) * kernel + sizes.example_bytes,
        },
        steps={
            "rows": Work(read=read, rows=read),
            "kernel": Work(algebra=2.0 * sizes.numbers**2 * sizes.d),
            "algebra": Work(algebra=(8.0 if sizes.q else 3.0) * inner**3),
        },
        prediction=Work(
            read=again,
            rows=1.0 + again,
            forward=1.0,
            algebra=2.0 * sizes.k * sizes.numbers * (sizes.d + 2.0 * inner),
        ),
    )


def matrix_free_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Of solves by conjugate gradients, each of which takes tens of passes over the data."""

    def solves(count: float) -> Work:
        return Work(read=50.0 * sizes.n * count, rows=100.0 * sizes.n * count)

    memory = 8.0 * sizes.chunk * sizes.k * sizes.d * sizes.item + sizes.row_bytes + sizes.example_bytes
    steps = {"solves": solves(sizes.numbers / sizes.chunk)}
    return Cost(name, stages={"solves": memory}, steps=steps, prediction=solves(sizes.k))


# --- Structures of layers ---------------------------------------------------------------------------------------------


def diagonal_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Of sums of squares, without a basis."""
    memory = sums_bytes(sizes.d, sizes.d, sizes.working) + sizes.layer_bytes + sizes.example_bytes
    steps, prediction = _spectral_work(sizes, rotations=0.0)
    return Cost(name, stages={"sums and weights": memory}, steps=steps, prediction=prediction)


def kronecker_cost(
    sizes: ProblemSizes, name: str, largest_exact: int, two_bases: bool = False, bounded: bool = False
) -> Cost:
    """Of Kronecker factors and sums of squares in their eigenbasis; the meats may have a basis of their own."""
    bases = factor_bytes(sizes.blocks, largest_exact)[0] * sizes.working / 8
    sums = sums_bytes(sizes.d, sizes.d, sizes.working)
    if two_bases:
        bases, sums = 3.0 * bases, sums + 8.0 * 4 * sizes.d
    stages = _factor_stages(sizes, largest_exact)
    stages["sums and weights"] = bases + sums + sizes.layer_bytes + sizes.example_bytes
    steps, prediction = _spectral_work(sizes, sizes.rotations)
    return Cost(name, stages, {**_factor_steps(sizes, largest_exact), **steps}, prediction, bounded)


def _factor_stages(sizes: ProblemSizes, largest_exact: int) -> dict[str, float]:
    return {
        "factors": factor_bytes(sizes.blocks, largest_exact)[0] + sizes.layer_bytes,
        "eigenvectors": decomposition_bytes(sizes.blocks, largest_exact),
    }


def _factor_steps(sizes: ProblemSizes, largest_exact: int) -> dict[str, Work]:
    cubes = 0.0
    for block in sizes.blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            cubes += shape[0] * (float(shape[1]) ** 3 + float(shape[2]) ** 3)
        elif block.kind == "rows" or block.numel <= largest_exact:
            cubes += float(shape[-1]) ** 3
    factors = Work(read=sizes.n, layers=sizes.n, working=sizes.n * sizes.rotations)
    return {"factors": factors, "eigenvectors": Work(cubes=cubes)}


def _spectral_work(sizes: ProblemSizes, rotations: float) -> tuple[dict[str, Work], Work]:
    """Steps of the fit, and a prediction."""
    squares = 2.0 * sizes.k * sizes.d

    def a_pass(sets: float) -> Work:
        return Work(read=sizes.n, layers=sizes.n, working=sizes.n * (rotations + sets * squares))

    steps = {"eigenvalues": a_pass(2.0), "leverages and meats": a_pass(1.0 + 3.0 / sizes.k)}
    return steps, Work(layers=1.0, working=rotations + 7.0 * squares)


# --- Exact algebra on features ----------------------------------------------------------------------------------------


def core_cost(sizes: ProblemSizes, name: str, r: int, largest_exact: int) -> Cost:
    """Of the exact algebra on r coordinates of the Kronecker eigenbasis, at most."""
    bases = factor_bytes(sizes.blocks, largest_exact)[0] * sizes.working / 8
    stages = _factor_stages(sizes, largest_exact)
    stages["eigenvalues"] = bases + 10.0 * 8 * sizes.d + sizes.layer_bytes
    steps = {**_factor_steps(sizes, largest_exact), "eigenvalues": _feature_rows(sizes, sizes.n, sizes.n)}
    found = sketch_cost(sizes, name, r, bases)
    return Cost(name, {**stages, **found.stages}, {**steps, **found.steps}, found.prediction, bounded=True)


def sketch_cost(sizes: ProblemSizes, name: str, r: int, bases: float | None = None) -> Cost:
    """Of the exact algebra on r features, whose bases take so many bytes: those of random projections, if not given."""
    if bases is None:
        bases = sum(math.sqrt(block.numel) for block in sizes.blocks) * math.sqrt(r) * sizes.working
    kept = _in_cache(float(sizes.numbers) * r * sizes.item, sizes.limit - 9.0 * r * r * 8)
    rows = float(sizes.numbers) * r * sizes.working if kept else 0.0
    chunk = sizes.layer_bytes + 3.0 * sizes.piece * sizes.k * r * sizes.working
    read = sizes.n * (1.0 if kept else 4.0)
    return Cost(
        name,
        stages={stage: bases + size for stage, size in _algebra_stages(sizes, r, rows, chunk).items()},
        steps={"rows": _feature_rows(sizes, read, read), "algebra": Work(algebra=_algebra_operations(sizes, r))},
        prediction=_feature_rows(sizes, 0.0, 1.0, algebra=12.0 * sizes.k * float(r) ** 2),
    )


def _feature_rows(sizes: ProblemSizes, read: float, examples: float, algebra: float = 0.0) -> Work:
    """Features of some examples."""
    each = sizes.rotations + 2.0 * sizes.k * sizes.d
    return Work(read=read, layers=examples, working=examples * each, algebra=algebra)


def _algebra_stages(sizes: ProblemSizes, r: int, rows: float, chunk: float) -> dict[str, float]:
    """Stages of the algebra on r features, of which `rows` bytes stay in memory, and `chunk` bytes pass."""
    square = float(r) ** 2 * sizes.item
    tall = (sizes.n * (sizes.q or sizes.k) + r) * float(r) * sizes.item
    factor = 2.6 * tall + 3.0 * square if rows and r <= QR_SIZE else 6.0 * square
    return {
        "rows and curvature": rows + 2.0 * square + chunk,
        "factor": rows + factor,
        "leverages and meats": rows + 7.0 * square + chunk + sizes.example_bytes,
    }


def _algebra_operations(sizes: ProblemSizes, r: int) -> float:
    """Operations of the algebra on r features, beside the rows."""
    tall = 2.0 * sizes.numbers * float(r) ** 2
    return tall * (5.0 + (sizes.k + 3.0) / sizes.k) + 2.0 * float(r) ** 3


def _in_cache(rows: float, limit: float) -> bool:
    """Whether rows of the training set stay in memory."""
    return rows <= CACHE_SHARE * max(limit, 0.0)
