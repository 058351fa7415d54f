"""Reading the training data: in order, again and again, and told when something changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import whence
from doubles import Changing, batches, inputs_and_targets
from whence.data.batches import (
    Batches,
    TensorBatches,
    batch_size,
    check_finite,
    describe,
    split,
    split_targets,
    take,
    to_device,
)
from whence.runtime.execution import Progress

CPU = torch.device("cpu")


def make(loader: Any, device: torch.device = CPU) -> Batches:
    return Batches(loader, device, Progress(enabled=False))


def test_passes_are_the_same(device: torch.device) -> None:
    data = make(batches(), device)
    for _ in range(3):
        found = list(data.read("pass"))
        assert [(batch.start, batch.size, batch.rows) for batch in found] == [
            (0, 3, slice(0, 3)),
            (3, 3, slice(3, 6)),
            (6, 2, slice(6, 8)),
        ]
        torch.testing.assert_close(torch.cat([batch.inputs for batch in found]), inputs_and_targets(device)[0])
        torch.testing.assert_close(torch.cat([batch.targets for batch in found]), inputs_and_targets(device)[1])
    assert data.notes == []


@pytest.mark.parametrize("size", [1, 3, 8, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_tensors_behind_a_data_loader_are_read_as_slices(size: int, drop_last: bool) -> None:
    """The same batches, in the same order, as the loader itself gives, again and again."""
    if drop_last and size > 8:
        size = 5
    weights = torch.arange(8.0)
    loader = DataLoader(TensorDataset(*inputs_and_targets(), weights), batch_size=size, drop_last=drop_last)
    data, wanted = make(loader), list(loader)
    assert isinstance(data.loader, TensorBatches)
    assert len(data.loader) == len(loader)
    for _ in range(2):
        for batch, (inputs, targets, some) in zip(data.read("pass"), wanted, strict=True):
            assert batch.weights is not None
            assert all(map(torch.equal, (batch.inputs, batch.targets, batch.weights), (inputs, targets, some)))


@pytest.mark.parametrize("change", ["in place", "another", "behind torch"])
def test_tensors_of_a_data_set_that_change(change: str) -> None:
    data = TensorDataset(*inputs_and_targets())
    read = make(DataLoader(data, batch_size=3))
    list(read)
    if change == "in place":
        data.tensors[0][4] += 1.0
    elif change == "another":
        data.tensors = (data.tensors[0] + 1.0, data.tensors[1])
    else:
        data.tensors[0].numpy()[0] += 1.0
    with pytest.raises(whence.LoaderError, match=f"other data in batch {int(change == 'in place')}"):
        list(read)


def test_inputs_that_a_model_writes_into_leave_the_data_set_alone() -> None:
    inputs, targets = inputs_and_targets()
    data = make(DataLoader(TensorDataset(inputs, targets), batch_size=3))
    for batch in data:
        batch.inputs.zero_()
    assert torch.equal(inputs, inputs_and_targets()[0])
    assert float(next(iter(data)).inputs.abs().sum()) > 0


def test_loaders_that_do_more_than_slice_are_read_as_they_are() -> None:
    class Shifted(TensorDataset):
        def __getitem__(self, at: Any) -> Any:
            return tuple(one + 1.0 for one in super().__getitem__(at))

    inputs, targets = inputs_and_targets()
    shifted = make(DataLoader(Shifted(inputs, targets), batch_size=8))
    assert torch.equal(next(iter(shifted)).inputs, inputs + 1.0)

    def doubled(rows: Any) -> Any:
        return tuple(2.0 * one for one in torch.utils.data.default_collate(rows))

    collated = make(DataLoader(TensorDataset(inputs, targets), batch_size=8, collate_fn=doubled))
    assert torch.equal(next(iter(collated)).inputs, 2.0 * inputs)


def test_a_reader_that_stops_early_does_not_end_the_pass() -> None:
    data = make(batches())
    first = next(iter(data))
    assert first.size == 3
    assert not data.complete
    reader = data.read(None)
    next(reader), next(reader)
    reader.close()
    assert not data.complete
    assert len(data.fingerprints) == 2
    assert len(list(data)) == 3
    assert data.complete
    assert len(data.fingerprints) == 3


def test_what_was_seen_early_counts() -> None:
    """A loader read once only, or shuffled, is found out by the batch that was looked at first."""
    data = make(Changing(batches(), lambda number, items: items[number - 1 :]))
    next(iter(data))
    with pytest.raises(whence.LoaderError, match="other data in batch 0"):
        list(data)


def test_two_readers_at_once() -> None:
    data = make(batches())
    pairs = [(one.start, other.start) for one in data for other in data]
    assert pairs == [(a, b) for a in (0, 3, 6) for b in (0, 3, 6)]


def test_an_error_in_a_pass_leaves_the_next_one_whole() -> None:
    def torn(number: int, items: list[Any]) -> Any:
        yield items[0]
        if number == 1:
            raise OSError("disk")
        yield from items[1:]

    data = make(Changing(batches(), torn))
    with pytest.raises(OSError, match="disk"):
        list(data)
    assert [batch.size for batch in data] == [3, 3, 2]


def test_changes_that_leave_sums_alone_are_seen() -> None:
    x, y = inputs_and_targets()
    for other in (x.flip(1), x.roll(1, 0), x[:, [1, 0, 2]], -x.flip(0)):
        data = make(Changing([(x, y)], lambda number, items, other=other: items if number == 1 else [(other, y)]))
        list(data)
        with pytest.raises(whence.LoaderError, match="other data in batch 0"):
            list(data)


def touched(items: list[Any]) -> None:
    items[0][0].add_(1.0)


def exchanged(items: list[Any]) -> None:
    items[0] = (items[0][0] + 1.0, items[0][1])


def through_numpy(items: list[Any]) -> None:
    items[0][0].numpy()[...] += 1.0


@pytest.mark.parametrize("change", [touched, exchanged, through_numpy])
def test_batches_of_a_list_that_change(change: Any) -> None:
    x, y = inputs_and_targets()
    items = [(x.clone(), y)]
    data = make(items)
    list(data), list(data)
    change(items)
    with pytest.raises(whence.LoaderError, match="other data in batch 0"):
        list(data)


def test_inputs_of_every_dtype_can_be_compared() -> None:
    y = inputs_and_targets()[1]
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.complex64):
        data = make([(torch.ones(8, 3).to(dtype), y)])
        assert len(list(data)) == len(list(data)) == 1


def test_huge_numbers_and_empty_axes_can_be_compared() -> None:
    y = inputs_and_targets()[1]
    for x in (torch.full((8, 3), 1.7e308, dtype=torch.float64), torch.zeros(8, 0)):
        data = make([(x, y)])
        assert len(list(data)) == len(list(data)) == 1


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
def test_targets_by_name(key: str) -> None:
    inputs, targets, _ = split({"a": 1, "b": 2, key: 3}, "batch 0")
    assert (inputs, targets) == ({"a": 1, "b": 2}, 3)


def test_the_parts_of_a_batch_to_predict() -> None:
    x, y = inputs_and_targets()
    assert split_targets(x)[0] is x
    assert split_targets((x, y))[0] is x
    assert split_targets([x, y])[0] is x
    assert split_targets((x,))[0] == (x,)
    assert split_targets((x, y), positional=2)[0] == (x, y)
    assert split_targets(((x, x), y), positional=2)[0] == (x, x)
    assert split_targets({"x": x, "labels": y})[0] == {"x": x}


def test_moving_cuts_graphs_and_leaves_the_rest(device: torch.device) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        frozen = torch.ones(2)
    moved = to_device({"x": (x, frozen), "name": "left"}, device)
    assert moved["name"] == "left"
    for tensor in moved["x"]:
        assert tensor.device.type == device.type
        assert not tensor.requires_grad
        assert not tensor.is_inference()
    assert x.requires_grad


def test_slices_of_nested_inputs() -> None:
    nested = {"a": torch.arange(4), "b": [torch.arange(8).reshape(4, 2), "flag"]}
    part = take(nested, slice(1, 3))
    assert part["a"].tolist() == [1, 2]
    assert part["b"][0].tolist() == [[2, 3], [4, 5]]
    assert part["b"][1] == "flag"
    assert batch_size(part, "here") == 2
    assert describe(part) == "(2,) int64, (2, 2) int64"


def test_finite_integers_pass(device: torch.device) -> None:
    check_finite([torch.arange(3, device=device), "text", None], "inputs", "here")


def test_the_number_of_positional_inputs_is_learnt() -> None:
    x, y = inputs_and_targets()

    def positional(inputs: Tensor | tuple[Tensor, ...] | dict[str, Tensor]) -> int:
        data = make([(inputs, y)])
        list(data)
        return data.positional

    assert positional(x) == positional({"x": x}) == 1
    assert positional((x, x)) == 2
