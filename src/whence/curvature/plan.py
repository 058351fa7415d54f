"""The least memory of a fit with very many weights, and what would fit instead: known before its first pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from whence.curvature.base import AdditiveStructure, Structure
from whence.curvature.core import Core, Sketch
from whence.curvature.cost import Cost, ProblemSizes, saved_bytes
from whence.curvature.ekfac import EKFAC
from whence.curvature.kronecker import INPUTS_PER_POSITION
from whence.data.batches import Inputs, take
from whence.errors import TooLargeError
from whence.jacobian.gradients import Block, Kind
from whence.jacobian.network import Network, Selection
from whence.runtime.memory import Budget, readable

RANK = 8  # of the suggested low-rank factors
SIZES = (4096, 2048, 1024, 512, 256)  # of the suggested sketches and cores
MOST_NAMED = 6  # most layers listed one by one
LAYER = re.compile(r"^(.*?\.\d+)\.")  # the part of a parameter's name that identifies one of many equal layers


def keeps_all_directions(device: torch.device, positions: int, blocks: Sequence[Block]) -> bool:
    """Whether no layer's basis will be truncated, as on a GPU with many positions; see `truncate`."""
    sides = [block.matrix_shape[2] for block in blocks if block.kind == "kronecker"]
    return device.type == "cuda" and positions > 1 and INPUTS_PER_POSITION * positions > max(sides, default=0)


def require_plan(
    structure: Structure,
    network: Network,
    selection: Selection,
    first: Inputs,
    columns: int,
    positions: int,
    n: int,
    budget: Budget,
) -> None:
    """Raise if a fit of n examples with this many columns cannot fit in memory, and say what would.

    The plan counts sums as large as the weights, which fewer data do not make smaller, and one example with its graph,
    outputs and gradients.
    """
    if not isinstance(structure, AdditiveStructure):
        return
    tables = {id(module.weight) for module in network.model.modules() if isinstance(module, nn.Embedding)}
    blocks = dict[str, Block]()
    for name, one in selection.parameters.items():
        kind: Kind = "rows" if id(one) in tables else "kronecker" if one.ndim > 1 else "dense"  # a guess
        blocks[name] = Block(name, (name,), (tuple(one.shape),), kind)
    example = (1.0 + columns / 2) * saved_bytes(network, take(first, slice(0, 1)))
    working = max(4, *(one.element_size() for one in selection.parameters.values()))
    sizes = ProblemSizes(
        n, columns, columns - 1, selection.size, 8, working, budget.limit, network.device, layer_bytes=example
    )

    def cost(structure: Structure, some: Sequence[Block]) -> Cost:
        return structure.cost(replace(sizes, d=sum(one.numel for one in some), blocks=tuple(some)))

    every = list(blocks.values())
    whole = cost(structure, every)
    need = whole.memory
    if whole.least is not None and not keeps_all_directions(network.device, positions, every):
        need = whole.least
    if budget.fits(need):
        return
    ways = ", or ".join(_ways_out(structure, blocks, lambda one, some: budget.fits(cost(one, some).memory)))
    instead = f"What would fit: {ways}." if ways else "Use a device with more memory, or a smaller model."
    if not budget.fits(example):
        instead = (
            "Use shorter sequences, gradient checkpointing, weights of half the precision, or fewer columns "
            f"(hessian_columns=...): one example takes {readable(example)}."
        )
    raise TooLargeError(
        f"expected a fit by {structure.name} of {selection.size:,} weights to fit in {readable(budget.limit)}, but it "
        f"takes {readable(need)} at least. {instead} More processes share the data, not these sums."
    )


def _ways_out(
    structure: Structure, blocks: Mapping[str, Block], fits: Callable[[Structure, Sequence[Block]], bool]
) -> Iterator[str]:
    """Say in words what takes less memory and fits."""
    every = list(blocks.values())
    sizes = [size for size in SIZES if size <= (getattr(structure, "size", None) or SIZES[0])]
    for other in (Sketch, Core):
        found = next((size for size in sizes if other(size=size) != structure and fits(other(size=size), every)), None)
        if found is not None:
            yield f"structure=whence.{other.__name__}(size={found})"
    if type(structure) not in (Sketch, Core, EKFAC) and fits(EKFAC(), every):
        yield "structure=whence.EKFAC()"
    layer_of = {name: match.group(1) for name in blocks if (match := LAYER.match(name))}
    names = list(dict.fromkeys(layer_of.values()))
    for count in range(len(names) - 1, 0, -1):
        if fits(structure, [blocks[name] for name, layer in layer_of.items() if layer in names[-count:]]):
            patterns = ", ".join(repr(f"{name}.*") for name in names[-count:])
            which = f"parameters=[{patterns}]" if count <= MOST_NAMED else f"from {names[-count]} on"
            yield f"the last {count} of {len(names)} layers ({which})"
            break
    sides = [block.matrix_shape[1:] for block in every if block.kind == "kronecker"]
    shapes = [shape for o, i in sides for shape in ((RANK, i), (o, RANK))]
    if shapes and fits(structure, [Block("LoRA", ("LoRA",), (shape,), "kronecker") for shape in shapes]):
        weights = RANK * sum(o + i for o, i in sides)
        yield f"LoRA of rank {RANK} ({weights:,} weights; all others with requires_grad=False)"
