"""`make portable` says what failed under which setting; tests that find no browser say so, or fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os

import pytest
import torch


def test_threads():
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_path():
    assert os.environ.get("ATEN_CPU_CAPABILITY") is None


@pytest.mark.skip(reason="for once")
def test_skipped():
    pass
"""


def ask(*command: str, **setting: str) -> tuple[int, list[str]]:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    where = {**os.environ, "PYTHONPATH": paths, **setting}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=where, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_failure_is_named_and_keeps_no_setting_back(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    # a setting of the shell does not leak into those that are run
    settings = ("aten-default", "threads-2")
    tests = ("-p", "no:xdist", "--confcutdir", str(ROOT), "-p", "conftest", str(path))
    status, lines = ask("tools/portable.py", *settings, "--", *tests, MKL_CBWR="AVX2", PYTHONPATH=str(ROOT / "tests"))
    head, first, failed, second = lines[-4:]
    assert status == 1
    assert head.split() == ["setting", "passed", "failed", "skipped", "seconds"]
    assert first.split()[:4] == ["aten-default", "1", "1", "1"]
    assert failed.endswith("::test_path")
    assert second.split()[:4] == ["threads-2", "2", "0", "1"]


def test_settings_that_are_not_there_are_named() -> None:
    assert ask("tools/portable.py", "mkl-avx9")[0] == 2
    status, lines = ask("tools/portable.py", "--list")
    assert status == 0
    assert {line.split()[0] for line in lines} >= {
        "default",
        "mkl-compatible",
        "aten-default",
        "aten-avx2",
        "threads-4",
    }


@pytest.mark.parametrize("required", ["", "1"])
def test_without_a_browser(required: str, tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="needs Playwright: pip install -e '.[dev]'")
    test = "tests/test_readme.py::test_it_fits_on_two_screens"
    setting = {"WHENCE_REQUIRE_BROWSER": required, "PATH": str(tmp_path)}
    status, lines = ask("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test, **setting)
    if required:
        assert status == 1
        assert "1 error in" in lines[-1], "pytest's own summary is last"
    else:
        assert status == 0
        assert "1 skipped in" in lines[-2]
        assert lines[-1].startswith("Skipped: 1 test")
        assert "apt-get install chromium" in lines[-1]
