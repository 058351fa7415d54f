"""The first pass over the training data: what a network says about them, and what its loss makes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.errors import ShapeError
from whence.likelihoods import Likelihood
from whence.memory import Budget
from whence.progress import Progress

from .batches import Batches, check_finite, take
from .forward import Network
from .linearization import Linearization
from .losses import Rows, check_alike, join, plain_weights, pooled
from .select import Selection
from .shards import exchanged
from .sketches import COLUMNS, MANY, Sketch, SketchedBatches


def linearize(
    network: Network,
    selection: Selection,
    batches: Batches,
    likelihood: Likelihood,
    *,
    dtype: torch.dtype,
    budget: Budget,
    progress: Progress,
    chunk_size: int | None,
    columns: int | None = None,
    seed: int = 0,
) -> Linearization:
    """Run the network once over its training data and check everything on the way.

    Args:
        network: the model.
        selection: its parameters that count.
        batches: the training data.
        likelihood: the loss.
        dtype: of the algebra.
        budget: memory that may be taken.
        progress: how far it is.
        chunk_size: examples whose tangents are held at once.
        columns: of the Hessian's root that are looked at; `None` for all outputs, 0 to decide by their number.
        seed: of what is random about these columns.
    """
    rest = (dtype, budget, progress, chunk_size)
    if columns == 0:
        columns = _enough(network, batches)
    if columns is None:
        found = _all_rows(network, batches, likelihood, dtype, budget)
        passes = batches.passes
        if not passes.crew.alone:
            found = exchanged(passes, pooled(found) if found else None, network.device)
        outputs, residuals, roots, weights, units = join(found)
        seen = (outputs, residuals, roots, weights)
        return Linearization(network, selection, batches, likelihood, *seen, *rest, units, None, passes)
    sketched = SketchedBatches(batches, network, likelihood, columns, seed, dtype)
    passed = _Sketching(sketched, network.device)
    outputs, residuals, roots, weights, sketched.largest = passed.joined()
    seen = (outputs, residuals, roots, plain_weights([weights]))
    parts = (sketched, likelihood, *seen, *rest, None, passed.sketch, batches.passes)
    return Linearization(network, selection, *parts)


def _all_rows(
    network: Network, batches: Batches, likelihood: Likelihood, dtype: torch.dtype, budget: Budget
) -> list[Rows]:
    """What the loss says about every batch, all outputs in sight."""
    rows: list[Rows] = []
    shape = torch.Size()
    for number, batch in enumerate(batches.read("outputs")):
        where = f"batch {number}"
        with torch.no_grad():
            out = network.shaped(batch.inputs, where)
        shape = out.shape[1:] if number == 0 else shape
        if out.shape[1:] != shape:
            raise ShapeError(
                f"expected {_sizes(shape)} as in batch 0, got {_sizes(out.shape[1:])} in {where}. Wrap the model in a "
                "module that returns the same number of outputs for every batch. Sequences of several lengths are "
                "padded to one, or seen through so many mixtures of their outputs: fit(..., outputs=16)."
            )
        check_finite(out, "outputs of the model", where)
        rows.append(Rows.of(likelihood, out.detach().to(dtype), batch, where))
        held = sum(row.roots.numel() for row in rows if row.roots is not None) * rows[0].outputs.element_size()
        budget.require(
            3.0 * held,  # they are joined; and roots of the noise and leverages are as large
            f"the Hessians of the {likelihood.name} loss for {batch.start + batch.size} training examples or more and "
            f"{_sizes(out.shape[1:])}",
            "Look at a few mixtures of the outputs, for example outputs=16, use fewer training examples, or a larger "
            "max_memory.",
        )
    return rows


def _enough(network: Network, batches: Batches) -> int | None:
    """All outputs where they are few, and a fixed number of columns where they are many."""
    first = batches.first()
    with torch.no_grad():
        shape = network.shaped(take(first.inputs, slice(0, 1)), "batch 0").shape[1:]
    if shape.numel() <= MANY:
        return None
    batches.notes.append(
        f"of {_sizes(shape)}, {COLUMNS} columns of the loss's Hessian were looked at in each training example, half of "
        "them the largest and half of them random mixtures of the rest, and the residual; outputs='all' looks at all"
    )
    return COLUMNS


class _Sketching:
    """One pass over sketched batches."""

    def __init__(self, batches: SketchedBatches, device: torch.device) -> None:
        self.device, self.crew, self.layers = device, batches.plain.passes.crew, batches.plain.passes.layers
        self.parts: list[tuple[Tensor, ...]] = []
        given: list[bool] = []
        counted, shape = 0, torch.Size()
        for batch, here, reduced in batches.reduced("outputs"):
            shape = here if not self.parts else shape
            if here[-1] != shape[-1] or len(here) != len(shape):
                raise ShapeError(
                    f"expected {_sizes(shape)} as in batch 0, got {_sizes(here)} from example {batch.start} on. Wrap "
                    "the model in a module that returns the same number of outputs for every batch."
                )
            self.parts.append((reduced.outputs, reduced.residuals, reduced.roots, reduced.weights, reduced.largest))
            given.append(batch.weights is not None)
            counted += reduced.counted
        told = self.crew.tell("the outputs", (tuple(shape), counted, given))
        check_alike([one for each in told for one in each[2]])
        shape = next(torch.Size(each[0]) for each in told if each[0])
        self.sketch = Sketch(batches.columns, shape[-1], len(shape) > 1, sum(each[1] for each in told))

    def joined(self) -> list[Tensor]:
        """Outputs, residuals, roots, weights, and which columns were the largest, of all examples.

        Processes that share the layers read the same data, and may choose otherwise among columns of nearly equal size:
        the first one's choice, and what it saw, are those of all.
        """
        parts = [torch.cat(each) for each in zip(*self.parts, strict=True)]
        self.layers.share(parts, 0, "the outputs")
        local: list[Tensor | None] = [*parts] or [None] * 5
        return [self.crew.gather(one, "the outputs", self.device) for one in local]


def _sizes(shape: torch.Size) -> str:
    """(..., k) in words."""
    return f"{shape[-1]} outputs" + (f" at {' x '.join(map(str, shape[:-1]))} positions" if len(shape) > 1 else "")
