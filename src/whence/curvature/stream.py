"""How many examples are handled at once, and what of them is kept: as memory allows, and no more than a batch takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from whence.curvature.rotation import Basis, BasisView, basis_views, formed_bytes
from whence.data.batches import Inputs, batch_size, take
from whence.errors import UncapturedParameterError
from whence.jacobian.capture import Capture, examples_using
from whence.jacobian.gradients import Block, Dense, Kronecker, Tangent
from whence.jacobian.linearization import Linearization
from whence.runtime.execution import Chunks, State
from whence.runtime.memory import Budget
from whence.runtime.model_state import one_thread, rounded_products

PIECE_BYTES = {"cpu": 48 * 2**20, "cuda": 24 * 2**30}
"""Output gradients and activations of one piece are kept under this size."""

OF_BATCH = 3
"""On a CPU also under the batch's over so much, since what is computed from them takes more than they do;"""

OF_SMALL_BATCH = 4
"""over so much where examples are small and few: then there is room to keep some;"""

LEAST_BYTES = 4 * 2**20
"""and down to this size."""

FEW_EXAMPLES = 8
"""So many are taken together at least, up to four times that size: products of fewer rows are slow."""

PIECE_SHARE = 0.18
"""The same as a share of the memory that may be taken: what is computed from a piece takes three or four times it."""

PIECES = 3.6
"""What is computed from a piece, in units of its size, itself included."""

WITHOUT_HOLES = 0.7
"""Share of the memory that tensors may take where little is left: a heap in which they come and go has holes."""

LEAST_PIECES = 0.07
"""Share of it that pieces take at least."""

WORK_SHARE = 0.4
"""Share of the memory that gradient matrices of a piece, or products of its pairs of positions, may take."""

KEPT_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
"""Gradients of training sets up to this size, as they are and turned, are kept from pass to pass, if there is room."""

TAKEN = 1.7
"""What is computed at once from a piece, in units of its size, where nothing is formed on the way."""

TURNED = 1.1
"""What is kept of a piece takes so many times its size, once it is turned."""

FEW_NUMBERS = 512
"""Up to so many activations and gradients an example, one thread is done before several have met."""


@dataclass(frozen=True)
class LayerSizes:
    """What a capture found out about a model.

    Attributes:
        blocks: blocks of parameters, in the order of the tangents.
        fixed: bytes of an example's activations.
        each: bytes of an example's output gradients for each cotangent.
        work: bytes that are formed on the way, for each of them, where that is more than a chunk.
    """

    blocks: tuple[Block, ...]
    fixed: float
    each: float
    work: float = 0.0

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.fixed + cotangents * self.each

    def few(self, examples: int, cotangents: int) -> bool:
        """Whether examples are so small, and so few, that calls cost more than numbers."""
        each = self.example(cotangents)
        return each <= 4 * FEW_NUMBERS and 2.0 * examples * each <= KEPT_BYTES["cpu"]


