"""What a fit by several processes takes: memory, operations and traffic, counted from the sizes of the layers.

For EKFAC with all eigenvalues (`tolerance=0`) on linear layers seen at several positions, as those of a transformer.
`benchmarks.distributed` compares with measurements at small sizes, and tells what a large model would take.
"""

from __future__ import annotations

from dataclasses import dataclass

from whence.curvature.accumulate import CHUNK_BYTES, LARGEST_SIDE, SUMS_PER_COORDINATE, SUMS_PER_WEIGHT
from whence.runtime.processes import shared_out

PIECES = 3.5
"""A piece, and what is made of it."""

ESTIMATORS = 3
"""Heteroscedastic meats: HeC0, HeC2, HeC3."""


@dataclass(frozen=True)
class Layer:
    """A linear layer: outputs, inputs."""

    o: int
    i: int

    @property
    def weights(self) -> int:
        return self.o * self.i

    @property
    def sides(self) -> list[int]:
        """Those that have a factor."""
        return [side for side in (self.o, self.i) if side <= LARGEST_SIDE]

    @property
    def factors(self) -> int:
        """Numbers in its factors."""
        return sum(side**2 for side in self.sides)


@dataclass(frozen=True)
class Task:
    """A network and its data.

    Attributes:
        layers: linear layers, the small rest left out.
        positions: tokens of an example.
        examples: how many.
        looks: outputs, or mixtures of outputs, that are pulled back in each example.
        squared: squared error of several outputs, whose noise takes sums of its own.
        weight_bytes: of the network's own weights.
        working: bytes of the numbers in which gradients are handled.
    """

    layers: tuple[Layer, ...]
    positions: int
    examples: int
    looks: int
    squared: bool
    weight_bytes: int = 4
    working: int = 4

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers)


@dataclass(frozen=True)
class Crew:
    """How many processes share the data, and how many the layers: as many as the product of both in all."""

    data: int = 1
    layers: int = 1


def owned(task: Task, process_group: Crew) -> list[list[Layer]]:
    """Which layers each of those who share them has."""
    owners = shared_out([layer.weights * (layer.o + layer.i) for layer in task.layers], process_group.layers)
    pairs = list(zip(task.layers, owners, strict=True))
    return [[layer for layer, owner in pairs if owner == rank] for rank in range(process_group.layers)]


def passing(task: Task, process_group: Crew, batch: int, device: str) -> float:
    """Bytes of the layers' inputs and output gradients of one piece of a batch, and of what is made of them."""
    widths = [sum(layer.i + task.looks * layer.o for layer in layers) for layers in owned(task, process_group)]
    each = 4.0 * task.positions * max(widths)
    return PIECES * max(each, min(batch * each, float(CHUNK_BYTES[device])))


def memory(task: Task, process_group: Crew) -> float:
    """Bytes that the fullest process holds beside the network, the data and the pieces of batches that pass."""
    found = []
    for layers in owned(task, process_group):
        factors = sum(layer.factors for layer in layers)
        largest = max(side**2 for layer in layers for side in layer.sides)
        weights = sum(layer.weights for layer in layers)
        decomposing = 8.0 * (2.0 * factors + 4.0 * largest)
        extra = 6.0 * (task.working == 8)
        summing = task.working * factors + 8.0 * ((SUMS_PER_COORDINATE + extra) * weights + SUMS_PER_WEIGHT * weights)
        found.append(max(decomposing, summing))
    return max(found)


def traffic(task: Task, process_group: Crew) -> dict[str, float]:
    """Bytes that the busiest process hands over to be added up or sent, by what they are."""
    n, c = task.examples, task.looks
    leverage_blocks = 8.0 * n * (c * c + c)
    found = {"leverages of layers": leverage_blocks / process_group.data} if process_group.layers > 1 else {}
    if process_group.data == 1:
        return found
    most = owned(task, process_group)
    factors = max(sum(layer.factors for layer in layers) for layers in most)
    weights = max(sum(layer.weights for layer in layers) for layers in most)
    sums = (3 if task.squared and c > 1 else 2) + ESTIMATORS + 1
    return {
        **found,
        "factors": 8.0 * factors,
        "eigenvectors": float(task.working * factors),
        "sums": 8.0 * sums * weights,
        "leverages": leverage_blocks,
        "outputs": 8.0 * n * (1 + 2 * c + (0 if task.squared else c * c)),
    }


def operations(task: Task, process_group: Crew) -> dict[str, float]:
    """Multiplications and additions of the busiest process, by what they are for."""
    t, c, n = task.positions, task.looks, task.examples
    network = 2.0 * t * task.weights * (4 + 3 * c) * n  # four times forward, three times back
    parts = [n * sum(_curvature(layer, t, c) for layer in layers) for layers in owned(task, process_group)]
    return {"network": network / process_group.data, "curvature": max(parts) / process_group.data}


def eigen_sizes(task: Task, process_group: Crew) -> list[int]:
    """Sides of the factors that the busiest process decomposes."""
    found: list[list[int]] = []
    for layers in owned(task, process_group):
        owners = shared_out([float(sum(side**3 for side in layer.sides)) for layer in layers], process_group.data)
        pairs = list(zip(layers, owners, strict=True))
        found += [
            [s for layer, owner in pairs if owner == rank for s in layer.sides] for rank in range(process_group.data)
        ]
    return max(found, key=lambda sides: sum(side**3 for side in sides))


def _curvature(layer: Layer, t: int, c: int) -> float:
    """Of one example: factors, eigenvalues, leverages and meats."""
    o, i = layer.o, layer.i
    above, below = float(o <= LARGEST_SIDE), float(i <= LARGEST_SIDE)
    factors = 2.0 * t * (below * i * i + above * c * o * o)
    early = 2.0 * (below * t * i * i + above * c * t * o * o + c * t * o * i)
    late = 2.0 * (c * t * o * i + c * (above * o * o * i + below * o * i * i))
    turned = min(early, late) if above * below else early
    squares = 4.0 * c * o * i
    meats = 2.0 * t * o * c * ESTIMATORS + 2.0 * t * o * i * ESTIMATORS + 2.0 * o * i * ESTIMATORS
    return factors + 2.0 * turned + squares + 2.0 * c * c * o * i + 2.0 * c * o * i + meats


def transformer(width: int, hidden: int, depth: int, vocabulary: int) -> tuple[Layer, ...]:
    """Attention with four square layers, a gated network of three, and the last layer over the vocabulary."""
    square = [Layer(width, width)] * 4
    gated = [Layer(hidden, width), Layer(hidden, width), Layer(width, hidden)]
    return (*([*square, *gated] * depth), Layer(vocabulary, width))
