"""What a fit that goes on does not take over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from cut_fits import BEFORE, Faulty, Halt, answers, batches, fit, network, same
from whence.runtime.files import opened, write_file


def other_batches(kind: str) -> list[Any]:
    data = batches()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    if kind == "changed":
        y[13, 1] += 1e-13
    if kind == "swapped":
        x[[2, 7]], y[[2, 7]] = x[[7, 2]], y[[7, 2]]
    if kind == "fewer":
        x, y = x[:-1], y[:-1]
    return list(zip(x.split(5), y.split(5), strict=True))


@pytest.mark.parametrize(("kind", "words"), [("changed", "place 13"), ("swapped", "place 2"), ("fewer", "23 training")])
def test_other_data_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    fit(batches(), "diagonal", tmp_path / "checkpoint")
    with pytest.raises(whence.LoaderError, match=words):
        fit(other_batches(kind), "diagonal", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "change",
    [
        {"ridge": 0.6},
        {"recenter": False},
        {"noise": "unbiased"},
        {"parameters": "last_layer"},
        {"execution": {"chunk_size": 3}},
        {"execution": {"dtype": torch.float32}},
        {"likelihood": whence.Gaussian()},
    ],
    ids=lambda change: next(iter(change.get("execution", change))),
)
def test_other_options_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    fit(batches(), "ekfac", tmp_path / "checkpoint")
    if "likelihood" in change:  # the same, said otherwise
        fit(batches(), "ekfac", tmp_path / "checkpoint", **change)
        return
    with pytest.raises(
        whence.InputError, match=f"this fit, got one with {next(iter(change.get('execution', change)))}"
    ):
        fit(batches(), "ekfac", tmp_path / "checkpoint", **change)


def test_another_structure_is_refused(tmp_path: Path) -> None:
    fit(batches(), "ekfac", tmp_path / "checkpoint")
    with pytest.raises(whence.InputError, match="structure"):
        fit(batches(), "ekfac, whole", tmp_path / "checkpoint")


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = network()
    execution = whence.Execution(checkpoint=tmp_path / "checkpoint")
    options: dict[str, Any] = {"structure": "diagonal", "progress": False, "execution": execution}
    whence.fit(model, batches(), **options)
    with torch.no_grad():
        model[0].bias[1] += 1e-15
    with pytest.raises(whence.StaleModelError, match=r"0\.bias"):
        whence.fit(model, batches(), **options)


def quarters(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/4 from -1 to 1: their products and sums are exact in float64, in whatever order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double() / 4


def exact_fit(size: int, folder: Path | None, after: int | None = None) -> whence.Tracer:
    """A fit whose outputs have no rounding error: they do not depend on how many examples are computed at once."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.copy_(quarters(*parameter.shape, seed=at))
    data = list(zip(quarters(24, 3, seed=8).split(size), quarters(24, 2, seed=9).split(size), strict=True))
    loader = data if after is None else Faulty(data, after)
    execution = whence.Execution(checkpoint=folder, checkpoint_seconds=0)
    options: dict[str, Any] = {"ridge": 0.5, "progress": False, "recenter": True, "execution": execution}
    return whence.fit(model, loader, structure="diagonal", **options)


def test_batches_of_another_size(tmp_path: Path) -> None:
    """Refused where none of them ends where the checkpoint does."""
    with pytest.raises(Halt):
        exact_fit(5, tmp_path / "checkpoint", after=BEFORE + 2)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    with pytest.raises(whence.LoaderError, match="one ended after 10 examples"):
        exact_fit(4, tmp_path / "checkpoint")
    found = answers(exact_fit(1, tmp_path / "copy"))  # ends where the others do
    for name, value in answers(exact_fit(5, None)).items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [1, 4])
