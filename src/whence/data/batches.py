"""Batches of training data, in order: split into inputs, targets and weights, checked, and fingerprinted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import length_hint
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from whence.errors import InputError, LoaderError, ShapeError
from whence.runtime.execution import Passes, Progress, partial_data_error
from whence.runtime.model_state import checksum, signed

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
WEIGHT_KEY = "sample_weight"

Inputs = Any  # inputs of a model: a tensor, a tuple of positional arguments, or a mapping of keyword arguments
Call = Callable[[Inputs], Tensor]  # runs a model on a batch: outputs (n, k)


@dataclass(frozen=True)
class Batch:
    """One batch of the loader; `start` is the index of its first example in the data set."""

    inputs: Inputs
    targets: Tensor
    start: int
    size: int
    weights: Tensor | None = None  # (n,) weight of each example

    @property
    def rows(self) -> slice:
        """The indices of these examples among all examples."""
        return slice(self.start, self.start + self.size)

    @property
    def tokens(self) -> int:
        """Number of positions if there is a class at each of many, as in a text; else zero."""
        return self.targets.numel() if self.targets.ndim == 2 and not self.targets.is_floating_point() else 0


@dataclass
class Batches:
    """Re-iterable batches of inputs, targets and optional weights, checked and moved to the model's device.

    Every pass must give the same examples in the same order, since leverages, residuals and shares refer to examples by
    index; a pass that differs from earlier ones raises `LoaderError`.

    Attributes:
        fingerprints: a checksum of inputs, weights and targets of each batch read so far.
        passes: how processes share the data: this one has examples from `passes.offset` on.
    """

    loader: Iterable[Any]
    device: torch.device
    progress: Progress
    notes: list[str] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    complete: bool = False  # whether a pass has reached the end, so the number of batches is known
    positional: int = 1  # number of positional arguments in the inputs
    target_transform: Callable[[Tensor], Tensor] | None = None  # applied to the targets of every batch
    passes: Passes = field(default_factory=Passes)
    saved: bool = False  # whether fingerprints come from the file of a saved fit
    sketch: Callable[[Batch, str], Iterable[Batch]] | None = None  # parts of a batch, whose outputs are sketched
    _first: Any = None

    def __post_init__(self) -> None:
        """Raise for a loader that can be read only once; read a shuffling DataLoader in order."""
        check_loader(self.loader)
        self.loader = in_order(self.loader, self.notes)

    def __iter__(self) -> Iterator[Batch]:
        """Read all batches once, without a progress bar."""
        return self.read(None)

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, in parts with sketched outputs if there is a sketch; show progress under `label`."""
        for number, batch in enumerate(self.unsketched(label)):
            yield from self._sketched(batch, number)

    def _sketched(self, batch: Batch, number: int) -> Iterable[Batch]:
        return (batch,) if self.sketch is None else self.sketch(batch, f"batch {number}")

    def unsketched(self, label: str | None) -> Iterator[Batch]:
        """As `read`, but without a sketch. Batches without examples are skipped."""
        if self.passes.closed:
            raise partial_data_error()
        if self.loader is NO_DATA:
            raise LoaderError(
                "expected the training data for this method, got a fit that was loaded without them. "
                "Pass them: whence.load(path, model, train_loader=...)."
            )
        batches = self._read()
        if label is not None:
            total = len(self.fingerprints) if self.complete else length_hint(self.loader) or None
            batches = self.progress.track(batches, f"{label}, batch", total)
        yield from (batch for batch in batches if batch.size)

    def _read(self) -> Iterator[Batch]:
        """All batches, including those without examples."""
        count, start = 0, self.passes.offset
        for number, raw in enumerate(self.loader):
            batch = self._prepare(number, raw, start)
            count = number + 1
            yield batch
            start += batch.size
        if count < len(self.fingerprints):
            raise self._changed(f"{count} batches instead of {len(self.fingerprints)}")
        if start == self.passes.offset and self.passes.process_group.alone:
            raise no_examples()
        self.complete = True

    def _prepare(self, number: int, raw: Any, start: int) -> Batch:
        """Move a batch to the device and check it, also against earlier passes."""
        where = f"batch {number}"
        inputs, targets, weights = to_device(split(raw, where), self.device)
        size = batch_size(inputs, where)
        self.positional = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        if not isinstance(targets, Tensor) or targets.ndim == 0 or len(targets) != size:
            got = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
            raise ShapeError(
                f"expected a tensor of {size} targets for the {size} inputs in {where}, got {got}. "
                "Make the loader give one target (a number, or a row of k numbers) for each example."
            )
        leaves = [*tensors_of((inputs, weights)), targets]
        found = signed(sum((2 * at + 1) * checksum(leaf) for at, leaf in enumerate(leaves)))
        known = self.fingerprints[number : number + 1]
        if known != [found]:  # unchanged data were checked before
            check_finite(inputs, "inputs", where)
            check_finite(targets, "targets", where)
            if known or self.complete:
                raise self._changed(f"other data in batch {number}" if known else f"more than {number} batches")
            self.fingerprints.append(found)
        if self.target_transform is not None and size:
            targets = self.target_transform(targets)
        return Batch(inputs, targets, start, size, weights)

    def first(self) -> Batch:
        """The first batch overall: from the first process that has one."""
        group = self.passes.process_group
        if group.alone:
            return next(self.read(None))
        if self._first is None:  # its targets are transformed below
            local = next(self.unsketched(None), None)
            have_any = group.all_gather_object("the first batch", local is not None)
            if not any(have_any):
                raise no_examples()
            sent = None
            if local is not None and group.rank == have_any.index(True):
                sent = to_device((local.inputs, local.targets, local.weights), torch.device("cpu"))
            self._first = group.all_gather_object("the first batch", sent)[have_any.index(True)]
        raw = to_device(self._first, self.device)
        targets = raw[1] if self.target_transform is None else self.target_transform(raw[1])
        return next(iter(self._sketched(Batch(raw[0], targets, 0, len(targets), raw[2]), 0)))

    def _changed(self, got: str) -> LoaderError:
        """The error for data that differ from an earlier pass."""
        wanted = "the training data of the saved fit, in the same order and batches" if self.saved else ""
        return LoaderError(
            f"expected {wanted or 'the same examples in every pass'}, got {got}. Use the same batch_size and "
            "shuffle=False, and switch random augmentation off (a DataLoader with shuffle=True alone is put in order "
            "automatically); a loader that can be read once only must be made a list first."
        )