def chunk_examples(
    known: LayerSizes, cotangents: int, batch: int, device: torch.device, budget: Budget, held: float
) -> int:
    """How many examples of a batch are handled at once.

    Args:
        known: about the model.
        cotangents: how many there are.
        batch: examples of the batch.
        device: where they are.
        budget: memory that may be taken.
        held: bytes of it that are in use beside the pieces.
    """
    each = max(known.example(cotangents), 1.0)
    usual = float(PIECE_BYTES["cuda"])
    if device.type != "cuda":
        parts = OF_SMALL_BATCH if known.few(batch, cotangents) else OF_BATCH
        usual = min(PIECE_BYTES["cpu"], max(LEAST_BYTES, math.ceil(batch / parts) * each))
    most = min(max(usual, FEW_EXAMPLES * each), 4 * usual)
    room = budget.limit
    left = max(WITHOUT_HOLES * room - held, LEAST_PIECES * room) / PIECES
    work = WORK_SHARE * room // max(cotangents * known.work, 1)
    return max(1, int(min(min(most, PIECE_SHARE * room, left) // each, work)))


def has_room_for_two(known: LayerSizes, cotangents: int, step: int, batch: int) -> bool:
    """Whether two pieces of so many examples, one done and one begun, take less than the batch."""
    return PIECES * step <= batch and not known.few(batch, cotangents)


def cache_bytes(known: LayerSizes, cotangents: int, n: int, batch: int, device: torch.device, budget: Budget) -> float:
    """Bytes of the gradients of a small training set that are kept from pass to pass: what pieces leave of a batch's.

    None of a large one, of which that would be little.
    """
    on_gpu = device.type == "cuda"
    each = known.example(cotangents)
    most = min(KEPT_BYTES["cuda" if on_gpu else "cpu"], LEAST_PIECES * budget.limit)
    if 2.0 * n * each > most:
        return 0.0
    if on_gpu:
        return float(most)
    taken = TAKEN * each * min(batch, chunk_examples(known, cotangents, batch, device, budget, 0.0))
    return max(batch * each - taken, LEAST_BYTES) / TURNED


Cotangents = Callable[[slice, int], Tensor]
"""From the place among the training examples and their number n to cotangents (c, n, k)."""


@dataclass(frozen=True)
class ConstantCotangents:
    """The same cotangents (c, k) for every example."""

    rows: Tensor

    def __call__(self, where: slice, n: int) -> Tensor:
        """(c, n, k)."""
        return self.rows.unsqueeze(1).expand(-1, n, -1)


Piece = tuple[slice, list[Tangent]]
"""Which examples, and their gradients."""


class GradientCache:
    """Gradients of the first pieces of a training set, kept while several passes want the same of them.

    Args:
        most: examples that are kept.
    """

    def __init__(self, most: int = 0) -> None:
        """Nothing yet."""
        self.most = most
        self._rows: Tensor | None = None
        self._open = True
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._views: dict[int, tuple[Sequence[Basis], list[BasisView]]] = {}

    def wants(self, cotangents: Cotangents) -> bool:
        """Whether the gradients of these cotangents are to be kept."""
        return self.most > 0 and self._rows is None and isinstance(cotangents, ConstantCotangents)

    def keep(self, cotangents: Cotangents, where: slice, tangents: list[Tangent]) -> None:
        """Remember a piece, if it and those before it are few enough."""
        assert isinstance(cotangents, ConstantCotangents)
        self._rows = cotangents.rows
        self._open = self._open and where.stop <= self.most
        if self._open:
            self._pieces[where.start, where.stop] = where, tangents

    def of(self, cotangents: Cotangents) -> dict[tuple[int, int], Piece]:
        """The pieces that are kept of these cotangents, by their first and last examples."""
        same = (
            self._rows is not None
            and isinstance(cotangents, ConstantCotangents)
            and torch.equal(cotangents.rows, self._rows)
        )
        return self._pieces if same else {}

    def views(self, tangents: list[Tangent], bases: Sequence[Basis], device: torch.device) -> list[BasisView] | None:
        """The gradients of a piece seen from these bases, where the piece is kept.

        The views alone hold its gradients from then on; the empty list goes on to stand for it.
        """
        if not any(tangents is kept for _, kept in self._pieces.values()):
            return None
        if id(tangents) not in self._views:
            self._views[id(tangents)] = bases, basis_views(tangents, bases, device)
            tangents.clear()
        of, found = self._views[id(tangents)]
        assert of is bases, "gradients that are kept for other bases"
        return found

    def forget(self, where: slice) -> None:
        """Let go of a piece that no later pass will want."""
        _, tangents = self._pieces.pop((where.start, where.stop), (where, []))
        self._views.pop(id(tangents), None)


PROOF = 8
"""Examples that a capture may be proved on."""


class LayerGradients:
    """A re-iterable stream of tangents over the training data, and over any other inputs.

    Args:
        problem: the linearized training problem.
        known: what an earlier capture of the same model found out; this one is then proved on the first inputs that
            come, and must find the same blocks.

    Attributes:
        held: bytes that are in use beside the pieces, as far as they are known; pieces take what is left.
    """

    def __init__(self, problem: Linearization, known: LayerSizes | None = None) -> None:
        """Prove the capture on the first batch, and learn how much memory an example takes."""
        self.problem = problem
        self._pieces = Chunks(problem.batches.notes, "gradients of all layers")
        self._capture: Capture | None = None
        self._more: list[Inputs] = []
        self.held = 0.0
        self.notes: list[str] = []
        self._batch = 0
        if known is None:
            first = problem.batches.first()
            self._batch = first.size
            few = take(first.inputs, slice(0, min(first.size, PROOF)))
            self._capture = self._prove(few)
            if self._capture.without_uses:
                read = problem.read("parameters not used by the first batch")
                process_group = problem.passes.process_group
                wanted = self._capture.without_uses
                self._more = examples_using(wanted, self._capture, read, process_group, problem.device)
                self._capture = self._prove(few) if self._more else self._capture
            self.notes = list(self._capture.notes)
            known = LayerSizes(self._capture.blocks, *self._measure(few))
        self.known = known
        self._kept = GradientCache()
        self._spare: tuple[object, ...] = ()
        self._roomy = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of parameters, in the order of the tangents."""
        return self.known.blocks

    def flatten(self, matrices: Sequence[Tensor], *lead: int) -> Tensor:
        """(*lead, d) from matrices of the blocks."""
        tensors: dict[str, Tensor] = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            tensors.update(block.from_matrix(matrix))
        return self.problem.selection.flatten(tensors, len(lead))

    def capture(self, inputs: Inputs) -> Capture:
        """The capture, proved on these inputs if it was not yet."""
        if self._capture is None:
            found = self._prove(take(inputs, slice(0, PROOF)), self.known.blocks)
            if found.blocks != self.known.blocks:
                raise UncapturedParameterError(
                    "expected the model to use its parameters as it did when it was fitted, got another path of its "
                    "forward pass for the first inputs. Pass train_loader to whence.load, so that the path of the "
                    "training data is followed."
                )
            self._capture = found
        return self._capture

    def _prove(self, few: Inputs, blocks: Sequence[Block] | None = None) -> Capture:
        problem = self.problem
        with rounded_products(False):  # the proof compares sums of products
            return Capture(
                problem.network,
                dict(problem.selection.parameters),
                example_inputs=few,
                more=self._more,
                blocks=blocks,
                later_notes=problem.batches.notes,
            )

    def piece(self, cotangents: int, batch: int) -> int:
        """How many examples of a batch are handled at once for so many cotangents."""
        if self.problem.chunk_size is not None:
            return self.problem.chunk_size
        return chunk_examples(self.known, cotangents, batch, self.problem.device, self.problem.budget, self.held)

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.known.example(cotangents)

    def work(self, cotangents: int) -> float:
        """Bytes that are computed on the way from one example, beside what grows with its gradients."""
        return cotangents * self.known.work

    def read(
        self,
        label: str,
        cotangents: Cotangents,
        count: int,
        state: State | None = None,
        given: Sequence[Tensor] = (),
    ) -> Iterator[tuple[slice, list[Tangent]]]:
        """One pass over the training data: yield (which examples, tangents of every block).

        Args:
            label: what the pass is for, shown with its progress.
            cotangents: what is pulled back.
            count: the number c of cotangents.
            state: as of `Linearization.read`.
            given: the same.
        """
        kept = self._kept.of(cotangents)
        if kept and sum(where.stop - where.start for where, _ in kept.values()) == self.problem.n:
            for key in self.problem.progress.track(list(kept), f"{label}, batch", len(kept)):
                yield kept[key]
            return
        keeps = self._kept.wants(cotangents)
        for batch in self.problem.read(label, state, given):
            for part, tangents, _ in self.of(batch.inputs, batch.start, cotangents, count, kept):
                if keeps:
                    self._kept.keep(cotangents, part, tangents)
                yield part, tangents
                del tangents  # the next piece needs the room

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Pull back once meanwhile for all passes that want the same outputs, as far as a small training set is kept.

        By one thread, where examples are so small that several would mostly wait for one another.
        """
        problem, passes = self.problem, self.problem.passes
        room = cache_bytes(self.known, problem.k, problem.n, self._batch, problem.device, problem.budget)
        held = problem.n <= (problem.chunk_size or problem.n)  # that many examples' gradients are held, and no more
        if not held or problem.sketch is not None or passes.shared or passes.checkpoint is not None:
            room = 0.0
        self._kept = GradientCache(int(room // max(self.example(problem.k), 1.0)))
        try:
            with self.by_few_threads(problem.n, problem.k):
                yield
        finally:
            self._kept = GradientCache()

    def by_few_threads(self, examples: int, cotangents: int) -> AbstractContextManager[None]:
        """One thread meanwhile, where a CPU computes with few examples of few numbers each."""
        return one_thread(self.problem.device.type == "cpu" and self.known.few(examples, cotangents))

    def views(self, tangents: list[Tangent], bases: Sequence[Basis]) -> list[BasisView]:
        """Every block of a piece in its basis, which alone holds its gradients from now on.

        Of gradients that are kept it is the same as in the last pass.
        """
        known = self._kept.views(tangents, bases, self.problem.device)
        if known is not None:
            return known
        found = basis_views(tangents, bases, self.problem.device)
        tangents.clear()
        return found

    def forget(self, where: slice) -> None:
        """No later pass will want this piece."""
        self._kept.forget(where)

    def of(
        self,
        inputs: Inputs,
        start: int,
        cotangents: Cotangents,
        count: int,
        kept: Mapping[tuple[int, int], Piece] | None = None,
    ) -> Iterator[tuple[slice, list[Tangent], Tensor]]:
        """Tangents of one batch, in pieces, with the outputs (n, k); those of training examples may be kept."""
        capture = self.capture(inputs)

        def pull(part: slice) -> tuple[slice, list[Tangent], Tensor]:
            where = slice(start + part.start, start + part.stop)
            if kept and (known := kept.get((where.start, where.stop))) is not None:
                return *known, self.problem.outputs[where]
            captured = capture.run(take(inputs, part))
            pulled = captured.tangents(cotangents(where, part.stop - part.start), last=True)
            return where, list(pulled), captured.outputs

        size = batch_size(inputs, "this batch")
        step = self.piece(count, size)
        self._roomy = self.problem.device.type == "cpu" and has_room_for_two(self.known, count, step, size)
        try:
            for _, found in self._pieces.of(size, step, pull):
                self._spare = ()  # by now the next piece has its room
                yield found
                del found  # the next piece needs the room
        finally:
            self._spare = ()

    def spare(self, *done: object) -> None:
        """Hold what a piece took until the next one is there, where a batch leaves the room.

        A CPU gives memory back that nobody holds, and takes long to get it again.
        """
        self._spare = done if self._roomy else ()

    def identity(self, outputs: int | None = None) -> Cotangents:
        """Every output in turn; of so many, where a view does not see all."""
        size = self.problem.k if outputs is None else outputs
        return self.constant(torch.eye(size, dtype=self.problem.dtype, device=self.problem.device))

    def constant(self, rows: Tensor) -> Cotangents:
        """The same cotangents (c, k) for every example."""
        return ConstantCotangents(rows)

    def _measure(self, few: Inputs) -> tuple[float, float, float]:
        """Bytes an example: of activations; for each cotangent of output gradients, and of what is formed."""
        n = batch_size(few, "this batch")
        captured = self.capture(few).run(few)
        ones = torch.ones(1, n, self.problem.k, dtype=captured.outputs.dtype, device=captured.outputs.device)
        fixed = each = work = 0.0
        room = self.problem.budget.limit
        for tangent in captured.tangents(ones, last=True):
            if isinstance(tangent, Kronecker):
                work = max(work, formed_bytes(tangent, self.problem.k, WORK_SHARE * room))
                fixed += 4.0 * prod(tangent.a.shape) / n
                each += 4.0 * prod(tangent.g.shape) / n
            else:
                held = tangent.parts if isinstance(tangent, Dense) else (tangent.grads,)
                each += 4.0 * sum(part.numel() for part in held) / n
        return fixed, each, work


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    widest = max((p.dtype for p in problem.selection.parameters.values()), key=lambda d: torch.finfo(d).bits)
    return torch.float64 if widest == torch.float64 else torch.float32
