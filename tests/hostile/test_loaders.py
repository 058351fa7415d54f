"""Training data that cannot be read, or not twice, or not in the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

import whence
from doubles import Changing, Once, batches, fit, inputs_and_targets, mlp


@pytest.mark.parametrize("empty", [[], [(torch.zeros(0, 3), torch.zeros(0, 2))]], ids=["no-batch", "no-example"])
def test_an_empty_loader(empty: list[Any]) -> None:
    with pytest.raises(whence.InputError, match=r"at least one example, got an empty one\. Check the data set"):
        fit(mlp(), empty)


def test_an_empty_data_loader() -> None:
    nothing = DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, 2)), batch_size=2)
    with pytest.raises(whence.InputError, match="got an empty one"):
        fit(mlp(), nothing)


@pytest.mark.parametrize(
    "once",
    [
        lambda: (batch for batch in batches()),
        lambda: iter(batches()),
        lambda: zip(*zip(*batches(), strict=True), strict=True),
    ],
    ids=["generator", "iterator", "zip"],
)
def test_a_loader_that_can_be_read_once(once: Any) -> None:
    with pytest.raises(
        whence.LoaderError, match=r"read several times, got a one-shot \w+\. Pass a DataLoader or a list"
    ):
        fit(mlp(), once())


def test_a_loader_that_hides_a_single_iterator() -> None:
    with pytest.raises(whence.LoaderError, match="read several times, got a one-shot Once"):
        fit(mlp(), Once(batches()))


def test_a_data_set_that_gives_its_examples_once() -> None:
    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.examples = iter([(x, y) for bx, by in batches() for x, y in zip(bx, by, strict=True)])

        def __iter__(self) -> Any:
            return self.examples

    with pytest.raises(whence.LoaderError, match=r"other data in batch 0.*read once only must be made a list"):
        fit(mlp(), DataLoader(Stream(), batch_size=3))


@pytest.mark.parametrize("loader", [None, 5, "data.csv", torch.zeros(4, 3)], ids=["none", "int", "str", "tensor"])
def test_no_loader_at_all(loader: Any) -> None:
    with pytest.raises(
        whence.InputError, match=r"expected a loader that gives \(inputs, targets\), got \w+\. Pass a Data"
    ):
        fit(mlp(), loader)


def test_a_batch_in_place_of_a_loader() -> None:
    with pytest.raises(
        whence.InputError, match=r"got a tuple of 2 tensors\. A single batch goes into a list: \[\(inputs"
    ):
        fit(mlp(), inputs_and_targets())


def test_a_data_set_in_place_of_a_loader() -> None:
    with pytest.raises(whence.InputError, match="got the data set TensorDataset, which gives single examples"):
        fit(mlp(), TensorDataset(*inputs_and_targets()))


def test_two_inputs_and_targets_without_a_tuple() -> None:
    x, y = inputs_and_targets()
    with pytest.raises(
        whence.ShapeError,
        match=r"sample weights as numbers of shape \(8,\) in batch 0, got \(8, 2\) .*several inputs go into a",
    ):
        fit(mlp(), [(x, x, y)])


def test_batches_of_four_parts() -> None:
    x, y = inputs_and_targets()
    with pytest.raises(
        whence.InputError, match=r"in batch 0, got tuple of 4\. Several inputs go into a tuple: \(\(a, b\)"
    ):
        fit(mlp(), [(x, x, x, y)])


@pytest.mark.parametrize("change", ["noise", "flip", "order", "targets"])
def test_data_that_change_from_pass_to_pass(change: str) -> None:
    def changed(number: int, items: list[Any]) -> list[Any]:
        if number <= 3:  # two looks at the first batch, and the first pass
            return items
        if change == "order":
            return items[::-1]
        x, y = items[1]
        other = {"noise": (x + 1e-7, y), "flip": (x.flip(1), y), "targets": (x, y.flip(0))}[change]
        return [items[0], other, items[2]]

    wrong = 0 if change == "order" else 1
    loader = Changing(batches(), changed)
    with pytest.raises(
        whence.LoaderError, match=f"other data in batch {wrong}. Use the same batch_size and shuffle=False"
    ):
        fit(mlp(), loader, execution=whence.Execution(max_memory=13_000))  # rows do not fit: the data are read again


@pytest.mark.parametrize(("more", "message"), [(False, "got 2 batches instead of 3"), (True, "got more than")])
def test_a_number_of_batches_that_changes(more: bool, message: str) -> None:
    def changed(number: int, items: list[Any]) -> list[Any]:
        return items if number <= 3 else [*items, items[0]] if more else items[:-1]

    with pytest.raises(whence.LoaderError, match=message):
        fit(mlp(), Changing(batches(), changed), execution=whence.Execution(max_memory=13_000))


def test_random_augmentation_in_a_data_loader() -> None:
    x, y = inputs_and_targets()

    def augment(pairs: list[Any]) -> Any:
        return torch.stack([a + torch.randn(3) for a, _ in pairs]), torch.stack([b for _, b in pairs])

    loader = DataLoader(TensorDataset(x, y), batch_size=4, collate_fn=augment)
    with pytest.raises(whence.LoaderError, match=r"batch 0.*switch random augmentation off"):
        fit(mlp(), loader)


def test_a_shuffling_data_loader_is_read_in_order() -> None:
    x, y = inputs_and_targets()
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, drop_last=True, generator=generator)
    tracer = fit(mlp(), loader)
    expected = fit(mlp(), [(x, y)])
    torch.testing.assert_close(tracer.residuals, expected.residuals)
    torch.testing.assert_close(tracer.predict(x).hec3, expected.predict(x).hec3)
    notes = [finding.value for finding in tracer.diagnostics if finding.name == "note"]
    assert "the loader shuffles; it was read in the order of its data set, which indices refer to" in notes
    assert torch.equal(generator.get_state(), before)  # the next epoch of training is as it would have been


def test_a_loader_that_drops_examples_is_noted() -> None:
    loader = DataLoader(TensorDataset(*inputs_and_targets()), batch_size=3, drop_last=True)
    tracer = fit(mlp(), loader)
    assert len(tracer.residuals) == 6
    assert "2 training examples were not read" in str(tracer.diagnostics)


@pytest.mark.parametrize("kind", ["replacement", "subset"])
def test_other_random_samplers_are_refused(kind: str) -> None:
    data = TensorDataset(*inputs_and_targets())
    sampler = RandomSampler(data, replacement=True) if kind == "replacement" else SubsetRandomSampler(range(8))
    with pytest.raises(whence.LoaderError, match=r"expected the same examples in every pass.*shuffle=False"):
        fit(mlp(), DataLoader(data, batch_size=4, sampler=sampler))


def test_a_data_loader_of_ones_own_is_left_alone() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((2 * x, y) for x, y in super().__iter__())

    x, y = inputs_and_targets()
    tracer = fit(mlp(), Doubling(TensorDataset(x, y), batch_size=3))
    torch.testing.assert_close(tracer.residuals, fit(mlp(), [(2 * x, y)]).residuals)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loader_with_workers(persistent: bool) -> None:
    x, y = inputs_and_targets()
    loader = DataLoader(
        TensorDataset(x, y), batch_size=3, shuffle=True, num_workers=1, persistent_workers=persistent, prefetch_factor=1
    )
    tracer = fit(mlp(), loader)
    torch.testing.assert_close(tracer.leverage, fit(mlp(), [(x, y)]).leverage)
    torch.testing.assert_close(tracer.predict(DataLoader(x, batch_size=5, num_workers=1)).mean, mlp()(x).detach())


def test_batches_without_examples_are_passed_over() -> None:
    gap = (torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64))
    first, *rest = batches()
    tracer = fit(mlp(), [gap, first, gap, *rest])
    torch.testing.assert_close(tracer.residuals, fit(mlp(), batches()).residuals)
