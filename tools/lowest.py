"""Print the lowest versions that pyproject.toml allows, as constraints for pip: `python tools/lowest.py [EXTRA...]`.

Torch is left out: the one that is installed stays.
"""

from __future__ import annotations

import sys

from packaging.requirements import Requirement
from packaging.version import Version
from project import requirements


def lowest(lines: list[str]) -> dict[str, str]:
    """The highest lower bound of every package.

    Examples:
        >>> lowest(["numpy>=1.26", "torch>=2.4", "numpy>=1.25"])
        {'numpy': '1.26'}
    """
    found: dict[str, str] = {}
    for need in map(Requirement, lines):
        bounds = [one.version for one in need.specifier if one.operator == ">="]
        if not bounds:
            raise SystemExit(f"expected a lower bound such as numpy>=1.26 in pyproject.toml, got {str(need)!r}.")
        if need.name != "torch":
            found[need.name] = max(bounds[0], found.get(need.name, "0"), key=Version)
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest(requirements(sys.argv[1:])).items()):
        print(f"{name}=={version}")