NO_DATA: list[Any] = []  # placeholder for training data not given with a saved fit: only questions that need them fail


def no_examples() -> InputError:
    """The error for data without examples."""
    return InputError(
        "expected a loader with at least one example, got an empty one. Check the data set and its filters."
    )


# --- The parts of a batch ---------------------------------------------------------------------------------------------


def split(raw: Any, where: str) -> tuple[Inputs, Any, Any]:
    """Split a batch into inputs, targets and weights; `None` if there are no weights.

    Examples:
        >>> split({"input_ids": [1], "labels": [0]}, "batch 0")
        ({'input_ids': [1]}, [0], None)
        >>> split(("inputs", "targets", "weights"), "batch 0")
        ('inputs', 'targets', 'weights')
    """
    if isinstance(raw, Mapping):
        keys = [key for key in TARGET_KEYS if key in raw]
        if len(keys) != 1:
            raise InputError(
                f"expected exactly one of the keys {', '.join(TARGET_KEYS)} in {where}, got the keys "
                f"{', '.join(sorted(map(str, raw)))}. Rename the key of the targets to 'labels'."
            )
        inputs = {key: value for key, value in raw.items() if key not in (keys[0], WEIGHT_KEY)}
        return inputs, raw[keys[0]], raw.get(WEIGHT_KEY)
    if isinstance(raw, (tuple, list)) and len(raw) in (2, 3):
        inputs = dict(raw[0]) if isinstance(raw[0], Mapping) else raw[0]  # as torch's pytrees know dicts
        return inputs, raw[1], raw[2] if len(raw) == 3 else None
    got = f"{type(raw).__name__} of {len(raw)}" if isinstance(raw, (tuple, list)) else type(raw).__name__
    raise InputError(
        f"expected (inputs, targets), (inputs, targets, weights) or a dict with labels in {where}, got {got}. "
        "Several inputs go into a tuple: ((a, b), targets). All data in one batch are a list of one pair: [(x, y)]."
    )


