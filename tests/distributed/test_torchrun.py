"""The script of the documentation under torchrun itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "distributed.py"


@pytest.mark.slow  # torch is imported five times
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_print_what_one_does(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(SCRIPT.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    setting = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CHECKPOINT": str(tmp_path / "checkpoint")}
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    lines = []
    for command in (several, [sys.executable, str(SCRIPT)]):  # the second one goes on from what the first one left
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=setting)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.strip().splitlines())
    assert lines[0][0] == "2 processes, 301 examples, 9 predictions"
    assert lines[1][0] == "1 process, 301 examples, 9 predictions"
    assert lines[0][1] == lines[1][1]
