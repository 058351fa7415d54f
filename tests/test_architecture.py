"""The shape of the source: imports point one way, names say what is inside.

Each rule is a function from a folder of sources to a list of complaints. It runs on the real sources, where it must
find nothing, and on small sources with a fault planted in them, which it must find.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from source_rules import (
    RULES,
    foreign_imports,
    import_cycles,
    imports_pointing_up,
    names_that_say_nothing,
    private_use_by_the_paper,
    unexplained_local_imports,
)

SRC = Path(__file__).resolve().parents[1] / "src"


FAULTS: tuple[tuple[Callable[[Path], list[str]], str, str], ...] = (
    (imports_pointing_up, "whence/likelihoods/gaussian.py", "from whence.curvature import dual"),
    (imports_pointing_up, "whence/likelihoods/gaussian.py", "from ..curvature.dual import Dual"),
    (imports_pointing_up, "whence/tangents.py", "def f():\n    import whence  # late"),
    (imports_pointing_up, "whence/newcomer.py", ""),
    (import_cycles, "whence/curvature/__init__.py", "from .dual import Dual"),
    (foreign_imports, "whence/results.py", "import pandas as pd"),
    (foreign_imports, "whence/cli/__init__.py", "import typer"),
    (foreign_imports, "whence/tabular/files.py", "import sklearn"),
    (foreign_imports, "whence/integrations/transformers.py", "import lightning"),
    (foreign_imports, "whence/api.py", "def f():\n    import whence_paper  # late"),
    (unexplained_local_imports, "whence/results.py", "def f():\n    import pandas"),
    (private_use_by_the_paper, "whence_paper/demo.py", "from whence.curvature import dual"),
    (private_use_by_the_paper, "whence_paper/demo.py", "from whence import api"),
    (private_use_by_the_paper, "whence_paper/demo.py", "from whence.plots import _grid"),
    (private_use_by_the_paper, "whence_paper/demo.py", "import whence\nwhence.api.fit()"),
    (names_that_say_nothing, "whence/tangents/_utils.py", ""),
)

SOUND = {
    "whence/__init__.py": "from whence.api import fit\n__all__ = ['fit']",
    "whence/api.py": "from whence import errors\nfrom whence.curvature import dual",
    "whence/errors.py": "import torch",
    "whence/curvature/dual.py": "from ..errors import ShapeError\nimport whence.curvature",
    "whence/results.py": "def f():\n    # pandas is an extra\n    import numpy\n    import pandas",
    "whence/cli/app.py": "import typer\nfrom whence.api import fit",
    "whence/tabular/files.py": "import pandas",
    "whence/sklearn.py": "from sklearn.base import BaseEstimator\nfrom . import api",
    "whence_paper/demo.py": "import whence\nfrom whence import fit, plots\nfrom whence.plots import grid\nwhence.fit()",
}


def write(src: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_obeys(rule: Callable[[Path], list[str]]) -> None:
    complaints = rule(SRC)
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_sound_source(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    write(tmp_path / "src", SOUND)
    assert rule(tmp_path / "src") == []


@pytest.mark.parametrize(("rule", "path", "text"), FAULTS)
def test_rule_finds_the_fault(rule: Callable[[Path], list[str]], path: str, text: str, tmp_path: Path) -> None:
    write(tmp_path / "src", {**SOUND, path: text})
    assert len(rule(tmp_path / "src")) == 1


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)
