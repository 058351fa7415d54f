"""`whence doctor`: what is installed, what the machine has, and whether the estimators are right on it.

The self-check compares with fractions computed by hand, for three examples x = 1, 2, 2 with targets y = 1, 2, 3 and the
model y = w x with sum of squared errors + lambda w^2:

    lambda = 0: F = 9, w = 11/9, residuals -2/9, -4/9, 5/9, leverages 1/9, 4/9, 4/9, left out -1/4, -4/5, 1.
    lambda = 1: F = 10, w = 11/10, residuals -1/10, -2/10, 8/10, leverages 1/10, 4/10, 4/10, left out -1/9, -1/3, 4/3.

At x = 1 the alignments are x_i / F, and the variances follow by hand.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch
from torch import nn

import whence
from whence.cli.console import FAILED, AsJson, Output, handle_errors, stop
from whence.runtime.memory import free_memory, readable

NEEDED = ("torch", "numpy", "safetensors")
EXTRAS = {
    "rich": "cli",
    "typer": "cli",
    "pandas": "report",
    "jinja2": "report",
    "matplotlib": "report",
    "pyarrow": "table",
    "scikit-learn": "table",
    "umap-learn": "paper",
}


@handle_errors
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices and extras, and check the estimators against numbers computed by hand.

    The exit code is 0 if all checks pass and 1 if one fails.

    Examples: `whence doctor`, `whence doctor --json`
    """
    output = Output(as_json)
    versions = {"whence": whence.__version__, "python": platform.python_version()}
    versions.update({name: metadata.version(name) for name in NEEDED})
    there = {str(found.metadata["Name"]).lower() for found in metadata.distributions()}
    extras = {name: metadata.version(name) if name in there else None for name in EXTRAS}
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_free": free_memory(torch.device("cpu")),
        "gpus": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
    }
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    checks = [check for device in devices for check in self_check(torch.device(device))]
    wrong = [check for check in checks if not check["passed"]]

    output.fact("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    output.fact("Extras", ", ".join(f"{name} {version}" for name, version in extras.items() if version) or "none")
    for name in (name for name, version in extras.items() if version is None):
        output.fact("", f"{name} is missing: pip install 'whence[{EXTRAS[name]}]'")
    free, gpus = readable(machine["memory_free"]), ", ".join(machine["gpus"]) or "no GPU"
    output.fact("Machine", f"{machine['system']}, {machine['cores']} cores, {free} free, {gpus}")
    agree = f"{len(checks) - len(wrong)} of {len(checks)} numbers agree"
    output.fact("Check", f"{agree} with those worked out by hand, to ten digits")
    for check in wrong:
        output.fact("", f"{check['name']}: expected {check['expected']!r}, got {check['found']!r}")
    found = {"versions": versions, "extras": extras, "machine": machine, "checks": checks, "passed": not wrong}
    output.finish(found)
    if wrong:
        stop("the self-check failed: do not trust results on this machine.", FAILED)


TOLERANCE = 1e-10
BY_HAND = {  # variances at x = 1 and the largest leverage, by lambda
    0: {"ho": 5 / 243, "hec0": 56 / 2187, "hec3": 883 / 10800, "leverage": 4 / 9},
    1: {"ho": 207 / 10000, "hec0": 273 / 10000, "hec3": 613 / 8100, "leverage": 4 / 10},
}


def self_check(device: torch.device) -> list[dict[str, Any]]:
    """Fit the three examples in several ways, and compare; numbers must agree to ten digits."""
    ways: list[tuple[str, int, str | whence.Structure]] = [
        ("exact, primal", 0, whence.Exact(road="primal")),
        ("exact, dual", 1, whence.Exact(road="dual")),
        ("exact, matrix-free", 1, whence.Exact(road="matrix_free")),
        ("core", 1, "core"),
    ]
    checks = []
    for name, ridge, structure in ways:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            model.weight.fill_(11 / (9 + ridge))
        model = model.eval().to(device)
        inputs = torch.tensor([[1.0], [2.0], [2.0]], dtype=torch.float64, device=device)
        targets = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, device=device)
        tracer = whence.fit(model, [(inputs, targets)], structure=structure, ridge=float(ridge), progress=False)
        u = tracer.predict(inputs[:1])
        found = {key: float(getattr(u, key)) for key in ("ho", "hec0", "hec3")}
        found["leverage"] = float(tracer.leverage.max())
        for key, expected in BY_HAND[ridge].items():
            passed = abs(found[key] - expected) <= TOLERANCE * max(1.0, abs(expected))
            checks.append({"name": f"{key}, {name}", "found": found[key], "expected": expected, "passed": passed})
    return checks
