"""What may serve as training data: something that can be read again and again, in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from whence.errors import InputError, LoaderError


def check_loader(loader: Any) -> None:
    """Refuse what is no loader, and what can be read once only."""
    if isinstance(loader, DataLoader):
        _check_sampler(loader.sampler)
        return  # to ask it for two iterators would start its workers
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(
            f"expected a loader that gives batches, got the data set {type(loader).__name__}, which gives single "
            "examples. Wrap it: torch.utils.data.DataLoader(dataset, batch_size=128)."
        )
    if isinstance(loader, (str, bytes, Tensor)) or not _iterable(loader):
        raise InputError(
            f"expected a loader that gives (inputs, targets), got {type(loader).__name__}. "
            "Pass a DataLoader, or a list of batches such as [(inputs, targets)]."
        )
    if isinstance(loader, tuple) and loader and all(isinstance(item, Tensor) for item in loader):
        raise InputError(
            f"expected a loader that gives (inputs, targets), got a tuple of {len(loader)} tensors. "
            "A single batch goes into a list: [(inputs, targets)]."
        )
    if iter(loader) is iter(loader):
        raise LoaderError(
            f"expected a loader that can be read several times, got a one-shot {type(loader).__name__}. "
            "Pass a DataLoader or a list of batches instead of an iterator or generator."
        )


def _check_sampler(sampler: Any) -> None:
    """Refuse shards that were made even by repeating examples, which would count twice."""
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    size, parts = length(sampler.dataset) or 0, sampler.num_replicas
    if size % parts:
        raise InputError(
            f"expected every example once, got a DistributedSampler that repeats {-size % parts} of {size} to make "
            f"{parts} shards even. Give each process a slice: Subset(dataset, range(n * rank // world, n * (rank + 1) "
            "// world))."
        )


def length(loader: Any) -> int | None:
    """The number of batches, where the loader knows it; a DataLoader of an iterable data set may not.

    Examples:
        >>> length([1, 2]), length(iter([1, 2]))
        (2, None)
    """
    try:
        return len(loader)
    except TypeError:
        return None


def _iterable(loader: Any) -> bool:
    try:
        iter(loader)
    except TypeError:
        return False
    return True


def in_order(loader: Iterable[Any], notes: list[str]) -> Iterable[Any]:
    """A loader that reads the same data in the order of the data set.

    A shuffling DataLoader is read in order, with a note. Its generator of random numbers is left alone, and workers
    that persist are not shared, since passes over the data may be nested, and other threads may read the same loader.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    sampler: Any = loader.sampler
    size = length(loader.dataset) or 0
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    sequential = type(sampler) is SequentialSampler
    if loader.batch_size is None or not (shuffled or sequential):
        return _apart(loader, **_own_order(loader)) if loader.persistent_workers else loader
    if shuffled:
        notes.append("the loader shuffles; it was read in the order of its data set, which indices refer to")
    elif loader.drop_last and size % loader.batch_size:
        notes.append(
            f"the loader drops its last, incomplete batch: {size % loader.batch_size} training examples were not seen"
        )
    return _apart(loader, batch_size=loader.batch_size, shuffle=False, drop_last=loader.drop_last and sequential)


def spread(loader: Iterable[Any], count: int) -> tuple[list[int], Iterable[Any]]:
    """Numbers of some batches, the first one among them, and these batches, none of the others being read.

    They are spread evenly over lists, and over a DataLoader that reads its data set in order. Of other loaders they are
    the first ones: there is no way to the last that does not read all.

    Examples:
        >>> spread(["a", "b", "c", "d", "e"], 3)
        ([0, 2, 4], ['a', 'c', 'e'])
    """
    plain = type(loader) is DataLoader and type(loader.sampler) is SequentialSampler and bool(loader.batch_size)
    if not (plain or isinstance(loader, (list, tuple))):
        return list(range(count)), islice(loader, count)
    total = length(loader) or 0
    numbers = sorted({round(at * (total - 1) / max(count - 1, 1)) for at in range(count)}) if total else []
    if isinstance(loader, (list, tuple)):
        return numbers, [loader[number] for number in numbers]
    assert isinstance(loader, DataLoader)
    size, examples = loader.batch_size or 1, length(loader.dataset) or 0
    chosen = [list(range(number * size, min((number + 1) * size, examples))) for number in numbers]
    return numbers, _apart(loader, batch_sampler=chosen)


def _own_order(loader: DataLoader[Any]) -> dict[str, Any]:
    """What says in which order and by how many a DataLoader reads."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}


def _apart(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """Another DataLoader of the same data, with workers of its own for each pass."""
    return DataLoader(
        loader.dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
