"""Look for advisories about all that an installation of whence brings along.

`python tools/advisories.py PIP_AUDIT [EXTRA...]`. pip-audit skips what it cannot look up, says that no vulnerability is
known, and exits with 0. So it is asked first about a release that is known to be vulnerable. Exit status: 0 nothing is
known against any package, 1 something is, 2 it could not be found out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from licences import brought
from project import requirements

KNOWN = "jinja2==2.10"
"""Since 2019 an advisory stands against it (CVE-2019-10906)."""


def audit(program: str, pins: list[str]) -> list[dict[str, Any]]:
    """What pip-audit says about pinned packages, one entry each; nothing where it breaks down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pins.txt")
        path.write_text("\n".join(pins) + "\n", encoding="utf-8")
        options = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip", "-r", str(path)]
        done = subprocess.run([program, *options], capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError, TypeError):
        print(done.stderr.strip(), file=sys.stderr)
        return []
    return found


def judge(known: list[dict[str, Any]], found: list[dict[str, Any]], pins: list[str]) -> tuple[int, list[str]]:
    """Exit status and lines to print.

    Args:
        known: what was said about the release that is known to be vulnerable.
        found: what was said about the pins.
        pins: what was asked about.
    """
    if not any(entry.get("vulns") for entry in known):
        why = next((entry["skip_reason"] for entry in known if "skip_reason" in entry), "no answer")
        return 2, [
            f"NOTHING WAS LOOKED UP: expected an advisory against {KNOWN}, got none ({why}).",
            "Is there a network, and does it reach the advisory service? No package was checked.",
        ]
    told = {entry["name"].lower().replace("_", "-"): entry for entry in found}
    lines, status = [], 0
    for pin in pins:
        entry = told.get(pin.split("==")[0], {"skip_reason": "no answer"})
        if "skip_reason" in entry:
            lines.append(f"{pin}: NOT LOOKED UP, {entry['skip_reason']}")
            status = max(status, 2)
        elif entry["vulns"]:
            lines.append(f"{pin}: VULNERABLE, {', '.join(one['id'] for one in entry['vulns'])}")
            status = max(status, 1)
    return status, lines or [f"no advisory against any of {len(pins)} packages"]


def main() -> int:
    """Ask, and print what is to be known."""
    program, *extras = sys.argv[1:]
    names = sorted(set(brought(requirements(extras))))
    pins = [f"{name}=={version(name).split('+')[0]}" for name in names]
    known = audit(program, [KNOWN])
    status, lines = judge(known, audit(program, pins) if known else [], pins)
    print("\n".join(lines), file=sys.stderr if status else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
