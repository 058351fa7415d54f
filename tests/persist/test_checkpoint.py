"""A fit that was interrupted goes on from its checkpoint to the same numbers, bit by bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from fits_to_save import STRUCTURES
from whence.persist.container import opened, write

RESUMABLE = [name for name in STRUCTURES if name not in ("dual", "matrix free")]

BEFORE = 13
"""Batches that are read before the first pass: five for their marks, five for the outputs, three looks at the first."""


class Halt(BaseException):
    """A power cut."""


class Faulty:
    """Batches, of which reading fails after so many."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.left = batches, after

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.left == 0:
                raise Halt
            self.left -= 1
            yield batch


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double().eval()


def batches(n: int = 24, size: int = 5, classes: bool = False) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    y = (noise[:, 0] > 0).long() if classes else x[:, :2].sin() + 0.3 * noise
    return list(zip(x.split(size), y.split(size), strict=True))


def answers(tracer: whence.Tracer) -> dict[str, Tensor]:
    found = tracer.predict(torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3), covariance=True)
    parts = {name: found.covariance(name) for name in found.estimators}
    freedom = torch.tensor([tracer.degrees_of_freedom, tracer.ridge])
    return {**parts, "leverage": tracer.leverage, "loo": tracer.loo_residuals, "sigma": tracer.sigma, "dof": freedom}


def same(one: whence.Tracer, other: whence.Tracer) -> list[str]:
    a, b = answers(one), answers(other)
    return [name for name in a if not torch.equal(a[name], b[name])]


def fit(loader: Any, structure: str, folder: Path | None, **options: Any) -> whence.Tracer:
    settings: dict[str, Any] = {"ridge": 0.5, "progress": False, "every": 0, "recenter": True, **options}
    return whence.fit(network(), loader, structure=STRUCTURES[structure], checkpoint=folder, **settings)


def until_it_ends(
    structure: str, folder: Path, data: list[Any], step: int, **options: Any
) -> tuple[whence.Tracer, int]:
    """Start again and again, with a little more time each time for the reading that comes before."""
    for attempt in range(1, 200):
        with suppress(Halt):
            return fit(Faulty(data, BEFORE - 1 + step * attempt), structure, folder, **options), attempt
    raise AssertionError("no progress")


@pytest.mark.parametrize("structure", RESUMABLE)
def test_a_fit_that_is_cut_again_and_again(structure: str, tmp_path: Path) -> None:
    wanted = fit(batches(), structure, None)
    found, attempts = until_it_ends(structure, tmp_path / "checkpoint", batches(), 4)
    assert attempts > 1
    assert same(found, wanted) == []
    assert str(found.diagnostics) == str(wanted.diagnostics)


