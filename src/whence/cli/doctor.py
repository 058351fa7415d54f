"""`whence doctor`: what is installed, what the machine has, and whether the estimators are right on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from whence import __version__
from whence.cli.leaving import FAILED, guarded, stop
from whence.cli.options import AsJson
from whence.cli.oracle import self_check
from whence.cli.output import Output
from whence.runtime.memory import free_memory, readable

NEEDED = ("torch", "numpy", "safetensors")
EXTRAS = {
    "rich": "cli",
    "typer": "cli",
    "pandas": "report",
    "jinja2": "report",
    "matplotlib": "report",
    "pyarrow": "table",
    "scikit-learn": "paper",
    "umap-learn": "paper",
}


@guarded
def doctor(as_json: AsJson = False) -> None:
    """Tell versions, devices and extras, and check the estimators against numbers worked out by hand.

    The exit code is 0 where all checks pass and 1 where one fails.

    Examples: `whence doctor`, `whence doctor --json`
    """
    output = Output(as_json)
    versions = {"whence": __version__, "python": platform.python_version()}
    versions.update({name: metadata.version(name) for name in NEEDED})
    extras = {name: _version(name) for name in EXTRAS}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = free_memory(torch.device("cpu"))
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    machine = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_free": free,
        "gpus": gpus,
    }
    checks = [check for one in dict.fromkeys([torch.device("cpu"), device]) for check in self_check(one)]
    passed = sum(check.passed for check in checks)

    output.fact("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    there = [f"{name} {version}" for name, version in extras.items() if version]
    output.fact("Extras", ", ".join(there) or "none")
    for name, version in extras.items():
        if version is None:
            output.fact("", f"{name} is missing: pip install 'whence[{EXTRAS[name]}]'")
    spoken = ", ".join(gpus) or "no GPU"
    output.fact("Machine", f"{machine['system']}, {machine['cores']} cores, {readable(free)} free, {spoken}")
    output.fact("Check", f"{passed} of {len(checks)} numbers agree with those worked out by hand, to ten digits")
    wrong = [check for check in checks if not check.passed]
    for check in wrong:
        output.fact("", f"{check.name}: expected {check.expected!r}, got {check.found!r}")
    output.finish(
        {
            "versions": versions,
            "extras": extras,
            "machine": machine,
            "checks": [{**vars(check), "passed": check.passed} for check in checks],
            "passed": not wrong,
        }
    )
    if wrong:
        stop("the self-check failed: do not trust results on this machine.", FAILED)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
