"""Passes over the training data: `accumulate` adds gradients, layer by layer, to sums.

An accumulator defines its zeros and how to add a chunk. This module handles everything else about a pass: how many
examples make a chunk, what happens when memory runs out, what is cached between passes and when it is freed, and how
much memory a curvature built layer by layer will take.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from whence.curvature.rotation import Basis, BasisView, formed_bytes, products_are_rounded
from whence.data.batches import Inputs, batch_size, take
from whence.errors import UncapturedParameterError
from whence.jacobian.capture import Capture
from whence.jacobian.gradients import Block, Dense, Kronecker, Tangent
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import in_half
from whence.jacobian.record import make_blocks
from whence.runtime.checkpoint import State
from whence.runtime.execution import Chunks
from whence.runtime.memory import Budget
from whence.runtime.model_state import one_thread, rounded_products

Cotangents = Callable[[slice, int], Tensor]
"""Maps a slice of the training examples and their number n to cotangents (c, n, k)."""


@dataclass(frozen=True)
class ConstantCotangents:
    """The same cotangents (c, k) for every example."""

    rows: Tensor

    def __call__(self, where: slice, n: int) -> Tensor:
        """(c, n, k)."""
        return self.rows.unsqueeze(1).expand(-1, n, -1)


class Accumulator(ABC):
    """Sums over the gradients of all layers of the training set: their zeros, and how to add a chunk."""

    label: str  # what the pass is for, shown with its progress
    cotangents: Cotangents  # vectors pulled back for every example
    count: int  # number c of cotangents
    bases: Sequence[Basis]  # of every block
    every: int = 1  # about one in this many examples is used; `where` then has a step
    state: dict[str, Tensor]  # the sums by name, zeros at first, which `add` changes in place
    given: Sequence[Tensor] = ()  # tensors the sums depend on, besides model, data, options and bases

    @abstractmethod
    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add some training examples: their gradients in every block, read by `pop_each` if they are read once."""


def pop_each(views: list[BasisView]) -> Iterator[BasisView]:
    """Yield every block, and free it when the next one is requested."""
    while views:
        yield views.pop(0)


Accumulated = TypeVar("Accumulated", bound=Accumulator)

CHUNK_BYTES = {"cpu": 48 * 2**20, "cuda": 24 * 2**30}  # most bytes of a chunk's activations and output gradients
CHUNKS_PER_BATCH = 3  # at least, on a CPU: the results of a chunk are larger than the chunk
LEAST_BYTES = 12 * 2**20  # no chunk is made smaller than this by CHUNKS_PER_BATCH
LEAST_EXAMPLES = 8  # in a chunk, if they take at most 4 CHUNK_BYTES: products of few rows are slow
CHUNK_SHARE = 0.18  # largest share of the memory budget for a chunk
LEAST_CHUNK_SHARE = 0.07  # share of the memory budget that chunks always get
CHUNK_WORKSPACE = 3.6  # peak memory while a chunk is added, the chunk itself included, in units of the chunk
UNFRAGMENTED = 0.7  # share of a tight budget that tensors may fill, as the heap gets fragmented
WORKSPACE_SHARE = 0.4  # share of the budget for gradient matrices formed from a chunk
CACHE_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}  # gradients are cached if twice their size is at most this
FEW_NUMBERS = 512  # up to this many activations and gradients an example, one thread is faster
FEW_BYTES = 32 * 2**20  # the same, in bytes of all examples
TOGETHER = 8  # least number of examples of a batch to run at once, when only some are used
SEARCHED_EXAMPLES = 64  # examples in which uses of parameters are looked for at once
PROOF_EXAMPLES = 8  # examples on which a capture is verified against autograd
PROOF_SEQUENCES = 3  # the same, if an example has outputs at many positions
LESS_MEMORY = (
    "Use fewer layers (parameters='last_layer' or a list), structure=whence.EKFAC(tolerance=0.1) or a core of fewer "
    "coordinates, whence.Core(size=...), fit(..., hessian_columns=16) where outputs are many, or a larger max_memory."
)


