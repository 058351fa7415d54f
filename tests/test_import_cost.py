"""Importing whence costs no more than importing what it is built on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# Prints the modules that `import whence` loads on top of its three dependencies.
PROBE = """
import json, sys
import torch, numpy, safetensors, safetensors.torch
before = set(sys.modules)
import whence
print(json.dumps({"file": whence.__file__, "loaded": sorted(set(sys.modules) - before)}))
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """The modules that importing whence adds, in a fresh interpreter."""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert Path(answer["file"]).is_relative_to(SRC), f"imported another whence: {answer['file']}"
    return answer["loaded"]


def test_pulls_only_its_dependencies(loaded: list[str]) -> None:
    third_party = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert third_party <= {"whence", "torch", "numpy", "safetensors"}


def test_leaves_the_compilers_of_torch_alone(loaded: list[str]) -> None:
    heavy = [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed."))]
    assert not heavy, f"import these where they are used: {heavy}"
