"""The Jacobian J of the outputs in the selected parameters: its rows, J v and J^T u, without a layer being known.

Rows and J v have several implementations, each more general and slower than the one before. The first that works, and
agrees with a backward pass, is used; the diagnostics say which ones failed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vmap
from torch.utils._pytree import tree_map

from whence.data.batches import Inputs, batch_size, take
from whence.errors import TooLargeError
from whence.jacobian.capture import Capture
from whence.jacobian.network import Network, Selection, first_line
from whence.jacobian.record import gradients
from whence.runtime.execution import Chunks
from whence.runtime.model_state import plain_kernels

CHUNK_BYTES = 256 * 2**20
"""A chunk of Jacobian rows is kept under this size unless `chunk_size` says otherwise."""


class Jacobian:
    """The Jacobian phi(x) = d f(x) / d w of the outputs in the selected parameters, as rows of size d.

    Args:
        network: the model.
        selection: the parameters w.
        chunk_size: examples whose rows are held at once; chosen from the sizes when `None`.
        dtype: of the rows handed out.
        chunk_bytes: size of a chunk where `chunk_size` is `None`.
    """

    def __init__(
        self,
        network: Network,
        selection: Selection,
        chunk_size: int | None,
        dtype: torch.dtype,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Remember what to differentiate."""
        self.network = network
        self.selection = selection
        self.chunk_size = chunk_size
        self.chunk_bytes = chunk_bytes
        self.dtype = dtype
        self.notes: list[str] = []
        self._chunks = Chunks(self.notes, "tangents")
        self._row_methods = _Methods(
            self.notes,
            "{failed} failed ({why}); tangents by {next}",
            ("torch.vmap", self._rows_by_vmap),
            ("the capture of layers", self._rows_by_capture),
            ("one example at a time", self._rows_one_by_one),
        )
        self._jvp_methods = _Methods(
            self.notes,
            "{failed} failed ({why}); {next} served instead",
            ("forward-mode derivatives", partial(self._verified_jvp, forward_mode)),
            ("two backward passes", partial(self._verified_jvp, double_backward)),
            ("the rows of the Jacobian", self._jvp_by_rows),
        )
        self._capture: Capture | None = None
        self._batched_backward = True
        self._verified: set[Any] = set()  # ways to compute J v, and batch sizes of rows by vmap

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

    def prescale(self, ridge: float | None) -> Tensor:
        """No prior knowledge of the sizes: ones."""
        return torch.ones(self.size, dtype=self.dtype, device=self.network.device)

    @property
    def orthonormal(self) -> bool:
        """Features are the selected weights themselves."""
        return True

    def into(self, vectors: Tensor) -> Tensor:
        """Features are the selected weights themselves."""
        return vectors

    def lift(self, step: Tensor) -> Tensor:
        """Features are the selected weights themselves."""
        return step

    def chunk(self, outputs: int) -> int:
        """How many examples are differentiated at once."""
        row = outputs * self.size * (torch.finfo(self.dtype).bits // 8 + 8)
        return self.chunk_size or max(1, self.chunk_bytes // row)

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, J (n, k, d)) for chunks of the batch.

        Args:
            inputs: a batch.
            outputs: the number k of outputs, for the size of the chunks.
        """
        size = batch_size(inputs, "this batch")
        return self._chunks.of(size, self.chunk(outputs), lambda where: self._rows(take(inputs, where)))

    def jvp(self, inputs: Inputs, directions: Tensor) -> Tensor:
        """J v for several directions at once: (q, d) -> (q, n, k)."""

        def push(where: slice) -> Tensor:
            some = take(inputs, where)
            step = max(1, self.chunk(1) // (where.stop - where.start))
            with self._out_of_memory(some), plain_kernels():
                return torch.cat([self._jvp_methods(some, part).to(self.dtype) for part in directions.split(step)])

        size = batch_size(inputs, "this batch")
        return torch.cat([part for _, part in self._chunks.of(size, self.chunk_size or size, push)], dim=1)

    def vjp(self, inputs: Inputs, cotangents: Tensor) -> Tensor:
        """J^T u summed over the batch, for several cotangents at once: (q, n, k) -> (q, d)."""

        def pull(where: slice) -> Tensor:
            leaves = self.selection.leaves()
            with torch.enable_grad(), plain_kernels():
                outputs = self.network.with_parameters(leaves, take(inputs, where))
                wanted = cotangents[:, where].to(outputs.dtype)
                step = max(1, self.chunk(1) // len(outputs))
                return torch.cat([self._backward(outputs, leaves, part) for part in wanted.split(step)])

        size = batch_size(inputs, "this batch")
        total = torch.zeros(len(cotangents), self.size, dtype=self.dtype, device=cotangents.device)
        for _, part in self._chunks.of(size, self.chunk_size or size, pull):
            total += part
        return total

    def _backward(self, outputs: Tensor, leaves: dict[str, Tensor], cotangents: Tensor) -> Tensor:
        """J^T u for cotangents (q, n, k), (q, d)."""
        if not outputs.requires_grad:
            return torch.zeros(len(cotangents), self.size, dtype=self.dtype, device=outputs.device)
        values = list(leaves.values())
        if self._batched_backward and len(cotangents) > 1:
            try:
                found = gradients(outputs, values, cotangents, batched=True)
                return self.selection.flatten(dict(zip(leaves, found, strict=True)), leading=1).to(self.dtype)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # an operation that vmap cannot follow: one cotangent at a time works always
                self._batched_backward = False
        each = []
        for u in cotangents:
            dense = (grad.to_dense() if grad.is_sparse else grad for grad in gradients(outputs, values, u))
            each.append(self.selection.flatten(dict(zip(leaves, dense, strict=True))).to(self.dtype))
        return torch.stack(each)

    # --- Rows ---------------------------------------------------------------------------------------------------------

    def _rows(self, inputs: Inputs) -> Tensor:
        with self._out_of_memory(inputs):
            return self._row_methods(inputs)

    def _rows_by_vmap(self, inputs: Inputs) -> Tensor:
        def single(parameters: dict[str, Tensor], example: Inputs) -> Tensor:
            one = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example)
            return self.network.with_parameters(parameters, one).squeeze(0)

        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, inputs)
        with torch.no_grad(), plain_kernels():  # no graph of the parameters that were not selected
            found = vmap(jacrev(single), in_dims=(None, axes), randomness="different")(
                self.selection.detached(), inputs
            )
        rows = self.selection.flatten(found, leading=2).to(self.dtype)
        if len(rows) not in self._verified:
            self._verify_rows(rows, inputs)
        return rows

    def _verify_rows(self, rows: Tensor, inputs: Inputs) -> None:
        """u^T J must be what a backward pass gives: torch has rules for vmap that are silently wrong at some sizes."""
        u = self._normal(rows.shape[:2]).unsqueeze(0)
        expected, summed = self.vjp(inputs, u)[0], u[0].flatten() @ rows.flatten(0, 1)
        gap, scale = float((expected - summed).norm()), float(expected.norm() + u.norm() * rows.norm())
        if gap > self.precision**0.5 * scale:
            raise ArithmeticError(f"not the rows of a backward pass, by {gap / scale:.1g}")
        self._verified.add(len(rows))

    def _rows_by_capture(self, inputs: Inputs) -> Tensor:
        """A whole batch, where its inputs decide on the path through the model, as Hugging Face's masks do."""
        if self._capture is None:
            selected = dict(self.selection.parameters)
            self._capture = Capture(self.network, selected, example_inputs=inputs, later_notes=self.notes)
        captured = self._capture.run(inputs)
        n, k = captured.outputs.shape
        units = torch.eye(k, dtype=captured.outputs.dtype, device=captured.outputs.device)
        tensors: dict[str, Tensor] = {}
        for tangent in captured.tangents(units.unsqueeze(1).expand(-1, n, -1), last=True):
            tensors.update(tangent.block.from_matrix(tangent.materialize()))
        return self.selection.flatten(tensors, leading=2).to(self.dtype)

    def _rows_one_by_one(self, inputs: Inputs) -> Tensor:
        rows = []
        for example in _examples(inputs):
            leaves = self.selection.leaves()
            with torch.enable_grad(), plain_kernels():
                outputs = self.network.with_parameters(leaves, example)  # (1, k)
                units = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).unsqueeze(1)
                rows.append(self._backward(outputs, leaves, units))
        return torch.stack(rows)

    # --- J v ----------------------------------------------------------------------------------------------------------

    def _verified_jvp(self, method: Callable[..., Tensor], inputs: Inputs, directions: Tensor) -> Tensor:
        """<u, J v> must be <J^T u, v>: torch's two modes differ, for example, on the padding row of an embedding."""
        if method not in self._verified:
            v = self._normal((1, self.size))
            moved = method(self.network, self.selection, inputs, v).to(self.dtype)
            u = self._normal(moved.shape)
            pulled = self.vjp(inputs, u)
            gap = float(((u * moved).sum() - (pulled * v).sum()).abs())
            scale = float(u.norm() * moved.norm() + pulled.norm() * v.norm())
            if gap > self.precision**0.5 * scale:
                raise ArithmeticError(f"not the transpose of a backward pass, by {gap / scale:.1g}")
            self._verified.add(method)
        return method(self.network, self.selection, inputs, directions)

    def _jvp_by_rows(self, inputs: Inputs, directions: Tensor) -> Tensor:
        wanted = directions.to(self.dtype).T
        return torch.cat([self._rows(example) @ wanted for example in _examples(inputs)]).permute(2, 0, 1)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        """Normal numbers, the same every time."""
        cpu = torch.Generator("cpu").manual_seed(0)
        return torch.randn(*shape, generator=cpu, dtype=self.dtype, device="cpu").to(self.network.device)

    @contextmanager
    def _out_of_memory(self, inputs: Inputs) -> Iterator[None]:
        """Say how many examples were too many."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            n = batch_size(inputs, "this batch")
            raise TooLargeError(
                f"expected the tangents of {n} examples to fit on {self.network.device}, got out of memory. "
                f"Pass a chunk_size below {n}, or smaller batches."
            ) from error


class _Methods:
    """Several implementations of one function, the fastest first: those that fail on some input are not used again.

    Args:
        notes: gets a line for each one that failed.
        note: the text, with {failed}, {why} and {next}.
        methods: names and functions.
    """

    def __init__(self, notes: list[str], note: str, *methods: tuple[str, Callable[..., Tensor]]) -> None:
        self.notes, self.note, self.methods = notes, note, [*methods]

    def __call__(self, *args: Any) -> Tensor:
        while True:
            name, method = self.methods[0]
            try:
                return method(*args)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model may do that this implementation cannot follow
                if len(self.methods) == 1:
                    raise
                del self.methods[0]
                following = self.methods[0][0]
                self.notes.append(self.note.format(failed=name, why=first_line(error), next=following))


def _examples(inputs: Inputs) -> Iterator[Inputs]:
    return (take(inputs, slice(at, at + 1)) for at in range(batch_size(inputs, "this batch")))


class _ForwardModeLock:
    """Torch counts the nesting of forward-mode derivatives for the whole process: two threads would share a level."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