@dataclass(frozen=True)
class LayerSizes:
    """The blocks of a model, and the memory needed for one example."""

    blocks: tuple[Block, ...]  # in the order of the gradients
    activations: float  # bytes
    gradients: float  # bytes of output gradients, for each cotangent
    workspace: float = 0.0  # bytes of gradient matrices that must be formed for each cotangent, beyond a chunk

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.activations + cotangents * self.gradients

    def small(self, examples: int, cotangents: int) -> bool:
        """Whether examples are so small and few that call overhead outweighs arithmetic."""
        each = self.example(cotangents)
        return each <= 4 * FEW_NUMBERS and examples * each <= FEW_BYTES


def fits_in_cache(sizes: LayerSizes, cotangents: int, n: int, device: torch.device, budget: Budget) -> bool:
    """Whether the gradients of n training examples are small enough to be cached between passes."""
    most = min(CACHE_BYTES["cuda" if device.type == "cuda" else "cpu"], LEAST_CHUNK_SHARE * budget.limit)
    return 2.0 * n * sizes.example(cotangents) <= most


@dataclass
class LayerChunk:
    """Gradients of some training examples, as captured until they are first requested in bases."""

    where: slice
    tangents: list[Tangent]
    outputs: Tensor  # (n, k)
    kept: bool = False  # whether it is cached, or held until the next chunk is there
    in_bases: list[BasisView] | None = None

    def views(self, bases: Sequence[Basis], problem: Linearization) -> list[BasisView]:
        """Every block in its basis, once: gradients as captured stay only if they are kept and nothing was rotated."""
        if self.in_bases is not None:
            pairs = zip(self.in_bases, bases, strict=True)
            assert all(view.basis is basis for view, basis in pairs), "gradients that are cached in other bases"
            return list(self.in_bases)
        rounded = products_are_rounded(problem.device)
        coarse = rounded and problem.gradients_are_half
        each = zip(self.tangents, bases, strict=True)
        found = [BasisView(tangent, basis, rounded, coarse) for tangent, basis in each]
        if self.kept and any(basis.tensors for basis in bases):
            self.in_bases = list(found)
        if not self.kept or self.in_bases is not None:
            self.tangents.clear()
        return found


