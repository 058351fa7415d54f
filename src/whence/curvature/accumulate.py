"""One pass over the training data: `LayerGradients.accumulate` adds the gradients of all layers to an `Accumulator`.

An accumulator knows its zeros and how to add a chunk of gradients. Everything else about a pass stands here: how many
examples make a chunk, what happens when memory runs out, which gradients are cached from pass to pass, when they are
freed, and how much memory a curvature built layer by layer will take.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from whence.curvature.rotation import Basis, BasisView, basis_views, formed_bytes
from whence.data.batches import Inputs, batch_size, take
from whence.display import count as counted
from whence.errors import UncapturedParameterError
from whence.jacobian.capture import Capture, examples_using
from whence.jacobian.gradients import Block, Dense, Kronecker, Tangent
from whence.jacobian.linearization import Linearization
from whence.runtime.execution import Chunks
from whence.runtime.memory import Budget
from whence.runtime.model_state import one_thread, rounded_products

Cotangents = Callable[[slice, int], Tensor]
"""From the place among the training examples and their number n to cotangents (c, n, k)."""


@dataclass(frozen=True)
class ConstantCotangents:
    """The same cotangents (c, k) for every example."""

    rows: Tensor

    def __call__(self, where: slice, n: int) -> Tensor:
        """(c, n, k)."""
        return self.rows.unsqueeze(1).expand(-1, n, -1)


class ChunkGradients:
    """Gradients of a chunk of training examples: iterating yields every block of parameters in its basis.

    A block is freed when the next one is asked for, in the last of the iterations that the accumulator announces.
    """

    def __init__(self, views: list[BasisView], reads: int, needs_captured: bool) -> None:
        """Nothing is freed yet."""
        self._views = views
        self._reads_left = reads
        self._needs_captured = needs_captured

    def __iter__(self) -> Iterator[BasisView]:
        """The blocks, one after the other."""
        self._reads_left -= 1
        if self._reads_left > 0:
            for view in self._views:
                yield view
                if not self._needs_captured:
                    view.free_captured()
            return
        while self._views:
            view = self._views.pop(0)
            yield view
            if not self._needs_captured:
                view.compact()
            del view  # the next one needs the memory


class Accumulator(ABC):
    """Sums over the training set: their zeros, and how to add a chunk of gradients.

    Attributes:
        label: what the pass is for, shown with its progress.
        cotangents: what is pulled back for every example.
        count: number c of cotangents.
        bases: in which the gradients of each block are given; `None` for the gradients as they were captured.
        reads: how often `add` iterates over the gradients of a chunk.
        needs_captured: whether this pass or a later one reads `BasisView.tangent`, the gradients as they were captured.
    """

    label: str
    cotangents: Cotangents
    count: int
    bases: Sequence[Basis] | None = None
    reads: int = 1
    needs_captured: bool = False

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The sums by name, zeros at first, which `add` changes in place."""

    def given(self) -> list[Tensor]:
        """What the sums depend on beside model, data and options."""
        return []

    @abstractmethod
    def add(self, where: slice, gradients: ChunkGradients) -> None:
        """Add the gradients of some training examples."""


Accumulated = TypeVar("Accumulated", bound=Accumulator)

CHUNK_BYTES = {"cpu": 48 * 2**20, "cuda": 24 * 2**30}
"""Activations and output gradients of one chunk take at most so many bytes, by kind of device."""

CHUNKS_PER_BATCH = 3
"""On a CPU a chunk is at most the batch over this number: what is computed from a chunk takes more than the chunk."""

CHUNKS_PER_SMALL_BATCH = 4
"""The same number where examples are small and few, so that some memory is left for the cache of gradients."""

LEAST_BYTES = 4 * 2**20
"""Chunks are not made smaller than this many bytes to stay below a share of the batch."""

LEAST_EXAMPLES = 8
"""A chunk has so many examples if they take at most four times `CHUNK_BYTES`: products of few rows are slow."""

CHUNK_SHARE = 0.18
"""A chunk takes at most this share of the memory budget."""

