"""Cost of a structure: bytes at the peak of a fit, and its work. `whence.estimate` adds up what structures say."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.curvature.accumulate import CHUNK_WORKSPACE, LayerGradients, examples_bytes, working_precision
from whence.data.batches import Inputs, batch_size, take
from whence.jacobian.gradients import Block
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network

SAMPLE = 32  # number of examples run to measure sizes and times
FEW_ROWS = 8  # examples whose rows of the Jacobian are timed
PRODUCT = 384  # size of the matrices whose product is timed
EIGENVECTORS = 12.0  # operations of an eigendecomposition, for each cubed side


@dataclass(frozen=True)
class ProblemSizes:
    """The sizes that memory and time depend on."""

    n: int  # training examples
    k: int  # outputs
    q: int  # columns of the roots of the loss's Hessian; 0 for squared error
    d: int  # selected weights
    item: int  # bytes per number in the algebra
    working: int  # bytes per number in the gradients
    limit: float  # bytes of memory allowed
    device: torch.device  # device of the computation
    blocks: tuple[Block, ...] = ()  # blocks of parameters
    layer_chunk: int = 0  # examples whose gradients are held at once, layer by layer
    layer_bytes: float = 0.0  # of a chunk with the gradients of all its layers
    row_chunk: int = 1  # examples whose rows of the Jacobian are held at once
    row_bytes: float = 0.0  # of a chunk of rows of the Jacobian, and of computing it
    example_bytes: float = 0.0  # of residuals, leverages and weights of the training examples
    scratch: bool = False  # whether features that do not fit in memory are kept on disk
    entries: int = 0  # nonzero entries in an example's gradients if they are sparse: one for each tree
    dual: bool = True  # whether the kernel is allowed: it is no sum over examples, as checkpoints and processes need

    @classmethod
    def of(cls, problem: Linearization) -> ProblemSizes:
        """Sizes of a problem without those of its layers."""
        return cls(
            n=problem.n,
            k=problem.k,
            q=problem.root_columns,
            d=problem.selection.size,
            item=problem.outputs.element_size(),
            working=working_precision(problem).itemsize,
            limit=problem.budget.limit,
            device=problem.device,
            row_chunk=min(problem.jacobian().chunk(problem.k), problem.n),
            dual=not (problem.passes.checkpointed or problem.passes.shared),
        )

    @property
    def numbers(self) -> int:
        """Total number of residuals, n k."""
        return self.n * self.k

    @property
    def rotations(self) -> float:
        """Operations to rotate the gradients of an example into a Kronecker basis, in units of the algebra."""
        shapes = [block.matrix_shape for block in self.blocks if block.kind == "kronecker"]
        return sum(2.0 * e * (i * i + self.k * o * o) for e, o, i in shapes) * self.working / self.item

    @property
    def squares(self) -> float:
        """Operations to square and sum the gradients of an example, in units of the algebra."""
        return 2.0 * self.k * self.d * self.working / self.item


@dataclass(frozen=True)
class Cost:
    """Memory and work of a fit."""

    name: str  # of the structure
    memory: float  # bytes at the peak, besides the model and the data
    passes: float  # passes over the training data that compute gradients
    operations: float = 0.0  # floating-point operations in the dtype of the algebra
    rows: bool = False  # whether gradients are rows of the Jacobian, not layer by layer
    least: float | None = None  # lower bound of the memory, if the structure chooses its size from the data
    disk: float = 0.0  # bytes of features on disk, if a folder is given for them


def measure_sizes(
    problem: Linearization, gradients: LayerGradients | None, first: Inputs, n: int, batch: int
) -> ProblemSizes:
    """Sizes of a problem with n examples, measured on a few; trees have no layers."""
    sizes, graph = ProblemSizes.of(problem), saved_bytes(problem.network, first)
    rows = min(problem.jacobian().chunk(sizes.k), batch)
    found = replace(
        sizes,
        n=n,
        row_chunk=rows,
        row_bytes=rows * (sizes.k * sizes.d * (sizes.working + 2.0 * sizes.item) + (1.0 + sizes.k) * graph),
        example_bytes=examples_bytes(n, sizes.k, sizes.q, sizes.item),
        entries=first["leaves"].shape[1] if isinstance(problem.network.model, LeafSum) else 0,
    )
    if gradients is None:
        return found
    chunk, layers = min(gradients.chunk_size(sizes.k, batch), batch), gradients.sizes
    each = CHUNK_WORKSPACE * layers.example(sizes.k) + graph + sizes.k * layers.workspace
    return replace(found, blocks=gradients.blocks, layer_chunk=chunk, layer_bytes=chunk * each)


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


def clock_work(
    problem: Linearization, gradients: LayerGradients | None, inputs: Inputs, read: float
) -> Callable[[Cost, int], float]:
    """A function that gives the seconds of a fit to n examples by its cost, from runs of a few; `read` is for one."""
    matrix = torch.eye(PRODUCT, dtype=problem.dtype, device=problem.device).roll(1, 0)
    operation = clocked(lambda: torch.mm(matrix, matrix), problem.device) / (2.0 * PRODUCT**3)

    @functools.cache
    def example(rows: bool) -> float:
        few = take(inputs, slice(0, FEW_ROWS if rows else SAMPLE))

        def run() -> None:
            if rows or gradients is None:
                found: Iterator[object] = problem.jacobian().rows(few, problem.k)
            else:
                found = gradients.of(few, gradients.identity(), problem.k)
            for _ in found:
                pass

        return read + clocked(run, problem.device) / batch_size(few, "this batch")

    return lambda cost, n: n * cost.passes * example(cost.rows) + cost.operations * operation


def clocked(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some work, the better of two runs."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    times = []
    for _ in range(2):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times)