@pytest.mark.parametrize("options", [{"groups": [at // 3 for at in range(24)]}, {"ridge": "loo"}, {"outputs": 1}])
def test_other_ways_to_fit(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = fit(batches(), "core", None, **options)
    found, attempts = until_it_ends("core", tmp_path / "checkpoint", batches(), 2, **options)
    assert attempts > 1
    assert same(found, wanted) == []


def test_rows_that_are_computed_again(tmp_path: Path) -> None:
    """With little memory rows are not kept, and every pass reads the data."""
    options = {"likelihood": "categorical", "max_memory": 140_000}
    wanted = fit(batches(classes=True), "primal", None, **options)
    found, attempts = until_it_ends("primal", tmp_path / "checkpoint", batches(classes=True), 3, **options)
    assert attempts > 1
    assert same(found, wanted) == []


def test_a_finished_fit_is_read_back(tmp_path: Path) -> None:
    """The data are read for their marks and outputs, and no pass is done again."""
    wanted = fit(batches(), "ekfac", tmp_path / "checkpoint")
    again = fit(Faulty(batches(), BEFORE), "ekfac", tmp_path / "checkpoint")
    assert same(again, wanted) == []


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
        {"chunk_size": 3},
        {"dtype": torch.float32},
        {"likelihood": whence.Gaussian()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_options_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    fit(batches(), "ekfac", tmp_path / "checkpoint")
    if "likelihood" in change:  # the same, said otherwise
        fit(batches(), "ekfac", tmp_path / "checkpoint", **change)
        return
    with pytest.raises(whence.InputError, match=f"this very fit, got one with {next(iter(change))}"):
        fit(batches(), "ekfac", tmp_path / "checkpoint", **change)


def test_another_structure_is_refused(tmp_path: Path) -> None:
    fit(batches(), "ekfac", tmp_path / "checkpoint")
    with pytest.raises(whence.InputError, match="structure"):
        fit(batches(), "ekfac, whole", tmp_path / "checkpoint")


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = network()
    options: dict[str, Any] = {"structure": "diagonal", "checkpoint": tmp_path / "checkpoint", "progress": False}
    whence.fit(model, batches(), **options)
    with torch.no_grad():
        model[0].bias[1] += 1e-15
    with pytest.raises(whence.StaleModelError, match=r"0\.bias"):
        whence.fit(model, batches(), **options)


def test_batches_of_another_size(tmp_path: Path) -> None:
    with pytest.raises(Halt):
        fit(Faulty(batches(), BEFORE + 2), "diagonal", tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    with pytest.raises(whence.LoaderError, match="one ended after"):
        fit(batches(size=4), "diagonal", tmp_path / "checkpoint")
    found = fit(batches(size=1), "diagonal", tmp_path / "copy")  # ends where the others do
    wanted = fit(batches(), "diagonal", None)
    for name, value in answers(found).items():
        torch.testing.assert_close(value, answers(wanted)[name], rtol=1e-10, atol=1e-12)


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
        sums = {name: 0.5 * container.read(entry) for name, entry in container.entries.items()}
    write(folder / "pass-02.whence", facts, sums)
    assert same(fit(batches(), "ekfac", folder), wanted) != []  # believed, as they fit
    write(folder / "pass-02.whence", {**facts, "given": [*facts["given"][:-1], 0]}, sums)
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
        sums = {name: container.read(entry) for name, entry in container.entries.items()}
    write(folder / "pass-01.whence", facts, sums)
    with pytest.raises(whence.WhenceError, match=words):
        fit(batches(), "diagonal", folder)


def test_sums_of_another_shape(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    fit(batches(), "diagonal", folder)
    with opened(folder / "pass-01.whence") as container:
        facts = container.manifest
        sums = {name: container.read(entry) for name, entry in container.entries.items()}
    first = next(iter(sums))
    for wrong in (
        {**sums, first: sums[first][..., :-1].contiguous()},
        {**sums, first: sums[first].float()},
        {**sums, "x": sums[first]},
    ):
        write(folder / "pass-01.whence", facts, wrong)
        with pytest.raises(whence.CorruptArtifactError):
            fit(batches(), "diagonal", folder)


@pytest.mark.parametrize("structure", ["dual", "matrix free"])
def test_what_is_no_sum_is_refused(structure: str, tmp_path: Path) -> None:
    with pytest.raises(whence.InputError, match="primal"):
        fit(batches(), structure, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("path", "every", "words"),
    [("missing/checkpoint", 1, "exists"), ("file", 1, "none"), ("full", 1, "other files"), (3, 1, "name of a folder")]
    + [("fine", every, "seconds") for every in (-1, "often", float("nan"))],
)
def test_places_that_cannot_be(path: Any, every: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    folder = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(whence.InputError, match=words):
        fit(batches(), "diagonal", folder, every=every)
    assert (tmp_path / "full" / "mine").read_text() == "mine"


KILLED = textwrap.dedent(
    """
    import os, random, signal, sys, time
    from pathlib import Path

    import torch

    import whence

    torch.set_num_threads(1)
    folder, name, rounds, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double().eval()
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 2, dtype=torch.float64)

    class Slow:
        def __iter__(self):
            for pair in zip(x.split(6), y.split(6)):
                time.sleep(0.002)
                yield pair

    def fit(checkpoint):
        data = Slow() if checkpoint else list(zip(x.split(6), y.split(6)))
        return whence.fit(model, data, structure=name, ridge=1.0, progress=False, checkpoint=checkpoint, every=0)

    def told(tracer):
        found = tracer.predict(x[:5])
        variances = [getattr(found, one) for one in ("ho", "hec0", "hec3", "laplace")]
        return [tracer.leverage, tracer.loo_residuals, *variances]

    wanted = told(fit(None))
    start = time.perf_counter()
    fit(folder / "whole")
    whole = time.perf_counter() - start
    kills = ends = 0
    files = set()
    for number in range(rounds):
        place = folder / str(number)
        while True:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, b"x")
                fit(place)
                os._exit(0)
            os.read(reading, 1)
            time.sleep(draw.random() * 0.9 * whole)
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            os.close(reading), os.close(writing)
            kills += status != 0
            files.update(path.name for path in place.glob("*")) if place.exists() else None
            if status == 0 or draw.random() < 0.25:
                break
        assert all(torch.equal(a, b) for a, b in zip(told(fit(place)), wanted)), number
        assert not list(place.glob(".whence-*.part"))
        ends += 1
    print(kills, ends, len([one for one in files if one.startswith("pass-")]))
    """
)


def killed(tmp_path: Path, structure: str, rounds: int, seed: int) -> list[int]:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), structure, str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_a_process_that_is_killed_at_random_moments(tmp_path: Path) -> None:
    kills, ends, passes = killed(tmp_path, "core", 4, 1)
    assert ends == 4
    assert kills >= 2  # a machine that grows faster meanwhile may be done before
    assert passes >= 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
@pytest.mark.parametrize("structure", ["ekfac", "core", "kfac", "diagonal", "sketch"])
def test_many_kills(structure: str, tmp_path: Path) -> None:
    kills, ends, passes = killed(tmp_path, structure, 40, 2)
    assert ends == 40
    assert kills >= 30
    assert passes >= 2
