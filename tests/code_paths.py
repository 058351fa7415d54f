"""Fits of mixtures of outputs that are saved under one code path and loaded under another. A program.

`python code_paths.py fit FOLDER` fits and saves every case, `python code_paths.py load FOLDER NAME` loads them; both
write what the fits say to NAME.json in the folder. `python code_paths.py share FOLDER RANK` fits with another process.
Which kernels torch and MKL choose is said by the environment. Weights and data are numpy's, whose random numbers are
the same for every kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whence

CASES: dict[str, dict[str, Any]] = {
    "dual": {"structure": whence.Exact("dual")},
    "primal": {"structure": whence.Exact("primal"), "hessian_columns": 7},
    "core": {"structure": whence.Core(size=40), "execution": {"dtype": torch.float32}},
    "sketch": {"structure": whence.Sketch(size=60)},
    "ekfac": {"structure": "ekfac"},
    "single precision": {"structure": whence.Exact("dual"), "single": True},
    "single precision, ekfac": {"structure": "ekfac", "single": True},
    "equal classes": {"structure": whence.Exact("dual"), "head": 0.0},
    "equal classes, single precision": {"structure": "core", "head": 1e-9, "single": True},
    "confident": {"structure": whence.Exact("dual"), "head": 30.0, "single": True},
    "squared error": {"structure": whence.Exact("dual"), "likelihood": "gaussian", "hessian_columns": 6},
    "interpolated": {
        "structure": "core",
        "likelihood": "gaussian",
        "hessian_columns": 6,
        "residual": 1e-3,
        "single": True,
    },
}
"""What is fitted: options of `whence.fit`, those of its execution as a dict; whether in single precision, and how large
weights of the head are."""

CLASSES, N = 70, 24


def problem(
    head: float = 1.0, single: bool = False, likelihood: str = "categorical", residual: float = 1.0, **_: Any
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """A network, batches of its training data, and inputs to predict."""
    draw = numpy.random.default_rng(5)
    dtype = torch.float32 if single else torch.float64
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(draw.normal(size=tuple(parameter.shape))))
        for parameter in model[2].parameters():
            parameter.mul_(head)
    x, test = (torch.from_numpy(draw.normal(size=(size, 5))).to(dtype) for size in (N, 4))
    y: Tensor = torch.from_numpy(draw.integers(0, CLASSES, N))
    if likelihood == "gaussian":
        noise = torch.from_numpy(draw.normal(size=(N, CLASSES)))
        w, b, v, c = (parameter.detach().double().numpy() for parameter in model.parameters())
        hidden = numpy.tanh((x.double().numpy()[:, None] * w).sum(2) + b)  # no BLAS: the same for every kernel
        y = (torch.from_numpy((hidden[:, None] * v).sum(2) + c) + residual * noise).to(dtype)
    return model, list(zip(x.split(5), y.split(5), strict=True)), test


def options_of(name: str, **execution: Any) -> dict[str, Any]:
    """Of `whence.fit`."""
    own = {key: value for key, value in CASES[name].items() if key not in ("single", "head", "residual", "execution")}
    how = whence.Execution(**CASES[name].get("execution", {}), **execution)
    return {"likelihood": "categorical", "ridge": 0.5, "progress": False, "execution": how, **own}


def answers(tracer: whence.Tracer, test: Tensor) -> dict[str, Any]:
    """Everything that depends on the mixtures."""
    found = tracer.predict(test, outputs=[0, 3, 69])
    shares = tracer.attribute(test, top=N)
    said: dict[str, Tensor] = {"ho": found.ho, "hec3": found.hec3, "hec0": found.variance("hec0")}
    for name in ("ho", "hec3"):
        one = shares.shares(name)
        said[f"shares of {name}"] = one.share.gather(1, one.index.argsort(dim=1))
    said["suspicion"] = torch.from_numpy(tracer.training_frame()["suspicion"].to_numpy().copy())
    said["leverage"] = tracer.leverage.sum(1)
    if tracer.loo.policy == "exact":
        changed = tracer.what_if(test, remove=[1, 17], repeat=[5])
        said |= {"change": changed.change, "new ho": changed.new_ho, "new hec3": changed.new_hec3}
    return {name: value.double().tolist() for name, value in said.items()}


def run(work: str, folder: Path, name: str, cases: Sequence[str]) -> None:
    """Fit, or load, and write down what is said; of a fit that is refused, why."""
    found: dict[str, Any] = {}
    for case in cases:
        model, batches, test = problem(**CASES[case])
        path = folder / f"{case}.whence"
        if work == "fit":
            tracer = whence.fit(model, batches, **options_of(case))
            tracer.save(path)
            found[case] = answers(tracer, test)
            continue
        try:
            found[case] = answers(whence.load(path, model, batches, progress=False), test)
        except whence.WhenceError as error:
            found[case] = f"{type(error).__name__}: {error}"
    (folder / f"{name}.json").write_text(json.dumps(found))


SHARED = ("ekfac", "single precision, ekfac", "core", "primal")
"""Cases that two processes fit together."""


def share(folder: Path, rank: int) -> None:
    """Fit together with another process, and write down what this one says."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for case in SHARED:
        model, batches, test = problem(**CASES[case])
        mine = [batches[:3], batches[3:]][rank]
        tracer = whence.fit(model, mine, **options_of(case, distributed=60))
        said = tracer.predict(test, outputs=[0, 3, 69])
        found[case] = {"ho": said.ho.tolist(), "hec3": said.hec3.tolist(), "leverage": tracer.leverage.sum(1).tolist()}
    (folder / f"rank {rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__" and sys.argv[1] == "share":
    share(Path(sys.argv[2]), int(sys.argv[3]))
elif __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "fit", list(CASES))
