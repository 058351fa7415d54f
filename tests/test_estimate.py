"""What a fit takes is estimated before it runs, and is what it takes: measured in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whence
from measured_fits import CASES, ask

HERE = Path(__file__).parent
needs_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or not hasattr(os, "fork"), reason="needs Linux to measure peaks"
)


def peaks(names: list[str], limit: int | None = None) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", str(HERE / "measured_fits.py"), ";".join(names)]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]), "OMP_NUM_THREADS": "1"}
    command += [] if limit is None else [str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=where, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


def check_memory(names: list[str]) -> None:
    """The peak of a real process is within a quarter of what was told; a bound is a bound."""
    for name, found in peaks(names).items():
        told = ask(name)
        slack = 16 * 2**20  # what the allocator keeps
        assert told.memory >= 0.85 * found["peak"] - slack, (name, told.memory, found["peak"])
        most = 5.0 if told.bounded else 1.5
        assert told.memory <= most * found["peak"] + slack, (name, told.memory, found["peak"])


def check_limit(names: list[str], limit: int) -> None:
    """A fit stays within `max_memory`, or is refused before it takes much."""
    for name, found in peaks(names, limit).items():
        assert found["peak"] <= 1.1 * limit + 8 * 2**20, (name, found)
        if found["refused"]:
            assert ask(name).memory > limit, name


@needs_peaks
def test_memory_of_real_processes() -> None:
    check_memory(["dual, classes", "core"])


@needs_peaks
def test_limits_of_real_processes() -> None:
    check_limit(["ekfac, convolutions", "ekfac, positions", "primal"], 60_000_000)


@needs_peaks
@pytest.mark.slow
def test_memory_of_many_real_processes() -> None:
    check_memory(list(CASES))


@needs_peaks
@pytest.mark.slow
@pytest.mark.parametrize("limit", [60_000_000, 150_000_000])
def test_limits_of_many_real_processes(limit: int) -> None:
    check_limit(list(CASES), limit)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).to(dtype).eval()


def batches(n: int = 64, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = torch.randn(n, 6), torch.randn(n, 2)
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("structure", ["auto", "exact", "core", "ekfac", "kfac", "diagonal", "sketch"])
def test_what_is_told(structure: str) -> None:
    found = whence.estimate(network(), batches(), structure=structure, execution=whence.Execution(max_memory=2**30))
    assert (found.examples, found.outputs, found.parameters) == (64, 2, 182)
    assert found.limit == 2**30
    assert found.fits
    assert 0 < found.memory < 2**28
    assert 0 < found.seconds < 60
    assert found.bounded is (structure in ("core", "ekfac"))
    names = {one.structure for one in found.alternatives}
    assert len(names) == 6
    assert found.structure not in names
    shown = str(found)
    assert "64 examples, 2 outputs, 182 parameters" in shown
    assert all(name in shown for name in names)
    assert repr(found).startswith(f"Estimate({found.structure}: ")


def test_what_does_not_fit() -> None:
    found = whence.estimate(
        network(), batches(), structure=whence.Exact(road="primal"), execution=whence.Execution(max_memory=100_000)
    )
    assert not found.fits
    assert "does NOT fit in 97.7 KiB" in str(found)
    assert "does not fit" in str(found)  # the dual road


def test_one_layer_that_does_not_fit_is_refused() -> None:
    options: dict[str, Any] = {
        "parameters": "last_layer",
        "structure": "exact",
        "execution": whence.Execution(max_memory=3_000),
    }
    found = whence.estimate(network(), batches(), **options)
    assert not found.fits
    with pytest.raises(whence.TooLargeError) as caught:
        whence.fit(network(), batches(), progress=False, **options)
    assert "fewer training examples" in str(caught.value)
    with pytest.raises(whence.TooLargeError):
        whence.fit(
            network(),
            batches(),
            structure=whence.Exact(road="primal"),
            execution=whence.Execution(max_memory=100_000),
            progress=False,
        )


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "core"])
def test_layers_that_do_not_fit_are_refused_with_ways_out(structure: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 2)).eval()
    message = (
        r"to fit in 976\.6 KiB, but it takes about .*parameters='last_layer'.*whence\.Core\(size=\.\.\.\).*max_memory"
    )
    with pytest.raises(whence.TooLargeError, match=message):
        whence.fit(
            model, batches(), structure=structure, execution=whence.Execution(max_memory=1_000_000), progress=False
        )


def test_more_of_everything_takes_more() -> None:
    small = whence.estimate(
        network(), batches(64), structure=whence.Exact(road="dual"), execution=whence.Execution(max_memory=2**33)
    )
    large = whence.estimate(
        network(), batches(640), structure=whence.Exact(road="dual"), execution=whence.Execution(max_memory=2**33)
    )
    assert large.examples == 640
    assert large.memory > 20 * small.memory
    double = whence.estimate(
        network(torch.float64), [(x.double(), y.double()) for x, y in batches()], structure="ekfac"
    )
    assert double.memory > whence.estimate(network(), batches(), structure="ekfac").memory
    half = whence.estimate(
        network(),
        batches(),
        structure=whence.Exact(road="primal"),
        execution=whence.Execution(dtype=torch.float32, max_memory=2**30),
    )
    whole = whence.estimate(
        network(), batches(), structure=whence.Exact(road="primal"), execution=whence.Execution(max_memory=2**30)
    )
    assert half.memory < 0.75 * whole.memory


def test_few_mixtures_of_many_outputs_take_less() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 200)).eval()
    x, y = torch.randn(64, 6), torch.randint(0, 200, (64,))
    loader = list(zip(x.split(16), y.split(16), strict=True))
    options: dict[str, Any] = {
        "likelihood": "categorical",
        "structure": "ekfac",
        "execution": whence.Execution(max_memory=2**33),
    }
    usual, few, every = (
        whence.estimate(model, loader, hessian_columns=outputs, **options) for outputs in ("auto", 4, "all")
    )
    assert usual.outputs == few.outputs == every.outputs == 200
    assert few.memory < usual.memory < 0.3 * every.memory
    assert few.seconds < every.seconds


@pytest.mark.parametrize("form", ["pair", "dict", "weights", "tokens"])
def test_every_form_of_data(form: str) -> None:
    x, y = torch.randn(40, 6), torch.randn(40, 2)
    model: nn.Module = network()
    loader: Any = [((x[:25],), y[:25]), ((x[25:],), y[25:])]
    likelihood = "gaussian"
    if form == "dict":
        loader = [{"input": x[:25], "labels": y[:25]}, {"input": x[25:], "labels": y[25:]}]
    elif form == "weights":
        loader = [(x, y, torch.rand(40))]
    elif form == "tokens":
        loader, likelihood = [(torch.randn(40, 3, 6), torch.randint(0, 2, (40, 3)))], "categorical"
    found = whence.estimate(model, loader, likelihood, "ekfac")
    assert (found.examples, found.outputs, found.fits) == (40, 2, True)


class Counted(TensorDataset):
    """Counts how often it is read."""

    read = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        type(self).read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("drop_last", [True, False])
def test_data_that_know_their_length_are_not_read(drop_last: bool) -> None:
    x, y = torch.randn(1000, 6), torch.randn(1000, 2)
    Counted.read = 0
    loader = DataLoader(Counted(x, y), batch_size=64, drop_last=drop_last)
    found = whence.estimate(network(), loader, structure="ekfac")
    assert found.examples == (960 if drop_last else 1000)
    assert Counted.read == 64


def test_the_model_is_left_as_it_was() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    whence.estimate(model, batches(), structure="ekfac")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    batches()  # draws
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_a_structure_of_ones_own() -> None:
    class Mine(whence.Structure):
        name = "mine"

        def fit(self, problem: Any, ridge: Any, weigh: Any = None) -> Any:
            raise AssertionError("nothing is fitted")

    with pytest.raises(whence.InputError, match="whose needs only its author knows"):
        whence.estimate(network(), batches(), structure=Mine())


@pytest.mark.parametrize("structure", ["ekfac", "exact"])
def test_time_is_of_the_right_order(structure: str) -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 2)).eval()
    x, y = torch.randn(400, 40), torch.randn(400, 2)
    loader = list(zip(x.split(100), y.split(100), strict=True))
    whence.fit(model, loader, structure=structure, progress=False)  # warm
    told = whence.estimate(model, loader, structure=structure).seconds
    start = time.perf_counter()
    whence.fit(model, loader, structure=structure, progress=False)
    took = time.perf_counter() - start
    assert took / 30 < told < 30 * took  # a machine may be busy; by how much, the documentation says
