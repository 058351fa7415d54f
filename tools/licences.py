"""Check the licences of all that an installation of whence brings along: `python tools/licences.py [EXTRA...]`.

Reads the metadata of installed packages. Fails on a licence that is not on the list, on one that is not told, and on a
dependency that is not installed, about which nothing can be said.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from project import requirements

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "MIT",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Unlicense",
    "Zlib",
}
"""Licences under which a program may be passed on with one's own, open or not. MPL binds its own files only."""

WORDS = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "new bsd": "BSD-3-Clause",
    "psf": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
}
"""What packages write that do not use the names of SPDX."""


NVIDIA = re.compile(r"(nvidia|cuda)-[a-z0-9-]+")
"""Libraries that torch's builds for GPUs bring along, under licences of NVIDIA's own. They come with such a torch, for
which whence does not ask, and are named as what they are: whoever passes them on has to read those licences."""


def brought(lines: list[str]) -> Iterator[str]:
    """Names of everything that an installation of these requirements brings along."""
    environment = default_environment()
    todo = [(Requirement(line), frozenset[str]()) for line in lines]
    seen = set()
    while todo:
        need, asked = todo.pop()
        if need.marker and not any(need.marker.evaluate({**environment, "extra": extra}) for extra in {"", *asked}):
            continue
        name, extras = canonicalize_name(need.name), frozenset(need.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        yield name
        try:
            todo += [(Requirement(line), extras) for line in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue  # it is named, and found missing by whoever looks for its licence


def licence(found: Distribution) -> str:
    """An expression of SPDX names; what is not understood stays as it is written."""
    told = found.metadata
    expression = told.get("License-Expression")
    if expression:
        return expression
    classified = [line.split(" :: ")[-1] for line in told.get_all("Classifier", []) if line.startswith("License ::")]
    exact = [line for line in classified if line != "OSI Approved"]
    words = exact or [line.strip() for line in (told.get("License") or "").splitlines()[:1]]
    named = [WORDS.get(word.lower(), word) for word in words if word]
    return " AND ".join(dict.fromkeys(named))


def accepted(expression: str) -> bool:
    """Whether an expression leaves a way to use the package: all of what is joined by AND, one of what is joined by OR.

    Examples:
        >>> accepted("MIT OR GPL-3.0-only"), accepted("MIT AND GPL-3.0-only"), accepted("")
        (True, False, False)
    """
    inner = re.search(r"\(([^()]*)\)", expression)
    if inner:
        settled = "MIT" if accepted(inner[1]) else "refused"
        return accepted(expression[: inner.start()] + settled + expression[inner.end() :])
    # AND binds more tightly than OR.
    return any(
        all(part.split(" WITH ")[0].strip() in ALLOWED for part in either.split(" AND "))
        for either in expression.split(" OR ")
    )


def comes_with_torch(name: str, expression: str) -> bool:
    """Whether this is one of NVIDIA's libraries, under a licence of its own.

    Examples:
        >>> [comes_with_torch("nvidia-cublas-cu12", told) for told in ("Other/Proprietary License", "GPL-3.0-only")]
        [True, False]
    """
    words = expression.lower()
    return NVIDIA.fullmatch(name) is not None and ("proprietary" in words or "nvidia" in words)


def main() -> int:
    """Print a line a package; 1 if any is refused."""
    refused = 0
    for name in sorted(set(brought(requirements(sys.argv[1:])))):
        try:
            found = licence(distribution(name))
        except PackageNotFoundError:
            print(f"{name}: NOT INSTALLED, nothing is known", file=sys.stderr)
            refused += 1
            continue
        if comes_with_torch(name, found):
            print(f"{name}: {found}, with this build of torch")
        elif not accepted(found):
            print(f"{name}: REFUSED, {found or 'no licence told'}", file=sys.stderr)
            refused += 1
        else:
            print(f"{name}: {found}")
    if refused:
        print(f"{refused} of these licences are not on the list in tools/licences.py.", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