def split_targets(raw: Any, positional: int = 1) -> tuple[Inputs, Any]:
    """The inputs of a batch to predict on, and the targets that came with them; `None` if there are none.

    A batch is a tensor, a mapping, a tuple with one input for each positional argument of the model, or any of these
    paired with targets, or with targets and weights.

    Examples:
        >>> split_targets(("inputs", "targets")), split_targets(("left", "right"), positional=2)
        (('inputs', 'targets'), (('left', 'right'), None))
    """
    if isinstance(raw, Mapping):
        inputs = {key: value for key, value in raw.items() if key not in (*TARGET_KEYS, WEIGHT_KEY)}
        return inputs, next((raw[key] for key in TARGET_KEYS if key in raw), None)
    if not isinstance(raw, (tuple, list)):
        return raw, None
    nested = any(isinstance(item, (tuple, list, Mapping)) for item in raw)
    weighted = len(raw) == 3 and positional != 3
    if (len(raw) == 2 or weighted) and (nested or positional == 1):
        return split(raw, "this batch")[:2]
    return tuple(raw), None


def check_finite(value: Any, what: str, where: str) -> None:
    """Raise if a tensor holds NaN or infinity."""
    for leaf in tensors_of(value):
        if leaf.is_floating_point() and leaf.numel() and not bool(torch.isfinite(torch.stack(leaf.aminmax())).all()):
            bad = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero()[0].item()
            advice = "Check that example's inputs and the weights."
            raise InputError(
                f"expected finite {what}, got NaN or infinity in {where} (first at example {bad} of the batch). "
                + (advice if what.startswith("outputs") else "Remove or impute these examples.")
            )


# --- Inputs of any structure ------------------------------------------------------------------------------------------


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in `value`, detached from any graph; tensors made in inference mode are copied."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device)
        return moved.clone() if moved.is_inference() else moved

    return tree_map(move, value)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor in the inputs."""
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def batch_size(inputs: Inputs, where: str) -> int:
    """The number of examples: size of the first axis of every input tensor."""
    leaves = tensors_of(inputs)
    if not leaves:
        raise InputError(
            f"expected tensors as inputs in {where}, got {type(inputs).__name__} without any. "
            "Convert arrays and lists with torch.as_tensor."
        )
    sizes = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ShapeError(
            f"expected input tensors with one common first axis (examples) in {where}, got shapes {shapes}. "
            "Give every input one row for each example; values shared by all examples belong in a buffer of the model."
        )
    return sizes.pop()


def describe(inputs: Inputs) -> str:
    """Shapes and dtypes, for messages.

    Examples:
        >>> describe({"x": torch.zeros(2, 3)})
        '(2, 3) float32'
    """
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in tensors_of(inputs))


def take(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """The same inputs for fewer examples."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, inputs)


R = TypeVar("R")


def combine(results: Sequence[R], how: Callable[[list[Tensor]], Tensor]) -> R:
    """Combine several results into one: `how` combines each tensor that has a row for each prediction.

    Fields named in a class's `shared` are the same for all predictions and taken from the first result.
    """
    parts: Sequence[Any] = results
    found: Any = parts[0]
    if isinstance(found, Tensor):
        found = how(list(parts))
    elif isinstance(found, dict):
        found = {name: combine([one[name] for one in parts], how) for name in found}
    elif is_dataclass(found) and not isinstance(found, type):
        shared = getattr(type(found), "shared", ())
        names = [field.name for field in fields(found) if field.name not in shared]
        found = replace(found, **{name: combine([getattr(one, name) for one in parts], how) for name in names})
    together: R = found
    return together


# --- Loaders ----------------------------------------------------------------------------------------------------------


