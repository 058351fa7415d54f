"""Memory of each structure, stage by stage: what is held at once, beside the model and the data."""

from __future__ import annotations

import math

from whence.curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.features import CACHE_SHARE
from whence.curvature.kronecker.factors import LARGEST_SIDE
from whence.curvature.kronecker.long_sides import side_bytes
from whence.curvature.kronecker.needs import decomposition_bytes, examples_bytes, factor_bytes, sums_bytes
from whence.curvature.kronecker.projected import primal_bytes
from whence.curvature.kronecker.room import PIECES
from whence.curvature.primal import QR_SIZE

from .sizes import Sizes

Stages = dict[str, float]


def of_examples(sizes: Sizes) -> float:
    """Residuals, leverages and weights of the training examples."""
    return examples_bytes(sizes.n, sizes.k, sizes.q, sizes.item)


def layers_bytes(sizes: Sizes) -> float:
    """A piece of a batch with the gradients of all its layers."""
    return sizes.piece * (PIECES * sizes.layers + sizes.graph + sizes.work)


def rows_bytes(sizes: Sizes) -> float:
    """A chunk of rows of the Jacobian, and the passes that make it."""
    return (
        sizes.chunk * sizes.k * sizes.d * (sizes.working + 2.0 * sizes.item)
        + sizes.chunk * (1.0 + sizes.k) * sizes.graph
    )


def road_of(structure: Exact, sizes: Sizes) -> str:
    """The road that "auto" takes."""
    if structure.road != "auto":
        return structure.road
    return "primal" if sizes.d <= sizes.numbers else "dual"


def core_size(structure: Core | Sketch, sizes: Sizes, limit: float) -> int:
    """Features, at most."""
    if isinstance(structure, Sketch):
        return min(structure.size, sizes.d)
    affordable = int((limit / primal_bytes(1)) ** 0.5)
    return min(structure.size or min(structure.largest, affordable), sizes.d)


def keeps_rows(rows: float, limit: float) -> bool:
    """Whether rows of the training set stay in memory."""
    return rows <= CACHE_SHARE * max(limit, 0.0)


def stages_of(structure: Structure, sizes: Sizes, limit: float) -> tuple[Stages, bool]:
    """Bytes of every stage, and whether they are an upper bound."""
    if isinstance(structure, Exact):
        road = road_of(structure, sizes)
        if road == "matrix_free":
            solves = 8.0 * sizes.chunk * sizes.k * sizes.d * sizes.item
            return {"solves": solves + rows_bytes(sizes) + of_examples(sizes)}, False
        return (_primal if road == "primal" else _dual)(sizes, limit), False
    if isinstance(structure, (Core, Sketch)):
        return _projected(structure, sizes, limit), isinstance(structure, Core)
    return _spectral(structure, sizes), isinstance(structure, EKFAC) and structure.tolerance > 0


def _primal(sizes: Sizes, limit: float) -> Stages:
    square = float(sizes.d) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = keeps_rows(rows, limit - 9.0 * square)
    return dense(sizes.d, square, rows if kept else 0.0, sizes, rows_bytes(sizes))


def dense(r: int, square: float, rows: float, sizes: Sizes, passing: float) -> Stages:
    """Stages of the algebra on r features: `rows` bytes of them stay in memory, if any."""
    tall = (sizes.n * (sizes.q or sizes.k) + r) * float(r) * sizes.item
    factor = 2.6 * tall + 3.0 * square if rows and r <= QR_SIZE else 6.0 * square
    examples = of_examples(sizes)
    return {
        "rows and curvature": rows + 2.0 * square + passing,
        "factor": rows + factor,
        "leverages and meats": rows + 7.0 * square + passing + examples,
    }


def _dual(sizes: Sizes, limit: float) -> Stages:
    inner = float(sizes.n * max(sizes.k, sizes.q)) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    passing = rows_bytes(sizes)
    kept = keeps_rows(rows, limit - 5.0 * inner)
    assembling = 2.0 * rows if kept else 2.0 * 0.2 * limit
    held = rows if kept else 0.0
    return {
        "rows and kernel": max(assembling, held + passing) + inner,
        "factor and leverages": held + (10.5 if sizes.q else 5.0) * inner + of_examples(sizes),
    }


def _spectral(structure: Structure, sizes: Sizes) -> Stages:
    passing, examples = layers_bytes(sizes), of_examples(sizes)
    sums = sums_bytes(sizes.d, sizes.d, sizes.working)
    if isinstance(structure, Diagonal):
        return {"sums and weights": sums + passing + examples}
    exact = structure.largest_exact if isinstance(structure, (EKFAC, KFAC)) else 0
    copies = 2 if isinstance(structure, EKFAC) and structure.meat == "joint" else 1
    side, long = LARGEST_SIDE, 0.0
    if isinstance(structure, EKFAC):
        side = structure.largest_side
        long = 0.0 if structure.leading is None else side_bytes(sizes.blocks, side, structure.leading, 1)
    factors = factor_bytes(sizes.blocks, exact, side)[0]
    bases = factors * sizes.working / 8
    if isinstance(structure, EKFAC) and structure.meat == "two_bases" and structure.corner is None:
        bases, sums = 3.0 * bases, sums + 8.0 * 4 * sizes.d
    return {
        "factors": copies * factors + passing + long,
        "eigenvectors": decomposition_bytes(sizes.blocks, exact, copies, side) + long,
        "sums and weights": bases + sums + passing + examples,
    }


def _projected(structure: Core | Sketch, sizes: Sizes, limit: float) -> Stages:
    r = core_size(structure, sizes, limit)
    square = float(r) ** 2 * sizes.item
    rows = float(sizes.numbers) * r * sizes.working
    held = rows if keeps_rows(float(sizes.numbers) * r * sizes.item, limit - primal_bytes(r)) else 0.0
    passing = layers_bytes(sizes) + 3.0 * sizes.piece * sizes.k * r * sizes.working
    found: Stages = {}
    if isinstance(structure, Core):
        total = factor_bytes(sizes.blocks, structure.largest_exact)[0]
        bases = total * sizes.working / 8
        found = {
            "factors": total + layers_bytes(sizes),
            "eigenvectors": decomposition_bytes(sizes.blocks, structure.largest_exact),
            "eigenvalues": bases + 10.0 * 8 * sizes.d + layers_bytes(sizes),
        }
    else:
        bases = sum(math.sqrt(block.numel) for block in sizes.blocks) * math.sqrt(r) * sizes.working
    return {**found, **{name: bases + size for name, size in dense(r, square, held, sizes, passing).items()}}