CHUNK_WORKSPACE = 3.6
"""Peak memory while a chunk is added, the chunk itself included, in units of the chunk."""

UNFRAGMENTED = 0.7
"""Share of the memory budget that tensors may fill where it is tight: a heap in which they come and go has holes."""

LEAST_CHUNK_SHARE = 0.07
"""Chunks get at least this share of the memory budget, however much is in use beside them."""

WORKSPACE_SHARE = 0.4
"""Gradient matrices of a chunk, or products of its pairs of positions, take at most this share of the memory budget."""

CACHE_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
"""Gradients of a training set are cached from pass to pass if twice their size is at most so many bytes."""

CHUNK_PEAK = 1.7
"""Peak memory while a chunk is added where no gradient matrix is formed, in units of the chunk."""

ROTATED_SIZE = 1.1
"""Cached gradients rotated to a basis take so many times the size of the captured ones."""

FEW_NUMBERS = 512
"""With at most so many activations and gradients an example, one thread is faster than several."""


@dataclass(frozen=True)
class LayerSizes:
    """The blocks of a model, and the memory that one example takes.

    Attributes:
        blocks: blocks of parameters, in the order of the gradients.
        activations: bytes of an example's activations.
        gradients: bytes of an example's output gradients for each cotangent.
        workspace: bytes of gradient matrices that must be formed for each cotangent, where they exceed a chunk.
    """

    blocks: tuple[Block, ...]
    activations: float
    gradients: float
    workspace: float = 0.0

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.activations + cotangents * self.gradients

    def small(self, examples: int, cotangents: int) -> bool:
        """Whether examples are so small, and so few, that the overhead of calls outweighs the arithmetic."""
        each = self.example(cotangents)
        return each <= 4 * FEW_NUMBERS and 2.0 * examples * each <= CACHE_BYTES["cpu"]


