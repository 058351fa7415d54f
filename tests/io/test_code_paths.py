"""Mixtures of outputs are the same wherever they are made: saved under one code path, loaded under another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import code_paths
import oracles
import whence
from fits_to_save import many
from whence.jacobian.sketches import random_signs

TESTS = Path(__file__).resolve().parents[1]
PATHS: dict[str, dict[str, str]] = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "mkl compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "aten default, two threads": {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"},
}
"""Environments that choose kernels: what one machine can do to look like another."""

NEAR = {
    "core": 1e-4,
    "interpolated": 2e-2,  # residuals are a few thousand times the rounding of the outputs
    "confident": 1e-3,  # outputs of 200, whose rounding is that of probabilities
}
"""How near to each other, and to brute force, cases are that are not exact to 1e-8; 1e-4 in single precision."""


def near(case: str) -> float:
    return NEAR.get(case, 1e-4 if code_paths.CASES[case].get("single") else 1e-8)


def run(folder: Path, environment: dict[str, str], *words: str) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MKL_", "ATEN_", "OMP_"))}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    plain = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": paths}
    command = [sys.executable, str(TESTS / "code_paths.py"), words[0], str(folder), *words[1:]]
    done = subprocess.run(command, env={**kept, **plain, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What fits say, and what they say when they are loaded under each code path."""
    folder = tmp_path_factory.mktemp("paths")
    run(folder, {}, "fit")
    for path, environment in PATHS.items():
        run(folder, environment, "load", path)
    return folder, {name: json.loads((folder / f"{name}.json").read_text()) for name in ("fit", *PATHS)}


@pytest.mark.parametrize("case", code_paths.CASES)
def test_a_fit_says_the_same_under_every_code_path(said: tuple[Path, dict[str, Any]], case: str) -> None:
    wanted = said[1]["fit"][case]
    for path in PATHS:
        found = said[1][path][case]
        assert not isinstance(found, str), f"{path}: {found}"
        for name, value in wanted.items():
            one, two = np.asarray(found[name]), np.asarray(value)
            np.testing.assert_allclose(one, two, rtol=0, atol=near(case) * np.abs(two).max(), err_msg=f"{path}: {name}")


def mixed_roots(tracer: whence.Tracer, p: np.ndarray | None, k: int) -> np.ndarray:
    """S (n, k, c) by hand: sampled labels of probabilities p (n, k), or random signs of squared error."""
    sketch = tracer.problem.sketch
    assert sketch is not None
    assert sketch.labels is not None
    c, found = sketch.columns, []
    for at in range(tracer.problem.n):
        if p is None:
            signs = random_signs(torch.tensor([[at]]), torch.arange(k).unsqueeze(0), c, sketch.seed)
            found.append(signs[0].numpy() / c**0.5)
            continue
        classes, floor = sketch.labels.classes[at, 0].tolist(), float(sketch.labels.floors[at, 0])
        signs = random_signs(torch.tensor([[at]]), torch.tensor([[1]]), c, sketch.seed)[0, 0].numpy()
        chosen = np.eye(k)[classes] - p[at]
        found.append((signs * np.sqrt(np.maximum(p[at][classes], floor)) * chosen.T) * (np.array(classes) >= 0))
    return np.stack(found)


