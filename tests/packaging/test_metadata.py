"""What the package says of itself agrees with itself."""

from __future__ import annotations

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import whence

ROOT = Path(__file__).resolve().parents[2]


def test_citation_names_the_version_and_the_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = re.search(r"^version: (.+)$", text, re.MULTILINE)
    assert found is not None
    assert found[1] == whence.__version__
    assert "Nodet" in text
    assert "George" in text


def test_installed_metadata() -> None:
    installed = metadata("whence")
    assert installed["Version"] == whence.__version__
    assert installed["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in installed.get_all("Classifier", [])
    needed = [line for line in installed.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in needed) == ["numpy", "safetensors", "torch"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_extra_has_lower_bounds_and_no_upper_ones() -> None:
    import tomllib  # new in Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {name: project["optional-dependencies"][name] for name in ("report", "cli", "docs")}
    for line in [*project["dependencies"], *(line for lines in named.values() for line in lines)]:
        assert ">=" in line, line
        assert "<" not in line, line


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_source_distribution_holds_what_the_tests_read() -> None:
    import tomllib  # new in Python 3.11

    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    shipped = {line.removeprefix("/") for line in tool["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert not [name for name in shipped if not (ROOT / name).exists()]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    read = set(re.findall(r'ROOT / "([A-Za-z][^"]+)"', sources)) - {"pyproject.toml"}  # which is always there
    assert {"docs", "tools", "README.md"} <= read
    assert not read - shipped


def test_types_are_shipped() -> None:
    assert (Path(whence.__file__).parent / "py.typed").exists()