def batches_of(given: Any, what_for: str) -> Iterable[Any]:
    """A loader or a list of batches as it is; a single batch in a list.

    Examples:
        >>> batches_of({"x": 1}, "to predict"), batches_of([{"x": 1}, {"x": 2}], "to predict")
        ([{'x': 1}], [{'x': 1}, {'x': 2}])
    """
    if isinstance(given, (Tensor, Mapping, tuple)):
        return [given]
    no_loader = isinstance(given, (str, bytes, numpy.ndarray, Dataset)) or hasattr(given, "iloc")
    if isinstance(given, Iterable) and not no_loader:
        return given
    raise InputError(
        f"expected a batch (a tensor, a tuple, a dict) or a loader {what_for}, got {type(given).__name__}. "
        "Convert arrays with torch.as_tensor, and wrap a data set in a DataLoader."
    )


def check_loader(loader: Any) -> None:
    """Raise unless this is a loader that can be read several times."""
    if isinstance(loader, DataLoader):
        _check_sampler(loader.sampler)
        return  # making two iterators would start its workers
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(
            f"expected a loader that gives batches, got the data set {type(loader).__name__}, which gives single "
            "examples. Wrap it: torch.utils.data.DataLoader(dataset, batch_size=128)."
        )
    try:
        one_shot = iter(loader) is iter(loader)
    except TypeError:
        one_shot = None
    if isinstance(loader, (str, bytes, Tensor)) or one_shot is None:
        raise InputError(
            f"expected a loader that gives (inputs, targets), got {type(loader).__name__}. "
            "Pass a DataLoader, or a list of batches such as [(inputs, targets)]."
        )
    if isinstance(loader, tuple) and loader and all(isinstance(item, Tensor) for item in loader):
        raise InputError(
            f"expected a loader that gives (inputs, targets), got a tuple of {len(loader)} tensors. "
            "A single batch goes into a list: [(inputs, targets)]."
        )
    if one_shot:
        raise LoaderError(
            f"expected a loader that can be read several times, got a one-shot {type(loader).__name__}. "
            "Pass a DataLoader or a list of batches instead of an iterator or generator."
        )


def _check_sampler(sampler: Any) -> None:
    """Raise for shards that repeat examples to make sizes equal: these would count twice."""
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    size, parts = length_hint(sampler.dataset), sampler.num_replicas
    if size % parts:
        raise InputError(
            f"expected every example once, got a DistributedSampler that repeats {-size % parts} of {size} to make "
            f"{parts} shards even. Give each process a slice: Subset(dataset, range(n * rank // world, n * (rank + 1) "
            "// world))."
        )


def in_order(loader: Iterable[Any], notes: list[str]) -> Iterable[Any]:
    """A loader that reads the same data in the order of the data set.

    A shuffling DataLoader is read in order, with a note. Its random generator is not used, and persistent workers are
    not shared: passes over the data may be nested, and other threads may read the same loader.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    found = copy.copy(loader)
    vars(found).update(persistent_workers=False, generator=None, _iterator=None)
    sampler, size, dataset = loader.sampler, loader.batch_size, loader.dataset
    if size is None:
        return found
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length_hint(dataset):
        notes.append("the loader shuffles; it was read in the order of its data set, which indices refer to")
        sampler = SequentialSampler(dataset)  # type: ignore[arg-type]  # of known length
        vars(found).update(sampler=sampler, batch_sampler=BatchSampler(sampler, size, False), drop_last=False)
    if type(sampler) is not SequentialSampler:
        return found
    left = len(sampler) % size
    if found.drop_last and left:
        notes.append(f"the loader drops its last, incomplete batch: {left} training examples were not read")
    if type(loader) is DataLoader and loader.collate_fn is default_collate and type(dataset) is TensorDataset:
        return TensorBatches(sampler, size, found.drop_last)
    return found


class TensorBatches(BatchSampler):
    """The batches of a DataLoader that reads tensors in order: slices, copied as a whole, not row by row.

    Examples:
        >>> batches = TensorBatches(SequentialSampler(TensorDataset(torch.arange(5))), 2, drop_last=False)
        >>> len(batches), [batch[0].tolist() for batch in batches]
        (3, [[0, 1], [2, 3], [4]])
    """

    def __iter__(self) -> Iterator[Any]:
        """Copies of the examples of each batch: a model may write into its inputs."""
        sampler: Any = self.sampler
        for low in range(0, len(self) * self.batch_size, self.batch_size):
            yield [tensor[low : low + self.batch_size].clone() for tensor in sampler.data_source.tensors]