@pytest.mark.parametrize("case", ["dual", "primal", "single precision", "equal classes", "confident", "squared error"])
def test_all_of_them_say_what_dense_algebra_says(said: tuple[Path, dict[str, Any]], case: str) -> None:
    """Jacobians by autograd, one large curvature, and every example left out in it."""
    options = code_paths.CASES[case]
    model, data, test = code_paths.problem(**options)
    tracer = whence.load(said[0] / f"{case}.whence", model, data, progress=False)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    model = model.double()
    outputs, tangents, _ = oracles.tangents_of(model, x.double())
    predicted, test_tangents, _ = oracles.tangents_of(model, test.double())
    n, k = outputs.shape
    if options.get("likelihood") == "gaussian":
        residuals, p = y.double().numpy() - outputs, None
        scale = float(np.square(residuals).mean())
    else:
        p = torch.from_numpy(outputs).softmax(1).numpy()
        residuals, scale = np.eye(k)[y.numpy()] - p, 1.0
    columns = mixed_roots(tracer, p, k)
    gradients = np.einsum("nkd,nkc->ncd", tangents, columns)  # S^T J
    scores = np.einsum("nkd,nk->nd", tangents, residuals)

    def curvature(counts: np.ndarray) -> np.ndarray:
        return tracer.ridge * np.eye(tangents.shape[2]) + np.einsum("n,ncd,nce->de", counts, gradients, gradients)

    inverse = np.linalg.inv(curvature(np.ones(n)))
    aligned = np.einsum("mkd,de->mke", test_tangents, inverse)
    inner = np.eye(columns.shape[2]) - np.einsum("ncd,de,nbe->ncb", gradients, inverse, gradients)
    pulled = np.einsum("ncd,de,ne->nc", gradients, inverse, scores)
    # J^T (I - S S^T Q)^-1 r = J^T r + J^T S (I - S^T Q S)^-1 S^T Q r
    left_out = scores + np.einsum("ncd,nc->nd", gradients, np.linalg.solve(inner, pulled[:, :, None])[:, :, 0])
    ho_terms = scale * np.square(np.einsum("mkd,ncd->mknc", aligned, gradients)).sum(3)
    hec3_terms = np.square(np.einsum("mkd,nd->mkn", aligned, left_out))
    shown = [0, 3, 69]
    wanted = {"ho": ho_terms.sum(2)[:, shown], "hec3": hec3_terms.sum(2)[:, shown]}
    classes = options.get("likelihood") != "gaussian"
    each = predicted.argmax(1)[:, None] if classes else np.tile(np.arange(k), (len(test), 1))
    for name, terms in (("ho", ho_terms), ("hec3", hec3_terms)):
        some = np.take_along_axis(terms, each[:, :, None], axis=1).sum(1)
        wanted[f"shares of {name}"] = some / some.sum(1, keepdims=True)
    counts = np.ones(n)
    counts[[1, 17]], counts[5] = 0.0, 2.0
    after = np.einsum("mkd,de->mke", test_tangents, np.linalg.inv(curvature(counts)))
    change = np.einsum("mkd,nd,n->mk", after, scores, counts - 1)
    wanted["change"] = np.take_along_axis(change, each, axis=1)
    new_ho = np.square(np.einsum("mkd,ncd->mknc", after, gradients)).sum(3) @ (scale * counts)
    wanted["new ho"] = np.take_along_axis(new_ho, each, axis=1)
    for path in PATHS:
        for name, value in wanted.items():
            found = np.asarray(said[1][path][case][name])
            bound = 10 * near(case) * np.abs(value).max()
            np.testing.assert_allclose(found, value, rtol=0, atol=bound, err_msg=f"{path}: {name}")


@pytest.mark.parametrize("structure", ["dual", "core", "ekfac"])
@pytest.mark.parametrize("example", [0, 13])
def test_outputs_that_changed_are_refused(structure: str, example: int, tmp_path: Path) -> None:
    """In the first batch, and in the last one, as if the model had said something else about an example."""
    fit = many(structure)
    outputs = fit.tracer.problem.outputs
    outputs[example, 0] += 0.1 * outputs.abs().max()
    fit.tracer.save(tmp_path / "fit.whence")
    with pytest.raises(whence.StaleModelError, match="Its weights are the same, its forward is not"):
        whence.load(tmp_path / "fit.whence", fit.model, fit.batches, progress=False)


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    fit = many("core")
    sketch = fit.tracer.problem.sketch
    assert sketch is not None
    assert sketch.labels is not None
    for wrong in (-2, 6):
        sketch.labels.classes[3, 0, 0] = wrong
        fit.tracer.save(tmp_path / "fit.whence")
        with pytest.raises(whence.CorruptArtifactError, match="classes is missing, or not classes below 6, or -1"):
            whence.load(tmp_path / "fit.whence", fit.model, fit.batches, progress=False)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_processes_on_unlike_code_paths_fit_together(said: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    with ThreadPoolExecutor(2) as both:
        tasks = [both.submit(run, tmp_path, env, "share", str(rank)) for rank, env in enumerate(({}, other))]
    for rank, task in enumerate(tasks):
        task.result()
        for case, found in json.loads((tmp_path / f"rank {rank}.json").read_text()).items():
            for name, value in found.items():
                wanted = np.asarray(said[1]["fit"][case][name])
                bound = near(case) * np.abs(wanted).max()
                np.testing.assert_allclose(value, wanted, rtol=0, atol=bound, err_msg=f"{rank}, {case}: {name}")
