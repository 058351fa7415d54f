"""Hessian sketches: training examples with many outputs, represented by a few combinations of their outputs.

A fit needs from an example only the gradients J^T r of its residual and J^T R of a root of its Hessian L = R R^T, with
k columns for k classes at every position. A sketch replaces R by S with c columns and E[S S^T] = L: labels sampled from
the softmax, or random signs times all columns of R. If c is the number of outputs, S is R.

The example is then represented by A = (S, r): its outputs are the c + 1 numbers A^T f, its Jacobian is A^T J. In these
coordinates the root of the Hessian is (I, 0)^T and the residual is the last unit vector, for every example. Nothing is
lost: with Q = J F^-1 J^T the leave-one-out residual is r + S (I - S^T Q S)^-1 S^T Q r. Its coordinates are c numbers
and a one, and it needs only A^T Q A of Q. Lengths in the outputs follow from the small Gram matrix A^T A; see
`Linearization.isometric`.

Labels are sampled in the first pass and stored with the fit: rounding may change one that is near a boundary. Signs are
hashes of the numbers of example, position and column, the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from whence.data.batches import Batch, check_finite, take
from whence.data.targets import example_weights, position_weights, targets_at
from whence.errors import InputError
from whence.jacobian.functionals import OutputFunctional, OutputMixtures, Softmax, SoftmaxColumns, chunk_of_positions
from whence.jacobian.network import CheckedOutputs, Network
from whence.likelihoods import Categorical, Likelihood
from whence.runtime.model_state import signed

ALL_OUTPUTS = 64  # up to this many outputs, no sketch is used by default
COLUMNS = 16  # default columns of a sketch, for up to a few thousand examples
ALL_COLUMNS = 2**16  # columns over all examples that are enough: curvatures of 3,500 degrees of freedom
CHUNK_BYTES = 256 * 2**20  # of the outputs of a chunk, if labels are sampled
CHUNK_SHARE = 1 / 16  # the same, as a share of the memory of a GPU
MIXTURE_BYTES = 96 * 2**20  # of the random signs for all outputs of a chunk


class Labels(NamedTuple):
    """Sampled labels of each position; see `sample_labels`. No positions if S is not made from labels."""

    classes: Tensor  # (n, t, c), int32; -1 for none
    floors: Tensor  # (n, t)


class SketchedOutputs(NamedTuple):
    """Results of the first pass for a chunk."""

    outputs: Tensor  # (n, c + 1) A^T f
    gram: Tensor  # (n, c + 1, c + 1) A^T A
    weights: Tensor  # (n,) weights of the examples
    counted: Tensor  # (n,) number of positions that count
    classes: Tensor  # see `Labels`
    floors: Tensor

    def padded(self, positions: int) -> SketchedOutputs:
        """The same, padded to more positions, without labels there."""
        more = positions - self.floors.shape[1]
        return self._replace(classes=pad(self.classes, (0, 0, 0, more), value=-1), floors=pad(self.floors, (0, more)))


Sketched = tuple[OutputFunctional, Tensor, Tensor, Tensor, Labels]
"""A^T as a functional, A^T f, A^T A, weights (n, t) of positions, and labels."""


@dataclass
class HessianSketch:
    """A few combinations of each training example's outputs, the same in every pass."""

    network: Network  # the model
    likelihood: Likelihood  # gives residuals and the Hessian's root
    columns: int  # c
    seed: int  # of labels and signs
    dtype: torch.dtype  # of the algebra
    width: int = 0  # outputs k at each position; 0 before the first pass
    counted: int = 0  # number of positions of training examples that count
    labels: Labels | None = None  # labels of all examples, padded to the longest; None in the first pass

    def __post_init__(self) -> None:
        self.outputs = CheckedOutputs(self.network, same_positions=False)

    def __call__(self, batch: Batch, where: str) -> Iterator[Batch]:
        """Yield parts of a batch whose outputs fit in memory, with functionals of the outputs as inputs."""
        if self.labels is None or not self._samples(batch.targets):
            yield from (part for part, _ in self.derivatives(batch, where))
            return
        for chunk in self._chunks(batch, self.width * batch.targets[0].numel(), sampled=True):
            yield replace(chunk, inputs=self._softmax_columns(chunk, where, self._known(chunk)))

    def _samples(self, targets: Tensor) -> bool:
        """Whether labels are sampled: for classes as targets of the softmax, unless all columns are used."""
        loss = self.likelihood
        if type(loss) is not Categorical or loss.label_smoothing or targets.is_floating_point():
            return False
        return self.columns < self.width * targets[0].numel()

    def derivatives(self, batch: Batch, where: str) -> Iterator[tuple[Batch, SketchedOutputs]]:
        """Yield the parts of a batch, with the results of the first pass."""
        outputs = self.outputs(batch.inputs, where)
        self.width = outputs.shape[-1]
        sampled = self._samples(batch.targets)
        for chunk in self._chunks(batch, outputs[0].numel(), sampled):
            some = outputs[chunk.start - batch.start :][: chunk.size]
            sketched = (self._by_labels if sampled else self._by_signs)(some, chunk, where)
            columns, values, gram, weights, labels = sketched
            kept = (one.to(self.dtype) for one in (values, gram, example_weights(chunk.weights, weights)))
            yield replace(chunk, inputs=columns), SketchedOutputs._make([*kept, (weights > 0).sum(1), *labels])

    def _chunks(self, batch: Batch, outputs: int, sampled: bool) -> Iterator[Batch]:
        """Yield parts of a batch that fit in memory, for examples with this many outputs."""
        device, most = self.network.device, MIXTURE_BYTES // (torch.float64.itemsize * (self.columns + 1))
        if sampled:
            on_gpu = device.type == "cuda"
            size = CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory if on_gpu else CHUNK_BYTES
            most = int(size) // torch.float32.itemsize
        step = max(1, most // outputs)
        for low in range(0, batch.size, step):
            some = slice(low, min(low + step, batch.size))
            weights = None if batch.weights is None else batch.weights[some]
            yield Batch(take(batch.inputs, some), batch.targets[some], batch.start + low, some.stop - low, weights)

    # --- Sampled labels -----------------------------------------------------------------------------------------------

    def _known(self, batch: Batch) -> Labels:
        """The labels of a batch, from the first pass."""
        assert self.labels is not None
        return Labels(*(one[batch.rows, : batch.targets[0].numel()] for one in self.labels))

    def _softmax_columns(self, batch: Batch, where: str, labels: Labels) -> SoftmaxColumns:
        """The columns of sampled labels, and the residual from the targets."""
        assert isinstance(self.likelihood, Categorical)
        answers = batch.targets.unsqueeze(-1).to(self.dtype)  # one for each position
        own, sizes = (one.reshape(batch.size, -1) for one in self.likelihood.labels(batch.targets, self.dtype))
        sizes = sizes * position_weights(batch.weights, answers, where)
        signs = random_signs(*self._places(batch, sizes), self.columns, self.seed).to(self.dtype)
        signs = signs * (labels.classes >= 0) * sizes.sqrt().unsqueeze(2)
        classes = torch.cat([labels.classes.clamp_min(0), own.unsqueeze(2)], dim=2)
        floors = labels.floors.unsqueeze(2).expand(-1, -1, self.columns)
        floors = torch.cat([floors, torch.ones_like(floors[:, :, :1])], dim=2)
        return SoftmaxColumns(batch.inputs, classes, torch.cat([signs, sizes.unsqueeze(2)], dim=2), floors)

    def _places(self, batch: Batch, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the examples (n, 1), and of their positions (n, t) among those that count."""
        examples = torch.arange(batch.start, batch.start + batch.size, device=sizes.device).unsqueeze(1)
        return examples, (sizes > 0).long().cumsum(1)

    def _sampled(self, outputs: Tensor, examples: Tensor, places: Tensor) -> Labels:
        """Labels of all positions, sampled from the softmax of outputs (n t, k)."""
        uniform, step = random_uniform(examples, places, self.seed).reshape(-1), chunk_of_positions(outputs)
        parts = zip(outputs.split(step), uniform.split(step), strict=True)
        drawn = [sample_labels(Softmax.of(some).all(), numbers, self.columns) for some, numbers in parts]
        classes, floors = (torch.cat(each).unflatten(0, (len(examples), -1)) for each in zip(*drawn, strict=True))
        return Labels(classes, floors.to(self.dtype))

    def _by_labels(self, outputs: Tensor, batch: Batch, where: str) -> Sketched:
        assert isinstance(self.likelihood, Categorical)
        flat, weights = outputs.flatten(0, -2), position_weights(batch.weights, outputs, where).double()
        _, sizes = self.likelihood.check_labels(targets_at(batch.targets, outputs, where), flat, where)
        weights = weights * (sizes > 0).reshape(weights.shape)
        labels = self._sampled(flat, *self._places(batch, weights)) if self.labels is None else self._known(batch)
        columns = self._softmax_columns(batch, where, labels)
        return columns, *columns.products(outputs), weights, labels

    # --- Random signs -------------------------------------------------------------------------------------------------

    def _by_signs(self, outputs: Tensor, batch: Batch, where: str) -> Sketched:
        n, k = len(outputs), outputs.shape[-1]
        shaped = outputs.double()  # exact for rounded outputs, even if very confident
        flat, weights = shaped.reshape(-1, k), position_weights(batch.weights, shaped, where)
        likelihood = self.likelihood
        targets = likelihood.check_targets(targets_at(batch.targets, outputs, where), flat, where)
        self._check_weights(batch.weights, where)
        counted = likelihood.counted(targets)
        weights = weights if counted is None else weights * counted.reshape(weights.shape)
        each = weights.reshape(-1, 1)
        residuals = (likelihood.residuals(flat, targets) * each).reshape(n, -1, 1)
        forms_root = type(likelihood).root_times is Likelihood.root_times  # others have as many columns as outputs
        root = likelihood.hessian_root(flat[:1], targets[:1]) if forms_root else None
        size = weights.shape[1] * (k if root is None else root.shape[2])
        mixing = self._mixing(n, size, batch.start, flat).reshape(len(flat), -1, self.columns)
        roots = likelihood.root_times(flat, targets, mixing)
        del mixing  # as large as the result
        roots = (roots * each.sqrt().unsqueeze(2)).reshape(n, -1, self.columns)
        check_finite((roots, residuals), f"derivatives of the {likelihood.name} loss", where)
        columns = torch.cat([roots, residuals], dim=2)
        values = (shaped.reshape(n, 1, -1) @ columns).squeeze(1)
        none = torch.zeros(n, 0, self.columns, dtype=torch.int32, device=outputs.device)
        labels = Labels(none, none[:, :, 0].to(self.dtype))
        return OutputMixtures(batch.inputs, columns.to(outputs.dtype)), values, columns.mT @ columns, weights, labels

    def _mixing(self, n: int, size: int, start: int, like: Tensor) -> Tensor:
        """M (n, q, c) with E[M M^T] = I for the q = `size` columns of a root: random signs, or all columns."""
        if self.columns >= size:
            return torch.eye(size, self.columns, dtype=like.dtype, device=like.device).expand(n, -1, -1)
        examples, places = (torch.arange(count, device=like.device) for count in (n, size))
        signs = random_signs((start + examples).unsqueeze(1), places.expand(n, -1), self.columns, self.seed)
        return signs.to(like).div_(self.columns**0.5)

    def _check_weights(self, weights: Tensor | None, where: str) -> None:
        """Raise for weights of positions with squared error: residuals without them are not known in a sketch."""
        squared = self.likelihood.squared_error
        if weights is None or weights.ndim == 1 or not squared or bool(((weights == 0) | (weights == 1)).all()):
            return
        raise InputError(
            "expected one weight for each example, or zeros and ones for its positions, where mixtures of the outputs "
            f"are fitted with squared error, got other weights of positions in {where}: the noise variance needs "
            'each position\'s residual without its weight. Fit with hessian_columns="all", or weigh whole examples.'
        )


# --- Random numbers ---------------------------------------------------------------------------------------------------


def sample_labels(p: Tensor, uniform: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Labels (m, c) for positions with probabilities p (m, k), and floors (m,), from one number in [0, 1) per position.

    A label y is chosen with probability q_y = min(1, p_y / floor), where the floor makes these sum to c. Classes more
    probable than the floor are always chosen, others by systematic sampling of the sums of q. Columns with the labels
    y_tj of position t, random signs s_tj and weights w_t are

        S_j = sum_t s_tj sqrt(w_t max(p_ty, floor_t)) (e_y - p_t),    y = y_tj.

    E[S S^T] is the Hessian of softmax cross-entropy. Signs of different positions are independent, so blocks between
    positions are zero. Since p_y / q_y = max(p_y, floor), the block of one position is

        w sum_y q_y (p_y / q_y) (e_y - p)(e_y - p)^T = w (diag(p) - p p^T).

    No label is chosen twice. If fewer than c have a probability above zero, all are chosen, and -1 for the rest.

    Examples:
        >>> p = torch.tensor([[0.5, 0.0, 0.3, 0.2]], dtype=torch.float64)
        >>> classes, floors = sample_labels(p, torch.tensor([0.7], dtype=torch.float64), 2)
        >>> classes.tolist(), floors.tolist()
        ([[0, 3]], [0.5])
    """
    floors = None
    if columns > 1:
        largest, at = p.topk(min(columns, p.shape[1]), dim=1)
        rest = p.scatter(1, at, 0.0).sum(1, keepdim=True) + largest.flip(1).cumsum(1).flip(1)  # from each on
        shares = rest / (columns - torch.arange(largest.shape[1], device=p.device))
        enough = largest <= shares
        first = enough.int().argmax(1, keepdim=True)
        floors = torch.where(enough.any(1, keepdim=True), shares.gather(1, first), 0.0)
        p = p.minimum(floors.clamp_min(torch.finfo(p.dtype).tiny))  # chances q times the floor
    sums = p.cumsum(1, dtype=torch.float64)
    scale = sums[:, -1:] if floors is None else floors.double().clamp_min(torch.finfo(p.dtype).tiny)
    wanted = (uniform.unsqueeze(1) + torch.arange(columns, device=p.device)) * scale
    found = torch.searchsorted(sums, wanted, right=True)  # (m, c)
    return torch.where(found < p.shape[1], found, -1).int(), (scale if floors is None else floors).squeeze(1)


def random_uniform(examples: Tensor, places: Tensor, seed: int) -> Tensor:
    """(n, t) numbers in [0, 1) for examples (n, 1) and places (n, t), the same in every call and on every device.

    Examples:
        >>> random_uniform(torch.tensor([[3]]), torch.tensor([[1, 2]]), 0)
        tensor([[0.8648, 0.3498]], dtype=torch.float64)
    """
    return _shifted(_hash(examples, places, -1, seed), 11).double() * 2.0**-53


def random_signs(examples: Tensor, places: Tensor, count: int, seed: int) -> Tensor:
    """(n, t, count) random signs, int8, for examples (n, 1) and places (n, t), as in `random_uniform`."""
    bits = torch.arange(64, device=places.device)
    words = [_hash(examples, places, block, seed).unsqueeze(2) for block in range(-(-count // 64))]
    parts = [(2 * ((word >> bits[: count - 64 * at]) & 1) - 1).to(torch.int8) for at, word in enumerate(words)]
    return torch.cat(parts, dim=2)


def _hash(examples: Tensor, places: Tensor, stream: int, seed: int) -> Tensor:
    """(n, t) 64 random bits: a counter passed through SplitMix64, in integers that wrap around."""
    found = _scrambled(_scrambled(torch.full_like(examples, signed(seed))) + stream)
    found = _scrambled(found + examples)
    return _scrambled(found + places)


def _scrambled(words: Tensor) -> Tensor:
    words = (words + 1) * signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Logical right shift: torch's own shift would copy the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)
