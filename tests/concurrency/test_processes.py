"""Processes that were forked or spawned ask a fit, and workers of every kind read its data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

import whence
from doubles import fit, inputs_and_targets, mlp

HERE = Path(__file__).parent
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")


@needs_fork
def test_a_fit_asked_in_forked_and_spawned_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "processes.py"), str(tmp_path)]
    where = {**os.environ, "PYTHONPATH": str(Path(whence.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    where["CUDA_VISIBLE_DEVICES"] = ""  # CUDA cannot be forked
    done = subprocess.run(command, capture_output=True, text=True, env=where, timeout=240, check=False)
    assert done.stdout == "the same\n", done.stderr


class Backwards(Sampler[int]):
    """An order of its own, the same every time."""

    def __iter__(self) -> Any:
        return iter(range(7, -1, -1))

    def __len__(self) -> int:
        return 8


class Stream(IterableDataset[Any]):
    """The examples one after the other; for one worker."""

    def __iter__(self) -> Any:
        return iter(list(zip(*inputs_and_targets(), strict=True)))


WORKERS: dict[str, dict[str, Any]] = {
    "a sampler": {"batch_size": 3, "sampler": Backwards()},
    "a sampler of batches": {"batch_sampler": BatchSampler(SequentialSampler(range(8)), 3, drop_last=False)},
}


@needs_fork
@pytest.mark.parametrize("structure", ["ekfac", "exact"])
@pytest.mark.parametrize("name", [*WORKERS, "a stream"])
def test_workers_that_persist(name: str, structure: str) -> None:
    x, y = inputs_and_targets()
    kept = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    options = {"batch_size": 3} if name == "a stream" else WORKERS[name]
    loader: DataLoader[Any] = DataLoader(Stream() if name == "a stream" else TensorDataset(x, y), **options, **kept)
    order = slice(None) if name != "a sampler" else list(range(7, -1, -1))
    tracer, wanted = fit(mlp(), loader, structure=structure), fit(mlp(), [(x[order], y[order])], structure=structure)
    torch.testing.assert_close(tracer.leverage, wanted.leverage, rtol=1e-10, atol=1e-12)
    found = tracer.predict(loader)  # the user's own loader, with its workers
    torch.testing.assert_close(found.hec3, wanted.predict(x[order]).hec3, rtol=1e-10, atol=1e-12)


def test_workers_that_are_spawned() -> None:
    x, y = inputs_and_targets()
    loader = DataLoader(x, batch_size=5, num_workers=1, multiprocessing_context="spawn")
    tracer = fit(mlp(), [(x, y)])
    torch.testing.assert_close(tracer.predict(loader).hec3, tracer.predict(x).hec3, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["ekfac", "exact"])
def test_a_fit_by_workers_that_are_spawned(structure: str) -> None:
    x, y = inputs_and_targets()
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    tracer = fit(mlp(), DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, **options), structure=structure)
    wanted = fit(mlp(), [(x, y)], structure=structure)
    torch.testing.assert_close(tracer.leverage, wanted.leverage, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("structure", ["ekfac", "exact"])
def test_pinned_memory(structure: str, workers: int) -> None:
    x, y = inputs_and_targets()
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": True}
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True, **options)
    tracer, wanted = fit(mlp().cuda(), loader, structure=structure), fit(mlp(), [(x, y)], structure=structure)
    torch.testing.assert_close(tracer.leverage.cpu(), wanted.leverage, rtol=1e-8, atol=1e-10)
    found = tracer.predict(DataLoader(TensorDataset(x, y), batch_size=4, **options))
    torch.testing.assert_close(found.hec3.cpu(), wanted.predict(x).hec3, rtol=1e-8, atol=1e-10)