def test_batches_of_another_size_whose_outputs_are_rounded_otherwise(size: int, tmp_path: Path) -> None:
    """On some CPUs other batches give outputs that differ in the last bit: refused, or done again, never mixed."""
    with pytest.raises(Halt):
        fit(Faulty(batches(), BEFORE + 2), "diagonal", tmp_path / "checkpoint")
    try:
        found = answers(fit(batches(size=size), "diagonal", tmp_path / "checkpoint"))
    except whence.LoaderError:
        with pytest.raises(whence.LoaderError, match="one ended after 10 examples"):
            fit(batches(size=size), "diagonal", tmp_path / "checkpoint")
        assert size == 4, "single examples end where batches of five do"
        return
    for name, value in answers(fit(batches(), "diagonal", None)).items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


def test_passes_of_another_fit_and_damaged_ones(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    wanted = fit(batches(), "ekfac", folder)
    foreign = tmp_path / "foreign"
    fit(batches(), "ekfac", foreign, ridge=40.0)
    right = (folder / "pass-02.whence").read_bytes()
    assert same(fit(batches(), "ekfac", folder), wanted) == []
    (folder / "pass-02.whence").write_bytes((foreign / "pass-02.whence").read_bytes())
    with pytest.raises(whence.InputError, match="another fit"):
        fit(batches(), "ekfac", folder)
    (folder / "pass-02.whence").write_bytes(right[:-3] + b"abc")
    with pytest.raises(whence.CorruptArtifactError, match="checksum"):
        fit(batches(), "ekfac", folder)


def test_sums_that_were_made_from_other_numbers_are_made_again(tmp_path: Path) -> None:
    """As on another machine, whose eigenvectors differ in the last digit."""
    folder = tmp_path / "checkpoint"
    wanted = fit(batches(), "ekfac", folder)
    with opened(folder / "pass-02.whence") as container:
        facts = container.manifest
        sums = {name: 0.5 * container.tensor(name) for name in container.names}
    write_file(folder / "pass-02.whence", facts, sums)
    assert same(fit(batches(), "ekfac", folder), wanted) != []  # believed, as they fit
    write_file(folder / "pass-02.whence", {**facts, "given": [*facts["given"][:-1], 0]}, sums)
    assert same(fit(batches(), "ekfac", folder), wanted) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"done": 25}, "how many examples"),
        ({"done": True}, "how many examples"),
        ({"done": None}, "how many examples"),
        ({"kind": "start"}, "another fit"),
        ({"key": "0" * 64}, "another fit"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_manifests_that_lie(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    fit(batches(), "diagonal", folder)
    with opened(folder / "pass-01.whence") as container:
        facts = {**container.manifest, **change}
        sums = {name: container.tensor(name) for name in container.names}
    write_file(folder / "pass-01.whence", facts, sums)
    with pytest.raises(whence.WhenceError, match=words):
        fit(batches(), "diagonal", folder)


def test_sums_of_another_shape(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    fit(batches(), "diagonal", folder)
    with opened(folder / "pass-01.whence") as container:
        facts = container.manifest
        sums = {name: container.tensor(name) for name in container.names}
    first = max(sums, key=lambda name: sums[name].ndim)
    for wrong in (
        {**sums, first: sums[first][..., :-1].contiguous()},
        {**sums, first: sums[first].float()},
        {**sums, "x": sums[first]},
    ):
        write_file(folder / "pass-01.whence", facts, wrong)
        with pytest.raises(whence.CorruptArtifactError):
            fit(batches(), "diagonal", folder)


@pytest.mark.parametrize("structure", ["dual", "matrix free"])
def test_what_is_no_sum_is_refused(structure: str, tmp_path: Path) -> None:
    with pytest.raises(whence.InputError, match="primal"):
        fit(batches(), structure, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("path", "every", "words"),
    [("missing/checkpoint", 1, "exists"), ("file", 1, "a file"), ("full", 1, "other files"), (3, 1, "name of a folder")]
    + [("fine", every, "seconds") for every in (-1, "often", float("nan"))],
)
def test_places_that_cannot_be(path: Any, every: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    folder = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(whence.InputError, match=words):
        fit(batches(), "diagonal", folder, execution={"checkpoint_seconds": every})
    assert (tmp_path / "full" / "mine").read_text() == "mine"
