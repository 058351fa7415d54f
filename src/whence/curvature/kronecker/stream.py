"""Tangents of the training set, layer by layer, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from math import prod

import torch
from torch import Tensor

from whence.errors import UncapturedParameterError
from whence.processes import shared_out
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.capture import Capture
from whence.tangents.eigh import alone
from whence.tangents.forms import Block, Dense, Kronecker, Tangent
from whence.tangents.linearization import Linearization
from whence.tangents.passes import State
from whence.tangents.pieces import Pieces
from whence.tangents.scan import examples_using
from whence.tangents.switches import rounded_products

from .basis import Basis
from .kept import Cotangents, Kept, Piece, Same
from .room import WORK_SHARE, Known, has_room_for_two, piece, to_keep
from .view import View, formed_bytes, views

PROOF = 8
"""Examples that a capture may be proved on."""


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
        self._more: list[Inputs] = []
        self.held = 0.0
        self.notes: list[str] = []
        self._batch = 0
        if known is None:
            first = problem.batches.first()
            self._batch = first.size
            few = take(first.inputs, slice(0, min(first.size, PROOF)))
            self._capture = self._prove(few)
            if self._capture.unseen:
                read = problem.read("parameters not used by the first batch")
                crew = problem.passes.crew
                self._more = examples_using(self._capture.unseen, self._capture, read, crew, problem.device)
                self._capture = self._prove(few) if self._more else self._capture
            self.notes = list(self._capture.notes)
            known = Known(self._capture.blocks, *self._measure(few))
        self.known = known
        self._kept = Kept()
        self._spare: tuple[object, ...] = ()
        self._roomy = False
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
                found = Capture(
                    self.problem.network,
                    selected,
                    example_inputs=few,
                    more=self._more,
                    told=self.problem.batches.notes,
                )
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
                told=problem.batches.notes,
            )

    def piece(self, cotangents: int, batch: int) -> int:
        """How many examples of a batch are handled at once for so many cotangents."""
        if self.problem.chunk_size is not None:
            return self.problem.chunk_size
        return piece(self.known, cotangents, batch, self.problem.device, self.problem.budget, self.held)

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
        room = to_keep(self.known, problem.k, problem.n, self._batch, problem.device, problem.budget)
        held = problem.n <= (problem.chunk_size or problem.n)  # that many examples' gradients are held, and no more
        if not held or problem.sketch is not None or passes.shared or passes.keeper is not None:
            room = 0.0
        self._kept = Kept(int(room // max(self.example(problem.k), 1.0)))
        try:
            with self.by_few_threads(problem.n, problem.k):
                yield
        finally:
            self._kept = Kept()

    def by_few_threads(self, examples: int, cotangents: int) -> AbstractContextManager[None]:
        """One thread meanwhile, where a CPU computes with few examples of few numbers each."""
        return alone(self.problem.device.type == "cpu" and self.known.few(examples, cotangents))

    def views(self, tangents: list[Tangent], bases: Sequence[Basis]) -> list[View]:
        """Every block of a piece in its basis, which alone holds its gradients from now on.

        Of gradients that are kept it is the same as in the last pass.
        """
        known = self._kept.views(tangents, bases, self.problem.device)
        if known is not None:
            return known
        found = views(tangents, bases, self.problem.device)
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
            return where, [pulled[at] for at in self._watched], captured.outputs

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
