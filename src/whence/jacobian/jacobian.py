"""The Jacobian J of the outputs in the selected parameters: its rows, J v and J^T u, for any layers.

Rows come from the capture. J v comes from forward-mode derivatives if they agree with a backward pass, else from the
rows; the notes say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import jvp, vmap

from whence.data.batches import Inputs, batch_size, take
from whence.errors import SingularCurvatureError, first_line
from whence.jacobian.capture import Capture
from whence.jacobian.functionals import SoftmaxColumns
from whence.jacobian.gradients import Block, normal_numbers
from whence.jacobian.network import Network, Selection
from whence.jacobian.record import gradients
from whence.runtime.execution import Chunks
from whence.runtime.model_state import plain_kernels

CHUNK_BYTES = 256 * 2**20  # largest chunk of Jacobian rows, unless `chunk_size` is given


@dataclass(eq=False)
class Jacobian:
    """The Jacobian phi(x) = d f(x) / d w of the outputs in the selected parameters, as rows of size d."""

    network: Network
    selection: Selection
    chunk_size: int | None  # examples whose rows are held at once; None for as many as `chunk_bytes` hold
    dtype: torch.dtype
    chunk_bytes: int = CHUNK_BYTES
    orthonormal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self._chunks = Chunks(self.notes, "tangents")
        self._capture: Capture | None = None
        self._forward_mode: bool | None = None  # whether it works; None if not yet tried

    @property
    def size(self) -> int:
        """The number d of features."""
        return self.selection.size

    @property
    def precision(self) -> float:
        """The relative precision of the coarsest selected weights."""
        return max(torch.finfo(p.dtype).eps for p in self.selection.parameters.values())

    def weights(self) -> Tensor:
        """The selected weights, (d,)."""
        return self.selection.weights(self.dtype)

    def into(self, vectors: Tensor) -> Tensor:
        """Features are the selected weights themselves."""
        return vectors

    def lift(self, step: Tensor) -> Tensor:
        """Features are the selected weights themselves."""
        return step

    def chunk(self, outputs: int) -> int:
        """Number of examples differentiated at once."""
        row = outputs * self.size * (torch.finfo(self.dtype).bits // 8 + 8)
        return self.chunk_size or max(1, self.chunk_bytes // row)

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, J (n, k, d)) in chunks of the batch: the more outputs k, the smaller."""
        size = batch_size(inputs, "this batch")
        return self._chunks.of(size, self.chunk(outputs), lambda where: self._rows(take(inputs, where)))

    def _rows(self, inputs: Inputs) -> Tensor:
        """The rows (n, k, d), from the gradients of every parameter; each is freed when it is in the rows."""
        if self._capture is None:
            selected = dict(self.selection.parameters)
            blocks = [Block(name, (name,), (tuple(p.shape),), "dense") for name, p in selected.items()]
            try:
                found = Capture(self.network, selected, example_inputs=inputs, blocks=blocks, later_notes=self.notes)
            except SingularCurvatureError:  # gradients are not finite, so there is nothing to compare with
                singles = [take(inputs, slice(at, at + 1)) for at in range(batch_size(inputs, "this batch"))]
                return torch.stack([self.vjp(one, self._units(*self.network(one).shape)) for one in singles])
            self._capture = found
            self.notes.extend(found.notes)
        captured = self._capture.run(inputs)
        rows = torch.empty(*captured.outputs.shape, self.size, dtype=self.dtype, device=self.network.device)
        parts = self.selection.unflatten(rows)  # views
        for tangent in captured.tangents(self._units(*captured.outputs.shape), last=True):
            parts[tangent.block.name].copy_(tangent.materialize().reshape(parts[tangent.block.name].shape))
        return rows

    def _units(self, n: int, k: int) -> Tensor:
        """Cotangents (k, n, k), one for each output."""
        return torch.eye(k, device=self.network.device).unsqueeze(1).expand(-1, n, -1)

    def vjp(self, inputs: Inputs, cotangents: Tensor) -> Tensor:
        """J^T u summed over the batch, for several cotangents at once: (q, n, k) -> (q, d)."""
        leaves = list(self.selection.parameters.values())

        def pull(where: slice) -> Tensor:
            with torch.enable_grad(), plain_kernels():
                outputs = self.network(take(inputs, where))
                wanted = cotangents[:, where].to(outputs.dtype)
                step = 1 if isinstance(inputs, SoftmaxColumns) else max(1, self.chunk(1) // len(outputs))
                each = (gradients(outputs, leaves, part) for part in wanted.split(step))
                parts = zip(*each, strict=True)
                return torch.cat([torch.cat(one).reshape(len(wanted), -1) for one in parts], dim=1).to(self.dtype)

        size = batch_size(inputs, "this batch")
        total = torch.zeros(len(cotangents), self.size, dtype=self.dtype, device=self.network.device)
        for _, part in self._chunks.of(size, self.chunk_size or size, pull):
            total += part
        return total

    def jvp(self, inputs: Inputs, directions: Tensor) -> Tensor:
        """J v for several directions at once: (q, d) -> (q, n, k)."""

        def push(where: slice) -> Tensor:
            some = take(inputs, where)
            if self._forward_mode is None:
                self._forward_mode = self._forward_mode_works(some)
            if not self._forward_mode:
                return torch.cat([rows @ directions.T for _, rows in self.rows(some, len(directions))]).permute(2, 0, 1)
            step = max(1, self.chunk(1) // (where.stop - where.start))
            return torch.cat([self._push_forward(some, part) for part in directions.split(step)])

        size = batch_size(inputs, "this batch")
        return torch.cat([part for _, part in self._chunks.of(size, self.chunk_size or size, push)], dim=1)

    def _push_forward(self, inputs: Inputs, directions: Tensor) -> Tensor:
        """J v by forward-mode differentiation, all directions at once: (q, d) -> (q, n, k)."""
        parameters = self.selection.detached()

        def along(direction: Tensor) -> Any:
            tangents = self.selection.unflatten(direction, cast=True)
            pushed = jvp(lambda values: self.network.with_parameters(values, inputs), (parameters,), (tangents,))
            return pushed[1]

        with torch.no_grad(), plain_kernels():  # no graph for unselected parameters
            found: Tensor = vmap(along, randomness="same")(directions)
        return found.to(self.dtype)

    def _forward_mode_works(self, inputs: Inputs) -> bool:
        """<u, J v> must equal <J^T u, v>: torch's modes differ, for example, on the padding row of an embedding."""
        try:
            v = normal_numbers((1, self.size), 0, self.weights())
            moved = self._push_forward(inputs, v)
            u = normal_numbers(moved.shape, 0, moved)
            pulled = self.vjp(inputs, u)
            gap = float(((u * moved).sum() - (pulled * v).sum()).abs())
            scale = float(u.norm() * moved.norm() + pulled.norm() * v.norm())
            if gap <= self.precision**0.5 * scale:
                return True
            why = f"not the transpose of a backward pass, by {gap / scale:.1g}"
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # anything forward mode does not support
            why = first_line(error.__cause__ or error)
        self.notes.append(f"forward-mode derivatives failed ({why}); products with the rows of the Jacobian instead")
        return False
