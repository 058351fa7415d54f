"""Files of every format that was released stay readable, and answer as they did."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from whence.persist.header import FORMAT

FOLDER = Path(__file__).parent / "fixtures"
FILES = sorted(FOLDER.glob("format-*-*.whence"))


@pytest.fixture(scope="module")
def make() -> Any:
    """The script that made the files."""
    spec = importlib.util.spec_from_file_location("make_fixtures", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_fixtures"] = module
    spec.loader.exec_module(module)
    return module


def test_every_format_has_its_files(make: Any) -> None:
    wanted = {f"format-{number}-{name}.whence" for number in range(1, FORMAT + 1) for name in make.FITS}
    assert {path.name for path in FILES} == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_answers_of_that_time(path: Path, make: Any) -> None:
    number, name = path.stem.removeprefix("format-").split("-", 1)
    wanted = json.loads((FOLDER / f"format-{number}.json").read_text())[name]
    likelihood = make.FITS[name].get("likelihood", "gaussian")
    tracer = whence.load(path, make.build(), make.data(likelihood))
    found = make.answers(tracer)
    for each, value in wanted.items():
        got, expected = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found[each], value))
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10, msg=each)
