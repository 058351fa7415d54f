"""Tangents of the training set, layer by layer, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.borrow import rounded_products
from whence.tangents.capture import Capture
from whence.tangents.forms import Block, Dense, Kronecker, Tangent
from whence.tangents.linearization import Linearization

PIECE_BYTES = {"cpu": 192 * 2**20, "cuda": 12 * 2**30}
"""Output gradients and activations of one piece are kept under this size."""

Cotangents = Callable[[slice, int], Tensor]
"""From the place among the training examples and their number n to cotangents (c, n, k)."""


class LayerStream:
    """A re-iterable stream of tangents over the training data, and over any other inputs.

    Args:
        problem: the linearized training problem.
    """

    def __init__(self, problem: Linearization) -> None:
        """Prove the capture on the first batch, and learn how much memory an example takes."""
        self.problem = problem
        first = next(iter(problem.batches.read(None)))
        few = take(first.inputs, slice(0, min(first.size, 8)))
        with rounded_products(False):  # the proof compares sums of products
            self.capture = Capture(problem.network, dict(problem.selection.parameters), example_inputs=few)
        self.notes = list(self.capture.notes)
        self._bytes = self._measure(few)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of parameters, in the order of the tangents."""
        return self.capture.blocks

    def piece(self, cotangents: int) -> int:
        """How many examples are handled at once for so many cotangents."""
        if self.problem.chunk_size is not None:
            return self.problem.chunk_size
        fixed, each = self._bytes
        limit = PIECE_BYTES["cuda" if self.problem.device.type == "cuda" else "cpu"]
        return max(1, int(limit // max(fixed + cotangents * each, 1)))

    def read(self, label: str, cotangents: Cotangents, count: int) -> Iterator[tuple[slice, list[Tangent]]]:
        """One pass over the training data: yield (which examples, tangents of every block).

        Args:
            label: what the pass is for, shown with its progress.
            cotangents: what is pulled back.
            count: the number c of cotangents.
        """
        for batch in self.problem.read(label):
            for part, tangents, _ in self.of(batch.inputs, batch.start, cotangents, count):
                yield part, tangents

    def of(
        self, inputs: Inputs, start: int, cotangents: Cotangents, count: int
    ) -> Iterator[tuple[slice, list[Tangent], Tensor]]:
        """Tangents of one batch, in pieces, with the outputs (n, k)."""
        size = batch_size(inputs, "this batch")
        step = self.piece(count)
        for low in range(0, size, step):
            high = min(low + step, size)
            captured = self.capture.run(take(inputs, slice(low, high)))
            where = slice(start + low, start + high)
            yield where, captured.tangents(cotangents(where, high - low), last=True), captured.outputs

    def identity(self) -> Cotangents:
        """Every output in turn."""
        return self.constant(torch.eye(self.problem.k, dtype=self.problem.dtype, device=self.problem.device))

    def constant(self, rows: Tensor) -> Cotangents:
        """The same cotangents (c, k) for every example."""
        return lambda _, n: rows.unsqueeze(1).expand(-1, n, -1)

    def _measure(self, few: Inputs) -> tuple[float, float]:
        """Bytes an example: of activations, and of output gradients for each cotangent."""
        n = batch_size(few, "this batch")
        captured = self.capture.run(few)
        ones = torch.ones(1, n, self.problem.k, dtype=captured.outputs.dtype, device=captured.outputs.device)
        fixed = each = 0.0
        for tangent in captured.tangents(ones, last=True):
            if isinstance(tangent, Kronecker):
                fixed += 4.0 * _numel(tangent.a.shape) / n
                each += 4.0 * _numel(tangent.g.shape) / n
            else:
                held = tangent.values if isinstance(tangent, Dense) else tangent.grads
                each += 4.0 * held.numel() / n
        return fixed, each


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    widest = max((p.dtype for p in problem.selection.parameters.values()), key=lambda d: torch.finfo(d).bits)
    return torch.float64 if widest == torch.float64 else torch.float32
