"""Cost of a structure: bytes held in each stage of a fit, and work of each step.

Structures compute it in `cost` from the sizes of a problem. `whence.estimate` adds it up, and long fits report it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.accumulate import CHUNK_WORKSPACE, LayerGradients, examples_bytes, working_precision
from whence.data.batches import Inputs, batch_size, take
from whence.jacobian.gradients import Block
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network

SAMPLE = 32  # number of examples run to measure sizes


@dataclass(frozen=True)
class ProblemSizes:
    """The sizes that memory and time depend on."""

    n: int  # training examples
    k: int  # outputs
    q: int  # columns of the roots of the loss's Hessian; 0 for squared error
    d: int  # selected weights
    item: int  # bytes per number in the algebra
    working: int  # bytes per number in the gradients
    blocks: tuple[Block, ...]  # blocks of parameters
    limit: float  # bytes of memory allowed
    device: torch.device  # device of the computation
    layer_bytes: float  # of a chunk with the gradients of all its layers
    layer_chunk: int = 1  # examples whose gradients are held at once, layer by layer
    row_chunk: int = 1  # examples whose rows of the Jacobian are held at once
    row_bytes: float = 0.0  # of a chunk of rows of the Jacobian, and of computing it
    example_bytes: float = 0.0  # of residuals, leverages and weights of the training examples
    scratch: bool = False  # whether features that do not fit in memory are kept on disk
    entries: int = 0  # nonzero entries in an example's gradients if they are sparse: one for each tree
    dual: bool = True  # whether the kernel is allowed; it is not a sum over examples, as checkpoints need

    @property
    def numbers(self) -> int:
        """Total number of residuals, n k."""
        return self.n * self.k

    @property
    def rotations(self) -> float:
        """Operations to rotate the gradients of an example into a Kronecker basis."""
        shapes = [block.matrix_shape for block in self.blocks if block.kind == "kronecker"]
        return sum(2.0 * e * (i * i + self.k * o * o) for e, o, i in shapes)


@dataclass(frozen=True)
class Work:
    """Work of one step of a fit, or of a prediction."""

    read: float = 0.0  # examples read
    forward: float = 0.0  # examples run forward
    layers: float = 0.0  # examples whose gradients are computed layer by layer, for all outputs
    rows: float = 0.0  # examples whose rows of the Jacobian are computed
    algebra: float = 0.0  # floating-point operations in the dtype of the algebra
    working: float = 0.0  # floating-point operations in the dtype of the gradients
    cubes: float = 0.0  # sum of cubed sizes of the decomposed matrices


@dataclass(frozen=True)
class Cost:
    """Memory and work of a structure."""

    name: str  # of the structure
    stages: Mapping[str, float]  # bytes held in each stage of the fit, besides the model and the data
    steps: Mapping[str, Work]  # work of each step of the fit, once the training outputs are known
    prediction: Work  # work of one prediction
    bounded: bool = False  # whether the memory is an upper bound, since the structure chooses its size from the data
    disk: float = 0.0  # bytes of features on disk, if a folder is given for them
    certain: tuple[str, ...] = ()  # stages whose memory is exact even if `bounded`

    @property
    def least(self) -> float:
        """Lower bound of the peak memory in bytes."""
        return max(self.stages[stage] for stage in (self.certain if self.bounded else self.stages))

    @property
    def memory(self) -> float:
        """Peak memory in bytes."""
        return max(self.stages.values())


def measure_sizes(
    problem: Linearization, stream: LayerGradients | None, first: Inputs, n: int, batch: int
) -> ProblemSizes:
    """Sizes of a problem with n examples, measured on a few; without `stream`, no sizes of layers."""
    roots = problem.hessian_roots
    k, d, item = problem.k, problem.selection.size, problem.outputs.element_size()
    q = 0 if roots is None else roots.shape[2]
    working = torch.finfo(working_precision(problem)).bits // 8
    graph = saved_bytes(problem.network, first)
    row_chunk, layer_chunk, layer_bytes = min(problem.jacobian().chunk(k), batch), 0, 0.0
    if stream is not None:
        layer_chunk = min(stream.chunk_size(k, batch), batch)
        layer_bytes = layer_chunk * (CHUNK_WORKSPACE * stream.sizes.example(k) + graph + k * stream.sizes.workspace)
    return ProblemSizes(
        n=n,
        k=k,
        q=q,
        d=d,
        item=item,
        working=working,
        blocks=() if stream is None else stream.blocks,
        limit=problem.budget.limit,
        device=problem.device,
        layer_bytes=layer_bytes,
        layer_chunk=layer_chunk,
        row_chunk=row_chunk,
        row_bytes=row_chunk * (k * d * (working + 2.0 * item) + (1.0 + k) * graph),
        example_bytes=examples_bytes(n, k, q, item),
        entries=first["leaves"].shape[1] if isinstance(problem.network.model, LeafSum) else 0,
    )


def saved_bytes(network: Network, inputs: Inputs) -> float:
    """Bytes per example that a forward pass saves for backward, outputs included."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    few = take(inputs, slice(0, SAMPLE))
    own = {p.untyped_storage().data_ptr() for p in network.model.parameters()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(network(few))
    return sum(size for place, size in held.items() if place not in own) / batch_size(few, "this batch")


def total_seconds(work: Work, unit_seconds: Work) -> float:
    """Seconds of some work, given the seconds for one unit of each kind of work."""
    return sum(float(vars(work)[kind] * seconds) for kind, seconds in vars(unit_seconds).items())


def step_seconds(cost: Cost, n: int, unit_seconds: Work) -> dict[str, float]:
    """Seconds of every step of a fit to n examples."""
    steps = {"outputs": Work(read=n, forward=n), **cost.steps}
    return {name: total_seconds(work, unit_seconds) for name, work in steps.items()}


def usual_seconds(k: int, reading: float, forward: float) -> Work:
    """Seconds for one unit of each kind of work on an ordinary core, from k outputs and measured times."""
    layers, rows = (1.0 + k) * forward, (1.0 + 2.0 * k) * forward
    return Work(reading, forward, layers, rows, algebra=1 / 4e10, working=1 / 8e10, cubes=3e-10)
