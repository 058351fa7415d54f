"""A fit that was interrupted goes on from its checkpoint to the same numbers, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cut_fits import BEFORE, Faulty, batches, fit, same, until_it_ends
from fits_to_save import STRUCTURES

RESUMABLE = [name for name in STRUCTURES if name not in ("dual", "matrix free")]


@pytest.mark.parametrize("structure", RESUMABLE)
def test_a_fit_that_is_cut_again_and_again(structure: str, tmp_path: Path) -> None:
    wanted = fit(batches(), structure, None)
    found, attempts = until_it_ends(structure, tmp_path / "checkpoint", batches(), 4)
    assert attempts > 1
    assert same(found, wanted) == []
    assert str(found.diagnostics) == str(wanted.diagnostics)


GROUPS = [at // 3 for at in range(24)]


@pytest.mark.parametrize(
    "options", [{"groups": GROUPS}, {"ridge": "loo"}, {"ridge": "loo", "groups": GROUPS}, {"hessian_columns": 1}]
)
def test_other_ways_to_fit(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = fit(batches(), "core", None, **options)
    found, attempts = until_it_ends("core", tmp_path / "checkpoint", batches(), 2, **options)
    assert attempts > 1
    assert same(found, wanted) == []


def test_rows_that_are_computed_again(tmp_path: Path) -> None:
    """With little memory rows are not kept, and every pass reads the data."""
    options: dict[str, Any] = {"likelihood": "categorical", "execution": {"max_memory": 140_000}}
    wanted = fit(batches(classes=True), "primal", None, **options)
    found, attempts = until_it_ends("primal", tmp_path / "checkpoint", batches(classes=True), 3, **options)
    assert attempts > 1
    assert same(found, wanted) == []


def test_a_finished_fit_is_read_back(tmp_path: Path) -> None:
    """The data are read for their marks and outputs, and no pass is done again."""
    wanted = fit(batches(), "ekfac", tmp_path / "checkpoint")
    again = fit(Faulty(batches(), BEFORE), "ekfac", tmp_path / "checkpoint")
    assert same(again, wanted) == []


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
        execution = whence.Execution(checkpoint=checkpoint, checkpoint_seconds=0)
        return whence.fit(model, data, structure=name, ridge=1.0, progress=False, execution=execution)

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
    where = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # CUDA cannot be forked
    done = subprocess.run(command, capture_output=True, text=True, env=where, timeout=600, check=False)
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
    assert passes >= (1 if structure == "sketch" else 2)  # its later passes read rows in memory, and are done at once
