"""Time of each structure: passes over the data from a small batch that is measured, algebra from counted operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from whence.curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.kronecker.projected import primal_bytes
from whence.curvature.kronecker.stream import LayerStream, working_precision
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.linearization import Linearization

from .needs import core_size, keeps_rows, road_of
from .sizes import SAMPLE, Sizes

Steps = dict[str, float]

PRODUCT = 384
"""Size of the matrices whose products and eigenvectors are timed."""


@dataclass(frozen=True)
class Speed:
    """What this machine does with this model.

    Attributes:
        reading: seconds to read an example.
        forward: seconds of a forward pass for an example.
        layers: seconds to get the tangents of an example, layer by layer, all outputs.
        rows: seconds to get its rows of the Jacobian.
        algebra: operations a second in the dtype of the algebra.
        working: operations a second in the dtype of the gradients.
        eigen: seconds for eigenvectors, over the cube of the size.
    """

    reading: float
    forward: float
    layers: float
    rows: float
    algebra: float
    working: float
    eigen: float


def measure_speed(problem: Linearization, stream: LayerStream, inputs: Inputs, reading: float) -> Speed:
    """Run a few examples, and a few products of matrices."""
    few = take(inputs, slice(0, SAMPLE))
    size = batch_size(few, "this batch")
    k, jacobian = problem.k, problem.jacobian()

    def pull() -> None:
        for _, tangents, _ in stream.of(few, 0, stream.identity(), k):
            for tangent in tangents:
                tangent.materialize() if tangent.block.kind == "dense" else None

    def rows() -> None:
        for _ in jacobian.rows(take(few, slice(0, 8)), k):
            pass

    eye = torch.eye(PRODUCT, dtype=torch.float64, device=problem.device)
    other = eye + eye.roll(1, 0) + eye.roll(1, 1)
    return Speed(
        reading=reading,
        forward=clocked(lambda: problem.network(few), problem.device) / size,
        layers=clocked(pull, problem.device) / size,
        rows=clocked(rows, problem.device) / min(size, 8),
        algebra=_rate(other.to(problem.dtype)),
        working=_rate(other.to(working_precision(problem))),
        eigen=clocked(lambda: torch.linalg.eigh(other), problem.device) / PRODUCT**3,
    )


def clocked(work: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Seconds, the best of a few, after one for warming up."""
    best = float("inf")
    for _ in range(times + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(matrix: torch.Tensor) -> float:
    return 2.0 * PRODUCT**3 / clocked(lambda: matrix @ matrix, matrix.device)


def steps_of(structure: Structure, sizes: Sizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    """Seconds of every step of the fit, and for a thousand predictions."""
    outputs = sizes.n * (speed.reading + speed.forward)
    if isinstance(structure, Exact):
        road = road_of(structure, sizes)
        if road == "matrix_free":
            each = 50.0 * sizes.n * (speed.reading + 2.0 * speed.rows)  # a solve takes tens of passes over the data
            return {"outputs": outputs, "solves": sizes.numbers * each / sizes.chunk}, 1000.0 * sizes.k * each
        found, each = (_primal if road == "primal" else _dual)(sizes, speed, limit)
    elif isinstance(structure, (Core, Sketch)):
        found, each = _projected(structure, sizes, speed, limit)
    else:
        found, each = _spectral(structure, sizes, speed)
    return {"outputs": outputs, **found}, 1000.0 * each


def _passes(count: int, each: float, sizes: Sizes, speed: Speed) -> float:
    return count * sizes.n * (speed.reading + each)


def dense(r: int, sizes: Sizes, rate: float) -> float:
    """Seconds of the algebra on r features, beside the rows."""
    tall = 2.0 * sizes.numbers * float(r) ** 2
    weighted = (sizes.k + 3.0) / sizes.k
    return (tall * (5.0 + weighted) + 2.0 * float(r) ** 3) / rate


def _primal(sizes: Sizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    kept = keeps_rows(float(sizes.numbers) * sizes.d * sizes.item, limit - 9.0 * float(sizes.d) ** 2 * sizes.item)
    found = {
        "rows": _passes(1 if kept else 4, speed.rows, sizes, speed),
        "algebra": dense(sizes.d, sizes, speed.algebra),
    }
    return found, speed.rows + speed.forward + 12.0 * sizes.k * float(sizes.d) ** 2 / speed.algebra


def _dual(sizes: Sizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    inner = float(sizes.n * max(sizes.k, sizes.q))
    kept = keeps_rows(float(sizes.numbers) * sizes.d * sizes.item, limit - 5.0 * inner**2 * sizes.item)
    blocks = 1.0 if kept else max(1.0, sizes.numbers * sizes.d * sizes.item / (0.2 * limit))
    found = {
        "rows": _passes(1, speed.rows, sizes, speed) * (1.0 if kept else 1.0 + blocks),
        "kernel": 2.0 * sizes.numbers**2 * sizes.d / speed.algebra,
        "algebra": (3.0 if not sizes.q else 8.0) * inner**3 / speed.algebra,
    }
    reading = 0.0 if kept else sizes.n * (speed.rows + speed.reading) / 100.0  # a pass for a hundred predictions or so
    each = 2.0 * sizes.k * sizes.numbers * (sizes.d + 2.0 * inner) / speed.algebra
    return found, speed.rows + speed.forward + reading + each


def _rotations(sizes: Sizes) -> float:
    """Operations to bring the tangents of an example into a basis."""
    total = 0.0
    for block in sizes.blocks:
        if block.kind == "kronecker":
            e, o, i = block.matrix_shape
            total += 2.0 * e * (i * i + sizes.k * o * o)
    return total


def _spectral(structure: Structure, sizes: Sizes, speed: Speed) -> tuple[Steps, float]:
    turned = 0.0 if isinstance(structure, Diagonal) else _rotations(sizes)
    squares = 2.0 * sizes.k * sizes.d
    exact = structure.largest_exact if isinstance(structure, (EKFAC, KFAC)) else 0
    found: Steps = {}
    if not isinstance(structure, Diagonal):
        found["factors"] = _passes(1, speed.layers, sizes, speed) + sizes.n * turned / speed.working
        found["eigenvectors"] = _decomposing(sizes, exact, speed)
    for name, sets in (("eigenvalues", 2.0), ("leverages and meats", 1.0 + 3.0 / sizes.k)):
        work = sizes.n * (turned + sets * squares) / speed.working
        found[name] = _passes(1, speed.layers, sizes, speed) + work
    return found, speed.layers + (turned + 7.0 * squares) / speed.working


def _decomposing(sizes: Sizes, exact: int, speed: Speed) -> float:
    each = []
    for block in sizes.blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * float(shape[1]) ** 3, shape[0] * float(shape[2]) ** 3]
        elif block.kind == "rows" or block.numel <= exact:
            each.append(float(shape[-1]) ** 3)
    return speed.eigen * sum(each)


def _projected(structure: Core | Sketch, sizes: Sizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    r = core_size(structure, sizes, limit)
    turned = _rotations(sizes)
    rows = speed.layers + (turned + 2.0 * sizes.k * sizes.d) / speed.working
    kept = keeps_rows(float(sizes.numbers) * r * sizes.item, limit - primal_bytes(r))
    found: Steps = {}
    if isinstance(structure, Core):
        found["factors"] = _passes(1, speed.layers, sizes, speed) + sizes.n * turned / speed.working
        found["eigenvectors"] = _decomposing(sizes, structure.largest_exact, speed)
        found["eigenvalues"] = _passes(1, rows, sizes, speed)
    found["rows"] = _passes(1 if kept else 4, rows, sizes, speed)
    found["algebra"] = dense(r, sizes, speed.algebra)
    return found, rows + 12.0 * sizes.k * float(r) ** 2 / speed.algebra
