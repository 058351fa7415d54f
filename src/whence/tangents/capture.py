"""Per-layer tangents of any model: one forward pass, and backward passes down to layer outputs only.

A function mode watches the model's calls. Calls that use a selected parameter in a way a rule understands are recorded
with their inputs and their place in the graph; gradients in their outputs are then all that a backward pass has to
compute, never a gradient in a weight. What no rule understands is differentiated example by example. The first batch
proves that nothing is missing, counted twice or mixed; see `whence.tangents.proof`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError, UncapturedParameterError
from whence.tangents.assemble import Sizes, tangents_of
from whence.tangents.backward import pull_back
from whence.tangents.batches import Inputs, batch_size, take
from whence.tangents.forms import Block, Dense, Kronecker, Tangent
from whence.tangents.generic import Call, Run
from whence.tangents.layout import Layout
from whence.tangents.proof import tolerance
from whence.tangents.recorder import Record, Watch, differentiable
from whence.tangents.settle import settle


class Captured:
    """One batch, run under capture.

    Attributes:
        outputs: (n, k), without a graph.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        outputs: Tensor,
        records: Sequence[Record],
        layouts: Sequence[Layout],
        generic: Run | None,
        vectorized: bool = False,
    ) -> None:
        """Hold the graph until `tangents(..., last=True)`, or until this object goes away."""
        self.outputs = outputs.detach()
        self._blocks = blocks
        self._graph = outputs
        self._records = records
        self._layouts = layouts
        self._generic = generic
        self._vectorized = vectorized

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """Pull cotangents back to every block.

        Args:
            cotangents: (c, n, k); c backward passes are made.
            last: Whether the graph may be freed, since nothing more will be asked.
            batched: Whether all cotangents go through one vectorised backward pass (`is_grads_batched`) instead of
                one after the other; where it was proved to give the same if `None`. Measured, this is up to 1.7
                times as fast on a GPU, no faster on a CPU, and some kernels have no such form.

        Returns:
            Tangents in the order of the capture's blocks.
        """
        n, k = self.outputs.shape
        if cotangents.dim() != 3 or cotangents.shape[1:] != (n, k):
            raise ShapeError(f"expected cotangents of shape (c, {n}, {k}), got {tuple(cotangents.shape)}.")
        cotangents = cotangents.to(self.outputs)
        batched = (self._vectorized if batched is None else batched) and len(cotangents) > 1
        pulled = pull_back(self._graph, self._records, self._layouts, cotangents, last=last, batched=batched)
        found = tangents_of(self._blocks, pulled, Sizes(n, len(cotangents), self.outputs))
        if self._generic is None:
            return found
        grads = self._generic.gradients(cotangents, last)
        return [
            Dense(one.block, (grads[name].reshape(n, len(cotangents), -1),))
            if (name := one.block.name) in grads
            else one
            for one in found
        ]


class Capture:
    """Everything needed to get the tangents of a model, batch by batch, proved on the first one.

    Args:
        call: Runs the model on a batch of inputs; outputs (n, k).
        parameters: The selected parameters by name; all of them require gradients.
        example_inputs: The first batch; a few of its examples are used for the proof.

    Attributes:
        blocks: The selected parameters, in blocks, in their order.
        notes: What went another way than usual, for diagnostics.
        unused: Parameters the outputs do not depend on.
        generic: Parameters differentiated example by example, and why.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.ones(5, 3)
        >>> capture = Capture(net, dict(net.named_parameters()), example_inputs=x)
        >>> [(block.name, block.matrix_shape) for block in capture.blocks]
        [('0.weight', (1, 4, 4)), ('2.weight', (1, 2, 5))]
        >>> captured = capture.run(x)
        >>> first, second = captured.tangents(torch.eye(2)[:, None].expand(2, 5, 2), last=True)
        >>> tuple(first.inputs().shape), tuple(first.grads().shape)
        ((5, 1, 1, 4), (5, 2, 1, 1, 4))
    """

    def __init__(self, call: Call, parameters: Mapping[str, Tensor], *, example_inputs: Inputs) -> None:
        """Run the proof."""
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        if frozen or not parameters:
            got = f"frozen ones: {', '.join(frozen)}" if frozen else "none"
            raise InputError(f"expected selected parameters that require gradients, got {got}.")
        self._call = call
        self._vectorized = False
        self._settled = settle(call, parameters, example_inputs)
        self._generic = {name: parameters[name] for name in self._settled.generic}
        self.blocks = self._settled.blocks
        self.notes = tuple(self._settled.notes)
        self.unused = self._settled.unused
        self.generic: dict[str, str] = dict(self._settled.generic)
        first = next(iter(parameters.values()))
        self._vectorized = first.is_cuda and self.vectorizes(take(example_inputs, slice(0, 2)))

    def vectorizes(self, inputs: Inputs) -> bool:
        """Whether all cotangents together bring back what they bring one after the other, on these inputs."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of kernels that have no vectorised form, and would run in a slow loop
                run = self.run(inputs)
                draw = torch.Generator("cpu").manual_seed(0)
                cotangents = torch.randn(2, *run.outputs.shape, generator=draw, dtype=torch.float64, device="cpu")
                pairs = zip(*(run.tangents(cotangents, batched=way) for way in (False, True)), strict=True)
                return all(_alike(_pulled(one), _pulled(other)) for one, other in pairs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever vmap cannot follow: one cotangent after the other works always
            return False

    def run(self, inputs: Inputs) -> Captured:
        """Run the model on a batch and keep what its tangents need."""
        n = batch_size(inputs, "this batch")
        settled = self._settled
        with differentiable(), Watch(settled.followed, n, settled.choices) as watch:
            outputs = self._call(inputs)
        if outputs.dim() != 2 or len(outputs) != n:
            raise ShapeError(f"expected outputs of shape ({n}, k), got {tuple(outputs.shape)}.")
        layouts = self._layouts(watch.records, n)
        generic = None if settled.runner is None else settled.runner(self._call, self._generic, inputs)
        return Captured(self.blocks, outputs, watch.records, layouts, generic, self._vectorized)

    def _layouts(self, records: Sequence[Record], n: int) -> list[Layout]:
        """The layouts proved on the first batch."""
        seen: Counter[tuple[Any, ...]] = Counter()
        found = []
        for record in records:
            key = record.key
            known = self._settled.layouts.get(key, ())
            at = seen[key]
            seen[key] += 1
            # One layout for all uses of a kind holds for any number of them (a cell called once for every token).
            layout = known[0] if len(known) == 1 else known[at] if at < len(known) else None
            if layout is None or not layout.fits(record.shape, n):
                names = ", ".join(root.parameter for source in record.roles.values() for root in source.roots)
                raise UncapturedParameterError(
                    f"expected {names} to be used as on the first batch, with the {n} examples "
                    f"{'at ' + str(layout) if layout else 'at a known place'}, got an output of shape "
                    f"{tuple(record.shape)}. The forward pass takes another path for these data: select parameters "
                    "that are always used in the same way."
                )
            found.append(layout)
        return found


def _pulled(tangent: Tangent) -> Tensor:
    """What came back, in the smallest form that tells."""
    if isinstance(tangent, Dense):
        return tangent.values
    return tangent.grads() if isinstance(tangent, Kronecker) else tangent.grads


def _alike(one: Tensor, other: Tensor) -> bool:
    near = tolerance(one.dtype, one.device)
    return one.shape == other.shape and bool(
        (one - other).norm() <= near * one.norm() + torch.finfo(torch.float32).tiny
    )
