"""Tangents of the training set, layer by layer, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from whence.errors import UncapturedParameterError
from whence.processes import shared_out
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.capture import Capture
from whence.tangents.forms import Block, Dense, Kronecker, Tangent
from whence.tangents.linearization import Linearization
from whence.tangents.passes import State
from whence.tangents.pieces import Pieces
from whence.tangents.switches import rounded_products

from .basis import Basis
from .kept import Cotangents, Kept, Same
from .view import View, formed_bytes, views

PROOF = 8
"""Examples that a capture may be proved on."""

PIECE_BYTES = {"cpu": 48 * 2**20, "cuda": 24 * 2**30}
"""Output gradients and activations of one piece are kept under this size."""

LEAST_BYTES = 8 * 2**20
"""On a CPU also under half of the batch's, down to this size: what is computed from them takes more than they do."""

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
"""Gradients of a whole training set, as they are and turned, are kept from pass to pass up to this size."""


@dataclass(frozen=True)
class Known:
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


class LayerStream:
    """A re-iterable stream of tangents over the training data, and over any other inputs.

    Args:
        problem: the linearized training problem.
        known: what an earlier capture of the same model found out; this one is then proved on the first inputs that
            come, and must find the same blocks.

    Attributes:
        held: bytes that are in use beside the pieces, as far as they are known; pieces take what is left.
        mine: places of the blocks that are this process's business among all.
    """

    def __init__(self, problem: Linearization, known: Known | None = None) -> None:
        """Prove the capture on the first batch, and learn how much memory an example takes."""
        self.problem = problem
        self._pieces = Pieces(problem.batches.notes, "gradients of all layers")
        self._capture: Capture | None = None
        self.held = 0.0
        self.notes: list[str] = []
        if known is None:
            first = problem.batches.first()
            few = take(first.inputs, slice(0, min(first.size, PROOF)))
            self._capture = self._prove(few)
            self.notes = list(self._capture.notes)
            known = Known(self._capture.blocks, *self._measure(few))
        self.known = known
        self._kept = Kept()
        self._layers = problem.passes.layers
        owners = enumerate(shared_out([block_cost(block) for block in known.blocks], self._layers.size))
        self.mine = [at for at, owner in owners if owner == self._layers.rank]
        self._watched = self.mine
        idle = self._layers.size - len(known.blocks)
        if idle > 0:
            self.notes.append(f"{idle} of {self._layers.size} processes have no layer of their own, and rows at most")
        if not self._layers.alone:
            self._watch_only_mine()

    def _watch_only_mine(self) -> None:
        """Capture this process's layers alone, where that finds the same blocks: gradients of others are not kept."""
        few = take((first := self.problem.batches.first()).inputs, slice(0, min(first.size, PROOF)))
        names = {name for block in self.blocks for name in block.parameters}
        selected = {name: one for name, one in self.problem.selection.parameters.items() if name in names}
        if selected:
            with rounded_products(False):
                found = Capture(self.problem.network, selected, example_inputs=few)
            if found.blocks == self.blocks:
                self._capture, self._watched = found, list(range(len(found.blocks)))
        told = self._layers.tell("the layers", self._measure(few))  # pieces are of the same size everywhere
        self.known = Known(self.known.blocks, *map(max, zip(*told, strict=True)))

    def watching(self, chosen: Sequence[int]) -> LayerStream:
        """The same for some of all blocks, whichever process has them; all that share the layers must ask for it."""
        other = copy(self)
        other._capture, other.mine, other._watched = None, list(chosen), list(chosen)
        other._kept = Kept()  # gradients of other blocks
        other._watch_only_mine()
        return other

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of parameters that are this process's business, in the order of the tangents."""
        return tuple(self.known.blocks[at] for at in self.mine)

    def together(self, tensor: Tensor) -> Tensor:
        """A sum over blocks, those of other processes included; in place."""
        self._layers.add([tensor], "sums over layers")
        return tensor

    def joined(self, matrices: Sequence[Tensor], *lead: int) -> Tensor:
        """(*lead, d) from float64 matrices of the blocks of all processes."""
        tensors: dict[str, Tensor] = {}
        for block, matrix in zip(self.blocks, matrices, strict=True):
            tensors.update(block.from_matrix(matrix))
        selected, device = self.problem.selection.parameters, self.problem.device
        for name in selected.keys() - tensors.keys():
            tensors[name] = torch.zeros(*lead, *selected[name].shape, dtype=torch.float64, device=device)
        return self.together(self.problem.selection.flatten(tensors, len(lead)))

    def capture(self, inputs: Inputs) -> Capture:
        """The capture, proved on these inputs if it was not yet."""
        if self._capture is None:
            found = self._prove(take(inputs, slice(0, PROOF)))
            if found.blocks != self.known.blocks:
                raise UncapturedParameterError(
                    "expected the model to use its parameters as it did when it was fitted, got another path of its "
                    "forward pass for the first inputs. Pass train_loader to whence.load, so that the path of the "
                    "training data is followed."
                )
            self._capture = found
        return self._capture

    def _prove(self, few: Inputs) -> Capture:
        problem = self.problem
        with rounded_products(False):  # the proof compares sums of products
            return Capture(problem.network, dict(problem.selection.parameters), example_inputs=few)

    def piece(self, cotangents: int, batch: int) -> int:
        """How many examples of a batch are handled at once for so many cotangents."""
        if self.problem.chunk_size is not None:
            return self.problem.chunk_size
        each = max(self.example(cotangents), 1.0)
        usual = float(PIECE_BYTES["cuda"])
        if self.problem.device.type != "cuda":
            usual = min(PIECE_BYTES["cpu"], max(LEAST_BYTES, batch * each / 2))
        most = min(max(usual, FEW_EXAMPLES * each), 4 * usual)
        room = self.problem.budget.limit
        left = max(WITHOUT_HOLES * room - self.held, LEAST_PIECES * room) / PIECES
        work = WORK_SHARE * room // max(self.work(cotangents), 1)
        return max(1, int(min(min(most, PIECE_SHARE * room, left) // each, work)))

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.known.fixed + cotangents * self.known.each

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
        if (known := self._kept.of(cotangents)) is not None:
            yield from self.problem.progress.track(known, f"{label}, batch", len(known))
            return
        found: list[tuple[slice, list[Tangent]]] = []
        keeps = self._kept.wants(cotangents)
        for batch in self.problem.read(label, state, given):
            for part, tangents, _ in self.of(batch.inputs, batch.start, cotangents, count):
                if keeps:
                    found.append((part, tangents))
                yield part, tangents
        if keeps:
            self._kept.keep(cotangents, found)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Pull back once meanwhile for all passes that want the same outputs, where the training set is small."""
        problem, passes = self.problem, self.problem.passes
        most = KEPT_BYTES["cuda" if problem.device.type == "cuda" else "cpu"]
        room = LEAST_PIECES * problem.budget.limit
        small = 2.0 * problem.n * self.example(problem.k) <= min(most, room)
        allowed = problem.n <= (problem.chunk_size or problem.n)  # that many examples' gradients are held, and no more
        self._kept = Kept(small and allowed and problem.sketch is None and not passes.shared and passes.keeper is None)
        try:
            yield
        finally:
            self._kept = Kept()

    def views(self, tangents: list[Tangent], bases: Sequence[Basis]) -> list[View]:
        """Every block of a piece in its basis; of gradients that are kept, the same as in the last pass."""
        return self._kept.views(tangents, bases, self.problem.device) or views(tangents, bases, self.problem.device)

    def settle(self, tangents: list[Tangent]) -> None:
        """Of a piece that is kept, only its views are wanted from now on."""
        self._kept.settle(tangents)

    def of(
        self, inputs: Inputs, start: int, cotangents: Cotangents, count: int
    ) -> Iterator[tuple[slice, list[Tangent], Tensor]]:
        """Tangents of one batch, in pieces, with the outputs (n, k)."""
        capture = self.capture(inputs)

        def pull(part: slice) -> tuple[slice, list[Tangent], Tensor]:
            where = slice(start + part.start, start + part.stop)
            captured = capture.run(take(inputs, part))
            pulled = captured.tangents(cotangents(where, part.stop - part.start), last=True)
            return where, [pulled[at] for at in self._watched], captured.outputs

        size = batch_size(inputs, "this batch")
        for _, found in self._pieces.of(size, self.piece(count, size), pull):
            yield found
            del found  # the next piece needs the room

    def identity(self, outputs: int | None = None) -> Cotangents:
        """Every output in turn; of so many, where a view does not see all."""
        size = self.problem.k if outputs is None else outputs
        return self.constant(torch.eye(size, dtype=self.problem.dtype, device=self.problem.device))

    def constant(self, rows: Tensor) -> Cotangents:
        """The same cotangents (c, k) for every example."""
        return Same(rows)

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


def block_cost(block: Block) -> float:
    """About what a block costs: sums over its weights, and eigenvectors of both sides."""
    *_, o, i = (1, 1, *block.matrix_shape)
    return float(block.numel * (o + i))


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    widest = max((p.dtype for p in problem.selection.parameters.values()), key=lambda d: torch.finfo(d).bits)
    return torch.float64 if widest == torch.float64 else torch.float32
