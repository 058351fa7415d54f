"""Fits by several processes are the fits by one; what fails in one of them ends the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import whence
from many_processes import CASES, SHARDS, batches_of, data, network
from whence.runtime.processes import ALONE, open_process_group

TESTS = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


def ask(folder: Path, work: str, **given: Any) -> Any:
    """Run one of the functions of `many_processes` in a process of its own, which forks more."""
    words = json.dumps({"work": work, "folder": str(folder), **given})
    # CUDA cannot be forked: the processes do not see it
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "many_processes.py"), words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the suite says, asked once, whichever of several workers of pytest comes first."""
    import fcntl  # not everywhere: what needs it is skipped there

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = shared / "processes.json"
        if not path.exists():
            path.write_text(json.dumps(ask(tmp_path_factory.mktemp("processes"), "suite")))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def check_gaps(gaps: dict[str, Any]) -> None:
    for name, gap in gaps.items():
        assert isinstance(gap, float), f"{name}: {gap}"
        assert gap <= (1e-5 if name.startswith("single precision") else 1e-12), name


def test_shards_of_any_size_give_the_fit_of_one_process(told: dict[str, Any]) -> None:
    gaps = told["compare"]
    assert len(gaps) == len(CASES) + 3 + 2
    check_gaps(gaps)


@pytest.mark.slow
def test_all_shards(tmp_path: Path) -> None:
    gaps = ask(tmp_path, "compare", names=list(CASES), worlds=[2, 4], shards=list(SHARDS))
    assert len(gaps) == 5 * len(CASES)
    check_gaps(gaps)


def test_processes_that_part_again_and_again(told: dict[str, Any]) -> None:
    """Taking a group down waits for its threads, which may still have the last tensors, and need Python's lock."""
    assert told["partings"]["said"] == 3 * [told["partings"]["rounds"]]


def test_eigendecompositions_are_shared_out(told: dict[str, Any]) -> None:
    alone, said = (told["decompositions"][name] for name in ("alone", "said"))
    factors = sorted(size for size in alone if size > 2)
    assert len(factors) >= 4
    assert sorted(size for sizes in said for size in sizes if size > 2) == factors  # each by one process
    assert sum(any(size > 2 for size in sizes) for sizes in said) > 1


def test_predictions_are_gathered_in_order(told: dict[str, Any]) -> None:
    assert len(told["predictions"]["gaps"]) == 3
    assert max(told["predictions"]["gaps"]) <= 1e-12


def test_what_needs_all_data_says_so(told: dict[str, Any]) -> None:
    errors = told["predictions"]["errors"]
    assert errors[0].startswith("LoaderError: expected all training data")
    assert "whence.load" in errors[2]


def test_a_saved_fit_is_whole_with_the_batches_of_all(told: dict[str, Any]) -> None:
    assert told["saved"]["hec3"] <= 1e-12
    assert told["saved"]["share"] <= 1e-10


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_wrapped_models(kind: str, told: dict[str, Any]) -> None:
    gaps = told["wrapped"][kind]
    assert all(isinstance(gap, float) and gap <= 1e-12 for gap in gaps), gaps


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peaks")
def test_a_sharded_model_is_brought_together_once(tmp_path: Path) -> None:
    found = ask(tmp_path, "copied")
    for one in found["said"]:
        assert one["held"] == found["whole"]
        assert one["peak"] <= found["whole"] + 8 * found["layer"], one  # and not all of it a second time


def test_an_error_is_told_to_the_others(told: dict[str, Any]) -> None:
    first, own, last = told["failures"]["fails"]
    assert own[:2] == ["OSError", "the disk is gone"]
    for name, words, seconds in (first, last):
        assert name == "ProcessError"
        assert "rank 1: OSError: the disk is gone." in words
        assert seconds < 30.0  # they wait up to a minute for one that says nothing


@pytest.mark.parametrize(("kind", "limit"), [("dies", 60), ("hangs", 5)])
def test_a_process_that_does_not_answer(kind: str, limit: int, told: dict[str, Any]) -> None:
    first, own, last = told["failures"][kind]
    for name, words, seconds in (first, last):
        assert name == "ProcessError"
        assert re.search(rf"go on to \w+ within {limit} s, got no answer from one of them \(\w", words), words
        assert seconds < (30.0 if kind == "dies" else own[2])  # at once; or before the sleeper awakes


def check_resumed(told: dict[str, Any], structure: str, passes: int) -> None:
    for world in (1, 2, 4):
        gaps, said, files = told[f"{structure} {world}"]
        assert [words.split(":")[0] for words in said] == ["ProcessError", "ProcessError", "OSError"]
        assert files == [*(f"pass-0{number}.whence" for number in range(1, passes + 1)), "start.whence"]
        assert len(gaps) == world
        assert all(isinstance(gap, float) and gap <= 1e-12 for gap in gaps), gaps


def test_a_fit_goes_on_with_another_number_of_processes(told: dict[str, Any]) -> None:
    check_resumed(told["resumed"], "ekfac", 2)


def test_fits_go_on_after_every_kill(told: dict[str, Any]) -> None:
    """One process is killed again and again; more of them or fewer go on from the checkpoint."""
    found = told["killed_fits"]
    assert len(set(found["worlds"])) >= 3
    for name in ("ekfac", "ekfac, two bases", "diagonal"):
        assert found[name]["kills"] >= 1
        assert all(isinstance(gap, float) and gap <= 1e-12 for gap in found[name]["gaps"]), found[name]
    gap, batches = found["again"]  # in one process, a second time
    assert gap <= 1e-12
    assert batches < 11 + 5  # no pass was done again: the network was looked at, the data marked, outputs taken


@pytest.mark.slow
def test_a_core_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    check_resumed(ask(tmp_path, "resumed", names=["core"]), "core", 1)


def test_processes_that_do_not_want_the_same(told: dict[str, Any]) -> None:
    for ridge, once, weights, free in told["unlike"]["said"]:
        assert "the same option ridge" in ridge
        assert "the same option checkpoint" in once
        assert "the same weights of 3.bias" in weights
        assert free.startswith("InputError: expected one process")


@pytest.mark.slow  # it waits for somebody who does not come
def test_a_process_that_fits_alone(tmp_path: Path) -> None:
    together, alone = ask(tmp_path, "absent")["said"]
    assert together.startswith("ProcessError: expected all 2 processes")
    assert "distributed=False" in together
    assert alone == "no error"


def test_a_sampler_that_repeats_examples_is_refused() -> None:
    dataset = TensorDataset(*data(None))
    for parts, fine in ((5, False), (4, True)):
        sampler: Any = DistributedSampler(dataset, num_replicas=parts, rank=0, shuffle=False)
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        if fine:
            assert whence.fit(network(), loader, structure="diagonal", progress=False).problem.n == 6
            continue
        with pytest.raises(whence.InputError, match="repeats 1 of 24"):
            whence.fit(network(), loader, structure="diagonal", progress=False)


def test_one_process_needs_nobody() -> None:
    assert open_process_group("auto") is ALONE
    assert open_process_group(False) is ALONE


@pytest.mark.parametrize(
    ("given", "words"),
    [("always", "expected distributed"), (-1.0, "expected distributed"), (True, "torchrun"), (30, "torchrun")],
)
def test_options_that_cannot_be(given: Any, words: str) -> None:
    with pytest.raises(whence.InputError, match=words):
        whence.fit(
            network(),
            batches_of(data(None), slice(0, 24)),
            execution=whence.Execution(distributed=given),
            progress=False,
        )