_FORWARD_MODE = _ForwardModeLock()


def forward_mode(network: Network, selection: Selection, inputs: Inputs, directions: Tensor) -> Tensor:
    """J v by forward-mode differentiation, all directions at once: (q, d) -> (q, n, k)."""
    parameters = selection.detached()

    def along(direction: Tensor) -> Tensor:
        tangents = selection.unflatten(direction, cast=True)
        pair = jvp(lambda values: network.with_parameters(values, inputs), (parameters,), (tangents,))
        return cast(Tensor, pair[1])

    with _FORWARD_MODE.lock, torch.no_grad():  # no graph of the parameters that were not selected
        found: Tensor = vmap(along, randomness="same")(directions)
    return found


def double_backward(network: Network, selection: Selection, inputs: Inputs, directions: Tensor) -> Tensor:
    """J v as the derivative of u -> <J^T u, v>, which is linear in u: (q, d) -> (q, n, k)."""
    leaves = selection.leaves()
    with torch.enable_grad():
        outputs = network.with_parameters(leaves, inputs)
        if not outputs.requires_grad:
            return outputs.new_zeros(len(directions), *outputs.shape)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, list(leaves.values()), u, create_graph=True, materialize_grads=True)
        found = []
        for direction in directions:
            tangent = selection.unflatten(direction, cast=True)
            inner = torch.stack([(g * tangent[name]).sum() for name, g in zip(leaves, pulled, strict=True)]).sum()
            found.append(gradients(inner, [u], torch.ones_like(inner))[0])
    return torch.stack(found)