class LayerGradients:
    """Gradients of all layers over the training data, as often as they are needed, and over any other inputs.

    `sizes` may come from an earlier capture of the same model. This capture is then verified on the first inputs, and
    must find the same blocks.
    """

    def __init__(self, problem: Linearization, sizes: LayerSizes | None = None) -> None:
        self.problem = problem
        self._chunks = Chunks(problem.batches.notes, "gradients of all layers")
        self.in_use = 0.0  # known bytes in use besides the chunks, which take the rest
        self.notes: list[str] = []  # anything unusual about the model, in words
        if sizes is None:
            first = problem.batches.first()
            sequences = problem.sketch is not None and problem.dense
            few = take(first.inputs, slice(0, PROOF_SEQUENCES if sequences else PROOF_EXAMPLES))
            if not problem.captures:
                problem.captures.append(self._with_later_uses(self._verified(few), few))
            capture = problem.captures[0]
            self.notes, sizes = list(capture.notes), LayerSizes(capture.blocks, *self._measure(capture, few))
        self.sizes = sizes
        # the cotangents and gradients of a small training set, none before its first pass; `None` if it is not cached
        self._cache: tuple[Tensor, list[LayerChunk]] | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of parameters, in the order of the gradients."""
        return self.sizes.blocks

    def accumulate(self, sums: Accumulated, *, last: bool = False) -> Accumulated:
        """Make one pass over the training data; `last` says that no later pass of the fit reads these gradients."""
        given = [*sums.given, *(one for basis in sums.bases for one in basis.tensors)]
        for chunk in self._read(sums.label, sums.cotangents, sums.count, sums.state, given, sums.every, last):
            sums.add(chunk.where, chunk.views(sums.bases, self.problem))
            del chunk  # the next one needs the memory
        return sums

    def chunks(self, label: str) -> Iterator[tuple[slice, list[Tangent]]]:
        """Yield (which training examples, gradients of every block) for all outputs, chunk by chunk."""
        for chunk in self._read(label, self.identity(), self.problem.k, None, ()):
            yield chunk.where, chunk.tangents
            del chunk  # the next one needs the memory

    def of(
        self, inputs: Inputs, cotangents: Cotangents, count: int, start: int = 0, every: int = 1
    ) -> Iterator[LayerChunk]:
        """Yield the gradients of one batch in chunks; its examples are number `start`, `start + every`, and so on."""
        capture = self.capture(inputs)

        def pull(part: slice) -> LayerChunk:
            where = slice(start + every * part.start, start + every * part.stop, every)
            captured = capture.run(take(inputs, part))
            pulled = captured.tangents(cotangents(where, part.stop - part.start), last=True)
            return LayerChunk(where, list(pulled), captured.outputs)

        size = batch_size(inputs, "this batch")
        step = self.chunk_size(count, size)
        # A CPU is slow to get freed memory again: if there is enough, it holds a chunk until the next one is there.
        need = 2 * step * self.sizes.example(count) * CHUNK_WORKSPACE
        free = UNFRAGMENTED * self.problem.budget.limit - self.in_use
        holds, held = self.problem.device.type == "cpu" and need <= free, list[LayerChunk]()
        for _, chunk in self._chunks.of(size, step, pull):
            chunk.kept = holds
            held[:] = [chunk] if holds else []
            yield chunk
            del chunk  # the next one needs the memory

    @contextmanager
    def cached(self) -> Iterator[None]:
        """Context that caches the gradients of a small training set, for passes with the same cotangents."""
        problem, passes = self.problem, self.problem.passes
        allowed = problem.n <= (problem.chunk_size or problem.n)  # chunk_size limits what is held
        allowed = allowed and problem.sketch is None and not passes.shared and passes.checkpoint is None
        if allowed and fits_in_cache(self.sizes, problem.k, problem.n, problem.device, problem.budget):
            self._cache = torch.empty(0), []
        try:
            with self.few_threads(problem.n, problem.k):
                yield
        finally:
            self._cache = None

    def few_threads(self, examples: int, cotangents: int) -> AbstractContextManager[None]:
        """Context with one thread, if a CPU works on few, small examples: several would mostly wait for each other."""
        return one_thread(self.problem.device.type == "cpu" and self.sizes.small(examples, cotangents))

    def identity(self, outputs: int | None = None) -> ConstantCotangents:
        """One cotangent for each output: all of them, or the given number."""
        size = self.problem.k if outputs is None else outputs
        return ConstantCotangents(torch.eye(size, dtype=self.problem.dtype, device=self.problem.device))

    def flatten(self, matrices: Iterable[Tensor], *lead: int) -> Tensor:
        """(*lead, d) from matrices of the blocks."""
        tensors: dict[str, Tensor] = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            tensors.update(block.from_matrix(matrix))
        return self.problem.selection.flatten(tensors, len(lead))

    def chunk_size(self, cotangents: int, batch: int) -> int:
        """Number of examples in a chunk of this batch, for this many cotangents."""
        problem, sizes, limit = self.problem, self.sizes, self.problem.budget.limit
        if problem.chunk_size is not None:
            return problem.chunk_size
        each = max(sizes.example(cotangents), 1.0)
        usual = float(CHUNK_BYTES["cuda"])
        if problem.device.type != "cuda":
            usual = min(CHUNK_BYTES["cpu"], max(LEAST_BYTES, math.ceil(batch / CHUNKS_PER_BATCH) * each))
        most = min(max(usual, LEAST_EXAMPLES * each), 4 * usual)
        free = max(UNFRAGMENTED * limit - self.in_use, LEAST_CHUNK_SHARE * limit) / CHUNK_WORKSPACE
        by_workspace = WORKSPACE_SHARE * limit // max(cotangents * sizes.workspace, 1)
        return max(1, int(min(min(most, CHUNK_SHARE * limit, free) // each, by_workspace)))

    def capture(self, inputs: Inputs) -> Capture:
        """The capture, verified on these inputs if not yet verified."""
        if not self.problem.captures:
            found = self._verified(take(inputs, slice(0, PROOF_EXAMPLES)), self.sizes.blocks)
            if found.blocks != self.sizes.blocks:
                raise UncapturedParameterError(
                    "expected the model to use its parameters as it did when it was fitted, got another path of its "
                    "forward pass for the first inputs. Pass train_loader to whence.load, so that the path of the "
                    "training data is followed."
                )
            self.problem.captures.append(found)
        return self.problem.captures[0]

    def _verified(self, few: Inputs, blocks: Sequence[Block] | None = None) -> Capture:
        problem = self.problem
        with rounded_products(False):  # sums of products are compared
            return Capture(
                problem.network,
                dict(problem.selection.parameters),
                example_inputs=few,
                blocks=blocks,
                later_notes=problem.batches.notes,
                lowered=(in_half(problem.network, few), torch.float16) if problem.half else None,
            )

    def _read(
        self,
        label: str,
        cotangents: Cotangents,
        count: int,
        state: State | None,
        given: Sequence[Tensor],
        every: int = 1,
        last: bool = False,
    ) -> Iterator[LayerChunk]:
        """One pass over the training data, or about one in `every` examples, or over the cache."""
        rows = cotangents.rows if isinstance(cotangents, ConstantCotangents) and every == 1 else None
        known, chunks = self._cache or (None, [])
        caches = known is not None and rows is not None and not chunks and not last
        if known is not None and rows is not None and chunks and torch.equal(rows, known):
            taken = (chunks.pop(0) for _ in range(len(chunks))) if last else iter(chunks)
            yield from self.problem.progress.track(taken, f"{label}, batch", len(chunks))
            return
        found: list[LayerChunk] = []
        for batch in self.problem.read(label, state, given):
            step = max(1, min(batch.size // TOGETHER, every))
            if batch.start // batch.size % -(-every // step):
                continue
            inputs = batch.inputs if step == 1 else take(batch.inputs, slice(0, None, step))
            for chunk in self.of(inputs, cotangents, count, batch.start, step):
                if caches:
                    chunk.kept = True
                    found.append(chunk)
                yield chunk
                del chunk  # the next one needs the memory
        if rows is not None and found:
            self._cache = rows, found

    def _with_later_uses(self, found: Capture, few: Inputs) -> Capture:
        """A capture with blocks for parameters that only later examples use too, as experts and heads of tasks."""
        problem, forms = self.problem, {name: set[Block]() for name in found.unused}
        if not forms:
            return found
        sequences = problem.sketch is not None and problem.dense
        step = PROOF_SEQUENCES if sequences else SEARCHED_EXAMPLES
        for batch in problem.read("parameters not used by the first batch"):
            for low in range(0, batch.size, step):
                here = found.forms_on(take(batch.inputs, slice(low, low + step)))
                forms = {name: blocks | here[name] for name, blocks in forms.items()}
            if all(forms.values()):
                break
        for each in problem.passes.process_group.all_gather_object("parameters not used so far", forms):
            forms = {name: blocks | each[name] for name, blocks in forms.items()}
        if not any(forms.values()):
            return found
        parameters = problem.selection.parameters
        every = {name: forms.get(name) or found.forms.get(name, set()) for name in parameters}
        return self._verified(few, make_blocks(every, parameters))

    def _measure(self, capture: Capture, few: Inputs) -> tuple[float, float, float]:
        """Bytes for each example: activations; and for each cotangent output gradients and formed matrices."""
        n = batch_size(few, "this batch")
        captured = capture.run(few)
        ones = torch.ones(1, n, self.problem.k, dtype=captured.outputs.dtype, device=captured.outputs.device)
        activations = gradients = workspace = 0.0
        on_gpu = self.problem.device.type == "cuda"
        for tangent in captured.tangents(ones, last=True):
            if isinstance(tangent, Kronecker):  # on a CPU unfolded: chunks should fit into its cache
                workspace = max(workspace, formed_bytes(tangent, WORKSPACE_SHARE * self.problem.budget.limit))
                a, g = (one.numel if on_gpu else math.prod(one.shape) for one in (tangent.a, tangent.g))
                activations, gradients = activations + a / n, gradients + g / n
            else:
                gradients += (tangent.values if isinstance(tangent, Dense) else tangent.grads).numel() / n
        each = 2.0 if self.problem.gradients_are_half and on_gpu else 4.0
        return each * activations, each * gradients, workspace

    def require_factors(self) -> None:
        """Raise if the Kronecker factors and their eigenvectors do not fit in memory."""
        need = decomposition_bytes(self.blocks)
        what = f"the Kronecker factors of the {len(self.blocks)} blocks of parameters"
        self.problem.budget.require(FRAGMENTED * need, what, LESS_MEMORY)

    def require_sums(self, bases: Sequence[Basis]) -> None:
        """Raise if sums in these bases and the weights of the examples do not fit in memory; chunks get the rest."""
        problem = self.problem
        coordinates = sum(math.prod(basis.shape) for basis in bases)
        size = sum(block.numel for block in self.blocks)
        need = sums_bytes(coordinates, size, working_precision(problem).itemsize)
        need += examples_bytes(problem.n, problem.k, problem.root_columns, problem.dtype.itemsize)
        what = f"sums over {coordinates} coordinates, and the weights of {problem.n} examples with {problem.k} outputs,"
        least = max(CHUNK_WORKSPACE * self.sizes.example(problem.k), LEAST_CHUNK_SHARE * problem.budget.limit)
        problem.budget.require(need + least, what, LESS_MEMORY)
        self.in_use = need


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    wide = any(one.dtype == torch.float64 for one in problem.selection.parameters.values())
    return torch.float64 if wide else torch.float32


def reserve_memory(problem: Linearization, need: float, what: str, instead: str) -> Linearization:
    """The same problem with `need` bytes less memory; raise with the advice `instead` if they do not fit."""
    problem.budget.require(need, what, instead)
    return replace(problem, budget=Budget(problem.device, problem.budget.limit - need))


LARGEST_SIDE = 8192  # a side with more inputs or outputs has no eigenbasis: a factor takes their square
LARGEST_EXACT = 1024  # largest block without a Kronecker form kept as a matrix; larger ones are diagonal
SUMS_PER_COORDINATE = 26.0  # sums, weights and temporaries in float64 numbers: peaks of real fits
SUMS_PER_WEIGHT = 5.0  # scores and Newton steps, in float64 numbers per weight
FRAGMENTED = 1.1  # factor for fragmentation of the heap by factors and eigenvectors


def has_exact_block(block: Block) -> bool:
    """Whether a block without a Kronecker form (norms, biases, bare parameters) is kept as a matrix, not a diagonal."""
    return block.numel <= LARGEST_EXACT


def factor_sides(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """(number, side) of the square factors of all blocks."""
    found = []
    for block in blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            found += [(shape[0], side) for side in shape[1:] if side <= LARGEST_SIDE]
        elif block.kind == "rows" or has_exact_block(block):
            found.append((1, shape[-1]))
    return found


def decomposition_bytes(blocks: Sequence[Block]) -> float:
    """Bytes of all factors in float64, their eigenvectors, and the workspace for the largest."""
    each = [8.0 * count * side**2 for count, side in factor_sides(blocks)]
    return 2.0 * sum(each) + 4.0 * max(each, default=0.0)


def sums_bytes(coordinates: float, size: int, itemsize: int) -> float:
    """Bytes of sums over `coordinates`, and of everything as large as the `size` weights."""
    return (SUMS_PER_COORDINATE + 6.0 * (itemsize == 8)) * 8.0 * coordinates + SUMS_PER_WEIGHT * 8.0 * size


def examples_bytes(n: int, k: int, q: int, itemsize: int) -> float:
    """Bytes of residuals, leverages and weights of n examples, with k outputs and q columns of Hessian roots."""
    blocks = 8.0 if q else 3.5  # roots of Hessians and of the noise, leverage blocks, their inverses
    return itemsize * n * (12.0 * k + blocks * k * max(k, q))