def chunk_examples(
    sizes: LayerSizes, cotangents: int, batch: int, device: torch.device, budget: Budget, in_use: float
) -> int:
    """How many examples of a batch make a chunk.

    Args:
        sizes: memory that an example takes.
        cotangents: their number.
        batch: examples of the batch.
        device: where they are.
        budget: memory that may be taken.
        in_use: bytes of it that are in use beside the chunks.
    """
    each = max(sizes.example(cotangents), 1.0)
    usual = float(CHUNK_BYTES["cuda"])
    if device.type != "cuda":
        parts = CHUNKS_PER_SMALL_BATCH if sizes.small(batch, cotangents) else CHUNKS_PER_BATCH
        usual = min(CHUNK_BYTES["cpu"], max(LEAST_BYTES, math.ceil(batch / parts) * each))
    most = min(max(usual, LEAST_EXAMPLES * each), 4 * usual)
    limit = budget.limit
    free = max(UNFRAGMENTED * limit - in_use, LEAST_CHUNK_SHARE * limit) / CHUNK_WORKSPACE
    by_workspace = WORKSPACE_SHARE * limit // max(cotangents * sizes.workspace, 1)
    return max(1, int(min(min(most, CHUNK_SHARE * limit, free) // each, by_workspace)))


def has_room_for_two(sizes: LayerSizes, cotangents: int, step: int, batch: int) -> bool:
    """Whether two chunks of so many examples take less memory than the batch."""
    return CHUNK_WORKSPACE * step <= batch and not sizes.small(batch, cotangents)


def cache_bytes(sizes: LayerSizes, cotangents: int, n: int, batch: int, device: torch.device, budget: Budget) -> float:
    """Bytes of gradients that are cached from pass to pass: what chunks leave of a batch's memory.

    None for a large training set, of which only a small part would be cached.
    """
    on_gpu = device.type == "cuda"
    each = sizes.example(cotangents)
    most = min(CACHE_BYTES["cuda" if on_gpu else "cpu"], LEAST_CHUNK_SHARE * budget.limit)
    if 2.0 * n * each > most:
        return 0.0
    if on_gpu:
        return float(most)
    taken = CHUNK_PEAK * each * min(batch, chunk_examples(sizes, cotangents, batch, device, budget, 0.0))
    return max(batch * each - taken, LEAST_BYTES) / ROTATED_SIZE


CachedChunk = tuple[slice, list[Tangent]]
"""Which examples, and their gradients."""


class GradientCache:
    """Gradients of the first chunks of a training set, for passes that pull back the same cotangents.

    Args:
        most: examples that are cached.
    """

    def __init__(self, most: int = 0) -> None:
        """Nothing yet."""
        self.most = most
        self._rows: Tensor | None = None
        self._open = True
        self._chunks: dict[tuple[int, int], CachedChunk] = {}
        self._views: dict[int, tuple[Sequence[Basis], list[BasisView]]] = {}

    def wants(self, cotangents: Cotangents) -> bool:
        """Whether the gradients of these cotangents are to be cached."""
        return self.most > 0 and self._rows is None and isinstance(cotangents, ConstantCotangents)

    def put(self, cotangents: Cotangents, where: slice, tangents: list[Tangent]) -> None:
        """Cache a chunk, if it and those before it are few enough."""
        assert isinstance(cotangents, ConstantCotangents)
        self._rows = cotangents.rows
        self._open = self._open and where.stop <= self.most
        if self._open:
            self._chunks[where.start, where.stop] = where, tangents

    def chunks(self, cotangents: Cotangents) -> dict[tuple[int, int], CachedChunk]:
        """The cached chunks of these cotangents, by their first and last examples."""
        same = (
            self._rows is not None
            and isinstance(cotangents, ConstantCotangents)
            and torch.equal(cotangents.rows, self._rows)
        )
        return self._chunks if same else {}

    def holds(self, tangents: list[Tangent]) -> bool:
        """Whether these gradients are cached."""
        return any(tangents is cached for _, cached in self._chunks.values())

    def views(self, tangents: list[Tangent], bases: Sequence[Basis], device: torch.device) -> list[BasisView]:
        """Cached gradients in these bases; the views alone hold them from then on, and the list is empty."""
        if id(tangents) not in self._views:
            self._views[id(tangents)] = bases, basis_views(tangents, bases, device)
            tangents.clear()
        of, found = self._views[id(tangents)]
        assert of is bases, "gradients that are cached in other bases"
        return found

    def remove(self, where: slice) -> None:
        """Free a chunk that no later pass reads."""
        _, tangents = self._chunks.pop((where.start, where.stop), (where, []))
        self._views.pop(id(tangents), None)


PROOF_EXAMPLES = 8
"""Examples on which a capture is verified against autograd."""


class LayerGradients:
    """Gradients of all layers over the training data, as often as they are needed, and over any other inputs.

    Args:
        problem: the linearized training problem.
        sizes: what an earlier capture of the same model found; this one is then verified on the first inputs that come,
            and must find the same blocks.

    Attributes:
        in_use: bytes that are in use beside the chunks, as far as they are known; chunks take what is left.
        notes: what was found out of the ordinary about the model, in words.
    """

    def __init__(self, problem: Linearization, sizes: LayerSizes | None = None) -> None:
        """Verify the capture on the first batch, and measure how much memory an example takes."""
        self.problem = problem
        self._chunks = Chunks(problem.batches.notes, "gradients of all layers")
        self._capture: Capture | None = None
        self._more: list[Inputs] = []
        self.in_use = 0.0
        self.notes: list[str] = []
        self._batch = 0
        if sizes is None:
            first = problem.batches.first()
            self._batch = first.size
            few = take(first.inputs, slice(0, min(first.size, PROOF_EXAMPLES)))
            self._capture = self._verified(few)
            if self._capture.without_uses:
                read = problem.read("parameters not used by the first batch")
                process_group = problem.passes.process_group
                self._more = examples_using(
                    self._capture.without_uses, self._capture, read, process_group, problem.device
                )
                self._capture = self._verified(few) if self._more else self._capture
            self.notes = list(self._capture.notes)
            sizes = LayerSizes(self._capture.blocks, *self._measure(few))
        self.sizes = sizes
        self._cache = GradientCache()
        self._keeps_last = False
        self._last_chunk: tuple[object, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of parameters, in the order of the gradients."""
        return self.sizes.blocks

    def accumulate(self, sums: Accumulated, *, last: bool = False) -> Accumulated:
        """One pass over the training data.

        Args:
            sums: what the gradients are added to.
            last: whether no later pass of the fit reads these gradients.
        """
        for where, tangents in self._read(sums.label, sums.cotangents, sums.count, sums.state(), sums.given()):
            views = self._views(tangents, sums.bases)
            if self._keeps_last:
                self._last_chunk = tuple(views)
            chunk = ChunkGradients(views, sums.reads, sums.needs_captured)
            del views, tangents  # the chunk alone decides when they are freed
            sums.add(where, chunk)
            del chunk
            if last:
                self._cache.remove(where)
        return sums

    def chunks(self, label: str) -> Iterator[tuple[slice, list[Tangent]]]:
        """Yield (which training examples, gradients of every block) for all outputs, chunk by chunk."""
        yield from self._read(label, self.identity(), self.problem.k, None, ())

    def of(
        self,
        inputs: Inputs,
        start: int,
        cotangents: Cotangents,
        count: int,
        cached: Mapping[tuple[int, int], CachedChunk] | None = None,
    ) -> Iterator[tuple[slice, list[Tangent], Tensor]]:
        """Gradients of one batch, in chunks, with the outputs (n, k); those of training examples may be cached."""
        capture = self.capture(inputs)

        def pull(part: slice) -> tuple[slice, list[Tangent], Tensor]:
            where = slice(start + part.start, start + part.stop)
            if cached and (known := cached.get((where.start, where.stop))) is not None:
                return *known, self.problem.outputs[where]
            captured = capture.run(take(inputs, part))
            pulled = captured.tangents(cotangents(where, part.stop - part.start), last=True)
            return where, list(pulled), captured.outputs

        size = batch_size(inputs, "this batch")
        step = self.chunk_size(count, size)
        # A CPU returns freed memory to the system, and takes long to get it again: where a batch leaves the room, the
        # last chunk is held until the next one is there.
        self._keeps_last = self.problem.device.type == "cpu" and has_room_for_two(self.sizes, count, step, size)
        try:
            for _, found in self._chunks.of(size, step, pull):
                self._last_chunk = ()
                yield found
                del found  # the next chunk needs the memory
        finally:
            self._last_chunk = ()

    def views_of(self, inputs: Inputs, bases: Sequence[Basis], k: int) -> Iterator[tuple[list[BasisView], Tensor]]:
        """Gradients of k outputs of one batch in bases, and the outputs (n, k), chunk by chunk."""
        for _, tangents, outputs in self.of(inputs, 0, self.identity(k), k):
            views = basis_views(tangents, bases, self.problem.device)
            if self._keeps_last:
                self._last_chunk = tuple(views)
            yield views, outputs
            del views, tangents  # the next chunk needs the memory

    @contextmanager
    def cached(self) -> Iterator[None]:
        """Cache the gradients of a small training set meanwhile, for all passes that pull back the same cotangents.

        Computes with one thread, where examples are so small that several would mostly wait for one another.
        """
        problem, passes = self.problem, self.problem.passes
        room = cache_bytes(self.sizes, problem.k, problem.n, self._batch, problem.device, problem.budget)
        allowed = problem.n <= (problem.chunk_size or problem.n)  # gradients of so many examples are held, and no more
        if not allowed or problem.sketch is not None or passes.shared or passes.checkpoint is not None:
            room = 0.0
        self._cache = GradientCache(int(room // max(self.sizes.example(problem.k), 1.0)))
        try:
            with self.few_threads(problem.n, problem.k):
                yield
        finally:
            self._cache = GradientCache()

    def few_threads(self, examples: int, cotangents: int) -> AbstractContextManager[None]:
        """One thread meanwhile, where a CPU computes with few examples of few numbers each."""
        return one_thread(self.problem.device.type == "cpu" and self.sizes.small(examples, cotangents))

    def identity(self, outputs: int | None = None) -> Cotangents:
        """Every output in turn: all of them, or the given number."""
        size = self.problem.k if outputs is None else outputs
        return ConstantCotangents(torch.eye(size, dtype=self.problem.dtype, device=self.problem.device))

    def flatten(self, matrices: Sequence[Tensor], *lead: int) -> Tensor:
        """(*lead, d) from matrices of the blocks."""
        tensors: dict[str, Tensor] = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            tensors.update(block.from_matrix(matrix))
        return self.problem.selection.flatten(tensors, len(lead))

    def chunk_size(self, cotangents: int, batch: int) -> int:
        """How many examples of a batch make a chunk for so many cotangents."""
        if self.problem.chunk_size is not None:
            return self.problem.chunk_size
        return chunk_examples(self.sizes, cotangents, batch, self.problem.device, self.problem.budget, self.in_use)

    def capture(self, inputs: Inputs) -> Capture:
        """The capture, verified on these inputs if it was not yet."""
        if self._capture is None:
            found = self._verified(take(inputs, slice(0, PROOF_EXAMPLES)), self.sizes.blocks)
            if found.blocks != self.sizes.blocks:
                raise UncapturedParameterError(
                    "expected the model to use its parameters as it did when it was fitted, got another path of its "
                    "forward pass for the first inputs. Pass train_loader to whence.load, so that the path of the "
                    "training data is followed."
                )
            self._capture = found
        return self._capture

    def _read(
        self,
        label: str,
        cotangents: Cotangents,
        count: int,
        state: Mapping[str, Tensor] | None,
        given: Sequence[Tensor],
    ) -> Iterator[tuple[slice, list[Tangent]]]:
        """One pass over the training data, or over the cache: yield (which examples, gradients of every block)."""
        cached = self._cache.chunks(cotangents)
        if cached and sum(where.stop - where.start for where, _ in cached.values()) == self.problem.n:
            for key in self.problem.progress.track(list(cached), f"{label}, batch", len(cached)):
                yield cached[key]
            return
        to_cache = self._cache.wants(cotangents)
        for batch in self.problem.read(label, state, given):
            for where, tangents, _ in self.of(batch.inputs, batch.start, cotangents, count, cached):
                if to_cache:
                    self._cache.put(cotangents, where, tangents)
                yield where, tangents
                del tangents  # the next chunk needs the memory

    def _views(self, tangents: list[Tangent], bases: Sequence[Basis] | None) -> list[BasisView]:
        """Every block of a chunk in its basis; unless they are cached, the views alone hold the gradients."""
        if bases is None:
            found = [BasisView(tangent, Basis(tangent.block)) for tangent in tangents]
        elif self._cache.holds(tangents):
            return list(self._cache.views(tangents, bases, self.problem.device))
        else:
            found = basis_views(tangents, bases, self.problem.device)
        if not self._cache.holds(tangents):
            tangents.clear()
        return found

    def _verified(self, few: Inputs, blocks: Sequence[Block] | None = None) -> Capture:
        problem = self.problem
        with rounded_products(False):  # sums of products are compared
            return Capture(
                problem.network,
                dict(problem.selection.parameters),
                example_inputs=few,
                more=self._more,
                blocks=blocks,
                later_notes=problem.batches.notes,
            )

    def _measure(self, few: Inputs) -> tuple[float, float, float]:
        """Bytes an example: of activations; for each cotangent of output gradients, and of what is formed."""
        n = batch_size(few, "this batch")
        captured = self.capture(few).run(few)
        ones = torch.ones(1, n, self.problem.k, dtype=captured.outputs.dtype, device=captured.outputs.device)
        activations = gradients = workspace = 0.0
        limit = self.problem.budget.limit
        for tangent in captured.tangents(ones, last=True):
            if isinstance(tangent, Kronecker):
                workspace = max(workspace, formed_bytes(tangent, self.problem.k, WORKSPACE_SHARE * limit))
                activations += 4.0 * prod(tangent.a.shape) / n
                gradients += 4.0 * prod(tangent.g.shape) / n
            else:
                parts = tangent.parts if isinstance(tangent, Dense) else (tangent.grads,)
                gradients += 4.0 * sum(part.numel() for part in parts) / n
        return activations, gradients, workspace

    def require_factors(self, largest_exact: int) -> None:
        """Raise when the Kronecker factors and their eigenvectors do not fit in memory."""
        need = decomposition_bytes(self.blocks, largest_exact)
        what = f"the Kronecker factors of {counted(len(self.blocks), 'block')} of parameters"
        self.problem.budget.require(FRAGMENTED * need, what, self._alternatives())

    def require_sums(self, bases: Sequence[Basis]) -> None:
        """Raise when sums in these bases, and the weights of the training examples, do not fit; chunks get the rest."""
        problem = self.problem
        coordinates = sum(math.prod(basis.shape) for basis in bases)
        roots = problem.hessian_roots
        size = sum(block.numel for block in self.blocks)
        need = sums_bytes(coordinates, size, working_precision(problem).itemsize)
        need += examples_bytes(problem.n, problem.k, 0 if roots is None else roots.shape[2], problem.dtype.itemsize)
        what = f"sums over {coordinates} coordinates, and the weights of {problem.n} examples with {problem.k} outputs,"
        least = max(CHUNK_WORKSPACE * self.sizes.example(problem.k), LEAST_CHUNK_SHARE * problem.budget.limit)
        problem.budget.require(need + least, what, self._alternatives())
        self.in_use = need

    def _alternatives(self) -> str:
        layers = "" if self.problem.selection.one_layer else "parameters='last_layer' or a list of layers, "
        return (
            f"Use {layers}structure=whence.EKFAC(tolerance=0.1) or a core of fewer coordinates, whence.Core(size=...), "
            "fit(..., hessian_columns=16) where outputs are many, or a larger max_memory."
        )


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    widest = max((p.dtype for p in problem.selection.parameters.values()), key=lambda d: torch.finfo(d).bits)
    return torch.float64 if widest == torch.float64 else torch.float32


LARGEST_SIDE = 8192
"""A layer with more inputs, or outputs, has no eigenbasis on that side: the factor has the square of their number."""

SUMS_PER_COORDINATE = 26.0
"""Sums over the training set, weights, and what is made on the way to them, in float64 numbers for each coordinate.

Measured as the peak of real fits; `tests/test_estimate.py` compares."""

SUMS_PER_WEIGHT = 5.0
"""Scores and Newton steps, in float64 numbers for each weight."""

FRAGMENTED = 1.1
"""A heap in which factors and eigenvectors come and go takes so many times what they take."""


def factor_bytes(blocks: Sequence[Block], largest_exact: int) -> tuple[float, float]:
    """Bytes of all Kronecker factors, in float64, and of the largest one."""
    each = []
    for block in blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * side**2 for side in shape[1:] if side <= LARGEST_SIDE]
        elif block.kind == "rows" or block.numel <= largest_exact:
            each.append(shape[-1] ** 2)
    return 8.0 * sum(each), 8.0 * max(each, default=0)


def decomposition_bytes(blocks: Sequence[Block], largest_exact: int) -> float:
    """All factors, the eigenvectors of those that are decomposed, and the workspace for the largest."""
    total, largest = factor_bytes(blocks, largest_exact)
    return 2.0 * total + 4.0 * largest


def sums_bytes(coordinates: float, size: int, itemsize: int) -> float:
    """Everything of the size of the weights, for so many coordinates of so many weights."""
    return (SUMS_PER_COORDINATE + 6.0 * (itemsize == 8)) * 8.0 * coordinates + SUMS_PER_WEIGHT * 8.0 * size


def examples_bytes(n: int, k: int, q: int, itemsize: int) -> float:
    """Residuals, leverages and weights of n training examples with k outputs and q columns of the Hessian's root."""
    blocks = 8.0 if q else 3.5  # roots of Hessians and of the noise, leverage blocks, their inverses
    return itemsize * n * (12.0 * k + blocks * k * max(k, q))
