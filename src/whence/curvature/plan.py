"""The least memory of a fit with very many weights, and what would fit instead: known before its first pass."""

from __future__ import annotations

import math
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
SMALLEST = 256  # features of the smallest suggested sketch
MOST_NAMED = 6  # most layers listed one by one
LAYER = re.compile(r"^(.*?\.\d+)\.")  # the part of a parameter's name that identifies one of many equal layers


def keeps_all_directions(device: torch.device, positions: int, blocks: Sequence[Block]) -> bool:
    """Whether no layer's basis will be truncated, as on a GPU with many positions; see `truncate`."""
    sides = [block.matrix_shape[2] for block in blocks if block.kind == "kronecker"]
    return device.type == "cuda" and positions > 1 and INPUTS_PER_POSITION * positions > max(sides, default=0)


def low_rank(blocks: Sequence[Block]) -> list[Block]:
    """The blocks of low-rank factors added to every layer, as in LoRA."""
    found = []
    for block in blocks:
        if block.kind == "kronecker":
            _, o, i = block.matrix_shape
            shapes = {f"{block.name}.A": (RANK, i), f"{block.name}.B": (o, RANK)}
            found += [Block(name, (name,), (shape,), "kronecker") for name, shape in shapes.items()]
    return found


def require_plan(
    structure: Structure,
    network: Network,
    selection: Selection,
    first: Inputs,
    columns: int,
    positions: int,
    n: int,
    budget: Budget,
) -> str:
    """Raise if a fit of n examples with this many columns cannot fit in memory, and say what would.

    The plan counts sums as large as the weights, which fewer data do not make smaller, and one example with its graph,
    outputs and gradients. Returns what takes half as much, in case the device still runs out of memory, or nothing.
    """
    if not isinstance(structure, AdditiveStructure):
        return ""
    tables = {id(module.weight) for module in network.model.modules() if isinstance(module, nn.Embedding)}
    blocks, item = dict[str, Block](), 4
    for name, one in selection.parameters.items():
        kind: Kind = "rows" if id(one) in tables else "kronecker" if one.ndim > 1 else "dense"  # a guess
        blocks[name] = Block(name, (name,), (tuple(one.shape),), kind)
        item = max(item, one.element_size())
    example = (1.0 + columns / 2) * saved_bytes(network, take(first, slice(0, 1)))
    sizes = ProblemSizes(
        n=n,
        k=columns,
        q=columns - 1,
        d=selection.size,
        item=8,
        working=item,
        blocks=tuple(blocks.values()),
        limit=budget.limit,
        device=network.device,
        layer_bytes=example,
    )

    def cost(structure: Structure, blocks: Sequence[Block]) -> Cost:
        return structure.cost(replace(sizes, d=sum(one.numel for one in blocks), blocks=tuple(blocks)))

    whole = cost(structure, sizes.blocks)
    need = whole.memory if keeps_all_directions(network.device, positions, sizes.blocks) else whole.least
    fits, shorter = budget.fits(need), "shorter sequences, gradient checkpointing, weights of half the precision"
    limit = 0.5 * whole.memory if fits else budget.limit
    ways = ", or ".join(_ways_out(structure, blocks, lambda one, some: cost(one, some).memory <= limit))
    if fits:
        return f"By the plan this takes at most half as much: {ways or shorter}."
    if not budget.fits(example):
        instead = f"Use {shorter}, or fewer columns (hessian_columns=...): one example takes {readable(example)}."
    else:
        instead = f"What would fit: {ways}." if ways else "Use a device with more memory, or a smaller model."
    raise TooLargeError(
        f"expected a fit by {structure.name} of {selection.size:,} weights to fit in {readable(budget.limit)}, but it "
        f"takes {readable(need)} at least. {instead} More processes share the data, not these sums."
    )


def _ways_out(
    structure: Structure, blocks: Mapping[str, Block], fits: Callable[[Structure, Sequence[Block]], bool]
) -> Iterator[str]:
    """Say in words what takes less memory and fits."""
    every = list(blocks.values())
    size = getattr(structure, "size", None) or 4096
    for other in (Sketch, Core):
        sizes = [2**power for power in range(int(math.log2(size)), int(math.log2(SMALLEST)) - 1, -1)]
        found = next((one for one in sizes if other(size=one) != structure and fits(other(size=one), every)), None)
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
    small = low_rank(every)
    if small and fits(structure, small):
        weights = sum(block.numel for block in small)
        yield f"LoRA of rank {RANK} ({weights:,} weights; all others with requires_grad=False)"
