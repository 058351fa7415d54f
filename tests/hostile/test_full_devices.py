"""Devices that are full say what helps, or get smaller pieces; the answers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import batches, fit, inputs_and_targets, mlp
from full_devices import Full


class Greedy(nn.Module):
    """Stands in for a GPU that is full as soon as gradients are asked for, of any number of examples but two.

    Two examples show, before the fit, which parameters the outputs depend on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) != 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        outputs: Tensor = self.net(x)
        return outputs


def test_a_full_device_says_which_option_helps() -> None:
    message = r"tangents of one example to fit on the device, got out of memory\. Select fewer parameters"
    with pytest.raises(whence.TooLargeError, match=message):
        fit(Greedy(), batches())


class Tight(nn.Module):
    """Stands in for a GPU that is full with more than eight examples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        outputs: Tensor = self.net(x)
        return outputs


@pytest.mark.parametrize("structure", ["ekfac", "core"])
def test_a_full_device_makes_pieces_smaller(structure: str) -> None:
    x, y = inputs_and_targets(n=20)
    found, wanted = (fit(model, [(x[:9], y[:9]), (x[9:], y[9:])], structure=structure) for model in (Tight(), mlp()))
    torch.testing.assert_close(found.predict(x).hec3, wanted.predict(x).hec3, rtol=1e-9, atol=1e-12)
    words = "the device ran out of memory with the gradients of all layers of 9 examples at once; 4 were used from then"
    assert str(found.diagnostics).count(words) == 1
    assert "ran out of memory" not in str(wanted.diagnostics)


class Busy(nn.Module):
    """Stands in for a GPU that others have filled, once `full` is set: no more than five examples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.full and len(x) > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        outputs: Tensor = self.net(x)
        return outputs


@pytest.mark.parametrize("structure", ["ekfac", "core", "exact", whence.Exact(road="dual")])
def test_a_device_that_is_full_later_answers_in_halves(structure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = inputs_and_targets(n=20)
    model = Busy()
    tracer = fit(model, [(x, y)], structure=structure, recenter=True, progress=True)
    asked = x[:12]
    wanted, shares = tracer.predict(asked), tracer.attribute(asked, top=3).hec3.share
    model.full = True
    capsys.readouterr()
    found = tracer.predict(asked)
    told = "whence: the device ran out of memory with the predictions of 12 examples at once" in capsys.readouterr().err
    assert told is (structure != "ekfac")  # whose gradients are in pieces anyway
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.hec3, wanted.hec3, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tracer.attribute(asked, top=3).hec3.share, shares, rtol=1e-9, atol=1e-12)


class Hungry(whence.Diagonal):
    """Runs out of memory after its plan was made, for as long as that is for more than 16 MiB."""

    def fit(self, problem: Any, ridge: Any, weigh: Any = None) -> Any:
        if problem.budget.limit > 2**24 or (problem.chunk_size or 0) > 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().fit(problem, ridge, weigh)


def test_a_full_device_is_planned_for_anew() -> None:
    x, y = inputs_and_targets(n=20)
    execution = whence.Execution(max_memory=2**26, chunk_size=20)
    found, wanted = (
        fit(mlp(), [(x, y)], structure=Hungry(), execution=execution),
        fit(mlp(), [(x, y)], structure="diagonal"),
    )
    notes = [one.value for one in found.diagnostics if one.name == "note" and "ran out of memory" in str(one.value)]
    assert notes == [
        f"the device ran out of memory; the fit was planned again with {size} MiB, chunks of {chunk} examples"
        for size, chunk in (("32.0", 10), ("16.0", 5), ("8.0", 2))
    ]
    torch.testing.assert_close(found.predict(x).hec3, wanted.predict(x).hec3, rtol=1e-9, atol=1e-12)
    message = r"take 3\.0 MiB at most on cpu, got out of memory \(CUDA .*\), with smaller chunks .*chunk_size"
    with pytest.raises(whence.TooLargeError, match=message):
        fit(mlp(), [(x, y)], structure=Starving(), execution=whence.Execution(max_memory=3 * 2**20, chunk_size=5))


