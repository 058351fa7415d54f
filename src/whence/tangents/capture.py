"""Per-layer tangents of any model: one forward pass, and backward passes down to layer outputs only.

A function mode watches the model's calls. Calls that use a selected parameter in a way a rule understands are recorded
with their inputs and their place in the graph; gradients in their outputs are then all that a backward pass has to
compute, never a gradient in a weight. What no rule understands is differentiated example by example. The first batch
proves that nothing is missing, counted twice or mixed; see `whence.tangents.proof`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from whence.errors import InputError, ShapeError, UncapturedParameterError
from whence.tangents.assemble import Sizes, tangents_of
from whence.tangents.backward import pull_back
from whence.tangents.batches import Inputs, batch_size
from whence.tangents.forms import Block, Dense, Tangent
from whence.tangents.generic import Call, Run
from whence.tangents.layout import Layout
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
    ) -> None:
        """Hold the graph until `tangents(..., last=True)`, or until this object goes away."""
        self.outputs = outputs.detach()
        self._blocks = blocks
        self._graph = outputs
        self._records = records
        self._layouts = layouts
        self._generic = generic

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool = False) -> list[Tangent]:
        """Pull cotangents back to every block.

        Args:
            cotangents: (c, n, k); c backward passes are made.
            last: Whether the graph may be freed, since nothing more will be asked.
            batched: Whether all cotangents go through one vectorised backward pass (`is_grads_batched`) instead of
                one after the other. Measured, this is no faster on a CPU, and some kernels have no such form.

        Returns:
            Tangents in the order of the capture's blocks.
        """
        n, k = self.outputs.shape
        if cotangents.dim() != 3 or cotangents.shape[1:] != (n, k):
            raise ShapeError(f"expected cotangents of shape (c, {n}, {k}), got {tuple(cotangents.shape)}.")
        cotangents = cotangents.to(self.outputs)
        pulled = pull_back(self._graph, self._records, self._layouts, cotangents, last=last, batched=batched)
        found = tangents_of(self._blocks, pulled, Sizes(n, len(cotangents), self.outputs))
        if self._generic is None:
            return found
        grads = self._generic.gradients(cotangents, last)
        return [
            Dense(one.block, grads[name].reshape(n, len(cotangents), -1)) if (name := one.block.name) in grads else one
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
        self._settled = settle(call, parameters, example_inputs)
        self._generic = {name: parameters[name] for name in self._settled.generic}
        self.blocks = self._settled.blocks
        self.notes = tuple(self._settled.notes)
        self.unused = self._settled.unused
        self.generic: dict[str, str] = dict(self._settled.generic)

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
        return Captured(self.blocks, outputs, watch.records, layouts, generic)

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
