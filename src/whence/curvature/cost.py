"""What a structure costs: bytes held in each stage of a fit, and work of each step.

A structure gives it by `cost`, from the sizes of a problem; `whence.estimate` adds it up, and a fit that lasts says it.
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

SAMPLE = 32  # examples that are run to measure


@dataclass(frozen=True)
class ProblemSizes:
    """What memory and time depend on."""

    n: int  # training examples
    k: int  # outputs
    q: int  # columns of the roots of the loss's Hessian; 0 for squared error
    d: int  # selected weights
    item: int  # bytes of a number of the algebra
    working: int  # bytes of a number of the gradients
    blocks: tuple[Block, ...]  # of parameters
    limit: float  # bytes that may be taken
    device: torch.device  # where it is computed
    layer_bytes: float  # of a chunk of a batch with the gradients of all its layers
    layer_chunk: int = 1  # examples whose gradients are held at once, layer by layer
    row_chunk: int = 1  # examples whose rows of the Jacobian are held at once
    row_bytes: float = 0.0  # of a chunk of rows of the Jacobian, and of the passes that make it
    example_bytes: float = 0.0  # of residuals, leverages and weights of the training examples
    scratch: bool = False  # whether features that do not fit in memory are kept on a disk
    entries: int = 0  # nonzero ones in the gradients of an example, where these are sparse: one for each tree
    dual: bool = True  # whether the kernel may be taken, which is no sum over examples that a checkpoint could hold

    @property
    def numbers(self) -> int:
        """Residuals in all, n k."""
        return self.n * self.k

    @property
    def rotations(self) -> float:
        """Operations to bring the gradients of an example into a Kronecker basis."""
        shapes = [block.matrix_shape for block in self.blocks if block.kind == "kronecker"]
        return sum(2.0 * e * (i * i + self.k * o * o) for e, o, i in shapes)


@dataclass(frozen=True)
class Work:
    """Work of a step of a fit, or of a prediction."""

    read: float = 0.0  # examples that are read
    forward: float = 0.0  # examples that are run forward
    layers: float = 0.0  # examples whose gradients are computed layer by layer, for all outputs
    rows: float = 0.0  # examples whose rows of the Jacobian are computed
    algebra: float = 0.0  # floating-point operations in the dtype of the algebra
    working: float = 0.0  # floating-point operations in the dtype of the gradients
    cubes: float = 0.0  # sizes of the matrices that are decomposed, cubed and summed


@dataclass(frozen=True)
class Cost:
    """Memory and work of a structure."""

    name: str  # of the structure
    stages: Mapping[str, float]  # bytes held at once in each stage of the fit, beside the model and the data
    steps: Mapping[str, Work]  # work of each step of the fit, after the outputs of the training examples are there
    prediction: Work  # work of one prediction
    bounded: bool = False  # whether the memory is an upper bound, since the structure chooses its size from the data
    disk: float = 0.0  # bytes of features on a disk, where a folder is given for them
    certain: tuple[str, ...] = ()  # of a bounded one, the stages that take what they say, whatever is chosen

    @property
    def least(self) -> float:
        """Bytes that are taken at least, at the peak."""
        return max(self.stages[stage] for stage in (self.certain if self.bounded else self.stages))

    @property
    def memory(self) -> float:
        """Bytes at the peak."""
        return max(self.stages.values())


def measure_sizes(
    problem: Linearization, stream: LayerGradients | None, first: Inputs, n: int, batch: int
) -> ProblemSizes:
    """Sizes of a problem of n examples, from one of a few; without its layers where rows of the Jacobian will do."""
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
    """Bytes that a forward pass keeps for an example, to be differentiated, and of its outputs."""
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
    """How long some work takes, from the seconds for one unit of each kind of work."""
    return sum(float(vars(work)[kind] * seconds) for kind, seconds in vars(unit_seconds).items())


def step_seconds(cost: Cost, n: int, unit_seconds: Work) -> dict[str, float]:
    """Seconds of every step of a fit to n examples."""
    steps = {"outputs": Work(read=n, forward=n), **cost.steps}
    return {name: total_seconds(work, unit_seconds) for name, work in steps.items()}


def usual_seconds(k: int, reading: float, forward: float) -> Work:
    """Seconds for one unit of each kind of work on an ordinary core, for k outputs and what was measured."""
    layers, rows = (1.0 + k) * forward, (1.0 + 2.0 * k) * forward
    return Work(reading, forward, layers, rows, algebra=1 / 4e10, working=1 / 8e10, cubes=3e-10)