class Allocating(whence.Diagonal):
    """Fails as cuBLAS does where others filled the GPU, until chunks are of five examples; or for another reason."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def fit(self, problem: Any, ridge: Any, weigh: Any = None) -> Any:
        if problem.chunk_size > 5:
            raise RuntimeError(self.words)
        return super().fit(problem, ridge, weigh)


def test_libraries_that_are_refused_memory_count_as_a_full_device() -> None:
    x, y = inputs_and_targets(n=20)
    structure = Allocating("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    found = fit(mlp(), [(x, y)], structure=structure, execution=whence.Execution(chunk_size=20))
    notes = [str(one.value) for one in found.diagnostics if "ran out of memory" in str(one.value)]
    assert [note.rpartition(", ")[2] for note in notes] == ["chunks of 10 examples", "chunks of 5 examples"]
    with pytest.raises(RuntimeError, match="another reason"):
        fit(mlp(), [(x, y)], structure=Allocating("another reason"), execution=whence.Execution(chunk_size=20))


def test_a_fit_that_is_written_down_keeps_to_its_plan(tmp_path: Path) -> None:
    with pytest.raises(whence.TooLargeError, match=r"writes checkpoints keeps its plan\."):
        fit(
            mlp(),
            batches(),
            structure=Hungry(),
            execution=whence.Execution(max_memory=2**26, checkpoint=tmp_path / "sums"),
        )


class Starving(whence.Diagonal):
    """Never has enough."""

    def fit(self, problem: Any, ridge: Any, weigh: Any = None) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


FULL: dict[str, tuple[whence.Structure, int, int, int]] = {  # width, examples, positions
    "ekfac": (whence.EKFAC(), 100, 600, 1),
    "core": (whence.Core(size=100), 20, 1000, 4),
    "primal": (whence.Exact(road="primal"), 12, 400, 48),
}


class Pooled(nn.Module):
    """The mean over positions: activations take more memory than gradients, which are kept for all examples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.each(x).tanh().mean(1))
        return outputs


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("told", [True, False])
def test_a_device_that_is_full(name: str, told: bool) -> None:
    """Halfway between what all examples at once take and what few at a time do, with a plan that knows of more."""
    structure, width, n, positions = FULL[name]
    torch.manual_seed(0)
    model, x, y = Pooled(width).eval(), torch.randn(n, positions, width), torch.randn(n, 10)
    options: dict[str, Any] = {"structure": structure, "ridge": 10.0}
    single: dict[str, Any] = {"dtype": torch.float32}
    answer, peaks = torch.zeros(0), []
    for chunk in (n, 20):
        with Full(2**50) as counted:
            wanted = fit(model, [(x, y)], **options, execution=whence.Execution(chunk_size=chunk, **single))
        answer = wanted.predict(x[:50]).hec3
        peaks.append(counted.peak)
        del wanted
    limit = sum(peaks) // 2
    assert peaks[1] < 0.80 * limit  # gradients of small training sets are cached, whatever the chunk
    with Full(limit) as device:
        found = fit(model, [(x, y)], **options, execution=whence.Execution(chunk_size=n if told else None, **single))
    notes = [str(one.value) for one in found.diagnostics if "ran out of memory" in str(one.value)]
    assert device.times > 0
    assert notes
    torch.testing.assert_close(found.predict(x[:50]).hec3, answer, rtol=1e-3, atol=1e-6)


class Fixed(whence.Diagonal):
    """Takes 40 MiB whatever happens, and a MiB for each example of a chunk, of a device with 50 MiB."""

    def fit(self, problem: Any, ridge: Any, weigh: Any = None) -> Any:
        problem.budget.require(40 * 2**20, "this", "Nothing.")
        if problem.chunk_size is None or problem.chunk_size > 10:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().fit(problem, ridge, weigh)


@pytest.mark.parametrize("chunk", [None, 20])
def test_memory_that_must_be_is_not_planned_away(chunk: int | None) -> None:
    """Half the memory would be refused by the plan: then chunks alone become smaller."""
    x, y = inputs_and_targets(n=20)
    found = fit(
        mlp(), [(x, y)], structure=Fixed(), execution=whence.Execution(max_memory=100 * 2**20, chunk_size=chunk)
    )
    notes = [str(one.value) for one in found.diagnostics if "ran out of memory" in str(one.value)]
    assert "50.0 MiB, chunks of 5 examples" in notes[-1] or "50.0 MiB, chunks of 10 examples" in notes[-1]


def test_products_with_the_jacobian_halve_too() -> None:
    x, y = inputs_and_targets(n=20)
    model = Busy()
    jacobian = fit(model, [(x, y)]).problem.jacobian()
    directions, cotangents = torch.randn(3, 26, dtype=torch.float64), torch.randn(2, 12, 2, dtype=torch.float64)
    wanted = jacobian.jvp(x[:12], directions), jacobian.vjp(x[:12], cotangents)
    model.full = True
    found = jacobian.jvp(x[:12], directions), jacobian.vjp(x[:12], cotangents)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert [note for note in jacobian.notes if "tangents of 12 examples at once; 6 were" in note]
