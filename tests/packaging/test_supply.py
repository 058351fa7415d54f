"""The tools that look after what an installation brings along."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = ["numpy==1.0", "torch==2.0"]
KNOWN = [{"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2019-217"}]}]
SKIPPED = {"skip_reason": "Dependency not found on PyPI and could not be audited"}
SOUND = [{"name": "numpy", "vulns": []}, {"name": "torch", "vulns": []}]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder of tools as modules."""
    if not (ROOT / "tools").is_dir():
        pytest.skip("needs the tools of a checkout")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def load(name: str) -> ModuleType:
        from importlib import import_module  # importable only now

        return import_module(name)

    yield load
    for name in ("advisories", "licences", "lowest", "project"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("known", "found", "status", "words"),
    [
        (KNOWN, SOUND, 0, "no advisory against any of 2 packages"),
        (
            KNOWN,
            [SOUND[0], {"name": "torch", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}],
            1,
            "VULNERABLE, CVE-1, CVE-2",
        ),
        (KNOWN, [SOUND[0], {"name": "torch", **SKIPPED}], 2, "torch==2.0: NOT LOOKED UP"),
        (KNOWN, SOUND[:1], 2, "torch==2.0: NOT LOOKED UP, no answer"),
        ([{"name": "jinja2", **SKIPPED}], SOUND, 2, "NOTHING WAS LOOKED UP"),
        ([{"name": "jinja2", "vulns": []}], SOUND, 2, "NOTHING WAS LOOKED UP"),
        ([], [], 2, "NOTHING WAS LOOKED UP"),
    ],
    ids=["sound", "vulnerable", "skipped", "missing", "no network", "no advisory", "no answer"],
)
def test_advisories_that_could_not_be_looked_up_are_no_good_news(
    tools: Any, known: Any, found: Any, status: int, words: str
) -> None:
    given, lines = tools("advisories").judge(known, found, PINS)
    assert given == status
    assert words in "\n".join(lines)


def test_a_program_that_breaks_down_gives_no_answer(tools: Any, tmp_path: Path) -> None:
    program = tmp_path / "audit"
    program.write_text("#!/bin/sh\necho not a word of JSON\nexit 0\n")
    program.chmod(0o755)
    assert tools("advisories").audit(str(program), PINS) == []


@pytest.mark.parametrize(
    ("expression", "good"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("BSD-3-Clause AND (MIT OR GPL-3.0-only)", True),
        ("BSD-3-Clause AND (MIT AND AGPL-3.0-only)", False),
        ("some licence of ours", False),
        ("", False),
    ],
)
def test_licences_on_the_list(tools: Any, expression: str, good: bool) -> None:
    assert tools("licences").accepted(expression) is good


@pytest.mark.parametrize(
    ("name", "expression", "comes"),
    [
        ("nvidia-cublas-cu12", "Other/Proprietary License", True),
        ("nvidia-cudnn", "LicenseRef-NVIDIA-Proprietary", True),
        ("nvidia-something", "GPL-3.0-only", False),
        ("nvidia-something", "", False),
        ("numpy", "Other/Proprietary License", False),
    ],
)
def test_libraries_of_gpus_come_with_torch(tools: Any, name: str, expression: str, comes: bool) -> None:
    assert tools("licences").comes_with_torch(name, expression) is comes


def test_what_is_not_installed_is_not_passed_over(
    tools: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    licences = tools("licences")
    monkeypatch.setattr(sys, "argv", ["licences.py"])
    monkeypatch.setattr(licences, "requirements", lambda extras: ["numpy>=1"])
    assert licences.main() == 0
    monkeypatch.setattr(licences, "requirements", lambda extras: ["numpy>=1", "no-such-package-anywhere>=1"])
    assert licences.main() == 1
    assert "no-such-package-anywhere: NOT INSTALLED" in capsys.readouterr().err


def test_lowest_versions(tools: Any) -> None:
    lowest = tools("lowest").lowest
    assert lowest(["torch>=2.4", "a>=1.9", "a>=1.10", "b>=2; python_version < '4'"]) == {"a": "1.10", "b": "2"}
    with pytest.raises(SystemExit, match="expected a lower bound"):
        lowest(["a"])
    found = lowest(tools("project").requirements(["table"]))
    assert {"numpy", "safetensors", "pandas", "pyarrow", "typer"} <= set(found)
    with pytest.raises(SystemExit, match="expected one of the extras"):
        tools("project").requirements(["tables"])
