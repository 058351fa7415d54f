"""The sizes of a problem, from its model and its first examples."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from whence.curvature.kronecker.stream import LayerStream, working_precision
from whence.tangents.batches import Batches, Inputs, batch_size, split, take
from whence.tangents.forms import Block
from whence.tangents.linearization import Linearization

SAMPLE = 32
"""Examples that are run to measure."""


@dataclass(frozen=True)
class Sizes:
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

    @property
    def numbers(self) -> int:
        """Residuals in all, n k."""
        return self.n * self.k


def measure_sizes(problem: Linearization, stream: LayerStream, first: Inputs, n: int, batch: int) -> Sizes:
    """Sizes of a problem of n examples, from one of a few."""
    roots = problem.hessian_roots
    k = problem.k
    return Sizes(
        n=n,
        k=k,
        q=0 if roots is None else roots.shape[2],
        d=problem.selection.size,
        item=problem.outputs.element_size(),
        working=torch.finfo(working_precision(problem)).bits // 8,
        batch=batch,
        chunk=min(problem.jacobian().chunk(k), batch),
        piece=min(stream.piece(k, batch), batch),
        work=stream.work(k),
        layers=stream.known.fixed + k * stream.known.each,
        graph=graph_bytes(problem, first),
        blocks=stream.blocks,
    )


def graph_bytes(problem: Linearization, inputs: Inputs) -> float:
    """Bytes that a forward pass keeps for an example, to be differentiated."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    few = take(inputs, slice(0, SAMPLE))
    own = {p.untyped_storage().data_ptr() for p in problem.network.model.parameters()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        problem.network(few)
    return sum(size for place, size in held.items() if place not in own) / batch_size(few, "this batch")


def count(batches: Batches) -> tuple[int, int]:
    """Training examples, and examples in the largest batch. Data that know their length are not read."""
    given = batches.loader
    if isinstance(given, DataLoader) and given.batch_size and isinstance(given.dataset, Sized):
        size = len(given.dataset)
        whole = size - size % given.batch_size if given.drop_last else size
        return whole, min(given.batch_size, whole)
    sizes = [batch_size(split(raw, f"batch {at}")[0], f"batch {at}") for at, raw in enumerate(given)]
    return sum(sizes), max(sizes)
