"""The training data as batches that can be read again and again, in the same order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from whence.errors import InputError, LoaderError, ShapeError
from whence.progress import Progress

from .loaders import check_loader, in_order, length, spread
from .marks import mark
from .passes import Passes, elsewhere
from .weights import WEIGHT_KEY, check_weights, weights_in

ALIKE = 64
"""So many examples, and so many batches, are searched for two examples that differ."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")

Inputs = Any
"""What a model is called with: a tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


@dataclass(frozen=True)
class Batch:
    """One batch of the loader; `start` is the index of its first example in the data set."""

    inputs: Inputs
    targets: Tensor
    start: int
    size: int
    weights: Tensor | None = None  # (n,), how much each example counts

    @property
    def rows(self) -> slice:
        """Where these examples stand among all examples."""
        return slice(self.start, self.start + self.size)


@dataclass
class Batches:
    """Re-iterable batches of inputs, targets and perhaps weights, checked and moved to the model's device.

    Every pass must give the same examples in the same order, since leverages, residuals and shares are told by
    index; a pass that differs from what was read before raises `LoaderError`.

    Attributes:
        prints: a mark for each batch read so far, of its inputs and targets.
        complete: whether some pass has reached the end, so that the number of batches is known.
        positional: how many positional arguments the inputs are.
        retarget: what is to become of the targets, if not what the loader gives.
        passes: how the data are shared: this process has those from `passes.offset` on.
        fitting: whether a fit runs, during which nobody else changes the data behind torch's back.
    """

    loader: Iterable[Any]
    device: torch.device
    progress: Progress
    notes: list[str] = field(default_factory=list)
    prints: list[tuple[int, ...]] = field(default_factory=list)
    complete: bool = False
    positional: int = 1
    retarget: Callable[[Tensor], Tensor] | None = None
    passes: Passes = field(default_factory=Passes)
    _first: Any = None
    fitting: bool = False
    _seen: dict[int, list[tuple[weakref.ref[Tensor], int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a loader that can be read once only; read a shuffling DataLoader in order."""
        check_loader(self.loader)
        self.loader = in_order(self.loader, self.notes)

    def __iter__(self) -> Iterator[Batch]:
        """Read all batches once, without a progress bar."""
        return self.read(None)

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, showing progress under `label`. Batches without examples are passed over."""
        if self.passes.closed:
            raise elsewhere()
        count, start = 0, self.passes.offset
        for number, raw in enumerate(self._tracked(label)):
            batch = self._checked(number, raw, start)
            count = number + 1
            if batch.size:
                yield batch
            start += batch.size
        self._finish(count, start - self.passes.offset)

    def some(self, count: int) -> Iterator[tuple[int, Batch]]:
        """A few batches and their numbers, of data that were all read before; see `loaders.spread`."""
        numbers, raws = spread(self.loader, count)
        start, known = self.passes.offset, 0
        for number, raw in zip(numbers, raws, strict=False):
            for before in range(known, number):
                start += self._size(before)
            batch = self._checked(number, raw, start)
            start, known = start + batch.size, number + 1
            if batch.size:
                yield number, batch

    def _size(self, number: int) -> int:
        """The examples of a batch of a loader that `spread` reads here and there."""
        if isinstance(self.loader, (list, tuple)):
            return batch_size(split(self.loader[number], f"batch {number}")[0], f"batch {number}")
        size: int = self.loader.batch_size  # type: ignore[attr-defined]  # a DataLoader, whose last batch alone is smaller
        return size

    def _checked(self, number: int, raw: Any, start: int) -> Batch:
        """What the loader gave, moved to the device, sound, and the same as in other passes."""
        where = f"batch {number}"
        inputs, targets = split(raw, where)
        inputs, targets = to_device(inputs, self.device), to_device(targets, self.device)
        size = batch_size(inputs, where)
        self.positional = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        if not isinstance(targets, Tensor) or targets.ndim == 0 or len(targets) != size:
            got = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
            raise ShapeError(
                f"expected a tensor of {size} targets for the {size} inputs in {where}, got {got}. "
                "Make the loader give one target (a number, or a row of k numbers) for each example."
            )
        weights = to_device(weights_in(raw), self.device)
        found = self._marks(number, raw, [*tensors_of((inputs, weights)), targets])
        if self.prints[number : number + 1] != [found]:  # of what is as it was, all is known
            check_finite(inputs, "inputs", where)
            check_finite(targets, "targets", where)
            if weights is not None:
                check_weights(weights, size, where)
        self._remember(number, found)
        wanted = targets if self.retarget is None or not size else self.retarget(targets)
        return Batch(inputs, wanted, start, size, weights)

    def _marks(self, number: int, raw: Any, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        """A mark for each tensor of a batch; while a fit runs, the same again for tensors of a list left untouched."""
        if self.fitting and isinstance(self.loader, (list, tuple)):
            now = [(weakref.ref(leaf), leaf._version) for leaf in tensors_of(raw) if not leaf.is_inference()]
            before, self._seen[number] = self._seen.get(number, []), now
            alike = len(before) == len(now) == len(leaves) and number < len(self.prints)
            if alike and all(one[0]() is two[0]() and one[1] == two[1] for one, two in zip(before, now, strict=True)):
                return self.prints[number]
        return tuple(map(mark, leaves))

    def fitted(self) -> None:
        """The fit is over: from now on others may change the data."""
        self.fitting = False
        self._seen.clear()

    def first(self) -> Batch:
        """The first batch of all: that of the first process which has one."""
        if self.passes.crew.alone:
            return next(self.read(None))
        if self._first is None:  # read before anything is known about the targets
            self._first = self._find_first()
        raw = to_device(self._first, self.device)
        targets = raw[1] if self.retarget is None else self.retarget(raw[1])
        return Batch(raw[0], targets, 0, len(targets), raw[2])

    def beginning(self) -> Inputs:
        """The inputs of the first batch, with some of later ones where it has no two examples that differ."""
        inputs = self.first().inputs
        if differ(inputs):
            return inputs
        mine: list[Inputs] = []
        for number, batch in enumerate(self.read(None)):
            mine.append(take(batch.inputs, slice(0, ALIKE)))
            if number == ALIKE or not alike(inputs, mine[-1]) or differ(joined([inputs, mine[-1]])):
                break
        crew = self.passes.crew
        sent = mine if crew.alone else to_device(mine, torch.device("cpu"))
        told = [one for each in crew.tell("the first examples", sent) for one in each]
        others = [one for one in to_device(told, self.device) if alike(inputs, one)]
        return joined([inputs, *others]) if others else inputs

    def _find_first(self) -> Any:
        crew = self.passes.crew
        mine = next(self.read(None), None)
        told = crew.tell("the first batch", mine is not None)
        if not any(told):
            raise nothing()
        owner = told.index(True)
        sent = None if mine is None else to_device((mine.inputs, mine.targets, mine.weights), torch.device("cpu"))
        return crew.tell("the first batch", sent if crew.rank == owner else None)[owner]

    def _tracked(self, label: str | None) -> Iterable[Any]:
        if label is None:
            return self.loader
        total = len(self.prints) if self.complete else length(self.loader)
        return self.progress.track(self.loader, f"{label}, batch", total)

    def _remember(self, number: int, found: tuple[int, ...]) -> None:
        if number < len(self.prints):
            if self.prints[number] != found:
                raise LoaderError(
                    f"expected the same examples in every pass, got other data in batch {number} than in the first "
                    "pass. Use shuffle=False and switch random augmentation off (a DataLoader with shuffle=True alone "
                    "is put in order automatically); a loader that can be read once only must be made a list first."
                )
        elif self.complete:
            raise LoaderError(
                f"expected {len(self.prints)} batches as in the first pass, got more. "
                "The loader must give the same examples in every pass."
            )
        else:
            self.prints.append(found)

    def _finish(self, count: int, examples: int) -> None:
        if count < len(self.prints):
            raise LoaderError(
                f"expected {len(self.prints)} or more batches as in the first pass, got {count}. "
                "The loader must give the same examples in every pass; one that can be read once only must be made a "
                "list first."
            )
        if examples == 0 and self.passes.crew.alone:
            raise nothing()
        self.complete = True


def nothing() -> InputError:
    """The error for data without examples."""
    return InputError(
        "expected a loader with at least one example, got an empty one. Check the data set and its filters."
    )


def split(raw: Any, where: str) -> tuple[Inputs, Any]:
    """Cut a batch into inputs and targets; weights are left aside.

    Examples:
        >>> split({"input_ids": [1], "labels": [0]}, "batch 0")
        ({'input_ids': [1]}, [0])
    """
    if isinstance(raw, Mapping):
        keys = [key for key in TARGET_KEYS if key in raw]
        if len(keys) != 1:
            raise InputError(
                f"expected exactly one of the keys {', '.join(TARGET_KEYS)} in {where}, got the keys "
                f"{', '.join(sorted(map(str, raw)))}. Rename the key of the targets to 'labels'."
            )
        return {key: value for key, value in raw.items() if key not in (keys[0], WEIGHT_KEY)}, raw[keys[0]]
    if isinstance(raw, (tuple, list)) and len(raw) in (2, 3):
        return _plain(raw[0]), raw[1]
    got = f"{type(raw).__name__} of {len(raw)}" if isinstance(raw, (tuple, list)) else type(raw).__name__
    raise InputError(
        f"expected (inputs, targets), (inputs, targets, weights) or a dict with labels in {where}, got {got}. "
        "Several inputs go into a tuple: ((a, b), targets)."
    )


def without_targets(raw: Any, positional: int = 1) -> Inputs:
    """The inputs of a batch to predict on, whether or not targets came with them.

    Args:
        raw: a tensor, a mapping, a tuple of inputs, or any of them with targets in a pair, or with weights too.
        positional: how many positional arguments the model takes.

    Examples:
        >>> without_targets(("inputs", "targets")), without_targets(("left", "right"), positional=2)
        ('inputs', ('left', 'right'))
    """
    if isinstance(raw, Mapping):
        return {key: value for key, value in raw.items() if key not in (*TARGET_KEYS, WEIGHT_KEY)}
    if isinstance(raw, (tuple, list)):
        nested = any(isinstance(item, (tuple, list, Mapping)) for item in raw)
        weighted = len(raw) == 3 and positional != 3
        if (len(raw) == 2 or weighted) and (nested or positional == 1):
            return _plain(raw[0])
        return tuple(raw)
    return raw


def _plain(inputs: Inputs) -> Inputs:
    """Mappings of any kind as dicts, in which tensors are found and moved."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor inside `value`, cut off from any graph; one made in inference mode is copied."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device)
        return moved.clone() if moved.is_inference() else moved

    return tree_map(move, value)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor inside the inputs."""
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def batch_size(inputs: Inputs, where: str) -> int:
    """The number of examples: the first axis of every input tensor."""
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
            "Give every input one row an example; what all examples share belongs into a buffer of the model."
        )
    return sizes.pop()


def describe(inputs: Inputs) -> str:
    """Shapes and dtypes, for messages.

    Examples:
        >>> describe({"x": torch.zeros(2, 3)})
        '(2, 3) float32'
    """
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in tensors_of(inputs))


def take(inputs: Inputs, rows: slice) -> Inputs:
    """The same inputs for fewer examples."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, inputs)


def alike(one: Inputs, other: Inputs) -> bool:
    """Whether two batches can be put together: the same tensors but for the number of examples."""
    sides = [tree_flatten(inputs) for inputs in (one, other)]
    if sides[0][1] != sides[1][1]:
        return False
    pairs = [(a, b) for a, b in zip(sides[0][0], sides[1][0], strict=True) if isinstance(a, Tensor)]
    return all(isinstance(b, Tensor) and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)


def joined(batches: Sequence[Inputs]) -> Inputs:
    """Several batches as one; what is no tensor is that of the first."""
    return tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *batches)


def differ(inputs: Inputs) -> bool:
    """Whether any of the first examples differs from the first one."""
    return any(bool((leaf[:ALIKE] != leaf[:1]).any()) for leaf in tensors_of(inputs))


def check_finite(value: Any, what: str, where: str) -> None:
    """Raise when a tensor holds NaN or infinity."""
    for leaf in tensors_of(value):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            bad = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero()[0].item()
            advice = "Look at that example's inputs and at the weights."
            raise InputError(
                f"expected finite {what}, got NaN or infinity in {where} (first at example {bad} of the batch). "
                + (advice if what.startswith("outputs") else "Remove or impute these examples.")
            )
