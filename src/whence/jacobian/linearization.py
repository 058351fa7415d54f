"""A trained network, linearized around its weights in the selected parameters, with its training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from whence.data.batches import Batch, Batches, Inputs, take
from whence.data.targets import LossDerivatives, Positions, check_weights_given, diagonal_blocks, none_if_ones
from whence.errors import ShapeError
from whence.jacobian.capture import Capture
from whence.jacobian.functionals import OutputFunctional
from whence.jacobian.gradients import HALVES
from whence.jacobian.jacobian import CHUNK_BYTES, Jacobian
from whence.jacobian.network import CheckedOutputs, Network, Selection, describe_outputs
from whence.jacobian.sketches import ALL_COLUMNS, ALL_OUTPUTS, COLUMNS, HessianSketch, Labels, SketchedOutputs
from whence.likelihoods import Likelihood, Noise
from whence.likelihoods.base import residual_degrees
from whence.linalg import eigh
from whence.runtime.checkpoint import State
from whence.runtime.execution import Execution, Passes, Precision, Progress
from whence.runtime.memory import Budget, free_memory, readable

CHUNK_SHARE = 0.05  # largest share of the memory budget for a chunk of Jacobian rows


@dataclass(frozen=True)
class Folds:
    """Parts of the training data to leave out, one at a time: by default, single examples.

    Attributes:
        groups: (n,) number of each example's group, counted from zero, if whole groups are left out.
        width: number of outputs of an example left out at once, if single positions or outputs are left out.

    Examples:
        >>> import torch
        >>> Folds(width=1).blocks(torch.eye(2).expand(3, 2, 2)).shape
        torch.Size([6, 1, 1])
    """

    groups: Tensor | None = None
    width: int | None = None

    def blocks(self, matrices: Tensor) -> Tensor:
        """Diagonal blocks (N, w, w) of matrices (n, k, k): one for each part that is left out at once."""
        k = matrices.shape[1]
        return diagonal_blocks(matrices, 1 if self.width is None else k // self.width).flatten(0, 1)

    def parts(self, vectors: Tensor) -> Tensor:
        """Parts (N, w) of vectors (n, k): one for each part that is left out at once."""
        return vectors if self.width is None else vectors.reshape(-1, self.width)


@dataclass(frozen=True)
class Linearization:
    """A trained network, linearized around its weights in the selected parameters, with its training data.

    With a sketch of the Hessians, k counts the combinations of outputs that are used for each example, and vectors
    (n, k) are coordinates in these; see `whence.jacobian.sketches`.
    """

    network: Network
    selection: Selection
    batches: Batches
    likelihood: Likelihood
    outputs: Tensor  # (n, k) of the training examples; k counts the outputs of all positions
    residuals: Tensor  # (n, k) minus the gradient of the weighted loss in the outputs; y - f(x) for squared error
    hessian_roots: Tensor  # (n, k, q) roots of the weighted loss's Hessians
    sample_weights: Tensor | None  # (n,) zero for examples that the loss leaves out; None if all are one
    units: Positions  # of the outputs of an example
    dtype: torch.dtype
    budget: Budget
    progress: Progress
    chunk_size: int | None
    sketch: HessianSketch | None = None
    gram: Tensor | None = None  # (n, k, k) inner products of the combinations of a sketch
    passes: Passes = field(default_factory=Passes)  # passes over the training data; several processes may share them
    folds: Folds = field(default_factory=Folds)  # what is left out at once when leave-one-out chooses the ridge
    precision: Precision = "float32"  # of products
    class_targets: Tensor | None = None  # (n, k) targets of classes as the likelihood encodes them, if all are known
    captures: list[Capture] = field(default_factory=list)  # the capture of the layers' gradients, once it is verified

    @property
    def n(self) -> int:
        """Number of training examples."""
        return self.outputs.shape[0]

    @property
    def k(self) -> int:
        """Number of outputs."""
        return self.outputs.shape[1]

    @property
    def counted(self) -> int:
        """Number of training examples with weight above zero."""
        return self.n if self.sample_weights is None else int((self.sample_weights > 0).sum())

    @property
    def total_weight(self) -> float:
        """Sum of the sample weights; n if all are one."""
        return float(self.n if self.sample_weights is None else self.sample_weights.sum())

    @property
    def numbers(self) -> int:
        """Number of residuals that can vary freely; n k for squared error."""
        return self.counted_units * self.likelihood.numbers(self.width)

    @property
    def width(self) -> int:
        """Number of outputs at each position; k without positions."""
        return self.units.width

    @property
    def counted_units(self) -> int:
        """Number of positions with weight above zero, over all training examples; of examples without positions."""
        if self.sketch is not None:
            return self.sketch.counted
        weights = self.units.weights
        return self.n * (self.k // self.width) if weights is None else int((weights > 0).sum())

    @property
    def dense(self) -> bool:
        """Whether the network has outputs at several positions of an example."""
        return bool(self.units.shape)

    @property
    def half(self) -> bool:
        """Whether a single-precision network runs in half precision for its gradients."""
        return self.precision == "fp16" and all(p.dtype == torch.float32 for p in self.selection.parameters.values())

    @property
    def gradients_are_half(self) -> bool:
        """Whether gradients have the digits of half precision: the network runs in it, or has such weights."""
        return self.half or all(p.dtype in HALVES for p in self.selection.parameters.values())

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.network.device

    def output_count(self, inputs: Inputs) -> int:
        """Number of outputs of an example: k, or of functionals."""
        return inputs.count if isinstance(inputs, OutputFunctional) else self.k

    def jacobian(self) -> Jacobian:
        """The Jacobian of the network in the selected parameters."""
        chunk_bytes = min(CHUNK_BYTES, int(CHUNK_SHARE * self.budget.limit))
        return Jacobian(self.network, self.selection, self.chunk_size, self.dtype, chunk_bytes)

    def read(self, label: str, state: State | None = None, given: Sequence[Tensor] = ()) -> Iterator[Batch]:
        """One pass over the training data; the caller adds to the tensors of `state`, see `Passes.over`."""
        batches = self.batches.read(label)
        if state is None:
            return batches
        return self.passes.over(batches, lambda batch: batch.rows, label, state, self.dependencies(given))

    def dependencies(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that the sums of a pass depend on: `given`, and with a sketch its combinations."""
        return [*given] if self.gram is None else [*given, self.gram]

    @property
    def local_rows(self) -> slice:
        """The training examples of this process."""
        count = self.n if self.passes.local_examples is None else self.passes.local_examples
        return slice(self.passes.offset, self.passes.offset + count)

    def weights(self) -> Tensor:
        """The selected weights, (d,)."""
        return self.selection.weights(self.dtype)

    @property
    def position_weights(self) -> Tensor | None:
        """Weights (n, 1) of the examples, or (n, t) of their positions; `None` if all are one."""
        if self.sketch is None:
            return self.units.weights
        return None if self.sample_weights is None else self.sample_weights.unsqueeze(1)

    @property
    def identity_hessians(self) -> bool:
        """Whether the Hessian of every example is the identity: squared error without weights."""
        return self.likelihood.squared_error and self.position_weights is None and self.sketch is None

    @property
    def root_columns(self) -> int:
        """Number q of columns of the roots that take memory: none if all Hessians are the identity."""
        return 0 if self.identity_hessians else self.hessian_roots.shape[2]

    def unweighted(self, vectors: Tensor) -> Tensor:
        """Divide vectors (n, k) by the sample weights; zero for examples of weight zero."""
        weights = self.position_weights
        if weights is None:
            return vectors
        inverse = torch.where(weights > 0, 1.0 / weights, 0.0)
        return inverse.repeat_interleave(self.k // weights.shape[1], dim=1) * vectors

    @property
    def targets(self) -> Tensor | None:
        """Targets (n, k) as the likelihood takes them; `None` unless it has classes or squared error."""
        if self.class_targets is not None or not self.likelihood.squared_error:
            return self.class_targets
        return self.outputs + self.unweighted(self.residuals)

    def isometric(self, vectors: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Transform vectors (n, k, ...) of some examples so that lengths and inner products are those in the outputs.

        In a sketch, vectors are coordinates in combinations A of an example's outputs. The length of A x is that of
        C^1/2 D x, with A^T A = D C D and D the lengths of the columns of A.
        """
        if self.gram is None:
            return vectors
        return (self._isometry[rows] @ vectors.reshape(len(vectors), self.k, -1)).reshape(vectors.shape)

    @cached_property
    def _isometry(self) -> Tensor:
        """(n, k, k) C^1/2 D."""
        assert self.gram is not None
        gram = self.gram.double()
        size = torch.diagonal(gram, dim1=1, dim2=2).clamp_min(0.0).sqrt()
        inverse = torch.where(size > 0, 1.0 / size, 0.0)
        values, vectors = eigh(inverse.unsqueeze(2) * gram * inverse.unsqueeze(1))
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(1) @ vectors.mT
        return (root * size.unsqueeze(1)).to(self.dtype)

    def residuals_after(self, change: Tensor) -> Tensor:
        """(n, k) residuals after the outputs changed by `change`, multiplied by the sample weights.

        Those of the new outputs for classes, and to first order for other losses.
        """
        roots, weights = self.hessian_roots, self.position_weights
        if self.class_targets is None:
            return self.residuals - (roots @ (roots.mT @ change.unsqueeze(2))).squeeze(2)
        found = self.likelihood.residuals(*self._by_position(change, self.class_targets)).reshape(
            self.n, -1, self.width
        )
        return (found if weights is None else weights.unsqueeze(2) * found).flatten(1)

    def log_residuals_after(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """`Likelihood.log_residuals` (n,) at the position where it is largest; -inf if no position counts."""
        if self.class_targets is None:
            found = self.unweighted(self.isometric(self.residuals_after(change))).abs().amax(1).log()
            return found, torch.zeros_like(found)
        pair = self.likelihood.log_residuals(*self._by_position(change, self.class_targets))
        first, second = (part.reshape(self.n, -1) for part in pair)
        if self.position_weights is not None:
            first = torch.where(self.position_weights > 0, first, -torch.inf)
        best = torch.where(first == first.amax(1, keepdim=True), second, -torch.inf)
        return first.amax(1), best.amax(1)

    def _by_position(self, change: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs after a change, and targets, of each position: (N, k) each."""
        return (self.outputs + change).reshape(-1, self.width), targets.reshape(-1, self.width)

    def noise(self, residuals: Tensor, degrees_of_freedom: float | None) -> Noise:
        """The likelihood's noise for weighted residuals (n, k), multiplied by each example's weight.

        An example of weight w counts as a residual of variance 1 / w, as in weighted least squares.
        """
        if self.sketch is not None:
            return self._sketched_noise(residuals, degrees_of_freedom)
        outputs, residuals = (one.reshape(-1, self.width) for one in (self.outputs, residuals))
        roots = self.units.split(self.hessian_roots)
        if self.position_weights is None:
            found = self.likelihood.noise(residuals, outputs, roots, degrees_of_freedom)
        else:
            weights = self.position_weights.reshape(-1)
            counted = weights > 0
            size = weights[counted].sqrt().unsqueeze(1)
            scaled = residuals[counted] / size
            plain = roots[counted] / size.unsqueeze(2)
            found = self.likelihood.noise(scaled, outputs[counted], plain, degrees_of_freedom)
            each = residuals.new_zeros(len(residuals), *found.roots.shape[1:])
            each[counted] = size.unsqueeze(2) * found.roots
            found = Noise(found.covariance, each, found.scale)
        return Noise(found.covariance, self.units.join(found.roots), found.scale)

    def _sketched_noise(self, residuals: Tensor, degrees_of_freedom: float | None) -> Noise:
        """The noise of a sketched fit: one variance for all outputs, as a covariance (1, 1)."""
        numbers = self.counted_units * self.width
        plain, roots = self.isometric(residuals), self.isometric(self.hessian_roots)
        if self.sample_weights is not None:
            counted = self.sample_weights > 0
            size = self.sample_weights[counted].sqrt().unsqueeze(1)
            plain, roots = plain[counted] / size, roots[counted] / size.unsqueeze(2)
        scale = 1.0
        if self.likelihood.squared_error:
            scale = float(plain.square().sum()) / residual_degrees(numbers, degrees_of_freedom)
        mean = scale * roots.square().sum() / numbers
        return Noise(mean.reshape(1, 1), scale**0.5 * self.hessian_roots, scale)


def linearize(
    network: Network,
    selection: Selection,
    batches: Batches,
    likelihood: Likelihood,
    execution: Execution,
    budget: Budget,
    columns: int | None,
    seed: int = 0,
) -> Linearization:
    """Run the network once over its training data, and check model and data.

    `columns` is the number of columns in a sketch of the Hessians: `None` for no sketch, 0 to choose by the number of
    outputs.
    """
    if columns == 0:
        columns = default_columns(network, batches)
    if columns is None:
        found = _loss_derivatives(network, batches, likelihood, execution.dtype, budget)
    else:
        found = _sketched_derivatives(batches, HessianSketch(network, likelihood, columns, seed, execution.dtype))
    found["sample_weights"] = none_if_ones(found["sample_weights"])
    found |= {"dtype": execution.dtype, "budget": budget, "chunk_size": execution.chunk_size}
    return Linearization(
        network, selection, batches, likelihood, **found, progress=batches.progress, passes=batches.passes
    )


def _loss_derivatives(
    network: Network, batches: Batches, likelihood: Likelihood, dtype: torch.dtype, budget: Budget
) -> dict[str, Any]:
    """Fields of a `Linearization` from all outputs of all examples."""
    parts: list[LossDerivatives] = []
    given: list[bool] = []
    checked = CheckedOutputs(network, same_positions=True)
    for number, batch in enumerate(batches.read("outputs")):
        where = f"batch {number}"
        out = checked(batch.inputs, where)
        parts.append(LossDerivatives.of(likelihood, out.to(dtype), batch, where))
        given.append(batch.weights is not None)
        size = sum(one.roots.numel() for one in parts if one.roots is not None) * dtype.itemsize
        budget.require(
            3.0 * size,  # for concatenation, and for roots of the noise and leverages of the same size
            f"the Hessians of the {likelihood.name} loss for {batch.start + batch.size} training examples or more and "
            f"{describe_outputs(checked.shape)}",
            "Use fewer columns of the Hessians (hessian_columns=16), fewer training examples, or a larger max_memory.",
        )
    shapes = _of_all_processes(batches, checked.shape, given)
    if len(set(shapes)) > 1:
        raise ShapeError(
            f"expected the same number of outputs in every process, got {sorted(set(shapes))}. Wrap the model in a "
            "module that returns the same number of outputs for every batch."
        )
    outputs, residuals, roots, weights, inner, targets = _gathered(batches, parts, network.device)
    *positions, k = shapes[0]
    units = Positions(tuple(positions), k, None if bool((inner == 1).all()) else inner)
    if roots is None:
        roots = torch.eye(outputs.shape[1], dtype=dtype, device=outputs.device).expand(len(outputs), -1, -1)
    found = {"outputs": outputs, "residuals": residuals, "hessian_roots": roots, "sample_weights": weights}
    return {**found, "units": units, "class_targets": targets}


def _of_all_processes(batches: Batches, shape: torch.Size, given: list[bool]) -> list[tuple[int, ...]]:
    """Shapes (..., k) of outputs in every process that has any; checks that all or no batches have weights."""
    headers = batches.passes.process_group.all_gather_object("the outputs", (tuple(shape), given))
    check_weights_given([one for _, each in headers for one in each])
    return [each for each, _ in headers if each]


def _gathered(batches: Batches, chunks: Sequence[Iterable[Tensor | None]], device: torch.device) -> list[Any]:
    """Concatenate the chunks of each tensor over batches and processes; `None` stays `None`."""
    process_group = batches.passes.process_group
    local = [None if each[0] is None else torch.cat(each) for each in zip(*chunks, strict=True)]
    every = process_group.all_gather_object("the outputs", [one is not None for one in local])
    present = next(each for each in every if each)
    return [
        process_group.all_gather(local[at] if local else None, "the outputs", device) if here else None
        for at, here in enumerate(present)
    ]


def default_columns(network: Network, batches: Batches) -> int | None:
    """`None` (no sketch) for few outputs; for many outputs, the more examples, the fewer columns."""
    first = batches.first()
    with torch.no_grad():
        shape = network.shaped(take(first.inputs, slice(0, 1)), "batch 0").shape[1:]
    if shape.numel() <= ALL_OUTPUTS:
        return None
    known = length_hint(batches.loader, -1)  # a DataLoader of an iterable data set may not know its length
    every = batches.passes.process_group.all_gather_object("the data", known * first.size)
    columns = COLUMNS if min(every) < 0 else min(COLUMNS, max(1, -(-ALL_COLUMNS // max(sum(every), 1))))
    batches.notes.append(
        f"of {describe_outputs(shape)}, {columns} random column{'s' * (columns > 1)} of the loss's Hessian were used "
        "in each training example, and the residual; hessian_columns='all' uses all"
    )
    return columns


def _sketched_derivatives(batches: Batches, sketch: HessianSketch) -> dict[str, Any]:
    """Fields of a `Linearization` from a sketch, which gets labels and sizes.

    Residuals (n, c + 1) and roots (n, c + 1, c) are the same for every example, in the sketch's coordinates.
    """
    chunks: list[SketchedOutputs] = []
    given: list[bool] = []
    for number, whole in enumerate(batches.unsketched("outputs")):
        for batch, found in sketch.derivatives(whole, f"batch {number}"):
            chunks.append(found)
            given.append(batch.weights is not None)
    *positions, width = _of_all_processes(batches, sketch.outputs.shape, given)[0]
    longest = max((chunk.floors.shape[1] for chunk in chunks), default=0)
    longest = max(batches.passes.process_group.all_gather_object("the outputs", longest))
    padded = [chunk.padded(longest) for chunk in chunks]
    outputs, gram, weights, counted, *labels = _gathered(batches, padded, sketch.network.device)
    sketch.labels, sketch.width, sketch.counted = Labels(*labels), width, int(counted.sum())
    batches.sketch = sketch
    eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    unit = {"residuals": eye[-1].expand_as(outputs), "hessian_roots": eye[:, :-1].expand(len(outputs), -1, -1)}
    units = Positions(tuple(positions), width, None)
    return {"outputs": outputs, **unit, "sample_weights": weights, "units": units, "sketch": sketch, "gram": gram}


LEAST_MEMORY = 2**20  # bytes below which no fit is planned


def with_less_memory(problem: Linearization, least: int = LEAST_MEMORY) -> Linearization | None:
    """The same problem with half the memory (at least `least`) and smaller chunks; `None` if nothing can be halved."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    most = min(problem.budget.limit, free_memory(problem.device))
    limit = max(most // 2, min(least, most))
    chunk = problem.chunk_size
    if chunk is None and limit == problem.budget.limit:
        chunk = problem.batches.first().size  # nothing else can be made smaller
    chunk = None if chunk is None else max(chunk // 2, 1)
    if limit < LEAST_MEMORY or (limit, chunk) == (problem.budget.limit, problem.chunk_size):
        return None
    smaller = readable(limit) + ("" if chunk is None else f", chunks of {chunk} examples")
    problem.batches.notes.append(f"the device ran out of memory; the fit was planned again with {smaller}")
    return replace(problem, budget=Budget(problem.device, limit), chunk_size=chunk)
