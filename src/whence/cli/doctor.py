"""`whence doctor`: what is installed, what the machine has, and whether the variances are right on it.

The check compares with fractions computed by hand: three examples x = 1, 2, 2 with targets y = 1, 2, 3, the model
y = w x, and lambda = 1. So F = 10 and w = 11/10; residuals are -1/10, -2/10, 8/10, leverages 1/10, 4/10, 4/10, and
left-out residuals -1/9, -1/3, 4/3. At x = 1 the alignments are x_i / F.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch
from torch import nn

import whence
from whence.cli.console import FAILED, AsJson, Output, handle_errors, stop
from whence.runtime.memory import free_memory, readable

PACKAGES = ["torch", "numpy", "safetensors", "typer", "rich", "pandas", "jinja2", "matplotlib"]
PACKAGES += ["scikit-learn", "pyarrow", "transformers", "lightning", "xgboost", "lightgbm", "catboost"]
BY_HAND = {"ho": 207 / 10000, "hec0": 273 / 10000, "hec3": 613 / 8100, "leverage": 4 / 10}
TOLERANCE = 1e-10
STRUCTURES: dict[str, str | whence.Structure] = {
    **{f"exact, {road}": whence.Exact(road=road) for road in ("primal", "dual", "matrix_free")},
    "core": "core",
}


@handle_errors
def doctor(as_json: AsJson = False) -> None:
    """Show versions and devices, and check the variances against numbers computed by hand.

    The exit code is 0 if all numbers agree and 1 if one does not.

    Examples: `whence doctor`, `whence doctor --json`
    """
    output = Output(as_json)
    installed = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions()}
    own = {"whence": whence.__version__, "python": platform.python_version()}
    versions = {**own, **{name: installed.get(name) for name in PACKAGES}}
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    free = free_memory(torch.device("cpu"))
    devices = ["cpu", "cuda"] if gpus else ["cpu"]
    found = {f"{name} on {device}": variances(STRUCTURES[name], device) for device in devices for name in STRUCTURES}
    wrong = [
        f"{key} by {name}: expected {expected!r}, got {numbers[key]!r}"
        for name, numbers in found.items()
        for key, expected in BY_HAND.items()
        if not abs(numbers[key] - expected) <= TOLERANCE
    ]
    output.fact("Versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    missing = [name for name, version in versions.items() if version is None]
    output.fact("", f"not installed: {', '.join(missing) or 'none'}")
    machine = [platform.platform(), f"{os.cpu_count()} cores", f"{readable(free)} free", *(gpus or ["no GPU"])]
    output.fact("Machine", ", ".join(machine))
    total = len(found) * len(BY_HAND)
    output.fact("Check", f"{total - len(wrong)} of {total} numbers agree with those computed by hand, to ten digits")
    output.finish({"versions": versions, "machine": machine, "found": found, "by_hand": BY_HAND, "wrong": wrong})
    if wrong:
        stop(f"the check failed: do not trust results on this machine. {'; '.join(wrong)}", FAILED)


def variances(structure: str | whence.Structure, device: str) -> dict[str, float]:
    """The numbers of `BY_HAND`, by a fit."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64, device=device)
    nn.init.constant_(model.weight, 11 / 10)
    x, y = torch.tensor([[[1.0], [2.0], [2.0]], [[1.0], [2.0], [3.0]]], dtype=torch.float64, device=device)
    tracer = whence.fit(model.eval(), [(x, y)], structure=structure, ridge=1.0, progress=False)
    u = tracer.predict(x[:1])
    return {
        **{name: float(getattr(u, name)) for name in ("ho", "hec0", "hec3")},
        "leverage": float(tracer.leverage.max()),
    }
