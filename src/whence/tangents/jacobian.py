"""Tangents of any module through `torch.func`: rows of the Jacobian, and products with it.

Slow but general: it sees the model as a function of its parameters, so every layer, custom forward, tied weight or
bare parameter is right by construction. The layer-wise capture is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from .batches import Inputs, batch_size, take
from .forward import Network, arguments, tidy
from .select import Selection

CHUNK_BYTES = 256 * 2**20
"""A chunk of Jacobian rows is kept under this size unless `chunk_size` says otherwise."""


class Jacobian:
    """Tangent features phi(x) = d f(x) / d w of the selected parameters, as rows of size d.

    Args:
        network: the model.
        selection: the parameters w.
        chunk_size: examples whose rows are held at once; chosen from the sizes when `None`.
        dtype: of the rows handed out.
    """

    def __init__(self, network: Network, selection: Selection, chunk_size: int | None, dtype: torch.dtype) -> None:
        """Remember what to differentiate."""
        self.network = network
        self.selection = selection
        self.chunk_size = chunk_size
        self.dtype = dtype
        self.notes: list[str] = []
        self._vectorized = True
        self._forward_mode = True
        self._batched_backward = True

    @property
    def size(self) -> int:
        """The number d of features."""
        return self.selection.size

    def weights(self) -> Tensor:
        """The selected weights, (d,)."""
        return self.selection.weights(self.dtype)

    def chunk(self, outputs: int) -> int:
        """How many examples are differentiated at once."""
        row = outputs * self.size * (torch.finfo(self.dtype).bits // 8 + 8)
        return self.chunk_size or max(1, CHUNK_BYTES // row)

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, J (n, k, d)) for chunks of the batch.

        Args:
            inputs: a batch.
            outputs: the number k of outputs, for the size of the chunks.
        """
        n = batch_size(inputs, "this batch")
        step = self.chunk(outputs)
        for start in range(0, n, step):
            where = slice(start, min(start + step, n))
            yield where, self._rows(take(inputs, where))

    def jvp(self, inputs: Inputs, directions: Tensor) -> Tensor:
        """J v for several directions at once: (q, d) -> (q, n, k)."""
        parameters = self._parameters()

        def outputs(values: dict[str, Tensor]) -> Tensor:
            return self.network.with_parameters(values, inputs)

        def forward(direction: Tensor) -> Tensor:
            tangent = self._like_parameters(direction)
            result: Tensor = jvp(outputs, (parameters,), (tangent,))[1]
            return result

        def twice_backward(direction: Tensor) -> Tensor:
            tangent = self._like_parameters(direction)
            value, pull = vjp(outputs, parameters)[:2]
            # J v is the derivative of u -> <J^T u, v>, which is linear in u.
            result: Tensor = torch.func.grad(
                lambda u: sum((pull(u)[0][name] * tangent[name]).sum() for name in tangent)
            )(torch.zeros_like(value))
            return result

        if self._forward_mode:
            try:
                with sdpa_kernel(SDPBackend.MATH):
                    moved: Tensor = vmap(forward)(directions)
                    return moved.to(self.dtype)
            except (NotImplementedError, RuntimeError) as error:
                self._forward_mode = False
                self.notes.append(f"forward-mode derivatives failed ({_first_line(error)}); two backward passes serve")
        with sdpa_kernel(SDPBackend.MATH):
            return torch.stack([twice_backward(v) for v in directions]).to(self.dtype)

    def vjp(self, inputs: Inputs, cotangents: Tensor) -> Tensor:
        """J^T u summed over the batch, for several cotangents at once: (q, n, k) -> (q, d)."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.selection.parameters.items()}
        with torch.enable_grad():
            outputs = self.network.with_parameters(parameters, inputs)
            pulled = self._pull(outputs, list(parameters.values()), cotangents.to(outputs.dtype))
        flat = self.selection.flatten(dict(zip(parameters, pulled, strict=True)), leading=1)
        return flat.to(self.dtype)

    def _pull(self, outputs: Tensor, parameters: list[Tensor], cotangents: Tensor) -> list[Tensor]:
        if self._batched_backward and len(cotangents) > 1:
            try:
                return list(
                    torch.autograd.grad(
                        outputs,
                        parameters,
                        cotangents,
                        retain_graph=True,
                        is_grads_batched=True,
                        materialize_grads=True,
                    )
                )
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                self._batched_backward = False
        each = [
            torch.autograd.grad(outputs, parameters, u, retain_graph=True, materialize_grads=True) for u in cotangents
        ]
        return [torch.stack(grads) for grads in zip(*each, strict=True)]

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.selection.parameters.items()}

    def _like_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        parts = self.selection.unflatten(vector)
        return {name: part.to(self.selection.parameters[name].dtype) for name, part in parts.items()}

    def _rows(self, inputs: Inputs) -> Tensor:
        if self._vectorized:
            try:
                return self._rows_at_once(inputs)
            except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                self._vectorized = False
                self.notes.append(f"torch.vmap failed ({_first_line(error)}); tangents came one example at a time")
        return self._rows_one_by_one(inputs)

    def _rows_at_once(self, inputs: Inputs) -> Tensor:
        model = self.network.model

        def single(parameters: dict[str, Tensor], example: Inputs) -> Tensor:
            one = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example)
            args, kwargs = arguments(one)
            return tidy(functional_call(model, parameters, args, kwargs), 1, "this batch").squeeze(0)

        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, inputs)
        with sdpa_kernel(SDPBackend.MATH):
            rows = vmap(jacrev(single), in_dims=(None, axes))(self._parameters(), inputs)
        flat: Tensor = self.selection.flatten(rows, leading=2)
        return flat.to(self.dtype)

    def _rows_one_by_one(self, inputs: Inputs) -> Tensor:
        parameters = {name: p.detach().requires_grad_() for name, p in self.selection.parameters.items()}
        rows = []
        for index in range(batch_size(inputs, "this batch")):
            with torch.enable_grad():
                outputs = self.network.with_parameters(parameters, take(inputs, slice(index, index + 1)))[0]
                for output in outputs:
                    grads = torch.autograd.grad(
                        output, list(parameters.values()), retain_graph=True, materialize_grads=True
                    )
                    rows.append(self.selection.flatten(dict(zip(parameters, grads, strict=True))).to(self.dtype))
        return torch.stack(rows).reshape(batch_size(inputs, "this batch"), -1, self.size)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
